"""Preference training on the policy's own answers: of those to a prompt, the best and the worst make a pair.

Guo et al. 2024, "Direct Language Model Alignment from Online AI Feedback", arXiv:2402.04792, with rewards for a judge.
"""

from collections.abc import Mapping
from functools import partial

from torch import Tensor

from ..rl.buffer import RolloutBuffer, Unit
from ..rl.setup import missing_end, open_rl
from ..runs.context import open_reference
from ..train.losses import CHOSEN, ENTROPY, PAIR_LOGPS, Term, needs, outputs_for, parse, policy_tensors
from .dpo import PAIR_LOSSES, refuse_split_steps
from .settings import OnlineDPO


def run_online_dpo(config: OnlineDPO) -> dict[str, float]:
    """Run the recipe; returns the metrics of its last step."""
    terms = online_dpo_terms(config)
    players = open_rl(config)
    refuse_split_steps(terms, players.recipe)
    reference, _ = open_reference(
        players.recipe, config.reference, needed="ref_chosen" in needs(terms), temperature=config.temperature
    )
    choose = partial(best_and_worst, penalty=config.missing_eos_penalty)

    def report(rollout: RolloutBuffer) -> Mapping[str, float]:
        return {**players.report(rollout), **pair_metrics(rollout, choose(rollout), config)}

    experience = players.experience(config, shape=choose, report=report)
    read = policy_tensors(reference=reference, outputs=outputs_for(terms), pairs=True, temperature=config.temperature)
    return players.train(config, experience, {**terms, **PAIR_LOGPS, **ENTROPY}, read)


def online_dpo_terms(config: OnlineDPO) -> dict[str, Term]:
    """The losses of this configuration.

    Raises:
        ValueError: if settings contradict each other.
    """
    if config.group_size < 2:
        raise ValueError(f"group_size: a pair needs two answers to a prompt, wanted >= 2, got {config.group_size}")
    if config.reference == "precompute":
        raise ValueError("reference: answers that are yet to be sampled can't be precomputed; use copy or adapters_off")
    known = {name: loss for name, loss in PAIR_LOSSES.items() if name != "distillation"}
    shared = {"beta": config.beta, "label_smoothing": config.label_smoothing, **config.loss_kwargs}
    return parse(config.loss, shared, known, of=CHOSEN, given=config.loss_kwargs)


def best_and_worst(rollout: RolloutBuffer, *, penalty: float) -> list[Unit]:
    """Of each group the answers of highest and lowest reward, the earlier one of equals; none where all are equal."""
    reward = (rollout.reward - penalty * missing_end(rollout)).tolist()
    pairs = ((max(group, key=reward.__getitem__), min(group, key=reward.__getitem__)) for group in rollout.groups)
    return [[[best, worst]] for best, worst in pairs if reward[best] > reward[worst]]


def pair_metrics(rollout: RolloutBuffer, pairs: list[Unit], config: OnlineDPO) -> dict[str, float]:
    """How many groups made a pair, how many did not, and by how much the pairs' rewards differ."""
    metrics = {"pairs": float(len(pairs)), "ties": float(config.batch_size - len(pairs))}
    if pairs:
        reward: Tensor = rollout.reward
        best, worst = ([pair[which] for (pair,) in pairs] for which in (0, 1))
        metrics["objective/scores_margin"] = float((reward[best] - reward[worst]).mean())
    return metrics
