"""One text in the tokens of two tokenizers, and the spans of it where both have a boundary.

    "the cats"    student    the | _c | ats
                  teacher    th | e | _cats
    spans                    the = th e      _c ats = _cats

A span ends where both tokens end, after a whole character: a token that holds a part of a character
ends nowhere. Only the texts are compared, so any two tokenizers have spans, whatever their tokens
are called. What one of them can't write is in no span: bytes that are no character, and whatever
follows the place where a tokenizer that changes the text (lower case, say) says something else.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .chat import Encoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Decode = Callable[[Sequence[int]], str]
Encode = Callable[[str], Sequence[int]]

UNDECODED = "\ufffd"  # what bytes that are no character are decoded to
_WINDOW = 4  # tokens before a text that are decoded with it, for how it begins depends on them


class Decoded(NamedTuple):
    """Tokens as text.

    ``ends[i]`` is the number of characters of the text that tokens up to the i-th write; None where
    a token ends within a character, or writes nothing.
    """

    text: str
    ends: list[int | None]


class Span(NamedTuple):
    """Tokens [start, stop) of the first tokenizer that write what [other_start, other_stop) of the
    second do.
    """

    start: int
    stop: int
    other_start: int
    other_stop: int


def decoded(decode: Decode, tokens: Sequence[int], after: Sequence[int] = ()) -> Decoded:
    """The text of tokens and where in it they end, in time proportional to their number.

    Args:
        after: tokens before these, since some tokenizers leave out a space at the start of a text.
    """
    before = list(after[-_WINDOW:])
    ids = [*before, *tokens]
    # As servers do that stream: of ids[window:], the text of ids[window:read] is known already.
    window = 0
    read = len(before)
    text = ""
    ends: list[int | None] = []
    for stop in range(read + 1, len(ids) + 1):
        known = decode(ids[window:read])
        longer = decode(ids[window:stop])
        if len(longer) <= len(known) or longer.endswith(UNDECODED):
            ends.append(None)
            continue
        text += longer[len(known) :]
        ends.append(len(text))
        window = read
        read = stop
    return Decoded(text, ends)


def shared_spans(first: Decoded, second: Decoded) -> list[Span]:
    """The smallest spans that end where tokens of both end, as far as both texts are the same."""
    same = _common(first.text, second.text)
    places = {end: place for place, end in enumerate(second.ends) if end is not None}
    spans = []
    start = other_start = begin = 0
    for place, end in enumerate(first.ends):
        if end is None or end > same or end not in places:
            continue
        span = Span(start, place + 1, other_start, places[end] + 1)
        if UNDECODED not in first.text[begin:end]:
            spans.append(span)
        start, other_start, begin = span.stop, span.other_stop, end
    return spans


def _common(first: str, second: str) -> int:
    """How many characters two texts begin with that are the same."""
    for place, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return place
    return min(len(first), len(second))


class Reader(NamedTuple):
    """A tokenizer as text and tokens, without special tokens of its own accord.

    Attributes:
        begin: token that a text begins with, if it has one.
        end: token that ends a text, if it has one.
        reply_end: token that ends a reply under the chat template, if there is one: gemma's is
            <end_of_turn>, and <eos> its ``end``.
    """

    decode: Decode
    encode: Encode
    begin: int | None
    end: int | None
    reply_end: int | None = None


def reader_of(tokenizer: "PreTrainedTokenizerBase") -> Reader:
    """The functions of a tokenizer of `transformers`."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)

    def decode(ids: Sequence[int]) -> str:
        if backend is not None:  # the same without transformers' work around it
            return str(backend.decode(list(ids), skip_special_tokens=False))
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return str(tokenizer.decode(list(ids), **options))

    def encode(text: str) -> Sequence[int]:
        ids: Sequence[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    reply_end: int | None = None
    if tokenizer.chat_template is not None:
        reply_end = next(iter(Encoder(tokenizer).reply_end), None)
    return Reader(decode, encode, tokenizer.bos_token_id, tokenizer.eos_token_id, reply_end)


def paired_ends(first: Reader, second: Reader) -> dict[int, int | None]:
    """What takes the place of the first's tokens that end a reply or a text: the second's.

    A reply ends as a reply and a text as a text; a token that ends both ends replies. If the second
    has no chat template that ends a reply, it may know the first's token, or ends it as a text.
    """
    ends: dict[int, int | None] = {}
    if first.end is not None:
        ends[first.end] = second.end
    if first.reply_end is not None and second.reply_end is not None:
        ends[first.reply_end] = second.reply_end
    elif first.reply_end is not None and first.reply_end != first.end:
        spelled_alike = second.encode(first.decode([first.reply_end]))
        ends[first.reply_end] = spelled_alike[0] if len(spelled_alike) == 1 else second.end
    return ends


def retokenized(
    tokens: Sequence[int], first: Reader, second: Reader, after: Sequence[int] = ()
) -> tuple[list[int], list[Span]]:
    """The same text in the second tokenizer's tokens, and the spans that both share.

    Tokens of the first that end a reply or a text become the second's, and the two are a span.

    Args:
        after: tokens of the first before these.
    """
    others: list[int] = []
    spans: list[Span] = []
    ends = paired_ends(first, second)
    before = list(after)
    start = 0
    for stop in [*(i for i, token in enumerate(tokens) if token in ends), len(tokens)]:
        text = decoded(first.decode, tokens[start:stop], before)
        ids = second.encode(text.text)
        for span in shared_spans(text, decoded(second.decode, ids)):
            spans.append(_moved(span, start, len(others)))
        others += ids
        end = ends[tokens[stop]] if stop < len(tokens) else None
        if end is not None:
            spans.append(Span(stop, stop + 1, len(others), len(others) + 1))
            others.append(end)
        before = [*before, *tokens[start : stop + 1]][-_WINDOW:]
        start = stop + 1
    return others, spans


def _moved(span: Span, by: int, other_by: int) -> Span:
    """The span in the tokens of the whole text, of which these begin a part."""
    start, stop, other_start, other_stop = span
    return Span(start + by, stop + by, other_start + other_by, other_stop + other_by)


def shared_tokens(
    first: "PreTrainedTokenizerBase", second: "PreTrainedTokenizerBase"
) -> list[tuple[int, int]]:
    """The ids of the tokens that both vocabularies spell alike, in the order of the second, as TRL
    matches them; and of the tokens that end a reply or a text, however they are spelled.

    Of one token there is one pair: that of the ends of a reply under two chat templates, or else
    that of tokens that are spelled alike.
    """
    ids = first.get_vocab()
    spelled = sorted(second.get_vocab().items(), key=lambda each: each[1])
    pairs = [(ids[token], other) for token, other in spelled if token in ids]
    one, two = reader_of(first), reader_of(second)
    if one.reply_end is not None and two.reply_end is not None:
        replies = (one.reply_end, two.reply_end)
        pairs = [pair for pair in pairs if pair[0] != replies[0] and pair[1] != replies[1]]
        pairs.append(replies)
    for end, other in paired_ends(one, two).items():
        taken = {id for id, _ in pairs}, {id for _, id in pairs}
        if other is not None and end not in taken[0] and other not in taken[1]:
            pairs.append((end, other))
    return pairs
