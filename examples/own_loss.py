"""DPO with an offset: the column `margin` of the data says by how much the chosen completion of
each pair is better.

python own_loss.py MODEL PAIRS OUTPUT, or burnish dpo --loss own_loss:odpo --loss_kwargs '{alpha:
0.5}' ...

Amini et al. 2024, "Direct Preference Optimization with an Offset", arXiv:2402.10571, eq. 9: -log
σ(Δr - α·margin).
"""

import sys

import burnish
from burnish.objectives import PerPair, Stats
from burnish.objectives.types import Positive
from torch.nn.functional import softplus


def odpo(
    chosen: PerPair,
    rejected: PerPair,
    ref_chosen: PerPair,
    ref_rejected: PerPair,
    margin: PerPair,  # no tensor of burnish's, so a column of the data
    *,
    beta: Positive = 0.1,
    alpha: Positive = 1.0,
) -> tuple[PerPair, Stats]:
    reward = beta * ((chosen - ref_chosen) - (rejected - ref_rejected))
    above = reward - alpha * margin
    return softplus(-above), {"above_margin": (above > 0).detach().float()}


if __name__ == "__main__":
    model, pairs, output = sys.argv[1:]
    for step in burnish.dpo(model, pairs, output, loss=odpo, loss_kwargs={"alpha": 0.5}, steps=5):
        print(f"{step.metrics['loss']:.4f} {step.metrics['above_margin']:.2f}")
