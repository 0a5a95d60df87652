"""The tokens between the turns of a conversation.

    prompt + completion + suffix + completion + suffix + ...

The prompt is rendered from messages once. What was sampled stays as it is, and is never rendered or
tokenized again. A suffix closes the assistant's turn, holds the environment's messages, and opens
the next turn; it is the common end of the renderings of two conversations that differ in the
assistant's completion alone.
"""

from collections.abc import Mapping, Sequence

from ...data.chat import Encoder
from ...data.columns import BadRow, Message, common_prefix

_OPENING: Message = {"role": "user", "content": "Ready?"}
_REPLIES = ("yes", "no")


class ChatTurns:
    """Turns under a tokenizer's chat template.

    Args:
        options: further arguments of the template, such as ``tools``.

    Raises:
        ValueError: if the template can't be followed turn by turn: it ends the assistant's message
            without an end token, or renders the beginning of a conversation in another way when
            more follows.
    """

    def __init__(self, encoder: Encoder, options: Mapping[str, object] | None = None) -> None:
        self.encoder = encoder
        self.options = options or {}
        self._opening = self.prompt([_OPENING])
        self._checked_roles: set[str] = set()
        # the token that ends the assistant's turn
        self.end = self.suffix([{"role": "user", "content": "Go on."}])[0]

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        text = self.encoder.render(list(messages), generation_prompt=True, options=self.options)
        return self.encoder.bare(text)

    def suffix(self, messages: Sequence[Message]) -> list[int]:
        """From the assistant's end token to where the next completion begins.

        Raises:
            ValueError: if the template refuses these messages or leaves them out, as some do with
                the role "tool".
        """
        for role in {str(message["role"]) for message in messages} - self._checked_roles:
            try:
                first = self._common_end([{"role": role, "content": "a"}])
                second = self._common_end([{"role": role, "content": "b"}])
            except BadRow as bad:  # gpt-oss wants a tool's result after the call alone
                raise ValueError(
                    f"turns: role {role}: {bad}; say it as 'user' (tools: {{role: user}})"
                ) from None
            if first == second:
                raise ValueError(
                    f"turns: the chat template leaves out messages of the role {role}; say it as 'user'"
                )
            self._checked_roles.add(role)
        return self._common_end(messages)

    def _after(self, reply: str, messages: Sequence[Message]) -> list[int]:
        """The tokens of a conversation in which the assistant gives a reply and these messages
        follow.
        """
        return self.prompt([_OPENING, {"role": "assistant", "content": reply}, *messages])

    def _common_end(self, messages: Sequence[Message]) -> list[int]:
        first = self._after(_REPLIES[0], messages)
        second = self._after(_REPLIES[1], messages)
        # The common end: what is the same after "yes" and after "no" does not depend on a reply.
        shared = common_prefix(first[::-1], second[::-1])
        answered = first[: len(first) - shared]
        suffix = first[len(first) - shared :]
        start = len(self._opening)
        text = str(self.encoder.tokenizer.decode(answered[start:], skip_special_tokens=True))
        if first[:start] != self._opening or not text.strip().endswith(_REPLIES[0]):
            raise ValueError(
                "turns: the chat template renders the beginning of a conversation in another way when more follows, so "
                "what was sampled would stand where the model has never seen it; use a template whose generation "
                "prompt is what it renders before a completion, or end the conversation after one turn"
            )
        ends = [position for position, token in enumerate(suffix) if token in self.encoder.special]
        end = ends[0] if ends else None
        if end is None or str(self.encoder.tokenizer.decode(suffix[:end])).strip():
            raise ValueError(
                "turns: the chat template ends the assistant's message without an end token, so nothing says where a "
                "turn ends; use a template that writes one"
            )
        return suffix[end:]
