"""Probe which kind of batch works with a model."""

import logging
import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ....data import Example
from ....data.images import ImageRef
from ....kernels.backend import autocast_dtype
from ...models.probe import REFUSALS, objection, without_values
from ..sample import Request, SamplingParams
from .decode import DecodeSequence, ModelRunner
from .graph_batch import GraphBatch
from .kv_cache import READ, ContinuousBatch, StaticBatch, cache_fit

log = logging.getLogger(__name__)

_WARNED: WeakSet[PreTrainedModel] = WeakSet()

# How far the states of a batch may be from the plain model's, as a share of their norm. Measured on
# tiny random models (Llama, Qwen 3, GPT-2, Granite; 2 and 16 layers): a right batch is off by at
# most 6e-7 in float32; one token that is not seen changes 0.41 and more, a mask that shows
# unwritten columns 1.1 and more. Layers amplify rounding, in half precision to some percent: the
# limit there stays below what a hidden token changes.
_ROUNDING = 1e-3
_ROUNDING_IN_HALVES = 0.35
# A position that is off by one changes 0.03 and more, which in half precision may pass for
# rounding. So the change is projected on the one that a shift makes: for shifted positions that
# gave 0.70 to 1.05, for a right batch 0.
_ALONG = 0.6
# Prompts of the probe, and the completions of each; of text 4 tokens are read at most, which no
# window is shorter than.
_SCRIPT = [
    Example([1, 2], [[1, 5, 6], [2, 5, 6]], [[True] * 3] * 2),
    Example([3], [[1, 6, 4], [2, 6, 4]], [[True] * 3] * 2),
]


DecodeBatch = ContinuousBatch | GraphBatch | StaticBatch
ProbedBatch = ContinuousBatch | StaticBatch  # those that are given their tokens


def choose_batch(
    runner: ModelRunner, cache_bytes: int, *, cuda_graphs: bool = False
) -> Callable[[int], DecodeBatch]:
    """Return the maker of batches, by their longest sequence, of the fastest kind that passes the
    probe.

    Args:
        cuda_graphs: make a `GraphBatch` where a `ContinuousBatch` passes the probe.
    """
    continuous = GraphBatch if cuda_graphs else ContinuousBatch
    plain = runner.policy.plain
    config = plain.config.get_text_config()
    refusal = _objection_to_continuous(runner)
    fit: Callable[[int], int] | None = None
    window = 0.0
    if refusal is None:
        fit = cache_fit(runner, cache_bytes, continuous=True)
        window = _window(config)
        if window == math.inf:
            return partial(_continuous, continuous, runner, fit)
    static, reading = _static(runner, cache_bytes)
    fallback = f"one prompt at a time, {reading}"
    if refusal is not None:
        _warn_once(plain, f"completions are generated {fallback}: {refusal}")

    def make_batch(longest: int) -> DecodeBatch:
        if fit is not None and longest <= window:
            return continuous(runner, fit, window)
        if fit is not None:
            _warn_once(plain, f"{longest} tokens are more than its window of {window}: {fallback}")
        return static()

    return make_batch


def _continuous(
    kind: type[ContinuousBatch | GraphBatch],
    runner: ModelRunner,
    fit: Callable[[int], int],
    longest: int,
) -> ContinuousBatch | GraphBatch:
    return kind(runner, fit)


def _objection_to_continuous(runner: ModelRunner) -> str | None:
    """The reason why a `ContinuousBatch` can't be used with this model."""
    plain = runner.policy.plain
    kinds = set(getattr(plain.config.get_text_config(), "layer_types", None) or [])
    others = kinds - {"full_attention", "sliding_attention"}
    if others:
        return f"it has layers of {', '.join(sorted(others))}"

    def probe() -> str | None:
        # Where a mask shows too much, zeros would change a few percent, and large values change
        # everything.
        return _try_out(ContinuousBatch(runner, lambda longest: 4, unwritten=1e3))

    return None if without_values(plain) else objection(plain, probe)


def _static(runner: ModelRunner, cache_bytes: int) -> tuple[Callable[[], StaticBatch], str]:
    """The maker of a `StaticBatch` that works with this model, and how it reads, for a message."""

    def probe() -> str | None:
        return _try_out(StaticBatch(runner, lambda longest: 4, cached=True))

    plain = runner.policy.plain
    unusable = None if without_values(plain) else objection(plain, probe)
    if unusable is None:
        fit = cache_fit(runner, cache_bytes, continuous=False)
        return lambda: StaticBatch(runner, fit, cached=True), "with its own cache"
    reading = f"all being read anew for every token ({unusable})"
    return lambda: StaticBatch(runner, lambda longest: READ // longest, cached=False), reading


def _warn_once(plain: PreTrainedModel, message: str) -> None:
    """Once per model: a run makes several sources of one policy, and a source many batches."""
    if plain not in _WARNED:
        _WARNED.add(plain)
        log.warning("%s: %s", type(plain).__name__, message)


def _window(config: object) -> float:
    """Length up to which the model attends to everything."""
    windowed = getattr(config, "use_sliding_window", True)
    if hasattr(config, "layer_types"):
        windowed = windowed and "sliding_attention" in config.layer_types
    if not windowed:
        return math.inf
    return getattr(config, "sliding_window", None) or math.inf


def _try_out(batch: ProbedBatch) -> str | None:
    """The reason why this batch can't be used.

    None if its states are those of the plain model for each text.
    """
    runner = batch.runner
    shifted: dict[int, Tensor] = {}
    try:
        with runner.inference():
            sequences = _read_script(batch)
            read = [each for of_sequence in sequences for each in of_sequence]
            texts = [each.text for each in read]
            shown = [each.images for each in read]
            states = torch.stack([each.state for each in read])
            eps = _rounding(states, runner)
            expected = _plain_states(runner, texts, shown)
            if eps > 1e-5 and isinstance(batch, ContinuousBatch):
                for shift in (1, -1):
                    shifted[shift] = _plain_states(runner, texts, shown, shift)
    except REFUSALS as error:  # the model does not support such input
        return f"{type(error).__name__}: {error}"
    difference = states.double() - expected
    share = float((difference.norm(dim=-1) / expected.norm(dim=-1)).max())
    if not share <= (_ROUNDING if eps < 1e-5 else _ROUNDING_IN_HALVES):  # NaN too
        return f"its states differ by {share:.2%} from the plain model's"
    reads = [len(of_sequence) for of_sequence in sequences]
    for shift, others in shifted.items():
        if _is_shifted(difference, others - expected, expected, reads, eps):
            return f"its states are those of tokens at positions that are off by {shift:+d}"
    return None


def _rounding(states: Tensor, runner: ModelRunner) -> float:
    """The coarsest precision that states are computed in; some heads widen their logits."""
    dtypes = (autocast_dtype(states) or states.dtype, runner.policy.plain.dtype)
    return max(torch.finfo(dtype).eps for dtype in dtypes)


def _is_shifted(
    difference: Tensor, by_shift: Tensor, expected: Tensor, reads: list[int], eps: float
) -> bool:
    """True if some sequence's states differ from the expected ones as those at other positions do.

    A wrong position may change less than rounding does, but in a direction of its own, which
    rounding has little of.

    Args:
        by_shift: what the other positions change.
        reads: how many states each sequence has.
    """
    columns = (torch.split(each, reads) for each in (difference, by_shift, expected))
    for found, change, state in zip(*columns, strict=True):
        size = (change**2).sum()
        along = (found * change).sum()
        visible = size > (eps / 2) ** 2 * (state**2).sum()  # else no rounded number changes
        if visible and along > _ALONG * size:
            return True
    return False


def _script(runner: ModelRunner) -> list[Example]:
    """The prompts of the probe; for a policy that sees images, the first one shows one."""
    images = runner.policy.images
    if images is None:
        return _SCRIPT
    first, second = images.as_words(_SCRIPT)
    return [images.shown(first, images.reader.blank, after=1), second]


class _Read(NamedTuple):
    """A text that was read, the images that it shows, and the state that follows it."""

    text: list[int]
    images: tuple[ImageRef, ...]
    state: Tensor


def _read_script(batch: ProbedBatch) -> list[list[_Read]]:
    """For each sequence, all that was read of it, each with the states that follow.

    The first one leaves early.
    """
    sampling = SamplingParams(max_tokens=3)
    script = _script(batch.runner)
    requests = [
        Request(task, example.prompt, [0, 1], sampling, key=0, images=example.images)
        for task, example in enumerate(script)
    ]
    waiting = [DecodeSequence(request, index) for request in requests for index in request.indices]
    first = waiting[0]
    read: dict[DecodeSequence, list[_Read]] = {sequence: [] for sequence in waiting}
    while waiting or batch.sequences:
        if batch.sequences:
            states = batch.step()
        else:
            count = batch.admit(waiting)
            states = batch.join(waiting[:count])
            waiting = waiting[count:]
        for sequence, state in zip(batch.sequences, states, strict=True):
            text = [*sequence.request.prompt, *sequence.tokens]
            read[sequence].append(_Read(text, sequence.request.images, state))
            completions = script[sequence.request.task].completions
            sequence.tokens.append(completions[sequence.index][len(sequence.tokens)])
            if len(sequence.tokens) == (2 if sequence is first else 3):
                sequence.finish = "stop"
        batch.drop_finished()
    return list(read.values())


def _plain_states(
    runner: ModelRunner,
    texts: list[list[int]],
    shown: list[tuple[ImageRef, ...]],
    shift: int = 0,
) -> Tensor:
    """States of the last tokens, float64 [texts, ...], each text read alone with its images, its
    last token moved so many positions.
    """
    states = []
    for text, images in zip(texts, shown, strict=True):
        inputs, _ = runner.inputs([text], [images])
        if shift and len(text) > 1:
            ids = inputs["input_ids"]
            positions = inputs.get("position_ids", torch.arange(len(text), device=ids.device)[None])
            positions = positions.clone()
            positions[..., -1] += shift
            inputs["position_ids"] = positions
            # without one, it would begin a new row
            inputs["attention_mask"] = torch.ones_like(ids)
        last, _ = runner.states(use_cache=False, **inputs)
        states.append(last[0].double())
    return torch.stack(states)
