"""One row as an example: token ids of a prompt and its completions, cut to `max_length`."""

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from .chat import Encoder
from .columns import Annotation, BadRow, Message, ParsedRow, PlainOrChat, images_of
from .images import ImageRef

TrainOn = Literal["auto", "assistant", "completion", "all"]


class Example(NamedTuple):
    """One prompt and its completions: one for SFT, two (chosen, rejected) for a pair, G for a group.

    The example of "2+2=" with the completion " 4</s>" is ([17, 10, 17, 28], [[220, 19, 2]],
    [[True, True, True]]).

    ``prompt`` holds at least one token, because the first token of a completion is predicted from
    the last of the prompt. ``trained[i][t]`` is true where token ``t`` of completion ``i`` carries
    loss: in a conversation of several turns, later messages of the user are part of the completion
    and are not trained. In a solution in steps it marks the end of each step, where the step is
    scored. ``images`` are those that the prompt shows; in a demonstration of several turns also
    those of the completion, counted on from the prompt.
    """

    prompt: Sequence[int]
    completions: Sequence[Sequence[int]]
    trained: Sequence[Sequence[bool]]
    images: tuple[ImageRef, ...] = ()


@dataclass(frozen=True)
class Tokenization:
    """Options that all ``encode_*`` functions share.

    Attributes:
        max_length: tokens of prompt and completion together, of `encode_prompts` those of the
            prompt; None for no limit.
        truncation: keep the start of a longer one (TRL's default) or its end, or treat it as a bad
            row. In pairs, and with labels, scores or ranks, "keep_end" cuts the beginning of the
            prompt until the longest completion fits. None is "keep_start", but "error" for prompts
            alone: one that was cut would ask something else.
        on_bad_row: raise at a row that can't be trained on, or count it and leave it out.
        chat_template: text or file of a template to use instead of the tokenizer's own.
        chat_template_kwargs: arguments of the template, such as ``enable_thinking``; those of a row
            come first.
        no_images: why rows with images are refused; "" where a model of text alone would be the
            reason.
        processes: how many tokenize at once.
        cached: look for the result on the disk, and leave it there; false for rows that are encoded
            in memory.
    """

    max_length: int | None = None
    truncation: Literal["keep_start", "keep_end", "error"] | None = None
    on_bad_row: Literal["error", "skip"] = "error"
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, object] = field(default_factory=dict)
    no_images: str = ""
    processes: int | None = None
    cached: bool = True

    def __post_init__(self) -> None:
        if self.max_length is not None and self.max_length < 2:
            raise ValueError(
                f"max_length: wanted at least 2, for a prompt and a completion, got {self.max_length}"
            )
        if self.truncation not in (None, "keep_start", "keep_end", "error"):
            raise ValueError(
                f"truncation: wanted keep_start, keep_end or error, got {self.truncation!r}"
            )
        if self.on_bad_row not in ("error", "skip"):
            raise ValueError(f"on_bad_row: wanted error or skip, got {self.on_bad_row!r}")

    def excess(self, example: Example) -> int:
        """Count the tokens beyond the limit; BadRow if there are some and nothing may be cut."""
        length = len(example.prompt) + max(map(len, example.completions))
        if self.max_length is None or length <= self.max_length:
            return 0
        if self.truncation == "error":
            fix = "raise max_length, choose the truncation keep_start or keep_end"
            problem = f"{length} tokens and max_length is {self.max_length}"
            raise BadRow("too long", f"{problem}; {fix}, or remove the row")
        return length - self.max_length

    def refuse(
        self, kind: str, problem: str, consequence: str = "nothing is left to train on"
    ) -> BadRow:
        """Make the error for a row of which `max_length` leaves too little."""
        reason = f"{problem} and max_length is {self.max_length}, so {consequence}"
        return BadRow(kind, f"{reason}; raise max_length or remove the row")


class EncodedExample(NamedTuple):
    """An example and its notes.

    Attributes:
        truncated: `max_length` cut it.
        shortened: its prompt lost its end to the completions.
        annotation: its label, score, ranks or step labels.
        digests: a name of its row's contents, and the name of a row that would contradict it.
        ends: the tokens that end its completions before `max_length` cuts them, or would end a
            completion of its prompt.
    """

    example: Example
    truncated: bool = False
    shortened: bool = False
    annotation: Annotation | None = None
    digests: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()


def demonstration(
    row: ParsedRow, encoder: Encoder, *, train_on: TrainOn, limit: Tokenization
) -> list[EncodedExample]:
    """One completion of one prompt, as `encode_supervised` describes it: one example or more."""
    encoded = []
    beyond = 0  # tokens before the first trained one of an example that is cut off whole
    for tokens, mask, shortened in _supervised_tokens(row, encoder, train_on):
        images = encoder.located(tokens, _messages(row.prompt, *row.completions))
        _untrain(mask, images)
        full = _sequence(tokens, mask)
        if full is None:
            problem = "no token is left to train on"
            raise BadRow("empty", f"{problem}; give it a completion or remove the row")
        excess = limit.excess(full)
        ids = [*full.prompt, *full.completions[0]]
        trained = [*[False] * len(full.prompt), *full.trained[0]]
        kept = slice(excess, None)
        if limit.truncation == "keep_start":
            kept = slice(len(ids) - excess)
        # Prompt and completion are told apart again: the cut may have taken the first turn.
        cut = _sequence(ids[kept], trained[kept])
        if cut is not None:
            cut = _with_images(cut, images, kept.start or 0, limit)
            ends = tuple(encoder.end_tokens(tokens, mask))
            encoded.append(EncodedExample(cut, excess > 0, shortened, ends=ends))
        elif not beyond:
            beyond = len(full.prompt)
    if not encoded:
        kind = "fully masked" if row.prompt is None else "prompt too long"
        raise limit.refuse(kind, f"{beyond} tokens precede the first trained one")
    if beyond:  # max_length has cut off turns, as it would from a single example
        encoded[-1] = encoded[-1]._replace(truncated=True)
    return encoded


def prompt_only(row: ParsedRow, encoder: Encoder, *, limit: Tokenization) -> EncodedExample:
    """A prompt that the policy will complete."""
    assert row.prompt is not None
    ends: tuple[int, ...] = ()
    if isinstance(row.prompt, str):
        prompt = encoder.plain(row.prompt)
        bos = encoder.tokenizer.bos_token_id
        eos = encoder.tokenizer.eos_token_id
        # Some tokenizers (T5's) end every text, and this one goes on. Where BOS and EOS are one
        # token (GPT-2's), it begins an empty prompt, and stays.
        if prompt and prompt[-1] == eos and prompt[-1] != bos:
            prompt.pop()
    else:
        prompt = encoder.chat(row.prompt, row.template_options, generation_prompt=True)
        ends = tuple(encoder.reply_end)
    if not prompt:
        problem = "the prompt has no tokens, so nothing predicts the first one of a completion"
        raise BadRow("no prompt", f"{problem}; fill it in")
    images = encoder.located(prompt, _messages(row.prompt))
    excess = limit.excess(Example(prompt, [[]], [[]]))
    first = 0
    if excess and limit.truncation == "keep_start":
        prompt = prompt[: limit.max_length]
    elif excess:
        first = excess
        prompt = prompt[excess:]
    example = _with_images(Example(prompt, [], []), images, first, limit)
    if len(example.images) < len(images):
        raise limit.refuse("image cut off", "an image ends later", "it would be cut off")
    return EncodedExample(example, truncated=excess > 0, ends=ends)


def completed(
    row: ParsedRow, encoder: Encoder, *, limit: Tokenization, compared: int | None = None
) -> EncodedExample:
    """One or more completions of one prompt, no two the same; the assistant's tokens are trained.

    Args:
        compared: only so many of them, the first, have to differ.
    """
    assert row.prompt is not None
    prompt, completions, masks, shortened = encoder.continuations(
        row.prompt, row.completions, row.template_options
    )
    if not prompt:
        # The first token is predicted from the one before: without a prompt, from the token that
        # all completions begin with, such as BOS.
        first_tokens = {tuple(completion[:1]) for completion in completions}
        if len(first_tokens) > 1:
            problem = "the prompt is empty, so nothing predicts the first token"
            raise BadRow("no prompt", f"{problem}; give a prompt")
        prompt = completions[0][:1]
        completions = [completion[1:] for completion in completions]
        masks = [mask[1:] for mask in masks]
    if not all(completions):
        problem = "a completion has no tokens of its own"
        raise BadRow("empty", f"{problem}; fill it in or remove the row")
    if _repeats(completions[:compared]):
        problem = "two completions have the same tokens, so neither is preferred"
        raise BadRow("identical", f"{problem}; remove the row")
    for value in row.completions:
        if images_of(value):
            problem = "a completion goes on with a message that shows an image"
            raise BadRow("images", f"{problem}; give images in the prompt alone")
    for completion in completions:
        encoder.located(completion, [])  # refuses an image token that someone has typed
    images = encoder.located(prompt, _messages(row.prompt))
    full = Example(prompt, completions, masks, images)
    # before the cut: a completion that is cut has no end
    ends = set().union(*map(encoder.end_tokens, completions, masks))
    excess = limit.excess(full)
    cut = _cut(full, excess, limit)
    if excess and _repeats(cut.completions[:compared]):
        raise _identical_after_truncation(limit)
    return EncodedExample(cut, excess > 0, shortened, row.annotation, ends=tuple(ends))


def pair(row: ParsedRow, encoder: Encoder, *, limit: Tokenization) -> EncodedExample:
    """Two completions of one prompt, the chosen one first, as `encode_preference` describes it."""
    encoded = completed(row, encoder, limit=limit)
    chosen, rejected = encoded.example.completions
    asked = _asked(encoded.example)
    statement = _digest(*asked, chosen, rejected)
    contradiction = _digest(*asked, rejected, chosen)
    return encoded._replace(digests=(statement, contradiction))


def triple(row: ParsedRow, encoder: Encoder, *, limit: Tokenization) -> EncodedExample:
    """A pair and a third completion, as `encode_triples` describes it."""
    encoded = completed(row, encoder, limit=limit, compared=2)
    asked = _asked(encoded.example)
    chosen, rejected, gold = encoded.example.completions
    statement = _digest(*asked, chosen, rejected, gold)
    contradiction = _digest(*asked, rejected, chosen, gold)
    return encoded._replace(digests=(statement, contradiction))


def unpaired(row: ParsedRow, encoder: Encoder, *, limit: Tokenization) -> list[EncodedExample]:
    """Each completion an example, desirable or not, as `encode_unpaired` describes it."""
    desirable = [True, False]  # of a preference pair
    if len(row.completions) == 1:
        desirable = [bool(row.annotation)]
    examples = []
    for text, good in zip(row.completions, desirable, strict=True):
        alone = replace(row, completions=(text,), annotation=good)
        encoded = completed(alone, encoder, limit=limit)
        (completion,) = encoded.example.completions
        asked = _asked(encoded.example)
        statement = _digest(*asked, completion, [good])
        contradiction = _digest(*asked, completion, [not good])
        examples.append(encoded._replace(digests=(statement, contradiction)))
    if len(examples) > 1 and examples[0].example == examples[1].example:
        raise _identical_after_truncation(limit)
    return examples


def stepwise(
    row: ParsedRow,
    encoder: Encoder,
    *,
    separator: str,
    train_on_last_step_only: bool,
    limit: Tokenization,
) -> EncodedExample:
    """The steps of one solution as one completion, and a label for each trained token."""
    assert isinstance(row.annotation, list)
    full = solution(row, encoder, separator=separator)
    labels: list[float] = [*row.annotation]
    excess = limit.excess(full)
    cut = _cut(full, excess, limit)
    if excess and limit.truncation == "keep_start":
        whole_steps = sum(cut.trained[0])  # their ends are left
        labels = labels[:whole_steps]
        if not labels:
            first = len(full.prompt) + full.trained[0].index(True) + 1
            problem = f"the first step ends at token {first}"
            raise limit.refuse("no step left", problem, "no label is left to train on")
        # Nothing reads the tokens of the step that was cut in the middle.
        end = _last(cut.trained[0]) + 1
        completion = cut.completions[0][:end]
        cut = cut._replace(completions=[completion], trained=[cut.trained[0][:end]])
    if train_on_last_step_only:
        if len(labels) < len(row.annotation):
            problem = f"the last step, the only one to train on, ends beyond max_length={limit.max_length}"
            raise BadRow("last step too far", f"{problem}; raise max_length or remove the row")
        labels = labels[-1:]
        cut = cut._replace(trained=[_only_last(cut.completions[0])])
    return EncodedExample(cut, truncated=excess > 0, annotation=labels)


def _last(trained: Sequence[bool]) -> int:
    """The position of the last trained token."""
    return len(trained) - 1 - trained[::-1].index(True)


def _only_last(ids: Sequence[int]) -> list[bool]:
    """A mask of tokens that is true at the last."""
    return [False] * (len(ids) - 1) + [True]


def solution(row: ParsedRow, encoder: Encoder, *, separator: str) -> Example:
    """Join the steps of one solution to one completion, trained at the last token of each step.

    There its label or score is. Each step and each separator is tokenized alone, as TRL did before
    1.0, so that no token spans the end of a step; a plain prompt begins with the BOS token where
    there is one.
    """
    assert row.prompt is not None
    if isinstance(row.prompt, str):
        bos = encoder.tokenizer.bos_token_id
        prompt = encoder.bare(row.prompt)
        if bos is not None:
            prompt.insert(0, bos)
    else:
        prompt = encoder.chat(row.prompt, row.template_options, generation_prompt=True)
    if not prompt:
        problem = "the prompt is empty and there is no BOS token to put in its place"
        raise BadRow("no prompt", f"{problem}; give a prompt")
    end = encoder.bare(separator)
    if not end:
        wanted = "wanted text that the tokenizer has a token for"
        raise ValueError(f"separator: {wanted}, got {separator!r}")
    completion: list[int] = []
    trained: list[bool] = []
    for step in row.completions:
        ids = encoder.bare(str(step)) + end
        completion += ids
        trained += _only_last(ids)
    images = encoder.located(prompt, _messages(row.prompt))
    encoder.located(completion, [])  # refuses an image token that someone has typed
    return Example(prompt, [completion], [trained], images)


def _messages(*values: PlainOrChat | None) -> list[Message]:
    """The messages of conversations, one after another; none of texts."""
    messages: list[Message] = []
    for value in values:
        if isinstance(value, list):
            messages += value
    return messages


def _untrain(trained: list[bool], images: Sequence[ImageRef]) -> None:
    """Leave the tokens of images out of the trained ones: they are seen, not written."""
    for image in images:
        trained[image.start : image.start + image.length] = [False] * image.length


def _with_images(
    cut: Example, images: Sequence[ImageRef], first: int, limit: Tokenization
) -> Example:
    """An example of what truncation has left, with its images.

    Args:
        images: of the whole example.
        first: the number of tokens that its beginning lost.

    Raises:
        BadRow: if an image would lose its beginning.
    """
    left = len(cut.prompt) + sum(map(len, cut.completions))
    kept: list[ImageRef] = []
    for image in images:
        start = image.start - first
        if start < 0:
            raise limit.refuse("image cut off", "an image begins earlier", "it would be cut off")
        if start + image.length <= left:
            kept.append(image._replace(start=start))
    return cut._replace(images=tuple(kept))


def _supervised_tokens(
    row: ParsedRow, encoder: Encoder, train_on: TrainOn
) -> list[tuple[list[int], list[bool], bool]]:
    """For each example its tokens, which of them are trained, and whether a prompt lost its end."""
    (text,) = row.completions
    before = row.prompt if isinstance(row.prompt, list) else []
    if train_on == "auto":
        train_on = _default_train_on(row.prompt, text)
    if train_on == "assistant":
        if isinstance(text, str):
            wanted = "train_on='assistant' wants conversations, got plain text"
            raise ValueError(f"{wanted}; choose 'completion' or 'all'")
        return encoder.assistant([*before, *text], row.template_options, start=len(before))
    if train_on == "all":
        if isinstance(text, str):
            ids = encoder.plain(str(row.prompt or "") + encoder.with_eos(text))
        else:
            ids = encoder.chat([*before, *text], row.template_options)
        return [(ids, [True] * len(ids), False)]
    if row.prompt is None:
        wanted = "train_on='completion' wants the columns prompt and completion"
        raise ValueError(f"{wanted}; choose 'assistant' or 'all'")
    prompt, (completion,), (mask,), shortened = encoder.continuations(
        row.prompt, [text], row.template_options
    )
    return [(prompt + completion, [False] * len(prompt) + mask, shortened)]


def _default_train_on(
    prompt: str | list[Message] | None, completion: str | list[Message]
) -> TrainOn:
    """What "auto" is for these values: see `encode_supervised`."""
    if isinstance(completion, list) and (prompt is None or len(completion) > 1):
        return "assistant"
    return "all" if prompt is None else "completion"


def _sequence(ids: list[int], trained: list[bool]) -> Example | None:
    """Split tokens before the first trained one, and end them with the last; None if none is.

    The prompt has one token at least: a trained first token, which nothing predicts, is in it.
    """
    targets = [position for position, train in enumerate(trained) if train and position]
    if not targets:
        return None
    first = targets[0]
    end = targets[-1] + 1
    return Example(ids[:first], [ids[first:end]], [trained[first:end]])


def _cut(full: Example, excess: int, limit: Tokenization) -> Example:
    """Without the ends of the completions, or without the beginning of the prompt."""
    if not excess:
        return full
    if limit.truncation == "keep_start":
        assert limit.max_length is not None
        left = limit.max_length - len(full.prompt)
        if left <= 0:
            raise limit.refuse("prompt too long", f"the prompt has {len(full.prompt)} tokens")
        completions = [ids[:left] for ids in full.completions]
        trained = [mask[:left] for mask in full.trained]
        return full._replace(completions=completions, trained=trained)
    if excess >= len(full.prompt):
        longest = max(map(len, full.completions))
        problem = f"a completion has {longest} tokens"
        raise limit.refuse("completion too long", problem, "nothing is left of the prompt")
    cut = full._replace(prompt=full.prompt[excess:])
    return _with_images(cut, full.images, excess, limit)


def _identical_after_truncation(limit: Tokenization) -> BadRow:
    problem = f"two completions differ only beyond max_length={limit.max_length}"
    fix = "raise max_length or remove the row"
    return BadRow("identical after truncation", f"{problem}, so neither is preferred; {fix}")


def _repeats(completions: Sequence[Sequence[int]]) -> bool:
    return len(set(map(tuple, completions))) < len(completions)


def _asked(example: Example) -> tuple[Sequence[int], ...]:
    """What a completion answers, as numbers: the prompt, and each of its images."""
    return (example.prompt, *(list(image.key) for image in example.images))


def _digest(*parts: Sequence[int]) -> int:
    """Name the contents of a row, so that contradictions are found without holding their tokens."""
    numbers = array("q")
    for part in parts:
        numbers.append(len(part))  # or [1, 2], [3] would be as [1], [2, 3]
        numbers.extend(part)
    # 8 bytes fit an int64 of Arrow; two of a million rows share one with a chance of 3e-8
    digest = hashlib.blake2b(numbers.tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
