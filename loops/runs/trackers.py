"""Log to Accelerate's trackers: the configuration, metrics under TRL's names, and completions as
tables.

A metric of training is under ``train/``, one of held-out data under ``eval/``, as in transformers'
Trainer, so that runs of both share a panel. ``metrics.jsonl`` has the same numbers under the names
of burnish.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from ..config import Common
from ..redaction import redacted
from ..registry import as_setting_error

# Metrics that TRL logs under another name.
RENAMED = {
    "seconds": "step_time",
    "clip_ratio/low": "clip_ratio/low_mean",
    "clip_ratio/high": "clip_ratio/high_mean",
    "clip_ratio/region": "clip_ratio/region_mean",
    "clip_ratio/low/min": "clip_ratio/low_min",
    "clip_ratio/high/max": "clip_ratio/high_max",
    "vespo/phi_seq": "vespo/phi_seq_mean",
    "sampling/logp_difference": "sampling/sampling_logp_difference/mean",
    "sampling/logp_difference/max": "sampling/sampling_logp_difference/max",
    "sampling/importance_ratio": "sampling/importance_sampling_ratio/mean",
    "sampling/importance_ratio/min": "sampling/importance_sampling_ratio/min",
    "sampling/importance_ratio/max": "sampling/importance_sampling_ratio/max",
}
# The argument of each tracker for the name of a run; others know only the project.
_RUN_NAME = {"wandb": "name", "trackio": "name", "mlflow": "run_name", "swanlab": "experiment_name"}
_PRIVATE = "vllm.environment"  # may hold keys


def open_trackers(accelerator: Accelerator, config: Common, start: int) -> None:
    """Start the configured trackers under the project and the name of the run, and give them the
    configuration. TensorBoard hides what an earlier process logged after the step ``start``, from
    which the run resumes.

    Raises:
        ValueError: if one of them does not start, for example without a login.
    """
    name = config.run_name or Path(config.output or "burnish").name
    named: dict[str, dict[str, Any]] = {
        tracker: {argument: name} for tracker, argument in _RUN_NAME.items()
    }
    named["tensorboard"] = {"purge_step": start + (start > 0)}
    tensorboard = [str(tracker) for tracker in accelerator.log_with] == ["tensorboard"]
    # TensorBoard makes a directory for the project, besides the one that it is already in.
    project = "logs" if tensorboard and config.project is None else config.project or "burnish"
    with as_setting_error(f"report_to: {config.report_to}", Exception):
        accelerator.init_trackers(project, config=flat(vars(config)), init_kwargs=named)


def flat(settings: Mapping[str, object], prefix: str = "") -> dict[str, bool | int | float | str]:
    """Settings as a flat mapping of numbers and texts, groups joined by a dot, without possible
    secrets.
    """
    levelled: dict[str, bool | int | float | str] = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"
        if is_dataclass(value):
            value = vars(value)
        if isinstance(value, Mapping) and value and name != _PRIVATE:
            levelled |= flat(value, f"{name}.")
        elif name != _PRIVATE:
            value = redacted(value, key)
            if not isinstance(value, bool | int | float | str):
                value = json.dumps(value, default=str)
            levelled[name] = value
    return levelled


def for_trackers(step: int, metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics under the names of TRL: ``train/loss``, ``eval/loss``,
    ``train/clip_ratio/low_mean``.
    """
    named = {}
    for name, value in metrics.items():
        kind, plain = (
            ("eval", name.removeprefix("eval/")) if name.startswith("eval/") else ("train", name)
        )
        name = RENAMED.get(plain, plain).replace("@", "_at_")  # mlflow takes no @
        named[f"{kind}/{name}"] = value
    return {**named, "train/global_step": step}


def _as_markdown(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table of Markdown, as TensorBoard shows text."""
    lines = [columns, ["--"] * len(columns)]
    for row in rows:
        lines.append([str(cell).replace("|", "\\|").replace("\n", "<br>") for cell in row])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def log_table(
    trackers: Sequence[Any],
    name: str,
    step: int,
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
) -> None:
    """Show rows of text in the trackers that have tables, or text: wandb, trackio, mlflow, clearml,
    tensorboard.
    """
    for tracker in trackers:
        if tracker.name == "tensorboard":
            tracker.writer.add_text(name, _as_markdown(columns, rows), step)
        elif tracker.name == "trackio":
            import pandas
            import trackio

            tracker.log(
                {name: trackio.Table(dataframe=pandas.DataFrame(rows, columns=list(columns)))}
            )
        elif tracker.name == "mlflow":
            import mlflow

            cells: dict[str, list[Any]] = {"step": [step] * len(rows)}
            for column, values in zip(columns, zip(*rows, strict=True), strict=True):
                cells[column] = list(map(str, values))
            # Rows are added to those of the file that earlier steps have logged.
            mlflow.log_table(cells, f"{name}.json", run_id=tracker.tracker.info.run_id)
        elif hasattr(tracker, "log_table"):
            tracker.log_table(
                name, columns=list(columns), data=[list(map(str, row)) for row in rows]
            )
