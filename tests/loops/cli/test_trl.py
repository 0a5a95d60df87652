"""TRL's files and flags on our command line."""

import json
import os
import re
import subprocess
import sys

import pytest
import yaml
from burnish.loops.cli import main
from tiny import CHATML, save_model, sums, write_rows
from trl_page import PAGE, RECIPES, page

PAIRS = sums(8)
MESSAGES = [{"messages": pair["prompt"] + pair["chosen"]} for pair in PAIRS]
PROMPTS = [{"prompt": pair["prompt"], "solution": "4"} for pair in PAIRS]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def burnish(tmp_path, capsys, monkeypatch):
    """``burnish(recipe, configuration, *flags)`` returns (status, standard output, standard
    error).
    """
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.chdir(tmp_path)

    def burnish(command, configuration, *flags):
        file = tmp_path / "trl.yaml"
        file.write_text(
            configuration if isinstance(configuration, str) else json.dumps(configuration)
        )
        words = command.split()
        named = (
            []
            if configuration is None
            else ([str(file)] if words[0] == "translate" else ["--config", str(file)])
        )
        try:
            status = main([*words, *named, *flags])
        except SystemExit as stopped:
            status = stopped.code
        return status, *capsys.readouterr()

    return burnish


@pytest.fixture
def trained(burnish, model, tmp_path, caplog):
    """Train two steps by a real configuration; returns the configuration in our fields and what was
    logged.
    """

    def trained(name, rows, *flags):
        (tmp_path / "template.jinja").write_text(CHATML)
        mine = {
            "model_name_or_path": model,
            "output_dir": tmp_path / "run",
            "chat_template": tmp_path / "template.jinja",
        }
        mine |= {
            "data": write_rows(tmp_path / "data.jsonl", rows),
            "max_steps": 2,
            "report_to": "none",
        }
        mine |= {
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "attn_implementation": "sdpa",
        }
        words = [str(word) for name, value in mine.items() for word in (f"--{name}", value)]
        uploaded = ["--push_to_hub", "false"] if RECIPES[name].get("push_to_hub") else []
        status, out, err = burnish(name.split("/")[-2], RECIPES[name], *words, *uploaded, *flags)
        assert status == 0, out + err
        lines = [
            json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()
        ]
        assert lines[-1]["step"] == 2
        return yaml.safe_load((tmp_path / "run/config.yaml").read_text()), caplog.text

    return trained


def test_a_file_of_trl_trains_a_model_on_messages(trained):
    config, logged = trained(
        "OpenR1-Distill-7B/sft/config_distill",
        MESSAGES,
        *(
            "--schedule",
            "cosine",
            "--lr_scheduler_kwargs",
            "null",
            "--eos_token",
            "null",
            "--dtype",
            "float32",
        ),
        *("--torch_dtype", "null", "--bf16", "false"),
    )
    expected = {
        "learning_rate": 4e-5,
        "max_grad_norm": 0.2,
        "max_length": 32768,
        "warmup": 0.03,
        "seed": 42,
    }
    expected |= {
        "schedule": "cosine",
        "batch_size": 4,
        "steps": 2,
        "report_to": "none",
        "dtype": "float32",
    }
    assert {name: config[name] for name in expected} == expected
    assert "train_on: of messages only the assistants' tokens are trained" in logged


@pytest.mark.filterwarnings("ignore:Paged optimizers")
def test_a_file_of_trl_trains_a_model_on_pairs_by_adapters(trained):
    flags = ["--load_in_4bit", "false", "--lora_r", "4"]
    config, _ = trained("zephyr-7b-beta/dpo/config_qlora", PAIRS, *flags)
    assert config["lora"]["r"] == 4
    assert config["lora"]["alpha"] == 128
    assert config["lora"]["dropout"] == 0.05
    assert config["lora"]["target_modules"][:2] == ["q_proj", "k_proj"]
    assert (config["beta"], config["dtype"], config["schedule"]) == (0.01, "bfloat16", "cosine")
    assert (config["optimizer"], config["weights_dtype"]) == ("paged_adamw_32bit", "float32")


def test_a_file_of_trl_trains_a_model_by_odds_ratios(trained):
    flags = ["--lr_scheduler_type", "linear", "--optim", "adamw_torch", "--dataset_num_proc", "1"]
    config, _ = trained("zephyr-141b-A35b/orpo/config_full", PAIRS, *flags)
    assert (config["odds_ratio"], config["warmup"], config["schedule"]) == (0.05, 100, "linear")


def test_a_file_of_trl_trains_a_policy_by_a_reward_of_trl(trained, tmp_path):
    (tmp_path / "mine_of_trl.py").write_text(
        "def short(completions, solution, **kwargs):\n    return [-float(len(c[0]['content'])) for c in completions]\n"
    )
    flags = [
        "--schedule",
        "cosine",
        "--lr_scheduler_kwargs",
        "null",
        "--dataset_prompt_column",
        "null",
    ]
    flags += [
        "--system_prompt",
        "null",
        "--use_vllm",
        "false",
        "--reward_funcs",
        "mine_of_trl.short",
    ]
    flags += ["--reward_weights", "0.5", "--num_generations", "2", "--max_completion_length", "4"]
    config, _ = trained("DeepSeek-R1-Distill-Qwen-1.5B/grpo/config_demo", PROMPTS, *flags)
    assert config["rewards"] == {"mine_of_trl:short": 0.5}
    assert (config["group_size"], config["prompts_per_rollout"], config["max_tokens"]) == (2, 2, 4)
    assert (config["temperature"], config["truncation"], config["source"]) == (
        0.7,
        "keep_end",
        "policy",
    )


# What a file asks for that can't be had: each is refused by its name, with what to do.
INSTEAD = {
    "eos_token": "null",
    "model_revision": "main",
    "code_language": "null",
    "code_eval_test_batch_size": "null",
}
INSTEAD |= {
    "code_eval_scoring_mode": "null",
    "reward_funcs": "accuracy_reward",
    "reward_weights": "1.0",
}
# What takes too long, or a GPU, here.
SMALL = {
    "lora_r": "4",
    "num_generations": "2",
    "max_completion_length": "4",
    "use_vllm": "false",
    "dataset_num_proc": "1",
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Paged optimizers")
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_of_the_handbooks_trains(trained, name):
    rows = {"sft": MESSAGES, "grpo": PROMPTS}.get(name.split("/")[-2], PAIRS)
    flags = [
        f"--{key}={value}" for key, value in {**INSTEAD, **SMALL}.items() if key in RECIPES[name]
    ]
    if "dataset_prompt_column" in RECIPES[name]:
        flags += ["--dataset_prompt_column=null"]
    trained(name, rows, *flags)


MINIMAL = {"model_name_or_path": "m", "dataset_name": "d", "output_dir": "o"}


def shown(burnish, recipe, configuration, *flags):
    """The resolved configuration, without training."""
    status, out, err = burnish(recipe, configuration, *flags, "--print_config")
    assert status == 0, err
    return yaml.safe_load(out)


def test_trls_flags_work_without_a_file(burnish):
    flags = "--model_name_or_path m --dataset_name d --output-dir o --per_device_train_batch_size 3 --bf16 --use_peft"
    flags += " --lora_target_modules q_proj v_proj --loss_type sigmoid sft --loss_weights 1 0.5 --learning_rate 1e-4"
    config = shown(
        burnish, "dpo", {}, *flags.split(), "--no_gradient_checkpointing", "--max_grad_norm=0.5"
    )
    assert (config["model"], config["data"], config["output"]) == ("m", "d", "o")
    assert (config["batch_size"], config["dtype"], config["learning_rate"]) == (3, "bfloat16", 1e-4)
    assert config["lora"]["target_modules"] == ["q_proj", "v_proj"]
    assert config["loss"] == {"dpo": 1.0, "nll": 0.5}
    assert (config["gradient_checkpointing"], config["max_grad_norm"]) == (False, 0.5)


def test_both_vocabularies_mix_and_flags_win_in_either(burnish):
    file = {**MINIMAL, "lora": {"r": 4}, "per_device_train_batch_size": 4, "micro_tokens": 99}
    config = shown(burnish, "dpo", file, "--num_train_epochs", "4", "--batch_size", "5")
    assert (
        config["lora"]["r"],
        config["batch_size"],
        config["epochs"],
        config["micro_tokens"],
    ) == (4, 5, 4, 99)
    config = shown(burnish, "dpo", {**MINIMAL, "epochs": 2, "steps": 7}, "--num_train_epochs", "4")
    assert (config["epochs"], config["steps"]) == (4, 7)


@pytest.mark.parametrize(
    ("file", "flags"),
    [
        ({**MINIMAL, "batch_size": 4, "gradient_accumulation_steps": 2}, []),
        ({**MINIMAL, "lora": {"r": 4}, "use_peft": True}, []),
        (MINIMAL, ["--epochs", "2", "--num_train_epochs", "3"]),
    ],
)
def test_a_field_that_is_given_in_both_vocabularies_is_refused(burnish, file, flags):
    status, _, err = burnish("dpo", file, *flags)
    assert status == 2
    assert "given twice" in err


def test_all_that_is_wrong_in_a_file_stands_in_one_message(burnish):
    file = {
        **MINIMAL,
        "fp16_full_eval": True,
        "torch_compile": True,
        "optim": "lomo",
        "per_device_batch": 3,
        "learning_rat": 1,
    }
    status, _, err = burnish("dpo", file, "--print_config")
    assert status == 2
    assert err.startswith("burnish dpo: 5 mistakes\n") and len(err.splitlines()) == 7
    for words in (
        "fp16_full_eval: ",
        "torch_compile: ",
        "optim: ",
        "no field 'learning_rat', did you mean 'learning_rate'?",
    ):
        assert words in err
    assert "no field 'per_device_batch', did you mean 'per_device_" in err


def test_all_unknown_keys_of_our_own_file_stand_in_one_message(burnish):
    status, _, err = burnish("dpo", {"model": "m", "stepps": 3, "learning_rat": 0.1})
    assert status == 2
    assert "no field 'stepps', did you mean 'steps'?" in err
    assert "no field 'learning_rat', did you mean 'learning_rate'?" in err


def test_a_flag_that_is_nearly_trls_is_told_with_trls_name(burnish):
    status, _, err = burnish("dpo", MINIMAL, "--per_device_train_batchsize", "4")
    assert status == 2
    assert "did you mean 'per_device_train_batch_size'?" in err


def test_translate_prints_a_file_that_means_the_same(burnish, tmp_path):
    name = "zephyr-7b-beta/dpo/config_qlora"
    file = {**RECIPES[name], "push_to_hub": False}
    direct = shown(burnish, "dpo", file)
    status, printed, _ = burnish("translate dpo", file)
    assert status == 0
    assert (
        "# no effect here: hub_model_id: without push_to_hub nothing is uploaded, as in TRL"
        in printed
    )
    assert shown(burnish, "dpo", printed) == direct
    status, printed, _ = burnish("translate dpo", {**file, "optim": "galore_adamw"})
    assert status == 1
    assert "# refused: optim: " in printed


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        (["translate"], 2, "usage: burnish translate"),
        (["translate", "dpoo", "trl.yaml"], 2, "usage: burnish translate"),
        (["translate", "dpo", "nosuch.yaml"], 1, "nosuch.yaml: No such file or directory"),
        (
            ["translate", "python", "dpo_vlm.py", "--beta", "0.2"],
            2,
            "no recipe for 'dpo_vlm', did you mean 'dpo'?",
        ),
        (["translate", "python", "nash_md.py"], 2, "no recipe for 'nash_md'"),
    ],
)
def test_a_mistake_in_translate_is_told(words, status, told, capsys):
    assert main(words) == status
    assert told in capsys.readouterr().err


def test_translate_reads_flags_without_a_file(capsys):
    assert (
        main(
            ["translate", "sft", "--model_name_or_path", "m", "--loss_type", "dft", "--steps", "3"]
        )
        == 0
    )
    assert yaml.safe_load(capsys.readouterr().out) == {"model": "m", "loss": "dft", "steps": 3}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("trl dpo --beta 0.2", {"beta": 0.2}),  # the example of the help
        ("dpo --learning_rate 1e-5", {"learning_rate": 1e-5}),
        ("trl sft --lora.r 8 --resume", {"lora": {"r": 8}, "resume": True}),
    ],
)
def test_translate_takes_a_command_whose_names_are_those_of_both(words, expected, capsys):
    assert main(["translate", *words.split()]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == expected


def test_translate_prints_a_file_of_ours_as_it_is_and_refuses_what_nobody_knows(burnish):
    status, printed, _ = burnish("translate dpo", {"beta": 0.2, "lora": {"r": 8}}, "--epochs", "2")
    assert (status, yaml.safe_load(printed)) == (0, {"beta": 0.2, "lora": {"r": 8}, "epochs": 2})
    status, printed, _ = burnish("translate dpo", {"beta": 0.2}, "--epoch", "2")
    assert (status, yaml.safe_load(printed)) == (1, {"beta": 0.2})
    assert "# refused: no field 'epoch', did you mean 'epochs'?" in printed


def test_translate_reads_a_command_as_it_is_pasted(burnish, capsys):
    command = "accelerate launch --num_processes 4 examples/scripts/kto.py --model_name_or_path m --dataset_name d"
    assert (
        main(
            [
                "translate",
                *command.split(),
                "--per_device_train_batch_size",
                "2",
                "--output_dir",
                "o",
            ]
        )
        == 0
    )
    printed = capsys.readouterr().out
    assert printed.startswith(
        "# torchrun --nproc_per_node 4 -m burnish kto --config with this file\n"
    )
    assert (
        "# num_processes: the batch is that of so many; torchrun or accelerate launch starts them"
        in printed
    )
    config = shown(burnish, "kto", printed)
    assert (config["model"], config["data"], config["batch_size"], config["output"]) == (
        "m",
        "d",
        8,
        "o",
    )


def test_trls_defaults_are_taken_if_wanted_and_told_if_not(burnish, caplog):
    config = shown(burnish, "grpo", {**MINIMAL, "rewards": {"math": 1}, "epochs": 1})
    assert (config["max_tokens"], config["seed"], config["dtype"]) == (256, 0, "float32")
    line = next(text for text in caplog.messages if "defaults that differ" in text)
    for words in (
        "max_tokens 256 (512)",
        "seed 0 (42)",
        "dtype float32 (bfloat16)",
        "weighting None (token_mean)",
    ):
        assert words in line
    assert "epochs" not in line
    caplog.clear()
    config = shown(
        burnish, "grpo", {**MINIMAL, "rewards": {"math": 1}, "epochs": 1, "defaults": "trl"}
    )
    assert (config["max_tokens"], config["seed"], config["dtype"]) == (512, 42, "bfloat16")
    assert (config["weighting"], config["epochs"], config["save_every"]) == ("token_mean", 1, 500)
    assert "defaults that differ" not in caplog.text
    ours = {"model": "m", "data": "d", "output": "o"}
    assert shown(burnish, "reward", ours, "--defaults", "trl")["learning_rate"] == 1e-4
    status, _, err = burnish("reward", ours, "--defaults", "tlr")
    assert (status, "defaults: wanted trl" in err) == (2, True)


def test_a_command_in_our_names_does_not_read_the_table(burnish, monkeypatch, caplog):
    monkeypatch.setattr("burnish.loops.cli.trl.entries", None)
    assert (
        shown(
            burnish,
            "dpo",
            {"model": "m", "data": "d", "output": "o", "lora": {"r": 2}},
            "--beta=0.3",
        )["beta"]
        == 0.3
    )
    assert caplog.messages == []


def test_a_difference_is_told_unless_its_field_is_set(burnish, caplog):
    shown(burnish, "sft", {**MINIMAL, "train_on": "all"})
    assert "train_on: " not in caplog.text
    shown(burnish, "sft", MINIMAL)
    assert "train_on: of messages only the assistants' tokens are trained" in caplog.text


@pytest.mark.parametrize(
    ("recipe", "given", "told"),
    [
        ("dpo", {"use_peft": True}, "lora.dropout: TRL's 0.05"),
        ("dpo", {"use_peft": True}, "lora.target_modules: all linear layers"),
        ("orpo", {"beta": 0.1}, "beta: it is odds_ratio here"),
        ("grpo", {"rewards": {"math": 1}}, "variant: grpo, where every completion counts the same"),
        ("grpo", {"rewards": {"math": 1}}, "max_tokens 256 (512)"),
        ("reward", {}, "learning_rate 1e-05 (0.0001)"),
        ("reward", {}, "margin: counts where a column is named for it"),
        (
            "kto",
            {},
            "kl: of the loss kto, from each prompt with the completion half a step further on",
        ),
        ("orpo", {"beta": 0.1}, "nll: of the completion alone"),
        ("cpo", {}, "ends: completions end as the chat template ends them"),
        ("dpo", {}, "turns: of a completion of several messages"),
        (
            "grpo",
            {"rewards": {"math": 1}},
            "old_logprobs: sampled, ratios are to the sampler's own log-probs",
        ),
        ("grpo", {"rewards": {"math": 1}, "beta": 0.1}, "use_bias_correction_kl False (True)"),
        (
            "distill",
            {},
            "learning_rate: 2e-05, as TRL's GKDTrainer; its DistillationTrainer has 1e-06",
        ),
        ("rloo", {"rewards": {"math": 1}}, "skipped: a step whose gradient is 0"),
        ("dpo", {}, "seed 0 (42)"),
        ("dpo", {}, "dtype float32 (bfloat16)"),
    ],
)
def test_what_trains_otherwise_without_a_word_of_the_file_is_told_by_translate(
    burnish, recipe, given, told
):
    _, printed, _ = burnish(f"translate {recipe}", {**MINIMAL, **given})
    assert told in printed


@pytest.mark.parametrize("name", RECIPES)
def test_a_run_begins_with_three_lines_at_most_about_names_of_trl(burnish, caplog, name):
    refused = (
        "eos_token",
        "reward_funcs",
        "reward_weights",
        "num_generations",
        "model_revision",
    )
    left_out = [key for key in RECIPES[name] if key in refused or key.startswith("code_")]
    config = {key: value for key, value in RECIPES[name].items() if key not in left_out}
    rewards = ["--rewards", "{math: 1}"] if "grpo" in name else []
    shown(burnish, name.split("/")[-2], {**config, "output_dir": "o"}, *rewards)
    said = [text for text in caplog.messages if text.startswith("TRL: ")]
    assert 1 <= len(said) <= 3
    assert len(said) < 3 or re.fullmatch(
        r"TRL: \d+ more, of less weight: burnish translate \w+, with .* prints them", said[-1]
    )


def test_few_differences_are_all_told_at_the_start(burnish, caplog):
    shown(burnish, "sft", {**MINIMAL, "train_on": "all"}, "--defaults", "trl")
    said = [text for text in caplog.messages if text.startswith("TRL: ")]
    assert len(said) <= 3 and not [text for text in said if "defaults that differ" in text]


def test_what_is_set_is_not_told(burnish, caplog):
    lora = {
        "use_peft": True,
        "lora_dropout": 0.1,
        "lora_target_modules": ["q_proj"],
        "seed": 42,
        "bf16": True,
    }
    shown(
        burnish,
        "grpo",
        {**MINIMAL, **lora, "rewards": {"math": 1}, "loss_type": "dapo", "dataset_mixer": {"a": 1}},
    )
    for field in ("lora.dropout", "lora.target_modules", "variant", "seed", "dtype"):
        assert f"{field}: " not in caplog.text and f" {field} " not in caplog.text


def test_held_out_data_of_other_data_is_no_default_that_differs(burnish, caplog):
    mixer = {"dataset_mixer": {"a": 1}, "dataset_splits": ["train", "test"]}
    shown(burnish, "dpo", {**MINIMAL, **mixer}, "--data", "mine.jsonl")
    assert "eval_data None" not in caplog.text


def test_a_template_among_trls_flags_is_text(burnish):
    template = "{% for message in messages %}{{ message }}{% endfor %}"
    assert shown(burnish, "sft", MINIMAL, "--chat_template", template)["chat_template"] == template


def test_other_ranks_say_nothing(burnish, caplog, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    shown(burnish, "sft", MINIMAL)
    assert caplog.messages == []


def test_a_translation_imports_nothing_heavy(tmp_path):
    (tmp_path / "trl.yaml").write_text(json.dumps(MINIMAL))
    code = (
        "import sys; from burnish.loops.cli import main; main(['translate', 'dpo', 'trl.yaml']); "
        "heavy = {'torch', 'transformers', 'datasets', 'numpy'}; "
        "print(sorted({name.partition('.')[0] for name in sys.modules} & heavy))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=600,
        cwd=tmp_path,
        env=os.environ,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_page_is_made_from_the_table():
    assert PAGE.read_text() == page(), "run tests/support/trl/trl_page.py"
