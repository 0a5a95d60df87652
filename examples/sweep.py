"""Search settings with Optuna (pip install "burnish[sweep]"), until so many trials have ended:

    python sweep.py dpo base.yaml space.yaml runs/sweep --trials 20

base.yaml has the settings that all trials share, with eval_data and eval_every; space.yaml those to
search: `learning_rate: {low: 1.0e-6, high: 1.0e-3, log: true}`, `lora.r: {choices: [8, 32]}`. After
kill -9, the same command goes on. Started several times, processes share the trials.
"""

import argparse
import fcntl
import hashlib
import json
from pathlib import Path

import burnish
import optuna
import yaml
from matplotlib.figure import Figure
from optuna.study import MaxTrialsCallback
from optuna.trial import TrialState

parser = argparse.ArgumentParser()
parser.add_argument("recipe")
for name in ("base", "space", "directory"):
    parser.add_argument(name, type=Path)
parser.add_argument("--trials", type=int, default=20)
args = parser.parse_args()
base, space = (yaml.safe_load(path.read_text()) for path in (args.base, args.space))
ENDED = (TrialState.COMPLETE, TrialState.PRUNED)


def suggest(trial, name, how):
    if "choices" in how:
        return trial.suggest_categorical(name, how["choices"])
    kind = trial.suggest_int if isinstance(how["low"], int) else trial.suggest_float
    return kind(name, **how)


def lock(name, wait=fcntl.LOCK_EX):
    """A file that is locked until it is closed, or its process dies."""
    file = (args.directory / f"{name}.lock").open("w")
    fcntl.flock(file, wait)
    return file


def train(trial):
    values = {name: suggest(trial, name, how) for name, how in space.items()}
    settings = {"save_every": base["eval_every"], **base}
    for name, value in values.items():
        group, _, field = name.partition(".")
        settings[group] = {**settings.get(group, {}), field: value} if field else value
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]
    output = args.directory / digest
    with lock(trial.number):
        run = getattr(burnish, args.recipe)(**settings, output=str(output), resume=True)
        try:
            for step in run:
                if "eval/loss" in step.metrics:
                    trial.report(step.metrics["eval/loss"], step.number)
                    if trial.should_prune():
                        raise optuna.TrialPruned
        except FloatingPointError as error:  # it has diverged
            raise optuna.TrialPruned from error
    lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return [line["eval/loss"] for line in lines if "eval/loss" in line][-1]


def revive():
    """Enqueue the values of trials whose process has died again; their runs are resumed."""
    with lock("revive"):
        for trial in study.get_trials(states=[TrialState.RUNNING]):
            try:
                lock(trial.number, fcntl.LOCK_EX | fcntl.LOCK_NB).close()
            except BlockingIOError:  # its process lives
                continue
            study.tell(trial.number, state=TrialState.FAIL)
            study.enqueue_trial(trial.params)


def report():
    """trials.md, the best first, and trials.png."""
    trials = sorted(study.get_trials(states=ENDED), key=lambda each: (each.state.value, each.value))
    lines = [
        "| trial | state | eval/loss | " + " | ".join(space) + " |",
        "|--" * (3 + len(space)) + "|",
    ]
    axes = Figure(layout="constrained").subplots()
    for trial in trials:
        cells = [trial.number, trial.state.name.lower(), f"{trial.value:.4f}"]
        lines.append("| " + " | ".join(map(str, [*cells, *trial.params.values()])) + " |")
        steps = sorted(trial.intermediate_values)
        losses = [trial.intermediate_values[step] for step in steps]
        color = "0.7" if trial.state == TrialState.PRUNED else "C0"
        axes.plot(steps, losses, color=color, marker=".")
    axes.set(xlabel="step", ylabel="eval/loss", title=f"{len(trials)} trials, pruned ones grey")
    axes.figure.savefig(args.directory / "trials.png")
    (args.directory / "trials.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines[:7]))


args.directory.mkdir(parents=True, exist_ok=True)
study = optuna.create_study(
    storage=f"sqlite:///{args.directory}/study.db",
    study_name=args.recipe,
    load_if_exists=True,
    pruner=optuna.pruners.MedianPruner(n_startup_trials=3),
)
revive()
if len(study.get_trials(states=ENDED)) < args.trials:
    study.optimize(train, callbacks=[MaxTrialsCallback(args.trials, states=ENDED)])
report()
