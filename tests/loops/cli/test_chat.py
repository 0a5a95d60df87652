"""A conversation on standard input and output says what the model generates, token for token."""

import io
import subprocess
import sys

import pytest
import torch
from burnish.loops.cli import main
from burnish.loops.config import Lora
from burnish.loops.recipes.settings import SFT
from burnish.loops.recipes.sft import open_sft
from grids import slow
from tiny import save_model, sums, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig


@pytest.fixture
def model(tmp_path):
    return save_model(tmp_path / "model")


@pytest.fixture
def chat(monkeypatch, capsys):
    """``chat(lines, *words)`` gives the status, and what was written to output and errors."""

    def talk(lines, *words):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        status = main(["chat", *map(str, words)])
        return status, *capsys.readouterr()

    return talk


def generated(directory, lines, *, system=None, most=12, dtype=torch.float32):
    """The likeliest answers to these lines by the model's own generate, one after the other."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    messages = [{"role": "system", "content": system}] if system else []
    answers = []
    for line in lines:
        messages.append({"role": "user", "content": line})
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        prompt = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
        ends = sorted(
            {*GenerationConfig.from_pretrained(directory).eos_token_id, tokenizer.eos_token_id}
        )
        tokens = model.generate(
            prompt, do_sample=False, max_new_tokens=most, eos_token_id=ends, pad_token_id=ends[0]
        )
        answers.append(tokenizer.decode(tokens[0, prompt.shape[1] :], skip_special_tokens=True))
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers


@pytest.fixture
def run(tmp_path):
    """A run that has learned by heart to end with a token that its start did not end with."""
    rows = [{"messages": pair["prompt"] + pair["chosen"]} for pair in sums(4)]
    start = save_model(tmp_path / "start", eos="<|start|>", dtype=torch.bfloat16)
    fields = {
        "model": str(start),
        "data": str(write_rows(tmp_path / "messages.jsonl", rows)),
        "dtype": "bfloat16",
    }
    fields |= {
        "output": str(tmp_path / "run"),
        "steps": 150,
        "batch_size": 4,
        "learning_rate": 1e-2,
    }
    open_sft(SFT(**fields, schedule="constant")).train()
    return tmp_path / "run", rows


def test_a_run_answers_as_its_model_generates_and_stops_at_its_end_tokens(run, chat):
    directory, rows = run
    lines = [row["messages"][0]["content"] for row in rows]
    for line, row in zip(lines, rows, strict=True):
        status, out, _ = chat([line], directory, "--temperature", 0)
        # learned by heart, no end token shown
        assert status == 0 and out == row["messages"][1]["content"] + "\n"
    conversation = generated(directory / "model", lines, dtype=torch.bfloat16)
    assert chat(lines, directory, "--temperature", 0, "--max_tokens", 12)[1] == "".join(
        f"{a}\n" for a in conversation
    )


def test_a_system_message_and_earlier_turns_are_in_the_prompt(model, chat):
    lines = ["1 + 1?", "and 2?"]
    GenerationConfig(eos_token_id=[1]).save_pretrained(model)
    expected = generated(model, lines, system="be terse")
    status, out, _ = chat(
        lines, model, "--system", "be terse", "--temperature", 0, "--max_tokens", 12
    )
    assert (status, out) == (0, "".join(f"{answer}\n" for answer in expected))
    assert (
        expected[0] != generated(model, lines)[0]
        and expected[1] != generated(model, lines[1:], system="be terse")[0]
    )


def test_an_answer_ends_with_a_stop_word_and_repeats_itself_less(model, chat):
    lines = ["1+1="]
    _, plain, _ = chat(lines, model, "--temperature", 0, "--max_tokens", 12)
    _, penalized, _ = chat(
        lines, model, "--temperature", 0, "--max_tokens", 12, "--repetition_penalty", 100
    )
    assert penalized != plain
    word = next(letter for letter in penalized if letter.isascii() and letter.isalnum())
    _, stopped, _ = chat(
        lines, model, "--temperature", 0, "--max_tokens", 12, "--repetition_penalty", 100,
        "--stop", word,
    )  # fmt: skip
    assert stopped.strip() == penalized[: penalized.index(word) + 1].strip()
    status, _, err = chat(lines, model, "--repetition_penalty", 0)
    assert status == 1 and "repetition_penalty: wanted > 0, got 0.0" in err


def test_answers_are_sampled_at_the_temperature(model, chat):
    likeliest = chat(["1 + 1?"], model, "--temperature", 0, "--max_tokens", 12)[1]
    hot = {chat(["1 + 1?"], model, "--temperature", 5, "--max_tokens", 12)[1] for _ in range(4)}
    assert len(hot) == 4
    assert chat(["1 + 1?"], model, "--temperature", 1e-4, "--max_tokens", 12)[1] == likeliest


def test_a_model_without_a_chat_template_continues_each_line(tmp_path, chat):
    plain = save_model(tmp_path / "plain", chat=False)
    status, out, said = chat(["ab", "", "ab"], plain, "--temperature", 0, "--max_tokens", 5)
    one, other, rest = out.split("\n")
    assert status == 0 and one == other and rest == ""
    assert "no chat template: each line is continued by itself" in said
    status, _, said = chat(["ab"], plain, "--system", "be terse")
    assert status == 1 and "system: this model has no chat template" in said


def test_what_cannot_be_talked_to_is_refused(tmp_path, model, chat):
    rows = [{"messages": pair["prompt"] + pair["chosen"]} for pair in sums(4)]
    fields = {
        "model": str(model),
        "data": str(write_rows(tmp_path / "m.jsonl", rows)),
        "output": str(tmp_path / "run"),
    }
    open_sft(SFT(**fields, steps=1, lora=Lora(r=2))).train()
    assert "burnish merge" in chat([], tmp_path / "run/adapter")[2]
    (tmp_path / "run/model").rename(tmp_path / "elsewhere")
    assert (
        f"the run has left no model yet; burnish export {tmp_path / 'run'}"
        in chat([], tmp_path / "run")[2]
    )
    assert "temperature: wanted at least 0, got -1.0" in chat([], model, "--temperature", "-1")[2]
    assert "max_tokens: wanted at least 1, got 0" in chat([], model, "--max_tokens", 0)[2]
    assert "model: nowhere/there is neither a directory" in chat([], "nowhere/there")[2]
    missing = tmp_path / "runs/nope"
    assert f"{missing} is neither a directory" in chat([], missing)[2]
    missing.mkdir(parents=True)
    assert f"{missing}: no config.json; wanted the directory that holds" in chat([], missing)[2]
    assert "the context of this model 512; begin anew" in chat(["x" * 600], model)[2]


@slow
def test_it_works_in_a_pipe(model):
    command = [
        sys.executable,
        "-m",
        "burnish",
        "chat",
        str(model),
        "--temperature",
        "0",
        "--max_tokens",
        "5",
    ]
    one = subprocess.run(command, input="1 + 1?\n", capture_output=True, text=True, timeout=120)
    two = subprocess.run(command, input="1 + 1?\n2?\n", capture_output=True, text=True, timeout=120)
    assert one.returncode == two.returncode == 0 and one.stderr == two.stderr == ""
    assert (
        two.stdout.startswith(one.stdout) and two.stdout.count("\n") > one.stdout.count("\n") >= 1
    )
