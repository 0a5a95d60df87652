"""Shared by policy-gradient recipes: losses, the policy in the ratio's denominator, and how a rollout is trained on.

μ        the sampler's policy, which the tokens were drawn from
π_old    the trainer's at the start of the rollout, in the ratio's denominator; or μ itself, see `ratio_denominator`
π        the trainer's now
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

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
from ..runs.reference import Reference, column
from ..train import weighting as weights
from ..train.losses import (
    ENTROPY,
    Loss,
    Losses,
    TensorReader,
    Tensors,
    Term,
    outputs_for,
    policy_tensors,
    tensors_needed,
    units_of,
)
from ..train.mix import TOKEN_LOSSES, losses_of, parse_losses
from .buffer import RolloutBuffer
from .context import RLContext
from .feed import RolloutFeed
from .mismatch import ClipWatch, MismatchMetrics
from .settings import CORRECTIONS, PolicyGradientConfig

_OF_TOKENS = ("tis", "icepop")


def completion_surrogate(
    logp: PerSequence,
    old_logp: PerSequence,
    advantage: PerSequence,
    *,
    clip_low: Bound = 0.2,
    clip_high: Bound = 0.2,
) -> tuple[PerSequence, Stats]:
    """`clipped_surrogate` of whole completions: the ratio is the product of those of its tokens. TRL's RLOO.

    At ρ = 1 its gradient is that of `reinforce`, RLOO as in the paper.
    """
    return clipped_surrogate(logp, old_logp, advantage, clip_low=clip_low, clip_high=clip_high)


POLICY_LOSSES: dict[str, Loss] = {
    name: loss
    for name, loss in {**losses_of(policy), "completion_surrogate": completion_surrogate, **TOKEN_LOSSES}.items()
    if name != "value_loss"  # only ppo has values
}


def policy_losses(
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
    losses = parse_losses(
        config.loss or default,
        {**loss_kwargs, **config.loss_kwargs},
        POLICY_LOSSES,
        weighting=weigh,
        given=config.loss_kwargs,
    )
    if kl_loss and config.beta:
        losses["kl"] = Term(partial(kl_estimate, kind=config.kl or "k3"), config.beta, weigh)
    for name, loss in losses.items():
        _refuse_k1(name, loss)
        _check_cap(name, loss)
        if config.correction != "none" and "advantage" in tensors_needed({name: loss}):
            if loss.unit == "sequences" and config.correction in _OF_TOKENS:
                raise ValueError(
                    f"correction: {config.correction} weighs tokens, and {name} has one entry per completion; "
                    "use sequence_tis, sequence_mask or geometric_mask"
                )
            losses[name] = replace(loss, factor="correction")
    return losses


def _check(config: PolicyGradientConfig) -> None:
    if config.correction == "none":
        if config.top_p < 1 or config.top_k:
            raise ValueError(
                "top_p, top_k: tokens sampled from a part of the distribution are more likely there than under the "
                "policy, and its gradient is biased; sample from all of it, or set a correction, and leave old_logprobs"
                " out"
            )
        return
    if config.old_logprobs == "sampled":
        raise ValueError(
            f"correction: {config.correction} compares the trainer's log-probs with the sampler's; with old_logprobs="
            "sampled the ratio of the loss does that already; leave old_logprobs out, or set correction to none"
        )
    low, high = config.bounds
    if low > high:
        raise ValueError(f"correction_low, correction_high: wanted low <= high, got {low} and {high}")


def _refuse_k1(name: str, loss: Term) -> None:
    function: Any = loss.function
    if getattr(function, "func", None) is kl_estimate and function.keywords["kind"] == "k1" and loss.coefficient:
        raise ValueError(
            f"kl: k1 as a loss, here {name}, has a gradient that is zero on average; use k2 or k3, or take the "
            "divergence off the reward (kl_as: reward)"
        )


def _check_cap(name: str, loss: Term) -> None:
    bound = getattr(loss.function, "keywords", {})
    lowest = 1 + bound.get("clip_high", 0.2)
    if bound.get("ratio_cap", lowest) < lowest:
        raise ValueError(f"{name}: ratio_cap must be >= 1 + clip_high = {lowest}, got {bound['ratio_cap']}")


def ratio_denominator(config: PolicyGradientConfig, losses: Losses) -> Literal["sampled", "recomputed"]:
    """The policy in the denominator of ratios, where the configuration leaves it open.

    Sampler and trainer round differently. One token's ratio hardly shows it, and to μ it needs no forward pass and
    corrects for what difference there is. Over a completion of T tokens it adds up to √T times as much, of a mean it
    leaves more than the narrow clip of such losses allows: these, whose signature says that they join the tokens of a
    completion, get π_old. Where values are learned, the pass that reads them at the start of a rollout gives it anyway.
    """
    if config.old_logprobs is not None:
        return config.old_logprobs
    units = [units_of(loss.function) for loss in losses.values()]
    joined = any("old_logp" in of and ("sequence" in of or of["old_logp"] == "sequences") for of in units)
    return "recomputed" if joined or config.correction != "none" or "old_value" in tensors_needed(losses) else "sampled"


def train_policy(
    context: RLContext,
    losses: Losses,
    *,
    advantages: Callable[[RolloutBuffer], Mapping[str, Tensor]],
    kl_in_reward: bool = False,
    dynamic_sampling: bool = False,
    report: Callable[[RolloutBuffer], Mapping[str, float]] = lambda rollout: {},
) -> dict[str, float]:
    """Sample, score, and train on the advantages, until the steps are done; returns the metrics of the last one.

    Args:
        advantages: the column ``advantage`` [tokens] of a rollout, and others that the losses read.
        kl_in_reward: whether the advantages read the divergence from the reference.
        dynamic_sampling: pass over groups whose rewards are all the same.
        report: further metrics of a rollout.
    """
    config: PolicyGradientConfig = context.config
    config = replace(config, old_logprobs=ratio_denominator(config, losses))
    wanted = "ref_logp" in tensors_needed(losses) or (kl_in_reward and config.beta > 0)
    reference, _ = context.reference(config.reference, needed=wanted, temperature=config.temperature)
    # Once per rollout, where that is fewer passes than one in each pass that trains, or was made for the reward anyway.
    stored = reference if kl_in_reward or config.epochs_per_rollout > 1 else None
    feed = RolloutFeed(
        context,
        **context.rollouts,
        advantages=advantages,
        measure=measures(config, context.model, stored, kl_in_reward=kl_in_reward),
        dynamic_sampling=dynamic_sampling,
        report=lambda rollout: {**context.metrics(rollout), **report(rollout)},
        first_step=ClipWatch(config.old_logprobs, context.accelerator),
    )
    apart = MismatchMetrics(context.accelerator)
    logged = {**losses, "sampling/logp_difference": Term(_mismatch, 0.0), **ENTROPY}
    if reference is not None and "kl" not in logged:
        logged["kl"] = Term(partial(kl_estimate, kind=config.kl or "k3"), 0.0)
    reads = reference if stored is None else column("ref_logp")
    read = policy_tensors(reference=reads, outputs=outputs_for(losses), temperature=config.temperature)
    return context.train(logged, rollout_tensors(read, config, apart), feed, report=apart.report)


def measures(
    config: PolicyGradientConfig, model: Policy, reference: Reference | None, *, kl_in_reward: bool = False
) -> Callable[[Batch], Mapping[str, Tensor]] | None:
    """Columns of a rollout before it is trained on: π_old where it is recomputed, and what the advantages read.

    Args:
        reference: its log-probs are columns too.
        kl_in_reward: whether the advantages read the divergence of π_old from it.
    """
    # Of a rollout that is trained on once, π_old is the policy itself, from the very pass that trains it.
    again = config.old_logprobs == "recomputed" and config.steps_per_rollout > 1
    start = again or model.has_values or (kl_in_reward and reference is not None)
    if not start and reference is None:
        return None

    def measure(batch: Batch) -> dict[str, Tensor]:
        columns = {} if reference is None else {"ref_logp": reference(batch)}
        if start:
            outputs = model(batch, temperature=config.temperature)
            columns |= {"old_logp": outputs.logprob} | ({} if outputs.value is None else {"old_value": outputs.value})
        return columns

    return measure


def rollout_tensors(
    read: TensorReader, config: PolicyGradientConfig, apart: MismatchMetrics | None = None
) -> TensorReader:
    """Beside the policy's tensors: the sampler's log-probs, those in the ratio's denominator, and the advantages."""

    def tensors(model: nn.Module, batch: Batch) -> Tensors:
        found = read(model, batch)
        sampled = batch.columns["sampled_logp"]
        now = found["tokens", "logp"].detach()
        start = batch.columns.get("old_logp", now) if config.steps_per_rollout > 1 else now
        old = sampled if config.old_logprobs == "sampled" else start
        if apart is not None:
            apart.add(start, sampled)
        advantage = batch.columns["advantage"]
        found |= {
            ("tokens", "sampled_logp"): sampled,
            ("tokens", "start_logp"): start,
            ("tokens", "old_logp"): old,
            ("tokens", "advantage"): advantage,
            ("sequences", "old_logp"): sequence_sum(old, batch.sequence, batch.sequences),
            ("sequences", "advantage"): _per_completion(advantage, batch),
        }
        if config.correction != "none":
            weight = corrections(config, start, sampled, batch.sequence)
            found["tokens", "correction"] = weight
            found["sequences", "correction"] = _per_completion(weight, batch)
        return found

    return tensors


def _per_completion(column: Tensor, batch: Batch) -> Tensor:
    """[sequences], of a column [tokens] that is the same for all tokens of a completion."""
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
            ratio = correction.sequence_log_ratio(old, sampled, sequence)
            return correction.importance_mask(ratio, low=low, high=high)
        case "geometric_mask":
            mean = correction.geometric_log_ratio(old, sampled, sequence)
            return correction.importance_mask(mean, low=low, high=high)
    raise ValueError(f"correction: {config.correction!r} is none of none, {', '.join(CORRECTIONS)}")


def _mismatch(start_logp: PerToken, sampled_logp: PerToken) -> tuple[PerToken, Stats]:
    """How far the trainer's policy at the start is from the sampler's; logged always."""
    return (start_logp - sampled_logp).abs(), sampler_mismatch(start_logp, sampled_logp)
