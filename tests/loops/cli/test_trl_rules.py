"""What TRL's names and values come to: every real key, every field of TRL's classes, every rule of
a value.
"""

import dataclasses
import importlib.util
import json
import re
from math import inf
from pathlib import Path

import pytest
from burnish.loops.cli.trl import entries, from_command, read, table, translate
from burnish.loops.recipes import RECIPES as OURS
from burnish.loops.recipes import settings_of
from burnish.loops.recipes.grpo import grpo_losses
from burnish.loops.recipes.preference import dpo_losses
from burnish.loops.recipes.settings import DPO, GRPO
from burnish.loops.rewards.resolve import SHIPPED
from burnish.loops.train.mix import PAIR_LOSSES
from trl_page import COMMANDS, RECIPES

# What the other configurations have can all be translated.
REFUSED = {
    "DeepSeek-R1-Distill-Qwen-1.5B/grpo/config_demo": {"reward_funcs"},
    "Qwen2.5-1.5B-Instruct/grpo/config_demo": {"reward_funcs"},
    "Qwen2.5-1.5B-Instruct/grpo/config_demo_code": {"reward_funcs", "num_generations"},
    "Qwen2.5-1.5B-Instruct/grpo/config_demo_code_ioi": {
        *("reward_funcs", "num_generations", "code_language", "code_eval_test_batch_size")
    },
    "Qwen2.5-Coder-7B-Instruct/grpo/config_codeforces": {
        *("reward_funcs", "code_eval_scoring_mode", "code_eval_test_batch_size")
    },
}


# Of scripts: batches that the other flags don't make up.
REFUSED_FLAGS = {"grpo": {"generation_batch_size"}}
REFUSED_FLAGS["grpo_continuous_batching"] = {"num_generations"}

# Of TRL's defaults, where vLLM samples.
IMPORTANCE = {
    "source": "vllm_engine",
    "correction": "sequence_mis",
    "correction_low": 0.0,
    "correction_high": 3.0,
}


def fields_of(recipe):
    return {field.name for field in dataclasses.fields(settings_of(recipe))}


def ours(recipe, **given):
    """Our fields; nothing may be refused."""
    translation = translate(recipe, fields_of(recipe), given)
    assert translation.refused == {}
    return translation.ours


@pytest.mark.parametrize("name", RECIPES)
def test_every_key_of_a_real_configuration_is_translated_told_or_refused(name, tmp_path):
    recipe, configuration = name.split("/")[-2], RECIPES[name]
    file = tmp_path / "trl.yaml"
    file.write_text(json.dumps(configuration))
    _, left, out = read(recipe, settings_of(recipe), ["--config", str(file)])
    assert left == []
    assert set(out.refused) == REFUSED.get(name, set())
    assert all(name in line for name, line in out.refused.items())
    accounted = {
        key for keys in (*out.sources.values(), *out.ignored.values()) for key in keys
    } | set(out.refused)
    assert accounted == set(configuration)


def test_the_real_configurations_are_the_thirty_of_two_handbooks_and_one_of_trl():
    assert len(RECIPES) == 31 and REFUSED.keys() <= RECIPES.keys()
    assert sum(map(len, RECIPES.values())) == 1086 + len(RECIPES["trl/sft/example_config"])


def words_of(flags):
    values = {name: value if isinstance(value, list) else [value] for name, value in flags.items()}
    return [
        word for name, each in values.items() for word in (f"--{name}", *each) if word is not None
    ]


@pytest.mark.parametrize("script", COMMANDS)
def test_every_flag_of_a_script_of_trl_is_translated_told_or_refused(script):
    flags = COMMANDS[script]
    command = from_command(
        ["accelerate", "launch", f"examples/scripts/{script}.py", *words_of(flags)]
    )
    _, left, out = read(command.recipe, settings_of(command.recipe), command.flags)
    assert left == []
    assert all(line.startswith(f"{name}: ") for name, line in out.refused.items())
    accounted = {
        key for keys in (*out.sources.values(), *out.ignored.values()) for key in keys
    } | set(out.refused)
    assert {name.removeprefix("no_") for name in flags} <= accounted
    assert set(out.refused) == REFUSED_FLAGS.get(script, set())


def test_the_flags_are_those_of_twenty_three_scripts():
    assert len(COMMANDS) == 23 and sum(map(len, COMMANDS.values())) == 330


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("trl dpo --beta 1", "dpo --beta 1"),
        ("CUDA_VISIBLE_DEVICES=0 trl sft --config a.yaml", "sft --config a.yaml"),
        ("python -m trl.scripts.rloo --beta 1", "rloo --beta 1"),
        ("uv run https://host/scripts/sft.py --packing", "sft --packing"),
        ("accelerate launch --num_processes 8 a/dpo.py --beta 1", "dpo --num_processes=8 --beta 1"),
        ("torchrun --nproc-per-node=2 grpo.py --beta 1", "grpo --num_processes=2 --beta 1"),
        (
            "accelerate launch --config_file zero3.yaml ppo/ppo_tldr.py --gamma 1",
            "ppo --accelerate_config=zero3.yaml --gamma 1",
        ),
        ("python bco.py --beta 1", "kto --loss_type bco --beta 1"),
    ],
)
def test_a_command_of_trl_becomes_a_recipe_and_its_flags(command, expected):
    found = from_command(command.split())
    assert [found.recipe, *found.flags] == expected.split()


def test_what_a_script_of_trl_trains_by_default_holds_unless_the_command_has_another():
    words = ["python", "gkd.py", "--lmbda", "0", "--beta", "1", "--teacher_model_name_or_path", "t"]
    command = from_command(words)
    ours, _, out = read(command.recipe, settings_of(command.recipe), command.flags)
    assert out.refused == {}
    teacher = {"model": "t", "divergence": "reverse_kl"}
    assert ours == {"on_policy": 0, "max_tokens": 128, "temperature": 0.9, "teacher": teacher}


@pytest.mark.parametrize("script", table()["scripts"])
def test_flags_of_a_script_of_trl_are_names_of_the_table(script):
    command = from_command([f"{script}.py"])
    _, left, out = read(command.recipe, settings_of(command.recipe), command.flags)
    assert (left, out.refused) == ([], {})


def test_a_comma_between_the_values_of_a_list_is_no_part_of_them():
    words = ["--use_peft", "--lora_target_modules", "q_proj,", "v_proj", "--chat_template", "a,"]
    ours, _, _ = read("sft", settings_of("sft"), words)
    assert ours["lora"]["target_modules"] == ["q_proj", "v_proj"]
    assert read("sft", settings_of("sft"), ["--dataset_name", "a,"])[0]["data"] == "a,"


EXPERIMENTAL = {
    "cpo": ("cpo", "CPO"),
    "orpo": ("orpo", "ORPO"),
    "online_dpo": ("online_dpo", "OnlineDPO"),
}
EXPERIMENTAL |= {"gkd": ("distill", "GKD"), "distillation": ("distill", "Distillation")}
EXPERIMENTAL |= {"gold": ("distill", "GOLD")}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("module", EXPERIMENTAL)
def test_every_field_of_an_experimental_trainer_of_the_installed_trl_is_in_the_table(
    module, monkeypatch
):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    trainer = pytest.importorskip(f"trl.experimental.{module}")
    recipe, name = EXPERIMENTAL[module]
    fields = dataclasses.fields(getattr(trainer, f"{name}Config"))
    names = {field.name for field in fields}
    assert len(names) > 120
    assert names - set(entries(recipe)) == set()
    given = {
        field.name: field.default for field in fields if field.default is not dataclasses.MISSING
    }
    assert null_without_a_meaning(recipe, translate(recipe, fields_of(recipe), given).ours) == set()


def test_distillation_trains_at_the_rate_of_the_installed_trls_trainer():
    trainer = pytest.importorskip("trl").DistillationConfig
    defaults = {field.name: field.default for field in dataclasses.fields(trainer)}
    words = dict(zip(*[iter(from_command(["distillation.py"]).flags)] * 2, strict=True))
    values = {
        name.removeprefix("--"): float(value) for name, value in words.items() if name != "--lmbda"
    }
    assert values.keys() == {"learning_rate", "beta", "temperature", "max_completion_length"}
    assert values == {name: defaults[name] for name in values}


@pytest.mark.filterwarnings("ignore")
def test_gold_trains_by_the_defaults_of_the_installed_trls_trainer(monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    trainer = pytest.importorskip("trl.experimental.gold").GOLDConfig
    defaults = {field.name: field.default for field in dataclasses.fields(trainer)}
    words = dict(zip(*[iter(from_command(["gold.py"]).flags)] * 2, strict=True))
    values = {name.removeprefix("--"): float(value) for name, value in words.items()}
    assert values == {name: defaults[name] for name in values}
    own = {"learning_rate", "lmbda", "beta", "temperature", "top_p", "max_completion_length"}
    assert values.keys() == own


TWO_DEVICES = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 3,
    "num_processes": 2,
}
SPANS = {"use_uld_loss": True, "uld_token_merge_strategy": "bayesian"}
HYBRID = {**SPANS, "uld_use_hybrid_loss": True}
ULD = {"teacher.divergence": "uld", "weighting": "length_normalized"}
MIXED = {"teacher.divergence": "gold", "weighting": "length_normalized"}
EVERYWHERE = {"weighting": "token_mean", "of": "all"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (SPANS, ULD),
        (HYBRID, MIXED),
        ({"use_uld_loss": False, "uld_use_hybrid_loss": True, "uld_crossentropy_weight": 1.0}, {}),
        ({**SPANS, "teacher_tokenizer_name_or_path": "t"}, {**ULD, "teacher.tokenizer": "t"}),
        ({"teacher_tokenizer_name_or_path": "t"}, {}),
        # the temperature is of the sampler alone, and beta of the hybrid loss
        ({**SPANS, "temperature": 0.9, "beta": 0.3}, {**ULD, "temperature": 0.9}),
        ({**HYBRID, "beta": 0.3}, {**MIXED, "teacher.beta": 0.3}),
        (
            {**SPANS, "uld_student_temperature": 2.0, "uld_teacher_temperature": 2.0},
            {**ULD, "teacher.temperature": 2.0},
        ),
        (
            {**HYBRID, "uld_hybrid_matched_weight": 0.25, "uld_hybrid_unmatched_weight": 0.75},
            {**MIXED, "teacher.matched_weight": 0.25},
        ),
        (
            {**HYBRID, "uld_hybrid_matched_weight": 1.5, "uld_hybrid_unmatched_weight": 0.5},
            {**MIXED, "teacher.matched_weight": 0.75, "loss": {"distillation": 2.0}},
        ),
        (
            {**SPANS, "uld_distillation_weight": 0.5, "uld_crossentropy_weight": 0.2},
            {**ULD, "loss": {"distillation": 0.5, "nll": {"coefficient": 0.2, **EVERYWHERE}}},
        ),
        ({**SPANS, "uld_hybrid_matched_weight": 0.25}, ULD),
        # of a prompt's completions, of which those of all prompts are the batch
        (
            {**TWO_DEVICES, "num_generations": 6},
            {"batch_size": 4, "group_size": 6},
        ),
        (
            {**TWO_DEVICES, "num_generations": 3, "generation_batch_size": 4},
            {"batch_size": 8, "group_size": 3},
        ),
    ],
    ids=str,
)
def test_golds_names_become_ours(given, expected, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert ours("distill", **given) == expected


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {**SPANS, "uld_token_merge_strategy": "observed"},
            "there is bayesian alone, got observed; TRL's observed reads each distribution one token late",
        ),
        ({**SPANS, "use_extended_uld": False}, "over spans of the same text, not by position"),
        ({**HYBRID, "beta": 1.0}, "at 1 can fall below 0, wanted between 0 and 1; give teacher.b"),
        (
            {**SPANS, "uld_teacher_temperature": 2.0},
            "one temperature, got 1 and 2; give teacher.temperature instead",
        ),
        ({**HYBRID, "uld_hybrid_matched_weight": 0.5}, "unmatched_weight: give both, or neither"),
        ({**HYBRID, "uld_hybrid_unmatched_weight": 0.5}, "_matched_weight: give both, or neither"),
        ({**SPANS, "uld_distillation_weight": 0.0}, "nothing is left to learn from the teacher"),
        ({"vllm_sync_frequency": 4}, "vllm_sync_frequency: completions are sampled by the weights"),
        (
            {**TWO_DEVICES, "num_generations": 5},
            "num_generations: 2 prompts x 5 completions are not the 12 completions of a device's",
        ),
        (
            {**TWO_DEVICES, "num_generations": 3, "generation_batch_size": 6},
            "generation_batch_size: 6 prompts x 3 completions are not the 12 completions",
        ),
    ],
    ids=str,
)
def test_what_gold_computes_otherwise_is_refused(given, words, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    (line,) = translate("distill", fields_of("distill"), given).refused.values()
    assert words in line
    assert line.partition(":")[0] in given


def test_a_field_of_a_group_that_is_set_replaces_what_is_refused():
    given = {**HYBRID, "beta": 1.0}
    out = translate("distill", fields_of("distill"), given, elsewhere={"teacher.beta": 0.9})
    assert out.refused == {} and out.ours == MIXED


def test_what_gold_leaves_to_a_default_is_told():
    notes = translate("distill", fields_of("distill"), {"use_uld_loss": True}).notes
    assert [note.partition(":")[0] for note in notes] == [
        "uld_token_merge_strategy",
        "uld_skip_student_eos",
    ]
    assert "observed, TRL's default, reads each distribution one token late" in notes[0]
    told = {**SPANS, "uld_skip_student_eos": False, "uld_skip_teacher_eos": False}
    assert translate("distill", fields_of("distill"), told).notes == []
    told["gradient_accumulation_steps"] = 2
    (note,) = translate("distill", fields_of("distill"), told).notes
    assert note.startswith("gradient_accumulation_steps: the gradient is the mean over the whole")


@pytest.mark.parametrize("recipe", ["sft", "dpo", "kto", "reward", "grpo", "rloo"])
def test_every_field_of_the_installed_trl_is_in_the_table(recipe):
    trl = pytest.importorskip("trl")
    own = {
        "sft": "SFT",
        "dpo": "DPO",
        "kto": "KTO",
        "reward": "Reward",
        "grpo": "GRPO",
        "rloo": "RLOO",
    }[recipe]
    classes = [getattr(trl, name) for name in (f"{own}Config", "ModelConfig", "ScriptArguments")]
    names = {field.name for each in classes for field in dataclasses.fields(each)}
    assert len(names) > 120
    assert names - set(entries(recipe)) == set()


@pytest.mark.parametrize("recipe", ["sft", "dpo", "kto", "reward", "grpo", "rloo"])
def test_the_defaults_of_the_installed_trl_change_nothing_silently(recipe):
    """A file that spells out all of TRL's defaults is translated without a refusal."""
    trl = pytest.importorskip("trl")
    own = {
        "sft": "SFT",
        "dpo": "DPO",
        "kto": "KTO",
        "reward": "Reward",
        "grpo": "GRPO",
        "rloo": "RLOO",
    }[recipe]
    given = {}
    for each in (getattr(trl, f"{own}Config"), trl.ModelConfig, trl.ScriptArguments):
        for field in dataclasses.fields(each):
            made = field.default_factory is not dataclasses.MISSING
            given[field.name] = field.default_factory() if made else field.default
    table_defaults = {**table()["defaults"]["all"], **table()["defaults"].get(recipe, {})}
    given["bf16"] = True  # None, which is true unless fp16 is
    for name, value in table_defaults.items():
        if name in given:
            assert given[name] == value, name
    translation = translate(recipe, fields_of(recipe), given)
    assert translation.refused == {}
    assert null_without_a_meaning(recipe, translation.ours) == set()


def null_without_a_meaning(recipe, fields):
    """The fields that would be null and take no null; of the lengths left out it means no limit."""
    optional = {
        field.name for field in dataclasses.fields(settings_of(recipe)) if field.default is None
    }
    needed = {"model", "teacher.model", "max_length", "max_prompt_length"}
    return {name for name, value in fields.items() if value is None} - optional - needed


def test_every_field_that_the_table_names_exists():
    everywhere = set().union(*(fields_of(recipe) for recipe in OURS if recipe != "demo"))
    for recipe in (*table()["recipes"], "reward"):
        for kind, entry in entries(recipe).values():
            field = {"renamed": lambda e: e, "values": lambda e: e["field"]}.get(
                kind, lambda e: "model"
            )(entry)
            assert field.partition(".")[0] in everywhere, field
    for recipe, part in table()["recipes"].items():
        for field in (
            *part.get("renamed", {}).values(),
            *(v["field"] for v in part.get("values", {}).values()),
        ):
            assert field in fields_of(recipe)
    assert {"defaults", "silent", "recipes"} <= table().keys()
    shipped = {
        reward for entry in table()["rewards"].values() for reward in entry if ":" not in reward
    }
    assert shipped <= SHIPPED.keys()


@pytest.mark.parametrize("recipe", [name for name in OURS if name != "demo"])
def test_a_field_of_ours_is_never_refused_as_a_name_of_trl(recipe):
    shared = {name: entry for name, entry in entries(recipe).items() if name in fields_of(recipe)}
    assert {"learning_rate", "seed", "dtype", "report_to"} <= shared.keys()
    assert {
        name for name, entry in shared.items() if entry != ("renamed", name) and entry[0] != "rules"
    } == set()


def test_names_are_in_the_table_once():
    for part in (table(), *table()["recipes"].values()):
        names = [
            *part.get("same", ()),
            *part.get("renamed", {}),
            *part.get("values", {}),
            *(name for names in part.get("ignored", {}).values() for name in names),
            *(name for names in part.get("refused", {}).values() for name in names),
            *{name for names in part.get("rules", {}).values() for name in names},
        ]
        assert [name for name in names if names.count(name) > 1] == []


LORA = {"lora.r": 16, "lora.alpha": 32.0, "lora.dropout": 0.05}
_SMOOTHED = {"loss": {"label_smoothed_nll": {"label_smoothing": 0.1}}}


@pytest.mark.parametrize(
    ("recipe", "given", "expected"),
    [
        ("dpo", TWO_DEVICES, {"batch_size": 24}),
        ("dpo", {"gradient_accumulation_steps": 2}, {"batch_size": 16}),
        (
            "grpo",
            {**TWO_DEVICES, "num_generations": 6},
            {"group_size": 6, "prompts_per_rollout": 4},
        ),
        (
            "grpo",
            {**TWO_DEVICES, "num_generations": 6, "steps_per_generation": 6},
            {"group_size": 6, "prompts_per_rollout": 8, "minibatches": 2},
        ),
        (
            "grpo",
            {"generation_batch_size": 32},
            {"group_size": 8, "prompts_per_rollout": 4, "minibatches": 4},
        ),
        ("rloo", {"num_generations": 4, "num_iterations": 3}, None),
        (
            "sft",
            {"push_to_hub": True, "output_dir": "runs/mine", "hub_private_repo": True},
            {
                "output": "runs/mine",
                "hub.id": "mine",
                "hub.private": True,
                "hub.every": "checkpoint",
            },
        ),
        (
            "sft",
            {
                "push_to_hub": True,
                "hub_model_id": "org/mine",
                "hub_revision": "v1",
                "hub_strategy": "end",
                "hub_token": "<HUB_TOKEN>",
            },
            {"hub.id": "org/mine", "hub.revision": "v1", "hub.every": "end"},
        ),
        (
            "sft",
            {
                "push_to_hub": True,
                "push_to_hub_model_id": "mine",
                "push_to_hub_organization": "org",
                "hub_model_revision": "main",
            },
            {"hub.id": "org/mine", "hub.every": "checkpoint"},
        ),
        ("sft", {"push_to_hub": False, "hub_model_id": "org/mine", "hub_token": "hf_x"}, {}),
        ("sft", {"max_steps": -1, "num_train_epochs": 2.0}, {"epochs": 2}),
        ("sft", {"max_steps": 70, "num_train_epochs": 2}, {"steps": 70}),
        ("sft", {"warmup_ratio": 0.1}, {"warmup": 0.1}),
        ("sft", {"warmup_ratio": 0.1, "warmup_steps": 20}, {"warmup": 20.0}),
        ("sft", {"bf16": True, "torch_dtype": None}, {"dtype": "bfloat16"}),
        ("sft", {"bf16": False}, {"dtype": "float32"}),
        ("sft", {"torch_dtype": "auto"}, {"dtype": "bfloat16"}),
        ("sft", {"torch_dtype": "bf16"}, {"dtype": "bfloat16", "weights_dtype": "bfloat16"}),
        ("sft", {"dtype": "float32"}, {"dtype": "float32"}),
        (
            "sft",
            {"torch_dtype": "bfloat16", "bf16": False},
            {"dtype": "bfloat16", "weights_dtype": "bfloat16"},
        ),
        ("sft", {"dtype": "bfloat16", "use_peft": True}, {"dtype": "bfloat16", **LORA}),
        ("sft", {"lr_scheduler_type": "inverse_sqrt"}, {"schedule": "inverse_sqrt"}),
        (
            "sft",
            {"lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
            {"schedule_kwargs": {"min_lr_rate": 0.1}},
        ),
        ("sft", {"lr_scheduler_kwargs": None}, {}),
        (
            "sft",
            {
                "lr_scheduler_type": "constant_with_warmup",
                "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
            },
            {"schedule": "constant"},
        ),
        ("sft", {"optim": "adamw_torch"}, {"optimizer": "adamw"}),
        ("sft", {"optim": "adamw_bnb_8bit"}, {"optimizer": "adamw_8bit"}),
        (
            "sft",
            {"optim": "lion_8bit"},
            {"optimizer": "lion_8bit", "optimizer_kwargs": {"betas": [0.9, 0.999]}},
        ),
        (
            "sft",
            {"optim": "sgd", "optim_args": "momentum=9e-1, nesterov=true", "adam_beta2": 0.9},
            None,
        ),
        (
            "sft",
            {"adam_beta1": 0.0, "adam_epsilon": "1e-6"},
            {"optimizer_kwargs": {"betas": [0.0, 0.999], "eps": 1e-6}},
        ),
        ("sft", {"adam_beta1": 0.9, "adam_epsilon": 1e-8}, {}),
        (
            "sft",
            {
                "use_peft": True,
                "use_rslora": True,
                "use_dora": True,
                "lora_modules_to_save": "lm_head",
            },
            {
                **LORA,
                "lora.use_rslora": True,
                "lora.use_dora": True,
                "lora.modules_to_save": ["lm_head"],
            },
        ),
        (
            "sft",
            {"use_peft": True, "lora_target_parameters": ["experts.w"]},
            {**LORA, "lora.target_parameters": ["experts.w"]},
        ),
        ("sft", {"lr_scheduler_type": "constant_with_warmup"}, {"schedule": "constant"}),
        (
            "sft",
            {"dataset_name": "a/b", "dataset_config": "c"},
            {"data": {"path": "a/b", "name": "c"}},
        ),
        (
            "sft",
            {"dataset_name": "a/b", "dataset_train_split": "train"},
            {"data": {"path": "a/b", "split": "train"}},
        ),
        (
            "sft",
            {"dataset_name": "a", "dataset_config": "c", "dataset_train_split": "train_sft"},
            {"data": {"path": "a", "name": "c", "split": "train_sft"}},
        ),
        (
            "sft",
            {"dataset_name": "a", "eval_strategy": "steps"},
            {"data": "a", "eval_data": {"split": "test"}, "eval_every": 10},
        ),
        (
            "sft",
            {
                "dataset_name": "a",
                "eval_strategy": "steps",
                "eval_steps": 5,
                "dataset_test_split": "test_sft",
            },
            {"data": "a", "eval_data": {"split": "test_sft"}, "eval_every": 5},
        ),
        ("sft", {"dataset_name": "a", "dataset_test_split": "test_sft"}, {"data": "a"}),
        ("sft", {"dataset_name": "a", "dataset_streaming": True}, {"data": "a", "streaming": True}),
        ("sft", {"datasets": [{"path": "a"}], "streaming": True}, {"data": "a", "streaming": True}),
        (
            "sft",
            {"dataset_name": "a", "dataset_text_field": "content"},
            {"data": {"path": "a", "columns": {"content": "text"}}},
        ),
        (
            "grpo",
            {"dataset_name": "a", "dataset_prompt_column": "problem", "system_prompt": "Think."},
            {"data": {"path": "a", "columns": {"problem": "prompt"}, "system_prompt": "Think."}},
        ),
        (
            "grpo",
            {"dataset_name": "a", "dataset_prompt_column": "prompt"},
            {"data": {"path": "a", "system_prompt": ""}},
        ),
        (
            "sft",
            {
                "datasets": [
                    {"path": "a", "fraction": 0.3, "columns": ["text"]},
                    {"path": "b", "fraction": 0.7},
                ],
                "test_split_size": 0.1,
            },
            {
                "data": [
                    {"path": "a", "fraction": 0.3, "columns": ["text"]},
                    {"path": "b", "fraction": 0.7},
                ],
                "eval_data": 0.1,
            },
        ),
        (
            "sft",
            {
                "dataset_mixture": {
                    "datasets": [
                        {"id": "a", "config": "c", "split": "s", "weight": 1.0},
                        {"id": "b", "weight": 0.02},
                    ],
                    "test_split_size": 1000.0,
                }
            },
            {
                "data": [
                    {"path": "a", "name": "c", "split": "s", "weight": 1.0},
                    {"path": "b", "weight": 0.02},
                ],
                "eval_data": 1000,
            },
        ),
        (
            "dpo",
            {
                "dataset_mixer": {"a": 1.0, "b": 0.5},
                "dataset_splits": ["train_prefs", "test_prefs"],
            },
            {
                "data": [
                    {"path": "a", "split": "train_prefs", "weight": 1.0},
                    {"path": "b", "split": "train_prefs", "weight": 0.5},
                ],
                "eval_data": [
                    {"path": "a", "split": "test_prefs", "weight": 1},
                    {"path": "b", "split": "test_prefs", "weight": 1},
                ],
            },
        ),
        ("sft", {"eval_strategy": "steps", "eval_steps": 7}, {"eval_every": 7}),
        ("sft", {"evaluation_strategy": "steps", "logging_steps": 5}, {"eval_every": 5}),
        ("sft", {"eval_strategy": False}, {}),
        ("sft", {"eval_strategy": "epoch"}, {"eval_every": "epoch"}),
        ("sft", {"save_strategy": "epoch"}, {"save_every": "epoch"}),
        ("sft", {"eval_strategy": "steps", "eval_steps": 0.2}, {"eval_every": 0.2}),
        (
            "sft",
            {"load_best_model_at_end": True},
            {"keep_best": "eval/loss", "load_best_model_at_end": True},
        ),
        ("sft", {"load_best_model_at_end": False, "metric_for_best_model": "loss"}, {}),
        (
            "dpo",
            {"load_best_model_at_end": True, "metric_for_best_model": "eval_rewards/accuracies"},
            {"keep_best": "max:eval/rewards/accuracies", "load_best_model_at_end": True},
        ),
        (
            "dpo",
            {
                "load_best_model_at_end": True,
                "metric_for_best_model": "rewards/margins",
                "greater_is_better": False,
            },
            {"keep_best": "eval/rewards/margins", "load_best_model_at_end": True},
        ),
        (
            "sft",
            {"save_strategy": "best", "metric_for_best_model": "eval_loss"},
            {"keep_best": "eval/loss"},
        ),
        ("sft", {"tf32": True}, {"tf32": True}),
        ("sft", {"model_revision": "v2"}, {"model_revision": "v2"}),
        ("sft", {"preprocessing_num_workers": 4}, {"dataset_num_proc": 4}),
        ("sft", {"use_flash_attention_2": True}, {"attention": "flash_attention_2"}),
        ("sft", {"use_flash_attention_2": False}, {}),
        ("dpo", {"rpo_alpha": 0.5}, {"loss": {"dpo": 1.0, "nll": 0.5}}),
        (
            "dpo",
            {"rpo_alpha": 1, "loss_type": ["sigmoid", "sft"], "loss_weights": [0.8, 0.2]},
            {"loss": {"dpo": 0.8, "nll": 1.2}},
        ),
        (
            "dpo",
            {"rpo_alpha": None, "loss_type": "ipo"},
            {"loss": "ipo", "logprob_reduction": "mean"},
        ),
        ("dpo", {"mixed_precision": "bf16", "bf16": False}, {"dtype": "bfloat16"}),
        ("dpo", {"mixed_precision": "no"}, {}),
        (
            "grpo",
            {
                "generation_kwargs": {"stop": ["a", "b"], "min_p": 0.1},
                "vllm_importance_sampling_correction": True,
            },
            {"stop": ["a", "b"], "min_p": 0.1},
        ),
        ("dpo", {"mixed_precision": "fp16"}, {"dtype": "float16"}),
        ("dpo", {"mixed_precision": "fp16", "bf16": False}, {"dtype": "float16"}),
        ("dpo", {"mixed_precision": "fp16", "bf16": True}, {"dtype": "bfloat16"}),
        ("dpo", {"mixed_precision": "bf16", "fp16": True}, {"dtype": "float16"}),
        ("sft", {"fp16": True, "bf16": False}, {"dtype": "float16"}),
        ("sft", {"fp16": True, "torch_dtype": "float16"}, {"dtype": "float16"}),
        ("sft", {"torch_dtype": "float16"}, {"dtype": "float16"}),
        ("sft", {"torch_dtype": "float16", "bf16": True}, {"dtype": "bfloat16"}),
        (
            "sft",
            {"save_strategy": "steps", "save_steps": 0.25, "max_steps": 10},
            {"steps": 10, "save_every": 0.25},
        ),
        ("sft", {"save_strategy": "steps"}, {"save_every": 500}),
        ("sft", {"save_strategy": "no", "save_steps": 5}, {}),
        ("sft", {"use_peft": True}, LORA),
        ("sft", {"use_peft": True, "lora_r": 4, "lora_target_modules": ["all-linear"]}, None),
        ("sft", {"lora_r": 4}, {}),
        ("sft", {"use_peft": True, "load_in_4bit": True}, {**LORA, "quantize": "4bit"}),
        (
            "sft",
            {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "use_bnb_nested_quant": True},
            {
                "quantize": "4bit",
                "quantize_kwargs": {
                    "bnb_4bit_quant_type": "fp4",
                    "bnb_4bit_use_double_quant": True,
                },
            },
        ),
        ("sft", {"neftune_noise_alpha": 5}, {"neftune_noise_alpha": 5.0}),
        ("sft", {"activation_offloading": True}, {"gradient_checkpointing": "offload"}),
        (
            "dpo",
            {"sync_ref_model": True},
            {"ref_model_sync_steps": 512, "ref_model_mixup_alpha": 0.6},
        ),
        ("dpo", {"sync_ref_model": False, "ref_model_sync_steps": 64}, {}),
        ("sft", {"load_in_8bit": False, "use_bnb_nested_quant": True}, {}),
        ("sft", {"report_to": "none"}, {"report_to": "none"}),
        ("sft", {"report_to": ["wandb", "tensorboard"]}, {"report_to": ["wandb", "tensorboard"]}),
        ("sft", {"resume_from_checkpoint": True}, {"resume": True}),
        (
            "sft",
            {"max_seq_length": 99, "truncation_mode": "keep_end"},
            {"max_length": 99, "truncation": "keep_end"},
        ),
        (
            "sft",
            {"assistant_only_loss": True, "completion_only_loss": True},
            {"train_on": "assistant"},
        ),
        ("sft", {"completion_only_loss": False}, {"train_on": "all"}),
        ("sft", {"loss_type": "chunked_nll"}, {"loss": "nll"}),
        ("sft", {"loss_type": "dft"}, {"loss": "dft"}),
        ("sft", {"label_smoothing_factor": 0.1}, _SMOOTHED),
        ("dpo", {"loss_type": "sigmoid"}, {"loss": "dpo"}),
        ("dpo", {"loss_type": ["sigmoid_norm"]}, {"loss": "dpo", "logprob_reduction": "mean"}),
        ("dpo", {"loss_type": "ipo"}, {"loss": "ipo", "logprob_reduction": "mean"}),
        (
            "dpo",
            {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1]},
            {"loss": {"dpo": 0.8, "bco_pair": 0.2, "nll": 1.0}},
        ),
        (
            "dpo",
            {"loss_type": ["discopop"], "discopop_tau": 0.1},
            {"loss": "discopop", "loss_kwargs": {"tau": 0.1}},
        ),
        (
            "dpo",
            {"f_divergence_type": "js_divergence", "use_weighting": True},
            {"divergence": "js", "pair_weight": "wpo"},
        ),
        (
            "dpo",
            {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.25},
            {"divergence": "alpha", "divergence_alpha": 0.75},
        ),
        (
            "dpo",
            {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 1.0},
            {"divergence": "reverse_kl"},
        ),
        (
            "dpo",
            {"f_divergence_type": "forward_kl", "f_alpha_divergence_coef": 1.0},
            {"divergence": "forward_kl"},
        ),
        ("dpo", {"loss_type": ["aot"]}, {"loss": "aot", "micro_tokens": None}),
        ("dpo", {"precompute_ref_log_probs": True}, {"reference": "precompute"}),
        (
            "kto",
            {"loss_type": "apo_zero_unpaired", "beta": 0.2},
            {"loss": "apo_zero_unpaired", "beta": 0.2},
        ),
        ("orpo", {"beta": 0.05}, {"odds_ratio": 0.05}),
        (
            "cpo",
            {"loss_type": "simpo", "simpo_gamma": 1.0, "cpo_alpha": 0.0},
            {"loss": "simpo", "gamma": 1.0, "nll": 0.0},
        ),
        ("cpo", {"loss_type": "simpo", "alpha": 0.3}, {"loss": "alpha_po", "alpha": 0.3}),
        ("cpo", {"tpo_alpha": 0.5}, {"loss": "cpo", "nll": 0.5, "nll_of": "reference"}),
        ("cpo", {"tpo_alpha": 0.0}, {"loss": "cpo", "nll": 0.0}),
        (
            "cpo",
            {"loss_type": "tpo-l", "tpo_l_gamma": 0.4},
            {"loss": "simpo", "nll": 1.0, "nll_of": "reference", "gamma": 0.4},
        ),
        ("reward", {"center_rewards_coefficient": 0.01}, {"centering": 0.01}),
        ("grpo", {"loss_type": "dapo"}, {"variant": "grpo", "weighting": "token_mean"}),
        ("grpo", {"loss_type": "dr_grpo", "scale_rewards": False}, None),
        (
            "grpo",
            {"loss_type": "cispo", "epsilon_high": 5.0},
            {"variant": "cispo", "loss_kwargs": {"clip_high": 4.0}},
        ),
        (
            "grpo",
            {"loss_type": "sapo", "sapo_temperature_neg": 2},
            {"variant": "sapo", "loss_kwargs": {"tau_neg": 2.0}},
        ),
        (
            "grpo",
            {"loss_type": "vespo", "vespo_k_pos": 1},
            {"variant": "vespo", "loss_kwargs": {"k_pos": 1.0}},
        ),
        (
            "grpo",
            {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.003},
            {"variant": "gspo", "loss_kwargs": {"clip_low": 0.003, "clip_high": 0.003}},
        ),
        (
            "grpo",
            {"loss_type": "dr_grpo", "importance_sampling_level": "sequence"},
            {
                "variant": "gspo_token",
                "weighting": "fixed_length",
                "loss_kwargs": {"clip_low": 0.2, "clip_high": 0.2},
            },
        ),
        ("grpo", {"epsilon_high": 0.28}, {"loss_kwargs": {"clip_low": 0.2, "clip_high": 0.28}}),
        ("grpo", {"delta": 1.5}, {"loss_kwargs": {"ratio_cap": 1.5}}),
        (
            "grpo",
            {"entropy_coef": 0.01},
            {
                "loss": {
                    "clipped_surrogate": 1.0,
                    "entropy_bonus": {"coefficient": 0.01, "weighting": "token_mean"},
                }
            },
        ),
        (
            "grpo",
            {"max_completion_length": 64, "mask_truncated_completions": True},
            {"max_tokens": 64, "mask_truncated": True},
        ),
        (
            "grpo",
            {"multi_objective_aggregation": "normalize_then_sum"},
            {"reward_aggregation": "normalize"},
        ),
        ("grpo", {"max_prompt_length": 99}, {"max_prompt_length": 99, "truncation": "keep_end"}),
        ("grpo", {"max_prompt_length": None}, {"max_prompt_length": None}),
        (
            "grpo",
            {
                "use_vllm": True,
                "vllm_mode": "server",
                "vllm_importance_sampling_mode": "token_truncate",
            },
            {"source": "vllm", "correction": "tis", "correction_low": 0.0, "correction_high": 3.0},
        ),
        (
            "grpo",
            {"top_entropy_quantile": 0.2, "off_policy_mask_threshold": 0.5},
            {"masks": {"high_entropy": {"quantile": 0.2}, "off_policy": {"threshold": 0.5}}},
        ),
        ("grpo", {"top_entropy_quantile": 1.0}, {}),
        (
            "grpo",
            {"use_vllm": True, "vllm_importance_sampling_clip_min": 0.1},
            IMPORTANCE | {"correction_low": 0.1},
        ),
        (
            "grpo",
            {"use_vllm": True, "vllm_importance_sampling_clip_max": None},
            IMPORTANCE | {"correction_high": inf},
        ),
        (
            "grpo",
            {
                "use_vllm": True,
                "vllm_importance_sampling_clip_max": 4,
                "vllm_importance_sampling_cap": 2,
            },
            IMPORTANCE | {"correction_high": 2.0},
        ),
        (
            "grpo",
            {
                "use_vllm": True,
                "vllm_max_model_length": 512,
                "vllm_importance_sampling_correction": False,
            },
            {"source": "vllm_engine", "vllm.options": {"max_model_len": 512}},
        ),
        (
            "grpo",
            {"reward_funcs": ["accuracy_reward", "mine.scores.short"], "reward_weights": [1, 0.5]},
            {"rewards": {"math": {"column": "solution", "weight": 1.0}, "mine.scores:short": 0.5}},
        ),
        (
            "rloo",
            {"reward_model_name_or_path": "a/b", "normalize_advantages": True},
            {"rewards": {"reward_model": {"model": "a/b", "weight": 1.0}}, "scale": "batch"},
        ),
        ("rloo", {"epsilon": 0.1}, {"loss_kwargs": {"clip_low": 0.1, "clip_high": 0.1}}),
        (
            "ppo",
            {"vf_coef": 0.2, "kl_coef": 0.1, "response_length": 9},
            {"value_coefficient": 0.2, "beta": 0.1, "max_tokens": 9},
        ),
        ("prm", {"step_separator": "\n\n"}, {"separator": "\n\n"}),
        (
            "ppo",
            {"total_episodes": 1000, "per_device_train_batch_size": 64, "num_mini_batches": 2},
            {"prompts_per_rollout": 64, "minibatches": 2, "steps": 128},
        ),
        (
            "ppo",
            {"model_name_or_path": "a", "sft_model_path": "b", "stop_token": "eos"},
            {"model": "b"},
        ),
        ("ppo", {"model_name_or_path": "a"}, {"model": "a"}),
        (
            "ppo",
            {"reward_model_path": "a"},
            {"rewards": {"reward_model": {"model": "a", "weight": 1.0}}, "value_model": "a"},
        ),
        ("distill", {"beta": 0.1}, {"teacher.divergence": "jsd", "teacher.beta": 0.1}),
        ("distill", {"beta": 0}, {"teacher.divergence": "forward_kl"}),
        ("distill", {"temperature": 0.9}, {"temperature": 0.9, "teacher.temperature": 0.9}),
        ("ppo", {"cliprange": 0.3}, {"loss_kwargs": {"clip_low": 0.3, "clip_high": 0.3}}),
        ("kto", {"train_sampling_strategy": "sequential"}, {"shuffle": False}),
        ("dpo", {"ld_alpha": None, "max_length": None}, {"max_length": None}),
        ("reward", {"center_rewards_coefficient": None}, {}),
        ("online_dpo", {"missing_eos_penalty": None}, {}),
        ("rloo", {"chat_template_kwargs": None, "top_k": None}, {}),
        (
            "dpo",
            {"save_strategy": "steps", "save_steps": 50, "save_total_limit": 3},
            {"save_every": 50, "keep": 3},
        ),
        ("dpo", {"save_total_limit": None}, {}),
        ("rloo", {"shuffle_dataset": False}, {"shuffle": False}),
        ("sft", {"lr_scheduler_type": "constant", "warmup_steps": 20}, {"schedule": "constant"}),
        (
            "sft",
            {"lr_scheduler_type": "cosine", "warmup_steps": 2},
            {"schedule": "cosine", "warmup": 2.0},
        ),
        (
            "sft",
            {"gradient_checkpointing": True, "activation_offloading": True},
            {"gradient_checkpointing": "offload"},
        ),
        (
            "sft",
            {"activation_offloading": True, "gradient_checkpointing": True},
            {"gradient_checkpointing": "offload"},
        ),
        ("dpo", {"activation_checkpointing": True}, {"gradient_checkpointing": True}),
        (
            "dpo",
            {"activation_checkpointing": False, "gradient_checkpointing": True},
            {"gradient_checkpointing": False},
        ),
        (
            "dpo",
            {"activation_checkpointing": None, "gradient_checkpointing": True},
            {"gradient_checkpointing": True},
        ),
        ("sft", {"loss_type": "chunked_nll", "label_smoothing_factor": 0.1}, _SMOOTHED),
        ("sft", {"loss_type": "dft", "label_smoothing_factor": 0.1}, {"loss": "dft"}),
        (
            "cpo",
            {"loss_type": "alphapo", "alpha": 0.3},
            {"loss": "alpha_po", "alpha": 0.3, "nll": 0.0},
        ),
        (
            "dpo",
            {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0},
            {"divergence": "forward_kl"},
        ),
        ("distill", {"temperature": 0.9, "lmbda": 1}, None),
    ],
    ids=str,
)
def test_a_value_becomes_ours(recipe, given, expected, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    special = {
        "rloo": {"group_size": 4, "prompts_per_rollout": 2, "epochs_per_rollout": 3},
        "sft": {**LORA, "lora.r": 4, "lora.target_modules": "all-linear"},
        "sgd": {"optimizer": "sgd", "optimizer_kwargs": {"momentum": 0.9, "nesterov": True}},
        "grpo": {"variant": "grpo", "weighting": "fixed_length", "scale": "none"},
        "distill": {"temperature": 0.9, "on_policy": 1},
    }
    assert ours(recipe, **given) == (
        special[given.get("optim", recipe)] if expected is None else expected
    )


@pytest.mark.parametrize(
    ("recipe", "given", "words"),
    [
        ("sft", {"fp16": True, "bf16": True}, "fp16: bf16 is true as well.*give dtype"),
        ("sft", {"torch_dtype": "int8"}, "torch_dtype: there is no int8"),
        ("sft", {"num_train_epochs": 0.5}, "num_train_epochs: 0.5 is a part.*steps"),
        (
            "sft",
            {"push_to_hub": True, "hub_token": "hf_secret"},
            "^hub_token: a token in a file or a flag is read by others; set HF_TOKEN, or log in",
        ),
        (
            "sft",
            {"push_to_hub_revision": True},
            "push_to_hub_revision: checkpoints get no branches",
        ),
        (
            "sft",
            {"push_to_hub": True, "hub_strategy": "each_save"},
            "hub_strategy: there is no 'each_save', did you mean 'every_save'",
        ),
        (
            "sft",
            {"mixed_precision": "fp8"},
            "mixed_precision: there is no fp8; there are bfloat16, float16 and float32",
        ),
        ("sft", {"lr_scheduler_type": "cosinus"}, "'cosinus' is none of linear, cosine"),
        (
            "sft",
            {"optim": "adamw_8bits"},
            "optim: there is no 'adamw_8bits', did you mean 'adamw_8bit'",
        ),
        (
            "sft",
            {"optim": "galore_adamw"},
            "optim: there is no 'galore_adamw'.*give optimizer instead",
        ),
        ("sft", {"adam_beta1": "x"}, "adam_beta1: 'x'"),
        (
            "sft",
            {"optim_target_modules": ["q_proj"]},
            "optim_target_modules: the low-rank optimizers",
        ),
        ("sft", {"loss_type": "nnl"}, "loss_type: 'nnl' is none of"),
        ("sft", {"beta": 0.1}, "beta: this recipe has no beta"),
        ("sft", {"max_seq_length": 9, "max_length": 8}, "max_length.*given twice"),
        (
            "dpo",
            {"loss_type": "sigmoidd"},
            "loss_type: there is no 'sigmoidd', did you mean 'sigmoid'",
        ),
        ("dpo", {"loss_type": ["sigmoid", "ipo"]}, "loss_type: of sigmoid, ipo some"),
        (
            "dpo",
            {"loss_type": ["sigmoid"], "loss_weights": [1, 2]},
            "loss_weights: there are 2 for 1",
        ),
        ("dpo", {"f_divergence_type": "tv"}, "f_divergence_type: 'tv' is none of reverse_kl"),
        (
            "dpo",
            {"loss_type": "ipo", "f_divergence_type": "forward_kl"},
            "f_divergence_type: of ipo: TRL's is of sums",
        ),
        ("cpo", {"loss_type": "hinge"}, "loss_type: no loss here is hinge"),
        ("grpo", {"num_generations": 7}, "num_generations: 8 completions.*no multiple of 7"),
        (
            "grpo",
            {"gradient_accumulation_steps": 2, "steps_per_generation": 3},
            "steps_per_generation: 24.*16 of a step",
        ),
        ("grpo", {"loss_type": "luspo"}, "loss_type: there is no 'luspo'"),
        ("grpo", {"loss_type": "cispo"}, "loss_type: cispo's epsilon_high"),
        (
            "grpo",
            {"loss_type": "sapo", "importance_sampling_level": "sequence"},
            "importance_sampling_level: 'sequence' goes with loss_type grpo, bnpo, dapo, dr_grpo, not",
        ),
        ("grpo", {"loss_type": "sapo", "entropy_coef": 0.1}, "entropy_coef: of sapo"),
        (
            "grpo",
            {"use_vllm": True, "vllm_importance_sampling_mode": "token"},
            "vllm_importance_sampling_mode",
        ),
        ("grpo", {"reward_funcs": ["code"]}, "reward_funcs: no reward 'code'; there are accuracy"),
        (
            "grpo",
            {"reward_funcs": ["format"], "reward_weights": [1, 2]},
            "reward_weights: there are 2 for 1",
        ),
        (
            "grpo",
            {"generation_kwargs": {"frequency_penalty": 0.1}},
            "generation_kwargs: there is no setting for 'frequency_penalty'",
        ),
        (
            "sft",
            {"per_device_train_batch_size": "many"},
            "per_device_train_batch_size: 'many': invalid literal",
        ),
        (
            "grpo",
            {"per_device_train_batch_size": 0},
            "per_device_train_batch_size: 0: wanted whole numbers > 0",
        ),
        ("sft", {"eval_strategy": "step"}, "eval_strategy: 'step' is none of no, steps, epoch"),
        ("sft", {"save_strategy": "epochs"}, "save_strategy: 'epochs' is none of no, steps, epoch"),
        ("sft", {"dtype": "bfloat"}, "dtype: there is no bfloat; there are"),
        (
            "sft",
            {"train_sampling_strategy": "group_by_length"},
            "'group_by_length' is none of random, sequential",
        ),
        ("ppo", {"stop_token_id": 3}, "stop_token_id: completions end at the tokenizer's EOS"),
        ("distill", {"seq_kd": True}, "seq_kd: no recipe offers it"),
        ("grpo", {"reward_clip_range": 5.0}, "reward_clip_range: no recipe offers it"),
        (
            "online_dpo",
            {"max_length": 300},
            "limits the prompt, and max_tokens the completion; give these instead",
        ),
    ],
    ids=str,
)
def test_a_value_without_an_equivalent_is_refused_by_name(recipe, given, words, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    refused = translate(recipe, fields_of(recipe), given).refused
    assert len(refused) == 1
    assert re.search(words, *refused.values())


@pytest.mark.parametrize(
    ("recipe", "given", "told"),
    [
        ("dpo", {"loss_type": ["sigmoid", "sft"]}, "sft: tokens averaged over the whole step"),
        ("dpo", {"loss_type": "aot_unpaired"}, "aot_unpaired: pairs ranked over the whole step"),
        ("grpo", {"loss_type": "bnpo"}, "bnpo: tokens averaged over the whole step"),
        ("cpo", {}, "nll: tokens averaged over the whole step"),
        ("orpo", {}, "odds_ratio: tokens of its nll averaged over the whole step"),
    ],
)
def test_what_trl_takes_over_each_micro_batch_is_told_where_there_are_several(
    recipe, given, told, monkeypatch
):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    notes = translate(
        recipe, fields_of(recipe), {**given, **TWO_DEVICES}, elsewhere={"num_generations": "2"}
    ).notes
    assert f"{told}; TRL's, over each of its 6 micro-batches" in notes
    alone = {**given, "per_device_train_batch_size": 4}
    notes = translate(recipe, fields_of(recipe), alone, elsewhere={"num_generations": "2"}).notes
    assert not any(told in note for note in notes)


def test_micro_tokens_that_are_set_hold_for_losses_of_ranks():
    translation = translate(
        "dpo", fields_of("dpo"), {"loss_type": ["aot"]}, elsewhere={"micro_tokens": 512}
    )
    assert translation.ours == {"loss": "aot"}


@pytest.mark.parametrize(
    ("recipe", "given", "told"),
    [
        ("dpo", {"loss_type": "ipo"}, "logprob_reduction: logps and rewards in the log are"),
        (
            "dpo",
            {"f_divergence_type": "js_divergence"},
            "f_divergence_type: unless it is reverse_kl, rewards in the",
        ),
        (
            "dpo",
            {"f_alpha_divergence_coef": 0.5},
            "f_alpha_divergence_coef: divergence_alpha is 1 minus it",
        ),
        (
            "dpo",
            {"truncation_mode": "keep_end"},
            "truncation_mode: keep_end leaves both completions of a pair the",
        ),
        (
            "sft",
            {"lr_scheduler_type": "constant", "warmup_ratio": 0.1},
            "warmup: none; transformers' constant",
        ),
        (
            "sft",
            {"dtype": "float32"},
            "dtype: float32 throughout; TRL's autocasts to bfloat16 unless bf16 is false",
        ),
        (
            "online_dpo",
            {"gradient_accumulation_steps": 2},
            "gradient_accumulation_steps: the gradient is the mean",
        ),
        ("online_dpo", {"temperature": 0.9}, "temperature: of the log-probs in the loss, too"),
        ("distill", {"temperature": 0.9}, "temperature: of the sampler; of both distributions too"),
        (
            "sft",
            {"num_train_epochs": 2},
            "duration: the last batch of an epoch takes rows of the next one",
        ),
        (
            "dpo",
            {"max_steps": 9},
            "duration: the last batch of an epoch takes rows of the next one",
        ),
        (
            "dpo",
            {"eval_strategy": "steps"},
            "eval_strategy: means are over all held-out tokens, pairs or completions",
        ),
        (
            "sft",
            {"neftune_noise_alpha": 5},
            "neftune_noise_alpha: scaled by the length of each sequence",
        ),
        (
            "sft",
            {"completion_only_loss": True},
            "completion_only_loss: of a completion of several messages only the",
        ),
        (
            "sft",
            {"assistant_only_loss": True},
            "assistant_only_loss: of a prompt and completion only the completion",
        ),
        (
            "online_dpo",
            {"max_length": 512},
            "max_length: max_prompt_length limits the prompt, and max_tokens the",
        ),
        (
            "grpo",
            {"steps_per_generation": 2},
            "steps_per_generation: a step takes whole groups, drawn anew",
        ),
        (
            "grpo",
            {"use_bias_correction_kl": True},
            "use_bias_correction_kl: by the ratio of each token",
        ),
        (
            "rloo",
            {"mask_truncated_completions": True},
            "mask_truncated_completions: what was cut counts in no mean",
        ),
        (
            "sft",
            {"packing_strategy": "wrapped"},
            "packing_strategy: a row longer than max_length is cut",
        ),
        ("sft", {"load_in_4bit": True, "use_peft": True}, "load_in_4bit: adapters stay float32"),
        ("kto", {"loss_type": "bco"}, "loss_type: bco weighs no completion by its prompt"),
        (
            "sft",
            {"save_steps": 50},
            "keep: the 2 newest checkpoints; TRL keeps all without save_total_limit",
        ),
    ],
)
def test_what_a_value_does_otherwise_is_told(recipe, given, told):
    assert any(note.startswith(told) for note in translate(recipe, fields_of(recipe), given).notes)


def test_evaluations_that_are_off_are_not_told_of():
    assert translate("dpo", fields_of("dpo"), {"eval_strategy": "no"}).notes == []


@pytest.mark.parametrize(
    ("recipe", "told"),
    [
        ("reward", "truncation: keep_start, a pair beyond max_length is cut; TRL leaves it out"),
        ("orpo", "rewards: in the log they are mean log-probs"),
        ("cpo", "logps: in the log they are sums over tokens"),
    ],
)
def test_what_no_value_says_is_told(recipe, told):
    silent = read(recipe, settings_of(recipe), ["--per_device_train_batch_size", "2"])[2].silent
    assert any(each.startswith(told) for each in silent)


def test_the_batch_counts_the_ranks_of_this_run(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert ours("dpo", per_device_train_batch_size=2) == {"batch_size": 16}


@pytest.mark.parametrize(
    "words",
    [
        ["--parallel.tp_size", "2"],
        ["--parallel.tp_size=2"],
        ["--parallel", "{tp_size: 2}"],
        ["--parallel.cp_size", "2"],
    ],
    ids=str,
)
def test_the_batch_counts_ranks_that_compute_the_same_rows_once(words, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    (file := tmp_path / "trl.yaml").write_text(
        "per_device_train_batch_size: 2\ngradient_accumulation_steps: 3\n"
    )
    fields, left, out = read("dpo", settings_of("dpo"), ["--config", str(file), *words])
    assert (fields["batch_size"], left, out.refused) == (2 * 3 * 4, words, {})
    file.write_text(f"{file.read_text()}parallel: {{tp_size: 4}}\n")
    assert read("dpo", settings_of("dpo"), ["--config", str(file)])[0]["batch_size"] == 2 * 3 * 2


@pytest.mark.parametrize("value", [None, False, "", [], {}, 0])
def test_a_refused_name_that_is_off_changes_nothing(value):
    assert ours("sft", deepspeed=value, neftune_noise_alpha=value, fsdp=value) == {}
    assert ours("sft", model_revision=None, adam_beta1=None) == {}


def named_losses(trainer):
    """The values of loss_type that the source of a trainer of the installed TRL tells apart."""
    spec = importlib.util.find_spec("trl")
    if spec is None:
        pytest.skip("TRL is not installed")
    source = (Path(spec.origin).parent / f"trainer/{trainer}_trainer.py").read_text()
    tests = re.findall(r"loss_type (?:==|in) (\".*?\"|\[.*?\])", source)
    return {name for test in tests for name in re.findall(r"\"(\w+)\"", test)}


def test_every_loss_of_trl_on_pairs_is_one_of_ours():
    names = named_losses("dpo")
    assert len(names) == 15
    assert names <= table()["losses"].keys()
    assert set(table()["losses"].values()) <= PAIR_LOSSES.keys()
    for name in names:
        made = ours("dpo", loss_type=[name])
        losses = dpo_losses(DPO("m", "d", "o", label_smoothing=0.1, **made))
        assert table()["losses"][name] in losses


def test_every_loss_of_trl_in_grpo_is_one_of_ours_or_refused():
    names = named_losses("grpo")
    assert {"grpo", "bnpo", "dapo", "dr_grpo", "cispo", "sapo", "vespo", "luspo"} == names
    for name in names - {"luspo"}:
        made = ours("grpo", loss_type=name, **({"epsilon_high": 5.0} if name == "cispo" else {}))
        assert grpo_losses(GRPO("m", "d", "o", **made))
