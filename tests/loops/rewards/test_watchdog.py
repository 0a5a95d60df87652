"""Rewards that stop answering, or end the process that they are called in."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
from burnish.loops.rewards import RewardFunction, isolated, resolve_rewards
from burnish.loops.rollouts import event_loops
from grids import exhaustive, slow
from online import lines, prepare, stored, under_torchrun

MODULE = '''
import os, re, sys, time

_calls = 0

def once(call):
    """In one call of four of this process."""
    global _calls
    _calls += 1
    if _calls % 4 == 0:
        call()
    return float(_calls)

def backtracks(completion):
    return once(lambda: re.fullmatch("(a+)+b", "a" * 60))

def sleeps(completion):
    return once(lambda: time.sleep(1000))

def aborts(completion):
    return once(os.abort)

def leaves(completion):
    return once(lambda: os._exit(0))

def says_goodbye(completion):
    return once(lambda: sys.exit(0))

def takes_much(completion):
    """In one call alone, or calls at the same time would take all of the machine's memory."""
    return once(lambda: len(bytearray(4 << 30)) if _calls == 4 else None)

def hangs(completion):
    time.sleep(1000)

def computes(completion):
    end = time.monotonic() + 6
    while time.monotonic() < end:
        pass
    return 1.0
'''
CALL = """
import asyncio, sys, odd_rewards
from burnish.loops.rewards import RewardFunction, score_samples
from burnish.loops.rollouts.sample import Sample, VersionSpan

def sample(index):
    return Sample(0, index, [5], [6], [True], [-1.0], [VersionSpan(0, 0, 1)], "stop", "a")

samples = [sample(i) for i in range(4)]
reward = RewardFunction("odd", getattr(odd_rewards, sys.argv[1]), timeout=float(sys.argv[2]))
asyncio.run(score_samples([reward], [{}] * 4, samples))
print("scored", [each.rewards["odd"] for each in samples], flush=True)
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("odd")
    (directory / "odd_rewards.py").write_text(MODULE)
    return directory


@pytest.fixture
def functions(directory, monkeypatch):
    monkeypatch.syspath_prepend(directory)
    monkeypatch.delitem(sys.modules, "odd_rewards", raising=False)
    import odd_rewards

    return odd_rewards


def calling(directory, name, timeout):
    """A process in which this reward scores four completions."""
    path = os.pathsep.join([str(directory), *sys.path])
    return subprocess.Popen(
        [sys.executable, "-P", "-c", textwrap.dedent(CALL), name, str(timeout)],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_reward_that_holds_the_interpreter_is_named_and_ends_the_run(directory):
    began = time.monotonic()
    with calling(directory, "backtracks", 1.0) as process:
        _, printed = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGABRT
    assert (
        "burnish: reward odd: it has held Python's interpreter for" in printed
        and "isolate: true" in printed
    )
    assert "odd_rewards.py" in printed and "in backtracks" in printed, "its stack is shown"
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(("name", "status"), [("aborts", -signal.SIGABRT), ("leaves", 0)])
def test_a_reward_that_ends_the_process_is_named(name, status, directory):
    with calling(directory, name, 30.0) as process:
        _, printed = process.communicate(timeout=120)
    assert process.returncode == status
    assert "burnish: reward odd: the run's process has ended while it was being called" in printed
    assert ("Fatal Python error: Aborted" in printed) == (name == "aborts")


def test_a_run_that_is_stopped_by_ctrl_z_in_a_reward_goes_on(directory):
    with calling(directory, "computes", 4.0) as process:
        time.sleep(6)  # its imports
        process.send_signal(signal.SIGSTOP)
        time.sleep(8)
        process.send_signal(signal.SIGCONT)
        scored, printed = process.communicate(timeout=120)
    assert process.returncode == 0 and "scored" in scored
    assert "interpreter" not in printed


def test_an_exit_of_a_reward_masks_its_completion(functions, groups, judging):
    rows, samples = groups
    judging([RewardFunction("odd", functions.says_goodbye)], rows[:4], samples[:4])
    assert {sample.rewards["odd"] for sample in samples[:4]} == {1.0, 2.0, 3.0, "error"}


def test_a_reward_that_is_out_of_time_moves_to_processes_and_is_killed_there(
    functions, groups, judging, caplog
):
    rows, samples = groups
    reward = RewardFunction("odd", functions.sleeps, timeout=2.0)
    judging([reward], rows[:4], samples[:4])
    assert {sample.rewards["odd"] for sample in samples[:4]} == {1.0, 2.0, 3.0, "timeout"}
    assert isinstance(reward.function, isolated)
    assert "so from now on it is called in" in caplog.text
    stuck = len(event_loops._abandoned)
    for _ in range(2):
        judging([reward], rows[:4], samples[:4])
        assert {sample.rewards["odd"] for sample in samples[:4]} <= {1.0, 2.0, 3.0, "timeout"}
    time.sleep(1)
    assert len(event_loops._abandoned) == stuck, "what is killed leaves no thread"


@pytest.mark.parametrize("isolate", [True, False, None])
def test_isolate_is_a_setting(isolate, functions):
    settings = {"weight": 1.0} | ({} if isolate is None else {"isolate": isolate})
    (reward,) = resolve_rewards({"odd_rewards:sleeps": settings})
    assert isinstance(reward.function, isolated) == (isolate is True)
    assert reward.isolate == (isolate is None)


def test_limits_of_isolation_are_settings(functions):
    (reward,) = resolve_rewards(
        {"odd_rewards:sleeps": {"isolate": {"memory": 0.5, "processes": 3}}}
    )
    assert reward.function.concurrency == 3 and reward.function._memory == 0.5
    with pytest.raises(ValueError, match=r"reward sleeps: isolate has no setting .*memory"):
        resolve_rewards({"odd_rewards:sleeps": {"isolate": {"memry": 0.5}}})
    with pytest.raises(
        ValueError, match="isolate: wanted true, false, or a mapping of processes, memory"
    ):
        resolve_rewards({"odd_rewards:sleeps": {"isolate": "yes"}})


def test_a_function_that_no_process_can_import_stays_and_says_so(groups, judging, caplog):
    rows, samples = groups
    release = threading.Event()
    reward = RewardFunction("odd", lambda row, sample: release.wait(60), timeout=0.2)
    judging([reward], rows[:1], samples[:1])
    release.set()
    assert not isinstance(reward.function, isolated)
    assert "reward odd: it is still called in threads of this process" in caplog.text


def test_more_stuck_threads_than_allowed_end_the_run_and_name_the_function(
    monkeypatch, groups, judging
):
    monkeypatch.setattr(event_loops, "MOST_ABANDONED", 2)
    monkeypatch.setattr(event_loops, "_abandoned", {})
    rows, samples = groups
    release = threading.Event()

    def stuck(row, sample):
        release.wait(60)

    reward = RewardFunction("odd", stuck, timeout=0.2, isolate=False)
    judging([reward], rows[:2], samples[:2])
    judging([reward], rows[:1], samples[:1])
    with pytest.raises(
        RuntimeError, match=r"3 calls have run out of time and still run.*3 of .*stuck"
    ):
        judging([reward], rows[:1], samples[:1])
    release.set()
    end = time.monotonic() + 60
    while event_loops._abandoned and time.monotonic() < end:
        time.sleep(0.02)
    assert not event_loops._abandoned, "those that end after all are forgotten"
    judging([RewardFunction("odd", lambda row, sample: 1.0)], rows[:1], samples[:1])


ENDS = {  # how a run of two steps ends: its status, and what is said
    "backtracks": (1, "reward backtracks: it has held Python's interpreter"),
    "sleeps": (0, "so from now on it is called in"),
    "aborts": (1, "reward aborts: the run's process has ended while it was being called"),
    "says_goodbye": (0, "the function raised SystemExit(0)"),
    "takes_much": (0, ""),
}


SOME_ENDS = [
    ("backtracks", None, 2),
    ("aborts", None, 1),
    ("sleeps", True, 2),
    ("takes_much", True, 1),
]
ALL_ENDS = [(name, isolate, ranks) for name in ENDS for isolate in (None, True) for ranks in (1, 2)]


@pytest.mark.parametrize(
    ("name", "isolate", "ranks"),
    [slow(*end) if end in SOME_ENDS else exhaustive(*end) for end in ALL_ENDS],
)
def test_a_run_goes_on_or_ends_in_time_and_names_the_reward(
    name, isolate, ranks, directory, tmp_path, monkeypatch
):
    """About 5 minutes of processor time in all. torchrun itself ends with 1 where a rank has ended
    otherwise.
    """
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(directory), *sys.path]))
    settings = {"timeout": 5.0} | ({} if isolate is None else {"isolate": isolate})
    fields = {
        **prepare(tmp_path),
        "output": str(tmp_path / "run"),
        "rewards": {f"odd_rewards:{name}": settings},
    }
    began = time.monotonic()
    done = under_torchrun(ranks, fields, timeout=300)
    status, says = ENDS[name] if isolate is None else (0, "")
    # a busy machine takes longer than 5 s for so much memory
    if name == "takes_much" and done.returncode == 1:
        status, says = 1, "reward takes_much: it has held Python's interpreter"
    assert done.returncode == status, done.stderr[-3000:]
    assert says in done.stderr
    if status == 0:
        assert [line["step"] for line in lines(tmp_path / "run")] == [1, 2]
        failed = [sample["rewards"][name] for sample in stored(tmp_path / "run")]
        if isolate or name in ("sleeps", "says_goodbye"):
            assert any(isinstance(reward, str) for reward in failed), "one call of four fails"
    assert time.monotonic() - began < 120
