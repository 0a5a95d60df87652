"""An install for those who embed an objective or a kernel: torch, triton and jaxtyping, and nothing
of training.
"""

import json
import re
import subprocess
import sys
import tomllib
import venv
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
TRAINING = {
    re.match(r"[\w-]+", requirement)[0] for requirement in [*EXTRAS["train"], *EXTRAS["plots"]]
} - {"burnish"}
EMBED = """
import torch
from burnish.kernels import linear_divergence, linear_logprob
from burnish.objectives import dpo, group_advantage
chosen, rejected = torch.randn(2, 4, requires_grad=True)
loss, stats = dpo(chosen, rejected, torch.zeros(4), torch.zeros(4), beta=0.1)
loss.mean().backward()
hidden, weight = torch.randn(5, 8, requires_grad=True), torch.randn(50, 8)
logprob = linear_logprob(hidden, weight, torch.arange(5)).logprob
logprob.sum().backward()
torch.testing.assert_close(logprob, (hidden @ weight.T).log_softmax(-1)[torch.arange(5), torch.arange(5)])
print("embedded", float(loss.mean()) > 0, bool(hidden.grad.abs().min() > 0))
"""
WITHOUT = """
import json, runpy, sys
from importlib.machinery import PathFinder
missing, find = set(json.loads(sys.argv[1])), PathFinder.find_spec
class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in missing else find(name, path, target)
sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
code, sys.argv = sys.argv[2], ["burnish", *sys.argv[3:]]
exec(code)
"""
COMMAND = "runpy.run_module('burnish', run_name='__main__', alter_sys=True)"


def without(packages, code, *arguments):
    """Run code in an interpreter in which these packages are not there."""
    command = [sys.executable, "-c", WITHOUT, json.dumps(sorted(packages)), code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def test_the_plain_install_has_torch_triton_and_jaxtyping():
    assert [re.match(r"\w+", requirement)[0] for requirement in PROJECT["dependencies"]] == [
        "torch",
        "triton",
        "jaxtyping",
    ]
    assert {"transformers", "accelerate", "datasets", "peft", "jsonargparse"} <= TRAINING
    assert "burnish[train]" in PROJECT["optional-dependencies"]["test"]


def test_only_vllm_and_the_tests_bound_torch_from_above():
    def bounds(requirements):
        of_torch = [
            requirement
            for requirement in map(Requirement, requirements)
            if requirement.name == "torch"
        ]
        return sorted(
            clause.operator for requirement in of_torch for clause in requirement.specifier
        )

    assert bounds(PROJECT["dependencies"]) == [">="]
    capped = {
        name for name, extra in PROJECT["optional-dependencies"].items() if "<" in bounds(extra)
    }
    assert capped == {"vllm", "test"}


def test_objectives_and_kernels_work_without_what_training_needs():
    done = without(TRAINING | {"yaml", "numpy", "pandas", "pyarrow"}, EMBED)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "embedded True True\n"


@pytest.mark.parametrize("arguments", [["sft"], ["--version"], ["dpo", "--help"]], ids=" ".join)
def test_the_command_says_in_a_line_how_training_is_installed(arguments):
    done = without(TRAINING | {"yaml"}, COMMAND, *arguments)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1 and 'pip install "burnish[train]"' in done.stderr


@pytest.mark.slow
def test_a_recipe_says_in_a_line_what_is_missing():
    arguments = ["sft", "--model", "m", "--data", "d.jsonl", "--output", "o"]
    done = without({"transformers"}, COMMAND, *arguments)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1 and 'pip install "burnish[train]"' in done.stderr


def required(requirements):
    """Names of the distributions, as they are installed here, that these requirements bring."""
    names, left = set(), list(requirements)
    while left:
        requirement = Requirement(left.pop())
        name = canonicalize_name(requirement.name)
        if name not in names and (
            requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        ):
            names.add(name)
            left += metadata.requires(name) or []
    return names


@pytest.mark.slow
def test_a_fresh_environment_embeds_and_says_how_to_train(tmp_path, monkeypatch):
    """Where there is nothing but the wheel and what its metadata name, which are those of this
    environment.
    """
    monkeypatch.delenv("PYTHONPATH", raising=False)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    build = [
        *pip,
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(tmp_path),
        str(ROOT),
    ]
    subprocess.run(build, check=True, timeout=600, cwd=tmp_path)
    venv.create(tmp_path / "fresh", with_pip=False)
    python, (wheel,) = str(tmp_path / "fresh/bin/python"), tmp_path.glob("*.whl")
    inside = [*pip, "--python", python]
    subprocess.run(
        [*inside, "install", "--no-deps", "--no-index", str(wheel)],
        check=True,
        timeout=600,
        cwd=tmp_path,
    )
    (site,) = tmp_path.glob("fresh/lib/python*/site-packages")
    (burnish,) = metadata.distributions(path=[str(site)])
    names = required(burnish.requires)
    assert {"torch", "triton", "jaxtyping"} <= names and not TRAINING & names
    for distribution in map(metadata.distribution, names):
        for entry in {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}:
            if not (site / entry).exists():  # packages may share a namespace
                (site / entry).symlink_to(distribution.locate_file(entry))
    subprocess.run([*inside, "check"], check=True, timeout=600, cwd=tmp_path)
    done = subprocess.run(
        [python, "-W", "ignore", "-c", EMBED], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.stdout == "embedded True True\n", done.stderr
    done = subprocess.run(
        [str(tmp_path / "fresh/bin/burnish"), "sft"], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 1 and 'pip install "burnish[train]"' in done.stderr


USERS = """
import burnish
from burnish.kernels import linear_logprob
from burnish.objectives import dpo

burnish.dpo("model", [], betta=0.1)
burnish.dpo("model", [], shuffle="no")
burnish.sft("model", [], lora=8)
dpo(1, 2, 3, 4, beta=0.1)
linear_logprob()
"""


@pytest.mark.slow
def test_an_editable_install_runs_where_the_files_are_and_is_seen_by_a_type_checker(
    tmp_path, monkeypatch
):
    """By README's own command, for a script outside of the checkout with five mistakes in five
    lines.
    """
    monkeypatch.delenv("PYTHONPATH", raising=False)
    venv.create(tmp_path / "fresh", with_pip=False)
    python = str(tmp_path / "fresh/bin/python")
    (site,) = tmp_path.glob("fresh/lib/python*/site-packages")
    here = str(Path(metadata.distribution("torch").locate_file("")))
    (site / "packages_of_this_environment.pth").write_text(here + "\n")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--quiet",
        "--python",
        python,
    ]
    install = [*pip, "install", "--no-deps", "--no-build-isolation", "-e", str(ROOT)]
    subprocess.run(install, check=True, timeout=600, cwd=tmp_path)
    (tmp_path / "user.py").write_text(USERS)

    where = [python, "-c", "import burnish; print(burnish.__file__)"]
    done = subprocess.run(where, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert Path(done.stdout.strip()) == ROOT / "__init__.py"
    check = [
        sys.executable,
        "-m",
        "mypy",
        "--python-executable",
        python,
        "--cache-dir",
        str(tmp_path),
        "user.py",
    ]
    done = subprocess.run(check, capture_output=True, text=True, cwd=tmp_path, timeout=600)
    mistaken = {int(line.split(":")[1]) for line in done.stdout.splitlines() if ": error: " in line}
    assert mistaken == {6, 7, 8, 9, 10}, done.stdout + done.stderr
