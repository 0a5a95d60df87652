"""How evenly a mixture of experts uses its experts."""

import torch
from torch import Tensor

from ...objectives import sequence_length


def load_balancing(
    router_logits: Tensor, sequence: Tensor, sequences: int, *, top_k: int
) -> Tensor:
    """The load-balancing loss of each token's completion, of which each token has a part: [tokens].

        f_e(s) = mean over the tokens of s: 1 if expert e is among the top_k, else 0
        ℓ_t    = E Σ_e f_e(s) p_e(t)        the mean over the tokens of s is E Σ_e f_e(s) P_e(s)

    It is top_k for a router that uses its E experts evenly. f has no gradient. Both are means over
    the layers, too, as in transformers' ``load_balancing_loss_func``, which takes all tokens of its
    batch for one sequence. Here a completion's loss depends on no other, nor on how examples are
    split into batches.

    Args:
        router_logits: [tokens, layers, E].
        sequence: int64 [tokens], the completion of each token.
        sequences: how many completions there are.
        top_k: experts that a token is sent to.

    Paper: Fedus et al. 2021, arXiv:2101.03961, Eq. 4 to 6; for a sequence: DeepSeek-AI 2024,
    arXiv:2412.19437, Eq. 17 to 20, divided by top_k there.
    """
    precision = torch.promote_types(router_logits.dtype, torch.float32)
    probability = router_logits.to(precision).softmax(-1)
    chosen = torch.zeros_like(probability)
    chosen.scatter_(-1, probability.topk(top_k, -1).indices, 1.0)
    length = sequence_length(sequence, sequences).clamp(min=1).to(precision)
    experts = router_logits.shape[-1]
    sums = chosen.new_zeros(sequences, experts).index_add(0, sequence, chosen.mean(1))
    used = sums / length[:, None]
    return experts * (used[sequence] * probability.mean(1)).sum(-1)
