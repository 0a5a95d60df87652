"""The same numbers as the peer where tokens matter: lengths, weights of completions, mixes; TRL
1.16's own DPO loss.
"""

from typing import Any

import pytest
import torch
from burnish import objectives as ob
from burnish.benchmarks.peer.trl_losses import dpo_loss, make_rows
from torch import Tensor

pytest.importorskip("trl", reason="the peer is not installed")

PAIRS, WIDTH = 6, 9
BETA = 0.3


class Completions:
    """Padded log-probs as TRL has them, chosen above rejected, and the same flat as burnish has
    them.
    """

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(0)
        length = torch.randint(1, WIDTH + 1, (2 * PAIRS,), generator=draw)
        self.mask = torch.arange(WIDTH) < length[:, None]
        self.padded, self.ref, self.squares = (
            -3 * torch.rand(2 * PAIRS, WIDTH, generator=draw, dtype=torch.float64) for _ in range(3)
        )
        self.padded.requires_grad_()
        self.sequence = torch.arange(2 * PAIRS).repeat_interleave(length)
        self.logp, self.ref_logp, self.log_sum_squares = (
            x[self.mask] for x in (self.padded, self.ref, self.squares)
        )

    def pairs(self, completion: Any) -> list[Tensor]:
        """chosen, rejected, ref_chosen, ref_rejected under
        ``completion(tokens, sequence, sequences)``.
        """
        both = (
            completion(x, self.sequence, 2 * PAIRS).chunk(2) for x in (self.logp, self.ref_logp)
        )
        return [half for value in both for half in value]

    def theirs(self, **settings: Any) -> Tensor:
        shared = settings.get("ld_alpha")
        public = torch.minimum(*self.mask.sum(1).chunk(2)).repeat(2)[:, None]
        beyond = torch.tensor(1.0 if shared is None else shared, dtype=self.ref.dtype)
        weight = torch.where(torch.arange(1, WIDTH + 1) <= public, 1.0, beyond) * self.mask
        # what is outside the mask is never read, but it is multiplied by zero
        rows = make_rows(self.padded * self.mask, self.mask)
        return dpo_loss(rows, (self.ref * weight).sum(1), self.squares, beta=BETA, **settings)

    def assert_same(self, ours: Tensor, theirs: Tensor, tolerance: float = 1e-12) -> None:
        torch.testing.assert_close(ours, theirs.to(ours.dtype), rtol=tolerance, atol=tolerance)
        mine, peer = (
            torch.autograd.grad(loss, self.padded, retain_graph=True)[0] for loss in (ours, theirs)
        )
        assert mine.abs().max() > 0
        torch.testing.assert_close(mine, peer.to(mine.dtype), rtol=tolerance, atol=tolerance)


@pytest.fixture
def completions() -> Completions:
    return Completions()


def test_ipo_and_dpo_on_means_equal_the_peers_normalized_losses(completions: Completions) -> None:
    means = completions.pairs(ob.sequence_mean)
    completions.assert_same(
        ob.ipo(*means, beta=BETA)[0].mean(), completions.theirs(loss_types=["ipo"])
    )
    completions.assert_same(
        ob.dpo(*means, beta=BETA)[0].mean(), completions.theirs(loss_types=["sigmoid_norm"])
    )


def test_nll_of_the_chosen_completions_equals_the_peers_sft_loss(completions: Completions) -> None:
    chosen = completions.sequence < PAIRS
    completions.assert_same(
        ob.nll(completions.logp[chosen])[0].mean(), completions.theirs(loss_types=["sft"])
    )


@pytest.mark.parametrize("alpha", [0.0, 0.4, 1.0])
def test_ld_dpo_equals_the_peer(completions: Completions, alpha: float) -> None:
    length = ob.sequence_length(completions.sequence, 2 * PAIRS)
    public = torch.minimum(*length.chunk(2)).repeat(2)

    def desensitized(x: Tensor, sequence: Tensor, sequences: int) -> Tensor:
        return ob.length_desensitized_sum(x, sequence, public, alpha=alpha)

    ours = ob.dpo(*completions.pairs(desensitized), beta=BETA)[0].mean()
    completions.assert_same(ours, completions.theirs(ld_alpha=alpha))


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
def test_wpo_equals_the_peer(completions: Completions, loss_type: str) -> None:
    weight = ob.wpo_weight(
        completions.logp, completions.log_sum_squares, completions.sequence, 2 * PAIRS
    )
    chosen, rejected = weight.chunk(2)
    sums, means = completions.pairs(ob.sequence_sum), completions.pairs(ob.sequence_mean)
    loss, _ = ob.dpo(*sums, beta=BETA) if loss_type == "sigmoid" else ob.ipo(*means, beta=BETA)
    ours = (chosen * rejected * loss).mean()
    completions.assert_same(ours, completions.theirs(loss_types=[loss_type], use_weighting=True))


def test_mpo_equals_the_peers_weighted_mix(completions: Completions) -> None:
    sums = completions.pairs(ob.sequence_sum)
    dpo, bco = ob.dpo(*sums, beta=BETA)[0].mean(), ob.bco_pair(*sums, beta=BETA)[0].mean()
    nll = ob.nll(completions.logp[completions.sequence < PAIRS])[0].mean()
    theirs = completions.theirs(
        loss_types=["sigmoid", "bco_pair", "sft"], loss_weights=[0.8, 0.2, 1.0]
    )
    completions.assert_same(0.8 * dpo + 0.2 * bco + nll, theirs)


@pytest.mark.parametrize("alpha", [0.3, 0.7])
def test_the_alpha_divergence_is_the_peers_at_one_minus_alpha(alpha: float) -> None:
    """The peer's coefficient is the exponent of the f-divergence, ours the authors' alpha; it
    computes in float32.
    """
    completions = Completions()
    for name in ("padded", "ref"):
        setattr(completions, name, getattr(completions, name).detach().float())
    completions.padded.requires_grad_()
    completions.logp, completions.ref_logp = (
        completions.padded[completions.mask],
        completions.ref[completions.mask],
    )
    chosen, rejected, ref_chosen, ref_rejected = completions.pairs(ob.sequence_sum)
    scores = (
        ob.f_divergence_score(ratio, divergence="alpha", alpha=alpha)
        for ratio in (chosen - ref_chosen, rejected - ref_rejected)
    )
    ours, _ = ob.dpo(*scores, torch.zeros(PAIRS), torch.zeros(PAIRS), beta=BETA)
    theirs = completions.theirs(
        f_divergence_type="alpha_divergence", f_alpha_divergence_coef=1 - alpha
    )
    completions.assert_same(ours.mean(), theirs, tolerance=1e-5)
