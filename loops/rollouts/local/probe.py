"""Many completions at once, token by token, from a policy's own module.

One number in [0, 1) per row decides its token, so that a row's token does not depend on its company. The kind of batch
that works with a model, see `kv_cache`, is found out by a probe.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from ...models.probe import REFUSALS, objection
from ..sample import Request, SamplingParams
from ..source import SourceError
from .decode import DecodeSequence, ModelRunner
from .kv_cache import ContinuousBatch, DecodeBatch, StaticBatch, continuous_fit, matmul_dtype, static_fit

log = logging.getLogger(__name__)

_ELEMENTS = 1 << 24  # logits that are turned into probabilities at once
_ELEMENTS_CPU = 1 << 19  # beyond which memory is mapped, and given back, for every token anew
_WARNED: WeakSet[Any] = WeakSet()  # models

# Prompts and completions of the probe; 4 tokens are read at most, which no window is shorter than.
_SCRIPT = (([1, 2], [5, 6]), ([3], [6, 4]))


def advance(batch: DecodeBatch, runner: ModelRunner, joining: Sequence[DecodeSequence], version: int) -> None:
    """Append a token to every sequence of the batch and the first one to those that join; finished ones leave.

    Raises:
        SourceError: if the weights give no finite log-prob.
    """
    with runner.inference():
        states = [batch.step()] if batch.sequences else []
        states += [batch.join(joining)] if joining else []
        sequences = batch.sequences
        uniform = [sequence.uniform[len(sequence.tokens)] for sequence in sequences]
        tokens, logprobs = draw(
            runner.logits(torch.cat(states)), uniform, [sequence.sampling for sequence in sequences]
        )
    for sequence, token, logprob in zip(sequences, tokens.tolist(), logprobs.tolist(), strict=True):
        if not logprob > float("-inf"):
            raise SourceError(f"generate: the weights of version {version} give log-probs of {logprob}; look for NaN")
        sequence.append(token, logprob, version)
    batch.drop_finished()


def draw(logits: Tensor, uniform: Sequence[float], sampling: Sequence[SamplingParams]) -> tuple[Tensor, Tensor]:
    """One token per row of ``logits`` [rows, V], by inversion of its cumulative distribution.

        i = min { i : Σ_{j≤i} p_j > u Σ_j p_j },   p = softmax(logits / T) over what top_k and then top_p leave

    Returns int64 tokens [rows], and their log-probs [rows] under the distribution that they were drawn from.
    A row of temperature 0 takes its likeliest token, and its log-prob is that of temperature 1.
    """
    precision = torch.promote_types(logits.dtype, torch.float32)
    elements = _ELEMENTS_CPU if logits.device.type == "cpu" else _ELEMENTS
    size = max(1, elements // logits.shape[1])
    parts = [
        _draw(logits[i : i + size].to(precision), uniform[i : i + size], sampling[i : i + size])
        for i in range(0, len(logits), size)
    ]
    if len(parts) == 1:
        return parts[0]
    tokens, logprobs = zip(*parts, strict=True)
    return torch.cat(tokens), torch.cat(logprobs)


def _draw(logits: Tensor, uniform: Sequence[float], sampling: Sequence[SamplingParams]) -> tuple[Tensor, Tensor]:
    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device)[:, None]

    kinds = set(sampling)
    if any(kind.temperature not in (0.0, 1.0) for kind in kinds):
        logits = logits / column([row.temperature or 1.0 for row in sampling]).to(logits.dtype)
    if any(kind.temperature and (kind.top_k or kind.top_p < 1) for kind in kinds):
        top_k = column([row.top_k * bool(row.temperature) for row in sampling])
        top_p = column([row.top_p if row.temperature else 1.0 for row in sampling])
        logits = _likeliest(logits, top_k, top_p)
    highest = logits.amax(-1, keepdim=True)
    cumulative = (logits - highest).exp_().cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    threshold = column(list(uniform)) * total
    token = torch.searchsorted(cumulative, threshold, right=True).clamp_(max=logits.shape[1] - 1)
    if any(kind.temperature == 0 for kind in kinds):
        greedy = column([row.temperature for row in sampling]) == 0
        token = torch.where(greedy, logits.argmax(-1, keepdim=True), token)
    logprob = (logits.gather(1, token) - highest).double() - total.log()
    return token[:, 0], logprob[:, 0].to(logits.dtype)


def _likeliest(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The logits with -inf for all but the likeliest k, and of these for all but those that make up p."""
    ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[1], device=logits.device)
    ordered = ordered.masked_fill((top_k > 0) & (rank >= top_k), -torch.inf)
    probability = ordered.softmax(-1, dtype=torch.float64)
    before = probability.cumsum(-1) - probability
    ordered = ordered.masked_fill((before >= top_p) & (rank > 0) & (top_p < 1), -torch.inf)
    return torch.empty_like(logits).scatter_(-1, ids, ordered)


def choose_memory(runner: ModelRunner, cache_bytes: int) -> Callable[[int], DecodeBatch]:
    """From the longest sequence to a batch for this model: the fastest kind that the probe shows to work."""
    plain = runner.policy.plain
    config = plain.config.get_text_config()
    others = set(getattr(config, "layer_types", None) or []) - {"full_attention", "sliding_attention"}
    all_of_them: Callable[[int], int] = lambda longest: 2 * len(_SCRIPT)  # noqa: E731
    against_continuous = (
        f"it has layers of {', '.join(sorted(others))}"
        if others
        else objection(plain, lambda: _try_out(lambda: _poisoned(ContinuousBatch(runner, all_of_them)), runner))
    )
    window = _window(config)
    fit = continuous_fit(runner, cache_bytes) if against_continuous is None else None
    if fit is not None and window is None:
        return lambda longest: ContinuousBatch(runner, fit)
    unusable = objection(plain, lambda: _try_out(lambda: StaticBatch(runner, all_of_them, cached=True), runner))
    cached = unusable is None
    fallback = "one prompt at a time, " + (
        "with its own cache" if cached else f"all being read anew for every token ({unusable})"
    )
    if against_continuous is not None:
        _warn_once(plain, f"completions are generated {fallback}: {against_continuous}")
    fit_of_fallback = static_fit(runner, cache_bytes, cached=cached)

    def make_batch(longest: int) -> DecodeBatch:
        if fit is not None and (window is None or longest <= window):
            return ContinuousBatch(runner, fit, window)
        if fit is not None:
            _warn_once(plain, f"{longest} tokens are more than its window of {window}: {fallback}")
        return StaticBatch(runner, fit_of_fallback, cached=cached)

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


def _try_out(make: Callable[[], DecodeBatch], runner: ModelRunner) -> str | None:
    """Why this batch can't be used, if its states are not those that the plain model computes of each text alone."""
    requests = [
        Request(task, prompt, [0, 1], SamplingParams(max_tokens=3), key=0) for task, (prompt, _) in enumerate(_SCRIPT)
    ]
    sequences = [DecodeSequence.of(request, index) for request in requests for index in request.indices]
    with runner.inference():
        try:
            batch = make()
            read = _read_script(batch, sequences)
            steps = [(sequences[i // 3], i % 3) for i in read]
            texts = [[*sequence.request.prompt, *_script(sequence)[:length]] for sequence, length in steps]
            states, expected = torch.stack(list(read.values())).double(), _plain_states(runner, texts)
            dtypes = matmul_dtype(read[0]), runner.policy.plain.dtype  # some heads widen their logits
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
    of = torch.tensor([i // 3 for i in read], device=states.device)
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


def _poisoned(batch: ContinuousBatch) -> ContinuousBatch:
    """A mask that shows too much is a matter of a few percent where there is nothing to see, and of everything here."""
    batch.cache.unwritten = 1e3
    return batch


def _read_script(batch: DecodeBatch, sequences: list[DecodeSequence]) -> dict[int, Tensor]:
    """The state that follows each part of each text; the first sequence leaves after two tokens."""
    read: dict[int, Tensor] = {}
    waiting = list(sequences)
    states = torch.empty(0)
    while waiting or batch.sequences:
        if batch.sequences:
            states = batch.step()
        else:
            count = batch.admit(waiting)
            states, waiting = batch.join(waiting[:count]), waiting[count:]
        for sequence, state in zip(batch.sequences, states, strict=True):
            read[3 * sequences.index(sequence) + len(sequence.tokens)] = state
            sequence.tokens.append(_script(sequence)[len(sequence.tokens)])
            if len(sequence.tokens) == (2 if sequence is sequences[0] else 3):
                sequence.finish = "stop"
        batch.drop_finished()
    return read


def _script(sequence: DecodeSequence) -> list[int]:
    """The same completion of a prompt, but for its first token."""
    return [sequence.index + 1, *_SCRIPT[sequence.request.task][1]]
