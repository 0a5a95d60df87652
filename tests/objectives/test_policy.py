"""Every policy objective against its equation, its errors and the extremes.

The equations of elementwise objectives stand here a second time, in 60-digit arithmetic on plain
numbers, each with its slope in log π written out by hand, because a stop-gradient has no equation.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from burnish.objectives import policy
from mpmath import mp, mpf
from torch import Tensor

Equation = Callable[..., mpf]


@dataclass(frozen=True)
class Case:
    """An elementwise objective, the tensors it takes, its hyper-parameters, its equation and slope
    for one token.
    """

    objective: Callable[..., tuple[Tensor, policy.Stats]]
    inputs: tuple[str, ...]
    hyper: dict[str, Any]
    value: Equation
    slope: Equation  # by the first of the inputs
    stats: dict[str, Equation]

    @property
    def name(self) -> str:
        return self.objective.__name__

    def __call__(self, tensors: list[Tensor]) -> tuple[Tensor, policy.Stats]:
        return self.objective(*tensors, **self.hyper)


ON_POLICY = ("logp", "advantage")
OFF_POLICY = ("logp", "old_logp", "advantage")
LOW, HIGH, CAP = mpf(0.2), mpf(0.3), mpf(2.5)  # as the floats below, not as the decimals
clips = {"clip_low": 0.2, "clip_high": 0.3}


def rho(logp: mpf, old: mpf) -> mpf:
    """The probability ratio, no larger than e^20."""
    return min(mp.exp(mpf(logp) - mpf(old)), mp.exp(20))


def clip(x: mpf, low: mpf, high: mpf) -> mpf:
    return max(low, min(x, high))


def surrogate(
    logp: mpf, old: mpf, a: mpf, low: mpf = LOW, high: mpf = HIGH, cap: mpf = mp.inf
) -> mpf:
    r = rho(logp, old)
    return -min(min(r, cap) * a, clip(r, 1 - low, 1 + high) * a)


def surrogate_slope(
    logp: mpf, old: mpf, a: mpf, low: mpf = LOW, high: mpf = HIGH, cap: mpf = mp.inf
) -> mpf:
    """Policy gradient but for tokens moved too far in the direction that A pushes, and those beyond
    the cap.
    """
    r = mp.exp(mpf(logp) - mpf(old))
    stopped = (a > 0 and r > 1 + high) or (a < 0 and (r < 1 - low or r > min(cap, mp.exp(20))))
    return mpf(0) if stopped else -r * a


def low(logp: mpf, old: mpf, a: mpf) -> mpf:
    return mpf(rho(logp, old) < 1 - LOW and a < 0)


def high(logp: mpf, old: mpf, a: mpf) -> mpf:
    return mpf(rho(logp, old) > 1 + HIGH and a > 0)


def ratio(logp: mpf, old: mpf, _: mpf) -> mpf:
    return rho(logp, old)


clip_stats = {
    "ratio": ratio,
    "clip_ratio/low": low,
    "clip_ratio/high": high,
    "clip_ratio/region": lambda *x: low(*x) + high(*x),
}


def left_low(logp: mpf, old: mpf, a: mpf) -> mpf:
    return mpf(a < 0 and mp.exp(logp) - mp.exp(old) < -mpf(0.1))


def left_high(logp: mpf, old: mpf, a: mpf) -> mpf:
    return mpf(a > 0 and mp.exp(logp) - mp.exp(old) > mpf(0.15))


def dppo_slope(logp: mpf, old: mpf, a: mpf) -> mpf:
    r = mp.exp(mpf(logp) - mpf(old))
    return mpf(0) if left_low(logp, old, a) or left_high(logp, old, a) or r > mp.exp(20) else -r * a


def coins(logp: mpf, old: mpf) -> mpf:
    """KL divergence from the coin of π to that of π_old."""
    p, q = mp.exp(logp), mp.exp(old)
    tails = (1 - q) * mp.log((1 - q) / (1 - p)) if q < 1 and p < 1 else mpf(0) if q == 1 else mp.inf
    return q * (mpf(old) - mpf(logp)) + tails


def far_low(logp: mpf, old: mpf, a: mpf) -> mpf:
    return mpf(a < 0 and logp < old and coins(logp, old) > mpf(0.02))


def far_high(logp: mpf, old: mpf, a: mpf) -> mpf:
    return mpf(a > 0 and logp > old and coins(logp, old) > mpf(0.03))


def dppo_kl_slope(logp: mpf, old: mpf, a: mpf) -> mpf:
    r = mp.exp(mpf(logp) - mpf(old))
    return mpf(0) if far_low(logp, old, a) or far_high(logp, old, a) or r > mp.exp(20) else -r * a


def cispo_weight(logp: mpf, old: mpf) -> mpf:
    return clip(rho(logp, old), 1 - LOW, 1 + HIGH)


def taper(logp: mpf, old: mpf, a: mpf) -> mpf:
    return min(rho(logp, old), mpf(1)) if a < 0 else mpf(1)


def gate(logp: mpf, old: mpf, a: mpf) -> mpf:
    tau = mpf(0.75) if a > 0 else mpf(1.25)
    return 4 / tau / (1 + mp.exp(-tau * (rho(logp, old) - 1)))


def gate_slope(logp: mpf, old: mpf, a: mpf) -> mpf:
    r, tau = mp.exp(mpf(logp) - mpf(old)), mpf(0.75) if a > 0 else mpf(1.25)
    sigma = 1 / (1 + mp.exp(-tau * (r - 1)))
    return mpf(0) if r > mp.exp(20) else 4 * sigma * (1 - sigma) * r


def critic(v: mpf, old: mpf, target: mpf) -> mpf:
    return max((v - target) ** 2, (clip(v, old - LOW, old + LOW) - target) ** 2) / 2


def critic_slope(v: mpf, old: mpf, target: mpf) -> mpf:
    clipped_is_worse = (clip(v, old - LOW, old + LOW) - target) ** 2 > (v - target) ** 2
    return mpf(0) if clipped_is_worse else v - target


KL: dict[str, tuple[Equation, Equation]] = {
    "k1": (lambda d: d, lambda d: mpf(1)),
    "k2": (lambda d: d**2 / 2, lambda d: d),
    "k3": (
        lambda d: mp.exp(-max(d, -20)) + max(d, -20) - 1,
        lambda d: 1 - mp.exp(-d) if d >= -20 else mpf(0),
    ),
}


def kl_cases(kind: str) -> list[Case]:
    k, slope = KL[kind]

    def plain(logp: mpf, ref: mpf) -> mpf:
        return k(mpf(logp) - mpf(ref))

    def corrected(logp: mpf, old: mpf, ref: mpf) -> mpf:
        return rho(logp, old) * plain(logp, ref)

    def corrected_slope(logp: mpf, old: mpf, ref: mpf) -> mpf:
        through_ratio = corrected(logp, old, ref) if mpf(logp) - mpf(old) <= 20 else mpf(0)
        return through_ratio + rho(logp, old) * slope(mpf(logp) - mpf(ref))

    hyper = {"kind": kind}
    return [
        Case(
            policy.kl_estimate,
            ("logp", "ref_logp"),
            hyper,
            plain,
            lambda p, ref: slope(mpf(p) - mpf(ref)),
            {"kl": plain},
        ),
        Case(
            policy.corrected_kl_estimate,
            ("logp", "old_logp", "ref_logp"),
            hyper,
            corrected,
            corrected_slope,
            {"kl": corrected},
        ),
    ]


CASES = [
    Case(policy.reinforce, ON_POLICY, {}, lambda p, a: -a * mpf(p), lambda p, a: -a, {}),
    Case(
        policy.topr,
        OFF_POLICY,
        {},
        lambda p, q, a: -taper(p, q, a) * a * p,
        lambda p, q, a: -taper(p, q, a) * a,
        {"ratio": ratio},
    ),
    Case(policy.clipped_surrogate, OFF_POLICY, clips, surrogate, surrogate_slope, clip_stats),
    Case(
        policy.clipped_surrogate,
        OFF_POLICY,
        {**clips, "ratio_cap": 2.5},
        lambda *x: surrogate(*x, cap=CAP),
        lambda *x: surrogate_slope(*x, cap=CAP),
        clip_stats,
    ),
    Case(
        policy.clipped_surrogate,
        OFF_POLICY,
        {"clip_low": math.inf, "clip_high": math.inf},
        lambda *x: surrogate(*x, low=mp.inf, high=mp.inf),
        lambda p, q, a: -mp.exp(mpf(p) - mpf(q)) * a if mpf(p) - mpf(q) <= 20 else mpf(0),
        {
            "ratio": ratio,
            **{f"clip_ratio/{name}": lambda *_: mpf(0) for name in ("low", "high", "region")},
        },
    ),
    Case(
        policy.dppo,
        OFF_POLICY,
        {"clip_low": 0.1, "clip_high": 0.15},
        lambda *x: mpf(0) if left_low(*x) or left_high(*x) else -rho(*x[:2]) * x[2],
        dppo_slope,
        {
            "ratio": ratio,
            "clip_ratio/low": left_low,
            "clip_ratio/high": left_high,
            "clip_ratio/region": lambda *x: left_low(*x) + left_high(*x),
        },
    ),
    Case(
        policy.dppo_kl,
        OFF_POLICY,
        {"clip_low": 0.02, "clip_high": 0.03},
        lambda *x: mpf(0) if far_low(*x) or far_high(*x) else -rho(*x[:2]) * x[2],
        dppo_kl_slope,
        {
            "ratio": ratio,
            "clip_ratio/low": far_low,
            "clip_ratio/high": far_high,
            "clip_ratio/region": lambda *x: far_low(*x) + far_high(*x),
        },
    ),
    Case(
        policy.cispo,
        OFF_POLICY,
        clips,
        lambda p, q, a: -cispo_weight(p, q) * a * p,
        lambda p, q, a: -cispo_weight(p, q) * a,
        {"ratio": ratio, "cispo_clip_ratio": high},
    ),
    Case(
        policy.cispo,
        OFF_POLICY,
        {"clip_high": 0.3},
        lambda p, q, a: -min(rho(p, q), 1 + HIGH) * a * p,
        lambda p, q, a: -min(rho(p, q), 1 + HIGH) * a,
        {"ratio": ratio, "cispo_clip_ratio": high},
    ),
    Case(
        policy.sapo,
        OFF_POLICY,
        {"tau_pos": 0.75, "tau_neg": 1.25},
        lambda p, q, a: -a * gate(p, q, a),
        lambda p, q, a: -a * gate_slope(p, q, a),
        {"ratio": ratio},
    ),
    Case(
        policy.value_loss,
        ("value", "old_value", "target"),
        {"clip": 0.2},
        critic,
        critic_slope,
        {
            "value": lambda v, *_: v,
            "clip_ratio/value": lambda v, o, t: mpf(critic(v, o, t) > (v - t) ** 2 / 2),
        },
    ),
    Case(
        policy.value_loss,
        ("value", "old_value", "target"),
        {"clip": math.inf},
        lambda v, o, t: (v - t) ** 2 / 2,
        lambda v, o, t: v - t,
        {"value": lambda v, *_: v, "clip_ratio/value": lambda *_: mpf(0)},
    ),
    *(case for kind in KL for case in kl_cases(kind)),
]
every = pytest.mark.parametrize(
    "case",
    CASES,
    ids=["-".join([c.name, *(f"{k}={v}" for k, v in c.hyper.items())]) for c in CASES],
)


@pytest.fixture(autouse=True)
def sixty_digits() -> Any:
    with mp.workdps(60):
        yield


def draw(case: Case, shape: tuple[int, ...] = (64,)) -> list[Tensor]:
    """Log-probabilities a little apart, values and advantages around zero; the first is a leaf."""
    generator = torch.Generator().manual_seed(0)
    common = -3 * torch.rand(shape, generator=generator, dtype=torch.float64)
    noise = torch.randn(len(case.inputs), *shape, generator=generator, dtype=torch.float64)
    tensors = [
        (common + 0.6 * noise[i]).clamp(max=0) if "logp" in name else noise[i].clone()
        for i, name in enumerate(case.inputs)
    ]
    tensors[0].requires_grad_()
    return tensors


def grid(case: Case, dtype: torch.dtype) -> list[Tensor]:
    """All combinations of extremes, one to a token: ratios of e^±50 and e^±2000, advantages from
    huge to nothing.
    """
    logps, others = [-2000.0, -1990.0, -50.0, -1e-3, 0.0], [-100.0, -1.0, 0.0, 1.0, 100.0]
    axes = [logps if "logp" in name else others for name in case.inputs]
    columns = zip(*itertools.product(*axes), strict=True)
    return [torch.tensor(c, dtype=dtype, requires_grad=i == 0) for i, c in enumerate(columns)]


def rows(tensors: list[Tensor]) -> list[tuple[mpf, ...]]:
    return [
        tuple(map(mpf, row)) for row in zip(*(t.flatten().tolist() for t in tensors), strict=True)
    ]


def close(actual: Tensor, expected: list[mpf], rtol: float = 1e-12, atol: float = 1e-290) -> None:
    torch.testing.assert_close(
        actual.detach().flatten(),
        torch.tensor([float(x) for x in expected], dtype=torch.float64),
        rtol=rtol,
        atol=atol,
    )


@every
def test_loss_slope_and_stats_equal_the_equations(case: Case) -> None:
    tensors = draw(case)
    loss, stats = case(tensors)
    (slope,) = torch.autograd.grad(loss.sum(), tensors[0])
    close(loss, [case.value(*row) for row in rows(tensors)], atol=1e-15)
    close(slope, [case.slope(*row) for row in rows(tensors)], rtol=1e-11, atol=1e-15)
    assert list(stats) == list(case.stats)
    for name, equation in case.stats.items():
        close(stats[name], [equation(*row) for row in rows(tensors)], atol=1e-15)
        if "clip" in name and not {math.inf} & set(case.hyper.values()):
            assert 0 < stats[name].mean() < 1, f"the draw must hold both kinds of token, {name}"


@every
def test_the_equations_hold_far_from_the_ordinary(case: Case) -> None:
    tensors = grid(case, torch.float64)
    loss, stats = case(tensors)
    (slope,) = torch.autograd.grad(loss.sum(), tensors[0])
    close(loss, [case.value(*row) for row in rows(tensors)], rtol=1e-11)
    close(slope, [case.slope(*row) for row in rows(tensors)], rtol=1e-11, atol=1e-15)
    for name, equation in case.stats.items():
        close(stats[name], [equation(*row) for row in rows(tensors)], rtol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@every
def test_loss_stats_and_gradient_are_finite_everywhere(case: Case, dtype: torch.dtype) -> None:
    tensors = grid(case, dtype)
    loss, stats = case(tensors)
    (slope,) = torch.autograd.grad(loss.sum(), tensors[0])
    for tensor in (loss, slope, *stats.values()):
        assert tensor.dtype == dtype
        assert tensor.isfinite().all()


@every
def test_stats_are_detached_and_shaped_like_the_loss_at_any_shape(case: Case) -> None:
    for shape in ((5,), (2, 3), (), (0,)):
        loss, stats = case(draw(case, shape))
        assert loss.shape == shape
        assert loss.requires_grad
        assert all(
            s.shape == shape and s.dtype == loss.dtype and not s.requires_grad
            for s in stats.values()
        )
        loss.sum().backward()


@every
def test_tokens_do_not_interact(case: Case) -> None:
    tensors = draw(case, (6,))
    jacobian = torch.autograd.functional.jacobian(
        lambda first: case([first, *tensors[1:]])[0], tensors[0]
    )
    assert torch.equal(jacobian, jacobian.diagonal().diag())
    alone = torch.cat([case([t[i : i + 1] for t in tensors])[0] for i in range(6)])
    torch.testing.assert_close(alone, case(tensors)[0], rtol=1e-15, atol=0)


SMOOTH = [
    c for c in CASES if c.name in ("reinforce", "sapo", "kl_estimate", "corrected_kl_estimate")
]


@pytest.mark.parametrize("case", SMOOTH, ids=lambda c: f"{c.name}-{c.hyper}")
def test_gradcheck(case: Case) -> None:
    tensors = draw(case)
    assert torch.autograd.gradcheck(lambda first: case([first, *tensors[1:]])[0], tensors[0])


@every
def test_no_silent_broadcast(case: Case, as_users_run_it: None) -> None:
    for i, name in enumerate(case.inputs):
        tensors = [torch.full((3,), -1.0) for _ in case.inputs]
        tensors[i] = torch.full((1,), -1.0)
        expected, got = ("[1]", "[3]") if i == 0 else ("[3]", "[1]")
        wrong = case.inputs[1] if i == 0 else name
        with pytest.raises(ValueError) as error:
            case(tensors)
        assert str(error.value) == (
            f"{case.name}: {wrong} must have the shape of {case.inputs[0]}, {expected}, got {got}"
        )


# Three completions of 3, 1 and 4 tokens, and between them one of none.
LENGTHS = [3, 1, 0, 4]
SEQUENCE = torch.tensor([0, 0, 0, 1, 3, 3, 3, 3])


@dataclass(frozen=True)
class CompletionCase:
    """An objective on completions: from log-ratios, log-probabilities and advantage of one to its
    loss and slopes.
    """

    objective: Callable[..., tuple[Tensor, policy.Stats]]
    hyper: dict[str, float]
    completion: Callable[[list[mpf], list[mpf], mpf], tuple[Any, list[mpf], dict[str, Any]]]
    per_token: bool

    @property
    def name(self) -> str:
        return self.objective.__name__


def gspo_completion(w: list[mpf], _: list[mpf], a: mpf) -> tuple[Any, list[mpf], dict[str, Any]]:
    mean = mp.fsum(w) / max(len(w), 1)
    stats = {name: equation(mean, mpf(0), a) for name, equation in clip_stats.items()}
    return surrogate(mean, mpf(0), a), [surrogate_slope(mean, mpf(0), a) / len(w) for _ in w], stats


def gspo_token_completion(
    w: list[mpf], _: list[mpf], a: mpf
) -> tuple[Any, list[mpf], dict[str, Any]]:
    mean = mp.fsum(w) / max(len(w), 1)
    stats = {name: [equation(mean, mpf(0), a) for _ in w] for name, equation in clip_stats.items()}
    return (
        [surrogate(mean, mpf(0), a) for _ in w],
        [surrogate_slope(mean, mpf(0), a) for _ in w],
        stats,
    )


def gmpo_completion(w: list[mpf], _: list[mpf], a: mpf) -> tuple[Any, list[mpf], dict[str, Any]]:
    one = mpf(1) / max(len(w), 1)
    product = mp.fprod(
        (min(mp.exp(x), mp.exp(HIGH)) if a > 0 else max(mp.exp(x), mp.exp(-LOW))) ** one for x in w
    )
    is_low, is_high = [x < -LOW and a < 0 for x in w], [x > HIGH and a > 0 for x in w]
    slopes = [
        mpf(0) if lo or hi or product > mp.exp(20) else -a * product * one
        for lo, hi in zip(is_low, is_high, strict=True)
    ]
    share = {
        "low": one * sum(is_low),
        "high": one * sum(is_high),
        "region": one * (sum(is_low) + sum(is_high)),
    }
    product = min(product, mp.exp(20))
    return (
        -a * product,
        slopes,
        {"ratio": product, **{f"clip_ratio/{name}": x for name, x in share.items()}},
    )


def vespo_completion(
    w: list[mpf], logp: list[mpf], a: mpf
) -> tuple[Any, list[mpf], dict[str, Any]]:
    k, decay = (mpf(2.5), mpf(3.5)) if a >= 0 else (mpf(1.5), mpf(0.5))
    r = mp.exp(mp.fsum(w))
    phi = r**k * mp.exp(decay * (1 - r))
    return (
        [-phi * a * x for x in logp],
        [-phi * a for _ in logp],
        {"vespo/phi_seq": [phi for _ in w]},
    )


vespo_hyper = {"k_pos": 2.5, "lambda_pos": 3.5, "k_neg": 1.5, "lambda_neg": 0.5}
COMPLETION_CASES = [
    CompletionCase(policy.gspo, clips, gspo_completion, per_token=False),
    CompletionCase(policy.gspo_token, clips, gspo_token_completion, per_token=True),
    CompletionCase(policy.gmpo, clips, gmpo_completion, per_token=False),
    CompletionCase(policy.vespo, vespo_hyper, vespo_completion, per_token=True),
]
every_completion = pytest.mark.parametrize("case", COMPLETION_CASES, ids=lambda c: c.name)


def advantages(case: CompletionCase, advantage: Tensor) -> Tensor:
    """As the objective takes them: per completion, or spread over its tokens."""
    return advantage[SEQUENCE] if case.objective is policy.gspo_token else advantage


def by_completion(x: Tensor) -> list[list[mpf]]:
    return [[mpf(value) for value in part.tolist()] for part in x.detach().split(LENGTHS)]


def check_completions(
    case: CompletionCase, logp: Tensor, old_logp: Tensor, advantage: Tensor
) -> dict[str, Tensor]:
    logp = logp.clone().requires_grad_()
    loss, stats = case.objective(
        logp, old_logp, advantages(case, advantage), SEQUENCE, **case.hyper
    )
    (slope,) = torch.autograd.grad(loss.sum(), logp)
    ratios = [
        [new - old for new, old in zip(*x, strict=True)]
        for x in zip(by_completion(logp), by_completion(old_logp), strict=True)
    ]
    expected = [
        case.completion(*x)
        for x in zip(ratios, by_completion(logp), map(mpf, advantage.tolist()), strict=True)
    ]

    def flat(values: list[Any]) -> list[mpf]:
        return [v for value in values for v in value] if case.per_token else values

    close(loss, flat([value for value, _, _ in expected]), rtol=1e-11, atol=1e-15)
    close(slope, [s for _, slopes, _ in expected for s in slopes], rtol=1e-11, atol=1e-15)
    assert all(list(stats) == list(s) for _, _, s in expected)
    for name, stat in stats.items():
        assert stat.shape == loss.shape and not stat.requires_grad
        close(stat, flat([s[name] for _, _, s in expected]), rtol=1e-11, atol=1e-15)
    return stats


@every_completion
def test_completions_equal_the_equations_over_python_lists(case: CompletionCase) -> None:
    seen: dict[str, list[float]] = {}
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        old_logp, change = (
            -3 * torch.rand(8, generator=generator, dtype=torch.float64),
            torch.randn(8, generator=generator),
        )
        advantage = torch.randn(4, generator=generator, dtype=torch.float64)
        advantage[seed % 4] *= seed % 3 > 0  # some are zero
        for name, stat in check_completions(
            case, old_logp + 0.7 * change.double(), old_logp, advantage
        ).items():
            seen.setdefault(name, []).extend(stat.tolist())
    assert all(0 < sum(v) < len(v) for name, v in seen.items() if "clip" in name), (
        "the draws must hold both kinds"
    )


@every_completion
@pytest.mark.parametrize("scale", [50.0, 2000.0])
def test_the_equations_of_completions_hold_far_from_the_ordinary(
    case: CompletionCase, scale: float
) -> None:
    far = scale * torch.tensor([1, 1, -1, 1, 1, 1, 1, 1], dtype=torch.float64)
    base = torch.full((8,), -3.0, dtype=torch.float64)
    for signs in itertools.product((-1.0, 1.0), repeat=2):
        for change in (far, -far):
            check_completions(
                case,
                base + change,
                base,
                torch.tensor([signs[0], signs[1], 0.5, signs[0]]).double(),
            )


@every_completion
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_completions_are_finite_everywhere(case: CompletionCase, dtype: torch.dtype) -> None:
    for new, old, sign in itertools.product(
        (-2000.0, -50.0, 0.0), (-2000.0, -50.0, 0.0), (-100.0, 0.0, 100.0)
    ):
        logp = torch.full((8,), new, dtype=dtype, requires_grad=True)
        advantage = advantages(case, torch.full((4,), sign, dtype=dtype))
        loss, stats = case.objective(
            logp, torch.full((8,), old, dtype=dtype), advantage, SEQUENCE, **case.hyper
        )
        (slope,) = torch.autograd.grad(loss.sum(), logp)
        assert all(t.isfinite().all() and t.dtype == dtype for t in (loss, slope, *stats.values()))


@every_completion
def test_completions_do_not_interact(case: CompletionCase) -> None:
    generator = torch.Generator().manual_seed(3)
    logp, old_logp = -torch.rand(2, 8, generator=generator, dtype=torch.float64)
    advantage = torch.tensor([1.0, -1.0, 1.0, -0.5], dtype=torch.float64)
    given = advantages(case, advantage)
    jacobian = torch.autograd.functional.jacobian(
        lambda x: case.objective(x, old_logp, given, SEQUENCE, **case.hyper)[0], logp
    )
    owner = SEQUENCE if case.per_token else torch.arange(4)
    assert torch.equal(
        (jacobian != 0) & (owner[:, None] != SEQUENCE), torch.zeros_like(jacobian, dtype=torch.bool)
    )

    whole, _ = case.objective(logp, old_logp, given, SEQUENCE, **case.hyper)
    first = given[:3] if case.objective is policy.gspo_token else given[:1]
    alone, _ = case.objective(logp[:3], old_logp[:3], first, SEQUENCE[:3], **case.hyper)
    torch.testing.assert_close(whole[: len(alone)], alone, rtol=1e-15, atol=0)


@pytest.mark.parametrize(
    "case", [c for c in COMPLETION_CASES if not c.per_token], ids=lambda c: c.name
)
def test_gradcheck_of_completions(case: CompletionCase) -> None:
    old_logp = -torch.rand(8, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    logp = (old_logp + torch.linspace(-0.15, 0.14, 8, dtype=torch.float64)).requires_grad_()
    advantage = torch.tensor([1.0, -1.0, 1.0, -0.5], dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda x: case.objective(x, old_logp, advantage, SEQUENCE, clip_low=0.5, clip_high=0.5)[0],
        logp,
    )


@every_completion
def test_no_completions_is_a_differentiable_zero(case: CompletionCase) -> None:
    logp = torch.zeros(0, requires_grad=True)
    none = torch.zeros(0, dtype=torch.int64)
    loss, _ = case.objective(logp, torch.zeros(0), torch.zeros(0), none, **case.hyper)
    assert loss.shape == (0,)
    loss.sum().backward()


@every_completion
def test_no_silent_broadcast_of_completions(case: CompletionCase, as_users_run_it: None) -> None:
    shapes = {
        "logp": 8,
        "old_logp": 8,
        "advantage": 8 if case.objective is policy.gspo_token else 4,
        "sequence": 8,
    }
    for name in (
        "old_logp",
        "sequence",
        *(["advantage"] if case.objective is policy.gspo_token else []),
    ):
        tensors = {k: torch.zeros(n) for k, n in shapes.items()} | {"sequence": SEQUENCE}
        tensors[name] = tensors[name][:1]
        with pytest.raises(ValueError) as error:
            case.objective(**tensors, **case.hyper)
        assert str(error.value) == f"{case.name}: {name} must have the shape of logp, [8], got [1]"


NOT_NEGATIVE = [
    (policy.clipped_surrogate, "clip_low", {}),
    (policy.clipped_surrogate, "clip_high", {}),
    (policy.dppo, "clip_low", {"clip_high": 0.2}),
    (policy.dppo, "clip_high", {"clip_low": 0.2}),
    (policy.dppo_kl, "clip_low", {"clip_high": 0.2}),
    (policy.dppo_kl, "clip_high", {"clip_low": 0.2}),
    (policy.cispo, "clip_low", {"clip_high": 1.0}),
    (policy.cispo, "clip_high", {}),
    (policy.value_loss, "clip", {}),
    (policy.gspo, "clip_low", {"clip_high": 0.2}),
    (policy.gspo_token, "clip_high", {"clip_low": 0.2}),
    (policy.gmpo, "clip_low", {}),
    (policy.gmpo, "clip_high", {}),
]
POSITIVE = [
    (policy.sapo, "tau_pos"),
    (policy.sapo, "tau_neg"),
    *((policy.vespo, name) for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")),
]


def one_token(objective: Callable[..., Any], **hyper: Any) -> Any:
    completions = objective in (policy.gspo, policy.gspo_token, policy.gmpo, policy.vespo)
    return objective(
        *[torch.zeros(1)] * 3,
        *([torch.zeros(1, dtype=torch.int64)] if completions else []),
        **hyper,
    )


@pytest.mark.parametrize(("objective", "name", "others"), NOT_NEGATIVE)
def test_clips_are_not_negative(
    objective: Callable[..., Any], name: str, others: dict[str, float]
) -> None:
    for wrong in (-0.1, math.nan):
        with pytest.raises(ValueError) as error:
            one_token(objective, **{name: wrong}, **others)
        assert str(error.value) == f"{objective.__name__}: {name} must be >= 0, got {wrong}"
    one_token(objective, **{name: 0.0}, **others)


@pytest.mark.parametrize(("objective", "name"), POSITIVE)
def test_temperatures_and_decays_are_positive(objective: Callable[..., Any], name: str) -> None:
    for wrong in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError) as error:
            one_token(objective, **{name: wrong})
        assert str(error.value) == f"{objective.__name__}: {name} must be > 0, got {wrong}"


def test_a_cap_below_the_clip_and_an_unknown_estimator_are_named(as_users_run_it: None) -> None:
    for wrong in (1.49, math.nan):
        with pytest.raises(ValueError) as error:
            one_token(policy.clipped_surrogate, clip_high=0.5, ratio_cap=wrong)
        assert (
            str(error.value)
            == f"clipped_surrogate: ratio_cap must be >= 1 + clip_high = 1.5, got {wrong}"
        )
    one_token(policy.clipped_surrogate, clip_high=0.5, ratio_cap=1.5)
    one = torch.zeros(1)
    with pytest.raises(ValueError, match=r"^kl_estimate: kind must be k1, k2 or k3, got 'k4'$"):
        policy.kl_estimate(one, one, kind="k4")  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"^corrected_kl_estimate: kind must be k1, k2 or k3, got 'k4'$"
    ):
        policy.corrected_kl_estimate(one, one, one, kind="k4")  # type: ignore[arg-type]
