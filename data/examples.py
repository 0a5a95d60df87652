"""One row as an example: its tokens, which of them carry loss, and what is left of it within `max_length`."""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal, NamedTuple

from .chat import Encoder
from .example import Example
from .columns import BadRow, Row

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
    """An example and what is known of it.

    ``truncated``: `max_length` cut it; ``shortened``: its prompt lost its end to the completions; ``judgment``: what
    its column of that kind holds; ``claim``: digests of what its row says, and of what would contradict that.
    """

    example: Example
    truncated: bool = False
    shortened: bool = False
    judgment: Any = None
    claim: tuple[int, ...] = ()


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


def question(row: Row, encoder: Encoder, *, limit: Limit) -> Encoded:
    """A prompt that is still to be answered. Of one that is too long, nothing is cut unless told so: it would ask
    something else."""
    assert row.prompt is not None
    if isinstance(row.prompt, str):
        prompt = encoder.plain(row.prompt)
        if prompt and prompt[-1] == encoder.tokenizer.eos_token_id and prompt[-1] != encoder.tokenizer.bos_token_id:
            prompt.pop()  # some tokenizers end every text, and this one goes on
    else:
        prompt = encoder.chat(row.prompt, row.template_options, generation_prompt=True)
    if not prompt:
        raise BadRow(
            "no prompt", "the prompt has no tokens, so nothing predicts the first one of an answer; fill it in"
        )
    excess = limit.excess(Example(prompt, [[]], [[]]))
    if excess:
        prompt = prompt[: limit.max_length] if limit.truncation == "keep_start" else prompt[excess:]
    return Encoded(Example(prompt, [], []), truncated=excess > 0)


def answers(row: Row, encoder: Encoder, *, limit: Limit) -> Encoded:
    """One or more answers to one prompt, all of them trained; no two of them may be the same."""
    assert row.prompt is not None
    prompt, completions, shortened = encoder.continuations(row.prompt, row.completions, row.template_options)
    if not prompt:
        # The first token is predicted from the one before: without a prompt, that is one which all answers begin with.
        if len({tuple(completion[:1]) for completion in completions}) > 1:
            raise BadRow("no prompt", "the prompt is empty, so nothing predicts the first token; give a prompt")
        prompt, completions = completions[0][:1], [completion[1:] for completion in completions]
    if not all(completions):
        raise BadRow("empty", "an answer has no tokens of its own; fill it in or remove the row")
    if _repeats(completions):
        raise BadRow("identical", "two answers have the same tokens, so neither is preferred; remove the row")
    whole = Example(prompt, completions, [[True] * len(completion) for completion in completions])
    excess = limit.excess(whole)
    if not excess:
        return Encoded(whole, shortened=shortened, judgment=row.judgment)
    cut = _cut_ends(whole, limit) if limit.truncation == "keep_start" else _cut_prompt(whole, excess, limit)
    if _repeats(cut.completions):
        raise _identical_after_truncation(limit)
    return Encoded(cut, truncated=True, shortened=shortened, judgment=row.judgment)


def pair(row: Row, encoder: Encoder, *, limit: Limit) -> Encoded:
    """Two answers to one prompt, the chosen one first, as `encode_preference` describes it."""
    encoded = answers(row, encoder, limit=limit)
    prompt, (chosen, rejected), _ = encoded.example
    return encoded._replace(claim=(_digest(prompt, chosen, rejected), _digest(prompt, rejected, chosen)))


def feedback(row: Row, encoder: Encoder, *, limit: Limit) -> list[Encoded]:
    """Each answer an example, desirable or not, as `encode_feedback` describes it."""
    desirable = [row.judgment] if len(row.completions) == 1 else [True, False]
    found = []
    for answer, good in zip(row.completions, desirable, strict=True):
        encoded = answers(replace(row, completions=(answer,), judgment=good), encoder, limit=limit)
        prompt, (completion,), _ = encoded.example
        claim = _digest(prompt, completion, [good]), _digest(prompt, completion, [not good])
        found.append(encoded._replace(claim=claim))
    if len(found) > 1 and found[0].example == found[1].example:
        raise _identical_after_truncation(limit)
    return found


def judged_steps(row: Row, encoder: Encoder, *, separator: str, train_on_last_step_only: bool, limit: Limit) -> Encoded:
    """The steps of one solution as one completion, and a label for each trained token."""
    whole, labels = solution(row, encoder, separator=separator), list(row.judgment)
    excess = limit.excess(whole)
    cut = whole
    if excess and limit.truncation == "keep_start":
        cut = _cut_steps(whole, limit)
        labels = labels[: sum(cut.trained[0])]
    elif excess:
        cut = _cut_prompt(whole, excess, limit)
    if train_on_last_step_only:
        if len(labels) < len(row.judgment):
            raise BadRow(
                "last step too far",
                f"the last step, the only one to train on, ends beyond max_length={limit.max_length}; raise max_length "
                "or remove the row",
            )
        labels = labels[-1:]
        cut = cut._replace(trained=[[False] * (len(cut.completions[0]) - 1) + [True]])
    return Encoded(cut, truncated=excess > 0, judgment=labels)


def solution(row: Row, encoder: Encoder, *, separator: str) -> Example:
    """The steps of one solution as one completion, trained at the last token of each: there its label or score is."""
    assert row.prompt is not None
    prompt, steps = encoder.steps(row.prompt, list(map(str, row.completions)), separator, row.template_options)
    if not prompt:
        raise BadRow("no prompt", "the prompt is empty and there is no BOS token to put in its place; give a prompt")
    ends = [[False] * (len(step) - 1) + [True] for step in steps]
    return Example(prompt, [list(chain(*steps))], [list(chain(*ends))])


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


def _cut_ends(whole: Example, limit: Limit) -> Example:
    assert limit.max_length is not None
    room = limit.max_length - len(whole.prompt)
    if room <= 0:
        raise BadRow(
            "prompt too long",
            f"the prompt has {len(whole.prompt)} tokens and max_length is {limit.max_length}, so nothing is left to "
            "train on; raise max_length or remove the row",
        )
    return Example(
        whole.prompt, [ids[:room] for ids in whole.completions], [trained[:room] for trained in whole.trained]
    )


def _cut_steps(whole: Example, limit: Limit) -> Example:
    """Without the steps that don't end within `max_length`."""
    prompt, (ids,), (trained,) = _cut_ends(whole, limit)
    if not any(trained):
        raise BadRow(
            "no step left",
            f"the first step ends at token {len(prompt) + whole.trained[0].index(True) + 1} and max_length is "
            f"{limit.max_length}, so no label is left to train on; raise max_length or remove the row",
        )
    end = max(position for position, train in enumerate(trained) if train) + 1
    return Example(prompt, [ids[:end]], [trained[:end]])


def _cut_prompt(whole: Example, excess: int, limit: Limit) -> Example:
    if excess >= len(whole.prompt):
        raise BadRow(
            "answer too long",
            f"an answer has {max(map(len, whole.completions))} tokens and max_length is {limit.max_length}, so nothing "
            "is left of the prompt; raise max_length or remove the row",
        )
    return whole._replace(prompt=whole.prompt[excess:])


def _identical_after_truncation(limit: Limit) -> BadRow:
    return BadRow(
        "identical after truncation",
        f"two answers differ only beyond max_length={limit.max_length}, so neither is preferred; raise max_length or "
        "remove the row",
    )


def _repeats(completions: Sequence[list[int]]) -> bool:
    return len(set(map(tuple, completions))) < len(completions)


def _digest(*parts: Sequence[int]) -> int:
    """Names what a row says, so that contradictions are found without holding their tokens."""
    content = array("q", [number for part in parts for number in (len(part), *part)]).tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little", signed=True)
