"""The prompts and models on which GRPO is compared, and a step of both sides on the same
completions.
"""

import json

import pytest
import torch
from burnish.benchmarks.peer.sampled import (
    SAMPLES,
    distance,
    full_length,
    questions,
    talkative,
    vowels,
)
from burnish.benchmarks.peer.trainers import run_provider
from tiny import save_model, sums, write_rows
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast


def pairs(*asked):
    return [
        {"prompt": [{"content": text}], "chosen": [{"content": f"to {text[:9]}"}]} for text in asked
    ]


def test_each_question_follows_others_that_are_answered():
    rows = list(questions(iter(pairs("a?", "b?", "x" * 300))))
    texts = [row["prompt"][0]["content"] for row in rows]
    assert len(rows) == 3 and not any("x" in text for text in texts)
    assert texts[0].count("Question: ") == 7 and texts[0].endswith("Question: a?\nAnswer:")
    assert texts[0].startswith("Question: a?\nAnswer: to a?\n\nQuestion: b?\nAnswer: to b?\n\n")


@pytest.fixture
def model(tmp_path):
    """A model whose end token is not the last of its special ones."""
    given = save_model(tmp_path / "given" / "small")
    tokenizer = AutoTokenizer.from_pretrained(given)
    tokenizer.unk_token = "Z"
    tokenizer.save_pretrained(given)
    return given


def test_a_talkative_model_has_the_same_weights_and_another_end(model, tmp_path):
    target = talkative(model, tmp_path)
    tokenizer, end = (
        AutoTokenizer.from_pretrained(target),
        AutoTokenizer.from_pretrained(model).unk_token_id,
    )
    before, after = (AutoModelForCausalLM.from_pretrained(path) for path in (model, target))
    assert (
        tokenizer.eos_token_id
        == after.config.eos_token_id
        == after.generation_config.eos_token_id
        == end
    )
    assert tokenizer.pad_token_id == after.generation_config.pad_token_id == 1 != end
    torch.testing.assert_close(after.state_dict(), before.state_dict(), rtol=0, atol=0)


def test_a_talkative_model_never_ends_as_it_did(model, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.unk_token = "Y"
    tokenizer.eos_token = "Z"  # the last of its special ones, as SmolLM2's
    last = tokenizer.eos_token_id
    tokenizer.chat_template = "{{ messages[0]['content'] }}Z"
    tokenizer.save_pretrained(model)
    changed = AutoTokenizer.from_pretrained(talkative(model, tmp_path))
    assert changed.eos_token_id == tokenizer.unk_token_id != last
    assert changed.chat_template.endswith("}}Y")


def test_a_tokenizer_with_one_special_token_is_refused(model, tmp_path):
    words = Tokenizer(WordLevel({"a": 0, "end": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="end").save_pretrained(model)
    with pytest.raises(ValueError, match="no special token but the one that ends a completion"):
        talkative(model, tmp_path)


def test_the_reward_is_the_share_of_vowels():
    assert vowels([[{"content": "A b, e!"}], [{"content": "12"}]]) == [2 / 3, 0.0]


def test_completions_have_their_length_if_hardly_one_has_ended_early():
    lines = [{"completions/mean_length": mean} for mean in (64.0, 63.0)]
    assert full_length(lines, 64) and not full_length(
        [*lines, {"completions/mean_length": 62.0}], 64
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the peer's own
def test_grpo_and_trl_take_the_same_step_on_the_same_completions(model, tmp_path):
    target = talkative(model, tmp_path)
    data, evidence = (
        write_rows(tmp_path / "rows.jsonl", questions(iter(sums(4)))),
        tmp_path / "evidence",
    )
    evidence.mkdir()
    sizes = {"group": 3, "tokens": 16}  # 6 rows, which the peer does not take 8 at a time
    ours, theirs = (
        run_provider("grpo", name, target, data, 2, 1, "float32", sizes, evidence)
        for name in ("burnish", "trl")
    )
    assert ours["losses"] == pytest.approx(theirs["losses"], abs=1e-5)
    assert distance(evidence / "burnish.float32.pt", evidence / "trl.float32.pt") < 1e-5

    samples = [
        json.loads(line) for line in (evidence / "burnish" / SAMPLES).read_text().splitlines()
    ]
    assert len(samples) == 6 and len({tuple(sample["tokens"]) for sample in samples}) == 6

    # On other answers the gradient is another one.
    assert all(len(sample["tokens"]) == 16 for sample in samples)
    samples[3]["tokens"] = samples[4]["tokens"]
    write_rows(evidence / "burnish" / SAMPLES, samples)
    (evidence / "trl.float32.pt").rename(evidence / "first.pt")
    run_provider("grpo", "trl", target, data, 2, 1, "float32", sizes, evidence)
    assert distance(evidence / "trl.float32.pt", evidence / "first.pt") > 1e-3


@pytest.mark.filterwarnings("default")
def test_the_two_are_to_ask_the_same_prompts(model, tmp_path):
    target = talkative(model, tmp_path)
    data = write_rows(tmp_path / "rows.jsonl", questions(iter(sums(4))))
    (tmp_path / "burnish").mkdir()
    write_rows(
        tmp_path / "burnish" / SAMPLES, [{"prompt": [1, 2], "tokens": [3], "logprobs": [-1.0]}] * 16
    )
    with pytest.raises(RuntimeError, match="the two sides ask other prompts"):
        run_provider("grpo", "trl", target, data, 1, 1, "float32", None, tmp_path)
