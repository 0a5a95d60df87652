"""The gallery of objectives: purpose, arguments, formula, paper and curves of each.

    python -m burnish.benchmarks.docs.gallery

writes docs/objectives.md and one picture per module under docs/gallery. The words come
from docstrings and signatures, the curves from calls of the functions, see `panels`. A picture
carries samples of the curves it shows, in its PNG text, so that a test can tell whether it is still
true.
"""

import inspect
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any, get_args, get_origin

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from ... import objectives
from ..report import figure
from .markdown import wrapped
from .panels import PANELS, UNDRAWN, Panel, trace

HOME = Path(__file__).parents[2] / "docs"
COMMAND = "python -m burnish.benchmarks.docs.gallery"
SAMPLES = "curves"  # the key of a picture's text

_COLORS = ("#1f62a8", "#d2601a", "#2f8f5b", "#8457a6")
_INK = "#444444"
_WIDTH, _HEIGHT = 2.8, 2.25  # inches, of one panel
_EVERY = 32  # of so many points one is sampled

_UNITS = {"sequences": "completion", "": "batch"}  # others are the singular of their dimension
# Data an objective needs beside the policy's log-probs, by the names of its arguments.
_NEEDS = {
    "old_logp": "log-probs of π_old",
    "proximal_logp": "log-probs of a proximal policy",
    "behavior_logp": "the sampler's log-probs",
    "log_ratio": "log-ratios",
    "advantage": "advantages",
    "reward": "rewards",
    "teacher_logp": "a teacher",
    "old_value": "a critic",
    "value": "a critic",
    "group": "groups",
    "rank": "ranks",
    "desirable": "labels",
    "penalized": "a mask",
    "covariance": "covariances",
    "greedy_reward": "rewards of greedy completions",
    "label": "labels",
    "target": "targets",
}


@dataclass(frozen=True)
class Entry:
    """A public function of `burnish.objectives`, read from its docstring and its signature."""

    function: Callable[..., Any]

    @property
    def name(self) -> str:
        return self.function.__name__

    @property
    def module(self) -> str:
        return self.function.__module__.rpartition(".")[2]

    @cached_property
    def signature(self) -> inspect.Signature:
        return inspect.signature(self.function)

    @property
    def is_loss(self) -> bool:
        """True if it returns ``(loss, stats)``."""
        returned = self.signature.return_annotation
        return get_origin(returned) is tuple and get_origin(get_args(returned)[1]) is dict

    @cached_property
    def purpose(self) -> str:
        """The docstring's first sentence, without the formula that may follow it."""
        return self._first_line[0]

    @cached_property
    def formula(self) -> str:
        """The first indented block of the docstring, or what its first line says after
        ``: ℓ =``.
        """
        blocks = [
            block
            for block in self._blocks
            if all(line.startswith("    ") for line in block.splitlines())
        ]
        return inspect.cleandoc(blocks[0]) if blocks else self._first_line[1]

    @cached_property
    def paper(self) -> str:
        return _one_line(re.sub(r"^\w+: ", "", self._block("Paper:") or self._block("Source:")))

    @cached_property
    def arguments(self) -> list[str]:
        """The lines of ``Args:``, names as code."""
        lines = inspect.cleandoc(self._block("Args:").removeprefix("Args:"))
        return [
            re.sub(r"^([\w, ]+):", r"`\1`:", _one_line(line))
            for line in re.split(r"\n(?! )", lines)
            if line
        ]

    @property
    def call(self) -> str:
        """The call without its annotations."""
        parts, keyword_only = [], False
        for parameter in self.signature.parameters.values():
            if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
                parts.append("*")
                keyword_only = True
            default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
            parts.append(parameter.name + default)
        return f"{self.name}({', '.join(parts)})"

    @property
    def unit(self) -> str:
        """The unit of its entries, in and out: a token, a completion, a pair."""
        units = [_unit(parameter.annotation) for parameter in self.signature.parameters.values()]
        read = (
            ", ".join(dict.fromkeys(unit for unit in units if unit not in ("", "batch")))
            or "any shape"
        )
        returned = self.signature.return_annotation
        made = _unit(get_args(returned)[0] if get_origin(returned) is tuple else returned)
        if get_origin(returned) is dict:
            made = "statistics"
        return f"{read} → {made}" if made not in ("", read) else read

    @property
    def needs_reference(self) -> bool:
        named = any(name.startswith("ref_") or name == "kl" for name in self.signature.parameters)
        return named or "π_ref" in self.purpose + self.formula

    @property
    def needs(self) -> list[str]:
        parameters = self.signature.parameters.items()
        found = [_NEEDS[name] for name, _ in parameters if name in _NEEDS]
        found += [
            "one number for the whole step" for _, p in parameters if _unit(p.annotation) == "batch"
        ]
        return list(dict.fromkeys(found))

    @cached_property
    def _blocks(self) -> list[str]:
        return re.split(r"\n\s*\n", inspect.cleandoc(self.function.__doc__ or ""))

    @property
    def _first_line(self) -> tuple[str, str]:
        purpose, found, formula = _one_line(self._blocks[0]).partition(": ℓ = ")
        return (f"{purpose}.", f"ℓ = {formula.rstrip('.')}") if found else (purpose, "")

    def _block(self, start: str) -> str:
        return next((block for block in self._blocks if block.startswith(start)), "")


def entries() -> dict[str, list[Entry]]:
    """The public functions of each module, in the order of the package's docstring and of the
    source.
    """
    public = [
        Entry(function) for function in vars(objectives).values() if inspect.isfunction(function)
    ]
    public.sort(key=lambda entry: inspect.unwrap(entry.function).__code__.co_firstlineno)
    modules = re.findall(r"^ +(\w+)  ", objectives.__doc__ or "", flags=re.M)
    modules += sorted({entry.module for entry in public} - set(modules))
    rooms = {module: [entry for entry in public if entry.module == module] for module in modules}
    return {module: room for module, room in rooms.items() if room}


def text() -> str:
    """The page docs/objectives.md."""
    rooms = entries()
    names = {entry.name for room in rooms.values() for entry in room} | rooms.keys()
    contents = [
        f"- [**{module}**](#{module}): {' · '.join(f'[{entry.name}](#{entry.name})' for entry in room)}"
        for module, room in rooms.items()
    ]
    sections = [_section(module, room) for module, room in rooms.items()]
    page = _linked(
        f"""# Objectives

Made by `{COMMAND}`: the words are read from docstrings and signatures, the curves are drawn by calling the functions.

{chr(10).join(contents)}

In the pictures a thick line is the loss, and a thin dashed one its gradient along the axis. Where the axis shows a
probability, the gradient is that of its logit; where it shows a ratio, that of log π. β = 1 throughout, and other
hyper-parameters have their defaults unless a curve names them.

{chr(10).join(sections)}""",
        names,
    )
    return wrapped(page)


def samples(module: str) -> dict[str, Any]:
    """The words of each panel of a module, and some points of its curves."""
    return {
        name: {
            "axis": panel.axis.label,
            "of": panel.of,
            "curves": {
                label: {what: numbers[::_EVERY] for what, numbers in trace(panel, label).items()}
                for label in panel.curves
            },
        }
        for name, panel in panels_of(module).items()
    }


def panels_of(module: str) -> dict[str, Panel]:
    return {entry.name: PANELS[entry.name] for entry in entries()[module] if entry.name in PANELS}


def draw(module: str, picture: Path) -> None:
    """One panel per drawn function of a module."""
    panels = panels_of(module)
    # the fewest gaps
    columns = min(len(panels), min((4, 3), key=lambda columns: -len(panels) % columns))
    rows = -(-len(panels) // columns)
    drawing = figure(_WIDTH * columns, _HEIGHT * rows + 0.25)
    all_axes = list(drawing.subplots(rows, columns, squeeze=False).flat)
    for axes, (name, panel) in zip(all_axes, panels.items(), strict=False):
        _draw_panel(axes, name, panel)
    for axes in all_axes[len(panels) :]:
        axes.remove()
    if any(panel.of == "loss" for panel in panels.values()):
        styles: list[dict[str, Any]] = [
            {"linewidth": 2},
            {"linewidth": 1, "linestyle": (0, (4, 2))},
        ]
        lines = [Line2D([], [], color=_INK, **style) for style in styles]
        drawing.legend(
            lines,
            ["loss", "gradient"],
            loc="outside upper right",
            ncols=2,
            frameon=False,
            fontsize=8,
        )
    drawn, words = BytesIO(), PngInfo()
    drawing.savefig(drawn, dpi=130)
    words.add_text(SAMPLES, json.dumps(samples(module)), zip=True)
    # a third as large, looks the same
    colors = Image.open(drawn).convert("RGB").quantize(64, dither=Image.Dither.NONE)
    colors.save(picture, pnginfo=words, optimize=True)


def _draw_panel(axes: Axes, name: str, panel: Panel) -> None:
    for color, label in zip(_COLORS, panel.curves, strict=False):
        line = trace(panel, label)
        axes.plot(line["x"], line["value"], color=color, linewidth=2, label=label)
        if "gradient" in line:
            axes.plot(line["x"], line["gradient"], color=color, linewidth=1, linestyle=(0, (4, 2)))
    axes.axhline(0, color="#9a9a9a", linewidth=0.8, zorder=1)
    axes.set_ylim(panel.bottom, panel.top)
    axes.set_xlim(*(round(float(end), 1) for end in panel.axis.shown(panel.axis.grid()[[0, -1]])))
    axes.set_title(name, fontsize=9.5, fontweight="bold", loc="left", color="#222222")
    if panel.of != "loss":
        axes.set_title(panel.of, fontsize=8, loc="right", color=_INK)
    axes.set_xlabel(panel.axis.label, fontsize=8, color=_INK, labelpad=2)
    axes.tick_params(labelsize=7, length=0, colors=_INK)
    axes.grid(color="#e4e4e4", linewidth=0.7)
    axes.set_axisbelow(True)
    for spine in axes.spines.values():
        spine.set_visible(False)
    if any(panel.curves):
        axes.legend(
            fontsize=7, frameon=False, handlelength=1.2, labelspacing=0.25, borderaxespad=0.2
        )


def _section(module: str, room: list[Entry]) -> str:
    picture = (
        f"![Curves of the {module} objectives](gallery/{module}.png)\n\n"
        if panels_of(module)
        else ""
    )
    notes = inspect.getdoc(sys.modules[room[0].function.__module__])
    return f"## {module}\n\n{notes}\n\n{picture}" + "\n".join(_card(entry) for entry in room)


def _card(entry: Entry) -> str:
    facts = [f"`{entry.call}`"]
    facts.append(
        f"**Data** {entry.unit} · **reference policy** {'yes' if entry.needs_reference else 'no'}"
    )
    if entry.needs:
        facts[-1] += f" · **needs** {', '.join(entry.needs)}"
    if entry.paper:
        facts.append(f"**Paper** {entry.paper}")
    if entry.name in UNDRAWN:
        facts.append(f"**No curve**, since {UNDRAWN[entry.name]}.")
    parts = [f"### {entry.name}", entry.purpose]
    if entry.formula:
        parts.append("\n".join(f"    {line}".rstrip() for line in entry.formula.splitlines()))
    parts.append("  \n".join(facts))
    if entry.arguments:
        parts.append("\n".join(f"- {line}" for line in entry.arguments))
    return "\n\n".join(parts) + "\n"


def _unit(annotation: object) -> str:
    """The unit of a jaxtyping annotation is its first dimension; what has none is no unit of
    data.
    """
    for kind in (annotation, *get_args(annotation)):
        if hasattr(kind, "dim_str"):
            dimension = next(iter(kind.dim_str.replace("*", " ").split()), "")
            return _UNITS.get(dimension, dimension.removesuffix("s"))
    return ""


def _linked(page: str, names: set[str]) -> str:
    """Papers as links to arXiv, names in backticks as links to their entries.

    Code stays as it is.
    """

    def link(line: str) -> str:
        if line.startswith("    "):
            return line
        line = re.sub(r"arXiv:(\d{4}\.\d{4,5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", line)
        return re.sub(
            r"(?<!`)`(\w+)`(?!`)", lambda m: f"[{m[0]}](#{m[1]})" if m[1] in names else m[0], line
        )

    return "".join(link(line) for line in page.splitlines(keepends=True))


def _one_line(block: str) -> str:
    return " ".join(block.split())


def main() -> None:
    (HOME / "objectives.md").write_text(text())
    (HOME / "gallery").mkdir(exist_ok=True)
    for module in entries():
        if panels_of(module):
            draw(module, HOME / "gallery" / f"{module}.png")


if __name__ == "__main__":
    main()
