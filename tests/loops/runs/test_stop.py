"""What a run leaves behind: at a signal a checkpoint to go on from, by the clock, and the best
beside the newest.
"""

import errno
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import online
import pytest
from burnish.loops.recipes.grpo import open_grpo
from burnish.loops.recipes.settings import GRPO, SFT
from burnish.loops.recipes.sft import open_sft
from burnish.loops.rollouts.local.source import LocalSource
from burnish.loops.runs import checkpoint, storage, training
from burnish.loops.runs.checkpoint import Saver
from burnish.loops.runs.stop import Stopped
from forked import run_forked
from grids import slow
from killed import assert_undisturbed
from online import prepare, stored
from signalled import in_step, send
from tiny import save_model, sums, write_rows

STATUSES = {"SIGHUP": 129, "SIGINT": 130, "SIGTERM": 143, "SIGUSR1": 75}


@pytest.fixture(autouse=True)
def sigint():
    """The handler of a terminal: of a shell's background process SIGINT is ignored, and of its
    children.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def settings(tmp_path):
    rows = [{"messages": pair["prompt"] + pair["chosen"]} for pair in sums(8)]
    data = write_rows(tmp_path / "messages.jsonl", rows)
    model = save_model(tmp_path / "start")
    fields = {"model": str(model), "data": str(data), "output": str(tmp_path / "run")}
    return {**fields, "batch_size": 2, "steps": 5, "learning_rate": 1e-2}


def kept(settings):
    """Steps of the checkpoints that are there."""
    names = [path.name for path in checkpoint._all(Path(settings["output"]) / "checkpoints")]
    return sorted(int(name.removeprefix("step-")) for name in names)


def handlers():
    return [signal.getsignal(signal.Signals[name]) for name in STATUSES]


@pytest.fixture
def not_ignored():
    """SIGINT is ignored in what a shell runs in the background, SIGHUP under nohup; a run leaves
    ignored ones alone.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("not_ignored")
@pytest.mark.parametrize("name", STATUSES)
def test_a_signal_stops_after_the_step_and_the_run_goes_on_to_the_same_weights(
    settings, name, capfd
):
    before = handlers()
    open_sft(SFT(**{**settings, "output": settings["output"] + "-undisturbed"})).train()
    with in_step(2, lambda: send(name)), pytest.raises(Stopped) as stopped:
        open_sft(SFT(**settings)).train()
    assert stopped.value.code == STATUSES[name] and kept(settings) == [2]
    assert not (Path(settings["output"]) / "model").exists()
    said = capfd.readouterr().err
    assert f"{name}: stops after this step; a second SIGINT ends it at once\n" in said
    assert said.endswith("stopped at step 2 of 5; continue with --resume true\n")
    assert handlers() == before
    open_sft(SFT(**settings, resume=True)).train()
    assert_undisturbed(settings)


def test_ctrl_c_during_scoring_finishes_the_rollout_and_closes_the_source(tmp_path, monkeypatch):
    config = {**prepare(tmp_path), "output": str(tmp_path / "run"), "steps": 3}
    open_grpo(GRPO(**{**config, "output": config["output"] + "-undisturbed"})).train()
    calls, closed, even, close = itertools.count(1), [], online.even, LocalSource.close

    def then_even(row, sample):
        if next(calls) == 20:  # in the second of three rollouts of sixteen
            send("SIGINT")
        return even(row, sample)

    async def then_close(source):
        closed.append(source)
        await close(source)

    then_even.__module__ = online.__name__  # where the configuration looks for it
    monkeypatch.setattr(online, "even", then_even)
    monkeypatch.setattr(LocalSource, "close", then_close)
    with pytest.raises(Stopped) as stopped:
        open_grpo(GRPO(**config)).train()
    assert stopped.value.code == 130 and kept(config) == [2] and len(closed) == 1
    open_grpo(GRPO(**config, resume=True)).train()
    assert_undisturbed(config)


def test_a_signal_stops_the_run_in_order_where_the_reader_of_its_errors_is_gone(
    settings, monkeypatch
):
    usual = os.write

    def write(descriptor, data):
        if descriptor == 2:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
        return usual(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    with in_step(2, lambda: send("SIGINT")), pytest.raises(Stopped):
        open_sft(SFT(**settings)).train()
    assert kept(settings) == [2]


def test_a_second_sigint_ends_at_once(settings):
    def twice():
        send("SIGINT")
        send("SIGINT")

    before = handlers()
    with in_step(2, twice), pytest.raises(KeyboardInterrupt):
        open_sft(SFT(**settings)).train()
    assert kept(settings) == [] and handlers() == before


def test_the_first_signal_is_obeyed(settings):
    def both():
        send("SIGTERM")
        send("SIGUSR1")

    with in_step(2, both), pytest.raises(Stopped) as stopped:
        open_sft(SFT(**settings)).train()
    assert stopped.value.code == 143


def test_a_signal_in_the_last_step_lets_the_run_end(settings):
    with in_step(5, lambda: send("SIGTERM")):
        open_sft(SFT(**settings)).train()
    assert kept(settings) == [5] and (Path(settings["output"]) / "model").exists()


def test_a_signal_in_the_body_of_the_loop_stops_after_its_step(settings):
    with pytest.raises(Stopped):
        for step in open_sft(SFT(**settings)):
            if step.number == 2:
                send("SIGTERM")
    assert kept(settings) == [2]


def test_a_handler_that_the_program_has_set_stays(settings):
    received = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: received.append(number))
    try:
        with in_step(2, lambda: send("SIGUSR1")):
            open_sft(SFT(**settings)).train()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert received == [signal.SIGUSR1] and kept(settings) == [5]


def test_a_child_that_a_library_forks_is_ended_by_a_signal_as_ever():
    code = """
import os, signal, time
from burnish.loops.runs import stop
reader, writer = os.pipe()
with stop.signals(visible=True) as received:
    child = os.fork()
    if not child:
        os.write(writer, b"here")
        time.sleep(60)
        os._exit(0)
    os.read(reader, 4)
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    assert not any(received.values())
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


@pytest.mark.slow
def test_the_command_exits_with_the_status_of_the_signal(settings):
    """Of any: a run ends by an exception with its status, which is seen above; here nobody reads
    its output.
    """
    flags = [f"--{field}={value}" for field, value in {**settings, "steps": 100_000}.items()]
    command = [sys.executable, "-m", "burnish", "sft", *flags]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    run.stdout.close()
    journal = Path(settings["output"]) / "metrics.jsonl"
    while run.poll() is None and not (journal.exists() and journal.read_text()):
        time.sleep(0.05)
    run.send_signal(signal.SIGUSR1)
    _, errors = run.communicate(timeout=300)
    assert run.returncode == STATUSES["SIGUSR1"], errors
    (step,) = kept(settings)
    assert (
        errors.splitlines()[-1] == f"stopped at step {step} of 100000; continue with --resume true"
    )


@pytest.mark.parametrize(
    ("recipe", "name", "rank"),
    [("sft", "SIGUSR1", 1), slow("grpo", "SIGTERM", 1), slow("grpo", "SIGINT", 0)],
)
def test_a_signal_that_reaches_one_rank_stops_all_at_the_same_step(
    settings, tmp_path, recipe, name, rank
):
    config = settings
    if recipe == "grpo":
        online = {
            "epochs_per_rollout": 2,
            "minibatches": 2,
            "old_logprobs": "recomputed",
            "steps": 8,
        }
        config = {**prepare(tmp_path), **online, "output": settings["output"]}
    config |= {"schedule": "cosine"}
    outcomes = run_forked(2, "signalled", recipe, config, name, 3, rank)
    for status, printed in outcomes:
        assert status == 0, printed[-3000:]
        stopped = f"stopped at step 3 of {config['steps']}; continue with --resume true"
        assert f"status {STATUSES[name]}: {stopped}, ['step-00000003', 'step-00000002']" in printed
    assert_undisturbed(config)
    if recipe == "grpo":
        assert stored(Path(config["output"])) == stored(Path(config["output"] + "-undisturbed"))


@pytest.mark.parametrize(("minutes", "saves"), [(2, [2, 4, 6, 7]), (0, [7]), (None, [7])])
def test_checkpoints_are_saved_by_the_clock(settings, monkeypatch, minutes, saves):
    """Each step takes a minute."""
    now, original = 0.0, training.optimize

    def optimize(*arguments, **options):
        nonlocal now
        for step in original(*arguments, **options):
            now += 60.0
            yield step

    monkeypatch.setattr(training, "monotonic", lambda: now)
    monkeypatch.setattr(training, "optimize", optimize)
    open_sft(SFT(**{**settings, "steps": 7}, save_minutes=minutes, keep=10)).train()
    assert kept(settings) == saves


@pytest.fixture
def in_background(monkeypatch):
    """Checkpoints are written as they are where an accelerator trains, by these."""
    savers = []
    monkeypatch.setattr(
        checkpoint, "Saver", lambda background: savers.append(Saver(background=True)) or savers[-1]
    )
    return savers


def test_a_signal_and_the_end_wait_for_what_is_written_in_the_background(
    settings, in_background, capfd
):
    open_sft(SFT(**{**settings, "output": settings["output"] + "-undisturbed"})).train()
    with in_step(3, lambda: send("SIGTERM")), pytest.raises(Stopped):
        open_sft(SFT(**settings, save_every=1)).train()
    assert kept(settings) == [2, 3]
    open_sft(SFT(**settings, save_every=1, resume=True)).train()
    assert kept(settings) == [4, 5]
    assert_undisturbed(settings)


def test_a_disk_full_in_the_background_ends_the_run_before_the_next_checkpoint(
    settings, in_background, monkeypatch
):
    write = storage.write

    def full(path, pieces):
        if "step-00000040" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path, pieces)

    def until_failed():
        while not in_background[0].failed:
            time.sleep(0.01)

    monkeypatch.setattr(storage, "write", full)
    error = pytest.raises(
        checkpoint.CheckpointError, match=r"of step 40 could.*full.*step-00000020 is intact"
    )
    with in_step(41, until_failed), error:
        open_sft(SFT(**{**settings, "steps": 1000}, save_every=20)).train()
    assert kept(settings) == [20] and not list(Path(settings["output"]).glob("checkpoints/.*"))
    last = json.loads((Path(settings["output"]) / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 41 and "unsaved" not in last


def test_so_many_of_the_newest_are_kept(settings):
    open_sft(SFT(**settings, save_every=1, keep=3)).train()
    assert kept(settings) == [3, 4, 5]


@pytest.fixture
def held_out(settings, monkeypatch):
    """The loss of each evaluation, from step 0 on, is that of this list."""
    losses = iter([9.0, 4.0, 1.0, float("nan"), 2.0, 3.0])
    monkeypatch.setattr(training, "evaluate", lambda *arguments: {"loss": next(losses)})
    return {**settings, "eval_data": settings["data"], "eval_every": 1}


@pytest.mark.parametrize(("metric", "steps"), [("eval/loss", [2, 5]), ("max:eval/loss", [1, 5])])
def test_the_best_is_kept_beside_the_newest(held_out, metric, steps):
    open_sft(SFT(**held_out, keep=1, keep_best=metric)).train()
    assert kept(held_out) == steps


def test_a_resumed_run_knows_the_best(held_out):
    with in_step(4, lambda: send("SIGTERM")), pytest.raises(Stopped):
        open_sft(SFT(**held_out, keep=1, keep_best="eval/loss")).train()
    assert kept(held_out) == [2, 4]
    open_sft(SFT(**held_out, keep=1, keep_best="eval/loss", resume=True)).train()
    assert kept(held_out) == [2, 5]


@pytest.mark.parametrize(
    ("metric", "change", "message"),
    [
        ("eval/los", {}, "keep_best: no metric 'eval/los', did you mean 'eval/loss'"),
        (
            "loss",
            {},
            "keep_best: wanted a metric of eval_data, such as eval/loss or max:eval/reward, got 'loss'",
        ),
        ("eval/loss", {"eval_data": None}, "got 'eval/loss' and no eval_data"),
    ],
)
def test_a_metric_that_is_not_measured_is_refused_before_the_first_step(
    held_out, metric, change, message
):
    with pytest.raises(ValueError, match=message):
        open_sft(SFT(**{**held_out, **change}, keep_best=metric)).train()
    assert kept(held_out) == []


def test_a_resumed_run_refuses_a_metric_that_was_not_measured(held_out):
    with in_step(2, lambda: send("SIGTERM")), pytest.raises(Stopped):
        open_sft(SFT(**held_out)).train()
    lines = (Path(held_out["output"]) / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2]
    with pytest.raises(ValueError, match="keep_best: no metric 'eval/los'"):
        open_sft(SFT(**held_out, keep_best="eval/los", resume=True)).train()
