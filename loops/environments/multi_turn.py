"""MultiTurnSource of the policy with an environment: tokens in, tokens out.

    environment.reset(row)     the first messages, or their tokens
    source.sample(request)         one completion; turn k is `Request.turn`
    environment.step(completion)   its observation, whether the conversation is over, and a reward
    ...

One conversation is one `Sample`. Its tokens are those after the prompt, in order; only those that the policy sampled
are trained and have log-probs. Nothing that was sampled is tokenized again.
"""

import asyncio
import logging
import math
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, cast

from torch import Tensor

from ...data.columns import Message
from ..config import Limits
from ..rewards.scoring import as_score
from ..rewards.scoring import OutOfTime, call, is_async, within
from ..rollouts.sample import Request, Row, Sample, VersionSpan, plain
from ..rollouts.source import RolloutSource, check_completions
from .chat_turns import ChatTurns

log = logging.getLogger(__name__)


class Step(NamedTuple):
    """An environment's reply to a completion.

    Attributes:
        observation: messages, a text (a user's), or token ids, which then hold everything between this completion and
            the next.
        done: whether the conversation is over; its observation is then ignored.
        reward: for this completion; a conversation's is the sum over its turns. None gives none.
        counts: numbers to be summed over the conversation and kept in ``sample.info``.
    """

    observation: str | Sequence[Message] | Sequence[int] = ""
    done: bool = False
    reward: float | None = None
    counts: Mapping[str, float] = {}


class Environment(Protocol):
    """The other side of one conversation. All of its functions may be async.

    One that has a function ``close()`` is closed exactly once, however the conversation ends: by itself, by a
    failure, at a limit, or because nothing more is to be sampled. A plain ``reset`` or ``step`` that took too long goes
    on in its thread, and the environment is closed when it returns.
    """

    def reset(self, row: Row) -> Sequence[Message] | Sequence[int] | Awaitable[Sequence[Message] | Sequence[int]]:
        """The prompt, which depends on the row alone: the conversations of a group share it."""
        ...

    def step(self, completion: Sample) -> Step | Awaitable[Step]:
        """``completion`` is the latest turn: its tokens, its text, how it ended."""
        ...


async def close(environment: Any) -> None:
    """Close an environment, if it has a function for that, plain or async."""
    if callable(function := getattr(environment, "close", None)):
        await call(function)


@dataclass
class MultiTurnSource:
    """A source of conversations: a `RolloutSource` itself, on top of another. What a request has for a prompt is not
    looked at: `reset` gives it.

    ``sample.info`` holds ``environment_reward`` (the sum of the turns' rewards, None where there was none, or in a word
    how the environment failed), ``turn_rewards``, ``turns``, ``messages`` (for TRL's rewards and for people) and
    the environment's counts. A conversation in which the environment fails or is too slow is aborted and counted in
    ``failures``; its turns until then are kept. So is one whose environment can't be closed, but its reward counts.

    Args:
        source: where completions come from.
        make: an environment for one conversation.
        row: the row of the data that a task's prompt comes from.
        turns: how messages become tokens; not needed by environments that speak in token ids.
    """

    source: RolloutSource
    make: Callable[[], Environment]
    row: Callable[[int], Row]
    turns: ChatTurns | None = None
    limits: Limits = field(default_factory=Limits)
    failures: Counter[str] = field(default_factory=Counter)
    _closing: "set[asyncio.Task[None]]" = field(default_factory=set, init=False, repr=False, compare=False)

    @property
    def overlaps(self) -> bool:
        return self.source.overlaps

    @property
    def stored(self) -> bool:
        return self.source.stored

    async def sample(self, request: Request) -> list[Sample]:
        """One conversation for each of ``request.indices``, all at the same time; if one fails, all are given up.

        Raises:
            ValueError: if `reset` fails, or gives the conversations of one task different prompts.
            SourceError: if the source returns another sample than the one requested.
        """
        conversations = [asyncio.ensure_future(self._converse(request, index)) for index in request.indices]
        try:
            samples = await asyncio.gather(*conversations)
        finally:
            for conversation in conversations:
                conversation.cancel()
            await asyncio.gather(*conversations, return_exceptions=True)
        if len({tuple(sample.prompt) for sample in samples}) > 1:
            raise ValueError(
                f"environment: the conversations of task {request.task} begin with different prompts; what `reset` "
                "returns must depend on the row alone, because their rewards are compared"
            )
        return list(samples)

    async def publish(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        await self.source.publish(weights, version)

    async def version(self) -> int | None:
        return await self.source.version()

    async def close(self) -> None:
        await asyncio.gather(*self._closing)
        await self.source.close()

    async def _converse(self, request: Request, index: int) -> Sample:
        environment = _Played(self.make())
        try:
            return await self._conversation(environment, request, index)
        finally:
            closing = asyncio.ensure_future(self._close(environment))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
            await asyncio.shield(closing)  # a conversation that is cancelled once more leaves it to `close`

    async def _conversation(self, environment: "_Played", request: Request, index: int) -> Sample:
        prompt = await self._open(environment, request)
        whole = Sample(request.task, index, prompt, [], [], [], [], "length")
        whole.info |= {"messages": [], "turn_rewards": [], "turns": 0, "environment_reward": None}
        for turn in range(self.limits.turns):
            completion = await self._complete(request, whole, turn)
            _append(whole, completion)
            whole.finish = completion.finish
            step = None if completion.finish == "aborted" else await self._step(environment, completion)
            if step is None:
                whole.finish = "aborted"
                whole.info["environment_reward"] = "aborted"
                break
            self._note(whole, step)
            if step.done or completion.finish == "length":
                break
            observation = self._observation_tokens(step, completion, request)
            whole.finish = "length"
            if turn + 1 == self.limits.turns or len(observation) >= self._left(whole):
                break
            _append_context(whole, observation)
            whole.info["messages"] += _messages(step.observation)
        whole.text = "\n".join(m["content"] for m in whole.info["messages"] if m["role"] == "assistant")
        return whole

    async def _open(self, environment: "_Played", request: Request) -> list[int]:
        try:
            opening = await within(self.limits.seconds, call(environment.reset, self.row(request.task)))
        except Exception as error:
            raise ValueError(f"environment: reset failed at the row of task {request.task}: {error!r}") from error
        prompt = list(opening) if _is_tokens(opening) else self._turns().prompt(opening)
        if not prompt:
            raise ValueError(f"environment: reset gave task {request.task} an empty prompt; say something first")
        if len(prompt) >= self._context:
            raise ValueError(
                f"environment: reset gave task {request.task} a prompt of {len(prompt)} tokens, which leaves nothing "
                f"of the model's context of {self._context} for completions; say less"
            )
        return prompt

    @property
    def _context(self) -> float:
        known: int | None = getattr(self.source, "context", None)
        return math.inf if known is None else known

    def _left(self, whole: Sample) -> int:
        """Tokens that the conversation may still grow by, within its limit and the model's context."""
        return int(min(self.limits.tokens, self._context - len(whole.prompt))) - len(whole.tokens)

    async def _complete(self, request: Request, whole: Sample, turn: int) -> Sample:
        """One more turn of the policy, within what is left of the conversation."""
        room = min(request.sampling.max_tokens, self._left(whole))
        stop = request.sampling.stop
        if self.turns is not None and self.turns.end not in stop:
            stop = (*stop, self.turns.end)
        asked = Request(
            request.task,
            [*whole.prompt, *whole.tokens],
            [whole.index],
            replace(request.sampling, max_tokens=room, stop=stop),
            request.key,
            turn,
        )
        completions = await self.source.sample(asked)
        check_completions(completions, asked, "environment")
        return completions[0]

    async def _step(self, environment: "_Played", completion: Sample) -> Step | None:
        try:
            step: Step = await within(self.limits.seconds, call(environment.step, completion))
        except Exception as error:
            self._failed(
                "timeout" if isinstance(error, OutOfTime) else "error",
                f"in step (task {completion.task}, completion {completion.index}); the conversation is aborted and has "
                "no reward, as are further ones, which are counted",
                error,
            )
            return None
        return step

    async def _close(self, environment: "_Played") -> None:
        try:
            await within(self.limits.seconds, environment.close())
        except Exception as error:
            self._failed("close", "failed; what the environment holds may be left over, as where it fails again", error)

    def _failed(self, kind: str, what: str, error: Exception) -> None:
        if kind not in self.failures:
            log.warning("environment: %s %s", kind, what, exc_info=error)
        self.failures[kind] += 1

    def _note(self, whole: Sample, step: Step) -> None:
        info = whole.info
        value = as_score(step.reward)
        if isinstance(value, str):
            self.failures[value] += 1
        info["turn_rewards"].append(value)
        given = [reward for reward in info["turn_rewards"] if reward is not None]
        failed = [reward for reward in given if isinstance(reward, str)]
        info["environment_reward"] = failed[0] if failed else sum(given) if given else None
        for name, count in step.counts.items():
            who = f"environment: counts[{name!r}]"
            number = plain(count, who)
            if not isinstance(number, int | float):
                raise ValueError(f"{who} must be a number, to be summed over the turns, got {number!r}")
            info[name] = info.get(name, 0) + number

    def _observation_tokens(self, step: Step, completion: Sample, request: Request) -> list[int]:
        """The tokens between this completion and the next."""
        if not step.observation:
            raise ValueError("environment: step observed nothing and is not done; return an observation, or done=True")
        if _is_tokens(step.observation):
            return [int(token) for token in cast(Sequence[int], step.observation)]
        suffix = self._turns().suffix(_messages(step.observation))
        # Any sampled end token stands for the template's; a completion without one is ended by the template's.
        last = completion.tokens[-1:]
        ended = last == suffix[:1] or (last and last[0] in request.sampling.stop)
        return suffix[1:] if ended else suffix

    def _turns(self) -> ChatTurns:
        if self.turns is None:
            raise ValueError("environment: it speaks in messages; give MultiTurnSource the turns of a chat template")
        return self.turns


class _Played:
    """An environment that is closed when nothing of it runs: a plain function that was given up is in its thread yet.

    `close` then leaves it to that thread to close the environment when it comes back.
    """

    def __init__(self, environment: Environment) -> None:
        self._environment, self._mutex = environment, threading.Lock()
        self._running = self._closed = False
        self.reset, self.step = self._noted(environment.reset), self._noted(environment.step)

    async def close(self) -> None:
        with self._mutex:
            self._closed = True
            running = self._running
        if not running:
            await close(self._environment)

    def _noted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if is_async(function):
            return function

        def noted(*arguments: Any) -> Any:
            with self._mutex:
                if self._closed:  # given up before this thread began
                    return None
                self._running = True
            try:
                return function(*arguments)
            finally:
                with self._mutex:
                    self._running = False
                if self._closed:
                    asyncio.run(close(self._environment))

        return noted


def _append(whole: Sample, completion: Sample) -> None:
    offset = len(whole.tokens)
    whole.tokens += completion.tokens
    whole.trained += completion.trained
    whole.logprobs += completion.logprobs
    whole.spans += [VersionSpan(version, start + offset, end + offset) for version, start, end in completion.spans]
    whole.info["messages"].append({"role": "assistant", "content": completion.text})
    whole.info["turns"] += 1


def _append_context(whole: Sample, tokens: Sequence[int]) -> None:
    whole.tokens += tokens
    whole.trained += [False] * len(tokens)
    whole.logprobs += [0.0] * len(tokens)


def _messages(observation: Any) -> list[Message]:
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}]
    return [] if _is_tokens(observation) else list(observation)


def _is_tokens(observation: Any) -> bool:
    return not isinstance(observation, str) and all(isinstance(token, int) for token in observation)
