"""Stable forms against 60-digit arithmetic, and how they go on where the exact value cannot be
held.
"""

import math

import pytest
import torch
from burnish.objectives.numerics import log1mexp, log_odds, log_remainder, power_score
from mpmath import mp, mpf


def value_and_slope(function, values, dtype=torch.float64):  # type: ignore[no-untyped-def]
    x = torch.tensor(values, dtype=dtype, requires_grad=True)
    y = function(x)
    (slope,) = torch.autograd.grad(y.sum(), x)
    return y.tolist(), slope.tolist()


@pytest.mark.parametrize(("dtype", "digits"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
def test_log1mexp_and_log_odds_keep_their_digits_at_both_ends(
    dtype: torch.dtype, digits: float
) -> None:
    near_one = [-1e-15, -1e-9] if dtype == torch.float64 else [-1e-6, -1e-5]
    # the form changes at −log 2
    values = torch.tensor([-80.0, -20.0, -0.8, -0.6, -1e-3, *near_one], dtype=dtype).tolist()
    with mp.workdps(60):
        remainder = [mp.log(1 - mp.exp(mpf(x))) for x in values]
        slopes = [1 / (1 - mp.exp(mpf(x))) for x in values]
        odds = [mpf(x) - r for x, r in zip(values, remainder, strict=True)]
    assert value_and_slope(log1mexp, values, dtype)[0] == pytest.approx(
        [float(x) for x in remainder], rel=digits
    )
    value, slope = value_and_slope(log_odds, values, dtype)
    assert value == pytest.approx([float(x) for x in odds], rel=digits)
    assert slope == pytest.approx([float(x) for x in slopes], rel=2 * digits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_log_odds_read_certainty_as_one_epsilon_short_of_it(dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps
    value, slope = value_and_slope(log_odds, [-eps, -eps / 1e6, 0.0, eps / 10], dtype)
    assert value == pytest.approx([value[0]] * 4)
    assert slope == pytest.approx([1 / eps] * 4, rel=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_log_remainder_is_log1mexp_down_to_one_epsilon(dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps
    inside = [-80.0, -2.0, -0.25, -8 * eps]
    assert value_and_slope(log_remainder, inside, dtype) == value_and_slope(log1mexp, inside, dtype)
    value, slope = value_and_slope(log_remainder, [-eps, 0.0, 4 * eps], dtype)
    assert value == pytest.approx([math.log(eps)] * 3, rel=0.01)
    assert slope == pytest.approx([-1 / eps] * 3, rel=0.01)


@pytest.mark.parametrize(("dtype", "corner"), [(torch.float32, 29.5), (torch.float64, 236.5)])
def test_power_score_goes_on_along_its_tangent(dtype: torch.dtype, corner: float) -> None:
    inside, outside, far = -corner + 1, -corner - 1, -1e5
    value, slope = value_and_slope(lambda x: power_score(x, 1.0), [inside, outside, far], dtype)
    with mp.workdps(60):
        assert value[0] == pytest.approx(float(1 - mp.exp(-mpf(inside))), rel=1e-5)
        assert value[1] > float(1 - mp.exp(-mpf(outside)))  # above the exact, concave curve
    assert slope[0] < slope[1] == slope[2]
    assert (value[1] - value[2]) / (outside - far) == pytest.approx(slope[1], rel=1e-5)


def test_power_score_at_zero_is_the_logarithm() -> None:
    x = torch.tensor([-3.0, 2.0])
    assert power_score(x, 0.0) is x
