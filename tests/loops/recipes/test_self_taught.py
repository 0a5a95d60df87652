"""Distillation from a teacher that reads another prompt, such as the model itself with a hint."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from burnish.data import DataError, Tokenization
from burnish.loops.config import Teacher
from burnish.loops.recipes.distill import encoder, open_distill
from burnish.loops.recipes.settings import Distill
from online import lines, stored
from tiny import save_sharpened, sums, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer


def hinted(pair):
    """The prompt with its answer in it."""
    answer = pair["chosen"][0]["content"]
    return [{"role": "user", "content": f"It is {answer}. {pair['prompt'][0]['content']}"}]


@pytest.fixture(scope="module")
def common(tmp_path_factory):
    directory = tmp_path_factory.mktemp("start")
    rows = [
        {"prompt": pair["prompt"], "completion": pair["chosen"], "hint": hinted(pair)}
        for pair in sums(8)
    ]
    model = str(save_sharpened(directory / "start"))
    return {
        "model": model,
        "teacher": Teacher(model=model, prompt="hint"),
        "data": str(write_rows(directory / "data.jsonl", rows)),
        "train_on": "completion",
        "batch_size": 8,
        "max_tokens": 5,
        "learning_rate": 0.0,
        "show_every": 0,
    }


def rows_of(common):
    return [json.loads(line) for line in Path(common["data"]).read_text().splitlines()]


def logp_after(model, prompt, completion):
    """The model's own log-probs [tokens, V] of a completion's tokens."""
    logits = model(torch.tensor([prompt + completion])).logits[0].double()
    return logits[len(prompt) - 1 : -1].log_softmax(-1)


@torch.no_grad()
def divergence_by_hand(common, prompts):
    """The mean over tokens of KL(teacher after its prompt || student after its own)."""
    tokenizer = AutoTokenizer.from_pretrained(common["model"])
    model = AutoModelForCausalLM.from_pretrained(common["model"])
    divergences = []
    for row, prompt in zip(rows_of(common), prompts, strict=True):
        how = {"add_generation_prompt": True, "return_dict": False}
        own, theirs = (
            tokenizer.apply_chat_template(text, **how) for text in (row["prompt"], prompt)
        )
        chat = [*row["prompt"], *row["completion"]]
        completion = tokenizer.apply_chat_template(chat, return_dict=False)[len(own) :]
        s, t = (logp_after(model, ids, completion) for ids in (own, theirs))
        divergences.append((t.exp() * (t - s)).sum(-1))
    return torch.cat(divergences).mean().item()


@pytest.mark.parametrize("micro_tokens", [None, 40])
def test_the_divergence_is_from_the_teacher_after_its_own_prompt(micro_tokens, common, tmp_path):
    config = Distill(**common, output=str(tmp_path / "run"), steps=1, micro_tokens=micro_tokens)
    open_distill(config).train()
    (logged,) = lines(tmp_path / "run")
    expected = divergence_by_hand(common, [row["hint"] for row in rows_of(common)])
    assert expected > 0.01
    assert logged["distillation"] == pytest.approx(expected, rel=1e-4)


def test_the_model_itself_has_nothing_to_teach_after_the_same_prompt(common, tmp_path):
    rows = [{**row, "hint": row["prompt"]} for row in rows_of(common)]
    config = Distill(**common | {"data": rows}, output=str(tmp_path / "run"), steps=1)
    open_distill(config).train()
    (logged,) = lines(tmp_path / "run")
    assert abs(logged["distillation"]) < 1e-5 and logged["grad_norm"] < 1e-4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_student_learns_to_do_without_the_hint(dtype, common, tmp_path):
    settings = common | {"learning_rate": 1e-3, "dtype": dtype, "eval_data": common["data"]}
    open_distill(Distill(**settings, output=str(tmp_path / "run"), steps=20)).train()
    first, *_, last = lines(tmp_path / "run")
    assert last["eval/distillation"] < 0.7 * first["eval/distillation"]


@pytest.mark.parametrize("loss", ["distillation", "sampled_reverse_kl"])
def test_the_student_samples_from_its_own_prompts(loss, common, tmp_path):
    """SDFT: what it says is rated by itself with the hint."""
    settings = common | {"loss": {loss: 1.0}, "on_policy": 1.0, "steps": 2, "group_size": 2}
    open_distill(Distill(**settings, output=str(tmp_path / "hinted"))).train()
    plain = [{**row, "hint": row["prompt"]} for row in rows_of(common)]
    open_distill(Distill(**settings | {"data": plain}, output=str(tmp_path / "plain"))).train()
    one, other = stored(tmp_path / "hinted"), stored(tmp_path / "plain")
    assert [sample["tokens"] for sample in one] == [sample["tokens"] for sample in other]
    assert [sample["prompt"] for sample in one] == [sample["prompt"] for sample in other]
    for hinted_line, plain_line in zip(
        lines(tmp_path / "hinted"), lines(tmp_path / "plain"), strict=True
    ):
        assert abs(plain_line[loss]) < 1e-5
        assert abs(hinted_line[loss]) > 0.01


def test_what_no_prompt_can_take_the_place_of_is_refused(common, tmp_path):
    config = Distill(**common, output=str(tmp_path))
    tokenizer = AutoTokenizer.from_pretrained(common["model"])

    def encode(**fields):
        changed = replace(config, **fields)
        return encoder(changed)(changed.data, tokenizer, Tokenization())

    data, _ = encode()
    hint = rows_of(common)[2]["hint"]
    ids = tokenizer.apply_chat_template(hint, add_generation_prompt=True, return_dict=False)
    assert data[2]["teacher_prompt"] == ids
    with pytest.raises(DataError, match=r"line 1: what the student reads .* is not its prompt"):
        encode(train_on="all")
    with pytest.raises(DataError, match="and a column clue; there are prompt, completion, hint"):
        encode(teacher=replace(config.teacher, prompt="clue"))
    long = [{**row, "hint": "x" * 600} for row in rows_of(common)]
    with pytest.raises(
        ValueError, match=r"the teacher's prompt of .* and the teacher's context is"
    ):
        open_distill(
            replace(config, data=[{**row, "prompt": "2+2=", "completion": "4"} for row in long])
        )
