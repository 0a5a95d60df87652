"""Cross-entropy without logits as a plugin of axolotl: in its YAML,
``plugins: [axolotl_plugin.LinearCrossEntropy]``, with this file on PYTHONPATH.

For one GPU, or copies of the model; where FSDP shards the head, call it in the model's own forward.
"""

from functools import partial

from axolotl.integrations.base import BasePlugin
from burnish.kernels import linear_logprob
from burnish.objectives import nll


class LinearCrossEntropy(BasePlugin):
    """Replaces the loss of the trainer that axolotl has made."""

    def post_trainer_create(self, cfg, trainer):
        trainer.compute_loss = partial(compute_loss, trainer)


def compute_loss(trainer, model, inputs, return_outputs=False, num_items_in_batch=None):
    labels = inputs.pop("labels")[:, 1:]
    # logits of no position
    nowhere = labels.new_empty(0)
    outputs = model(**inputs, output_hidden_states=True, logits_to_keep=nowhere)
    trained = labels != -100
    hidden = outputs.hidden_states[-1][:, :-1][trained]
    head = trainer.accelerator.unwrap_model(model).get_output_embeddings()
    loss, _ = nll(linear_logprob(hidden, head.weight, labels[trained]).logprob)
    if num_items_in_batch is None:  # evaluation
        loss = loss.mean()
    else:  # counted over ranks and accumulated batches; DDP averages over the ranks again
        loss = loss.sum() / num_items_in_batch * trainer.accelerator.num_processes
    return (loss, outputs) if return_outputs else loss
