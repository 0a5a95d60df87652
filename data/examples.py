"""One row as an example: its tokens, which of them carry loss, and what is left of it within `max_length`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from .chat import Encoder, common_prefix
from .example import Example
from .layouts import BadRow, Row

TrainOn = Literal["auto", "assistant", "completion", "all"]
Truncation = Literal["keep_start", "keep_end", "error"]


@dataclass(frozen=True)
class Limit:
    """How many tokens prompt and completion may have together (None: any number), and what becomes of a longer one."""

    max_length: int | None
    truncation: Truncation

    def __post_init__(self) -> None:
        if self.max_length is not None and self.max_length < 2:
            raise ValueError(f"max_length: wanted at least 2, for a prompt and a completion, got {self.max_length}")
        if self.truncation not in ("keep_start", "keep_end", "error"):
            raise ValueError(f"truncation: wanted keep_start, keep_end or error, got {self.truncation!r}")

    def excess(self, example: Example) -> int:
        """By how many tokens the example is too long.

        Raises:
            BadRow: if it is, and nothing may be cut.
        """
        length = len(example.prompt) + max(map(len, example.completions))
        if self.max_length is None or length <= self.max_length:
            return 0
        if self.truncation == "error":
            raise BadRow(
                "too long",
                f"{length} tokens and max_length is {self.max_length}; raise max_length, choose the truncation "
                "keep_start or keep_end, or remove the row",
            )
        return length - self.max_length


class Encoded(NamedTuple):
    """An example, whether `max_length` cut it, and whether its prompt lost its end to the completions."""

    example: Example
    truncated: bool = False
    shortened: bool = False


def demonstration(row: Row, encoder: Encoder, *, train_on: TrainOn, limit: Limit) -> Encoded:
    """One answer to one prompt, as `encode_supervised` describes it."""
    ids, trained, shortened = _supervised_tokens(row, encoder, train_on)
    whole = _sequence(ids, trained)
    if whole is None:
        raise BadRow("empty", "no token is left to train on; give it an answer or remove the row")
    excess = limit.excess(whole)
    if not excess:
        return Encoded(whole, shortened=shortened)
    ids = whole.prompt + whole.completions[0]
    trained = [False] * len(whole.prompt) + whole.trained[0]
    kept = slice(len(ids) - excess) if limit.truncation == "keep_start" else slice(excess, None)
    cut = _sequence(ids[kept], trained[kept])
    if cut is None:
        raise BadRow(
            "fully masked" if row.prompt is None else "prompt too long",
            f"{len(whole.prompt)} tokens precede the first trained one and max_length is {limit.max_length}, so "
            "nothing is left to train on; raise max_length or remove the row",
        )
    return Encoded(cut, truncated=True, shortened=shortened)


def pair(row: Row, encoder: Encoder, *, limit: Limit) -> Encoded:
    """Two answers to one prompt, the chosen one first, as `encode_preference` describes it."""
    assert row.prompt is not None
    prompt, completions, shortened = encoder.continuations(row.prompt, row.completions, row.template_options)
    if not prompt:
        # The first token is predicted from the one before: without a prompt, that is one which both answers begin with.
        if not common_prefix(*completions):
            raise BadRow("no prompt", "the prompt is empty, so nothing predicts the first token; give a prompt")
        prompt, completions = completions[0][:1], [completion[1:] for completion in completions]
    if not all(completions):
        raise BadRow("empty", "an answer has no tokens of its own; fill it in or remove the row")
    if completions[0] == completions[1]:
        raise BadRow("identical", "chosen and rejected have the same tokens; remove the row")
    whole = _all_trained(prompt, completions)
    excess = limit.excess(whole)
    if not excess:
        return Encoded(whole, shortened=shortened)
    cut = _cut_ends(whole, limit) if limit.truncation == "keep_start" else _cut_prompt(whole, excess, limit)
    if cut.completions[0] == cut.completions[1]:
        raise BadRow(
            "identical after truncation",
            f"chosen and rejected differ only beyond max_length={limit.max_length}, so no preference is left; raise "
            "max_length or remove the row",
        )
    return Encoded(cut, truncated=True, shortened=shortened)


def _supervised_tokens(row: Row, encoder: Encoder, train_on: TrainOn) -> tuple[list[int], list[bool], bool]:
    (answer,) = row.completions
    if train_on == "auto":
        train_on = "completion" if row.prompt is not None else "assistant" if isinstance(answer, list) else "all"
    if train_on == "assistant":
        if isinstance(answer, str):
            raise ValueError("train_on='assistant' wants conversations, got plain text; choose 'completion' or 'all'")
        before = row.prompt if isinstance(row.prompt, list) else []
        return *encoder.assistant([*before, *answer], row.template_options, start=len(before)), False
    if row.prompt is not None:
        prompt, (completion,), shortened = encoder.continuations(row.prompt, [answer], row.template_options)
        return prompt + completion, [train_on == "all"] * len(prompt) + [True] * len(completion), shortened
    if train_on == "completion":
        raise ValueError("train_on='completion' wants the columns prompt and completion; choose 'assistant' or 'all'")
    if isinstance(answer, str):
        ids = encoder.plain(encoder.with_eos(answer))
    else:
        ids = encoder.chat(answer, row.template_options)
    return ids, [True] * len(ids), False


def _sequence(ids: list[int], trained: list[bool]) -> Example | None:
    """Prompt: what precedes the first trained token, at least one token. What follows the last has no effect."""
    targets = [position for position, train in enumerate(trained) if train and position]
    if not targets:
        return None
    first, end = targets[0], targets[-1] + 1
    return Example(ids[:first], [ids[first:end]], [trained[first:end]])


def _all_trained(prompt: list[int], completions: Sequence[list[int]]) -> Example:
    return Example(prompt, list(completions), [[True] * len(completion) for completion in completions])


def _cut_ends(whole: Example, limit: Limit) -> Example:
    assert limit.max_length is not None
    room = limit.max_length - len(whole.prompt)
    if room <= 0:
        raise BadRow(
            "prompt too long",
            f"the prompt has {len(whole.prompt)} tokens and max_length is {limit.max_length}, so nothing is left to "
            "train on; raise max_length or remove the row",
        )
    return _all_trained(whole.prompt, [completion[:room] for completion in whole.completions])


def _cut_prompt(whole: Example, excess: int, limit: Limit) -> Example:
    if excess >= len(whole.prompt):
        raise BadRow(
            "answer too long",
            f"an answer has {max(map(len, whole.completions))} tokens and max_length is {limit.max_length}, so nothing "
            "is left of the prompt; raise max_length or remove the row",
        )
    return _all_trained(whole.prompt[excess:], whole.completions)
