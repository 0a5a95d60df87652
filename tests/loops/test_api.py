"""Recipes from Python: objects in place of names, steps in a loop of one's own, with or without a
directory.
"""

import inspect
import json
import math
import os
import re
import subprocess
import sys

import burnish
import looped
import pytest
import torch
from agents import twice
from burnish.loops.cli import main
from burnish.loops.environments import Step
from burnish.objectives import PerPair, Stats, dpo
from datasets import Dataset
from forked import run_forked
from grids import exhaustive
from peft import IA3Config, LoraConfig, get_peft_model
from safetensors.torch import load_file
from tiny import save_model, sums, write_rows
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

PAIRS = sums(12)
DEMONSTRATIONS = [{"messages": pair["prompt"] + pair["chosen"]} for pair in PAIRS]
PROMPTS = [{"prompt": pair["prompt"], "answer": pair["chosen"][0]["content"]} for pair in PAIRS]
SETTINGS = {"steps": 3, "batch_size": 4, "learning_rate": 1e-3}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("start"))


@pytest.fixture
def tokenizer(saved):
    return AutoTokenizer.from_pretrained(saved)


@pytest.fixture
def model(saved):
    return AutoModelForCausalLM.from_pretrained(saved)


def weights(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name].cpu(), theirs[name])] == []


def brief(completions, **columns):
    """A reward written for TRL."""
    return [-float(len(completion[0]["content"])) for completion in completions]


RECIPES = {
    "sft": (DEMONSTRATIONS, {}),
    "dpo": (PAIRS, {"reference": "copy"}),
    "kto": (PAIRS, {}),
    "grpo": (
        PROMPTS,
        {
            "rewards": {"length": {"target": 1}},
            "prompts_per_rollout": 4,
            "group_size": 2,
            "max_tokens": 4,
        },
    ),
}


@pytest.mark.parametrize("recipe", ["dpo", "grpo"])
def test_a_model_is_evaluated_without_a_step_as_a_run_evaluates_it_before_the_first(
    recipe, saved, tmp_path
):
    rows, options = RECIPES[recipe]
    settings = {"steps": 1, "learning_rate": 1e-3, **options, "eval_data": rows[:4]}
    before = getattr(burnish, recipe)(str(saved), rows, **settings).evaluate()
    getattr(burnish, recipe)(str(saved), rows, str(tmp_path / "run"), **settings).train()
    first = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[0])
    assert before and {name: first[name] for name in before} == before and first["step"] == 0
    if recipe == "grpo":
        with pytest.raises(
            ValueError,
            match=r"^evaluate: an online recipe samples the completions of eval_data; pass",
        ):
            getattr(burnish, recipe)(str(saved), rows, **settings).evaluate(rows[:4])
    without = getattr(burnish, recipe)(str(saved), rows, **{**settings, "eval_data": None})
    with pytest.raises(
        ValueError, match=r"^evaluate: this run has no held-out data; give it some, eval_data=rows"
    ):
        without.evaluate()


@pytest.mark.parametrize("recipe", ["sft", "dpo", "kto"])
def test_rows_can_be_evaluated_after_a_step_as_held_out_data_are(recipe, saved, tmp_path):
    rows, options = RECIPES[recipe]
    settings = {"steps": 2, "learning_rate": 1e-2, **options}
    run = getattr(burnish, recipe)(str(saved), rows, **settings, eval_data=rows[:3])
    before = run.evaluate()
    run.train()
    after = run.evaluate()
    assert after != before
    without = getattr(burnish, recipe)(str(saved), rows, **settings)
    assert without.evaluate(rows[:3]) == before
    without.train()
    assert without.evaluate(rows[:3]) == after
    assert without.evaluate(write_rows(tmp_path / "held_out.jsonl", rows[:3])) == after


def test_rows_are_not_evaluated_against_a_reference_that_is_gone(saved, tmp_path):
    rows, _ = RECIPES["dpo"]
    run = burnish.dpo(str(saved), rows, str(tmp_path / "run"), steps=1, reference="precompute")
    with pytest.raises(
        ValueError, match=r"^evaluate: the reference was the policy before training"
    ):
        run.evaluate(rows[:3])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_loop_that_does_nothing_ends_in_the_weights_of_the_command(
    recipe, dtype, saved, tmp_path, tokenizer
):
    rows, options = RECIPES[recipe]
    settings = {**SETTINGS, **options, "dtype": dtype}
    if recipe == "grpo":
        del settings["batch_size"]
    flags = [
        f"--{name}={json.dumps(value) if isinstance(value, dict) else value}"
        for name, value in settings.items()
    ]
    data = write_rows(tmp_path / "data.jsonl", rows)
    arguments = ["--model", str(saved), "--data", str(data), "--output", str(tmp_path / "command")]
    assert main([recipe, *arguments, *flags]) == 0
    model = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    losses = [
        step.metrics["loss"]
        for step in getattr(burnish, recipe)(model, rows, tokenizer=tokenizer, **settings)
    ]
    lines = [
        json.loads(line) for line in (tmp_path / "command/metrics.jsonl").read_text().splitlines()
    ]
    assert losses == [line["loss"] for line in lines]
    assert_same(
        weights(AutoModelForCausalLM.from_pretrained(tmp_path / "command/model")), weights(model)
    )


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"per_device_train_batch_size": 4}, "per_device_train_batch_size is batch_size=4"),
        (
            {"train_dataset": PAIRS, "eval_dataset": PAIRS},
            "train_dataset is data=; eval_dataset is eval_data=",
        ),
        ({"peft_config": LoraConfig()}, "peft_config is lora=, which takes a LoraConfig too"),
        (
            {"args": object(), "processing_class": None},
            "args is the arguments themselves, .*processing_class is tokenizer=",
        ),
        (
            {"num_train_epochs": 2, "bf16": True},
            "num_train_epochs is epochs=2; bf16 is dtype='bfloat16'",
        ),
        ({"use_peft": True, "lora_r": 4}, r"use_peft is lora=\{'r': 4\}"),
        ({"logging_steps": 5}, r"logging_steps is to be left out \(every step is logged\)"),
        ({"push_to_hub": True}, r"push_to_hub is hub=\{'id': 'burnish'\}"),
        ({"callbacks": []}, "callbacks is the body of your loop"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_an_argument_of_trl_is_answered_with_ours(given, told, model, tokenizer):
    data = {} if "train_dataset" in given else {"data": PAIRS}
    with pytest.raises(ValueError, match=rf"dpo: of TRL's arguments, .*{told}"):
        burnish.dpo(model=model, tokenizer=tokenizer, **data, **given)


def test_every_argument_of_a_trainer_of_trl_is_answered():
    trl = pytest.importorskip("trl")
    for name in ("SFT", "DPO", "KTO", "Reward", "GRPO", "RLOO"):
        recipe = name.lower()
        theirs = inspect.signature(getattr(trl, f"{name}Trainer").__init__).parameters.keys() - {
            "self",
            "kwargs",
        }
        ours = inspect.signature(getattr(burnish, recipe)).parameters
        for argument in sorted(theirs - ours.keys()):
            with pytest.raises(ValueError, match=f"{recipe}: of TRL's arguments, {argument} is "):
                getattr(burnish, recipe)("m", [], **{argument: None})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("config", "ours"),
    [
        (LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["v_proj", "q_proj"]),
         {"r": 4, "alpha": 8, "dropout": 0.1, "target_modules": ["q_proj", "v_proj"]}),
        (LoraConfig(task_type="CAUSAL_LM", use_rslora=True, rank_pattern={"q_proj": 2}),
         {"r": 8, "alpha": 8, "use_rslora": True, "target_modules": None, "kwargs": {"rank_pattern": {"q_proj": 2}}}),
        (LoraConfig(r=2, target_modules="all-linear", init_lora_weights="gaussian", modules_to_save=["embed_tokens"]),
         {"r": 2, "alpha": 8, "init_lora_weights": "gaussian", "modules_to_save": ["embed_tokens"]}),
    ],
    ids=["layers", "patterns", "embeddings"],
)  # fmt: skip
def test_a_configuration_of_peft_trains_as_the_same_settings_do(
    config, ours, dtype, saved, tokenizer
):
    trained = []
    for lora in (config, ours):
        run = burnish.dpo(
            str(saved), PAIRS, tokenizer=tokenizer, lora=lora, dtype=dtype, **SETTINGS
        )
        run.train()
        trained.append(weights(run.model))
    assert_same(*trained)
    assert any("lora_A" in name for name in trained[0])


def test_another_kind_of_adapter_than_lora_is_refused_by_its_class(model, tokenizer):
    with pytest.raises(
        ValueError, match="lora: wanted a LoraConfig, or a mapping of its fields, got IA3Config"
    ):
        burnish.dpo(model, PAIRS, tokenizer=tokenizer, lora=IA3Config())


def test_products_are_in_tf32_where_a_run_asks_for_it_and_as_torch_has_it_elsewhere(
    model, tokenizer
):
    before = torch.get_float32_matmul_precision()
    try:
        for tf32, precision in ((True, "high"), (None, "high"), (False, "highest")):
            burnish.sft(model, DEMONSTRATIONS, tokenizer=tokenizer, tf32=tf32, **SETTINGS)
            assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("of", [torch.bfloat16, torch.float32])
def test_a_model_that_is_converted_in_place_is_said_once_at_the_start(of, model, tokenizer, caplog):
    burnish.sft(model.to(of), DEMONSTRATIONS, tokenizer=tokenizer, **SETTINGS)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    said = [text for text in caplog.messages if text.startswith("model: ")]
    expected = ["model: its weights were bfloat16, and are float32 now, in place (+0.00 GiB); load it in that "
                "precision, or copy it, to keep yours"]  # fmt: skip
    assert said == (expected if of == torch.bfloat16 else [])


@pytest.mark.parametrize("data", [PAIRS, Dataset.from_list(PAIRS)], ids=["rows", "dataset"])
def test_without_a_directory_no_file_is_written(model, data, tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = weights(model)
    metrics = burnish.dpo(model, data, tokenizer=tokenizer, eval_data=data, **SETTINGS).train()
    assert metrics["eval/loss"] < 0.6931
    assert list(tmp_path.iterdir()) == []
    assert any(not torch.equal(tensor, before[name]) for name, tensor in weights(model).items())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"save_every": 2},
            "save_every: checkpoints are kept in the run's directory, and it has none; set output",
        ),
        ({"resume": True}, "resume: checkpoints are kept"),
        (
            {"reference": "precompute"},
            "output: this run keeps files in its directory, and has none; name one",
        ),
        ({"betta": 1.0}, "dpo: no setting 'betta', did you mean 'beta'?"),
        ({"beta": -1.0}, "beta: must be > 0, got -1.0"),
        ({"lora": {"rank": 1}}, "dpo: lora: no setting 'rank'"),
        (
            {"lora": {"alpha": 32}},
            "dpo: lora.alpha: without lora.r there are no adapters, and the whole model is",
        ),
        ({"lora": 8}, r"dpo: lora: wanted a mapping of r, alpha, dropout, ..., got 8"),
        ({"shuffle": "no"}, "dpo: shuffle: wanted true or false, got 'no'"),
        ({"quantize": "4bit"}, "quantize: the model is loaded already"),
        (
            {"teacher": {"model": "the student"}, "loss": {"dpo": 1, "distillation": 1}},
            "it has weights of the student",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_a_mistake_is_refused_in_one_line(model, tokenizer, settings, message):
    if settings.get("teacher"):
        settings = {**settings, "teacher": {"model": model}}
    with pytest.raises(ValueError) as refused:
        burnish.dpo(model, PAIRS, tokenizer=tokenizer, **settings)
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_a_teacher_may_share_no_weights_with_the_student(model, saved, tokenizer):
    teacher = AutoModelForCausalLM.from_pretrained(saved)
    # freezing it would freeze those of the student
    teacher.set_input_embeddings(model.get_input_embeddings())
    for student in (model, get_peft_model(teacher, LoraConfig(r=2))):
        with pytest.raises(
            ValueError, match="it has weights of the student, which training changes; give a copy"
        ):
            burnish.distill(
                student, DEMONSTRATIONS, tokenizer=tokenizer, teacher={"model": teacher}, **SETTINGS
            )


def test_a_path_is_the_name_of_what_is_there(saved, tmp_path):
    run = burnish.distill(
        saved, DEMONSTRATIONS, tmp_path / "run", teacher={"model": saved}, **SETTINGS
    )
    assert run.train()["distillation"] < 1e-3
    with pytest.raises(
        ValueError, match=r"this run would write over its model, .*model; name another directory"
    ):
        burnish.sft(tmp_path / "run/model", DEMONSTRATIONS, tmp_path / "run", **SETTINGS)


def test_help_says_what_a_recipe_takes_and_gives():
    assert inspect.signature(burnish.dpo).return_annotation == "Training"
    assert "Objects may stand for names" in burnish.dpo.__doc__


def test_a_model_made_in_memory_wants_its_tokenizer(model):
    model.config._name_or_path = ""
    with pytest.raises(ValueError, match="tokenizer: a model made in memory has no name"):
        burnish.dpo(model, PAIRS)


def test_a_loop_left_early_ends_in_order_and_a_resumed_one_reaches_the_same_weights(
    saved, tokenizer, tmp_path, capsys
):
    output = str(tmp_path / "run")

    def opened(**settings):
        model = AutoModelForCausalLM.from_pretrained(saved)
        return burnish.dpo(model, PAIRS, output, tokenizer=tokenizer, **{**SETTINGS, **settings})

    def undisturbed():
        model = AutoModelForCausalLM.from_pretrained(saved)
        burnish.dpo(model, PAIRS, tokenizer=tokenizer, **SETTINGS).train()
        return weights(model)

    run = opened()
    for step in run:
        step.metrics["mine"] = torch.tensor(7.0)
        if step.number == 2:
            break
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["mine"] for line in lines] == [7.0, 7.0]
    assert_same(load_file(tmp_path / "run/model/model.safetensors"), weights(run.model))
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step-00000002"]
    with pytest.raises(
        RuntimeError, match="it ended at step 2 of 3; continue it in another run, by resume=True"
    ):
        next(iter(run))
    run = opened(resume=True)
    assert repr(run) == "<Training at step 2 of 3: iterate over it, or call its train()>"
    assert [step.number for step in run] == [3]
    assert capsys.readouterr().out.splitlines()[-1] == f"the model is in {output}/model"
    assert_same(undisturbed(), weights(run.model))
    opened(resume=True).train()
    assert (
        capsys.readouterr().out.splitlines()[-1]
        == f"no steps were left; the model is in {output}/model"
    )


def test_an_error_in_the_loop_leaves_a_checkpoint_and_the_error(model, tokenizer, tmp_path):
    def loop():
        for step in burnish.dpo(
            model, PAIRS, str(tmp_path / "run"), tokenizer=tokenizer, **SETTINGS
        ):
            raise KeyError(step.number)

    with pytest.raises(KeyError, match="1"):
        loop()
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step-00000001"]


@pytest.mark.parametrize("change", ["weights", "rows", "settings"])
def test_a_run_goes_on_with_the_model_and_the_rows_it_began_with(
    saved, tokenizer, tmp_path, change
):
    """The reference is a copy of the model that was given, so that another one would change the
    loss.
    """
    output, rows = str(tmp_path / "run"), PAIRS
    for _ in burnish.dpo(
        AutoModelForCausalLM.from_pretrained(saved), rows, output, tokenizer=tokenizer, **SETTINGS
    ):
        break
    model, settings = AutoModelForCausalLM.from_pretrained(saved), {**SETTINGS, "resume": True}
    if change == "weights":
        model.lm_head.weight.data[0, 0] += 1
    elif change == "settings":
        settings["loss"] = hinged
    else:
        rows = [*PAIRS[:-1], PAIRS[0]]
    words = {
        "weights": "model='LlamaForCausalLM",
        "rows": "the data is not what",
        "settings": "test_api:hinged",
    }
    with pytest.raises((ValueError, RuntimeError), match=words[change]):
        burnish.dpo(model, rows, output, tokenizer=tokenizer, **settings)


def test_one_model_passes_through_one_recipe_after_the_other(model, tokenizer):
    first = burnish.sft(model, DEMONSTRATIONS, tokenizer=tokenizer, **SETTINGS).train()
    second = burnish.sft(model, DEMONSTRATIONS, tokenizer=tokenizer, **SETTINGS).train()
    assert second["nll"] < first["nll"]
    before = weights(model)
    losses = [
        step.metrics["loss"] for step in burnish.dpo(model, PAIRS, tokenizer=tokenizer, **SETTINGS)
    ]
    # the reference is what SFT made
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6) != losses[-1]
    assert not torch.equal(model.lm_head.weight, before["lm_head.weight"])


def test_adapters_of_ones_own_are_trained_and_saved(model, tokenizer, tmp_path):
    adapted = get_peft_model(model, LoraConfig(r=2, lora_dropout=0.25, target_modules="all-linear"))
    frozen = {name: tensor for name, tensor in weights(adapted).items() if "lora_" not in name}
    run = burnish.dpo(adapted, PAIRS, str(tmp_path / "run"), tokenizer=tokenizer, **SETTINGS)
    assert run.model is adapted
    losses = [step.metrics["loss"] for step in run]
    # the reference is the model without them
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6) != losses[-1]
    assert_same(
        {name: tensor for name, tensor in weights(adapted).items() if "lora_" not in name}, frozen
    )
    assert {module.p for module in adapted.modules() if isinstance(module, torch.nn.Dropout)} == {
        0.25
    }
    assert (tmp_path / "run/adapter/adapter_model.safetensors").exists()
    with pytest.raises(ValueError, match=r"lora\.r: the model has adapters already"):
        burnish.dpo(adapted, PAIRS, tokenizer=tokenizer, lora={"r": 2})
    for lora in ({}, {"r": 2}):  # peft has put its layers into the model itself
        with pytest.raises(
            ValueError, match="model: an earlier run left adapters in it; give that run's model"
        ):
            burnish.dpo(model, PAIRS, tokenizer=tokenizer, lora=lora)


def test_a_classifier_of_ones_own_learns_rewards(saved, tokenizer):
    model = AutoModelForSequenceClassification.from_pretrained(saved, num_labels=1)
    run = burnish.reward(model, PAIRS, tokenizer=tokenizer, **{**SETTINGS, "steps": 8})
    losses = [step.metrics["loss"] for step in run]
    assert run.model is model and losses[-1] < losses[0]


def test_a_teacher_of_ones_own_is_learned_from(saved, tmp_path, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(saved)
    teacher = AutoModelForCausalLM.from_pretrained(save_model(tmp_path / "teacher", seed=1))
    run = burnish.distill(
        model, DEMONSTRATIONS, tokenizer=tokenizer, teacher={"model": teacher}, **SETTINGS
    )
    losses = [step.metrics["distillation"] for step in run]
    assert 0 < losses[-1] < losses[0]


def test_rewards_are_functions_names_or_both(model, tokenizer):
    def letters(completion):
        return float(sum(map(str.isalpha, completion)))

    settings = {
        "steps": 2,
        "prompts_per_rollout": 4,
        "group_size": 2,
        "max_tokens": 4,
        "tokenizer": tokenizer,
    }
    for rewards in (brief, [brief, letters], {letters: 0.5, "exact_match": 1.0}):
        metrics = burnish.grpo(model, PROMPTS, rewards=rewards, **settings).train()
        names = {name.split("/")[1] for name in metrics if name.startswith("rewards/")}
        wanted = [rewards] if callable(rewards) else rewards
        assert {getattr(reward, "__name__", reward) for reward in wanted} <= names


class Echo:
    """A conversation of two turns."""

    def reset(self, row):
        self.turns = 0
        return row["prompt"]

    def step(self, completion):
        self.turns += 1
        return Step("And?", done=self.turns == 2, reward=0.5)


def test_an_environment_an_agent_and_an_order_are_objects(model, tokenizer):
    choices = []

    def backwards(history):
        choices.append(history.choice)
        return sorted(history.rows, reverse=True)

    settings = {"prompts_per_rollout": 2, "group_size": 2, "max_tokens": 4, "tokenizer": tokenizer}
    run = burnish.grpo(model, PROMPTS, environment=Echo, order=backwards, steps=1, **settings)
    metrics = run.train()
    assert choices[0] == 0
    assert metrics["rewards/environment/mean"] == pytest.approx(metrics["turns/mean"] / 2)
    run = burnish.grpo(model, PROMPTS, agent=twice, steps=1, **settings)
    assert run.train()["turns/aborted"] == 0
    with pytest.raises(ValueError, match="environment Echo: wanted a class with reset"):
        burnish.grpo(model, PROMPTS, environment=Echo(), steps=1, **settings)


@pytest.mark.parametrize("kind", ["class", "function", "object"])
def test_an_optimizer_is_made_by_a_class_or_a_function_or_given(model, tokenizer, kind):
    def of_the_head(params, lr):
        return torch.optim.SGD(
            [parameter for parameter in params if parameter is model.lm_head.weight], lr
        )

    objects = {
        "class": torch.optim.SGD,
        "function": of_the_head,
        "object": of_the_head(model.parameters(), 1e-3),
    }
    before = weights(model)
    burnish.sft(
        model, DEMONSTRATIONS, optimizer=objects[kind], tokenizer=tokenizer, **SETTINGS
    ).train()
    changed = {
        name for name, tensor in weights(model).items() if not torch.equal(tensor, before[name])
    }
    assert changed == (before.keys() if kind == "class" else {"lm_head.weight"})


def hinged(
    chosen: PerPair, rejected: PerPair, difficulty: PerPair, *, gap: float = 1.0
) -> tuple[PerPair, Stats]:
    """Hinge of the margin, less of it where a pair is difficult."""
    loss = (gap - difficulty * (chosen - rejected)).relu()
    return loss, {"hinge/inside": (loss > 0).to(loss.dtype).detach()}


def test_a_loss_of_ones_own_takes_its_tensors_and_columns_and_joins_a_mix(model, tokenizer):
    rows = [{**pair, "difficulty": 0.5 + i / 10} for i, pair in enumerate(PAIRS)]
    mix = {"dpo": 1.0, hinged: {"coefficient": 0.5, "gap": 2.0}}
    metrics = burnish.dpo(model, rows, loss=mix, tokenizer=tokenizer, **SETTINGS).train()
    assert metrics["loss"] == pytest.approx(metrics["dpo"] + 0.5 * metrics["hinged"])
    assert metrics["hinge/inside"] > 0
    with pytest.raises(ValueError, match="no column 'difficulty', which a loss reads"):
        burnish.dpo(model, PAIRS, loss=hinged, tokenizer=tokenizer, **SETTINGS)


def test_a_copy_of_a_loss_of_ours_trains_as_that_does(saved, tokenizer):
    trained = []
    for loss in ("dpo", dpo):
        model = AutoModelForCausalLM.from_pretrained(saved)
        burnish.dpo(model, PAIRS, loss=loss, tokenizer=tokenizer, **SETTINGS).train()
        trained.append(weights(model))
    assert_same(*trained)


def by_forks(*arguments):
    outcomes = run_forked(2, "looped", *arguments)
    assert [status for status, _ in outcomes] == [0, 0], outcomes
    return "".join(printed for _, printed in outcomes)


def by_torchrun(*arguments):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        looped.__file__,
    ]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(
        [*command, *arguments], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("launch", "left_by", "dtype"),
    [
        (by_forks, "none", "float32"),
        (by_forks, "1", "bfloat16"),
        exhaustive(by_torchrun, "1", "float32"),
    ],
)
def test_a_script_trains_on_two_ranks_and_one_that_leaves_its_loop_ends_both(
    saved, model, tmp_path, launch, left_by, dtype
):
    begun = weights(model)
    printed = launch(str(saved), str(tmp_path / "run"), left_by, dtype)
    assert (
        re.findall(r"^steps (.*)$", printed, re.M) == ["1 2 3" if left_by == "none" else "1 2"] * 2
    )
    alone = looped.be_rank(saved, None, "none" if left_by == "none" else "0", dtype)
    together = load_file(tmp_path / "run/model/model.safetensors")
    ends = weights(alone)
    way, apart = (
        torch.cat([(ends[name] - other[name]).flatten() for name in ends])
        for other in (begun, together)
    )
    # AdamW takes whole steps along gradients that are little more than rounding, and bfloat16
    # rounds much.
    assert apart.norm() < {"float32": 1e-3, "bfloat16": 0.2}[dtype] * way.norm()
