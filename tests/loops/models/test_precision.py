"""Under bf16 autocast every pass of every recipe multiplies the same rounded factors of the
head.
"""

import pytest
import torch
from burnish.kernels import reference
from burnish.loops.cli import main
from burnish.loops.models import lm_head as head
from online import prepare
from tiny import save_model, sums, write_rows
from transformers import AutoModelForCausalLM


class Passes:
    """What is asked of the kernels: whether it has gradients, and that it is what rounded factors
    give in float64.

    Only the probe of a new policy, of 7 tokens, is outside of autocast.
    """

    def __init__(self, monkeypatch):
        self.seen = set()
        for name in ("linear_logprob", "linear_divergence", "linear_logits"):
            monkeypatch.setattr(head, name, self.checking(name, getattr(head, name)))

    def checking(self, name, function):
        def call(*given, **options):
            found, hidden = function(*given, **options), given[0]
            if not torch.is_autocast_enabled("cpu") and hidden.dtype == torch.float32:
                assert name == "linear_logprob" and len(hidden) == 7
                return found
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                ours, wanted = getattr(self, name)(found, *given, **options)
                unrounded = getattr(self, name)(found, *given, compute=torch.float64, **options)[1]
            assert (ours.double() - wanted).abs().max() <= 2e-4, name
            if hidden.dtype == torch.float32:
                assert (unrounded - wanted).abs().max() > 1e-3, name  # else nothing is tested
            kind = "several targets" if name == "linear_logprob" and given[2].ndim == 2 else name
            self.seen.add((kind, torch.is_grad_enabled()))
            return found

        return call

    @staticmethod
    def exact(hidden, head, compute):
        return reference.head_logits(
            hidden.double(), head, len(head.weight), torch.float64, compute
        )

    def linear_logprob(
        self, found, hidden, given, target, *, temperature=1.0, compute=torch.bfloat16, **options
    ):
        logp = (self.exact(hidden, given, compute) / temperature).log_softmax(-1)
        return found.logprob, logp.gather(1, target.reshape(len(target), -1)).reshape(target.shape)

    def linear_divergence(
        self,
        found,
        hidden,
        student,
        teacher_hidden,
        teacher,
        *,
        temperature,
        compute=torch.bfloat16,
        **options,
    ):
        heads = (hidden, student), (teacher_hidden, teacher)
        s, t = ((self.exact(*each, compute) / temperature).log_softmax(-1) for each in heads)
        return found, (t.exp() * (t - s)).sum(1)

    def linear_logits(self, found, hidden, given, *, compute=torch.bfloat16):
        return found, self.exact(hidden, given, compute)


def decided(directory):
    """With logits large enough for their rounding to be seen."""
    model = AutoModelForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        model.lm_head.weight.mul_(30)
    model.save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    place = tmp_path_factory.mktemp("start")
    fields, pairs = prepare(place), sums(20)
    completions = [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in pairs]
    return {
        "model": decided(fields["model"]),
        "teacher": decided(save_model(place / "teacher", seed=1)),
        "prompts": fields["data"],
        "pairs": str(write_rows(place / "pairs.jsonl", pairs)),
        "completions": str(write_rows(place / "completions.jsonl", completions)),
    }


SAMPLED = ["--rewards", "{'online:even': 1.0}", "--max_tokens", "5", "--show_every", "0"]
TRAINED, MEASURED, DRAWN = (
    ("linear_logprob", True),
    ("linear_logprob", False),
    ("linear_logits", False),
)
ON_POLICY = ["--on_policy", "1", "--max_tokens", "5"]
RECIPES = {
    "sft": ("completions", [], {TRAINED}),
    "sft of an adapter on the head": (
        "completions",
        ["--lora.r", "4", "--lora.target_modules", "lm_head"],
        {TRAINED},
    ),
    "dpo": ("pairs", [], {TRAINED, MEASURED}),
    "grpo": (
        "prompts",
        [*SAMPLED, "--group_size", "2", "--beta", "0.1"],
        {TRAINED, MEASURED, DRAWN},
    ),
    "ppo": ("prompts", [*SAMPLED, "--minibatches", "2"], {TRAINED, MEASURED, DRAWN}),
    "distill": ("completions", ON_POLICY, {("linear_divergence", True), TRAINED, DRAWN}),
    "distill from top k": (
        "completions",
        ["--teacher.top_k", "3"],
        {("several targets", True), TRAINED},
    ),
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_pass_of_a_recipe_rounds_the_same_factors(recipe, data, tmp_path, monkeypatch):
    name, flags, wanted = RECIPES[recipe]
    command = recipe.split()[0]
    flags = [*flags, *(["--teacher.model", data["teacher"]] if command == "distill" else [])]
    arguments = [
        "--model",
        data["model"],
        "--data",
        data[name],
        "--output",
        str(tmp_path / "run"),
        *flags,
    ]
    passes = Passes(monkeypatch)
    batch = "--prompts_per_rollout" if name == "prompts" else "--batch_size"
    assert main([command, *arguments, "--dtype", "bfloat16", "--steps", "1", batch, "4"]) == 0
    assert passes.seen >= wanted
