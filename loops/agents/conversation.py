"""What one agent asks of the policy, and what is drawn for it.

A call continues the longest beginning of its messages that ends with a completion of ours; only
what follows that is rendered, as the suffix of `ChatTurns`. Nothing that was drawn is rendered or
tokenized again. Without such a beginning, as after a compaction or of a sub-agent, a call is
rendered whole, and begins another context.

Each completion is drawn once, in a task of its own: a client that hangs up and asks again is told
the same. Its seed is of the run, the prompt, and how often the conversation has asked for that, so
that it does not matter which of several calls comes first.
"""

import asyncio
import hashlib
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...data.columns import BadRow
from ..config import Limits
from ..environments import ChatTurns
from ..rollouts.event_loops import gather_or_cancel
from ..rollouts.sample import Request, Sample
from ..rollouts.source import check_completions
from .chat import ChatCall, Refused, reply_of
from .tree import AgentTurn, Tree


@dataclass(eq=False)
class Drawing:
    """The completions of one call, while they are drawn and after.

    Attributes:
        waiting: how many requests of clients wait for it.
        received: whether one of them was told.
    """

    task: "asyncio.Task[list[AgentTurn]]"
    waiting: int = 0
    received: bool = False


@dataclass(eq=False)
class Conversation:
    """One agent's conversation with the policy.

    Args:
        request: for the conversations of its task; its prompt is not read.
        index: which of them this one is.
        sample: ``await sample(request)`` draws completions, see `RolloutSource`.
        templates: ``templates(tools)`` are the turns of the chat template that describes these.
        context: of the model, the longest prompt and completion together; None without a limit.

    Attributes:
        asked: how many completions were asked for.
        full: whether a limit was met.
        aborted: whether the source gave up a completion.
        idle_since: when a completion was last under way, see `time.monotonic`.
        lost: fails with the error of the source, after which nothing more can be drawn.
    """

    request: Request
    index: int
    sample: Callable[[Request], Awaitable[list[Sample]]]
    templates: Callable[[Sequence[Any]], ChatTurns]
    limits: Limits
    context: int | None = None
    tree: Tree = field(default_factory=Tree)
    asked: int = 0
    full: bool = False
    aborted: bool = False

    def __post_init__(self) -> None:
        self.idle_since = time.monotonic()
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._under_way: set[asyncio.Task[list[AgentTurn]]] = set()
        self._drawings: dict[bytes, list[Drawing]] = {}  # by the body of the call
        self._times: Counter[str] = Counter()  # how often each prompt was asked for

    @property
    def is_idle(self) -> bool:
        return not self._under_way

    def drawing(self, call: ChatCall, body: bytes, *, again: bool) -> Drawing:
        """The completions of a call, which are being drawn.

        Args:
            body: of the request, which names the call.
            again: whether the client repeats it: then it gets what was drawn before.
        """
        same = self._drawings.setdefault(hashlib.sha256(body).digest(), [])
        if again and same:
            # one that nobody waits for any more, if there is one
            left = [each for each in same if not (each.waiting or each.received)]
            return [*left, same[-1]][0]
        task = asyncio.create_task(self._draw(call))
        self._under_way.add(task)
        task.add_done_callback(self._ended)
        same.append(Drawing(task))
        return same[-1]

    async def close(self) -> None:
        """End what is still being drawn."""
        for task in self._under_way:
            task.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)
        if self.lost.done():
            self.lost.exception()  # it was told, or never will be
        self.lost.cancel()

    def _ended(self, task: "asyncio.Task[list[AgentTurn]]") -> None:
        self._under_way.discard(task)
        self.idle_since = time.monotonic()
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, Refused) and not self.lost.done():
            self.lost.set_exception(error)

    async def _draw(self, call: ChatCall) -> list[AgentTurn]:
        """The turns of a call; none where a limit leaves no room for them.

        Raises:
            Refused: if the chat template refuses the messages, or a limit was met before.
        """
        before, length, given = self._place(call)
        prompt = given if before is None else [*before.tokens, *given]
        room = self._room(before, prompt)
        if room < 1 or self.asked + call.count > self.limits.turns:
            if self.full:
                raise Refused(400, "the conversation is at its limit of turns or tokens; end it")
            self.full = True
            return []
        longest = min(room, call.max_tokens or room)
        depth = 0 if before is None else len(before.path)
        requests = [self._request(prompt, longest, depth) for _ in range(call.count)]
        self.asked += call.count
        groups = await gather_or_cancel(map(self._complete, requests))
        turns = []
        for (drawn,) in groups:
            if drawn.finish == "aborted":
                self.aborted = True
                raise Refused(503, "the completion was given up by the sampler")
            reply = reply_of(drawn.text, call.tools, len(self.tree.turns))
            turn = AgentTurn(before, given, call.messages[length:], drawn, reply)
            self.tree.add(turn, _key(call.tools), call.messages)
            turns.append(turn)
        return turns

    async def _complete(self, request: Request) -> list[Sample]:
        completions = await self.sample(request)
        check_completions(completions, request, "agent")
        return completions

    def _place(self, call: ChatCall) -> tuple[AgentTurn | None, int, list[int]]:
        """The turn that a call continues, how many messages it holds, and the tokens that are
        new.
        """
        try:
            turns = self.templates(call.tools)
            before, length = self.tree.longest_known(_key(call.tools), call.messages)
            if before is not None:
                suffix = _suffix(turns, call, length)
                if suffix is not None:
                    return before, length, suffix[1:] if self._is_ended(before) else suffix
            return None, 0, turns.prompt(call.messages)
        except BadRow as bad:
            raise Refused(400, bad.problem, "messages") from None
        except ValueError as error:
            raise Refused(400, str(error), "messages") from None

    def _is_ended(self, turn: AgentTurn) -> bool:
        """Whether a completion has its end token; that of one that was cut is the template's."""
        return turn.drawn.tokens[-1] in self.request.sampling.stop

    def _room(self, before: AgentTurn | None, prompt: Sequence[int]) -> int:
        """How many tokens may be drawn after a prompt."""
        first = len(prompt) if before is None else len(before.path[0].drawn.prompt)
        room = self.limits.tokens - (len(prompt) - first)
        if self.context is not None:
            room = min(room, self.context - len(prompt))
        return min(room, self.request.sampling.max_tokens)

    def _request(self, prompt: list[int], max_tokens: int, depth: int) -> Request:
        """One completion, whose seed no other one of the conversation has.

        Args:
            depth: how many turns its prompt has.
        """
        name = hashlib.sha256(",".join(map(str, prompt)).encode()).hexdigest()
        times = self._times[name]
        self._times[name] += 1
        key = hashlib.sha256(f"{self.request.key},{name},{times}".encode()).digest()[:7]
        return replace(
            self.request,
            prompt=prompt,
            indices=[self.index],
            sampling=replace(self.request.sampling, max_tokens=max_tokens),
            key=int.from_bytes(key),
            turn=depth,
        )


def _suffix(turns: ChatTurns, call: ChatCall, length: int) -> list[int] | None:
    """The tokens of the messages after so many; None if the template renders them in another way
    when they stand alone.
    """
    try:
        return turns.suffix(call.messages[length:])
    except ValueError:
        return None


def _key(tools: Sequence[object]) -> str:
    return json.dumps(tools, sort_keys=True, default=str)
