"""What a run shows: its journal, and which metrics are in its picture."""

import json

import pytest
import torch.distributed as dist
from accelerate import Accelerator
from burnish.loops.config import Common
from burnish.loops.runs.report import draw_curves, foremost, journal, read_curves
from matplotlib.figure import Figure


@pytest.fixture
def metrics(tmp_path):
    """Metrics of a recipe that has more than there is room for."""
    many = {f"sampling/{i}": float(i) for i in range(30)}
    steps = [{"step": step, "tokens": 9.0, **many, "loss": 1 / step, "reward": step, "kl": 0.1} for step in (1, 2)]
    steps[1] |= {"eval/loss": 0.4, "eval/accuracy": 0.5, "sampling/7": float("inf")}
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(step) + "\n" for step in steps))
    return path


def test_what_is_held_out_is_in_the_panel_of_its_twin_and_what_is_not_finite_is_in_none(metrics):
    curves = read_curves(metrics)
    assert curves["loss"] == {"training": [(1, 1.0), (2, 0.5)], "held out": [(2, 0.4)]}
    assert curves["sampling/7"] == {"training": [(1, 7.0)]}
    assert "tokens" not in curves and "step" not in curves


def test_of_too_many_metrics_the_foremost_are_drawn(metrics):
    names = list(foremost(read_curves(metrics)))
    assert names == ["loss", "reward", "accuracy", "kl", *(f"sampling/{i}" for i in range(8))]


def test_the_picture_has_a_panel_for_each(metrics, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **options: drawn.append(figure))
    draw_curves(metrics, tmp_path / "curves.png")
    assert [axis.get_title() for axis in drawn[0].axes] == list(foremost(read_curves(metrics)))
    assert [line.get_label() for line in drawn[0].axes[0].lines] == ["training", "held out"]


def test_a_run_without_metrics_has_no_picture(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    draw_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png")
    assert not (tmp_path / "curves.png").exists()


def test_single_points_are_no_curve(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 0.7, "grad_norm": 1.0}) + "\n")
    draw_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png")
    assert not (tmp_path / "curves.png").exists()


def test_a_resumed_journal_takes_back_the_steps_after_and_half_a_line(tmp_path):
    lines = [json.dumps({"step": step, "loss": 0.5}) + "\n" for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join([*lines, '{"step": 4, "lo']))
    config = Common("model", "data", str(tmp_path))
    with journal(tmp_path, 2, 3, Accelerator(), config, steps_per_epoch=1.0) as log:
        log(3, {"loss": 0.4})
    assert (tmp_path / "metrics.jsonl").read_text() == "".join(lines[:2]) + '{"step": 3, "loss": 0.4}\n'


def test_ranks_can_still_meet_when_the_trackers_have_finished(tmp_path):
    accelerator = Accelerator(log_with="tensorboard", project_dir=tmp_path)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        with journal(tmp_path, 0, 1, accelerator, Common("model", "data", str(tmp_path)), steps_per_epoch=1.0):
            pass
        assert dist.is_initialized()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
