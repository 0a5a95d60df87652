"""Conversations of the policy with agents that know nothing of training.

    run(row, url, key) -> reward     the agent: it asks POST {url}/chat/completions as often as it likes

`AgentSource` is a source of conversations on top of a source of completions, as `MultiTurnSource`
is. One conversation is one `Sample` of one context or several, see `tree`.
"""

import asyncio
import json
import logging
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from ..config import Limits
from ..environments import ChatTurns
from ..environments.resolve import refuse_hidden_calls
from ..rewards.scoring import OutOfTime, as_score, call
from ..rollouts.event_loops import gather_or_cancel
from ..rollouts.sample import Request, Row, Sample, SamplingParams, copied
from ..rollouts.source import RolloutSource, SourceOnAnother
from .conversation import Conversation
from .server import AgentServer

log = logging.getLogger(__name__)

# seconds until an agent that made no call is run a second time; twice as long before each further
_PAUSE = 0.5
# seconds in which an agent that is cancelled may close what it holds
_PARTING = 10.0

_ABORTED = "the conversation is aborted and has no reward, as are further ones, which are counted"

Agent = Callable[[Row, str, str], float | Awaitable[float | None] | None]


class AgentFailure(Exception):
    """An agent came to its end, and there is nothing to train on."""


@dataclass
class AgentSource(SourceOnAnother):
    """A source of conversations: a `RolloutSource` on top of another.

    The prompts are what the agent asks, not the request's.

    ``sample.info`` holds ``environment_reward`` (what the agent returned; None where it gave none,
    or in a word how it failed), ``turns``, and ``messages`` of the first context, from the policy's
    first reply on.

    An agent that raises, or makes no call for ``limits.seconds`` while none of its completions is
    under way, ends its conversation, which is aborted; if it had not made a call, it is run again,
    ``limits.attempts`` times in all. At ``limits.turns`` completions, or where ``limits.tokens`` or
    the model's context leave no room, a call is answered with an empty message that ends by
    "length", and a further one is refused: an agent may end by itself, and return its reward. The
    first failure of each kind is logged.

    Args:
        source: where completions come from.
        run: the agent, for one row of the data, as a plain or an async function; a plain one runs
            in a thread.
        row: the row of the data that a task's conversations are about.
        turns: how messages become tokens.
        sampling: parameters of the run, which agents may name; those of the request they may
            anyway.
        server: where agents ask.

    Attributes:
        failures: the first failure of each kind, with its traceback.
    """

    who: ClassVar[str] = "agent"  # in messages

    source: RolloutSource
    run: Agent
    row: Callable[[int], Row]
    turns: ChatTurns
    limits: Limits = field(default_factory=Limits)
    sampling: SamplingParams | None = None
    server: AgentServer = field(default_factory=AgentServer)
    failures: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._places = asyncio.Semaphore(self.limits.concurrency or sys.maxsize)
        self._turns = {"[]": self.turns}  # by the tools that the template describes
        self.overlaps = self.source.overlaps
        self.stored = self.source.stored
        # a scheduler reads prompts of text with it
        self.tokenizer = getattr(self.source, "tokenizer", None)

    def on(self, source: RolloutSource) -> "AgentSource":
        """The same conversations, of completions from another source, such as one that repeats
        failed requests.
        """
        return replace(self, source=source)

    async def sample(self, request: Request) -> list[Sample]:
        """One conversation for each of ``request.indices``, at the same time.

        If the source of completions fails, all are cancelled.

        Raises:
            SourceError: if the source returns another sample than the one requested.
        """
        stop = request.sampling.stop
        if self.turns.end not in stop:
            stop = (*stop, self.turns.end)
        request = replace(request, sampling=replace(request.sampling, stop=stop))
        return await gather_or_cancel(self._converse(request, index) for index in request.indices)

    async def _converse(self, request: Request, index: int) -> Sample:
        async with self._places:
            for attempt in range(self.limits.attempts):
                if attempt:
                    await asyncio.sleep(_PAUSE * 2 ** (attempt - 1))
                conversation = self._conversation(request, index)
                sample = await self._run(conversation)
                if conversation.asked:
                    break
            return sample

    def _conversation(self, request: Request, index: int) -> Conversation:
        context = getattr(self.source, "context", None)
        return Conversation(
            request, index, self.source.sample, self._template, self.limits, context
        )

    def _template(self, tools: Sequence[Any]) -> ChatTurns:
        """The turns of a conversation whose tools are described to the template.

        Raises:
            ValueError: if it can't be followed turn by turn with them.
        """
        key = json.dumps(tools, sort_keys=True)
        if key not in self._turns:
            self._turns[key] = with_tools(self.turns, tools)
        return self._turns[key]

    async def _run(self, conversation: Conversation) -> Sample:
        """Run the agent once; what it has drawn, and its reward."""
        request, index = conversation.request, conversation.index
        reward: float | str | None = "aborted"
        repeated = [] if self.sampling is None else [self.sampling]
        async with self.server.session(conversation, *repeated) as (url, key):
            agent = asyncio.ensure_future(call(self.run, copied(self.row(request.task)), url, key))
            try:
                reward = as_score(await self._result(agent, conversation))
                if not conversation.tree.branches():
                    raise AgentFailure("it ended without a completion of the policy")
            except Exception as error:
                if conversation.lost.done():
                    raise
                reward = "aborted"
                self._failed(error, f"task {request.task}, completion {index}")
            finally:
                agent.cancel()
                await asyncio.wait({agent}, timeout=_PARTING)
                await conversation.close()
        return _sample_of(conversation, reward)

    async def _result(
        self, agent: "asyncio.Future[Any]", conversation: Conversation
    ) -> float | None:
        """What the agent returns.

        Raises:
            OutOfTime: if it has made no call for too long.
            SourceError, OSError: what the source of completions raised.
        """
        either: set[asyncio.Future[Any]] = {agent, conversation.lost}
        while True:
            left = self.limits.seconds
            if conversation.is_idle:
                left -= time.monotonic() - conversation.idle_since
            if left <= 0:
                raise OutOfTime(f"made no call for {self.limits.seconds:g} s")
            await asyncio.wait(either, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if conversation.lost.done():
                conversation.lost.result()
            if agent.done():
                if agent.cancelled():
                    raise AgentFailure("it was cancelled from within")
                reward: float | None = agent.result()
                return reward

    def _failed(self, error: Exception, place: str) -> None:
        kind = "error"
        if isinstance(error, OutOfTime):
            kind = "timeout"
        elif isinstance(error, AgentFailure):
            kind = "no completion"
        if kind in self.failures:
            return
        what = f"{kind} ({place}); {_ABORTED}"
        log.warning("agent: %s", what, exc_info=error)
        shown = "".join(traceback.format_exception(error)).strip()
        self.failures[kind] = f"{what}\n{shown}"


def _sample_of(conversation: Conversation, reward: float | str | None) -> Sample:
    """A conversation that has ended."""
    tree = conversation.tree
    contexts = tree.contexts()
    kept = tree.kept()
    info = {
        "messages": tree.messages(),
        "turns": len(tree.turns),
        "environment_reward": reward,
    }
    sample = Sample(
        conversation.request.task, conversation.index, [], [], [], [], [], "aborted", info=info
    )
    if contexts:
        first, *sample.further = contexts
        sample.prompt, sample.tokens, sample.trained = first.prompt, first.tokens, first.trained
        sample.logprobs, sample.spans = first.logprobs, first.spans
    sample.text = "\n".join(turn.drawn.text for turn in kept)
    if reward == "aborted" or conversation.aborted or not contexts:
        info["environment_reward"] = "aborted"
    elif conversation.full or kept[-1].drawn.finish == "length":
        sample.finish = "length"
    else:
        sample.finish = "stop"
    return sample


def with_tools(turns: ChatTurns, tools: Sequence[Any]) -> ChatTurns:
    """The same turns with tools described to the template.

    Raises:
        ValueError: if the template can't be followed turn by turn with them, or the tokenizer hides
            tool calls.
    """
    refuse_hidden_calls(turns.encoder.tokenizer)
    return ChatTurns(turns.encoder, {**turns.options, "tools": list(tools)})
