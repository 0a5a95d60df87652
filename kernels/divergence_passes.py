"""What happens to one tile of logits of either head ``[n, columns]``: three elementwise passes, eager or compiled.

Their equations are in tiled_divergence.py. ``known`` ``[n, 5]`` has, of each row, m and log S of the student, m and log
R of the teacher, and in ``LEVEL`` what backward subtracts, D or in a mixture K.
"""

import torch
from torch import Tensor

from .tiles import Transform

LEVEL = 4


def fold(p: Tensor, q: Tensor, state: Tensor, to_z: Transform, to_w: Transform, gap: bool) -> Tensor:
    """``[n, 5]``, m_P, S, m_Q, R and G of KL(P‖Q), after one more pair of tiles of c; G only if it is asked for."""
    shift, total, other_shift, other_total, sum_of_gaps = state.unbind(1)
    z, w = to_z.tempered(to_z.capped(p)), to_w.tempered(to_w.capped(q))
    top, other_top = torch.maximum(shift, z.amax(1)), torch.maximum(other_shift, w.amax(1))
    drop, other_drop = shift - top, other_shift - other_top
    x, y = z - top[:, None], w - other_top[:, None]
    weight = x.exp()
    total_after = total * drop.exp() + weight.sum(1)
    if gap:
        sum_of_gaps = (sum_of_gaps + (drop - other_drop) * total) * drop.exp() + weight.mul_(x.sub_(y)).sum(1)
    other_after = other_total * other_drop.exp() + y.exp_().sum(1)
    return torch.stack((top, total_after, other_top, other_after, sum_of_gaps), 1)


def mix(student: Tensor, teacher: Tensor, known: Tensor, to_z: Transform, to_w: Transform, beta: float) -> Tensor:
    """``[n, 2]``: Σ eᵗ·(t − log M) and Σ eˢ·(s − log M) over a pair of tiles of c."""
    s, t = _log_probabilities(student, teacher, known, to_z, to_w)
    p, q = s.exp(), t.exp()
    mixture = _log_mixture(p, q, beta)
    return torch.stack((q.mul_(t.sub_(mixture)).sum(1), p.mul_(s.sub_(mixture)).sum(1)), 1)


def pull(
    out: Tensor,
    student: Tensor,
    teacher: Tensor,
    known: Tensor,
    gain: Tensor,
    to_z: Transform,
    to_w: Transform,
    beta: float,
) -> None:
    """From a pair of tiles of c, the student's dc, into ``out``; ``gain`` is g·scale/T, in a mixture times 1−β."""
    s, t = _log_probabilities(student, teacher, known, to_z, to_w)
    p, level = s.exp(), known[:, LEVEL, None]
    if beta == 0:
        dz = p.sub_(t.exp_())
    elif beta == 1:
        dz = p.mul_(s.sub_(t).sub_(level))
    else:
        dz = p.mul_(s.sub_(_log_mixture(p, t.exp_(), beta)).sub_(level))
    if to_z.softcap is not None:
        dz.mul_(1 - (to_z.capped(student) / to_z.softcap).square_())
    torch.mul(dz, gain[:, None], out=out)


def _log_probabilities(
    student: Tensor, teacher: Tensor, known: Tensor, to_z: Transform, to_w: Transform
) -> tuple[Tensor, Tensor]:
    """s and t, free to be overwritten. Minus m first: large logits cost no digits."""
    shift, log_total, other_shift, other_log_total, _ = known[:, :, None].unbind(1)
    s = to_z.tempered(to_z.capped(student)) - shift
    t = to_w.tempered(to_w.capped(teacher)) - other_shift
    return s.sub_(log_total), t.sub_(other_log_total)


def _log_mixture(p: Tensor, q: Tensor, beta: float) -> Tensor:
    """log((1−β)p + βq), finite where it underflows: there it is multiplied by zero."""
    return (p * (1 - beta)).add_(q, alpha=beta).clamp_(min=torch.finfo(p.dtype).tiny).log_()
