"""Break the library on purpose, one place at a time, and count how often its tests notice.

    python tests/mutation.py [files of objectives/ ...]        writes benchmarks/results/mutation_objectives.json
    python tests/mutation.py --room kernels [--sample 60] [files of kernels/ ...]         ... mutation_kernels.json

A mutant differs from the source in one comparison, operator, constant, sign, condition, or
function, lacks a term of a sum or a check, or hands on two arguments in the wrong order. It is
caught if any of its file's tests fails, or does not end: those of `tests/objectives` named after
it, of what all objectives refuse, or of the peer comparisons; for torch's files of the kernels
those of `KERNEL_TESTS`. Each mutant runs in a process forked from one that has torch loaded, the
tests that caught one before first. A sample is spread evenly over all mutants of the files, the
same in every run. MUTANTS.md tells what still passes, and why.
"""

import argparse
import ast
import atexit
import gc
import itertools
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
# The tests of each file of kernels/ that torch alone computes with, the likeliest to fail first.
_HEAD = ("linear_logprob", "backward", "precision", "sixteen_bits", "linear_divergence")
KERNEL_TESTS = {
    "softmax": ("linear_logprob", "logits_logprob", "backward", "sharding"),
    "passes": (*_HEAD, "threads", "ranking", "sharding", "compile"),
    "threads": ("threads",),
    "head": _HEAD,
    "divergence_passes": ("linear_divergence",),
    "linear_divergence": ("linear_divergence", "precision", "compile"),
    "linear_logprob": (*_HEAD[:-1], "ranking", "backends", "sharding", "compile"),
    "logits_logprob": ("logits_logprob", "ranking", "precision", "backends", "compile"),
    "sharding": ("sharding",),
    "backend": (*_HEAD, "logits_logprob", "ranking", "backends", "sharding", "compile"),
    "reference": ("linear_logprob", "logits_logprob", "linear_divergence", "ranking"),
}
LAST = ("sharding", "compile")  # these start processes, or compile

COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
}
OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.BitAnd: ast.BitOr,
             ast.BitOr: ast.BitAnd}  # fmt: skip
FUNCTIONS = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum", "exp": "expm1", "log": "log1p",
             "log1p": "log", "expm1": "exp", "sum": "mean", "mean": "sum", "detach": "clone", "logsigmoid": "sigmoid",
             "sequence_sum": "sequence_mean", "sequence_mean": "sequence_sum", "square": "abs", "any": "all",
             "all": "any"}  # fmt: skip
# whose first arguments may change places, or must not for the types of Python
SYMMETRIC = {"min", "max", "minimum", "maximum", "logaddexp", "isinstance"}


def places(source: str) -> Iterator[tuple[int, int]]:
    """Every place that can be changed: the number of its node, and of the change there."""
    tree = ast.parse(source)
    skipped = {id(part) for node in ast.walk(tree) for part in _not_behavior(node)}
    for number, node in enumerate(ast.walk(tree)):
        yield from (
            (number, change) for change in range(0 if id(node) in skipped else _count(node))
        )


def mutant(source: str, number: int, change: int) -> tuple[int, str, str]:
    """(line, what was changed, the changed source) for one place."""
    tree = ast.parse(source)
    place = next(itertools.islice(ast.walk(tree), number, None))
    return getattr(place, "lineno", 0), _apply(place, change), ast.unparse(tree)


def _not_behavior(node: ast.AST) -> Iterator[ast.AST]:
    """Docstrings, annotations, defaults of type aliases, and the texts of errors."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        yield from ast.walk(node.value)
    if isinstance(node, ast.JoinedStr):
        yield from ast.walk(node)
    for name in ("annotation", "returns"):
        if isinstance(part := getattr(node, name, None), ast.AST):
            yield from ast.walk(part)


def _count(node: ast.AST) -> int:
    match node:
        case ast.Compare(ops=ops):
            return sum(type(op) in COMPARISONS for op in ops)
        case ast.BoolOp() | ast.Expr(value=ast.Call()):
            return 1
        case ast.BinOp(op=ast.Add() | ast.Sub()):
            return 3
        case ast.BinOp(op=op):
            return int(type(op) in OPERATORS)
        case ast.UnaryOp(op=ast.USub() | ast.Not() | ast.Invert()):
            return 1
        case ast.Constant(value=bool()):
            return 1
        case ast.Constant(value=0):  # dimension −1 of a vector is its dimension 0
            return 1
        case ast.Constant(value=int() | float()):
            return 2
        case ast.Call(func=ast.Attribute(attr=name)) | ast.Call(func=ast.Name(id=name)):
            return int(name in FUNCTIONS) + len(_swappable(node, name))
        case ast.IfExp() | ast.If():
            return 1
        case ast.keyword(arg="min" | "max" as name):
            return int(name is not None)
    return 0


def _swappable(call: ast.Call, name: str) -> list[int]:
    """Positions of positional arguments that may change places with the next one."""
    if name in SYMMETRIC:
        return []

    def holds_value(argument: ast.expr) -> bool:
        is_name_of_caller = isinstance(argument, ast.Constant) and isinstance(argument.value, str)
        return not is_name_of_caller and not isinstance(argument, ast.Starred)

    pairs = enumerate(itertools.pairwise(call.args))
    return [place for place, pair in pairs if all(map(holds_value, pair))]


def _apply(node: ast.AST, change: int) -> str:
    before = ast.unparse(node)
    match node:
        case ast.Compare():
            place = [i for i, op in enumerate(node.ops) if type(op) in COMPARISONS][change]
            node.ops[place] = COMPARISONS[type(node.ops[place])]()
        case ast.BoolOp():
            node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        case ast.Expr():  # a check
            node.value = ast.Constant(None)
        case ast.BinOp() if change == 0:
            node.op = OPERATORS[type(node.op)]()
        case ast.BinOp() if change == 1:
            node.left = ast.Constant(0)
        case ast.BinOp():
            node.right = ast.Constant(0)
        case ast.UnaryOp():
            node.op = ast.UAdd() if isinstance(node.op, ast.USub) else ast.Not()
            if isinstance(node.op, ast.Not):
                node.operand = ast.UnaryOp(ast.Not(), node.operand)
        case ast.Constant(value=bool()):
            node.value = not node.value
        case ast.Constant():
            node.value += 1 if change == 0 else -1
        case ast.Call(func=ast.Attribute() | ast.Name() as function):
            key = "attr" if isinstance(function, ast.Attribute) else "id"
            name = getattr(function, key)
            if change == 0 and name in FUNCTIONS:
                setattr(function, key, FUNCTIONS[name])
            else:
                first = _swappable(node, name)[change - int(name in FUNCTIONS)]
                node.args[first : first + 2] = reversed(node.args[first : first + 2])
        case ast.IfExp() | ast.If():
            node.test = ast.UnaryOp(ast.Not(), node.test)
        case ast.keyword():
            node.arg = FUNCTIONS[str(node.arg)]
    return f"{before.splitlines()[0]}  ->  {ast.unparse(node).splitlines()[0]}"


# Tests of the compiler take most of a minute each, and what they compile is what the others run
# eagerly.
UNCOMPILED = "not compiled_tiles and not fullgraph_compile and not served_by_one_graph"
QUIET = ["-x", "-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
UNTYPED = ["-o", "addopts=--import-mode=importlib"]
TYPED = ["--numprocesses=0", "-m", ""]
PROCESSOR_SECONDS, SECONDS = 120, 900  # of all tests of a file: what takes longer does not end


REFUSED = "tests/objectives/test_types.py"  # what every objective refuses


def caught(room: str, name: str, source: str, tree: Path) -> bool:
    """Whether a test fails when ``room/name`` reads ``source``: first the quick ones, then those of
    the peer.
    """
    target = tree / "burnish" / room / name
    original = target.read_text()
    target.write_text(source)
    try:
        if room == "kernels":
            options = ["-m", "not slow", "-k", UNCOMPILED]
            tests = KERNEL_TESTS[Path(name).stem]
            stages = [[t for t in tests if t not in LAST], [t for t in tests if t in LAST]]
            files = [
                [f"tests/kernels/test_{test}.py" for test in stage] for stage in stages if stage
            ]
            return any(
                not passes([*stage, *options], target, tree, plugins=False) for stage in files
            )
        quick, peers = _tests(Path(name).stem)
        return (
            not passes(quick, target, tree, plugins=False)
            or not passes([REFUSED], target, tree, plugins=False)
            or not passes([*quick, *peers], target, tree)
        )
    finally:
        target.write_text(original)


def passes(tests: list[str], target: Path, tree: Path, *, plugins: bool = True) -> bool:
    """Whether the tests pass; without ``plugins`` the types of functions are not checked, which
    takes a second.
    """
    # as old and as long as another mutant's
    for stale in target.parent.glob(f"__pycache__/{target.stem}.*"):
        stale.unlink()
    child = os.fork()
    if child == 0:
        status = 1
        resource.setrlimit(resource.RLIMIT_CPU, (PROCESSOR_SECONDS, PROCESSOR_SECONDS))
        signal.alarm(SECONDS)  # of waiting: what it has started ends with it
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        os.dup2(sys.stdout.fileno(), 1)
        os.dup2(sys.stdout.fileno(), 2)
        os.chdir(tree)
        sys.dont_write_bytecode = False  # what is not broken is compiled once
        sys.path.insert(0, str(tree))
        # that of an editable installation may come before the path
        sys.meta_path[:] = [
            f for f in sys.meta_path if "Editable" not in getattr(f, "__name__", "")
        ]
        try:
            os.environ["PYTHONPATH"] = str(tree)  # of the processes that tests start
            os.environ |= {} if plugins else {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
            order = [Order(tree / "seen")]
            status = int(
                pytest.main([*QUIET, *(TYPED if plugins else UNTYPED), *tests], plugins=order)
            )
        finally:
            # never back into the caller, whose temporary directory it would remove
            os._exit(status)
    return os.waitpid(child, 0)[1] == 0


def import_for(room: str) -> None:
    """Import what the tests of the room import, but for what is to be broken, once for all of their
    processes.
    """
    # as tests/conftest.py has it before anything imports Triton
    os.environ["TRITON_INTERPRET"] = "1"
    import torch

    if room == "objectives":
        from trl import DPOTrainer, GRPOTrainer  # noqa: F401
    else:
        import torch._inductor.utils
        import triton.runtime.interpreter  # noqa: F401
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # tests look for garbage, of which there is none in millions of objects
    atexit.register(gc.unfreeze)


class Order:
    """A plugin of pytest: first the tests that have caught most mutants, then the quickest."""

    def __init__(self, seen: Path) -> None:
        self.seen, self.caught, self.took = seen, Counter[str](), Counter[str]()
        for line in seen.read_text().splitlines() if seen.exists() else []:
            test, failed, seconds = line.split("\t")
            self.caught[test] += int(failed)
            self.took[test] = max(self.took[test], float(seconds))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: (-self.caught[item.nodeid], self.took[item.nodeid]))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        with self.seen.open("a") as seen:
            if report.failed or (report.when == "call" and report.nodeid not in self.took):
                print(report.nodeid, int(report.failed), report.duration, sep="\t", file=seen)


def main(room: str, names: list[str], sample: int | None) -> None:
    import_for(room)
    results_file = RESULTS / f"mutation_{room}.json"
    results = json.loads(results_file.read_text()) if results_file.exists() else {}
    sources = {name: (ROOT / room / name).read_text() for name in names}
    everything = [(name, place) for name, source in sources.items() for place in places(source)]
    step = len(everything) / min(sample or len(everything), len(everything))
    chosen = [everything[int(i * step)] for i in range(round(len(everything) / step))]
    with tempfile.TemporaryDirectory() as directory:
        tree = Path(directory)
        copy_tree(room, tree)
        for name, source in sources.items():
            selected, survivors = [place for file, place in chosen if file == name], []
            if selected:
                assert not caught(room, name, source, tree), f"the tests of {name} fail as they are"
                assert caught(room, name, "raise ImportError", tree), f"no test reads {name}"
            for place in selected:
                line, change, changed = mutant(source, *place)
                if not caught(room, name, changed, tree):
                    survivors.append(f"line {line}: {change}")
                    print("survived", name, survivors[-1], flush=True)
            found = len(selected) - len(survivors)
            results[name] = {"mutants": len(selected), "caught": found, "survivors": survivors}
            if len(selected) < (count := sum(file == name for file, _ in everything)):
                results[name] |= {"sampled_from": count}
            print(name, f"{found} of {len(selected)} caught", flush=True)
            results_file.write_text(json.dumps(dict(sorted(results.items())), indent=2) + "\n")


def copy_tree(room: str, tree: Path) -> None:
    """A package whose room is a copy to be broken, and the room's tests; the rest are links."""
    (tree / "burnish").mkdir()
    for module in ROOT.glob("*.py"):
        (tree / "burnish" / module.name).symlink_to(module)
    for package in {init.parent for init in ROOT.glob("*/__init__.py")} - {ROOT / room}:
        (tree / "burnish" / package.name).symlink_to(package)
    shutil.copy(ROOT / "pyproject.toml", tree)
    no_cache = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / room, tree / "burnish" / room, ignore=no_cache)
    shutil.copytree(ROOT / "tests" / room, tree / "tests" / room, ignore=no_cache)
    shutil.copytree(ROOT / "tests" / "support", tree / "tests" / "support", ignore=no_cache)
    if room == "kernels":
        shutil.copy(ROOT / "tests" / "conftest.py", tree / "tests")
        # whose group failed, and so the test
        forked = tree / "tests" / "support" / "processes" / "forked.py"
        forked.write_text(forked.read_text().replace("GRACE = 60.0", "GRACE = 0.0"))


def _tests(stem: str) -> tuple[list[str], list[str]]:
    """The tests of a file, and those that it shares with others."""
    folder = ROOT / "tests" / "objectives"
    users = {
        "numerics": ["preference", "reward"],
        "reference_free": ["preference"],
        "types": ["preference", "sequence"],
    }.get(stem, [])
    own, shared = ([path for name in names for path in sorted(folder.glob(f"test_{name}*.py"))]
                   for names in ([stem, *users], ["peer"]))  # fmt: skip
    return tuple([f"tests/objectives/{path.name}" for path in paths] for paths in (own, shared))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Break the library on purpose, and count how often its tests notice."
    )
    parser.add_argument("files", nargs="*", help="files of the room; all of them if none is given")
    parser.add_argument("--room", choices=["objectives", "kernels"], default="objectives")
    parser.add_argument("--sample", type=int, metavar="N", help="so many mutants instead of all")
    options = parser.parse_args()
    objectives = sorted(path.name for path in (ROOT / "objectives").glob("*.py"))
    everything = [f"{stem}.py" for stem in KERNEL_TESTS]
    if options.room == "objectives":
        everything = [name for name in objectives if name not in ("__init__.py", "types.py")]
    main(options.room, options.files or everything, options.sample)
