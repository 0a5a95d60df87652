"""`mean_token_accuracy` of sft: the share of trained tokens that are the model's likeliest ones."""

import json

import pytest
import torch
from burnish.data import encode_supervised, example
from burnish.loops.recipes.settings import SFT
from burnish.loops.recipes.sft import open_sft
from forked import run_forked
from tiny import save_model, sums, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer

ROWS = [{"messages": pair["prompt"] + pair["chosen"]} for pair in sums(10)]


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return str(save_model(tmp_path_factory.mktemp("start")))


@torch.no_grad()
def accuracy_of(directory, rows):
    """The share of trained tokens, over all rows, that have the highest logit."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    data, _ = encode_supervised(rows, tokenizer)
    right = []
    for index in range(len(data)):
        each = example(data, index)
        ids = torch.tensor([each.prompt + each.completions[0]])
        likeliest = model(ids).logits[0, :-1].argmax(-1) == ids[0, 1:]
        trained = torch.tensor([False] * (len(each.prompt) - 1) + each.trained[0])
        right.append(likeliest[trained])
    return torch.cat(right).double().mean().item()


@pytest.mark.parametrize("micro_tokens", [1, None])
def test_it_is_the_share_of_trained_tokens_with_the_highest_logit(micro_tokens, start, tmp_path):
    settings = {"learning_rate": 3e-2, "steps": 12, "batch_size": 5, "micro_tokens": micro_tokens}
    run = open_sft(
        SFT(model=start, data=ROWS, eval_data=ROWS, output=str(tmp_path / "run"), **settings)
    )
    run.train()
    wanted = accuracy_of(tmp_path / "run/model", ROWS)
    assert 0.1 < wanted < 1 and run.metrics["eval/mean_token_accuracy"] == pytest.approx(wanted)
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert all(0 <= line["mean_token_accuracy"] <= 1 for line in lines if line["step"])


def test_a_backend_that_ranks_no_tokens_leaves_it_out(start, monkeypatch):
    run = open_sft(SFT(model=start, data=ROWS, backend="fused", steps=1))
    assert "mean_token_accuracy" not in run.losses


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 2])
def test_it_is_the_same_on_two_ranks_under_autocast(shards, start, tmp_path):
    data = write_rows(tmp_path / "rows.jsonl", ROWS)
    for status, printed in run_forked(
        2, "rank_ended", start, str(data), str(tmp_path / "run"), shards
    ):
        assert status == 0, printed[-3000:]
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    alone = open_sft(SFT(model=start, data=str(data), dtype="bfloat16", batch_size=4, steps=2))
    for step, line in zip(alone, lines[-2:], strict=True):
        assert line["mean_token_accuracy"] == pytest.approx(step.metrics["mean_token_accuracy"])
