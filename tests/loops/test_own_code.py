"""Whose code a configuration runs: nothing of the standard library, nothing of anyone under
--no_code.
"""

import sys
from types import SimpleNamespace

import pytest
import yaml
from burnish.loops.cli import main
from burnish.loops.config import Common
from burnish.loops.environments import resolve_environment
from burnish.loops.own_code import burnish_alone, whose_code
from burnish.loops.registry import find
from burnish.loops.rewards import resolve_rewards
from burnish.loops.rl.curriculum import resolve_order
from burnish.loops.train.mix import PAIR_LOSSES, parse_losses
from burnish.loops.train.optimizers import check
from tiny import save_model, sums, write_rows

# Each would leave a file or a folder at {trap}, if it was called with these settings.
STANDARD = {
    "subprocess:Popen": {"args": "touch {trap}", "shell": True},
    "subprocess:run": {"args": "touch {trap}", "shell": True},
    "builtins:open": {"file": "{trap}", "mode": "w"},
    "os:mkdir": {"path": "{trap}"},
    "shutil:copyfile": {"src": "/etc/hostname", "dst": "{trap}"},
    "sqlite3:Connection": {"database": "{trap}"},
    "logging:FileHandler": {"filename": "{trap}"},
    "zipfile:ZipFile": {"file": "{trap}", "mode": "w"},
    "tarfile:TarFile": {"name": "{trap}", "mode": "w"},
    "gzip:GzipFile": {"filename": "{trap}", "mode": "w"},
    "pathlib:Path.touch": {"self": "{trap}"},
    "runpy:run_path": {"path_name": "{trap}.py"},
}
SETTINGS = {
    "reward": lambda name, settings: {"rewards": {name: settings}},
    "reward of another name": lambda name, settings: {
        "rewards": {"judge": {"function": name, **settings}}
    },
    "reward that is asked": lambda name, settings: {
        "rewards": {"cosine": {"limit": 9, "correct": name}}
    },
    "environment": lambda name, settings: {"environment": {name: settings}},
    "tool": lambda name, settings: {"environment": {"tools": {"tools": [name]}}},
    "order": lambda name, settings: {"order": {name: settings}},
    "optimizer": lambda name, settings: {"optimizer": name, "optimizer_kwargs": settings},
    "loss": lambda name, settings: {"loss": {name: settings}},
}
RESOLVED = {
    "rewards": resolve_rewards,
    "environment": resolve_environment,
    "order": resolve_order,
    "loss": lambda loss: parse_losses(loss, {}, PAIR_LOSSES),
}
COMMANDS = {
    "train": ["grpo"],
    "plan": ["plan", "grpo"],
    "dry run": ["grpo", "--dry_run"],
    "data": ["data", "grpo"],
}
REFUSED = "Python's standard library, which has nothing that a configuration may name"


@pytest.fixture
def trapped(tmp_path):
    """``trapped(setting, name)``: fields of a configuration that names this; then the trap, which
    must stay empty.
    """
    trap = tmp_path / "trap" / "sprung"
    trap.parent.mkdir()
    (trap.parent / "sprung.py").write_text(f"open({str(trap)!r}, 'w')")

    def fields(setting, name):
        settings = STANDARD[name].items()
        filled = {
            key: value.format(trap=trap) if isinstance(value, str) else value
            for key, value in settings
        }
        return SETTINGS[setting](name, filled)

    yield fields
    assert [path.name for path in trap.parent.iterdir()] == ["sprung.py"]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", STANDARD)
def test_a_configuration_runs_nothing_of_the_standard_library(setting, name, trapped):
    fields = trapped(setting, name)
    with pytest.raises(ValueError, match=REFUSED):
        if "optimizer" in fields:
            check(Common(model="m", data="d", **fields))
        for field in RESOLVED.keys() & fields.keys():
            RESOLVED[field](fields[field])


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    rows = [{"prompt": pair["prompt"], "answer": pair["chosen"][0]["content"]} for pair in sums(4)]
    return {
        "model": str(save_model(folder / "model")),
        "data": str(write_rows(folder / "data.jsonl", rows)),
    }


@pytest.fixture
def command(inputs, tmp_path, capsys):
    """``command(kind, fields, *flags)`` returns (exit status, what was said)."""

    def run(kind, fields, *flags):
        file = tmp_path / "run.yaml"
        run = {
            "output": str(tmp_path / "run"),
            "steps": 1,
            "prompts_per_rollout": 2,
            "group_size": 2,
            "max_tokens": 4,
        }
        file.write_text(
            yaml.safe_dump({**inputs, **run, "rewards": {"exact_match": 1.0}, **fields})
        )
        try:
            status = main([*COMMANDS[kind], "--config", str(file), *flags])
        except SystemExit as stopped:
            status = stopped.code
        return status, "".join(capsys.readouterr())

    return run


PRODUCT = [(kind, setting, name) for kind in COMMANDS for setting in SETTINGS for name in STANDARD]
SOME = [
    (kind, setting, "subprocess:Popen")
    for kind in COMMANDS
    for setting in ("reward", "environment", "optimizer")
]


def check_command(command, kind, fields):
    status, said = command(kind, fields)
    assert status == 1 and REFUSED in said, said


@pytest.mark.parametrize(("kind", "setting", "name"), SOME)
def test_no_command_runs_a_shell(kind, setting, name, command, trapped):
    check_command(command, kind, trapped(setting, name))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "setting", "name"), PRODUCT)
def test_no_command_runs_anything_of_the_standard_library(kind, setting, name, command, trapped):
    check_command(command, kind, trapped(setting, name))


MODULE = """
import os
from subprocess import Popen
from torch import nn
from trl.rewards import accuracy_reward

built = []

class Mute:
    def __init__(self, **settings): built.append(self)

class Strange(Mute):
    def __call__(self, text): return 1.0

class Half(Mute):
    def reset(self, row): return []

class Whole(Half):
    def step(self, completion): ...

def make() -> Whole: return Whole()

def make_unsaid(): built.append(1)

class NoOptimizer(Mute):
    pass

def right(completion): return 1.0
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "their_code.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "their_code", raising=False)
    import their_code

    return their_code


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"rewards": {"their_code:Mute": 1}},
            "wanted a function or a class with __call__, got the class Mute",
        ),
        (
            {"rewards": {"their_code:Strange": 1}},
            r"wanted the parameters \(completion, .*got \(text\)",
        ),
        ({"rewards": {"their_code:os": 1}}, "is a module; name a function or a class in it"),
        (
            {"rewards": {"their_code:Popen": 1}},
            "only imports it; name it where it is defined, in subprocess",
        ),
        (
            {"rewards": {"their_code:accuracy_reward": 1}},
            "only imports it; .* in trl.rewards.accuracy_rewards",
        ),
        ({"rewards": {"torch:add": 1}}, "torch:add: its parameters can't be read"),
        (
            {"environment": "their_code:Half"},
            r"has no function step; wanted reset\(row\) and step\(completion\)",
        ),
        (
            {"environment": "their_code:make_unsaid"},
            "wanted a class with reset.*annotation says that it returns one",
        ),
        (
            {"environment": {"tools": {"tools": ["their_code:Mute"]}}},
            "tool their_code:Mute: wanted a function",
        ),
        (
            {"optimizer": "their_code:NoOptimizer"},
            "wanted a subclass of torch.optim.Optimizer, got <class",
        ),
        (
            {"optimizer": "their_code:make"},
            "wanted a subclass of torch.optim.Optimizer, got <function",
        ),
        ({"loss": {"their_code:Mute": 1}}, "loss Mute: wanted a function of tensors"),
    ],
)
def test_what_does_not_fit_its_setting_is_refused_before_it_is_built(fields, message, own):
    with pytest.raises(ValueError, match=message):
        if "optimizer" in fields:
            check(Common(model="m", data="d", **fields))
        for field in RESOLVED.keys() & fields.keys():
            RESOLVED[field](fields[field])
    assert own.built == []


def test_a_function_that_says_what_it_returns_makes_environments(own):
    assert isinstance(resolve_environment("their_code:make")(), own.Whole)


def test_rewards_of_packages_are_found_where_the_package_offers_them():
    pytest.importorskip("trl")
    (reward,) = resolve_rewards({"trl.rewards:think_format_reward": 1.0})
    assert reward.function.over == "step"


@pytest.mark.parametrize("kind", ["plan", "dry run", "data"])
def test_whose_code_is_said_first(kind, command, own):
    status, said = command(kind, {"rewards": {"their_code:right": 1.0}})
    assert status == 0, said
    assert said.splitlines()[0] == f"this configuration runs code of: their_code ({own.__file__})"


def test_whose_code_of_every_setting_is_said_without_importing_it(monkeypatch, tmp_path):
    (tmp_path / "never_imported.py").write_text("raise AssertionError")
    monkeypatch.chdir(tmp_path)
    config = SimpleNamespace(
        optimizer="an_optimizer:A",
        loss={"a_loss:f": 1.0, "dpo": 1.0},
        rewards={
            "b": {"function": "never_imported.py:f"},
            "cosine": {"correct": "c_reward:f"},
            "math": 1.0,
        },
        environment={"tools": {"tools": ["a_tool:f", "calculator"]}},
        vllm=SimpleNamespace(
            python="/opt/python",
            options={"middleware": "m.f", "max_model_len": 9},
            environment={"LD_PRELOAD": "x.so", "CUDA_VISIBLE_DEVICES": "0,1"},
        ),
    )
    assert whose_code(config) == (
        "this configuration runs code of: a_loss (not found), a_tool (not found), an_optimizer (not found), "
        f"c_reward (not found), never_imported ({tmp_path / 'never_imported.py'}), vllm.python (/opt/python), "
        "vllm.environment (LD_PRELOAD), vllm.options (middleware)"
    )
    assert "never_imported" not in sys.modules
    assert (
        whose_code(SimpleNamespace(rewards="math"))
        == "this configuration runs no code but burnish's own"
    )


@pytest.mark.parametrize("kind", COMMANDS)
def test_no_code_refuses_all_but_burnishs_own(kind, command, own):
    own_reward = {"rewards": {"their_code:right": 1.0}}
    status, said = command(kind, own_reward, "--no_code")
    assert (
        status == 1
        and "reward their_code:right: refused, as --no_code allows no code but burnish's" in said
    ), said


def test_no_code_leaves_what_is_shipped_and_lasts_for_one_command(command, own):
    assert command("plan", {}, "--no_code")[0] == 0
    assert command("plan", {"rewards": {"their_code:right": 1.0}})[0] == 0


def test_no_code_holds_wherever_an_object_is_looked_up(own):
    with (
        burnish_alone(),
        pytest.raises(ValueError, match="refused, as --no_code allows no code but burnish's"),
    ):
        find("reward", "their_code:right", {}, "")
    assert find("reward", "their_code:right", {}, "") is own.right


@pytest.mark.parametrize(
    ("vllm", "named"),
    [
        ({"python": "/opt/python"}, "vllm.python"),
        ({"options": {"middleware": "m.f"}}, "vllm.options"),
        ({"options": {"trust_remote_code": True}}, "vllm.options"),
        ({"environment": {"PYTHONPATH": "/tmp"}}, "vllm.environment"),
    ],
)
def test_no_code_refuses_what_could_run_code_in_a_server(vllm, named, command):
    status, said = command("data", {"source": "vllm", "vllm": vllm}, "--no_code")
    assert status == 1 and f"{named}: refused" in said, said
