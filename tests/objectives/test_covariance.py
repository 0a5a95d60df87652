"""Entropy control by covariance: which tokens, how many of them, what it does to the entropy, and
what is refused.
"""

import math
from typing import Any

import pytest
import torch
from burnish.objectives import covariance as cov
from burnish.objectives import policy
from mpmath import mp, mpf
from torch import Tensor


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


LOGP, ADVANTAGE = -draw(200).abs(), draw(200, seed=1)
COVARIANCE = cov.token_covariance(LOGP, ADVANTAGE)
UNIFORM = torch.rand(200, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def test_the_covariance_of_a_token_equals_its_equation() -> None:
    logp, advantage = LOGP.tolist(), ADVANTAGE.tolist()
    mean_logp, mean_advantage = math.fsum(logp) / 200, math.fsum(advantage) / 200
    expected = [
        (p - mean_logp) * (a - mean_advantage) for p, a in zip(logp, advantage, strict=True)
    ]
    assert COVARIANCE.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-15)
    joint = torch.cov(torch.stack([LOGP, ADVANTAGE]), correction=0)[0, 1]
    torch.testing.assert_close(COVARIANCE.mean(), joint)


def test_the_entropy_falls_by_the_mean_covariance_of_a_step_of_natural_policy_gradient() -> None:
    logits, reward = draw(6, seed=3), draw(6, seed=4)
    pi = logits.softmax(0)
    advantage = reward - (pi * reward).sum()

    def entropy(step: float) -> float:
        moved = (logits + step * advantage).log_softmax(0)
        return float(-(moved.exp() * moved).sum())

    slope = (entropy(1e-5) - entropy(-1e-5)) / 2e-5
    # Each action as often as it is likely: the mean over tokens is the expectation.
    counts = (pi * 200_000).round().long()
    action = torch.arange(6).repeat_interleave(counts)
    covariance = cov.token_covariance(pi.log()[action], advantage[action]).mean()
    assert slope == pytest.approx(-float(covariance), rel=1e-3)


def test_clip_cov_drops_so_many_of_the_tokens_between_the_bounds() -> None:
    eligible = (COVARIANCE > 0.5) & (COVARIANCE < 2.0)
    mask = cov.clip_cov_mask(COVARIANCE, UNIFORM, share=0.05, low=0.5, high=2.0)
    dropped = mask == 0
    assert int(dropped.sum()) == 10 < int(eligible.sum())
    assert not (dropped & ~eligible).any()
    assert UNIFORM[dropped].max() < UNIFORM[eligible & ~dropped].min(), "those of the smallest draw"
    every = cov.clip_cov_mask(COVARIANCE, UNIFORM, share=1.0, low=0.5, high=2.0)
    assert torch.equal(every == 0, eligible)
    assert int((cov.clip_cov_mask(COVARIANCE, UNIFORM, low=0.5) == 0).sum()) == 1, "one at least"
    assert cov.clip_cov_mask(COVARIANCE, UNIFORM, share=0.0).all()
    assert cov.clip_cov_mask(COVARIANCE, UNIFORM, share=1.0, low=100.0, high=200.0).all()


def test_the_bounds_of_clip_cov_are_one_and_five_and_exclude_themselves() -> None:
    covariance = torch.tensor([1.0, 1.1, 4.9, 5.0, -math.inf])
    mask = cov.clip_cov_mask(covariance, torch.zeros(5), share=1.0)
    assert mask.tolist() == [1, 0, 0, 1, 1]


def test_a_token_that_clip_cov_drops_has_no_gradient() -> None:
    logp = LOGP.clone().requires_grad_()
    loss, stats = policy.clipped_surrogate(logp, LOGP + 0.1 * draw(200, seed=5), ADVANTAGE)
    free = COVARIANCE.masked_fill(stats["clip_ratio/region"] > 0, -math.inf)
    mask = cov.clip_cov_mask(free, UNIFORM, share=0.05, low=0.5, high=2.0)
    (slope,) = torch.autograd.grad((mask * loss).sum(), logp)
    assert torch.equal(slope == 0, (mask == 0) | (stats["clip_ratio/region"] > 0))
    assert not mask.requires_grad


def test_kl_cov_takes_the_share_of_largest_covariance() -> None:
    mask = cov.kl_cov_mask(COVARIANCE, share=0.05)
    assert int(mask.sum()) == 10
    assert COVARIANCE[mask].min() > COVARIANCE[~mask].max()
    assert int(cov.kl_cov_mask(COVARIANCE, share=1e-9).sum()) == 1
    assert not cov.kl_cov_mask(COVARIANCE, share=0.0).any()
    assert cov.kl_cov_mask(torch.ones(4), share=0.5).tolist() == [True, True, False, False]
    assert cov.kl_cov_mask(torch.ones(1), share=0.5).tolist() == [True]
    assert cov.kl_cov_mask(COVARIANCE.view(20, 10), share=0.05).shape == (20, 10)


def test_masks_of_no_tokens_are_empty() -> None:
    none = torch.zeros(0)
    for empty in (
        cov.token_covariance(none, none),
        cov.clip_cov_mask(none, none),
        cov.kl_cov_mask(none, share=0.5),
    ):
        assert empty.shape == (0,)


def equation(p: float, old: float, a: float, penalized: bool) -> tuple[mpf, mpf]:
    """ℓ and its slope in log π."""
    w = mpf(p) - mpf(old)
    ratio, inside = mp.exp(min(w, 20)), w <= 20
    penalty = mpf(0.3) if penalized else mpf(0)
    return -ratio * a + penalty * abs(w), (-ratio * a if inside else 0) + penalty * mp.sign(w)


@pytest.mark.parametrize("far", [False, True])
def test_kl_cov_equals_its_equation(far: bool) -> None:
    old = LOGP + draw(200, seed=6)
    logp = torch.where(torch.arange(200) % 3 == 0, LOGP - 2000, LOGP + 1000) if far else LOGP
    penalized = torch.arange(200) % 2 == 0
    logp = logp.clone().requires_grad_()
    loss, stats = cov.kl_cov(logp, old, ADVANTAGE, penalized, beta=0.3)
    (slope,) = torch.autograd.grad(loss.sum(), logp)
    arguments = zip(
        logp.tolist(), old.tolist(), ADVANTAGE.tolist(), penalized.tolist(), strict=True
    )
    expected = [equation(*x) for x in arguments]
    assert loss.tolist() == pytest.approx([float(x) for x, _ in expected], rel=1e-12, abs=1e-14)
    assert slope.tolist() == pytest.approx([float(x) for _, x in expected], rel=1e-12, abs=1e-14)
    assert list(stats) == ["ratio", "kl_cov/penalty"]
    torch.testing.assert_close(
        stats["kl_cov/penalty"], penalized * 0.3 * (logp - old).abs().detach()
    )
    assert all(not stat.requires_grad and stat.shape == loss.shape for stat in stats.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kl_cov_is_finite_everywhere(dtype: torch.dtype) -> None:
    values = torch.tensor([-12000.0, -50.0, -1e-7, 0.0], dtype=dtype)
    logp, old = (x.flatten() for x in torch.meshgrid(values, values, indexing="ij"))
    logp.requires_grad_()
    loss, stats = cov.kl_cov(
        logp, old, torch.full_like(old, -3.0), torch.ones(16, dtype=torch.bool)
    )
    (slope,) = torch.autograd.grad(loss.sum(), logp)
    assert all(x.isfinite().all() and x.dtype == dtype for x in (loss, slope, *stats.values()))


def test_kl_cov_of_no_penalized_token_is_policy_gradient_and_tokens_do_not_interact() -> None:
    old = LOGP + draw(200, seed=6)
    none = torch.zeros(200, dtype=torch.bool)
    free, _ = policy.clipped_surrogate(LOGP, old, ADVANTAGE, clip_low=math.inf, clip_high=math.inf)
    torch.testing.assert_close(cov.kl_cov(LOGP, old, ADVANTAGE, none)[0], free)
    one = torch.arange(200) == 7
    assert torch.equal(cov.kl_cov(LOGP, old, ADVANTAGE, one)[0] != free, one)


def test_the_penalty_of_kl_cov_has_a_coefficient_of_one_and_bounds_may_be_equal() -> None:
    every = torch.ones(200, dtype=torch.bool)
    stated, _ = cov.kl_cov(LOGP, LOGP - 1, ADVANTAGE, every, beta=1.0)
    assert torch.equal(cov.kl_cov(LOGP, LOGP - 1, ADVANTAGE, every)[0], stated)
    assert cov.clip_cov_mask(COVARIANCE, UNIFORM, low=1.0, high=1.0).all()


def test_gradcheck() -> None:
    logp = (LOGP[:20] - 1).requires_grad_()  # off the kink
    penalized = torch.arange(20) % 2 == 0
    assert torch.autograd.gradcheck(
        lambda x: cov.kl_cov(x, LOGP[:20], ADVANTAGE[:20], penalized)[0], logp
    )


ONE = torch.zeros(1)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            lambda: cov.token_covariance(ONE, torch.zeros(2)),
            "token_covariance: advantage must have the shape of logp, [1], got [2]",
        ),
        (
            lambda: cov.clip_cov_mask(ONE, ONE, share=1.5),
            "clip_cov_mask: share must be in [0, 1], got 1.5",
        ),
        (
            lambda: cov.clip_cov_mask(ONE, torch.zeros(2)),
            "clip_cov_mask: draw must have the shape of covariance, [1], got [2]",
        ),
        (
            lambda: cov.clip_cov_mask(ONE, ONE, low=6.0),
            "clip_cov_mask: bounds must be low <= high, got 6.0 and 5.0",
        ),
        (
            lambda: cov.kl_cov_mask(ONE, share=-0.1),
            "kl_cov_mask: share must be in [0, 1], got -0.1",
        ),
        (
            lambda: cov.kl_cov(ONE, ONE, ONE, ONE > 0, beta=0.0),
            "kl_cov: beta must be > 0, got 0.0",
        ),
        (
            lambda: cov.kl_cov(ONE, ONE, ONE, ONE),
            "kl_cov: penalized must be a Bool tensor, got torch.float32",
        ),
        (
            lambda: cov.kl_cov(ONE, ONE, ONE, torch.zeros(2, dtype=torch.bool)),
            "kl_cov: penalized must have the shape of logp, [1], got [2]",
        ),
    ],
)
def test_errors_name_the_function_and_what_it_got(
    wrong: Any, message: str, as_users_run_it: None
) -> None:
    with pytest.raises(ValueError) as error:
        wrong()
    assert str(error.value) == message
