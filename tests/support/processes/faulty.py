"""Faults of the disk, of processes and of files, one at a time: after each, a run goes on to the
same weights.

The run is that of `resharded`: six steps, in a world of so many ranks of a kind, with checkpoints
of steps 2 and 3; where ranks die in collectives, it is one of `sharded`.
"""

import errno
import itertools
import json
import os
import random
import shutil
import signal
import tempfile
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import patch

import forked
import resharded
import sharded
import torch
from accelerate import PartialState
from burnish.loops.runs import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

COLLECTIVES = 10  # in which ranks die, of all that there are


class Counted:
    """A file whose writes are calls; of the one that is killed half was written."""

    def __init__(self, file, call):
        self.file, self.call = file, call

    def write(self, data):
        half = memoryview(data)[: len(data) // 2]
        self.call("write", lambda: (self.file.write(half), self.file.flush()))
        return self.file.write(data)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.file.close()

    def __getattr__(self, name):
        return getattr(self.file, name)


@contextmanager
def at_call(number, action):
    """Do this in place of the number-th call to the file system; yields the names of all calls."""
    names = []

    def call(name, before=lambda: None):
        names.append(name)
        if len(names) == number:
            before()
            action()

    def counted(name):
        original = getattr(os, name)

        def function(*args, **options):
            call(name)
            return original(*args, **options)

        return function

    original = Path.open

    def open_file(path, mode="r", *args, **options):
        if "w" not in mode:
            return original(path, mode, *args, **options)
        call("open")
        return Counted(original(path, mode, *args, **options), call)

    patches = [
        patch.object(os, name, counted(name))
        for name in ("fsync", "mkdir", "rename", "open", "rmdir", "unlink")
    ]
    for each in patches:
        each.start()
    try:
        with patch.object(Path, "open", open_file):
            yield names
    finally:
        for each in patches:
            each.stop()


def train_to_save(kind, directory):
    """A run after step 3, of which step 2 was saved."""
    run = resharded.start(kind, random=True)
    for number in (1, 2):
        resharded.step(run, number)
    save(run, directory, 2)
    resharded.step(run, 3)
    return run


def save(run, directory, number):
    """Keep the newest, so that an older one is removed, after the first."""
    checkpoint.save(Path(directory), number, **run.checkpoints, keep=1)


def resume(kind, directory):
    """The step that the run went on from, and its weights at the end."""
    run = resharded.start(kind, random=True)
    begin = checkpoint.load_newest(Path(directory), **run.checkpoints)
    return begin, resharded.finish(run, begin)


def same(weights, others):
    return all(torch.equal(weights[name], others[name]) for name in others)


def unbroken(kind):
    return resharded.finish(resharded.start(kind, random=True), 0)


def fail(number):
    raise OSError(number, os.strerror(number))


def be_failing(kind, rank, number, directory, every):
    """An OSError of this number at every so-many-th call of one rank; each rank says so, and goes
    on after it.
    """
    expected, outcomes, total, here = unbroken(kind), [], 1, PartialState().process_index
    for n in (0, *range(1, 1000, every)):
        if n > total:
            break
        place = Path(directory, str(n))
        run = train_to_save(kind, place)
        failed = None
        with at_call(n if here == rank else 0, partial(fail, number)) as calls:
            try:
                save(run, place, 3)
            except checkpoint.CheckpointError as error:
                failed = str(error)
        calls = share(calls, rank)
        begin, weights = resume(kind, place)
        if n == 0:
            assert failed is None and begin == 3
            total = len(calls)
            continue
        at = calls[n - 1]
        # Of what is not needed any more, errors are ignored; else all ranks have failed, and said
        # why.
        assert failed is not None or (at in ("rmdir", "unlink", "open") and begin == 3), (
            n,
            at,
            begin,
        )
        if failed is not None:
            cause = os.strerror(number)
            assert cause in failed and "--resume true" in failed, failed
            assert ("disk is full" in failed) == (number == errno.ENOSPC), failed
            assert f"step-{begin:08d} is intact" in failed, failed
            assert not list(place.glob(".partial-*"))
        assert same(weights, expected), (n, at, begin)
        outcomes.append([at, begin])
    return outcomes


def share(value, rank):
    """The value of one rank, on all."""
    if not torch.distributed.is_initialized():
        return value
    values = [value]
    torch.distributed.broadcast_object_list(values, src=rank)
    return values[0]


def be_killed(kind, rank, number, place):
    """Die at this call of the save of step 3, or write down all calls for 0."""
    run = train_to_save(kind, place)
    here = PartialState().process_index
    with at_call(
        number if here == rank else 0, lambda: os.kill(os.getpid(), signal.SIGKILL)
    ) as calls:
        save(run, place, 3)
    if number == 0 and here == rank:
        Path(place, "calls.json").write_text(json.dumps(calls))


def kill_at_calls(ranks, kind, rank, directory, every):
    """kill -9 of one rank at every so-many-th call; resumed in another group."""
    outcomes, calls = [], [""]
    places = []
    for number in (0, *range(1, 1000, every)):
        if number > len(calls):
            break
        place = Path(directory, str(number))
        statuses = launch(ranks, be_killed, kind, rank, number, str(place))
        if number == 0:
            assert all(status == 0 for status, _ in statuses), statuses
            calls = json.loads((place / "calls.json").read_text())
            continue
        assert statuses[rank][0] == -signal.SIGKILL, statuses
        for other in range(ranks):
            status, printed = statuses[other]
            if other != rank:
                assert status == 1, statuses  # one that doesn't end is killed
                assert (
                    "another rank ended" in printed and "start again with --resume true" in printed
                ), printed
        places.append((number, place))
    output = Path(directory, "resumed.pt")
    ((status, printed), *_) = launch(
        ranks, be_resumed, kind, [str(place) for _, place in places], str(output)
    )
    assert status == 0, printed
    for (number, _), begin in zip(places, json.loads(output.read_text()), strict=True):
        outcomes.append([calls[number - 1], begin])
    return outcomes


def be_resumed(kind, places, output):
    expected, begins = unbroken(kind), []
    for place in places:
        begin, weights = resume(kind, place)
        assert same(weights, expected) and begin in (2, 3), (place, begin)
        begins.append(begin)
    if PartialState().is_main_process:
        Path(output).write_text(json.dumps(begins))


class Collectives(TorchDispatchMode):
    """Do this before the number-th collective.

    Attributes:
        names: of all.
    """

    def __init__(self, number, action):
        super().__init__()
        self.number, self.action, self.names = number, action, []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if function.namespace == "c10d":
            self.names.append(function.__name__.partition(".")[0].strip("_"))
            if len(self.names) == self.number:
                self.action()
        return function(*arguments, **(options or {}))


def be_killed_in_collective(start, shards, rank, number, output):
    """Die before this collective of a run of DPO, or write down all of this rank for 0."""
    here = int(os.environ["RANK"])
    with Collectives(
        number if here == rank else 0, lambda: os.kill(os.getpid(), signal.SIGKILL)
    ) as collectives:
        sharded.train(start, shards, "dpo", output, save_every=1)
    if number == 0 and here == rank:
        Path(output, "collectives.json").write_text(json.dumps(collectives.names))


def kill_in_collectives(ranks, shards, rank, directory, every):
    """kill -9 of one rank in collectives from the first to the last; resumed, one after the other,
    in another group.
    """
    start = Path(directory, "start")
    start.mkdir()
    sharded.prepare(start)

    def die(number):
        output = Path(directory, str(number))
        return output, launch(
            ranks, be_killed_in_collective, str(start), shards, rank, number, str(output)
        )

    whole, statuses = die(0)
    assert all(status == 0 for status, _ in statuses), statuses
    names = json.loads((whole / "collectives.json").read_text())
    outcomes, places = [], []
    steps = COLLECTIVES // every - 1
    for number in (1 + k * (len(names) - 1) // steps for k in range(steps + 1)):
        place, statuses = die(number)
        assert statuses[rank][0] == -signal.SIGKILL, statuses
        others = [status for other, (status, _) in enumerate(statuses) if other != rank]
        # where the last one is that all are there
        ended = (place / "model/model.safetensors").exists()
        assert set(others) <= ({0, 1} if ended else {1}), statuses
        places.append(place)
        newest = checkpoint._all(place / "checkpoints")
        outcomes.append(
            [names[number - 1], int(newest[0].name.removeprefix("step-")) if newest else 0]
        )
    runs = [("dpo", str(place), {"save_every": 1, "resume": True}) for place in places]
    for status, printed in launch(ranks, sharded.be_rank, str(start), shards, runs):
        assert status == 0, printed[-5000:]
    for place in places:
        file = "model/model.safetensors"
        assert (place / file).read_bytes() == (whole / file).read_bytes(), place
    return outcomes


def launch(ranks, function, *arguments):
    with tempfile.TemporaryDirectory() as logs:
        return forked.run(ranks, function, arguments, logs)


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[int(at * (len(content) - 1))] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "empty": lambda path: os.truncate(path, 0),
    "half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "last byte cut": lambda path: os.truncate(path, path.stat().st_size - 1),
    "byte added": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "first bit flipped": lambda path: flip(path, 0.0),
    "a bit flipped": lambda path: flip(path, 0.4),
    "last bit flipped": lambda path: flip(path, 1.0),
    "missing": Path.unlink,
    "of another step": lambda path: shutil.copy(
        path.parents[1] / "step-00000002" / path.name, path
    ),
}


def be_damaged(kind, directory, every):
    """Files of the newest checkpoint damaged, in every so-many-th way; then all of both; and clocks
    that jump.
    """
    expected, outcomes = unbroken(kind), []
    run, whole = resharded.start(kind, random=True), Path(directory, "whole")
    main = run.accelerator.is_main_process
    for number in (1, 2, 3):
        resharded.step(run, number)
        if number > 1:
            checkpoint.save(whole, number, **run.checkpoints)
    files = sorted(path.name for path in (whole / "step-00000003").iterdir())

    def check(name, damage, begins):
        place = Path(directory, str(len(outcomes)))
        if main:
            shutil.copytree(whole, place)
            damage(place)
        run.accelerator.wait_for_everyone()
        begin, weights = resume(kind, place)
        assert begin == begins and same(weights, expected), (name, begin)
        outcomes.append([name, begin])

    for file, name in list(itertools.product(files, DAMAGES))[::every]:
        damage = DAMAGES[name]
        check(f"{file} {name}", lambda place, f=file, d=damage: d(place / "step-00000003" / f), 2)
    for name in ("empty", "a bit flipped", "missing"):
        damage = DAMAGES[name]
        check(
            f"all {name}", lambda place, d=damage: [d(file) for file in place.glob("*/state.pt")], 0
        )
    check(
        "renamed shard", lambda place: next(place.glob("*3/shard-0*")).rename(place / "shard-9"), 2
    )
    check(
        "stray shard",
        lambda place: shutil.copy(
            next(place.glob("*3/shard-0*")), place / "step-00000003/x.safetensors"
        ),
        2,
    )
    for year in (0, 2**32):
        check(
            f"newest dated {year}",
            lambda place, at=year: os.utime(place / "step-00000003", (at, at)),
            3,
        )
        with patch.object(time, "time", lambda at=year: float(at)):
            check(f"clock at {year}", lambda place: None, 3)
    return outcomes


def be_rank(action, *arguments):
    """Print the outcomes as JSON: what each fault was, and the step that was gone on from."""
    os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    random.seed(0)
    actions = {
        "fail": be_failing,
        "damage": be_damaged,
        "kill": kill_at_calls,
        "collective": kill_in_collectives,
    }
    print(json.dumps(actions[action](*arguments)))


# The processes that the fault suite starts, and what it does in them.
FAULTS = {
    "ENOSPC, one process": (1, "fail", "one", 0, 28),
    "EIO, one process": (1, "fail", "one", 0, 5),
    "kill -9, one process": (1, "kill", 1, "one", 0),
    "damaged files, one process": (1, "damage", "one"),
    "ENOSPC, rank 0 of 2": (2, "fail", "fsdp", 0, 28),
    "ENOSPC, rank 1 of 2": (2, "fail", "fsdp", 1, 28),
    "EIO, rank 0 of 2": (2, "fail", "ddp", 0, 5),
    "EIO, rank 1 of 2": (2, "fail", "ddp", 1, 5),
    "kill -9, rank 0 of 2": (1, "kill", 2, "fsdp", 0),
    "kill -9, rank 1 of 2": (1, "kill", 2, "fsdp", 1),
    "damaged files, two ranks": (2, "damage", "fsdp"),
    "kill -9 in collectives of shards, rank 1 of 2": (1, "collective", 2, 2, 1),
    "kill -9 in collectives of copies, rank 0 of 2": (1, "collective", 2, 1, 0),
}


def outcomes(name, directory, every=1):
    """Of every so-many-th fault of a kind: what it was, and the step that the run went on from to
    the same weights.
    """
    processes, *arguments = FAULTS[name]
    results = forked.run_forked(
        processes, "faulty", *arguments, str(directory), every, timeout=1800
    )
    for status, printed in results:
        assert status == 0, printed[-5000:]
    return json.loads(results[0][1].splitlines()[-1])
