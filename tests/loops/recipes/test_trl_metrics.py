"""Metrics of preference, feedback and reward recipes beside losses: likeliest tokens, logits, and the
lowest and highest of a step.
"""

import pytest
import torch
from accelerate import Accelerator
from burnish.data import Example, encode_preference, encode_unpaired, example
from burnish.loops.batch import collate, completion_mean, token_mean
from burnish.loops.recipes.kto import open_kto
from burnish.loops.recipes.online_dpo import open_online_dpo
from burnish.loops.recipes.preference import open_cpo, open_dpo, open_orpo
from burnish.loops.recipes.reward import open_reward
from burnish.loops.recipes.settings import CPO, DPO, KTO, ORPO, OnlineDPO, Reward
from burnish.loops.rl.policy_gradient import clip_extremes
from burnish.loops.train.step import evaluate, sign_of_extreme
from online import lines
from online import prepare as prepare_online
from tiny import save_model, sums
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

ROWS = sums(7)
FEEDBACK = [
    {"prompt": row["prompt"], "completion": row[kind], "label": kind == "chosen"}
    for row in ROWS
    for kind in ("chosen", "rejected")
]
RECIPES = {"dpo": (open_dpo, DPO), "orpo": (open_orpo, ORPO), "cpo": (open_cpo, CPO)}
SHORT = {"learning_rate": 3e-2, "steps": 6, "batch_size": 5}


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return str(save_model(tmp_path_factory.mktemp("start")))


@torch.no_grad()
def trained_tokens(directory, encode, rows, of_completion):
    """The logits [tokens, V] and the ids [tokens] of the trained tokens of some completions."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    data, _ = encode(rows, tokenizer)
    logits, ids = [], []
    for index in range(len(data)):
        each = example(data, index)
        for place in of_completion(data, index):
            text = torch.tensor([each.prompt + each.completions[place]])
            trained = torch.tensor([False] * (len(each.prompt) - 1) + each.trained[place])
            logits.append(model(text).logits[0, :-1][trained])
            ids.append(text[0, 1:][trained])
    return torch.cat(logits).double(), torch.cat(ids)


def of_pair(directory, place):
    return trained_tokens(directory, encode_preference, ROWS, lambda data, index: [place])


def of_label(directory, label):
    def chosen(data, index):
        return [0] if bool(data[index]["desirable"]) == label else []

    return trained_tokens(directory, encode_unpaired, FEEDBACK, chosen)


@pytest.mark.parametrize("micro_tokens", [1, None])
@pytest.mark.parametrize("recipe", RECIPES)
def test_pairs_have_the_mean_logit_and_the_share_of_likeliest_tokens(
    recipe, micro_tokens, start, tmp_path
):
    opened, settings = RECIPES[recipe]
    run = opened(
        settings(start, ROWS, str(tmp_path), eval_data=ROWS, micro_tokens=micro_tokens, **SHORT)
    )
    run.train()
    chosen, ids = of_pair(tmp_path / "model", 0)
    rejected, _ = of_pair(tmp_path / "model", 1)
    share = (chosen.argmax(-1) == ids).double().mean().item()
    assert 0.1 < share < 1 and run.metrics["eval/mean_token_accuracy"] == pytest.approx(share)
    mean = pytest.approx(chosen.mean().item(), rel=1e-5, abs=1e-5)
    assert run.metrics["eval/logits/chosen"] == mean
    assert run.metrics["eval/logits/rejected"] != mean
    mean = pytest.approx(rejected.mean().item(), rel=1e-5, abs=1e-5)
    assert run.metrics["eval/logits/rejected"] == mean


@pytest.mark.parametrize("micro_tokens", [1, None])
def test_feedback_has_the_mean_logit_of_desirable_and_of_other_completions(
    micro_tokens, start, tmp_path
):
    settings = {"eval_data": FEEDBACK, "micro_tokens": micro_tokens, **SHORT}
    run = open_kto(KTO(start, FEEDBACK, str(tmp_path), **settings))
    run.train()
    for name, label in (("chosen", True), ("rejected", False)):
        logits, _ = of_label(tmp_path / "model", label)
        mean = pytest.approx(logits.mean().item(), rel=1e-5, abs=1e-5)
        assert run.metrics[f"eval/logits/{name}"] == mean


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_backend_that_ranks_no_tokens_has_the_logits_alone(recipe, start):
    opened, settings = RECIPES[recipe]
    run = opened(settings(start, ROWS, backend="fused", steps=1))
    assert "mean_token_accuracy" not in run.losses
    assert {"logits/chosen", "logits/rejected"} <= run.losses.keys()


@pytest.mark.parametrize("micro_tokens", [1, None])
def test_reward_models_log_the_lowest_and_the_highest_score(micro_tokens, start, tmp_path):
    settings = {"eval_data": ROWS, "micro_tokens": micro_tokens, **SHORT}
    run = open_reward(Reward(start, ROWS, str(tmp_path), **settings))
    run.train()
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    data, _ = encode_preference(ROWS, AutoTokenizer.from_pretrained(start))
    scores = []
    for index in range(len(data)):
        each = example(data, index)
        for completion in each.completions:
            ids = torch.tensor([each.prompt + completion])
            scores.append(model(ids).logits.item())
    found = [run.metrics[f"eval/{name}_reward"] for name in ("min", "mean", "max")]
    wanted = [min(scores), sum(scores) / len(scores), max(scores)]
    assert wanted[0] < wanted[2] and found == pytest.approx(wanted, abs=1e-5)


def test_the_kl_of_pairs_is_the_mean_reward_over_beta(tmp_path):
    common = prepare_online(tmp_path / "start")
    settings = {**common, "steps": 4, "epochs_per_rollout": 2, "beta": 0.3}
    open_online_dpo(OnlineDPO(**settings, output=str(tmp_path / "run"))).train()
    first, second, *_ = lines(tmp_path / "run")
    assert first["objective/kl"] == pytest.approx(0, abs=1e-5)
    rewards = (second["rewards/chosen"] + second["rewards/rejected"]) / 2
    assert abs(rewards) > 1e-4
    assert second["objective/kl"] == pytest.approx(rewards / 0.3, rel=1e-4)
    assert second["objective/non_score_reward"] == pytest.approx(-rewards, rel=1e-4)


def stat_of(stats, weigh, batches):
    """What is logged of stats that are columns of the batches."""

    def objective(policy, batch):
        column = batch.columns["x"]
        return {"loss": (column, {name: sign * column for name, sign in stats.items()})}

    policy = torch.nn.Linear(1, 1)
    return evaluate(Accelerator(cpu=True), policy, batches, objective, {"loss": (1.0, weigh)})


def batch_of(*lengths, x):
    examples = [Example([1], [[3] * length], [[True] * length]) for length in lengths]
    return collate(examples, {"x": torch.tensor(x, dtype=torch.float64)})


def test_a_stat_is_an_extreme_by_the_last_part_of_its_name():
    stats = {"a/min": 1.0, "max_a": 1.0, "max/a": 1.0, "minimal": 1.0, "a/max_b": -1.0}
    batches = [
        batch_of(1, 1, x=[4.0, 1.0]),
        collate([], {"x": torch.zeros(0)}),
        batch_of(1, x=[2.5]),
    ]
    found = stat_of(stats, completion_mean, batches)
    assert found == {
        "loss": 2.5, "a/min": 1.0, "max_a": 4.0, "max/a": 2.5, "minimal": 2.5, "a/max_b": -1.0
    }  # fmt: skip
    assert [sign_of_extreme(name) for name in ("a/min", "max_a", "maximum", "a")] == [-1, 1, 0, 0]


def test_an_entry_without_weight_is_no_extreme_and_nothing_has_none():
    def weigh(batch):
        weights = completion_mean(batch)
        return weights._replace(weight=weights.weight * (batch.columns["x"] < 3))

    found = stat_of({"a/max": 1.0, "a/min": 1.0}, weigh, [batch_of(1, 1, x=[4.0, 1.0])])
    assert (found["a/max"], found["a/min"]) == (1.0, 1.0)
    empty = stat_of({"a/max": 1.0}, token_mean, [collate([], {"x": torch.zeros(0)})])
    assert "a/max" not in empty


def test_a_nan_is_told():
    found = stat_of({"a/max": 1.0}, token_mean, [batch_of(1, 1, x=[float("nan"), 1.0])])
    assert found["a/max"] != found["a/max"]


def test_clips_are_counted_within_each_completion():
    batch = batch_of(2, 4, 1, x=[0.0] * 7)
    low = torch.tensor([1.0, 0, 1, 1, 1, 1, 1])
    high = torch.tensor([0.0, 1, 0, 0, 0, 0, 0])
    stats = {"clip_ratio/low": low, "clip_ratio/high": high, "ratio": low}
    found = clip_extremes(stats, batch, unit="tokens")
    assert found.keys() == {"clip_ratio/low/min", "clip_ratio/high/max"}
    assert found["clip_ratio/low/min"].tolist() == [0.5, 0.5, 1, 1, 1, 1, 1]
    assert found["clip_ratio/high/max"].tolist() == [0.5, 0.5, 0, 0, 0, 0, 0]
    whole = clip_extremes({"clip_ratio/low": torch.ones(3)}, batch, unit="sequences")
    assert whole["clip_ratio/low/min"].tolist() == [1, 1, 1]
