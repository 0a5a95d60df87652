"""Column layouts: which columns hold the prompt and its completions, and how a row is checked.

Names and meanings are TRL's, where it has them. A value is plain (text) or conversational (a list
of {role, content}, where the content may be a list of {type: text, text}; ShareGPT's {from, value};
or JSON); a step is plain. Beside any of them a conversation may have columns `tools`,
`chat_template_kwargs`, `system_prompt`, its first message, and `image` or `images`, which its
messages show: where they have parts {type: image}, or before the user's first text.
"""

import difflib
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeGuard, TypeVar

from .images import HOLE, ImageError, ImageRef, decoded, found, reference

# A message has its role and content, and whatever keys a chat template reads besides:
# {"role": "assistant", "content": "", "tool_calls": [...], "thinking": "..."}
Message = dict[str, Any]
PlainOrChat: TypeAlias = str | list[Message]
Record: TypeAlias = Mapping[str, object]  # a row as it was read, nothing of it checked yet

Checked = TypeVar("Checked")

SUPERVISED = (("prompt", "completion"), ("messages",), ("conversations",), ("text",))
# the two share their beginning, the prompt
PREFERENCE = (("prompt", "chosen", "rejected"), ("chosen", "rejected"))
TRIPLES = (("prompt", "chosen", "rejected", "reference"),)  # the last one a gold completion
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
IMAGE_COLUMNS = ("image", "images")
TEXT_ALONE = "the model reads text alone; train a vision-language model"
LAYOUT_COLUMNS = frozenset(OPTION_COLUMNS).union(
    *SUPERVISED, *UNPAIRED, *STEPWISE, *SCORES, *RANKING
)
# What many datasets call a column, the most telling name first. Two words are two columns that are
# joined: Alpaca's "instruction" and "input", Dolly's "instruction" and "context".
ALIASES = {
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
# The roles of ShareGPT, and of OpenAI's messages before there were tool calls.
SHAREGPT_ROLES = {
    "human": "user",
    "gpt": ASSISTANT,
    "chatgpt": ASSISTANT,
    "function_call": ASSISTANT,
    "observation": "tool",
    "function_response": "tool",
    "function": "tool",
}
IMAGES = "images"  # the key of a message that holds its images, one for each hole of its text
# Where a message may hold its reasoning: as Qwen3's template calls it, gpt-oss's, and OpenRouter.
REASONING = ("reasoning_content", "thinking", "reasoning")


class BadRow(ValueError):
    """A row that can't be trained on.

    Attributes:
        kind: groups such rows for counting.
        problem: what is wrong, for the message.
        row: its index, if known.
    """

    def __init__(self, kind: str, problem: str, row: int | None = None) -> None:
        super().__init__(kind, problem, row)  # all three, or it could not be pickled by a process
        self.kind = kind
        self.problem = problem
        self.row = row

    def __str__(self) -> str:
        return self.problem


@dataclass(frozen=True)
class ParsedRow:
    """A prompt and its completions, or the steps of one completion, and their annotation.

    An assistant message {role, content} may have ``train``, as in axolotl's data (`weight` in
    OpenAI's).

    Attributes:
        prompt: None where one value holds everything: `messages`, `text`.
        annotation: a bool for `label`, a float for `score`, and one number per completion or step
            for `ranks` and `labels`; None without any.
        keeps_system: the row has another system message than the one that all rows were to get.
    """

    prompt: PlainOrChat | None
    completions: tuple[PlainOrChat, ...]
    template_options: Record = field(default_factory=dict)
    annotation: "Annotation | None" = None
    keeps_system: bool = False


def find_layout(
    columns: Sequence[str], accepted: Sequence[tuple[str, ...]], *, no_images: str = TEXT_ALONE
) -> tuple[str, ...]:
    """Return the first accepted layout whose columns are all there.

    Args:
        no_images: why rows with images are refused; "" if they are not.

    Raises:
        ValueError: if there is none, or if the rows carry images that are refused.
    """
    for name in IMAGE_COLUMNS:
        if name in columns and no_images:
            raise ValueError(f"column '{name}': {no_images}, or remove the column")
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
    """Ask about each missing column that has a near namesake: "should 'promt' be 'prompt'?"."""
    wanted: set[str] = set().union(*accepted)
    questions = ""
    for name in sorted(wanted - set(columns)):
        # 0.75: one wrong letter in a word of four
        near = difflib.get_close_matches(name, columns, n=1, cutoff=0.75)
        if near:
            questions += f"; should '{near[0]}' be '{name}'?"
    return questions


def _renaming(layout: Sequence[str], columns: Collection[str]) -> str:
    """Say how to rename columns to a layout; empty if one that it wants has no counterpart."""
    names = []
    for new in layout:
        if new in columns:
            continue
        group = _columns_for(new, columns)
        if not group:
            return ""
        for name in group:
            names.append(f"{name}: {new}")
    return f"to rename columns, give data: {{path: ..., columns: {{{', '.join(names)}}}}}"


def _columns_for(new: str, columns: Collection[str]) -> list[str]:
    """Return the columns of the first alias of a column whose columns are all there, or none."""
    for alias in ALIASES.get(new, ()):
        group = alias.split()
        if set(group) <= set(columns):
            return group
    return []


def unused_options(
    features: Record, layout: tuple[str, ...], uses: Callable[[str], bool]
) -> list[str]:
    """Name the option columns that plain text leaves unread, or the arguments a template ignores.

    Args:
        features: of the dataset, by column.
        uses: whether the chat template reads an argument of this name.
    """
    texts = [features[name] for name in layout if name in TEXT_COLUMNS]
    if texts and all(getattr(kind, "dtype", "").endswith("string") for kind in texts):
        return [name for name in OPTION_COLUMNS if name in features]
    arguments = features.get("chat_template_kwargs")
    if not isinstance(arguments, dict):
        return []
    return [f"chat_template_kwargs.{name}" for name in arguments if not uses(name)]


def read_row(
    record: Record,
    layout: tuple[str, ...],
    system_prompt: str = "",
    image_folder: str | None = None,
    no_images: str = TEXT_ALONE,
) -> ParsedRow:
    """Check a record, and take it apart into prompt, completions and annotation.

    Args:
        system_prompt: the first message of a conversation that has no system message of its own.
        image_folder: where relative paths of images begin; None if rows with images are refused.
        no_images: why they are.

    Raises:
        BadRow: if a field is missing, is neither text nor messages, is empty, or has its roles in a
            wrong order; if the annotation has another type, or is of another number of completions;
            if two fields contradict each other; or if an image is missing, is nowhere shown, or is
            in a message other than the user's.
    """
    options = _template_options(record)
    values = _values(record, layout)
    several = _several(record, layout)
    annotation = None
    if layout[-1] in ANNOTATIONS:
        annotation = _annotation(record.get(layout[-1]), layout[-1], len(several))
    if values.get("prompt") == []:  # an empty text is told of later, where it matters
        raise BadRow("no prompt", "'prompt' has no messages; give it at least one")
    if "chosen" in values and layout not in TRIPLES:
        values = _with_one_prompt(values)
    if image_folder is None:
        _refuse_images(values, no_images)
    else:
        values = _with_images(record, values, image_folder)
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
            if images_of(values[name]):
                raise BadRow("images", f"'{name}' shows an image; give images in the prompt alone")
        prompt, completions = _prompt_and_completions(record, layout, prompt, values)
    return ParsedRow(prompt, completions, options, annotation, keeps_system)


def _values(record: Record, layout: tuple[str, ...]) -> dict[str, PlainOrChat]:
    """The texts and conversations of a layout, by their columns."""
    values = {}
    for name in layout:
        if name != "completions" and name not in ANNOTATIONS:
            values[name] = _value(record.get(name), name)
    return values


def _several(record: Record, layout: tuple[str, ...]) -> list[object]:
    """The steps or completions in the column `completions`; empty if the layout has none."""
    if "completions" not in layout:
        return []
    written = _list_of_text(record.get("completions"), "completions")
    several = _of_type(list, written, "'completions'", "a list")
    if not several:
        raise BadRow("empty", "'completions' is an empty list; fill it in or remove the row")
    return several


def _whole_text(values: Mapping[str, PlainOrChat]) -> PlainOrChat:
    """The one value of a row that holds prompt and completions: a text, or a conversation."""
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
    record: Record,
    layout: tuple[str, ...],
    prompt: PlainOrChat | None,
    values: dict[str, PlainOrChat],
) -> tuple[PlainOrChat, tuple[PlainOrChat, ...]]:
    """Check a prompt and its completions; split a pair without a prompt where the two differ."""
    if layout in PROMPTS:
        _check_prompt(prompt or "")
    every = values if prompt is None else {"prompt": prompt, **values}
    if len(set(map(type, every.values()))) > 1:
        kinds = [f"'{name}' is {_kind(value)}" for name, value in every.items()]
        raise BadRow("mixed", f"{', '.join(kinds)}; give all of them as text or all as messages")
    if "chosen" in values and values["chosen"] == values["rejected"]:
        problem = "'chosen' and 'rejected' are identical, so there is no preference"
        raise BadRow("identical", f"{problem}; remove the row")
    if prompt is None:
        prompt, values = _split_shared(record, values["chosen"], values["rejected"])
    for name, value in values.items():
        _check_completion(name, prompt, value)
    return prompt, tuple(values.values())


def _with_one_prompt(values: dict[str, PlainOrChat]) -> dict[str, PlainOrChat]:
    """Put the plain prompt of a pair of conversations into them, as the user's message.

    UltraFeedback repeats the prompt: as text in its own column, and as the first message of both
    conversations. Then the column is dropped.

    Raises:
        BadRow: if the two conversations begin with another prompt.
    """
    prompt = values.get("prompt")
    chosen = values["chosen"]
    rejected = values["rejected"]
    if not (isinstance(prompt, str) and isinstance(chosen, list) and isinstance(rejected, list)):
        return values
    if chosen and rejected and chosen[0]["role"] == rejected[0]["role"] == ASSISTANT:
        return {**values, "prompt": [{"role": "user", "content": prompt}]}
    shared = chosen[: common_prefix(chosen, rejected)]
    asked = {_words(message.get("content")) for message in shared if message["role"] == "user"}
    # compared by words, as the two copies often differ in white space
    if prompt.strip() and chosen and rejected and _words(prompt) not in asked:
        problem = "'prompt' is no message of the user's that 'chosen' and 'rejected' share"
        fix = "leave it out (data: {path: ..., columns: [chosen, rejected]}), or correct it"
        raise BadRow("contradictory prompt", f"{problem}; {fix}")
    return {"chosen": chosen, "rejected": rejected}


def _with_images(
    record: Record, values: dict[str, PlainOrChat], folder: str
) -> dict[str, PlainOrChat]:
    """Conversations whose messages hold the images that they show, the row's column among them.

    Args:
        folder: where relative paths begin.
    """
    of_column = _column_images(record)
    # Where there is a prompt, it and its completion are one conversation; else each value is one.
    together = [[*values]] if "prompt" in values else [[name] for name in values]
    completed = dict(values)
    for names in together:
        chats = [values[name] for name in names]
        messages: list[Message] = []
        for chat in chats:
            if isinstance(chat, list):
                messages += chat
        if of_column and not messages:
            problem = "the row has images and its prompt is plain text"
            raise BadRow("images", f"{problem}; give a list of messages, {{role, content}}")
        shown = iter(_messages_with_images(messages, of_column, folder))
        for name, chat in zip(names, chats, strict=True):
            if isinstance(chat, list):
                completed[name] = [next(shown) for _ in chat]
    return completed


def _refuse_images(values: Mapping[str, PlainOrChat], why: str) -> None:
    """Raise BadRow if a message shows an image."""
    for name, value in values.items():
        for number, message in enumerate(value, 1):
            if isinstance(message, dict) and IMAGES in message:
                at = f"the content of '{name}' message {number}"
                problem = f"{at} has a part of the type 'image', wanted text: {why}"
                raise BadRow("not text", f"{problem}, or remove the row")


def _column_images(record: Record) -> list[ImageRef]:
    """The images of the columns `image` and `images`, in their order."""
    images: list[ImageRef] = []
    for name in IMAGE_COLUMNS:
        value = record.get(name)
        if value is None:
            continue
        several = value if isinstance(value, list) else [value]
        for each in several:
            try:
                images.append(reference(each))
            except ImageError as error:
                raise BadRow("images", f"'{name}': {error}") from None
    return images


def with_pictures(record: Record, folder: str) -> Record:
    """The row with decoded pictures in its columns of images.

    Args:
        folder: where relative paths begin.
    """
    pictures: dict[str, object] = {}
    for name in IMAGE_COLUMNS:
        value = record.get(name)
        if isinstance(value, list):
            pictures[name] = [_picture(each, folder) for each in value]
        elif value is not None:
            pictures[name] = _picture(value, folder)
    return {**record, **pictures}


def _picture(value: object, folder: str) -> object:
    return decoded(found(reference(value), folder))


def _messages_with_images(
    messages: list[Message], of_column: list[ImageRef], folder: str
) -> list[Message]:
    """The messages of one conversation, each hole of which has its image."""
    holes = [image for message in messages for image in message.get(IMAGES, ())]
    waiting = holes.count(None)
    if of_column and not holes:
        messages = _at_first_text(messages, len(of_column))
    elif len(of_column) != waiting:
        problem = f"{waiting} image parts name no image, and the row has {len(of_column)} images"
        raise BadRow("images", f"{problem}; give as many, or remove the row")
    left = iter(of_column)
    completed = []
    for number, message in enumerate(messages, 1):
        if IMAGES not in message:
            completed.append(message)
            continue
        role = message["role"]
        if role != "user":
            problem = f"message {number}, of the role {role}, has an image"
            raise BadRow("images", f"{problem}; wanted images in the user's messages alone")
        images = [next(left) if image is None else image for image in message[IMAGES]]
        if str(message["content"]).count(HOLE) != len(images):
            problem = f"message {number} has the character U+FFFC, which stands for images"
            raise BadRow("images", f"{problem}; remove it from the text")
        try:
            images = [found(image, folder) for image in images]
        except ImageError as error:
            raise BadRow("missing image", str(error)) from None
        completed.append({**message, IMAGES: images})
    return completed


def _at_first_text(messages: list[Message], count: int) -> list[Message]:
    """The messages with ``count`` holes before the user's first text, as TRL places images."""
    for number, message in enumerate(messages):
        if message["role"] == "user":
            text = HOLE * count + (message.get("content") or "")
            with_holes = {**message, "content": text, IMAGES: [None] * count}
            return [*messages[:number], with_holes, *messages[number + 1 :]]
    raise BadRow("images", "the row has images and no message of the user's to show them; add one")


def images_of(value: PlainOrChat | None) -> list[ImageRef]:
    """The images that the messages of a conversation show, in their order; none of a text."""
    if value is None or isinstance(value, str):
        return []
    return [image for message in value for image in message.get(IMAGES, ())]


def _words(text: str | None) -> tuple[str, ...]:
    return tuple((text or "").replace(HOLE, " ").split())


def _with_system(
    values: dict[str, PlainOrChat], of_row: str, of_all: str
) -> tuple[dict[str, PlainOrChat], bool]:
    """Begin conversations with the system message of their row, or of all rows.

    Returns:
        The values, plain text as it was; and whether a conversation keeps another system message
        than the one ``of_all`` rows.

    Raises:
        BadRow: if a conversation has a system message of its own, and its row has another one.
    """
    if not (of_row or of_all):
        return values, False
    with_system = dict(values)
    keeps = bool(of_row and of_all and of_row != of_all)
    # A system message comes first: in the prompt, or where there is none, in each conversation.
    beginnings = list(values)
    if isinstance(values.get("prompt"), list):
        beginnings = ["prompt"]
    for name in beginnings:
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


def without_invented(value: object, kind: object) -> object:
    """Drop the nulls that Arrow invents: it gives each struct the keys of all.

    [{"a": 1}, {"b": 2}] comes back as [{"a": 1, "b": None}, {"a": None, "b": 2}].

    Args:
        kind: the feature of the value: a dict for a struct, `List` for a list. A feature `Json`
            is neither, so nulls that JSON writes stay.
    """
    if isinstance(kind, dict) and isinstance(value, Mapping):
        present = {}
        for name, inner in kind.items():
            if value[name] is not None:
                present[name] = without_invented(value[name], inner)
        return present
    if isinstance(value, list) and hasattr(kind, "feature"):
        return [without_invented(item, kind.feature) for item in value]
    return value


def read_number(value: object, name: str) -> float:
    """Read a finite number, or the text of one, which the cells of a CSV are.

    Raises:
        BadRow: if it is missing, NaN, infinite, or another value.
    """
    number = number_of_text(value)
    if not _is_number(number) or isinstance(number, bool) or not math.isfinite(number):
        wanted = "wanted a finite number; fix it or remove the row"
        raise BadRow(f"bad {name}", f"'{name}' is {_shown(value)}, {wanted}")
    return float(number)


def _is_number(value: object) -> TypeGuard[float]:
    """True for an int, a float, true and false."""
    return isinstance(value, int | float)


Annotation: TypeAlias = float | bool | list[int] | list[float]


def _annotation(value: object, name: str, count: int) -> Annotation:
    """Read the column of annotations: of one completion, or of ``count`` steps or completions."""
    if name == "score":
        return read_number(value, name)
    if name == "label":
        return _label(value)
    several = _one_for_each(value, name, count)
    return _ranks(several) if name == "ranks" else _labels(several)


def _label(value: object) -> bool:
    number = number_of_text(value)
    if number not in (0, 1) or not _is_number(number):
        wanted = "wanted true or false (1 or 0); convert it or remove the row"
        raise BadRow("bad label", f"'label' is {_shown(value)}, {wanted}")
    return bool(number)


def _one_for_each(value: object, name: str, count: int) -> list[object]:
    """A list with one entry for each of ``count`` steps or completions."""
    kind = f"bad {name}"
    unit = "step" if name == "labels" else "completion"
    several = _list_of_text(value, name)
    if not isinstance(several, list):
        wanted = f"wanted a list with one for each {unit}"
        raise BadRow(kind, f"'{name}' is {_kind(several)}, {wanted}; convert it")
    if len(several) != count:
        counts = f"'completions' has {count} {unit}s and '{name}' has {len(several)}"
        raise BadRow(kind, f"{counts}; give each {unit} one, or remove the row")
    return several


def _ranks(ranks: list[object]) -> list[int]:
    """Places of completions, 0 the best, without ties."""
    # True would pass for 1
    numbers = [rank for rank in ranks if _is_number(rank) and not isinstance(rank, bool)]
    is_complete = len(numbers) == len(ranks) and sorted(numbers) == list(range(len(ranks)))
    if len(ranks) < 2 or not is_complete:
        wanted = "wanted each of 0 (best), 1, ... once, for at least two completions"
        fix = "break ties, number them so, or remove the row"
        raise BadRow("bad ranks", f"'ranks' is {ranks}, {wanted}; {fix}")
    # where one row has a fraction, Arrow makes floats of all
    return [int(rank) for rank in numbers]


def _labels(labels: list[object]) -> list[float]:
    """Probabilities that steps are right."""
    probabilities = []
    for number, label in enumerate(labels, 1):
        if not _is_number(label) or not 0 <= label <= 1:
            wanted = "wanted true, false, or a probability in [0, 1] that the step is right"
            found = f"label {number} of 'labels' is {_shown(label)}"
            raise BadRow("bad labels", f"{found}, {wanted}; convert it or remove the row")
        probabilities.append(float(label))
    return probabilities


def _steps(steps: list[object]) -> tuple[str, ...]:
    texts = []
    for number, step in enumerate(steps, 1):
        at = f"step {number} of 'completions'"
        text = _of_type(str, step, at, "text")
        if not text.strip():
            raise BadRow("empty", f"{at} is empty; remove it and its label, or remove the row")
        texts.append(text)
    return tuple(texts)


def _value(value: object, name: str) -> PlainOrChat:
    if value is None:
        raise BadRow("missing", f"'{name}' is missing; fill it in or remove the row")
    # a plain prompt may begin with a bracket, too
    holds_conversation = name in ("messages", "conversations")
    if holds_conversation and isinstance(value, str) and value.startswith("["):
        value = _from_json(value, f"'{name}'")
    if isinstance(value, list):
        messages = []
        for number, message in enumerate(value, 1):
            messages.append(read_message(message, f"'{name}' message {number}"))
        return messages
    return _of_type(str, value, f"'{name}'", "text or a list of {role, content}")


def read_message(record: object, at: str) -> Message:
    """Read a message of TRL's, OpenAI's or ShareGPT's as {role, content, ...}.

    Its keys `tool_calls` and `train` are checked, too; all others are the chat template's.

    Args:
        at: names the message in errors.
    """
    written = _mapping(record, at, "{role, content}")
    # Arrow gives every message the keys of all others.
    message: Message = {key: value for key, value in written.items() if value is not None}
    if "from" in message and "role" not in message:  # ShareGPT
        message = {"role": message.pop("from"), "content": message.pop("value", None), **message}
    sender = message.get("role")
    role = SHAREGPT_ROLES.get(str(sender), sender)
    if role not in ROLES:
        wanted = f"wanted one of {', '.join(ROLES)}; rename it"
        raise BadRow("roles", f"{at} has the role {role!r}, {wanted}")
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


def _set_content(message: Message, content: object, calls: object, at: str) -> None:
    """Set text and tool calls of a message.

    Args:
        content: text, a list of parts, or None.
        calls: tool calls, or nothing.
    """
    if content is None and not calls:
        raise BadRow("missing", f"{at} has no content; fill it in or remove the row")
    if IMAGES in message:
        fix = "give them as parts {type: image} of the content, or in a column 'images'"
        raise BadRow("images", f"{at} has a key '{IMAGES}'; {fix}")
    where = f"the content of {at}"
    if isinstance(content, list):
        images: list[ImageRef | None] = []
        texts = [_part(part, images, where) for part in content]
        content = "".join(texts)
        message["content"] = content
        if images:
            message[IMAGES] = images
    if content is not None:
        content = _of_type(str, content, where, "text")
    if calls:
        # templates add to the content, which None would break
        message["content"] = content or ""
        listed = _of_type(list, calls, f"'tool_calls' of {at}", "a list")
        message["tool_calls"] = [_tool_call(call, at) for call in listed]


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
            wanted = "true or false (1 or 0)"
            if not is_assistant:
                wanted = f"none, as only the {ASSISTANT} is trained"
            problem = f"'{name}' of {at} is {train!r}, wanted {wanted}"
            raise BadRow(f"bad {name}", f"{problem}; correct or remove it")
        message["train"] = bool(train)


def _part(part: object, images: list[ImageRef | None], at: str) -> str:
    """The text of a part of a content; for an image a hole, and it is added to ``images``."""
    kind = _kind(part)
    if isinstance(part, Mapping):
        if part.get("type") == "text" and isinstance(part.get("text"), str):
            return str(part["text"])
        if part.get("type") in ("image", "image_url"):
            images.append(_image_of(part, at))
            return HOLE
        kind = repr(part.get("type"))
    raise BadRow(
        "not text",
        f"{at} has a part of the type {kind}, wanted text or an image; convert it or remove the row",
    )


def _image_of(part: Mapping[str, object], at: str) -> ImageRef | None:
    """The image that a part names; None if one of the row's column belongs there."""
    for name in ("image", "image_url", "url", "path", "bytes", "base64"):
        value = part.get(name)
        if value is None:
            continue
        try:
            return reference({name: value} if name == "base64" else value)
        except ImageError as error:
            raise BadRow("images", f"{at}: {error}") from None
    return None


def _tool_call(call: object, at: str) -> Message:
    """Write a call as {type, function: {name, arguments}} with the arguments by name.

    Templates want a mapping of arguments; OpenAI's messages have JSON in a text.
    """
    given = _mapping(call, f"a tool call of {at}", "a mapping")
    if not given.get("function"):
        given = {"type": "function", "function": given}
    function = _mapping(given["function"], f"'function' of a tool call of {at}", "a mapping")
    name = f"'arguments' of a tool call of {at}"
    written = _from_json(function.get("arguments"), name) or {}
    arguments = _mapping(written, name, "a mapping of names to values")
    return {**given, "function": {**function, "arguments": arguments}}


def _check_prompt(prompt: PlainOrChat) -> None:
    if not prompt:
        problem = "'prompt' is empty, so nothing predicts the first token"
        raise BadRow("no prompt", f"{problem}; fill it in")
    if isinstance(prompt, str):
        return
    role = prompt[-1]["role"]
    content = prompt[-1].get("content") or ""
    if role not in ("user", "tool"):
        wanted = "wanted a user's or a tool's, which is to be answered; add it, or remove what comes after it"
        raise BadRow("roles", f"'prompt' ends with a message of the role {role}, {wanted}")
    if role == "user" and not content.strip():
        problem = f"'prompt' message {len(prompt)}, the user's, is empty"
        raise BadRow("empty", f"{problem}; fill it in or remove the row")


def _check_completion(name: str, prompt: PlainOrChat, value: PlainOrChat) -> None:
    if not value:
        problem = "is empty" if isinstance(value, str) else "has no messages"
        raise BadRow("empty", f"'{name}' {problem}; fill it in or remove the row")
    if isinstance(value, str):
        return
    before = [message["role"] for message in prompt if isinstance(message, dict)]
    problem = _problem_of_roles(before, [message["role"] for message in value])
    if problem:
        raise BadRow("roles", f"'{name}'{problem}")
    for number, message in enumerate(value, 1):
        says = any(message.get(key) for key in ("content", "tool_calls", *REASONING))
        if message["role"] == ASSISTANT and not says:
            problem = f"'{name}' message {number} is empty"
            raise BadRow("empty", f"{problem}; fill it in or remove the row")


def _problem_of_roles(before: list[str], roles: list[str]) -> str:
    """Say what is wrong with the order of roles in a completion; empty if nothing is.

    Args:
        before: the roles in the prompt; none if the completion is the whole conversation.
    """
    every = [*before, *roles]
    first = roles[0]
    last = roles[-1]
    if "system" in every[1:] or "developer" in every[1:]:
        return ": a system message comes later than first; move it to the start"
    if ASSISTANT not in roles:
        return " has no assistant message, so there is nothing to learn; add it or remove the row"
    if last != ASSISTANT:
        return f" ends with a {last} message, wanted the assistant's; remove what is unanswered"
    if before and first != ASSISTANT:
        return f" begins with a {first} message, wanted the assistant's; move it to the prompt"
    if every[0] == ASSISTANT:
        return " begins with the assistant, wanted a prompt before it; add one or remove the row"
    return ""


def _split_shared(
    record: Record, chosen: PlainOrChat, rejected: PlainOrChat
) -> tuple[PlainOrChat, dict[str, PlainOrChat]]:
    """Split the shared prompt from a pair: whole messages, or characters up to a space, as TRL."""
    shared = common_prefix(chosen, rejected)
    is_whole = shared == min(len(chosen), len(rejected))  # a completion would be left empty
    # tokenizers have the space at the beginning of a word, so it belongs to the completion
    if shared and (is_whole or chosen[shared - 1] == " "):
        shared -= 1
    if not shared:
        fix = _renaming(PREFERENCE[0], record) or "give the 'prompt' in a column of its own"
        raise BadRow("no prompt", f"'chosen' and 'rejected' share no beginning; {fix}")
    return chosen[:shared], {"chosen": chosen[shared:], "rejected": rejected[shared:]}


def common_prefix(a: Sequence[object], b: Sequence[object]) -> int:
    """Number of entries that two sequences share at their beginning."""
    for position, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return position
    return min(len(a), len(b))


def _template_options(record: Record) -> dict[str, object]:
    """The arguments that a row gives the chat template: its tools, and others by name."""
    tools = _from_json(record.get("tools"), "'tools'")
    if tools is not None:
        tools = _of_type(list, tools, "'tools'", "a list of JSON schemas", fix="convert it")
    name = "'chat_template_kwargs'"
    written = record.get("chat_template_kwargs") or {}
    if isinstance(written, str) and written.lstrip().startswith("{"):
        written = _from_json(written, name)
    options = _mapping(written, name, "a mapping of names to values", fix="convert it")
    given = {key: value for key, value in options.items() if value is not None}
    # some templates ask `tools is not none`, and would begin a list of no tools
    return {"tools": tools or None, **given}


def number_of_text(value: object) -> object:
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


def _list_of_text(value: object, name: str) -> object:
    """The list that a text writes as JSON, such as a cell of a CSV; any other value as it is."""
    if not (isinstance(value, str) and value.lstrip().startswith("[")):
        return value
    # labels may be written as Python writes them: [True, False]
    text = value if name == "completions" else value.lower()
    return _from_json(text, f"'{name}'")


def _from_json(value: object, at: str) -> object:
    """The value that a text holds as JSON; None for an empty text; any other value as it is."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        parsed: object = json.loads(value)
    except json.JSONDecodeError as error:
        raise BadRow("not text", f"{at} is not JSON: {error}; fix it or remove the row") from None
    return parsed


def _of_type(
    kind: type[Checked],
    value: object,
    at: str,
    wanted: str,
    fix: str = "convert it or remove the row",
) -> Checked:
    """Return a value of this type; BadRow if it is of another.

    Args:
        at: names the value in the message.
        wanted: the type, in the words of the message.
    """
    if not isinstance(value, kind):
        raise _wrong_type(value, at, wanted, fix)
    return value


def _mapping(
    value: object, at: str, wanted: str, fix: str = "convert it or remove the row"
) -> Record:
    """Return a mapping; BadRow if the value is of another type."""
    if not isinstance(value, Mapping):
        raise _wrong_type(value, at, wanted, fix)
    return value


def _wrong_type(value: object, at: str, wanted: str, fix: str) -> BadRow:
    return BadRow("not text", f"{at} is {_kind(value)}, wanted {wanted}; {fix}")


def _shown(value: object) -> str:
    return "missing" if value is None else repr(value)


_KINDS = {
    str: "text",
    list: "a list",
    dict: "a mapping",
    type(None): "missing",
    bool: "true or false",
}


def _kind(value: object) -> str:
    """What a message calls the type of a value, in words of JSON."""
    if type(value) in _KINDS:
        return _KINDS[type(value)]
    if isinstance(value, int | float):
        return f"a number ({value!r})"
    return type(value).__name__
