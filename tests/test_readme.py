"""The README's Python, and what its loops compute; tests/test_docs.py runs the pages of docs/."""

import re
from pathlib import Path

import pytest
import torch
from forked import run_forked
from tiny import save_model, sums, write_rows

ROOT = Path(__file__).parents[1]


def blocks(page):
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.S)


QUICK, EMBEDDED = blocks("README.md")
PAIRS, LOOP, *_ = blocks("docs/your-own-loop.md")
(DIVERGENCE,) = blocks("docs/kernels.md")


@pytest.fixture
def names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "pairs.jsonl", sums(8))
    return {"name": str(save_model(tmp_path / "model"))}


def test_it_is_read_in_three_minutes():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 115 and max(map(len, lines)) <= 100


def test_ci_finds_its_command_in_it():
    (pattern,) = re.findall(r"grep -E '(.*)' README.md", (ROOT / ".ci/run").read_text())
    assert len(re.findall(pattern, (ROOT / "README.md").read_text(), flags=re.M)) == 1


def test_ten_lines_train_evaluate_and_save(names, capsys):
    exec(QUICK, names)
    printed = capsys.readouterr().out
    assert "step 1/8  loss 0.6931" in printed  # log 2: the policy is its own reference
    assert "eval/loss" in printed.splitlines()[-1]
    assert (Path("my-dpo-model") / "model.safetensors").exists()


def test_preference_pairs_become_a_step(names):
    exec(PAIRS, names)
    metrics = names["metrics"]
    assert metrics["dpo"] == torch.tensor(2.0).log()
    assert metrics["loss"] == metrics["dpo"] + 0.2 * metrics["nll"]


def test_a_loop_learns_from_a_reward(names):
    # A random model earns nothing from right answers, and no group would vary.
    exec(LOOP.replace("float(completion.strip() == answer)", "float(len(completion))"), names)
    assert names["metrics"]["grad_norm"] > 0 and not names["metrics"]["skipped"]
    assert len(names["rollout"]) == 64 and {
        sample.oldest for sample in names["rollout"].samples
    } == {1}


@pytest.mark.slow
@pytest.mark.skipif(
    torch.__version__ < "2.13", reason="this torch can't register devices from Python"
)
def test_where_there_is_an_accelerator_both_run_on_it(tmp_path):
    ((status, printed),) = run_forked(1, "rank_on_page", str(tmp_path), PAIRS, LOOP)
    assert status == 0, printed[-3000:]


def test_an_objective_and_a_kernel_embed_in_a_plain_loop():
    torch.manual_seed(0)
    pairs = {
        f"{a}{b}": torch.randn(4, requires_grad=True)
        for a in ("", "ref_")
        for b in ("chosen", "rejected")
    }
    head, hidden = torch.nn.Linear(8, 50, bias=False), torch.randn(5, 8, requires_grad=True)
    names = {**pairs, "hidden": hidden, "lm_head": head, "target": torch.arange(5)}
    exec(EMBEDDED, names)
    logits = hidden.detach() @ head.weight.T
    torch.testing.assert_close(
        names["logprob"], logits.log_softmax(-1)[torch.arange(5), torch.arange(5)]
    )
    assert hidden.grad.abs().min() > 0 and pairs["chosen"].grad.abs().min() > 0


def test_two_heads_are_compared():
    torch.manual_seed(0)
    head, hidden = torch.nn.Linear(8, 50, bias=False), torch.randn(5, 8, requires_grad=True)
    names = {"hidden": hidden, "lm_head": head, "teacher_head": torch.nn.Linear(6, 52, bias=False)}
    names["teacher_hidden"] = torch.randn(5, 6)
    exec(DIVERGENCE, names)
    student = (hidden @ head.weight.T).log_softmax(-1)
    teacher = (names["teacher_hidden"] @ names["teacher_head"].weight.T)[:, :50].log_softmax(-1)
    expected = torch.nn.functional.kl_div(student, teacher, log_target=True, reduction="none").sum(
        -1
    )
    torch.testing.assert_close(names["divergence"], expected)
    assert hidden.grad.abs().min() > 0
