"""kill -9 at any moment of a run on rows with images, and resume: the same weights, bit for bit."""

import json
from pathlib import Path

import pytest
import vision
from burnish.data import images
from burnish.loops.recipes.preference import open_dpo
from burnish.loops.recipes.settings import DPO
from burnish.loops.runs.checkpoint import CheckpointError
from grids import slow
from killed import assert_undisturbed, build, kill_and_resume
from safetensors.torch import load_file

TOWER = "model.vision_model.embeddings.patch_embedding.weight"


@pytest.fixture
def config(tmp_path):
    """Shuffled epochs of rows with one image, two and none, of which each step has a few."""
    lines = []
    for number in range(20):
        names = []
        for place in range(number % 3):
            names.append(f"{number}-{place}.png")
            size = (20 + 2 * number, 40 - place)
            vision.picture(*size, color=["red", "blue"][number % 2]).save(tmp_path / names[-1])
        row = {
            "images": names,
            "prompt": [{"role": "user", "content": f"what of {number}?"}],
            "chosen": [{"role": "assistant", "content": f"it is {number}"}],
            "rejected": [{"role": "assistant", "content": "no" * (1 + number % 4)}],
        }
        lines.append(json.dumps(row) + "\n")
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    return {
        "model": str(vision.save(tmp_path / "start", "idefics3")),
        "data": str(tmp_path / "rows.jsonl"),
        "output": str(tmp_path / "run"),
        "batch_size": 4,
        "micro_tokens": 200,
        "learning_rate": 1e-3,
        "save_every": 2,
        "steps": 5,
    }


@pytest.mark.parametrize("kills", [0, slow(3)])
@pytest.mark.parametrize("changes", [{}, slow({"lora": {"r": 4, "dropout": 0.1}})], ids=str)
def test_dpo_on_images_survives_kills(kills, changes, config):
    config |= {**changes, "steps": 24 if kills else 5}
    happened, _ = kill_and_resume("dpo", config, "write:7", "write:4", f"random:{kills}")
    assert (happened["random"], happened["write"]) == (kills, 2)
    assert_undisturbed(config)
    start, end = (
        load_file(Path(path) / "model.safetensors")
        for path in (config["model"], f"{config['output']}/model")
    )
    assert start[TOWER].equal(end[TOWER]) == bool(changes)


def test_a_run_is_not_resumed_on_an_image_that_changed(config, tmp_path):
    config["steps"] = 2
    open_dpo(build(DPO, config)).train()
    vision.picture(50, 50, "green").save(tmp_path / "1-0.png")
    config |= {"steps": 6, "resume": True}
    with pytest.raises(CheckpointError, match="the data is not what step-00000002 was trained on"):
        open_dpo(build(DPO, config)).train()


def test_a_run_stops_at_an_image_that_changes_under_it(config, tmp_path, monkeypatch):
    monkeypatch.setattr(images, "_CACHED", 0)  # as with more images than are kept
    training = iter(open_dpo(build(DPO, config)))
    next(training)
    for path in tmp_path.glob("*-0.png"):
        vision.picture(50, 50, "green").save(path)
    with pytest.raises(ValueError, match=r"-0.png was changed or removed since its row was enc"):
        for _ in training:
            pass
