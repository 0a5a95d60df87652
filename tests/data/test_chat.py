import copy
import random
import re

import pytest
from burnish.data.chat import Encoder
from burnish.data.columns import BadRow, common_prefix
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi\n"},
    {"role": "assistant", "content": "bonjour, é"},
    {"role": "user", "content": "assistant\n2+2?"},
    {"role": "assistant", "content": "4 assistant\nfour"},
]


def trained_runs(tokenizer, messages, **kwargs) -> list[str]:
    """The runs of trained tokens, as text."""
    [(ids, trained, shortened)] = Encoder(tokenizer).assistant(messages, {}, **kwargs)
    assert not shortened
    whole = tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
    assert ids == whole[: len(ids)]
    assert not tokenizer.decode(whole[len(ids) :]).strip()
    runs: list[list[int]] = []
    for previous, token, train in zip([False, *trained], ids, trained, strict=False):
        if train:
            runs += [] if previous else [[]]
            runs[-1].append(token)
    return [tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize(
    ("template", "end"),
    [
        ("chatml", "<|im_end|>"),
        ("llama3", "<|eot_id|>"),
        ("gemma", "<end_of_turn>"),
        ("markers", "<|im_end|>"),
    ],
)
def test_what_is_trained_is_every_answer_with_its_end_token_and_nothing_else(
    byte_tokenizer, template, end
) -> None:
    assert trained_runs(byte_tokenizer(template), CHAT) == [
        f"bonjour, é{end}",
        f"4 assistant\nfour{end}",
    ]


def test_what_is_trained_with_the_template_of_a_real_model(smollm2) -> None:
    assert trained_runs(smollm2, CHAT) == ["bonjour, é<|im_end|>", "4 assistant\nfour<|im_end|>"]
    assert trained_runs(smollm2, CHAT[1:]) == [
        "bonjour, é<|im_end|>",
        "4 assistant\nfour<|im_end|>",
    ]


@pytest.mark.parametrize("template", ["chatml", "markers"])
def test_answers_before_the_start_are_not_trained(byte_tokenizer, template) -> None:
    assert trained_runs(byte_tokenizer(template), CHAT, start=3) == ["4 assistant\nfour<|im_end|>"]


def test_a_conversation_of_one_turn_splits_even_where_history_would_be_rewritten(
    byte_tokenizer,
) -> None:
    messages = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "<think>easy</think>4"},
    ]
    assert trained_runs(byte_tokenizer("forgets_thinking"), messages) == [
        "<think>easy</think>4<|im_end|>"
    ]


def test_turns_that_a_template_rewrites_as_history_are_examples_of_their_own(
    byte_tokenizer,
) -> None:
    messages = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "<think>easy</think>4"},
        {"role": "user", "content": "3+3?"},
        {"role": "assistant", "content": "6"},
        {"role": "user", "content": "4+4?"},
        {"role": "assistant", "content": "<think>so</think>8"},
    ]
    tokenizer = byte_tokenizer("forgets_thinking")
    found = [
        (
            tokenizer.decode(ids),
            tokenizer.decode([token for token, train in zip(ids, trained, strict=True) if train]),
        )
        for ids, trained, _ in Encoder(tokenizer).assistant(messages, {})
    ]
    first, between, second = (
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n",
        "<|im_end|>\n",
        "3+3?<|im_end|>",
    )
    assert found == [
        (f"{first}<think>easy</think>4<|im_end|>", "<think>easy</think>4<|im_end|>"),
        (
            f"{first}4{between}<|im_start|>user\n{second}\n<|im_start|>assistant\n6{between}<|im_start|>user\n4+4?"
            f"{between}<|im_start|>assistant\n<think>so</think>8<|im_end|>",
            "6<|im_end|><think>so</think>8<|im_end|>",
        ),
    ]


def test_marked_turns_are_examples_of_their_own_where_history_is_rewritten(
    byte_tokenizer,
) -> None:
    tokenizer = byte_tokenizer("markers")
    source = tokenizer.chat_template.replace(
        "{% generation %}{{ m.content }}",
        "{% generation %}{{ m.content if loop.last else m.content.split('</think>')[-1] }}",
    )
    messages = [*CHAT[1:2], {"role": "assistant", "content": "<think>a</think>4"}, *CHAT[3:]]
    found = Encoder(tokenizer, source).assistant(messages, {})
    assert [
        tokenizer.decode([token for token, train in zip(ids, trained, strict=True) if train])
        for ids, trained, _ in found
    ] == ["<think>a</think>4<|im_end|>", "4 assistant\nfour<|im_end|>"]


def test_a_reply_without_the_reasoning_that_its_prompt_opens_follows_the_header(
    byte_tokenizer,
) -> None:
    tokenizer = byte_tokenizer()
    source = tokenizer.chat_template.replace(
        "assistant\n{% endif %}", "assistant\n<think>\n{% endif %}"
    )
    [(ids, trained, shortened)] = Encoder(tokenizer, source).assistant(CHAT[:3], {})
    assert shortened
    assert tokenizer.decode(ids[: trained.index(True)]).endswith("<|im_start|>assistant\n")
    assert tokenizer.decode(ids[trained.index(True) :]) == "bonjour, é<|im_end|>"


def test_an_answer_that_a_template_escapes_is_trained_as_it_is_rendered(byte_tokenizer) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("m.content", "m.content | tojson")
    assert trained_runs(tokenizer, [CHAT[1], {"role": "assistant", "content": "a\nb"}]) == [
        '"a\\nb"<|im_end|>'
    ]


def test_a_header_that_is_not_the_generation_prompts_is_refused(byte_tokenizer) -> None:
    tokenizer = byte_tokenizer()
    source = tokenizer.chat_template.replace("assistant\n{% endif %}", "model\n{% endif %}")
    with pytest.raises(
        BadRow,
        match=r"message 3.*in another way than the model would generate it.*\{% generation %\}",
    ):
        Encoder(tokenizer, source).assistant(CHAT, {})


def test_a_template_without_end_token_is_refused(byte_tokenizer) -> None:
    with pytest.raises(BadRow, match=r"ends message 3, the assistant's, without an end token"):
        Encoder(byte_tokenizer("no_end")).assistant(CHAT, {})


def test_a_turn_that_ends_where_the_users_begins_ends_with_the_first_token_of_that(
    byte_tokenizer,
) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}<|start_header_id|><|end_header_id|>{{ m.content }}"
        "{% else %}<start_of_turn>{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>{% endif %}"
    )
    [(ids, trained, _)] = Encoder(tokenizer).assistant(CHAT[1:], {})
    text = tokenizer.decode([token for token, train in zip(ids, trained, strict=True) if train])
    assert text == "bonjour, é<|start_header_id|>4 assistant\nfour<|start_header_id|>"


def test_a_token_that_begins_every_message_ends_none(byte_tokenizer) -> None:
    tokenizer = byte_tokenizer()
    # no special token of this tokenizer's
    source = tokenizer.chat_template.replace("<|im_end|>", "</s>")
    with pytest.raises(BadRow, match="without an end token"):
        Encoder(tokenizer, source).assistant(CHAT, {})


def test_a_template_that_leaves_out_what_the_assistant_says_is_refused(byte_tokenizer) -> None:
    # templates of vision models want content in blocks and write nothing of plain text
    tokenizer = byte_tokenizer()
    source = tokenizer.chat_template.replace(
        "m.content", "'' if m.role == 'assistant' else m.content"
    )
    with pytest.raises(
        BadRow, match="nothing of message 3, the assistant's, is left under the chat template"
    ):
        Encoder(tokenizer, source).assistant(CHAT, {})


def test_markers_that_leave_out_the_end_token_are_refused(byte_tokenizer) -> None:
    tokenizer = byte_tokenizer("markers")
    source = tokenizer.chat_template.replace(
        "<|im_end|>\n{% endgeneration %}", "{% endgeneration %}<|im_end|>\n", 1
    )
    with pytest.raises(BadRow, match="without an end token"):
        Encoder(tokenizer, source).assistant(CHAT, {})


def test_markers_around_some_answers_only_are_refused(byte_tokenizer) -> None:
    tokenizer = byte_tokenizer("markers")
    source = tokenizer.chat_template.replace(
        "== 'assistant' %}", "== 'assistant' and loop.last %}", 1
    )
    with pytest.raises(BadRow, match="marks 1 runs of tokens, and the assistant has 2 messages"):
        Encoder(tokenizer, source).assistant(CHAT, {})


def test_a_token_over_the_edge_of_an_answer_is_cut_where_the_model_would_begin(
    byte_tokenizer,
) -> None:
    tokenizer = byte_tokenizer()
    source = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<eos>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "bon"}]
    encoder = Encoder(tokenizer, source)
    assert len(encoder.bare(" b")) == 1
    # the tokens of the first are others as history, so it is an example of its own
    for turns in (1, 2):
        examples = encoder.assistant(messages * turns, {})
        assert len(examples) == turns
        for number, (ids, trained, _) in enumerate(examples):
            before = encoder.chat((messages * turns)[: 2 * number + 1], {}, generation_prompt=True)
            assert ids == before + encoder.bare("bon<eos>")
            assert trained == [False] * len(before) + [True] * (len("bon") + 1)


def test_a_tokenizer_with_a_manner_of_its_own_at_the_start_of_a_text_splits_as_well(
    byte_tokenizer,
) -> None:
    from tokenizers import normalizers

    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Prepend("_")
    encoder = Encoder(tokenizer)
    [(ids, trained, _)] = encoder.assistant(CHAT, {})
    assert ids == encoder.chat(CHAT, {})[: len(ids)]
    last = [token for token, train in zip(ids, trained, strict=True) if train][-16:]
    assert tokenizer.decode(last).endswith("four<|im_end|>")


def test_a_token_over_an_edge_is_refused_where_the_start_of_a_text_gets_more(
    byte_tokenizer,
) -> None:
    from tokenizers import normalizers

    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Prepend("_")
    source = "{% for m in messages %}{{ m.role }}: {{ m.content }}<eos>{% endfor %}"
    source += "{% if add_generation_prompt %}assistant: {% endif %}"
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "bon"}]
    with pytest.raises(
        BadRow,
        match=r"a token spans the edge of what the assistant writes; pass a chat template with",
    ):
        Encoder(tokenizer, source).assistant(messages, {})


def test_tools_and_template_arguments_reach_the_template(byte_tokenizer) -> None:
    source = "{{ tools[0].function.name }}|{{ tone }}|{% for m in messages %}{{ m.content }}<eos>{% endfor %}"
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    encoder = Encoder(byte_tokenizer(), source)
    ids = encoder.chat([{"role": "user", "content": "x"}], {"tools": tools, "tone": "dry"})
    assert encoder.tokenizer.decode(ids) == "f|dry|x<eos>"


def test_what_a_template_refuses_is_a_bad_row_with_its_reason(byte_tokenizer) -> None:
    source = "{% if messages[1].role == messages[0].role %}{{ raise_exception('roles must alternate') }}{% endif %}"
    with pytest.raises(BadRow, match="refuses the conversation: roles must alternate"):
        Encoder(byte_tokenizer(), source).chat([{"role": "user", "content": "x"}] * 2, {})


def test_conversations_need_a_template(byte_tokenizer) -> None:
    with pytest.raises(
        ValueError, match=re.escape("no chat template; pass one (--chat_template file.jinja)")
    ):
        Encoder(byte_tokenizer(None)).chat(CHAT, {})


def test_plain_text_needs_an_eos_token(byte_tokenizer) -> None:
    with pytest.raises(
        ValueError,
        match=re.escape("no EOS token to end a plain text with; set tokenizer.eos_token"),
    ):
        Encoder(byte_tokenizer(eos_token="")).continuations("a", ["b"], {})


def test_the_completion_is_all_that_the_template_adds(byte_tokenizer) -> None:
    encoder = Encoder(byte_tokenizer())
    prompt, (completion,), (trained,), shortened = encoder.continuations(CHAT[:2], [CHAT[2:3]], {})
    assert all(trained)
    assert encoder.tokenizer.decode(completion) == "bonjour, é<|im_end|>\n"
    assert prompt == encoder.chat(CHAT[:2], {}, generation_prompt=True)
    assert not shortened


def test_a_plain_completion_ends_with_one_eos(byte_tokenizer) -> None:
    encoder = Encoder(byte_tokenizer())
    _, completions, _, _ = encoder.continuations("a", ["x", "x<eos>"], {})
    assert [encoder.tokenizer.decode(ids) for ids in completions] == ["x<eos>"] * 2


def test_a_prompt_gives_up_tokens_that_merge_with_an_answer(byte_tokenizer) -> None:
    encoder = Encoder(byte_tokenizer())
    prompt, completions, _, shortened = encoder.continuations("a ", ["b", "c"], {})
    assert shortened
    assert encoder.tokenizer.decode(prompt) == "a"
    assert [encoder.tokenizer.decode(ids) for ids in completions] == [" b<eos>", " c<eos>"]


@pytest.mark.parametrize(
    ("a", "b", "shared"), [([], [1], 0), ([1, 2], [1, 2, 3], 2), ([1, 2], [1, 3], 1), ([2], [1], 0)]
)
def test_common_prefix(a, b, shared) -> None:
    assert common_prefix(a, b) == shared


ALPHABET = [*"ab \n▁éx", "<", ">"]
PIECES = ["<a>", "<a>b", "<e>", "a", "b", " ", "  ", "\n", "é", "e\u0301", "ab", " b", "x<", ">"]
PRE_TOKENIZERS = {
    "none": None,
    "words": pre_tokenizers.Split(Regex(r"\s*[\r\n]+|\s+(?!\S)|\s?\w+"), "isolated"),
    "first": pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(prepend_scheme="first", split=False)]
    ),
    "always": pre_tokenizers.Metaspace(prepend_scheme="always"),
    "never": pre_tokenizers.Metaspace(prepend_scheme="never"),
    "bytes": pre_tokenizers.ByteLevel(add_prefix_space=True),
}
NORMALIZERS = {
    "none": None,
    "prepends": normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
    "composes": normalizers.Sequence([normalizers.NFC(), normalizers.Strip()]),
}
ADDED: dict[str, dict[str, bool]] = {
    "plain": {}, "left": {"lstrip": True}, "right": {"rstrip": True}, "word": {"single_word": True},
    "normalized": {"normalized": True},
}  # fmt: skip


@pytest.mark.parametrize("pre_tokenizer", PRE_TOKENIZERS)
@pytest.mark.parametrize("normalizer", NORMALIZERS)
@pytest.mark.parametrize("added", ADDED)
def test_a_text_has_the_tokens_that_its_tokenizer_gives_the_whole(pre_tokenizer, normalizer, added):
    pieces = [*ALPHABET, *pre_tokenizers.ByteLevel.alphabet(), "▁b", "Ġb", "ab", "▁ab"]
    core = Tokenizer(
        models.BPE(
            {piece: n for n, piece in enumerate(dict.fromkeys(pieces))},
            [("▁", "b"), ("Ġ", "b"), ("a", "b")],
        )
    )
    if PRE_TOKENIZERS[pre_tokenizer]:
        core.pre_tokenizer = PRE_TOKENIZERS[pre_tokenizer]
    if NORMALIZERS[normalizer]:
        core.normalizer = NORMALIZERS[normalizer]
    core.add_special_tokens(
        [AddedToken("<a>", **ADDED[added]), AddedToken("<a>b", normalized=False), "<e>"]
    )
    core.enable_padding(length=64)  # left by another call
    core.enable_truncation(3)
    encoder, peer = (
        Encoder(PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<e>")),
        copy.deepcopy(core),
    )
    peer.no_padding()
    peer.no_truncation()
    draw = random.Random(0)
    for _ in range(300):
        text = "".join(draw.choices(PIECES, k=draw.randint(0, 9)))
        assert encoder.bare(text) == peer.encode(text, add_special_tokens=False).ids, text


def test_a_tokenizer_that_changes_texts_itself_has_its_way(byte_tokenizer):
    class Shouts(PreTrainedTokenizerFast):
        def _encode_plus(self, text, **options):
            return super()._encode_plus(text.upper(), **options)

    tokenizer = Shouts(tokenizer_object=byte_tokenizer().backend_tokenizer)
    assert (
        Encoder(tokenizer).bare("<|im_start|>a")
        == tokenizer("<|im_start|>a", add_special_tokens=False)["input_ids"]
    )
    splits = byte_tokenizer()
    splits.add_tokens(AddedToken("b", normalized=False, special=True))
    splits.split_special_tokens = True  # so it cuts no text at them, and merges " b" here
    assert Encoder(splits).bare("a b") == splits("a b", add_special_tokens=False)["input_ids"]
    assert len(Encoder(splits).bare("a b")) == 2
