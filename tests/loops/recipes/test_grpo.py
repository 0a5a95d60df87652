"""GRPO, RLOO and their relatives: what each variant computes, logs and refuses; and death at any
step.
"""

import asyncio
import gc
import json
from dataclasses import replace
from math import exp, isfinite
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from burnish.data import Example
from burnish.loops.batch import collate
from burnish.loops.cli import main
from burnish.loops.recipes.grpo import VARIANTS, advantages, grpo_losses, open_grpo
from burnish.loops.recipes.settings import GRPO, RLOO
from burnish.loops.rewards import RewardFunction
from burnish.loops.rl.buffer import RolloutBuffer
from burnish.loops.rl.policy_gradient import SamplerMismatch, corrections, rollout_tensors
from burnish.loops.rollouts.sample import Sample
from burnish.objectives import effective_sample_size
from forked import run_forked
from online import Killed, dying_in_step, lines, prepare, stored
from safetensors.torch import load_file

LOGGED = {
    "loss", "grad_norm", "learning_rate", "tokens", "seconds", "skipped", "entropy", "reward", "reward_std",
    "frac_reward_zero_std", "rewards/even/mean", "rewards/even/std", "completions/mean_length",
    "completions/min_length", "completions/max_length", "completions/clipped_ratio", "age/mean", "age/max",
    "sampling/logp_difference", "sampling/logp_difference/max", "sampling/importance_ratio",
    "sampling/importance_ratio/min", "sampling/importance_ratio/max", "sampling/effective_sample_size",
}  # fmt: skip


@pytest.fixture(scope="module")
def common(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("start"))


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_takes_two_steps_and_logs_what_it_should(variant, common, tmp_path):
    open_grpo(GRPO(**common, output=str(tmp_path / "run"), variant=variant)).train()
    first, last = lines(tmp_path / "run")
    assert first.keys() >= LOGGED
    assert first["grad_norm"] > 0
    assert first["skipped"] == last["skipped"] == 0
    # The sampler is the policy itself, whatever rows it computes.
    assert first["sampling/logp_difference/max"] < 1e-4
    assert first["sampling/effective_sample_size"] == pytest.approx(1, abs=1e-4)
    assert last["reward"] != first["reward"]
    assert [sample["task"] for sample in stored(tmp_path / "run")][:4] == [0] * 4
    if variant == "cispo":
        assert "cispo_clip_ratio" in first
    elif variant not in ("sapo", "vespo"):
        assert {"clip_ratio/low", "clip_ratio/high", "clip_ratio/region", "ratio"} <= first.keys()


def test_rloo_is_a_recipe_of_the_command_line(common, tmp_path):
    fields = {**common, "output": str(tmp_path / "run"), "group_size": 2}
    flags = [
        f"--{name}={json.dumps(value) if isinstance(value, dict) else value}"
        for name, value in fields.items()
    ]
    assert main(["rloo", *flags]) == 0
    first, last = lines(tmp_path / "run")
    assert {"completion_surrogate", "kl"} <= first.keys()
    assert first["kl"] == pytest.approx(0, abs=1e-6)
    assert last["kl"] > 1e-6


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"rewards": {}},
            "rewards: none is named, .* give at least one, such as --rewards '{exact_match: 1.0}'",
        ),
        ({"rewards": {"exact": 1.0}}, "exact_match"),
        (
            {"group_size": 1},
            "group_size: .* wanted >= 2, got 1; ppo, .* learn from single completions",
        ),
        ({"temperature": 0.0}, "temperature: at 0 every completion of a prompt is the same"),
        ({"max_tokens": 0}, "max_tokens: must be > 0, got 0"),
        ({"top_p": 0.9}, "top_p, top_k, min_p: .* set a correction, and leave old_logprobs out"),
        ({"top_k": 5, "old_logprobs": "recomputed"}, "top_p, top_k, min_p: "),
        ({"min_p": 0.1}, "top_p, top_k, min_p: "),
        (
            {"repetition_penalty": 1.1},
            "repetition_penalty: tokens are sampled from another distribution .* set a correction",
        ),
        ({"stop": ["a", ""]}, "stop: an empty word would end every completion"),
        (
            {"correction": "tis", "old_logprobs": "sampled"},
            "correction: tis .* leave old_logprobs out",
        ),
        ({"correction": "tis", "variant": "gspo"}, "tis weighs tokens, and gspo has one entry per"),
        (
            {"correction": "icepop", "correction_low": 9.0},
            "correction_high: wanted low <= high, got 9.0 and 5.0",
        ),
        (
            {"reference": "precompute"},
            "reference: must be one of auto, copy, adapters_off, got 'precompute'",
        ),
        ({"beta": -1.0}, "beta: must be >= 0"),
        ({"variant": "rloo", "scale": "group"}, "scale: .* use batch or none"),
        (
            {"reward_aggregation": "normalize", "beta": 0.1, "kl_as": "reward"},
            "reward_aggregation: normalize",
        ),
        (
            {"use_bias_correction_kl": True, "kl_as": "reward"},
            "use_bias_correction_kl: is for the diverg.* loss",
        ),
        (
            {"beta": 0.1, "kl": "k1"},
            "kl: k1 as a loss, here kl, .* use k2 or k3, or .*kl_as: reward",
        ),
        (
            {"loss": {"clipped_surrogate": 1, "kl_estimate": {"kind": "k1", "coefficient": 0.1}}},
            "here kl_estimate, ",
        ),
        (
            {"variant": "gspo", "weighting": "token_mean"},
            "weighting: token_mean .* gspo has one entry per completion",
        ),
        (
            {
                "loss": {"gmpo": 1, "clipped_surrogate": {"weighting": "token_mean"}},
                "weighting": "length_normalized",
            },
            "gmpo has one entry per completion; clipped_surrogate has its own; leave it out",
        ),
        ({"steps": 0}, "steps: must be > 0, got 0"),
        ({"minibatches": 5}, "minibatches: the 4 prompts of a rollout can't be shared by 5 steps"),
        ({"loss_kwargs": {"clip_hi": 0.2}}, "loss: no loss of this mix has 'clip_hi'"),
        ({"loss": "clipped"}, "did you mean 'clipped_surrogate'"),
        ({"max_staleness": -1}, "max_staleness"),
    ],
)
def test_wrong_settings_are_refused_before_a_model_is_loaded(
    config, message, common, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        "burnish.loops.runs.context.load_model", lambda config: pytest.fail("the model was loaded")
    )
    with pytest.raises(ValueError, match=message):
        open_grpo(GRPO(**{**common, "output": str(tmp_path / "run"), **config})).train()


@pytest.mark.parametrize(
    "config",
    [
        {"kl": "k1"},  # nothing is pulled, it is only measured
        {"kl": "k1", "beta": 0.1, "kl_as": "reward"},
        {"loss": {"clipped_surrogate": 1, "kl_estimate": {"kind": "k1", "coefficient": 0.0}}},
        {
            "loss": {"gspo": 1, "nll": 0.1},
            "loss_kwargs": {"clip_low": 0.1, "clip_high": 0.1},
            "weighting": "token_mean",
        },
        {"variant": "gspo", "beta": 0.1, "weighting": "token_mean"},
    ],
    ids=str,
)
def test_a_measuring_estimator_and_a_weighting_with_something_to_weigh_are_taken(config):
    assert grpo_losses(GRPO(model="", data="", output="", **config))


def test_a_reward_that_reads_a_missing_column_is_refused_before_a_model_is_loaded(
    common, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        "burnish.loops.runs.context.load_model", lambda config: pytest.fail("the model was loaded")
    )
    rewards = {"exact_match": {"column": "solution"}}
    with pytest.raises(ValueError, match="'solution'"):
        open_grpo(GRPO(**{**common, "output": str(tmp_path / "run"), "rewards": rewards})).train()


def weights(directory):
    return (directory / "model/model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("config", "alike", "masked"),
    [
        ({"rewards": {"online:alike": 1.0}}, 4, 0),
        ({"rewards": {"online:unknown": 1.0}}, None, 15 / 16),
        # of these none happens to end
        ({"mask_truncated": True, "max_tokens": 1, "seed": 2}, None, 1),
    ],
    ids=["alike", "without a score", "cut"],
)
def test_a_rollout_that_teaches_nothing_takes_no_step(config, alike, masked, common, tmp_path):
    """Skipped and counted, no NaN, and weights as they were, bit for bit."""
    steps = {"steps": 2, "epochs_per_rollout": 2, "old_logprobs": "recomputed"}
    open_grpo(GRPO(**{**common, **steps, **config, "output": str(tmp_path / "run")})).train()
    for line in lines(tmp_path / "run"):
        assert line["skipped"] == 1
        assert line["grad_norm"] == line["loss"] == 0
        assert alike in (None, line["zero_std_groups"])
        assert line["completions/masked_ratio"] == masked
    # Saved again, the start is what was saved.
    assert weights(tmp_path / "run") == (Path(common["model"]) / "model.safetensors").read_bytes()


def test_momentum_does_not_move_the_weights_where_no_reward_does(common, tmp_path):
    config = GRPO(
        **{**common, "output": str(tmp_path / "three"), "rewards": {"online:alike_in_the_end": 1.0}}
    )
    open_grpo(replace(config, steps=3)).train()
    open_grpo(replace(config, output=str(tmp_path / "two"))).train()
    assert [line["skipped"] for line in lines(tmp_path / "three")] == [0, 0, 1]
    assert weights(tmp_path / "three") == weights(tmp_path / "two")


def test_the_reference_pulls_where_no_reward_does(common, tmp_path):
    rewards = {"online:alike_in_the_end": 1.0}
    open_grpo(
        GRPO(**{**common, "output": str(tmp_path), "rewards": rewards, "steps": 3, "beta": 0.1})
    ).train()
    last = lines(tmp_path)[-1]
    assert last["zero_std_groups"] == 4
    assert last["loss"] == pytest.approx(0.1 * last["kl"]) != 0
    assert last["skipped"] == 0 < last["grad_norm"]


@pytest.mark.parametrize("correction", ["tis", "sequence_mask"])
def test_answers_drawn_from_a_part_of_the_distribution_are_corrected_for(
    correction, common, tmp_path
):
    """What the sampler left out has no log-prob there, and is not drawn: nothing is NaN."""
    part = {
        "top_k": 5,
        "top_p": 0.9,
        "old_logprobs": "recomputed",
        "epochs_per_rollout": 2,
        "correction": correction,
    }
    open_grpo(GRPO(**{**common, **part, "output": str(tmp_path)})).train()
    # of 258 tokens, five remain
    assert all(min(sample["logprobs"]) > -3 for sample in stored(tmp_path))
    for line in lines(tmp_path):
        assert all(isfinite(value) for value in line.values())
        assert line["sampling/logp_difference"] > 3
        # six such ratios are far below its bounds
        assert line["skipped"] == (correction == "sequence_mask")


def test_dynamic_sampling_looks_beyond_groups_without_variance(common, tmp_path):
    config = {
        "dynamic_sampling": True,
        "group_size": 2,
        "max_tokens": 1,
        "steps": 1,
    }  # two answers of one token are often alike
    open_grpo(GRPO(**{**common, **config, "output": str(tmp_path / "run")})).train()
    (line,) = lines(tmp_path / "run")
    passed_over = line["groups_passed_over"]
    assert passed_over > 0
    assert line["zero_std_groups"] == 0
    assert line["tokens"] == 8
    # all are on record
    assert [s["task"] for s in stored(tmp_path / "run")][::2] == list(range(4 + int(passed_over)))


def test_dynamic_sampling_gives_up_where_nothing_varies(common, tmp_path, caplog):
    config = {"dynamic_sampling": True, "steps": 1, "rewards": {"online:alike": 1.0}}
    open_grpo(GRPO(**{**common, **config, "output": str(tmp_path / "run")})).train()
    assert "only 0 of 4 groups have completions of different reward, 32 do not" in caplog.text
    assert lines(tmp_path / "run")[0]["skipped"] == 1


# the dead leave files open
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "settings",
    [{}, {"dynamic_sampling": True, "group_size": 2, "max_tokens": 1}],
    ids=["plain", "dynamic"],
)
def test_death_in_every_step_and_resumption_give_the_weights_of_an_undisturbed_run(
    settings, common, tmp_path
):
    """Two steps per rollout, so that every other one begins with a rollout at hand; samples are on
    record once.
    """
    several = {
        "steps": 5,
        "epochs_per_rollout": 2,
        "old_logprobs": "recomputed",
        "save_every": 1,
        "beta": 0.1,
        "minibatches": 1,
        **settings,
    }
    config = GRPO(**{**common, **several, "output": str(tmp_path / "undisturbed")})
    open_grpo(config).train()
    at = tmp_path / "disturbed"
    disturbed = replace(config, output=str(at), resume=True)
    # each process takes a step, and dies in the next, whose answers are lost
    for _ in range(config.steps - 1):
        with pytest.raises(Killed), dying_in_step(2):
            open_grpo(disturbed).train()
        gc.collect()
    open_grpo(disturbed).train()
    assert weights(at) == weights(tmp_path / "undisturbed")
    assert stored(at) == stored(tmp_path / "undisturbed")
    if settings:
        assert sum(line["groups_passed_over"] for line in lines(at)) > 0
    timed = {"seconds": 0, "sampling/seconds": 0}
    both = zip(lines(at), lines(tmp_path / "undisturbed"), strict=True)
    assert all({**one, **timed} == {**other, **timed} for one, other in both)


def rollout(rewards, lengths, groups):
    samples = [
        Sample(
            task,
            index,
            [1],
            [5] * length,
            [True] * length,
            [0.0] * length,
            [],
            "stop",
            rewards={"right": reward},
        )
        for index, (reward, task, length) in enumerate(zip(rewards, groups, lengths, strict=True))
    ]
    found = RolloutBuffer(samples)
    found.score([RewardFunction("right", None)])
    return found


def test_a_penalty_in_the_reward_is_that_of_the_whole_answer():
    found = rollout([1.0, 0.0, 2.0, 2.0], [2, 1, 1, 3], [5, 5, 9, 9])
    found.columns = {"old_logp": -torch.arange(7.0), "ref_logp": -torch.ones(7)}
    config = RLOO(model="", data="", output="", beta=0.5)
    # k1 summed: 1 + 0, -1, -2, -3 - 4 - 5; the rewards less half of it: 0.5, 0.5, 3, 8
    expected = torch.tensor([0, 0, 0, -5, 5, 5, 5.0], dtype=torch.float64)
    torch.testing.assert_close(advantages(found, config=config)["advantage"], expected)


CORRECTED = {
    # w of the four tokens of two answers: (1, -0.5), (-1, 0.9); what multiplies each
    "tis": [2.0, exp(-0.5), exp(-1), 2.0],
    "icepop": [exp(1), exp(-0.5), 0, exp(0.9)],
    "decoupled": [exp(1), exp(-0.5), exp(-1), exp(0.9)],
    "sequence_tis": [exp(0.5), exp(0.5), exp(-0.1), exp(-0.1)],
    "sequence_mis": [exp(0.5), exp(0.5), exp(-0.1), exp(-0.1)],
    "sequence_mask": [1, 1, 1, 1],
    "geometric_mask": [0, 0, 0, 0],
}


@pytest.mark.parametrize("kind", CORRECTED)
def test_a_correction_multiplies_the_loss_of_tokens_and_of_answers(kind):
    batch = collate(
        [Example([3], [[5, 6], [7, 8]], [[True, True]] * 2)],
        {
            "old_logp": torch.tensor([-1.0, -2, -2, -1]),
            "sampled_logp": torch.tensor([-2.0, -1.5, -1, -1.9]),
            "advantage": torch.tensor([3.0, 3, -1, -1]),
        },
    )

    def read(policy, batch):
        return {
            ("tokens", "logp"): batch.columns["old_logp"],
            ("tokens", "sequence"): batch.sequence,
        }

    expected = -batch.columns["advantage"] * torch.tensor(CORRECTED[kind])
    config = GRPO(model="", data="", output="", old_logprobs="recomputed", correction=kind)
    for variant in ("grpo", *(["gspo"] if kind not in ("tis", "icepop", "decoupled") else [])):
        (term,) = grpo_losses(replace(config, variant=variant)).values()
        loss, _ = term(rollout_tensors(read, config, None, batch), batch)
        torch.testing.assert_close(loss, expected if variant == "grpo" else expected[::2])
    narrow = replace(config, correction_high=1.5)
    if kind != "decoupled":
        narrow = replace(narrow, correction_low=0.95)
    weight = corrections(
        narrow, batch.columns["old_logp"], batch.columns["sampled_logp"], batch.sequence
    )
    assert weight.max() <= 1.5


def test_held_out_answers_are_judged_and_leave_the_run_as_it_is(common, tmp_path):
    config = GRPO(**common, output=str(tmp_path / "plain"), save_every=1)
    open_grpo(config).train()
    open_grpo(
        replace(config, output=str(tmp_path / "judged"), eval_data=common["data"], eval_every=1)
    ).train()
    logged = lines(tmp_path / "judged")
    assert [line["step"] for line in logged] == [0, 1, 2]
    assert all(0 <= line["eval/rewards/even/mean"] <= 1 for line in logged)
    assert logged[0]["eval/reward"] == logged[0]["eval/rewards/even/mean"]
    assert weights(tmp_path / "judged") == weights(tmp_path / "plain")
    assert len(stored(tmp_path / "judged")) == 2 * 4 * 4


def test_a_run_in_a_notebook_judges_held_out_answers_too(common, tmp_path):
    """Where an event loop runs already."""

    async def in_a_notebook():
        return open_grpo(
            GRPO(**common, output=str(tmp_path / "inside"), eval_data=common["data"])
        ).train()

    inside = asyncio.run(in_a_notebook())
    outside = open_grpo(
        GRPO(**common, output=str(tmp_path / "outside"), eval_data=common["data"])
    ).train()
    assert inside["eval/reward"] == outside["eval/reward"]
    assert weights(tmp_path / "inside") == weights(tmp_path / "outside")


def test_answers_drawn_while_training_are_of_bounded_age_and_on_record_once(common, tmp_path):
    open_grpo(
        GRPO(**{**common, "steps": 4, "max_staleness": 1}, output=str(tmp_path / "run"))
    ).train()
    logged = lines(tmp_path / "run")
    assert logged[0]["age/max"] == 0
    assert max(line["age/max"] for line in logged) == 1
    assert [sample["task"] for sample in stored(tmp_path / "run")][::4] == list(range(16))


def test_two_ranks_end_with_the_weights_of_one(common, tmp_path):
    """One of them samples and judges; held-out answers too."""
    fields = {
        **common,
        "dtype": "float64",
        "epochs_per_rollout": 2,
        "old_logprobs": "recomputed",
        "beta": 0.1,
        "steps": 4,
    }
    fields |= {"eval_data": common["data"], "micro_tokens": 60}
    open_grpo(GRPO(**fields, output=str(tmp_path / "one"))).train()
    outcomes = run_forked(2, "online", {**fields, "output": str(tmp_path / "two")})
    assert [status for status, _ in outcomes] == [0, 0], outcomes
    one, two = (load_file(tmp_path / name / "model/model.safetensors") for name in ("one", "two"))
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, rtol=1e-6, atol=1e-6)
    assert stored(tmp_path / "two") == stored(tmp_path / "one")
    measured = zip(lines(tmp_path / "two"), lines(tmp_path / "one"), strict=True)
    for line, expected in measured:
        untimed = {name: value for name, value in expected.items() if "seconds" not in name}
        assert {name: line[name] for name in untimed} == pytest.approx(untimed, rel=1e-5, abs=1e-5)


def test_the_effective_sample_size_is_that_of_all_micro_batches():
    start, sampled = torch.randn(9, dtype=torch.float64), torch.randn(9, dtype=torch.float64)
    distance = SamplerMismatch(Accelerator())
    for part in (slice(0, 4), slice(4, 4), slice(4, 9)):
        distance.measure(start[part], sampled[part])
    found = distance.report()
    ratio = (start - sampled).exp()
    assert found["sampling/effective_sample_size"] == pytest.approx(
        effective_sample_size(ratio).item() / 9
    )
    assert found["sampling/importance_ratio/min"] == pytest.approx(ratio.min().item())
    assert found["sampling/importance_ratio/max"] == pytest.approx(ratio.max().item())
    assert found["sampling/logp_difference/max"] == pytest.approx(
        (start - sampled).abs().max().item()
    )
    assert distance.report() == {}
