"""The README's Python runs as printed."""

import re
from pathlib import Path

import torch
from tiny import save_model, sums, write_rows

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.S)


def test_twenty_lines_take_preference_pairs_to_a_step(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "pairs.jsonl", sums(8))
    names = {"name": str(save_model(tmp_path / "model"))}
    exec(BLOCKS[0], names)
    metrics = names["metrics"]
    assert metrics["dpo"] == torch.tensor(2.0).log()
    assert metrics["loss"] == metrics["dpo"] + 0.2 * metrics["nll"]
    lines = [line for line in BLOCKS[0].splitlines() if line and not line.startswith(("import", "from"))]
    assert len(lines) <= 20


def test_an_objective_and_a_kernel_embed_in_a_plain_loop():
    torch.manual_seed(0)
    pairs = {f"{a}{b}": torch.randn(4, requires_grad=True) for a in ("", "ref_") for b in ("chosen", "rejected")}
    exec(BLOCKS[1], dict(pairs))
    assert pairs["chosen"].grad.abs().min() > 0
    head = torch.nn.Linear(8, 50)
    hidden = torch.randn(5, 8, requires_grad=True)
    names = {"hidden": hidden, "lm_head": head, "target": torch.arange(5)}
    exec(BLOCKS[2], names)
    logits = hidden.detach() @ head.weight.T
    torch.testing.assert_close(names["logprob"], logits.log_softmax(-1)[torch.arange(5), torch.arange(5)])
    assert hidden.grad.abs().min() > 0
