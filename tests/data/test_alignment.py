"""Spans that two tokenizers share: both write the same text in each, and none could be smaller."""

import random
from itertools import pairwise

import pytest
from burnish.data.alignment import (
    Decoded,
    Span,
    decoded,
    reader_of,
    retokenized,
    shared_spans,
    shared_tokens,
)
from small_tokenizers import CORPUS, like_sentencepiece, on_bytes

PIECES = [
    *"abcdehst ",
    " the",
    " cats",
    "\n",
    "  ",
    "\t",
    "ß",
    "é",
    "日本",
    "語",
    "🙂",
    "👩‍👧",
    "и",
    ".",
]


@pytest.fixture(scope="module")
def tokenizers():
    return {
        "bytes": on_bytes(258),
        "merged": on_bytes(340),
        "sentencepiece": like_sentencepiece(360),
    }


def texts(count, seed=0):
    rng = random.Random(seed)
    for _ in range(count):
        yield "".join(rng.choice(PIECES) for _ in range(rng.randint(1, 25)))


PAIRS = [
    ("bytes", "merged"),
    ("merged", "bytes"),
    ("merged", "sentencepiece"),
    ("sentencepiece", "merged"),
]


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_both_write_the_same_in_every_span_and_all_of_the_text_is_in_some(one, other, tokenizers):
    first, second = (reader_of(tokenizers[name]) for name in (one, other))
    more = 0
    for text in texts(200):
        ids = first.encode(text)
        others, spans = retokenized(ids, first, second)
        assert second.decode(others) == first.decode(ids) == text
        assert spans[0].start == spans[0].other_start == 0
        assert spans[-1].stop == len(ids) and spans[-1].other_stop == len(others)
        for before, after in pairwise(spans):
            assert before.stop == after.start and before.other_stop == after.other_start
        for span in spans:  # what is decoded up to there is the same
            assert first.decode(ids[: span.stop]) == second.decode(others[: span.other_stop])
            more += span.stop - span.start > 1 or span.other_stop - span.other_start > 1
    assert more > 100


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_no_span_could_be_split(one, other, tokenizers):
    """Within a span there is no place where the texts up to tokens of both are the same."""
    first, second = (reader_of(tokenizers[name]) for name in (one, other))
    for text in texts(60, seed=1):
        ids = first.encode(text)
        others, spans = retokenized(ids, first, second)
        found = {(span.stop, span.other_stop) for span in spans}
        mine = {first.decode(ids[:i]): i for i in range(1, len(ids) + 1)}
        for j in range(1, len(others) + 1):
            said = second.decode(others[:j])
            if said in mine and said and not said.endswith("\ufffd"):
                assert (mine[said], j) in found


def test_a_character_in_several_tokens_ends_with_the_last_of_them(tokenizers):
    first = reader_of(tokenizers["bytes"])
    ids = first.encode("a🙂b")
    assert decoded(first.decode, ids) == Decoded("a🙂b", [1, None, None, None, 2, 3])
    others, spans = retokenized(ids, first, reader_of(tokenizers["sentencepiece"]))
    assert [(span.start, span.stop) for span in spans] == [(0, 1), (1, 5), (5, 6)]
    assert spans[-1].other_stop == len(others)


def test_bytes_that_are_no_text_are_in_no_span(tokenizers):
    """Of a sample that ended within a character, or left one unfinished."""
    first, second = (reader_of(tokenizers[name]) for name in ("bytes", "merged"))
    smile = first.encode("🙂")
    cut = [*first.encode("ab"), *smile[:2]]
    others, spans = retokenized(cut, first, second)
    assert second.decode(others) == "ab" and spans[-1].stop == 2
    broken = [*first.encode("ab"), *smile[:2], *first.encode("c ab")]
    _, spans = retokenized(broken, first, second)
    covered = {place for span in spans for place in range(span.start, span.stop)}
    assert covered == {0, 1, 5, 6, 7}


def test_the_end_of_one_is_the_end_of_the_other(tokenizers):
    first, second = (reader_of(tokenizers[name]) for name in ("merged", "sentencepiece"))
    ids = [*first.encode("the cats"), first.end, *first.encode("\n")]
    others, spans = retokenized(ids, first, second)
    end = others.index(second.end)
    assert Span(ids.index(first.end), ids.index(first.end) + 1, end, end + 1) in spans
    assert second.decode(others[:end]) == "the cats"
    assert spans[-1].stop == len(ids) and spans[-1].other_stop == len(others)
    without = second._replace(end=None)
    others, spans = retokenized(ids, first, without)
    assert all(not span.start <= ids.index(first.end) < span.stop for span in spans)
    assert second.decode(others) == "the cats \n" or second.decode(others) == "the cats\n"


def test_a_reply_ends_as_the_replies_of_the_other_do(smollm2, byte_tokenizer):
    """Under gemma's template a reply ends with <end_of_turn>, and a text with <eos>."""
    gemma = byte_tokenizer("gemma")
    first, second = reader_of(gemma), reader_of(smollm2)
    turn = gemma.convert_tokens_to_ids("<end_of_turn>")
    assert (first.reply_end, first.end) == (turn, gemma.eos_token_id)
    assert second.reply_end == second.end == smollm2.convert_tokens_to_ids("<|im_end|>")
    for one, two in ((first, second), (second, first)):
        ids = [*one.encode("the cats"), one.reply_end, *one.encode("\n")]
        others, spans = retokenized(ids, one, two)
        assert others == [*two.encode("the cats"), two.reply_end, *two.encode("\n")]
        end = ids.index(one.reply_end)
        assert Span(end, end + 1, len(others) - 2, len(others) - 1) in spans
    text = [*first.encode("the cats"), first.end]
    assert retokenized(text, first, second)[0] == [*second.encode("the cats"), second.end]


def test_without_a_template_a_reply_ends_as_its_token_is_spelled_or_as_a_text(
    byte_tokenizer, tokenizers
):
    first = reader_of(byte_tokenizer("gemma"))
    ids = [*first.encode("cats"), first.reply_end]
    spells_it, lacks_it = byte_tokenizer(None), tokenizers["merged"]
    assert reader_of(spells_it).reply_end is None
    others, _ = retokenized(ids, first, reader_of(spells_it))
    assert spells_it.decode(others) == "cats<end_of_turn>" and len(others) == 5
    second = reader_of(lacks_it)
    others, spans = retokenized(ids, first, second)
    assert others == [*second.encode("cats"), second.end] and spans[-1].start == len(ids) - 1


def test_the_ends_of_replies_are_one_pair_of_shared_tokens(smollm2, byte_tokenizer):
    """And no pair of tokens that are spelled alike, one of which ends no reply."""
    gemma = byte_tokenizer("gemma")
    knows = gemma.convert_tokens_to_ids("<|im_end|>")
    turn = gemma.convert_tokens_to_ids("<end_of_turn>")
    end = smollm2.eos_token_id
    for pairs in (shared_tokens(smollm2, gemma), [p[::-1] for p in shared_tokens(gemma, smollm2)]):
        assert (end, turn) in pairs and (end, knows) not in pairs
        for ids in zip(*pairs, strict=True):
            assert len(set(ids)) == len(ids)


def test_a_space_that_a_text_begins_with_stays_in_context(tokenizers):
    """SentencePiece's decoder leaves out the first space of what it is given."""
    first, second = (reader_of(tokenizers[name]) for name in ("sentencepiece", "merged"))
    whole = first.encode("the cats sat")
    pieces = tokenizers["sentencepiece"].convert_ids_to_tokens(whole)
    cut = next(i for i in range(1, len(whole)) if pieces[i].startswith("▁"))
    others, spans = retokenized(whole[cut:], first, second, whole[:cut])
    assert second.decode(others).startswith(" ")
    assert spans[-1].stop == len(whole) - cut


def test_where_a_tokenizer_changes_the_text_spans_end(tokenizers):
    first, second = reader_of(tokenizers["bytes"]), reader_of(on_bytes(258, lower=True))
    _, spans = retokenized(first.encode("the cats Sat on"), first, second)
    assert spans[-1].stop == len("the cats ")


def test_the_same_tokenizer_shares_every_token(tokenizers):
    reader = reader_of(tokenizers["merged"])
    ids = reader.encode("the cats sat on the mat")
    others, spans = retokenized(ids, reader, reader)
    assert others == ids
    assert spans == [Span(i, i + 1, i, i + 1) for i in range(len(ids))]
    assert shared_spans(Decoded("", []), Decoded("", [])) == []


def test_shared_tokens_are_spelled_alike_or_end_an_answer(tokenizers):
    one, other = tokenizers["merged"], tokenizers["sentencepiece"]
    pairs = shared_tokens(one, other)
    *alike, ends = pairs
    assert ends == (one.eos_token_id, other.eos_token_id)
    assert all(
        one.convert_ids_to_tokens(first) == other.convert_ids_to_tokens(second)
        for first, second in alike
    )
    assert len(alike) == len(one.get_vocab().keys() & other.get_vocab().keys())
    assert [second for _, second in alike] == sorted(second for _, second in alike)
    assert shared_tokens(one, one) == [(i, i) for i in range(len(one))]
    ended = on_bytes(300, eos="<s>")  # has the other's end token as its first
    assert (one.eos_token_id, 0) not in shared_tokens(one, ended)
    assert (0, one.eos_token_id) not in shared_tokens(ended, one)


def test_the_work_grows_with_the_number_of_tokens(tokenizers):
    reader = reader_of(tokenizers["merged"])
    asked = []

    def decode(ids):
        asked.append(len(ids))
        return reader.decode(ids)

    ids = reader.encode("the cats sat on the mat, " * 40)
    decoded(decode, ids)
    assert sum(asked) < 8 * len(ids)


def test_smollm2_shares_spans_with_a_small_tokenizer(smollm2, tokenizers):
    real, small = reader_of(smollm2), reader_of(tokenizers["merged"])
    for text in [*CORPUS, *texts(30, seed=2)]:
        for first, second in ((real, small), (small, real)):
            ids = first.encode(text)
            others, spans = retokenized(ids, first, second)
            assert second.decode(others) == text
            assert spans[-1].stop == len(ids) and spans[-1].other_stop == len(others)
