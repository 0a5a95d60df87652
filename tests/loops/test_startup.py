"""Questions to the command line are answered before torch and transformers are imported."""

import json
import subprocess
import sys

import pytest
from burnish import loops
from burnish.loops.cli.arguments import parse
from burnish.loops.recipes import RECIPES
from burnish.loops.recipes.settings import SFT

HEAVY = {
    "torch",
    "transformers",
    "datasets",
    "accelerate",
    "peft",
    "matplotlib",
    "numpy",
    "triton",
    "vllm",
}
RUN = """
import json, runpy, sys
sys.argv = ["burnish", *json.loads(sys.argv[1])]
try:
    runpy.run_module("burnish", run_name="__main__", alter_sys=True)
except SystemExit as stopped:
    print(json.dumps([stopped.code, sorted({name.partition(".")[0] for name in sys.modules})]))
"""


def burnish(*arguments):
    """Exit status of ``python -m burnish``, the packages that it imported, and all that it
    printed.
    """
    command = [sys.executable, "-c", RUN, json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    *printed, last = done.stdout.splitlines()
    status, packages = json.loads(last)
    return status, set(packages), "\n".join([*printed, done.stderr])


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--version"], 0, "burnish 0.2.0"),
        (["--help"], 0, "usage: burnish <recipe>"),
        (["dop"], 2, "no recipe 'dop', did you mean 'dpo'?"),
        (["--versoin"], 2, "no flag '--versoin', did you mean '--version'?"),
        (["dpo", "--stepps", "3"], 2, "no field 'stepps', did you mean 'steps'?"),
        (["grpo", "--steps", "many"], 2, "steps"),
        (["dpo", "--help"], 0, "Strength of the pull towards the reference"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_question_is_answered_without_heavy_imports(arguments, status, message):
    answered, packages, said = burnish(*arguments)
    assert answered == status, said
    assert message in said
    assert not packages & HEAVY


def test_the_settings_of_every_recipe_are_read_without_heavy_imports():
    from burnish.loops.recipes import settings

    assert {name for name, *_ in RECIPES.values()} <= vars(settings).keys()
    code = "import sys, burnish.loops.recipes.settings; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert not set(done.stdout.split()) & HEAVY


def test_only_help_reads_the_docstrings_of_fields(monkeypatch, capsys):
    read = []
    monkeypatch.setattr(
        "docstring_parser.parse_from_object", lambda component, **options: read.append(component)
    )
    parse("sft", SFT, ["--model", "m", "--data", "d", "--output", "o"])
    for mistake in (["--lerning_rate", "1"], ["--steps", "many"]):
        with pytest.raises(SystemExit):
            parse("sft", SFT, mistake)
    assert read == []
    for question in ("--help", "-h", "--print_config"):
        with pytest.raises(SystemExit):
            parse("sft", SFT, [question])
        assert SFT in read
        read.clear()


def test_loops_exports_every_name_that_it_promises():
    for package in (loops, sys.modules["burnish"]):
        assert {*package.__all__} <= {*dir(package)}
    missing = [name for name in loops.__all__ if not hasattr(loops, name)]
    assert missing == []
    with pytest.raises(AttributeError, match="has no attribute 'Polcy'"):
        _ = loops.Polcy
