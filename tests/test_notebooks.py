"""The notebooks of examples/notebooks run as scripts, and show what they say."""

import re
import runpy
from pathlib import Path

import pytest

NOTEBOOKS = Path(__file__).parents[1] / "examples/notebooks"


def run(name, capsys, monkeypatch, tmp_path):
    """What the notebook prints, its model and runs in a directory of the test."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    runpy.run_path(str(NOTEBOOKS / name))
    return capsys.readouterr().out


def percent(printed, what):
    return float(re.search(rf"{what}: ([\d.]+)%", printed)[1])


@pytest.mark.slow
def test_dpo_on_its_own_answers_makes_more_of_them_right(capsys, monkeypatch, tmp_path):
    printed = run("sft_to_dpo.py", capsys, monkeypatch, tmp_path)
    assert percent(printed, "accuracy after DPO") > percent(printed, "accuracy after SFT") + 10


@pytest.mark.slow
def test_a_reward_of_ones_own_teaches(capsys, monkeypatch, tmp_path):
    printed = run("own_reward.py", capsys, monkeypatch, tmp_path)
    assert "1.0 0.5 0.0" in printed
    assert percent(printed, "accuracy after") > percent(printed, "accuracy before") + 10


@pytest.mark.slow
def test_a_composed_loss_has_the_gradient_of_its_parts(capsys, monkeypatch, tmp_path):
    printed = run("compose_a_loss.py", capsys, monkeypatch, tmp_path)
    assert re.search(r"margin +\+0 +loss 0\.693 +push \+0\.050", printed)
    assert "push of the hinge: ['+0.10', '+0.10', '+0.00', '+0.00']" in printed


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.py")), ids=lambda path: path.name)
def test_a_notebook_is_made_of_cells(path):
    text = path.read_text()
    assert text.startswith("# %% [markdown]\n# # ")
    cells = re.split(r"^# %%", text, flags=re.M)[1:]
    assert any(not cell.startswith(" [markdown]") for cell in cells)
    for cell in cells:
        if cell.startswith(" [markdown]"):
            assert all(line.startswith("#") for line in cell.strip().splitlines()[1:]), cell
