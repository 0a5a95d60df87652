"""Preference training without a reference: CPO, SimPO, AlphaPO and ORPO."""

from ...data import encode_preference
from ...objectives import alpha_po, cpo, nll, orpo, simpo
from ..runs.context import open_recipe
from ..train.losses import CHOSEN, Loss, Term, parse, policy_tensors
from .dpo import train_pairs
from .settings import CPO, ORPO


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
