"""Column layouts: the columns that hold the prompt and its completions, and the checks of a row of
each.

Names and meanings are TRL's, where it has them. A value is plain (text) or conversational (a list
of {role, content}, where the content may be a list of {type: text, text}; ShareGPT's {from, value};
or JSON); a step is plain. Beside any of them a conversation may have columns `tools`,
`chat_template_kwargs`, and `system_prompt`, its first message.
"""

import difflib
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Message = dict[str, Any]
PlainOrChat: TypeAlias = str | list[Message]

SUPERVISED = (("prompt", "completion"), ("messages",), ("conversations",), ("text",))
# the two share their beginning, the prompt
PREFERENCE = (("prompt", "chosen", "rejected"), ("chosen", "rejected"))
UNPAIRED = (("prompt", "completion", "label"), *PREFERENCE)  # true or false, or 1 or 0
# the steps of one solution, and the label of each
STEPWISE = (("prompt", "completions", "labels"),)
SCORES = (("prompt", "completion", "score"),)
RANKING = (("prompt", "completions", "ranks"),)  # of each completion, 0 the best
PROMPTS = (("prompt",),)  # which the policy completes; all other columns are for rewards
SOLUTION = ("prompt", "completions")  # steps without labels

ANNOTATIONS = ("label", "labels", "score", "ranks")
RECIPES: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        PREFERENCE[1],
        "preference pairs, for a recipe such as dpo or kto, or reward with --loss bradley_terry",
    ),
    (UNPAIRED[0], "completions with labels, for a recipe such as kto"),
    (STEPWISE[0], "steps with labels, for a recipe such as prm"),
    (SCORES[0], "completions with scores, for reward with --loss score_regression"),
    (RANKING[0], "ranked completions, for reward with --loss plackett_luce"),
    *((layout, "demonstrations, for a recipe such as sft") for layout in SUPERVISED),
)
TEXT_COLUMNS = frozenset({"prompt", "completion", "chosen", "rejected", "text"})
OPTION_COLUMNS = ("tools", "chat_template_kwargs", "system_prompt")
LAYOUT_COLUMNS = frozenset(OPTION_COLUMNS).union(
    *SUPERVISED, *UNPAIRED, *STEPWISE, *SCORES, *RANKING
)
ALIASES = {  # of a column, by what many datasets call it; Alpaca's two are joined, and Dolly's
    "prompt": [
        "instruction input",
        "instruction context",
        "instruction",
        "question",
        "problem",
        "query",
        "messages",
    ],
    "completion": ["output", "response", "answer", "answers", "solution"],
    "text": ["chat"],
}

ASSISTANT = "assistant"
ROLES = ("system", "developer", "user", ASSISTANT, "tool")
SHAREGPT_ROLES = {  # and OpenAI's, before there were tool calls
    **{"human": "user", "gpt": ASSISTANT, "chatgpt": ASSISTANT, "function_call": ASSISTANT},
    **dict.fromkeys(("observation", "function_response", "function"), "tool"),
}
REASONING = ("reasoning_content", "thinking", "reasoning")


class BadRow(ValueError):
    """A row that can't be trained on: its kind, for counting, the problem, for the message, and its
    index if known.
    """

    def __init__(self, kind: str, problem: str, row: int | None = None) -> None:
        super().__init__(kind, problem, row)
        self.kind, self.problem, self.row = kind, problem, row

    def __str__(self) -> str:
        return self.problem


@dataclass(frozen=True)
class ParsedRow:
    """A prompt and its completions, or the steps of one completion, and their annotation.

    An assistant message {role, content} may have ``train``, as in axolotl's data (`weight` in
    OpenAI's). ``prompt`` is None where one value holds everything: `messages`, `text`.
    ``annotation`` is a bool for `label`, a float for `score`, and one number per completion or step
    for `ranks` and `labels`. ``keeps_system``: it has another system message than the one that all
    rows were to get.
    """

    prompt: PlainOrChat | None
    completions: tuple[PlainOrChat, ...]
    template_options: Mapping[str, Any] = field(default_factory=dict)
    annotation: Any = None
    keeps_system: bool = False


def find_layout(columns: Sequence[str], accepted: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """The first accepted layout whose columns are all there.

    Raises:
        ValueError: if there is none, or if the rows carry images.
    """
    for name in ("images", "image"):
        if name in columns:
            raise ValueError(
                f"column '{name}': burnish trains on text only; remove the column to train without images"
            )
    for layout in accepted:
        if set(layout) <= set(columns):
            return layout
    wanted = " or ".join("(" + ", ".join(layout) + ")" for layout in accepted)
    message = f"found the columns ({', '.join(columns)}), wanted {wanted}"
    for layout, rows in RECIPES:
        if set(layout) <= set(columns):
            message += f"; these are {rows}"
            break
    for layout in accepted:
        fix = _renaming(layout, columns)
        if fix:
            raise ValueError(f"{message}; {fix}")
    raise ValueError(message + _misspelled(accepted, columns))


def _misspelled(accepted: Sequence[tuple[str, ...]], columns: Sequence[str]) -> str:
    """A question for each column that is missing, where one with nearly its name is there."""
    wanted = {name for layout in accepted for name in layout}
    questions = ""
    for name in sorted(wanted - set(columns)):
        near = difflib.get_close_matches(name, columns, n=1, cutoff=0.75)
        if near:
            questions += f"; should '{near[0]}' be '{name}'?"
    return questions


def _renaming(layout: Sequence[str], columns: Collection[str]) -> str:
    """The fix that names columns as a layout does; empty if there is none for each that it
    misses.
    """
    names = []
    for new in layout:
        if new in columns:
            continue
        group = _columns_for(new, columns)
        if not group:
            return ""
        names += [f"{name}: {new}" for name in group]
    return f"to rename columns, give data: {{path: ..., columns: {{{', '.join(names)}}}}}"


def _columns_for(new: str, columns: Collection[str]) -> list[str]:
    """The columns that many datasets have in place of one, the first such alias whose columns are
    all there.
    """
    for alias in ALIASES.get(new, ()):
        group = alias.split()
        if set(group) <= set(columns):
            return group
    return []


def unused_options(
    features: Mapping[str, Any], layout: tuple[str, ...], uses: Callable[[str], bool]
) -> list[str]:
    """The `OPTION_COLUMNS` that plain text does not use, or the template's arguments that the chat
    template ignores.
    """
    texts = [features[name] for name in layout if name in TEXT_COLUMNS]
    if texts and all(getattr(kind, "dtype", "").endswith("string") for kind in texts):
        return [name for name in OPTION_COLUMNS if name in features]
    arguments = features.get("chat_template_kwargs")
    names = arguments if isinstance(arguments, dict) else {}
    return [f"chat_template_kwargs.{name}" for name in names if not uses(name)]


def read_row(
    record: Mapping[str, Any], layout: tuple[str, ...], system_prompt: str = ""
) -> ParsedRow:
    """Check a record, and take it apart into prompt, completions and annotation.

    Args:
        system_prompt: the first message of a conversation that has no system message of its own.

    Raises:
        BadRow: if a field is missing, is neither text nor messages, is empty, or has its roles in a
            wrong order; if the annotation has another type, or is of another number of completions;
            or if two fields contradict each other.
    """
    options = _template_options(record)
    values = _values(record, layout)
    several = _several(record, layout)
    annotation = None
    if layout[-1] in ANNOTATIONS:
        annotation = _annotation(record.get(layout[-1]), layout[-1], len(several))
    if values.get("prompt") == []:
        raise BadRow("no prompt", "'prompt' has no messages; give it at least one")
    if "chosen" in values:
        values = _with_one_prompt(values)
    of_row = str(record.get("system_prompt") or "")
    values, keeps_system = _with_system(values, of_row, system_prompt)
    prompt = values.pop("prompt", None)

    completions: tuple[PlainOrChat, ...]
    if layout in (SOLUTION, *STEPWISE):
        completions = _steps(several)
    elif len(layout) == 1 and prompt is None:
        completions = (_whole_text(values),)
    else:
        for number, value in enumerate(several, 1):
            name = f"completions {number}"
            values[name] = _value(value, name)
        prompt, completions = _prompt_and_completions(record, layout, prompt, values)
    return ParsedRow(prompt, completions, options, annotation, keeps_system)


def _values(record: Mapping[str, Any], layout: tuple[str, ...]) -> dict[str, PlainOrChat]:
    """The texts and conversations of a layout, by their columns."""
    names = [name for name in layout if name not in ("completions", *ANNOTATIONS)]
    return {name: _value(record.get(name), name) for name in names}


def _several(record: Mapping[str, Any], layout: tuple[str, ...]) -> list[Any]:
    """The steps or completions in the column `completions`; empty if the layout has no such
    column.
    """
    if "completions" not in layout:
        return []
    several: Any = _list_of_text(record.get("completions"), "completions")
    _require_type("'completions'", several, list, "a list")
    if not several:
        raise BadRow("empty", "'completions' is an empty list; fill it in or remove the row")
    return list(several)


def _whole_text(values: Mapping[str, PlainOrChat]) -> PlainOrChat:
    """The only value of a row, which holds prompt and completions: a text, or else a
    conversation.
    """
    ((name, value),) = values.items()
    if name == "text" and not isinstance(value, str):
        fix = "; name the column 'messages' if it holds messages"
        raise BadRow("not text", f"'{name}' is {_kind(value)}{fix}")
    if name != "text" and isinstance(value, str):
        fix = ", wanted a list of {role, content}; name the column 'text' if it is plain"
        raise BadRow("not text", f"'{name}' is {_kind(value)}{fix}")
    if isinstance(value, list):
        _check_completion(name, [], value)
    return value


def _prompt_and_completions(
    record: Mapping[str, Any],
    layout: tuple[str, ...],
    prompt: PlainOrChat | None,
    values: dict[str, PlainOrChat],
) -> tuple[PlainOrChat, tuple[PlainOrChat, ...]]:
    """Check a prompt and its completions together; a pair without a prompt is split where the two
    begin to differ.
    """
    if layout in PROMPTS:
        _check_prompt(prompt or "")
    every = values if prompt is None else {"prompt": prompt, **values}
    if len({type(value) for value in every.values()}) > 1:
        kinds = ", ".join(f"'{name}' is {_kind(value)}" for name, value in every.items())
        raise BadRow("mixed", f"{kinds}; give all of them as text or all as messages")
    if "chosen" in values and values["chosen"] == values["rejected"]:
        problem = "'chosen' and 'rejected' are identical, so there is no preference"
        raise BadRow("identical", f"{problem}; remove the row")
    if prompt is None:
        prompt, values = _split_shared(record, values["chosen"], values["rejected"])
    for name, value in values.items():
        _check_completion(name, prompt, value)
    return prompt, tuple(values.values())


def _with_one_prompt(values: dict[str, PlainOrChat]) -> dict[str, PlainOrChat]:
    """A pair whose plain prompt, beside conversations, has become the user's message, or is gone,
    as they begin with it; BadRow if they begin with another one."""
    prompt, chosen, rejected = values.get("prompt"), values["chosen"], values["rejected"]
    if not (isinstance(prompt, str) and isinstance(chosen, list) and isinstance(rejected, list)):
        return values
    if chosen and rejected and chosen[0]["role"] == rejected[0]["role"] == ASSISTANT:
        return {**values, "prompt": [{"role": "user", "content": prompt}]}
    shared = chosen[: common_prefix(chosen, rejected)]
    asked = {_words(message.get("content")) for message in shared if message["role"] == "user"}
    if prompt.strip() and chosen and rejected and _words(prompt) not in asked:
        problem = "'prompt' is no message of the user's that 'chosen' and 'rejected' share"
        fix = "leave it out (data: {path: ..., columns: [chosen, rejected]}), or correct it"
        raise BadRow("contradictory prompt", f"{problem}; {fix}")
    return {"chosen": chosen, "rejected": rejected}


def _words(text: str | None) -> tuple[str, ...]:
    return tuple((text or "").split())


def _with_system(
    values: dict[str, PlainOrChat], of_row: str, of_all: str
) -> tuple[dict[str, PlainOrChat], bool]:
    """Conversations that begin with the system message of their row, or else with the one
    ``of_all`` rows; and whether they keep another one. Plain text gets none.

    Raises:
        BadRow: if a conversation has a system message of its own, and its row has another one.
    """
    if not (of_row or of_all):
        return values, False
    with_system = dict(values)
    keeps = bool(of_row and of_all and of_row != of_all)
    has_chat_prompt = isinstance(values.get("prompt"), list)
    for name in ["prompt"] if has_chat_prompt else list(values):
        value = values[name]
        if not isinstance(value, list):
            continue
        has_own = bool(value) and value[0]["role"] in ("system", "developer")
        if not has_own:
            with_system[name] = [{"role": "system", "content": of_row or of_all}, *value]
        elif of_row and value[0].get("content") != of_row:
            problem = f"'{name}' begins with a {value[0]['role']} message, and 'system_prompt' is another one"
            raise BadRow("roles", f"{problem}; leave one of them out")
        elif value[0].get("content") != of_all:
            keeps |= bool(of_all)
    return with_system, keeps


def without_invented(value: Any, kind: Any) -> Any:
    """Drop the nulls of Arrow, which gives each struct the keys of all. ``kind`` is the feature;
    nulls of JSON stay.
    """
    if isinstance(kind, dict) and isinstance(value, Mapping):
        return {
            name: without_invented(value[name], kind[name])
            for name in kind
            if value[name] is not None
        }
    if isinstance(value, list) and hasattr(kind, "feature"):
        return [without_invented(item, kind.feature) for item in value]
    return value


def read_number(value: Any, name: str) -> float:
    """A finite number, or the text of one, as cells of a CSV are; BadRow if it is missing, NaN,
    infinite, or another value."""
    number = number_of_text(value)
    if not isinstance(number, int | float) or isinstance(number, bool) or not math.isfinite(number):
        raise BadRow(
            f"bad {name}",
            f"'{name}' is {_shown(value)}, wanted a finite number; fix it or remove the row",
        )
    return float(number)


def _annotation(value: Any, name: str, count: int) -> float | bool | list[int] | list[float]:
    """The label or score of a completion, or the labels or ranks of ``count`` steps or
    completions.
    """
    if name == "score":
        return read_number(value, name)
    if name == "label":
        return _label(value)
    several = _one_for_each(value, name, count)
    return _ranks(several) if name == "ranks" else _labels(several)


def _label(value: Any) -> bool:
    number = number_of_text(value)
    if number not in (0, 1) or not isinstance(number, int | float):
        wanted = "wanted true or false (1 or 0); convert it or remove the row"
        raise BadRow("bad label", f"'label' is {_shown(value)}, {wanted}")
    return bool(number)


def _one_for_each(value: Any, name: str, count: int) -> list[Any]:
    """A list with one entry for each of ``count`` steps or completions."""
    kind = f"bad {name}"
    unit = "step" if name == "labels" else "answer"
    several = _list_of_text(value, name)
    if not isinstance(several, list):
        wanted = f"wanted a list with one for each {unit}"
        raise BadRow(kind, f"'{name}' is {_kind(several)}, {wanted}; convert it")
    if len(several) != count:
        counts = f"'completions' has {count} {unit}s and '{name}' has {len(several)}"
        raise BadRow(kind, f"{counts}; give each {unit} one, or remove the row")
    return several


def _ranks(ranks: list[Any]) -> list[int]:
    """Places of completions, 0 the best, without ties."""
    are_numbers = all(type(rank) in (int, float) for rank in ranks)
    if len(ranks) < 2 or not are_numbers or sorted(ranks) != list(range(len(ranks))):
        wanted = "wanted each of 0 (best), 1, ... once, for at least two completions"
        fix = "break ties, number them so, or remove the row"
        raise BadRow("bad ranks", f"'ranks' is {ranks}, {wanted}; {fix}")
    return [int(rank) for rank in ranks]  # where one row has a fraction, Arrow makes floats of all


def _labels(labels: list[Any]) -> list[float]:
    """Probabilities that steps are right."""
    for number, label in enumerate(labels, 1):
        if not isinstance(label, int | float) or not 0 <= label <= 1:
            wanted = "wanted true, false, or a probability in [0, 1] that the step is right"
            found = f"label {number} of 'labels' is {_shown(label)}"
            raise BadRow("bad labels", f"{found}, {wanted}; convert it or remove the row")
    return [float(label) for label in labels]


def _steps(steps: list[Any]) -> tuple[str, ...]:
    for number, step in enumerate(steps, 1):
        at = f"step {number} of 'completions'"
        _require_type(at, step, str, "text")
        if not step.strip():
            raise BadRow("empty", f"{at} is empty; remove it and its label, or remove the row")
    return tuple(steps)


def _value(value: Any, name: str) -> PlainOrChat:
    if value is None:
        raise BadRow("missing", f"'{name}' is missing; fill it in or remove the row")
    if name in ("messages", "conversations") and isinstance(value, str) and value.startswith("["):
        value = _from_json(value, f"'{name}'")
    if isinstance(value, list):
        return [
            _message(message, f"'{name}' message {number}")
            for number, message in enumerate(value, 1)
        ]
    _require_type(f"'{name}'", value, str, "text or a list of {role, content}")
    return str(value)


def _message(record: Any, at: str) -> Message:
    """A message of TRL's, OpenAI's or ShareGPT's as {role, content, ...}, where ``tool_calls`` and
    ``train`` are known.

    Args:
        at: names the message in errors.
    """
    _require_type(at, record, Mapping, "{role, content}")
    # Arrow gives every message the keys of all others.
    message: Message = {key: value for key, value in record.items() if value is not None}
    if "from" in message and "role" not in message:  # ShareGPT
        message = {"role": message.pop("from"), "content": message.pop("value", None), **message}
    sender = message.get("role")
    role = SHAREGPT_ROLES.get(str(sender), sender)
    if role not in ROLES:
        raise BadRow(
            "roles", f"{at} has the role {role!r}, wanted one of {', '.join(ROLES)}; rename it"
        )
    message["role"] = role
    content = message.get("content")
    call = message.pop("function_call", None)
    if sender == "function_call":  # a role of ShareGPT's, whose content is the call
        call = _from_json(content, f"the content of {at}, a function_call,")
        content = None
    calls = message.pop("tool_calls", None)
    if not calls:
        calls = [call] if isinstance(call, Mapping) else call
    _set_content(message, content, calls, at)
    _set_trained(message, at)
    return message


def _set_content(message: Message, content: Any, calls: Any, at: str) -> None:
    """Set text and tool calls of a message.

    Args:
        content: text, a list of parts, or None.
        calls: tool calls, or nothing.
    """
    if content is None and not calls:
        raise BadRow("missing", f"{at} has no content; fill it in or remove the row")
    if isinstance(content, list):
        content = "".join(_text_part(part, f"the content of {at}") for part in content)
        message["content"] = content
    if content is not None:
        _require_type(f"the content of {at}", content, str, "text")
    if calls:
        _require_type(f"'tool_calls' of {at}", calls, list, "a list")
        message["content"] = content or ""
        message["tool_calls"] = [_tool_call(call, at) for call in calls]


def _set_trained(message: Message, at: str) -> None:
    """Set ``train``, which axolotl calls so and OpenAI `weight`, if the message has one of them."""
    given = [name for name in ("train", "weight") if name in message]
    if len(given) == 2 and message["train"] != message["weight"]:
        problem = f"'train' of {at} is {message['train']!r} and its 'weight' {message['weight']!r}"
        raise BadRow("bad train", f"{problem}, which mean the same; remove one of them")
    is_assistant = message["role"] == ASSISTANT
    for name in given:
        train = message.pop(name)
        if train not in (0, 1) or (train and not is_assistant):
            only = f"none, as only the {ASSISTANT} is trained"
            wanted = "true or false (1 or 0)" if is_assistant else only
            raise BadRow(
                f"bad {name}",
                f"'{name}' of {at} is {train!r}, wanted {wanted}; correct or remove it",
            )
        message["train"] = bool(train)


def _text_part(part: Any, at: str) -> str:
    kind = _kind(part)
    if isinstance(part, Mapping):
        if part.get("type") == "text" and isinstance(part.get("text"), str):
            return str(part["text"])
        kind = repr(part.get("type"))
    raise BadRow(
        "not text", f"{at} has a part of the type {kind}, wanted text; convert it or remove the row"
    )


def _tool_call(call: Any, at: str) -> Message:
    """As {type, function: {name, arguments}} with arguments by name, which templates want; OpenAI's
    are JSON.
    """
    _require_type(f"a tool call of {at}", call, Mapping, "a mapping")
    call = call if call.get("function") else {"type": "function", "function": call}
    name = f"'arguments' of a tool call of {at}"
    arguments = _from_json(call["function"].get("arguments"), name) or {}
    _require_type(name, arguments, Mapping, "a mapping of names to values")
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _check_prompt(prompt: PlainOrChat) -> None:
    if not prompt:
        raise BadRow(
            "no prompt", "'prompt' is empty, so nothing predicts the first token; fill it in"
        )
    if isinstance(prompt, str):
        return
    role = prompt[-1]["role"]
    content = prompt[-1].get("content") or ""
    if role not in ("user", "tool"):
        wanted = "wanted a user's or a tool's, which is to be answered; add it, or remove what comes after it"
        raise BadRow("roles", f"'prompt' ends with a message of the role {role}, {wanted}")
    if role == "user" and not content.strip():
        raise BadRow(
            "empty",
            f"'prompt' message {len(prompt)}, the user's, is empty; fill it in or remove the row",
        )


def _check_completion(name: str, prompt: PlainOrChat, value: PlainOrChat) -> None:
    if not value:
        problem = "is empty" if isinstance(value, str) else "has no messages"
        raise BadRow("empty", f"'{name}' {problem}; fill it in or remove the row")
    if isinstance(value, str):
        return
    all_roles = [message["role"] for message in (*prompt, *value)]
    roles = all_roles[len(prompt) :]
    first, last = roles[0], roles[-1]
    problems = {
        ": a system message comes later than first; move it to the start": {"system", "developer"}
        & {*all_roles[1:]},
        " has no assistant message, so there is nothing to learn; add it or remove the row": ASSISTANT
        not in roles,
        f" ends with a {last} message, wanted the assistant's; remove what is unanswered": last
        != ASSISTANT,
        f" begins with a {first} message, wanted the assistant's; move it to the prompt": prompt
        and first != ASSISTANT,
        " begins with the assistant, wanted a prompt before it; add one or remove the row": all_roles[
            0
        ]
        == ASSISTANT,
    }
    for problem, is_there in problems.items():
        if is_there:
            raise BadRow("roles", f"'{name}'{problem}")
    for number, message in enumerate(value, 1):
        says = any(message.get(key) for key in ("content", "tool_calls", *REASONING))
        if message["role"] == ASSISTANT and not says:
            raise BadRow(
                "empty", f"'{name}' message {number} is empty; fill it in or remove the row"
            )


def _split_shared(
    record: Mapping[str, Any], chosen: PlainOrChat, rejected: PlainOrChat
) -> tuple[PlainOrChat, dict[str, PlainOrChat]]:
    """The prompt that chosen and rejected share: whole messages, or characters up to a space, as
    TRL splits them.
    """
    shared = common_prefix(chosen, rejected)
    # leave each something
    if shared and (shared == min(len(chosen), len(rejected)) or chosen[shared - 1] == " "):
        shared -= 1
    if not shared:
        fix = _renaming(PREFERENCE[0], record) or "give the 'prompt' in a column of its own"
        raise BadRow("no prompt", f"'chosen' and 'rejected' share no beginning; {fix}")
    return chosen[:shared], {"chosen": chosen[shared:], "rejected": rejected[shared:]}


def common_prefix(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Number of entries that two sequences share at their beginning."""
    for position, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return position
    return min(len(a), len(b))


def _template_options(record: Mapping[str, Any]) -> dict[str, Any]:
    tools = _from_json(record.get("tools"), "'tools'")
    options = record.get("chat_template_kwargs") or {}
    if isinstance(options, str) and options.lstrip().startswith("{"):
        options = _from_json(options, "'chat_template_kwargs'")
    if tools is not None:
        _require_type("'tools'", tools, list, "a list of JSON schemas", fix="convert it")
    _require_type(
        "'chat_template_kwargs'", options, Mapping, "a mapping of names to values", fix="convert it"
    )
    given = {key: value for key, value in options.items() if value is not None}
    return {"tools": tools or None, **given}


def number_of_text(value: Any) -> Any:
    """The number, or the true or false, that a text writes; any other value as it is."""
    if not isinstance(value, str):
        return value
    word = value.strip().lower()
    if word in ("true", "false"):
        return word == "true"
    try:
        return float(word)
    except ValueError:
        return value


def _list_of_text(value: Any, name: str) -> Any:
    """The list that a text writes as JSON, in which True and False may have capitals; any other
    value as it is.
    """
    if not (isinstance(value, str) and value.lstrip().startswith("[")):
        return value
    text = value if name == "completions" else value.lower()
    return _from_json(text, f"'{name}'")


def _from_json(value: Any, at: str) -> Any:
    """A value, which text holds as JSON; None for no text."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise BadRow("not text", f"{at} is not JSON: {error}; fix it or remove the row") from None


def _require_type(
    at: str, value: Any, kind: type, wanted: str, fix: str = "convert it or remove the row"
) -> None:
    if not isinstance(value, kind):
        raise BadRow("not text", f"{at} is {_kind(value)}, wanted {wanted}; {fix}")


def _shown(value: Any) -> str:
    return "missing" if value is None else repr(value)


def _kind(value: Any) -> str:
    names = {
        str: "text",
        list: "a list",
        dict: "a mapping",
        type(None): "missing",
        bool: "true or false",
    }
    if type(value) in names:
        return names[type(value)]
    return f"a number ({value!r})" if isinstance(value, int | float) else type(value).__name__
