"""Inside a Lightning module: its loop, loggers and precision; our loss in ``training_step``."""

from typing import Any

import pytest
import torch
from burnish.kernels import linear_logprob
from burnish.objectives import nll, sequence_mean, simpo
from tiny import make_examples, make_model
from torch import Tensor
from torch.utils.data import DataLoader

lightning = pytest.importorskip(
    "lightning.pytorch", reason="embedding in Lightning is tested where it is installed"
)


class Preference(lightning.LightningModule):
    """simpo + 0.1 nll from one forward pass; a batch has the chosen answers first, then the
    rejected ones.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        tokens, answer = batch["input_ids"][:, 1:], batch["answer"][:, 1:]
        hidden = self.model.model(batch["input_ids"], batch["attention_mask"]).last_hidden_state[
            :, :-1
        ]
        logprob = linear_logprob(hidden[answer], self.model.lm_head.weight, tokens[answer]).logprob
        row, rows = answer.nonzero()[:, 0], len(answer)
        preference, stats = simpo(*sequence_mean(logprob, row, rows).chunk(2), beta=2.0, gamma=0.5)
        likelihood, _ = nll(logprob[row < rows // 2])
        loss = preference.mean() + 0.1 * likelihood.mean()
        self.log("loss", loss)
        self.log_dict({name: value.mean() for name, value in stats.items()})
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


# What the example claims.

pytestmark = [
    # torch's, for what Lightning calls
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning"),
    # its advice for data that is slow to load
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings(
        "ignore:The number of training batches .* is smaller than the logging interval"
    ),
]


def collated(examples):
    """Prompt and chosen answer of every example, then prompt and rejected answer, padded."""
    rows = [(e.prompt, e.completions[i]) for i in (0, 1) for e in examples]
    length = max(len(prompt) + len(answer) for prompt, answer in rows)
    place = torch.arange(length)
    begin = torch.tensor([len(prompt) for prompt, _ in rows])[:, None]
    end = torch.tensor([len(prompt) + len(answer) for prompt, answer in rows])[:, None]
    return {
        "input_ids": torch.tensor([[*p, *a, *[0] * (length - len(p) - len(a))] for p, a in rows]),
        "attention_mask": (place < end).long(),
        "answer": (place >= begin) & (place < end),
    }


STEPS = 12
QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def fit():
    """The module after a few steps on 6 pairs, and what it logged at each of them."""
    history = []

    class Record(lightning.Callback):
        def on_train_batch_end(self, trainer, *rest):
            history.append({name: value.item() for name, value in trainer.callback_metrics.items()})

    module = Preference(make_model("llama").train())
    rows = DataLoader(make_examples(6), batch_size=6, collate_fn=collated)
    lightning.Trainer(max_epochs=STEPS, callbacks=[Record()], **QUIET).fit(module, rows)
    return module, history


def textbook(model, batch):
    """The same loss from padded logits."""
    tokens, answer = batch["input_ids"][:, 1:, None], batch["answer"][:, 1:]
    logprob = (
        model(batch["input_ids"], batch["attention_mask"])
        .logits[:, :-1]
        .log_softmax(-1)
        .gather(-1, tokens)
    )
    logprob = logprob[..., 0] * answer
    means, chosen = logprob.sum(1) / answer.sum(1), len(answer) // 2
    margin = 2.0 * (means[:chosen] - means[chosen:]) - 0.5
    likelihood = -logprob[:chosen].sum() / answer[:chosen].sum()
    return -torch.nn.functional.logsigmoid(margin).mean() + 0.1 * likelihood


def test_lightning_takes_the_steps_of_a_plain_loop_with_the_textbook_loss():
    module, history = fit()
    model, batch, losses = make_model("llama"), collated(make_examples(6)), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = textbook(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert [step["loss"] for step in history] == pytest.approx(losses, rel=1e-6)
    for mine, other in zip(module.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-9)


def test_it_learns_to_tell_the_answers_apart():
    _, history = fit()
    assert history[-1]["rewards/accuracies"] == 1 > history[0]["rewards/accuracies"]
    assert history[-1]["rewards/margins"] > history[0]["rewards/margins"] + 0.5
