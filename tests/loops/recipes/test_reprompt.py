"""Self-distillation: a teacher that is told about the student's completions, and follows it."""

import copy
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from burnish.data import DataError, prompt_tokens
from burnish.loops.cli.rehearsal import rehearse
from burnish.loops.config import Lora, Teacher
from burnish.loops.own_code import code_names
from burnish.loops.recipes.distill import open_distill
from burnish.loops.recipes.settings import Distill
from burnish.loops.rl.reprompt import resolve_reprompt
from burnish.loops.rollouts.sample import Sample
from online import lines, stored
from tiny import save_model, save_sharpened, sums, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer

STEPS = 4


def by_length(row, samples):
    """A prompt about each completion, but for those that end at once; of one row, another."""
    prompts = []
    for sample in samples:
        hint = f"Said in {len(sample.tokens)}: {sample.text[:3]}. {row['prompt'][0]['content']}"
        short = len(sample.tokens) < 2
        prompts.append(None if short else [{"role": "user", "content": hint}])
    return prompts


@pytest.fixture(scope="module")
def common(tmp_path_factory):
    directory = tmp_path_factory.mktemp("start")
    rows = [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in sums(8)]
    model = str(save_sharpened(directory / "start"))
    return {
        "model": model,
        "teacher": Teacher(model=model, reprompt=by_length, divergence="reverse_kl"),
        "data": str(write_rows(directory / "data.jsonl", rows)),
        "train_on": "completion",
        "batch_size": 4,
        "group_size": 2,
        "on_policy": 1.0,
        "max_tokens": 5,
        "learning_rate": 1e-3,
        "schedule": "constant",
        "show_every": 0,
        "steps": STEPS,
        "shuffle": False,
    }


@torch.no_grad()
def divergence_by_hand(common, samples, student, teacher):
    """The mean over tokens of KL(student after x || teacher after x and the feedback), as SDPO's
    equation has it; and the share of completions that there is feedback on.
    """
    tokenizer = AutoTokenizer.from_pretrained(common["model"])
    rows = [json.loads(line) for line in Path(common["data"]).read_text().splitlines()]
    divergences, told = [], 0
    for sample in samples:
        row = next(row for row in rows if ids_of(tokenizer, row["prompt"]) == sample["prompt"])
        known = SimpleNamespace(tokens=sample["tokens"], text=sample["text"])
        (prompt,) = by_length(row, [known])
        if prompt is None:
            continue
        told += 1
        s, t = (
            model(torch.tensor([ids + sample["tokens"]])).logits[0, len(ids) - 1 : -1].double()
            for model, ids in ((student, sample["prompt"]), (teacher, ids_of(tokenizer, prompt)))
        )
        s, t = s.log_softmax(-1), t.log_softmax(-1)
        divergences.append((s.exp() * (s - t)).sum(-1))
    return torch.cat(divergences).mean().item(), told / len(samples)


def ids_of(tokenizer, prompt):
    how = {"add_generation_prompt": True, "return_dict": False}
    return tokenizer.apply_chat_template(prompt, **how)


def load(path):
    return AutoModelForCausalLM.from_pretrained(path)


@pytest.mark.parametrize("micro_tokens", [None, 60])
def test_the_divergence_is_from_the_teacher_that_was_told_of_the_completion(
    micro_tokens, common, tmp_path
):
    config = Distill(**common | {"steps": 1}, micro_tokens=micro_tokens, output=str(tmp_path))
    open_distill(config).train()
    (logged,) = lines(tmp_path)
    samples = stored(tmp_path)
    start = load(common["model"])
    expected, told = divergence_by_hand(common, samples, start, start)
    assert expected > 0.01
    assert logged["distillation"] == pytest.approx(expected, rel=1e-4)
    assert logged["reprompted"] == pytest.approx(told)


@pytest.mark.parametrize("alpha", [1.0, 0.3])
def test_a_teacher_that_follows_is_the_student_before_the_step_or_its_average(
    alpha, common, tmp_path
):
    """With alpha 1 it is SDPO's own: the current model, of which the gradient is stopped."""
    teacher = replace(common["teacher"], sync_steps=1, mixup_alpha=alpha)
    ends = []
    for steps in (1, 2):
        output = tmp_path / f"{steps}"
        settings = common | {"teacher": teacher, "steps": steps}
        open_distill(Distill(**settings, output=str(output))).train()
        ends.append(output)
    student = load(ends[0] / "model")
    followed = copy.deepcopy(student)
    start = load(common["model"])
    with torch.no_grad():
        for each, before in zip(followed.parameters(), start.parameters(), strict=True):
            each.copy_(alpha * each + (1 - alpha) * before)
    second = stored(ends[1])[8:]
    expected, _ = divergence_by_hand(common, second, student, followed)
    frozen, _ = divergence_by_hand(common, second, student, start)
    assert lines(ends[1])[1]["distillation"] == pytest.approx(expected, rel=1e-3)
    assert abs(expected - frozen) > 2e-3 * expected


def test_a_teacher_that_is_told_nothing_has_nothing_to_teach(common, tmp_path):
    teacher = replace(common["teacher"], reprompt=lambda row, samples: [row["prompt"]] * 2)
    config = Distill(**common | {"teacher": teacher, "steps": 1}, output=str(tmp_path))
    open_distill(config).train()
    (logged,) = lines(tmp_path)
    assert abs(logged["distillation"]) < 1e-5 and logged["grad_norm"] < 1e-4


def test_completions_without_a_prompt_train_nothing(common, tmp_path):
    teacher = replace(common["teacher"], reprompt=lambda row, samples: [None, None])
    settings = common | {"teacher": teacher, "steps": 2, "weight_decay": 0.0}
    open_distill(Distill(**settings, output=str(tmp_path))).train()
    for logged in lines(tmp_path):
        assert logged["reprompted"] == 0 and logged["grad_norm"] == 0
    for each, before in zip(
        load(tmp_path / "model").parameters(), load(common["model"]).parameters(), strict=True
    ):
        assert torch.equal(each, before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_killed_run_goes_on_to_the_same_weights_and_the_student_learns(dtype, common, tmp_path):
    teacher = replace(common["teacher"], sync_steps=2)
    settings = common | {"teacher": teacher, "dtype": dtype, "steps": 6, "save_every": 3}
    whole, again = tmp_path / "whole", tmp_path / "again"
    open_distill(Distill(**settings, output=str(whole))).train()
    shutil.copytree(whole, again)
    shutil.rmtree(again / "checkpoints/step-00000006")
    shutil.rmtree(again / "model")
    open_distill(Distill(**settings, output=str(again), resume=True)).train()
    weights = "model/model.safetensors"
    assert (whole / weights).read_bytes() == (again / weights).read_bytes()
    assert [sample["tokens"] for sample in stored(whole)] == [
        sample["tokens"] for sample in stored(again)
    ]
    logged = [line["distillation"] for line in lines(whole)]
    assert logged[-1] < logged[0]


def test_the_prompts_are_those_of_trl(common):
    """TRL's builder, and the function of docs/recipes/distill.md, on a group with one success."""
    trl = pytest.importorskip("trl.experimental.sdpo.sdpo_trainer")
    config = pytest.importorskip("trl.experimental.sdpo").SDPOConfig
    page = (Path(__file__).parents[3] / "docs/recipes/distill.md").read_text()
    code = next(
        block for block in re.findall(r"```python\n(.*?)```", page, re.S) if "def told" in block
    )
    names = {}
    exec(code[: code.index("chats = ")], names)
    tokenizer = AutoTokenizer.from_pretrained(common["model"])
    tokenizer.pad_token = tokenizer.eos_token
    texts = ["five", "four", "six"]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    longest = max(map(len, ids))
    padded = torch.tensor([each + [tokenizer.pad_token_id] * (longest - len(each)) for each in ids])
    accelerator = SimpleNamespace(
        process_index=0,
        device="cpu",
        gather=lambda tensor: tensor,
        pad_across_processes=lambda tensor, **_: tensor,
    )
    defaults = {each.name: each.default for each in config.__dataclass_fields__.values()}
    trainer = SimpleNamespace(
        accelerator=accelerator,
        args=SimpleNamespace(**defaults),
        model=SimpleNamespace(training=True),
        num_generations=3,
        processing_class=tokenizer,
        _tokenizer=tokenizer,
    )
    prompts = []

    class Builder(trl.SuccessfulRolloutTeacherContextBuilder):
        def _tokenize_teacher_messages(self, messages):
            prompts.extend(messages)
            return {
                "prompt_ids": torch.zeros(3, 0, dtype=torch.int64),
                "prompt_mask": torch.zeros(3, 0, dtype=torch.int64),
            }

    asked = [{"role": "user", "content": "2+2?"}]
    output = {"completion_ids": padded, "completion_mask": torch.ones_like(padded)}
    built = Builder(trainer).build(output, [asked] * 3, torch.tensor([0.0, 1.0, 0.0]))
    samples = [SimpleNamespace(text=text) for text in texts]
    ours = names["told"]({"prompt": asked, "answer": "four"}, samples)
    used = built["self_distillation_mask"].bool().tolist()
    assert [prompt is not None for prompt in ours] == used
    for prompt, theirs, is_used in zip(ours, prompts, used, strict=True):
        if is_used:
            assert prompt == theirs


WRONG = {
    "no list": (lambda row, samples: "hint", r"wanted a list of 2 prompts, .* got 'hint'"),
    "too few": (lambda row, samples: [None], r"wanted a list of 2 prompts"),
    "no prompt": (lambda row, samples: [7, 7], r"7 is no prompt"),
    "error": (lambda row, samples: 1 / 0, r"ZeroDivisionError: division by zero"),
    "no function of both": (lambda row: [], r"wanted a function of \(row, samples\)"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_function_that_writes_no_prompts_is_told(case, common, tmp_path):
    function, message = WRONG[case]
    teacher = replace(common["teacher"], reprompt=function)
    with pytest.raises(ValueError, match=rf"^teacher\.reprompt.*{message}"):
        open_distill(Distill(**common | {"teacher": teacher}, output=str(tmp_path))).train()


def test_prompts_beyond_the_context_are_left_out(common, tmp_path, caplog):
    teacher = replace(common["teacher"], reprompt=lambda row, samples: ["x" * 6000, None])
    rows = [{"prompt": "2+2=", "completion": "4"}] * 4
    settings = common | {"teacher": teacher, "data": rows, "steps": 1}
    open_distill(Distill(**settings, output=str(tmp_path))).train()
    assert lines(tmp_path)[0]["reprompted"] == 0
    assert "and the teacher's context is" in caplog.text


def test_only_a_copy_of_the_student_follows_it(common, tmp_path):
    other = load(save_model(tmp_path / "other", hidden_size=16, intermediate_size=24))
    teacher = Teacher(model=other, sync_steps=1)
    with pytest.raises(ValueError, match=r"^teacher\.sync_steps: the teacher has other weights"):
        open_distill(Distill(**common | {"teacher": teacher}, output=str(tmp_path / "run")))
    config = Distill(
        **common | {"teacher": Teacher(model=common["model"], sync_steps=1), "lora": Lora(r=2)},
        output=str(tmp_path / "run"),
    )
    assert "only a whole model follows the student" in next(config.contradictions())


def test_whose_code_writes_the_prompts_is_known(common):
    config = Distill(**common | {"teacher": Teacher(model="m", reprompt="online:told")}, output="o")
    assert ("teacher.reprompt", "online:told") in list(code_names(config))
    assert resolve_reprompt("online:told").__name__ == "told"
    sample = Sample(0, 0, [1], [2, 3], [True, True], [0.0, 0.0], [], "stop")
    row = {"messages": [{"role": "user", "content": "2+2?"}]}
    ((told,),) = resolve_reprompt("online:told")(row, [sample])
    assert told["content"] == "0.5 was right. 2+2?"


def test_a_plan_does_not_call_the_function(common, tmp_path):
    def never(row, samples):
        raise AssertionError

    teacher = replace(common["teacher"], reprompt=never)
    config = Distill(**common | {"teacher": teacher}, output=str(tmp_path / "run"))
    assert rehearse(open_distill, config).tokens > 0


def test_prompt_tokens_are_those_of_prompts(common):
    tokenizer = AutoTokenizer.from_pretrained(common["model"])
    asked = [{"role": "user", "content": "2+2?"}]
    assert prompt_tokens({"prompt": asked}, tokenizer) == ids_of(tokenizer, asked)
    system = [{"role": "system", "content": "Count."}]
    assert prompt_tokens({"prompt": asked}, tokenizer, system_prompt="Count.") == ids_of(
        tokenizer, system + asked
    )
    with pytest.raises(DataError, match="'prompt'"):
        prompt_tokens({"prompt": None}, tokenizer)
