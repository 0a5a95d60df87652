"""Layouts: which columns hold the prompt and the answers, and what a well-formed row of each looks like.

    supervised   prompt, completion | messages | conversations | text
    preference   prompt, chosen, rejected | chosen, rejected (they share their beginning, which is the prompt)

Names and meanings are TRL's. A value is plain (text) or conversational (a list of {role, content}).
"""

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]
Value = str | list[Message]  # plain or conversational
Layout = tuple[str, ...]

SUPERVISED: tuple[Layout, ...] = (("prompt", "completion"), ("messages",), ("conversations",), ("text",))
PREFERENCE: tuple[Layout, ...] = (("prompt", "chosen", "rejected"), ("chosen", "rejected"))
TEXT_COLUMNS = frozenset({"prompt", "completion", "chosen", "rejected", "text"})
OPTION_COLUMNS = ("tools", "chat_template_kwargs")

ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}


class BadRow(ValueError):
    """A row that can't be trained on: its kind, for counting, and what to say about it."""

    def __init__(self, kind: str, problem: str) -> None:
        super().__init__(kind, problem)
        self.kind, self.problem = kind, problem

    def __str__(self) -> str:
        return self.problem


@dataclass(frozen=True)
class Row:
    """A prompt and the answers to it. ``prompt`` is None where one value holds everything: `messages`, `text`."""

    prompt: Value | None
    completions: tuple[Value, ...]
    template_options: Mapping[str, Any] = field(default_factory=dict)


def find_layout(columns: Sequence[str], accepted: Sequence[Layout]) -> Layout:
    """The first accepted layout whose columns are all there.

    Raises:
        ValueError: if there is none, or if the rows carry images.
    """
    for name in ("images", "image"):
        if name in columns:
            raise ValueError(f"column '{name}': burnish trains on text only; remove the column to train without images")
    for layout in accepted:
        if set(layout) <= set(columns):
            return layout
    wanted = " or ".join("(" + ", ".join(layout) + ")" for layout in accepted)
    message = f"found the columns ({', '.join(columns)}), wanted {wanted}"
    if set(PREFERENCE[1]) <= set(columns):
        message += "; these are preference pairs, for a recipe such as dpo"
    elif any(set(layout) <= set(columns) for layout in SUPERVISED):
        message += "; these are demonstrations, for a recipe such as sft"
    for name in sorted({name for layout in accepted for name in layout} - set(columns)):
        near = difflib.get_close_matches(name, columns, n=1, cutoff=0.75)
        if near:
            message += f"; should '{near[0]}' be '{name}'?"
    raise ValueError(message)


def read_row(record: Mapping[str, Any], layout: Layout) -> Row:
    """Check a record, and take it apart into prompt and answers.

    Raises:
        BadRow: if a field is missing, is neither text nor messages, is empty, or has its roles in a wrong order.
    """
    options = _template_options(record)
    values = {name: _value(record, name) for name in layout}
    if layout[0] in ("messages", "conversations", "text"):
        (value,) = values.values()
        if layout == ("text",) and not isinstance(value, str):
            raise BadRow("not text", "'text' is a list; name the column 'messages' if it holds messages")
        if layout != ("text",) and isinstance(value, str):
            raise BadRow(
                "not text",
                f"'{layout[0]}' is text, wanted a list of {{role, content}}; name the column 'text' if it is plain",
            )
        if isinstance(value, list):
            _check_answers(layout[0], [], value)
        return Row(None, (value,), options)
    prompt = values.pop("prompt", None)
    if prompt is None or (
        isinstance(prompt, str) and all(isinstance(v, list) for v in values.values()) and len(values) > 1
    ):
        # A plain prompt beside conversational answers repeats what the answers begin with.
        prompt, values = _split_shared(values)
    if prompt == []:
        raise BadRow("no prompt", "'prompt' has no messages; give it at least one")
    if len({type(value) for value in (prompt, *values.values())}) > 1:
        kinds = ", ".join(f"'{name}' is {_kind(value)}" for name, value in {"prompt": prompt, **values}.items())
        raise BadRow("mixed", f"{kinds}; give all of them as text or all as messages")
    for name, value in values.items():
        _check_answers(name, prompt, value)
    if len(values) > 1 and values["chosen"] == values["rejected"]:
        raise BadRow("identical", "'chosen' and 'rejected' are identical, so there is no preference; remove the row")
    return Row(prompt, tuple(values.values()), options)


def _value(record: Mapping[str, Any], name: str) -> Value:
    value = record.get(name)
    if value is None:
        raise BadRow("missing", f"'{name}' is missing; fill it in or remove the row")
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return [_message(message, name, number) for number, message in enumerate(value, 1)]
    raise BadRow(
        "not text",
        f"'{name}' is {_kind(value)}, wanted text or a list of {{role, content}}; convert it or remove the row",
    )


def _message(record: Any, name: str, number: int) -> Message:
    at = f"'{name}' message {number}"
    if not isinstance(record, Mapping):
        raise BadRow("not text", f"{at} is {_kind(record)}, wanted {{role, content}}; convert it or remove the row")
    # Arrow gives every message the keys of all others.
    message: Message = {key: value for key, value in record.items() if value is not None}
    if "from" in message and "role" not in message:
        role = message.pop("from")
        message = {"role": SHAREGPT_ROLES.get(role, role), "content": message.pop("value", None), **message}
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise BadRow("roles", f"{at} has the role {role!r}, wanted one of {', '.join(ROLES)}; rename it")
    if content is None and not message.get("tool_calls"):
        raise BadRow("missing", f"{at} has no content; fill it in or remove the row")
    if content is not None and not isinstance(content, str):
        raise BadRow("not text", f"the content of {at} is {_kind(content)}, wanted text; convert it or remove the row")
    return message


def _check_answers(name: str, prompt: Value, value: Value) -> None:
    if isinstance(value, str):
        if not value:
            raise BadRow("empty", f"'{name}' is empty; fill it in or remove the row")
        return
    messages = [*prompt, *value]
    if not value:
        raise BadRow("empty", f"'{name}' has no messages; fill it in or remove the row")
    if any(message["role"] in ("system", "developer") for message in messages[1:]):
        raise BadRow("roles", f"'{name}': a system message comes later than first; move it to the start")
    roles = [message["role"] for message in value]
    if "assistant" not in roles:
        raise BadRow(
            "roles", f"'{name}' has no assistant message, so there is nothing to learn; add it or remove the row"
        )
    if roles[-1] != "assistant":
        raise BadRow(
            "roles", f"'{name}' ends with a {roles[-1]} message, wanted the assistant's; remove what is unanswered"
        )
    if prompt and roles[0] != "assistant":
        raise BadRow(
            "roles", f"'{name}' begins with a {roles[0]} message, wanted the assistant's; move it to the prompt"
        )
    if messages[0]["role"] == "assistant":
        raise BadRow(
            "roles", f"'{name}' begins with the assistant, wanted a prompt before it; add one or remove the row"
        )
    for number, message in enumerate(value, 1):
        if message["role"] == "assistant" and not any(
            message.get(key) for key in ("content", "tool_calls", "reasoning_content", "thinking")
        ):
            raise BadRow("empty", f"'{name}' message {number} is empty; fill it in or remove the row")


def _split_shared(values: Mapping[str, Value]) -> tuple[Value, dict[str, Value]]:
    """The prompt that chosen and rejected share: whole messages, or characters up to a space, as TRL splits them."""
    chosen, rejected = values["chosen"], values["rejected"]
    if type(chosen) is not type(rejected):
        raise BadRow(
            "mixed", f"'chosen' is {_kind(chosen)}, 'rejected' is {_kind(rejected)}; give both in the same form"
        )
    if chosen == rejected:
        raise BadRow("identical", "'chosen' and 'rejected' are identical, so there is no preference; remove the row")
    shorter = min(len(chosen), len(rejected))
    shared = next((i for i in range(shorter) if chosen[i] != rejected[i]), None)
    if shared is None:  # one is the beginning of the other: leave it something
        shared = max(shorter - 1, 0)
    elif shared and chosen[shared - 1] == " ":
        shared -= 1
    if not shared:
        raise BadRow(
            "no prompt", "'chosen' and 'rejected' share no beginning; give the 'prompt' in a column of its own"
        )
    return chosen[:shared], {"chosen": chosen[shared:], "rejected": rejected[shared:]}


def _template_options(record: Mapping[str, Any]) -> dict[str, Any]:
    tools, options = record.get("tools"), record.get("chat_template_kwargs") or {}
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except json.JSONDecodeError as error:
            raise BadRow("not text", f"'tools' is not JSON: {error}; fix it or remove the row") from None
    if tools is not None and not isinstance(tools, list):
        raise BadRow("not text", f"'tools' is {_kind(tools)}, wanted a list of JSON schemas; convert it")
    if not isinstance(options, Mapping):
        raise BadRow(
            "not text", f"'chat_template_kwargs' is {_kind(options)}, wanted a mapping of names to values; convert it"
        )
    return {"tools": tools or None, **{key: value for key, value in options.items() if value is not None}}


def _kind(value: Any) -> str:
    names = {str: "text", list: "a list", dict: "a mapping", type(None): "missing", bool: "true or false"}
    return names.get(type(value), f"a number ({value!r})" if isinstance(value, int | float) else type(value).__name__)
