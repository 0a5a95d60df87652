"""Preference training on the policy's own completions, of each prompt the best and the worst.

Guo et al. 2024, "Direct Language Model Alignment from Online AI Feedback", arXiv:2402.04792, with
rewards as the judge.
"""

from functools import partial

from ...objectives import PerPair, Stats
from ..rl.buffer import RolloutBuffer
from ..rl.context import RLContext, open_rl
from ..rl.feed import RolloutFeed
from ..runs.training import Training
from ..train.losses import CHOSEN, PAIR_METRICS, Term, outputs_for, policy_tensors, tensors_needed
from ..train.mix import PAIR_LOSSES, parse_losses
from .settings import OnlineDPO

NEEDING_A_TEACHER = {"distillation", "tdpo1", "tdpo2"}  # losses that this recipe has none for


def open_online_dpo(config: OnlineDPO, context: RLContext | None = None) -> Training:
    """Open a run that is ready to train, in ``context`` if it is already open."""
    losses = online_dpo_losses(config)
    context = context or open_rl(config)
    reference, _ = context.run.reference(
        config.reference,
        needed="ref_chosen" in tensors_needed(losses),
        temperature=config.temperature,
    )
    select = partial(best_and_worst, penalty=config.missing_eos_penalty)
    feed = RolloutFeed(
        context,
        select=select,
        report=lambda rollout: pair_metrics(rollout, select(rollout), config),
    )
    outputs = outputs_for(losses)
    read = policy_tensors(
        reference=reference, outputs=outputs, pairs=True, temperature=config.temperature
    )
    measured = dict(PAIR_METRICS)
    if reference is not None:
        measured["objective/kl"] = Term(partial(_kl, beta=config.beta), 0.0)
    return context.run.train({**losses, **measured}, read, feed)


def _kl(
    chosen: PerPair, rejected: PerPair, ref_chosen: PerPair, ref_rejected: PerPair, *, beta: float
) -> tuple[PerPair, Stats]:
    """log π/π_ref of a completion, the mean of the two of a pair: an estimate of KL(π‖π_ref)."""
    kl = ((chosen - ref_chosen) + (rejected - ref_rejected)).detach() / 2
    return kl, {"objective/non_score_reward": -beta * kl}


def online_dpo_losses(config: OnlineDPO) -> dict[str, Term]:
    """The losses of this configuration."""
    known = {name: loss for name, loss in PAIR_LOSSES.items() if name not in NEEDING_A_TEACHER}
    shared = {"beta": config.beta, "label_smoothing": config.label_smoothing, **config.loss_kwargs}
    return parse_losses(config.loss, shared, known, of=CHOSEN, given=config.loss_kwargs)


def best_and_worst(rollout: RolloutBuffer, *, penalty: float) -> list[list[list[int]]]:
    """The pair of each group: highest and lowest reward, the earlier one of equals.

    A group whose rewards are all equal makes none.

    Raises:
        ValueError: if completions of a group begin with different prompts, or have several
            contexts: a pair has one prompt.
    """
    reward = (rollout.reward - penalty * rollout.unfinished).tolist()
    if len(rollout.contexts) > len(rollout):
        raise ValueError(
            "online_dpo: a conversation has several contexts, and a pair is two completions of one prompt; use grpo"
        )
    pairs = []
    for examples in rollout.split_groups():
        if len(examples) > 1:
            raise ValueError(
                f"online_dpo: the conversations of task {rollout.task_of(examples[0][0])} begin with different "
                "prompts, and a pair is two completions of one prompt; let `reset` depend on the row alone, or use grpo"
            )
        (group,) = examples
        best = max(group, key=reward.__getitem__)
        worst = min(group, key=reward.__getitem__)
        if reward[best] > reward[worst]:
            pairs.append([[best, worst]])  # a unit of one example
    return pairs


def pair_metrics(
    rollout: RolloutBuffer, pairs: list[list[list[int]]], config: OnlineDPO
) -> dict[str, float]:
    """How many groups made a pair and how many did not, and how far rewards of pairs differ."""
    metrics = {"pairs": float(len(pairs)), "ties": float(config.prompts_per_rollout - len(pairs))}
    if pairs:
        best = [pair[0] for (pair,) in pairs]
        worst = [pair[1] for (pair,) in pairs]
        margin = rollout.reward[best] - rollout.reward[worst]
        metrics["objective/scores_margin"] = float(margin.mean())
    return metrics
