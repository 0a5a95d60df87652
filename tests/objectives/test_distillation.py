"""Divergences between next-token distributions, and objectives on sampled tokens that estimate
them.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from burnish.objectives import distillation as ds
from mpmath import mp, mpf
from torch import Tensor

NEVER = -math.inf
Distribution = list[mpf]


@pytest.fixture(autouse=True)
def sixty_digits() -> Any:
    with mp.workdps(60):
        yield


def kl(p: Distribution, q: Distribution) -> mpf:
    return mp.fsum(x * mp.log(x / y) for x, y in zip(p, q, strict=True) if x)


def mixed(share: float, p: Distribution, q: Distribution) -> Distribution:
    return [mpf(share) * x + (1 - mpf(share)) * y for x, y in zip(p, q, strict=True)]


def jsd(share: float) -> Callable[[Distribution, Distribution], mpf]:
    return lambda s, t: (
        mpf(share) * kl(t, mixed(share, t, s)) + (1 - mpf(share)) * kl(s, mixed(share, t, s))
    )


def alpha_beta(alpha: float, beta: float) -> Callable[[Distribution, Distribution], mpf]:
    a, b = mpf(alpha), mpf(beta)

    def of_token(s: mpf, t: mpf) -> mpf:
        return t**a * s**b - a / (a + b) * t ** (a + b) - b / (a + b) * s ** (a + b)

    return lambda s, t: -mp.fsum(map(of_token, s, t)) / (a * b)


Divergence = Callable[[Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]
BOUNDED: dict[str, tuple[Divergence, Callable[[Distribution, Distribution], mpf]]] = {
    "jsd-0.1": (lambda s, t: ds.generalized_jsd(s, t, beta=0.1), jsd(0.1)),
    "jsd-0.5": (lambda s, t: ds.generalized_jsd(s, t, beta=0.5), jsd(0.5)),
    "skew_forward": (
        lambda s, t: ds.skew_forward_kl(s, t, alpha=0.2),
        lambda s, t: kl(t, mixed(0.2, t, s)),
    ),
    "skew_reverse": (
        lambda s, t: ds.skew_reverse_kl(s, t, alpha=0.2),
        lambda s, t: kl(s, mixed(0.2, s, t)),
    ),
    "alpha_beta": (
        lambda s, t: ds.alpha_beta_divergence(s, t, alpha=0.25, beta=0.75),
        alpha_beta(0.25, 0.75),
    ),
}
DIVERGENCES = BOUNDED | {
    "forward": (ds.forward_kl, lambda s, t: kl(t, s)),
    "reverse": (ds.reverse_kl, lambda s, t: kl(s, t)),
    "jsd-0": (lambda s, t: ds.generalized_jsd(s, t, beta=0.0), lambda s, t: kl(t, s)),
    "jsd-1": (lambda s, t: ds.generalized_jsd(s, t, beta=1.0), lambda s, t: kl(s, t)),
}
every = pytest.mark.parametrize("name", DIVERGENCES)
bounded = pytest.mark.parametrize("name", BOUNDED)


def logits(*shape: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """The student's, as a leaf, and the teacher's."""
    draw = torch.Generator().manual_seed(seed)
    student, teacher = 3 * torch.randn(2, *shape, generator=draw, dtype=torch.float64)
    return student.requires_grad_(), teacher


def distribution(logits: list[float]) -> Distribution:
    worth = [mp.exp(mpf(z)) for z in logits]
    return [w / mp.fsum(worth) for w in worth]


def gradient(loss: Tensor, of: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad(loss.sum(), of, retain_graph=True)
    return slope


@every
def test_divergence_and_gradient_equal_the_equation(name: str) -> None:
    divergence, equation = DIVERGENCES[name]
    student, teacher = logits(4, 5)
    loss, stats = divergence(student.log_softmax(-1), teacher.log_softmax(-1))
    assert stats == {}
    rows = list(zip(student.tolist(), teacher.tolist(), strict=True))
    expected = [float(equation(distribution(s), distribution(t))) for s, t in rows]
    assert loss.tolist() == pytest.approx(expected, rel=1e-12)
    slope = gradient(loss, student).tolist()
    for row, (s, t) in enumerate(rows):
        for v in range(5):

            def moved(z: mpf, s: list[float] = s, t: list[float] = t, v: int = v) -> mpf:
                return equation(distribution([*s[:v], z, *s[v + 1 :]]), distribution(t))

            assert slope[row][v] == pytest.approx(
                float(mp.diff(moved, mpf(s[v]))), rel=1e-10, abs=1e-14
            )


@every
def test_gradcheck_in_both_distributions(name: str) -> None:
    divergence, _ = DIVERGENCES[name]
    tensors = tuple(x.log_softmax(-1).detach().requires_grad_() for x in logits(2, 4))
    assert torch.autograd.gradcheck(lambda s, t: divergence(s, t)[0], tensors)


@every
def test_positions_do_not_interact_and_may_have_any_shape(name: str) -> None:
    divergence, _ = DIVERGENCES[name]
    student, teacher = (x.log_softmax(-1) for x in logits(2, 3, 4))
    loss, _ = divergence(student, teacher)
    assert loss.shape == (2, 3)
    torch.testing.assert_close(
        loss[1, 2], divergence(student[1, 2], teacher[1, 2])[0], rtol=1e-14, atol=0
    )
    jacobian = torch.autograd.functional.jacobian(
        lambda s: divergence(s, teacher[0])[0], student[0]
    )
    assert not jacobian[~torch.eye(3, dtype=torch.bool)].any()
    assert divergence(student[:0], teacher[:0])[0].shape == (0, 3)


@every
def test_a_divergence_is_zero_between_equals_and_else_positive(name: str) -> None:
    divergence, _ = DIVERGENCES[name]
    student, teacher = (x.log_softmax(-1) for x in logits(50, 7))
    assert (divergence(student, teacher)[0] > 0).all()
    student = teacher.clone().requires_grad_()
    loss, _ = divergence(student, teacher)
    assert loss.abs().max() < 1e-15
    through_softmax = gradient(divergence(student.log_softmax(-1), teacher)[0], student)
    assert through_softmax.abs().max() < 1e-15


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@every
def test_padding_adds_nothing(name: str, dtype: torch.dtype) -> None:
    divergence, _ = DIVERGENCES[name]
    student, teacher = (x.detach().to(dtype) for x in logits(3, 5))
    padding = torch.full((3, 2), NEVER, dtype=dtype)
    padded = torch.cat([student, padding], 1).requires_grad_()
    loss, _ = divergence(padded.log_softmax(-1), torch.cat([teacher, padding], 1).log_softmax(-1))
    student.requires_grad_()
    plain, _ = divergence(student.log_softmax(-1), teacher.log_softmax(-1))
    torch.testing.assert_close(loss, plain)
    slope = gradient(loss, padded)
    torch.testing.assert_close(slope[:, :5], gradient(plain, student))
    assert not slope[:, 5:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@every
def test_value_and_gradient_are_finite_at_log_probabilities_of_minus_ten_thousand(
    name: str, dtype: torch.dtype
) -> None:
    divergence, _ = DIVERGENCES[name]
    corners = [[0.0, -2000.0, -1e4], [-2000.0, 0.0, -50.0], [-1e-7, -16.0, -1e4], [-1e4, -1e4, 0.0]]
    student, teacher = zip(*itertools.product(corners, repeat=2), strict=True)
    s, t = (
        torch.tensor(student, dtype=dtype, requires_grad=True),
        torch.tensor(teacher, dtype=dtype),
    )
    loss, _ = divergence(s, t)
    assert loss.dtype == dtype
    assert loss.isfinite().all() and gradient(loss, s).isfinite().all()
    equation = DIVERGENCES[name][1]
    sides = ([[mp.exp(mpf(x)) for x in row] for row in side.tolist()] for side in (s, t))
    exact = [float(equation(*pair)) for pair in zip(*sides, strict=True)]
    tolerance = torch.finfo(dtype).eps
    assert loss.tolist() == pytest.approx(exact, rel=10 * tolerance, abs=10 * tolerance)


@bounded
def test_bounded_divergences_stay_finite_where_the_other_has_no_mass(name: str) -> None:
    divergence, equation = BOUNDED[name]
    student = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0]], dtype=torch.float64).log()
    teacher = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.25, 0.75]], dtype=torch.float64).log()
    leaf = student.clone().requires_grad_()
    loss, _ = divergence(leaf, teacher)
    sides = zip(student.exp().tolist(), teacher.exp().tolist(), strict=True)
    expected = [float(equation([mpf(x) for x in s], [mpf(x) for x in t])) for s, t in sides]
    assert loss.tolist() == pytest.approx(expected, rel=1e-14)
    slope = gradient(loss, leaf)
    assert slope.isfinite().all()
    assert not slope[student == NEVER].any()


def test_kl_is_infinite_only_where_it_is_by_definition() -> None:
    inside = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]], dtype=torch.float64).log()
    whole = torch.tensor([[0.25, 0.25, 0.5], [1e-300, 1.0, 0.0]], dtype=torch.float64).log()
    assert ds.reverse_kl(inside, whole)[0].tolist() == [pytest.approx(math.log(2)), math.inf]
    assert ds.forward_kl(whole, inside)[0].tolist() == [pytest.approx(math.log(2)), math.inf]
    assert ds.forward_kl(inside, whole)[0].tolist() == [math.inf, math.inf]
    underflowing = torch.tensor([[-2000.0, 0.0]], dtype=torch.float64)
    assert (
        ds.reverse_kl(underflowing, torch.tensor([[NEVER, 0.0]], dtype=torch.float64))[0].item()
        == 0
    )


def test_the_ends_of_the_generalized_jsd_are_limits_of_its_rescaled_self() -> None:
    student, teacher = (x.log_softmax(-1).detach() for x in logits(3, 5))
    small = 1e-8
    near_zero = ds.generalized_jsd(student, teacher, beta=small)[0] / small
    near_one = ds.generalized_jsd(student, teacher, beta=1 - small)[0] / small
    torch.testing.assert_close(near_zero, ds.forward_kl(student, teacher)[0], rtol=1e-4, atol=0)
    torch.testing.assert_close(near_one, ds.reverse_kl(student, teacher)[0], rtol=1e-4, atol=0)


def test_jsd_is_bounded_symmetric_at_one_half_and_the_mean_of_two_skew_divergences() -> None:
    student, teacher = (x.log_softmax(-1).detach() for x in logits(3, 5))
    there, back = (
        ds.generalized_jsd(*pair, beta=0.5)[0] for pair in ((student, teacher), (teacher, student))
    )
    torch.testing.assert_close(there, back)
    swapped = ds.generalized_jsd(teacher, student, beta=0.7)[0]
    jensen, _ = ds.generalized_jsd(student, teacher, beta=0.3)
    torch.testing.assert_close(jensen, swapped)
    forward = ds.skew_forward_kl(student, teacher, alpha=0.3)[0]
    reverse = ds.skew_reverse_kl(student, teacher, alpha=0.7)[0]
    torch.testing.assert_close(jensen, 0.3 * forward + 0.7 * reverse)
    apart = torch.tensor([[0.0, -1e4], [-1e4, 0.0]], dtype=torch.float64)
    assert ds.generalized_jsd(*apart, beta=0.5)[0].item() == pytest.approx(math.log(2))
    assert ds.skew_forward_kl(*apart, alpha=0.1)[0].item() == pytest.approx(-math.log(0.1))
    assert ds.skew_reverse_kl(*apart, alpha=0.1)[0].item() == pytest.approx(-math.log(0.1))


@pytest.mark.parametrize(("alpha", "beta"), [(0.2, 0.7), (1.5, 0.5), (1.0, 1.0), (0.1, 3.0)])
def test_the_alpha_beta_divergence_equals_its_equation(alpha: float, beta: float) -> None:
    student, teacher = logits(6, 5)
    s, t = student.log_softmax(-1), teacher.log_softmax(-1)
    loss, _ = ds.alpha_beta_divergence(s, t, alpha=alpha, beta=beta)
    rows = zip(student.tolist(), teacher.tolist(), strict=True)
    expected = [float(alpha_beta(alpha, beta)(distribution(a), distribution(b))) for a, b in rows]
    assert loss.tolist() == pytest.approx(expected, rel=1e-12)
    assert torch.autograd.gradcheck(
        lambda x: ds.alpha_beta_divergence(x, t, alpha=alpha, beta=beta)[0], s
    )


def test_the_alpha_beta_divergence_has_the_kls_for_limits_and_hellinger_in_the_middle() -> None:
    student, teacher = (x.log_softmax(-1).detach() for x in logits(3, 5))
    forward, _ = ds.alpha_beta_divergence(student, teacher, alpha=1.0, beta=1e-7)
    torch.testing.assert_close(forward, ds.forward_kl(student, teacher)[0], rtol=1e-5, atol=0)
    reverse, _ = ds.alpha_beta_divergence(student, teacher, alpha=1e-7, beta=1.0)
    torch.testing.assert_close(reverse, ds.reverse_kl(student, teacher)[0], rtol=1e-5, atol=0)
    middle, _ = ds.alpha_beta_divergence(student, teacher, alpha=0.5, beta=0.5)
    hellinger = ((student / 2).exp() - (teacher / 2).exp()).square().sum(-1) / 2
    torch.testing.assert_close(middle, 4 * hellinger)
    half_square, _ = ds.alpha_beta_divergence(student, teacher, alpha=1.0, beta=1.0)
    torch.testing.assert_close(half_square, (student.exp() - teacher.exp()).square().sum(-1) / 2)


@pytest.mark.parametrize("t", [0.0, 0.3, 1.0])
def test_taid_equals_its_equation_in_value_and_gradient(t: float) -> None:
    student, teacher = logits(4, 5)
    loss, stats = ds.taid(student.log_softmax(-1), teacher.log_softmax(-1), t=t)
    assert stats == {}
    expected, slopes = [], []
    for s, of_teacher in zip(student.tolist(), teacher.tolist(), strict=True):
        between = distribution([(1 - t) * a + t * b for a, b in zip(s, of_teacher, strict=True)])
        q = distribution(s)
        expected.append(float(kl(between, q)))
        slopes.append([float(a - p) for a, p in zip(q, between, strict=True)])
    assert loss.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-15)
    for actual, wanted in zip(gradient(loss, student).tolist(), slopes, strict=True):
        assert actual == pytest.approx(wanted, rel=1e-10, abs=1e-15)


def test_taid_ends_at_forward_kl_and_begins_without_a_gradient() -> None:
    student, teacher = logits(4, 5)
    s, t = student.log_softmax(-1), teacher.log_softmax(-1)
    whole, _ = ds.taid(s, t, t=1.0)
    torch.testing.assert_close(whole, ds.forward_kl(s, t)[0])
    torch.testing.assert_close(gradient(whole, student), gradient(ds.forward_kl(s, t)[0], student))
    assert gradient(ds.taid(s, t, t=0.0)[0], student).abs().max() < 1e-15
    third, _ = ds.taid(s, t, t=0.3)
    assert (third < whole).all()
    alone, _ = ds.taid(s[2:3], t[2:3], t=0.3)
    torch.testing.assert_close(alone, third[2:3])
    assert ds.taid(s[:0], t[:0], t=0.3)[0].shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_taid_is_finite_at_extremes_and_padding_adds_nothing(dtype: torch.dtype) -> None:
    corners = [[0.0, -2000.0, -1e4], [-2000.0, 0.0, -50.0], [-1e4, -1e4, 0.0]]
    student, teacher = zip(*itertools.product(corners, repeat=2), strict=True)
    s, t = (
        torch.tensor(student, dtype=dtype, requires_grad=True),
        torch.tensor(teacher, dtype=dtype),
    )
    for share in (0.0, 0.5, 1.0):
        loss, _ = ds.taid(s, t, t=share)
        assert loss.dtype == dtype
        assert loss.isfinite().all() and gradient(loss, s).isfinite().all()
        padding = torch.full((len(t), 2), NEVER, dtype=dtype)
        padded = torch.cat([s.detach(), padding], 1).requires_grad_()
        wider, _ = ds.taid(padded, torch.cat([t, padding], 1), t=share)
        torch.testing.assert_close(wider, loss)
        torch.testing.assert_close(gradient(wider, padded)[:, :3], gradient(loss, s))
        assert not gradient(wider, padded)[:, 3:].any()


@pytest.mark.parametrize("teachers", [3, 5, 8])
def test_uld_equals_its_equation_in_value_and_gradient(teachers: int) -> None:
    student, _ = logits(4, 5)
    teacher = logits(4, teachers)[1]
    loss, stats = ds.uld(student.log_softmax(-1), teacher.log_softmax(-1))
    assert stats == {}
    expected, slopes = [], []
    for s, t in zip(student.tolist(), teacher.tolist(), strict=True):
        p, q = sorted(distribution(t), reverse=True), distribution(s)
        places = sorted(range(5), key=lambda v: -q[v])
        value, sign = mpf(0), [0] * 5
        for rank in range(max(5, teachers)):
            left = q[places[rank]] if rank < 5 else mpf(0)
            right = p[rank] if rank < teachers else mpf(0)
            value += abs(left - right)
            if rank < 5:
                sign[places[rank]] = 1 if left > right else -1
        expected.append(float(value))
        # ∂S_v/∂z_w = S_v (1[v = w] − S_w)
        mean = mp.fsum(a * b for a, b in zip(sign, q, strict=True))
        slopes.append([float(x * (a - mean)) for x, a in zip(q, sign, strict=True)])
    assert loss.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-15)
    for actual, wanted in zip(gradient(loss, student).tolist(), slopes, strict=True):
        assert actual == pytest.approx(wanted, rel=1e-10, abs=1e-15)


def test_uld_is_blind_to_which_token_is_which_and_bounds_the_distance_from_below() -> None:
    student, teacher = logits(6, 5)
    s, t = student.log_softmax(-1), teacher.log_softmax(-1)
    loss, _ = ds.uld(s, t)
    shuffled, _ = ds.uld(s[:, [3, 1, 0, 4, 2]], t[:, [1, 4, 2, 0, 3]])
    torch.testing.assert_close(shuffled, loss)
    assert ds.uld(s, s[:, [3, 1, 0, 4, 2]])[0].abs().max() < 1e-15
    assert (loss <= (s.exp() - t.exp()).abs().sum(-1) + 1e-15).all() and (loss > 0).all()
    ordered = s.sort(-1).values, t.sort(-1).values  # the same order: the distance itself
    distance = (ordered[0].exp() - ordered[1].exp()).abs().sum(-1)
    torch.testing.assert_close(ds.uld(*ordered)[0], distance)
    one = torch.tensor([[0.0, NEVER, NEVER, NEVER]])
    many = torch.full((1, 1000), 1e-3).log()
    torch.testing.assert_close(ds.uld(one, many)[0], torch.tensor([2 * 0.999]))


def test_positions_do_not_interact_in_uld_and_may_have_any_shape() -> None:
    student, teacher = (x.log_softmax(-1) for x in logits(6, 5))
    flat, _ = ds.uld(student, teacher)
    padded, _ = ds.uld(student.view(2, 3, 5), teacher.view(2, 3, 5))
    torch.testing.assert_close(padded, flat.view(2, 3), rtol=0, atol=0)
    alone = [ds.uld(s, t)[0] for s, t in zip(student, teacher, strict=True)]
    torch.testing.assert_close(torch.stack(alone), flat, rtol=1e-15, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uld_is_finite_at_extremes_and_padding_adds_nothing(dtype: torch.dtype) -> None:
    corners = [[0.0, -2000.0, -1e4], [-2000.0, 0.0, -50.0], [-1e4, -1e4, 0.0]]
    student, teacher = zip(*itertools.product(corners, repeat=2), strict=True)
    s = torch.tensor(student, dtype=dtype, requires_grad=True)
    t = torch.tensor(teacher, dtype=dtype)
    loss, _ = ds.uld(s, t)
    assert loss.dtype == dtype
    assert loss.isfinite().all() and gradient(loss, s).isfinite().all()
    for both in ((s, pad(t, 2)), (pad(s, 2), t), (pad(s, 2), pad(t, 3))):
        wider, _ = ds.uld(*both)
        torch.testing.assert_close(wider, loss)
        torch.testing.assert_close(gradient(wider, s), gradient(loss, s))
    alone, _ = ds.uld(s[2:3], t[2:3])
    torch.testing.assert_close(alone, loss[2:3])
    assert ds.uld(s[:0], t[:0])[0].shape == (0,)


def pad(logp: Tensor, more: int) -> Tensor:
    """A vocabulary with further tokens of probability 0."""
    return torch.nn.functional.pad(logp, (0, more), value=NEVER)


def test_forward_kl_covers_two_modes_and_reverse_kl_seeks_one() -> None:
    teacher = torch.tensor([0.49, 0.02, 0.49], dtype=torch.float64).log()
    wide = torch.tensor([0.33, 0.34, 0.33], dtype=torch.float64).log()
    narrow = torch.tensor([0.97, 0.02, 0.01], dtype=torch.float64).log()
    assert ds.forward_kl(wide, teacher)[0] < ds.forward_kl(narrow, teacher)[0]
    assert ds.reverse_kl(narrow, teacher)[0] < ds.reverse_kl(wide, teacher)[0]


def test_a_tail_makes_a_distribution_and_a_lower_bound_of_every_divergence() -> None:
    student, teacher = (x.log_softmax(-1).detach() for x in logits(6, 9))
    top, ids = teacher.topk(3)
    coarse = ds.with_tail(student.gather(1, ids)), ds.with_tail(top)
    assert [x.shape for x in coarse] == [(6, 4), (6, 4)]
    assert torch.equal(coarse[1][:, :3], top)
    for x, whole in zip(coarse, (student, teacher), strict=True):
        torch.testing.assert_close(x[:, 3].exp(), 1 - whole.gather(1, ids).exp().sum(1))
    for divergence, _ in DIVERGENCES.values():
        assert (divergence(*coarse)[0] < divergence(student, teacher)[0]).all()
    # all k = 9: the tail is rounding, and adds none
    exact = [x.logsumexp(1) for x in (student, teacher)]
    assert max(x.abs().max() for x in exact) < 1e-14
    for divergence, _ in DIVERGENCES.values():
        full = divergence(ds.with_tail(student), ds.with_tail(teacher))[0]
        torch.testing.assert_close(full, divergence(student, teacher)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_tail_that_rounding_took_is_one_epsilon_and_still_pulls(dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps
    tops = [
        [math.log(0.5), math.log(0.5)],
        [math.log(0.5), math.log(0.5) + 8 * eps],
        [-1e4, -0.0],
        [0.5, NEVER],
    ]
    top = torch.tensor(tops, dtype=dtype, requires_grad=True)
    tail = ds.with_tail(top)[:, 2]
    assert tail.tolist() == pytest.approx([math.log(eps)] * 4, rel=1e-3)
    slope = gradient(tail, top)
    assert slope.isfinite().all()
    # with both tokens at ½, d log(1 − p₁ − p₂) = −½ / ε
    assert slope[0].tolist() == pytest.approx([-0.5 / eps] * 2, rel=0.01)
    almost = torch.tensor([math.log1p(-1e-3), -50.0], dtype=dtype)
    assert ds.with_tail(almost)[2].item() == pytest.approx(math.log(1e-3), rel=1e-4)
    assert torch.autograd.gradcheck(
        ds.with_tail, torch.tensor([[-1.0, -2.0]], dtype=torch.float64, requires_grad=True)
    )


def test_sampled_reverse_kl_equals_reverse_kl_on_average_in_value_and_gradient() -> None:
    leaf, teacher_logits = logits(6)
    student, teacher = leaf.log_softmax(-1), teacher_logits.log_softmax(-1)
    exact = ds.reverse_kl(student, teacher)[0]
    loss, stats = ds.sampled_reverse_kl(student, teacher)  # every token once ...
    share = student.detach().exp()  # ... as often as it is sampled
    assert list(stats) == ["reverse_kl"]
    assert not stats["reverse_kl"].requires_grad
    assert (share * stats["reverse_kl"]).sum().item() == pytest.approx(exact.item(), rel=1e-14)
    torch.testing.assert_close(gradient(share * loss, leaf), gradient(exact, leaf))
    torch.testing.assert_close(loss, (student - teacher) * student)
    torch.testing.assert_close(
        torch.autograd.functional.jacobian(lambda q: ds.sampled_reverse_kl(q, teacher)[0], student),
        (student - teacher).diag(),
    )


LENGTHS = [3, 1, 0, 4]
SEQUENCE = torch.tensor([0, 0, 0, 1, 3, 3, 3, 3])


def tokens() -> list[Tensor]:
    """Per token: a divergence, log q and log p; as leaves."""
    draw = torch.Generator().manual_seed(2)
    values = (
        4 * torch.rand(3, 8, generator=draw, dtype=torch.float64) * torch.tensor([[1], [-1], [-1]])
    )
    return [row.clone().requires_grad_() for row in values.unbind()]


def minillm(*tensors: Tensor, alpha: float = 0.2) -> Tensor:
    return ds.minillm(*tensors, SEQUENCE, 4, alpha=alpha)[0]


def test_minillm_equals_its_equation() -> None:
    tensors = tokens()
    loss, stats = ds.minillm(*tensors, SEQUENCE, 4, alpha=0.2)
    expected: list[float] = []
    slopes: list[float] = []
    for divergence, q, p in zip(*(x.detach().split(LENGTHS) for x in tensors), strict=True):
        r = (p - q).tolist()
        for t in range(len(r)):
            later = r[t + 1 :]
            future = math.fsum(later) / len(later) if later else 0.0
            weight = math.exp(q[t]) / (0.2 * math.exp(p[t]) + 0.8 * math.exp(q[t]))
            expected.append(weight * (divergence[t].item() - future * q[t].item()))
            slopes.append(-weight * future)
    assert loss.tolist() == pytest.approx(expected, rel=1e-13)
    weight = stats["importance"]
    by_divergence, by_logp, *by_teacher = torch.autograd.grad(
        loss.sum(), tensors, allow_unused=True
    )
    assert torch.equal(by_divergence, weight)
    assert by_logp.tolist() == pytest.approx(slopes, rel=1e-13)
    assert by_teacher == [None]
    assert list(stats) == ["reverse_kl", "importance"]
    assert torch.equal(stats["reverse_kl"], (tensors[1] - tensors[2]).detach())
    assert all(
        not s.requires_grad and s.shape == loss.shape and s.dtype == loss.dtype
        for s in stats.values()
    )


def test_minillm_is_the_reverse_kl_of_whole_completions() -> None:
    # the first token's logits, and the second one's for each first token
    first, first_teacher = logits(3)
    second, second_teacher = logits(3, 3, seed=1)
    leaves = [first, second]
    q1, q2, p1, p2 = (x.log_softmax(-1) for x in (*leaves, first_teacher, second_teacher))
    whole, _ = ds.reverse_kl((q1[:, None] + q2).flatten(), (p1[:, None] + p2).flatten())

    total = torch.zeros((), dtype=torch.float64)
    for i, j in itertools.product(range(3), repeat=2):
        steps = [(q1, p1, i), (q2[i], p2[i], j)]
        divergence = torch.stack([ds.reverse_kl(q, p)[0] for q, p, _ in steps])
        logp, teacher_logp = (
            torch.stack([pair[side][pair[2]] for pair in steps]) for side in (0, 1)
        )
        loss, _ = ds.minillm(
            divergence, logp, teacher_logp, torch.zeros(2, dtype=torch.int64), 1, alpha=0.0
        )
        total = total + (q1[i] + q2[i, j]).detach().exp() * loss.sum()
    for mine, exact in zip(
        torch.autograd.grad(total, leaves, retain_graph=True),
        torch.autograd.grad(whole, leaves),
        strict=True,
    ):
        torch.testing.assert_close(mine, exact, rtol=1e-12, atol=1e-15)


def test_minillm_s_weight_undoes_the_mixture_and_is_bounded() -> None:
    student, teacher = (x.log_softmax(-1).detach() for x in logits(6))
    one = torch.arange(6)
    nothing = torch.zeros_like(student)
    mixture = 0.3 * teacher.exp() + 0.7 * student.exp()
    weight = ds.minillm(nothing, student, teacher, one, 6, alpha=0.3)[1]["importance"]
    torch.testing.assert_close(mixture * weight, student.exp())
    assert (weight <= 1 / 0.7).all()
    alone = ds.minillm(nothing, student, teacher, one, 6, alpha=0.0)[1]["importance"]
    assert alone.tolist() == [1.0] * 6


def test_completions_do_not_interact_in_minillm() -> None:
    tensors = tokens()
    other = SEQUENCE[:, None] != SEQUENCE
    for jacobian in torch.autograd.functional.jacobian(minillm, tuple(tensors)):
        assert not jacobian[other].any()
    moved = [torch.where(SEQUENCE == 0, 1e3 * x, x) for x in tensors]
    assert torch.equal(minillm(*moved)[3:], minillm(*tensors)[3:])


@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sampled_objectives_are_finite_at_extremes(alpha: float, dtype: torch.dtype) -> None:
    q = torch.tensor(
        [-2000.0, 0.0, -1e4, -50.0, -0.0, -1e4, 0.0, -1e4], dtype=dtype, requires_grad=True
    )
    p = torch.tensor([0.0, -2000.0, 0.0, 0.0, -50.0, -1e4, -1e4, 0.0], dtype=dtype)
    divergence = torch.full_like(p, 1e4).requires_grad_()
    for loss, stats in (
        ds.sampled_reverse_kl(q, p),
        ds.minillm(divergence, q, p, SEQUENCE, 4, alpha=alpha),
    ):
        for tensor in (loss, gradient(loss, q), *stats.values()):
            assert tensor.dtype == dtype
            assert tensor.isfinite().all()


def test_no_tokens_are_a_differentiable_zero() -> None:
    none = torch.zeros(0, requires_grad=True)
    no_ids = torch.zeros(0, dtype=torch.int64)
    for sequences in (0, 2):
        loss, _ = ds.minillm(none, none, none.detach(), no_ids, sequences, alpha=0.2)
        loss.sum().backward()
        assert loss.shape == (0,)
    ds.sampled_reverse_kl(none, none.detach())[0].sum().backward()


THREE, ONE = torch.full((3,), -1.0), torch.full((1,), -1.0)
ID3, ID1 = torch.zeros(3, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: ds.forward_kl(THREE, ONE),
            "forward_kl: teacher_logp must have the shape of logp, [3], got [1]",
        ),
        (
            lambda: ds.alpha_beta_divergence(THREE, ONE, alpha=0.5, beta=0.5),
            "alpha_beta_divergence: teacher_logp must have the shape of logp, [3], got [1]",
        ),
        (
            lambda: ds.alpha_beta_divergence(THREE, THREE, alpha=0.0, beta=0.5),
            "alpha_beta_divergence: alpha must be > 0, got 0.0",
        ),
        (
            lambda: ds.alpha_beta_divergence(THREE, THREE, alpha=0.5, beta=-1.0),
            "alpha_beta_divergence: beta must be > 0, got -1.0",
        ),
        (
            lambda: ds.taid(THREE, ONE, t=0.5),
            "taid: teacher_logp must have the shape of logp, [3], got [1]",
        ),
        (
            lambda: ds.uld(THREE[:, None], ONE[:, None]),
            "uld: teacher_logp must have the shape of logp, [3], got [1]",
        ),
        (lambda: ds.taid(THREE, THREE, t=1.5), "taid: t must be in [0, 1], got 1.5"),
        (
            lambda: ds.reverse_kl(THREE, ONE),
            "reverse_kl: teacher_logp must have the shape of logp, [3], got [1]",
        ),
        (
            lambda: ds.generalized_jsd(THREE, ONE, beta=0.5),
            "generalized_jsd: teacher_logp must have the shape of logp, [3], got [1]",
        ),
        (
            lambda: ds.skew_forward_kl(THREE, ONE, alpha=0.5),
            "skew_forward_kl: teacher_logp must have the shape of logp, [3], got [1]",
        ),
        (
            lambda: ds.skew_reverse_kl(THREE, ONE, alpha=0.5),
            "skew_reverse_kl: teacher_logp must have the shape of logp, [3], got [1]",
        ),
        (
            lambda: ds.sampled_reverse_kl(THREE, ONE),
            "sampled_reverse_kl: teacher_logp must have the shape of logp, [3], got [1]",
        ),
        (
            lambda: ds.minillm(THREE, ONE, THREE, ID3, 1, alpha=0.2),
            "minillm: logp must have the shape of divergence, [3], got [1]",
        ),
        (
            lambda: ds.minillm(THREE, THREE, ONE, ID3, 1, alpha=0.2),
            "minillm: teacher_logp must have the shape of divergence, [3], got [1]",
        ),
        (
            lambda: ds.minillm(THREE, THREE, THREE, ID1, 1, alpha=0.2),
            "minillm: sequence must have the shape of divergence, [3], got [1]",
        ),
        *(
            (
                lambda beta=beta: ds.generalized_jsd(THREE, THREE, beta=beta),
                f"generalized_jsd: beta must be in [0, 1], got {beta}",
            )
            for beta in (-0.1, 1.1, math.nan)
        ),
        *(
            (
                lambda function=function, alpha=alpha: function(THREE, THREE, alpha=alpha),
                f"{function.__name__}: alpha must be in (0, 1), got {alpha}",
            )
            for alpha in (0.0, 1.0, -0.1, math.nan)
            for function in (ds.skew_forward_kl, ds.skew_reverse_kl)
        ),
        *(
            (
                lambda alpha=alpha: ds.minillm(THREE, THREE, THREE, ID3, 1, alpha=alpha),
                f"minillm: alpha must be in [0, 1), got {alpha}",
            )
            for alpha in (1.0, -0.1, math.nan)
        ),
    ],
)
def test_errors_name_the_function_and_what_it_got(
    call: Callable[[], object], message: str, as_users_run_it: None
) -> None:
    with pytest.raises(ValueError) as error:
        call()
    assert str(error.value) == message


def iw_opd(logp: Tensor, teacher_logp: Tensor, gamma: float = 0.5) -> Tensor:
    return ds.iw_opd(logp, teacher_logp, SEQUENCE, gamma=gamma)[0]


def test_iw_opd_equals_its_equation() -> None:
    _, logp, teacher_logp = tokens()
    loss, stats = ds.iw_opd(logp, teacher_logp, SEQUENCE, gamma=0.7)
    expected: list[float] = []
    slopes: list[float] = []
    for q, p in zip(*(x.detach().split(LENGTHS) for x in (logp, teacher_logp)), strict=True):
        a = (q - p).tolist()
        total = math.fsum(map(abs, a))
        for t in range(len(a)):
            weight = 1 + 0.7 * (1 - math.fsum(map(abs, a[:t])) / total)
            expected.append(weight * a[t] * q[t].item())
            slopes.append(weight * a[t])
    assert loss.tolist() == pytest.approx(expected, rel=1e-13)
    (by_logp,) = torch.autograd.grad(loss.sum(), logp)
    assert by_logp.tolist() == pytest.approx(slopes, rel=1e-13)
    assert list(stats) == ["reverse_kl", "importance"]
    assert torch.equal(stats["reverse_kl"], (logp - teacher_logp).detach())
    assert all(not stat.requires_grad and stat.shape == loss.shape for stat in stats.values())


def test_iw_opd_weighs_early_tokens_more_and_without_gamma_is_the_sampled_reverse_kl() -> None:
    _, logp, teacher_logp = tokens()
    plain, _ = ds.sampled_reverse_kl(logp, teacher_logp)
    torch.testing.assert_close(iw_opd(logp, teacher_logp, 0.0), plain)
    weight = ds.iw_opd(logp, teacher_logp, SEQUENCE, gamma=0.5)[1]["importance"]
    for of_completion in weight.split(LENGTHS):
        if len(of_completion):
            assert of_completion[0].item() == pytest.approx(1.5)
        assert (of_completion.diff() < 0).all() and (of_completion > 1).all()
    agreed = ds.iw_opd(logp, logp.detach(), SEQUENCE, gamma=0.5)
    assert not agreed[0].any() and agreed[1]["importance"].tolist() == [1.5] * 8


def test_completions_do_not_interact_in_iw_opd() -> None:
    _, logp, teacher_logp = tokens()
    moved = torch.where(SEQUENCE == 0, 1e3 * teacher_logp, teacher_logp)
    assert torch.equal(iw_opd(logp, moved)[3:], iw_opd(logp, teacher_logp)[3:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_iw_opd_is_finite_at_extremes(dtype: torch.dtype) -> None:
    far = torch.tensor([-1e4, -1e-30, -1e4, -5.0], dtype=dtype, requires_grad=True)
    near = torch.tensor([-1e-30, -1e4, -1e4, -5.0], dtype=dtype)
    sequence = torch.tensor([0, 0, 1, 1])
    loss, stats = ds.iw_opd(far, near, sequence, gamma=0.5)
    (slope,) = torch.autograd.grad(loss.sum(), far)
    assert all(x.isfinite().all() and x.dtype == dtype for x in (loss, slope, *stats.values()))


def test_iw_opd_names_what_does_not_fit(as_users_run_it: None) -> None:
    good = torch.zeros(2)
    sequence = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="iw_opd: teacher_logp must have the shape of logp"):
        ds.iw_opd(good, torch.zeros(3), sequence)
    with pytest.raises(ValueError, match="iw_opd: gamma must be >= 0, got -1"):
        ds.iw_opd(good, good, sequence, gamma=-1.0)
    with pytest.raises(ValueError, match="iw_opd: logp must be flat"):
        ds.iw_opd(torch.zeros(1, 2), torch.zeros(1, 2), sequence[None])
