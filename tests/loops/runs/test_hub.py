"""A run uploads its model to a Hub; what can't be uploaded stays on the disk, and a line says how
to.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import huggingface_hub
import pytest
from burnish.loops.cli import main
from burnish.loops.config import Hub
from burnish.loops.recipes.settings import SFT
from burnish.loops.recipes.sft import open_sft
from burnish.loops.registry import build
from burnish.loops.runs import hub as uploads
from forked import run_forked
from hub_fake import TOKEN, Fake
from safetensors.torch import load
from tiny import save_model, sums, write_rows

# of the Hub's library, in its use of httpx2
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

WEIGHTS = "model.safetensors"


@pytest.fixture
def fake(monkeypatch):
    """A Hub that the library of this process calls, with a token that is right."""
    server = Fake()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.address)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    # the library waits before it repeats a call
    at_once = SimpleNamespace(sleep=lambda seconds: None, time=time.time)
    monkeypatch.setattr("huggingface_hub.utils._http.time", at_once)
    huggingface_hub.close_session()
    yield server
    server.close()
    huggingface_hub.close_session()


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    directory = tmp_path_factory.mktemp("start")
    rows = [{"messages": pair["prompt"] + pair["chosen"]} for pair in sums(12)]
    write_rows(directory / "rows.jsonl", rows)
    save_model(directory / "model")
    return directory


@pytest.fixture
def flags(start, tmp_path):
    """Flags of a run of four steps, whose model goes to a private repository."""
    words = f"--model {start / 'model'} --data {start / 'rows.jsonl'} --output {tmp_path / 'run'}"
    words += " --steps 4 --batch_size 2 --learning_rate 1e-2 --hub.id my-model --hub.private true"
    return words.split()


def command_in(printed):
    """The command of the last line that says how to upload."""
    (line,) = [line for line in printed.splitlines() if "is not on the Hub" in line]
    return line, shlex.split(line.partition("this uploads it: ")[2])


def repeat(words, tmp_path, fake):
    """Run the command of such a line in a process of its own."""
    environment = {
        "HF_ENDPOINT": fake.address,
        "HF_HUB_DISABLE_XET": "1",
        "HF_TOKEN": TOKEN,
        "HOME": str(tmp_path),
    }
    program = "import sys; from huggingface_hub.cli.hf import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, *words[1:]], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_a_run_ends_with_its_model_on_the_hub_private_and_on_its_branch(fake, flags, tmp_path):
    adapters = ["--lora.r", "2", "--hub.revision", "tried"]
    assert main(["sft", *flags, *adapters]) == 0
    assert fake.private == {"me/my-model": True}
    files = fake.files("me/my-model", "tried")
    for name in ("model", "adapter"):
        for path in (tmp_path / "run" / name).iterdir():
            place = path.name if name == "model" else f"adapter/{path.name}"
            assert files.pop(place) == path.read_bytes(), place
    assert files == {} and fake.files("me/my-model") == {}
    assert len({*fake.cards}) == 2 and not (tmp_path / "run/hub").exists()


def test_the_token_is_in_no_file_of_a_run(fake, flags, tmp_path, capfd):
    assert main(["sft", *flags]) == 0
    for path in (tmp_path / "run").rglob("*"):
        if path.is_file():
            assert TOKEN.encode() not in path.read_bytes(), path
    assert TOKEN not in "".join(capfd.readouterr())


def test_nothing_is_called_by_a_dry_run_or_without_a_repository(fake, flags, tmp_path):
    assert main(["sft", *flags, "--dry_run"]) == 0
    assert main(["plan", "sft", *flags]) == 0
    assert main(["sft", *flags[:-4]]) == 0
    assert fake.calls == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda fake, patch: patch.delenv("HF_TOKEN"),
            "there is no token of the Hub; set HF_TOKEN",
        ),
        (lambda fake, patch: patch.setenv("HF_TOKEN", "hf_wrong"), "Invalid user token"),
        (lambda fake, patch: setattr(fake, "role", "read"), "may only read"),
        (lambda fake, patch: fake.odd.update(create=403), "can't be written to (403"),
        (lambda fake, patch: fake.close(), "can't be written to ("),
        (
            lambda fake, patch: patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True),
            "offline mode is enabled",
        ),
    ],
    ids=["no token", "wrong token", "reading token", "forbidden", "no server", "offline"],
)
def test_what_is_wrong_with_the_hub_is_told_before_the_model_is_loaded(
    change, said, fake, flags, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.setattr("burnish.loops.runs.context.load_model", None)
    change(fake, monkeypatch)
    assert main(["sft", *flags]) == 1
    printed = capsys.readouterr().err
    assert said in printed and "hub.id: " in printed
    assert not (tmp_path / "run").exists()


def test_a_public_repository_is_not_written_where_a_private_one_is_wanted(fake, flags, capsys):
    fake.private["me/my-model"] = False
    fake.branches["me/my-model", "main"] = {}
    assert main(["sft", *flags]) == 1
    assert "hub.private: me/my-model is there already, and is public" in capsys.readouterr().err
    assert fake.files("me/my-model") == {}


# Of the products of a failure and a call, one of each runs by default.
FAILURES = [
    pytest.param(where, failure, marks=() if default else pytest.mark.slow)
    for where, failure, default in [
        ("preupload", 401, True),
        ("objects/batch", 413, True),
        ("commit", 503, True),
        ("commit", None, True),
        ("preupload", 503, False),
        ("preupload", None, False),
        ("objects/batch", 401, False),
        ("objects/batch", 503, False),
        ("objects/batch", None, False),
        ("commit", 401, False),
        ("commit", 413, False),
    ]
]


@pytest.mark.parametrize(("where", "failure"), FAILURES)
def test_a_failed_upload_leaves_the_model_and_a_line_that_repeats_it(
    where, failure, fake, flags, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(uploads, "SILENCE", 0.2)
    fake.odd[where] = failure
    assert main(["sft", *flags, "--hub.revision", "v 1"]) == 1
    line, words = command_in(capsys.readouterr().err)
    assert "the model of step 4 " in line and TOKEN not in line
    assert (str(failure) if failure else "timed out") in line
    place = str(tmp_path / "run/model")
    options = ["--revision", "v 1", "--private"]
    assert words == ["hf", "upload", "my-model", place, ".", *options]
    assert (tmp_path / "run/model" / WEIGHTS).exists()
    (entry,) = json.loads((tmp_path / "run/run.json").read_text())["starts"]
    assert entry["ended"]["step"] == 4 and "error" not in entry["ended"]


@pytest.mark.slow
def test_the_line_of_a_failed_upload_uploads_it(fake, flags, tmp_path, capsys):
    fake.odd["commit"] = 413
    assert main(["sft", *flags, "--lora.r", "2", "--hub.revision", "v1"]) == 1
    fake.odd.clear()
    _, words = command_in(capsys.readouterr().err)
    between = words.index("&&")
    for part in (words[:between], words[between + 1 :]):
        repeat(part, tmp_path, fake)
    files = fake.files("me/my-model", "v1")
    assert files[WEIGHTS] == (tmp_path / "run/model" / WEIGHTS).read_bytes()
    assert "adapter/adapter_model.safetensors" in files


def test_weights_of_another_model_are_removed_and_other_files_stay(fake, flags):
    fake.private["me/my-model"] = True
    left = {"model-00001-of-00002.safetensors": b"", "model.safetensors.index.json": b"{}"}
    fake.branches["me/my-model", "main"] = {**left, "notes.txt": b"mine"}
    assert main(["sft", *flags]) == 0
    files = fake.files("me/my-model")
    assert WEIGHTS in files and files["notes.txt"] == b"mine" and not left.keys() & files.keys()


def test_the_model_of_each_checkpoint_is_uploaded_while_steps_are_taken(fake, flags, tmp_path):
    seen = []
    fake.odd["commit"] = lambda fake: seen.append(sorted(fake.files("me/my-model")))
    settings = settings_of(flags, tmp_path, every="checkpoint", save_every=1)
    run = open_sft(settings)
    weights = {}
    for step in run:
        wait_for(lambda: run_is_idle(tmp_path))
        weights[step.number] = fake.files("me/my-model").get(WEIGHTS)
    assert run.uploaded and weights[1] is None and None not in (weights[2], weights[3], weights[4])
    assert len({*weights.values()}) == 4 and len(seen) == 4
    assert fake.files("me/my-model")[WEIGHTS] == (tmp_path / "run/model" / WEIGHTS).read_bytes()


def settings_of(flags, tmp_path, *, every, **more):
    values = dict(zip([flag[2:] for flag in flags[::2]], flags[1::2], strict=True))
    hub = {"id": values["hub.id"], "private": True, "every": every}
    names = ("model", "data", "output")
    fields = {name: values[name] for name in names} | more
    return SFT(**fields, hub=Hub(**hub), steps=4, batch_size=2, learning_rate=1e-2)


def run_is_idle(tmp_path):
    return not any((tmp_path / "run/hub").glob("step-*"))


def wait_for(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("fails", [False, True])
def test_the_best_step_is_on_the_hub_when_the_run_ends(fails, fake, flags, tmp_path):
    settings = settings_of(
        flags,
        tmp_path,
        every="best",
        eval_data=4,
        eval_every=1,
        keep_best="max:eval/loss",
        keep=9,
        save_every=1,
    )
    if fails:  # until the last step
        fake.odd["commit"] = 503
    run = open_sft(settings)
    for step in run:
        if step.number == 4:
            wait_for(lambda: run_is_idle(tmp_path) or fails)
            fake.odd.clear()
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["eval/loss"] for line in lines if line["step"]}
    assert run.best == max(losses, key=losses.get) and run.uploaded
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "best"), "--best"]) == 0
    best = load((tmp_path / "best" / WEIGHTS).read_bytes())
    there = fake.files("me/my-model")
    uploaded = load(there[WEIGHTS])
    assert best.keys() == uploaded.keys()
    assert all(uploaded[name].equal(weight) for name, weight in best.items())
    assert f"those of step {run.best}, the best by `max:eval/loss`" in there["README.md"].decode()


def test_of_models_that_wait_only_the_newest_is_uploaded(fake, tmp_path):
    held, sent = threading.Event(), []
    fake.odd["commit"] = lambda fake: held.wait(30)
    several = uploads.Uploads(Hub(id="me/my-model"), tmp_path / "hub")
    for step in (1, 2, 3):
        partial = tmp_path / "hub/.partial"
        (partial / "model").mkdir(parents=True)
        (partial / "model/step.txt").write_text(str(step))
        several.stage(step, partial)
        if step == 1:
            wait_for(lambda: any("commit" in path for _, path in fake.calls))
    held.set()
    assert several.finish(lambda: False) and sent == []
    assert fake.files("me/my-model") == {"step.txt": b"3"}
    assert sum("commit" in path for _, path in fake.calls) == 2
    assert not (tmp_path / "hub").exists()


def test_a_signal_ends_the_wait_for_an_upload(fake, flags, capsys):
    def interrupt(fake):
        os.kill(os.getpid(), signal.SIGTERM)
        fake.hung_up.wait(60)

    fake.odd["commit"] = interrupt
    assert main(["sft", *flags]) == 1
    line, _ = command_in(capsys.readouterr().err)
    assert "a signal ended the wait for it" in line


@pytest.mark.parametrize("every", ["end", pytest.param("checkpoint", marks=pytest.mark.slow)])
def test_a_run_killed_while_it_uploads_uploads_the_rest_when_it_is_resumed(
    every, fake, flags, tmp_path
):
    words = [*flags, "--hub.every", every, "--save_every", "2", "--lora.r", "2"]
    ((status, printed),) = run_forked(1, "hub_killed", fake.address, words)
    assert status == -signal.SIGKILL, printed
    before = set(fake.objects)
    assert before and WEIGHTS not in fake.files("me/my-model")
    assert main(["sft", *words, "--resume", "true"]) == 0
    files = fake.files("me/my-model")
    assert files[WEIGHTS] == (tmp_path / "run/model" / WEIGHTS).read_bytes()
    assert "adapter/adapter_model.safetensors" in files
    sent_again = [path for _, path in fake.calls if path.removeprefix("/objects/") in before]
    assert len(sent_again) == len(before)


@pytest.mark.slow
def test_the_first_of_two_ranks_uploads_and_both_end(fake, flags, tmp_path):
    words = [*flags, "--hub.every", "checkpoint", "--save_every", "1", "--dtype", "bfloat16"]
    for shards in ("1", "2"):
        words[words.index("--output") + 1] = str(tmp_path / f"run-{shards}")
        words[words.index("--hub.id") + 1] = f"me/of-{shards}"
        sharded = [*words, "--parallel.dp_shard_size", shards]
        for status, printed in run_forked(2, "rank_hub", fake.address, sharded):
            assert status == 0, printed[-3000:]
        files = fake.files(f"me/of-{shards}")
        assert files[WEIGHTS] == (tmp_path / f"run-{shards}/model" / WEIGHTS).read_bytes()
    assert [path for _, path in fake.calls].count("/api/whoami-v2") == 2


@pytest.mark.slow
def test_what_the_first_rank_finds_wrong_with_the_hub_ends_both(fake, flags):
    fake.role = "read"
    ended = run_forked(2, "rank_hub", fake.address, flags)
    assert [status for status, _ in ended] == [1, 1]
    assert all("may only read" in printed for _, printed in ended)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"hub": {"revision": "v1"}}, "hub.revision: nothing is uploaded without hub.id"),
        ({"hub": {"id": "me/x"}, "output": None}, "hub.id: a model is uploaded from the run's"),
        ({"hub": {"id": "me/x", "every": "best"}}, "hub.every: wanted a metric to be the best by"),
        ({"hub": {"id": ""}}, "hub.id: wanted a repository"),
    ],
)
def test_settings_of_the_hub_that_contradict_others_are_refused(given, said):
    fields = {"model": "m", "data": "d", "output": "o", **given}
    fields["hub"] = build("hub", Hub, fields["hub"])
    with pytest.raises(ValueError, match=said):
        SFT(**fields).refuse_contradictions()
