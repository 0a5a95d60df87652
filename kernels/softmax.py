"""The running softmax over tiles of logits ``[n, columns]``: two elementwise passes, eager or
compiled.

Forward, a running softmax over the tiles of the vocabulary, with x = z − m and m the largest z so
far of the row:

    S = Σ eˣ        M = Σ x·eˣ        and when m grows by δ:   M ← (M − δS)·e^(−δ),   S ← S·e^(−δ)
    logsumexp = m + log S             logprob = (z_t − m) − log S              entropy = log S − M/S

and, on request, over the n tokens that are possible at all,

    X = Σ x         Q = Σ e²ˣ         X ← X − nδ,   Q ← Q·e^(−2δ)
    mean_logprob = X/n − log S        log_sum_squares = log Q − 2·log S

Everything is relative to m, so logits near ±1000 cost no digits. Backward, for gradients g_p, g_H,
g_L, g_X, g_Q:

    dz_v = p_v·(g_L − g_p − g_H·(log p_v + entropy) − g_X − 2·g_Q) + 2·g_Q·p_v²/Σp² + g_X/n + 1[v =
    t]·g_p
         = eˣ·(level + slope·x + bend·eˣ) + flat + 1[v = t]·g_p
    slope = −g_H/S,  level = (g_L − g_p − g_H·(entropy − log S) − g_X − 2·g_Q)/S,  bend = 2·g_Q/Q,  flat = g_X/n

With several targets in a row, g_p is a sum over them in ``level``.

Eager, each of the two functions is a few passes over a tile that stays in the cache; compiled, a
single one. The choice depends on shape and machine only, which exact resume relies on.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .backend import accumulation_dtype

# A finite −inf: e^(−1e30) is 0 like e^(−inf), but 0·(−1e30) is 0 and 0·(−inf) is NaN.
NEVER = -1e30
IMPOSSIBLE = -1e20  # logits below this were masked
# Compiling takes tens of seconds once and saves a nanosecond or two per logit of every call: here a
# tenth of a second.
COMPILE_FROM = 2**26
T = TypeVar("T")
Fields = TypeVar("Fields", bound=tuple[Any, ...])
log = logging.getLogger(__name__)


class LogitTransform(NamedTuple):
    """z = cap(scale·c)/T, with cap(s) = softcap·tanh(s/softcap).

    Called, it gives cap(scale·c) on the autograd graph; ``capped`` and ``tempered`` are for
    constants.
    """

    scale: float = 1.0
    softcap: float | None = None
    temperature: Tensor | None = None  # [n]

    def __call__(self, c: Tensor) -> Tensor:
        scaled = self.scale * c
        return scaled if self.softcap is None else self.softcap * torch.tanh(scaled / self.softcap)

    def capped(self, c: Tensor) -> Tensor:
        scaled = c if self.scale == 1.0 else c * self.scale
        return (
            scaled if self.softcap is None else (scaled / self.softcap).tanh_().mul_(self.softcap)
        )

    def tempered(self, capped: Tensor) -> Tensor:
        return capped if self.temperature is None else capped / self.temperature[:, None]

    def slope(self, like: Tensor) -> Tensor:
        """``[n]``: scale/T, the derivative of z before that of the soft cap."""
        scale = torch.full_like(like, self.scale)
        return scale if self.temperature is None else scale / self.temperature


class Softmax(NamedTuple):
    """The outputs, and what backward needs besides: m, log S, the targets' z, n.

    Outputs not asked for are empty.

    Each ``[rows]``; logprob and chosen ``[rows, targets]``.
    """

    logprob: Tensor
    entropy: Tensor
    logsumexp: Tensor
    mean_logprob: Tensor
    log_sum_squares: Tensor
    shift: Tensor
    log_total: Tensor
    chosen: Tensor
    possible: Tensor

    @classmethod
    def empty(cls, target: Tensor, like: Tensor, mean: bool, squares: bool) -> "Softmax":
        """Uninitialized tensors of the right shapes, for tracing."""

        def row(wanted: bool = True) -> Tensor:
            return like.new_empty(
                target.shape[0] if wanted else 0, dtype=accumulation_dtype(like.dtype)
            )

        per_target = [
            like.new_empty(target.shape, dtype=accumulation_dtype(like.dtype)) for _ in range(2)
        ]
        return cls(
            per_target[0],
            row(),
            row(),
            row(mean),
            row(squares),
            row(),
            row(),
            per_target[1],
            row(mean),
        )


# the first so many fields are differentiable; all are kept for backward
OUTPUTS, SAVED = 5, len(Softmax._fields)


class Coefficients(NamedTuple):
    """The upstream gradients as coefficients of dz per row; None where nothing arrives."""

    level: Tensor
    slope: Tensor | None
    bend: Tensor | None
    flat: Tensor | None
    gain: Tensor | None  # [n, k], added at the targets


class SoftmaxState(NamedTuple):
    """The sums over the tiles so far, each ``[n]``; None for sums that are not needed."""

    shift: Tensor  # m
    total: Tensor  # S
    moment: Tensor  # M
    chosen: Tensor  # [n, k], the targets' z
    linear: Tensor | None  # [n, 2], X and n
    squares: Tensor | None  # Q

    @classmethod
    def start(cls, target: Tensor, like: Tensor, mean: bool, squares: bool) -> "SoftmaxState":
        """Before the first tile; ``like`` has the accumulation dtype."""
        n = len(target)
        linear, total_squares = (
            like.new_zeros(n, 2) if mean else None,
            like.new_zeros(n) if squares else None,
        )
        sums = like.new_zeros(n), like.new_zeros(n), like.new_zeros(target.shape)
        return cls(like.new_full((n,), NEVER), *sums, linear, total_squares)

    def store_(self, part: "SoftmaxState") -> None:
        for mine, sums in zip(self, part, strict=True):
            if mine is not None and sums is not None:
                mine.copy_(sums)


def rows_of(fields: Fields, rows: slice | Tensor) -> Fields:
    """Some rows of every tensor of a named tuple.

    A number, None, and a tensor that is empty stay as they are.
    """
    make: Callable[..., Fields] = type(fields)
    return make(*(t[rows] if isinstance(t, Tensor) and t.shape[0] else t for t in fields))


def per_row(temperature: float | Tensor, like: Tensor) -> Tensor | None:
    """``[N]`` temperatures in the accumulation dtype, or None if they are all 1."""
    dtype = accumulation_dtype(like.dtype)
    if isinstance(temperature, Tensor):
        return temperature.to(dtype)
    return None if temperature == 1.0 else like.new_full(like.shape[:1], temperature, dtype=dtype)


def fold(
    tile: Tensor, column: Tensor, state: SoftmaxState, transform: LogitTransform
) -> SoftmaxState:
    """The sums after one more tile ``[n, columns]`` of c.

    ``column`` ``[n, k]`` is the column of the targets in this tile; outside ``[0, columns)`` they
    are in another one.
    """
    z = transform.tempered(transform.capped(tile))
    inside = (column >= 0) & (column < z.shape[1])
    chosen = torch.where(inside, z.gather(1, column.clamp(0, z.shape[1] - 1)), state.chosen)
    top = torch.maximum(state.shift, z.amax(1))
    drop = state.shift - top
    decay = drop.exp()
    x = z - top[:, None]
    weight = x.exp()
    linear = squares = None
    if state.linear is not None:
        linear_sum, count = state.linear.unbind(1)
        possible = z > IMPOSSIBLE
        added = torch.where(possible, x, 0).sum(1)
        linear = torch.stack(
            (linear_sum + count * drop + added, count + possible.to(x.dtype).sum(1)), 1
        )
    if state.squares is not None:
        squares = state.squares * decay.square() + weight.square().sum(1)
    total = state.total * decay + weight.sum(1)
    moment = (state.moment + state.total * drop) * decay + weight.mul_(x).sum(1)
    return SoftmaxState(top, total, moment, chosen, linear, squares)


def finish(state: SoftmaxState) -> Softmax:
    """The outputs, once every tile is folded in.

    A row without a possible token has no distribution: its outputs and gradients are NaN, its
    logsumexp is −inf.
    """
    shift, total, moment, chosen, linear, squares = state
    nothing = shift < IMPOSSIBLE
    log_total = total.log().masked_fill(nothing, torch.nan)
    logprob, entropy = (chosen - shift[:, None]) - log_total[:, None], log_total - moment / total
    mean, log_squares, possible = (shift.new_empty(0) for _ in range(3))
    if linear is not None:
        possible = linear[:, 1].clone()
        mean = linear[:, 0] / possible - log_total
    if squares is not None:
        log_squares = squares.log() - 2 * log_total
    logsumexp = (shift + log_total).masked_fill(nothing, -torch.inf)
    return Softmax(
        logprob, entropy, logsumexp, mean, log_squares, shift, log_total, chosen, possible
    )


def rule_out_(results: Softmax) -> None:
    """Give targets whose logits were masked the log-prob −inf, where another token is possible."""
    masked = (results.chosen < IMPOSSIBLE) & ~results.logprob.isnan()
    results.logprob.masked_fill_(masked, -torch.inf)


def coefficients(
    upstream: Sequence[Tensor | None], softmax: Softmax, transform: LogitTransform
) -> Coefficients:
    """The upstream gradients of the outputs, None if unused, times scale/T, as coefficients."""
    # An output that was not asked for is empty, and so is its gradient.
    d_logprob, d_entropy, d_logsumexp, d_mean, d_squares = (
        d if d is not None and d.numel() else None for d in upstream
    )
    inner = transform.slope(softmax.entropy)
    density = inner * (-softmax.log_total).exp()
    level, slope, bend, flat, gain = torch.zeros_like(density), None, None, None, None
    if d_logsumexp is not None:
        level = level + d_logsumexp * density
    if d_entropy is not None:
        slope = -d_entropy * density
        level = level + slope * (softmax.entropy - softmax.log_total)
    if d_mean is not None:
        level, flat = level - d_mean * density, d_mean * inner / softmax.possible
    if d_squares is not None:
        level = level - 2 * d_squares * density
        bend = 2 * d_squares * inner * (-softmax.log_sum_squares - 2 * softmax.log_total).exp()
    if d_logprob is not None:
        level, gain = level - d_logprob.sum(1) * density, d_logprob * inner[:, None]
        if transform.softcap is not None:
            temperature = transform.temperature
            capped = (
                softmax.chosen if temperature is None else softmax.chosen * temperature[:, None]
            )
            gain = gain * (1 - (capped / transform.softcap).square())
    return Coefficients(level, slope, bend, flat, gain)


def backward_tile(
    tile: Tensor,
    shift: Tensor,
    arriving: Coefficients,
    transform: LogitTransform,
    moments: bool,
    out: Tensor,
) -> Tensor | None:
    """From a tile of c, dc without the targets' share, written to ``out``, which may be the tile: a
    fresh one each time would let the heap grow by several. Returns Σ_v dz_v·x_v, if ``moments``."""
    capped = transform.capped(tile)
    steepness = None if transform.softcap is None else 1 - (capped / transform.softcap).square_()
    x = transform.tempered(capped) - shift[:, None]
    dz = x.exp()
    factor = arriving.level[:, None]
    if arriving.slope is not None:
        factor = torch.addcmul(factor, arriving.slope[:, None], x)
    if arriving.bend is not None:
        factor = torch.addcmul(factor, arriving.bend[:, None], dz)
    dz.mul_(factor)
    if arriving.flat is not None:
        dz.add_(torch.where(x > IMPOSSIBLE, arriving.flat[:, None], 0))
    moment = (dz * x).sum(1) if moments else None
    out.copy_(dz if steepness is None else dz.mul_(steepness))
    return moment


def add_target_(tile: Tensor, column: Tensor, gain: Tensor | None) -> None:
    """``tile[i, column[i, j]] += gain[i, j]`` where the column is in this tile."""
    if gain is not None:
        inside = (column >= 0) & (column < tile.shape[1])
        tile.scatter_add_(1, column.clamp(0, tile.shape[1] - 1), torch.where(inside, gain, 0))


def temperature_gradient(
    moments: Tensor, upstream: Sequence[Tensor | None], softmax: Softmax, transform: LogitTransform
) -> Tensor:
    """dT = −(Σ_v dz_v·x_v + g_L·m)/T.

    ``moments`` is scale/T times that sum, the targets' g_p·x_t not included.
    """
    d_logprob, _, d_logsumexp, *_ = upstream
    rest = torch.zeros_like(moments)
    if d_logprob is not None:
        rest += (d_logprob * (softmax.chosen - softmax.shift[:, None])).sum(1)
    if d_logsumexp is not None:
        rest += d_logsumexp * softmax.shift
    assert transform.temperature is not None
    return -moments / transform.scale - rest / transform.temperature


def worth_compiling(tile: Tensor, logits: int) -> bool:
    """True if passes over so many ``logits``, in tiles like this one, go through the compiler."""
    return tile.device.type == "cpu" and logits >= COMPILE_FROM and tile.shape[0] > 1


def run(function: Callable[..., T], tile: Tensor, *rest: object, width: int, logits: int) -> T:
    """``function(tile, *rest)``, through torch.compile where that is worth it and works on this
    machine.

    Args:
        width: of most tiles; only those of one width are compiled, once for all calls.
        logits: in all tiles together.
    """
    if tile.shape[1] == width and worth_compiling(tile, logits) and function not in _uncompilable:
        try:
            # Rows are symbolic from the first call on: every batch size shares one compilation, and
            # its bits.
            for tensor in tree_leaves((tile, rest)):
                if isinstance(tensor, Tensor):
                    torch._dynamo.mark_dynamic(tensor, 0)
            result: T = _compile(function, dynamic=False)(tile, *rest)
            return result
        except (
            Exception
        ) as error:  # no compiler, a broken one, a full disk: eager is the same mathematics
            _uncompilable.add(function)
            log.info("%s runs eagerly, torch.compile failed: %s", function.__name__, error)
    return function(tile, *rest)


_compile = functools.cache(torch.compile)
_uncompilable: set[Callable[..., object]] = set()
