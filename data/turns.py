"""Turns of the assistant in the text of a chat template, found and proved by rendering.

A turn is what the model generates after the generation prompt, its end token included:

    prompt   render(messages[:i], generation prompt)    what the sampler gives the model
    turn     what render(messages[:i + 1]) adds to it   what the model should answer

    begin    Where the rendering does not continue the default generation prompt, it has to continue that of the other
             setting of `enable_thinking` or `thinking` (Nemotron opens <think>, which an answer
             without reasoning has closed). If it continues none, the turn begins right after the
             assistant's header, and counts as shortened (DeepSeek opens <think>, and writes nothing
             where there is no reasoning).
    content  A template that cuts reasoning out of the very turn it renders (DeepSeek) is given a placeholder, and the
             content takes its place. The proof: the rendering is this text with nothing but
             deletions.
    end      The last special token of the turn, as it stands when another message follows (Phi-3 ends a text with one
             more, gpt-oss with another one); or, if the turn has none, the one that the next
             message begins with: GLM's models stop by <|user|> or <|observation|>.
"""

import re
from collections.abc import Callable
from typing import Any

from .columns import ASSISTANT, REASONING, BadRow, Message, common_prefix

PLACEHOLDER = "PLACEHOLDER5C1F"
ADVICE = (
    "pass a chat template with {% generation %} ... {% endgeneration %} around all that the assistant writes, end "
    "token included; or give each answer a row of its own, in the columns prompt and completion; or train on all tokens"
)


def find_begin(
    render: Callable[..., str], messages: list[Message], text: str, modes: list[dict[str, Any]]
) -> tuple[int, bool]:
    """The index in ``text`` where the last message, the assistant's, begins, and whether the
    generation prompt goes on there; BadRow if it can't be proved.

    ``render(messages, generation_prompt=False, **mode)`` is the chat template, ``text`` the
    `full_text` of messages, and ``modes`` are other arguments of the template to try for the
    generation prompt.
    """
    history, message = messages[:-1], messages[-1]
    prompts = (render(history, generation_prompt=True, **mode) for mode in ({}, *modes))
    begin = next((len(prompt) for prompt in prompts if text.startswith(prompt)), -1)
    shortened = begin < 0
    if shortened:
        begin = render([*history, message | {"content": PLACEHOLDER}]).find(PLACEHOLDER)
        if begin < 0 or text[:begin] != render(history, generation_prompt=True)[:begin]:
            name = f"message {len(messages)}, the assistant's,"
            problem = (
                f"the chat template renders {name} in another way than the model would generate it"
            )
            raise BadRow(
                "template", f"{problem}, so its tokens can't be told from the rest; {ADVICE}"
            )
    return begin, shortened


def full_text(render: Callable[..., str], messages: list[Message], text: str) -> str:
    """The ``text`` of messages with all that the last one says; BadRow if its reasoning or a tool
    call is left out.
    """
    history, message = messages[:-1], messages[-1]
    content, calls = message.get("content") or "", message.get("tool_calls") or []
    parts = {
        f"tool call {i + 1}": {"tool_calls": calls[:i] + calls[i + 1 :]} for i in range(len(calls))
    }
    if any(message.get(name) for name in REASONING):
        parts["the reasoning"] = dict.fromkeys(REASONING)
    for part, changes in parts.items():
        without = {"content": ""} | {
            name: value for name, value in (message | changes).items() if value
        }
        try:
            is_left_out = render([*history, without]) == text
        except BadRow:
            continue
        if is_left_out:
            problem = f"the chat template leaves out {part} of message {len(messages)}"
            raise BadRow("template", f"{problem}; use a template that writes it, or remove it")
    if "".join(content.split()) not in "".join(text.split()):
        written = render([*history, message | {"content": PLACEHOLDER}]).replace(
            PLACEHOLDER, content
        )
        characters = iter(written)
        # nothing but deletions
        if content in written and all(character in characters for character in text):
            return written
    return text


def check_roles(render: Callable[..., str], messages: list[Message], text: str) -> None:
    """Refuse a template whose ``text`` of the messages leaves out those of a role, such as tool or
    developer.
    """
    others = [message for message in messages if message["role"] != ASSISTANT]
    # what they say may be in the text by chance; renderings cost time
    is_short = {"tool", "developer"}
    roles = {
        m["role"]
        for m in others
        if m["role"] in is_short or (m.get("content") or "").strip() not in text
    }
    for role in sorted(roles):
        changed = [m | {"content": PLACEHOLDER} if m["role"] == role else m for m in messages]
        if render(changed) == text:
            raise BadRow(
                "template", f"the chat template leaves out messages of the role {role}; use another"
            )


def through_end(
    render: Callable[..., str],
    messages: list[Message],
    text: str,
    begin: int,
    stops: re.Pattern[str],
    full: str,
) -> str:
    """The text without what follows the end token of the last turn; all of it if there is none.

    ``stops`` matches a token that may end a turn; ``full`` is the text of these and all later
    messages.
    """
    turn, message, content = (
        text.rstrip(),
        messages[-1],
        (messages[-1].get("content") or "").strip(),
    )
    ends = list(stops.finditer(turn, begin))
    is_ended = bool(ends) and ends[-1].end() == len(turn)
    if is_ended and full.startswith(turn) and full != text:
        return turn
    following: Message = {"role": "user", "content": PLACEHOLDER}
    if message.get("tool_calls"):
        call = message["tool_calls"][0]
        following |= {
            "role": "tool",
            "name": call["function"].get("name"),
            "tool_call_id": call.get("id"),
        }
    try:
        after = render([*messages, following])
    except BadRow:
        return turn  # nothing may follow
    if is_ended and (after.startswith(turn) or not content):
        return turn
    if is_ended:
        shared = common_prefix(turn, after)
        written = text.rfind(content, begin, shared)
        return next(
            (text[: m.end()] for m in ends[::-1] if 0 <= written < m.start() and m.end() <= shared),
            turn,
        )
    header = render(messages[:-1], generation_prompt=True)[len(render(messages[:-1])) :]
    for match in reversed(list(stops.finditer(after, 0, after.rfind(PLACEHOLDER) + 1))):
        upto = after[: match.start()].rstrip()
        if upto.endswith(turn.rsplit("\n", 1)[-1]) and match.group() not in header:
            return turn + after[len(upto) : match.end()]
    return turn
