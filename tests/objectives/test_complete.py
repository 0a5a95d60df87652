"""Every objective has its equation, a law of its paper, gradients that are those of its value, and
finite values at extremes.

Tests are told apart by their names, and belong to the objectives that they reach: in their code, in
what it calls, and in the cases that they are run with. `tests/test_gallery.py` asks for a panel,
`test_types.py` for what is refused.
"""

import dataclasses
import functools
import importlib.util
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from burnish import objectives
from burnish.benchmarks.docs.gallery import entries

LOSSES = {entry.name for room in entries().values() for entry in room if entry.is_loss}
HERE = Path(__file__).parent
OF_ALL = {"complete", "names", "types"}  # and of no objective in particular

# By words of a test's name; a test of none of these kinds, nor of form alone, is of a law.
KINDS = {
    "equation": r"equal|equation|sums_to_the_negative_log_likelihood",
    "extremes": r"finite|extremes|far_from_the_ordinary",
}
FORM = (
    r"^test_[a-z]+_do_not_interact|broadcast|named?s?_|names_the|errors|refuse|detached|gradcheck"
    r"|differentiable_zero|out_of_range|shapes?_|every_objective|says_what_is_wrong|not_negative"
    r"|are_positive"
)
# What their gradient takes for a constant; tests of their equations have the gradient written out.
STOPPED = {
    "cispo": "the weight",
    "dft": "the probability",
    "gspo_token": "the ratio of the completion over that of the token",
    "iw_opd": "the weight and the log-ratio",
    "minillm": "the weight and the log-ratios",
    "sampled_reverse_kl": "the log-ratio",
    "taid": "the student in the mixture",
    "tdpo2": "the divergence of the chosen completion",
    "topr": "the taper",
    "vespo": "the weight",
}


def reached(value: Any, seen: dict[int, Any]) -> Iterator[str]:
    """Names of the public functions of objectives that this value holds, or this code calls."""
    if id(value) in seen:
        return
    seen[id(value)] = value  # kept, as its id is else given again
    match value:
        case types.FunctionType() if str(value.__module__).startswith("burnish."):
            yield value.__name__
        case types.FunctionType():
            yield from code_reaches(value.__code__, value.__globals__, seen)
            for cell in value.__closure__ or ():
                yield from reached(cell.cell_contents, seen)
        case functools.partial():
            yield from reached(value.func, seen)
        case dict():
            for held in value.values():
                yield from reached(held, seen)
        case list() | tuple() | set():
            for held in value:
                yield from reached(held, seen)
        case _ if dataclasses.is_dataclass(value):
            yield from reached(list(vars(value).values()), seen)


def code_reaches(code: Any, names: dict[str, Any], seen: dict[int, Any]) -> Iterator[str]:
    for name in code.co_names:
        if isinstance(getattr(objectives, name, None), types.FunctionType):
            yield name
        held = names.get(name)
        if not isinstance(held, types.ModuleType):
            yield from reached(held, seen)
    for nested in code.co_consts:
        if isinstance(nested, types.CodeType):
            yield from code_reaches(nested, names, seen)


def cases_of(test: Any) -> Iterator[Any]:
    for mark in getattr(test, "pytestmark", []):
        if mark.name == "parametrize":
            yield mark.args[1]


def kinds_of(name: str) -> set[str]:
    kinds = {kind for kind, words in KINDS.items() if re.search(words, name)}
    if kinds or re.search(FORM, name):
        return kinds
    return {"law"}


@functools.cache
def load(stem: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"complete_{stem}", HERE / f"test_{stem}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def found() -> dict[str, set[str]]:
    """The objectives that tests of each kind reach; tests of peers are no equation of ours."""
    stems = {path.stem.removeprefix("test_") for path in HERE.glob("test_*.py")} - OF_ALL
    of_kind: dict[str, set[str]] = {kind: set() for kind in (*KINDS, "law")}
    for stem in sorted(stem for stem in stems if not stem.startswith("peer")):
        for name, test in vars(load(stem)).items():
            if name.startswith("test_"):
                for kind in kinds_of(name):
                    of_kind[kind] |= set(reached([test, *cases_of(test)], {}))
    return of_kind


@pytest.mark.parametrize("kind", [*KINDS, "law"])
def test_every_objective_has_tests_of_each_kind(kind: str, found: dict[str, set[str]]) -> None:
    missing = LOSSES - found[kind]
    assert not missing, f"write a test of this kind: {kind}"


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_the_gradient_is_that_of_the_value_but_for_what_is_stopped(name: str) -> None:
    objective, types_of = getattr(objectives, name), load("types")
    inputs = types_of.arguments(objective)
    several = {
        "advantage": torch.tensor([-0.5, 0.8, 0.3], dtype=torch.float64),
        "sequence": torch.tensor([0, 0, 2]),
    }
    inputs |= {key: value for key, value in several.items() if key in inputs}
    trained = sorted(types_of.TRAINED & inputs.keys()) or list(types_of.tensors_of(objective))
    leaves = [inputs[key].clone().requires_grad_() for key in trained]

    def loss(*tensors: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = objective(**inputs | dict(zip(trained, tensors, strict=True)))[0]
        return values

    agrees = torch.autograd.gradcheck(loss, leaves, raise_exception=False)
    assert agrees == (name not in STOPPED)
