"""Conversations of the policy with an environment: tokens in, tokens out.

    environment.reset(row)         the first messages, or their tokens
    source.sample(request)         one completion; turn k is `Request.turn`
    environment.step(completion)   its observation, whether the conversation is over, and a reward
    ...
    environment.reward()           if there is such a method: the reward of the whole conversation

One conversation is one `Sample`. Its tokens are all tokens after the prompt, in order; only tokens
that the policy sampled are trained and have log-probs. Nothing that was sampled is tokenized again.
"""

import asyncio
import logging
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any, NamedTuple

from ...data.columns import Message
from ..config import Limits
from ..rewards.scoring import OutOfTime, as_score, call, is_async, within
from ..rollouts.event_loops import gather_or_cancel, run, warn_if_blocking
from ..rollouts.sample import Request, Row, Sample, VersionSpan, copied, plain
from ..rollouts.source import RolloutSource, SourceOnAnother, check_completions
from .chat_turns import ChatTurns

log = logging.getLogger(__name__)

# seconds until an environment is made a second time; twice as long before each further time
_PAUSE = 0.5

_AGAIN = "it is made again, at most limits.attempts times; then the conversation is aborted and has no reward"
_ABORTED = "the conversation is aborted and has no reward, as are further ones, which are counted"
_WANTED = "wanted a text, a list of messages with role and content, or token ids"
# of a conversation, in ``sample.info``
_NAMES = ("messages", "turn_rewards", "turn_ends", "turns", "environment_reward")


class Step(NamedTuple):
    """An environment's reply to a completion.

    Attributes:
        observation: messages, a text (a user's), or token ids of everything between this completion
            and the next, in a list or an array.
        done: whether the conversation is over; its observation is then ignored.
        reward: for this completion; a conversation's is the sum over its turns. None gives none.
        counts: numbers to be summed over the conversation and kept in ``sample.info``.
    """

    observation: str | Sequence[Message] | Sequence[int] = ""
    done: bool = False
    reward: float | None = None
    counts: Mapping[str, float] = {}


async def close(environment: object) -> None:
    """Close an environment, if it has a function for that, plain or async."""
    function = getattr(environment, "close", None)
    if callable(function):
        await call(function)


@dataclass
class MultiTurnSource(SourceOnAnother):
    """A source of conversations: a `RolloutSource` on top of another.

    `reset` gives the prompt, not the request; those of one task may differ, such as from random
    starts.

    ``sample.info`` holds ``environment_reward`` (the sum of the turns' rewards and of the
    conversation's, which ``reward()`` gives; None where there was none, or in a word how the
    environment failed), ``turn_rewards``, ``turn_ends`` (how many of its tokens each turn ends
    after), ``turns``, ``messages`` (for TRL's rewards and for people) and the environment's counts.

    An environment that can't be made, or whose `reset` fails or is too slow, is made again,
    ``limits.attempts`` times in all. If none works, or the environment fails in a turn, the
    conversation is aborted; its turns until then are kept. The first failure of each kind is
    logged.

    Args:
        source: where completions come from.
        make: an environment for one conversation.
        row: the row of the data that a task's prompt comes from.
        turns: how messages become tokens; not needed by environments that speak in token ids.

    Attributes:
        failures: the first failure of each kind, with its traceback.
    """

    source: RolloutSource
    make: Callable[[], Any]
    row: Callable[[int], Row]
    turns: ChatTurns | None = None
    limits: Limits = field(default_factory=Limits)
    failures: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._places = asyncio.Semaphore(self.limits.concurrency or sys.maxsize)
        self._closing: set[asyncio.Task[None]] = set()
        self.overlaps = self.source.overlaps
        self.stored = self.source.stored
        # a scheduler reads prompts of text with it
        self.tokenizer = getattr(self.source, "tokenizer", None)

    def on(self, source: RolloutSource) -> "MultiTurnSource":
        """The same conversations, of completions from another source, such as one that repeats
        failed requests.
        """
        return replace(self, source=source)

    async def sample(self, request: Request) -> list[Sample]:
        """One conversation for each of ``request.indices``, at the same time.

        If one fails, all are cancelled.

        Raises:
            ValueError: if `reset` gives a prompt that can't be used.
            SourceError: if the source returns another sample than the one requested.
        """
        return await gather_or_cancel(self._converse(request, index) for index in request.indices)

    async def close(self) -> None:
        await asyncio.gather(*self._closing)
        await super().close()

    async def _converse(self, request: Request, index: int) -> Sample:
        async with self._places:
            for attempt in range(self.limits.attempts):
                if attempt:
                    await asyncio.sleep(_PAUSE * 2 ** (attempt - 1))
                environment = self._made(request, index)
                if environment is None:
                    continue
                try:
                    opening = await self._reset(environment, request, index)
                    if opening is not None:
                        return await self._conversation(environment, opening, request, index)
                finally:
                    closing = asyncio.ensure_future(self._close(environment))
                    self._closing.add(closing)
                    closing.add_done_callback(self._closing.discard)
                    # a conversation that is cancelled once more leaves it to `close`
                    await asyncio.shield(closing)
        info = dict(zip(_NAMES, ([], [], [], 0, "aborted"), strict=True))
        return Sample(request.task, index, [], [], [], [], [], "aborted", info=info)

    def _made(self, request: Request, index: int) -> "TrackedEnvironment | None":
        began = time.perf_counter()
        try:
            return TrackedEnvironment(self.make())
        except Exception as error:
            self._failed("error in its constructor", f"({_place(request, index)}); {_AGAIN}", error)
            return None
        finally:
            warn_if_blocking("the environment's constructor", time.perf_counter() - began)

    async def _reset(self, environment: "TrackedEnvironment", request: Request, index: int) -> Any:
        """What `reset` gives; None if it fails."""
        row = copied(self.row(request.task))
        try:
            opening = await within(self.limits.seconds, environment.call("reset", row))
        except Exception as error:
            self._failed(f"{_kind(error)} in reset", f"({_place(request, index)}); {_AGAIN}", error)
            return None
        return "" if opening is None else opening

    async def _conversation(
        self, environment: "TrackedEnvironment", opening: object, request: Request, index: int
    ) -> Sample:
        prompt, limit = self._open(opening, request)
        info: dict[str, Any] = dict(zip(_NAMES, ([], [], [], 0, None), strict=True))
        sample = Sample(request.task, index, prompt, [], [], [], [], "length", info=info)
        stop = self._stop(request)
        for turn in range(self.limits.turns):
            most = min(request.sampling.max_tokens, limit - len(sample.tokens))
            sampling = replace(request.sampling, max_tokens=most, stop=stop)
            part = replace(
                request,
                prompt=[*prompt, *sample.tokens],
                indices=[index],
                sampling=sampling,
                turn=turn,
            )
            completions = await self.source.sample(part)
            check_completions(completions, part, "environment")
            completion = completions[0]
            _add_turn(sample, completion)
            step = None
            if completion.finish != "aborted":
                step = await self._step(environment, completion)
            if step is None:
                sample.finish = "aborted"
                break
            self._note(info, step)
            if step.done or completion.finish == "length":
                break
            messages, context = self._observation(step.observation, completion, request)
            sample.finish = "length"
            is_last = turn + 1 == self.limits.turns
            if is_last or len(context) >= limit - len(sample.tokens):
                break
            _add_observation(sample, messages, context)
        sample.text = "\n".join(
            each["content"] for each in info["messages"] if each["role"] == "assistant"
        )
        if sample.finish != "aborted" and not await self._reward(environment, sample):
            sample.finish = "aborted"
        if sample.finish == "aborted":
            info["environment_reward"] = "aborted"
        return sample

    def _stop(self, request: Request) -> tuple[int, ...]:
        """The tokens that end a turn: the request's, and the one by which the chat template ends
        the assistant's.
        """
        stop = tuple(request.sampling.stop)
        if self.turns is None or self.turns.end in stop:
            return stop
        return (*stop, self.turns.end)

    def _open(self, opening: Any, request: Request) -> tuple[list[int], int]:
        """The prompt, and how many tokens may follow within the limit and the model's context."""
        opening = _observed(opening, "reset returned")
        if not opening:
            raise ValueError(
                f"environment: reset gave task {request.task} an empty prompt; say something first"
            )
        prompt = opening if _is_tokens(opening) else self._turns().prompt(_messages(opening))
        context = getattr(self.source, "context", None)
        if context is None:
            return prompt, self.limits.tokens
        if len(prompt) >= context:
            raise ValueError(
                f"environment: reset gave task {request.task} a prompt of {len(prompt)} tokens, which leaves nothing "
                f"of the model's context of {context} for completions; say less"
            )
        return prompt, min(self.limits.tokens, context - len(prompt))

    async def _step(self, environment: "TrackedEnvironment", completion: Sample) -> Step | None:
        try:
            step: Step = await within(
                self.limits.seconds, environment.call("step", completion.copy())
            )
        except Exception as error:
            self._failed(
                f"{_kind(error)} in step",
                f"({_place(completion, completion.index)}); {_ABORTED}",
                error,
            )
            return None
        if not hasattr(step, "observation"):
            raise ValueError(
                f"environment: step returned {step!r:.200}; wanted a Step(observation, done, reward)"
            )
        return step

    async def _reward(self, environment: "TrackedEnvironment", sample: Sample) -> bool:
        """Add the environment's reward of the whole conversation; false if computing it fails."""
        name = environment.reward_name
        if name is None:
            return True
        try:
            reward = await within(self.limits.seconds, environment.call(name))
        except Exception as error:
            self._failed(
                f"{_kind(error)} in {name}", f"({_place(sample, sample.index)}); {_ABORTED}", error
            )
            return False
        given = [*sample.info["turn_rewards"], as_score(reward)]
        sample.info["environment_reward"] = _total(given)
        return True

    async def _close(self, environment: "TrackedEnvironment") -> None:
        try:
            await within(self.limits.seconds, environment.close())
        except Exception as error:
            self._failed(
                "close",
                "failed; what the environment holds may be left over, as where it fails again",
                error,
            )

    def _failed(self, kind: str, what: str, error: Exception) -> None:
        if kind not in self.failures:
            log.warning("environment: %s %s", kind, what, exc_info=error)
            self.failures[kind] = (
                f"{kind} {what}\n" + "".join(traceback.format_exception(error)).strip()
            )

    def _note(self, info: dict[str, Any], step: Step) -> None:
        """Add the reward and the counts of a turn."""
        info["turn_rewards"].append(as_score(step.reward))
        info["environment_reward"] = _total(info["turn_rewards"])
        if not isinstance(step.counts, Mapping):
            raise ValueError(
                f"environment: counts must be a mapping of names to numbers, got {step.counts!r:.200}"
            )
        for name, count in step.counts.items():
            who = f"environment: counts[{name!r}]"
            number = plain(count, who)
            if name in _NAMES:
                raise ValueError(
                    f"{who}: sample.info has a {name} of its own; give the count another name"
                )
            if not isinstance(number, int | float):
                raise ValueError(
                    f"{who} must be a number, to be summed over the turns, got {number!r}"
                )
            info[name] = info.get(name, 0) + number

    def _observation(
        self, observation: Any, completion: Sample, request: Request
    ) -> tuple[list[Message], list[int]]:
        """The environment's messages, and the tokens between this completion and the next."""
        observation = _observed(observation, "step observed")
        if not observation:
            raise ValueError(
                "environment: step observed nothing and is not done; return an observation, or done=True"
            )
        if _is_tokens(observation):
            return [], observation
        messages = _messages(observation)
        suffix = self._turns().suffix(messages)
        # Any sampled end token replaces the template's; a completion without one is ended by the
        # template's.
        last = completion.tokens[-1:]
        ended = last == suffix[:1] or (last and last[0] in request.sampling.stop)
        return messages, suffix[1:] if ended else suffix

    def _turns(self) -> ChatTurns:
        if self.turns is None:
            raise ValueError(
                "environment: it speaks in messages; give MultiTurnSource the turns of a chat template"
            )
        return self.turns


class TrackedEnvironment:
    """An environment that is closed once none of its functions runs.

    A plain function that timed out continues in a thread.
    """

    def __init__(self, environment: object) -> None:
        self.environment = environment
        self.latest: Future[None] = Future()  # call of a plain function

    @property
    def reward_name(self) -> str | None:
        """The method that gives the conversation's reward: ``reward``, or ``get_reward``, TRL's
        name for it.

        It is one of the class: an attribute of the object may be anything.
        """
        for name in ("reward", "get_reward"):
            of_class = getattr(type(self.environment), name, None)
            if callable(of_class) and callable(getattr(self.environment, name)):
                return name
        return None

    async def call(self, name: str, *arguments: object) -> Any:
        function = getattr(self.environment, name)
        if is_async(function):
            return await call(function, *arguments)
        latest: Future[None] = Future()
        self.latest = latest

        def tracked() -> Any:
            if not latest.set_running_or_notify_cancel():  # closed before this thread started
                return None
            try:
                return function(*arguments)
            finally:
                latest.set_result(None)

        return await call(tracked)

    async def close(self) -> None:
        if self.latest.cancel() or self.latest.done():
            await close(self.environment)
        else:  # in its thread, when the call returns
            self.latest.add_done_callback(lambda _: run(close(self.environment)))


def _add_turn(sample: Sample, completion: Sample) -> None:
    """Append a completion to a conversation."""
    start = len(sample.tokens)
    sample.tokens += completion.tokens
    sample.trained += completion.trained
    sample.logprobs += completion.logprobs
    sample.spans += [
        VersionSpan(version, start + first, start + end) for version, first, end in completion.spans
    ]
    sample.finish = completion.finish
    sample.info["messages"].append({"role": "assistant", "content": completion.text})
    sample.info["turns"] += 1
    sample.info["turn_ends"].append(len(sample.tokens))


def _add_observation(sample: Sample, messages: Sequence[Message], tokens: Sequence[int]) -> None:
    """Append the environment's messages to a conversation; their tokens are not trained."""
    sample.tokens += list(tokens)
    sample.trained += [False] * len(tokens)
    sample.logprobs += [0.0] * len(tokens)
    sample.info["messages"] += messages


def refuse_failing(source: object, samples: Sequence[Sample]) -> None:
    """Raise ValueError, with the first failure, if an environment failed in all conversations of
    the first rollout.
    """
    failures = getattr(source, "failures", {})
    who = getattr(source, "who", "environment")
    outcomes = [sample.info.get("environment_reward") for sample in samples]
    if failures and outcomes and all(outcome == "aborted" for outcome in outcomes):
        raise ValueError(
            f"{who}: it failed in all {len(samples)} conversations of the first rollout, so nothing can be "
            "learned; fix it, or see that what it needs is there. The first failure of each kind:\n"
            + "\n".join(failures.values())
        )


def _kind(error: Exception) -> str:
    return "timeout" if isinstance(error, OutOfTime) else "error"


def _place(part: Request | Sample, index: int) -> str:
    return f"task {part.task}, completion {index}"


def _total(rewards: Sequence[float | str | None]) -> float | str | None:
    """The sum of the numbers among them, None where there is none, or the first failure."""
    failed = [reward for reward in rewards if isinstance(reward, str)]
    numbers = [reward for reward in rewards if isinstance(reward, float)]
    if failed:
        return failed[0]
    return sum(numbers) if numbers else None


def _observed(observation: object, what: str) -> Any:
    """A text, a list of messages, or a list of token ids, whatever array or sequence it came in.

    Raises:
        ValueError: if it is none of these.
    """
    if hasattr(observation, "tolist"):  # an array of numpy, a tensor
        observation = observation.tolist()
    if isinstance(observation, str):
        return observation
    # bytes are integers
    if isinstance(observation, Mapping | bytes) or not isinstance(observation, Iterable):
        raise ValueError(f"environment: {what} {observation!r:.200}; {_WANTED}")
    entries = list(observation)
    if all(isinstance(entry, Integral) for entry in entries):
        return [int(entry) for entry in entries]
    if not all(isinstance(entry, Mapping) and "role" in entry for entry in entries):
        raise ValueError(f"environment: {what} {observation!r:.200}; {_WANTED}")
    return entries


def _messages(observation: str | list[Message]) -> list[Message]:
    return (
        [{"role": "user", "content": observation}] if isinstance(observation, str) else observation
    )


def _is_tokens(observation: str | list[Any]) -> bool:
    return not isinstance(observation, str) and isinstance(observation[0], int)
