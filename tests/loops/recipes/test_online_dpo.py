"""Online DPO: pairs of the policy's own answers."""

from dataclasses import replace

import pytest
from burnish.loops.recipes.online_dpo import best_and_worst, open_online_dpo
from burnish.loops.recipes.settings import OnlineDPO
from burnish.loops.rewards import RewardFunction
from burnish.loops.rewards.table import reward_metrics
from burnish.loops.rl.buffer import RolloutBuffer
from burnish.loops.rollouts.sample import Context, Sample
from burnish.loops.train.mix import PAIR_LOSSES
from online import lines, prepare

UNKNOWN = "error"  # a failed reward
TAUGHT = ("distillation", "tdpo1", "tdpo2")  # by a model, which this recipe has not
NEED = {
    "simpo": {"gamma": 0.5},
    "alpha_po": {"gamma": 0.5, "alpha": 0.25},
    "exo": {"label_smoothing": 0.1},
}
NEED |= {
    "discopop": {"tau": 0.05},
    "robust_dpo": {"label_smoothing": 0.1},
    "label_smoothed_nll": {"label_smoothing": 0.1},
    "dpo_positive": {"penalty": 5.0},
    "length_regularized_dpo": {"alpha": 0.02},
}


@pytest.fixture(scope="module")
def common(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("start"))


def rollout(rewards, tasks, finish=None):
    samples = [
        Sample(
            task,
            i,
            [1],
            [5],
            [True],
            [0.0],
            [],
            (finish or {}).get(i, "stop"),
            rewards={"right": rewards[i]},
        )
        for i, task in enumerate(tasks)
    ]
    found = RolloutBuffer(samples)
    found.score([RewardFunction("right", None)])
    return found


def test_a_pair_is_the_best_and_the_worst_of_a_group_and_ties_make_none():
    found = rollout(
        [0.1, 0.9, 0.5, UNKNOWN, 1.0, 1.0, 0.3, UNKNOWN, 0.7, 0.2], [0, 0, 0, 0, 1, 1, 2, 2, 3, 3]
    )
    assert best_and_worst(found, penalty=0.0) == [[[1, 0]], [[8, 9]]]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"prompt": [2]}, "the conversations of task 0 begin with different prompts"),
        ({"further": [Context([2], [5], [True], [0.0], [])]}, "several contexts"),
    ],
)
def test_conversations_that_are_no_two_completions_of_one_prompt_make_no_pair(change, says):
    samples = rollout([0.1, 0.9], [0, 0]).samples
    samples[1] = replace(samples[1], **change)
    with pytest.raises(ValueError, match=f"online_dpo: .*{says}.* two completions of one prompt"):
        best_and_worst(RolloutBuffer(samples), penalty=0.0)


@pytest.mark.parametrize("noise", [5e-17, 1e-9])
def test_rewards_that_differ_by_rounding_are_a_tie(noise):
    """0.1 + 0.2 is not 0.3, and a pair of the two would be trained on as any other."""
    found = rollout([0.3, 0.3 + noise, 0.3, 0.3 + 1e-6], [0, 0, 1, 1])
    assert 0.3 + noise > 0.3
    assert best_and_worst(found, penalty=0.0) == [[[3, 2]]]
    assert reward_metrics(found.scores)["zero_std_groups"] == 1


def test_an_answer_that_does_not_end_is_worth_less():
    found = rollout([1.0, 0.9], [0, 0], {0: "length"})
    assert best_and_worst(found, penalty=0.0) == [[[0, 1]]]
    assert best_and_worst(found, penalty=0.2) == [[[1, 0]]]


def test_it_logs_what_it_should_and_separates_its_pairs(common, tmp_path):
    open_online_dpo(
        OnlineDPO(**{**common, "steps": 4, "epochs_per_rollout": 2}, output=str(tmp_path / "run"))
    ).train()
    logged = lines(tmp_path / "run")
    wanted = {
        "dpo",
        "rewards/chosen",
        "rewards/rejected",
        "rewards/margins",
        "rewards/accuracies",
        "logps/chosen",
    }
    wanted |= {
        "logps/rejected",
        "reward",
        "pairs",
        "ties",
        "objective/scores_margin",
        "completions/mean_length",
    }
    assert wanted <= logged[0].keys()
    assert logged[0]["dpo"] == pytest.approx(0.6931, abs=1e-3)  # the policy is its own reference
    assert logged[0]["pairs"] + logged[0]["ties"] == 4
    # the same pairs, a step later
    assert logged[1]["rewards/margins"] > logged[0]["rewards/margins"] + 1e-3


def test_ties_are_counted_and_a_step_of_ties_is_skipped(common, tmp_path):
    open_online_dpo(
        OnlineDPO(
            **{**common, "steps": 1, "rewards": {"online:alike": 1.0}}, output=str(tmp_path / "run")
        )
    ).train()
    (line,) = lines(tmp_path / "run")
    assert (line["pairs"], line["ties"], line["skipped"], line["loss"]) == (0, 4, 1, 0)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_policy_and_reference_are_compared_at_the_temperature_of_the_answers(
    common, tmp_path, temperature
):
    open_online_dpo(
        OnlineDPO(
            **{**common, "steps": 1, "temperature": temperature}, output=str(tmp_path / "run")
        )
    ).train()
    (line,) = lines(tmp_path / "run")
    assert line["rewards/chosen"] == pytest.approx(0, abs=1e-5)
    assert line["rewards/rejected"] == pytest.approx(0, abs=1e-5)


def test_all_pair_losses_take_a_step(common, tmp_path):
    """In one mix, each with a small coefficient, so that the model is loaded once."""
    losses = {
        name: {"coefficient": 0.01, **NEED.get(name, {})}
        for name in PAIR_LOSSES
        if name not in TAUGHT
    }
    open_online_dpo(
        OnlineDPO(
            **{**common, "steps": 1, "micro_tokens": None},
            loss=losses,
            output=str(tmp_path / "run"),
        )
    ).train()
    (line,) = lines(tmp_path / "run")
    assert losses.keys() <= line.keys()
    assert line["skipped"] == 0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"group_size": 1}, "group_size: a pair needs two completions"),
        (
            {"reference": "precompute"},
            "reference: must be one of auto, copy, adapters_off, got 'precompute'",
        ),
        ({"loss": "distillation"}, "'distillation' is not one of"),
        ({"beta": -0.1}, "beta"),
        ({"rewards": {}}, "rewards: none is named"),
    ],
)
def test_wrong_settings_are_refused_before_a_model_is_loaded(
    config, message, common, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        "burnish.loops.runs.context.load_model", lambda config: pytest.fail("the model was loaded")
    )
    with pytest.raises(ValueError, match=message):
        open_online_dpo(OnlineDPO(**{**common, "output": str(tmp_path / "run"), **config})).train()
