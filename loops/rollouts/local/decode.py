"""Many answers at once, token by token, from a policy's own module.

How it can remember what was read, see `memory`, is tried out, as rows are in `backbone`.
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
from .draw import draw
from .kv_cache import ContinuousBatch, Fit, Memory, StaticBatch, lockstep_fit, ragged_fit
from .runner import Answer, Reader
from .slots import matmul_dtype

log = logging.getLogger(__name__)

_WARNED: WeakSet[Any] = WeakSet()  # models

# Prompts and answers to try a memory with; 4 tokens are read at most, which no window is shorter than.
_SCRIPT = (([1, 2], [5, 6]), ([3], [6, 4]))


def advance(memory: Memory, reader: Reader, joining: Sequence[Answer], version: int) -> list[Answer]:
    """One token more for every answer under way and the first for those that join; returns the finished ones.

    Raises:
        SourceError: if the weights give no finite log-prob.
    """
    with reader.reading():
        states = [memory.step()] if memory.answers else []
        states += [memory.join(joining)] if joining else []
        answers = memory.answers
        uniform = [answer.uniform[len(answer.tokens)] for answer in answers]
        drawn = draw(reader.logits(torch.cat(states)), uniform, [answer.sampling for answer in answers])
    for answer, token, logprob in zip(answers, drawn.token.tolist(), drawn.logprob.tolist(), strict=True):
        if not logprob > float("-inf"):
            raise SourceError(f"generate: the weights of version {version} give log-probs of {logprob}; look for NaN")
        answer.append(token, logprob, version)
    memory.drop_finished()
    return [answer for answer in answers if answer.finish is not None]


def read_again(memory: Memory, reader: Reader) -> None:
    """The weights are other ones: what is remembered under the old ones is of no use."""
    with reader.reading():
        memory.read_again()


def choose_memory(reader: Reader, cache_bytes: int) -> Callable[[int], Memory]:
    """What to remember the answers of this model with, given the longest of them: the fastest that is shown to work."""
    plain = reader.policy.plain
    config = plain.config.get_text_config()
    others = set(getattr(config, "layer_types", None) or []) - {"full_attention", "sliding_attention"}
    all_of_them: Fit = lambda longest: 2 * len(_SCRIPT)  # noqa: E731
    against_ragged = (
        f"it has layers of {', '.join(sorted(others))}"
        if others
        else objection(plain, lambda: _try_out(lambda: _poisoned(ContinuousBatch(reader, all_of_them)), reader))
    )
    window = _window(config)
    fit = ragged_fit(reader, cache_bytes) if against_ragged is None else None
    if fit is not None and window is None:
        return lambda longest: ContinuousBatch(reader, fit)
    unusable = objection(plain, lambda: _try_out(lambda: StaticBatch(reader, all_of_them, cached=True), reader))
    cached = unusable is None
    fallback = "one prompt at a time, " + (
        "with its own cache" if cached else f"all being read anew for every token ({unusable})"
    )
    if against_ragged is not None:
        _warn_once(plain, f"answers are generated {fallback}: {against_ragged}")
    fit_of_fallback = lockstep_fit(reader, cache_bytes, cached=cached)

    def memory(longest: int) -> Memory:
        if fit is not None and (window is None or longest <= window):
            return ContinuousBatch(reader, fit, window)
        if fit is not None:
            _warn_once(plain, f"{longest} tokens are more than its window of {window}: {fallback}")
        return StaticBatch(reader, fit_of_fallback, cached=cached)

    return memory


def _warn_once(plain: Any, message: str) -> None:
    """Of a model: a run makes several sources of one policy, and many memories from a source."""
    if plain not in _WARNED:
        _WARNED.add(plain)
        log.warning("%s: %s", type(plain).__name__, message)


def _window(config: Any) -> int | None:
    """Up to this length the model attends to everything."""
    windowed = getattr(config, "use_sliding_window", True)
    if hasattr(config, "layer_types"):
        windowed = windowed and "sliding_attention" in config.layer_types
    return getattr(config, "sliding_window", None) if windowed else None


def _try_out(make: Callable[[], Memory], reader: Reader) -> str | None:
    """Why this memory is of no use, if its states are not those that the plain model computes of each text alone."""
    requests = [
        Request(task, prompt, [0, 1], SamplingParams(max_tokens=3), key=0) for task, (prompt, _) in enumerate(_SCRIPT)
    ]
    answers = [Answer.of(request, index) for request in requests for index in request.indices]
    with reader.reading():
        try:
            memory = make()
            read = _read_script(memory, answers)
            texts = {i: [*_SCRIPT[answers[i // 3].request.task][0], *_script(answers[i // 3])[: i % 3]] for i in read}
            got, wanted = torch.stack(list(read.values())).double(), _plain_states(reader, texts.values())
            dtypes = matmul_dtype(read[0]), reader.policy.plain.dtype  # some heads widen their logits
            eps = max(torch.finfo(dtype).eps for dtype in dtypes)
            if eps < 1e-5:
                tolerance, moved = 1e-3, {}
            else:
                # Layers amplify rounding, but a token that is not seen, or poison that is, is half of a state or more.
                shifts = (1, -1) if isinstance(memory, ContinuousBatch) else ()
                tolerance, moved = 0.35, {shift: _plain_states(reader, texts.values(), shift) for shift in shifts}
        except REFUSALS as error:  # the model takes no such input
            return f"{type(error).__name__}: {error}"
    difference = float(((got - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max())
    if not difference <= tolerance:
        return f"its states differ by {difference:.2%} from the plain model's"
    # A wrong position may change less than rounding does, but in a direction of its own, which rounding has little of.
    of = torch.tensor([i // 3 for i in read], device=got.device)
    for shift, other in moved.items():
        change = _by_answer(of, (other - wanted) ** 2)
        share = _by_answer(of, (got - wanted) * (other - wanted)) / change
        if torch.any((share > 0.6) & (change > (eps / 2) ** 2 * _by_answer(of, wanted**2))):
            return f"its states are those of tokens at positions that are off by {shift:+d}"
    return None


def _plain_states(reader: Reader, texts: Iterable[list[int]], shift: int = 0) -> Tensor:
    """float64 [texts, ...] of the last tokens, each text read alone, with its last token moved so many positions."""
    states = []
    for text in texts:
        inputs: dict[str, Any] = {"input_ids": reader.ids([text]), "use_cache": False}
        if shift and len(text) > 1:
            inputs["position_ids"] = torch.arange(len(text), device=reader.policy.device)[None].clone()
            inputs["position_ids"][0, -1] += shift
            inputs["attention_mask"] = torch.ones_like(inputs["position_ids"])  # without one, it would begin a new row
        states.append(reader.states(**inputs)[0][0].double())
    return torch.stack(states)


def _by_answer(of: Tensor, values: Tensor) -> Tensor:
    return values.new_zeros(2 * len(_SCRIPT)).index_add(0, of, values.flatten(1).sum(1))


def _poisoned(memory: ContinuousBatch) -> ContinuousBatch:
    """A mask that shows too much is a matter of a few percent where there is nothing to see, and of everything here."""
    memory.slots.unwritten = 1e3
    return memory


def _read_script(memory: Memory, answers: list[Answer]) -> dict[int, Tensor]:
    """The state that follows each part of each text; the first answer leaves after two tokens."""
    read: dict[int, Tensor] = {}
    waiting = list(answers)
    states = torch.empty(0)
    while waiting or memory.answers:
        if memory.answers:
            states = memory.step()
        else:
            count = memory.room(waiting)
            states, waiting = memory.join(waiting[:count]), waiting[count:]
        for answer, state in zip(memory.answers, states, strict=True):
            read[3 * answers.index(answer) + len(answer.tokens)] = state
            answer.tokens.append(_script(answer)[len(answer.tokens)])
            if len(answer.tokens) == (2 if answer is answers[0] else 3):
                answer.finish = "stop"
        memory.drop_finished()
    return read


def _script(answer: Answer) -> list[int]:
    """The same answer to a prompt, but for its first token."""
    return [answer.index + 1, *_SCRIPT[answer.request.task][1]]
