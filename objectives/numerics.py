"""Functions of log-probabilities that stay finite, in value and in gradient, where the textbook
form does not.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def log_odds(logp: Tensor) -> Tensor:
    """log(p / (1 − p)) from log p, accurate from p → 0 to p → 1.

    A log p closer to zero than the machine epsilon ε of its dtype is read as −ε: rounding alone
    puts p there, and at p = 1 the odds are infinite. The gradient 1/(1 − p) is taken at that point
    too, so it is never more than 1/ε.
    """
    below_one = _below_one(logp)
    return below_one - log1mexp(below_one)


def log_remainder(logp: Tensor) -> Tensor:
    """log(1 − p) from log p, never less than log ε: near p = 1 it is read as in `log_odds`."""
    return log1mexp(_below_one(logp))


def log1mexp(x: Tensor) -> Tensor:
    """log(1 − eˣ) for x < 0, by whichever of its two forms loses no digits there (Mächler 2012,
    "log1mexp").
    """
    return torch.where(x > -math.log(2), torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(x)))


def power_score(log_ratio: Tensor, alpha: float) -> Tensor:
    """(1 − u^−α) / α as a function of log u; its limit log u at α = 0.

    Where u^−α exceeds the cube root of the largest float (e²⁹ in float32, e²³⁶ in float64) the
    curve goes on along its tangent. It stays monotone, so two such scores still compare rightly,
    and its square and gradient stay finite.
    """
    if alpha == 0:
        return log_ratio
    exponent = -alpha * log_ratio
    limit = math.log(torch.finfo(exponent.dtype).max) / 3
    below = exponent.clamp(max=limit)
    # Near zero e^x − 1 cancels; far below it expm1's backward does, which computes e^x as (e^x − 1)
    # + 1.
    curve = torch.where(below.abs() < 1, torch.expm1(below), torch.exp(below) - 1)
    tangent = math.exp(limit) * F.relu(exponent - limit)
    return -(curve + tangent) / alpha


def _below_one(logp: Tensor) -> Tensor:
    """log p, at most −ε; the gradient passes as if nothing had been cut."""
    fixed = logp.detach()
    return fixed.clamp(max=-torch.finfo(logp.dtype).eps) + (logp - fixed)
