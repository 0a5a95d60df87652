"""Processes that tests fork: they end with the process that asked for them."""

import os
import subprocess
import sys
import time
from pathlib import Path

SLEEPER = """
import os, pathlib, time
def be_rank(place):
    pathlib.Path(place, os.environ["RANK"]).write_text(str(os.getpid()))
    time.sleep(600)
"""


def alive(process):
    """False for a process that has ended, though its new parent may not have asked for its
    status.
    """
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until(condition, seconds=30.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def finding(directory):
    """The environment of a process that finds the modules of this directory, and those of
    tests/support.
    """
    support = (Path(__file__).parent / "support").iterdir()
    places = [str(directory), *map(str, support), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))}


def test_a_process_that_forked_ends_without_a_warning(tmp_path):
    (tmp_path / "greeter.py").write_text("def be_rank(): print('hello')")
    code = "from forked import run_forked; print(run_forked(2, 'greeter'))"
    command = [sys.executable, "-W", "always::ResourceWarning", "-c", code]
    done = subprocess.run(
        command, env=finding(tmp_path), capture_output=True, text=True, timeout=600
    )
    assert (done.stdout, done.stderr) == (r"[[0, 'hello\n'], [0, 'hello\n']]" + "\n", "")


def test_no_rank_outlives_the_process_that_asked_for_it(tmp_path):
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    code = f"from forked import run_forked; run_forked(2, 'sleeper', {str(tmp_path)!r})"
    asker = subprocess.Popen([sys.executable, "-c", code], env=finding(tmp_path))
    notes = [tmp_path / "0", tmp_path / "1"]
    assert until(lambda: all(note.exists() and note.read_text() for note in notes))
    ranks = [int(note.read_text()) for note in notes]
    assert all(map(alive, ranks))
    asker.kill()
    asker.wait()
    assert until(lambda: not any(map(alive, ranks)))
