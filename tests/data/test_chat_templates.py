"""The chat templates that TRL tests with: what is trained of a conversation, against tokens written
down by hand.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from burnish.data.chat import Encoder
from burnish.data.columns import BadRow, read_row
from burnish.loops.environments.tools import parse_calls
from transformers import PreTrainedTokenizerFast

SYSTEM = {"role": "system", "content": "Be brief."}
CHAT = [
    {"role": "user", "content": "Hi there"},
    {"role": "assistant", "content": "Bonjour, é"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4, four"},
    {"role": "user", "content": "3+3?"},
    {"role": "assistant", "content": "6"},
]

TURN = {
    "chatml": "<|im_end|>",
    "gemma": "<end_of_turn>",
    "gemma4": "<turn|>",
    "llama": "<|eot_id|>",
}
DEEPSEEK = {"start": "<｜Assistant｜>", "end": "<｜end▁of▁sentence｜>", "cut": "<think>\n"}
GEMMA = {"start": "<start_of_turn>model\n", "end": "<end_of_turn>"}
GEMMA4 = {"start": "<|turn>model\n", "end": "<turn|>"}
CHATML = {"start": "<|im_start|>assistant\n", "end": "<|im_end|>"}
LLAMA = {"start": "<|start_header_id|>assistant<|end_header_id|>\n\n", "end": "<|eot_id|>"}
PHI = {"start": "<|assistant|>\n", "end": "<|end|>"}
NEMOTRON = {
    "start": "<|im_start|>assistant\n<think></think>",
    "end": "<|im_end|>",
    "mode": {"enable_thinking": False},
}
THINKS = {
    "start": "<|im_start|>assistant\n<think>\n",
    "turn": "\n</think>\n\n",
    "end": "<|im_end|>",
}

# Of each template by hand: the end of the generation prompt; what the model generates before and
# after its answer; whether earlier turns are rendered in another way (then each turn is an
# example); the argument that makes the generation prompt that of an answer without reasoning; what
# the template adds to the generation prompt where there is no such argument; whether it takes a
# system message.
TEMPLATES: dict[str, dict[str, object]] = {
    "cohere": {"start": "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>", "end": "<|END_OF_TURN_TOKEN|>"},
    "cohere2": {
        "start": "<|CHATBOT_TOKEN|><|START_RESPONSE|>",
        "end": "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",
    },
    "deepseek_r1_distill": DEEPSEEK,
    "deepseekv3": DEEPSEEK,
    "diffusion_gemma": GEMMA4,
    "gemma": GEMMA | {"system": False},
    "gemma3": GEMMA,
    "gemma4": GEMMA4,
    "gemma4_v2": GEMMA4,
    "gemma4_v3": GEMMA4,
    "gemma4_v4": GEMMA4,
    "gemma4_v5": GEMMA4,
    "glm4moe": {"start": "<|assistant|>", "turn": "\n<think></think>\n", "end": "<|user|>"},
    "gptoss": {
        "start": "<|start|>assistant",
        "turn": "<|channel|>final<|message|>",
        "end": "<|return|>",
        "rewrites": True,
    },
    "lfm2": CHATML,
    "lfm2_2_5": CHATML,
    "lfm2_2_5_v2": CHATML,
    "lfm2_2_5_vl": CHATML,
    "lfm2_v2": CHATML,
    "llama3": LLAMA,
    "llama3_1": LLAMA,
    "llama3_2": LLAMA,
    "muse_glimmer": {
        "start": "<|start|>assistant",
        "turn": " to=user<|message|>",
        "end": "<|eot|>",
    },
    "nemotron_3_5_lightning": NEMOTRON,
    "nemotron_3_nano": NEMOTRON,
    "nemotron_3_super": NEMOTRON,
    "nemotron_3_ultra": NEMOTRON,
    "phi3": PHI,
    "phi3_5": PHI,
    "qwen2_5": CHATML,
    "qwen2_5_vl": CHATML,
    "qwen3": CHATML | {"turn": "<think>\n\n</think>\n\n", "rewrites": True},
    "qwen3_5_nothink": CHATML
    | {"start": "<|im_start|>assistant\n<think>\n\n</think>\n\n", "rewrites": True},
    "qwen3_5_think": THINKS | {"rewrites": True},
    "qwen3_6": THINKS | {"rewrites": True},
    # its text stays, but "\n\n" becomes one token once it is history
    "qwen3_8": THINKS | {"rewrites": True},
    "qwen3_instruct_2507": CHATML,
    "qwen3_vl": CHATML,
}
VISION_ONLY = {"idefics3", "llava_next", "smolvlm"}  # they write nothing of plain text

SPECIAL = [
    *(
        "<bos>",
        "<eos>",
        "<|im_start|>",
        "<|im_end|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
    ),
    *(
        "<start_of_turn>",
        "<end_of_turn>",
        "<|turn>",
        "<turn|>",
        "<|tool_response>",
        "<|eot|>",
        "<|eom|>",
        "<|start|>",
    ),
    *(
        "<|START_OF_TURN_TOKEN|>",
        "<|END_OF_TURN_TOKEN|>",
        "<|CHATBOT_TOKEN|>",
        "<|START_RESPONSE|>",
    ),
    *(
        "<|END_RESPONSE|>",
        "<|USER_TOKEN|>",
        "<|SYSTEM_TOKEN|>",
        "<｜end▁of▁sentence｜>",
        "<|message|>",
        "<|channel|>",
    ),
    *(
        "<|return|>",
        "<|call|>",
        "<|end|>",
        "<|user|>",
        "<|assistant|>",
        "<|system|>",
        "<|observation|>",
        "[gMASK]",
    ),
    "<end_of_utterance>",
]
NOT_SPLIT = [  # added tokens that real tokenizers don't call special
    *(
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<｜User｜>",
        "<｜Assistant｜>",
        "<tool_response>",
    ),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    *("<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "</tool_response>"),
]


@pytest.fixture(scope="module")
def stock(trl, byte_tokenizer) -> Callable[[str], PreTrainedTokenizerFast]:
    """A tokenizer with one of TRL's templates, and with tokens that such tokenizers have."""
    folder = Path(trl.__file__).parent / "chat_templates"

    def load(name: str) -> PreTrainedTokenizerFast:
        tokenizer = byte_tokenizer(merged="ĊĊ")  # as in real vocabularies, "\n\n" is one token
        tokenizer.add_special_tokens({"extra_special_tokens": SPECIAL})
        tokenizer.add_tokens(NOT_SPLIT)
        tokenizer.chat_template = (folder / f"{name}.jinja").read_text()
        return tokenizer

    load.folder = folder
    return load


def runs(tokenizer, examples) -> list[tuple[list[int], str]]:
    """The runs of trained tokens of all examples, as text, and the tokens before each."""
    found = []
    for ids, trained, _ in examples:
        for at, train in enumerate(trained):
            if train and (at == 0 or not trained[at - 1]):
                end = next((end for end in range(at, len(ids)) if not trained[end]), len(ids))
                found.append((ids[:at], tokenizer.decode(ids[at:end])))
    return sorted(found, key=lambda run: len(run[0]))


def prompt(tokenizer, messages, **kwargs) -> list[int]:
    out = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True, **kwargs
    )
    return list(out["input_ids"])


def test_every_text_template_of_the_peer_is_here(stock) -> None:
    names = {
        path.stem for path in stock.folder.glob("*.jinja") if not path.stem.endswith("_training")
    }
    assert names == set(TEMPLATES) | VISION_ONLY
    assert len(names) == 41


@pytest.mark.parametrize("with_system", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
def test_each_turn_is_trained_as_it_is_generated(stock, name, with_system) -> None:
    tokenizer, template = stock(name), TEMPLATES[name]
    messages = [SYSTEM, *CHAT] if with_system and template.get("system", True) else CHAT
    examples = Encoder(tokenizer).assistant(messages, {})
    found = runs(tokenizer, examples)
    turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    assert len(examples) == (3 if template.get("rewrites") else 1)
    assert [text for _, text in found] == [
        f"{template.get('turn', '')}{messages[number]['content']}{template['end']}"
        for number in turns
    ]
    for (before, _), number in zip(found, turns, strict=True):
        sampled = prompt(tokenizer, messages[:number], **template.get("mode", {}))
        cut = template.get("cut", "")
        assert tokenizer.decode(before).endswith(template["start"])
        assert tokenizer.decode(before) + cut == tokenizer.decode(sampled)
        assert before == sampled[: len(before)]
        assert cut or before == sampled
    assert {shortened for _, _, shortened in examples} == {"cut" in template}


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Say it.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
    for name in ("weather", "time")
]


def calling(*names: str, arguments=lambda city: {"city": city}, content: str = "") -> list[dict]:
    calls = [
        {
            "type": "function",
            "id": f"call{i}abcd",
            "function": {"name": name, "arguments": arguments("Rome")},
        }
        for i, name in enumerate(names)
    ]
    results = [
        {"role": "tool", "name": name, "tool_call_id": f"call{i}abcd", "content": "sunny"}
        for i, name in enumerate(names)
    ]
    return [
        {"role": "user", "content": "Hi there"},
        {"role": "assistant", "content": content, "tool_calls": calls},
        *results,
        {"role": "assistant", "content": "Sunny, é"},
        {"role": "user", "content": "Thanks"},
        {"role": "assistant", "content": "Welcome"},
    ]


# The text of one call by hand, where WEATHER is its name; what separates two, and what is around
# all of them.
HERMES = (
    '<tool_call>\n{"name": "NAME", "arguments": {"city": "Rome"}}\n</tool_call>',
    "\n",
    "{}<|im_end|>",
)
XML = (
    "<tool_call>\n<function=NAME>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>"
)
QWEN_XML, NEMOTRON_XML = (XML, "\n", "{}<|im_end|>"), (XML, "\n", "\n{}\n<|im_end|>")
JSON = ('{"name": "NAME", "parameters": {"city": "Rome"}}', None, "{}<|eot_id|>")
GEMMA_CALL = ('<|tool_call>call:NAME{city:<|"|>Rome<|"|>}<tool_call|>', "", "{}<|tool_response>")
PYTHONIC = ("NAME(city='Rome')", ", ", "<|tool_call_start|>[{}]<|tool_call_end|><|im_end|>")
CALLS: dict[str, tuple[str, str | None, str]] = {
    "deepseekv3": (
        '<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n{"city": "Rome"}\n```<｜tool▁call▁end｜>',
        "\n",
        "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
    ),
    "diffusion_gemma": GEMMA_CALL,
    "gemma4": GEMMA_CALL,
    "gemma4_v2": (*GEMMA_CALL[:2], "{}<turn|>"),
    "gemma4_v3": GEMMA_CALL,
    "gemma4_v4": GEMMA_CALL,
    "gemma4_v5": GEMMA_CALL,
    "glm4moe": (
        "<tool_call>NAME\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>",
        "\n",
        "\n<think></think>\n{}<|observation|>",
    ),
    "gptoss": (
        ' to=functions.NAME<|channel|>commentary json<|message|>{"city": "Rome"}<|call|>',
        None,  # it writes one call of a message
        "{}",
    ),
    "lfm2_2_5": PYTHONIC,
    "lfm2_2_5_v2": PYTHONIC,
    "lfm2_2_5_vl": PYTHONIC,
    "lfm2_v2": PYTHONIC,
    "llama3_1": JSON,
    "llama3_2": JSON,
    "muse_glimmer": (
        '<atem:invoke name="NAME">\n<atem:parameter name="city">Rome</atem:parameter>\n</atem:invoke>',
        None,
        " to=NAME<|message|><atem:function_calls>\n{}\n</atem:function_calls><|eot|>",
    ),
    "nemotron_3_5_lightning": NEMOTRON_XML,
    "nemotron_3_nano": NEMOTRON_XML,
    "nemotron_3_super": NEMOTRON_XML,
    "nemotron_3_ultra": NEMOTRON_XML,
    "qwen2_5": HERMES,
    "qwen3": (*HERMES[:2], "<think>\n\n</think>\n\n{}<|im_end|>"),
    "qwen3_5_nothink": QWEN_XML,
    "qwen3_5_think": (*QWEN_XML[:2], "\n</think>\n\n{}<|im_end|>"),
    "qwen3_6": (*QWEN_XML[:2], "\n</think>\n\n{}<|im_end|>"),
    "qwen3_8": (*QWEN_XML[:2], "\n</think>\n\n{}<|im_end|>"),
    "qwen3_instruct_2507": HERMES,
    "qwen3_vl": HERMES,
}


def tools_of(name: str) -> dict:
    return {"tools": None if name == "deepseekv3" else TOOLS}  # it writes calls, and no schemas


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_end_token_of_a_turn_and_of_an_unseen_reply_is_known(stock, name) -> None:
    encoder, end = Encoder(stock(name)), TEMPLATES[name]["end"]
    for ids, trained, _ in encoder.assistant(CHAT, {}):
        (token,) = encoder.end_tokens(ids, trained)
        assert str(end).endswith(encoder.tokenizer.decode([token]))
    assert encoder.reply_end == {token}


@pytest.mark.parametrize(
    ("name", "as_json", "count"),
    [
        *((name, as_json, 1) for name in CALLS for as_json in (False, True)),
        *((name, False, 2) for name, (_, between, _) in CALLS.items() if between is not None),
    ],
)
def test_a_tool_call_is_trained_as_it_is_rendered_and_its_result_is_not(
    stock, name, as_json, count
) -> None:
    call, between, around = CALLS[name]
    names = ["weather", "time"][:count]
    arguments = (
        (lambda city: json.dumps({"city": city})) if as_json else (lambda city: {"city": city})
    )
    messages = read_row(
        {"messages": calling(*names, arguments=arguments)}, ("messages",)
    ).completions[0]
    tokenizer, template, options = stock(name), TEMPLATES[name], tools_of(name)
    found = runs(tokenizer, Encoder(tokenizer).assistant(messages, options))
    calls = (between or "").join(call.replace("NAME", n) for n in names)
    assert found[0][1] == around.replace("NAME", "weather").format(calls)
    # its generation prompt after a result lacks that
    header = "<|turn>model\n" if name == "diffusion_gemma" else ""
    after_result = template.get("turn", "") if name != "deepseekv3" else ""
    assert [text for _, text in found[1:]] == [
        f"{header}{after_result}Sunny, é{template['end']}",
        f"{template.get('turn', '')}Welcome{template['end']}",
    ]
    assert "sunny" not in "".join(text for _, text in found)
    assert "sunny" in tokenizer.decode(found[1][0])
    for (before, _), number in zip(found, (1, 2 + count, 4 + count), strict=True):
        string_arguments = json.loads(json.dumps(messages))
        if name == "deepseekv3":
            for each in string_arguments[1]["tool_calls"]:
                each["function"]["arguments"] = '{"city": "Rome"}'
        sampled = prompt(
            tokenizer, string_arguments[:number], **options, **template.get("mode", {})
        )
        assert before == sampled[: len(before)]
        assert tokenizer.decode(sampled[len(before) :]) in ("", template.get("cut", ""))


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_are_read_from_a_completion_are_rendered_as_they_were_written(
    stock, name
) -> None:
    names = ["weather"] if CALLS[name][1] is None else ["weather", "time"]
    tokenizer, messages = stock(name), calling(*names)
    completion = runs(tokenizer, Encoder(tokenizer).assistant(messages, tools_of(name)))[0][1]
    ids = tokenizer(completion, add_special_tokens=False)["input_ids"]
    calls = parse_calls(tokenizer.decode(ids, skip_special_tokens=True))
    assert calls == [(n, {"city": "Rome"}, "") for n in names]
    for made, (n, arguments, _) in zip(messages[1]["tool_calls"], calls, strict=True):
        made["function"] = {"name": n, "arguments": arguments}
    assert (
        runs(tokenizer, Encoder(tokenizer).assistant(messages, tools_of(name)))[0][1] == completion
    )


@pytest.mark.parametrize(
    ("name", "names", "problem"),
    [
        ("cohere", ["weather"], "roles must alternate"),
        ("cohere2", ["weather"], "roles must alternate"),
        ("gemma", ["weather"], "roles must alternate"),
        ("gemma3", ["weather"], "roles must alternate"),
        ("gptoss", ["weather", "time"], "leaves out tool call 2 of message 2"),
        ("lfm2", ["weather"], "leaves out tool call 1 of message 2"),
        ("llama3", ["weather"], "leaves out tool call 1 of message 2"),
        ("llama3_1", ["weather", "time"], "single tool-calls"),
        ("llama3_2", ["weather", "time"], "single tool-calls"),
        ("phi3", ["weather"], "leaves out messages of the role tool"),
        ("phi3_5", ["weather"], "leaves out messages of the role tool"),
        ("qwen2_5_vl", ["weather"], "leaves out tool call 1 of message 2"),
    ],
)
def test_a_template_that_knows_no_such_calls_is_refused_by_name(
    stock, name, names, problem
) -> None:
    with pytest.raises(BadRow, match=problem):
        Encoder(stock(name)).assistant(calling(*names), {})


@pytest.mark.parametrize("name", ["llama3", "deepseekv3", "phi3", "cohere2", "qwen2_5_vl"])
def test_tools_that_a_template_leaves_out_are_refused(stock, name) -> None:
    with pytest.raises(
        BadRow, match="leaves out 'tools'; use one that knows tools, or name no tools"
    ):
        Encoder(stock(name)).assistant(CHAT, {"tools": TOOLS})
    assert Encoder(stock(name)).assistant(CHAT, {"tools": None})


REASONED = [
    {"role": "user", "content": "Hi there"},
    {"role": "assistant", "reasoning_content": "Greet.", "content": "Bonjour"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "reasoning_content": "Add.", "content": "4"},
]
IN_CONTENT = [
    {"role": m["role"], "content": f"<think>\n{m['reasoning_content']}\n</think>\n\n{m['content']}"}
    if "reasoning_content" in m
    else m
    for m in REASONED
]


@pytest.mark.parametrize(
    ("name", "messages", "start", "turns"),
    [
        ("qwen3", REASONED, "assistant\n", "<think>\n{}\n</think>\n\n{}<|im_end|>"),
        ("qwen3", IN_CONTENT, "assistant\n", "<think>\n{}\n</think>\n\n{}<|im_end|>"),
        ("qwen3_5_think", REASONED, "assistant\n<think>\n", "{}\n</think>\n\n{}<|im_end|>"),
        ("qwen3_5_nothink", REASONED, "assistant\n<think>\n", "{}\n</think>\n\n{}<|im_end|>"),
        ("qwen3_6", IN_CONTENT, "assistant\n<think>\n", "{}\n</think>\n\n{}<|im_end|>"),
        ("nemotron_3_nano", REASONED, "assistant\n<think>\n", "{}\n</think>\n{}<|im_end|>"),
        ("nemotron_3_ultra", IN_CONTENT, "assistant\n<think>\n", "{}\n</think>\n\n{}<|im_end|>"),
        ("glm4moe", REASONED, "<|assistant|>", "\n<think>{}</think>\n{}<|user|>"),
        ("glm4moe", IN_CONTENT, "<|assistant|>", "\n<think>{}</think>\n{}<|user|>"),
        ("gemma4_v5", REASONED, "<|turn>model\n", "<|channel>thought\n{}\n<channel|>{}<turn|>"),
        (
            "gptoss",
            REASONED,
            "<|start|>assistant",
            "<|channel|>analysis<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>{}<|return|>",
        ),
        (
            "deepseekv3",
            IN_CONTENT,
            "<｜Assistant｜><think>\n",
            "{}\n</think>\n\n{}<｜end▁of▁sentence｜>",
        ),
        (
            "deepseek_r1_distill",
            IN_CONTENT,
            "<｜Assistant｜><think>\n",
            "{}\n</think>\n\n{}<｜end▁of▁sentence｜>",
        ),
        (
            "lfm2_2_5",
            IN_CONTENT,
            "<|im_start|>assistant\n",
            "<think>\n{}\n</think>\n\n{}<|im_end|>",
        ),
    ],
)
def test_reasoning_is_trained_in_every_turn_and_not_in_the_history_of_later_ones(
    stock, name, messages, start, turns
) -> None:
    tokenizer = stock(name)
    examples = Encoder(tokenizer).assistant(messages, {})
    found = runs(tokenizer, examples)
    assert [text for _, text in found] == [
        turns.format("Greet.", "Bonjour"),
        turns.format("Add.", "4"),
    ]
    assert len(examples) == 2
    assert all(tokenizer.decode(before).endswith(start) for before, _ in found)
    history = tokenizer.decode(found[1][0])
    assert "Bonjour" in history
    assert "Greet." not in history
    mode = {"enable_thinking": True} if name == "qwen3_5_nothink" else {}
    assert [before for before, _ in found] == [
        prompt(tokenizer, messages[:n], **mode) for n in (1, 3)
    ]


def test_a_template_whose_history_keeps_the_reasoning_makes_one_example(stock) -> None:
    tokenizer = stock("qwen3_8")
    [example] = Encoder(tokenizer).assistant(REASONED, {})
    assert [text for _, text in runs(tokenizer, [example])] == [
        "Greet.\n</think>\n\nBonjour<|im_end|>",
        "Add.\n</think>\n\n4<|im_end|>",
    ]


@pytest.mark.parametrize("name", ["llama3", "deepseekv3", "qwen2_5", "phi3", "cohere2"])
def test_reasoning_that_a_template_leaves_out_is_refused(stock, name) -> None:
    with pytest.raises(
        BadRow, match="leaves out the reasoning of message 2; use a template that writes it"
    ):
        Encoder(stock(name)).assistant(REASONED, {})


def test_vision_templates_that_write_nothing_of_plain_text_are_refused(stock) -> None:
    for name in VISION_ONLY:
        with pytest.raises(
            BadRow, match=r"leaves out messages of the role user|refuses the conversation"
        ):
            Encoder(stock(name)).assistant(CHAT, {})


@pytest.mark.parametrize("name", ["qwen3", "glm4moe", "phi3", "deepseekv3", "lfm2_v2", "llama3"])
def test_the_peers_own_training_templates_work_as_well(stock, name) -> None:
    tokenizer = stock(name)
    path = stock.folder / f"{name}_training.jinja"
    examples = Encoder(tokenizer, str(path)).assistant(CHAT, {})
    assert [
        re.sub("<.*?>|\\s|final|to=user", "", text) for _, text in runs(tokenizer, examples)
    ] == [re.sub(r"\s", "", message["content"]) for message in CHAT[1::2]]
