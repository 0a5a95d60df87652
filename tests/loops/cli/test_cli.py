"""The command line, as a person meets it: what is wrong, where, and what to do about it."""

import json
import math
import re

import pytest
import yaml
from burnish.loops.cli import main
from burnish.loops.recipes import settings
from burnish.loops.registry import MEANT
from tiny import save_model, sums, write_rows


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def run(model, tmp_path, capsys):
    """``run(recipe, rows, *flags)`` returns (exit status, what was said)."""

    def run(recipe, rows, *flags, model=model):
        data = tmp_path / "data.jsonl"
        write_rows(data, rows) if isinstance(rows, list) else data.write_text(rows)
        arguments = [
            recipe,
            "--model",
            str(model),
            "--data",
            str(data),
            "--output",
            str(tmp_path / "run"),
            *flags,
        ]
        try:
            status = main(arguments)
        except SystemExit as stopped:
            status = stopped.code
        said = capsys.readouterr()
        return status, said.out + said.err

    return run


PAIRS = sums(6)
MESSAGES = [{"messages": pair["prompt"] + pair["chosen"]} for pair in PAIRS]


@pytest.mark.drawn
def test_dpo_writes_everything_that_a_run_directory_promises(run, tmp_path):
    flags = [
        "--steps",
        "4",
        "--batch_size",
        "3",
        "--eval_data",
        str(tmp_path / "data.jsonl"),
        "--save_every",
        "2",
    ]
    status, said = run("dpo", PAIRS, *flags, "--report_to", "tensorboard")
    assert status == 0, said
    assert "6 rows read, 6 kept" in said
    place = tmp_path / "run"
    lines = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    promised = {
        "loss",
        "grad_norm",
        "learning_rate",
        "tokens",
        "seconds",
        "rewards/margins",
        "rewards/accuracies",
    }
    assert promised <= lines[1].keys()
    assert {"eval/loss", "eval/rewards/accuracies"} <= lines[0].keys() & lines[-1].keys()
    assert (place / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in sorted((place / "checkpoints").iterdir())] == [
        "step-00000002",
        "step-00000004",
    ]
    assert list(place.glob("logs/**/events*")), "TensorBoard has nothing to show"
    assert yaml.safe_load((place / "config.yaml").read_text())["batch_size"] == 3


def test_a_configuration_is_yaml_and_flags_win_wherever_they_stand(run, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(
        "loss: {dpo: 1.0, nll: {coefficient: 0.2}}\nbeta: 0.3\nlora: {r: 2}\nlearning_rate: 1e-4\n"
    )
    status, said = run("dpo", PAIRS, "--beta", "0.5", "--config", str(config), "--steps", "1")
    assert status == 0, said
    written = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    assert written["loss"] == {"dpo": 1.0, "nll": {"coefficient": 0.2}}
    assert (written["beta"], written["learning_rate"], written["lora"]["r"]) == (0.5, 1e-4, 2)
    line = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[0])
    assert line["loss"] == pytest.approx(line["dpo"] + 0.2 * line["nll"])


def test_print_config_shows_every_field_resolved(run):
    status, said = run("sft", MESSAGES, "--lora.r", "8", "--print_config")
    assert status == 0
    printed = yaml.safe_load(said)
    assert printed["lora"]["r"] == 8
    assert printed["weighting"] == "token_mean"


@pytest.mark.parametrize("recipe", ["sft", "dpo", "kto", "orpo", "cpo", "reward", "prm", "distill"])
def test_every_recipe_shows_its_configuration_and_is_listed(recipe, run, capsys):
    status, said = run(recipe, PAIRS, "--seed", "7", "--print_config")
    assert status == 0
    printed = yaml.safe_load(said)
    assert printed["seed"] == 7
    assert {"model", "data", "output", "steps", "lora"} <= printed.keys()
    assert main(["--help"]) == 0
    assert f"\n  {recipe} " in capsys.readouterr().out


def test_help_says_what_each_field_is_for(run, capsys):
    with pytest.raises(SystemExit):
        main(["dpo", "--help"])
    assert "Strength of the pull towards the reference" in capsys.readouterr().out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "flags",
    [["--reference", "copy"], ["--reference", "precompute"], ["--lora.r", "2"]],
    ids=["copy", "precompute", "adapters off"],
)
def test_before_the_first_step_policy_and_reference_are_one(run, tmp_path, dtype, flags):
    status, said = run(
        "dpo", PAIRS, "--steps", "2", "--dtype", dtype, "--learning_rate", "1e-2", *flags
    )
    assert status == 0, said
    first, second = [
        json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    ]
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert abs(second["rewards/margins"]) > 1e-4


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lerning_rate", "1e-5"], "no field 'lerning_rate', did you mean 'learning_rate'?"),
        (["--lora.rank", "1"], "no field 'lora.rank', did you mean 'lora.r'?"),
        (["--refer", "copy"], "no field 'refer', did you mean 'reference'?"),
        (["--steps", "many"], "steps"),
        (["--schedule", "cosin"], "schedule"),
    ],
)
def test_an_unknown_or_malformed_flag_is_named_with_the_nearest(run, flags, message):
    status, said = run("dpo", PAIRS, *flags)
    assert status == 2
    assert message in said
    assert "usage:" not in said, "every flag is repeated"


@pytest.mark.parametrize(
    ("recipe", "name", "meant"),
    [
        ("grpo", "batch_size", "prompts_per_rollout"),
        ("ppo", "batch_size", "prompts_per_rollout"),
    ],
)
def test_the_name_of_another_recipe_is_answered_with_ours(run, recipe, name, meant):
    status, said = run(recipe, PAIRS, f"--{name}", "3")
    assert status == 2
    assert f"no field {name!r}, did you mean {meant!r}?" in said


def test_every_name_that_is_meant_is_a_field_of_a_recipe():
    fields = {
        field
        for config in vars(settings).values()
        for field in getattr(config, "__dataclass_fields__", ())
    }
    assert fields >= {*MEANT.values()}


@pytest.mark.parametrize(
    ("recipe", "name", "meant"),
    [("dpo", "batchsize", "batch_size"), ("ppo", "old", "old_logprobs")],
)
def test_an_unknown_yaml_key_is_named_with_the_nearest_or_with_ours(
    run, recipe, name, meant, tmp_path
):
    (tmp_path / "config.yaml").write_text(f"{name}: 3\n")
    status, said = run(recipe, PAIRS, "--config", str(tmp_path / "config.yaml"))
    assert status == 2
    assert f"no field {name!r}, did you mean {meant!r}?" in said


def test_an_unknown_recipe_is_named_with_the_nearest(capsys):
    assert main(["dop"]) == 2
    assert "no recipe 'dop', did you mean 'dpo'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--loss", "{dpo: 1, cpo: 1}", "--divergence", "js"],
            "divergence: cpo has no reference to diverge from",
        ),
        (["--loss", "aot", "--pair_weight", "wpo"], "pair_weight: aot sorts the pairs of a step"),
        (["--loss", "{dpo: {beta: -0.1}}"], "dpo: beta must be > 0, got -0.1"),
        (["--loss", "dop"], "'dop' is not one of"),
        (["--loss", "exo"], "exo: label_smoothing"),
        (["--loss", "simpo"], "simpo needs gamma"),
        (["--loss_kwargs", "{gama: 1.0}"], "no loss of this mix has 'gama'"),
        (["--loss", "{dpo: {coefficient: 1.0, alpha: 2.0}}"], "dpo has no 'alpha'"),
        (["--loss", "aot"], "couples all pairs of a step"),
    ],
)
def test_a_mix_that_makes_no_sense_is_refused(run, flags, message):
    status, said = run("dpo", PAIRS, *flags)
    assert status == 1
    assert message in said


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ld_alpha", "2"], "ld_alpha: must be >= 0 and <= 1, got 2"),
        (["--beta", "-0.1"], "beta: must be > 0, got -0.1"),
        (["--beta", "0"], "beta: must be > 0, got 0"),
        (["--lora.r", "-1"], "lora.r: must be >= 0, got -1"),
        (["--batch_size", "0"], "batch_size: must be > 0, got 0"),
        (["--steps", "0"], "steps: must be > 0, got 0"),
        (["--teacher.beta", "1"], "teacher.beta: must be > 0 and < 1, got 1"),
    ],
)
def test_a_number_outside_of_its_type_is_refused_with_the_range(run, flags, message):
    status, said = run("dpo", PAIRS, *flags)
    assert status == 2
    assert message in said and len(said.splitlines()) == 2


def without(pair, column):
    return {name: value for name, value in pair.items() if name != column}


@pytest.mark.parametrize(
    ("recipe", "rows", "flags", "message"),
    [
        ("dpo", [without(pair, "rejected") for pair in PAIRS], [], "rejected"),
        ("dpo", [PAIRS[0], {**PAIRS[1], "rejected": PAIRS[1]["chosen"]}], [], "data.jsonl line 2"),
        ("dpo", PAIRS, ["--max_length", "20"], "data.jsonl line 1"),
        ("sft", [{"prompt": "2+2=", "completion": ""}], [], "data.jsonl line 1"),
        (
            "sft",
            [MESSAGES[0], {"messages": list(reversed(MESSAGES[1]["messages"]))}],
            [],
            "data.jsonl line 2",
        ),
        (
            "sft",
            [{"messages": [{"role": "user", "content": 42}, *MESSAGES[0]["messages"][1:]]}],
            [],
            "data.jsonl line 1",
        ),
        ("sft", '{"text": "a b"}\n{"text": "a\n', [], "data.jsonl line 2: not JSON"),
    ],
    ids=[
        "missing column",
        "identical",
        "prompt too long",
        "empty",
        "role order",
        "non-string content",
        "malformed",
    ],
)
def test_a_bad_row_is_named_and_nothing_is_written(run, tmp_path, recipe, rows, flags, message):
    status, said = run(recipe, rows, *flags)
    assert status == 1
    assert message in said
    assert not (tmp_path / "run").exists()


def test_bad_rows_are_skipped_and_counted_on_demand(run):
    rows = [*PAIRS, {**PAIRS[0], "rejected": PAIRS[0]["chosen"]}]
    status, said = run("dpo", rows, "--on_bad_row", "skip", "--steps", "1")
    assert status == 0, said
    assert "7 rows read, 6 kept" in said
    assert "1 skipped" in said


def test_a_conversation_without_a_chat_template_says_what_to_pass(run, tmp_path):
    status, said = run("sft", MESSAGES, model=save_model(tmp_path / "plain", chat=False))
    assert status == 1
    assert "no chat template; pass one (--chat_template" in said


def test_the_directory_of_another_run_is_not_touched(run, tmp_path):
    assert run("dpo", PAIRS, "--steps", "1")[0] == 0
    before = (tmp_path / "run/metrics.jsonl").read_bytes()
    status, said = run("dpo", PAIRS, "--steps", "1")
    assert status == 1
    assert "already holds a run" in said
    status, said = run("dpo", PAIRS, "--steps", "1", "--resume", "true", "--beta", "0.7")
    assert status == 1
    assert "was run with beta=0.1, now it is 0.7" in said
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == before


STEPS = [{"prompt": "1+1=", "completions": ["2", "3"], "labels": [True, False]}] * 4


@pytest.mark.parametrize(("recipe", "rows"), [("reward", PAIRS), ("prm", STEPS)])
def test_the_console_shows_the_accuracy_of_models_that_judge(recipe, rows, run):
    status, said = run(recipe, rows, "--steps", "1")
    assert status == 0, said
    assert re.search(r"step 1/1  loss [\d.]+  accuracy [\d.]+", said)


def test_a_finished_run_resumed_with_more_steps_goes_on(run, tmp_path):
    assert run("dpo", PAIRS, "--steps", "2", "--schedule", "constant")[0] == 0
    assert run("dpo", PAIRS, "--steps", "4", "--schedule", "constant", "--resume", "true")[0] == 0
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]


@pytest.mark.parametrize("rewards", ["short:reward", "[short:reward]", "{short:reward: 1.0}"])
def test_a_reward_is_named_as_in_python(run, tmp_path, monkeypatch, rewards):
    (tmp_path / "short.py").write_text(
        "def reward(row, sample):\n    return -float(len(sample.text))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    flags = ["--prompts_per_rollout", "2", "--group_size", "2", "--max_tokens", "4", "--steps", "1"]
    status, printed = run("grpo", [{"prompt": "a"}, {"prompt": "b"}], *flags, "--rewards", rewards)
    assert status == 0, printed
    resolved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["rewards"]
    assert resolved == yaml.safe_load(rewards)
    metrics = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert any(name.startswith("rewards/reward/") for name in metrics), metrics
