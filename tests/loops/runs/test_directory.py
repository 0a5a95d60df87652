"""One run, one directory: one writer, one configuration, one set of data."""

import errno
import fcntl
import json
import os
import re
from pathlib import Path

import pytest
import torch
import yaml
from burnish.loops.config import Lora
from burnish.loops.recipes.settings import SFT
from burnish.loops.recipes.sft import open_sft
from burnish.loops.runs import checkpoint, context, lock
from burnish.objectives import PerToken, Stats
from forked import run_forked
from online import prepare
from safetensors.torch import load_file
from tiny import save_model, sums, write_rows


@pytest.fixture
def settings(tmp_path):
    rows = [{"messages": pair["prompt"] + pair["chosen"]} for pair in sums(8)]
    data = write_rows(tmp_path / "messages.jsonl", rows)
    model = save_model(tmp_path / "start")
    return {
        "model": str(model),
        "data": str(data),
        "output": str(tmp_path / "run"),
        "batch_size": 2,
        "save_every": 1,
    }


def stopped_at(step, settings, monkeypatch):
    """A run that ends with the checkpoint of ``step``."""
    save = checkpoint.save

    def then_die(directory, number, **parts):
        save(directory, number, **parts)
        if number == step:
            raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "save", then_die)
    with pytest.raises(KeyboardInterrupt):
        open_sft(SFT(**settings)).train()
    monkeypatch.undo()


@pytest.mark.parametrize("change", ["append", "edit", "cut"])
def test_a_run_goes_on_with_its_own_data_only(settings, tmp_path, monkeypatch, change):
    stopped_at(2, settings, monkeypatch)
    path = tmp_path / "messages.jsonl"
    lines = path.read_text().splitlines()
    edited = lines[0].replace(json.loads(lines[0])["messages"][0]["content"], "9+9=", 1)
    changed = {"append": [*lines, lines[0]], "edit": [edited, *lines[1:]], "cut": lines[:1]}[change]
    path.write_text("".join(line + "\n" for line in changed))
    with pytest.raises(
        checkpoint.CheckpointError, match="the data is not what step-00000002 was trained on"
    ):
        open_sft(SFT(**settings, resume=True)).train()


def test_a_run_and_its_data_may_be_moved(settings, tmp_path, monkeypatch):
    whole = {**settings, "output": str(tmp_path / "whole")}
    open_sft(SFT(**whole)).train()
    stopped_at(2, settings, monkeypatch)
    (tmp_path / "elsewhere").mkdir()
    moved = {"data": tmp_path / "elsewhere/messages.jsonl", "output": tmp_path / "elsewhere/run"}
    (tmp_path / "messages.jsonl").rename(moved["data"])
    (tmp_path / "run").rename(moved["output"])
    open_sft(
        SFT(**{**settings, **{name: str(path) for name, path in moved.items()}}, resume=True)
    ).train()
    expected, weights = (
        load_file(run / "model/model.safetensors") for run in (tmp_path / "whole", moved["output"])
    )
    assert all(torch.equal(weight, expected[name]) for name, weight in weights.items())


def test_the_model_is_on_the_disk_before_it_counts_as_written(
    settings, tmp_path, monkeypatch, capsys
):
    usual, synced, printed = os.fsync, {}, []

    def fsync(descriptor):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        usual(descriptor)
        printed.append(capsys.readouterr().out)
        if "the model is in" not in "".join(printed):
            synced[path] = path.stat().st_size

    monkeypatch.setattr(os, "fsync", fsync)
    open_sft(SFT(**settings, steps=1, lora=Lora(r=2))).train()
    run = tmp_path / "run"
    results = [
        path for name in ("model", "adapter") for path in (run / name, *(run / name).rglob("*"))
    ]
    assert {"model.safetensors", "adapter_model.safetensors", "tokenizer.json"} < {
        path.name for path in results
    }
    assert all(synced[path] == path.stat().st_size for path in results)
    assert run in synced


def test_a_run_that_needs_less_memory_goes_on_with_what_was_held_out_elsewhere(
    settings, tmp_path, monkeypatch
):
    settings |= {"dtype": "float64", "learning_rate": 1e-2, "eval_data": settings["data"]}
    whole = {**settings, "output": str(tmp_path / "whole")}
    open_sft(SFT(**whole)).train()
    stopped_at(2, settings, monkeypatch)
    changed = {
        "micro_tokens": 10,
        "gradient_checkpointing": True,
        "keep_bytes": 0,
        "backend": "torch",
    }
    changed |= {
        "layout": "padded",
        "attention": "sdpa",
        "eval_data": str(tmp_path / "held_out.jsonl"),
    }
    (tmp_path / "held_out.jsonl").write_bytes(Path(settings["data"]).read_bytes())
    with pytest.raises(
        ValueError,
        match=r"was run with model=.*, now it is 'start'; if it is the same one elsewhere,",
    ):
        open_sft(SFT(**{**settings, "model": "start"}, resume=True)).train()
    open_sft(SFT(**{**settings, **changed}, resume=True)).train()
    expected, weights = (
        load_file(tmp_path / run / "model/model.safetensors") for run in ("whole", "run")
    )
    assert all(
        torch.allclose(weight, expected[name], atol=1e-9) for name, weight in weights.items()
    )


def test_a_run_stays_in_its_directory_when_the_process_moves_to_another(
    settings, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for _ in open_sft(SFT(**{**settings, "output": "run"})):
        monkeypatch.chdir(tmp_path.parent)
    assert (tmp_path / "run/model/model.safetensors").exists() and not (
        tmp_path.parent / "run"
    ).exists()


def test_checkpoints_without_a_configuration_are_a_run(settings, tmp_path, monkeypatch):
    stopped_at(2, settings, monkeypatch)
    (tmp_path / "run/config.yaml").unlink()
    with pytest.raises(
        ValueError, match=r"output: .*run already holds a run; continue it \(--resume true\)"
    ):
        open_sft(SFT(**settings)).train()
    open_sft(SFT(**settings, resume=True)).train()
    assert (tmp_path / "run/config.yaml").exists()


def fails_in_training(logp: PerToken) -> tuple[PerToken, Stats]:
    if logp.requires_grad:
        raise ZeroDivisionError
    return -logp, {}


@pytest.mark.parametrize("held_out", [None, 2])
def test_a_run_that_ended_before_its_first_step_holds_no_directory(held_out, settings, tmp_path):
    settings |= {"eval_data": held_out, "steps": 1}
    with pytest.raises(ZeroDivisionError):
        open_sft(SFT(**settings, loss=fails_in_training)).train()
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0] * bool(held_out)
    open_sft(SFT(**settings)).train()
    with pytest.raises(ValueError, match="already holds a run"):
        open_sft(SFT(**settings))


def test_settings_of_ones_own_in_a_directory_are_not_written_over(settings, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text("# mine")
    with pytest.raises(ValueError, match="already holds a run"):
        open_sft(SFT(**settings))


def test_a_directory_has_one_writer(settings, tmp_path, monkeypatch):
    stopped_at(2, settings, monkeypatch)
    with (tmp_path / "run/.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="output: another process trains in"):
            open_sft(SFT(**settings, resume=True)).train()
    open_sft(SFT(**settings, resume=True)).train()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_gets_a_file_with_a_heartbeat(
    number, settings, tmp_path, monkeypatch
):
    usual = fcntl.flock

    def flock(file, operation):
        if isinstance(file, int):  # a cache's
            return usual(file, operation)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(lock, "_POLL", 0.05)
    monkeypatch.setattr(lock, "BEAT", 0.05)
    (tmp_path / "run").mkdir()
    with lock.heartbeat(tmp_path / "run"):
        with pytest.raises(
            ValueError,
            match=f"output: process {os.getpid()} on .* trains in .*wait for it, or name",
        ):
            open_sft(SFT(**settings)).train()
        assert not list(tmp_path.glob("run/checkpoints"))
    open_sft(SFT(**settings)).train()
    assert not list(tmp_path.glob("run/.lock.owner*"))


def test_of_two_runs_that_begin_at_once_one_is_refused(settings, monkeypatch):
    load, other = context.load_model, []

    def meanwhile(config, **options):
        monkeypatch.undo()
        other.append(open_sft(SFT(**settings)).train())
        return load(config, **options)

    monkeypatch.setattr(context, "load_model", meanwhile)
    with pytest.raises(ValueError, match="already holds a run"):
        open_sft(SFT(**settings)).train()
    assert len(other) == 1


def test_settings_that_came_later_have_their_defaults_in_an_older_run(
    settings, tmp_path, monkeypatch
):
    stopped_at(2, settings, monkeypatch)
    path = tmp_path / "run/config.yaml"
    written = yaml.safe_load(path.read_text())
    for group, name in (
        (written, "max_grad_norm"),
        (written["lora"], "alpha"),
        (written, "report_to"),
    ):
        del group[name]
    path.write_text(yaml.safe_dump(written))
    (tmp_path / "run/.config.yaml").unlink()
    with pytest.raises(ValueError, match=r"was run with max_grad_norm=1\.0, now it is 2\.0"):
        open_sft(SFT(**settings, resume=True, max_grad_norm=2.0)).train()
    open_sft(SFT(**settings, resume=True)).train()
    assert yaml.safe_load(path.read_text())["lora"]["alpha"] == SFT(**settings).lora.alpha


@pytest.mark.parametrize("content", ["", "steps: [1, 2\n"])
def test_a_damaged_configuration_without_its_spare_one_is_told_in_a_line(
    content, settings, tmp_path, monkeypatch
):
    stopped_at(2, settings, monkeypatch)
    (tmp_path / "run/config.yaml").write_text(content)
    (tmp_path / "run/.config.yaml").unlink()
    with pytest.raises(
        ValueError, match=r"resume: .*config\.yaml is damaged; write the run's settings into it"
    ):
        open_sft(SFT(**settings, resume=True)).train()


def warnings_of(caplog, word):
    return [record.getMessage() for record in caplog.records if word in record.getMessage()]


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content.replace(b"shuffle: true", b"shuffle: tsue"),
        lambda content: content.replace(b"seed: 0", b"seed: 1"),
        lambda content: content[: len(content) // 2],
        lambda content: bytes(len(content)),
        lambda content: b"\xff" + content[1:],
        lambda content: b"",
    ],
)
def test_a_damaged_configuration_is_not_blamed_on_the_settings(
    damage, settings, tmp_path, monkeypatch, caplog
):
    stopped_at(2, settings, monkeypatch)
    path = tmp_path / "run/config.yaml"
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert path.read_bytes() != whole
    open_sft(SFT(**settings, resume=True)).train()
    assert (
        len(
            warnings_of(
                caplog, "config.yaml was damaged or edited; the settings that the run began with"
            )
        )
        == 1
    )
    text = re.sub("resume: .*\n|# sha.*", "", whole.decode())
    assert re.sub("resume: .*\n|# sha.*", "", path.read_text()) == text


def test_changed_settings_are_told_though_the_configuration_was_damaged(
    settings, tmp_path, monkeypatch
):
    stopped_at(2, settings, monkeypatch)
    (tmp_path / "run/config.yaml").write_bytes(b"\0" * 99)
    with pytest.raises(ValueError, match="was run with seed=0, now it is 3; set it back"):
        open_sft(SFT(**settings, resume=True, seed=3)).train()


def test_a_configuration_that_was_edited_to_the_settings_now_is_believed(
    settings, tmp_path, monkeypatch, caplog
):
    stopped_at(2, settings, monkeypatch)
    path = tmp_path / "run/config.yaml"
    path.write_text(path.read_text().replace("max_grad_norm: 1.0", "max_grad_norm: 2.0"))
    open_sft(SFT(**settings, resume=True, max_grad_norm=2.0)).train()
    assert (
        len(
            warnings_of(
                caplog, "was edited since it was written, and the settings now are those in it"
            )
        )
        == 1
    )


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl"])
def test_a_disk_that_is_full_when_a_run_is_resumed_leaves_its_files_as_they_were(
    name, settings, tmp_path, monkeypatch
):
    stopped_at(2, settings, monkeypatch)
    before, usual = (tmp_path / "run" / name).read_bytes(), Path.open

    def full(path, mode="r", *arguments, **options):
        opened = usual(path, mode, *arguments, **options)
        if "w" in mode and path.stem == name.partition(".")[0]:
            opened.close()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return opened

    monkeypatch.setattr(Path, "open", full)
    told = rf"^{name} could not be written to .*: the disk is full .*step-00000002 is intact: make room and start again"
    with pytest.raises(checkpoint.CheckpointError, match=told):
        open_sft(SFT(**settings, resume=True)).train()
    monkeypatch.undo()
    assert (tmp_path / "run" / name).read_bytes() == before
    open_sft(SFT(**settings, resume=True)).train()


def test_other_steps_bend_the_schedule_which_is_said(settings, monkeypatch, caplog):
    stopped_at(2, settings, monkeypatch)
    open_sft(SFT(**settings, resume=True, steps=6)).train()
    assert (
        caplog.text.count("resume: steps was None, now it is 6: the learning rate continues as if")
        == 1
    )


def test_a_norm_of_zero_clips_nothing(settings, tmp_path):
    weights = []
    for norm in (0.0, 1e9):
        output = tmp_path / f"norm-{norm}"
        open_sft(
            SFT(**{**settings, "output": str(output)}, max_grad_norm=norm, learning_rate=1e-2)
        ).train()
        weights.append(load_file(output / "model/model.safetensors"))
    assert all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())
    start = load_file(tmp_path / "start/model.safetensors")
    assert not all(torch.equal(weight, start[name]) for name, weight in weights[0].items())


@pytest.mark.parametrize(
    ("tracker", "message"),
    [
        ("wandbb", "report_to: no tracker 'wandbb', did you mean 'wandb'"),
        ("clearml", "clearml is not installed"),
    ],
)
def test_a_tracker_that_is_not_there_stops_the_run_before_anything_is_loaded(
    settings, tmp_path, tracker, message
):
    with pytest.raises(ValueError, match=message):
        open_sft(SFT(**{**settings, "model": "nowhere"}, report_to=tracker)).train()
    assert not (tmp_path / "run").exists()


def test_no_tracker_is_named_none(settings):
    assert open_sft(SFT(**settings, report_to="none", steps=1)).train()["loss"] > 0


def test_on_two_ranks_both_end_where_another_process_holds_the_directory(tmp_path):
    fields = {**prepare(tmp_path), "output": str(tmp_path / "run")}
    (tmp_path / "run").mkdir()
    with (tmp_path / "run/.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        outcomes = run_forked(2, "online", fields)
    notes = [(tmp_path / f"run-rank{rank}.txt").read_text() for rank in (0, 1)]
    assert (
        notes[0]
        == f"output: another process trains in {tmp_path}/run; wait for it, or name another directory"
    )
    assert notes[1] == f"rank 1: the main process failed: ValueError: {notes[0]}"
    assert [status for status, _ in outcomes] == [1, 1]
