"""`run.json`: what a run was, each time that it was started."""

import json
import re
import subprocess
import sys
from importlib.metadata import version

import pytest
from burnish.loops.recipes import RECIPES, settings_of
from burnish.loops.recipes.preference import open_dpo
from burnish.loops.recipes.settings import DPO
from burnish.loops.redaction import MARK
from burnish.loops.runs import checkpoint
from burnish.loops.runs.record import command_line, hub_revision, read_entries, recipe_name
from burnish.loops.versions import git_revision
from datasets import Dataset, DatasetInfo
from forked import run_forked
from tiny import save_model, sums, write_rows

# What a damaged record may hold.
DAMAGED = {
    "cut": b'{"starts": [{"began"',
    "empty": b"",
    "binary": b"\xff\x00\xfe",
    "list": b"[]",
    "null": b'{"starts": null}',
    "texts": b'{"starts": ["one"]}',
    "deep": b"[" * 100_000,
}


@pytest.fixture
def settings(tmp_path):
    data = write_rows(tmp_path / "pairs.jsonl", sums(8))
    model = save_model(tmp_path / "start")
    return {
        "model": str(model),
        "data": str(data),
        "output": str(tmp_path / "run"),
        "batch_size": 2,
        "steps": 3,
    }


def recorded(tmp_path):
    return json.loads((tmp_path / "run/run.json").read_text())["starts"]


def break_after(step, settings):
    for each in open_dpo(DPO(**settings)):
        if each.number == step:
            break


def test_a_run_records_what_it_was_before_its_first_step_and_how_it_ended(settings, tmp_path):
    for step in open_dpo(DPO(**settings, beta=0.25, eval_data=0.25, seed=5)):
        if step.number == 1:
            (entry,) = recorded(tmp_path)
            assert "ended" not in entry
    (ended,) = recorded(tmp_path)
    assert ended.pop("ended").keys() == {"time", "step"} and ended == entry
    assert (
        entry["recipe"] == "dpo"
        and entry["seed"] == 5
        and entry["steps"] == 3
        and entry["resumed_from"] == 0
    )
    assert "beta=0.25" in entry["call"] and "learning_rate" not in entry["call"]
    assert entry["versions"]["torch"] == version("torch") and entry["versions"].keys() >= {
        "python",
        "transformers",
    }
    assert entry["versions"]["burnish revision"] == git_revision()
    assert [rank["device"] for rank in entry["ranks"]] == ["cpu"]
    assert (
        entry["model"]["architecture"] == "LlamaForCausalLM"
        and entry["model"]["name"] == settings["model"]
    )
    (part,), (held_out,) = entry["data"], entry["eval_data"]
    assert (part["source"], part["read"], part["kept"], held_out["kept"]) == (
        "pairs.jsonl",
        6,
        6,
        2,
    )
    assert part["tokens"] > part["trained_tokens"] > 0
    assert (tmp_path / "run/run.json").stat().st_mode & 0o777 == 0o600


def test_the_digest_of_a_part_is_that_of_its_rows_wherever_they_lie(settings, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    moved = write_rows(tmp_path / "elsewhere/other.jsonl", sums(8))
    edited = write_rows(tmp_path / "edited.jsonl", [*sums(7), sums(9)[8]])
    digests = []
    for number, data in enumerate((settings["data"], str(moved), str(edited))):
        run = tmp_path / f"run-{number}"
        open_dpo(DPO(**{**settings, "data": data, "output": str(run), "steps": 1})).train()
        digests.append(read_entries(run / "run.json")[0]["data"][0]["sha256"])
    assert digests[0] == digests[1] != digests[2]


def test_each_part_of_a_mixture_has_its_account_and_digest(settings, tmp_path):
    other = write_rows(tmp_path / "other.jsonl", sums(4, seed=1))
    open_dpo(DPO(**{**settings, "data": [settings["data"], str(other)]})).train()
    parts = recorded(tmp_path)[0]["data"]
    assert [(part["source"], part["read"]) for part in parts] == [
        ("pairs.jsonl", 8),
        ("other.jsonl", 4),
    ]
    assert len({part["sha256"] for part in parts}) == 2


def test_streamed_data_have_an_account_of_what_was_read_and_no_digest(settings, tmp_path):
    open_dpo(DPO(**settings, streaming=True)).train()
    (part,) = recorded(tmp_path)[0]["data"]
    assert part["source"] == "pairs.jsonl" and "sha256" not in part


def test_a_resumed_run_adds_an_entry_and_keeps_the_others(settings, tmp_path):
    break_after(1, settings)
    first = recorded(tmp_path)
    open_dpo(DPO(**settings, resume=True)).train()
    entries = recorded(tmp_path)
    assert entries[:1] == first and [each["resumed_from"] for each in entries] == [0, 1]
    assert [each["ended"]["step"] for each in entries] == [1, 3]


def test_an_error_ends_the_record_with_its_name(settings, tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise checkpoint.CheckpointError("no room")

    monkeypatch.setattr(checkpoint, "save", refuse)
    with pytest.raises(checkpoint.CheckpointError, match="no room"):
        open_dpo(DPO(**settings, save_every=2)).train()
    ended = recorded(tmp_path)[0]["ended"]
    assert (ended["error"], ended["step"]) == ("CheckpointError", 2)


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_record_is_moved_aside_and_read_no_more(damage, tmp_path, caplog):
    path = tmp_path / "run.json"
    path.write_bytes(DAMAGED[damage])
    assert read_entries(path) == [] and not path.exists()
    assert (tmp_path / "run.json.damaged").read_bytes() == DAMAGED[damage]
    assert "run.json.damaged" in caplog.text


def test_a_run_resumes_with_a_directory_in_place_of_its_record(settings, tmp_path):
    break_after(1, settings)
    (tmp_path / "run/run.json").unlink()
    (tmp_path / "run/run.json").mkdir()
    open_dpo(DPO(**settings, resume=True)).train()
    assert [each["resumed_from"] for each in recorded(tmp_path)] == [1]
    assert (tmp_path / "run/run.json.damaged").is_dir()


def test_a_run_without_a_directory_records_nothing(settings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    open_dpo(DPO(**{**settings, "output": None})).train()
    assert list(tmp_path.rglob("run.json")) == []


def test_the_main_process_records_the_devices_of_all_ranks_and_writes_the_card(settings, tmp_path):
    rows = write_rows(
        tmp_path / "rows.jsonl", [{"messages": pair["prompt"] + pair["chosen"]} for pair in sums(8)]
    )
    for status, printed in run_forked(
        2, "rank_ended", settings["model"], str(rows), str(tmp_path / "run"), 2
    ):
        assert status == 0, printed[-3000:]
    (entry,) = recorded(tmp_path)
    assert [rank["device"] for rank in entry["ranks"]] == ["cpu", "cpu"]
    assert entry["launch"]["WORLD_SIZE"] == "2" and entry["ended"]["step"] == 2
    assert "Ranks: 2 x cpu." in (tmp_path / "run/model/README.md").read_text()


def test_a_command_is_recorded_without_its_secrets():
    words = [
        "burnish",
        "grpo",
        "--judge.api_key",
        "swordfish-77",
        "--vllm.environment.HF_TOKEN=swordfish-78",
    ]
    line = command_line([*words, "--url", "http://me:swordfish-79@host", "--steps", "3"])
    assert "swordfish" not in line and line.count(MARK) == 3
    assert line.startswith("burnish grpo --judge.api_key") and line.endswith("--steps 3")


def test_the_program_of_python_c_is_left_out_of_the_command():
    assert command_line(["python", "-c", "print('swordfish')", "last"]) == "python -c ... last"


def test_the_command_is_that_of_the_process(monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py", "--beta", "0.2"])
    assert command_line() == "python train.py --beta 0.2"


@pytest.mark.parametrize("recipe", sorted(RECIPES.keys() - {"demo"}))
def test_a_recipe_is_recorded_by_its_name(recipe):
    kind = settings_of(recipe)
    assert recipe_name(kind.__new__(kind)) == recipe


def test_data_of_the_hub_are_recorded_with_their_commit():
    commit = "0123456789abcdef0123456789abcdef01234567"
    files = {
        f"hf://datasets/trl-lib/pairs@{commit}/data/train.parquet": {
            "num_bytes": 1,
            "checksum": None,
        }
    }
    dataset = Dataset.from_list([{"x": 1}], info=DatasetInfo(download_checksums=files))
    assert hub_revision(dataset.select([0])) == commit
    assert hub_revision(Dataset.from_list([{"x": 1}])) is None


def test_a_changed_checkout_is_told_from_its_commit(tmp_path):
    git = [
        "git",
        "-C",
        str(tmp_path),
        "-c",
        "user.name=a",
        "-c",
        "user.email=a@b.c",
        "-c",
        "commit.gpgsign=false",
    ]
    (tmp_path / "file").write_text("one")
    for words in (
        ["init", "-q"],
        ["add", "file"],
        ["commit", "-qm", "first"],
        ["tag", "-a", "v1", "-m", "v1"],
    ):
        subprocess.run([*git, *words], check=True)
    revision = git_revision(tmp_path)
    assert re.fullmatch("[0-9a-f]{40}", revision)
    git_revision.cache_clear()
    (tmp_path / "file").write_text("two")
    assert git_revision(tmp_path) == f"{revision}-dirty"
    assert git_revision(tmp_path / "nowhere") is None
