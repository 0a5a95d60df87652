"""Reinforcement learning from Python, without a recipe: its loop, and the same numbers as the
recipe's.
"""

import json

import pytest
import torch
from burnish.loops import Files, LocalSource, RolloutBuffer, VLLMServer
from burnish.loops.recipes.grpo import open_grpo
from burnish.loops.recipes.settings import GRPO
from burnish.loops.rollouts.sample import Sample, VersionSpan
from burnish.objectives import group_advantage
from forked import run_forked
from rl_loop import COMPLETIONS, GROUPS, PROMPTS, STEPS, TOKENS, train
from tiny import save_model, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm_fake import Fake


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("start") / "model")


@pytest.fixture(scope="module")
def looped(directory):
    return train(directory, LocalSource)


def autocasting(policy, tokenizer):
    return LocalSource(policy, tokenizer, context=lambda: torch.autocast("cpu", torch.bfloat16))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_loop_gives_the_numbers_of_the_recipe(directory, dtype, tmp_path, monkeypatch, request):
    """The same samples, rewards and steps: metrics and weights are the same bits."""
    if dtype == "float32":
        metrics, policy = request.getfixturevalue("looped")
    else:
        metrics, policy = train(directory, autocasting, precision="bf16")
    monkeypatch.setattr("burnish.loops.runs.training.draw_curves", lambda metrics, picture: None)
    config = GRPO(
        model=str(directory),
        data=str(write_rows(tmp_path / "prompts.jsonl", PROMPTS)),
        output=str(tmp_path / "run"),
        rewards={"rl_loop:even": 1.0},
        prompts_per_rollout=GROUPS,
        group_size=COMPLETIONS,
        max_tokens=TOKENS,
        steps=STEPS,
        micro_tokens=64,
        learning_rate=1e-3,
        shuffle=False,
        show_every=0,
        dtype=dtype,
    )
    open_grpo(config).train()
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    samples = [
        json.loads(line) for line in (tmp_path / "run/samples.jsonl").read_text().splitlines()
    ]
    assert [s["tokens"] for s in samples] == [s.tokens for step in metrics for s in step["samples"]]
    assert [line["reward"] for line in lines] == [step["reward"] for step in metrics]
    assert [line["loss"] for line in lines] == [step["loss"] for step in metrics]
    assert [line["grad_norm"] for line in lines] == [step["grad_norm"] for step in metrics]
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "run/model").state_dict()
    assert all(
        torch.equal(weight, trained[name]) for name, weight in policy.plain.state_dict().items()
    )


@pytest.mark.parametrize(
    "alone", [True, False], ids=["its address alone", "with what is known of it"]
)
def test_a_server_takes_the_place_of_the_policys_own_source(directory, tmp_path, alone):
    fake = Fake(AutoTokenizer.from_pretrained(directory))
    fake.root, fake.config["model_config"]["max_model_len"] = str(directory), 256

    def server(policy, tokenizer):
        if alone:
            return VLLMServer(fake.url)
        known = {"config": policy.plain.config, "tokenizer": tokenizer, "dtype": "float32"}
        return VLLMServer(fake.url, updates=Files(tmp_path / "weights"), **known)

    try:
        metrics, _ = train(directory, server)
    finally:
        fake.close()
    published = [
        body["weight_version"].split("@")[0]
        for path, body in fake.calls
        if path == "/finish_weight_update"
    ]
    assert published == ["0", "1", "2"]
    assert [sample.task for step in metrics for sample in step["samples"]][::COMPLETIONS] == list(
        range(12)
    )
    assert all(step["skipped"] == 0 < step["grad_norm"] for step in metrics)


def test_two_ranks_take_the_steps_of_one(directory, looped):
    outcomes = run_forked(2, "rl_loop", str(directory))
    assert [status for status, _ in outcomes] == [0, 0], outcomes
    for line, step in zip(json.loads(outcomes[0][1].splitlines()[-1]), looped[0], strict=True):
        assert line == pytest.approx({name: step[name] for name in line}, rel=1e-5, abs=1e-6)


def test_what_must_not_be_trained_on_is_masked():
    def sample(index, finish="stop"):
        return Sample(
            0,
            index,
            [5],
            [6, 7],
            [True, True],
            [-1.0, -1.0],
            [VersionSpan(0, 0, 2)],
            finish,
            text=str(index),
        )

    def fails_at_one(completion):
        if completion == "1":
            raise ValueError("no such completion")
        return float(completion)

    rollout = RolloutBuffer([[sample(0), sample(1), sample(2, "aborted"), sample(3)]])
    scores = rollout.score([fails_at_one])
    assert scores.total.isnan().tolist() == [False, True, True, False]
    rollout["advantage"] = group_advantage(scores.total, scores.group)[rollout.sequence]
    assert rollout.sequence.tolist() == [0, 0, 3, 3]
    (batch,) = rollout.micro_batches(100)
    assert batch.sequences == 2
    assert batch.columns["advantage"].tolist() == pytest.approx(
        [-0.7071] * 2 + [0.7071] * 2, abs=1e-4
    )
