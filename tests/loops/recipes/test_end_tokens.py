"""A model that was trained on conversations ends its answers by itself, wherever it is used
next.
"""

import json

import burnish as burnish_package
import pytest
import torch
from burnish.loops.cli import main
from burnish.loops.config import Lora, Teacher
from burnish.loops.recipes import opener, settings_of
from burnish.loops.recipes.settings import SFT
from burnish.loops.recipes.sft import open_sft
from forked import run_forked
from tiny import save_model, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

# the end of a document, which the base model was made with, and of a message under its template
EOS, END = 2, 1
QUESTION = [{"role": "user", "content": "2 + 2?"}]
ANSWER = [{"role": "assistant", "content": "4"}]


def save_base(directory):
    """A base model under a chat template that it was not made with."""
    return save_model(directory, eos="<|endoftext|>", eos_token_id=EOS)


def burnish(recipe, tmp_path, output, model, rows, *flags):
    data = write_rows(tmp_path / f"{recipe}.jsonl", rows)
    paths = ("--model", str(model), "--data", str(data), "--output", str(tmp_path / output))
    return main([recipe, *paths, *flags])


def ends(directory):
    return GenerationConfig.from_pretrained(directory).eos_token_id


def test_a_base_model_that_learns_a_chat_template_ends_its_answers(tmp_path, capsys):
    base = save_base(tmp_path / "base")
    steps = ("--steps", "40", "--batch_size", "1", "--learning_rate", "1e-2")
    assert burnish("sft", tmp_path, "run", base, [{"messages": QUESTION + ANSWER}], *steps) == 0
    said = "end tokens: '<|end|>' (1) added to '<|endoftext|>' (2) of generation_config.json"
    assert said in capsys.readouterr().out

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run/model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run/model")
    prompt = tokenizer.apply_chat_template(
        QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        out = model.generate(**prompt, max_new_tokens=20, do_sample=False, pad_token_id=EOS)
    assert tokenizer.decode(out[0, prompt["input_ids"].shape[1] :]) == "4<|end|>"
    assert model.generation_config.eos_token_id == [EOS, END]

    online = ("--rewards", "{math: 1.0}")
    sampling = (
        "--steps",
        "2",
        "--prompts_per_rollout",
        "1",
        "--group_size",
        "4",
        "--max_tokens",
        "20",
    )
    rows = [{"prompt": QUESTION, "answer": "4"}]
    assert burnish("grpo", tmp_path, "grpo", tmp_path / "run/model", rows, *online, *sampling) == 0
    for line in (tmp_path / "grpo/metrics.jsonl").read_text().splitlines():
        assert json.loads(line)["completions/clipped_ratio"] == 0
    assert ends(tmp_path / "grpo/model") == [EOS, END]


PAIRS = [
    {"prompt": QUESTION, "chosen": ANSWER, "rejected": [{"role": "assistant", "content": "5"}]}
]
FEEDBACK = [{"prompt": QUESTION, "completion": ANSWER, "label": True}] * 2
MESSAGES = [{"messages": QUESTION + ANSWER}]
TEXTS = [{"prompt": "2 + 2?", "completion": "4"}]
ONLINE = {
    "rewards": {"math": 1.0},
    "prompts_per_rollout": 1,
    "group_size": 2,
    "max_tokens": 3,
    "source": "policy",
}


def opened(recipe, tmp_path, rows, **settings):
    """The end tokens of the model of a run that is ready to train."""
    base = settings.pop("model", None) or save_base(tmp_path / "base")
    config = settings_of(recipe)(model=str(base), data=rows, **settings)
    return opener(recipe)(config).context.model.plain.generation_config.eos_token_id


@pytest.mark.parametrize(
    ("recipe", "rows", "settings"),
    [
        ("dpo", PAIRS, {}),
        ("kto", FEEDBACK, {"batch_size": 2}),
        ("orpo", PAIRS, {}),
        ("cpo", PAIRS, {}),
        ("sft", MESSAGES, {"train_on": "all"}),
        ("sft", [{"prompt": QUESTION, "completion": ANSWER}], {}),
        ("distill", MESSAGES, {"teacher": "base"}),
        ("grpo", [{"prompt": QUESTION, "answer": "4"}], ONLINE),
    ],
    ids=["dpo", "kto", "orpo", "cpo", "sft-all", "sft-completion", "distill", "grpo"],
)
def test_every_recipe_on_conversations_ends_with_what_the_template_writes(
    tmp_path, recipe, rows, settings
):
    if settings.get("teacher"):
        settings = {"teacher": Teacher(model=str(save_base(tmp_path / "base")))}
    assert opened(recipe, tmp_path, rows, **settings) == [EOS, END]


def test_plain_texts_add_only_the_end_token_of_the_tokenizer(tmp_path):
    assert opened("sft", tmp_path, TEXTS) == EOS
    chat = save_model(tmp_path / "chat", eos_token_id=EOS)  # its tokenizer ends with <|end|>
    assert opened("sft", tmp_path, TEXTS, model=chat) == [EOS, END]


def test_an_answer_that_is_cut_shows_its_end_token_nevertheless(tmp_path):
    """What a cut leaves last may be special too, such as the end of a thought; it ends no
    answer.
    """
    long = [{"role": "assistant", "content": "<|start|> and more than fits"}]
    rows = [{"prompt": QUESTION, "completion": long}]
    prompt = len(
        AutoTokenizer.from_pretrained(save_base(tmp_path / "base"))(
            "<|start|>user\n2 + 2?<|end|>\n"
        ).input_ids
    )
    prompt += len("-assistant\n")
    # the first of these cuts right after the special token
    for limit in range(prompt + 1, prompt + 4):
        assert opened("sft", tmp_path, rows, max_length=limit) == [EOS, END]


def test_merged_and_bare_adapters_keep_the_end_tokens(tmp_path, capsys):
    base, steps = save_base(tmp_path / "base"), ("--steps", "1", "--batch_size", "1")
    assert burnish("sft", tmp_path, "run", base, MESSAGES, *steps, "--lora.r", "2") == 0
    assert ends(tmp_path / "run/model") == ends(tmp_path / "run/adapter") == [EOS, END]
    further = {"lora": Lora(path=str(tmp_path / "run/adapter"))}
    assert opened("sft", tmp_path, TEXTS, model=base) == EOS
    assert opened("sft", tmp_path, TEXTS, model=base, **further) == [EOS, END]


def test_a_resumed_run_and_an_object_keep_the_end_tokens(tmp_path):
    base = save_base(tmp_path / "base")
    for total, resume in (("1", "false"), ("2", "true")):
        flags = (
            "--steps",
            total,
            "--batch_size",
            "1",
            "--schedule",
            "constant",
            "--resume",
            resume,
        )
        assert burnish("sft", tmp_path, "run", base, MESSAGES, *flags) == 0
        assert ends(tmp_path / "run/model") == [EOS, END]
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(base),
        AutoTokenizer.from_pretrained(base),
    )
    run = burnish_package.sft(model, MESSAGES, tokenizer=tokenizer, steps=1, batch_size=1)
    run.train()
    assert (
        run.model.generation_config.eos_token_id
        == model.generation_config.eos_token_id
        == [EOS, END]
    )


def test_a_stream_keeps_the_end_tokens_of_its_later_steps(tmp_path):
    """The first step may have plain texts alone."""
    rows = [{"text": "a plain text"}] * 4
    write_rows(tmp_path / "plain.jsonl", rows)
    write_rows(tmp_path / "chat.jsonl", MESSAGES * 4)
    mixture = {str(tmp_path / "plain.jsonl"): 1, str(tmp_path / "chat.jsonl"): 1}
    settings = {
        "streaming": True,
        "batch_size": 1,
        "model": str(save_base(tmp_path / "base")),
        "data": mixture,
        "seed": 1,
    }
    config = SFT(**settings, output=str(tmp_path / "run"), steps=12)
    run = open_sft(config)
    first = run.context.model.plain.generation_config.eos_token_id
    run.train()
    assert first == EOS
    assert ends(tmp_path / "run/model") == [EOS, END]


@pytest.mark.parametrize("shards", [1, 2])
def test_two_ranks_save_the_end_tokens(tmp_path, shards):
    start = save_base(tmp_path / "base")
    data = write_rows(tmp_path / "rows.jsonl", MESSAGES * 4)
    for status, printed in run_forked(
        2, "rank_ended", str(start), str(data), str(tmp_path / "run"), shards
    ):
        assert status == 0, printed[-3000:]
    assert ends(tmp_path / "run/model") == [EOS, END]


def test_eos_token_names_the_end_token_of_tokenizer_and_model(tmp_path, capsys):
    base, steps = save_base(tmp_path / "base"), ("--steps", "1", "--batch_size", "1")
    assert burnish("sft", tmp_path, "run", base, TEXTS, *steps, "--eos_token", "<|end|>") == 0
    assert AutoTokenizer.from_pretrained(tmp_path / "run/model").eos_token == "<|end|>"
    assert ends(tmp_path / "run/model") == [EOS, END]
    assert burnish("sft", tmp_path, "typo", base, TEXTS, *steps, "--eos_token", "<|im_end|>") == 1
    told = capsys.readouterr().err
    named = "<|start|>, <|end|>, <|endoftext|>"
    assert f"eos_token: wanted a token of the vocabulary, such as {named}, got '<|im_end|>'" in told


def test_eos_token_stands_beside_what_the_template_writes(tmp_path):
    assert opened("sft", tmp_path, MESSAGES, eos_token="<|start|>") == [EOS, 0, END]


def test_a_tokenizer_that_is_passed_as_an_object_keeps_its_end_token(tmp_path):
    base = save_base(tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(base)
    config = SFT(model=str(base), data=TEXTS, tokenizer=tokenizer, eos_token="<|end|>")
    assert open_sft(config).tokenizer.eos_token == "<|end|>"
    assert tokenizer.eos_token == "<|endoftext|>"
