"""Ranks that differ are named before anything is trained."""

import json
import re
import shutil

import pytest
import torch
from burnish.loops.recipes.settings import GRPO, SFT
from burnish.loops.runs import agreement
from burnish.loops.runs.agreement import (
    difference,
    file_digest,
    model_files,
    settings,
    weights_sample,
)
from forked import run_forked
from grids import slow
from killed import build
from tiny import save_model, sums, write_rows

# What the last rank has instead, and what is said of it.
DIFFERENT = {
    "learning_rate": ("flag", "0.1", "has 0.1, rank 0 has 0.01"),
    "seed": ("flag", "1", "has 1, rank 0 has 0"),
    "loss": ("flag", "dft", "has 'dft', rank 0 has 'nll'"),
    "micro_tokens": ("flag", "64", "has 64, rank 0 has 8192"),
    "steps": ("flag", "3", "has 3, rank 0 has 2"),
    "save_every": ("flag", "1", "has 1, rank 0 has None"),
    "eval_data": ("flag", "2", "has 2, rank 0 has None"),
    "model": ("flag", None, "model.safetensors: rank N has digest"),
    "torch": ("package", "version 2.0", "has version 2.0, rank 0 has version "),
    "burnish": (
        "package",
        "version 0.1.0 with files abc",
        "has version 0.1.0 with files abc, rank 0 has version ",
    ),
}


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    directory = tmp_path_factory.mktemp("differing")
    rows = [{"messages": pair["prompt"] + pair["chosen"]} for pair in sums(8)]
    other = save_model(directory / "other", seed=1)
    start = save_model(directory / "start")
    for path in start.iterdir():
        if path.name != "model.safetensors":
            shutil.copy(path, other)  # the same architecture
    fields = {
        "model": start,
        "data": write_rows(directory / "rows.jsonl", rows),
        "output": directory / "run",
    }
    fields |= {"steps": 2, "batch_size": 4, "learning_rate": 0.01}
    return {name: str(value) for name, value in fields.items()}


@pytest.mark.parametrize(("ranks", "shards"), [(2, 2), slow(2, 1), slow(3, 1)])
def test_ten_things_that_differ_on_a_rank_are_named_by_all_and_nothing_is_trained(
    flags, ranks, shards
):
    cases = {name: (kind, value) for name, (kind, value, _) in DIFFERENT.items()}
    cases["model"] = ("flag", flags["model"].replace("start", "other"))
    outcomes = run_forked(
        ranks, "rank_differing", cases, {**flags, "parallel.dp_shard_size": str(shards)}
    )
    for status, printed in outcomes:
        assert status == 0, printed[-3000:]
        for name, (_, _, said) in DIFFERENT.items():
            (line,) = [
                line for line in printed.splitlines() if re.match(rf"burnish sft: {name}[: ]", line)
            ]
            assert (
                said.replace("rank N", f"rank {ranks - 1}") in line
                and f"rank {ranks - 1} has" in line
            )
            (ended,) = re.findall(rf"CASE {name}: status 1 in ([\d.]+) s, weights \[\]", printed)
            assert float(ended) < 5.0, f"{name} took {ended} s"


def test_a_message_names_the_first_difference_and_its_ranks():
    first = {"seed": "0", "beta": "0.1"}
    assert difference([first, first, {**first, "beta": "0.2"}]).startswith(
        "beta: rank 2 has 0.2, rank 0 has 0.1; "
    )
    others = [{**first, "seed": "1"}] * 12
    said = difference([first, *others])
    assert said.startswith("seed: ranks 1, 2, 3, 4, 5, 6, 7, 8 and 4 more have 1, rank 0 has 0; ")
    assert difference([first, {"seed": "0"}]).startswith(
        "beta: rank 1 has nothing, rank 0 has 0.1; "
    )


def test_paths_of_data_and_models_may_differ_and_their_content_may_not(tmp_path):
    one, two = (save_model(tmp_path / name) for name in ("one", "two"))
    same = [
        settings(
            SFT(
                model=str(model),
                data=str(tmp_path / f"{model.name}.jsonl"),
                dataset_num_proc=processes,
            )
        )
        for model, processes in ((one, 1), (two, 8))
    ]
    assert same[0] == same[1]
    (two / "config.json").write_text(
        json.dumps(json.loads((two / "config.json").read_text()) | {"rope_theta": 7.0})
    )
    other = settings(SFT(model=str(two), data=""))
    assert [name for name in other if other[name] != same[0][name]] == ["model: config.json"]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"eval_data": "held_out.jsonl"}, "eval_data"),
        ({"eval_data": 0.1}, "eval_data"),
        ({"vllm": {"url": "http://other"}}, "vllm.url"),
        ({"loss_kwargs": {"clip_high": 0.5}}, "loss_kwargs.clip_high"),
        ({"hang_seconds": 5.0}, "hang_seconds"),
    ],
)
def test_what_ranks_compute_or_wait_for_may_not_differ(change, name, tmp_path):
    fields = {
        "model": "",
        "data": "prompts.jsonl",
        "rewards": {"exact_match": 1.0},
        "loss_kwargs": {"clip_high": 0.2},
    }
    usual, other = settings(build(GRPO, fields)), settings(build(GRPO, {**fields, **change}))
    assert [key for key in {**usual, **other} if usual.get(key) != other.get(key)] == [name]


def test_streamed_data_are_compared_by_what_names_them():
    one, two = (
        settings(SFT(model="", data=f"{n}.jsonl", streaming=True, steps=2)) for n in ("one", "two")
    )
    assert [name for name in one if one[name] != two[name]] == ["data"]


def test_no_text_of_an_entry_is_shown():
    fields = {"model": "", "data": "", "rewards": {"judge": {"api_key": "sk-secret"}}}
    texts = settings(GRPO(**fields))
    assert "rewards.judge.api_key" in texts and "secret" not in str(texts)


def test_a_byte_in_a_block_that_is_compared_changes_the_digest_of_a_large_file(tmp_path):
    file = tmp_path / "model.safetensors"
    content = bytearray(agreement._WHOLE + 1000)
    file.write_bytes(content)
    before = file_digest(file)
    for place in (0, len(content) - 1, (len(content) - agreement._BLOCK) // 31 * 7 + 5):
        content[place] ^= 1
        file.write_bytes(content)
        assert file_digest(file) != before
        content[place] ^= 1
    file.write_bytes(content + b"\0")
    assert file_digest(file) != before
    assert model_files(tmp_path).keys() == {"model.safetensors"}


def test_weights_in_memory_that_differ_have_other_digests():
    model = torch.nn.Linear(300, 7)
    before = weights_sample(model)
    assert weights_sample(torch.nn.Linear(300, 7)) != before
    with torch.no_grad():
        model.weight.mul_(1.01)
    assert weights_sample(model) != before


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """``resumed(seen)`` is the directory of a run on two ranks; in its second half one of them sees
    this.
    """
    directory = tmp_path_factory.mktemp("stale")
    data = write_rows(directory / "pairs.jsonl", sums(16))
    fields = {
        "model": str(save_model(directory / "start")),
        "data": str(data),
        "eval_data": 4,
        "batch_size": 4,
    }
    fields |= {
        "steps": 2,
        "eval_every": 1,
        "keep": 1,
        "keep_best": "eval/loss",
        "reference": "precompute",
    }
    fields |= {"learning_rate": 1e-3, "schedule": "constant", "hang_seconds": 20.0}

    def run(seen):
        output = directory / str(seen)
        outcomes = run_forked(
            2, "rank_stale", {**fields, "output": str(output)}, {"steps": 5}, seen
        )
        for status, printed in outcomes:
            assert status == 0, printed[-3000:]
        return output

    return run


@pytest.fixture(scope="module")
def undisturbed(resumed):
    return resumed(None)


def saved(run):
    """The weights, and the steps of the checkpoints."""
    steps = [path.name for path in sorted((run / "checkpoints").glob("step-*"))]
    return (run / "model/model.safetensors").read_bytes(), steps


@pytest.mark.parametrize("seen", ["better", "no files", slow("nothing"), slow("worse")])
def test_a_rank_that_sees_an_older_disk_decides_nothing(resumed, undisturbed, seen):
    weights, steps = saved(undisturbed)
    assert steps == ["step-00000004", "step-00000005"], (
        "one of its evaluations is the best, and saves"
    )
    assert saved(resumed(seen)) == (weights, steps)
