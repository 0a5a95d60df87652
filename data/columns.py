"""Layouts: which columns hold the prompt and the answers, and what a well-formed row of each looks like.

    supervised   prompt, completion | messages | conversations | text
    preference   prompt, chosen, rejected | chosen, rejected (they share their beginning, which is the prompt)
    feedback     prompt, completion, label (true or false) | those of preference
    steps        prompt, completions (the steps of one solution), labels (of each step)
    scores       prompt, completion, score
    ranking      prompt, completions (several answers), ranks (of each answer, 0 the best)
    prompts      prompt, to be answered by the policy; all other columns are for whoever judges its answers

Names and meanings are TRL's, where it has them. A value is plain (text) or conversational (a list of {role, content});
a step is plain.
"""

import difflib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]
Value = str | list[Message]  # plain or conversational
Layout = tuple[str, ...]

SUPERVISED: tuple[Layout, ...] = (("prompt", "completion"), ("messages",), ("conversations",), ("text",))
PREFERENCE: tuple[Layout, ...] = (("prompt", "chosen", "rejected"), ("chosen", "rejected"))
FEEDBACK: tuple[Layout, ...] = (("prompt", "completion", "label"), *PREFERENCE)
STEPS: tuple[Layout, ...] = (("prompt", "completions", "labels"),)
SCORES: tuple[Layout, ...] = (("prompt", "completion", "score"),)
RANKING: tuple[Layout, ...] = (("prompt", "completions", "ranks"),)
PROMPTS: tuple[Layout, ...] = (("prompt",),)
SOLUTION: Layout = ("prompt", "completions")  # steps that are still to be judged

JUDGMENTS = ("label", "labels", "score", "ranks")
RECIPES: tuple[tuple[Layout, str], ...] = (
    (PREFERENCE[1], "preference pairs, for a recipe such as dpo, kto or reward"),
    (FEEDBACK[0], "answers with labels, for a recipe such as kto"),
    (STEPS[0], "steps with labels, for a recipe such as prm"),
    (SCORES[0], "answers with scores, for a recipe such as reward"),
    (RANKING[0], "ranked answers, for a recipe such as reward"),
    *((layout, "demonstrations, for a recipe such as sft") for layout in SUPERVISED),
)
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
    """A prompt and the answers to it, or the steps of one answer, and what the row says about them.

    ``prompt`` is None where one value holds everything: `messages`, `text`. ``judgment`` is a bool for `label`, a float
    for `score`, and one number per answer or step for `ranks` and `labels`.
    """

    prompt: Value | None
    completions: tuple[Value, ...]
    template_options: Mapping[str, Any] = field(default_factory=dict)
    judgment: Any = None


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
    message += next((f"; these are {what}" for layout, what in RECIPES if set(layout) <= set(columns)), "")
    for name in sorted({name for layout in accepted for name in layout} - set(columns)):
        near = difflib.get_close_matches(name, columns, n=1, cutoff=0.75)
        if near:
            message += f"; should '{near[0]}' be '{name}'?"
    raise ValueError(message)


def read_row(record: Mapping[str, Any], layout: Layout) -> Row:
    """Check a record, and take it apart into prompt, answers and judgment.

    Raises:
        BadRow: if a field is missing, is neither text nor messages, is empty, or has its roles in a wrong order; or if
            the judgment is no such thing, or judges another number of answers.
    """
    options = _template_options(record)
    values = {name: _value(record.get(name), name) for name in layout if name not in ("completions", *JUDGMENTS)}
    several = _several(record.get("completions")) if "completions" in layout else []
    judgment = _judgment(record.get(layout[-1]), layout[-1], len(several)) if layout[-1] in JUDGMENTS else None
    if values.get("prompt") == []:
        raise BadRow("no prompt", "'prompt' has no messages; give it at least one")
    if layout in (SOLUTION, *STEPS):
        return Row(values["prompt"], _steps(several), options, judgment)
    values |= {f"completions {number}": _value(v, f"completions {number}") for number, v in enumerate(several, 1)}
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
    if layout in PROMPTS:
        assert prompt is not None
        _check_question(prompt)
    if prompt is None or (
        isinstance(prompt, str) and all(isinstance(v, list) for v in values.values()) and "chosen" in values
    ):
        # A plain prompt beside conversational answers repeats what the answers begin with.
        prompt, values = _split_shared(values)
    if len({type(value) for value in (prompt, *values.values())}) > 1:
        kinds = ", ".join(f"'{name}' is {_kind(value)}" for name, value in {"prompt": prompt, **values}.items())
        raise BadRow("mixed", f"{kinds}; give all of them as text or all as messages")
    for name, value in values.items():
        _check_answers(name, prompt, value)
    if "chosen" in values and values["chosen"] == values["rejected"]:
        raise BadRow("identical", "'chosen' and 'rejected' are identical, so there is no preference; remove the row")
    return Row(prompt, tuple(values.values()), options, judgment)


def read_number(value: Any, name: str) -> float:
    """A finite number.

    Raises:
        BadRow: if it is missing, NaN, infinite, or no number.
    """
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise BadRow(f"bad {name}", f"'{name}' is {_shown(value)}, wanted a finite number; fix it or remove the row")
    return float(value)


def _judgment(value: Any, name: str, count: int) -> Any:
    """What a row says about its ``count`` answers or steps."""
    if name == "score":
        return read_number(value, name)
    if name == "label":
        if not isinstance(value, bool):
            raise BadRow("bad label", f"'label' is {_shown(value)}, wanted true or false; convert it or remove the row")
        return value
    of = "step" if name == "labels" else "answer"
    if not isinstance(value, list):
        raise BadRow(f"bad {name}", f"'{name}' is {_kind(value)}, wanted a list with one for each {of}; convert it")
    if len(value) != count:
        raise BadRow(
            f"bad {name}",
            f"'completions' has {count} {of}s and '{name}' has {len(value)}; give each {of} one, or remove the row",
        )
    if name == "ranks":
        if not all(type(rank) in (int, float) for rank in value) or sorted(value) != list(range(count)) or count < 2:
            raise BadRow(
                "bad ranks",
                f"'ranks' is {value}, wanted each of 0 (best), 1, ... once, for at least two answers; break ties, "
                "number them so, or remove the row",
            )
        return [int(rank) for rank in value]  # where one row has a fraction, Arrow makes floats of all
    for number, label in enumerate(value, 1):
        if not isinstance(label, int | float) or not 0 <= label <= 1:
            raise BadRow(
                "bad labels",
                f"label {number} of 'labels' is {_shown(label)}, wanted true, false, or a probability in [0, 1] that "
                "the step is right; convert it or remove the row",
            )
    return [float(label) for label in value]


def _several(answers: Any) -> list[Any]:
    if not isinstance(answers, list):
        raise BadRow("not text", f"'completions' is {_kind(answers)}, wanted a list; convert it or remove the row")
    if not answers:
        raise BadRow("empty", "'completions' is an empty list; fill it in or remove the row")
    return answers


def _steps(steps: list[Any]) -> tuple[str, ...]:
    for number, step in enumerate(steps, 1):
        at = f"step {number} of 'completions'"
        if not isinstance(step, str):
            raise BadRow("not text", f"{at} is {_kind(step)}, wanted text; convert it or remove the row")
        if not step.strip():
            raise BadRow("empty", f"{at} is empty; remove it and its label, or remove the row")
    return tuple(steps)


def _value(value: Any, name: str) -> Value:
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


def _check_question(prompt: Value) -> None:
    if not prompt:
        raise BadRow("no prompt", "'prompt' is empty, so nothing predicts the first token; fill it in")
    if isinstance(prompt, str):
        return
    role, content = prompt[-1]["role"], prompt[-1].get("content") or ""
    if role not in ("user", "tool"):
        raise BadRow(
            "roles",
            f"'prompt' ends with a message of the role {role}, wanted a user's or a tool's, which is to be answered; "
            "add it, or remove what comes after it",
        )
    if role == "user" and not content.strip():
        raise BadRow("empty", f"'prompt' message {len(prompt)}, the user's, is empty; fill it in or remove the row")


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


def _shown(value: Any) -> str:
    return "missing" if value is None else repr(value)


def _kind(value: Any) -> str:
    names = {str: "text", list: "a list", dict: "a mapping", type(None): "missing", bool: "true or false"}
    return names.get(type(value), f"a number ({value!r})" if isinstance(value, int | float) else type(value).__name__)
