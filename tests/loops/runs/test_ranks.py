"""What one rank does for the others, who wait for it and fail with it."""

import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from forked import run_forked
from online import prepare
from transformers import AutoTokenizer
from vllm_fake import Fake

PATIENCE = 6.0


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
    fields |= {"output": str(directory / "run"), "source": "vllm", "rewards": {"online:Loaded": {"note": "loaded"}}}
    fields["rewards"]["online:Loaded"]["note"] = str(directory / "loaded")
    fields["vllm"] = {"url": fake.url, "timeout": 2.5, "patience": PATIENCE}
    outcomes = run_forked(2, "online", fields)
    seconds = time.monotonic() - since[0]
    fake.close()
    return SimpleNamespace(directory=directory, url=fake.url, outcomes=outcomes, seconds=seconds)


def test_a_server_that_is_healthy_and_answers_nothing_ends_the_run_on_all_ranks_by_its_name(wedged):
    said = [(wedged.directory / f"run-rank{rank}.txt").read_text() for rank in (0, 1)]
    assert said[0].startswith(
        f"vllm: the server at {wedged.url} has given nothing of what it was asked for in 6 s; see"
    )
    assert said[1] == f"rank 1: the main process failed: SourceError: {said[0]}"
    assert [status for status, _ in wedged.outcomes] == [1, 1] and wedged.seconds < PATIENCE + 60
    printed = wedged.outcomes[0][1]
    assert "task 0 could not be sampled in attempt 1 of 8: " in printed
    assert "/inference/v1/generate: no answer in 2.5 s" in printed


def test_rewards_are_loaded_when_the_run_is_open_on_the_main_process_alone_and_on_its_device(wedged):
    notes = {path.name: path.read_text() for path in Path(wedged.directory).glob("loaded-*")}
    assert notes == {"loaded-0.txt": "cpu:0 True"}  # what Accelerate calls the device of rank 0


@pytest.fixture
def die(tmp_path):
    """``die(moment, mortal, ...)`` is how the other rank of two ended: status, note, what was printed, seconds."""

    def die(moment, mortal, stuck=False):
        fields = {**prepare(tmp_path), "output": str(tmp_path / "run")}
        outcomes = run_forked(2, "mortal", fields, moment, mortal, stuck)
        ended = time.time()
        assert outcomes[mortal][0] == -signal.SIGKILL
        status, printed = outcomes[1 - mortal]
        return status, (tmp_path / f"run-rank{1 - mortal}.txt").read_text(), printed, ended

    return die


@pytest.mark.parametrize(
    ("moment", "mortal"),
    [
        ("sampling", 1),
        ("training", 1),
        ("saving", 0),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("sampling", 0), ("training", 0), ("saving", 1))),
    ],
)
def test_a_rank_that_is_killed_ends_the_other_which_names_it(die, moment, mortal):
    status, note, _, _ = die(moment, mortal)
    assert status == 1
    assert note.startswith(f"RankLost: rank {1 - mortal}: the process of rank {mortal} has ended: it was killed, or")


def test_a_rank_that_waits_where_no_error_arrives_is_ended(die):
    status, note, printed, ended = die("training", 1, stuck=True)
    assert status == 1
    assert ended - float(note) < 20  # seconds; it would have waited for 60
    assert "rank 0: the process of rank 1 has ended: it was killed, or failed" in printed
