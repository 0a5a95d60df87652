"""What ranks are started, how they share the model, and what one does for the others, who wait and
fail with it.
"""

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from burnish.loops.cli import _message, main
from burnish.loops.config import Parallel
from burnish.loops.recipes.settings import SFT
from burnish.loops.rollouts.vllm.weights import free_port
from burnish.loops.runs.parallel import _LOCAL_RANKS, _SIZES, _WRAPPERS, check_launcher, check_ranks
from forked import run_forked
from grids import exhaustive, slow
from online import prepare
from tiny import save_model, sums, write_rows
from torch import distributed
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm_fake import Fake

PATIENCE = 6.0


@pytest.mark.parametrize(
    ("rank", "message"), [(0, "1/2 clients joined"), (1, "while trying to connect")]
)
def test_a_rank_whose_partner_never_starts_says_so_in_a_line(rank, message, tmp_path):
    files = {
        "model": save_model(tmp_path / "model"),
        "data": write_rows(tmp_path / "pairs.jsonl", sums(8)),
    }
    flags = [f"--{name}={path}" for name, path in {**files, "output": tmp_path / "run"}.items()]
    ((status, printed),) = run_forked(1, "rank_alone", str(rank), "dpo", *flags)
    assert status == 0, printed[-3000:]
    (line,) = [line for line in printed.splitlines() if line.startswith("burnish dpo: ")]
    assert (
        "ranks can't meet at MASTER_ADDR and a free MASTER_PORT; start them all: " in line
        and message in line
    )
    assert "Traceback" not in printed


def test_a_rank_whose_partner_has_ended_is_not_told_to_start_it():
    """As one whose settings were refused, which the other ranks meet for a moment."""
    port = free_port()
    meeting = distributed.TCPStore("127.0.0.1", port, 2, True, wait_for_workers=False)
    partner = distributed.TCPStore(
        "127.0.0.1", port, 2, False, wait_for_workers=False, timeout=timedelta(seconds=30)
    )
    partner.set("here", "1")
    del meeting
    with pytest.raises(distributed.DistError) as raised:
        for _ in range(100):
            partner.set("still", "1")
            partner.get("still")
    message = _message(raised.value)
    assert message.startswith("another rank has ended, and says why; this one was told: ")
    assert "MASTER_ADDR" not in message and "\n" not in message


def test_ranks_with_other_rows_than_each_other_are_refused(tmp_path):
    outcomes = run_forked(2, "rank_uneven", str(save_model(tmp_path / "model")))
    assert [status for status, _ in outcomes] == [0, 0], outcomes
    assert all("refused rows held out order stream" in printed for _, printed in outcomes)


@pytest.fixture(scope="module")
def wedged(tmp_path_factory):
    """Two ranks, whose server is healthy and stops to answer as they begin to sample."""
    directory = tmp_path_factory.mktemp("ranks")
    fields = prepare(directory)
    fake = Fake(AutoTokenizer.from_pretrained(fields["model"]))
    fake.root, fake.config["model_config"]["max_model_len"] = fields["model"], 256
    usual, since = fake.do_inference_v1_generate, []

    def answer(body):
        if body["sampling_params"]["max_tokens"] == 1:  # it is tried before it is trusted
            return usual(body)
        since.append(time.monotonic())
        return None, 600

    fake.odd["/inference/v1/generate"] = answer
    fields |= {
        "output": str(directory / "run"),
        "source": "vllm",
        "rewards": {"online:Loaded": {"note": "loaded"}},
    }
    fields["rewards"]["online:Loaded"]["note"] = str(directory / "loaded")
    fields["vllm"] = {"url": fake.url, "timeout": 2.5, "patience": PATIENCE}
    outcomes = run_forked(2, "online", fields)
    assert since, outcomes
    seconds = time.monotonic() - since[0]
    fake.close()
    return SimpleNamespace(directory=directory, url=fake.url, outcomes=outcomes, seconds=seconds)


def test_a_healthy_server_that_answers_nothing_ends_the_run_on_all_ranks_by_its_name(wedged):
    said = [(wedged.directory / f"run-rank{rank}.txt").read_text() for rank in (0, 1)]
    assert said[0].startswith(
        f"vllm: the server at {wedged.url} has answered nothing in 6 s; check"
    )
    assert said[1] == f"rank 1: the main process failed: SourceError: {said[0]}"
    assert [status for status, _ in wedged.outcomes] == [1, 1] and wedged.seconds < PATIENCE + 60
    printed = wedged.outcomes[0][1]
    assert "task 0 could not be sampled in attempt 1 of 8: " in printed
    assert "/inference/v1/generate: no answer in 2.5 s" in printed


def test_rewards_are_loaded_on_the_main_process_alone_and_on_its_device(
    wedged,
):
    notes = {path.name: path.read_text() for path in Path(wedged.directory).glob("loaded-*")}
    assert notes == {"loaded-0.txt": "cpu:0 True"}  # what Accelerate calls the device of rank 0


@pytest.fixture
def die(tmp_path):
    """``die(moment, mortal, ...)`` is how the other rank of two ended: status, its note if any,
    what was printed.
    """

    def die(moment, mortal, stuck=False):
        fields = {**prepare(tmp_path), "output": str(tmp_path / "run")}
        outcomes = run_forked(2, "rank_mortal", fields, moment, mortal, stuck)
        assert outcomes[mortal][0] == -signal.SIGKILL
        status, printed = outcomes[1 - mortal]
        note = tmp_path / f"run-rank{1 - mortal}.txt"
        return status, note.read_text() if note.exists() else "", printed

    return die


@pytest.mark.parametrize(
    ("moment", "mortal"),
    [
        ("sampling", 1),
        ("training", 1),
        ("saving", 0),
        *(slow(*case) for case in (("sampling", 0), ("training", 0), ("saving", 1))),
    ],
)
def test_a_rank_that_is_killed_ends_the_other_which_names_it(die, moment, mortal):
    status, note, _ = die(moment, mortal)
    assert status == 1
    assert note.startswith(
        f"RankLost: rank {1 - mortal}: the process of rank {mortal} has ended: it was killed, or"
    )


@pytest.mark.parametrize("moment", ["opening", slow("loading"), slow("resuming")])
def test_a_rank_that_is_killed_before_training_ends_the_other_that_waits_for_it(die, moment):
    status, note, _ = die(moment, 1)
    assert status == 1 and note.startswith("RankLost: rank 0: the process of rank 1 has ended: "), (
        note
    )


def test_a_rank_that_waits_where_no_error_arrives_is_ended(die):
    status, note, printed = die("training", 1, stuck=True)
    assert (status, note) == (1, ""), "it was killed, or an error arrived"
    assert "rank 0: the process of rank 1 has ended: it was killed, or failed" in printed


def config_of(size, **fields):
    return SFT(model="", data="", output="", parallel=Parallel(size), **fields)


@pytest.fixture
def alone(monkeypatch):
    """The environment of a process that no launcher started."""
    for variable in (*_SIZES, *_LOCAL_RANKS, *_WRAPPERS):
        monkeypatch.delenv(variable, raising=False)
    return monkeypatch


@pytest.mark.parametrize(("variable", "wrapper"), _WRAPPERS.items())
def test_a_wrapper_of_accelerate_is_refused_before_there_is_an_accelerator(
    variable, wrapper, alone, tmp_path, capsys
):
    alone.setenv(variable, "true")
    paths = ["--model", str(tmp_path), "--data", str(tmp_path), "--output", str(tmp_path / "run")]
    assert main(["sft", *paths]) == 1
    error = capsys.readouterr().err
    assert (
        error.startswith(f"burnish sft: {variable}: Accelerate's {wrapper} is not supported")
        and error.count("\n") == 1
    )
    assert "--parallel.dp_shard_size" in error


def test_processes_that_would_each_train_for_themselves_are_refused(alone):
    check_launcher()
    alone.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        ValueError, match=r"^2 processes were announced, and this one has no LOCAL_RANK; start"
    ):
        check_launcher()
    alone.setenv("LOCAL_RANK", "1")
    check_launcher()
    with pytest.raises(
        ValueError, match=r"^2 processes were started, and the process group has 1; start ranks"
    ):
        check_ranks(config_of(1), SimpleNamespace(num_processes=1))
    alone.delenv("WORLD_SIZE")
    alone.setenv("OMPI_COMM_WORLD_SIZE", "4")
    with pytest.raises(ValueError, match=r"^4 processes were started"):
        check_ranks(config_of(1), SimpleNamespace(num_processes=1))


@pytest.mark.parametrize(
    ("ranks", "size", "said"),
    [
        (1, 1, None),
        (2, 1, "2 ranks: 2 copies of the model"),
        (4, 4, "4 ranks: one copy of the model, sharded over 4"),
        (4, 2, "4 ranks: 2 copies of the model, each sharded over 2"),
    ],
)
def test_a_run_says_how_its_ranks_share_the_model(ranks, size, said, alone, capsys):
    alone.setenv("WORLD_SIZE", str(ranks))
    check_ranks(config_of(size), SimpleNamespace(num_processes=ranks, print=print))
    assert capsys.readouterr().out.splitlines() == [said] * bool(said)


def test_shards_that_the_ranks_cannot_hold_are_refused(alone):
    alone.setenv("WORLD_SIZE", "4")
    ranks = SimpleNamespace(num_processes=4, print=print)
    with pytest.raises(
        ValueError, match=r"^parallel.dp_shard_size: must divide the number of ranks, which is 4, g"
    ):
        check_ranks(config_of(3), ranks)


# With `-m burnish` torchrun starts what Accelerate does, which runs it with more variables in the
# environment, so that one stands for both.
LAUNCHERS = {
    "torchrun": [
        "torch.distributed.run",
        "--nproc_per_node=2",
        "--no-python",
        sys.executable,
        "-m",
        "burnish",
    ],
    "accelerate launch": [
        "accelerate.commands.launch",
        "--multi_gpu",
        "--num_processes=2",
        "-m",
        "burnish",
    ],
}


@pytest.mark.parametrize("launcher", [exhaustive("torchrun"), slow("accelerate launch")])
def test_a_launcher_starts_ranks_that_share_one_model(launcher, alone, tmp_path):
    rows = [{"messages": pair["prompt"] + pair["chosen"]} for pair in sums(6)]
    fields = {
        "model": save_model(tmp_path / "start"),
        "data": write_rows(tmp_path / "rows.jsonl", rows),
    }
    fields |= {"output": tmp_path / "run", "steps": 2, "batch_size": 3, "parallel.dp_shard_size": 2}
    flags = [word for name, value in fields.items() for word in (f"--{name}", str(value))]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}  # no GPU, and no variable that says so
    command = [sys.executable, "-m", *LAUNCHERS[launcher], "sft", *flags]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.count("2 ranks: one copy of the model, sharded over 2\n") == 1
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 2
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run/model")
