"""Turns of the assistant in the text of a chat template, found and proved by rendering.

A turn is what the model generates after the generation prompt, its end token included:

    prompt   render(messages[:i], generation prompt)    what the sampler gives the model
    turn     what render(messages[:i + 1]) adds to it   what the model should answer

    begin    Where the rendering does not continue the default generation prompt, it has to continue
             the prompt of the other setting of `enable_thinking` or `thinking` (Nemotron opens
             <think>, which a reply without reasoning has closed). If it continues none, the turn
             begins right after the assistant's header, and counts as shortened (DeepSeek opens
             <think>, and writes nothing where there is no reasoning).
    content  A template that cuts reasoning out of the very turn it renders (DeepSeek) is given a
             placeholder, and the content takes its place. The proof: the rendering is this text
             with nothing but deletions.
    end      The last special token of the turn, as it stands when another message follows (Phi-3
             ends a text with one more, gpt-oss with another one); or, if the turn has none, the one
             that the next message begins with: GLM's models stop by <|user|> or <|observation|>.
"""

import re
from collections.abc import Callable, Mapping

from .columns import ASSISTANT, REASONING, BadRow, Message, common_prefix

PLACEHOLDER = "PLACEHOLDER5C1F"  # which no conversation has
ADVICE = (
    "pass a chat template with {% generation %} ... {% endgeneration %} around all that the assistant writes, end "
    "token included; or give each reply a row of its own, in the columns prompt and completion; or train on all tokens"
)


def find_begin(
    render: Callable[..., str],
    messages: list[Message],
    text: str,
    modes: list[dict[str, bool]],
) -> tuple[int, bool]:
    """Find where the last message, the assistant's, begins in the text of messages.

    Args:
        render: ``render(messages, generation_prompt=False, **mode)`` is the chat template.
        text: the `full_text` of messages.
        modes: other arguments of the template to try for the generation prompt.

    Returns:
        The index in ``text``, and whether the generation prompt loses its end to the message.

    Raises:
        BadRow: if it can't be proved.
    """
    history = messages[:-1]
    for mode in ({}, *modes):
        prompt = render(history, generation_prompt=True, **mode)
        if text.startswith(prompt):
            return len(prompt), False
    begin = render([*history, messages[-1] | {"content": PLACEHOLDER}]).find(PLACEHOLDER)
    # The header before the message has to be the beginning of the generation prompt.
    if begin < 0 or text[:begin] != render(history, generation_prompt=True)[:begin]:
        name = f"message {len(messages)}, the assistant's,"
        problem = (
            f"the chat template renders {name} in another way than the model would generate it"
        )
        raise BadRow("template", f"{problem}, so its tokens can't be told from the rest; {ADVICE}")
    return begin, True


def full_text(render: Callable[..., str], messages: list[Message], text: str) -> str:
    """The ``text`` of messages with all that the last one says.

    Raises:
        BadRow: if the template leaves out its reasoning or a tool call.
    """
    history = messages[:-1]
    message = messages[-1]
    content = message.get("content") or ""
    for part, without in _without_parts(message).items():
        try:
            is_left_out = render([*history, without]) == text
        except BadRow:  # the template wants the part, so it has written it
            continue
        if is_left_out:
            problem = f"the chat template leaves out {part} of message {len(messages)}"
            raise BadRow("template", f"{problem}; use a template that writes it, or remove it")
    if not _same_but_for_space(content, text):
        with_placeholder = render([*history, message | {"content": PLACEHOLDER}])
        written = with_placeholder.replace(PLACEHOLDER, content)
        if content in written and _is_with_deletions(text, written):
            return written
    return text


def _without_parts(message: Message) -> dict[str, Message]:
    """A message without each of its tool calls, and without its reasoning, by what is missing."""
    calls = message.get("tool_calls") or []
    changes: dict[str, Mapping[str, object]] = {}
    for number in range(len(calls)):
        others = calls[:number] + calls[number + 1 :]
        changes[f"tool call {number + 1}"] = {"tool_calls": others}
    if any(message.get(name) for name in REASONING):
        changes["the reasoning"] = dict.fromkeys(REASONING)
    without = {}
    for part, change in changes.items():
        # templates ask whether a key is defined, so those that are empty go; the content is needed
        kept = {name: value for name, value in {**message, **change}.items() if value}
        without[part] = {"content": "", **kept}
    return without


def _same_but_for_space(content: str, text: str) -> bool:
    """True if a text has the content, whatever the template did with its white space."""
    return "".join(content.split()) in "".join(text.split())


def _is_with_deletions(text: str, written: str) -> bool:
    """True if a text is the written one, of which characters were deleted and nothing else."""
    characters = iter(written)  # `in` reads on to the character, so their order counts
    return all(character in characters for character in text)


def check_roles(render: Callable[..., str], messages: list[Message], text: str) -> None:
    """Refuse a template whose ``text`` leaves out the messages of a role, such as tool."""
    suspects = set()
    for message in messages:
        role = message["role"]
        is_missing = (message.get("content") or "").strip() not in text
        # Tools and developers are what templates leave out, and what they say may be in the text by
        # chance ("4"). Others are tried if it is not: a rendering costs time.
        if role in ("tool", "developer") or (role != ASSISTANT and is_missing):
            suspects.add(role)
    for role in sorted(suspects):
        changed = []
        for message in messages:
            is_of_role = message["role"] == role
            changed.append(message | {"content": PLACEHOLDER} if is_of_role else message)
        if render(changed) == text:
            problem = f"the chat template leaves out messages of the role {role}"
            raise BadRow("template", f"{problem}; use another")


def through_end(
    render: Callable[..., str],
    messages: list[Message],
    text: str,
    begin: int,
    stops: re.Pattern[str],
    full: str,
) -> str:
    """The text without what follows the end token of the last turn; all of it if there is none.

    Args:
        begin: where the turn begins in the text.
        stops: matches a token that may end a turn.
        full: the text of these and all later messages.
    """
    turn = text.rstrip()
    content = (messages[-1].get("content") or "").strip()
    ends = list(stops.finditer(turn, begin))
    is_ended = bool(ends) and ends[-1].end() == len(turn)
    if is_ended and full.startswith(turn) and full != text:
        return turn  # it stands so where others do follow
    try:
        after = render([*messages, _next_message(messages[-1])])
    except BadRow:
        return turn  # nothing may follow
    if not is_ended:
        return turn + _borrowed_end(render, messages[:-1], turn, after, stops)
    if content and not after.startswith(turn):
        # The end belongs to a text that stops here. The turn's own is the last behind the content
        # that stays when another message follows.
        shared = common_prefix(turn, after)
        written = text.rfind(content, begin, shared)
        for end in reversed(ends):
            if 0 <= written < end.start() and end.end() <= shared:
                return text[: end.end()]
    return turn


def _next_message(message: Message) -> Message:
    """A message that may follow the assistant's: a tool's result if it calls one, or a user's."""
    if not message.get("tool_calls"):
        return {"role": "user", "content": PLACEHOLDER}
    call = message["tool_calls"][0]
    return {
        "role": "tool",
        "content": PLACEHOLDER,
        "name": call["function"].get("name"),
        "tool_call_id": call.get("id"),
    }


def _borrowed_end(
    render: Callable[..., str],
    history: list[Message],
    turn: str,
    after: str,
    stops: re.Pattern[str],
) -> str:
    """The token with which the message after a turn begins, if the turn has no end of its own.

    Args:
        after: the text with another message behind the turn.
    """
    header = render(history, generation_prompt=True)[len(render(history)) :]
    last_line = turn.rsplit("\n", 1)[-1]
    for match in reversed(list(stops.finditer(after, 0, after.rfind(PLACEHOLDER) + 1))):
        upto = after[: match.start()].rstrip()
        # the assistant's header would begin a turn, and end none
        if upto.endswith(last_line) and match.group() not in header:
            return after[len(upto) : match.end()]
    return ""
