"""Cross-entropy without logits in torchtitan's loss slot: in your configuration,
``loss=LinearCrossEntropy.Config()``. The trainer hands such a loss hidden states and the head.

For one GPU, or copies of the model; where FSDP shards the head, call it in the model's own forward.
"""

from dataclasses import dataclass

from burnish.kernels import linear_logprob
from burnish.objectives import nll, z_loss
from torchtitan.components.loss import IGNORE_INDEX, ChunkedLossWrapper


class LinearCrossEntropy(ChunkedLossWrapper):
    """Log-probs come from hidden states, tile by tile: no chunks of the sequence are needed."""

    @dataclass(kw_only=True, slots=True)
    class Config(ChunkedLossWrapper.Config):
        z_loss: float = 0.0
        """Coefficient of PaLM's z-loss, which the same pass gives."""

    def __init__(self, config, *, compile_config=None):
        super().__init__(config, compile_config=compile_config)
        self.z_loss = config.z_loss

    def __call__(self, pred, labels, global_valid_tokens=None, **loss_inputs):
        trained = labels != IGNORE_INDEX
        outputs = linear_logprob(pred[trained], self.lm_head.weight, labels[trained])
        loss, _ = nll(outputs.logprob)
        if self.z_loss:
            loss = loss + self.z_loss * z_loss(outputs.logsumexp)[0]
        total = loss.sum()
        return total if global_valid_tokens is None else total / global_valid_tokens, {}
