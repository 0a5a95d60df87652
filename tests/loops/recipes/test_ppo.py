"""PPO: generalized advantages, a value function on the policy's backbone, and what it logs and
refuses.
"""

from dataclasses import replace

import pytest
import torch
from burnish.data import Example
from burnish.loops.batch import collate
from burnish.loops.config import Lora
from burnish.loops.models.io import load_model
from burnish.loops.recipes.ppo import (
    advantages,
    objective_metrics,
    open_critic,
    open_ppo,
    turn_rewards,
    with_values,
)
from burnish.loops.recipes.settings import PPO
from burnish.loops.rewards import RewardFunction
from burnish.loops.rl.buffer import RolloutBuffer
from burnish.loops.rollouts.sample import Sample
from burnish.loops.runs.reference import frozen_copy
from online import Killed, dying_in_step, lines, prepare, stored
from safetensors.torch import load_file, save_file

CONFIG = PPO(model="", data="", output="", beta=0.5, gamma=0.9, lam=0.8, missing_eos_penalty=0.25)


@pytest.fixture(scope="module")
def common(tmp_path_factory):
    return {
        **prepare(tmp_path_factory.mktemp("start")),
        "group_size": 1,
        "epochs_per_rollout": 2,
        "steps": 4,
    }


def rollout():
    """Three answers: one that ended, one that was cut, one without a score."""
    trained = [[True] * 3, [True, False, True], [True] * 3]
    samples = [
        Sample(i, 0, [1], [5] * 3, trained[i], [0.0] * 3, [], finish, rewards={"right": reward})
        for i, (finish, reward) in enumerate([("stop", 1.0), ("length", 0.5), ("stop", None)])
    ]
    columns = {
        "old_logp": [-1, -2, -3, -1, -1],
        "ref_logp": [-2, -2, -1, -1, -2],
        "old_value": [0.1, 0.2, 0.3, 0.4, 0],
    }
    buffer = RolloutBuffer(samples, dtype=torch.float64)
    buffer.score([RewardFunction("right", None, weight=2.0)])
    for name, column in columns.items():
        buffer[name] = torch.tensor(column).double()
    return buffer


def test_advantages_are_those_of_the_recursion_whitened_over_the_rollout():
    """δ_t = r_t + γ V_{t+1} − V_t and A_t = δ_t + γλ A_{t+1}, from the last token of each answer
    back to the first.
    """
    expected, returns = [], []
    for kl, value, reward in (
        ([1, 0, -2], [0.1, 0.2, 0.3], 2 * 1.0),
        ([0, 1], [0.4, 0.0], 2 * 0.5 - 0.25),
    ):
        after, advantage, found = 0.0, 0.0, []
        for t in reversed(range(len(kl))):
            earned = -0.5 * kl[t] + (reward if t == len(kl) - 1 else 0.0)
            advantage = earned + 0.9 * after - value[t] + 0.9 * 0.8 * advantage
            after = value[t]
            found.insert(0, advantage)
        expected += found
        returns += [a + v for a, v in zip(found, value, strict=True)]
    expected = torch.tensor(expected).double()
    columns = advantages(rollout(), config=CONFIG)
    whitened = (expected - expected.mean()) / (expected.std() + 1e-4)
    torch.testing.assert_close(columns["advantage"], whitened, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(
        columns["target"], torch.tensor(returns).double(), rtol=1e-7, atol=1e-7
    )


def test_the_objective_is_the_mean_over_the_answers_that_are_trained_on():
    found = rollout()
    found.columns |= advantages(found, config=CONFIG)
    metrics = objective_metrics(found, config=CONFIG)
    assert metrics["objective/kl"] == pytest.approx((-1 + 1) / 2)
    assert metrics["objective/scores"] == pytest.approx((2 + 0.75) / 2)
    assert metrics["objective/rlhf_reward"] == pytest.approx((2 + 0.5 + 0.75 - 0.5) / 2)


def test_a_turns_reward_is_paid_at_its_end_and_the_rest_at_that_of_the_conversation():
    """An environment's 0.5 and 0.25 at turns, none at the third, 2 at the last, 1 by `reward()`."""
    trained = [True, True, False, True, False, True, False, True, True]
    info = {
        "turn_rewards": [0.5, 0.25, None, 2.0],
        "turn_ends": [2, 4, 6, 9],
        "environment_reward": 3.75,
    }
    alone = {"turn_rewards": [0.5], "turn_ends": [2], "environment_reward": 0.75}
    failed = {"turn_rewards": [0.5, "nan"], "turn_ends": [1, 2], "environment_reward": "nan"}
    samples = []
    for task, (marks, about) in enumerate(
        [(trained, info), ([True, True], alone), ([True, True], failed)]
    ):
        count = len(marks)
        rewards = {"environment": about["environment_reward"], "right": 1.0}
        samples.append(Sample(task, 0, [1], [5] * count, marks, [0.0] * count, [], "stop"))
        samples[-1].rewards, samples[-1].info = rewards, about
    found = RolloutBuffer(samples, dtype=torch.float64)
    found.score([RewardFunction("environment", None, weight=2.0), RewardFunction("right", None)])
    paid = [0, 1.0, 0.5, 0, 0, 0, 0, 0]  # of the second conversation, whose turn is its last, none
    assert turn_rewards(found).tolist() == paid
    value = [0.1 * t for t in range(len(paid))]
    found["old_value"] = torch.tensor(value, dtype=torch.float64)
    found["old_logp"] = torch.zeros(len(paid), dtype=torch.float64)
    reward = [0, 1.0, 0.5, 0, 0, 2 * 3.75 + 1 - 1.5, 0, 2 * 0.75 + 1]
    target = []
    for first, end in ((0, 6), (6, 8)):
        carried, backward = 0.0, []
        for t in reversed(range(first, end)):
            following = value[t + 1] if t + 1 < end else 0.0
            carried = reward[t] + 0.9 * following - value[t] + 0.72 * carried
            backward.append(carried + value[t])
        target += reversed(backward)
    given = advantages(found, config=replace(CONFIG, beta=0.0))
    torch.testing.assert_close(given["target"], torch.tensor(target, dtype=torch.float64))


def test_it_logs_what_it_should_and_leaves_a_value_head_to_begin_with(common, tmp_path):
    config = PPO(**common, output=str(tmp_path / "first"), minibatches=2)
    open_ppo(config).train()
    logged = lines(tmp_path / "first")
    wanted = {
        "clipped_surrogate",
        "value_loss",
        "value",
        "clip_ratio/value",
        "clip_ratio/region",
        "ratio",
        "kl",
    }
    wanted |= {
        "objective/kl",
        "objective/scores",
        "objective/rlhf_reward",
        "objective/non_score_reward",
    }
    assert wanted <= logged[0].keys()
    assert "val/explained_variance" in logged[0]
    assert logged[0]["value"] == 0  # the head is zero at first
    assert logged[0]["ratio"] == pytest.approx(1, abs=1e-5)
    # to the policy at the start of the rollout, not to that of the step
    assert abs(logged[3]["ratio"] - 1) > 1e-5
    # one rollout, four steps
    assert [line["reward"] for line in logged] == [logged[0]["reward"]] * 4
    head = load_file(tmp_path / "first/value_head.safetensors")
    assert head["weight"].abs().max() > 0
    open_ppo(
        replace(
            config,
            output=str(tmp_path / "second"),
            value_head=str(tmp_path / "first/value_head.safetensors"),
        )
    ).train()
    assert lines(tmp_path / "second")[0]["value"] != 0


# the dead leave files open
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_checkpoints_hold_the_value_head(common, tmp_path):
    config = PPO(**common, output=str(tmp_path / "undisturbed"), save_every=1)
    open_ppo(config).train()
    disturbed = replace(config, output=str(tmp_path / "disturbed"), resume=True)
    with pytest.raises(Killed), dying_in_step(4):
        open_ppo(disturbed).train()
    open_ppo(disturbed).train()
    for name in ("value_head.safetensors", "model/model.safetensors"):
        assert (tmp_path / "disturbed" / name).read_bytes() == (
            tmp_path / "undisturbed" / name
        ).read_bytes()
    assert stored(tmp_path / "disturbed") == stored(tmp_path / "undisturbed")


def test_a_critic_is_a_model_of_its_own_that_is_trained_and_kept(common, tmp_path):
    first = PPO(**common, output=str(tmp_path / "first"), value_model=common["model"])
    open_ppo(first).train()
    logged = lines(tmp_path / "first")
    # its head is new; the reference is the policy
    assert logged[0]["value"] == 0 and logged[0]["kl"] == 0
    assert logged[-1]["value"] != 0
    start, policy = (
        load_file(f"{path}/model.safetensors")
        for path in (common["model"], tmp_path / "first/model")
    )
    critic = load_file(tmp_path / "first/critic/model/model.safetensors")
    moved = [
        name for name in critic if name in start and not torch.equal(critic[name], start[name])
    ]
    assert "model.layers.0.mlp.up_proj.weight" in moved and critic["score.weight"].abs().max() > 0
    assert any(not torch.equal(critic[name], policy[name]) for name in moved)  # by the values alone
    open_ppo(
        replace(
            first, output=str(tmp_path / "second"), value_model=str(tmp_path / "first/critic/model")
        )
    ).train()
    assert lines(tmp_path / "second")[0]["value"] != 0


def test_a_critic_reads_the_state_that_a_token_is_chosen_in(common):
    critic = open_critic(PPO(**common, output="", value_model=common["model"], dtype="float64"))
    torch.nn.init.normal_(critic.head.weight)
    example = Example([5, 6], [[7, 8, 9]], [[True, False, True]])
    said = critic(collate([example]))
    hidden = critic.plain.base_model(torch.tensor([[5, 6, 7, 8, 9]])).last_hidden_state[0]
    # before the first and the third token
    torch.testing.assert_close(said, (hidden @ critic.head.weight[0])[[1, 3]])


def test_a_frozen_reference_has_no_critic(common):
    config = PPO(**common, output="", value_model=common["model"])
    policy = with_values(load_model(config), config)
    policy.critic.forward = lambda batch: pytest.fail("a reference asked for values")
    batch = collate([Example([5, 6], [[7, 8, 9]], [[True, False, True]])])
    assert frozen_copy(policy)(batch).shape == (2,)
    assert policy.critic is not None


def test_adapters_and_a_value_head_train_together(common, tmp_path):
    open_ppo(PPO(**common, output=str(tmp_path / "run"), lora=Lora(r=2))).train()
    assert load_file(tmp_path / "run/value_head.safetensors")["weight"].abs().max() > 0
    assert lines(tmp_path / "run")[-1]["kl"] != 0


def test_the_head_begins_at_0_and_computes_in_its_own_precision(common):
    config = PPO(**common, output="")
    policy = with_values(load_model(config), config)
    head, batch = policy.value_head, collate([Example([5, 6], [[7, 8, 9]], [[True, False, True]])])
    assert head.weight.abs().max() == head.bias.abs().max() == 0
    torch.nn.init.normal_(head.weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = policy.hidden(policy.arranged(batch.examples, policy.layout))
        value = policy(batch).value
    assert value.dtype == torch.float32
    assert torch.equal(value, head(hidden.float())[:, 0])
    # as autocast would round it
    assert not torch.equal(value, head.bfloat16()(hidden.bfloat16())[:, 0].float())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"gamma": 1.5}, "gamma: must be >= 0 and <= 1, got 1.5"),
        ({"lam": -0.1}, "lam: must be >= 0 and <= 1"),
        ({"value_clip": -1.0}, "value_clip: must be >= 0"),
        ({"value_coefficient": -1.0}, "value_coefficient: must be >= 0"),
        ({"value_head": "a", "value_model": "b"}, "give one of the two"),
        (
            {"value_head": "nowhere"},
            "nowhere: no such file; a run leaves one, value_head.safetensors",
        ),
        (
            {"loss": "gspo", "loss_kwargs": {"clip_low": 0.1, "clip_high": 0.1}},
            "gspo takes one advantage per completion",
        ),
        ({"loss": "nll"}, "none of nll learns from the rewards"),
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
        open_ppo(PPO(**{**common, "output": str(tmp_path / "run"), **config})).train()


def test_a_value_head_of_another_model_is_refused(common, tmp_path):
    save_file(torch.nn.Linear(8, 1).state_dict(), tmp_path / "other.safetensors")
    save_file({"score.weight": torch.ones(1)}, tmp_path / "score.safetensors")
    (tmp_path / "text.safetensors").write_text("no tensors")
    for name, message in (
        (
            "other",
            r"of a run of ppo with this model: .*size mismatch for weight: .*\[1, 8\].*\[1, 32\]",
        ),
        (
            "score",
            r'score.safetensors: wanted value_head.* Missing key\(s\) .*"weight", "bias".*: "score.weight"',
        ),
        ("text", "value_head: .*text.safetensors: .*header"),
    ):
        with pytest.raises(ValueError, match=message):
            open_ppo(
                PPO(
                    **common,
                    output=str(tmp_path / name),
                    value_head=str(tmp_path / f"{name}.safetensors"),
                )
            ).train()
