"""Probe which kind of batch works with a model."""

import logging
import math
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from ....kernels.backend import autocast_dtype
from ...models.probe import REFUSALS, objection
from ..sample import Request, SamplingParams
from .decode import DecodeSequence, ModelRunner
from .kv_cache import READ, ContinuousBatch, StaticBatch, cache_fit

log = logging.getLogger(__name__)

_WARNED: WeakSet[Any] = WeakSet()  # models

# Prompts of the probe, and the completions of each; 4 tokens are read at most, which no window is shorter than.
_SCRIPT = (([1, 2], ([1, 5, 6], [2, 5, 6])), ([3], ([1, 6, 4], [2, 6, 4])))


def choose_batch(runner: ModelRunner, cache_bytes: int) -> Callable[[int], ContinuousBatch | StaticBatch]:
    """Return the maker of batches, by their longest sequence, of the fastest kind that passes the probe."""
    plain = runner.policy.plain
    config = plain.config.get_text_config()

    others = set(getattr(config, "layer_types", None) or []) - {"full_attention", "sliding_attention"}
    if others:
        refusal: str | None = f"it has layers of {', '.join(sorted(others))}"
    else:  # where a mask shows too much, zeros would change a few percent, and large values change everything
        refusal = objection(plain, lambda: _try_out(ContinuousBatch(runner, lambda longest: 4, unwritten=1e3)))
    fit, window = None, 0.0
    if refusal is None:
        fit, window = cache_fit(runner, cache_bytes, continuous=True), _window(config)
        if window == math.inf:
            return lambda longest: ContinuousBatch(runner, fit)
    unusable = objection(plain, lambda: _try_out(StaticBatch(runner, lambda longest: 4, cached=True)))
    reading = "with its own cache" if unusable is None else f"all being read anew for every token ({unusable})"
    fallback = f"one prompt at a time, {reading}"
    own = (lambda longest: READ // longest) if unusable else cache_fit(runner, cache_bytes, continuous=False)
    if refusal is not None:
        _warn_once(plain, f"completions are generated {fallback}: {refusal}")

    def make_batch(longest: int) -> ContinuousBatch | StaticBatch:
        if fit is not None and longest <= window:
            return ContinuousBatch(runner, fit, window)
        if fit is not None:
            _warn_once(plain, f"{longest} tokens are more than its window of {window}: {fallback}")
        return StaticBatch(runner, own, cached=unusable is None)

    return make_batch


def _warn_once(plain: Any, message: str) -> None:
    """Once per model: a run makes several sources of one policy, and a source many batches."""
    if plain not in _WARNED:
        _WARNED.add(plain)
        log.warning("%s: %s", type(plain).__name__, message)


def _window(config: Any) -> float:
    """Length up to which the model attends to everything."""
    windowed = getattr(config, "use_sliding_window", True)
    if hasattr(config, "layer_types"):
        windowed = windowed and "sliding_attention" in config.layer_types
    return (getattr(config, "sliding_window", None) if windowed else None) or math.inf


def _try_out(batch: ContinuousBatch | StaticBatch) -> str | None:
    """The reason why this batch can't be used; None if its states are those of the plain model for each text."""
    runner = batch.runner
    try:
        with runner.inference():
            read = _read_script(batch)
            texts = [text for pairs in read for text, _ in pairs]
            states = torch.stack([state for pairs in read for _, state in pairs])
            dtypes = autocast_dtype(states) or states.dtype, runner.policy.plain.dtype  # some heads widen their logits
            eps = max(torch.finfo(dtype).eps for dtype in dtypes)
            states, expected, moved = states.double(), _plain_states(runner, texts), {}
            if eps > 1e-5 and isinstance(batch, ContinuousBatch):
                moved = {shift: _plain_states(runner, texts, shift) for shift in (1, -1)}
    except REFUSALS as error:  # the model does not support such input
        return f"{type(error).__name__}: {error}"
    # Layers amplify rounding, but a token that is not seen, or poison that is, is half of a state or more.
    difference = states - expected
    share = float((difference.norm(dim=-1) / expected.norm(dim=-1)).max())
    if not share <= (1e-3 if eps < 1e-5 else 0.35):
        return f"its states differ by {share:.2%} from the plain model's"
    # A wrong position may change less than rounding does, but in a direction of its own, which rounding has little of.
    lengths = list(map(len, read))
    for shift, other in moved.items():
        columns = (torch.split(x, lengths) for x in (difference, other - expected, expected))
        for moved_by, change, state in zip(*columns, strict=True):
            size = (change**2).sum()
            if (moved_by * change).sum() > 0.6 * size > 0.6 * (eps / 2) ** 2 * (state**2).sum():
                return f"its states are those of tokens at positions that are off by {shift:+d}"
    return None


def _read_script(batch: ContinuousBatch | StaticBatch) -> list[list[tuple[list[int], Tensor]]]:
    """For each sequence, all that was read of it, each with the states that follow; the first one leaves early."""
    sampling = SamplingParams(max_tokens=3)
    requests = [Request(task, prompt, [0, 1], sampling, key=0) for task, (prompt, _) in enumerate(_SCRIPT)]
    waiting = [DecodeSequence(request, index) for request in requests for index in request.indices]
    first, read = waiting[0], {sequence: list[tuple[list[int], Tensor]]() for sequence in waiting}
    while waiting or batch.sequences:
        if batch.sequences:
            states = batch.step()
        else:
            count = batch.admit(waiting)
            states, waiting = batch.join(waiting[:count]), waiting[count:]
        for sequence, state in zip(batch.sequences, states, strict=True):
            read[sequence].append(([*sequence.request.prompt, *sequence.tokens], state))
            completion = _SCRIPT[sequence.request.task][1][sequence.index]
            sequence.tokens.append(completion[len(sequence.tokens)])
            if len(sequence.tokens) == (2 if sequence is first else 3):
                sequence.finish = "stop"
        batch.drop_finished()
    return list(read.values())


def _plain_states(runner: ModelRunner, texts: list[list[int]], shift: int = 0) -> Tensor:
    """States of the last tokens, float64 [texts, ...], each text read alone, its last token moved so many positions."""
    states = []
    for text in texts:
        inputs: dict[str, Any] = {"input_ids": runner.ids([text]), "use_cache": False}
        if shift and len(text) > 1:
            inputs["position_ids"] = torch.arange(len(text), device=runner.policy.device)[None].clone()
            inputs["position_ids"][0, -1] += shift
            inputs["attention_mask"] = torch.ones_like(inputs["position_ids"])  # without one, it would begin a new row
        states.append(runner.states(**inputs)[0][0].double())
    return torch.stack(states)
