"""Cross-entropy without logits in torchtune's loss slot: in a copy of a recipe, after the model is
made, ``self._loss_fn = LinearCrossEntropy(self._model)``.

For one GPU, or copies of the model; where FSDP shards the head, call it in the model's own forward.
"""

import torch
from burnish.kernels import linear_logprob
from burnish.objectives import nll


class LinearCrossEntropy(torch.nn.Module):
    """The model's last layer hands its input on, and the loss applies the layer's weight."""

    ignore_index = -100

    def __init__(self, model):
        super().__init__()
        head = model.output
        assert type(head) is torch.nn.Linear and head.bias is None
        head.forward = lambda hidden: hidden
        self.weight_of = lambda: head.weight  # it stays a parameter of the model

    def forward(self, hidden, labels):
        """[tokens, width], which the recipe takes for logits, and [tokens]."""
        trained = labels != self.ignore_index
        weight = self.weight_of()
        states = hidden[trained].to(weight.dtype)
        return nll(linear_logprob(states, weight, labels[trained]).logprob)[0].mean()
