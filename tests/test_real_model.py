"""SmolLM2-135M-Instruct on reasoning-gym questions: `burnish sft` and `burnish dpo` improve it on
held-out ones.
"""

import json

import pytest
import torch
from burnish.benchmarks.real_model import (
    TASKS,
    Unavailable,
    conversations,
    preference_pairs,
    smollm2,
    write_jsonl,
)
from burnish.data import Tokenization, encode_preference, encode_supervised, example
from burnish.loops import Policy, collate
from burnish.loops.cli import main
from transformers import AutoModelForCausalLM, AutoTokenizer


@pytest.fixture(scope="module")
def model():
    try:
        return smollm2()
    except Unavailable as reason:
        pytest.skip(str(reason))


def train(recipe, directory, model, rows, counts, *flags, tasks=TASKS):
    """The first and the last line of the metrics of a run on this many pairs, for training and held
    out.
    """
    trained, held_out = counts
    data = write_jsonl(directory / "data.jsonl", rows(preference_pairs(trained, 0, tasks)))
    held_out = write_jsonl(
        directory / "held_out.jsonl", rows(preference_pairs(held_out, 1_000_000, tasks))
    )
    arguments = [recipe, "--model", str(model), "--data", str(data), "--eval_data", str(held_out)]
    arguments += ["--output", str(directory / "run"), "--micro_tokens", "2048", *flags]
    assert main(arguments) == 0
    lines = [
        json.loads(line) for line in (directory / "run/metrics.jsonl").read_text().splitlines()
    ]
    return lines[0], lines[-1]


def reloaded(directory, encode, batch_size=8):
    """Log-probs of every held-out batch under the model that a run has saved, and the batches."""
    place = directory / "run/model"
    tokenizer, policy = (
        AutoTokenizer.from_pretrained(place),
        Policy(AutoModelForCausalLM.from_pretrained(place)),
    )
    rows, _ = encode(str(directory / "held_out.jsonl"), tokenizer, Tokenization(max_length=1024))
    starts = range(0, len(rows), batch_size)
    batches = [
        collate([example(rows, i) for i in range(k, min(k + batch_size, len(rows)))])
        for k in starts
    ]
    with torch.no_grad():
        return [policy(batch).logprob for batch in batches], batches


def turned(pairs):
    """A word that is spelled backward is chosen over the word itself."""
    for pair in pairs:
        word = pair["chosen"][0]["content"][::-1]
        yield {**pair, "rejected": [{"role": "assistant", "content": word}]}


@pytest.mark.slow
def test_two_steps_of_sft_lower_the_held_out_loss_and_the_model_reloads_with_it(model, tmp_path):
    flags = [
        "--steps",
        "2",
        "--batch_size",
        "4",
        "--learning_rate",
        "1e-4",
        "--schedule",
        "constant",
    ]
    before, after = train("sft", tmp_path, model, conversations, (8, 4), *flags)
    assert after["eval/nll"] < 0.85 * before["eval/nll"]  # 0.77 of it was measured
    logprobs, _ = reloaded(tmp_path, encode_supervised)
    assert float(-torch.cat(logprobs).mean()) == pytest.approx(after["eval/nll"], rel=1e-5)


@pytest.mark.slow
def test_dpo_tells_held_out_pairs_apart_and_the_model_reloads_with_the_same_log_probs(
    model, tmp_path
):
    flags = ["--steps", "4", "--batch_size", "6", "--learning_rate", "1e-5", "--schedule", "linear"]
    before, after = train(
        "dpo", tmp_path, model, turned, (24, 8), *flags, tasks=("spell_backward",)
    )
    assert before["eval/dpo"] == pytest.approx(float(torch.tensor(2.0).log()))
    assert after["eval/rewards/accuracies"] >= 0.9  # chance is 0.5; all 8 were measured
    assert after["eval/dpo"] < 0.5
    assert after["eval/rewards/margins"] > 0.5
    answers = [
        torch.zeros(batch.sequences).index_add(0, batch.sequence, logprob)
        for logprob, batch in zip(*reloaded(tmp_path, encode_preference), strict=True)
    ]
    assert float(torch.cat(answers)[0::2].mean()) == pytest.approx(
        after["eval/logps/chosen"], rel=1e-5
    )
