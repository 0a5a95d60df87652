"""A `ContinuousBatch` in tensors of fixed shapes, whose token step a CUDA graph replays.

A token step of a small model is a thousand short kernels, which a host starts more slowly than a
GPU runs them. So the whole step, draw included, is work of the device on tensors that stay where
they are: recorded once for a number of rows (8, 16, 32, ...) and of columns (256, 512, ...), and
replayed. Lengths stay on the device, and the host reads the tokens of a step while the next one
runs. Hence a finished sequence runs one step more, whose token nobody reads.

Tokens and log-probs are those of a `ContinuousBatch`, which is the definition. Elsewhere than on
CUDA the same steps are plain calls. It has never run on a GPU.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..source import SourceError
from .decode import DecodeSequence, DrawKinds, ModelRunner, draw_rows, numbers_of, penalize_seen
from .kv_cache import ReadOnce, RowCache, filled_gaps

ROWS = 8  # of the smallest shape; the next one has twice as many, ...
COLUMNS = 256


@dataclass
class _Rows:
    """What the device knows of each row.

    Attributes:
        token: int64 [rows], the last one, not cached yet.
        logprob: float64 [rows], of that token.
        length, beyond: int64 [rows], see `RowCache`.
        drawn: int64 [rows], how many tokens were drawn.
        used: int64 [rows], 1 where there is a sequence, 0 elsewhere.
        uniform: float64 [rows, columns], the numbers that decide tokens.
        numbers: float64 [rows, 4], see `numbers_of`.
        penalty: float64 [rows], the repetition penalty.
        seen: bool [rows, V], the tokens of prompt and completion, where there is a penalty.
    """

    token: Tensor
    logprob: Tensor
    length: Tensor
    beyond: Tensor
    drawn: Tensor
    used: Tensor
    uniform: Tensor
    numbers: Tensor
    penalty: Tensor
    seen: Tensor

    @classmethod
    def empty(cls, rows: int, columns: int, vocab: int, device: torch.device) -> "_Rows":
        whole = torch.zeros(rows, dtype=torch.int64, device=device)
        number = torch.zeros(rows, dtype=torch.float64, device=device)
        return cls(
            token=whole.clone(),
            logprob=number.clone(),
            length=whole.clone(),
            beyond=whole.clone(),
            drawn=whole.clone(),
            used=whole.clone(),
            uniform=number.new_zeros(rows, columns),
            numbers=number.new_zeros(rows, 4),
            penalty=torch.ones_like(number),
            seen=torch.zeros(rows, vocab, dtype=torch.bool, device=device),
        )

    def tensors(self) -> list[Tensor]:
        return [getattr(self, each.name) for each in fields(self)]

    def part(self, rows: slice) -> "_Rows":
        """Some of the rows, in the same memory."""
        return _Rows(*(tensor[rows] for tensor in self.tensors()))


class _Shape(NamedTuple):
    """What a recorded step is for."""

    rows: int
    columns: int
    kinds: DrawKinds
    penalized: bool


class Drawn(NamedTuple):
    """Tokens that were drawn, perhaps still on their way to the host.

    Attributes:
        sequences: that they continue.
        tokens: int64 [sequences].
        logprobs: [sequences].
        version: of the weights.
        arrived: on a GPU, set when both are on the host.
    """

    sequences: list[DecodeSequence]
    tokens: Tensor
    logprobs: Tensor
    version: int
    arrived: torch.cuda.Event | None = None

    def read(self) -> tuple[list[int], list[float]]:
        """Tokens and log-probs; waits until they are there."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.tokens.tolist(), self.logprobs.tolist()


class GraphBatch(RowCache):
    """Rows and columns of the next larger shape; see the module.

    Within ``cache_bytes``: ``fit`` is asked for the columns of that shape.

    Attributes:
        lengths: what `length` holds, as the host knows it without asking.
        held: all rows that there is space for; `length`, `beyond` and `row` are those of the step.
        columns: that there is space for.
        unread: tokens that were drawn, and not handed out yet.
    """

    def __init__(
        self,
        runner: ModelRunner,
        fit: Callable[[int], int],
        window: float = math.inf,
        *,
        unwritten: float = 0.0,
    ) -> None:
        def fit_shape(longest: int) -> int:
            return fit(_shape_of(longest, COLUMNS))

        super().__init__(runner, fit_shape, window, unwritten=unwritten)
        self.device = runner.policy.device
        self.lengths: list[int] = []
        self.columns = 0
        self.held = _Rows.empty(0, 0, runner.vocab, self.device)
        self.unread: list[Drawn] = []
        self._graphs: dict[_Shape, torch.cuda.CUDAGraph | None] = {}
        self._memory: Any = None  # that all graphs share

    def advance(self, joining: Sequence[DecodeSequence], version: int) -> list[Drawn]:
        """Start to draw the next token of every sequence, and the first of those that join.

        Returns the tokens that the call before has started to draw.

        Args:
            version: of the weights.
        """
        started = []
        if self.sequences:
            self._step()
            started.append(self._send(0, version))
        if joining:
            first = len(self.sequences)
            states = self.join(joining)
            rows = slice(first, len(self.sequences))
            self._draw(self.held.part(rows), states, self._kinds(), self._penalized())
            started.append(self._send(first, version))
        drawn = self.take()
        self.unread = started
        return drawn

    def take(self) -> list[Drawn]:
        """What was drawn and not handed out yet."""
        drawn = self.unread
        self.unread = []
        return drawn

    def join(self, sequences: Sequence[DecodeSequence]) -> Tensor:
        first = len(self.sequences)
        states = super().join(sequences)
        self._place(first)
        return states

    def drop_finished(self) -> None:
        kept = [row for row, sequence in enumerate(self.sequences) if sequence.finish is None]
        if len(kept) == len(self.sequences):
            return
        order, gaps, moved = filled_gaps(kept)
        if gaps:
            gap, row = _sent([gaps, moved], torch.int64, self.device).unbind()
            columns = max(self.lengths)
            for store in self.stores:
                store[gap, :, :columns] = store[row, :, :columns]
            for tensor in self.held.tensors():
                tensor[gap] = tensor[row]
        self.sequences = [self.sequences[row] for row in order]
        self.lengths = [self.lengths[row] for row in order]
        self._mark_used()

    def _add_rows(self, texts: Sequence[ReadOnce], length: Tensor, beyond: Tensor) -> int:
        first = len(self.lengths)
        for text in texts:
            self.lengths += [len(text.ids)] * text.rows
        self._reserve(len(self.sequences), self.longest)
        part = self.held.part(slice(first, len(self.lengths)))
        part.length.copy_(length)
        part.beyond.copy_(beyond)
        return first

    def _reserve(self, rows: int, columns: int) -> None:
        """Make space for these, and for whatever of them has the same shape."""
        held = len(self.held.token)
        if rows <= held and columns <= self.columns:
            return
        columns = max(self.columns, _shape_of(columns, COLUMNS))
        rows = max(held, rows, min(_shape_of(rows, ROWS), self.fit(columns)))
        for i, old in enumerate(self.stores):
            filler = self.unwritten if i % 2 else 0.0
            new = old.new_full((rows, old.shape[1], columns, old.shape[3]), filler)
            new[:held, :, : self.columns] = old
            self.stores[i] = new
        larger = _Rows.empty(rows, columns, self.runner.vocab, self.device)
        for new, old in zip(larger.tensors(), self.held.tensors(), strict=True):
            if old.ndim == 1:
                new[:held] = old
            else:
                new[:held, : old.shape[1]] = old
        self.held = larger
        self.columns = columns
        self._graphs.clear()  # of the tensors before

    def _place(self, first: int) -> None:
        """Tell the device what the sequences from this row on are drawn by."""
        joined = self.sequences[first:]
        part = self.held.part(slice(first, len(self.sequences)))
        uniform = []
        for sequence in joined:
            rest = self.columns - len(sequence.uniform)
            uniform.append([*sequence.uniform, *[0.0] * rest])
        numbers = [numbers_of(sequence.sampling) for sequence in joined]
        penalty = [sequence.sampling.repetition_penalty for sequence in joined]
        drawn = [len(sequence.tokens) for sequence in joined]
        last = [sequence.tokens[-1] if sequence.tokens else 0 for sequence in joined]
        part.uniform.copy_(_sent(uniform, torch.float64, self.device))
        part.numbers.copy_(_sent(numbers, torch.float64, self.device))
        part.penalty.copy_(_sent(penalty, torch.float64, self.device))
        part.drawn.copy_(_sent(drawn, torch.int64, self.device))
        part.token.copy_(_sent(last, torch.int64, self.device))
        self._see(part.seen, joined)
        self._mark_used()

    def _see(self, seen: Tensor, joined: Sequence[DecodeSequence]) -> None:
        """Mark the tokens of these sequences, as far as they are penalized."""
        places = []
        for number, sequence in enumerate(joined):
            if sequence.sampling.repetition_penalty != 1:
                known = sorted(token for token in sequence.seen if token < self.runner.vocab)
                places += [(number, token) for token in known]
        seen.zero_()
        if places:
            row, token = _sent(places, torch.int64, self.device).unbind(1)
            seen[row, token] = seen.new_ones(())

    def _mark_used(self) -> None:
        """Rows without a sequence run along, and stay at their beginning."""
        held = self.held
        held.used.copy_(torch.arange(len(held.used), device=self.device) < len(self.sequences))
        held.length.mul_(held.used)
        held.drawn.mul_(held.used)

    def _kinds(self) -> DrawKinds:
        return DrawKinds.of([sequence.sampling for sequence in self.sequences])

    def _penalized(self) -> bool:
        return any(each.sampling.repetition_penalty != 1 for each in self.sequences)

    def _step(self) -> None:
        """Draw the next token of every sequence: in a plain call, or by a graph."""
        rows = min(_shape_of(len(self.sequences), ROWS), len(self.held.token))
        columns = _shape_of(max(self.lengths) + 1, COLUMNS)
        shape = _Shape(rows, columns, self._kinds(), self._penalized())
        self.lengths = [length + 1 for length in self.lengths]
        if not self._recordable():
            self._token_step(shape)
        elif shape not in self._graphs:
            # what libraries prepare at first can't be recorded
            self._graphs[shape] = None
            self._token_step(shape)
        else:
            graph = self._graphs[shape] or self._record(shape)
            self._graphs[shape] = graph
            graph.replay()

    def _recordable(self) -> bool:
        return self.device.type == "cuda"

    def _token_step(self, shape: _Shape) -> None:
        """The device's work alone, in tensors that stay where they are."""
        part = self.held.part(slice(shape.rows))
        self.width = shape.columns
        self.length = part.length
        self.beyond = part.beyond
        self.row = torch.arange(shape.rows, device=self.device)
        states = self._states(part.token[:, None])
        part.length.add_(part.used)
        self._draw(part, states, shape.kinds, shape.penalized)

    def _draw(self, part: _Rows, states: Tensor, kinds: DrawKinds, penalized: bool) -> None:
        """Draw the token that follows each state [rows, ...]."""
        logits = self.runner.logits(states)
        if penalized:
            logits = penalize_seen(logits, part.seen, part.penalty)
        uniform = part.uniform.gather(1, part.drawn[:, None])
        token, logprob = draw_rows(logits, torch.cat([uniform, part.numbers], 1), kinds)
        part.token.copy_(token)
        part.logprob.copy_(logprob)
        part.drawn.add_(part.used)
        if penalized:
            part.seen.scatter_(1, token[:, None], True)

    def _record(self, shape: _Shape) -> torch.cuda.CUDAGraph:
        """The graph of a token step; nothing is computed."""
        if self._memory is None:
            self._memory = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            with (
                _uncached_casts(),
                # other threads may ask the GPU how far it is, as NCCL's does
                torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"),
            ):
                self._token_step(shape)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            name = type(self.runner.policy.plain).__name__
            raise SourceError(
                f"local: CUDA can't record a token step of {name}; leave out cuda_graphs ({error})"
            ) from error
        return graph

    def _send(self, first: int, version: int) -> Drawn:
        """Send what was drawn for the rows from this one on to the host, without waiting."""
        part = self.held.part(slice(first, len(self.sequences)))
        tokens = _fetched(part.token)
        logprobs = _fetched(part.logprob)
        arrived = None
        if self.device.type == "cuda":
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()
        return Drawn(self.sequences[first:], tokens, logprobs, version, arrived)


def _shape_of(number: int, least: int) -> int:
    """The smallest least · 2ⁿ that is not less."""
    while least < number:
        least *= 2
    return least


def _sent(values: Sequence[object], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of these, sent without waiting for what the device is doing."""
    host = torch.tensor(values, dtype=dtype)
    if device.type == "cuda":
        host = host.pin_memory()  # a copy of other memory is waited for
    return host.to(device, non_blocking=True)


def _fetched(values: Tensor) -> Tensor:
    """These on the host, once the device has come to send them; nothing waits for it here."""
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.device.type == "cuda")
    return host.copy_(values, non_blocking=True)


@contextmanager
def _uncached_casts() -> Iterator[None]:
    """Context in which autocast rounds every weight anew.

    One that it has rounded before is let go of when its context is left, and a graph would go on
    reading it.
    """
    enabled = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)
