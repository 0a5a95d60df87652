"""The lock of a directory on a file system that has none: a file that its owner rewrites."""

import json
import os
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest
from burnish.loops.runs import lock


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(lock, "BEAT", 0.05)
    monkeypatch.setattr(lock, "STALE", 0.5)
    monkeypatch.setattr(lock, "_POLL", 0.05)


def left_by(path, **owner):
    """The file of a process that was killed."""
    (path / ".lock.owner").write_text(
        json.dumps({"token": "other", "beat": "000000000003", **owner})
    )


def held(path):
    return json.loads((path / ".lock.owner").read_text())


def test_an_owner_that_is_alive_is_waited_for_by_nobody(tmp_path):
    with (
        lock.heartbeat(tmp_path),
        pytest.raises(
            ValueError, match=f"process {os.getpid()} on {socket.gethostname()} trains in"
        ),
        lock.heartbeat(tmp_path),
    ):
        raise AssertionError("two owners")
    assert list(tmp_path.iterdir()) == []


def test_a_lock_whose_owner_is_silent_is_taken_over(tmp_path, caplog):
    left_by(tmp_path, host="another-machine", pid=1)
    begun = time.monotonic()
    with lock.heartbeat(tmp_path):
        assert held(tmp_path)["pid"] == os.getpid() and time.monotonic() - begun >= 0.5
    assert list(tmp_path.iterdir()) == [] and "is taken over" in caplog.text


def test_a_lock_of_a_process_that_has_ended_here_is_taken_over_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "STALE", 60.0)
    ended = subprocess.Popen(["true"])
    ended.wait()
    left_by(tmp_path, host=socket.gethostname(), pid=ended.pid)
    with lock.heartbeat(tmp_path):
        assert held(tmp_path)["pid"] == os.getpid()


@pytest.mark.parametrize("content", [b"", b"\0" * 64, b"[1]", b'{"pid": "x"}'])
def test_a_lock_that_was_damaged_is_taken_over(content, tmp_path):
    (tmp_path / ".lock.owner").write_bytes(content)
    with lock.heartbeat(tmp_path):
        assert held(tmp_path)["pid"] == os.getpid()


def test_of_many_that_find_a_stale_lock_one_gets_it(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "STALE", 2.0)  # of a busy machine, a beat may come a second late
    sent = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append(number) if number else None)
    left_by(tmp_path, host="another-machine", pid=1)
    refused, won = threading.Semaphore(0), []

    def contend():
        try:
            with lock.heartbeat(tmp_path):
                won.append(threading.current_thread())
                assert all(refused.acquire(timeout=30) for _ in range(7))
        except ValueError:
            refused.release()

    threads = [threading.Thread(target=contend) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1 and not sent
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_was_replaced_meanwhile_is_not_touched(tmp_path):
    path = tmp_path / ".lock.owner"
    path.write_bytes(b"the new owner's")
    before = path.stat()
    with pytest.raises(ValueError, match="another process trains in"):
        lock._remove_stale(path, b"left by a process that has ended", tmp_path)
    assert os.path.samestat(path.stat(), before) and path.stat().st_ctime_ns == before.st_ctime_ns
    assert list(tmp_path.iterdir()) == [path]


def test_a_lock_that_is_created_while_a_stale_one_is_looked_for_is_not_removed(
    tmp_path, monkeypatch
):
    path = tmp_path / ".lock.owner"
    monkeypatch.setattr(lock, "_read", lambda path: path.write_bytes(b"the new owner's") and None)
    lock._remove_stale(path, b"left by a process that has ended", tmp_path)
    assert list(tmp_path.iterdir()) == [path]


def test_a_takeover_that_was_killed_is_named(tmp_path, monkeypatch):
    left_by(tmp_path, host="another-machine", pid=1)
    path = tmp_path / ".lock.owner"
    monkeypatch.setattr(Path, "unlink", lambda *_args, **_options: None)  # killed before
    lock._remove_stale(path, path.read_bytes(), tmp_path)
    (claim,) = tmp_path.glob(".lock.owner.*")
    with (
        pytest.raises(ValueError, match=f"or remove {claim} if there is none"),
        lock.heartbeat(tmp_path),
    ):
        raise AssertionError("two owners")


def test_a_lock_that_cannot_be_read_for_a_moment_is_not_lost(tmp_path, monkeypatch):
    sent = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append(number))
    monkeypatch.setattr(lock, "_POLL", 0.5)
    path, aside = tmp_path / ".lock.owner", tmp_path / "aside"
    with lock.heartbeat(tmp_path):
        path.rename(aside)
        time.sleep(0.2)  # some beats
        aside.rename(path)
        time.sleep(0.8)
        assert not sent and held(tmp_path)["token"]


def test_an_owner_that_stood_still_and_lost_its_lock_ends(tmp_path, monkeypatch):
    sent = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append(number))
    with lock.heartbeat(tmp_path):
        left_by(tmp_path, host="another-machine", pid=1)
        until = time.monotonic() + 10
        while not sent and time.monotonic() < until:
            time.sleep(0.05)
    assert sent and held(tmp_path)["token"] == "other", "the lock is the other's"


def test_a_lock_file_that_is_removed_while_it_is_opened_is_not_held_alone(tmp_path, monkeypatch):
    usual, removed = lock.fcntl.flock, []

    def flock(file, operation):
        if not removed:
            removed.append((tmp_path / ".lock").unlink())
        usual(file, operation)

    monkeypatch.setattr(lock.fcntl, "flock", flock)
    with (
        lock.locked(tmp_path),
        pytest.raises(ValueError, match="another process trains in"),
        lock.locked(tmp_path),
    ):
        raise AssertionError("two owners")
