"""Train in child processes that are killed with SIGKILL as ordered, until one finishes.

random:<count>     kill <count> children, at moments spread over the run at random; some of them while they start
signals:<count>    the same with SIGINT, SIGTERM, SIGUSR1 and SIGKILL, one of them drawn for each child
write:<n>          kill a child in the middle of writing its n-th file of a checkpoint
truncate           cut the newest checkpoint in half
"""

import dataclasses
import itertools
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from burnish.loops.recipes.grpo import open_grpo
from burnish.loops.recipes.ppo import open_ppo
from burnish.loops.recipes.preference import open_dpo
from burnish.loops.recipes.settings import DPO, GRPO, PPO, SFT
from burnish.loops.recipes.sft import open_sft
from burnish.loops.runs import checkpoint, stop, storage
from forked import run_forked

RECIPES = {
    "dpo": (DPO, open_dpo),
    "sft": (SFT, open_sft),
    "grpo": (GRPO, open_grpo),
    "ppo": (PPO, open_ppo),
}

ANY = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGKILL)


def kill_and_resume(recipe, config, *orders, timeout=600):
    """Obey the orders; returns how many kills there were of each kind, and what the children
    printed.
    """
    ((status, printed),) = run_forked(1, "killed", recipe, config, *orders, timeout=timeout)
    log = Path(config["output"]).with_suffix(".log")
    log = log.read_text() if log.exists() else ""
    assert status == 0, printed[-2000:] + log[-2000:]
    return json.loads(printed.splitlines()[-1]), log


def assert_undisturbed(config):
    """It ended with the weights of the run that nobody killed, bit for bit, and logged what that
    did.
    """
    run, whole = Path(config["output"]), Path(config["output"] + "-undisturbed")
    weights = "model/model.safetensors"
    assert (run / weights).read_bytes() == (whole / weights).read_bytes()
    logged = [untimed(place) for place in (run, whole)]
    for disturbed, undisturbed in zip(*logged, strict=True):
        assert disturbed == undisturbed


def assert_each_answer_once(config):
    """All answers to each task, in the order of tasks unless in a window, none drawn from weights
    older than may be.
    """
    run, steps, groups = Path(config["output"]), config["steps"], config["prompts_per_rollout"]
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    size = groups * config["group_size"]  # of a step
    places = [(sample["task"], sample["index"]) for sample in samples]
    if config.get("in_flight"):
        assert len(places) == len(set(places)) == steps * size
        assert max(places)[0] < steps * groups + config["in_flight"]
    else:
        asked = itertools.product(range(steps * groups), range(config["group_size"]))
        assert places == list(asked)
    ages = Counter(
        number // size - min(v for v, _, _ in sample["spans"])
        for number, sample in enumerate(samples)
    )
    assert set(ages) <= set(range(config["max_staleness"] + 1))
    logged = untimed(run)
    assert [line["step"] for line in logged] == list(range(1, steps + 1))
    assert max(line["age/max"] for line in logged) <= config["max_staleness"]
    newest = max((run / "checkpoints").glob("step-*")) / "state.pt"
    ends = torch.load(newest, weights_only=True)["memory"]["scheduler"]["ends"]
    assert ends == list(range(groups, (steps + 1) * groups, groups))
    return ages


def untimed(run):
    """What a run logged, without what depends on the clock, on its ranks or on a server's
    health.
    """
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    passing = ("seconds", "sampling/seconds", "sampling/retries")
    return [
        {
            name: value
            for name, value in line.items()
            if name not in passing and not name.startswith("ranks/")
        }
        for line in lines
    ]


def build(kind, fields):
    """The configuration of these fields, groups of them as mappings."""
    groups = {
        f.name: f.default_factory
        for f in dataclasses.fields(kind)
        if dataclasses.is_dataclass(f.default_factory)
    }
    return kind(
        **{
            name: groups[name](**value) if name in groups else value
            for name, value in fields.items()
        }
    )


def train(recipe, config, before=lambda: None):
    """Process id of a child that trains; it exits with status 0 if it finishes."""
    child = os.fork()
    if child:
        return child
    log = os.open(
        Path(config["output"]).with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND
    )
    os.dup2(log, 1)
    os.dup2(log, 2)
    # ignored in what a shell runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
    status = 1
    try:
        before()
        kind, open_recipe = RECIPES[recipe]
        # the picture takes longer than the run
        with patch("burnish.loops.runs.training.draw_curves"):
            open_recipe(build(kind, config)).train()
        status = 0
    except stop.Stopped as stopped:
        status = stopped.code
    except KeyboardInterrupt:  # before the run was ready for it
        status = stop.STATUS["SIGINT"]
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def wait(child):
    """True if a signal ended the child, which goes on if it stopped for it; raises if it failed by
    itself.
    """
    while os.WIFSTOPPED(status := os.waitpid(child, os.WUNTRACED)[1]):
        os.kill(child, signal.SIGCONT)
    if os.WIFSIGNALED(status) or os.WEXITSTATUS(status) in stop.STATUS.values():
        return True
    if os.WEXITSTATUS(status):
        raise SystemExit(f"a child failed with status {os.WEXITSTATUS(status)}")
    return False


def wait_for_step(journal, target, child, earlier):
    """Until the child has taken this step, or has ended; ``earlier`` is the journal of the child
    before it.
    """
    while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        lines = journal.read_text().splitlines() if inode(journal) != earlier else []
        if lines and lines[-1].endswith("}") and json.loads(lines[-1])["step"] >= target:
            return
        time.sleep(0.01)


@contextmanager
def in_step(number, action):
    """Before the gradient of the number-th step that is taken from now on, do this."""
    module = sys.modules["burnish.loops.train.step"]  # the package has a function of that name
    step, steps = module.train_step, itertools.count(1)

    def then_step(*arguments, **options):
        if next(steps) == number:
            action()
        return step(*arguments, **options)

    with patch.object(module, "train_step", then_step):
        yield


def newest_step(run):
    """Of its checkpoints."""
    return max(
        (int(path.name.removeprefix("step-")) for path in checkpoint._all(run / "checkpoints")),
        default=0,
    )


def inode(path):
    """Another one for a file that has taken the place of this one."""
    return path.stat().st_ino if path.exists() else None


def kill_while_writing(nth):
    """In this process, die half-way through the n-th file that a checkpoint writes."""
    original = storage.write
    written = 0

    def write(path, pieces):
        nonlocal written
        written += 1
        digest = original(path, pieces)
        if written == nth:
            os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        return digest

    storage.write = write


def kill_at_random(recipe, config, rng, upto, margin, signals=(signal.SIGKILL,)):
    """Send a signal to a child while it starts, or some moments after a step up to this one; the
    result of `wait`.

    A child that is so fast that it has gone on by ``margin`` steps stops there until the signal
    comes.
    """
    journal = Path(config["output"]) / "metrics.jsonl"
    saved, earlier = newest_step(journal.parent), inode(journal)
    target = rng.randint(saved, max(saved, upto))
    held = in_step(max(0, upto - saved) + margin, lambda: os.kill(os.getpid(), signal.SIGSTOP))
    child = train(recipe, config, held.__enter__)
    if target > saved:
        wait_for_step(journal, target, child, earlier)
    time.sleep(rng.uniform(0.0, 0.2))
    os.kill(child, rng.choice(signals))
    return wait(child)


def be_rank(recipe, config, *orders):
    rng = random.Random(0)
    happened = {"random": 0, "signals": 0, "write": 0, "truncate": 0}
    if not config.get("max_staleness"):  # above, no two runs are alike
        assert not wait(train(recipe, {**config, "output": config["output"] + "-undisturbed"}))
    config["resume"] = True
    for order in orders:
        kind, _, value = order.partition(":")
        if kind == "truncate":
            newest = checkpoint._all(Path(config["output"]) / "checkpoints")[0] / "state.pt"
            os.truncate(newest, newest.stat().st_size // 2)
            happened["truncate"] += 1
        elif kind == "write":
            happened["write"] += wait(
                train(recipe, config, partial(kill_while_writing, int(value)))
            )
        else:
            count = int(value)
            signals = (signal.SIGKILL,) if kind == "random" else ANY
            margin = config["steps"] // (count + 1)  # steps between two signals
            for number in range(1, count + 1):
                upto = margin * number
                happened[kind] += kill_at_random(recipe, config, rng, upto, margin, signals)
    while wait(train(recipe, config)):
        pass
    print(json.dumps(happened))
