"""The completions of a conversation as a tree, and its branches as contexts to train on.

    prompt ── completion ── suffix ── completion ── suffix ── completion        one context
                       └─── suffix ── completion                                another one

What two contexts share is trained in the first of them alone.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...data.columns import Message
from ..rollouts.sample import Context, Sample, VersionSpan
from .chat import canonical


@dataclass(eq=False)
class AgentTurn:
    """A completion, and the one that it follows.

    Attributes:
        before: the turn that it continues; None if it begins a context.
        given: the tokens between that turn and this one, or the prompt.
        messages: what they say.
        reply: the completion, as the client is told it.
        received: whether a client was told.
    """

    before: "AgentTurn | None"
    given: list[int]
    messages: list[Message]
    drawn: Sample
    reply: Message
    received: bool = False

    @property
    def path(self) -> "list[AgentTurn]":
        """The turns of its context up to this one."""
        turns = [self]
        while turns[-1].before is not None:
            turns.append(turns[-1].before)
        return turns[::-1]

    @property
    def tokens(self) -> list[int]:
        """All tokens of its context up to its own last one."""
        return [*self.drawn.prompt, *self.drawn.tokens]


class Tree:
    """The turns of a conversation, in the order in which they were drawn."""

    def __init__(self) -> None:
        self.turns: list[AgentTurn] = []
        self._ended_by: dict[str, AgentTurn] = {}  # digest of messages: the turn that they end with

    def add(self, turn: AgentTurn, tools: str, messages: Sequence[Message]) -> None:
        """Append a turn.

        Args:
            tools: that were described to the policy.
            messages: all that it has answered.
        """
        self.turns.append(turn)
        *_, digest = _digests(tools, [*messages, turn.reply])
        self._ended_by.setdefault(digest, turn)

    def longest_known(
        self, tools: str, messages: Sequence[Message]
    ) -> tuple[AgentTurn | None, int]:
        """The turn that ends the longest known beginning of messages, and the length of that.

        At least one message follows it.
        """
        found: tuple[AgentTurn | None, int] = (None, 0)
        for length, digest in enumerate(_digests(tools, messages[:-1]), 1):
            if digest in self._ended_by:
                found = self._ended_by[digest], length
        return found

    def kept(self) -> list[AgentTurn]:
        """The turns that a client was told of, or that another such turn continues."""
        told: set[AgentTurn] = set()
        for turn in self.turns:
            if turn.received:
                told.update(turn.path)
        return [turn for turn in self.turns if turn in told]

    def branches(self) -> list[list[AgentTurn]]:
        """The path of every turn that none continues, in the order in which they began."""
        kept = self.kept()
        followed = {turn.before for turn in kept}
        order = {turn: number for number, turn in enumerate(kept)}
        paths = [turn.path for turn in kept if turn not in followed]
        return sorted(paths, key=lambda path: [order[turn] for turn in path])

    def contexts(self) -> list[Context]:
        trained: set[AgentTurn] = set()
        contexts = []
        for branch in self.branches():
            contexts.append(_context(branch, trained))
            trained.update(branch)
        return contexts

    def messages(self) -> list[Message]:
        """What was said in the first context, from the policy's first reply on."""
        said: list[Message] = []
        for turn in next(iter(self.branches()), []):
            if said:
                said += turn.messages
            said.append(turn.reply)
        return said


def _digests(tools: str, messages: Sequence[Message]) -> Iterator[str]:
    """A digest of the first message, of the first two, and so on."""
    digest = tools
    for message in messages:
        digest = hashlib.sha256(f"{digest}\n{canonical(message)}".encode()).hexdigest()
        yield digest


def _context(branch: Sequence[AgentTurn], trained: set[AgentTurn]) -> Context:
    """A branch as one sequence, whose prompt ends where the first turn that is not trained yet
    begins.
    """
    new = [turn for turn in branch if turn not in trained]
    context = Context(list(new[0].drawn.prompt), [], [], [], [])
    for turn in new:
        if turn is not new[0]:
            context.tokens += turn.given
            context.trained += [False] * len(turn.given)
            context.logprobs += [0.0] * len(turn.given)
        start = len(context.tokens)
        context.tokens += turn.drawn.tokens
        context.trained += turn.drawn.trained
        context.logprobs += turn.drawn.logprobs
        context.spans += [
            VersionSpan(version, start + first, start + end)
            for version, first, end in turn.drawn.spans
        ]
    return context
