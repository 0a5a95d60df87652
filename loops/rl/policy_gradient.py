"""Shared by policy-gradient recipes: losses, the policy in the ratio's denominator, and how a
rollout is trained on.

μ        the sampler's policy, which the tokens were drawn from
π_old    the trainer's at the start of the rollout, in the ratio's denominator; or μ itself, see `ratio_denominator`
π        the trainer's now

From a rollout to its loss:
advantages          the recipe's, over the whole rollout
rollout_tensors     all that losses take of a micro-batch, from one pass of π
policy_losses       the losses of these tensors, and their weights: total = Σ coefficient · correction · w · loss / Z
"""

import logging
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from ...kernels import Extra
from ...objectives import (
    PerSequence,
    PerToken,
    Stats,
    correction,
    covariance,
    kl_estimate,
    policy,
    sampler_mismatch,
    sequence_mean,
    sequence_sum,
)
from ...objectives.types import Bound
from ..batch import Batch, Weights, token_mean
from ..models.lm_head import Outputs
from ..rollouts.source import SourceError
from ..runs.training import Training
from ..train.losses import (
    ENTROPY,
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
from .masks import check_masks, needs_start, rollout_masks, step_mask
from .settings import PolicyGradientConfig

log = logging.getLogger(__name__)

# share of the tokens, or completions, of the first step on a rollout that is worth a warning
CLIPPED = 0.05


def completion_surrogate(
    logp: PerSequence,
    old_logp: PerSequence,
    advantage: PerSequence,
    *,
    clip_low: Bound = 0.2,
    clip_high: Bound = 0.2,
) -> tuple[PerSequence, Stats]:
    """`clipped_surrogate` of whole completions: the ratio is the product of those of its tokens.

    TRL's RLOO.

    At ρ = 1 its gradient is that of `reinforce`, RLOO as in the paper.
    """
    return policy.clipped_surrogate(
        logp, old_logp, advantage, clip_low=clip_low, clip_high=clip_high
    )


POLICY_LOSSES = {
    **losses_of(policy),
    **losses_of(covariance),
    **TOKEN_LOSSES,
    "completion_surrogate": completion_surrogate,
}
del POLICY_LOSSES["value_loss"]  # only ppo has values


def policy_losses(
    config: PolicyGradientConfig,
    default: str,
    loss_kwargs: Mapping[str, float],
    weigh: Callable[..., Weights] = token_mean,
    *,
    kl_loss: Callable[..., Any] | None = None,
) -> dict[str, Term]:
    """Build the configured losses; losses with an advantage are multiplied by the correction and
    by the masks, if there are some.

    Args:
        default: the loss, unless the configuration names another.
        loss_kwargs: its hyper-parameters, unless the configuration has others.
        weigh: weighting of losses of tokens.
        kl_loss: KL estimator to add as a loss; None adds none.

    Raises:
        ValueError: if settings contradict each other.
    """
    shared = {**loss_kwargs, **config.loss_kwargs}
    mix = config.loss or default
    losses = parse_losses(mix, shared, POLICY_LOSSES, weighting=weigh, given=config.loss_kwargs)
    if kl_loss and config.beta:
        losses["kl"] = Term(partial(kl_loss, kind=config.kl or "k3"), config.beta, weigh)
    for name, loss in losses.items():
        is_kl = getattr(loss.function, "func", None) is kl_estimate
        bound = getattr(loss.function, "keywords", {})
        if is_kl and bound["kind"] == "k1" and loss.coefficient:
            raise ValueError(
                f"kl: k1 as a loss, here {name}, has a gradient that is zero on average; use k2 or k3, or take the "
                "divergence off the reward (kl_as: reward)"
            )
        corrected = config.correction != "none" or config.masks
        if corrected and "advantage" in units_of(loss.function):
            of_tokens = config.correction in ("tis", "icepop", "decoupled")
            if loss.unit == "sequences" and of_tokens:
                raise ValueError(
                    f"correction: {config.correction} weighs tokens, and {name} has one entry per completion; "
                    "use sequence_tis, sequence_mis, sequence_mask or geometric_mask"
                )
            losses[name] = replace(loss, factor="correction")
    check_masks(config, losses)
    return losses


def refuse_completion_losses(who: str, losses: Mapping[str, Term]) -> None:
    """Raise ValueError for a loss that takes one advantage per completion, where the advantages of
    ``who`` differ from token to token.
    """
    for name, loss in losses.items():
        if units_of(loss.function).get("advantage") == "sequences":
            raise ValueError(
                f"loss: {name} takes one advantage per completion, and those of {who} differ from token to token; "
                "use clipped_surrogate, or grpo with another advantage"
            )


def ratio_denominator(
    config: PolicyGradientConfig, losses: Mapping[str, Term]
) -> Literal["sampled", "recomputed"]:
    """The policy in the denominator of ratios, where the configuration leaves it open.

    Sampler and trainer round differently. In the ratio of one token this hardly matters, and a
    ratio to μ needs no forward pass and corrects for the difference. Over a completion of T tokens
    it grows to √T times as much, and in a mean it exceeds the narrow clip of such losses: losses
    whose signature joins the tokens of a completion get π_old. Where values are learned, the pass
    that computes them at the start of a rollout gives π_old anyway.
    """
    if config.old_logprobs is not None:
        return config.old_logprobs
    joined = any(_joins_tokens(loss) for loss in losses.values())
    if joined or config.correction != "none" or "old_value" in tensors_needed(losses):
        return "recomputed"
    return "sampled"


def _joins_tokens(loss: Term) -> bool:
    """True for a loss with the ratio of a whole completion, as its signature tells."""
    units = units_of(loss.function)
    return "old_logp" in units and ("sequence" in units or units["old_logp"] == "sequences")


def train_policy(
    context: RLContext,
    losses: Mapping[str, Term],
    *,
    advantages: Callable[[RolloutBuffer], Mapping[str, Tensor]],
    kl_in_reward: bool = False,
    at_start: Collection[Extra] = (),
    save: Callable[[], None] = lambda: None,
    **options: Any,
) -> Training:
    """Prepare to sample rollouts, score them, and train on their advantages.

    Args:
        advantages: ``advantages(rollout)`` gives the column of this name [tokens], and others that
            the losses read.
        kl_in_reward: whether the advantages read the divergence from the reference.
        at_start: outputs of the log-prob kernel at the start of a rollout that the advantages
            read, as columns ``old_...``.
        save: of `RunContext.train`.
        options: further ones of `RolloutFeed`.
    """
    run = context.run
    config: PolicyGradientConfig = run.config
    config = replace(config, old_logprobs=ratio_denominator(config, losses))
    needed = "ref_logp" in tensors_needed(losses) or (kl_in_reward and config.beta > 0)
    reference, _ = run.reference(config.reference, needed=needed, temperature=config.temperature)

    # π_ref once per rollout, if that takes fewer passes than one per training pass, or is needed
    # for the reward anyway.
    ref_at_start = reference if kl_in_reward or config.epochs_per_rollout > 1 else None
    # Masks that compare all tokens of a rollout do so under the policy that begins it.
    masked_at_start = needs_start(config, losses)
    advantages_read_old = bool(at_start) or (kl_in_reward and reference is not None)
    old_needed = (
        run.model.has_values or masked_at_start or advantages_read_old or _is_read_later(config)
    )

    def measure(batch: Batch) -> dict[str, Tensor]:
        columns: dict[str, Tensor] = {}
        if ref_at_start is not None:
            columns["ref_logp"] = ref_at_start(batch)
        if old_needed:
            outputs = run.model(batch, temperature=config.temperature, outputs=tuple(at_start))
            columns |= _old_columns(outputs, at_start, with_entropy=masked_at_start)
        return columns

    def with_masks(rollout: RolloutBuffer) -> Mapping[str, Tensor]:
        columns = advantages(rollout)
        return {**columns, **rollout_masks(rollout, columns["advantage"], config, losses)}

    if old_needed or ref_at_start is not None:
        options["measure"] = measure
    mismatch = SamplerMismatch(run.accelerator, config.old_logprobs, config.logp_bound)
    feed = RolloutFeed(
        context,
        with_masks if masked_at_start else advantages,
        per_step=mismatch.report,
        first_step=mismatch.check_first_step,
        **options,
    )

    ref_logp = reference if ref_at_start is None else _stored_reference
    forward = policy_tensors(
        reference=ref_logp, outputs=outputs_for(losses), temperature=config.temperature
    )
    logged = _with_metrics(config, losses, mismatch, has_reference=reference is not None)
    read = partial(rollout_tensors, forward, config)
    return run.train(logged, read, feed, save=save)


def _with_metrics(
    config: PolicyGradientConfig,
    losses: Mapping[str, Term],
    mismatch: "SamplerMismatch",
    *,
    has_reference: bool,
) -> dict[str, Term]:
    """The losses, and terms of coefficient 0 that are only logged."""
    terms = {}
    for name, term in losses.items():
        terms[name] = replace(term, further=partial(clip_extremes, unit=term.unit))
    terms |= {"sampling/logp_difference": Term(mismatch.measure, 0.0), **ENTROPY}
    if config.masks:
        terms["kept"] = Term(_kept, 0.0)
    if has_reference and "kl" not in terms:
        terms["kl"] = Term(partial(kl_estimate, kind=config.kl or "k3"), 0.0)
    return terms


def clip_extremes(stats: Stats, batch: Batch, *, unit: str) -> Stats:
    """The share of each completion's tokens that the clip stops below and above, one entry per
    unit of the loss: the smallest and the largest are logged.
    """
    found = {}
    for name, kind in (("clip_ratio/low", "min"), ("clip_ratio/high", "max")):
        if name not in stats:
            continue
        share = stats[name]
        if unit == "tokens":
            share = sequence_mean(share, batch.sequence, batch.sequences)[batch.sequence]
        found[f"{name}/{kind}"] = share
    return found


def _is_read_later(config: PolicyGradientConfig) -> bool:
    """Whether later steps on a rollout read π_old, which its first step computes anyway."""
    read = config.old_logprobs == "recomputed" or "veto" in config.masks
    return read and config.steps_per_rollout > 1


def _old_columns(
    outputs: Outputs, further: Collection[str], *, with_entropy: bool
) -> dict[str, Tensor]:
    """Columns of what the policy computes before anything is learned from a rollout.

    Args:
        further: names of further outputs of the kernel.
    """
    columns = {"old_logp": outputs.logprob}
    if outputs.value is not None:
        columns["old_value"] = outputs.value
    if with_entropy:
        columns["old_entropy"] = outputs.entropy
    for name in further:
        columns[f"old_{name}"] = getattr(outputs, name)
    return columns


def _stored_reference(batch: Batch) -> Tensor:
    return batch.columns["ref_logp"]


def rollout_tensors(
    forward: TensorReader, config: PolicyGradientConfig, model: nn.Module, batch: Batch
) -> Tensors:
    """The tensors of ``forward``, the policy's one pass over a micro-batch, and what its losses
    compare π with.

    sampled_logp    log μ of each token
    start_logp      the trainer's at the start of the rollout: stored, or in its only step that of this pass
    old_logp        log π_old, in the ratio's denominator: one of these two; of a completion the sum over its tokens
    advantage       A of each token, or of each completion, whose tokens all have the same
    mask            1 at tokens that the losses of the advantage learn from, else 0, with masks
    correction      weight of each token or completion by how far the trainer's policy is from μ, times the mask
    """
    tensors = forward(model, batch)
    sampled = batch.columns["sampled_logp"]
    now = tensors["tokens", "logp"].detach()
    start = now  # this pass is the one at the start
    if config.steps_per_rollout > 1:
        start = batch.columns.get("old_logp", now)
    old = sampled if config.old_logprobs == "sampled" else start
    advantage = batch.columns["advantage"]
    alike = {"advantage": advantage}  # the same for all tokens of a completion
    if config.correction != "none":
        alike["correction"] = corrections(config, start, sampled, batch.sequence)
    if config.masks:
        of_completion = _of_completions(advantage, batch)
        kept = batch.columns.get("rollout_mask")
        mask = step_mask(
            config, now, start, sampled, advantage, of_completion, batch.sequence, kept
        )
        tensors["tokens", "mask"] = mask
        alike["correction"] = mask * alike.get("correction", 1.0)
    of_tokens = {"sampled_logp": sampled, "start_logp": start, "old_logp": old, **alike}
    tensors |= {("tokens", name): column for name, column in of_tokens.items()}
    tensors["sequences", "old_logp"] = sequence_sum(old, batch.sequence, batch.sequences)
    for name, column in alike.items():
        tensors["sequences", name] = _of_completions(column, batch)
    return tensors


def _of_completions(column: Tensor, batch: Batch) -> Tensor:
    """[completions], of a column [tokens] that is the same for all tokens of a completion."""
    return column.new_zeros(batch.sequences).index_copy(0, batch.sequence, column)


def _kept(mask: PerToken) -> tuple[PerToken, Stats]:
    """The mask itself: its mean is the share of the tokens that are learned from."""
    return mask, {}


def corrections(
    config: PolicyGradientConfig, old: Tensor, sampled: Tensor, sequence: Tensor
) -> Tensor:
    """[tokens], the weight of each by how far the trainer's policy is from the sampler's."""
    low, high = config.bounds
    if config.correction == "decoupled":
        return correction.decoupled_ratio(old, sampled, cap=high)
    if config.correction in ("tis", "icepop"):
        log_ratio = correction.token_log_ratio(old, sampled)
    elif config.correction == "geometric_mask":
        log_ratio = correction.geometric_log_ratio(old, sampled, sequence)
    else:
        log_ratio = correction.sequence_log_ratio(old, sampled, sequence)
    if config.correction in ("tis", "sequence_tis"):
        return correction.truncated_importance(log_ratio, cap=high, floor=low)
    if config.correction in ("icepop", "sequence_mis"):
        return correction.masked_importance(log_ratio, low=low, high=high)
    return correction.importance_mask(log_ratio, low=low, high=high)


class SamplerMismatch:
    """Distance of the trainer's policy at the start of a rollout from the sampler's.

    Extremes and the effective sample size of a step's importance ratios are no means over tokens:
    `report` gives them.

    Args:
        old_logprobs: of the denominator of the losses' ratios, "sampled" or "recomputed".
        bound: mean difference of log-probs, in nats per token, above which the weights are other
            ones.
    """

    def __init__(
        self, accelerator: Accelerator, old_logprobs: str | None = None, bound: float = math.inf
    ) -> None:
        self.accelerator = accelerator
        self.old_logprobs = old_logprobs
        self.bound = bound
        self.silent = not accelerator.is_main_process
        # Of each micro-batch, float64: N, Σ ρ, Σ ρ², and the largest |log ρ|, ρ and -ρ.
        self.parts: list[Tensor] = []

    def measure(self, start_logp: PerToken, sampled_logp: PerToken) -> tuple[PerToken, Stats]:
        """A loss that is only logged."""
        if len(start_logp):
            difference = (start_logp - sampled_logp).detach().double()
            ratio = difference.clamp(-policy.LOG_RATIO_LIMIT, policy.LOG_RATIO_LIMIT).exp()
            sums = ratio.new_tensor(len(ratio)), ratio.sum(), ratio.square().sum()
            self.parts.append(
                torch.stack([*sums, difference.abs().max(), ratio.max(), -ratio.min()])
            )
        return (start_logp - sampled_logp).abs(), sampler_mismatch(start_logp, sampled_logp)

    def report(self) -> dict[str, float]:
        """Metrics of the micro-batches since the last report, over all ranks. Every rank calls it.

        sampling/effective_sample_size    (Σ ρ)² / (N Σ ρ²), the share of the N tokens that equal
                                          weights would need
        """
        # A rank without tokens takes part, too: the neutral element of three sums and three maxima.
        nothing = torch.tensor(
            [0.0, 0, 0, *[-torch.inf] * 3], dtype=torch.float64, device=self.accelerator.device
        )
        parts = torch.stack([nothing, *self.parts])
        self.parts = []
        of_rank = torch.cat([parts[:, :3].sum(0), parts[:, 3:].amax(0)])
        of_ranks: Tensor = self.accelerator.gather(of_rank[None])
        count, total, squares = of_ranks[:, :3].sum(0).tolist()
        difference, highest, lowest = of_ranks[:, 3:].amax(0).tolist()
        if not count:
            return {}
        return {
            "sampling/effective_sample_size": total**2 / (count * squares),
            "sampling/logp_difference/max": difference,
            "sampling/importance_ratio/max": highest,
            "sampling/importance_ratio/min": -lowest,
        }

    def check_first_step(self, metrics: Mapping[str, float]) -> None:
        """Judge the first step on a rollout, whose forward pass saw the weights that sampled it.

        Completions of older weights are not judged: their log-probs do differ.

        Args:
            metrics: of the step, over all ranks, so that all of them raise.

        Raises:
            SourceError: if log-probs differ by more than the bound.
        """
        if metrics.get("age/max", 0.0) > 0:
            return
        difference = metrics.get("sampling/logp_difference", 0.0)
        if difference > self.bound:
            raise SourceError(
                "sampling: in the first step on a rollout, before anything was learned from it, the sampler's "
                f"log-probs differ from the trainer's by {difference:.3g} nats per token, and max_logp_difference is "
                f"{self.bound:g}: it sampled from other weights, such as a server that did not take the published "
                "ones, or from another distribution. Nothing of this step is kept. Restart the server and continue, or "
                "set max_logp_difference to .inf if that is meant"
            )
        self.warn_of_clipping(metrics)

    def warn_of_clipping(self, metrics: Mapping[str, float]) -> None:
        """Warn once if the first step on a rollout clips, before learning from it could change a
        ratio.
        """
        share = max(metrics.get(name, 0.0) for name in ("clip_ratio/region", "cispo_clip_ratio"))
        if self.silent or not share > CLIPPED:
            return
        self.silent = True
        if self.old_logprobs == "sampled":
            why = (
                "ratios are to the sampler's log-probs, which differ from the trainer's by "
                f"{metrics['sampling/logp_difference']:.2g} per token; set old_logprobs to recomputed"
            )
        else:
            why = (
                "the pass that recomputed log-probs and the one that trains differ, by rounding or dropout; set "
                "epochs_per_rollout and minibatches to 1, dtype to float32, or wider clips in loss_kwargs"
            )
        log.warning(
            "%.0f %% clipped in the first step on a rollout, with nothing learned yet: %s",
            100 * share,
            why,
        )
