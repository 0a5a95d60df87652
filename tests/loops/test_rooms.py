"""The rooms of loops/ import downwards only, and no recipe imports another."""

import ast
from pathlib import Path

LOOPS = Path(__file__).parents[2] / "loops"
FLOORS = ["models", "train", "runs", "rollouts", "rewards", "environments", "rl", "recipes"]


def imported(path):
    """(file, room, module) of every relative import; the room is "" for what lies beside the rooms."""
    package = path.relative_to(LOOPS).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and 0 < node.level <= len(package) + 1:
            parts = [*package[: len(package) - node.level + 1], *(node.module or "").split(".")]
            yield path, parts[0] if parts[0] in FLOORS else "", parts[-1]


def test_rooms_import_those_below_them():
    upwards = [
        f"{path.relative_to(LOOPS)}: {room}"
        for floor, own in enumerate(FLOORS)
        for path in (LOOPS / own).rglob("*.py")
        for path, room, _ in imported(path)
        if room and FLOORS.index(room) > floor
    ]
    assert upwards == []


def test_no_recipe_imports_a_recipe():
    recipes = {path.stem for path in (LOOPS / "recipes").glob("*.py")} - {"__init__", "settings", "demo"}
    sideways = [
        f"{path.stem}: {module}"
        for path in (LOOPS / "recipes").glob("*.py")
        for path, room, module in imported(path)
        if path.stem != "demo" and room == "recipes" and module in recipes
    ]
    assert len(recipes) == 9 and sideways == []
