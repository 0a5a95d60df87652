"""Files of a run that are no checkpoints, damaged at random: it goes on to the same bits, with one
warning at most.
"""

import os
import random
import shutil

import pytest
from burnish.loops.recipes.grpo import open_grpo
from burnish.loops.recipes.preference import open_dpo
from burnish.loops.recipes.settings import DPO, GRPO
from online import prepare
from tiny import save_model, sums, write_rows

TRIALS = 60
DPO_FILES = (".lock", ".config.yaml", "config.yaml", "run.json", "metrics.jsonl", "reference")
GRPO_FILES = (".lock", ".config.yaml", "config.yaml", "run.json", "metrics.jsonl", "samples.jsonl")


def flipped(content, rng):
    at = rng.randrange(len(content))
    return content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]


def without_newline(content, rng):
    ends = [at for at, byte in enumerate(content) if byte == ord("\n")]
    at = rng.choice(ends) if ends else 0
    return content[:at] + content[at + 1 :]


def with_zeros(content, rng):
    at = rng.randrange(len(content))
    return content[:at] + bytes(64) + content[at + 64 :]


def with_random_bytes(content, rng):
    at = rng.randrange(len(content))
    return content[:at] + rng.randbytes(200) + content[at:]


DAMAGES = {
    "a bit flipped": flipped,
    "64 zeros": with_zeros,
    "cut": lambda content, rng: content[: rng.randrange(len(content))],
    "empty": lambda content, rng: b"",
    "lines merged": without_newline,
    "bytes between": with_random_bytes,
    "a line twice": lambda content, rng: content + (content.splitlines(keepends=True) or [b""])[0],
}


def damage(path, rng):
    """Damage a file in one of these ways, or remove it; says how."""
    content = path.read_bytes()
    ways = list(DAMAGES) if content else ["bytes between"]
    way = rng.choice([*ways, "removed"])
    if way == "removed":
        path.unlink()
    else:
        path.write_bytes(DAMAGES[way](content, rng) if content else rng.randbytes(50))
    return way


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """By recipe: ``resume(directory)``, a run after two of four steps, its files, and the weights
    at its end.
    """
    runs = {}
    for recipe, files in (("dpo", DPO_FILES), ("grpo", GRPO_FILES)):
        folder = tmp_path_factory.mktemp(recipe)
        if recipe == "grpo":
            opener, kind, fields = (
                open_grpo,
                GRPO,
                prepare(folder) | {"prompts_per_rollout": 2, "group_size": 2},
            )
        else:
            opener, kind = open_dpo, DPO
            data = write_rows(folder / "pairs.jsonl", sums(8))
            fields = {
                "model": str(save_model(folder / "start")),
                "data": str(data),
                "batch_size": 2,
            }
            fields |= {"reference": "precompute", "learning_rate": 1e-3}
        fields |= {"steps": 4, "save_every": 1}
        whole = folder / "whole"
        opener(kind(**fields, output=str(whole))).train()
        half = folder / "half"
        for step in opener(kind(**fields, output=str(half))):
            if step.number == 2:
                break
        shutil.rmtree(half / "model")
        weights = (whole / "model/model.safetensors").read_bytes()

        def resume(place, opener=opener, kind=kind, fields=fields):
            opener(kind(**fields, output=str(place), resume=True)).train()

        runs[recipe] = (resume, half, files, weights)
    return runs


def check(runs, trial, place, caplog):
    rng = random.Random(trial)
    resume, half, files, weights = runs[rng.choice(["dpo", "grpo"])]
    shutil.copytree(half, place)
    name = rng.choice(files)
    (path,) = [each for each in place.iterdir() if each.name.startswith(name)]
    what = f"{path.name}: {damage(path, rng)}"
    resume(place)
    assert (place / "model/model.safetensors").read_bytes() == weights, what
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) <= 1, (what, warnings)


@pytest.mark.parametrize("trial", range(6))
def test_a_run_goes_on_whatever_happened_to_its_other_files(trial, runs, tmp_path, caplog):
    check(runs, trial, tmp_path / "run", caplog)


@pytest.mark.exhaustive
@pytest.mark.parametrize("trial", range(6, TRIALS))
def test_a_run_goes_on_after_many_more_kinds_of_damage(trial, runs, tmp_path, caplog):
    check(runs, trial, tmp_path / "run", caplog)


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl"])
def test_a_log_whose_every_line_is_damaged_stops_nothing(name, runs, tmp_path, caplog):
    resume, half, _, weights = runs["grpo"]
    place = tmp_path / "run"
    shutil.copytree(half, place)
    (place / name).write_bytes(b"\0\n" * 9)
    resume(place)
    assert (place / "model/model.safetensors").read_bytes() == weights
    assert (place / f"{name}.damaged").read_bytes() == b"\0\n" * 9
    assert sum("can't be read" in record.getMessage() for record in caplog.records) == 1


def test_stored_log_probs_that_were_damaged_are_computed_again(runs, tmp_path, caplog):
    resume, half, _, weights = runs["dpo"]
    place = tmp_path / "run"
    shutil.copytree(half, place)
    (path,) = place.glob("reference-*.safetensors")
    content = path.read_bytes()
    os.truncate(path, len(content) - 8)
    path.write_bytes(content[:-8] + bytes(4) + content[-4:])
    resume(place)
    assert (place / "model/model.safetensors").read_bytes() == weights
    assert path.read_bytes() == content and "is damaged" in caplog.text
