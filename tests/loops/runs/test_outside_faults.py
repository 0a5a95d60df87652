"""Faults from outside: clocks that jump, outputs that are full, numbers that are none, models that
bring code.
"""

import json
import os
import re
import sys
import time
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from burnish.loops import cli
from burnish.loops.cli import main
from burnish.loops.recipes import grpo
from burnish.loops.recipes.grpo import open_grpo
from burnish.loops.recipes.preference import open_dpo
from burnish.loops.recipes.settings import DPO, GRPO, SFT
from burnish.loops.recipes.sft import open_sft
from forked import run_forked
from grids import slow
from killed import assert_undisturbed
from online import prepare
from safetensors.torch import load_file, save_file
from signalled import in_step
from tiny import save_model, sums, write_rows
from transformers import AutoTokenizer


@pytest.fixture
def settings(tmp_path):
    rows = [{"messages": pair["prompt"] + pair["chosen"]} for pair in sums(8)]
    fields = {
        "model": str(save_model(tmp_path / "start")),
        "data": str(write_rows(tmp_path / "rows.jsonl", rows)),
    }
    return {
        **fields,
        "output": str(tmp_path / "run"),
        "batch_size": 2,
        "steps": 3,
        "learning_rate": 1e-2,
    }


def command(settings):
    return ["burnish", "sft", *(f"--{name}={value}" for name, value in settings.items())]


@pytest.mark.parametrize("recipe", ["sft", "grpo"])
def test_a_clock_that_jumps_back_and_forth_changes_nothing(recipe, settings, tmp_path, monkeypatch):
    open_recipe, kind = {"sft": (open_sft, SFT), "grpo": (open_grpo, GRPO)}[recipe]
    config = settings if recipe == "sft" else {**prepare(tmp_path), "output": settings["output"]}
    config["save_minutes"] = 15.0
    open_recipe(kind(**{**config, "output": config["output"] + "-undisturbed"})).train()
    now, calls = time.time_ns, iter(range(10**9))
    monkeypatch.setattr(time, "time_ns", lambda: now() + (-1) ** next(calls) * 3 * 10**17)
    monkeypatch.setattr(time, "time", lambda: time.time_ns() / 1e9)
    open_recipe(kind(**config)).train()
    assert next(calls) > 0
    assert_undisturbed(config)


@pytest.fixture
def output_to(monkeypatch):
    """``output_to(descriptor)`` is where standard output goes, beneath Python."""
    usual = os.dup(1)
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # which the command replaces
    yield lambda descriptor: os.dup2(descriptor, 1)
    os.dup2(usual, 1)
    os.close(usual)


@pytest.mark.parametrize("kind", ["a full disk", "no reader"])
def test_an_output_that_takes_nothing_leaves_the_run_to_itself(
    kind, settings, output_to, monkeypatch, capfd
):
    reader, writer = os.pipe()
    os.close(reader)
    with open("/dev/full", "w") as full, open(writer, "w") as pipe, capfd.disabled():
        output_to((full if kind == "a full disk" else pipe).fileno())
        monkeypatch.setattr(sys, "argv", command(settings))
        assert main() == 0
        sys.stdout.flush()
    assert (Path(settings["output"]) / "model/model.safetensors").exists()


def test_a_pipe_that_is_full_and_does_not_block_is_waited_for(monkeypatch):
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    read = []
    monkeypatch.setattr(cli.select, "select", lambda *waits: read.append(os.read(reader, 2**24)))
    with cli._Output(writer, "w") as output:
        assert output.write(b"step 1/2") == 8
    with os.fdopen(reader, "rb") as rest:
        assert read and rest.read() == b"step 1/2"


def test_weights_that_are_no_numbers_end_the_run_in_one_line(settings, capsys):
    path = Path(settings["model"], "model.safetensors")
    weights = load_file(path)
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, path, metadata={"format": "pt"})
    flags = [f"--{name}={value}" for name, value in {**settings, "steps": 9}.items()]
    assert main(["sft", *flags]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(
        "burnish sft: optimize: the gradient was not finite in 5 steps in a row, the last one step 5:"
    )
    named = r"; the loss is not finite in a micro-batch of rows\.jsonl line [1-8], rows\.jsonl line [1-8]$"
    assert re.search(named, last), last
    assert not (Path(settings["output"]) / "model").exists()


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_step_whose_gradient_is_no_number_is_skipped_and_the_run_goes_on(
    step, settings, monkeypatch, caplog
):
    usual = Accelerator.backward

    def backward(accelerator, loss, **options):
        Accelerator.backward = usual
        usual(accelerator, loss * float("nan"), **options)

    with in_step(step, lambda: monkeypatch.setattr(Accelerator, "backward", backward)):
        open_sft(SFT(**settings)).train()
    named = (
        r"its losses are finite, and its rows are rows\.jsonl line [1-8], rows\.jsonl line [1-8]$"
    )
    (line,) = warnings(caplog)
    assert re.search(named, line), line
    lines = [
        json.loads(line)
        for line in (Path(settings["output"]) / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["skipped"] for line in lines] == [float(line["step"] == step) for line in lines]
    assert all(
        weight.isfinite().all()
        for weight in load_file(Path(settings["output"]) / "model/model.safetensors").values()
    )


def poisoned(directory, poison="~", **options):
    """A small model without a number for the embedding of one byte."""
    path = save_model(directory, **options) / "model.safetensors"
    weights = load_file(path)
    token = AutoTokenizer.from_pretrained(directory).convert_tokens_to_ids(poison)
    weights["model.embed_tokens.weight"][token] = float("nan")
    save_file(weights, path, metadata={"format": "pt"})
    return directory


def with_poison(rows, *places):
    """The rows, of which those at these places, from 1, have the byte in their prompt."""
    for place in places:
        rows[place - 1]["prompt"][0]["content"] += "~"
    return rows


def warnings(caplog):
    return [message for message in caplog.messages if "is skipped" in message]


def skipped(run):
    return [
        line["step"]
        for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        if line["skipped"]
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("rows_of_a_micro_batch", "named"),
    [
        (1, "rows.jsonl line 5"),
        (
            6,
            "rows.jsonl line 1, rows.jsonl line 2, rows.jsonl line 4, rows.jsonl line 5 and 2 more",
        ),
    ],
)
def test_rows_whose_loss_is_no_number_are_named(
    rows_of_a_micro_batch, named, dtype, settings, tmp_path, caplog
):
    """By their lines, of which one was left out."""
    poisoned(Path(settings["model"]))
    rows = [
        {**pair, "rejected": pair["chosen"]} if i == 2 else pair
        for i, pair in enumerate(with_poison(sums(13), 5))
    ]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    micro_tokens = None if rows_of_a_micro_batch > 1 else 10
    settings |= {
        "data": str(data),
        "on_bad_row": "skip",
        "batch_size": 6,
        "micro_tokens": micro_tokens,
        "steps": 2,
    }
    open_dpo(DPO(**settings, shuffle=False, dtype=dtype)).train()
    (line,) = warnings(caplog)
    assert line.endswith(f"the loss is not finite in a micro-batch of {named}"), line
    assert skipped(tmp_path / "run") == [1]


def test_rows_of_streamed_parts_are_named(settings, tmp_path, caplog):
    poisoned(Path(settings["model"]))
    parts = [
        str(write_rows(tmp_path / f"{name}.jsonl", with_poison(sums(6), 2))) for name in ("a", "b")
    ]
    options = {
        "data": parts,
        "streaming": True,
        "shuffle": False,
        "batch_size": 4,
        "steps": 3,
        "micro_tokens": 10,
    }
    open_dpo(DPO(**{**settings, **options})).train()
    named = [line.rpartition(" of ")[2] for line in warnings(caplog)]
    assert set(", ".join(named).split(", ")) == {"a.jsonl row 2", "b.jsonl row 2"}, named


@pytest.mark.parametrize("minibatches", [1, 2])
def test_prompts_whose_loss_is_no_number_are_named(minibatches, tmp_path, monkeypatch, caplog):
    config = {**prepare(tmp_path), "output": str(tmp_path / "run"), "steps": 4 * minibatches}
    poison, usual = (
        AutoTokenizer.from_pretrained(config["model"]).convert_tokens_to_ids("~"),
        grpo.advantages,
    )

    def advantages(rollout, **options):
        columns = usual(rollout, **options)
        bad = torch.tensor([poison in sample.prompt for sample in rollout.samples])
        columns["advantage"][bad[rollout.sequence]] = float("nan")
        return columns

    monkeypatch.setattr(grpo, "advantages", advantages)
    rows = [{"prompt": pair["prompt"]} for pair in with_poison(sums(16), 3, 9)]
    config["data"] = str(write_rows(tmp_path / "prompts.jsonl", rows))
    open_grpo(GRPO(**config, micro_tokens=10, minibatches=minibatches)).train()
    named = [line.rpartition(" of ")[2] for line in warnings(caplog)]
    assert set(", ".join(named).split(", ")) == {"prompts.jsonl line 3", "prompts.jsonl line 9"}, (
        named
    )
    assert len(skipped(tmp_path / "run")) == len(named) <= 2


@pytest.mark.parametrize(("shards", "dtype"), [(1, "float64"), (2, "float64"), slow(2, "bfloat16")])
def test_the_rank_whose_row_it_is_names_it_and_all_skip_the_step(shards, dtype, tmp_path):
    poisoned(tmp_path / "start", dtype=torch.float64)
    rows = with_poison(
        [{"messages": pair["prompt"] + pair["chosen"], **pair} for pair in sums(10)], 7
    )
    write_rows(tmp_path / "messages.jsonl", [{"messages": row["messages"]} for row in rows])
    options = {"steps": 2, "micro_tokens": 10, "shuffle": False, "dtype": dtype}
    outcomes = run_forked(
        2, "sharded", str(tmp_path), shards, [("sft", str(tmp_path / "run"), options)]
    )
    assert [status for status, _ in outcomes] == [0, 0], outcomes
    line = "step 2 is skipped, as its gradient is not finite; the loss is not finite in a micro-batch of "
    assert [printed.count(f"{line}messages.jsonl line 7\n") for _, printed in outcomes] == [1, 0], (
        outcomes
    )
    assert skipped(tmp_path / "run") == [2]


class Code:
    """Pickled, it would leave a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def pickled(model, ran):
    weights = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    torch.save({**weights, "more": Code(str(ran))}, model / "pytorch_model.bin")


def with_code(*parts):
    """The model, or its tokenizer, is of a class in a file beside it."""

    def change(model, ran):
        (model / "odd.py").write_text(f"import os\nos.mkdir({str(ran)!r})\n")
        for name, change in {
            "config.json": {"model_type": "odd", "auto_map": {part: "odd.Odd" for part in parts}},
            "tokenizer_config.json": {
                "tokenizer_class": "Odd",
                "auto_map": {"AutoTokenizer": ["odd.Odd", None]},
            },
        }.items():
            if ("AutoTokenizer" in parts) == (name == "tokenizer_config.json"):
                path = model / name
                path.write_text(json.dumps({**json.loads(path.read_text()), **change}))

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            pickled,
            "is pickled with more than tensors, which could run code, and is not loaded; save it as safetensors",
        ),
        (
            with_code("AutoConfig", "AutoModelForCausalLM"),
            "needs code that comes with it, which is not run; read that",
        ),
        (
            with_code("AutoTokenizer"),
            "needs code that comes with it, which is not run; read that code, load model and",
        ),
    ],
    ids=["pickled weights", "code of a model", "code of a tokenizer"],
)
@pytest.mark.parametrize("role", ["model", "teacher"])
def test_a_model_that_brings_code_is_refused_in_one_line_and_none_is_run(
    role, change, message, settings, tmp_path, capfd, monkeypatch
):
    monkeypatch.setattr("builtins.input", lambda *question: pytest.fail("it asks"))
    ran = tmp_path / "ran"
    odd = save_model(tmp_path / "odd")
    change(odd, ran)
    flags = {
        name: value for name, value in settings.items() if name != "model" or role == "teacher"
    }
    flags["model" if role == "model" else "teacher.model"] = odd
    recipe = "sft" if role == "model" else "distill"
    assert main([recipe, *(f"--{name}={value}" for name, value in flags.items())]) == 1
    last = capfd.readouterr().err.splitlines()[-1]
    named = f"burnish {recipe}: {'model' if role == 'model' else 'teacher.model'}: {odd}"
    assert last.startswith(named) and message in last
    assert not ran.exists()
