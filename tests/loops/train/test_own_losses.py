"""Losses of one's own: named ``module:function`` like rewards, or given as functions; their law is
in `test_law`.
"""

import json
import re
from functools import partial

import pytest
from burnish.loops.cli import main
from burnish.loops.train.losses import tensors_needed
from burnish.loops.train.mix import PAIR_LOSSES, parse_losses
from burnish.objectives import PerPair, PerSequence, PerToken, Stats
from jaxtyping import Float
from law import contrast, near_reference
from tiny import save_model, sums, write_rows
from torch import Tensor

SOURCE = """
from __future__ import annotations

from burnish.objectives import PerPair, PerToken, Stats

def hinged(chosen: PerPair, rejected: PerPair, difficulty: PerPair, *, gap: float = 1.0) -> tuple[PerPair, Stats]:
    loss = (gap - difficulty * (chosen - rejected)).relu()
    return loss, {"hinged/inside": (loss > 0).to(loss.dtype).detach()}

def careful(logp: PerToken, ref_logp: PerToken) -> tuple[PerToken, Stats]:
    return (logp - ref_logp).square(), {}

def plain(logp, ref_logp):
    return logp - ref_logp

def alone(chosen: PerPair) -> PerPair:
    return chosen

def dpo(chosen: PerPair, rejected: PerPair) -> tuple[PerPair, Stats]:
    return rejected - chosen, {}

weights = {"a": 1}
"""
FORM = "wanted the unit of each tensor, and a loss with its stats, as annotations of burnish.objectives; such as def "


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The name of a module in the working directory."""
    monkeypatch.chdir(tmp_path)
    name = f"losses_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    return name


@pytest.fixture
def command(tmp_path, capsys):
    """``command(rows, *flags)`` returns the exit status of dpo and what it says."""
    model = save_model(tmp_path / "start")

    def command(rows, *flags):
        places = ["--model", str(model), "--data", str(write_rows(tmp_path / "data.jsonl", rows))]
        status = main(["dpo", *places, "--output", str(tmp_path / "run"), "--steps", "2", *flags])
        said = capsys.readouterr()
        return status, said.out + said.err

    return command


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_loss_of_the_working_directory_joins_a_mix_by_its_name(own, command, tmp_path, dtype):
    rows = [{**pair, "difficulty": 0.5 + i / 10} for i, pair in enumerate(sums(8))]
    mix = f"{{dpo: 1.0, '{own}:hinged': {{coefficient: 0.5, gap: 2.0}}, '{own}:careful': 0.1}}"
    status, said = command(rows, "--loss", mix, "--dtype", dtype)
    assert status == 0, said
    for line in map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines()):
        assert line["loss"] == pytest.approx(
            line["dpo"] + 0.5 * line["hinged"] + 0.1 * line["careful"]
        )
        assert line["hinged/inside"] > 0
    assert line["careful"] > 0  # the policy has left its reference


def test_a_missing_column_is_told_with_the_columns_that_rows_have(own, command):
    status, said = command(
        [{**pair, "ease": 0.5, "source": "a"} for pair in sums(4)], "--loss", f"{own}:hinged"
    )
    assert status == 1
    assert (
        "no column 'difficulty', which a loss reads; of columns of numbers, there are ease" in said
    )


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ("{own}:hingd", "loss {own}:hingd: {own} has no 'hingd', did you mean 'hinged'?"),
        ("nowhere:hinged", "loss nowhere:hinged: no module 'nowhere' in"),
        (
            "{own}:hinged",
            "data: no column 'difficulty', which a loss reads; of columns of numbers, there are none",
        ),
        ("{own}:weights", "loss weights: wanted a function of tensors, got {{'a': 1}}"),
        ("{{'{own}:dpo': 1, dpo: 1}}", "loss: two are called dpo; rename your own"),
        ("{{'{own}:hinged': {{gapp: 1}}}}", "loss: hinged has no 'gapp'; it has gap"),
        (
            "{own}:plain",
            "loss plain: wanted the unit of each tensor, and a loss with its stats, as annotations of",
        ),
    ],
    ids=lambda value: value.partition(":")[2][:12],
)
def test_a_loss_that_cannot_be_is_refused_in_one_line(own, command, loss, message):
    status, said = command(sums(4), "--loss", loss.format(own=own))
    assert status == 1
    (line,) = [line for line in said.splitlines() if line.startswith("burnish dpo: ")]
    assert message.format(own=own) in line


def test_its_signature_asks_for_its_tensors():
    losses = parse_losses(
        {"dpo": 1.0, contrast: {"gap": 2.0}, near_reference: 0.1}, {"beta": 0.1}, PAIR_LOSSES
    )
    assert list(losses) == ["dpo", "contrast", "near_reference"]
    assert [loss.unit for loss in losses.values()] == ["pairs", "pairs", "tokens"]
    assert {"mean_chosen", "mean_rejected", "logp", "ref_logp"} <= tensors_needed(losses)
    assert losses["contrast"].columns == losses["near_reference"].columns == ()
    (bound,) = parse_losses(partial(contrast, gap=3.0), {}, PAIR_LOSSES).values()
    assert bound.function.keywords["gap"] == 3.0


def per_step(logp: PerToken, scale: float) -> tuple[PerToken, Stats]:
    return logp * scale, {}


def without_stats(chosen: PerPair) -> PerPair:
    return chosen


def bare(chosen, rejected, beta=0.1):
    return -beta * (chosen - rejected), {}


@pytest.mark.parametrize(
    ("loss", "form"),
    [
        (per_step, "per_step(logp: PerToken, scale: PerToken) -> tuple[PerToken, Stats]"),
        (without_stats, "without_stats(chosen: PerPair) -> tuple[PerPair, Stats]"),
        (lambda logp: (logp, {}), "<lambda>(logp: PerToken) -> tuple[PerToken, Stats]"),
        (bare, "bare(chosen: PerPair, rejected: PerPair, *, beta) -> tuple[PerPair, Stats]"),
    ],
)
def test_a_function_of_another_form_is_refused_with_the_form_that_it_wants(loss, form):
    with pytest.raises(ValueError, match=re.escape(FORM + form)):
        parse_losses(loss, {}, PAIR_LOSSES)


def test_a_function_in_the_place_of_a_coefficient_is_told_where_it_belongs():
    with pytest.raises(
        ValueError,
        match=r"loss: mine: wanted a number .* your own function is a key: {function: 1.0}",
    ):
        parse_losses({"mine": contrast}, {}, PAIR_LOSSES)


def test_a_loss_may_take_one_number_for_the_whole_step():
    def centered(logp: PerSequence, kl: Float[Tensor, ""]) -> tuple[PerSequence, Stats]:
        return logp - kl, {}

    (loss,) = parse_losses(centered, {}, PAIR_LOSSES).values()
    assert loss.unit == "sequences" and loss.columns == ()
