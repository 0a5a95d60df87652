"""The examples do what they say, with stand-ins for the clusters that they are for."""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import pytest
import yaml
from hub_fake import TOKEN, Fake
from tiny import save_model, sums, write_rows

EXAMPLES = Path(__file__).parents[1] / "examples"

SRUN = """#!{python}
import os, subprocess, sys
words = sys.argv[1:]
while words[0].startswith("--"):
    words.pop(0)
tasks = [
    subprocess.Popen(words, env=os.environ | {{"SLURM_PROCID": str(i), "SLURM_LOCALID": str(i), "SLURM_NTASKS": "2"}})
    for i in range(2)
]
if not os.path.exists("signalled") and {signalled}:
    import signal, time
    while not os.path.exists("run/metrics.jsonl") or not open("run/metrics.jsonl").read():
        time.sleep(0.1)
    open("signalled", "w").close()
    for task in tasks:
        task.send_signal(signal.SIGUSR1)
sys.exit(max(task.wait() for task in tasks))
"""
SCONTROL = """#!/bin/sh
case $1 in
    show) echo 127.0.0.1; echo 127.0.0.2 ;;
    requeue) echo "$2" >> requeued ;;
esac
"""
BURNISH = """#!{python}
import json, os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
with open(f"rank-{{os.environ['RANK']}}.jsonl", "a") as file:
    print(json.dumps([sys.argv[1:], [os.environ[name] for name in names]]), file=file)
sys.exit({status})
"""


STOPPED = """#!{python}
import os, pathlib, signal, sys, time
if os.path.exists("signalled"):
    sys.exit(0)
signal.signal(signal.SIGUSR1, lambda *received: sys.exit(75))
pathlib.Path("run").mkdir(exist_ok=True)
pathlib.Path(f"run/{{os.environ['RANK']}}").touch()
while not all(os.path.exists(f"run/{{rank}}") for rank in range(2)):
    time.sleep(0.01)
pathlib.Path("run/metrics.jsonl").write_text("1")
time.sleep(60)
"""


@pytest.fixture
def cluster(tmp_path):
    """``cluster(burnish, signalled)`` queues the job until it asks for no further turn; returns the
    statuses.
    """

    def submit(burnish, *words, signalled=False):
        stand_ins = {
            "srun": SRUN.format(python=sys.executable, signalled=signalled),
            "scontrol": SCONTROL,
        }
        for name, text in {**stand_ins, "burnish": burnish}.items():
            file = tmp_path / "bin" / name
            file.parent.mkdir(exist_ok=True)
            file.write_text(text)
            file.chmod(0o755)
        job = {"SLURM_JOB_ID": "12345", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2"}
        job |= {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "ACCELERATE_USE_CPU": "true"}
        statuses, requeued = [], tmp_path / "requeued"
        while len(statuses) < 4:
            turns = requeued.read_text() if requeued.exists() else ""
            done = subprocess.run(
                [EXAMPLES / "slurm.sh", *words],
                cwd=tmp_path,
                env=os.environ | job,
                capture_output=True,
                text=True,
            )
            statuses.append((done.returncode, done.stderr[-2000:]))
            if (requeued.read_text() if requeued.exists() else "") == turns:
                break
        return statuses

    return submit


def test_a_slurm_job_that_ends_with_75_is_queued_again_and_goes_on(cluster, tmp_path):
    status = "75 if sum(1 for _ in open('rank-0.jsonl')) < 3 and os.environ['RANK'] == '0' else 0"
    statuses = cluster(
        BURNISH.format(python=sys.executable, status=status), "dpo", "--output", "two words"
    )
    assert [status for status, _ in statuses] == [75, 75, 0]
    assert (tmp_path / "requeued").read_text().split() == ["12345"] * 2
    for rank in "01":
        calls = [
            json.loads(line) for line in (tmp_path / f"rank-{rank}.jsonl").read_text().splitlines()
        ]
        environment = [rank, rank, "2", "127.0.0.1", str(20000 + 12345 % 10000)]
        assert calls == [[["dpo", "--output", "two words", "--resume", "true"], environment]] * 3


@pytest.mark.parametrize("status", [0, 1, 143])
def test_a_slurm_job_with_another_status_is_not_queued_again(cluster, tmp_path, status):
    statuses = cluster(BURNISH.format(python=sys.executable, status=status), "dpo")
    assert [code for code, _ in statuses] == [status] and not (tmp_path / "requeued").exists()


def test_slurm_signals_the_ranks_with_what_burnish_ends_with_75_for():
    from burnish.loops.runs.stop import STATUS

    text = (EXAMPLES / "slurm.sh").read_text()
    directives = dict(re.findall(r"^#SBATCH --([\w-]+)=?(\S*)", text, re.M))
    name, seconds = directives["signal"].split("@")
    assert STATUS[f"SIG{name}"] == 75 and int(seconds) >= 60 and "requeue" in directives
    assert subprocess.run(["bash", "-n", EXAMPLES / "slurm.sh"]).returncode == 0


def test_the_signal_of_slurm_reaches_the_command_of_each_rank(cluster):
    statuses = cluster(STOPPED.format(python=sys.executable), "dpo", signalled=True)
    assert [status for status, _ in statuses] == [75, 0]


# ranks of one environment, and a signal to one or both of them, are tested in loops/runs
@pytest.mark.exhaustive
def test_a_run_on_two_ranks_goes_on_after_slurm_has_preempted_it(cluster, tmp_path):
    model = save_model(tmp_path / "model")
    rows = [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in sums(16)]
    data = write_rows(tmp_path / "data.jsonl", rows)
    burnish = f'#!/bin/sh\nexec {sys.executable} -m burnish "$@"\n'
    words = [
        "sft",
        "--model",
        str(model),
        "--data",
        str(data),
        "--output",
        "run",
        "--steps",
        "40",
        "--batch_size",
        "4",
    ]
    statuses = cluster(burnish, *words, signalled=True)
    assert [status for status, _ in statuses] == [75, 0], statuses
    steps = [
        json.loads(line)["step"]
        for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    ]
    assert steps == list(range(1, 41)) and (tmp_path / "run/model/model.safetensors").exists()


# The keys of SkyPilot's task YAML, by its documentation.
TASK = {
    "name",
    "workdir",
    "num_nodes",
    "resources",
    "envs",
    "secrets",
    "volumes",
    "file_mounts",
    "setup",
    "run",
}
TASK |= {"config", "service", "event_callback"}


def test_the_skypilot_task_has_the_keys_and_variables_of_its_documentation():
    task = yaml.safe_load((EXAMPLES / "skypilot.yaml").read_text())
    assert task.keys() <= TASK and {"run", "resources", "num_nodes"} <= task.keys()
    assert task["resources"].keys() <= {
        "accelerators",
        "use_spot",
        "infra",
        "disk_size",
        "cpus",
        "memory",
        "any_of",
    }
    assert re.fullmatch(r"\w+:\d+", task["resources"]["accelerators"])
    given = {"SKYPILOT_NUM_NODES", "SKYPILOT_NODE_IPS", "SKYPILOT_NUM_GPUS_PER_NODE"}
    assert set(re.findall(r"\$\{?(\w+)", task["run"])) == given | task["envs"].keys()
    assert subprocess.run(["bash", "-n"], input=task["run"], text=True).returncode == 0
    assert "--resume true" in task["run"] and "/runs/" in task["run"]


@pytest.mark.parametrize("name", ["slurm.sh", "skypilot.yaml"])
def test_ranks_are_restarted_by_a_rendezvous_that_can(name):
    """torchrun's static one hands the ranks of the second attempt the addresses of the first."""
    text = (EXAMPLES / name).read_text()
    assert "--max-restarts=3" in text and "--rdzv_backend=c10d" in text and "--resume true" in text
    assert "--node_rank" not in text and "--master_addr" not in text


def test_the_ray_example_is_short():
    assert len((EXAMPLES / "ray_train.py").read_text().splitlines()) <= 60


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_ray_train_runs_a_recipe_on_two_workers(tmp_path):
    model = save_model(tmp_path / "model")
    rows = [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in sums(8)]
    data, output = write_rows(tmp_path / "data.jsonl", rows), tmp_path / "run"
    flags = [
        "--model",
        model,
        "--data",
        data,
        "--output",
        output,
        "--steps",
        "2",
        "--batch_size",
        "4",
    ]
    command = [
        sys.executable,
        EXAMPLES / "ray_train.py",
        "--cpu",
        "--workers",
        "2",
        "--storage",
        tmp_path / "ray",
    ]
    # for paths of sockets, which may have 107 characters
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        environment = {**os.environ, "RAY_TMPDIR": short}
        done = subprocess.run(
            [*map(str, [*command, "sft", *flags])],
            env=environment,
            capture_output=True,
            text=True,
            timeout=500,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (output / "model/model.safetensors").exists()
    assert [
        json.loads(line)["step"] for line in (output / "metrics.jsonl").read_text().splitlines()
    ] == [1, 2]


HF_JOBS = EXAMPLES / "hf_jobs.py"


@pytest.fixture
def hub():
    fake = Fake()
    yield fake
    fake.close()


def run_job(hub, *words, cwd):
    """The script as uv runs it on a machine of Hugging Face, whose Hub is this one."""
    calls = {"HF_ENDPOINT": hub.address, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
    return subprocess.run(
        [sys.executable, HF_JOBS, *map(str, words)],
        cwd=cwd,
        env={**os.environ, **calls, "HF_TOKEN": TOKEN, "HOME": str(cwd)},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_the_header_of_the_hf_jobs_script_installs_what_a_recipe_needs():
    """The header is one of PEP 723, which uv reads."""
    header = re.search(r"^# /// script\n((?:#.*\n)+?)# ///$", HF_JOBS.read_text(), re.M)[1]
    inline = tomllib.loads("".join(line[2:] + "\n" for line in header.splitlines()))
    project = tomllib.loads((EXAMPLES.parent / "pyproject.toml").read_text())["project"]
    assert inline["requires-python"] == project["requires-python"]
    (dependency,) = inline["dependencies"]
    name, extra = re.fullmatch(r"(\w+)\[(\w+)\]", dependency).groups()
    assert name == project["name"] and extra in project["optional-dependencies"]


def test_the_line_that_submits_an_hf_job_is_one_of_the_hubs_command():
    lines = HF_JOBS.read_text().partition("    hf jobs")[2].partition("\n\n")[0]
    words = shlex.split("hf jobs" + lines.replace("\\\n", " "))
    command = [Path(sys.executable).with_name("hf"), *words[1:4], "--dry-run", "--namespace", "me"]
    done = subprocess.run(
        [*command, *words[4:]],
        cwd=EXAMPLES.parent,
        env={**os.environ, "HF_TOKEN": TOKEN, "HF_ENDPOINT": "http://127.0.0.1:9"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    shown = dict(re.findall(r"^  (\w+) +(.*)$", done.stdout, re.M))
    assert shown["script"] == "examples/hf_jobs.py" and shown["args"].startswith("dpo --model")
    assert (shown["attempts"], shown["volumes"]) == ("3", "hf://buckets/me/runs:/runs")


def test_an_hf_job_leaves_its_model_on_the_hub(hub, tmp_path):
    rows = [{"messages": pair["prompt"] + pair["chosen"]} for pair in sums(6)]
    data, model = write_rows(tmp_path / "rows.jsonl", rows), save_model(tmp_path / "model")
    words = ["sft", "--model", model, "--data", data, "--steps", "2", "--batch_size", "2"]
    done = run_job(hub, *words, "--hub.id", "my-model", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    (repository,) = {name for name, _ in hub.branches}
    assert {"model.safetensors", "README.md"} <= hub.files(repository).keys()
    assert (tmp_path / "run/model/model.safetensors").exists()


def test_an_hf_job_without_a_repository_is_refused(hub, tmp_path):
    done = run_job(hub, "sft", "--steps", "2", cwd=tmp_path)
    assert done.returncode == 2 and "pass --hub.id me/my-model" in done.stderr
    assert not hub.calls
