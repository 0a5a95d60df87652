"""SmolLM2-135M-Instruct on reasoning-gym questions: `burnish sft` and `burnish dpo` improve it on held-out ones."""

import json
import os

import pytest
import torch
from burnish.benchmarks.real_model import Unavailable, conversations, preference_pairs, smollm2, write_jsonl
from burnish.data import Tokenization, encode_preference, example
from burnish.loops import Policy, collate
from burnish.loops.cli import main
from transformers import AutoModelForCausalLM, AutoTokenizer

TRAINED, HELD_OUT = 160, 48


@pytest.fixture(scope="module")
def model():
    try:
        return smollm2()
    except Unavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module", autouse=True)
def both_cores():
    threads = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    yield
    torch.set_num_threads(threads)


def train(recipe, directory, model, rows, *flags):
    data = write_jsonl(directory / "data.jsonl", rows(preference_pairs(TRAINED, seed=0)))
    held_out = write_jsonl(directory / "held_out.jsonl", rows(preference_pairs(HELD_OUT, seed=1_000_000)))
    arguments = [recipe, "--model", str(model), "--data", str(data), "--eval_data", str(held_out)]
    arguments += ["--output", str(directory / "run"), "--batch_size", "8", "--micro_tokens", "2048", *flags]
    assert main(arguments) == 0
    lines = [json.loads(line) for line in (directory / "run/metrics.jsonl").read_text().splitlines()]
    return lines[0], lines[-1]


def test_sft_lowers_the_held_out_loss(model, tmp_path):
    flags = ["--steps", "8", "--learning_rate", "5e-5"]
    before, after = train("sft", tmp_path, model, conversations, *flags)
    assert after["eval/nll"] < 0.8 * before["eval/nll"]


@pytest.fixture(scope="module")
def dpo(model, tmp_path_factory):
    directory = tmp_path_factory.mktemp("dpo")
    flags = ["--steps", "16", "--learning_rate", "1e-5", "--schedule", "linear"]
    return directory, train("dpo", directory, model, lambda pairs: pairs, *flags)


def test_dpo_tells_held_out_pairs_apart(dpo):
    _, (before, after) = dpo
    assert before["eval/dpo"] == pytest.approx(float(torch.tensor(2.0).log()))
    assert after["eval/rewards/accuracies"] >= 0.65  # chance is 0.5; 34 of 48 were measured, two may flip by rounding
    assert after["eval/dpo"] < 0.6
    assert after["eval/rewards/margins"] > 0.25


def test_the_trained_model_reloads_with_the_same_log_probs(dpo):
    directory, (_, after) = dpo
    place = directory / "run/model"
    tokenizer = AutoTokenizer.from_pretrained(place)
    policy = Policy(AutoModelForCausalLM.from_pretrained(place))
    pairs, _ = encode_preference(str(directory / "held_out.jsonl"), tokenizer, Tokenization(max_length=1024))
    with torch.no_grad():
        batches = [collate([example(pairs, i) for i in range(k, k + 8)]) for k in range(0, HELD_OUT, 8)]
        answers = [
            torch.zeros(batch.sequences).index_add(0, batch.sequence, policy(batch).logprob) for batch in batches
        ]
    chosen = torch.cat(answers)[0::2].mean()
    assert float(chosen) == pytest.approx(after["eval/logps/chosen"], rel=1e-5)
