"""The README's Python runs as printed."""

import re
from pathlib import Path

import pytest
import torch
import yaml
from accelerate import Accelerator
from burnish.loops.config import Teacher
from burnish.loops.train.losses import PAIR_LOSSES, columns_of, parse_losses, tensors_needed
from tiny import save_model, sums, write_rows

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.S)


@pytest.fixture
def step(tmp_path, monkeypatch):
    """The names that the first example leaves behind."""
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "pairs.jsonl", sums(8))
    names = {"name": str(save_model(tmp_path / "model"))}
    exec(BLOCKS[0], names)
    return names


def test_twenty_lines_take_preference_pairs_to_a_step(step):
    metrics = step["metrics"]
    assert metrics["dpo"] == torch.tensor(2.0).log()
    assert metrics["loss"] == metrics["dpo"] + 0.2 * metrics["nll"]
    lines = [line for line in BLOCKS[0].splitlines() if line and not line.startswith(("import", "from"))]
    assert len(lines) <= 20


def test_named_losses_of_three_kinds_make_one_step(step):
    names = {**step, "accelerator": Accelerator()}
    exec(BLOCKS[1], names)
    metrics = names["metrics"]
    assert metrics["loss"] == pytest.approx(metrics["dpo"] + 0.2 * metrics["nll"] + 0.01 * metrics["entropy"])
    assert metrics["grad_norm"] > 0


def test_an_objective_and_two_kernels_embed_in_a_plain_loop():
    torch.manual_seed(0)
    pairs = {f"{a}{b}": torch.randn(4, requires_grad=True) for a in ("", "ref_") for b in ("chosen", "rejected")}
    exec(BLOCKS[2], dict(pairs))
    assert pairs["chosen"].grad.abs().min() > 0
    head = torch.nn.Linear(8, 50)
    hidden = torch.randn(5, 8, requires_grad=True)
    names = {"hidden": hidden, "lm_head": head, "target": torch.arange(5)}
    exec(BLOCKS[3], names)
    logits = hidden.detach() @ head.weight.T
    torch.testing.assert_close(names["logprob"], logits.log_softmax(-1)[torch.arange(5), torch.arange(5)])
    assert hidden.grad.abs().min() > 0
    names |= {"teacher_head": torch.nn.Linear(6, 52), "teacher_hidden": torch.randn(5, 6)}
    exec(BLOCKS[4], names)
    student, teacher = logits.log_softmax(-1), (names["teacher_hidden"] @ names["teacher_head"].weight.T)[:, :50]
    expected = torch.nn.functional.kl_div(student, teacher.log_softmax(-1), log_target=True, reduction="none").sum(-1)
    torch.testing.assert_close(names["divergence"], expected)


def test_the_mix_of_the_readme_is_one_that_the_recipe_knows():
    (mix,) = re.findall(r"```yaml\n(.*?)```", README, flags=re.S)
    config = yaml.safe_load(mix)
    terms = parse_losses(config["loss"], {"beta": 0.1, "label_smoothing": 0.0}, PAIR_LOSSES)
    assert columns_of(terms) == ["importance"]
    assert tensors_needed(terms) == {"chosen", "rejected", "ref_chosen", "ref_rejected", "logp", "divergence"}
    Teacher(**config["teacher"])
