"""Preference training without a reference: CPO, SimPO, AlphaPO and ORPO."""

from dataclasses import dataclass
from typing import Literal

from ...data import encode_preference
from ...objectives import alpha_po, cpo, nll, orpo, simpo
from ..config import Common
from ..runs.context import open_recipe
from ..train.losses import CHOSEN, Loss, Term, parse, policy_tensors
from .dpo import train_pairs


@dataclass(frozen=True)
class CPO(Common):
    """Preference training on pairs without a reference model: contrast of the answers, plus NLL of the chosen one."""

    learning_rate: float = 1e-6
    """Peak learning rate of AdamW."""
    loss: Literal["cpo", "simpo", "alpha_po"] = "cpo"
    """What contrasts the two answers: their log-probs (cpo) or those per token (simpo, alpha_po)."""
    beta: float = 0.1
    """Scale of the contrast; SimPO's authors use 2 to 2.5."""
    gamma: float = 0.5
    """Target margin of simpo and alpha_po."""
    alpha: float = 0.25
    """Shape of alpha_po's reward; at 0 it is simpo's."""
    label_smoothing: float = 0.0
    """Assumed share of pairs labelled the wrong way round (cpo and simpo)."""
    nll: float = 1.0
    """Coefficient of the NLL per token of the chosen answers; SimPO and AlphaPO have none (0)."""


@dataclass(frozen=True)
class ORPO(Common):
    """Preference training on pairs in one stage: NLL of the chosen answers plus the odds ratio of the two."""

    learning_rate: float = 8e-6
    """Peak learning rate of AdamW."""
    odds_ratio: float = 0.1
    """Coefficient of the odds-ratio loss, the paper's lambda; the NLL has 1."""


def run_cpo(config: CPO) -> dict[str, float]:
    """Run the recipe; returns the metrics of its last step."""
    shared = {"beta": config.beta, "label_smoothing": config.label_smoothing, "gamma": config.gamma}
    mix = {config.loss: 1.0} | ({"nll": config.nll} if config.nll else {})
    known: dict[str, Loss] = {"cpo": cpo, "simpo": simpo, "alpha_po": alpha_po, "nll": nll}
    terms = parse(mix, {**shared, "alpha": config.alpha}, known, of=CHOSEN)
    return train_pairs(open_recipe(config, encode_preference), terms, policy_tensors(pairs=True))


def run_orpo(config: ORPO) -> dict[str, float]:
    """Run the recipe; returns the metrics of its last step."""
    terms = {"nll": Term(nll, of=CHOSEN), "orpo": Term(orpo, config.odds_ratio)}
    return train_pairs(open_recipe(config, encode_preference), terms, policy_tensors(pairs=True))
