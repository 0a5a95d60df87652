"""Log-probability, entropy and log-normalizer of one target per token, straight from hidden states.

    c = hidden·Wᵀ + bias + scaling·(hidden·Aᵀ)·Bᵀ        s = cap(scale·c)        z = s/temperature

    logsumexp = log Σ_v e^{z_v}        logprob = z_target − logsumexp        entropy = −Σ_v p_v log p_v

with p = e^{z − logsumexp} and cap(s) = softcap·tanh(s/softcap). An objective needs nothing else of
a language-model head. The gradient for upstream g_p, g_H, g_L, from which the rest follows by the
chain rule:

    dz_v = p_v·(g_L − g_p − g_H·(log p_v + entropy)) + 1[v = target]·g_p

``reference.py`` is the definition. Here ``[N, V]`` is never in memory, only tiles of tokens ×
vocabulary, one after the other (passes.py). Forward folds each tile into a running softmax.
Backward takes a tile that forward kept, or computes it again, turns it into dc, and multiplies it
out: dh = dc·W, dW = dcᵀ·h, db = Σ dc, du = dc·B, dB = dcᵀ·u, with u = scaling·(hidden·Aᵀ), and,
because Σ_v dz_v = g_L,

    dT = −(Σ_v dz_v·z_v)/T = −(Σ_v dz_v·x_v + g_L·m)/T

(8 − 2f)·NDV floating-point operations, where f is the part of the logits that is kept: all of them
when N is small. Backward costs in proportion to the rows that a gradient arrives at: the others,
clipped or of advantage 0, are left out. Moved: W and dW once, h and dh once per vocabulary tile.
With backend "fused" one Triton kernel is all of forward (triton_forward.py), and nothing is kept.

Precision, in every backend and with gradients or without: h, W, A, B and u are rounded to one
dtype, ``compute_dtype``, and their products are summed in float32. Logits are never rounded.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import launch_table, passes, reference, softmax
from .backend import (
    Backend,
    accumulation_dtype,
    check_main_grad,
    check_outputs,
    check_tensors,
    check_types,
    check_values,
    checked_dtype,
    checked_vocab,
    choose_backend,
    factor_dtype,
)
from .head import Head, HeadFactors, checked_head
from .passes import WAITS, TileStore, operator_schema
from .reference import EXTRAS, Extra, Logprobs, TopK
from .sharding import combine, sum_over
from .softmax import (
    OUTPUTS,
    SAVED,
    Coefficients,
    LogitTransform,
    Softmax,
    SoftmaxState,
    rows_of,
    run,
)


def linear_logprob(
    hidden: Tensor,
    head: Tensor | Head,
    target: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    vocab: int | None = None,
    outputs: tuple[Extra, ...] = (),
    top_k: int | None = None,
    keep_bytes: int | None = None,
    main_grad: Tensor | None = None,
    compute_dtype: torch.dtype | None = None,
    backend: Backend = "auto",
) -> Logprobs:
    """Log-probs of targets under a language-model head, see the top of this file.

    Differentiable once, in each output, with respect to every floating-point tensor given; what
    needs no gradient costs nothing, nor does an output that is not used. Computed and returned in
    float32, in float64 for float64 hidden states; every gradient has the dtype of its own input.

    Args:
        hidden: ``[N, D]``, only the rows that carry a target. N = 0 gives empty outputs on the
            graph.
        head: W ``[V, D]`` alone, or ``Head(weight, bias, scale, softcap, adapter, shard)``.
        target: int64 ``[N]``, or ``[N, k]`` for k tokens of each row, such as a teacher's most
            probable ones; then ``logprob`` is ``[N, k]`` too, and nothing larger is made of it.
        temperature: T > 0, one number or ``[N]``, one per token.
        vocab: tokens from here on are padding and have probability 0; counted over the whole
            vocabulary.
        outputs: further fields of ``Logprobs`` to compute:
            "mean_logprob", (1/n) Σ_v log p_v over the n tokens that are possible (label smoothing);
            "log_sum_squares", log Σ_v p_v² (the expected probability of a sample, as in WPO);
            "top1", int64, the likeliest token; "rank", int64, how many tokens are likelier than the
            target.
        top_k: compute the ids and log-probs ``[N, top_k]`` of the likeliest tokens,
            ``Logprobs.top_k``.
        keep_bytes: how many bytes of logits forward may leave for backward, which computes the
            others again: with a share f of them, (8 − 2f)·NDV operations instead of 8. Default 96
            MB, on a GPU a thirty-second of its memory and at most 4 GiB.
        main_grad: float32 ``[V, D]``, as optimizers of 16-bit models keep it: the gradient of W is
            added to it, without rounding, and W gets none.
        compute_dtype: float32, bfloat16 or float16, what the factors of products are rounded to.
            Default: autocast's dtype where autocast is on, for float32 inputs too, so that tensor
            cores are used; else the dtype of ``hidden``, to which W is rounded. float32 asks for
            float32 products under autocast.
        backend: "auto" is the fastest that runs on the device of ``hidden``. "torch" is torch
            alone; "triton" has Triton kernels between the matrix products; "fused" one Triton
            kernel that writes no logits at all in forward, and backward as "triton"; "reference" is
            differentiable any number of times and materializes ``[N, V]``. Triton needs a GPU, or
            its interpreter (TRITON_INTERPRET=1), and no float64.

    Raises:
        ValueError: if shapes or devices disagree, or a hyper-parameter is out of range.
        IndexError: if a target is outside ``[0, vocab)``.
    """
    who = "linear_logprob"
    check_types(who, target=target)
    head = checked_head(who, hidden, head)
    check_tensors(
        who,
        {
            "hidden": (hidden, list(hidden.shape)),
            "target": (target, [len(hidden), *target.shape[1:2]]),
        },
        {"temperature": temperature},
    )
    size = len(head.weight)
    if head.shard is None:
        vocab = checked_vocab(who, vocab, size)
        check_outputs(who, outputs, EXTRAS, target, top_k, vocab)
    else:
        check_outputs(who, outputs, EXTRAS, target, top_k, None)
    compute = checked_dtype(who, compute_dtype, hidden, keep_bytes)
    if main_grad is not None:
        check_main_grad(who, main_grad, head.weight)
    with torch.autocast(hidden.device.type, enabled=False):  # it would round logits to 16 bits
        backend = choose_backend(who, backend, hidden)
        if backend == "fused" and ("rank" in outputs or "top1" in outputs or top_k is not None):
            raise ValueError(
                f"{who}: backend='fused' sees no tile of logits to rank; use 'triton' or 'auto'"
            )
        if backend == "reference":
            if head.shard is not None or main_grad is not None:
                raise ValueError(
                    f"{who}: backend='reference' knows neither shards nor main_grad; use another"
                )
            return reference.linear_logprob(
                hidden,
                head,
                target,
                temperature=temperature,
                vocab=size if vocab is None else vocab,
                outputs=outputs,
                top_k=top_k,
                compute_dtype=compute,
            )
        arguments = LogprobArguments.of(
            HeadFactors.of(hidden, head, compute),
            head,
            target,
            softmax.per_row(temperature, hidden),
            vocab=vocab,
            outputs=outputs,
            top_k=top_k,
            keep_bytes=keep_bytes,
            main_grad=main_grad,
            backend=backend,
        )
        logprob, entropy, logsumexp, mean, squares, *_, ranks, ids, top_logprob = _forward(
            *arguments
        )
    return Logprobs(
        logprob.reshape(target.shape),
        entropy,
        logsumexp,
        mean_logprob=mean if arguments.mean else None,
        log_sum_squares=squares if arguments.squares else None,
        top1=ids[:, 0] if "top1" in outputs else None,
        rank=ranks if arguments.rank else None,
        top_k=None if top_k is None else TopK(ids, top_logprob),
    )


class TilePlan(NamedTuple):
    """How a call is computed: the size of tiles, the bytes of logits that stay for backward, and
    the backend.
    """

    rows: int
    columns: int
    keep_bytes: int | None
    backend: Backend


def plan(
    factors: HeadFactors, backend: Backend, keep_bytes: int | None, *, graph: bool, ranked: bool
) -> TilePlan:
    """How to compute, by device and arguments only: the same call is always cut the same way.

    Args:
        backend: of ``choose_backend``; "auto" is one of the two of Triton.
        graph: whether a gradient is wanted.
        ranked: whether ranks or likeliest tokens are, for which tiles of logits have to be there.
    """
    if backend == "auto":
        may_be_fused = not graph and not ranked
        backend = "fused" if may_be_fused and _prefers_fused(factors) else "triton"
    on_gpu = factors.hidden.device.type == "cuda"
    return TilePlan(
        rows=passes.GPU_ROWS if on_gpu else passes.ROWS,
        columns=passes.GPU_COLUMNS if on_gpu else passes.COLUMNS,
        keep_bytes=keep_bytes if graph and backend != "fused" else 0,
        backend=backend,
    )


def _prefers_fused(factors: HeadFactors) -> bool:
    architecture = launch_table.architecture_of(factors.hidden.device)
    width = factors.hidden.shape[1]
    return launch_table.prefers_fused(architecture, factors.compute, factors.weight.dtype, width)


class LogprobArguments(NamedTuple):
    """The arguments of the operators, forward and backward: tensors first."""

    hidden: Tensor  # [N, D], and the rest of HeadFactors
    weight: Tensor  # [V, D]
    bias: Tensor | None
    low: Tensor | None
    up: Tensor | None
    temperature: Tensor | None  # [N]
    target: Tensor  # [N, k]
    # [V, D], or [0] if there is none: an operator can't write to an optional tensor
    main_grad: Tensor
    scale: float
    softcap: float | None
    vocab: int
    start: int
    group: str | None
    mean: bool
    squares: bool
    rank: bool
    top_k: int
    rows: int
    columns: int
    keep_bytes: int | None
    backend: str
    compute: torch.dtype

    @classmethod
    def of(
        cls,
        factors: HeadFactors,
        head: Head,
        target: Tensor,
        temperature: Tensor | None,
        *,
        vocab: int | None,
        outputs: tuple[Extra, ...],
        top_k: int | None,
        keep_bytes: int | None,
        main_grad: Tensor | None,
        backend: Backend,
    ) -> "LogprobArguments":
        """The arguments of a call of ``linear_logprob``."""
        hidden, weight, bias, low, up, compute = factors
        size = len(weight)
        start = 0 if head.shard is None else head.shard.start
        # that are not padding, of this rank's
        columns = size if vocab is None else min(max(vocab - start, 0), size)
        rank = "rank" in outputs
        likeliest = max(top_k or 0, int("top1" in outputs))
        differentiable = [t for t in (hidden, weight, bias, low, up, temperature) if t is not None]
        graph = torch.is_grad_enabled() and any(t.requires_grad for t in differentiable)
        how = plan(factors, backend, keep_bytes, graph=graph, ranked=rank or likeliest > 0)
        return cls(
            hidden,
            weight,
            bias,
            low,
            up,
            temperature,
            target if target.ndim == 2 else target[:, None],
            main_grad=hidden.new_empty(0) if main_grad is None else main_grad,
            scale=head.scale,
            softcap=head.softcap,
            vocab=columns,
            start=start,
            group=None if head.shard is None else head.shard.group.group_name,
            mean="mean_logprob" in outputs,
            squares="log_sum_squares" in outputs,
            rank=rank,
            top_k=likeliest,
            rows=how.rows,
            columns=how.columns,
            keep_bytes=how.keep_bytes,
            backend=how.backend,
            compute=compute,
        )

    @property
    def is_triton(self) -> bool:
        """Whether Triton passes keep tiles in 16 bits, and their tops."""
        return self.backend == "triton"

    def operands(self, only: Tensor | None = None) -> tuple[HeadFactors, Tensor, LogitTransform]:
        """The rounded head, the targets as this rank numbers them, and what is done to logits, of
        all rows or some.
        """
        factors = HeadFactors(self.hidden, self.weight, self.bias, self.low, self.up, self.compute)
        target = self.target - self.start if self.start else self.target
        transform = LogitTransform(self.scale, self.softcap, self.temperature)
        if only is None:
            return factors.rounded(), target, transform
        return factors.rounded(only), target[only], rows_of(transform, only)

    def allocate(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Memory for the tiles that are kept and for their tops, of which c itself has none; and
        for a ``Ranking``: ranks, and ids and log-probs of the likeliest."""
        n = self.hidden.shape[0]
        exact = accumulation_dtype(self.hidden.dtype)
        dtype = exact
        if self.is_triton and factor_dtype(self.hidden, self.compute).itemsize == 2:
            # of logits less their top, also where factors are bfloat16: 3 bits more
            dtype = torch.float16
        kept = passes.allocate_kept(
            self.hidden, self.vocab, self.columns, dtype, self.keep_bytes, passes.KEEP
        )
        tops = passes.allocate_tops(kept if self.is_triton else kept[:0], self.columns, exact)
        ranks = self.target.new_empty(n if self.rank else 0)
        ids = self.target.new_empty(n, self.top_k)
        likeliest = self.hidden.new_empty(n, self.top_k, dtype=exact)
        return kept, tops, ranks, ids, likeliest

    def store(
        self, head: HeadFactors, kept: Tensor, tops: Tensor, only: Tensor | None = None
    ) -> TileStore:
        """The memory that ``allocate`` made, for tiles of the rounded head: of all rows or some."""
        threads = 1
        if self.backend == "torch":
            threads = passes.threads_for(head, len(head.hidden) * self.vocab, self.rows)
        return TileStore(
            kept,
            self.rows,
            self.columns,
            self.vocab,
            tops if self.is_triton else None,
            only,
            threads,
        )


TEMPERATURE = LogprobArguments._fields.index("temperature")
NEEDED = LogprobArguments._fields.index("target")  # the tensors before it have a gradient
# the tensors before it are saved for backward
TENSORS = LogprobArguments._fields.index("main_grad")


@torch.library.custom_op(
    "burnish::linear_logprob",
    mutates_args=(),
    tags=WAITS,
    schema=operator_schema(LogprobArguments, SAVED + 5),
)
def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    """The fields of ``Softmax``, what is kept for backward and its tops (``TileStore``), and a
    ``Ranking``.
    """
    given = LogprobArguments(*arguments)
    check_values(
        "linear_logprob",
        given.target if given.group is None else None,
        given.vocab,
        given.temperature,
    )
    head, target, transform = given.operands()
    kept, tops, ranks, ids, likeliest = given.allocate()
    ranking = None
    if given.rank or given.top_k:
        of_target = target[:, 0] if given.rank else None
        ranking = passes.Ranking(head, given.top_k, of_target, given.vocab, given.group)
    if given.backend == "fused":
        from . import triton_forward

        whole = head.columns(slice(given.vocab))
        state = triton_forward.accumulate(
            whole,
            target,
            transform=transform,
            vocab=given.vocab,
            mean=given.mean,
            squares=given.squares,
        )
    else:
        state = SoftmaxState.start(target, tops, given.mean, given.squares)
        _fold_tiles(given, head, target, transform, given.store(head, kept, tops), state, ranking)
    if given.group is not None:
        state = combine(state, target, given.vocab, given.group)
    results = softmax.finish(state)
    if given.softcap is None:
        softmax.rule_out_(results)
    if ranking is not None:
        ranks, ids, likeliest = ranking.finish(results, transform, given.start)
    return *results, kept, tops, ranks, ids, likeliest


def _fold_tiles(
    given: LogprobArguments,
    head: HeadFactors,
    target: Tensor,
    transform: LogitTransform,
    store: TileStore,
    state: SoftmaxState,
    ranking: passes.Ranking | None,
) -> None:
    """Compute the logits tile by tile, and fold each into ``state`` and ``ranking``."""
    n = len(target)

    def fold(span: HeadFactors, thread: int, rows: slice, columns: slice) -> None:
        tile, shifted = store.tile(rows, columns, thread)
        span.logits(rows, tile)
        if ranking is not None:
            ranking.update(tile, rows, columns)
        column = target[rows] - columns.start
        sums = rows_of(state, rows)
        if given.is_triton:
            from . import triton_softmax

            triton_softmax.fold_(tile, column, sums, rows_of(transform, rows), shifted)
        else:
            folded = run(
                softmax.fold,
                tile,
                column,
                sums,
                rows_of(transform, rows),
                width=given.columns,
                logits=n * given.vocab,
            )
            sums.store_(folded)

    def fold_on_thread(thread: int, rows: slice, columns: slice) -> None:
        fold(head.columns(columns), thread, rows, columns)

    if store.threads > 1:
        store.for_each_tile(fold_on_thread)
        return
    for columns in passes.vocabulary_spans(given.vocab, given.columns, head.hidden.device):
        span = head.columns(columns)
        for rows in passes.spans(n, given.rows):
            fold(span, 0, rows, columns)


@_forward.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    given = LogprobArguments(*arguments)
    return *Softmax.empty(given.target, given.hidden, given.mean, given.squares), *given.allocate()


BEFORE: Any = {
    "upstream": list[Tensor | None],
    "outputs": list[Tensor],
    "kept": list[Tensor],
    "needed": list[bool],
}
BACKWARD = operator_schema(LogprobArguments, NEEDED, mutates=("main_grad",), **BEFORE)


@torch.library.custom_op(
    "burnish::linear_logprob_backward", mutates_args=("main_grad",), tags=WAITS, schema=BACKWARD
)
def _backward(
    upstream: list[Tensor | None],
    outputs: list[Tensor],
    kept: list[Tensor],
    needed: list[bool],
    *arguments: Any,
) -> tuple[Tensor, ...]:
    """The gradients of hidden, weight, bias, low, up and temperature, empty where not needed; that
    of the weight is added to ``main_grad`` if there is one."""
    given = LogprobArguments(*arguments)
    saved = Softmax(*outputs)
    n = len(given.target)
    live, unit = passes.live_rows(upstream, factor_dtype(given.hidden, given.compute), given.scale)
    head, target, transform = given.operands(live)
    if live is not None:
        upstream = [u[live] if u is not None and u.numel() else u for u in upstream]
        saved = rows_of(saved, live)
    moments = torch.zeros_like(saved.shift) if needed[TEMPERATURE] else None
    tiles = _BackwardTiles(
        given,
        head,
        target,
        transform,
        saved,
        softmax.coefficients([None if u is None else u / unit for u in upstream], saved, transform),
        given.store(head, kept[0], kept[1], live),
        moments,
    )
    main_grad = given.main_grad if given.main_grad.ndim == 2 else None
    hidden, weight, bias, low, up = passes.multiply_out(
        head, needed, tiles.store, unit, tiles.open_span, main_grad
    )
    if given.group is not None:  # a rank has the sums over its part of the vocabulary
        for t in (hidden, low, moments):
            if t is not None:
                sum_over(t, given.group)
    if moments is not None:
        moments = softmax.temperature_gradient(moments * unit, upstream, saved, transform)
    if live is not None:
        hidden = passes.scatter_rows(hidden, live, n)
        low = passes.scatter_rows(low, live, n)
        moments = passes.scatter_rows(moments, live, n)
    return passes.returned(arguments[:NEEDED], (hidden, weight, bias, low, up, moments))


class _BackwardTiles(NamedTuple):
    """Tiles of dc.

    Attributes:
        arriving: what dc is made of, see ``softmax.coefficients``.
        moments: ``[N]``, to which each tile adds Σ_v dz_v·x_v; None if temperatures need no
            gradient.
    """

    given: LogprobArguments
    head: HeadFactors
    target: Tensor
    transform: LogitTransform
    saved: Softmax
    arriving: Coefficients
    store: TileStore
    moments: Tensor | None

    def open_span(self, columns: slice) -> tuple[HeadFactors, passes.WriteTile]:
        """The factors of a span of the vocabulary, and what writes dc of a tile of it."""
        span = self.head.columns(columns)
        return span, functools.partial(self._write, span, columns)

    def _write(
        self, span: HeadFactors, columns: slice, rows: slice, out: Tensor, thread: int
    ) -> None:
        """Write dc of a tile into ``out``, from c that was kept, or is computed again."""
        tile, shifted = self.store.tile(rows, columns, thread)
        if columns.start >= self.store.recomputed:
            span.logits(rows, tile)
        column = self.target[rows] - columns.start
        if self.given.backend == "torch":
            self._write_by_torch(tile, column, rows, out)
        else:  # backward of "fused" is Triton's, too
            self._write_by_triton(tile, shifted, column, rows, out)

    def _write_by_triton(
        self,
        tile: Tensor,
        shifted: tuple[Tensor, Tensor] | None,
        column: Tensor,
        rows: slice,
        out: Tensor,
    ) -> None:
        from . import triton_softmax

        source, top = shifted or (tile, None)
        triton_softmax.backward_tile_(
            source,
            column,
            self.saved.shift[rows],
            rows_of(self.arriving, rows),
            rows_of(self.transform, rows),
            out,
            top=top,
            moments=None if self.moments is None else self.moments[rows],
        )

    def _write_by_torch(self, tile: Tensor, column: Tensor, rows: slice, out: Tensor) -> None:
        arriving = rows_of(self.arriving, rows)
        dc = out if out.dtype == tile.dtype else torch.empty_like(tile)
        added = run(
            softmax.backward_tile,
            tile,
            self.saved.shift[rows],
            arriving,
            rows_of(self.transform, rows),
            self.moments is not None,
            dc,
            width=self.given.columns,
            logits=len(self.target) * self.given.vocab,
        )
        softmax.add_target_(dc, column, arriving.gain)
        if dc is not out:  # 16 bits: rounded once, with the targets' share
            out.copy_(dc)
        if self.moments is not None and added is not None:
            self.moments[rows] += added


@_backward.register_fake
def _(
    upstream: Any, outputs: Any, kept: Any, needed: list[bool], *arguments: Any
) -> tuple[Tensor, ...]:
    given = LogprobArguments(*arguments)
    weight = needed[1] and given.main_grad.ndim != 2
    return passes.returned_shapes(arguments[:NEEDED], [needed[0], weight, *needed[2:]])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.main_grad, *ctx.constants = inputs[TENSORS:]
    ctx.set_materialize_grads(False)  # None for an output that is not used
    ctx.mark_non_differentiable(*output[OUTPUTS:])
    ctx.save_for_backward(*output[: SAVED + 2], *inputs[:TENSORS])


def _apply_backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors  # read once: a checkpoint recomputes them
    given = LogprobArguments._make((*tensors[-TENSORS:], ctx.main_grad, *ctx.constants))
    needed = list(ctx.needs_input_grad[:NEEDED])
    found = _backward(
        list(upstream[:OUTPUTS]),
        list(tensors[:SAVED]),
        list(tensors[SAVED:-TENSORS]),
        needed,
        *given,
    )
    for grad in found:
        # with create_graph; an operator that writes to an argument can't have a backward
        if grad.requires_grad:
            grad.register_hook(passes.no_second_derivative)
    if given.main_grad.ndim == 2:
        needed[1] = False
    grads = [grad if wanted else None for grad, wanted in zip(found, needed, strict=True)]
    return *grads, *(None,) * (len(given) - NEEDED)


_forward.register_autograd(_apply_backward, setup_context=_setup_context)
