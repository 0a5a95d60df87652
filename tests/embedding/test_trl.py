"""Inside TRL's trainers, by ``compute_loss``: their data, reference, generation and logs; our
log-probs and losses.
"""

from typing import Any

import pytest
import torch
from burnish.kernels import linear_logprob
from burnish.objectives import clipped_surrogate, dft, dpo, ipo, nll, sequence_mean, sequence_sum
from datasets import Dataset
from tiny import save_model, sums
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer


def answer_logprobs(
    model: Any, head: torch.nn.Linear, tokens: Tensor, attention_mask: Tensor, mask: Tensor
) -> Tensor:
    """Log-probabilities of the tokens under the mask, both [rows, length]: flat, row by row,
    without logits.
    """
    outputs = model(
        input_ids=tokens,
        attention_mask=attention_mask,
        use_cache=False,
        output_hidden_states=True,
        logits_to_keep=tokens.new_empty(0),  # logits of no position
    )
    here = mask[:, 1:].bool()
    return linear_logprob(
        outputs.hidden_states[-1][:, :-1][here], head.weight, tokens[:, 1:][here]
    ).logprob


class DynamicFineTuning(SFTTrainer):
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        trained = inputs["labels"] != -100
        head = self.accelerator.unwrap_model(model).lm_head
        logprob = answer_logprobs(
            model, head, inputs["input_ids"], inputs["attention_mask"], trained
        )
        loss, _ = dft(logprob)
        if num_items_in_batch is None:  # evaluation
            return loss.mean()
        return loss.sum() / num_items_in_batch * self.accelerator.num_processes


class Mix(DPOTrainer):
    """dpo + 0.2 nll of the chosen answers, from one forward pass."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        logprob, before, row, rows = self.logprobs(model, inputs)
        now, before = (sequence_sum(x, row, rows).chunk(2) for x in (logprob, before))
        preference, stats = dpo(*now, *before, beta=self.beta)
        likelihood, _ = nll(logprob[row < rows // 2])
        for name, value in stats.items():  # what TRL logs
            self._metrics["train" if model.training else "eval"][name].append(value.mean().item())
        return preference.mean() + 0.2 * likelihood.mean()

    def logprobs(self, model: Any, inputs: Any) -> tuple[Tensor, Tensor, Tensor, int]:
        """Policy and reference per token, and its row; the first half of the rows are the chosen
        answers.
        """
        batch = inputs["input_ids"], inputs["attention_mask"], inputs["completion_mask"]
        logprob = answer_logprobs(model, self.accelerator.unwrap_model(model).lm_head, *batch)
        with torch.no_grad():
            reference = self.accelerator.unwrap_model(self.ref_model)
            before = answer_logprobs(self.ref_model, reference.lm_head, *batch)
        return logprob, before, inputs["completion_mask"].nonzero()[:, 0], len(inputs["input_ids"])


class Identity(Mix):
    """IPO of log-probabilities per token, which is how TRL reads the paper."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        logprob, before, row, rows = self.logprobs(model, inputs)
        now, before = (sequence_mean(x, row, rows).chunk(2) for x in (logprob, before))
        return ipo(*now, *before, beta=self.beta)[0].mean()


class Surrogate(GRPOTrainer):
    """GRPO with any token objective: every answer alike."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        prompt, completion = inputs["prompt_ids"], inputs["completion_ids"]
        sampled = inputs["completion_mask"].bool()
        tokens = torch.cat([prompt, completion], 1)
        attention_mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        mask = torch.cat([torch.zeros_like(prompt, dtype=torch.bool), sampled], 1)
        logprob = answer_logprobs(
            model, self.accelerator.unwrap_model(model).lm_head, tokens, attention_mask, mask
        )
        old = inputs.get("old_per_token_logps")
        old = logprob.detach() if old is None else old[sampled]
        row, rows = sampled.nonzero()[:, 0], len(sampled)
        loss, _ = clipped_surrogate(
            logprob, old, inputs["advantages"][row], clip_low=0.2, clip_high=0.28
        )
        return sequence_mean(loss, row, rows).mean() / self.current_gradient_accumulation_steps


# What the examples claim.

# The old name of a setting that TRL turns on, still the only one in some of the versions we
# support.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`gradient_checkpointing` is deprecated:FutureWarning"
)
QUIET = {
    "per_device_train_batch_size": 4,
    "learning_rate": 3e-3,
    "lr_scheduler_type": "constant",
    "train_sampling_strategy": "sequential",
    "gradient_checkpointing": False,
    "bf16": False,
    "use_cpu": True,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}
PAIRS = sums(16)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


def train(kind, arguments, saved, rows, **options):
    """Logged lines of every step."""
    tokenizer = AutoTokenizer.from_pretrained(saved)
    tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(saved)
    trainer = kind(
        model=model,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(rows),
        args=arguments,
        **options,
    )
    trainer.train()
    return [line for line in trainer.state.log_history if "loss" in line]


def assert_same_losses(ours, theirs):
    ours, theirs = ([line["loss"] for line in lines] for lines in (ours, theirs))
    assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)
    assert max(ours) - min(ours) > 1e-3  # far more than they may differ


def test_dft_in_the_sft_trainer_equals_its_own(saved, tmp_path):
    rows = [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in PAIRS]
    arguments = SFTConfig(
        tmp_path, max_steps=6, gradient_accumulation_steps=2, loss_type="dft", **QUIET
    )
    ours = train(DynamicFineTuning, arguments, saved, rows)
    assert_same_losses(ours, train(SFTTrainer, arguments, saved, rows))


def test_a_mix_in_the_dpo_trainer_equals_its_own_and_tells_the_answers_apart(saved, tmp_path):
    mix = {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.2]}
    arguments = DPOConfig(tmp_path, max_steps=12, beta=0.1, **mix, **QUIET)
    ours, theirs = train(Mix, arguments, saved, PAIRS), train(DPOTrainer, arguments, saved, PAIRS)
    assert_same_losses(ours, theirs)
    for name in ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"):
        assert [line[name] for line in ours] == pytest.approx(
            [line[name] for line in theirs], rel=1e-4, abs=1e-5
        )
    assert ours[-1]["rewards/accuracies"] > ours[0]["rewards/accuracies"] == 0


def test_ipo_per_token_in_the_dpo_trainer_equals_its_own(saved, tmp_path):
    arguments = DPOConfig(tmp_path, max_steps=6, beta=0.5, loss_type="ipo", **QUIET)
    assert_same_losses(
        train(Identity, arguments, saved, PAIRS), train(DPOTrainer, arguments, saved, PAIRS)
    )


def digits(completions, **columns):
    """Reward: the share of digits."""
    texts = [completion[0]["content"] for completion in completions]
    return [sum(letter.isdigit() for letter in text) / max(len(text), 1) for text in texts]


def test_the_surrogate_in_the_grpo_trainer_equals_its_own(saved, tmp_path):
    # With its usual epsilon, Adam makes whole steps of gradients that are nothing but rounding.
    setting = {
        **QUIET,
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 8,
        "adam_epsilon": 1e-6,
    }
    arguments = GRPOConfig(
        tmp_path,
        max_steps=6,
        num_iterations=3,
        num_generations=8,
        max_completion_length=8,
        loss_type="grpo",
        epsilon=0.2,
        epsilon_high=0.28,
        beta=0.0,
        **setting,
    )
    rows = [{"prompt": pair["prompt"]} for pair in PAIRS]
    ours = train(Surrogate, arguments, saved, rows, reward_funcs=digits)
    assert_same_losses(ours, train(GRPOTrainer, arguments, saved, rows, reward_funcs=digits))
