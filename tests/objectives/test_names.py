"""Who calls it what: the table's rows, and our numbers beside the other frameworks' own functions.

Each comparison is of value and gradient, on the framework's padded batch. They run in an
environment that ``tests/support/tools/install_peers`` makes.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from burnish import objectives as ob
from burnish.benchmarks.docs import names
from burnish.loops.train.mix import losses_of
from peers import part, peer
from torch import Tensor

LENGTHS = torch.tensor([5, 1, 3, 4, 2, 5, 6, 2])
LONGEST = 6
MASK = torch.arange(LONGEST) < LENGTHS[:, None]
ONES = MASK.double()
SEQUENCE = torch.arange(8)[:, None].expand(-1, LONGEST)[MASK]
GROUP = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
INDEX = GROUP.numpy().astype(object)
REWARD = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.25, 0.0, 2.0, 0.5], dtype=torch.float64)


def draw(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*(shape or (8, LONGEST)), generator=generator, dtype=torch.float64)


def flat(padded: Tensor) -> Tensor:
    return padded[MASK]


OLD = -0.2 - draw(0).abs()
LOGP = (OLD + draw(1, scale=0.8)).clamp(max=-1e-3)
REF = OLD + draw(3, scale=0.3)
CLOSE = REF + draw(18, scale=0.5)  # to the reference: all three cut off k3 beyond 10
SAMPLED = OLD + draw(4, scale=0.7)
OF_TOKENS = draw(2)
OF_COMPLETIONS = draw(5, 8)
SPREAD = OF_COMPLETIONS[:, None].expand(-1, LONGEST)  # the same advantage for all tokens
PAIRS = [-30 * torch.rand(8, generator=torch.Generator().manual_seed(i)).double() for i in range(4)]
MEANS = [-0.1 - 2 * draw(6 + i, 8).abs() for i in range(2)]
LOGITS, TEACHER = draw(8, 8, LONGEST, 7, scale=2.0), draw(9, 8, LONGEST, 7, scale=2.0)


class Both(NamedTuple):
    """Our number and theirs, and how they are compared.

    Attributes:
        leaves: what is differentiated by; none compares values alone.
        gradients_alone: the value is another one, so that only gradients are compared.
    """

    ours: Tensor
    theirs: Tensor
    leaves: tuple[Tensor, ...] = ()
    gradients_alone: bool = False
    rtol: float = 1e-9
    atol: float = 1e-12


COMPARISONS: dict[tuple[str, str, str], Callable[[Any], Both]] = {}


def compared(framework: str, objective: str, variant: str = "") -> Callable[[Any], Any]:
    def keep(function: Callable[[Any], Both]) -> Callable[[Any], Both]:
        assert (framework, objective, variant) not in COMPARISONS
        COMPARISONS[framework, objective, variant] = function
        return function

    return keep


def leaf(tensor: Tensor) -> Tensor:
    return tensor.clone().requires_grad_()


def mean_of_completions(of_tokens: Tensor) -> Tensor:
    return ob.sequence_mean(of_tokens, SEQUENCE, 8).mean()


# --- verl


class Config:
    """What verl's losses read of an actor's configuration."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


def verl_loss(core: Any, name: str, logp: Tensor, advantage: Tensor, **settings: Any) -> Tensor:
    of_loss = {
        key: settings.pop(key)
        for key in list(settings)
        if key.startswith(("clip_cov", "kl_cov", "ppo_kl", "dro"))
    }
    clips = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
    settings = {**clips, "clip_ratio_c": 20.0, **settings, "global_batch_info": {}}
    # Some losses want an instance of their class.
    kind = type("Configured", (Config, core.ActorConfig), {"__init__": Config.__init__})
    config = kind(**settings, policy_loss=Config(**of_loss))
    loss = core.get_policy_loss_fn(name)
    return loss(OLD, logp, advantage, ONES, loss_agg_mode="token-mean", config=config)[0]


def verl_policy(
    name: str,
    objective: str,
    ours: Callable[[Tensor], Tensor],
    advantage: Tensor = OF_TOKENS,
    variant: str = "",
    tolerances: dict[str, Any] | None = None,
    **settings: Any,
) -> None:
    @compared("verl", objective, variant)
    def compare(core: Any) -> Both:
        logp = leaf(LOGP)
        theirs = verl_loss(core, name, logp, advantage, **settings)
        return Both(ours(logp), theirs, (logp,), **(tolerances or {}))


CLIP = {"clip_low": 0.2, "clip_high": 0.28}


def token_objective(name: str, advantage: Tensor = OF_TOKENS, **settings: Any) -> Any:
    """The mean over tokens of one of our objectives."""

    def value(logp: Tensor) -> Tensor:
        objective = getattr(ob, name)
        return objective(flat(logp), flat(OLD), flat(advantage), **settings)[0].mean()

    return value


def gspo_of_tokens(logp: Tensor) -> Tensor:
    loss, _ = ob.gspo_token(flat(logp), flat(OLD), flat(OF_TOKENS), SEQUENCE, **CLIP)
    return loss.mean()


def dro_as_in_verl(logp: Tensor) -> Tensor:
    penalty, _ = ob.kl_estimate(flat(logp), flat(OLD), kind="k2")
    return (ob.reinforce(flat(logp), flat(OF_TOKENS))[0] + 0.3 * penalty).mean()


def kl_cov(logp: Tensor) -> Tensor:
    covariance = ob.token_covariance(flat(logp), flat(OF_TOKENS))
    penalized = ob.kl_cov_mask(covariance, share=0.2)
    loss, _ = ob.kl_cov(flat(logp), flat(OLD), flat(OF_TOKENS), penalized, beta=0.7)
    return loss.mean()


def clip_cov(logp: Tensor) -> Tensor:
    """All eligible tokens are dropped, so that nothing is drawn."""
    loss, stats = ob.clipped_surrogate(flat(logp), flat(OLD), flat(OF_TOKENS), **CLIP)
    covariance = ob.token_covariance(flat(logp), flat(OF_TOKENS))
    free = covariance.masked_fill(stats["clip_ratio/region"] > 0, -torch.inf)
    drawn = torch.rand(len(free), dtype=torch.float64)
    mask = ob.clip_cov_mask(free, drawn, share=1.0, low=0.1, high=0.5)
    assert 0 < (mask == 0).sum() < len(mask)
    return (mask * loss).mean()


def gmpo(logp: Tensor) -> Tensor:
    loss, _ = ob.gmpo(flat(logp), flat(OLD), OF_COMPLETIONS, SEQUENCE, clip_low=0.2, clip_high=0.28)
    return loss.mean()


NEAR = {"rtol": 1e-6, "atol": 1e-8}  # they add 1e-8 to a divisor, or compute in float32
verl_policy("vanilla", "clipped_surrogate", token_objective("clipped_surrogate", **CLIP))
verl_policy(
    "vanilla",
    "clipped_surrogate",
    token_objective("clipped_surrogate", ratio_cap=1.5, **CLIP),
    variant="dual clip",
    clip_ratio_c=1.5,
)
SCORE = {"gradients_alone": True}  # its value is that of a policy gradient, −sg(ρ)A log π
verl_policy("dppo_tv", "dppo", token_objective("dppo", **CLIP), tolerances=SCORE)
verl_policy("dppo_kl", "dppo_kl", token_objective("dppo_kl", **CLIP), tolerances=SCORE | NEAR)
verl_policy("gspo", "gspo_token", gspo_of_tokens)
verl_policy("gpg", "reinforce", lambda x: ob.reinforce(flat(x), flat(OF_TOKENS))[0].mean())
verl_policy("dro", "kl_estimate", dro_as_in_verl, variant="dro", dro_beta=0.3)
verl_policy("kl_cov", "kl_cov", kl_cov, kl_cov_ratio=0.2, ppo_kl_coef=0.7)
verl_policy(
    "clip_cov", "clip_cov_mask", clip_cov, clip_cov_ratio=1.0, clip_cov_lb=0.1, clip_cov_ub=0.5
)
verl_policy("geo_mean", "gmpo", gmpo, SPREAD, tolerances=NEAR)
verl_policy("cispo", "cispo", token_objective("cispo", clip_low=0.2, clip_high=0.28))


@compared("verl", "sapo")
def _(core: Any) -> Both:
    logp = leaf(LOGP)
    theirs = verl_loss(core, "sapo", logp, OF_TOKENS, tau_pos=1.0, tau_neg=1.05)
    loss, _ = ob.sapo(flat(logp), flat(OLD), flat(OF_TOKENS))
    return Both(mean_of_completions(loss), theirs, (logp,), **NEAR)


@compared("verl", "value_loss")
def _(core: Any) -> Both:
    value, old, target = leaf(draw(10)), draw(11), draw(12)
    theirs, _ = core.compute_value_loss(value, target, old, ONES, 0.2)
    ours, _ = ob.value_loss(flat(value), flat(old), flat(target), clip=0.2)
    return Both(ours.mean(), theirs, (value,))


def verl_kl(kind: Any) -> None:
    @compared("verl", "kl_estimate", kind)
    def compare(core: Any) -> Both:
        logp = leaf(CLOSE)
        theirs = (core.kl_penalty(logp, REF, kind) * ONES).sum() / ONES.sum()
        return Both(ob.kl_estimate(flat(logp), flat(REF), kind=kind)[0].mean(), theirs, (logp,))


def verl_advantage(
    name: str,
    objective: str,
    ours: Callable[[], Tensor],
    variant: str = "",
    tolerances: dict[str, Any] | None = None,
    **settings: Any,
) -> None:
    @compared("verl", objective, variant)
    def compare(core: Any) -> Both:
        estimator = core.get_adv_estimator_fn(name)
        options = {key: Config(**v) if isinstance(v, dict) else v for key, v in settings.items()}
        options = {"index": INDEX, **options}
        if name in ("remax", "gae", "reinforce_plus_plus"):
            del options["index"]
        # some change the rewards that they are given
        theirs, _ = estimator(rewards(), response_mask=ONES.clone(), **options)
        return Both(ours(), flat(theirs), **(tolerances or NEAR))


def rewards() -> Tensor:
    """On the last token of each row."""
    padded = torch.zeros(8, LONGEST, dtype=torch.float64)
    padded[torch.arange(8), LENGTHS - 1] = REWARD
    return padded


VALUES = draw(13) * ONES
GREEDY = torch.linspace(-1, 1, 8, dtype=torch.float64)
SQUARES = OLD.exp().square() + 0.3 * (1 - OLD.exp()).square()


def gae() -> Tensor:
    return ob.gae(flat(rewards()), flat(VALUES), SEQUENCE, gamma=0.9, lam=0.8)[0]


def optimal_token() -> Tensor:
    return ob.optimal_token_advantage(
        flat(rewards()), flat(OLD), flat(SQUARES.log()), SEQUENCE, GROUP
    )


def plus_plus() -> Tensor:
    kl = torch.zeros_like(flat(OLD))
    return ob.reinforce_plus_plus(REWARD, kl, SEQUENCE, beta=0.0, gamma=0.9, eps=0.0)


for each in ("k1", "k2", "k3"):
    verl_kl(each)
verl_advantage("gae", "gae", lambda: ob.whiten(gae(), eps=0.0), values=VALUES, gamma=0.9, lam=0.8)
verl_advantage(
    "grpo", "group_advantage", lambda: ob.group_advantage(REWARD, GROUP, eps=1e-6)[SEQUENCE]
)
verl_advantage(
    "grpo",
    "group_advantage",
    lambda: ob.group_advantage(REWARD, GROUP, scale="none")[SEQUENCE],
    variant="Dr. GRPO",
    norm_adv_by_std_in_grpo=False,
)
verl_advantage(
    "grpo_passk",
    "max_at_k_advantage",
    lambda: ob.max_at_k_advantage(REWARD, GROUP, k=4)[SEQUENCE],
    config={"norm_adv_by_std_in_grpo": False},
)
verl_advantage("rloo", "rloo_advantage", lambda: ob.rloo_advantage(REWARD, GROUP)[SEQUENCE])
verl_advantage("opo", "opo_advantage", lambda: ob.opo_advantage(REWARD, GROUP, LENGTHS)[SEQUENCE])
verl_advantage("reinforce_plus_plus", "reinforce_plus_plus", plus_plus, config={"gamma": 0.9})
verl_advantage(
    "reinforce_plus_plus_baseline",
    "reinforce_plus_plus_baseline",
    lambda: ob.reinforce_plus_plus_baseline(REWARD, GROUP, SEQUENCE, eps=0.0),
)
verl_advantage(
    "remax",
    "remax_advantage",
    lambda: ob.remax_advantage(REWARD, GREEDY)[SEQUENCE],
    reward_baselines=GREEDY,
)
# verl divides by the completions of a reward other than 0, 5 of 8, and not by those that teach.
verl_advantage("gpg", "gpg_advantage", lambda: 8 / 5 * ob.gpg_advantage(REWARD, GROUP)[SEQUENCE])
for each in ("optimal_token_baseline", "tir_optimal_token_baseline"):
    verl_advantage(
        each,
        "optimal_token_advantage",
        optimal_token,
        variant=each,
        old_log_probs=OLD,
        sum_pi_squared=SQUARES,
    )


# --- SkyRL, whose losses are sums: a mean over tokens is in its advantages


def skyrl_config(**settings: Any) -> Any:
    config = part("skyrl.train.config").AlgorithmConfig(eps_clip_low=0.2, eps_clip_high=0.28)
    for name, value in settings.items():
        group, dot, key = name.partition("__")
        setattr(getattr(config, group) if dot else config, key if dot else group, value)
    return config


def skyrl_policy(
    name: str,
    objective: str,
    ours: Callable[[Tensor], Tensor],
    variant: str = "",
    tolerances: dict[str, Any] | None = None,
    **settings: Any,
) -> None:
    @compared("SkyRL", objective, variant)
    def compare(utils: Any) -> Both:
        logp = leaf(LOGP)
        config = skyrl_config(policy_loss_type=name, loss_reduction="sequence_mean", **settings)
        loss = utils.PolicyLossRegistry.get(name)
        theirs, _ = loss(logp, OLD, OF_TOKENS, config, loss_mask=ONES, rollout_logprobs=SAMPLED)
        return Both(ours(logp), theirs / ONES.sum(), (logp,), **(tolerances or {}))


def against_the_sampler(logp: Tensor) -> Tensor:
    weight = ob.masked_importance(flat(logp.detach() - SAMPLED), low=0.8, high=1.28)
    return (weight * ob.reinforce(flat(logp), flat(OF_TOKENS))[0]).mean()


def dppo_of_the_sampler(name: str) -> Callable[[Tensor], Tensor]:
    def value(logp: Tensor) -> Tensor:
        objective = getattr(ob, name)
        bounds = {"clip_low": 0.1, "clip_high": 0.15}
        return objective(flat(logp), flat(SAMPLED.clamp(max=-1e-3)), flat(OF_TOKENS), **bounds)[
            0
        ].mean()

    return value


INFINITE = {"clip_low": torch.inf, "clip_high": torch.inf}
skyrl_policy(
    "regular",
    "clipped_surrogate",
    token_objective("clipped_surrogate", **CLIP),
    tolerances=NEAR,
)
skyrl_policy(
    "importance_sampling",
    "clipped_surrogate",
    token_objective("clipped_surrogate", **INFINITE),
    variant="importance_sampling",
)
skyrl_policy("sapo", "sapo", token_objective("sapo"), sapo__tau_pos=1.0, sapo__tau_neg=1.05)
skyrl_policy("gspo", "gspo_token", gspo_of_tokens)
skyrl_policy(
    "cispo",
    "cispo",
    token_objective("cispo", clip_low=0.2, clip_high=0.28),
    cispo__cispo_eps_clip_low=0.2,
    cispo__cispo_eps_clip_high=0.28,
    tolerances=NEAR,
)
skyrl_policy("rollout_is", "masked_importance", against_the_sampler, tolerances=NEAR)
skyrl_policy("cross_entropy", "nll", lambda logp: ob.nll(flat(logp))[0].mean())
skyrl_policy("kl_cov", "kl_cov", kl_cov, kl_cov__kl_cov_frac=0.2, kl_cov__ppo_kl_coef=0.7)
skyrl_policy(
    "clip_cov",
    "clip_cov_mask",
    clip_cov,
    clip_cov__clip_ratio=1.0,
    clip_cov__clip_cov_lb=0.1,
    clip_cov__clip_cov_ub=0.5,
)


@compared("SkyRL", "value_loss")
def _(utils: Any) -> Both:
    value, old, target = leaf(draw(10)), draw(11), draw(12)
    theirs, _ = utils.ppo_critic_loss(value, old, target, skyrl_config(), loss_mask=ONES)
    ours, _ = ob.value_loss(flat(value), flat(old), flat(target), clip=0.2)
    return Both(mean_of_completions(ours), theirs, (value,))


def skyrl_dppo(kind: str, objective: str) -> None:
    @compared("SkyRL", objective)
    def compare(utils: Any) -> Both:
        logp = leaf(LOGP)
        of_loss = {"dppo__dppo_type": kind, "dppo__delta_low": 0.1, "dppo__delta_high": 0.15}
        config = skyrl_config(policy_loss_type="dppo", **of_loss)
        sampler = SAMPLED.clamp(max=-1e-3)
        loss = utils.PolicyLossRegistry.get("dppo")
        theirs, _ = loss(logp, OLD, OF_TOKENS, config, loss_mask=ONES, rollout_logprobs=sampler)
        ours = dppo_of_the_sampler(objective)(logp)
        return Both(ours, theirs / ONES.sum(), (logp,), **NEAR)


def skyrl_kl(kind: Any) -> None:
    @compared("SkyRL", "kl_estimate", kind)
    def compare(utils: Any) -> Both:
        logp = leaf(CLOSE)
        theirs = utils.compute_approx_kl(logp, REF, ONES, kind).sum() / ONES.sum()
        return Both(ob.kl_estimate(flat(logp), flat(REF), kind=kind)[0].mean(), theirs, (logp,))


def skyrl_advantage(
    name: str, objective: str, ours: Callable[[], Tensor], variant: str = "", **settings: Any
) -> None:
    @compared("SkyRL", objective, variant)
    def compare(utils: Any) -> Both:
        estimator = utils.AdvantageEstimatorRegistry.get(name)
        theirs, _ = estimator(
            token_level_rewards=rewards(), response_mask=ONES.clone(), index=INDEX, **settings
        )
        return Both(ours(), flat(theirs), rtol=1e-5, atol=1e-8)


skyrl_dppo("binary_tv", "dppo")
skyrl_dppo("binary_kl", "dppo_kl")
for each in ("k1", "k2", "k3"):
    skyrl_kl(each)
skyrl_advantage(
    "grpo", "group_advantage", lambda: ob.group_advantage(REWARD, GROUP, eps=1e-6)[SEQUENCE]
)
skyrl_advantage(
    "grpo",
    "group_advantage",
    lambda: ob.group_advantage(REWARD, GROUP, scale="none")[SEQUENCE],
    variant="Dr. GRPO",
    grpo_norm_by_std=False,
)
skyrl_advantage("rloo", "rloo_advantage", lambda: ob.rloo_advantage(REWARD, GROUP)[SEQUENCE])
skyrl_advantage("maxrl", "maxrl_advantage", lambda: ob.maxrl_advantage(REWARD, GROUP)[SEQUENCE])
skyrl_advantage("reinforce++", "reinforce_plus_plus", plus_plus, gamma=0.9)
skyrl_advantage(
    "gae", "gae", lambda: ob.whiten(gae(), eps=0.0), values=VALUES, gamma=0.9, lambd=0.8
)


# --- OpenRLHF


def openrlhf_policy(
    objective: str,
    ours: Callable[[Tensor], Tensor],
    variant: str = "",
    advantage: Tensor = OF_TOKENS,
    tolerances: dict[str, Any] | None = None,
    **settings: Any,
) -> None:
    @compared("OpenRLHF", objective, variant)
    def compare(losses: Any) -> Both:
        logp = leaf(LOGP)
        loss = losses.PolicyLoss(clip_eps_low=0.2, clip_eps_high=0.28, **settings)
        theirs = loss(logp, OLD, advantage, ONES, rollout_log_probs=SAMPLED)[0]
        return Both(ours(logp), theirs, (logp,), **(tolerances or {}))


def corrected(weight: Callable[[], Tensor]) -> Callable[[Tensor], Tensor]:
    def value(logp: Tensor) -> Tensor:
        loss, _ = ob.clipped_surrogate(flat(logp), flat(OLD), flat(OF_TOKENS), **CLIP)
        return (weight() * loss).mean()

    return value


def of_token() -> Tensor:
    return ob.token_log_ratio(flat(OLD), flat(SAMPLED))


def within_the_mean() -> Tensor:
    """Their weight is that of tokens, where the mean of the completion is within its bounds."""
    mean = ob.geometric_log_ratio(flat(OLD), flat(SAMPLED), SEQUENCE)
    return ob.importance_mask(mean, low=0.7, high=1.3) * of_token().exp()


def gspo_mean(logp: Tensor) -> Tensor:
    """Completions' ratios, clipped; theirs is a mean over completions."""
    loss, _ = ob.gspo(flat(logp), flat(OLD), OF_COMPLETIONS, SEQUENCE, **CLIP)
    return loss.mean()


openrlhf_policy("clipped_surrogate", token_objective("clipped_surrogate", **CLIP))
openrlhf_policy(
    "clipped_surrogate",
    token_objective("clipped_surrogate", ratio_cap=1.5, **CLIP),
    variant="dual clip",
    dual_clip=1.5,
)
openrlhf_policy("gspo", gspo_mean, advantage=SPREAD, policy_loss_type="gspo", tolerances=NEAR)
BOUNDS = {"is_correction_threshold": [0.7, 1.3]}
openrlhf_policy(
    "truncated_importance",
    corrected(lambda: ob.truncated_importance(of_token(), cap=1.3, floor=0.7)),
    is_correction_level="token",
    is_correction_mode="clip",
    **BOUNDS,
)
openrlhf_policy(
    "masked_importance",
    corrected(lambda: ob.masked_importance(of_token(), low=0.7, high=1.3)),
    is_correction_level="token",
    **BOUNDS,
)
openrlhf_policy(
    "geometric_log_ratio", corrected(within_the_mean), is_correction_level="seq", **BOUNDS
)


@compared("OpenRLHF", "value_loss")
def _(losses: Any) -> Both:
    value, old, target = leaf(draw(10)), draw(11), draw(12)
    theirs = losses.ValueLoss(clip_eps=0.2)(value, old, target, ONES)
    ours, _ = ob.value_loss(flat(value), flat(old), flat(target), clip=0.2)
    return Both(ours.mean(), theirs, (value,))


@compared("OpenRLHF", "bradley_terry")
def _(losses: Any) -> Both:
    chosen, rejected = leaf(draw(14, 8)), leaf(draw(15, 8))
    ours, _ = ob.bradley_terry(chosen, rejected)
    return Both(ours.mean(), losses.PairWiseLoss()(chosen, rejected), (chosen, rejected))


@compared("OpenRLHF", "bradley_terry", "margin")
def _(losses: Any) -> Both:
    chosen, rejected, margin = leaf(draw(14, 8)), leaf(draw(15, 8)), draw(16, 8).abs()
    ours, _ = ob.bradley_terry(chosen, rejected, margin)
    return Both(ours.mean(), losses.PairWiseLoss()(chosen, rejected, margin), (chosen, rejected))


@compared("OpenRLHF", "bradley_terry", "LogExpLoss")
def _(losses: Any) -> Both:
    chosen, rejected = leaf(draw(14, 8)), leaf(draw(15, 8))
    ours, _ = ob.bradley_terry(chosen, rejected)
    return Both(ours.mean(), losses.LogExpLoss()(chosen, rejected), (chosen, rejected))


def of_pairs(
    framework: str,
    objective: str,
    theirs: Callable[[Any, list[Tensor]], Tensor],
    variant: str = "",
    tolerances: dict[str, Any] | None = None,
    **settings: float,
) -> None:
    @compared(framework, objective, variant)
    def compare(module: Any) -> Both:
        policy = [leaf(tensor) for tensor in PAIRS[:2]]
        tensors = [*policy, *PAIRS[2:]]
        ours, _ = getattr(ob, objective)(*tensors, **settings)
        return Both(ours.mean(), theirs(module, tensors), tuple(policy), **(tolerances or {}))


of_pairs("OpenRLHF", "dpo", lambda m, x: m.DPOLoss(0.3)(*x)[0], beta=0.3)
of_pairs(
    "OpenRLHF",
    "dpo",
    lambda m, x: m.DPOLoss(0.3, label_smoothing=0.1)(*x)[0],
    variant="label smoothing",
    beta=0.3,
    label_smoothing=0.1,
)
of_pairs("OpenRLHF", "ipo", lambda m, x: m.DPOLoss(0.3, ipo=True)(*x)[0], beta=0.3)


def openrlhf_kl(kind: Any) -> None:
    @compared("OpenRLHF", "kl_estimate", kind)
    def compare(_: Any) -> Both:
        logp = leaf(CLOSE)
        estimate = part("openrlhf.models.utils").compute_approx_kl
        theirs = (estimate(logp, REF, kl_estimator=kind) * ONES).sum() / ONES.sum()
        ours = ob.kl_estimate(flat(logp), flat(REF), kind=kind)[0].mean()
        return Both(ours, theirs, (logp,), rtol=1e-5, atol=1e-7)


for each in ("k1", "k2", "k3"):
    openrlhf_kl(each)


@compared("OpenRLHF", "kl_penalized_reward")
def _(_module: Any) -> Both:
    kl = draw(17)
    theirs = part("openrlhf.models.utils").compute_reward(REWARD, 0.1, kl, MASK)
    return Both(ob.kl_penalized_reward(REWARD, flat(kl), SEQUENCE, beta=0.1), flat(theirs))


# --- torchtune

of_pairs("torchtune", "dpo", lambda m, x: m.DPOLoss(0.3)(*x)[0].mean(), beta=0.3)
of_pairs(
    "torchtune",
    "dpo",
    lambda m, x: m.DPOLoss(0.3, label_smoothing=0.1)(*x)[0].mean(),
    variant="label smoothing",
    beta=0.3,
    label_smoothing=0.1,
)
of_pairs("torchtune", "hinge", lambda m, x: m.RSOLoss(gamma=0.3)(*x)[0].mean(), beta=0.3)


@compared("torchtune", "clipped_surrogate")
def _(losses: Any) -> Both:
    logp, value, old, target = leaf(LOGP), leaf(draw(10)), draw(11), draw(12)
    ppo = losses.PPOLoss(epsilon=0.2, value_clip_range=0.3, value_coeff=0.1)
    theirs = ppo(OLD, logp, OF_TOKENS, old, value, target, MASK, MASK)[0]
    surrogate, _ = ob.clipped_surrogate(
        flat(logp), flat(OLD), flat(OF_TOKENS), clip_low=0.2, clip_high=0.2
    )
    squared, _ = ob.value_loss(flat(value), flat(old), flat(target), clip=0.3)
    return Both(surrogate.mean() + 0.1 * squared.mean(), theirs, (logp, value))


@compared("torchtune", "gae")
def _(_module: Any) -> Both:
    estimate = part("torchtune.rlhf").estimate_advantages
    _theirs, returns = estimate(VALUES, rewards(), 0.9, 0.8)
    value = VALUES.flatten()  # without a mask, padding is part of a row
    sequence = torch.arange(8).repeat_interleave(LONGEST)
    _, ours = ob.gae(rewards().flatten(), value, sequence, gamma=0.9, lam=0.8)
    return Both(ours, returns.flatten())


def torchtune_divergence(name: str, objective: str, ours: Callable[[Tensor], Tensor]) -> None:
    @compared("torchtune", objective, "symmetric" if name == "SymmetricKLLoss" else "")
    def compare(_: Any) -> Both:
        logits = leaf(LOGITS)
        labels = torch.where(MASK, 1, -100)
        loss = getattr(part("torchtune.modules.loss.kd_losses"), name)()
        theirs = loss(logits.flatten(0, 1), TEACHER.flatten(0, 1), labels.flatten())
        # theirs of the forward direction lacks the teacher's entropy
        gradients_alone = objective == "forward_kl"
        return Both(ours(logits), theirs, (logits,), gradients_alone, rtol=1e-5, atol=1e-7)


def divergence(objective: str, logits: Tensor, **settings: float) -> Tensor:
    student, teacher = flat(logits).log_softmax(-1), flat(TEACHER).log_softmax(-1)
    return getattr(ob, objective)(student, teacher, **settings)[0]


torchtune_divergence("ForwardKLLoss", "forward_kl", lambda x: divergence("forward_kl", x).mean())
torchtune_divergence("ReverseKLLoss", "reverse_kl", lambda x: divergence("reverse_kl", x).mean())
torchtune_divergence(
    "SymmetricKLLoss",
    "forward_kl",
    lambda x: (divergence("forward_kl", x) + divergence("reverse_kl", x)).mean() / 2,
)


@compared("torchtune", "nll")
def _(_module: Any) -> Both:
    logits = leaf(LOGITS)
    target = torch.randint(0, 7, (8, LONGEST), generator=torch.Generator().manual_seed(0))
    loss = part("torchtune.modules.loss").CEWithChunkedOutputLoss(num_output_chunks=2)
    theirs = loss(list(logits.chunk(2, 1)), target.masked_fill(~MASK, -100))
    logp = flat(logits).log_softmax(-1).gather(1, flat(target)[:, None])[:, 0]
    return Both(ob.nll(logp)[0].mean(), theirs, (logits,), rtol=1e-5, atol=1e-7)


# --- Liger's losses of given log-probs, which its fused heads call chunk by chunk

FULL = torch.zeros(16)  # of so many rows, whose pairs are half


def liger_pairs(objective: str, loss_type: str, tolerances: Any = None, **extra: Any) -> None:
    def theirs(module: Any, tensors: list[Tensor]) -> Tensor:
        function = part("liger_kernel.chunked_loss.dpo_loss").LigerFusedLinearDPOFunction
        chosen, rejected, ref_chosen, ref_rejected = tensors
        return function.preference_loss_fn(
            chosen,
            rejected,
            FULL,
            ref_chosen_logps=ref_chosen,
            ref_rejected_logps=ref_rejected,
            beta=0.3,
            loss_type=loss_type,
            **extra,
        )[0]

    of_pairs("Liger", objective, theirs, tolerances=tolerances, beta=0.3, **extra)


liger_pairs("dpo", "sigmoid")
liger_pairs("hinge", "hinge")
liger_pairs("exo", "exo_pair", {"rtol": 1e-6, "atol": 1e-8}, label_smoothing=0.1)
liger_pairs("nca", "nca_pair")
liger_pairs("robust_dpo", "robust", label_smoothing=0.1)
liger_pairs("bco_pair", "bco_pair")
liger_pairs("sppo_hard", "sppo_hard")
liger_pairs("apo_zero", "apo_zero")
liger_pairs("apo_down", "apo_down")
liger_pairs("discopop", "discopop")


def liger_free(objective: str, module: str, function: str, theirs: Any, ours: Any) -> None:
    @compared("Liger", objective)
    def compare(_: Any) -> Both:
        tensors = [leaf(tensor) for tensor in MEANS]
        loss = getattr(part(f"liger_kernel.chunked_loss.{module}"), function).preference_loss_fn
        return Both(
            ours(getattr(ob, objective), tensors), loss(*tensors, FULL, **theirs)[0], tuple(tensors)
        )


liger_free(
    "cpo",
    "cpo_loss",
    "LigerFusedLinearCPOFunction",
    {"beta": 0.3, "label_smoothing": 0.1},
    lambda f, x: f(*x, beta=0.3, label_smoothing=0.1)[0].mean(),
)
liger_free(
    "simpo",
    "simpo_loss",
    "LigerFusedLinearSimPOFunction",
    {"beta": 2.0, "gamma": 0.5},
    lambda f, x: f(*x, beta=2.0, gamma=0.5)[0].mean(),
)
liger_free(
    "orpo",
    "orpo_loss",
    "LigerFusedLinearORPOFunction",
    {"beta": 0.1},
    lambda f, x: 0.1 * f(*x)[0].mean(),
)


def liger_kto(objective: str, kl: float | None) -> None:
    @compared("Liger", objective)
    def compare(_: Any) -> Both:
        logp, ref, desirable = leaf(PAIRS[0]), PAIRS[2], torch.arange(8) % 3 > 0
        function = part("liger_kernel.chunked_loss.kto_loss").LigerFusedLinearKTOFunction
        z0 = None if kl is None else torch.tensor(kl, dtype=torch.float64)
        theirs = function.preference_loss_fn(
            logp, desirable, FULL[:8], ref_log_prob_chunk=ref, beta=0.1, kl=z0
        )[0]
        arguments = (logp, ref, desirable) if z0 is None else (logp, ref, desirable, z0)
        return Both(getattr(ob, objective)(*arguments, beta=0.1)[0].mean(), theirs, (logp,))


liger_kto("kto", 2.0)
liger_kto("apo_zero_unpaired", None)


def liger_jsd(beta: float) -> None:
    @compared("Liger", "generalized_jsd", f"beta {beta}")
    def compare(_: Any) -> Both:
        logits = leaf(LOGITS)
        function = part("liger_kernel.chunked_loss.jsd_loss").LigerFusedLinearJSDFunction
        theirs = function.distillation_loss_fn(flat(logits), flat(TEACHER), beta=beta)
        return Both(divergence("generalized_jsd", logits, beta=beta).sum(), theirs, (logits,))


for number in (0.0, 0.3, 1.0):
    liger_jsd(number)


def liger_policy(
    objective: str,
    loss_type: str,
    ours: Callable[[Tensor], Tensor],
    variant: str = "",
    tolerances: dict[str, Any] | None = None,
    **settings: Any,
) -> None:
    @compared("Liger", objective, variant)
    def compare(_: Any) -> Both:
        logp = leaf(LOGP)
        function = part("liger_kernel.chunked_loss.grpo_loss").LigerFusedLinearGRPOFunction
        options = {"epsilon_low": 0.2, "epsilon_high": 0.28, "beta": 0.0, **settings}
        theirs, _ = function.ppo_loss_fn(
            logp,
            ONES,
            OF_COMPLETIONS,
            ONES,
            ref_per_token_logps=REF,
            old_per_token_logps=OLD,
            loss_type=loss_type,
            **options,
        )
        return Both(ours(logp), theirs, (logp,), **(tolerances or {}))


def surrogate_by_completions(logp: Tensor) -> Tensor:
    loss, _ = ob.clipped_surrogate(flat(logp), flat(OLD), flat(SPREAD), **CLIP)
    return mean_of_completions(loss)


def sapo_by_completions(logp: Tensor) -> Tensor:
    return mean_of_completions(ob.sapo(flat(logp), flat(OLD), flat(SPREAD))[0])


def vespo(logp: Tensor) -> Tensor:
    return ob.vespo(flat(logp), flat(OLD), OF_COMPLETIONS, SEQUENCE)[0].mean()


def with_kl(logp: Tensor, *, corrected: bool) -> Tensor:
    loss, _ = ob.clipped_surrogate(flat(logp), flat(OLD), flat(SPREAD), **CLIP)
    if corrected:
        kl, _ = ob.corrected_kl_estimate(flat(logp), flat(OLD), flat(REF), kind="k3")
    else:
        kl, _ = ob.kl_estimate(flat(logp), flat(REF), kind="k3")
    return (loss + 0.04 * kl).mean()


liger_policy("clipped_surrogate", "grpo", surrogate_by_completions, "grpo")
liger_policy(
    "clipped_surrogate", "dapo", token_objective("clipped_surrogate", SPREAD, **CLIP), "dapo"
)
liger_policy(
    "clipped_surrogate",
    "bnpo",
    token_objective("clipped_surrogate", SPREAD, ratio_cap=1.5, **CLIP),
    "two-sided",
    delta=1.5,
)
liger_policy("cispo", "cispo", token_objective("cispo", SPREAD, clip_high=0.28), epsilon_high=1.28)
liger_policy("sapo", "sapo", sapo_by_completions)
liger_policy("vespo", "vespo", vespo)
liger_policy("gspo", "grpo", gspo_mean, importance_sampling_level="sequence")
liger_policy("kl_estimate", "dapo", lambda x: with_kl(x, corrected=False), beta=0.04)
liger_policy(
    "corrected_kl_estimate",
    "dapo",
    lambda x: with_kl(x, corrected=True),
    beta=0.04,
    use_bias_correction_kl=True,
)


# --- prime-rl, of one completion or of packed ones; its losses are sums over tokens


def prime(loss: str, logp: Tensor, advantage: Tensor = OF_TOKENS, **settings: float) -> Any:
    losses = peer("prime-rl")
    inputs = losses.LossInputs(
        trainer_logprobs=flat(logp),
        inference_logprobs=flat(SAMPLED),
        ref_logprobs=flat(REF),
        advantages=flat(advantage),
        loss_mask=flat(MASK),
    )
    config = (SimpleNamespace(**settings),) if settings else ()
    return getattr(losses, loss)(inputs, *config).loss


PRIME = {"dppo_mask_low": 0.1, "dppo_mask_high": 0.15, "adv_tau": 1.0}


@compared("prime-rl", "dppo")
def _(_module: Any) -> Both:
    logp = leaf(LOGP)
    bounds = {"clip_low": 0.1, "clip_high": 0.15}
    loss, _ = ob.dppo(flat(logp), flat(SAMPLED), flat(OF_TOKENS), **bounds)
    drift, _ = ob.kl_estimate(flat(logp), flat(SAMPLED), kind="k2")
    theirs = prime("default_loss_fn", logp, kl_tau=0.3, **PRIME)
    return Both((loss + 2 * 0.3 * drift).sum(), theirs, (logp,))


@compared("prime-rl", "total_variation_mask")
def _(_module: Any) -> Both:
    logp = leaf(LOGP)
    tokens = flat(logp), flat(SAMPLED), flat(OF_TOKENS)
    mask = ob.total_variation_mask(*tokens, low=0.1, high=0.15)
    loss, _ = ob.clipped_surrogate(*tokens, **INFINITE)
    assert 0 < (mask == 0).sum() < len(mask)
    theirs = prime("default_loss_fn", logp, kl_tau=0.0, **PRIME)
    return Both((mask * loss).sum(), theirs, (logp,))


@compared("prime-rl", "nll")
def _(_module: Any) -> Both:
    logp = leaf(LOGP)
    return Both(ob.nll(flat(logp))[0].sum(), prime("ce_loss_fn", logp), (logp,))


@compared("prime-rl", "sampled_reverse_kl")
def _(_module: Any) -> Both:
    """On policy: where the sampler is another, theirs weighs by the ratio to it."""
    logp = leaf(SAMPLED)
    ours, _ = ob.sampled_reverse_kl(flat(logp), flat(REF))
    return Both(ours.sum(), prime("ref_kl_loss_fn", logp), (logp,), gradients_alone=True)


def prime_advantage(file: str, algorithm: str, objective: str, ours: Callable[[], Tensor]) -> None:
    @compared("prime-rl", objective)
    def compare(_: Any) -> Both:
        module = part(f"prime_rl.orchestrator.algo.{file}")
        module.iter_trainable_traces = lambda episodes: [(None, each) for each in episodes]
        module.assign_advantages = lambda trace, value: setattr(trace, "advantage", value)
        self = SimpleNamespace(length_penalty=None)
        traces = [SimpleNamespace(reward=reward) for reward in REWARD.tolist()]
        for group in (traces[:4], traces[4:]):
            asyncio.run(getattr(module, algorithm).score_group(self, group))
        theirs = torch.tensor([trace.advantage for trace in traces], dtype=torch.float64)
        return Both(ours(), theirs, rtol=1e-6, atol=1e-7)


prime_advantage(
    "grpo",
    "GRPOAlgorithm",
    "group_advantage",
    lambda: ob.group_advantage(REWARD, GROUP, scale="none"),
)
prime_advantage(
    "max_rl", "MaxRLAlgorithm", "maxrl_advantage", lambda: ob.maxrl_advantage(REWARD, GROUP)
)


# --- AReaL


def areal_policy(
    objective: str,
    ours: Callable[[Tensor], Tensor],
    variant: str = "",
    correction: dict[str, Any] | None = None,
    **settings: Any,
) -> None:
    @compared("AReaL", objective, variant)
    def compare(losses: Any) -> Both:
        logp = leaf(LOGP)
        bounds = {"metric": "ratio", "agg": "mean", "lower": 0.7, "upper": 1.3}
        config = SimpleNamespace(**bounds, **correction) if correction else None
        theirs, _ = losses.ppo_actor_loss_fn(
            logp,
            OLD,
            SAMPLED,
            OF_TOKENS,
            eps_clip=0.2,
            loss_mask=MASK,
            eps_clip_higher=0.28,
            rejection_sampling=config,
            **settings,
        )
        return Both(ours(logp), theirs, (logp,), **(NEAR if correction else {}))


def gspo_by_tokens(logp: Tensor) -> Tensor:
    """A completion counts by its tokens, and its advantage is their mean."""
    advantage = ob.sequence_mean(flat(OF_TOKENS), SEQUENCE, 8)
    loss, _ = ob.gspo(flat(logp), flat(OLD), advantage, SEQUENCE, **CLIP)
    return loss[SEQUENCE].mean()


def of_completion() -> Tensor:
    return ob.geometric_log_ratio(flat(OLD), flat(SAMPLED), SEQUENCE)


areal_policy("clipped_surrogate", token_objective("clipped_surrogate", **CLIP))
areal_policy(
    "clipped_surrogate",
    token_objective("clipped_surrogate", ratio_cap=1.5, **CLIP),
    variant="dual clip",
    c_clip=1.5,
)
areal_policy("gspo", gspo_by_tokens, importance_sampling_level="sequence")
areal_policy(
    "truncated_importance",
    corrected(lambda: ob.truncated_importance(of_token(), cap=1.3, floor=0.7)),
    correction={"level": "token", "action": "clamp"},
)
areal_policy(
    "masked_importance",
    corrected(lambda: ob.masked_importance(of_token(), low=0.7, high=1.3)),
    correction={"level": "token", "action": "mask"},
)
areal_policy(
    "geometric_log_ratio",
    corrected(lambda: ob.masked_importance(of_completion(), low=0.7, high=1.3)),
    correction={"level": "sequence", "action": "mask"},
)


@compared("AReaL", "decoupled_ratio")
def _(losses: Any) -> Both:
    logp = leaf(LOGP)
    bound = {"level": "token", "action": "mask", "metric": "ratio", "lower": None, "upper": 1.5}
    theirs, _ = losses.ppo_actor_loss_fn(
        logp, OLD, SAMPLED, OF_TOKENS, 0.2, MASK, rejection_sampling=SimpleNamespace(**bound)
    )
    weight = ob.decoupled_ratio(flat(OLD), flat(SAMPLED), cap=1.5)
    clips = {"clip_low": 0.2, "clip_high": 0.2}
    loss, _ = ob.clipped_surrogate(flat(logp), flat(OLD), flat(OF_TOKENS), **clips)
    return Both((weight * loss).mean(), theirs, (logp,), **NEAR)


@compared("AReaL", "sapo")
def _(losses: Any) -> Both:
    logp = leaf(LOGP)
    theirs, _ = losses.sapo_loss_fn(logp, OLD, OF_TOKENS, 1.0, 1.05, MASK)
    return Both(token_objective("sapo")(logp), theirs, (logp,))


@compared("AReaL", "m2po_mask")
def _(_module: Any) -> Both:
    """Theirs is of all tokens: those that moved against their advantage are left out as well."""
    mask_of = part("areal.trainer.ppo.actor")._apply_m2po_masking
    theirs = flat(mask_of(SAMPLED, OLD, MASK, 0.2)).double()
    along = flat(OLD - SAMPLED)  # an advantage by which each token moved its way
    ours = ob.m2po_mask(flat(OLD), flat(SAMPLED), along, threshold=0.2)
    assert 0 < ours.sum() < len(ours)
    return Both(ours, theirs)


@compared("AReaL", "value_loss")
def _(losses: Any) -> Both:
    value, old, target = leaf(draw(10)), draw(11), draw(12)
    single = value.float(), old.float(), target.float()
    theirs, _ = losses.ppo_critic_loss_fn(*single, 0.2, MASK)
    ours, _ = ob.value_loss(flat(value), flat(old), flat(target), clip=0.2)
    return Both(ours.mean(), theirs, (value,), rtol=1e-5, atol=1e-7)


def areal_pairs(objective: str, loss_type: str) -> None:
    def theirs(losses: Any, tensors: list[Tensor]) -> Tensor:
        chosen, rejected, ref_chosen, ref_rejected = tensors
        margin = chosen - ref_chosen - (rejected - ref_rejected)
        return losses.dpo_preference_loss(margin, beta=0.3, loss_type=loss_type).mean()

    of_pairs("AReaL", objective, theirs, tolerances={"rtol": 1e-5, "atol": 1e-6}, beta=0.3)


areal_pairs("dpo", "sigmoid")
areal_pairs("ipo", "ipo")


# --- slime, whose losses are of packed tokens


def rows(padded: Tensor) -> list[Tensor]:
    return list(flat(padded).split(LENGTHS.tolist()))


def slime_policy(
    objective: str, ours: Callable[[Tensor], Tensor], variant: str = "", cap: float | None = None
) -> None:
    @compared("slime", objective, variant)
    def compare(losses: Any) -> Both:
        logp = leaf(LOGP)
        moved = flat(OLD - logp)
        theirs, _ = losses.compute_policy_loss(moved, flat(OF_TOKENS), 0.2, 0.28, cap)
        return Both(ours(logp), theirs.mean(), (logp,))


slime_policy("clipped_surrogate", token_objective("clipped_surrogate", **CLIP))
slime_policy(
    "clipped_surrogate",
    token_objective("clipped_surrogate", ratio_cap=1.5, **CLIP),
    variant="dual clip",
    cap=1.5,
)


@compared("slime", "cispo")
def _(losses: Any) -> Both:
    logp = leaf(LOGP)
    moved = flat(OLD - logp)
    theirs, _ = losses.compute_cispo_loss(moved, flat(logp), flat(OF_TOKENS), 0.2, 0.28)
    return Both(token_objective("cispo", **CLIP)(logp), theirs.mean(), (logp,))


@compared("slime", "gspo")
def _(losses: Any) -> Both:
    logp = leaf(LOGP)
    masks = rows(ONES)
    moved = losses.compute_gspo_kl(rows(logp), rows(OLD), rows(logp), masks)
    theirs, _ = losses.compute_policy_loss(moved, flat(SPREAD), 0.2, 0.28)
    return Both(gspo_mean(logp), mean_of_completions(theirs), (logp,))


@compared("slime", "off_policy_mask")
def _(losses: Any) -> Both:
    args = SimpleNamespace(opsm_delta=0.1)
    theirs, _ = losses.compute_opsm_mask(args, rows(LOGP), rows(OLD), rows(SPREAD), rows(ONES))
    ours = ob.off_policy_mask(flat(LOGP), flat(OLD), OF_COMPLETIONS, SEQUENCE, threshold=0.1)
    assert 0 < ours.sum() < len(ours)
    return Both(ours, theirs)


def slime_kl(kind: Any) -> None:
    @compared("slime", "kl_estimate", kind)
    def compare(losses: Any) -> Both:
        logp = leaf(LOGP)
        theirs = losses.compute_approx_kl(flat(logp), flat(REF), kind).mean()
        ours, _ = ob.kl_estimate(flat(logp), flat(REF), kind=kind)
        return Both(ours.mean(), theirs, (logp,), rtol=1e-5, atol=1e-7)


for each in ("k1", "k2", "k3"):
    slime_kl(each)


@compared("slime", "corrected_kl_estimate")
def _(losses: Any) -> Both:
    logp = leaf(LOGP)
    ratio = flat(logp - OLD).exp()
    theirs = losses.compute_approx_kl(flat(logp), flat(REF), "k3", ratio).mean()
    ours, _ = ob.corrected_kl_estimate(flat(logp), flat(OLD), flat(REF), kind="k3")
    return Both(ours.mean(), theirs, (logp,), rtol=1e-5, atol=1e-7)


def slime_correction(name: str, objective: str, weight: Callable[[], Tensor]) -> None:
    @compared("slime", objective)
    def compare(_: Any) -> Both:
        logp = leaf(LOGP)
        surrogate, _ = ob.clipped_surrogate(flat(logp), flat(OLD), flat(OF_TOKENS), **CLIP)
        correct = getattr(part("slime.backends.megatron_utils.loss"), name)
        theirs, _, _ = correct(
            SimpleNamespace(tis_clip_low=0.7, tis_clip=1.3),
            pg_loss=surrogate,
            train_log_probs=rows(OLD),
            rollout_log_probs=rows(SAMPLED),
            loss_masks=rows(ONES),
        )
        return Both(corrected(weight)(logp), theirs.mean(), (logp,))


slime_correction(
    "vanilla_tis_function",
    "truncated_importance",
    lambda: ob.truncated_importance(of_token(), cap=1.3, floor=0.7),
)
slime_correction(
    "icepop_function",
    "masked_importance",
    lambda: ob.masked_importance(of_token(), low=0.7, high=1.3),
)


def slime_gae(name: str) -> None:
    @compared("slime", "gae", name)
    def compare(losses: Any) -> Both:
        theirs, _ = getattr(losses, name)(rewards(), VALUES, 0.9, 0.8)
        return Both(gae(), flat(theirs))


slime_gae("vanilla_gae")
slime_gae("chunked_gae")


@compared("slime", "reinforce_plus_plus")
def _(losses: Any) -> Both:
    part("megatron.core").mpu.get_context_parallel_world_size = lambda: 1
    kl, lengths = draw(17), LENGTHS.tolist()
    returns = losses.get_reinforce_plus_plus_returns(
        REWARD, rows(kl), rows(ONES), lengths, lengths, kl_coef=0.1, gamma=0.9
    )
    ours = ob.reinforce_plus_plus(REWARD, flat(kl), SEQUENCE, beta=0.1, gamma=0.9, eps=0.0)
    return Both(ours, ob.whiten(torch.cat(returns), eps=0.0))


@compared("slime", "reinforce_plus_plus_baseline")
def _(losses: Any) -> Both:
    centered = ob.group_advantage(REWARD, GROUP, scale="none")
    spread = losses.get_reinforce_plus_plus_baseline_advantages(
        centered, rows(draw(17)), rows(ONES), kl_coef=0.0
    )
    ours = ob.reinforce_plus_plus_baseline(REWARD, GROUP, SEQUENCE, eps=0.0)
    return Both(ours, ob.whiten(torch.cat(spread), eps=0.0))


@compared("slime", "sampled_reverse_kl")
def _(_module: Any) -> Both:
    """Theirs is taken off the advantage: the loss is that of any policy objective."""
    logp = leaf(LOGP)
    advantages = rows(torch.zeros_like(OLD))
    part("slime.backends.megatron_utils.loss").apply_opd_kl_to_advantages(
        SimpleNamespace(opd_kl_coef=1.0),
        {"teacher_log_probs": rows(REF)},
        advantages,
        rows(logp.detach()),
    )
    ours, _ = ob.sampled_reverse_kl(flat(logp), flat(REF))
    theirs, _ = ob.reinforce(flat(logp), torch.cat(advantages))
    return Both(ours.mean(), theirs.mean(), (logp,))


# --- LLaMA-Factory


def llama_pairs(label_smoothing: float) -> None:
    def theirs(_module: Any, tensors: list[Tensor]) -> Tensor:
        loss = part("llamafactory.v1.trainers.dpo_trainer").compute_sigmoid_dpo_loss
        return loss(*tensors, beta=0.3, label_smoothing=label_smoothing).mean()

    variant = "label smoothing" if label_smoothing else ""
    of_pairs("LLaMA-Factory", "dpo", theirs, variant, beta=0.3, label_smoothing=label_smoothing)


llama_pairs(0.0)
llama_pairs(0.1)


def llama_free(objective: str, method: str, ours: Callable[[list[Tensor]], Tensor]) -> None:
    @compared("LLaMA-Factory", objective)
    def compare(_: Any) -> Both:
        tensors = [leaf(tensor) for tensor in MEANS]
        trainer = part("llamafactory.v1.trainers.dpo_trainer").DPOTrainer
        settings = SimpleNamespace(pref_beta=2.0, simpo_gamma=0.5)
        theirs = getattr(trainer, method)(settings, *tensors)
        return Both(ours(tensors), theirs.mean(), tuple(tensors))


llama_free("orpo", "_odds_ratio_loss", lambda x: (ob.nll(x[0])[0] + 2.0 * ob.orpo(*x)[0]).mean())
llama_free("simpo", "_simpo_loss", lambda x: ob.simpo(*x, beta=2.0, gamma=0.5)[0].mean())

SINGLE = {"rtol": 1e-5, "atol": 1e-6}  # logits in float32


def labels_of(tokens: Tensor) -> Tensor:
    """A prompt of one token before each row: the logits at a place are of the next token."""
    labels = torch.full((8, LONGEST + 1), -100)
    labels[:, 1:] = tokens.masked_fill(~MASK, -100)
    return labels


TOKENS = torch.randint(0, 7, (8, LONGEST), generator=torch.Generator().manual_seed(0))


def before_the_end(logits: Tensor) -> Tensor:
    return torch.cat([logits, logits.new_zeros(8, 1, 7)], 1)


def of_targets(logits: Tensor) -> Tensor:
    return flat(logits).log_softmax(-1).gather(1, flat(TOKENS)[:, None])[:, 0]


@compared("LLaMA-Factory", "dft")
def _(losses: Any) -> Both:
    logits = leaf(LOGITS)
    theirs = losses.dft_loss_func({"logits": before_the_end(logits)}, labels_of(TOKENS))
    return Both(ob.dft(of_targets(logits))[0].mean(), theirs, (logits,), **SINGLE)


@compared("LLaMA-Factory", "forward_kl")
def _(losses: Any) -> Both:
    logits = leaf(LOGITS)
    theirs = losses.asft_loss_func(
        {"logits": before_the_end(logits)},
        labels_of(TOKENS),
        before_the_end(TEACHER),
        asft_alpha=0.3,
    )
    supervised = ob.dft(of_targets(logits))[0].mean()
    ours = supervised + 0.3 * divergence("forward_kl", logits).mean()
    return Both(ours, theirs, (logits,), **SINGLE)


@compared("LLaMA-Factory", "length_desensitized_sum")
def _(losses: Any) -> Both:
    logits = leaf(LOGITS)
    theirs, _ = losses.get_batch_logps(before_the_end(logits), labels_of(TOKENS), -100, 0.3)
    public = torch.minimum(*LENGTHS.chunk(2)).repeat(2)
    ours = ob.length_desensitized_sum(of_targets(logits), SEQUENCE, public, alpha=0.3)
    weight = draw(19, 8)
    return Both((weight * ours).sum(), (weight * theirs).sum(), (logits,))


# --- the comparisons, and the table


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of packages that we don't keep
@pytest.mark.parametrize(
    "key", COMPARISONS, ids=[" ".join(filter(None, key)) for key in COMPARISONS]
)
def test_value_and_gradient_are_those_of_the_framework(key: tuple[str, str, str]) -> None:
    with torch.compiler.set_stance("force_eager"):  # some of theirs are compiled
        both = COMPARISONS[key](peer(key[0]))
    theirs = both.theirs.to(both.ours.dtype)
    tolerance = {"rtol": both.rtol, "atol": both.atol}
    if not both.gradients_alone:
        torch.testing.assert_close(both.ours, theirs, **tolerance)
    assert both.ours.detach().abs().max() > 1e-3
    if not both.leaves:
        return
    gradients = [torch.autograd.grad(loss, both.leaves) for loss in (both.ours, theirs)]
    for mine, other in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, other, **tolerance)
        assert mine.abs().max() > 1e-4


TABLE = yaml.safe_load(names.TABLE.read_text())
ROWS = [(name, framework) for name, row in TABLE.items() for framework in row]


def test_the_page_is_made_of_the_table() -> None:
    assert names.PAGE.read_text() == names.text(), f"run: {names.COMMAND}"


def test_every_function_of_a_framework_that_the_table_names_is_compared() -> None:
    """TRL's are compared in files of their own, which the row names."""
    listed = {(framework, name) for name, framework in ROWS if "function" in TABLE[name][framework]}
    assert {key[:2] for key in COMPARISONS} == listed


def test_the_table_names_our_objectives_and_known_frameworks_only() -> None:
    assert all(callable(getattr(ob, name)) for name in TABLE)
    assert {framework for _, framework in ROWS} <= set(names.FRAMEWORKS)
    for name, framework in ROWS:
        assert TABLE[name][framework].keys() <= {
            "name",
            "function",
            "read",
            "ours",
            "differs",
            "test",
        }


def test_every_loss_has_a_row_or_is_said_to_be_in_none() -> None:
    modules = ob.preference, ob.reference_free, ob.feedback, ob.reward, ob.policy, ob.supervised
    losses = {name for module in modules for name in losses_of(module)}
    losses |= losses_of(ob.distillation).keys() | losses_of(ob.covariance).keys()
    assert losses <= TABLE.keys() | set(names.NOWHERE)
    assert not set(names.NOWHERE) & TABLE.keys()


def test_a_test_that_a_row_names_exists() -> None:
    here = Path(__file__).parent
    for name, framework in ROWS:
        if test := TABLE[name][framework].get("test"):
            file, _, function = test.partition("::")
            assert f"def {function}(" in (here / file).read_text(), test
