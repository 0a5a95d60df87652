"""How a server is started, watched over and ended, with a stand-in for the interpreter that would
run vLLM.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from importlib.metadata import distributions
from pathlib import Path

import psutil
import pytest
from burnish.loops.rollouts.source import SourceLost
from burnish.loops.rollouts.vllm.launch import ServerProcess
from burnish.loops.rollouts.vllm.plugin.burnish_vllm_key import RequireKey
from burnish.loops.rollouts.vllm.weights import Adapters, free_port, max_lora_rank
from peft import LoraConfig

WRONG = "unrecognized arguments: --no-such-flag"
SERVER = f"""#!{sys.executable}
import os, subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

if "--no-such-flag" in sys.argv:
    sys.exit("Traceback (most recent call last):\\ns.py: error: {WRONG}\\nRuntimeError: see above")
if "--silent" in sys.argv:
    print("loading")
    sys.exit(3)
if "--killed" in sys.argv:
    os.kill(os.getpid(), 9)
subprocess.Popen(["sleep", "600"])  # a worker


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()


HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""
TRAINER = """
import sys, time
from burnish.loops.rollouts.vllm.launch import ServerProcess

python, log = sys.argv[1:]
print(ServerProcess("model", python=python, log=log, dtype="float32").pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def python(tmp_path):
    path = tmp_path / "python"
    path.write_text(SERVER)
    path.chmod(0o755)
    return path


@pytest.fixture
def start(python, tmp_path):
    return lambda **options: ServerProcess(
        "model", python=python, log=tmp_path / "log.txt", dtype="float32", **options
    )


def group(leader):
    """The processes of a process group that run."""
    found = []
    for process in psutil.process_iter(["status"]):
        try:
            if os.getpgid(process.pid) == leader and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process)
        except ProcessLookupError:
            continue
    return found


def wait_until(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_dead_server_is_revived_at_its_address_and_one_that_runs_is_left_alone(start):
    with start() as server:
        first, url = server.pid, server.url
        server.revive()
        assert server.pid == first
        os.kill(first, signal.SIGKILL)
        server.revive()  # at once, while it may still be dying
        assert server.pid not in (None, first) and server.url == url
        assert not group(first), "a worker of the dead server is left"
        second = server.pid
        assert len(group(second)) > 1
    assert server.pid is None
    wait_until(lambda: not group(second))


def test_a_server_that_ends_at_once_shows_its_first_error_the_fix_and_the_log(start, tmp_path):
    (tmp_path / "log.txt").write_text("ValueError: of an earlier run\n")
    with pytest.raises(SourceLost) as raised:
        start(flags=["--no-such-flag"])
    error, rest = str(raised.value).split("\n")
    assert error == "vllm: the server did not start (it ended with status 1): s.py: error: " + WRONG
    assert rest == (
        f"To fix it, leave it out of --vllm.options: this vLLM has no such flag. Its log is {tmp_path / 'log.txt'}"
    )
    with pytest.raises(
        SourceLost, match=r"it ended with status 127\): .* not found\nIts log is .*log\.txt"
    ):
        ServerProcess(
            "model", python=tmp_path / "nowhere", log=tmp_path / "log.txt", dtype="float32"
        )


def test_a_server_that_ends_without_a_word_shows_what_there_is(start):
    with pytest.raises(
        SourceLost, match=r"it ended with status 3\); its log, .*, ends with:\nloading$"
    ):
        start(flags=["--silent"])
    with pytest.raises(
        SourceLost, match=r"it was killed, as the kernel does where memory runs out\)"
    ):
        start(flags=["--killed"])


def test_a_server_leaves_memory_to_the_trainer_unless_it_has_a_device_of_its_own(start):
    def share(**options):
        with start(**options) as server:
            command = psutil.Process(server.pid).cmdline()
        return [
            command[i + 1] for i, part in enumerate(command) if part == "--gpu-memory-utilization"
        ]

    assert share() == share(environment={"VLLM_CPU_KVCACHE_SPACE": "1"}) == ["0.4"]
    assert share(flags=["--gpu-memory-utilization", "0.7"]) == ["0.7"]
    assert share(environment={"CUDA_VISIBLE_DEVICES": "1"}) == []


def test_a_server_has_room_for_as_many_adapters_as_are_loaded_at_once(start, tmp_path):
    with start(update_flags=Adapters(tmp_path, LoraConfig(r=9), loaded=3).flags) as server:
        command = " ".join(psutil.Process(server.pid).cmdline())
    assert "--max-loras 3" in command and "--enable-lora --max-lora-rank 16" in command
    assert "--weight-transfer-config" not in command
    with start() as server:
        command = " ".join(psutil.Process(server.pid).cmdline())
    assert (
        '--weight-transfer-config {"backend": "burnish_files"}' in command and "lora" not in command
    )


def test_a_server_is_looked_for_at_the_port_that_its_flags_name(start):
    for port, form in ((free_port(), "--port {}"), (free_port(), "--port={}")):
        with start(flags=form.format(port).split()) as server:
            assert server.url == f"http://127.0.0.1:{port}" and server.pid is not None


def test_a_server_of_another_environment_finds_the_plugin(start):
    with start() as server:
        path = psutil.Process(server.pid).environ()["PYTHONPATH"].split(os.pathsep)
    (entry,) = (entry for found in distributions(path=path[:1]) for entry in found.entry_points)
    assert entry.group == "vllm.general_plugins"
    assert (entry.name, entry.module) == ("burnish_files", "burnish_vllm_files")
    assert Path(path[0], f"{entry.module}.py").exists()


def test_a_server_has_a_random_key_that_only_its_environment_holds(start):
    with start() as first, start() as second:
        assert first.key != second.key and len(first.key) > 40
        for server in (first, second):
            process = psutil.Process(server.pid)
            assert process.environ()["VLLM_API_KEY"] == server.key
            command = process.cmdline()
            assert not any(server.key in part for part in command)
            assert command[command.index("--middleware") + 1] == "burnish_vllm_key.RequireKey"
            environ = Path(f"/proc/{server.pid}/environ")
            assert environ.stat().st_mode & 0o077 == 0, "other users can't read it"
    with start(environment={"VLLM_API_KEY": "chosen"}) as server:
        assert server.key == "chosen"


def test_a_server_listens_to_the_network_only_where_its_address_is_named(start, caplog):
    def host(server):
        command = psutil.Process(server.pid).cmdline()
        return [command[i + 1] for i, part in enumerate(command) if part == "--host"]

    with start() as server:
        assert host(server) == ["127.0.0.1"]
    assert not caplog.records
    with start(host="0.0.0.0") as server:
        assert host(server) == ["0.0.0.0"] and server.url.startswith("http://127.0.0.1:")
    assert "the server listens at 0.0.0.0: whoever reaches port" in caplog.text
    for flags in (["--host", "0.0.0.0"], ["--host=::"]):
        with pytest.raises(
            ValueError, match=r"vllm\.options: host: opens the server to the network"
        ):
            start(flags=flags)
    with pytest.raises(ValueError, match=r"vllm\.options: api_key: all users of the machine see"):
        start(flags=["--api-key", "secret"])


def asked(middleware, kind, *headers):
    """What an ASGI application behind the key, and its client, see of a request."""
    reached, sent = [], []

    async def application(scope, receive, send):
        reached.append(scope["type"])

    async def send(message):
        sent.append(message)

    asyncio.run(middleware(application)({"type": kind, "headers": headers}, None, send))
    return reached, sent


def test_each_request_needs_the_key_whatever_its_route(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "right")
    good = (b"Authorization", b"Bearer right")
    assert asked(RequireKey, "http", (b"host", b"a"), good) == (["http"], [])
    assert asked(RequireKey, "lifespan") == (["lifespan"], []), "the server's start is no request"
    for wrong in (
        (),
        ((b"authorization", b"Bearer wrong"),),
        ((b"authorization", b"right"),),
        ((b"x", b"Bearer right"),),
    ):
        reached, (start, body) = asked(RequireKey, "http", *wrong)
        assert not reached and start["status"] == 401
        assert "key was not sent" in json.loads(body["body"])["error"]["message"]
        reached, (closed,) = asked(RequireKey, "websocket", *wrong)
        assert not reached and closed["type"] == "websocket.close"


def test_a_server_without_a_key_in_its_environment_does_not_start_open(monkeypatch):
    for key in (None, ""):
        monkeypatch.delenv("VLLM_API_KEY", raising=False) if key is None else monkeypatch.setenv(
            "VLLM_API_KEY", key
        )
        with pytest.raises(ValueError, match="there is none in its environment"):
            RequireKey(None)


def test_a_server_outlives_the_thread_that_started_it(start):
    started = []
    thread = threading.Thread(target=lambda: started.append(start()))
    thread.start()
    thread.join()
    with started[0] as server:
        time.sleep(0.2)
        assert server.pid is not None


def test_nothing_of_a_server_outlives_a_trainer_that_is_killed(python, tmp_path):
    command = [sys.executable, "-c", TRAINER, str(python), str(tmp_path / "log.txt")]
    trainers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for trainer, how in zip(trainers, (signal.SIGKILL, signal.SIGTERM), strict=True):
        with trainer:
            leader = int(trainer.stdout.readline())
            assert len(group(leader)) > 1
            trainer.send_signal(how)
        wait_until(lambda leader=leader: not group(leader))


def test_a_server_is_no_rank_of_the_trainers_process_group(python, tmp_path, monkeypatch):
    """With TORCHELASTIC_USE_AGENT_STORE a group over TCP waits for a store that nobody hosts."""
    ranks = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK ROLE_RANK ROLE_NAME MASTER_ADDR MASTER_PORT"
    ranks = [*ranks.split(), "TORCHELASTIC_USE_AGENT_STORE", "ACCELERATE_USE_FSDP", "FSDP_VERSION"]
    for name in (*ranks, "CUDA_VISIBLE_DEVICES", "RANKING"):
        monkeypatch.setenv(name, "1")
    given = {"MASTER_PORT": "7"}
    with ServerProcess(
        "m", python=python, log=tmp_path / "log.txt", dtype="float32", environment=given
    ) as server:
        there = psutil.Process(server.pid).environ()
    assert {name: there[name] for name in ranks if name in there} == given
    assert there["CUDA_VISIBLE_DEVICES"] == there["RANKING"] == there["VLLM_SERVER_DEV_MODE"] == "1"


def test_an_adapter_of_a_rank_unknown_to_vllm_has_room_in_the_next_or_is_refused(tmp_path):
    assert [max_lora_rank({"r": rank}) for rank in (1, 8, 9, 257, 512)] == [1, 8, 16, 320, 512]
    assert max_lora_rank({"r": 4, "rank_pattern": {"q_proj": 9}}) == 16
    with pytest.raises(
        ValueError, match=r"lora\.r: vLLM takes adapters up to rank 512, got 513; lower lora\.r, or"
    ):
        Adapters(tmp_path, LoraConfig(r=513))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (
            {"use_dora": True},
            r"lora\.use_dora: vLLM can't load adapters with use_dora=True; leave it out, or",
        ),
        (
            {"modules_to_save": ["lm_head"]},
            r"lora\.modules_to_save: .* with modules_to_save=\['lm_head'\]",
        ),
    ],
)
def test_an_adapter_that_vllm_cannot_load_is_refused(fields, says, tmp_path):
    with pytest.raises(ValueError, match=says):
        Adapters(tmp_path, LoraConfig(r=2, **fields))
