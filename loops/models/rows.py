"""Examples laid out as the input of a model.

Only this file knows about padding, packing and shared prompts:

    padded   one row per completion, prompt + completion, padded on the right to the longest
    packed   the same sequences side by side in fewer rows; position ids restart, and with no attention mask
             transformers keeps the sequences apart by them
    shared   prompt + completion_1 + ... + completion_G once per example; position ids restart after the prompt, and a
             4-D mask lets each completion see the prompt and itself only

Hidden states, and therefore losses, gradients and metrics, are the same in all three, up to rounding. They differ in
the number of token positions that the model computes, and of pairs of them: the mask of a shared row is dense, of the
width squared, but under FlexAttention (``attention: flex_attention``), which leaves out blocks that see nothing.

A policy reads each trained token one position before it, where it is predicted; a scorer reads it at its own position,
the end of a completion or of a step.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from ...data import Example, first_fit

Layout = Literal["padded", "packed", "shared"]

_BLOCK = 128  # positions of a block of FlexAttention


@dataclass(frozen=True)
class Rows:
    """Model input, and the position at which each trained token is read.

    Attributes:
        input_ids, position_ids: int64 [rows, width].
        attention_mask: None (packed), int64 [rows, width] (padded), or (shared) bool [rows, 1, width, width], or the
            same as blocks.
        position: int64 [tokens], index of each trained token into the flattened rows, in the token order of `Batch`.
        mine: bool [all tokens], the trained tokens that ``position`` is of; None for all. See `Columns`.
    """

    input_ids: Tensor
    position_ids: Tensor
    attention_mask: Tensor | BlockMask | None
    position: Tensor
    mine: Tensor | None = None


def arrange(
    examples: Sequence[Example],
    layout: Layout,
    *,
    read: Literal["before", "at"] = "before",
    one_row: bool = False,
    blocks: bool = False,
    multiple_of: int = 1,
    device: torch.device | str = "cpu",
) -> Rows:
    """Arrange the examples in rows; ``one_row`` puts all of them into one, as kernels for packed rows require.

    With ``blocks``, the mask of shared rows is one of FlexAttention, whose memory is the number of blocks. Rows are as
    wide as the longest segment, or the next ``multiple_of``, and filled first-fit, longest first: attention costs their
    width squared. A segment is a run of tokens that must stay together in one row.
    """
    if layout == "shared" and all(len(example.completions) == 1 for example in examples):
        layout = "packed"  # nothing to share, and no mask to store
    if layout != "shared":
        examples = [
            Example(example.prompt, [completion], [trained])
            for example in examples
            for completion, trained in zip(example.completions, example.trained, strict=True)
        ]
    # An empty batch still runs forward and backward: other ranks wait for it.
    segments = [_segment(example, read) for example in examples] or [([0], [0], [0], [])]
    tokens, positions, branches, read_at = zip(*segments, strict=True)
    lengths = [len(ids) for ids in tokens]
    width, every = sum(lengths) if one_row else max(lengths), range(len(lengths))
    width += -width % multiple_of
    rows = [[i] for i in every] if layout == "padded" else first_fit(every, lengths, width)

    def lay(values: Sequence[Sequence[int]], filler: int) -> Tensor:
        """One value for each slot of the rows: those of the row's segments one after the other, then the filler."""
        laid = ([value for i in members for value in values[i]] for members in rows)
        return torch.tensor([row + [filler] * (width - len(row)) for row in laid], device=device)

    # Slots that no segment covers have position 0, and so are sequences of their own, which are never read; of a token
    # that is trained on, as the embedding of another may be all zeros, from which some models compute NaN gradients.
    input_ids, position_ids = lay(tokens, tokens[0][0]), lay(positions, 0)
    start: dict[int, int] = {}  # of each segment, in the flattened rows
    for row, members in enumerate(rows):
        start |= zip(members, itertools.accumulate((lengths[i] for i in members), initial=row * width), strict=False)
    position = torch.tensor([start[i] + p for i in every for p in read_at[i]], dtype=torch.int64, device=device)
    mask: Tensor | BlockMask | None = None
    if layout == "padded":
        mask = lay([[1] * length for length in lengths], 0)
    elif layout == "shared":
        owner = lay([[i] * length for i, length in enumerate(lengths)], -1)
        mask = (_block_mask if blocks else _dense_mask)(owner, lay(branches, 0))
    return Rows(input_ids, position_ids, mask, position)


def _dense_mask(owner: Tensor, branch: Tensor, queries: slice = slice(None)) -> Tensor:
    """The keys that each of these queries sees, bool [rows, 1, queries, width]: itself and those before it, in the
    prompt and in its own completion."""
    place = torch.arange(owner.shape[1], device=owner.device)
    same = owner[:, queries, None] == owner[:, None, :]
    own = (branch[:, None, :] == 0) | (branch[:, queries, None] == branch[:, None, :])
    return (same & own & (place[queries, None] >= place))[:, None]


def _block_mask(owner: Tensor, branch: Tensor) -> BlockMask:
    """`_dense_mask` for FlexAttention, one block of queries at a time: nothing of the squared width is ever stored."""
    rows, width = owner.shape
    count = -(-width // _BLOCK)
    seen = torch.zeros(rows, 1, count, count, dtype=torch.int64, device=owner.device)  # pairs of each two blocks
    for i in range(count):
        keys = _dense_mask(owner, branch, slice(i * _BLOCK, (i + 1) * _BLOCK)).sum(2)
        seen[:, :, i] = nn.functional.pad(keys, (0, count * _BLOCK - width)).view(rows, 1, count, _BLOCK).sum(-1)

    def blocks(chosen: Tensor) -> tuple[Tensor, Tensor]:
        """For each block of queries, the number of chosen blocks of keys, and all blocks with the chosen ones first."""
        order = chosen.int().argsort(dim=-1, descending=True, stable=True)
        return chosen.sum(-1, dtype=torch.int32), order.to(torch.int32)

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        own = (branch[row, key] == 0) | (branch[row, query] == branch[row, key])
        return (owner[row, query] == owner[row, key]) & own & (query >= key)

    whole = seen == _BLOCK**2
    some, all_of_it = blocks((seen > 0) & ~whole), blocks(whole)
    return BlockMask.from_kv_blocks(*some, *all_of_it, _BLOCK, visible, seq_lengths=(width, width))


def _segment(example: Example, read: Literal["before", "at"]) -> tuple[list[int], list[int], list[int], list[int]]:
    """The tokens of an example; the position and branch of each, 0 for the prompt and from 1 on for the completions;
    and the offset at which each trained token is read."""
    start = len(example.prompt)
    tokens, positions, branches, read_at = list(example.prompt), list(range(start)), [0] * start, []
    for branch, (completion, trained) in enumerate(zip(example.completions, example.trained, strict=True), start=1):
        offset = len(tokens)
        marked = [t for t, train in enumerate(trained) if train]
        end = max(marked, default=0)  # the last target is predicted from the token before it, and is not an input
        if read == "at":
            end = end + 1 if marked else 0
            read_at += [offset + t for t in marked]
        else:  # the first token of every completion is predicted from the prompt's last position
            read_at += [offset + t - 1 if t else start - 1 for t in marked]
        tokens += completion[:end]
        positions += range(start, start + end)
        branches += [branch] * end
    return tokens, positions, branches, read_at
