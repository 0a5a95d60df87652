"""The gallery of objectives is what the code says today: words, curves and pictures."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from burnish import objectives
from burnish.benchmarks.docs import gallery
from burnish.benchmarks.docs.panels import PANELS, UNDRAWN, Axis, Panel, trace
from PIL import Image

REMEDY = f"docs/objectives.md is not what the code says; run: {gallery.COMMAND}"
PAGE = gallery.HOME / "objectives.md"
ENTRIES = {entry.name: entry for room in gallery.entries().values() for entry in room}
LOSSES = {name for name, entry in ENTRIES.items() if entry.is_loss}
DRAWN = [module for module in gallery.entries() if gallery.panels_of(module)]


PICTURES = {path.stem: path for path in (gallery.HOME / "gallery").iterdir()}


def shown_in(picture: Path) -> dict:
    with Image.open(picture) as opened:
        return json.loads(opened.text[gallery.SAMPLES])


def same(one: object, other: object) -> bool:
    """Equal, numbers up to what another processor may round differently."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-9)
    return one == other


def is_fresh() -> bool:
    return PAGE.read_text() == gallery.text()


def test_the_page_is_what_the_generator_writes():
    assert is_fresh(), REMEDY


def test_a_new_objective_makes_the_page_stale(monkeypatch):
    def dpo_again(chosen: objectives.PerPair) -> tuple[objectives.PerPair, objectives.Stats]:
        """DPO, again: ℓ = 0."""
        return chosen, {}

    dpo_again.__module__ = objectives.dpo.__module__
    monkeypatch.setattr(objectives, "dpo_again", dpo_again, raising=False)
    assert not is_fresh()


def test_every_public_function_has_one_entry():
    public = [
        name
        for name, function in vars(objectives).items()
        if callable(function)
        and getattr(function, "__module__", "").startswith("burnish.objectives")
    ]
    assert sorted(re.findall(r"^### (\w+)$", PAGE.read_text(), flags=re.M)) == sorted(public), (
        REMEDY
    )


def test_every_loss_has_a_panel_or_a_reason_to_have_none():
    assert PANELS.keys() <= ENTRIES.keys()
    assert PANELS.keys() & UNDRAWN.keys() == set()
    missing = LOSSES - PANELS.keys() - UNDRAWN.keys()
    assert not missing, f"add them to benchmarks/docs/panels.py, then run: {gallery.COMMAND}"


def test_losses_are_drawn_with_their_gradients_and_all_curves_are_finite():
    for name, panel in PANELS.items():
        assert (panel.of == "loss") == (name in LOSSES), name
        for label in panel.curves:
            lines = trace(panel, label)
            assert ("gradient" in lines) == (name in LOSSES)
            assert all(math.isfinite(y) for line in lines.values() for y in line), (name, label)


@pytest.mark.parametrize("name", sorted(ENTRIES))
def test_an_entry_says_what_it_is_for_and_of_what_unit(name):
    entry = ENTRIES[name]
    assert entry.purpose.endswith("."), (
        f"{name}: the docstring's first line should say in a sentence what it is for"
    )
    assert not re.match(r"→|.*→ *$", entry.unit) and entry.unit


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_a_loss_has_its_formula_and_its_paper(name):
    assert "=" in ENTRIES[name].formula, (
        f"{name}: the docstring should have its equation in an indented block"
    )
    assert ENTRIES[name].paper or name == "nll", (
        f"{name}: the docstring should have a line `Paper: authors year, id`"
    )


@pytest.mark.parametrize(
    ("name", "unit", "reference", "needs"),
    [
        ("nll", "token", False, []),
        ("dpo", "pair", True, []),
        ("f_divergence_score", "any shape", True, ["log-ratios"]),
        ("simpo", "pair", False, []),
        ("kto", "completion", True, ["labels", "one number for the whole step"]),
        ("step_loss", "token", False, ["labels"]),
        ("plackett_luce", "completion", False, ["groups", "ranks"]),
        ("gspo", "token, completion → completion", False, ["log-probs of π_old", "advantages"]),
        ("forward_kl", "token", False, ["a teacher"]),
        (
            "sampler_mismatch",
            "token → statistics",
            False,
            ["log-probs of π_old", "the sampler's log-probs"],
        ),
    ],
)
def test_units_and_needs_are_read_from_the_signature(name, unit, reference, needs):
    entry = ENTRIES[name]
    assert (entry.unit, entry.needs_reference, entry.needs) == (unit, reference, needs)


def test_the_parts_of_a_docstring_are_told_apart():
    def loss(
        logp: objectives.PerToken, *, beta: float = 1.0
    ) -> tuple[objectives.PerToken, objectives.Stats]:
        """What it is for,
        in a sentence.

            ℓ = −β log p
            β > 0

        More of it.

        Args:
            logp: log p
                of a token.
            beta: β.

        Paper: Somebody 2020, arXiv:2001.00001,
        Eq. 1.
        """
        return -beta * logp, {}

    entry = gallery.Entry(loss)
    assert entry.purpose == "What it is for, in a sentence."
    assert entry.formula == "ℓ = −β log p\nβ > 0"
    assert entry.arguments == ["`logp`: log p of a token.", "`beta`: β."]
    assert entry.paper == "Somebody 2020, arXiv:2001.00001, Eq. 1."
    assert entry.call == "loss(logp, *, beta=1.0)"


def test_papers_and_names_become_links_but_code_does_not():
    page = "`dpo` of arXiv:2305.18290\n    `dpo` of arXiv:2305.18290\n``dpo`` and `else`\n"
    linked = "[`dpo`](#dpo) of [arXiv:2305.18290](https://arxiv.org/abs/2305.18290)"
    assert (
        gallery._linked(page, {"dpo"})
        == f"{linked}\n    `dpo` of arXiv:2305.18290\n``dpo`` and `else`\n"
    )


def test_every_link_of_the_page_leads_somewhere():
    page = PAGE.read_text()
    headings = set(re.findall(r"^#+ (\w+)$", page, flags=re.M))
    assert set(re.findall(r"\]\(#(\w+)\)", page)) <= headings
    assert set(re.findall(r"\]\((gallery/[^)]+)\)", page)) == {
        f"gallery/{module}.png" for module in PICTURES
    }


def test_there_is_a_light_picture_of_every_module_that_has_panels():
    assert PICTURES.keys() == set(DRAWN), REMEDY
    sizes = {module: path.stat().st_size for module, path in PICTURES.items()}
    assert max(sizes.values()) < 150_000, sizes


@pytest.mark.parametrize("module", DRAWN)
def test_a_picture_shows_the_curves_of_today(module):
    assert module in PICTURES, REMEDY
    assert same(shown_in(PICTURES[module]), gallery.samples(module)), (
        f"{module}.png is stale; run: {gallery.COMMAND}"
    )


def test_a_curve_that_moved_is_told_from_rounding():
    curves = gallery.samples("feedback")
    moved = json.loads(json.dumps(curves))
    moved["kto"]["curves"]["desirable, z₀ = 1"]["gradient"][3] *= 1 + 1e-12
    assert same(moved, curves)
    moved["kto"]["curves"]["desirable, z₀ = 1"]["gradient"][3] *= 1 + 1e-5
    assert not same(moved, curves)


def test_a_trace_is_the_function_and_its_derivative():
    square = Panel(Axis("x", -1.0, 2.0), {"": lambda x: x.square()})
    lines = {
        name: torch.tensor(line, dtype=torch.float64) for name, line in trace(square, "").items()
    }
    torch.testing.assert_close(lines["value"], lines["x"] ** 2)
    torch.testing.assert_close(lines["gradient"], 2 * lines["x"])


def test_drawing_a_module_puts_its_samples_into_the_picture(tmp_path):
    gallery.draw("sequence", tmp_path / "sequence.png")
    assert same(shown_in(tmp_path / "sequence.png"), gallery.samples("sequence"))
    with Image.open(tmp_path / "sequence.png") as picture:
        assert len(picture.convert("RGB").getcolors()) > 8
