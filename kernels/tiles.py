"""What happens to one tile of logits ``[n, columns]``: two elementwise passes, eager or compiled.

Forward, a running softmax over the tiles of the vocabulary, with x = z − m and m the largest z so far of the row:

    S = Σ eˣ        M = Σ x·eˣ        and when m grows by δ:   M ← (M − δS)·e^(−δ),   S ← S·e^(−δ)
    logsumexp = m + log S             logprob = (z_t − m) − log S              entropy = log S − M/S

Everything is relative to m, so logits near ±1000 cost no digits. Backward, for upstream gradients g_p, g_H, g_L:

    dz_v = p_v·(g_L − g_p − g_H·(log p_v + entropy)) + 1[v = t]·g_p
         = eˣ·(level + slope·x) + 1[v = t]·g_p        slope = −g_H/S,  level = (g_L − g_p − g_H·(entropy − log S))/S

Both functions are written once. Eager, they are a few passes over a tile that stays in the cache; compiled, a single
one. A given shape always takes the same road on a given machine, which exact resume relies on.
"""

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .reference import accumulation_dtype

# A finite −inf: e^(−1e30) is 0 like e^(−inf), but 0·(−1e30) is 0 and 0·(−inf) is NaN.
NEVER = -1e30
# Compiling takes tens of seconds once and saves a nanosecond or two per logit of every call: here a tenth of a second.
COMPILE_FROM = 2**26

T = TypeVar("T")
log = logging.getLogger(__name__)


class Transform(NamedTuple):
    """z = cap(scale·c)/T, with cap(s) = softcap·tanh(s/softcap)."""

    scale: float
    softcap: float | None
    temperature: Tensor | None  # [n]

    @classmethod
    def of(cls, scale: float, softcap: float | None, temperature: Tensor | None, like: Tensor) -> "Transform":
        return cls(scale, softcap, None if temperature is None else temperature.to(accumulation_dtype(like.dtype)))

    def rows(self, rows: slice) -> "Transform":
        return self if self.temperature is None else self._replace(temperature=self.temperature[rows])

    def capped(self, c: Tensor) -> Tensor:
        scaled = c if self.scale == 1.0 else c * self.scale
        return scaled if self.softcap is None else (scaled / self.softcap).tanh_().mul_(self.softcap)

    def tempered(self, capped: Tensor) -> Tensor:
        return capped if self.temperature is None else capped / self.temperature[:, None]


class Softmax(NamedTuple):
    """The outputs, and what backward needs besides: m, log S and the target's z. Each ``[n]``."""

    logprob: Tensor
    entropy: Tensor
    logsumexp: Tensor
    shift: Tensor
    log_total: Tensor
    chosen: Tensor


class Upstream(NamedTuple):
    """The gradients that arrive, as coefficients per row; None where nothing arrives."""

    level: Tensor
    slope: Tensor | None
    gain: Tensor | None  # what is added at the target

    def rows(self, rows: slice) -> "Upstream":
        slope = None if self.slope is None else self.slope[rows]
        gain = None if self.gain is None else self.gain[rows]
        return Upstream(self.level[rows], slope, gain)


def per_row(temperature: float | Tensor, like: Tensor) -> Tensor | None:
    """``[N]`` temperatures, or None if they are all 1."""
    if isinstance(temperature, Tensor):
        return temperature
    dtype = accumulation_dtype(like.dtype)
    return None if temperature == 1.0 else like.new_full(like.shape[:1], temperature, dtype=dtype)


def spans(length: int, widest: int) -> Iterator[slice]:
    return (slice(start, min(start + widest, length)) for start in range(0, length, widest))


def start(rows: int, like: Tensor) -> Tensor:
    """``[rows, 4]``: m, S, M and z_t before the first tile."""
    state = like.new_zeros(rows, 4)
    state[:, 0] = NEVER
    return state


def fold(tile: Tensor, column: Tensor, state: Tensor, transform: Transform) -> Tensor:
    """The running softmax after one more tile ``[n, columns]`` of c.

    ``column`` is the target's place in this tile; outside ``[0, columns)`` it is in another one.
    """
    shift, total, moment, chosen = state.unbind(1)
    z = transform.tempered(transform.capped(tile))
    inside = (column >= 0) & (column < z.shape[1])
    here = z.gather(1, column.clamp(0, z.shape[1] - 1)[:, None])[:, 0]
    top = torch.maximum(shift, z.amax(1))
    drop = shift - top
    decay = drop.exp()
    x = z - top[:, None]
    weight = x.exp()
    total_after = total * decay + weight.sum(1)
    moment_after = (moment + total * drop) * decay + weight.mul_(x).sum(1)
    return torch.stack((top, total_after, moment_after, torch.where(inside, here, chosen)), 1)


def finish(state: Tensor) -> Softmax:
    """The outputs, once every tile is folded in."""
    shift, total, moment, chosen = state.unbind(1)
    log_total = total.log()
    logprob, entropy = (chosen - shift) - log_total, log_total - moment / total
    return Softmax(logprob, entropy, shift + log_total, shift.clone(), log_total, chosen.clone())


def coefficients(upstream: Sequence[Tensor | None], softmax: Softmax, transform: Transform) -> Upstream:
    """The upstream gradients of logprob, entropy and logsumexp, None if unused, times scale/T, as coefficients."""
    d_logprob, d_entropy, d_logsumexp = upstream
    inner = torch.full_like(softmax.entropy, transform.scale)
    if transform.temperature is not None:
        inner = inner / transform.temperature
    density = inner * (-softmax.log_total).exp()
    level, slope, gain = torch.zeros_like(density), None, None
    if d_logsumexp is not None:
        level = level + d_logsumexp * density
    if d_entropy is not None:
        slope = -d_entropy * density
        level = level + slope * (softmax.entropy - softmax.log_total)
    if d_logprob is not None:
        level, gain = level - d_logprob * density, d_logprob * inner
        if transform.softcap is not None:
            capped = softmax.chosen if transform.temperature is None else softmax.chosen * transform.temperature
            gain = gain * (1 - (capped / transform.softcap).square())
    return Upstream(level, slope, gain)


def pull(
    tile: Tensor, shift: Tensor, upstream: Upstream, transform: Transform, moments: bool
) -> tuple[Tensor, Tensor | None]:
    """From a tile of c, dc without the target's share; and its Σ_v dz_v·x_v, if asked for."""
    capped = transform.capped(tile)
    steepness = None if transform.softcap is None else 1 - (capped / transform.softcap).square_()
    x = transform.tempered(capped) - shift[:, None]
    dz = x.exp()
    level = upstream.level[:, None]
    dz.mul_(level if upstream.slope is None else torch.addcmul(level, upstream.slope[:, None], x))
    moment = (dz * x).sum(1) if moments else None
    return dz if steepness is None else dz.mul_(steepness), moment


def add_target_(tile: Tensor, column: Tensor, gain: Tensor | None) -> None:
    """``tile[i, column[i]] += gain[i]`` where the column is in this tile."""
    if gain is not None:
        inside = (column >= 0) & (column < tile.shape[1])
        here = column.clamp(0, tile.shape[1] - 1)
        tile.scatter_add_(1, here[:, None], torch.where(inside, gain, 0)[:, None])


def temperature_gradient(
    moments: Tensor, upstream: Sequence[Tensor | None], softmax: Softmax, transform: Transform
) -> Tensor:
    """dT = −(Σ_v dz_v·x_v + g_L·m)/T; ``moments`` is scale/T times that sum, the target's g_p·x_t not included."""
    d_logprob, _, d_logsumexp = upstream
    rest = torch.zeros_like(moments)
    if d_logprob is not None:
        rest += d_logprob * (softmax.chosen - softmax.shift)
    if d_logsumexp is not None:
        rest += d_logsumexp * softmax.shift
    assert transform.temperature is not None
    return -moments / transform.scale - rest / transform.temperature


def no_second_derivative(ctx: Any, *_: Any) -> None:
    """The backward of a backward."""
    raise NotImplementedError(
        "linear_logprob: the tiled backend has no second derivative, use backend='reference', which has them all"
    )


def worth_compiling(tile: Tensor, logits: int) -> bool:
    """Whether passes over ``logits`` numbers, in tiles like this one, are to go through the compiler."""
    return tile.device.type == "cpu" and logits >= COMPILE_FROM and tile.shape[0] > 1


def run(function: Callable[..., T], tile: Tensor, *rest: object, compiled: bool) -> T:
    """``function(tile, *rest)``, through torch.compile if so decided and if it works on this machine."""
    if compiled and function not in _uncompilable:
        try:
            # Rows are symbolic from the first call on: every batch size shares one compilation, and its bits.
            for tensor in tree_leaves((tile, rest)):
                if isinstance(tensor, Tensor):
                    torch._dynamo.mark_dynamic(tensor, 0)
            result: T = _compile(function, dynamic=False)(tile, *rest)
            return result
        except Exception as error:  # no compiler, a broken one, a full disk: eager is the same mathematics
            _uncompilable.add(function)
            log.info("%s runs eagerly, torch.compile failed: %s", function.__name__, error)
    return function(tile, *rest)


_compile = functools.cache(torch.compile)
_uncompilable: set[Callable[..., object]] = set()
