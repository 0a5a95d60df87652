"""What recipes that sample are given and can't use, as a person meets it: refused before anything
is sampled.
"""

import json

import pytest
from burnish.loops.cli import main
from tiny import save_model, sums, write_rows

ROWS = [{"prompt": pair["prompt"], "answer": pair["chosen"][0]["content"]} for pair in sums(4)]
DISTILLED = [{"prompt": f"{n}?", "completion": "a"} for n in range(4)]
LONG = {"prompt": [{"role": "user", "content": "x" * 480}], "answer": "1"}
FITS = "a prompt of 499 tokens and max_tokens=100 do not fit the model's context of 512; lower max_tokens"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_model(tmp_path_factory.mktemp("start")))


@pytest.fixture
def refused(model, tmp_path, capsys):
    """What is said of the settings when they are refused."""

    def refused(recipe, rows, **settings):
        fields = {
            "model": model,
            "data": write_rows(tmp_path / "data.jsonl", rows),
            "output": tmp_path / "run",
        }
        fields |= (
            {"rewards": {"exact_match": 1.0}} if recipe != "distill" else {"teacher.model": model}
        )
        flags = [
            f"--{name}={json.dumps(value) if isinstance(value, dict) else value}"
            for name, value in {**fields, "max_tokens": 100, **settings}.items()
        ]
        assert main([recipe, *flags]) == 1
        assert not (tmp_path / "run/samples.jsonl").exists()
        return capsys.readouterr().err

    return refused


@pytest.mark.parametrize("recipe", ["grpo", "rloo", "ppo", "online_dpo"])
def test_a_row_that_asks_nothing_is_named(recipe, refused):
    assert "data.jsonl line 5: 'prompt' has no messages" in refused(
        recipe, [*ROWS, {"prompt": [], "answer": "1"}]
    )


def test_a_row_that_shows_an_image_is_named(refused):
    message = {
        "role": "user",
        "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}],
    }
    said = refused("grpo", [*ROWS, {"prompt": [message], "answer": "1"}])
    assert (
        "data.jsonl line 5: the content of 'prompt' message 1 has a part of the type 'image', wanted text"
        in said
    )
    assert "column 'image'" in refused("grpo", [{**row, "image": "a.png"} for row in ROWS])


def test_a_prompt_that_leaves_no_room_for_its_answer_is_named_before_the_first_step(
    refused, tmp_path
):
    assert f"data.jsonl line 5: {FITS}, cut prompts (max_prompt_length, trunc" in refused(
        "grpo", [*ROWS, LONG]
    )
    held_out = write_rows(tmp_path / "held_out.jsonl", [LONG])
    assert f"held_out.jsonl line 1: {FITS}" in refused("ppo", ROWS, eval_data=held_out)
    long = {"prompt": "x" * 480, "completion": "a"}
    said = refused("distill", [*DISTILLED, long], on_policy=1.0)
    assert "data.jsonl, example 5: a prompt of 480 tokens and max_tokens=100 do not fit" in said
    assert "cut prompts (max_length, truncation)" in said


def test_data_without_what_a_reward_reads_is_named(refused, tmp_path):
    held_out = write_rows(tmp_path / "held_out.jsonl", [{"prompt": "1?"}])
    said = refused("grpo", ROWS, eval_data=held_out)
    assert "reward exact_match: rename a column, " in said
    assert "held_out.jsonl has no column 'answer'; there are prompt" in said


def test_a_model_that_is_not_there_is_named(refused):
    assert "model: /no/such/model is neither a directory" in refused(
        "grpo", ROWS, model="/no/such/model"
    )
