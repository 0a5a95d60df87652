"""Functions in processes of their own: they can be killed, and their crashes are nobody else's."""

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from burnish.loops.rewards import RewardFunction, isolated
from burnish.loops.rewards.scoring import OutOfTime, within
from burnish.loops.rollouts import event_loops

MODULE = """
import os, sys, time

def pid(*arguments):
    return os.getpid()

def double(x):
    print("functions may print")
    return 2 * x

async def later(x):
    return x + 1

def fails(x):
    raise KeyError("pepper")

def spin(x):
    while x:
        pass
    return "did not spin"

def holds_the_interpreter(x):
    import re
    return re.fullmatch("(a+)+b", "a" * x) is None

def crashes(x):
    os._exit(7)

def starts_another(path):
    import subprocess
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    path.write_text(str(child.pid))
    if os.fork() == 0:
        time.sleep(600)
    path.with_name("done").touch()
    child.wait()

def unpicklable(x):
    return lambda: x

def has_torch(row, sample):
    import sys
    assert sample.index == 0
    return "torch" in sys.modules

class Unsafe:
    def __reduce__(self):
        return os.mkdir, (os.environ["BURNISH_PROOF"],)

def returns_code(x):
    return [Unsafe()]

def takes(gigabytes):
    return len(bytearray(int(gigabytes * (1 << 30))))

def writes(path):
    with open(path, "wb") as file:
        for _ in range(17):
            file.write(bytes(1 << 26))

def computes(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
    return True

def variables(x):
    return dict(os.environ)

def notes(row, sample):
    sample.info["seen"] = {"tokens": (1, 2)}
    return 1.0

def reaches(path):
    import socket
    from pathlib import Path
    found = {}
    try:
        socket.create_connection(("127.0.0.1", int(path[1])), 2)
        found["network"] = True
    except OSError:
        found["network"] = False
    try:
        Path(path[0]).write_text("changed")
        found["writes"] = True
    except OSError:
        found["writes"] = False
    found["home"] = os.path.exists(path[2])
    found["processes"] = len([name for name in os.listdir("/proc") if name.isdigit()])
    return found

def by_index(row, sample):
    if sample.index == 1:
        time.sleep(60)
    return float(sample.index)
by_index.columns = ("answer",)
"""


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    directory = tmp_path_factory.mktemp("own")
    (directory / "own_rewards.py").write_text(MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(directory)
        import own_rewards

        yield own_rewards


def run(coroutine):
    return asyncio.run(coroutine)


def test_it_runs_elsewhere_and_stays_there(functions):
    there = isolated(functions.pid)
    assert run(there()) == run(there()) != os.getpid()


def test_ctrl_c_at_the_terminal_of_the_run_does_not_reach_it(functions):
    assert os.getpgid(run(isolated(functions.pid)())) != os.getpgid(0)


def test_it_returns_what_the_function_does(functions):
    assert run(isolated(functions.double)(21)) == 42
    assert run(isolated(functions.later)(41)) == 42


def test_its_exception_comes_with_the_traceback_there(functions):
    with pytest.raises(RuntimeError, match=r"in fails\n(.|\n)*KeyError: 'pepper'"):
        run(isolated(functions.fails)(0))


@pytest.mark.parametrize(
    ("name", "forever", "short"), [("spin", 1, 0), ("holds_the_interpreter", 60, 3)]
)
def test_a_call_out_of_time_is_killed_and_the_next_one_works(name, forever, short, functions):
    function = isolated(getattr(functions, name))

    async def twice():
        await function(short)
        ((process, _),) = function._idle
        with pytest.raises(OutOfTime):
            await within(0.3, function(forever))
        for _ in range(3000):  # a minute
            if process.poll() is not None:
                break
            await asyncio.sleep(0.02)
        assert process.poll() == -9
        return await function(short)

    assert run(twice())


def lives(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_what_a_function_has_started_is_killed_with_it(functions, tmp_path):
    """Such as a program that the policy wrote; a child that holds the connection would keep its
    reader waiting.
    """

    async def starts():
        call = asyncio.ensure_future(isolated(functions.starts_another)(tmp_path / "pid"))
        while not (tmp_path / "done").exists():
            await asyncio.sleep(0.02)
        busy = len(event_loops._idle)
        call.cancel()
        for _ in range(3000):
            if not lives((tmp_path / "pid").read_text()) and len(event_loops._idle) > busy:
                return True
            await asyncio.sleep(0.02)
        return False

    assert run(starts())


def test_what_a_function_has_started_ends_with_a_run_that_is_killed(functions, tmp_path):
    code = (
        "import asyncio, pathlib, own_rewards; from burnish.loops.rewards.isolation import isolated; "
        f"asyncio.run(isolated(own_rewards.starts_another)(pathlib.Path({str(tmp_path / 'pid')!r})))"
    )
    path = os.pathsep.join([str(Path(functions.__file__).parent), *sys.path])
    run = subprocess.Popen(
        [sys.executable, "-P", "-c", code], env={**os.environ, "PYTHONPATH": path}
    )
    while run.poll() is None and not (tmp_path / "done").exists():
        time.sleep(0.02)
    run.kill()
    run.wait()
    for _ in range(3000):
        if not lives((tmp_path / "pid").read_text()):
            return
        time.sleep(0.02)
    raise AssertionError("it outlived the run by a minute")


def test_a_crash_is_an_error_and_the_next_call_works(functions):
    crashing = isolated(functions.crashes)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="ended with code 7"):
            run(crashing(0))


def test_a_result_that_cannot_be_sent_is_an_error(functions):
    with pytest.raises(
        RuntimeError, match=r"the function's result: wanted numbers, text, .* got function"
    ):
        run(isolated(functions.unpicklable)(0))


def test_what_it_returns_is_data_and_runs_nothing_here(functions, tmp_path, monkeypatch):
    """Once it was unpickled: an object that names a command ran it in the trainer."""
    monkeypatch.setenv("BURNISH_PROOF", str(tmp_path / "proof"))
    with pytest.raises(RuntimeError, match="wanted numbers, text"):
        run(isolated(functions.returns_code, environment=["BURNISH_PROOF"])(0))
    assert not (tmp_path / "proof").exists()


def test_a_function_that_takes_too_much_memory_is_told_so_and_the_next_call_works(functions):
    there = isolated(functions.takes, memory=0.5)
    with pytest.raises(
        RuntimeError,
        match=r"(?s)MemoryError.*it may take 0\.5 GiB beyond its imports; raise memory",
    ):
        run(there(1.0))
    assert run(there(0.25)) == 1 << 28
    with pytest.raises(RuntimeError, match="it may take 2 GiB"):
        run(isolated(functions.takes)(4.0))


@pytest.mark.slow
def test_a_file_that_grows_without_end_is_cut_off(functions, tmp_path):
    """Writes a gigabyte."""
    with pytest.raises(RuntimeError, match="File too large"):
        run(isolated(functions.writes)(tmp_path / "file"))
    assert (tmp_path / "file").stat().st_size == 1 << 30


def test_a_call_that_uses_too_much_processor_time_is_ended(functions):
    there = isolated(functions.computes, processor_seconds=1)
    for _ in range(2):  # of each call, and not of all
        assert run(there(0.7)) is True
    with pytest.raises(
        RuntimeError, match="used more than 1 s of processor time; raise processor_seconds"
    ):
        run(there(60))


def test_secrets_of_the_environment_are_not_passed_on(functions, monkeypatch):
    planted = {
        "OPENAI_API_KEY": "sk-1",
        "HF_TOKEN": "hf-1",
        "AWS_SECRET_ACCESS_KEY": "a",
        "MY_OWN": "m",
    }
    for name, value in {**planted, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}.items():
        monkeypatch.setenv(name, value)
    there = run(isolated(functions.variables)(0))
    assert not planted.keys() & there.keys() and "PATH" in there
    assert (there["OMP_NUM_THREADS"], there["HF_HUB_OFFLINE"]) == ("1", "1")
    chosen = run(isolated(functions.variables, environment=["OPENAI_API_KEY"])(0))
    assert planted.keys() & chosen.keys() == {"OPENAI_API_KEY"}


def test_the_info_of_a_sample_comes_back(functions, answer):
    sample = answer()
    assert run(isolated(functions.notes)({}, sample)) == 1.0
    assert sample.info["seen"] == {"tokens": [1, 2]}


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_in_a_jail_there_is_no_network_nothing_to_write_and_no_home(functions, tmp_path):
    (file := tmp_path / "file").write_text("whole")
    (secret := Path.home() / ".burnish-test-secret").touch()
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            argument = (str(file), server.getsockname()[1], str(secret))
            here = run(isolated(functions.reaches)(argument))
            file.write_text("whole")
            jailed = run(isolated(functions.reaches, jail=True)(argument))
    finally:
        secret.unlink()
    here.pop("processes")
    assert here == {"network": True, "writes": True, "home": True}
    assert not jailed["network"] and not jailed["home"]
    assert file.read_text() == "whole" and jailed["processes"] < 5


def test_a_jail_is_bubblewraps_or_refused(functions, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        ValueError,
        match=r"a jail for double needs bubblewrap, whose program bwrap .* leave jail out",
    ):
        isolated(functions.double, jail=True)


@pytest.mark.parametrize("wrong", [{"memory": 0}, {"memory": -1.0}, {"processor_seconds": 0}])
def test_limits_are_above_zero(wrong, functions):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be > 0"):
        isolated(functions.double, **wrong)


def test_as_many_calls_as_processes_run_at_once(functions):
    there = isolated(functions.pid, processes=2)

    async def both():
        return await asyncio.gather(there(), there())

    assert len(set(run(both()))) == 2


def test_a_judge_masks_what_was_killed(functions, groups, judging):
    reward = RewardFunction("slow", isolated(functions.by_index), timeout=30)
    rows, samples = groups
    judging([reward], rows[:1], samples[:1])  # starting a process takes longer than what follows
    reward.timeout = 1.0
    begun = time.monotonic()
    assert judging([reward], rows[1:2], samples[1:2]) == {("slow", "timeout"): 1}
    assert [sample.rewards["slow"] for sample in samples[:2]] == [0.0, "timeout"]
    assert time.monotonic() - begun < 30


def test_its_process_starts_without_torch(functions, answer, judging):
    """Or it would take hundreds of megabytes, and seconds, for a function that compares texts."""
    sample = answer()
    assert judging([RewardFunction("torch", isolated(functions.has_torch))], [{}], [sample]) == {}
    assert sample.rewards == {"torch": 0.0}


def test_it_keeps_what_the_function_says_of_itself(functions):
    assert isolated(functions.by_index).columns == ("answer",)
    assert isolated(functions.by_index, processes=3).concurrency == 3


def test_what_no_other_process_can_import_is_refused():
    with pytest.raises(ValueError, match=r"<lambda> can't be sent to another process.*no lambda"):
        isolated(lambda row, sample: 1.0)

    def script(row, sample):
        return 1.0

    script.__module__ = "__main__"
    with pytest.raises(ValueError, match=r"script that runs.*move it to a module"):
        isolated(script)


def test_there_is_at_least_one_process(functions):
    with pytest.raises(ValueError, match="processes must be >= 1, got 0"):
        isolated(functions.double, processes=0)
