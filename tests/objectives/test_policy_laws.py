"""What the papers promise of policy objectives: which gradient they follow, where they stop, what
they reduce to.

Expectations are exact: one token from a vocabulary of four, every outcome weighted by its
probability.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from burnish.objectives import policy
from burnish.objectives.sequence import sequence_mean, sequence_sum
from torch import Tensor

SEQUENCE = torch.tensor([0, 0, 0, 1, 2, 2, 2, 2])
ADVANTAGE = torch.tensor([1.5, -0.5, -2.0], dtype=torch.float64)
wide = {"clip_low": math.inf, "clip_high": math.inf}
ppo: dict[str, float] = {"clip_low": 0.2, "clip_high": 0.3}
OFF_POLICY: list[tuple[Callable[..., Any], dict[str, float]]] = [
    (policy.topr, {}),
    (policy.clipped_surrogate, ppo),
    (policy.dppo, ppo),
    (policy.dppo_kl, ppo),
    (policy.cispo, ppo),
    (policy.sapo, {"tau_pos": 0.5, "tau_neg": 3.0}),
]
OF_COMPLETIONS: list[tuple[Callable[..., Any], dict[str, float]]] = [
    (policy.gspo, ppo),
    (policy.gspo_token, ppo),
    (policy.gmpo, {}),
    (policy.vespo, {}),
]


def slope(objective: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    x = at.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(objective(x).sum(), x)
    return gradient


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


LOGP = -draw(8).abs()


@pytest.mark.parametrize(
    ("objective", "hyper"), OFF_POLICY, ids=lambda x: getattr(x, "__name__", "")
)
def test_at_ratio_one_the_gradient_is_the_policy_gradient(
    objective: Any, hyper: dict[str, float]
) -> None:
    advantage = draw(8, seed=1)
    gradient = slope(lambda x: objective(x, LOGP, advantage, **hyper)[0], LOGP)
    torch.testing.assert_close(gradient, -advantage, rtol=1e-14, atol=0)
    torch.testing.assert_close(
        gradient, slope(lambda x: policy.reinforce(x, advantage)[0], LOGP), rtol=1e-14, atol=0
    )


@pytest.mark.parametrize(
    ("objective", "hyper"), OF_COMPLETIONS, ids=lambda x: getattr(x, "__name__", "")
)
def test_at_ratio_one_completions_follow_the_policy_gradient_too(
    objective: Any, hyper: dict[str, float]
) -> None:
    advantage = ADVANTAGE[SEQUENCE] if objective is policy.gspo_token else ADVANTAGE
    gradient = slope(lambda x: objective(x, LOGP, advantage, SEQUENCE, **hyper)[0], LOGP)
    length = torch.bincount(SEQUENCE)[SEQUENCE]
    per_token = objective in (policy.gspo_token, policy.vespo)
    expected = -ADVANTAGE[SEQUENCE] if per_token else -ADVANTAGE[SEQUENCE] / length
    torch.testing.assert_close(gradient, expected, rtol=1e-14, atol=0)


def expected_slope(
    sampler: Tensor, objective: Callable[[Tensor], Tensor], logits: Tensor
) -> Tensor:
    """The gradient in the logits of a loss per outcome, averaged over the sampler's outcomes."""
    return slope(lambda x: sampler * objective(x.log_softmax(-1)), logits)


LOGITS, OLD_LOGITS, REF_LOGITS = draw(3, 4, seed=2)
OLD, REF = OLD_LOGITS.log_softmax(-1), REF_LOGITS.log_softmax(-1)
PI = LOGITS.softmax(-1)
REWARD = numbers(1.0, -2.0, 0.5, 3.0)


def test_expected_gradients_are_that_of_the_expected_reward() -> None:
    true = -slope(lambda x: x.softmax(-1) * REWARD, LOGITS)
    on_policy = expected_slope(PI, lambda x: policy.reinforce(x, REWARD)[0], LOGITS)
    torch.testing.assert_close(on_policy, true)
    for off_policy in (
        lambda x: policy.clipped_surrogate(x, OLD, REWARD, **wide)[0],
        lambda x: policy.cispo(x, OLD, REWARD, clip_high=math.inf)[0],
        lambda x: policy.dppo(x, OLD, REWARD, clip_low=1.0, clip_high=1.0)[0],
        lambda x: policy.dppo_kl(x, OLD, REWARD, **wide)[0],
    ):
        torch.testing.assert_close(expected_slope(OLD.exp(), off_policy, LOGITS), true)


def test_the_surrogate_is_pessimistic_and_stops_where_the_advantage_has_had_its_way() -> None:
    logp, advantage = draw(200, seed=3) - 3, draw(200, seed=4)
    old = torch.full_like(logp, -3)
    clipped, stats = policy.clipped_surrogate(logp, old, advantage, **ppo)
    free, _ = policy.clipped_surrogate(logp, old, advantage, **wide)
    assert (clipped >= free).all()
    gradient = slope(lambda x: policy.clipped_surrogate(x, old, advantage, **ppo)[0], logp)
    assert torch.equal(gradient == 0, stats["clip_ratio/region"].bool())
    assert torch.equal(
        stats["clip_ratio/region"], stats["clip_ratio/low"] + stats["clip_ratio/high"]
    )


def test_the_defaults_clip_at_a_fifth() -> None:
    logp, old, other = draw(3, 200, seed=16)
    stated, _ = policy.clipped_surrogate(logp, old, other, clip_low=0.2, clip_high=0.2)
    assert torch.equal(policy.clipped_surrogate(logp, old, other)[0], stated)
    assert torch.equal(
        policy.value_loss(logp, old, other)[0], policy.value_loss(logp, old, other, clip=0.2)[0]
    )


@pytest.mark.parametrize(
    "objective", [policy.clipped_surrogate, policy.dppo, policy.dppo_kl, policy.cispo]
)
def test_a_token_that_has_not_moved_is_not_clipped_however_tight_the_clip(objective: Any) -> None:
    advantage = numbers(1.0, -1.0)
    _, stats = objective(LOGP[:2], LOGP[:2], advantage, clip_low=0.0, clip_high=0.0)
    gradient = slope(
        lambda x: objective(x, LOGP[:2], advantage, clip_low=0.0, clip_high=0.0)[0], LOGP[:2]
    )
    assert torch.equal(gradient, -advantage)
    assert not any(stat.any() for name, stat in stats.items() if "clip" in name)


def test_the_cap_of_two_sided_clipping_is_the_constant_of_dual_clip() -> None:
    logp, advantage = 2 * draw(500, seed=5) - 3, draw(500, seed=6)
    old = torch.full_like(logp, -3)
    for c in (1.3, 3.0):

        def dual_clip(x: Tensor, c: float = c) -> Tensor:
            ratio = (x - old).exp()
            gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.3) * advantage)
            return -torch.where(advantage < 0, torch.maximum(gain, c * advantage), gain)

        def ours(x: Tensor, c: float = c) -> Tensor:
            return policy.clipped_surrogate(x, old, advantage, ratio_cap=c, **ppo)[0]

        torch.testing.assert_close(ours(logp), dual_clip(logp))
        torch.testing.assert_close(slope(ours, logp), slope(dual_clip, logp))
        assert (slope(ours, logp) != slope(lambda x: ours(x, math.inf), logp)).any(), (
            "the cap must matter"
        )


def test_dppo_lets_rare_tokens_rise_and_holds_frequent_ones() -> None:
    old, new = numbers(1e-5, 0.9).log(), numbers(1e-2, 0.6).log()
    advantage = numbers(1.0, -1.0)
    hyper = {"clip_low": 0.2, "clip_high": 0.2}
    divergence = slope(lambda x: policy.dppo(x, old, advantage, **hyper)[0], new)
    assert divergence[0] < 0 == divergence[1]
    # PPO stops the first at a ratio of 1000, and lets the second go on at one of 2/3, for ε_low >
    # 1/3.
    ratio = slope(
        lambda x: policy.clipped_surrogate(x, old, advantage, clip_low=0.4, clip_high=0.2)[0], new
    )
    assert ratio[0] == 0 < ratio[1]


def test_dppo_never_stops_a_token_on_its_way_back() -> None:
    old, new = numbers(0.1, 0.9).log(), numbers(0.9, 0.1).log()
    gradient = slope(
        lambda x: policy.dppo(x, old, numbers(-1.0, 1.0), clip_low=0.2, clip_high=0.2)[0], new
    )
    torch.testing.assert_close(gradient, numbers(9.0, -1 / 9))


def test_cispo_bounds_every_weight_and_drops_no_token() -> None:
    logp, advantage = 3 * draw(100, seed=7) - 9, draw(100, seed=8)
    old = torch.full_like(logp, -9)
    gradient = slope(lambda x: policy.cispo(x, old, advantage, clip_high=1.0)[0], logp)
    assert (gradient != 0).all()
    assert torch.equal(gradient.sign(), -advantage.sign())
    assert (gradient.abs() <= 2 * advantage.abs()).all()


def test_topr_imitates_successes_and_forgets_unlearned_failures() -> None:
    old = numbers(-9.0, -9.0, -9.0, -9.0)
    new = numbers(-40.0, -2.0, -40.0, -2.0)
    advantage = numbers(1.0, 1.0, -1.0, -1.0)
    gradient = slope(lambda x: policy.topr(x, old, advantage)[0], new)
    torch.testing.assert_close(gradient, numbers(-1.0, -1.0, math.exp(-31), 1.0))


def test_sapo_fades_evenly_on_both_sides_and_without_a_temperature_not_at_all() -> None:
    distance = numbers(0.1, 0.5, 0.9)

    def per_ratio(x: Tensor, tau: float) -> Tensor:
        """The slope in ρ, for A = 1."""
        zero, one = torch.zeros_like(x), torch.ones_like(x)
        return -slope(lambda r: policy.sapo(r.log(), zero, one, tau_pos=tau, tau_neg=9.0)[0], x)

    up, down = per_ratio(1 + distance, 2.0), per_ratio(1 - distance, 2.0)
    torch.testing.assert_close(up, down)
    torch.testing.assert_close(up, 1 / distance.cosh().square())
    assert (up.diff() < 0).all()
    torch.testing.assert_close(per_ratio(1 + distance, 1e-4), torch.ones(3, dtype=torch.float64))


def test_by_default_sapo_fades_faster_for_negative_advantages() -> None:
    loss, _ = policy.sapo(numbers(0.5, 0.5, 0.5), numbers(0, 0, 0), numbers(1, -1, 0))
    up = math.exp(0.5) - 1
    assert loss.tolist() == pytest.approx(
        [-4 / (1 + math.exp(-up)), 4 / 1.05 / (1 + math.exp(-1.05 * up)), 0]
    )


def test_one_token_completions_make_gspo_ppo() -> None:
    each = torch.arange(8)
    logp, advantage = LOGP + 0.5 * draw(8, seed=9), draw(8, seed=10)
    loss, stats = policy.clipped_surrogate(logp, LOGP, advantage, **ppo)
    assert stats["clip_ratio/region"].any()
    for objective in (policy.gspo, policy.gspo_token):
        mine, mine_stats = objective(logp, LOGP, advantage, each, **ppo)
        torch.testing.assert_close(mine, loss)
        assert all(torch.equal(mine_stats[name], stats[name]) for name in stats if "clip" in name)


def test_one_token_completions_make_gmpo_ppo_with_bounds_on_the_logarithm() -> None:
    old = -draw(64, seed=9).abs()
    logp, advantage = old + 0.6 * draw(64, seed=10), draw(64, seed=11)
    bounds = {"clip_low": 1 - math.exp(-0.4), "clip_high": math.exp(0.4) - 1}
    loss, _ = policy.clipped_surrogate(logp, old, advantage, **bounds)
    mine, stats = policy.gmpo(logp, old, advantage, torch.arange(64))
    torch.testing.assert_close(mine, loss)
    assert stats["clip_ratio/low"].any() and stats["clip_ratio/high"].any()


def test_gspo_token_with_one_advantage_per_completion_averages_to_gspo() -> None:
    logp = LOGP + 0.3 * draw(8, seed=11)

    def averaged(x: Tensor) -> Tensor:
        loss, _ = policy.gspo_token(x, LOGP, ADVANTAGE[SEQUENCE], SEQUENCE, **ppo)
        return sequence_mean(loss, SEQUENCE, 3)

    def whole(x: Tensor) -> Tensor:
        return policy.gspo(x, LOGP, ADVANTAGE, SEQUENCE, **ppo)[0]

    torch.testing.assert_close(averaged(logp), whole(logp))
    torch.testing.assert_close(slope(averaged, logp), slope(whole, logp))


def test_gspo_token_follows_each_tokens_own_advantage() -> None:
    advantage = draw(8, seed=12)
    gradient = slope(lambda x: policy.gspo_token(x, LOGP, advantage, SEQUENCE, **ppo)[0], LOGP)
    torch.testing.assert_close(gradient, -advantage)
    # completions without a token between
    skipped, _ = policy.gspo_token(LOGP, LOGP, advantage, 5 * SEQUENCE, **ppo)
    torch.testing.assert_close(skipped, -advantage)


def test_an_elementwise_objective_of_means_is_its_completion_level_form() -> None:
    logp = LOGP + 0.3 * draw(8, seed=11)
    means = [sequence_mean(x, SEQUENCE, 3) for x in (logp, LOGP)]
    torch.testing.assert_close(
        policy.clipped_surrogate(*means, ADVANTAGE, **ppo)[0],
        policy.gspo(logp, LOGP, ADVANTAGE, SEQUENCE, **ppo)[0],
    )


def test_reinforce_of_sums_is_rloo_whose_tokens_share_the_advantage() -> None:
    gradient = slope(lambda x: policy.reinforce(sequence_sum(x, SEQUENCE, 3), ADVANTAGE)[0], LOGP)
    assert torch.equal(gradient, -ADVANTAGE[SEQUENCE])


def test_gmpo_is_moved_less_by_one_outlier_than_the_mean_of_ratios() -> None:
    logp = LOGP.clone()
    logp[5] += 3
    geometric, stats = policy.gmpo(logp, LOGP, ADVANTAGE, SEQUENCE, **wide)
    arithmetic = sequence_mean((logp - LOGP).exp(), SEQUENCE, 3)
    torch.testing.assert_close(stats["ratio"], numbers(1, 1, math.exp(3 / 4)))
    assert stats["ratio"][2] < 0.4 * arithmetic[2]
    torch.testing.assert_close(geometric, -ADVANTAGE * stats["ratio"])


def test_vespo_weighs_a_completion_by_its_distance_and_most_at_k_over_lambda() -> None:
    sequence = torch.arange(5)
    for advantage, k, decay in ((1.0, 2.0, 3.0), (0.0, 2.0, 3.0), (-1.0, 3.0, 2.0)):
        best = math.log(k / decay)
        change = numbers(0.0, best - 0.1, best, best + 0.1, 5.0)
        given = torch.full((5,), advantage, dtype=torch.float64)
        _, stats = policy.vespo(LOGP[:5] + change, LOGP[:5], given, sequence)
        phi = stats["vespo/phi_seq"]
        assert phi[0].item() == pytest.approx(1)
        assert phi[1] < phi[2] > phi[3]
        assert phi[4] < 1e-90


def test_the_value_loss_is_pessimistic_and_without_a_clip_half_the_squared_error() -> None:
    value, old, target = draw(3, 100, seed=13)
    clipped, _ = policy.value_loss(value, old, target)
    plain, _ = policy.value_loss(value, old, target, clip=math.inf)
    torch.testing.assert_close(
        plain, 0.5 * torch.nn.functional.mse_loss(value, target, reduction="none")
    )
    assert (clipped >= plain).all() and (clipped > plain).any()
    near, _ = policy.value_loss(old + 0.19, old, target)
    torch.testing.assert_close(near, 0.5 * (old + 0.19 - target).square())


def kl(p: Tensor, q: Tensor) -> Tensor:
    """KL between two distributions given as log-probabilities."""
    return (p.exp() * (p - q)).sum()


def kl_loss(kind: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: policy.kl_estimate(x, REF, kind=kind)[0]


def test_k1_and_k3_are_unbiased_and_k3_is_never_negative() -> None:
    true = kl(LOGITS.log_softmax(-1), REF)
    for kind in ("k1", "k3"):
        torch.testing.assert_close((PI * kl_loss(kind)(LOGITS.log_softmax(-1))).sum(), true)
    assert not torch.isclose((PI * kl_loss("k2")(LOGITS.log_softmax(-1))).sum(), true)
    apart = torch.cat(
        [-numbers(*[10.0**i for i in range(-9, 4)]), numbers(*[10.0**i for i in range(-9, 4)])]
    )
    assert (policy.kl_estimate(apart, torch.zeros_like(apart), kind="k3")[0] > 0).all()
    assert policy.kl_estimate(LOGP, LOGP, kind="k3")[0].eq(0).all()


def test_as_losses_k1_goes_nowhere_k2_down_the_kl_and_k3_down_the_forward_kl() -> None:
    reverse = slope(lambda x: kl(x.log_softmax(-1), REF), LOGITS)
    forward = slope(lambda x: kl(REF, x.log_softmax(-1)), LOGITS)
    torch.testing.assert_close(expected_slope(PI, kl_loss("k1"), LOGITS), torch.zeros_like(LOGITS))
    torch.testing.assert_close(expected_slope(PI, kl_loss("k2"), LOGITS), reverse)
    torch.testing.assert_close(expected_slope(PI, kl_loss("k3"), LOGITS), forward)


@pytest.mark.parametrize("kind", ["k1", "k3"])
@pytest.mark.parametrize("old", [OLD, LOGITS.log_softmax(-1)], ids=["off-policy", "on-policy"])
def test_the_correction_makes_value_and_gradient_those_of_the_kl(kind: Any, old: Tensor) -> None:
    def loss(x: Tensor) -> Tensor:
        return policy.corrected_kl_estimate(x, old, REF, kind=kind)[0]

    torch.testing.assert_close(
        (old.exp() * loss(LOGITS.log_softmax(-1))).sum(), kl(LOGITS.log_softmax(-1), REF)
    )
    true = slope(lambda x: kl(x.log_softmax(-1), REF), LOGITS)
    torch.testing.assert_close(expected_slope(old.exp(), loss, LOGITS), true)


def test_reinforce_with_k2_to_the_old_policy_is_mirror_descent() -> None:
    logp, advantage, tau = LOGP + draw(8, seed=14), draw(8, seed=15), 0.3
    squared = slope(lambda x: (advantage - tau * (x - LOGP)).square() / (2 * tau), logp)
    composed = slope(
        lambda x: (
            policy.reinforce(x, advantage)[0] + tau * policy.kl_estimate(x, LOGP, kind="k2")[0]
        ),
        logp,
    )
    torch.testing.assert_close(composed, squared)


@pytest.mark.parametrize("tokens", [1, 2, 5, 10, 101, 1000])
def test_the_entropy_mask_keeps_the_tokens_above_the_quantile(tokens: int) -> None:
    entropy = draw(tokens, seed=tokens).abs()
    for share in (0.0, 0.1, 0.25, 0.5, 1.0):
        mask = policy.high_entropy_mask(entropy, quantile=share)
        assert torch.equal(mask, entropy >= torch.quantile(entropy, 1 - share))
        assert torch.equal(policy.high_entropy_mask(entropy.flip(0), quantile=share), mask.flip(0))
        assert mask.sum() == 1 + int(share * (tokens - 1))


def test_the_entropy_mask_keeps_ties_and_shapes_and_takes_a_step_of_any_size(
    as_users_run_it: None,
) -> None:
    assert policy.high_entropy_mask(torch.ones(2, 3), quantile=0.2).tolist() == [[True] * 3] * 2
    assert policy.high_entropy_mask(torch.zeros(0, 3), quantile=0.2).shape == (0, 3)
    assert policy.high_entropy_mask(torch.zeros(0), quantile=0.2).dtype == torch.bool
    large = torch.arange(2**24 + 2, dtype=torch.float64)
    assert policy.high_entropy_mask(large, quantile=0.5).sum() == 2**23 + 1
    for wrong in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError) as error:
            policy.high_entropy_mask(large, quantile=wrong)
        assert str(error.value) == f"high_entropy_mask: quantile must be in [0, 1], got {wrong}"
