"""The curves of the gallery: for each objective its natural axis, and a few curves along it.

A curve calls the function itself on a grid, every point a unit of its own; the gradient is
autograd's. Arguments that are not named in the table stay at 0 and hyper-parameters at their
defaults. β, where there is one, is 1.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import objectives as o

Curve = Callable[[Tensor], Tensor]

# 479 steps, a prime, meet no kink, at which another machine's rounding would choose the side
POINTS = 480


@dataclass(frozen=True)
class Axis:
    """The variable that gradients are along runs from ``low`` to ``high``.

    The picture has ``shown`` of it.
    """

    label: str
    low: float
    high: float
    shown: Curve = lambda x: x
    points: int = POINTS

    def grid(self) -> Tensor:
        return torch.linspace(self.low, self.high, self.points, dtype=torch.float64)


@dataclass(frozen=True)
class Panel:
    """Named curves on one axis, ``of`` a loss or another result of the function.

    ``bottom`` and ``top`` cut it.
    """

    axis: Axis
    curves: dict[str, Curve]
    bottom: float | None = None
    top: float | None = None
    of: str = "loss"


def trace(panel: Panel, label: str) -> dict[str, list[float]]:
    """A curve's abscissas, values and, of a loss, gradients."""
    x = panel.axis.grid().requires_grad_()
    value = panel.curves[label](x)
    found = {"x": panel.axis.shown(x), "value": value}
    if panel.of == "loss":
        (found["gradient"],) = torch.autograd.grad(value.sum(), x)
    return {name: numbers.detach().tolist() for name, numbers in found.items()}


def curve(function: Callable[..., Any], **arguments: Any) -> Curve:
    """The function along x, its arguments given as functions of x, as numbers, or not at all."""
    parameters = inspect.signature(function).parameters.values()
    tensors = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]

    def along(x: Tensor) -> Tensor:
        result = function(
            **{**arguments, **{p.name: _filled(p, arguments.get(p.name, 0.0), x) for p in tensors}}
        )
        value: Tensor = result[0] if isinstance(result, tuple) else result
        return value

    return along


def _filled(parameter: inspect.Parameter, value: Any, x: Tensor) -> Any:
    """A value at every point of x, and every point a sequence of its own."""
    if callable(value):
        return value(x)
    if parameter.name in ("sequence", "group"):
        return torch.arange(len(x))
    if parameter.name == "sequences":
        return len(x)
    if getattr(parameter.annotation, "dim_str", None) == "":
        return torch.tensor(value, dtype=x.dtype)
    return torch.full_like(x, value, dtype=torch.bool if isinstance(value, bool) else x.dtype)


def _x(x: Tensor) -> Tensor:
    return x


def _margin(function: Callable[..., object], **loss_kwargs: object) -> Curve:
    return curve(function, chosen=_x, beta=1.0, **loss_kwargs)


def _each_side(function: Callable[..., object], other: float = 0.0) -> dict[str, Curve]:
    at = f"{other:g}".replace("-", "−")
    return {
        f"along a, b = {at}": curve(function, chosen=_x, rejected=other, beta=1.0),
        f"along b, a = {at}": curve(function, chosen=other, rejected=_x, beta=1.0),
    }


def _each_label(
    function: Callable[..., object], symbol: str = "", **reference: float
) -> dict[str, Curve]:
    at = "".join(f", {symbol} = {value:g}" for value in reference.values())
    return {
        name + at: curve(function, logp=_x, desirable=name == "desirable", beta=1.0, **reference)
        for name in ("desirable", "undesirable")
    }


def _each_sign(function: Callable[..., object], **arguments: object) -> dict[str, Curve]:
    signs = {"A = +1": 1.0, "A = −1": -1.0}
    return {
        name: curve(function, **{"logp": _x, "advantage": sign, **arguments})
        for name, sign in signs.items()
    }


# Losses of −log π are drawn at log π_old = −1, ρ = 1: a token that has something to lose.
_FROM_1_OVER_E = {"logp": lambda w: w - 1, "old_logp": -1.0}


def _after_another(distance: float) -> Curve:
    """iw_opd of the second of two tokens; at the first one, student and teacher differ by
    ``distance`` nats. The teacher's log p of the second is −1.
    """

    def along(x: Tensor) -> Tensor:
        logp = torch.stack([torch.full_like(x, -1.0), x], 1).flatten()
        teacher = torch.tensor([-1.0 - distance, -1.0], dtype=x.dtype).repeat(len(x))
        sequence = torch.arange(len(x)).repeat_interleave(2)
        return o.iw_opd(logp, teacher, sequence)[0][1::2]

    return along


def _of_two_tokens(logit: Tensor) -> Tensor:
    """Log-probabilities of a vocabulary of two, whose first has this logit and whose second has
    0.
    """
    return torch.stack([F.logsigmoid(logit), F.logsigmoid(-logit)], -1)


def _teacher(logit: Tensor) -> Tensor:
    return torch.tensor([0.2, 0.8], dtype=logit.dtype).log().expand(len(logit), 2)


def _divergence(function: Callable[..., object], **loss_kwargs: object) -> Curve:
    return curve(function, logp=_of_two_tokens, teacher_logp=_teacher, **loss_kwargs)


def _bell(x: Tensor) -> Tensor:
    """A histogram of 50 bins between −2.5 and 2.5, in the shape of a normal distribution around
    x.
    """
    middle = torch.linspace(-2.45, 2.45, 50, dtype=x.dtype)
    return (-2 * (middle - x[:, None]).square()).log_softmax(-1)


def _ranking(place: int) -> Curve:
    """The loss of a ranking of three as the score of one of them moves, the others' being 0."""

    def along(x: Tensor) -> Tensor:
        others = torch.zeros_like(x)
        score = torch.stack([x if i == place else others for i in range(3)], 1)
        group = torch.arange(len(x)).repeat_interleave(3)
        return (
            o.plackett_luce(score.flatten(), group, torch.arange(3).repeat(len(x)))[0]
            .view(-1, 3)
            .sum(1)
        )

    return along


def _of_sixteen(advantage: Callable[[Tensor, Tensor], Tensor], which: str) -> Curve:
    """The advantage of a right (reward 1) or a wrong completion (0) among 16, by how many of them
    are right.
    """

    def along(x: Tensor) -> Tensor:
        rewards = [(torch.arange(16) < right).to(x.dtype) for right in x.tolist()]
        group = torch.zeros(16, dtype=torch.int64)
        return torch.stack(
            [advantage(reward, group)[0 if which == "right" else -1] for reward in rewards]
        )

    return along


def _before_the_end(lam: float) -> Curve:
    """The advantage of a token by how many tokens before the end it stands, the only reward being 1
    at the end.
    """

    def along(x: Tensor) -> Tensor:
        length = int(x.max()) + 2
        reward = torch.zeros(length, dtype=x.dtype)
        reward[-1] = 1.0
        same = torch.zeros(length, dtype=torch.int64)
        return o.gae(reward, torch.zeros_like(reward), same, gamma=1.0, lam=lam)[0].flip(0)[
            x.round().long()
        ]

    return along


def _completion_of_length(alpha: float) -> Curve:
    """LD-DPO's log-likelihood of a completion whose tokens all have log p = −1, beside another one
    of 32 tokens.
    """

    def along(x: Tensor) -> Tensor:
        lengths = x.round().long()
        sequence = torch.arange(len(x)).repeat_interleave(lengths)
        logp = torch.full_like(sequence, -1, dtype=x.dtype)
        return o.length_desensitized_sum(logp, sequence, lengths.clamp(max=32), alpha=alpha)

    return along


def _mismatch(name: str, w: Tensor) -> Tensor:
    return o.sampler_mismatch(w, torch.zeros_like(w))[f"sampling/{name}"]


_MARGIN = Axis("margin h", -5, 5)
_A_OR_B = Axis("log-ratio a or b", -5, 5)
_R = Axis("log-ratio r", -6, 6)
_M = Axis("mean log-prob m of chosen, rejected: −1", -4, -1e-3)
_P = Axis("probability p", -6, 6, torch.sigmoid)
_RATIO = Axis("ratio ρ", -5, math.log(2.7), torch.exp)
_RATIO_AT = Axis("ratio ρ, log π$_{old}$ = −1", -5, math.log(2.7), torch.exp)
_S = Axis("ratio s of the completion", math.log(0.5), math.log(1.6), torch.exp)
_D = Axis("log-ratio d", -3, 3)
_RIGHT = Axis("right completions among 16", 1, 15, points=15)
_W = Axis("log-ratio w", -3, 2)
_PI = Axis("probability π, before: 0.3", -6, 6, torch.sigmoid)
_Q = Axis("student's q, teacher's p = 0.2", -6, 6, torch.sigmoid)

PANELS = {
    # supervised
    "nll": Panel(_P, {"": curve(o.nll, logp=F.logsigmoid)}),
    "label_smoothed_nll": Panel(
        _P,
        {
            f"ε = {ε:g}": curve(
                o.label_smoothed_nll,
                logp=F.logsigmoid,
                mean_logp=lambda z: _of_two_tokens(z).mean(-1),
                label_smoothing=ε,
            )
            for ε in (0.0, 0.3)
        },
    ),
    "dft": Panel(_P, {"": curve(o.dft, logp=F.logsigmoid)}),
    "z_loss": Panel(Axis("log Z", -2, 2), {"": curve(o.z_loss, logsumexp=_x)}),
    "entropy_bonus": Panel(
        _P,
        {
            "": curve(
                o.entropy_bonus,
                entropy=lambda z: torch.special.entr(_of_two_tokens(z).exp()).sum(-1),
            )
        },
    ),
    # sequence
    "length_desensitized_sum": Panel(
        Axis("length |y|, the other completion's: 32", 1, 96, points=96),
        {f"α = {alpha:g}": _completion_of_length(alpha) for alpha in (1.0, 0.5, 0.0)},
        of="sum",
    ),
    "wpo_weight": Panel(
        Axis("mean of log p − log Σ p²", -3, 0.5), {"": curve(o.wpo_weight, logp=_x)}, of="weight"
    ),
    # preference
    "dpo": Panel(_MARGIN, {f"ε = {ε:g}": _margin(o.dpo, label_smoothing=ε) for ε in (0.0, 0.2)}),
    "robust_dpo": Panel(
        _MARGIN, {f"ε = {ε:g}": _margin(o.robust_dpo, label_smoothing=ε) for ε in (0.0, 0.2)}
    ),
    "ipo": Panel(_MARGIN, {"": _margin(o.ipo)}, top=10),
    "hinge": Panel(_MARGIN, {"": _margin(o.hinge)}),
    "exo": Panel(_MARGIN, {f"ε = {ε:g}": _margin(o.exo, label_smoothing=ε) for ε in (0.01, 0.2)}),
    "nca": Panel(_A_OR_B, _each_side(o.nca)),
    "bco_pair": Panel(_A_OR_B, _each_side(o.bco_pair)),
    "sppo_hard": Panel(_A_OR_B, _each_side(o.sppo_hard), top=10),
    "apo_zero": Panel(_A_OR_B, _each_side(o.apo_zero), top=2.2),
    "apo_down": Panel(_A_OR_B, _each_side(o.apo_down, other=-1.0), top=1.9),
    "discopop": Panel(
        _MARGIN, {f"τ = {tau:g}": _margin(o.discopop, tau=tau) for tau in (0.05, 1.0)}
    ),
    "dpo_positive": Panel(
        Axis("log-ratio a, b = 0", -5, 5),
        {f"λ = {λ:g}": curve(o.dpo_positive, chosen=_x, beta=1.0, penalty=λ) for λ in (0.0, 2.0)},
        top=12,
    ),
    "length_regularized_dpo": Panel(
        _MARGIN,
        {
            f"{words}, α = 0.02": _margin(o.length_regularized_dpo, length_chosen=n, alpha=0.02)
            for words, n in (
                ("100 tokens longer", 100.0),
                ("as long", 0.0),
                ("100 shorter", -100.0),
            )
        },
    ),
    "chi_po": Panel(
        Axis("log-ratio a, b = 0", -4, 2),
        {f"β = {β:g}": curve(o.chi_po, chosen=_x, beta=β) for β in (0.3, 1.0)},
    ),
    "tdpo1": Panel(
        _MARGIN,
        {f"$D_l - D_w$ = {d:g}": _margin(o.tdpo1, divergence_rejected=d) for d in (0.0, 2.0)},
    ),
    "tdpo2": Panel(
        _MARGIN,
        {
            f"α = {α:g}, $D_l - D_w$ = 2": _margin(o.tdpo2, divergence_rejected=2.0, alpha=α)
            for α in (0.0, 0.5, 1.0)
        },
    ),
    "aot": Panel(Axis("Δ", -5, 5), {"": _margin(o.aot)}),
    "aot_unpaired": Panel(Axis("Δ", -5, 5), {"": _margin(o.aot_unpaired)}),
    "f_divergence_score": Panel(
        Axis("log-ratio", -3, 3),
        {
            kind: curve(o.f_divergence_score, log_ratio=_x, divergence=kind)
            for kind in ("reverse_kl", "forward_kl", "js", "alpha")
        },
        bottom=-5,
        of="score",
    ),
    # reference_free
    "cpo": Panel(
        Axis("log-ratio z", -5, 5),
        {f"ε = {ε:g}": _margin(o.cpo, label_smoothing=ε) for ε in (0.0, 0.2)},
    ),
    "simpo": Panel(
        Axis("$m_w - m_l$", -5, 5),
        {f"γ = {γ:g}": curve(o.simpo, mean_chosen=_x, beta=1.0, gamma=γ) for γ in (0.0, 2.0)},
    ),
    "alpha_po": Panel(
        _M,
        {
            f"α = {α:g}": curve(
                o.alpha_po, mean_chosen=_x, mean_rejected=-1.0, beta=1.0, gamma=0.0, alpha=α
            )
            for α in (0.0, 0.5, 1.0)
        },
        bottom=-4,
        top=8,
    ),
    "orpo": Panel(_M, {"": curve(o.orpo, mean_chosen=_x, mean_rejected=-1.0)}),
    # feedback
    "kto": Panel(_R, _each_label(o.kto, "z₀", kl=1.0), top=1.5),
    "apo_zero_unpaired": Panel(_R, _each_label(o.apo_zero_unpaired), top=1.5),
    "bco": Panel(_R, _each_label(o.bco, "δ", delta=1.0)),
    "dro": Panel(
        Axis("log-ratio r, R − V = 1", -4, 6),
        {f"β = {β:g}": curve(o.dro, logp=_x, reward=1.0, beta=β) for β in (0.3, 1.0)},
    ),
    # reward
    "bradley_terry": Panel(
        Axis("$r_w - r_l$", -5, 5),
        {f"m = {m:g}": curve(o.bradley_terry, chosen=_x, margin=m) for m in (0.0, 2.0)},
    ),
    "bradley_terry_ties": Panel(
        Axis("$r_w - r_l$, λ = 1", -5, 5),
        {
            "decided": curve(o.bradley_terry_ties, chosen=_x, tied=False, threshold=1.0),
            "tied": curve(o.bradley_terry_ties, chosen=_x, tied=True, threshold=1.0),
        },
    ),
    "ordinal_preference": Panel(
        Axis("$r_w - r_l$", -5, 5),
        {
            f"z = {z:g}": curve(o.ordinal_preference, chosen=_x, preference=z)
            for z in (1.0, 0.7, 0.5)
        },
    ),
    "centering": Panel(Axis("$r_w + r_l$", -2, 2), {"": curve(o.centering, chosen=_x)}),
    "plackett_luce": Panel(
        Axis("score of one of three, the others' 0", -5, 5),
        {
            f"ranked {name}": _ranking(place)
            for place, name in enumerate(("first", "second", "third"))
        },
    ),
    "score_regression": Panel(Axis("r − y", -2, 2), {"": curve(o.score_regression, score=_x)}),
    "hl_gauss": Panel(
        Axis("prediction, y = 0", -2, 2),
        {
            f"σ = {σ:g}": curve(o.hl_gauss, logp=_bell, low=-2.5, high=2.5, sigma=σ)
            for σ in (0.1, 0.5)
        },
    ),
    "step_loss": Panel(
        Axis("logit z", -5, 5),
        {f"y = {y:g}": curve(o.step_loss, logit=_x, label=y) for y in (1.0, 0.7, 0.0)},
    ),
    # policy
    "reinforce": Panel(
        Axis("probability π", -6, 6, torch.sigmoid), _each_sign(o.reinforce, logp=F.logsigmoid)
    ),
    "topr": Panel(_RATIO_AT, _each_sign(o.topr, **_FROM_1_OVER_E)),
    "clipped_surrogate": Panel(
        _RATIO,
        {
            **_each_sign(o.clipped_surrogate),
            "A = −1, δ = 2": curve(o.clipped_surrogate, logp=_x, advantage=-1.0, ratio_cap=2.0),
        },
    ),
    "dppo": Panel(
        _PI,
        _each_sign(o.dppo, logp=F.logsigmoid, old_logp=math.log(0.3), clip_low=0.2, clip_high=0.2),
    ),
    "dppo_kl": Panel(
        _PI,
        _each_sign(
            o.dppo_kl, logp=F.logsigmoid, old_logp=math.log(0.3), clip_low=0.1, clip_high=0.1
        ),
    ),
    "cispo": Panel(_RATIO_AT, _each_sign(o.cispo, clip_high=0.5, **_FROM_1_OVER_E)),
    "sapo": Panel(_RATIO, _each_sign(o.sapo)),
    "gspo": Panel(_S, _each_sign(o.gspo, clip_low=0.2, clip_high=0.2)),
    "gspo_token": Panel(_S, _each_sign(o.gspo_token, clip_low=0.2, clip_high=0.2)),
    "gmpo": Panel(_RATIO, _each_sign(o.gmpo)),
    "vespo": Panel(_RATIO_AT, _each_sign(o.vespo, **_FROM_1_OVER_E)),
    "value_loss": Panel(
        Axis("value V, before: 0", -0.5, 2),
        {f"R = {R:g}": curve(o.value_loss, value=_x, target=R) for R in (1.0, 0.1)},
    ),
    "kl_estimate": Panel(
        _D,
        {kind: curve(o.kl_estimate, logp=_x, kind=kind) for kind in ("k1", "k2", "k3")},
        bottom=-4,
        top=6,
    ),
    "corrected_kl_estimate": Panel(
        Axis("log-ratio d, π$_{old}$ being π$_{ref}$", -4, 2),
        {kind: curve(o.corrected_kl_estimate, logp=_x, kind=kind) for kind in ("k1", "k2", "k3")},
        bottom=-1,
        top=6,
    ),
    # advantage
    "group_advantage": Panel(
        _RIGHT,
        {
            f"{name}, scale={scale}": _of_sixteen(partial(o.group_advantage, scale=scale), name)
            for scale in ("group", "none")
            for name in ("right", "wrong")
        },
        of="advantage",
    ),
    "rloo_advantage": Panel(
        _RIGHT,
        {name: _of_sixteen(o.rloo_advantage, name) for name in ("right", "wrong")},
        of="advantage",
    ),
    "gae": Panel(
        Axis("tokens before the end, γ = 1", 0, 95, points=96),
        {f"λ = {lam:g}": _before_the_end(lam) for lam in (1.0, 0.98, 0.9)},
        of="advantage",
    ),
    "maxrl_advantage": Panel(
        _RIGHT,
        {name: _of_sixteen(o.maxrl_advantage, name) for name in ("right", "wrong")},
        of="advantage",
    ),
    "max_at_k_advantage": Panel(
        _RIGHT,
        {
            f"right, k = {k}": _of_sixteen(partial(o.max_at_k_advantage, k=k), "right")
            for k in (2, 4, 16)
        },
        of="advantage",
    ),
    # covariance
    "kl_cov": Panel(
        Axis("log-ratio w, A = 1", -1.5, 1.5),
        {
            "penalized": curve(o.kl_cov, logp=_x, advantage=1.0, penalized=True),
            "not": curve(o.kl_cov, logp=_x, advantage=1.0, penalized=False),
        },
    ),
    # correction
    "truncated_importance": Panel(
        _W, {"C = 2": curve(o.truncated_importance, log_ratio=_x, cap=2.0)}, of="weight"
    ),
    "masked_importance": Panel(
        _W, {"α = 0.5, β = 5": curve(o.masked_importance, log_ratio=_x)}, of="weight"
    ),
    "importance_mask": Panel(
        _W,
        {"low = 0.5, high = 2": curve(o.importance_mask, log_ratio=_x, low=0.5, high=2.0)},
        top=1.4,
        of="mask",
    ),
    "off_policy_mask": Panel(
        Axis("mean of log μ − log π", -1, 2),
        _each_sign(o.off_policy_mask, logp=lambda x: -x, threshold=0.5),
        top=1.4,
        of="mask",
    ),
    "total_variation_mask": Panel(
        _PI,
        _each_sign(
            o.total_variation_mask,
            logp=F.logsigmoid,
            behavior_logp=math.log(0.3),
            low=0.2,
            high=0.2,
        ),
        top=1.4,
        of="mask",
    ),
    "sampler_mismatch": Panel(
        _W,
        {
            name: partial(_mismatch, name)
            for name in ("logp_difference", "importance_ratio", "kl_k3", "chi_square")
        },
        bottom=-1.5,
        top=6,
        of="statistic",
    ),
    # distillation
    "forward_kl": Panel(_Q, {"": _divergence(o.forward_kl)}),
    "reverse_kl": Panel(_Q, {"": _divergence(o.reverse_kl)}),
    "generalized_jsd": Panel(
        _Q, {f"β = {β:g}": _divergence(o.generalized_jsd, beta=β) for β in (0.1, 0.5, 0.9)}
    ),
    "skew_forward_kl": Panel(
        _Q, {f"α = {α:g}": _divergence(o.skew_forward_kl, alpha=α) for α in (0.1, 0.5)}
    ),
    "skew_reverse_kl": Panel(
        _Q, {f"α = {α:g}": _divergence(o.skew_reverse_kl, alpha=α) for α in (0.1, 0.5)}
    ),
    "alpha_beta_divergence": Panel(
        _Q,
        {
            f"α = {α:g}, β = {β:g}": _divergence(o.alpha_beta_divergence, alpha=α, beta=β)
            for α, β in ((0.2, 0.7), (0.5, 0.5), (1.0, 1.0))
        },
    ),
    "taid": Panel(_Q, {f"t = {t:g}": _divergence(o.taid, t=t) for t in (0.2, 0.5, 1.0)}),
    "uld": Panel(_Q, {"": _divergence(o.uld)}),
    "sampled_reverse_kl": Panel(
        Axis("student's log q, teacher's log p = −1", -3, -1e-3),
        {"": curve(o.sampled_reverse_kl, logp=_x, teacher_logp=-1.0)},
    ),
    "iw_opd": Panel(
        Axis("a second token's log q, its log p = −1", -3, -1e-3),
        {f"$|a_1|$ = {d:g}": _after_another(d) for d in (0.0, 1.0, 8.0)},
    ),
}

# Losses that no curve would show.
UNDRAWN = {
    "minillm": "what a token adds depends on the tokens after it; its single step is `reverse_kl`",
}
