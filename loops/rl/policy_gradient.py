"""What policy-gradient recipes share: surrogates of sampled tokens, who the ratios are to, and how far off they are.

μ        the sampler's policy: what the tokens were drawn from
π_old    the trainer's at the start of the rollout, which ratios are to; or μ itself, see `old_policy`
π        the trainer's now
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...objectives import (
    PerSequence,
    PerToken,
    Stats,
    clipped_surrogate,
    correction,
    kl_estimate,
    policy,
    sampler_mismatch,
    sequence_sum,
)
from ...objectives.types import Bound
from ..batch import Batch
from ..models.policy import Policy
from ..recipes.sft import TOKEN_LOSSES
from ..runs.context import open_reference
from ..runs.reference import Reference, column
from ..train import weighting as weights
from ..train.losses import (
    ENTROPY,
    Loss,
    Losses,
    Reader,
    Tensors,
    Term,
    losses_of,
    needs,
    outputs_for,
    parse,
    policy_tensors,
    units_of,
)
from .buffer import Advantages, Measure, Report
from .mismatch import ClipWatch, MismatchMetrics
from .settings import CORRECTIONS, Old, PolicyGradientConfig
from .setup import RLContext

_OF_TOKENS = ("tis", "icepop")


def completion_surrogate(
    logp: PerSequence,
    old_logp: PerSequence,
    advantage: PerSequence,
    *,
    clip_low: Bound = 0.2,
    clip_high: Bound = 0.2,
) -> tuple[PerSequence, Stats]:
    """`clipped_surrogate` of whole answers: the ratio is the product of those of its tokens. TRL's RLOO.

    At ρ = 1 its gradient is that of `reinforce`, RLOO as in the paper.
    """
    return clipped_surrogate(logp, old_logp, advantage, clip_low=clip_low, clip_high=clip_high)


POLICY_LOSSES: dict[str, Loss] = {
    name: loss
    for name, loss in {**losses_of(policy), "completion_surrogate": completion_surrogate, **TOKEN_LOSSES}.items()
    if name != "value_loss"  # only ppo has values
}


def surrogate_terms(
    config: PolicyGradientConfig,
    default: str,
    loss_kwargs: Mapping[str, float],
    weigh: Any = weights.token_mean,
    *,
    kl_loss: bool = False,
) -> dict[str, Term]:
    """The losses of this configuration, those with an advantage times the correction, if there is one.

    Args:
        default: the loss unless the configuration names another.
        loss_kwargs: its hyper-parameters, unless the configuration has others.
        weigh: of losses of tokens.
        kl_loss: whether the divergence from the reference is one of the losses.

    Raises:
        ValueError: if settings contradict each other.
    """
    _check(config)
    terms = parse(
        config.loss or default,
        {**loss_kwargs, **config.loss_kwargs},
        POLICY_LOSSES,
        weighting=weigh,
        given=config.loss_kwargs,
    )
    if kl_loss and config.beta:
        terms["kl"] = Term(partial(kl_estimate, kind=config.kl or "k3"), config.beta, weigh)
    for name, term in terms.items():
        _refuse_k1(name, term)
    if config.correction == "none":
        return terms
    for name, term in terms.items():
        if "advantage" in needs({name: term}):
            if term.unit == "sequences" and config.correction in _OF_TOKENS:
                raise ValueError(
                    f"correction: {config.correction} weighs tokens, and {name} has one entry per answer; "
                    "use sequence_tis, sequence_mask or geometric_mask"
                )
            terms[name] = replace(term, factor="correction")
    return terms


def _check(config: PolicyGradientConfig) -> None:
    if config.correction != "none":
        if config.old == "sampled":
            raise ValueError(
                f"correction: {config.correction} compares the trainer's log-probs with the sampler's; with old="
                "sampled the ratio of the loss does that already; leave old out, or set correction to none"
            )
        nothing = torch.zeros(0)
        corrections(config, nothing, nothing, nothing.long())  # bounds out of range are refused here
    elif config.top_p < 1 or config.top_k:
        raise ValueError(
            "top_p, top_k: answers drawn from a part of the distribution are more likely there than under the policy, "
            "and its gradient is biased; draw from all of it, or set a correction, and leave old out"
        )
    if config.beta < 0:
        raise ValueError(f"beta: must be >= 0, got {config.beta}")
    if config.reference == "precompute":
        raise ValueError("reference: answers that are yet to be sampled can't be precomputed; use copy or adapters_off")


def _refuse_k1(name: str, term: Term) -> None:
    function: Any = term.function
    if getattr(function, "func", None) is kl_estimate and function.keywords["kind"] == "k1" and term.coefficient:
        raise ValueError(
            f"kl: k1 as a loss, here {name}, has a gradient that is zero on average; use k2 or k3, or take the "
            "divergence off the reward (kl_as: reward)"
        )


def old_policy(config: PolicyGradientConfig, terms: Losses) -> Old:
    """The policy that ratios are to, where the configuration leaves it open.

    Sampler and trainer round differently. One token's ratio hardly shows it, and to μ it needs no forward pass and
    corrects for what difference there is. Over a completion of T tokens it adds up to √T times as much, of a mean it
    leaves more than the narrow clip of such losses allows: these, whose signature says that they join the tokens of a
    completion, get π_old. Where values are learned, the pass that reads them at the start of a rollout says it anyway.
    """
    if config.old is not None:
        return config.old
    units = [units_of(term.function) for term in terms.values()]
    joined = any("old_logp" in of and ("sequence" in of or of["old_logp"] == "sequences") for of in units)
    return "recomputed" if joined or config.correction != "none" or "old_value" in needs(terms) else "sampled"


def train_policy(
    config: PolicyGradientConfig,
    players: RLContext,
    terms: Losses,
    *,
    advantages: Advantages,
    in_reward: bool,
    report: Report = lambda rollout: {},
    dynamic_sampling: bool = False,
) -> dict[str, float]:
    """Sample, judge, compare, and train, until the steps are done.

    Args:
        in_reward: whether the advantages read the divergence from the reference.
        report: further metrics of a rollout.
    """
    recipe = players.recipe
    config = replace(config, old=old_policy(config, terms))
    wanted = "ref_logp" in needs(terms) or (in_reward and config.beta > 0)
    reference, _ = open_reference(recipe, config.reference, needed=wanted, temperature=config.temperature)
    # Once per rollout, where that is fewer passes than one in each pass that trains, or was made for the reward anyway.
    stored = reference if in_reward or config.epochs_per_rollout > 1 else None
    experience = players.experience(
        config,
        advantages=advantages,
        measure=measures(config, recipe.model, stored, in_reward=in_reward),
        dynamic_sampling=dynamic_sampling,
        report=lambda rollout: {**players.report(rollout), **report(rollout)},
        first_step=ClipWatch(config.old, recipe.run.accelerator),
    )
    distance = MismatchMetrics(recipe.run.accelerator)
    logged = {**terms, "sampling/logp_difference": Term(_mismatch, 0.0), **ENTROPY}
    if reference is not None and "kl" not in logged:
        logged["kl"] = Term(partial(kl_estimate, kind=config.kl or "k3"), 0.0)
    reads = reference if stored is None else column("ref_logp")
    read = policy_tensors(reference=reads, outputs=outputs_for(terms), temperature=config.temperature)
    return players.train(config, experience, logged, rollout_tensors(read, config, distance), distance.report)


def measures(
    config: PolicyGradientConfig, model: Policy, reference: Reference | None, *, in_reward: bool = False
) -> Measure | None:
    """What is found before a rollout is trained on: π_old where it is recomputed, and what the advantages read.

    Args:
        reference: whose log-probs are found too.
        in_reward: whether the advantages read the divergence of π_old from it.
    """
    # Of a rollout that is trained on once, π_old is the policy itself, from the very pass that trains it.
    again = config.old == "recomputed" and _several(config)
    start = again or model.has_values or (in_reward and reference is not None)
    if not start and reference is None:
        return None

    def measured(batch: Batch) -> dict[str, Tensor]:
        found = {} if reference is None else {"ref_logp": reference(batch)}
        if start:
            said = model(batch, temperature=config.temperature)
            found |= {"old_logp": said.logprob} | ({} if said.value is None else {"old_value": said.value})
        return found

    return measured


def _several(config: PolicyGradientConfig) -> bool:
    """Whether a rollout is trained on in several steps."""
    return config.epochs_per_rollout * config.minibatches > 1


def rollout_tensors(read: Reader, config: PolicyGradientConfig, distance: MismatchMetrics | None = None) -> Reader:
    """Beside what the policy says now: who sampled, who the ratios are to (``config.old``), and the advantages."""

    def tensors(model: nn.Module, batch: Batch) -> Tensors:
        found = read(model, batch)
        sampled = batch.columns["sampled_logp"]
        now = found["tokens", "logp"].detach()
        start = batch.columns.get("old_logp", now) if _several(config) else now
        old = sampled if config.old == "sampled" else start
        if distance is not None:
            distance.add(start, sampled)
        advantage = batch.columns["advantage"]
        found |= {
            ("tokens", "sampled_logp"): sampled,
            ("tokens", "start_logp"): start,
            ("tokens", "old_logp"): old,
            ("tokens", "advantage"): advantage,
            ("sequences", "old_logp"): sequence_sum(old, batch.sequence, batch.sequences),
            ("sequences", "advantage"): _of_answers(advantage, batch),
        }
        if config.correction != "none":
            weight = corrections(config, start, sampled, batch.sequence)
            found["tokens", "correction"] = weight
            found["sequences", "correction"] = _of_answers(weight, batch)
        return found

    return tensors


def _of_answers(column: Tensor, batch: Batch) -> Tensor:
    """[sequences], of a column [tokens] that is the same for all tokens of an answer."""
    return column.new_zeros(batch.sequences).index_copy(0, batch.sequence, column)


def corrections(config: PolicyGradientConfig, old: Tensor, sampled: Tensor, sequence: Tensor) -> Tensor:
    """[tokens], the weight of each by how far the trainer's policy is from the sampler's."""
    low, high = config.bounds
    match config.correction:
        case "tis":
            return correction.truncated_importance(correction.token_log_ratio(old, sampled), cap=high)
        case "icepop":
            return correction.masked_importance(correction.token_log_ratio(old, sampled), low=low, high=high)
        case "sequence_tis":
            return correction.truncated_importance(correction.sequence_log_ratio(old, sampled, sequence), cap=high)
        case "sequence_mask":
            whole = correction.sequence_log_ratio(old, sampled, sequence)
            return correction.importance_mask(whole, low=low, high=high)
        case "geometric_mask":
            mean = correction.geometric_log_ratio(old, sampled, sequence)
            return correction.importance_mask(mean, low=low, high=high)
    raise ValueError(f"correction: {config.correction!r} is none of none, {', '.join(CORRECTIONS)}")


def _mismatch(start_logp: PerToken, sampled_logp: PerToken) -> tuple[PerToken, Stats]:
    """How far the trainer's policy at the start is from the sampler's; logged always."""
    return (start_logp - sampled_logp).abs(), sampler_mismatch(start_logp, sampled_logp)
