"""``linear_logprob`` for those who already hold logits."""

from torch import Tensor

from . import reference
from .reference import Logprobs


def logits_logprob(
    logits: Tensor, target: Tensor, *, temperature: float | Tensor = 1.0, vocab: int | None = None
) -> Logprobs:
    return reference.logits_logprob(
        logits, target, temperature=temperature, vocab=logits.shape[1] if vocab is None else vocab
    )
