"""Words that end a completion, in text that comes token by token."""

import asyncio

import pytest
import torch
from burnish.loops.rollouts.local.source import LocalSource
from burnish.loops.rollouts.sample import Request, SamplingParams
from burnish.loops.rollouts.stop_words import StopWords, stop_words
from tiny import save_model
from transformers import AutoModelForCausalLM, AutoTokenizer


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("stop") / "start")


@pytest.fixture(scope="module")
def tokenizer(start):
    return AutoTokenizer.from_pretrained(start)


def end(tokenizer, text, *words, special=None):
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    if special is not None:  # which is no text
        tokens.insert(special, tokenizer.eos_token_id)
    return StopWords(tokenizer, words).end(tokens)


def test_a_completion_ends_with_the_token_that_completes_the_first_word(tokenizer):
    assert end(tokenizer, "1 + 1 = 2;\n3", ";", "\n") == len("1 + 1 = 2;")
    assert end(tokenizer, "a</answer> b</answer>", "</answer>") == len("a</answer>")
    assert end(tokenizer, "a</answer", "</answer>") is None
    assert end(tokenizer, "stop", "stop", "to") == 3
    assert end(tokenizer, "aab", "ab", "aab") == 3


def test_a_word_of_characters_of_several_bytes_ends_with_its_last_byte(tokenizer):
    assert end(tokenizer, "wörld€ €", "€") == len("wörld€".encode())
    assert end(tokenizer, "日本語", "本") == 6


def test_special_tokens_are_no_text(tokenizer):
    assert end(tokenizer, "x</a>y", "</a>", special=3) == len("x</a>") + 1
    assert end(tokenizer, "x", tokenizer.eos_token, special=1) is None


def test_words_without_a_tokenizer_are_refused():
    with pytest.raises(ValueError, match=r"^stop_words: without a tokenizer .* find 'END'"):
        stop_words(None, ("END",))


def test_a_stopped_completion_is_the_beginning_of_the_one_that_goes_on(start, tokenizer):
    """The same numbers decide its tokens, and their log-probs are the same."""
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float64)
    source = LocalSource(model, tokenizer, version=0)

    def sampled(*words):
        params = SamplingParams(40, stop_words=words)
        prompt = tokenizer("7 + 8 =", add_special_tokens=False)["input_ids"]
        return asyncio.run(source.sample(Request(0, prompt, range(24), params, key=3)))

    whole = sampled()
    letters = [sample.text[10:12] for sample in whole if sample.text[10:12].isascii()]
    word = next(letter for letter in letters if len(letter) == 2)
    ends = 0
    for sample, other in zip(sampled(word), whole, strict=True):
        count = StopWords(tokenizer, (word,)).end(other.tokens)
        assert sample.tokens == other.tokens[:count]
        assert sample.logprobs == pytest.approx(other.logprobs[:count], abs=1e-12)
        assert sample.spans[-1].end == len(sample.tokens)
        assert sample.finish == ("length" if count is None else "stop")
        assert (word in sample.text) == (count is not None)
        ends += count is not None
    assert 0 < ends < 24
