"""Log-probability, entropy and log-normalizer of one target per token, straight from hidden states.

    c = hidden·Wᵀ + bias + scaling·(hidden·Aᵀ)·Bᵀ        s = cap(scale·c)        z = s/temperature

    logsumexp = log Σ_v e^{z_v}        logprob = z_target − logsumexp        entropy = −Σ_v p_v log p_v

with p = e^{z − logsumexp} and cap(s) = softcap·tanh(s/softcap). An objective needs nothing else of a language-model
head. The gradient for upstream g_p, g_H, g_L, from which the rest follows by the chain rule:

    dz_v = p_v·(g_L − g_p − g_H·(log p_v + entropy)) + 1[v = target]·g_p

``reference.py`` is the definition. Here ``[N, V]`` is never in memory, only tiles of tokens × vocabulary, one after the
other (passes.py). Forward folds each tile into a running softmax. Backward takes a tile that forward kept, or computes
it again, turns it into dc, and multiplies it out: dh = dc·W, dW = dcᵀ·h, db = Σ dc, du = dc·B, dB = dcᵀ·u, with
u = scaling·(hidden·Aᵀ), and, because Σ_v dz_v = g_L,

    dT = −(Σ_v dz_v·z_v)/T = −(Σ_v dz_v·x_v + g_L·m)/T

(8 − 2f)·NDV floating-point operations, where f is the part of the logits that is kept: all but the last tile when N is
small. Backward costs in proportion to the rows that a gradient arrives at: the others, clipped or of advantage 0, are
left out. Moved: W and dW once, h and dh once per vocabulary tile. With backend "fused" one Triton kernel is all of
forward (triton_forward.py), and nothing is kept.

Precision, in every backend and with gradients or without: h, W, A, B and u are rounded to one dtype, ``compute_dtype``,
and their products are summed in float32. Logits are never rounded.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import passes, reference
from .backend import Backend, choose_backend
from .checks import check_keep, check_main_grad, check_outputs, check_rows, check_top_k, check_values, checked_vocab
from .head import Head, HeadFactors, as_head, check_head
from .operators import WAITS, no_second_derivative, operator_schema, returned, returned_shapes
from .passes import TileStore, Tiling, allocate_kept, fold_all, gradients, tile_shape
from .precision import accumulation_dtype, autocast_dtype, check_compute_dtype, factor_dtype
from .ranking import Ranking
from .reference import EXTRAS, Extra, Logprobs, TopK
from .sharding import combine
from .softmax import IMPOSSIBLE, OUTPUTS, SAVED, LogitTransform, Softmax, SoftmaxState, finish, per_row

# Whether "auto" is the fused kernel where neither gradients nor ranks are wanted. Predicted for the shape of README.md:
# 17 to 19 ms, and 15 to 16 for tiles. One figure of a GPU will decide.
FUSED_WITHOUT_GRADIENTS = True


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

    Differentiable once, in each output, with respect to every floating-point tensor given; what needs no gradient
    costs nothing, nor does an output that is not used. Computed and returned in float32, in float64 for float64 hidden
    states; every gradient has the dtype of its own input.

    Args:
        hidden: ``[N, D]``, only the rows that carry a target. N = 0 gives empty outputs on the graph.
        head: W ``[V, D]`` alone, or ``Head(weight, bias, scale, softcap, adapter, shard)``.
        target: int64 ``[N]``, or ``[N, k]`` for k tokens of each row, such as a teacher's most probable ones; then
            ``logprob`` is ``[N, k]`` too, and nothing larger is made of it.
        temperature: T > 0, one number or ``[N]``, one per token.
        vocab: tokens from here on are padding and have probability 0; counted over the whole vocabulary.
        outputs: further fields of ``Logprobs`` to compute:
            "mean_logprob", (1/n) Σ_v log p_v over the n tokens that are possible (label smoothing);
            "log_sum_squares", log Σ_v p_v² (the expected probability of a sample, as in WPO);
            "top1", int64, the likeliest token; "rank", int64, how many tokens are likelier than the target.
        top_k: compute the ids and log-probs ``[N, top_k]`` of the likeliest tokens, ``Logprobs.top_k``.
        keep_bytes: how many bytes of logits forward may leave for backward, which computes the others again: with a
            share f of them, (8 − 2f)·NDV operations instead of 8. Default 96 MB, on a GPU a thirty-second of its
            memory and at most 4 GiB.
        main_grad: float32 ``[V, D]``, as optimizers of 16-bit models keep it: the gradient of W is added to it, without
            rounding, and W gets none.
        compute_dtype: float32, bfloat16 or float16, what the factors of products are rounded to. Default: autocast's
            dtype where autocast is on, for float32 inputs too, so that tensor cores are used; else the dtype of
            ``hidden``, to which W is rounded. float32 asks for float32 products under autocast.
        backend: "auto" is the fastest that runs on the device of ``hidden``. "torch" is torch alone; "triton" has
            Triton kernels between the matrix products; "fused" one Triton kernel that writes no logits at all in
            forward, and backward as "triton"; "reference" is differentiable any number of times and materializes
            ``[N, V]``. Triton needs a GPU, or its interpreter (TRITON_INTERPRET=1), and no float64.

    Raises:
        ValueError: if shapes or devices disagree, or a hyper-parameter is out of range.
        IndexError: if a target is outside ``[0, vocab)``.
    """
    who, head = "linear_logprob", as_head(head)
    check_head(who, hidden, head)
    check_rows(who, {"hidden": hidden}, temperature, target)
    check_outputs(who, outputs, EXTRAS, target)
    check_keep(who, keep_bytes)
    check_main_grad(who, main_grad, head.weight)
    check_compute_dtype(who, compute_dtype)
    columns = _columns(head, vocab)
    if head.shard is None:
        check_top_k(who, top_k, columns)
    compute = compute_dtype or autocast_dtype(hidden)
    with torch.autocast(hidden.device.type, enabled=False):  # it would round logits to 16 bits
        backend = choose_backend(who, backend, hidden)
        if backend == "reference":
            if head.shard is not None or main_grad is not None:
                raise ValueError(f"{who}: backend='reference' knows neither shards nor main_grad; use another")
            options: Any = {"temperature": temperature, "vocab": columns, "outputs": outputs, "top_k": top_k}
            return reference.linear_logprob(hidden, head, target, compute_dtype=compute, **options)
        if backend == "fused" and ("rank" in outputs or "top1" in outputs or top_k is not None):
            raise ValueError(f"{who}: backend='fused' sees no tile of logits to rank; use 'triton' or 'auto'")
        factors = HeadFactors.of(hidden, head, compute)
        temperatures = per_row(temperature, hidden)
        graph = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (*factors[:5], temperatures))
        rank, likeliest = "rank" in outputs, max(top_k or 0, int("top1" in outputs))
        columns_of_targets = target if target.ndim == 2 else target[:, None]
        arguments = LogprobArguments(
            *(factors.hidden, factors.weight, columns_of_targets, factors.bias, factors.low, factors.up, temperatures),
            main_grad=hidden.new_empty(0) if main_grad is None else main_grad,
            scale=head.scale,
            softcap=head.softcap,
            vocab=columns,
            start=0 if head.shard is None else head.shard.start,
            group=None if head.shard is None else head.shard.group.group_name,
            mean="mean_logprob" in outputs,
            squares="log_sum_squares" in outputs,
            rank=rank,
            top_k=likeliest,
            compute=factors.compute,
            **plan(factors, backend, keep_bytes, graph=graph, ranked=rank or likeliest > 0),
        )
        logprob, entropy, logsumexp, mean, squares, *_, ranks, ids, top_logprob = _forward(*arguments)
    return Logprobs(
        logprob.reshape(target.shape),
        entropy,
        logsumexp,
        mean_logprob=mean if arguments.mean else None,
        log_sum_squares=squares if arguments.squares else None,
        top1=ids[:, 0] if "top1" in outputs else None,
        rank=ranks if rank else None,
        top_k=None if top_k is None else TopK(ids, top_logprob),
    )


def _columns(head: Head, vocab: int | None) -> int:
    """How many rows of W are not padding; of a shard, of this rank's."""
    if head.shard is None:
        return checked_vocab("linear_logprob", vocab, len(head.weight))
    return len(head.weight) if vocab is None else min(max(vocab - head.shard.start, 0), len(head.weight))


def plan(
    factors: HeadFactors, backend: Backend, keep_bytes: int | None, *, graph: bool, ranked: bool
) -> dict[str, Any]:
    """The arguments that say how to compute, by devices and arguments only, never by a measurement."""
    if backend == "auto":
        # The fused kernel reads W as it is: of one in another dtype it would need a rounded copy.
        fused = FUSED_WITHOUT_GRADIENTS and factors.weight.dtype == factors.compute
        backend = "fused" if fused and not graph and not ranked else "triton"
    rows, columns = tile_shape(factors.hidden.device)
    keep_bytes = keep_bytes if graph and backend != "fused" else 0
    return {"rows": rows, "columns": columns, "keep_bytes": keep_bytes, "backend": backend}


class LogprobArguments(NamedTuple):
    """The arguments of the operators, forward and backward: tensors first."""

    hidden: Tensor  # [N, D]
    weight: Tensor  # [V, D]
    target: Tensor  # [N, k]
    bias: Tensor | None
    low: Tensor | None
    up: Tensor | None
    temperature: Tensor | None  # [N]
    main_grad: Tensor  # [V, D], or [0] if there is none: an operator can't write to an optional tensor
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

    def differentiable(self) -> tuple[Tensor | None, ...]:
        """The arguments with a gradient, in the order of ``NEEDED``."""
        return self.hidden, self.weight, self.bias, self.low, self.up, self.temperature

    def head(self) -> HeadFactors:
        return HeadFactors(self.hidden, self.weight, self.bias, self.low, self.up, self.compute)

    def rest(self) -> tuple[Tensor, LogitTransform, Tiling]:
        """The targets as this rank numbers them, what is done to logits, and how they are cut."""
        transform = LogitTransform.of(self.scale, self.softcap, self.temperature, self.hidden)
        target = self.target - self.start if self.start else self.target
        return target, transform, Tiling(self.rows, self.columns, self.vocab, self.backend)

    def allocate_kept(self) -> tuple[Tensor, Tensor]:
        """Memory for the tiles that are kept, and for their tops: none where c itself is kept."""
        exact, triton = accumulation_dtype(self.hidden.dtype), self.backend == "triton"
        keep_bytes = self.keep_bytes
        if keep_bytes is None:
            keep_bytes = passes.keep_by_default(self.hidden.device, passes.KEEP)
        dtype = factor_dtype(self.hidden, self.compute) if triton else exact
        kept = allocate_kept(self.hidden, self.vocab, self.columns, keep_bytes, dtype)
        return kept, self.hidden.new_empty(kept.shape[0] if triton else 0, self.hidden.shape[0], dtype=exact)


TENSORS = LogprobArguments._fields.index("main_grad")  # the tensors before it are saved for backward
NEEDED = [i for i in range(TENSORS) if i != LogprobArguments._fields.index("target")]  # those with a gradient


@torch.library.custom_op(
    "burnish::linear_logprob", mutates_args=(), tags=WAITS, schema=operator_schema(LogprobArguments, SAVED + 5)
)
def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    """The fields of ``Softmax``, what is kept for backward and its tops (``TileStore``), and a ``Ranking``."""
    given = LogprobArguments(*arguments)
    check_values("linear_logprob", given.target if given.group is None else None, given.vocab, given.temperature)
    (target, transform, tiling), head = given.rest(), given.head().rounded()
    kept, tops = given.allocate_kept()
    ranking = Ranking(head, given.top_k, target[:, 0] if given.rank else None, given.vocab, given.group)
    if given.backend == "fused":
        from . import triton_forward

        sums: Any = {"vocab": given.vocab, "mean": given.mean, "squares": given.squares}
        state = triton_forward.accumulate(head.columns(slice(given.vocab)), target, transform=transform, **sums)
    else:
        state = SoftmaxState.start(target, tops, given.mean, given.squares)
        store = TileStore(kept, given.rows, given.vocab, tops if given.backend == "triton" else None)
        fold_all(head, target, transform, tiling, state, store, ranking)
    if given.group is not None:
        state = combine(state, target, given.vocab, given.group)
    softmax = finish(state)
    if given.softcap is None:
        softmax.logprob.masked_fill_(softmax.chosen < IMPOSSIBLE, -torch.inf)
    return *softmax, kept, tops, *ranking.finish(softmax, transform, given.start)


@_forward.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    given = LogprobArguments(*arguments)
    n, softmax = given.target.shape[0], Softmax.empty(given.target, given.hidden, given.mean, given.squares)
    ranks, ids = given.target.new_empty(n if given.rank else 0), given.target.new_empty(n, given.top_k)
    return *softmax, *given.allocate_kept(), ranks, ids, softmax.entropy.new_empty(n, given.top_k)


BEFORE: Any = {"upstream": list[Tensor | None], "softmax": list[Tensor], "kept": list[Tensor], "needed": list[bool]}
BACKWARD = operator_schema(LogprobArguments, len(NEEDED), mutates=("main_grad",), **BEFORE)


@torch.library.custom_op("burnish::linear_logprob_backward", mutates_args=("main_grad",), tags=WAITS, schema=BACKWARD)
def _backward(
    upstream: list[Tensor | None], softmax: list[Tensor], kept: list[Tensor], needed: list[bool], *arguments: Any
) -> tuple[Tensor, ...]:
    """The gradients of hidden, weight, bias, low, up and temperature, empty where not needed; that of the weight is
    added to ``main_grad`` if there is one."""
    given = LogprobArguments(*arguments)
    main_grad = given.main_grad if _has_main_grad(given) else None
    arriving, head = (upstream, Softmax(*softmax), kept), given.head()
    grads = gradients(*arriving, head, *given.rest(), given.group, needed, main_grad)
    return returned(given.differentiable(), grads)


@_backward.register_fake
def _(upstream: Any, softmax: Any, kept: Any, needed: list[bool], *arguments: Any) -> tuple[Tensor, ...]:
    given = LogprobArguments(*arguments)
    kept_apart = needed[1] and not _has_main_grad(given)
    return returned_shapes(given.differentiable(), [needed[0], kept_apart, *needed[2:]])


def _has_main_grad(given: LogprobArguments) -> bool:
    return given.main_grad.ndim == 2


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.main_grad, *ctx.constants = inputs[TENSORS:]
    ctx.set_materialize_grads(False)  # None for an output that is not used
    ctx.mark_non_differentiable(*output[OUTPUTS:])
    ctx.save_for_backward(*output[: SAVED + 2], *inputs[:TENSORS])


def _apply_backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors  # read once: a checkpoint recomputes them
    given = LogprobArguments._make((*tensors[-TENSORS:], ctx.main_grad, *ctx.constants))
    needed = [ctx.needs_input_grad[i] for i in NEEDED]
    found = _backward(list(upstream[:OUTPUTS]), list(tensors[:SAVED]), list(tensors[SAVED:-TENSORS]), needed, *given)
    grads: list[Tensor | None] = [None] * len(given)
    for i, grad, wanted in zip(NEEDED, found, needed, strict=True):
        grads[i] = grad if wanted else None
        if grad.requires_grad:  # with create_graph; an operator that writes to an argument can't have a backward
            grad.register_hook(no_second_derivative)
    if _has_main_grad(given):
        grads[1] = None
    return tuple(grads)


_forward.register_autograd(_apply_backward, setup_context=_setup_context)
