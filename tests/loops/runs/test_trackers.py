"""What trackers are told: TensorBoard, and a tracker that keeps all that it gets."""

import json
import sys
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import pytest
import torch
import yaml
from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker
from accelerate.utils import LoggerType
from burnish.loops.cli import main
from burnish.loops.config import Lora
from burnish.loops.recipes.settings import GRPO, SFT
from burnish.loops.runs.trackers import flat, for_trackers, log_table, open_trackers
from online import Killed, dying_in_step
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny import save_model, sums, write_rows

PAIRS = sums(6)
PROMPTS = [{"prompt": pair["prompt"], "answer": pair["chosen"][0]["content"]} for pair in PAIRS]
# The metrics that TRL's pages of these trainers list.
TRL = {
    "dpo": """global_step epoch num_tokens loss entropy learning_rate grad_norm rewards/chosen rewards/rejected
        rewards/margins rewards/accuracies logps/chosen logps/rejected logits/chosen logits/rejected
        mean_token_accuracy""",
    "grpo": """global_step epoch num_tokens step_time loss entropy learning_rate grad_norm reward reward_std
        frac_reward_zero_std completions/mean_length completions/min_length completions/max_length
        completions/clipped_ratio rewards/exact_match/mean rewards/exact_match/std clip_ratio/low_mean
        clip_ratio/high_mean clip_ratio/region_mean clip_ratio/low_min clip_ratio/high_max""",
    "reward": """global_step epoch num_tokens loss accuracy min_reward mean_reward max_reward margin
        learning_rate grad_norm""",
}


class Kept(GeneralTracker):
    """Stands for wandb: keeps everything."""

    name, requires_logging_directory = "wandb", False
    made: ClassVar[list] = []

    def __init__(self, project, **options):
        super().__init__()
        self.project, self.options, self.metrics, self.tables = project, options, [], []
        self.made.append(self)

    @property
    def tracker(self):
        return self

    def store_init_configuration(self, values):
        self.config = values

    def log(self, values, step=None, **options):
        self.metrics.append((step, values))

    def log_table(self, name, columns, data):
        self.tables.append((name, columns, data))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def train(model, tmp_path, monkeypatch):
    """``train(recipe, *flags)`` returns the run directory and the tracker, if there is one."""
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "wandb", Kept)
    available = [LoggerType.WANDB, LoggerType.TENSORBOARD]
    monkeypatch.setattr("burnish.loops.runs.context.get_available_trackers", lambda: available)
    monkeypatch.setattr("accelerate.tracking.get_available_trackers", lambda: available)
    Kept.made.clear()

    def train(recipe, *flags):
        data = write_rows(tmp_path / "data.jsonl", PROMPTS if recipe == "grpo" else PAIRS)
        words = {"--model": model, "--data": data, "--output": tmp_path / "run", "--steps": 2}
        flags = [str(word) for pair in words.items() for word in pair] + list(flags)
        assert main([recipe, *flags]) == 0
        return tmp_path / "run", Kept.made[-1] if Kept.made else None

    return train


def test_a_tracker_is_told_project_name_and_the_whole_configuration(train):
    flags = [
        "--report_to",
        "wandb",
        "--project",
        "p",
        "--run_name",
        "r",
        "--lora.r",
        "2",
        "--beta",
        "0.3",
    ]
    directory, tracker = train("dpo", *flags)
    assert (tracker.project, tracker.options) == ("p", {"name": "r"})
    fields = flat(yaml.safe_load((directory / "config.yaml").read_text()))
    assert tracker.config == fields
    assert (fields["beta"], fields["lora.r"], fields["project"]) == (0.3, 2, "p")


def test_project_and_run_have_names_without_any(train):
    directory, tracker = train("dpo", "--report_to", "wandb")
    assert (tracker.project, tracker.options["name"]) == ("burnish", directory.name)


def test_variables_of_a_server_are_not_told():
    config = {
        "vllm": {"url": None, "environment": {"API_KEY": "secret"}},
        "rewards": {"math": 1.0},
        "list": [1],
    }
    assert flat(config) == {"vllm.url": "null", "rewards.math": 1.0, "list": "[1]"}


@pytest.mark.parametrize("recipe", TRL)
def test_training_and_held_out_metrics_have_the_names_of_trl(train, tmp_path, recipe):
    online = [
        "--rewards",
        "{exact_match: 1}",
        "--max_tokens",
        "4",
        "--prompts_per_rollout",
        "3",
        "--group_size",
        "2",
    ]
    flags = [
        "--eval_data",
        str(tmp_path / "data.jsonl"),
        *(online if recipe == "grpo" else ["--batch_size", "3"]),
    ]
    directory, tracker = train(recipe, "--report_to", "wandb", *flags)
    steps = dict(tracker.metrics)
    assert {f"train/{name}" for name in TRL[recipe].split()} <= steps[2].keys()
    assert {name.partition("/")[0] for metrics in steps.values() for name in metrics} == {
        "train",
        "eval",
    }
    assert ("eval/reward" if recipe == "grpo" else "eval/loss") in steps[2]
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert steps[2]["train/loss"] == lines[-1]["loss"]
    assert (steps[1]["train/epoch"], steps[2]["train/epoch"], steps[2]["train/global_step"]) == (
        0.5,
        1.0,
        2,
    )
    assert steps[2]["train/num_tokens"] == sum(line.get("input_tokens", 0) for line in lines)
    if recipe == "grpo":
        (name, columns, rows), *_ = tracker.tables
        assert (
            name == "completions"
            and "completion" in columns
            and "+" in rows[0][columns.index("end of the prompt")]
        )


def test_num_tokens_goes_on_when_a_run_is_resumed(train):
    flags = ["--report_to", "wandb", "--schedule", "constant"]
    _, first = train("dpo", *flags)
    _, second = train("dpo", *flags, "--steps", "3", "--resume", "true")
    before = dict(first.metrics)[2]["train/num_tokens"]
    assert before > 0 and dict(second.metrics)[3]["train/num_tokens"] > before


def test_tensorboard_shows_each_step_of_a_run_that_was_killed_once(train):
    flags = [
        "--report_to",
        "tensorboard",
        "--schedule",
        "constant",
        "--steps",
        "4",
        "--batch_size",
        "3",
    ]
    with dying_in_step(4), pytest.raises(Killed):
        train("dpo", *flags, "--save_every", "2")
    directory, _ = train("dpo", *flags, "--resume", "true")
    shown = EventAccumulator(str(directory / "logs")).Reload()
    assert [event.step for event in shown.Scalars("train/loss")] == [1, 2, 3, 4]


def test_tensorboard_has_metrics_configuration_and_completions(train):
    online = [
        "--rewards",
        "{exact_match: 1}",
        "--max_tokens",
        "4",
        "--prompts_per_rollout",
        "3",
        "--group_size",
        "2",
    ]
    directory, _ = train("grpo", "--report_to", "tensorboard", *online)
    (events,) = [path for path in (directory / "logs").glob("events*")]
    shown = EventAccumulator(str(events)).Reload()
    assert {"train/loss", "train/reward", "train/epoch"} <= {*shown.Tags()["scalars"]}
    (text,) = shown.Tensors("completions/text_summary")
    assert b"| task | end of the prompt | completion | rewards |" in text.tensor_proto.string_val[0]
    (stored,) = (directory / "logs").glob("*/hparams.yml")
    assert yaml.safe_load(stored.read_text())["group_size"] == 2


def test_mlflow_keeps_the_rows_of_all_steps_in_one_table(monkeypatch):
    logged = []
    module = ModuleType("mlflow")
    module.log_table = lambda data, artifact_file, run_id: logged.append(
        (data, artifact_file, run_id)
    )
    monkeypatch.setitem(sys.modules, "mlflow", module)
    run = SimpleNamespace(info=SimpleNamespace(run_id="r1"))
    tracker = SimpleNamespace(name="mlflow", tracker=run)
    log_table([tracker], "completions", 3, ("task", "rewards"), [("7", 0.5), ("8", 1.0)])
    cells = {"step": [3, 3], "task": ["7", "8"], "rewards": ["0.5", "1.0"]}
    assert logged == [(cells, "completions.json", "r1")]


def test_metrics_of_more_than_one_kind_are_renamed():
    named = for_trackers(3, {"seconds": 1.0, "eval/loss": 2.0, "clip_ratio/low": 0.5})
    assert named == {
        "train/step_time": 1.0,
        "eval/loss": 2.0,
        "train/clip_ratio/low_mean": 0.5,
        "train/global_step": 3,
    }


def test_a_tracker_that_does_not_start_is_told_in_a_line(train, monkeypatch, capsys):
    def start(self):
        raise RuntimeError("api_key not configured")

    monkeypatch.setattr(Kept, "start", start)
    with pytest.raises(AssertionError):
        train("dpo", "--report_to", "wandb")
    said = capsys.readouterr().err
    assert "burnish dpo: report_to: wandb: " in said and "api_key not configured" in said


def test_a_model_in_memory_is_not_copied_to_be_told_of(tmp_path):
    class Model(torch.nn.Linear):
        def __deepcopy__(self, memo):
            pytest.fail("it was copied")

    accelerator = Accelerator(log_with="tensorboard", project_dir=tmp_path)
    open_trackers(
        accelerator, SFT(model=Model(2, 2), data=[], output=str(tmp_path), lora=Lora(r=2)), 0
    )
    for tracker in accelerator.trackers:
        tracker.finish()
    assert list(tmp_path.rglob("hparams.yml"))


def test_a_configuration_is_told_as_numbers_and_texts():
    config = flat(vars(GRPO(model="m", data="d", output="o", rewards={"math": 1.0})))
    assert all(isinstance(value, bool | int | float | str) for value in config.values())
