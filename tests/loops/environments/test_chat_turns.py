"""ChatTurns: what is put after an answer is what the template would write there."""

import pytest
from burnish.data.chat import Encoder
from burnish.loops.environments import ChatTurns

TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object"}},
}
TEMPLATES = {
    "llama3": (
        "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
        "{{ m.content | trim }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
    "space_before_the_end": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{{ ' ' + m.content + ' ' }}</s>"
        "{% else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"
    ),
    "no_end": (
        "{% for m in messages %}{{ m.role }}:\n{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:\n{% endif %}"
    ),
    "no_tools": (
        "{% for m in messages %}{% if m.role != 'tool' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "thinks_at_the_end": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    ),
    "counts": (
        "{% for m in messages %}<|im_start|>{{ m.role }} {{ loop.index }} of {{ messages | length }}\n{{ m.content }}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
}
PEERS = ("qwen2_5", "qwen3", "qwen3_instruct_2507", "llama3", "gemma", "gemma3", "phi3")
OTHERS = {"gemma": "user", "gemma3": "user", "phi3": "user", "llama3": "user"}


def chat(tokenizer, messages, **options):
    return Encoder(tokenizer).chat(messages, options, generation_prompt=True)


def built(tokenizer, turns, conversation):
    """A conversation turn by turn: answers tokenized alone, as if they had been sampled."""
    ids = turns.prompt(conversation[:1])
    for answer, reply in zip(conversation[1::2], conversation[2::2], strict=True):
        ids += [
            *Encoder(tokenizer).bare(answer["content"]),
            *turns.suffix(reply if isinstance(reply, list) else [reply]),
        ]
    return ids


def conversation(role):
    """Two answers; what is said would merge with its neighbors if it were tokenized together with
    them.
    """
    return [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "in 10"},
        {"role": role, "content": "10\n\n he", "name": "f"},
        {"role": "assistant", "content": "h"},
        {"role": role, "content": "in", "name": "f"},
    ]


@pytest.mark.parametrize("name", ["llama3", "chatml"])
@pytest.mark.parametrize("role", ["user", "tool"])
def test_a_conversation_built_turn_by_turn_is_the_templates_rendering_of_it(
    name, role, byte_tokenizer
):
    tokenizer = byte_tokenizer(TEMPLATES[name]) if name != "chatml" else byte_tokenizer()
    turns = ChatTurns(Encoder(tokenizer))
    assert built(tokenizer, turns, conversation(role)) == chat(tokenizer, conversation(role))


@pytest.mark.parametrize("name", PEERS)
def test_so_it_is_with_templates_in_use(name, byte_tokenizer, templates_of_the_peer):
    tokenizer = byte_tokenizer((templates_of_the_peer / f"{name}.jinja").read_text())
    role = OTHERS.get(name, "tool")
    options = {"tools": [TOOL]} if role == "tool" else {}
    turns = ChatTurns(Encoder(tokenizer), options)
    assert built(tokenizer, turns, conversation(role)) == chat(
        tokenizer, conversation(role), **options
    )


def test_several_results_are_rendered_together(byte_tokenizer, templates_of_the_peer):
    """Qwen puts all of them into one turn of the user."""
    tokenizer = byte_tokenizer((templates_of_the_peer / "qwen2_5.jinja").read_text())
    turns = ChatTurns(Encoder(tokenizer))
    asked, answer = conversation("tool")[:2]
    results = [{"role": "tool", "name": "f", "content": content} for content in ("one", "two")]
    ids = [
        *turns.prompt([asked]),
        *Encoder(tokenizer).bare(answer["content"]),
        *turns.suffix(results),
    ]
    assert ids == chat(tokenizer, [asked, answer, *results])
    assert tokenizer.decode(ids).count("<|im_start|>user") == 2


def test_the_end_token_is_the_templates_and_not_always_the_tokenizers(byte_tokenizer):
    tokenizer = byte_tokenizer(TEMPLATES["llama3"])
    assert (
        ChatTurns(Encoder(tokenizer)).end
        == tokenizer.convert_tokens_to_ids("<|eot_id|>")
        != tokenizer.eos_token_id
    )


def test_blanks_that_a_template_writes_before_the_end_are_not_repeated(byte_tokenizer):
    tokenizer = byte_tokenizer(TEMPLATES["space_before_the_end"])
    turns = ChatTurns(Encoder(tokenizer))
    assert (
        tokenizer.decode(turns.suffix([{"role": "user", "content": "more"}]))
        == "</s>[INST] more [/INST]"
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_end", "ends the assistant's message without an end token"),
        (
            "thinks_at_the_end",
            "renders the beginning of a conversation in another way when more follows",
        ),
        ("counts", "renders the beginning of a conversation in another way when more follows"),
    ],
)
def test_a_template_that_cannot_be_followed_is_refused(name, message, byte_tokenizer):
    with pytest.raises(ValueError, match=message):
        ChatTurns(Encoder(byte_tokenizer(TEMPLATES[name])))


def test_a_template_that_drops_what_tools_say_is_refused(byte_tokenizer):
    turns = ChatTurns(Encoder(byte_tokenizer(TEMPLATES["no_tools"])))
    turns.suffix([{"role": "user", "content": "heard"}])
    with pytest.raises(ValueError, match="leaves out messages of the role tool; say it as 'user'"):
        turns.suffix([{"role": "tool", "content": "not heard"}])


def test_a_tokenizer_without_a_template_is_refused(byte_tokenizer):
    with pytest.raises(ValueError, match="no chat template"):
        ChatTurns(Encoder(byte_tokenizer(None)))
