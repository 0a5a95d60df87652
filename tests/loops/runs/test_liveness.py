"""A rank that stops, stands still or is held ends all ranks, which name it; and what ends a rank
that waits for one.
"""

import gc
import json
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time

import pytest
from burnish.loops.runs import liveness, peers
from burnish.loops.runs.liveness import RankLost, Watch
from burnish.loops.runs.peers import Peer, connect, own_process
from forked import run_forked
from grids import exhaustive, slow
from online import prepare
from rank_stopped import MOMENTS


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Fields of a run on two ranks, and the weights with which it ends."""

    directory = tmp_path_factory.mktemp("stopped")
    fields = {**prepare(directory), "steps": 3, "save_every": 1, "eval_every": 1}
    fields["eval_data"] = fields["data"]
    output = directory / "undisturbed"
    for status, printed in run_forked(
        2, "rank_stopped", {**fields, "output": str(output)}, None, 0, "", ""
    ):
        assert status == 0, printed[-3000:]
    return fields, (output / "model/model.safetensors").read_bytes()


def disturb(fields, output, moment, rank, kind, hang_seconds):
    """How two ranks ended, and seconds since it happened."""
    note = output.with_suffix(".note")
    config = {**fields, "output": str(output), "hang_seconds": hang_seconds}
    outcomes = run_forked(2, "rank_stopped", config, moment, rank, kind, str(note))
    assert note.exists(), outcomes
    return outcomes, time.time() - float(note.read_text().split()[0])


STOPPED = [
    (moment, rank, 10.0, exhaustive)
    for moment in MOMENTS
    for rank in (0, 1)
    if (moment, rank) != ("forward", 1)
]


@pytest.mark.parametrize(
    ("moment", "rank", "hang_seconds"),
    [
        ("forward", 1, 5.0),
        *(mark(moment, rank, seconds) for moment, rank, seconds, mark in STOPPED),
    ],
)
def test_a_rank_that_is_stopped_ends_all_which_name_it(
    undisturbed, moment, rank, hang_seconds, tmp_path
):
    fields, weights = undisturbed
    run = tmp_path / "run"
    outcomes, seconds = disturb(fields, run, moment, rank, "stop", hang_seconds)
    status, printed = outcomes[1 - rank]
    assert status == liveness.HUNG, printed[-3000:]
    assert outcomes[rank][0] in (liveness.HUNG, -signal.SIGABRT, -signal.SIGKILL), outcomes[rank][
        1
    ][-3000:]
    assert (
        f"rank {1 - rank}: rank {rank} has been silent for " in printed
        and "last heard of in step " in printed
    )
    assert "(most recent call first)" in printed, "no stacks"
    assert seconds < hang_seconds + 15
    for status, printed in run_forked(
        2, "rank_stopped", {**fields, "output": str(run), "resume": True}, None, 0, "", ""
    ):
        assert status == 0, printed[-3000:]
    assert (run / "model/model.safetensors").read_bytes() == weights


@pytest.mark.parametrize(("kind", "rank"), [slow("hold", 1), slow("stand", 0), slow("stand", 1)])
def test_a_rank_that_holds_python_or_stands_still_ends_all(undisturbed, kind, rank, tmp_path):
    fields, _ = undisturbed
    outcomes, seconds = disturb(fields, tmp_path / "run", "forward", rank, kind, 5.0)
    printed = outcomes[1 - rank][1]
    assert outcomes[1 - rank][0] == liveness.HUNG, printed[-3000:]
    if kind == "hold":
        assert f"rank {rank} has been silent for " in printed
        assert "rank_stopped.py" in outcomes[rank][1], (
            "the function that holds Python is in no stack"
        )
    else:
        assert "no rank has moved for " in printed and outcomes[rank][0] == liveness.HUNG
        assert f": rank {rank} in step 2, " in printed, (
            "the rank that waits for no other is named first"
        )
    assert seconds < 5 + 15


# A process of two that meet as ranks do, over a store of its own, without a model.
PAIR = """
import os, signal, sys, threading, time
import torch.distributed as dist
from burnish.loops.runs import liveness, stop
from burnish.loops.runs.ranks import opening, watching

rank, port, hang_seconds = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
os.environ |= {{"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}}
liveness.GRACE = 2.0
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell runs in the background
with opening():
    liveness.open_watch(hang_seconds)
    dist.init_process_group("gloo")
    print("met", flush=True)
    {body}
"""


@pytest.fixture
def pair():
    """``pair(body of rank 0, body of rank 1, hang_seconds)`` starts both, and waits until they have
    met.
    """
    started = []

    def start(*bodies, hang_seconds=600.0):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        for rank, body in enumerate(bodies):
            code = PAIR.format(body=textwrap.indent(textwrap.dedent(body).strip(), "    ").strip())
            command = [sys.executable, "-c", code, str(rank), port, str(hang_seconds)]
            started.append(
                subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            )
        for process in started:
            assert process.stdout.readline() == "met\n", process.stderr.read()
        return started

    yield start
    for process in started:
        process.kill()
        process.communicate()


def ended(process, seconds=60):
    """Exit status, standard error, and how long it took from now on."""
    began = time.monotonic()
    _, errors = process.communicate(timeout=seconds)
    return process.returncode, errors, time.monotonic() - began


IN_STEP = """
with stop.signals(visible=True), watching():
    print("waits", flush=True)
    dist.barrier()
"""


def test_a_second_sigint_ends_a_rank_in_a_collective_as_sigterm_does_beside_silence(pair):
    waiting, other = pair(IN_STEP, "time.sleep(600)")
    assert waiting.stdout.readline() == "waits\n"
    other.send_signal(signal.SIGSTOP)
    waiting.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert waiting.poll() is None
    waiting.send_signal(signal.SIGINT)
    status, errors, seconds = ended(waiting)
    assert (
        status == 130
        and seconds < 2.5
        and "rank 0: SIGINT while it waited for other ranks; " in errors
    )
    assert "Traceback" not in errors


def test_sigterm_ends_a_rank_that_waits_for_a_silent_one(pair):
    waiting, other = pair(IN_STEP, "time.sleep(600)")
    assert waiting.stdout.readline() == "waits\n"
    waiting.send_signal(signal.SIGTERM)
    time.sleep(3.0)
    assert waiting.poll() is None, "the other rank moves, so the step may be finished"
    other.send_signal(signal.SIGSTOP)
    status, errors, seconds = ended(waiting)
    assert status == 143 and seconds < liveness.SILENT + 4
    assert (
        "rank 0: SIGTERM while it waited for other ranks; rank 1 has been silent for a while"
        in errors
    )


def test_ranks_that_wait_for_each_other_in_vain_are_ended(pair):
    both = pair("dist.barrier()", "time.sleep(600)", hang_seconds=4)
    for rank, process in enumerate(both):
        status, errors, seconds = ended(process)
        assert status == liveness.HUNG and seconds < 4 + 15
        assert (
            f"rank {rank}: no rank has moved for 4 s: rank " in errors
            and "(most recent call first)" in errors
        )


def test_a_rank_that_moves_is_waited_for_and_so_is_one_that_may_stand(pair):
    computing = "end = time.monotonic() + 9\nwhile time.monotonic() < end:\n    sum(range(1000))\ndist.barrier()"
    both = pair(computing, "dist.barrier()", hang_seconds=4)
    assert [ended(process)[0] for process in both] == [0, 0]


def test_a_rank_may_stand_for_as_long_as_it_says(pair):
    standing = "with liveness.may_stand(10):\n    time.sleep(9)\ndist.barrier()"
    both = pair(standing, "dist.barrier()", hang_seconds=4)
    assert [ended(process)[0] for process in both] == [0, 0]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_before_there_is_a_run_is_named_by_the_other(pair, rank):
    both = pair("time.sleep(600)", "time.sleep(600)")
    both[rank].kill()
    status, errors, seconds = ended(both[1 - rank])
    assert status == 1 and seconds < 15, errors
    assert (
        f"rank {1 - rank}: the process of rank {rank} has ended: it was killed, or failed; its own"
        in errors
    )


def test_the_error_of_a_rank_is_told_to_the_others(pair):
    failing, waiting = pair("raise ValueError('no such thing')", "time.sleep(600)")
    status, errors, _ = ended(waiting)
    assert (
        status == 1
        and "rank 1: rank 0 failed with ValueError: no such thing; this one ends, too" in errors
    )
    assert ended(failing)[0] == 1


def test_a_rank_whose_run_is_over_may_go_on_alone(pair):
    alone = "with watching():\n    dist.barrier()\ntime.sleep(6)"
    first, second = pair("with watching():\n    dist.barrier()\nos._exit(3)", alone)
    assert ended(first)[0] == 3
    assert ended(second)[0] == 0


def test_a_child_of_a_fork_is_no_part_of_the_connection(pair):
    forking = """
    child = os.fork()
    if not child:
        time.sleep(20)
        os._exit(0)
    print("waits", flush=True)
    time.sleep(600)
    """
    waiting, dying = pair("time.sleep(600)", forking)
    assert dying.stdout.readline() == "waits\n"
    dying.kill()
    assert ended(waiting)[0] == 1  # though the child still has what it inherited


class Store:
    """A key-value store of threads."""

    def __init__(self):
        self.values, self.there = {}, threading.Event()

    def set(self, key, value):
        self.values[key] = value
        self.there.set()

    def get(self, key):
        assert self.there.wait(10)
        return self.values[key]


def test_a_stranger_without_the_token_is_not_connected(monkeypatch):
    monkeypatch.setattr(peers, "MEETING", 5.0)
    store, connected = Store(), {}
    accepting = threading.Thread(target=lambda: connected.update(connect(store, 0, 2)))
    accepting.start()
    meeting = json.loads(store.get("burnish/watch/0"))
    for line in (
        b"GET / HTTP/1.1\n",
        b'["", 1, ["", 1, ""]]\n',
        json.dumps([meeting["token"], 7, []]).encode() + b"\n",
    ):
        with socket.create_connection(("127.0.0.1", meeting["port"])) as stranger:
            stranger.sendall(line)
            assert stranger.recv(100) == b""
    others = connect(store, 1, 2)
    accepting.join(10)
    assert connected[1].process == own_process() == others[0].process
    for peer in (connected[1], others[0]):
        peer.connection.close()


def test_a_rank_that_does_not_come_is_named(monkeypatch):
    monkeypatch.setattr(peers, "MEETING", 0.2)
    with pytest.raises(
        peers.Unreachable,
        match="rank 0: the process of rank 1 has ended just after it met the others",
    ):
        connect(Store(), 0, 3)


def test_rank_0_that_is_out_of_reach_is_said_with_what_to_set():
    store = Store()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    store.set(
        "burnish/watch/0", json.dumps({"token": "", "addresses": ["127.0.0.1"], "port": port})
    )
    with pytest.raises(
        peers.Unreachable, match=r"rank 1: rank 0 can't be reached .*127.0.0.1 \(.*set MASTER_ADDR"
    ):
        connect(store, 1, 2)


def test_a_process_that_was_stopped_itself_blames_no_other(monkeypatch):
    """As of a job that its batch system suspends: every rank wakes, and has not heard from the
    others for hours.
    """
    one, other = socket.socketpair()
    monkeypatch.setattr(liveness, "_write_signals_to", lambda end: False)
    monkeypatch.setattr(Watch, "_watch", lambda self: None)
    watch = Watch(0, 2, {1: Peer(1, one, ["", 0, ""])})
    watch.begin(10.0)
    told = []
    monkeypatch.setattr(watch, "_tell_hung", lambda why, silent: told.append(why))
    now = time.monotonic() + 3600
    watch._excuse(3600)
    watch._look(now)
    watch._judge(now)
    assert told == []
    watch._judge(watch.peers[1].heard + 11)
    assert len(told) == 1
    assert "rank 1 has been silent for 11 s, last heard of in step 0, set-up" in told[0]
    for end in (one, other, watch._wake, watch._woken):
        end.close()


def test_no_garbage_is_looked_for_while_threads_are_listed(monkeypatch):
    """Python 3.11 would do so under a lock: the process could stand still for ever."""
    collecting = []
    frames = sys._current_frames

    def listed():
        collecting.append(gc.isenabled())
        return frames()

    monkeypatch.setattr(sys, "_current_frames", listed)
    assert gc.isenabled()
    assert threading.get_ident() in liveness._frames()
    assert collecting == [False] and gc.isenabled()


def test_ranks_that_have_lost_one_open_no_further_run(monkeypatch):
    one, other = socket.socketpair()
    monkeypatch.setattr(liveness, "_write_signals_to", lambda end: False)
    monkeypatch.setattr(Watch, "_watch", lambda self: None)
    watch = Watch(0, 2, {1: Peer(1, one, ["", 0, ""])})
    other.close()
    watch._hear(watch.peers[1], time.monotonic())
    with pytest.raises(RankLost, match="rank 0: the process of rank 1 has ended"):
        watch.begin(10.0)
    for end in (one, watch._wake, watch._woken):
        end.close()
