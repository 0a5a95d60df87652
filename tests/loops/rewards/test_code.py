"""Code that a model wrote is scored by its tests, and can do no more harm than its limits allow."""

import socket
import subprocess
import sys
import time

import pytest
from burnish.loops.rewards.code import CodeTests, code_of, passes
from burnish.loops.rewards.isolation import isolated
from burnish.loops.rewards.resolve import resolve_rewards
from burnish.loops.rewards.table import score

ADD = "def add(a, b):\n    return a + b\n"
TESTS = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]


def fenced(code):
    return f"Here it is:\n```python\n{code}\n```\nDone."


def test_the_score_is_the_share_of_tests_that_pass(answer):
    row = {"tests": [*TESTS, "assert add('a', 'b') == 'ba'", "assert add(1) == 1"]}
    assert CodeTests()(row, answer(fenced(ADD))) == 0.5
    assert CodeTests(all_or_nothing=True)(row, answer(fenced(ADD))) == 0.0
    assert CodeTests(all_or_nothing=True)({"tests": TESTS}, answer(fenced(ADD))) == 1.0
    assert CodeTests()({"tests": TESTS[0]}, answer(ADD)) == 1.0
    assert CodeTests()({"tests": []}, answer(ADD)) is None


def test_a_program_is_judged_by_what_it_prints(answer):
    program = "a, b = map(int, input().split())\nprint(a + b, '')"
    row = {"tests": [{"input": "1 2\n", "output": "3"}, {"input": "1 1\n", "output": "3\n"}]}
    assert CodeTests()(row, answer(fenced(program))) == 0.5


def test_the_code_is_the_last_block_of_the_text():
    assert code_of("```python\n1\n```\nbetter:\n```py\n2\n```") == "2\n"
    assert code_of("```\nx = 1") == "x = 1"
    assert code_of("x = 1") == "x = 1"


def test_a_test_of_another_kind_is_refused():
    with pytest.raises(ValueError, match="code: a test is a text of Python, or a mapping of input"):
        passes(ADD, {"stdin": "1"})
    with pytest.raises(ValueError, match="code: seconds must be > 0, got 0"):
        CodeTests(seconds=0)


HOSTILE = {
    "ends": "import sys; sys.exit(0)",
    "ends at once": "import os; os._exit(0)",
    "closes": "import os; os.close(1)",
    "raises": "1 / 0",
    "no code": "This is no code.",
    "not a character": "x = '\udc80'",
    "recursion": "def f(): f()\nf()",
    "crash": "import ctypes; ctypes.string_at(0)",
    "kills itself": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "kills its group": "import os, signal; os.killpg(0, signal.SIGKILL)",
    "kills its parent": "import os, signal; os.kill(os.getppid(), signal.SIGKILL)",
    "sleeps": "import time; time.sleep(100)",
    "spins": "while True: pass",
    "waits for input": "import sys; sys.stdin.read(); input()",
    "ignores signals": "import signal; [signal.signal(s, signal.SIG_IGN) for s in (2, 15, 24)]\nwhile True: pass",
    "prints for ever": "while True: print('x' * 10000)",
    "complains for ever": "import sys\nwhile True: sys.stderr.write('x' * 10000)",
    "memory": "x = bytearray(1 << 36)",
    "memory, slowly": "x = []\nwhile True: x.append(bytearray(1 << 24))",
    "a large file": "open('f', 'wb').write(bytes(1 << 26))",
    "many files": "fs = [open(str(i), 'w') for i in range(1000)]",
    "forks": "import os, time\nfor _ in range(5):\n    if os.fork() == 0: time.sleep(100)\ntime.sleep(100)",
    "a daemon": "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(3)\n    open(PLACE, 'w')",
    "threads": "import threading, time\nthreading.Thread(target=time.sleep, args=(100,)).start()\nraise SystemExit",
    "environment": "import os; assert 'SECRET_OF_THE_RUN' in os.environ",
    "reads its test": "assert 'add' in open('test.py').read()",
    "reads its token": "print(open('token').read())",
    "network": "import socket; socket.create_connection(('127.0.0.1', PORT), 1)",
    "regular expression": "import re; re.match('(a+)+$', 'a' * 50 + 'b')",
    "large number": "x = 10 ** 10 ** 10",
    "changes exit": "import atexit, os; atexit.register(os._exit, 0); raise ValueError",
}
BEHIND_NAMESPACES = ("network", "a daemon", "kills its parent")


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_code_ends_in_time_and_fails(name, answer, tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_RUN", "1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = HOSTILE[name].replace("PORT", str(server.getsockname()[1]))
        code = code.replace("PLACE", repr(str(tmp_path / "left")))
        if name in BEHIND_NAMESPACES and not has_namespaces():
            pytest.skip("this kernel allows no user namespaces")
        began = time.monotonic()
        score = CodeTests(seconds=1.5, memory=0.25)({"tests": TESTS}, answer(fenced(code)))
    assert score == 0.0
    assert time.monotonic() - began < 8  # its own limit, and a busy machine
    if name == "a daemon":
        time.sleep(3.5)
        assert not (tmp_path / "left").exists()


def has_namespaces():
    probe = "import ctypes, sys; sys.exit(ctypes.CDLL(None).unshare(0x70000000) != 0)"
    return subprocess.run([sys.executable, "-c", probe]).returncode == 0


@pytest.mark.slow
def test_it_is_a_reward_of_a_configuration_in_a_process_of_its_own(answer):
    (reward,) = resolve_rewards({"code": {"tests": "checks", "seconds": 5}})
    samples = [answer(fenced(ADD)), answer(fenced("import os; os._exit(1)"))]
    score([reward], samples, [{"checks": TESTS}] * 2)
    assert [sample.rewards["code"] for sample in samples] == [1.0, 0.0]
    assert isinstance(reward.function, isolated)
