"""Weights, masks and mismatch diagnostics against Python loops over tokens, and what they are
worth.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from burnish.objectives import correction as co
from torch import Tensor

NAN, INF = math.nan, math.inf
LENGTHS = {0: 3, 2: 1, 3: 5, 5: 4}  # completions 1 and 4 have no tokens
SEQUENCE = torch.tensor([i for i, n in LENGTHS.items() for _ in range(n)])
TOKENS = len(SEQUENCE)
ADVANTAGE = torch.tensor([-1.0, 0.0, 2.0, -0.5, 0.0, 0.0], dtype=torch.float64)


def logps(seed: int = 0, spread: float = 0.7) -> tuple[Tensor, Tensor]:
    """log π_old and log μ of the sampled tokens, as leaves."""
    draw = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(TOKENS, dtype=torch.float64, generator=draw) - 0.5
    behavior = old + spread * torch.randn(TOKENS, dtype=torch.float64, generator=draw)
    return old.requires_grad_(), behavior.requires_grad_()


def differences(old: Tensor, behavior: Tensor) -> list[float]:
    pairs = zip(old.tolist(), behavior.tolist(), strict=True)
    return [0.0 if math.isnan(mu) else p - mu for p, mu in pairs]


def of_completions(w: list[float], rule: Callable[[list[float]], float]) -> list[float]:
    """The rule's value for a token's whole completion, at each token."""
    ids = SEQUENCE.tolist()
    return [rule([x for x, j in zip(w, ids, strict=True) if j == i]) for i in ids]


def clamp(x: float) -> float:
    return min(max(x, -20.0), 20.0)


LOG_RATIOS: dict[
    str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[list[float]], list[float]]]
] = {
    "token_log_ratio": (co.token_log_ratio, lambda w: [clamp(x) for x in w]),
    "sequence_log_ratio": (
        lambda old, mu: co.sequence_log_ratio(old, mu, SEQUENCE),
        lambda w: of_completions(w, lambda y: clamp(math.fsum(y))),
    ),
    "geometric_log_ratio": (
        lambda old, mu: co.geometric_log_ratio(old, mu, SEQUENCE),
        lambda w: of_completions(w, lambda y: clamp(math.fsum(y) / len(y))),
    ),
}
log_ratios = pytest.mark.parametrize("name", LOG_RATIOS)

# Each weight of a log-ratio, and its equation for one ratio.
WEIGHTS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[float], float]]] = {
    "truncated_importance": (lambda w: co.truncated_importance(w, cap=1.5), lambda p: min(p, 1.5)),
    "truncated_importance, floor": (
        lambda w: co.truncated_importance(w, cap=1.5, floor=0.8),
        lambda p: max(0.8, min(p, 1.5)),
    ),
    "masked_importance": (co.masked_importance, lambda p: p if 0.5 <= p <= 5 else 0.0),
    "masked_importance, narrow": (
        lambda w: co.masked_importance(w, low=0.8, high=1.5),
        lambda p: p if 0.8 <= p <= 1.5 else 0.0,
    ),
    "importance_mask": (
        lambda w: co.importance_mask(w, low=0.8, high=1.5),
        lambda p: float(0.8 <= p <= 1.5),
    ),
}
weights = pytest.mark.parametrize("name", WEIGHTS)


@log_ratios
def test_log_ratios_equal_their_equation_and_carry_no_gradient(name: str) -> None:
    function, equation = LOG_RATIOS[name]
    old, behavior = logps()
    actual = function(old, behavior)
    assert actual.tolist() == pytest.approx(
        equation(differences(old, behavior)), rel=1e-12, abs=1e-14
    )
    assert not actual.requires_grad


@log_ratios
def test_a_token_of_unknown_behavior_counts_as_on_policy(name: str) -> None:
    function, equation = LOG_RATIOS[name]
    old, behavior = logps()
    gaps = behavior.detach().clone()
    gaps[[1, 4]] = NAN
    assert function(old, gaps).tolist() == pytest.approx(
        equation(differences(old, gaps)), rel=1e-12, abs=1e-14
    )
    broken = old.detach().clone()
    broken[0] = NAN  # of the trainer's own log-prob, on the other hand, a NaN must not vanish
    assert function(broken, behavior)[0].isnan()


@log_ratios
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log_ratios_are_clamped_to_20(name: str, dtype: torch.dtype) -> None:
    function, equation = LOG_RATIOS[name]
    behavior = torch.zeros(TOKENS, dtype=dtype)
    for far in (-2000.0, -50.0, 50.0, 2000.0):
        actual = function(torch.full_like(behavior, far), behavior)
        assert actual.dtype == dtype
        assert actual.tolist() == equation([far] * TOKENS) == [math.copysign(20, far)] * TOKENS
        for weight in (co.truncated_importance(actual, cap=3e38), actual.exp().square()):
            assert weight.isfinite().all()


@log_ratios
def test_a_completion_depends_on_no_other(name: str) -> None:
    function, _ = LOG_RATIOS[name]
    old, behavior = logps()
    spoiled = old.detach().clone()
    spoiled[SEQUENCE == 3] = -2000.0
    before, after = function(old, behavior), function(spoiled, behavior)
    assert torch.equal(before[SEQUENCE != 3], after[SEQUENCE != 3])
    assert (before[SEQUENCE == 3] != after[SEQUENCE == 3]).all()


def test_the_geometric_mean_of_a_completion_twice_as_long_is_the_same_and_the_product_its_square() -> (
    None
):
    old, behavior = (x.detach()[:4] for x in logps())
    one, two = torch.zeros(4, dtype=torch.int64), torch.zeros(8, dtype=torch.int64)
    twice = old.repeat(2), behavior.repeat(2)
    torch.testing.assert_close(
        co.geometric_log_ratio(*twice, two)[:4], co.geometric_log_ratio(old, behavior, one)
    )
    torch.testing.assert_close(
        co.sequence_log_ratio(*twice, two)[:4], 2 * co.sequence_log_ratio(old, behavior, one)
    )


@weights
def test_weights_equal_their_equation_and_carry_no_gradient(name: str) -> None:
    function, equation = WEIGHTS[name]
    log_ratio = torch.linspace(-2, 2, 41, dtype=torch.float64).requires_grad_()
    for shaped in (log_ratio, log_ratio[:40].reshape(5, 8)):
        actual = function(shaped)
        assert actual.shape == shaped.shape and actual.dtype == torch.float64
        assert not actual.requires_grad
        expected = [equation(math.exp(w)) for w in shaped.flatten().tolist()]
        assert actual.flatten().tolist() == pytest.approx(expected, rel=1e-14)


@weights
def test_a_sample_of_the_policy_itself_has_weight_1(name: str) -> None:
    old, _ = logps()
    for log_ratio, _ in LOG_RATIOS.values():
        assert WEIGHTS[name][0](log_ratio(old, old)).tolist() == [1.0] * TOKENS


@weights
def test_weights_stay_finite_at_log_ratios_nobody_clamped(name: str) -> None:
    far = torch.tensor([-2000.0, -50.0, 50.0, 2000.0])
    assert WEIGHTS[name][0](far).isfinite().all()
    assert co.masked_importance(far, low=0.0, high=3e38).isfinite().all()


def test_bounds_are_inside_and_may_be_absent() -> None:
    log_ratio = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64).log()
    assert co.importance_mask(log_ratio, low=0.5, high=2.0).tolist() == [1, 1, 1]
    assert co.masked_importance(log_ratio, low=0.0, high=INF).tolist() == pytest.approx([0.5, 1, 2])
    assert co.importance_mask(log_ratio, low=1.0, high=1.0).tolist() == [0, 1, 0]
    assert co.truncated_importance(log_ratio, cap=1.0, floor=1.0).tolist() == [1, 1, 1]
    assert not any(share.any() for share in co.bound_stats(log_ratio, low=0.5, high=2.0).values())


def test_the_untruncated_weight_makes_a_mean_over_samples_one_over_the_policy() -> None:
    p, mu = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    value = torch.tensor([1.0, -2.0, 5.0])
    weight = co.truncated_importance(co.token_log_ratio(p.log(), mu.log()), cap=1e6)
    torch.testing.assert_close((mu * weight * value).sum(), (p * value).sum())
    torch.testing.assert_close(
        (mu * co.decoupled_ratio(p.log(), mu.log()) * value).sum(), (p * value).sum()
    )


def test_decoupled_ratio_leaves_out_tokens_above_its_cap() -> None:
    old, behavior = logps()
    ratio = [math.exp(w) for w in differences(old, behavior)]
    assert co.decoupled_ratio(old, behavior).tolist() == pytest.approx(ratio)
    assert co.decoupled_ratio(old, behavior, cap=1.2).tolist() == pytest.approx(
        [p if p <= 1.2 else 0 for p in ratio]
    )
    assert not co.decoupled_ratio(old, behavior).requires_grad
    assert co.decoupled_ratio(old, behavior, cap=0.3).tolist() == pytest.approx(
        [p if p <= 0.3 else 0 for p in ratio]
    )
    assert co.decoupled_ratio(old - 2000, behavior).max() < 1e-8


def naive_off_policy(logp: Tensor, behavior: Tensor, threshold: float) -> list[float]:
    drift = of_completions(differences(logp, behavior), lambda y: -math.fsum(y) / len(y))
    advantage = ADVANTAGE.tolist()
    return [
        float(advantage[i] >= 0 or d <= threshold)
        for i, d in zip(SEQUENCE.tolist(), drift, strict=True)
    ]


@pytest.mark.parametrize("threshold", [-0.5, 0.0, 0.1, 0.4, INF])
def test_off_policy_mask_drops_bad_completions_that_drifted_away(threshold: float) -> None:
    masks = []
    for seed in range(8):
        logp, behavior = logps(seed)
        mask = co.off_policy_mask(logp, behavior, ADVANTAGE, SEQUENCE, threshold=threshold)
        assert mask.tolist() == naive_off_policy(logp, behavior, threshold)
        assert mask.dtype == torch.float64 and not mask.requires_grad
        masks.append(mask)
    dropped = 1 - torch.stack(masks)
    assert dropped.any() == (threshold < INF)
    assert not dropped[:, ADVANTAGE[SEQUENCE] >= 0].any()


def test_off_policy_mask_looks_at_the_direction_of_the_drift_and_includes_its_threshold() -> None:
    behavior = torch.zeros(TOKENS, dtype=torch.float64)
    bad = -torch.ones(6, dtype=torch.float64)
    one = [1.0] * TOKENS
    assert (
        co.off_policy_mask(behavior - 0.25, behavior, bad, SEQUENCE, threshold=0.25).tolist() == one
    )
    assert co.off_policy_mask(behavior - 0.26, behavior, bad, SEQUENCE, threshold=0.25).sum() == 0
    assert (
        co.off_policy_mask(behavior + 9.0, behavior, bad, SEQUENCE, threshold=0.25).tolist() == one
    )
    assert (
        co.off_policy_mask(behavior - 0.26, behavior, 0 * bad, SEQUENCE, threshold=0.25).tolist()
        == one
    )
    unknown = torch.where(SEQUENCE == 3, NAN, behavior)
    known = co.off_policy_mask(behavior - 2000.0, unknown, bad, SEQUENCE, threshold=0.25)
    assert torch.equal(known == 1, SEQUENCE == 3)


def test_one_impossible_token_vetoes_its_completion() -> None:
    old, behavior = logps()
    assert co.veto_mask(old, behavior, SEQUENCE, threshold=1e-4).tolist() == [1.0] * TOKENS
    for token in range(TOKENS):
        spoiled = old.detach().clone()
        spoiled[token] = -2000.0
        mask = co.veto_mask(spoiled, behavior, SEQUENCE, threshold=1e-4)
        assert torch.equal(mask == 0, SEQUENCE[token] == SEQUENCE)
    edge = torch.zeros(TOKENS, dtype=torch.float64)
    edge[0] = math.log(0.25)
    assert co.veto_mask(edge, torch.zeros_like(edge), SEQUENCE, threshold=0.25).all()
    assert (
        co.veto_mask(edge, torch.zeros_like(edge), SEQUENCE, threshold=0.26).tolist()
        == [0.0] * 3 + [1.0] * 10
    )
    assert (
        mask.dtype == torch.float64
        and not co.veto_mask(old, behavior, SEQUENCE, threshold=0.5).requires_grad
    )


def naive_m2po(w: list[float], advantage: list[float], threshold: float) -> list[float]:
    """The algorithm as the paper tells it: take away the largest one by one."""
    rest = [
        t
        for t, (x, a) in enumerate(zip(w, advantage, strict=True))
        if (a > 0 and x > 0) or (a < 0 and x < 0)
    ]
    mask = [1.0] * len(w)
    while rest and math.fsum(w[t] ** 2 for t in rest) / len(rest) > threshold:
        largest = max(rest, key=lambda t: w[t] ** 2)
        rest.remove(largest)
        mask[largest] = 0.0
    return mask


@pytest.mark.parametrize("threshold", [1e-9, 0.04, 0.3, 1e9])
def test_m2po_mask_takes_away_outliers_one_by_one(threshold: float) -> None:
    masked = 0.0
    for seed in range(8):
        logp, behavior = logps(seed)
        advantage = ADVANTAGE[SEQUENCE] + torch.randn(
            TOKENS, generator=torch.Generator().manual_seed(seed)
        )
        mask = co.m2po_mask(logp, behavior, advantage, threshold=threshold)
        assert mask.tolist() == naive_m2po(
            differences(logp, behavior), advantage.tolist(), threshold
        )
        assert mask.dtype == torch.float64 and not mask.requires_grad
        masked += (1 - mask).sum().item()
    assert (masked > 0) == (threshold < 1e9)


def test_m2po_mask_has_the_paper_s_threshold_and_keeps_what_just_meets_it() -> None:
    w = torch.tensor([0.125, 0.25, 0.375, 0.5], dtype=torch.float64)
    zero, up = torch.zeros_like(w), torch.ones_like(w)
    # means of squares: 1/64, 5/128, 14/192, 30/256
    assert co.m2po_mask(w, zero, up).tolist() == [1, 1, 0, 0]
    assert co.m2po_mask(w, zero, up, threshold=14 / 192).tolist() == [1, 1, 1, 0]
    assert co.m2po_mask(w, zero, -up, threshold=1e-9).tolist() == [1, 1, 1, 1]
    assert co.m2po_mask(-w, zero, -up).tolist() == [1, 1, 0, 0]
    unmoved = torch.zeros(100, dtype=torch.float64)
    assert (
        co.m2po_mask(
            *(torch.cat(x) for x in ((w, unmoved), (zero, unmoved), (up, unmoved + 1)))
        ).sum()
        == 102
    )
    assert co.m2po_mask(w, zero, zero, threshold=1e-9).tolist() == [1, 1, 1, 1]
    assert co.m2po_mask(w[:0], zero[:0], up[:0]).tolist() == []
    far = torch.tensor([2000.0, -2000.0, 0.1])
    assert co.m2po_mask(far, torch.zeros(3), far).tolist() == [0, 0, 1]
    assert co.m2po_mask(far, torch.tensor([NAN, 0.0, 0.0]), far).tolist() == [1, 0, 1]


def test_m2po_mask_does_not_depend_on_the_order_of_tokens_even_among_equals() -> None:
    # the first tokens of a group's completions are often the same: they must share their fate
    w = torch.tensor([0.1, 0.3, 0.3, 0.3, 0.05, -0.2, 0.3], dtype=torch.float64)
    zero = torch.zeros_like(w)
    mask = co.m2po_mask(w, zero, torch.ones_like(w))
    assert mask.tolist() == [1, 0, 0, 0, 1, 1, 0]
    order = torch.tensor([3, 6, 5, 0, 1, 4, 2])
    assert torch.equal(co.m2po_mask(w[order], zero, torch.ones_like(w)), mask[order])


def test_total_variation_mask_stops_tokens_that_moved_far_where_they_were_sent() -> None:
    grid = [
        (p, mu, a)
        for p in (0.05, 0.3, 0.6, 0.9)
        for mu in (0.1, 0.45, 0.9)
        for a in (-1.0, 0.0, 2.0)
    ]
    p, mu, a = (torch.tensor(x, dtype=torch.float64) for x in zip(*grid, strict=True))
    logp = p.log().requires_grad_()
    mask = co.total_variation_mask(logp, mu.log(), a, low=0.3, high=0.2)
    stopped = [(x > 0 and q - m > 0.2) or (x < 0 and m - q > 0.3) for q, m, x in grid]
    assert mask.tolist() == [float(not s) for s in stopped]
    assert any(stopped) and mask.dtype == torch.float64 and not mask.requires_grad
    # unlike a ratio's clip, it lets rare tokens grow a hundredfold
    rare = torch.tensor([1e-4]).log()
    assert (
        co.total_variation_mask(rare + math.log(100), rare, torch.ones(1), low=0.2, high=0.2) == 1
    )
    assert (
        co.total_variation_mask(
            torch.zeros(1), torch.tensor([NAN]), torch.ones(1), low=0.0, high=0.0
        )
        == 1
    )
    assert (
        co.total_variation_mask(
            torch.zeros(1), torch.full((1,), -2000.0), torch.ones(1), low=0.0, high=0.5
        )
        == 0
    )
    assert (
        co.total_variation_mask(
            torch.zeros(1), torch.full((1,), -2000.0), torch.ones(1), low=0.0, high=1.0
        )
        == 1
    )
    assert (
        co.total_variation_mask(
            torch.full((1,), -2000.0), torch.zeros(1), -torch.ones(1), low=1.0, high=0.0
        )
        == 1
    )


def test_mismatch_equals_its_equations() -> None:
    old, behavior = logps()
    stats = co.sampler_mismatch(old, behavior)
    w = differences(old, behavior)
    expected = {
        "sampling/logp_difference": [abs(x) for x in w],
        "sampling/importance_ratio": [math.exp(x) for x in w],
        "sampling/kl": [-x for x in w],
        "sampling/kl_k3": [math.exp(x) - 1 - x for x in w],
        "sampling/chi_square": [math.exp(x) ** 2 - 1 for x in w],
    }
    assert stats.keys() == expected.keys()
    for name, values in expected.items():
        assert stats[name].tolist() == pytest.approx(values, rel=1e-11, abs=1e-13), name
        assert not stats[name].requires_grad


def test_mismatch_of_two_distributions_averages_to_their_divergences() -> None:
    p, mu = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    mean = {
        name: (mu * x).sum().item() for name, x in co.sampler_mismatch(p.log(), mu.log()).items()
    }
    kl = (mu * (mu / p).log()).sum().item()
    assert mean["sampling/importance_ratio"] == pytest.approx(1)
    assert mean["sampling/kl"] == pytest.approx(kl, rel=1e-6)
    assert mean["sampling/kl_k3"] == pytest.approx(kl, rel=1e-6)
    assert mean["sampling/chi_square"] == pytest.approx(((p - mu) ** 2 / mu).sum().item(), rel=1e-6)


def test_mismatch_is_finite_far_away_exact_close_by_and_loud_about_nan() -> None:
    far = co.sampler_mismatch(torch.tensor([-2000.0, 0.0, 50.0]), torch.tensor([0.0, -2000.0, 0.0]))
    assert all(x.isfinite().all() for x in far.values())
    assert far["sampling/logp_difference"].tolist() == [2000, 2000, 50]
    assert far["sampling/kl"].tolist() == [2000, -2000, -50]
    close = co.sampler_mismatch(torch.tensor([1e-4]), torch.zeros(1))
    assert close["sampling/chi_square"].item() == pytest.approx(2e-4, rel=1e-3)
    assert (close["sampling/kl_k3"] >= 0).all()
    assert all(
        x.isnan().all() for x in co.sampler_mismatch(torch.zeros(1), torch.tensor([NAN])).values()
    )


def test_bound_stats_tell_what_a_mask_took() -> None:
    log_ratio = co.token_log_ratio(*logps())
    stats = co.bound_stats(log_ratio.requires_grad_(), low=0.8, high=1.25)
    ratio = [math.exp(w) for w in log_ratio.tolist()]
    assert stats["sampling/clip_ratio/low"].tolist() == [float(p < 0.8) for p in ratio]
    assert stats["sampling/clip_ratio/high"].tolist() == [float(p > 1.25) for p in ratio]
    region = stats["sampling/clip_ratio/region"]
    assert torch.equal(region, 1 - co.importance_mask(log_ratio, low=0.8, high=1.25))
    assert 0 < stats["sampling/clip_ratio/low"].mean() < region.mean() < 1
    assert not any(x.requires_grad for x in stats.values())


def test_effective_sample_size_counts_equal_weights_and_one_weight_alone() -> None:
    for scale in (1e-300, 1.0, 1e300):
        equal = scale * torch.ones(50, dtype=torch.float64)
        assert co.effective_sample_size(equal).item() == pytest.approx(50)
    assert co.effective_sample_size(torch.tensor([0.0, 0.0, 7.0])) == 1
    assert co.effective_sample_size(torch.tensor([1.0, 2.0, 3.0])).item() == pytest.approx(36 / 14)
    assert co.effective_sample_size(torch.zeros(3)) == co.effective_sample_size(torch.zeros(0)) == 0
    extreme = torch.tensor([math.exp(50.0), math.exp(-50.0)])
    assert co.effective_sample_size(extreme) == 1
    assert not co.effective_sample_size(torch.ones(2, requires_grad=True)).requires_grad


def test_weights_multiply_a_loss_and_nothing_more() -> None:
    logp, behavior = logps()
    token = co.token_log_ratio(logp, behavior)
    weight = co.truncated_importance(token, cap=1.2) * co.importance_mask(
        co.geometric_log_ratio(logp, behavior, SEQUENCE), low=0.8, high=1.25
    )
    (gradient,) = torch.autograd.grad((weight * -logp).sum(), logp)
    assert torch.equal(gradient, -weight)
    assert (weight == 0).any() and (weight > 0).any()


def test_no_tokens_at_all() -> None:
    none, nowhere = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    for weight in (
        co.sequence_log_ratio(none, none, nowhere),
        co.geometric_log_ratio(none, none, nowhere),
        co.off_policy_mask(none, none, torch.ones(2), nowhere, threshold=0.1),
        co.veto_mask(none, none, nowhere, threshold=0.1),
    ):
        assert weight.shape == (0,)


def call(function: Callable[..., Any], *tensors: Tensor, **hyper: Any) -> Callable[[], Any]:
    return lambda: function(*tensors, **hyper)


X, S = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([0, 0, 1])


def shape(name: str, first: str) -> str:
    return f"{name} must have the shape of {first}, [3], got [2]"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (call(co.token_log_ratio, X, X[:2]), f"token_log_ratio: {shape('behavior_logp', 'logp')}"),
        (
            call(co.sequence_log_ratio, X, X[:2], S),
            f"sequence_log_ratio: {shape('behavior_logp', 'logp')}",
        ),
        (
            call(co.sequence_log_ratio, X, X, S[:2]),
            f"sequence_log_ratio: {shape('sequence', 'old_logp')}",
        ),
        (
            call(co.geometric_log_ratio, X, X[:2], S),
            f"geometric_log_ratio: {shape('behavior_logp', 'logp')}",
        ),
        (
            call(co.geometric_log_ratio, X, X, S[:2]),
            f"geometric_log_ratio: {shape('sequence', 'old_logp')}",
        ),
        *(
            (
                call(co.truncated_importance, X, cap=cap),
                f"truncated_importance: cap must be > 0, got {cap}",
            )
            for cap in (0.0, -1.0, NAN)
        ),
        *(
            (
                call(co.truncated_importance, X, cap=2.0, floor=floor),
                f"truncated_importance: floor must be in [0, cap], got {floor} with cap 2.0",
            )
            for floor in (-0.1, 2.1, NAN)
        ),
        *(
            (
                call(function, X, low=low, high=high),
                f"{function.__name__}: bounds must be 0 <= low <= high, got {low} and {high}",
            )
            for function in (co.masked_importance, co.importance_mask, co.bound_stats)
            for low, high in ((2.0, 1.0), (-0.1, 1.0), (0.5, NAN))
        ),
        (
            call(co.decoupled_ratio, X, X[:2]),
            f"decoupled_ratio: {shape('behavior_logp', 'proximal_logp')}",
        ),
        *(
            (
                call(co.decoupled_ratio, X, X, cap=cap),
                f"decoupled_ratio: cap must be > 0, got {cap}",
            )
            for cap in (0.0, NAN)
        ),
        (
            call(co.off_policy_mask, X, X[:2], X, S, threshold=0.1),
            f"off_policy_mask: {shape('behavior_logp', 'logp')}",
        ),
        (
            call(co.off_policy_mask, X, X, X, S[:2], threshold=0.1),
            f"off_policy_mask: {shape('sequence', 'logp')}",
        ),
        (
            call(co.off_policy_mask, X, X, X, S, threshold=NAN),
            "off_policy_mask: threshold must be a number, got nan",
        ),
        (
            call(co.veto_mask, X, X[:2], S, threshold=0.1),
            f"veto_mask: {shape('behavior_logp', 'logp')}",
        ),
        (
            call(co.veto_mask, X, X, S[:2], threshold=0.1),
            f"veto_mask: {shape('sequence', 'old_logp')}",
        ),
        (call(co.veto_mask, X, X, S, threshold=0.0), "veto_mask: threshold must be > 0, got 0.0"),
        (call(co.m2po_mask, X, X[:2], X), f"m2po_mask: {shape('behavior_logp', 'logp')}"),
        (call(co.m2po_mask, X, X, X[:2]), f"m2po_mask: {shape('advantage', 'logp')}"),
        (call(co.m2po_mask, X, X, X, threshold=0.0), "m2po_mask: threshold must be > 0, got 0.0"),
        (
            call(co.total_variation_mask, X, X[:2], X, low=0.2, high=0.2),
            f"total_variation_mask: {shape('behavior_logp', 'logp')}",
        ),
        (
            call(co.total_variation_mask, X, X, X[:2], low=0.2, high=0.2),
            f"total_variation_mask: {shape('advantage', 'logp')}",
        ),
        *(
            (
                call(co.total_variation_mask, X, X, X, low=low, high=high),
                f"total_variation_mask: {name} must be in [0, 1], got {got}",
            )
            for low, high, name, got in (
                (-0.1, 0.2, "low", -0.1),
                (0.2, 1.1, "high", 1.1),
                (NAN, 0.2, "low", NAN),
            )
        ),
        (
            call(co.sampler_mismatch, X, X[:2]),
            f"sampler_mismatch: {shape('behavior_logp', 'old_logp')}",
        ),
        *(
            (
                call(co.effective_sample_size, torch.tensor([1.0, bad])),
                "effective_sample_size: weights must be finite and >= 0",
            )
            for bad in (-0.1, NAN, INF)
        ),
    ],
)
def test_errors_name_the_function_and_what_it_got(
    wrong: Callable[[], Any], message: str, as_users_run_it: None
) -> None:
    with pytest.raises(ValueError) as error:
        wrong()
    assert str(error.value) == message
