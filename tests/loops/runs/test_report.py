"""What a run shows: its journal, and which metrics are in its picture."""

import json
import os
import tracemalloc

import pytest
import torch.distributed as dist
from accelerate import Accelerator
from burnish.loops.config import Common
from burnish.loops.runs.report import (
    draw_curves,
    entries,
    journal,
    most_important,
    read_curves,
    written,
)
from matplotlib.figure import Figure


@pytest.fixture
def metrics(tmp_path):
    """Metrics of a recipe that has more than there is room for."""
    many = {f"sampling/{i}": float(i) for i in range(30)}
    steps = [
        {"step": step, "tokens": 9.0, **many, "loss": 1 / step, "reward": step, "kl": 0.1}
        for step in (1, 2)
    ]
    steps[1] |= {"eval/loss": 0.4, "eval/accuracy": 0.5, "sampling/7": float("inf")}
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(step) + "\n" for step in steps))
    return path


def test_held_out_metrics_share_a_panel_with_their_twin_and_infinite_ones_have_none(metrics):
    curves = read_curves(metrics)
    assert curves["loss"] == {"training": [(1, 1.0), (2, 0.5)], "held out": [(2, 0.4)]}
    assert curves["sampling/7"] == {"training": [(1, 7.0)]}
    assert "tokens" not in curves and "step" not in curves


def test_of_too_many_metrics_the_foremost_are_drawn(metrics):
    names = list(most_important(read_curves(metrics)))
    assert names == ["loss", "reward", "accuracy", "kl", *(f"sampling/{i}" for i in range(8))]


def test_the_picture_has_a_panel_for_each(metrics, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **options: drawn.append(figure))
    draw_curves(metrics, tmp_path / "curves.png")
    assert [axis.get_title() for axis in drawn[0].axes] == list(
        most_important(read_curves(metrics))
    )
    assert [line.get_label() for line in drawn[0].axes[0].lines] == ["training", "held out"]


def test_a_run_without_metrics_has_no_picture(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    draw_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png")
    assert not (tmp_path / "curves.png").exists()


def test_single_points_are_no_curve(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        json.dumps({"step": 1, "loss": 0.7, "grad_norm": 1.0}) + "\n"
    )
    draw_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png")
    assert not (tmp_path / "curves.png").exists()


def test_a_resumed_journal_takes_back_the_steps_after_and_half_a_line(tmp_path):
    lines = [json.dumps({"step": step, "loss": 0.5}) + "\n" for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join([*lines, '{"step": 4, "lo']))
    config = Common("model", "data", str(tmp_path))
    with journal(tmp_path, 2, 3, Accelerator(), config, steps_per_epoch=1.0) as log:
        log(3, {"loss": 0.4})
    assert (tmp_path / "metrics.jsonl").read_text() == "".join(
        lines[:2]
    ) + '{"step": 3, "loss": 0.4}\n'


def test_ranks_can_still_meet_when_the_trackers_have_finished(tmp_path):
    accelerator = Accelerator(log_with="tensorboard", project_dir=tmp_path)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        with journal(
            tmp_path, 0, 1, accelerator, Common("model", "data", str(tmp_path)), steps_per_epoch=1.0
        ):
            pass
        assert dist.is_initialized()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


DAMAGED = [
    b"{",
    b"[1, 2]",
    b'{"loss": 0.5}',
    b'{"step": "2"}',
    b'{"step": 2, "loss": "low"}',
    b'{"step": 1}{"step": 2}',
    b"\0" * 64,
    b'{"step": 2, "l\xffss": 0.5}',
    b'{"step": 2, "loss": ' + b"[" * 100_000,
]


@pytest.mark.parametrize("line", DAMAGED, ids=range(len(DAMAGED)))
def test_a_line_of_the_journal_that_cannot_be_read_is_set_aside_and_counted(line, tmp_path, caplog):
    good = [
        json.dumps({"step": step, "loss": 0.5, "input_tokens": 10.0}).encode() for step in (1, 2, 3)
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"\n".join([good[0], line, *good[1:], b""]))
    assert read_curves(path)["loss"] == {"training": [(1, 0.5), (2, 0.5), (3, 0.5)]}
    assert [entry["step"] for entry in written(tmp_path, 2)] == [1, 2]
    config = Common("model", "data", str(tmp_path))
    with journal(tmp_path, 2, 3, Accelerator(), config, steps_per_epoch=1.0) as log:
        log(3, {"loss": 0.25})
    assert (
        path.read_bytes().splitlines()[:2] == good[:2] and len(path.read_bytes().splitlines()) == 3
    )
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == line + b"\n"
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "1 of its lines can't be read and are in metrics.jsonl.damaged" in warning


def test_a_directory_in_place_of_the_journal_is_moved_away(tmp_path, caplog):
    (tmp_path / "metrics.jsonl").mkdir()
    config = Common("model", "data", str(tmp_path))
    with journal(tmp_path, 2, 3, Accelerator(), config, steps_per_epoch=1.0) as log:
        log(3, {"loss": 0.25})
    assert (tmp_path / "metrics.jsonl.damaged").is_dir() and len(caplog.records) == 1
    assert [entry["step"] for entry in entries(tmp_path / "metrics.jsonl")] == [3]


def test_a_journal_that_ends_before_the_checkpoint_is_said(tmp_path, caplog):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 0.5}) + "\n")
    config = Common("model", "data", str(tmp_path))
    with journal(tmp_path, 2, 3, Accelerator(), config, steps_per_epoch=1.0):
        pass
    assert "it ends at step 1, and the run goes on from step 2" in caplog.text


def test_a_long_journal_is_taken_back_in_bounded_memory(tmp_path):
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(1, 20_001):
            file.write(json.dumps({"step": step, "loss": 0.5, "text": 1.0}) + " " * 500 + "\n")
    tracemalloc.start()
    try:
        config = Common("model", "data", str(tmp_path))
        with journal(tmp_path, 20_000, 20_001, Accelerator(), config, steps_per_epoch=1.0):
            pass
        assert tracemalloc.get_traced_memory()[1] < 3_000_000  # the file has eleven
    finally:
        tracemalloc.stop()


def test_the_journal_is_on_the_disk_at_the_end_of_a_run_that_stops(tmp_path, monkeypatch):
    synced, usual = [], os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda file: (synced.append(os.readlink(f"/proc/self/fd/{file}")), usual(file))
    )
    config = Common("model", "data", str(tmp_path))
    with journal(tmp_path, 0, 9, Accelerator(), config, steps_per_epoch=1.0) as log:
        for step in (1, 2, 3):
            log(step, {"loss": 0.25})
        during = synced.count(str(tmp_path / "metrics.jsonl"))
    assert 1 <= during <= 3 and synced[-1] == str(tmp_path / "metrics.jsonl")
