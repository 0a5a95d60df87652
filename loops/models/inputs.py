"""Lay out examples as model input: the one file that knows about padding, packing and shared prompts.

    padded   one row per completion, prompt + completion, padded on the right to the longest
    packed   the same sequences side by side in fewer rows; position ids restart, and with no attention mask
             transformers keeps the sequences apart by them
    shared   prompt + completion_1 + ... + completion_G once per example; position ids restart after the prompt, and a
             4-D mask lets each completion see the prompt and itself only

Hidden states, and so losses, gradients and metrics, are the same in all three, up to rounding. They differ in the
number of token positions that the model computes.

A policy reads each trained token one position before it, where it is predicted; a scorer reads it at its own position,
the end of a completion or of a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ...data import Example, first_fit

Layout = Literal["padded", "packed", "shared"]
Read = Literal["before", "at"]


@dataclass(frozen=True)
class Rows:
    """Model input, and the position at which each trained token is read.

    Attributes:
        input_ids, position_ids: int64 [rows, width].
        attention_mask: None (packed), int64 [rows, width] (padded), or bool [rows, 1, width, width] (shared).
        position: int64 [tokens], index of each trained token into the flattened rows, in the token order of `Batch`.
    """

    input_ids: Tensor
    position_ids: Tensor
    attention_mask: Tensor | None
    position: Tensor

    def to(self, device: torch.device | str) -> "Rows":
        mask = None if self.attention_mask is None else self.attention_mask.to(device)
        return Rows(self.input_ids.to(device), self.position_ids.to(device), mask, self.position.to(device))


class _Segment(NamedTuple):
    """A run of tokens that must stay together in one row."""

    tokens: list[int]
    positions: list[int]
    branch: list[int]  # 0 for the prompt, i for the tokens of completion i, counted from 1
    read: list[int]  # offset in the segment where each trained token is read


def arrange(examples: Sequence[Example], layout: Layout, *, read: Read = "before", one_row: bool = False) -> Rows:
    """Arrange the examples in rows; ``one_row`` puts all of them into one, as kernels for packed rows want it.

    Rows are as wide as the longest segment and filled first-fit, longest first: attention costs their width squared.
    """
    if layout == "shared" and all(len(example.completions) == 1 for example in examples):
        layout = "packed"  # nothing to share, and no mask to store
    segments = [
        segment
        for example in examples
        for segment in ([_shared(example, read)] if layout == "shared" else _separate(example, read))
    ] or [_Segment([0], [0], [0], [])]  # an empty batch still runs forward and backward: other ranks wait for it
    width = sum(len(s.tokens) for s in segments) if one_row else max(len(s.tokens) for s in segments)
    places = [(i, 0) for i in range(len(segments))] if layout == "padded" else _packed(segments, width)
    return _fill(segments, places, width, layout)


def _separate(example: Example, read: Read) -> list[_Segment]:
    return [
        _shared(Example(example.prompt, [completion], [trained]), read)
        for completion, trained in zip(example.completions, example.trained, strict=True)
    ]


def _shared(example: Example, read: Read) -> _Segment:
    start = len(example.prompt)
    tokens, positions, branch, read_at = list(example.prompt), list(range(start)), [0] * start, []
    for i, (completion, trained) in enumerate(zip(example.completions, example.trained, strict=True), start=1):
        offset = len(tokens)
        marked = [t for t, train in enumerate(trained) if train]
        end = max(marked, default=0)  # the last target is predicted from the token before it, and is no input
        if read == "at":
            end = end + 1 if marked else 0
            read_at += [offset + t for t in marked]
        else:  # the first token of every completion is predicted from the prompt's last position
            read_at += [offset + t - 1 if t else start - 1 for t in marked]
        tokens += completion[:end]
        positions += range(start, start + end)
        branch += [i] * end
    return _Segment(tokens, positions, branch, read_at)


def _packed(segments: list[_Segment], width: int) -> list[tuple[int, int]]:
    """(row, offset) of each segment."""
    lengths = [len(segment.tokens) for segment in segments]
    places = [(0, 0)] * len(segments)
    for row, members in enumerate(first_fit(range(len(segments)), lengths, width)):
        offset = 0
        for i in members:
            places[i] = (row, offset)
            offset += lengths[i]
    return places


def _fill(segments: list[_Segment], places: list[tuple[int, int]], width: int, layout: Layout) -> Rows:
    rows = 1 + max(row for row, _ in places)
    input_ids = torch.zeros(rows, width, dtype=torch.int64)
    # Slots that no segment covers have position 0, and so are sequences of their own, which are never read.
    position_ids = torch.zeros(rows, width, dtype=torch.int64)
    owner = torch.full((rows, width), -1)
    branch = torch.zeros(rows, width, dtype=torch.int64)
    position: list[int] = []
    for i, (segment, (row, offset)) in enumerate(zip(segments, places, strict=True)):
        span = slice(offset, offset + len(segment.tokens))
        input_ids[row, span] = torch.tensor(segment.tokens)
        position_ids[row, span] = torch.tensor(segment.positions)
        owner[row, span] = i
        branch[row, span] = torch.tensor(segment.branch)
        position += [row * width + offset + p for p in segment.read]
    mask: Tensor | None = None
    if layout == "padded":
        mask = (owner >= 0).to(torch.int64)
    elif layout == "shared":
        same = owner[:, :, None] == owner[:, None, :]
        visible = (branch[:, None, :] == 0) | (branch[:, :, None] == branch[:, None, :])
        mask = (same & visible & torch.ones(width, width, dtype=torch.bool).tril())[:, None]
    return Rows(input_ids, position_ids, mask, torch.tensor(position, dtype=torch.int64))
