"""The kind of batch that works with a model is found out by a probe."""

import logging
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from ...models.probe import REFUSALS, objection
from ..sample import Request, SamplingParams
from .decode import DecodeSequence, ModelRunner
from .kv_cache import ContinuousBatch, StaticBatch, continuous_fit, matmul_dtype, static_fit

log = logging.getLogger(__name__)

_WARNED: WeakSet[Any] = WeakSet()  # models

# Prompts and completions of the probe; 4 tokens are read at most, which no window is shorter than.
_SCRIPT = (([1, 2], [5, 6]), ([3], [6, 4]))


def choose_batch(runner: ModelRunner, cache_bytes: int) -> Callable[[int], ContinuousBatch | StaticBatch]:
    """From the longest sequence to a batch for this model: the fastest kind that the probe shows to work."""
    plain = runner.policy.plain
    config = plain.config.get_text_config()

    def poisoned() -> ContinuousBatch:
        """A mask that shows too much is a matter of a few percent where there is nothing to see, of everything here."""
        batch = ContinuousBatch(runner, lambda longest: 2 * len(_SCRIPT))
        batch.cache.unwritten = 1e3
        return batch

    def with_own_cache() -> StaticBatch:
        return StaticBatch(runner, lambda longest: 2 * len(_SCRIPT), cached=True)

    others = set(getattr(config, "layer_types", None) or []) - {"full_attention", "sliding_attention"}
    against_continuous = (
        f"it has layers of {', '.join(sorted(others))}"
        if others
        else objection(plain, lambda: _try_out(poisoned, runner))
    )
    window = _window(config)
    fit = continuous_fit(runner, cache_bytes) if against_continuous is None else None
    if fit is not None and window is None:
        return lambda longest: ContinuousBatch(runner, fit)
    unusable = objection(plain, lambda: _try_out(with_own_cache, runner))
    reading = "with its own cache" if unusable is None else f"all being read anew for every token ({unusable})"
    fallback = f"one prompt at a time, {reading}"
    if against_continuous is not None:
        _warn_once(plain, f"completions are generated {fallback}: {against_continuous}")
    fit_of_fallback = static_fit(runner, cache_bytes, cached=unusable is None)

    def make_batch(longest: int) -> ContinuousBatch | StaticBatch:
        if fit is not None and (window is None or longest <= window):
            return ContinuousBatch(runner, fit, window)
        if fit is not None:
            _warn_once(plain, f"{longest} tokens are more than its window of {window}: {fallback}")
        return StaticBatch(runner, fit_of_fallback, cached=unusable is None)

    return make_batch


def _warn_once(plain: Any, message: str) -> None:
    """Once per model: a run makes several sources of one policy, and a source many batches."""
    if plain not in _WARNED:
        _WARNED.add(plain)
        log.warning("%s: %s", type(plain).__name__, message)


def _window(config: Any) -> int | None:
    """Up to this length the model attends to everything."""
    windowed = getattr(config, "use_sliding_window", True)
    if hasattr(config, "layer_types"):
        windowed = windowed and "sliding_attention" in config.layer_types
    return getattr(config, "sliding_window", None) if windowed else None


def _try_out(make: Callable[[], ContinuousBatch | StaticBatch], runner: ModelRunner) -> str | None:
    """Why this batch can't be used, if its states are not those that the plain model computes of each text alone."""
    sequences = [
        DecodeSequence(Request(task, prompt, [0, 1], SamplingParams(max_tokens=3), key=0), index)
        for task, (prompt, _) in enumerate(_SCRIPT)
        for index in (0, 1)
    ]
    with runner.inference():
        try:
            batch = make()
            read = _read_script(batch, sequences)
            texts = [[*sequences[i].request.prompt, *_script(sequences[i])[:length]] for i, length in read]
            states, expected = torch.stack(list(read.values())).double(), _plain_states(runner, texts)
            dtypes = matmul_dtype(read[0, 0]), runner.policy.plain.dtype  # some heads widen their logits
            eps = max(torch.finfo(dtype).eps for dtype in dtypes)
            if eps < 1e-5:
                tolerance, moved = 1e-3, {}
            else:
                # Layers amplify rounding, but a token that is not seen, or poison that is, is half of a state or more.
                shifts = (1, -1) if isinstance(batch, ContinuousBatch) else ()
                tolerance, moved = 0.35, {shift: _plain_states(runner, texts, shift) for shift in shifts}
        except REFUSALS as error:  # the model takes no such input
            return f"{type(error).__name__}: {error}"
    difference = float(((states - expected).norm(dim=-1) / expected.norm(dim=-1)).max())
    if not difference <= tolerance:
        return f"its states differ by {difference:.2%} from the plain model's"
    # A wrong position may change less than rounding does, but in a direction of its own, which rounding has little of.
    of = torch.tensor([i for i, _ in read], device=states.device)
    for shift, other in moved.items():
        change = _by_sequence(of, (other - expected) ** 2)
        share = _by_sequence(of, (states - expected) * (other - expected)) / change
        if torch.any((share > 0.6) & (change > (eps / 2) ** 2 * _by_sequence(of, expected**2))):
            return f"its states are those of tokens at positions that are off by {shift:+d}"
    return None


def _plain_states(runner: ModelRunner, texts: Iterable[list[int]], shift: int = 0) -> Tensor:
    """float64 [texts, ...] of the last tokens, each text read alone, with its last token moved so many positions."""
    states = []
    for text in texts:
        inputs: dict[str, Any] = {"input_ids": runner.ids([text]), "use_cache": False}
        if shift and len(text) > 1:
            inputs["position_ids"] = torch.arange(len(text), device=runner.policy.device)[None].clone()
            inputs["position_ids"][0, -1] += shift
            inputs["attention_mask"] = torch.ones_like(inputs["position_ids"])  # without one, it would begin a new row
        states.append(runner.states(**inputs)[0][0].double())
    return torch.stack(states)


def _by_sequence(of: Tensor, values: Tensor) -> Tensor:
    return values.new_zeros(2 * len(_SCRIPT)).index_add(0, of, values.flatten(1).sum(1))


def _read_script(
    batch: ContinuousBatch | StaticBatch, sequences: list[DecodeSequence]
) -> dict[tuple[int, int], Tensor]:
    """The states that follow so many tokens of a sequence; the first sequence leaves after two tokens."""
    read, waiting = {}, sequences
    while waiting or batch.sequences:
        if batch.sequences:
            states = batch.step()
        else:
            count = batch.admit(waiting)
            states, waiting = batch.join(waiting[:count]), waiting[count:]
        for sequence, state in zip(batch.sequences, states, strict=True):
            read[sequences.index(sequence), len(sequence.tokens)] = state
            sequence.tokens.append(_script(sequence)[len(sequence.tokens)])
            if len(sequence.tokens) == (2 if sequence is sequences[0] else 3):
                sequence.finish = "stop"
        batch.drop_finished()
    return read


def _script(sequence: DecodeSequence) -> list[int]:
    """The same completion of a prompt, but for its first token."""
    return [sequence.index + 1, *_SCRIPT[sequence.request.task][1]]
