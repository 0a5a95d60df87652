"""Recipes that sample completions for prompts with images, and train on them."""

import hashlib
import json

import pytest
import torch
import vision
from burnish.data import DataError, example
from burnish.data.images import ImageRef
from burnish.loops.recipes import opener, settings
from burnish.loops.rewards.reward_models import RewardModel
from burnish.loops.rl.feed import RolloutFeed
from burnish.loops.rollouts.replay import read_samples
from burnish.loops.rollouts.sample import Sample, VersionSpan
from safetensors.torch import load_file

RECIPES = {"grpo": "GRPO", "rloo": "RLOO", "ppo": "PPO", "online_dpo": "OnlineDPO"}
FAST = ("idefics3", "gemma3", "qwen2_5_vl")
FAMILIES = [
    pytest.param(family, marks=[] if family in FAST else pytest.mark.slow)
    for family in vision.FAMILIES
]


def redness(completion, images, **columns):
    """A reward that sees pictures: the share of letters, by how red the first picture is."""
    red = images[0].getpixel((images[0].width - 1, 0))[0] / 255 if images else 0.5
    return red * len(completion) + 0.01 * sum(map(ord, completion)) % 1.0


def write_prompts(folder):
    """Four prompts: one image, two of unlike sizes, none, and one again."""
    sizes = [[(60, 30)], [(30, 60), (60, 30)], [], [(32, 32)]]
    rows = []
    for number, shown in enumerate(sizes):
        names = []
        for place, size in enumerate(shown):
            names.append(f"{number}-{place}.png")
            vision.picture(*size, color=["red", "blue"][number % 2]).save(folder / names[-1])
        user = {"role": "user", "content": f"what of {number}?"}
        rows.append({"prompt": [user], "images": names})
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def world(tmp_path):
    def world(family="idefics3", kind="grpo", **given):
        vision.skip_unless_available(family)
        model = tmp_path / family
        if not model.exists():
            vision.save(model, family)
        plain = {
            "model": str(model),
            "data": str(write_prompts(tmp_path)),
            "rewards": {redness: 1.0},
            "steps": 2,
            "prompts_per_rollout": 4,
            "group_size": 3,
            "max_tokens": 6,
            "learning_rate": 1e-3,
            "dtype": "float64",
            "report_to": "none",
            "show_every": 0,
            "output": str(tmp_path / "run"),
        }
        return getattr(settings, RECIPES[kind])(**{**plain, **given})

    return world


def steps(config):
    training = opener(type(config).__name__.lower().replace("dpo", "_dpo"))(config)
    return [dict(step.metrics) for step in training]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_first_ratio_is_one(family, world):
    first, second = steps(world(family))
    assert first["sampling/logp_difference/max"] < 1e-6
    assert abs(first["sampling/importance_ratio/max"] - 1) < 1e-6
    assert abs(first["sampling/importance_ratio/min"] - 1) < 1e-6
    assert second["sampling/logp_difference/max"] < 1e-6
    assert first["grad_norm"] > 0


@pytest.mark.parametrize("kind", ["rloo", "ppo", "online_dpo"])
def test_every_recipe_that_samples_trains_on_images(kind, world):
    first, second = steps(world(kind=kind))
    assert first["grad_norm"] > 0
    assert first["loss"] != second["loss"]


@pytest.mark.parametrize("kind", list(RECIPES))
def test_every_split_of_a_step_gives_the_same_gradient(kind, world, tmp_path):
    norms = []
    for run, given in enumerate([{}, {"micro_tokens": 60}, {"layout": "padded"}]):
        config = world(kind=kind, steps=1, output=str(tmp_path / str(run)), **given)
        norms.append(steps(config)[0]["grad_norm"])
    torch.testing.assert_close(norms, [norms[0]] * 3, rtol=1e-7, atol=0)


def test_rewards_see_the_pictures_of_their_prompt(world):
    seen = []

    def note(prompts, completions, images, **columns):
        """As TRL calls a reward: a list of each column."""
        seen.extend(images)
        return [float(len(each)) for each in images]

    (first, *_) = steps(world(rewards={note: 1.0}, steps=1))
    sizes = sorted([picture.size for picture in pictures] for pictures in seen)
    assert sizes == sorted([[(60, 30)], [(30, 60), (60, 30)], [], [(32, 32)]] * 3)
    assert {type(picture).__name__ for pictures in seen for picture in pictures} == {"Image"}
    assert {picture.mode for pictures in seen for picture in pictures} == {"RGB"}
    assert first["reward"] == 1.0


def test_held_out_prompts_with_images_are_evaluated(world, tmp_path):
    data = write_prompts(tmp_path)
    rows = steps(world(eval_data=str(data), eval_every=1, steps=1))
    assert rows[-1]["eval/reward"] > 0


def tiles_of(tensors):
    """Entries of the tower's batch for a prompt's images, without Idefics3's padding."""
    pixels = tensors["pixel_values"]
    if pixels.ndim == 5:
        return int(pixels.flatten(2).abs().sum(-1).ne(0).sum())
    return len(pixels)


@pytest.mark.parametrize(
    ("family", "tower"),
    [("idefics3", "vision_model"), ("llava", "vision_tower"), ("qwen2_5_vl", "visual")],
)
def test_the_vision_tower_sees_a_group_once_in_a_step(family, tower, world):
    """In a rollout it runs once for each prompt, and once more where the group trains."""
    training = opener("grpo")(world(family, steps=1))
    tiles = []
    getattr(training.context.model.plain.base_model, tower).register_forward_pre_hook(
        lambda module, args, kwargs: tiles.append(len([*args, *kwargs.values()][0])),
        with_kwargs=True,
    )
    data = training.context.data
    reader = training.context.model.images.reader
    shown = [example(data, row).images for row in range(4)]
    once = sum(tiles_of(reader.read(images).tensors) for images in shown if images)
    training.train()
    assert sum(tiles) == 2 * once


def digest(run):
    return hashlib.sha256((run / "model" / "model.safetensors").read_bytes()).digest()


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_resumed_run_has_the_bytes_of_one_that_went_on(epochs, world, tmp_path):
    """With two steps on a rollout, the second begins from samples of the checkpoint."""
    given = {"epochs_per_rollout": epochs, "save_every": 1}
    steps(world(output=str(tmp_path / "whole"), steps=2, **given))
    training = opener("grpo")(world(output=str(tmp_path / "parts"), steps=2, **given))
    for step in training:
        if step.number == 1:
            break
    steps(world(output=str(tmp_path / "parts"), steps=2, resume=True, **given))
    assert digest(tmp_path / "parts") == digest(tmp_path / "whole")
    logged = list(read_samples(tmp_path / "parts" / "samples.jsonl"))
    assert len(logged) == 12 * (2 if epochs == 1 else 1)


def test_bfloat16_autocast_is_near_float32(world, tmp_path):
    exact = steps(world(dtype="float32", steps=1, output=str(tmp_path / "a"), seed=3))[0]
    rounded = steps(world(dtype="bfloat16", steps=1, output=str(tmp_path / "b"), seed=3))[0]
    assert rounded["sampling/logp_difference"] < 2e-2 * exact["entropy"]


def test_the_losses_of_bfloat16_autocast_are_near_those_of_float32(world, tmp_path, monkeypatch):
    """On the same completions: rounding draws others."""
    rollouts = []
    take = RolloutFeed._take
    given = {"steps": 4, "epochs_per_rollout": 2, "beta": 0.1, "seed": 3}

    def recorded(feed, number):
        rollouts.append(take(feed, number))
        return rollouts[-1]

    monkeypatch.setattr(RolloutFeed, "_take", recorded)
    exact = steps(world(dtype="float32", output=str(tmp_path / "a"), **given))
    monkeypatch.setattr(RolloutFeed, "_take", lambda feed, number: rollouts[number])
    rounded = steps(world(dtype="bfloat16", output=str(tmp_path / "b"), **given))
    assert len(rollouts) == 2 and any(sample.images for sample in rollouts[0][0][0])
    pairs = [[row["loss"] for row in rows] for rows in (rounded, exact)]
    assert pairs[0] != pairs[1]
    # advantages are in units of a standard deviation
    torch.testing.assert_close(*pairs, rtol=0, atol=2e-3)


def test_samples_ahead_of_training_come_from_a_copy_that_sees_images(world):
    rows = steps(world(max_staleness=1, steps=3))
    assert rows[0]["sampling/logp_difference/max"] < 1e-6
    assert rows[2]["age/max"] == 1.0


@pytest.mark.parametrize(
    ("converses", "who"),
    [({"environment": "guess_number"}, "an environment"), ({"agent": "agents:twice"}, "an agent")],
)
def test_conversations_refuse_images_by_name(converses, who, world, tmp_path):
    config = world(**converses, rewards={})
    with pytest.raises(DataError, match=f"column 'images': {who} converses in text alone so far"):
        steps(config)
    parts = [{"type": "image", "image": "0-0.png"}, {"type": "text", "text": "what?"}]
    row = {"prompt": [{"role": "user", "content": parts}]}
    (tmp_path / "parts.jsonl").write_text(json.dumps(row) + "\n")
    config = world(**converses, rewards={}, data=str(tmp_path / "parts.jsonl"))
    message = rf"parts.jsonl line 1: .* part of the type 'image', wanted text: {who} converses in"
    with pytest.raises(DataError, match=message):
        steps(config)


def test_a_critic_of_its_own_sees_the_images(world, tmp_path):
    critic = {"value_model": str(tmp_path / "idefics3")}
    norms = []
    for run, layout in enumerate(["auto", "padded"]):
        config = world(kind="ppo", layout=layout, output=str(tmp_path / str(run)), **critic)
        norms.append([step["loss"] for step in steps(config)])
    torch.testing.assert_close(norms[0], norms[1], rtol=1e-7, atol=1e-9)
    saved = load_file(tmp_path / "0" / "critic" / "model" / "model.safetensors")
    start = load_file(tmp_path / "idefics3" / "model.safetensors")
    tower = "model.vision_model.embeddings.patch_embedding.weight"
    assert not torch.equal(saved[tower].double(), start[tower].double())


def test_a_reward_model_refuses_images_by_name():
    reward = RewardModel.__new__(RewardModel)
    sample = Sample(0, 0, [1], [2], [True], [-1.0], [VersionSpan(0, 0, 1)], "stop")
    sample.images = (ImageRef("a.png"),)
    with pytest.raises(ValueError, match="a reward model reads text alone so far"):
        reward([{}], [sample])
