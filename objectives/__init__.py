"""Post-training objectives as pure functions of log-probabilities.

Each takes tensors and keyword hyper-parameters and returns ``(loss, stats)``, unreduced: one entry per token, sequence
or pair. The caller weighs, sums and divides, once, over the whole batch. Nothing here knows of models, padding,
devices or ranks.

    supervised       tokens that should become likely
    sequence         from tokens to whole answers
    preference       pairs of answers, against a reference policy
    reference_free   pairs of answers, without one
"""

from .preference import (
    aot,
    aot_unpaired,
    apo_down,
    apo_zero,
    bco_pair,
    discopop,
    dpo,
    exo,
    f_score,
    hinge,
    ipo,
    nca,
    robust_dpo,
    sppo_hard,
)
from .reference_free import alpha_po, cpo, orpo, simpo
from .sequence import length_desensitized_sum, sequence_length, sequence_mean, sequence_sum, wpo_weight
from .supervised import dft, entropy_bonus, label_smoothed_nll, nll, z_loss
from .types import FlatTokens, PerPair, PerSequence, PerToken, SequenceIds, SequenceLengths, Stats

__all__ = [
    "FlatTokens",
    "PerPair",
    "PerSequence",
    "PerToken",
    "SequenceIds",
    "SequenceLengths",
    "Stats",
    "alpha_po",
    "aot",
    "aot_unpaired",
    "apo_down",
    "apo_zero",
    "bco_pair",
    "cpo",
    "dft",
    "discopop",
    "dpo",
    "entropy_bonus",
    "exo",
    "f_score",
    "hinge",
    "ipo",
    "label_smoothed_nll",
    "length_desensitized_sum",
    "nca",
    "nll",
    "orpo",
    "robust_dpo",
    "sequence_length",
    "sequence_mean",
    "sequence_sum",
    "simpo",
    "sppo_hard",
    "wpo_weight",
    "z_loss",
]
