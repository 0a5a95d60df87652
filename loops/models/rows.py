"""Examples laid out as the input of a model.

Only this file knows about padding, packing and shared prompts:

    padded   one row per completion, prompt + completion, padded on the right to the longest
    packed   the same sequences side by side in fewer rows; position ids restart, and with no attention mask
             transformers keeps the sequences apart by them
    shared   prompt + completion_1 + ... + completion_G once per example; position ids restart after the prompt, and a
             4-D mask lets each completion see the prompt and itself only

Hidden states, and therefore losses, gradients and metrics, are the same in all three, up to
rounding. They differ in the number of token positions that the model computes, and of pairs of
them: the mask of a shared row is dense, of the width squared, but under FlexAttention
(``attention: flex_attention``), which leaves out blocks that see nothing.

A policy reads each trained token one position before it, where it is predicted; a scorer reads it
at its own position, the end of a completion or of a step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from ...data import Example, first_fit
from ...data.images import ImageRef

Layout = Literal["padded", "packed", "shared"]

# positions of the tokens of a sequence that shows these images, in several axes
Axes = Callable[[list[int], Sequence[ImageRef]], list[list[int]]]

_BLOCK = 128  # positions of a block of FlexAttention


@dataclass(frozen=True)
class Rows:
    """Model input, and the position at which each trained token is read.

    Attributes:
        input_ids: int64 [rows, width].
        position_ids: int64 [rows, width]; in several axes (M-RoPE) [axes, rows, width], before
            which packed rows have the plain positions, by which transformers makes their mask.
        attention_mask: None (packed), int64 [rows, width] (padded), or (shared) bool [rows, 1,
            width, width], or the same as blocks.
        position: int64 [tokens], index of each trained token into the flattened rows, in the token
            order of `Batch`.
        mine: bool [all tokens], the trained tokens that ``position`` is of; None for all. See
            `Columns`.
        shown: the images of each sequence, in the order in which the flattened rows show them.
    """

    input_ids: Tensor
    position_ids: Tensor
    attention_mask: Tensor | BlockMask | None
    position: Tensor
    mine: Tensor | None = None
    shown: tuple[tuple[ImageRef, ...], ...] = ()


class _Segment(NamedTuple):
    """A run of tokens that must stay together in one row.

    Attributes:
        tokens: their ids.
        positions: of each token, for the model: plain ones, then those in several axes, if the
            model has some.
        branches: what each token belongs to, 0 for the prompt and from 1 on for the completions.
        read_at: the offset at which each trained token is read.
        images: that its tokens show.
    """

    tokens: list[int]
    positions: list[list[int]]
    branches: list[int]
    read_at: list[int]
    images: tuple[ImageRef, ...] = ()


def arrange(
    examples: Sequence[Example],
    layout: Layout,
    *,
    read: Literal["before", "at"] = "before",
    one_row: bool = False,
    blocks: bool = False,
    multiple_of: int = 1,
    axes: Axes | None = None,
    image_token: int | None = None,
    device: torch.device | str = "cpu",
) -> Rows:
    """Arrange the examples in rows.

    ``one_row`` puts all of them into one, as kernels for packed rows require.

    With ``blocks``, the mask of shared rows is one of FlexAttention, whose memory is the number of
    blocks. Rows are as wide as the longest segment, or the next ``multiple_of``, and filled
    first-fit, longest first: attention costs their width squared.

    Args:
        axes: gives the positions of a sequence in several axes, for a model that has them.
        image_token: stands for what a model sees of an image.
    """
    if layout == "shared" and all(len(example.completions) == 1 for example in examples):
        layout = "packed"  # nothing to share, and no mask to store
    if layout != "shared":
        examples = _one_completion_each(examples)
    segments = [_segment(example, read, axes) for example in examples]
    if not segments:  # an empty batch still runs forward and backward: other ranks wait for it
        segments = [_Segment([0], [[0]], [0], [])]

    lengths = [len(segment.tokens) for segment in segments]
    width = sum(lengths) if one_row else max(lengths)
    width += -width % multiple_of
    everything = range(len(segments))
    rows = [[i] for i in everything]  # of padded ones
    if layout != "padded":
        rows = first_fit(everything, lengths, width)
    slots = _Slots(rows, width, device)

    # Slots that no segment covers have position 0, and so are sequences of their own, which are
    # never read. They repeat a token that is trained on: the embedding of another may be all zeros,
    # and some models' gradients of that are NaN. An image token would want an image.
    words = (token for token in segments[0].tokens if token != image_token)
    input_ids = slots.fill([segment.tokens for segment in segments], next(words))
    position_ids = _position_ids(segments, layout, slots)
    mask = _mask(segments, layout, slots, blocks=blocks)
    position = _read_positions(segments, slots)
    in_order = (segments[i].images for members in slots.rows for i in members)
    return Rows(input_ids, position_ids, mask, position, shown=tuple(filter(None, in_order)))


class _Slots(NamedTuple):
    """The token positions of rows, and which segments fill them.

    Attributes:
        rows: the segments of each row, in order, as their indices.
    """

    rows: Sequence[Sequence[int]]
    width: int
    device: torch.device | str

    def fill(self, values: Sequence[Sequence[int]], filler: int) -> Tensor:
        """int64 [rows, width]: the values of the segments of each row, then the filler."""
        filled = []
        for members in self.rows:
            row = list(chain.from_iterable(values[i] for i in members))
            filled.append(row + [filler] * (self.width - len(row)))
        return torch.tensor(filled, device=self.device)


def _position_ids(segments: Sequence[_Segment], layout: Layout, slots: _Slots) -> Tensor:
    """The position of each slot, or its positions in several axes; see `Rows`."""
    every = range(len(segments[0].positions))
    if layout != "packed" and len(every) > 1:
        every = every[1:]  # a mask tells sequences apart
    positions = [slots.fill([segment.positions[axis] for segment in segments], 0) for axis in every]
    return positions[0] if len(positions) == 1 else torch.stack(positions)


def _mask(
    segments: Sequence[_Segment], layout: Layout, slots: _Slots, *, blocks: bool
) -> Tensor | BlockMask | None:
    """The attention mask of a layout; packed rows have none."""
    if layout == "padded":
        return slots.fill([[1] * len(segment.tokens) for segment in segments], 0)
    if layout == "packed":
        return None
    owners = [[i] * len(segment.tokens) for i, segment in enumerate(segments)]
    owner = slots.fill(owners, -1)
    branch = slots.fill([segment.branches for segment in segments], 0)
    return _block_mask(owner, branch) if blocks else _dense_mask(owner, branch)


def _read_positions(segments: Sequence[_Segment], slots: _Slots) -> Tensor:
    """int64 [tokens], where each trained token is read in the flattened rows."""
    lengths = [len(segment.tokens) for segment in segments]
    starts = _starts(slots.rows, lengths, slots.width)
    read_at: list[int] = []
    for i, segment in enumerate(segments):
        read_at += [starts[i] + offset for offset in segment.read_at]
    return torch.tensor(read_at, dtype=torch.int64, device=slots.device)


def _one_completion_each(examples: Sequence[Example]) -> list[Example]:
    """An example for each completion, with its prompt."""
    return [
        example._replace(completions=[completion], trained=[trained])
        for example in examples
        for completion, trained in zip(example.completions, example.trained, strict=True)
    ]


def _starts(rows: Sequence[Sequence[int]], lengths: Sequence[int], width: int) -> dict[int, int]:
    """The index in the flattened rows at which each segment begins."""
    starts: dict[int, int] = {}
    for row, members in enumerate(rows):
        begun = row * width
        for i in members:
            starts[i] = begun
            begun += lengths[i]
    return starts


def _dense_mask(owner: Tensor, branch: Tensor, queries: slice = slice(None)) -> Tensor:
    """The keys that each of these queries sees, bool [rows, 1, queries, width]: itself and those
    before it, in the prompt and in its own completion."""
    place = torch.arange(owner.shape[1], device=owner.device)
    same = owner[:, queries, None] == owner[:, None, :]
    own = (branch[:, None, :] == 0) | (branch[:, queries, None] == branch[:, None, :])
    return (same & own & (place[queries, None] >= place))[:, None]


def _block_mask(owner: Tensor, branch: Tensor) -> BlockMask:
    """`_dense_mask` for FlexAttention, one block of queries at a time: nothing of the squared width
    is ever stored.
    """
    rows, width = owner.shape
    count = -(-width // _BLOCK)
    padding = count * _BLOCK - width
    # of each two blocks
    visible_pairs = torch.zeros(rows, 1, count, count, dtype=torch.int64, device=owner.device)
    for i in range(count):
        queries = slice(i * _BLOCK, (i + 1) * _BLOCK)
        of_keys = _dense_mask(owner, branch, queries).sum(2)  # [rows, 1, width]
        visible_pairs[:, :, i] = (
            nn.functional.pad(of_keys, (0, padding)).view(rows, 1, count, _BLOCK).sum(-1)
        )

    def blocks(chosen: Tensor) -> tuple[Tensor, Tensor]:
        """For each block of queries, the number of chosen blocks of keys, and all blocks with the
        chosen ones first.
        """
        order = chosen.int().argsort(dim=-1, descending=True, stable=True)
        return chosen.sum(-1, dtype=torch.int32), order.to(torch.int32)

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        own = (branch[row, key] == 0) | (branch[row, query] == branch[row, key])
        return (owner[row, query] == owner[row, key]) & own & (query >= key)

    # FlexAttention calls `visible` in blocks of which some pairs are seen, and not in those of
    # which all are.
    full = visible_pairs == _BLOCK**2
    partial_count, partial_blocks = blocks((visible_pairs > 0) & ~full)
    full_count, full_blocks = blocks(full)
    return BlockMask.from_kv_blocks(
        partial_count,
        partial_blocks,
        full_count,
        full_blocks,
        _BLOCK,
        visible,
        seq_lengths=(width, width),
    )


def _segment(example: Example, read: Literal["before", "at"], axes: Axes | None = None) -> _Segment:
    """The prompt of an example, and after it each completion as far as something is read."""
    start = len(example.prompt)
    segment = _Segment(list(example.prompt), [list(range(start))], [0] * start, [])
    if axes is not None:
        segment.positions.extend(axes(segment.tokens[:start], _within(example, start)))
    shown = start
    for branch, (completion, trained) in enumerate(
        zip(example.completions, example.trained, strict=True), start=1
    ):
        offset = len(segment.tokens)
        marked = [t for t, train in enumerate(trained) if train]
        if read == "at":
            end = marked[-1] + 1 if marked else 0
            segment.read_at.extend(offset + t for t in marked)
        else:
            # the last target is predicted from the token before it: no input
            end = marked[-1] if marked else 0
            # the first token of every completion is predicted from the prompt's last position
            for t in marked:
                segment.read_at.append(offset + t - 1 if t else start - 1)
        segment.tokens.extend(completion[:end])
        segment.positions[0].extend(range(start, start + end))
        segment.branches.extend([branch] * end)
        shown = start + end
        if axes is not None:
            whole = axes([*example.prompt, *completion[:end]], _within(example, shown))
            for positions, added in zip(segment.positions[1:], whole, strict=True):
                positions.extend(added[start:])
    return segment._replace(images=_within(example, shown))


def _within(example: Example, length: int) -> tuple[ImageRef, ...]:
    """The images of an example that its first tokens show."""
    return tuple(each for each in example.images if each.start + each.length <= length)
