"""How far trainer and sampler are apart on a rollout, and what the ratios of a loss make of it."""

import logging
from collections.abc import Mapping
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from ...objectives.policy import LOG_RATIO_LIMIT

log = logging.getLogger(__name__)

CLIPPED = 0.05  # share of the tokens, or completions, of a step


class MismatchMetrics:
    """What no mean over the tokens of a step says of trainer and sampler: extremes, and the effective sample size."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.parts: list[Tensor] = []  # [6] of each micro-batch, float64

    def add(self, start: Tensor, sampled: Tensor) -> None:
        if len(start):
            difference = (start - sampled).detach().double()
            ratio = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
            count = ratio.new_tensor(len(ratio))
            sums = [count, ratio.sum(), ratio.square().sum()]
            self.parts.append(torch.stack([*sums, difference.abs().max(), ratio.max(), -ratio.min()]))

    def report(self) -> dict[str, float]:
        """Of the micro-batches since the last report, over all ranks. Every rank calls it.

        sampling/effective_sample_size    (Σ ρ)² / (N Σ ρ²), the share of the N tokens that equal weights would need
        """
        none = torch.tensor([0.0, 0, 0, *[-torch.inf] * 3], dtype=torch.float64, device=self.accelerator.device)
        mine, self.parts = torch.stack([none, *self.parts]), []
        together = torch.cat([mine[:, :3].sum(0), mine[:, 3:].amax(0)])
        every: Any = self.accelerator.gather(together[None])
        count, total, squares = every[:, :3].sum(0).tolist()
        if not count:
            return {}
        difference, highest, lowest = every[:, 3:].amax(0).tolist()
        return {
            "sampling/effective_sample_size": total**2 / (count * squares),
            "sampling/logp_difference/max": difference,
            "sampling/importance_ratio/max": highest,
            "sampling/importance_ratio/min": -lowest,
        }


class ClipWatch:
    """Warns once where the first step on a rollout clips, though nothing was learned from it that could move a ratio.

    Args:
        old: the policy that ratios are to, "sampled" or "recomputed".
    """

    def __init__(self, old: str | None, accelerator: Accelerator) -> None:
        self.old, self.silent = old, not accelerator.is_main_process

    def __call__(self, metrics: Mapping[str, float]) -> None:
        """Of the first step on a rollout, over all ranks. Of completions that are older than that, ratios do move."""
        share = max(metrics.get(name, 0.0) for name in ("clip_ratio/region", "cispo_clip_ratio"))
        if self.silent or metrics.get("age/max", 0.0) > 0 or not share > CLIPPED:
            return
        self.silent = True
        if self.old == "sampled":
            why = (
                "ratios are to the sampler's log-probs, which differ from the trainer's by "
                f"{metrics['sampling/logp_difference']:.2g} per token; set old to recomputed"
            )
        else:
            why = (
                "the pass that recomputed log-probs and the one that trains differ, by rounding or dropout; set "
                "epochs_per_rollout and minibatches to 1, dtype to float32, or wider clips in loss_kwargs"
            )
        log.warning("%.0f %% clipped in the first step on a rollout, with nothing learned yet: %s", 100 * share, why)
