"""The rooms of the library: what may import what, and one meaning for each name."""

import ast
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

ROOMS = ("objectives", "kernels", "data", "loops", "benchmarks")
SHIPPED = set(
    tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
)

# The floors of loops/, lowest first. A room imports from lower floors only, and a recipe from no
# other recipe.
FLOORS = [
    {"lines", "own_code", "quiet", "redaction", "versions"},
    {"registry"},
    {"batch", "config"},
    {"models"},
    {"rollouts", "train"},
    {"rollouts/local", "rollouts/vllm", "rewards", "runs"},
    {"environments"},
    {"agents"},
    {"rl"},
    {"recipes"},
    {"cli"},
    {"api"},
]
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}


def files(room: str) -> list[Path]:
    paths = [path.relative_to(ROOT) for path in sorted((ROOT / room).rglob("*.py"))]
    return [path for path in paths if ".".join(["burnish", *path.parts[:-1]]) in SHIPPED]


def tree(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text())


def room_of(path: Path) -> str:
    """The room of a file or folder of loops/, such as rollouts/local."""
    names = path.with_suffix("").parts[1:]
    return next(room for room in ("/".join(names[:2]), names[0]) if room in FLOOR)


def imported(path: Path, module: ast.Module) -> Iterator[Path]:
    """Files and folders of loops/ that a file imports from, relative to the root; not the package
    itself.
    """
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom) and node.level:
            above = path.parents[node.level - 1]
            source = above.joinpath(*(node.module or "").split("."))
            for alias in node.names:
                target = source / alias.name
                exists = (ROOT / target).is_dir() or (ROOT / target).with_suffix(".py").exists()
                target = target if exists else source
                if target.parts[:1] == ("loops",) and target != Path("loops"):
                    yield target


def arrows(path: Path, module: ast.Module) -> list[str]:
    """The imports of a file of loops/ that go up, sideways, or from recipe to recipe."""
    here, wrong = room_of(path), []
    for target in imported(path, module):
        there = room_of(target)
        recipe = (
            here == there == "recipes"
            and target.with_suffix("").name != "settings"
            and path.name != "demo.py"
        )
        if (here != there and FLOOR[there] >= FLOOR[here]) or recipe:
            wrong.append(f"{path} imports {target}")
    return wrong


def test_rooms_of_loops_import_from_lower_floors_only() -> None:
    paths = [path for path in files("loops") if path != Path("loops/__init__.py")]
    assert [arrow for path in paths for arrow in arrows(path, tree(path))] == []
    assert {room_of(path) for path in paths} == set(FLOOR)


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("loops/models/policy.py", "from ..train.losses import Term"),
        ("loops/rollouts/source.py", "from .vllm.server import VLLMServer"),
        ("loops/rewards/scoring.py", "def f():\n    from ..environments import Tools"),
        ("loops/recipes/grpo.py", "from .sft import open_sft"),
        ("loops/train/step.py", "from .. import runs"),
    ],
)
def test_an_arrow_up_or_sideways_is_seen(path: str, code: str) -> None:
    assert len(arrows(Path(path), ast.parse(code))) == 1


def test_no_files_of_loops_import_each_other_in_a_circle_not_even_for_type_checkers() -> None:
    paths = [path for path in files("loops") if path != Path("loops/__init__.py")]
    TopologicalSorter(
        {path.with_suffix(""): imported(path, tree(path)) for path in paths}
    ).prepare()


def named_types(module: ast.Module) -> Iterator[str]:
    """Classes, and aliases such as ``Row = Mapping[str, Any]``."""
    for node in module.body:
        if isinstance(node, ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign) and isinstance(target := node.targets[0], ast.Name):
            alias = isinstance(node.value, ast.Subscript | ast.BinOp)
            if alias and target.id.lstrip("_")[:1].isupper() and not target.id.isupper():
                yield target.id


def test_a_public_type_has_one_meaning() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for room in ROOMS:
        for path in files(room):
            for name in named_types(tree(path)):
                homes[name].append(str(path))
    doubled = {
        name: paths for name, paths in homes.items() if len(paths) > 1 and not name.startswith("_")
    }
    assert doubled == {}
