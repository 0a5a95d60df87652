"""Many answers at once, token by token, from a policy's own module.

How it can remember what was read, see `memory`, is tried out, as rows are in `backbone`.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .draw import draw
from .memory import Lockstep, Memory, Ragged
from .reader import Answer, Reader
from .sample import Request, Sampling
from .source import SourceError

log = logging.getLogger(__name__)

# Prompts and answers to try a memory with; 4 tokens are read at most, which no window is shorter than.
_SCRIPT = (([1, 2], [5, 6]), ([3], [6, 4]))
_REFUSALS = (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, NotImplementedError)


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


def choose_memory(reader: Reader, tokens: int) -> Callable[[int], Memory]:
    """What to remember the answers of this model with, given the longest of them: the fastest that is shown to work."""
    name, config = type(reader.policy.plain).__name__, reader.policy.plain.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    ragged = kinds <= {"full_attention", "sliding_attention"} and _agrees(lambda: Ragged(reader, tokens), reader)
    cached = _agrees(lambda: Lockstep(reader, tokens, cached=True), reader)
    window = _window(config)
    fallback = "one prompt at a time, " + ("with its own cache" if cached else "all being read anew for every token")
    if not ragged:
        log.warning("%s: answers are generated %s", name, fallback)

    def memory(longest: int) -> Memory:
        if ragged and (window is None or longest <= window):
            return Ragged(reader, tokens, window)
        if ragged:
            log.warning("%s: %d tokens are more than its window of %s: %s", name, longest, window, fallback)
        return Lockstep(reader, tokens, cached=cached)

    return memory


def _window(config: Any) -> int | None:
    """Up to this length the model attends to everything."""
    windowed = getattr(config, "use_sliding_window", True)
    if hasattr(config, "layer_types"):
        windowed = windowed and "sliding_attention" in config.layer_types
    return getattr(config, "sliding_window", None) if windowed else None


def _agrees(make: Callable[[], Memory], reader: Reader) -> bool:
    """Whether the states read from this memory are those that the plain model computes of each text alone."""
    requests = [
        Request(task, prompt, [0, 1], Sampling(max_tokens=3), key=0) for task, (prompt, _) in enumerate(_SCRIPT)
    ]
    answers = [Answer.of(request, index) for request in requests for index in request.indices]
    texts = [[*_SCRIPT[answer.request.task][0], *_script(answer)[:end]] for answer in answers for end in range(3)]
    with reader.reading():
        try:
            read = _read_script(make(), answers)
            expected = [reader.states(input_ids=reader.ids([text]), use_cache=False)[0] for text in texts]
        except _REFUSALS as error:  # the model takes no such input
            log.info("%s: %s", type(reader.policy.plain).__name__, error)
            return False
    pairs = [(read[i], wanted[0]) for i, wanted in enumerate(expected) if i in read]
    got, wanted = (torch.stack(states).double() for states in zip(*pairs, strict=True))
    tolerance = 1e-3 if torch.finfo(expected[0].dtype).eps < 1e-5 else 0.35  # as in `backbone`
    return bool((got - wanted).norm() <= tolerance * wanted.norm())


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
