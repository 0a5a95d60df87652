"""Advantages and masks by name: what each computes, logs and refuses, also in bfloat16 and after
death.
"""

import gc
from dataclasses import replace

import pytest
import torch
from burnish import objectives
from burnish.data import Example
from burnish.loops.batch import collate
from burnish.loops.recipes.grpo import (
    advantages,
    greedy_metrics,
    grpo_losses,
    open_grpo,
)
from burnish.loops.recipes.settings import GRPO, PPO
from burnish.loops.rewards import RewardFunction
from burnish.loops.rl.buffer import RolloutBuffer
from burnish.loops.rl.masks import rollout_masks, uniform
from burnish.loops.rl.policy_gradient import rollout_tensors
from burnish.loops.rollouts.sample import Sample
from online import Killed, dying_in_step, lines, prepare

BARE = {"model": "", "data": "", "output": "", "group_size": 3}
REWARDS = [1.0, 0.0, 0.5, 2.0, 2.0, 0.25]
LENGTHS = [2, 1, 3, 4, 2, 1]
GROUPS = [5, 5, 5, 9, 9, 9]
GREEDY = {5: 0.25, 9: 1.5}  # rewards of the greedy completions
RIGHT = [RewardFunction("right", None)]


@pytest.fixture(scope="module")
def common(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("start"))


@pytest.fixture
def rollout():
    samples = []
    for i, (reward, task, n) in enumerate(zip(REWARDS, GROUPS, LENGTHS, strict=True)):
        sample = Sample(task, i, [1], [5] * n, [True] * n, [-1.0] * n, [], "stop")
        sample.rewards = {"right": reward}
        sample.info = {"greedy": {"finish": "stop", "rewards": {"right": GREEDY[task]}}}
        samples.append(sample)
    found = RolloutBuffer(samples)
    found.score(RIGHT)
    draw = torch.Generator().manual_seed(0)
    count = len(found.sequence)
    found["old_logp"] = -torch.rand(count, generator=draw)
    found["ref_logp"] = -torch.rand(count, generator=draw)
    found["old_entropy"] = torch.rand(count, generator=draw)
    # a sum of squared probabilities lies between p² and 1
    found["old_log_sum_squares"] = 2 * found["old_logp"] * torch.rand(count, generator=draw)
    return found


def expected_advantage(name, found):
    reward = torch.tensor(REWARDS, dtype=torch.float64)
    group = torch.tensor(GROUPS)
    length = torch.tensor(LENGTHS)
    sequence = torch.arange(6).repeat_interleave(length)
    kl = (found["old_logp"] - found["ref_logp"]).double()
    penalized = reward - 0.5 * objectives.sequence_sum(kl, sequence, 6)
    match name:
        case "optimal_token":
            of_tokens = objectives.kl_penalized_reward(reward, kl, sequence, beta=0.5)
            policy = found["old_logp"].double(), found["old_log_sum_squares"].double()
            return objectives.optimal_token_advantage(of_tokens, *policy, sequence, group)
        case "reinforce_plus_plus":
            return objectives.reinforce_plus_plus(reward, kl, sequence, beta=0.5)
        case "reinforce_plus_plus_baseline":
            return objectives.reinforce_plus_plus_baseline(penalized, group, sequence)
        case "opo":
            advantage = objectives.opo_advantage(penalized, group, length)
        case "max_at_k":
            advantage = objectives.max_at_k_advantage(penalized, group, k=2)
        case "group":
            advantage = objectives.group_advantage(penalized, group)
        case "remax":
            greedy = torch.tensor([GREEDY[task] for task in GROUPS], dtype=torch.float64)
            advantage = objectives.remax_advantage(penalized, greedy)
        case _:
            advantage = getattr(objectives, f"{name}_advantage")(penalized, group)
    return advantage[sequence]


NAMES = [
    *("group", "rloo", "opo", "gpg", "maxrl", "max_at_k", "remax", "optimal_token"),
    *("reinforce_plus_plus", "reinforce_plus_plus_baseline"),
]


@pytest.mark.parametrize("name", NAMES)
def test_an_advantage_is_the_objective_of_that_name(name, rollout):
    config = GRPO(**BARE, advantage=name, beta=0.5, kl_as="reward")
    if name == "max_at_k":
        config = replace(config, advantage_k=2)
    if name == "maxrl":  # rewards are not negative
        rollout["ref_logp"] = rollout["old_logp"]
    found = advantages(rollout, config=config, rewards=RIGHT)["advantage"]
    torch.testing.assert_close(found, expected_advantage(name, rollout))
    assert found.abs().max() > 0.1


@pytest.mark.parametrize("name", ["rloo", "opo", "gpg", "max_at_k", "optimal_token"])
def test_an_advantage_is_whitened_over_the_batch_if_that_is_its_scale(name, rollout):
    plain = advantages(rollout, config=GRPO(**BARE, advantage=name))["advantage"]
    scaled = advantages(rollout, config=GRPO(**BARE, advantage=name, scale="batch"))["advantage"]
    if name == "optimal_token":
        expected = objectives.whiten(plain)
    else:
        first = torch.tensor(LENGTHS).cumsum(0) - 1
        of_completions = objectives.whiten(plain[first])
        expected = of_completions[rollout.sequence]
    torch.testing.assert_close(scaled, expected)


def test_masks_of_a_rollout_compare_all_of_its_tokens(rollout):
    advantage = advantages(rollout, config=GRPO(**BARE))["advantage"]
    logp, sampled = rollout["old_logp"], rollout["sampled_logp"]
    covariance = objectives.token_covariance(logp, advantage.float())
    clip_cov = {"share": 0.5, "low": -0.1, "high": 5.0}
    expected = {
        "high_entropy": objectives.high_entropy_mask(rollout["old_entropy"], quantile=0.3).float(),
        "clip_cov": objectives.clip_cov_mask(covariance, uniform(13, 0, 0).float(), **clip_cov),
        "m2po": objectives.m2po_mask(logp, sampled, advantage.float(), threshold=0.1),
    }
    settings = {
        "high_entropy": {"quantile": 0.3},
        "clip_cov": clip_cov,
        "m2po": {"threshold": 0.1},
    }
    for name, mask in expected.items():
        config = GRPO(**BARE, masks={name: settings[name]})
        found = rollout_masks(rollout, advantage, config, {})["rollout_mask"]
        torch.testing.assert_close(found, mask)
        assert 0 < mask.mean() < 1
    together = rollout_masks(rollout, advantage, GRPO(**BARE, masks=settings), {})["rollout_mask"]
    torch.testing.assert_close(together, torch.stack([*expected.values()]).prod(0))


def test_kl_cov_penalizes_its_share_of_a_rollout(rollout):
    config = GRPO(**BARE, loss="kl_cov", kl_cov_share=0.3)
    advantage = advantages(rollout, config=config)["advantage"]
    found = rollout_masks(rollout, advantage, config, grpo_losses(config))["penalized"]
    covariance = objectives.token_covariance(rollout["old_logp"], advantage.float())
    assert found.equal(objectives.kl_cov_mask(covariance, share=0.3))
    assert found.sum() == 3


def test_numbers_that_masks_draw_are_uniform_and_other_ones_in_each_rollout():
    first, second = uniform(10_000, 0, 0), uniform(10_000, 0, 1)
    assert first.equal(uniform(10_000, 0, 0))
    assert first.min() >= 0 and first.max() < 1
    assert abs(first.mean() - 0.5) < 4 / 12**0.5 / 100
    assert abs(torch.corrcoef(torch.stack([first, second]))[0, 1]) < 0.04


@pytest.mark.parametrize(
    ("name", "settings", "kept"),
    [
        ("veto", {"threshold": 0.5}, [1, 1, 0, 0]),  # the ratio of one token is e^-1
        ("off_policy", {"threshold": 0.04}, [1, 1, 0, 0]),  # 0.05 nats less likely on average
        ("off_policy", {"threshold": 0.06}, [1, 1, 1, 1]),
        ("total_variation", {"low": 0.2, "high": 0.1}, [0, 1, 0, 1]),
    ],
)
def test_a_mask_of_a_step_multiplies_the_loss(name, settings, kept):
    batch = collate(
        [Example([3], [[5, 6], [7, 8]], [[True, True]] * 2)],
        {
            "old_logp": torch.tensor([-1.0, -2, -2, -1]),
            "sampled_logp": torch.tensor([-2.0, -1.5, -1, -1.9]),
            "advantage": torch.tensor([3.0, 3, -1, -1]),
        },
    )

    def read(policy, batch):
        return {("tokens", "logp"): batch.columns["old_logp"]}

    config = GRPO(**BARE, old_logprobs="recomputed", masks={name: settings})
    (term,) = grpo_losses(config).values()
    tensors = rollout_tensors(read, config, None, batch)
    expected = -batch.columns["advantage"] * torch.tensor(kept)
    torch.testing.assert_close(term(tensors, batch)[0], expected)
    assert tensors["tokens", "mask"].tolist() == kept


@pytest.mark.parametrize(
    ("kind", "config", "message"),
    [
        (GRPO, {"masks": {"vetoed": {}}}, "masks: no mask 'vetoed', did you mean 'veto'"),
        (GRPO, {"masks": {"veto": {}}}, "masks: veto needs threshold"),
        (GRPO, {"masks": {"veto": {"treshold": 1}}}, "has no 'treshold', did you mean 'threshold'"),
        (GRPO, {"masks": {"veto": 0.1}}, "masks: veto: wanted its hyper-parameters"),
        (PPO, {"masks": {"off_policy": {"threshold": 0.1}}}, "masks: off_policy .* those of ppo"),
        (GRPO, {"correction": "decoupled", "correction_low": 0.1}, "correction_low: decoupled"),
        (GRPO, {"advantage": "opo", "scale": "group"}, "scale: .* baseline of opo"),
        (
            GRPO,
            {"advantage": "reinforce_plus_plus", "scale": "batch"},
            "scale: reinforce_plus_plus is scaled",
        ),
        (GRPO, {"advantage_k": 2}, "advantage_k: is for the advantage max_at_k, and this is group"),
        (GRPO, {"advantage": "max_at_k", "advantage_k": 9}, "advantage_k: wanted from 2 to"),
        (
            GRPO,
            {"advantage": "remax", "dynamic_sampling": True},
            "dynamic_sampling: completions of equal rewards teach remax",
        ),
        (GRPO, {"advantage": "opo", "group_size": 1}, "group_size: .* wanted >= 2"),
        (
            GRPO,
            {"advantage": "reinforce_plus_plus", "group_size": 1, "variant": "dapo"},
            "dynamic_sampling: the reward of a single completion never varies",
        ),
        (
            GRPO,
            {"advantage": "opo", "reward_aggregation": "normalize"},
            "reward_aggregation: normalize",
        ),
        (
            GRPO,
            {"advantage": "optimal_token", "masks": {"off_policy": {"threshold": 0.1}}},
            "masks: off_policy .* those of optimal_token differ",
        ),
    ],
)
def test_contradictions_of_advantages_and_masks_are_told(kind, config, message):
    settings = {"model": "", "data": "", "output": "o", "rewards": {"math": 1.0}} | config
    with pytest.raises(ValueError, match=message):
        kind(**settings).refuse_contradictions()


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "remax"])
def test_single_completions_are_enough_for(name):
    config = GRPO(
        model="", data="", output="o", rewards={"math": 1.0}, group_size=1, advantage=name
    )
    config.refuse_contradictions()


def test_a_greedy_completion_of_unknown_reward_is_compared_with_none(rollout):
    for sample in rollout.samples[:3]:
        sample.info["greedy"]["rewards"] = {"right": "exception"}
    config = GRPO(**BARE, advantage="remax")
    found = advantages(rollout, config=config, rewards=RIGHT)["advantage"]
    assert not found[rollout.sequence < 3].any() and found[rollout.sequence >= 3].all()
    assert greedy_metrics(rollout, rewards=RIGHT) == {"reward/greedy": GREEDY[9]}
    for sample in rollout.samples[3:]:
        sample.info["greedy"]["finish"] = "aborted"
    assert greedy_metrics(rollout, rewards=RIGHT) == {}


def test_remax_compares_with_what_the_policy_says_greedily(common, tmp_path):
    """Nothing is learned, so the greedy completions of all prompts are those of an evaluation."""
    settings = common | {"prompts_per_rollout": 20, "group_size": 2, "learning_rate": 0.0}
    config = GRPO(
        **settings | {"steps": 1, "output": str(tmp_path / "run"), "eval_data": common["data"]},
        eval_every=1,
        advantage="remax",
    )
    open_grpo(config).train()
    records = lines(tmp_path / "run")
    trained = next(line for line in records if "reward/greedy" in line)
    assert trained["reward/greedy"] == pytest.approx(trained["eval/reward"], abs=1e-6)
    assert trained["reward"] != trained["reward/greedy"]
    # the greedy one is none of the group
    assert trained["rewards/even/unscored"] == 0 and trained["grad_norm"] > 0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"masks": {"high_entropy": {"quantile": 2.0}}}, "high_entropy_mask: quantile must be in"),
        ({"masks": {"veto": {"threshold": -1.0}}}, "veto_mask: threshold must be > 0"),
        (
            {"variant": "gspo", "masks": {"m2po": {}}},
            "masks: m2po leaves out tokens, and gspo has one entry per completion",
        ),
        ({"variant": "gspo", "correction": "decoupled"}, "decoupled weighs tokens, and gspo"),
        (
            {"variant": "gspo", "advantage": "optimal_token"},
            "gspo takes one advantage per completion, and those of optimal_token differ",
        ),
    ],
)
def test_masks_and_advantages_that_no_loss_could_heed_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        grpo_losses(GRPO(**BARE, **config))


SEVERAL = {
    "steps": 4,
    "epochs_per_rollout": 2,
    "minibatches": 1,
    "loss": "kl_cov",
    "kl_cov_share": 0.2,
    "advantage": "optimal_token",
    "masks": {"clip_cov": {"share": 0.2, "low": -1.0}, "veto": {"threshold": 1e-4}},
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_with_masks_logs_the_share_that_it_learns_from(dtype, common, tmp_path):
    open_grpo(GRPO(**{**common, **SEVERAL, "dtype": dtype, "output": str(tmp_path)})).train()
    for line in lines(tmp_path):
        assert 0.7 < line["kept"] < 1
        assert line["grad_norm"] > 0
        assert line["skipped"] == 0


def test_a_veto_compares_the_sampler_with_the_policy_that_began_the_rollout(common, tmp_path):
    """And not with the one that has learned from it since."""
    steps = {"steps": 2, "epochs_per_rollout": 2, "learning_rate": 0.1}
    masks = {"veto": {"threshold": 0.99}}
    open_grpo(GRPO(**{**common, **steps, "masks": masks, "output": str(tmp_path)})).train()
    first, second = lines(tmp_path)
    assert first["kept"] == second["kept"] == 1
    assert second["ratio"] != pytest.approx(1, abs=0.1)


# the dead leave files open
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_run_with_masks_is_resumed_in_the_middle_of_a_rollout(common, tmp_path):
    config = GRPO(**{**common, **SEVERAL, "save_every": 1, "output": str(tmp_path / "whole")})
    open_grpo(config).train()
    disturbed = replace(config, output=str(tmp_path / "disturbed"), resume=True)
    with pytest.raises(Killed), dying_in_step(2):
        open_grpo(disturbed).train()
    gc.collect()
    open_grpo(disturbed).train()
    saved = [tmp_path / name / "model/model.safetensors" for name in ("whole", "disturbed")]
    assert saved[0].read_bytes() == saved[1].read_bytes()
