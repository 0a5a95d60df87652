"""Which room may import what, and what a user pays for `import burnish.objectives`."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = {"objectives", "kernels", "data", "loops"}
ARROWS = {"objectives": set(), "kernels": set(), "data": set(), "loops": ROOMS}
# the others: what they need
THIRD_PARTY = {"objectives": {"torch", "jaxtyping"}, "kernels": {"torch", "triton"}}


def imports(tree: ast.AST, package: tuple[str, ...]) -> list[tuple[bool, tuple[str, ...]]]:
    """(relative, path) of every module or name imported anywhere in a file of the package; paths
    start at burnish.
    """
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(False, tuple(alias.name.split("."))) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = (*above, *(node.module.split(".") if node.module else ()))
            found += [(node.level > 0, (*module, alias.name)) for alias in node.names]
    return found


def holds_triton_kernels(tree: ast.AST) -> bool:
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return any(
        "triton.jit" in ast.unparse(decorator) for f in functions for decorator in f.decorator_list
    )


def wrong_imports(file: str, source: str) -> list[str]:
    """What a file, named from the repository root, imports against the rules."""
    package = Path(file).parts[:-1]
    room, tree = package[0], ast.parse(source)
    wrong = []
    for relative, path in imports(tree, package):
        name = path[0]
        if relative:
            if name in ROOMS and name not in {room} | ARROWS[room]:
                wrong.append(f"{file}: {room} must not import {name}")
        elif name in ROOMS | {"burnish"}:
            wrong.append(f"{file}: imports inside the package are relative, got {'.'.join(path)}")
        elif name == "triton" and room == "kernels" and not holds_triton_kernels(tree):
            wrong.append(f"{file}: triton is imported only where a Triton kernel is defined")
        elif room in THIRD_PARTY and name not in THIRD_PARTY[room] | sys.stdlib_module_names:
            wrong.append(f"{file}: {room} must not import {name}")
    return wrong


def test_rooms_import_along_the_arrows() -> None:
    files = [path for room in sorted(ROOMS) for path in sorted((ROOT / room).rglob("*.py"))]
    assert {path.relative_to(ROOT).parts[0] for path in files} == ROOMS
    wrong = [
        line
        for path in files
        for line in wrong_imports(str(path.relative_to(ROOT)), path.read_text())
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("objectives/x.py", "import transformers"),
        ("objectives/x.py", "import triton"),
        ("objectives/x.py", "from ..kernels import linear_logprob"),
        ("objectives/x.py", "from .. import loops"),
        ("objectives/__init__.py", "from ..data.examples import Example"),
        ("objectives/deep/x.py", "from ...kernels import linear_logprob"),
        ("objectives/x.py", "from burnish.objectives import dpo"),
        ("objectives/x.py", "def f():\n    import numpy"),
        ("objectives/x.py", "if TYPE_CHECKING:\n    from ..loops import Batch"),
        ("kernels/x.py", "from ..objectives import dpo"),
        ("kernels/x.py", "import jaxtyping"),
        ("kernels/x.py", "import triton.language as tl"),
        ("data/x.py", "from ..loops.batch import Batch"),
        ("data/x.py", "import kernels"),
        ("loops/x.py", "import burnish.data"),
    ],
)
def test_the_walker_can_fail(file: str, source: str) -> None:
    assert len(wrong_imports(file, source)) == 1


@pytest.mark.parametrize(
    ("file", "source"),
    [
        (
            "objectives/x.py",
            "import math\nfrom torch import nn\nfrom .types import Stats\nfrom . import numerics",
        ),
        ("objectives/deep/x.py", "from ..types import Stats"),
        ("kernels/x.py", "import triton\n@triton.jit\ndef kernel(): ..."),
        ("data/x.py", "import datasets, transformers\nfrom .. import __version__"),
        (
            "loops/x.py",
            "from .. import objectives\nfrom ..kernels import linear_logprob\nimport accelerate",
        ),
    ],
)
def test_the_walker_lets_good_imports_pass(file: str, source: str) -> None:
    assert wrong_imports(file, source) == []


def run(code: str, cwd: Path) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, check=True, capture_output=True, text=True
    ).stdout


def test_importing_objectives_loads_torch_and_its_annotations_only(tmp_path: Path) -> None:
    code = "import json, sys, torch; before = set(sys.modules); import burnish.objectives; "
    added = set(
        json.loads(run(code + "print(json.dumps(sorted(set(sys.modules) - before)))", tmp_path))
    )
    # jaxtyping reads two more modules of numpy where torch has already loaded it
    assert {name.partition(".")[0] for name in added} - sys.stdlib_module_names <= {
        "burnish",
        "jaxtyping",
        "numpy",
    }
    assert not {f"burnish.{room}" for room in ROOMS - {"objectives"}} & added


@pytest.mark.slow
def test_importing_objectives_costs_at_most_a_fifth_more_than_torch(tmp_path: Path) -> None:
    # Processor time, and the minimum over runs, because a busy machine only ever adds to it.
    code = "from time import process_time as t; a = t(); import torch; b = t(); import burnish.objectives; "
    runs = [json.loads(run(code + "print([b - a, t() - b])", tmp_path)) for _ in range(3)]
    torch, more = (min(times) for times in zip(*runs, strict=True))
    assert more <= 0.2 * torch, (
        f"import torch {torch:.2f} s, and then import burnish.objectives {more:.2f} s"
    )


@pytest.mark.slow
def test_a_script_in_the_repository_root_does_not_load_our_kernels_under_the_name_of_another_package():
    script = "import transformers.activations, sys; import burnish.kernels; print(sorted(vars(sys.modules['kernels'])))"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert "linear_logprob" not in done.stdout
