"""Inside ``transformers.Trainer``: its data, optimizer, accumulation and logs; our loss, with or
without logits.
"""

from typing import Any

import pytest
import torch
from burnish.kernels import linear_logprob, logits_logprob
from burnish.objectives import label_smoothed_nll, nll, z_loss
from tiny import make_examples, make_model
from torch import Tensor
from transformers import Trainer, TrainingArguments


class WithoutLogits(Trainer):
    """Label-smoothed likelihood straight from hidden states.

    The whole model is called, so that DDP sees the pass. Where weights are sharded (FSDP, ZeRO-3)
    the head has to run inside the model's forward too: wrap both in a module, as
    `burnish.loops.Policy` does.
    """

    label_smoothing = 0.0

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")[:, 1:]
        outputs = model(
            **inputs, output_hidden_states=True, logits_to_keep=labels.new_empty(0)
        )  # logits of no position
        trained = labels != -100
        hidden, head = (
            outputs.hidden_states[-1][:, :-1][trained],
            self.accelerator.unwrap_model(model).lm_head,
        )
        logprobs = linear_logprob(hidden, head.weight, labels[trained], outputs=("mean_logprob",))
        loss, _ = label_smoothed_nll(
            logprobs.logprob, logprobs.mean_logprob, label_smoothing=self.label_smoothing
        )
        if num_items_in_batch is None:  # evaluation
            loss = loss.mean()
        else:  # counted over ranks and accumulated batches; DDP averages over the ranks again
            loss = loss.sum() / num_items_in_batch * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss


def nll_with_z_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """A ``compute_loss_func`` for logits that are there anyway."""
    labels = labels[:, 1:]
    trained = labels != -100
    logprobs = logits_logprob(outputs.logits[:, :-1][trained], labels[trained])
    loss = nll(logprobs.logprob)[0] + 1e-2 * z_loss(logprobs.logsumexp)[0]
    return loss.sum() / (trained.sum() if num_items_in_batch is None else num_items_in_batch)


# What the examples claim.

ROWS = [
    {"input_ids": e.prompt + e.completions[0], "labels": [-100] * len(e.prompt) + e.completions[0]}
    for e in make_examples(16, completions=1)
]


def padded(rows):
    length = max(len(row["input_ids"]) for row in rows)

    def stack(values, fill):
        return torch.tensor([[*x, *[fill] * (length - len(x))] for x in values])

    return {
        "input_ids": stack([row["input_ids"] for row in rows], 0),
        "attention_mask": stack([[1] * len(row["input_ids"]) for row in rows], 0),
        "labels": stack([row["labels"] for row in rows], -100),
    }


def train(kind, directory, *, model=None, eval_dataset=None, compute_loss_func=None, **options):
    """The trainer after 6 steps of two unequal micro-batches."""
    arguments = TrainingArguments(
        directory,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=6,
        learning_rate=0.3,
        lr_scheduler_type="constant",
        optim="sgd",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
        **options,
    )
    trainer = kind(
        model or make_model("llama"),
        arguments,
        data_collator=padded,
        train_dataset=ROWS,
        eval_dataset=ROWS,
        compute_loss_func=compute_loss_func,
    )
    trainer.train()
    return trainer


def losses(trainer):
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
def test_loss_and_weights_are_those_of_the_trainer_itself(tmp_path, label_smoothing, monkeypatch):
    monkeypatch.setattr(WithoutLogits, "label_smoothing", label_smoothing)
    theirs = train(Trainer, tmp_path / "theirs", label_smoothing_factor=label_smoothing)
    ours = train(WithoutLogits, tmp_path / "ours")
    # Models compute their own loss in float32.
    assert losses(ours) == pytest.approx(losses(theirs), rel=1e-5)
    assert ours.evaluate()["eval_loss"] == pytest.approx(theirs.evaluate()["eval_loss"], rel=1e-5)
    for mine, other in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)
    assert losses(ours)[-1] < losses(ours)[0] - 0.3


def test_no_logits_are_computed(tmp_path):
    model, sizes = make_model("llama"), set()
    model.lm_head.register_forward_hook(lambda module, inputs, logits: sizes.add(logits.numel()))
    train(WithoutLogits, tmp_path, model=model)
    assert sizes == {0}


def test_a_loss_function_reads_the_logits_and_trains(tmp_path):
    batch, model = padded(ROWS), make_model("llama")
    logits = model(batch["input_ids"], batch["attention_mask"]).logits[:, :-1]
    labels = batch["labels"][:, 1:]
    own = torch.nn.functional.cross_entropy(logits.mT, labels)
    penalty = 1e-2 * logits.logsumexp(-1).square()[labels != -100].mean()
    trainer = train(Trainer, tmp_path, model=model, compute_loss_func=nll_with_z_loss)
    got = nll_with_z_loss(
        make_model("llama")(batch["input_ids"], batch["attention_mask"]), batch["labels"]
    )
    torch.testing.assert_close(got, own + penalty, rtol=1e-6, atol=0, check_dtype=False)
    assert losses(trainer)[-1] < losses(trainer)[0] - 0.3
