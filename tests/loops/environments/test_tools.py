"""Tools: calls found in the text, mistakes said back, and nothing evaluated that should not be."""

import asyncio
import threading
import time
from datetime import date

import pytest
from burnish.loops.environments import (
    MultiTurnSource,
    Tools,
    resolve_environment,
    tool_metrics,
    turns_for,
)
from burnish.loops.environments.tools import calculator, parse_calls


def call(name, **arguments):
    import json

    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def wait(seconds: float) -> str:
    """Wait.

    Args:
        seconds: how long
    """
    await asyncio.sleep(seconds)
    return "waited"


def sleep(seconds: float) -> dict:
    """Sleep.

    Args:
        seconds: how long
    """
    time.sleep(seconds)
    return {"slept": seconds}


def step(tools, said, text):
    return asyncio.run(tools.step(said(text)))


@pytest.fixture
def tools():
    return Tools([calculator, wait, sleep], seconds=60)


def test_a_call_is_answered_in_the_role_tool(tools, said):
    found = step(tools, said, f"I compute {call('calculator', expression='17 * 23')}")
    assert found.observation == [{"role": "tool", "name": "calculator", "content": "391"}]
    assert not found.done and found.counts == {"tool_calls": 1, "tool_failures": 0}


def test_an_answer_without_a_call_ends_the_conversation(tools, said):
    assert step(tools, said, "It is 391.").done
    assert step(tools, said, "").done


def test_several_calls_are_made_at_once_and_answered_in_order(said):
    """Each of the first two waits for the other one to be called."""
    first_called, second_called = threading.Event(), threading.Event()

    async def first() -> str:
        """Wait for the second."""
        first_called.set()
        while not second_called.is_set():
            await asyncio.sleep(0.01)
        return "met"

    def second() -> dict:
        """Wait for the first."""
        second_called.set()
        return {"met": first_called.wait(60), "on": date(2026, 1, 2)}

    found = step(
        Tools([calculator, first, second], seconds=60),
        said,
        call("first") + call("second") + call("calculator", expression="1/0"),
    )
    assert [message["content"] for message in found.observation] == [
        "met",
        '{"met": true, "on": "2026-01-02"}',
        "error: ZeroDivisionError: division by zero",
    ]
    assert found.counts == {"tool_calls": 3, "tool_failures": 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "<tool_call>{'name': 1}</tool_call>",
            "error: the call is not JSON: Expecting property name",
        ),
        ('<tool_call>{"name": "calculator"', "error: a call must end with </tool_call>"),
        ("<tool_call>[1]</tool_call>", 'error: a call is an object with "name" and "arguments"'),
        (
            '<tool_call>{"name": "calculator", "arguments": [1]}</tool_call>',
            'error: "arguments" must be an object',
        ),
        (
            '<tool_call>{"name": "calculator", "arguments": "{"}</tool_call>',
            "error: the arguments are not JSON",
        ),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "error: the call is not JSON"),
        (
            call("calculater", expression="1"),
            "error: no tool 'calculater', did you mean 'calculator'?",
        ),
        (call("xyz"), "error: no tool 'xyz'; there are calculator, sleep, wait"),
        (call("calculator"), "error: calculator: missing a required argument: 'expression'"),
        (
            call("calculator", expression="1", precision=2),
            "error: calculator: got an unexpected keyword argument",
        ),
        (call("wait", seconds=60), "error: wait took longer than 0.3 s"),
        (call("sleep", seconds=60), "error: sleep took longer than 0.3 s"),
    ],
)
def test_what_is_wrong_with_a_call_is_said_back_and_counted(text, message, tools, said):
    if message.endswith("0.3 s"):
        tools.seconds = 0.3
    found = step(tools, said, text)
    (reply,) = found.observation
    assert reply["content"].startswith(message), reply
    assert not found.done and found.counts == {"tool_calls": 1, "tool_failures": 1}


def test_arguments_may_be_json_within_json():
    assert parse_calls('<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>') == [
        ("f", {"x": 1}, "")
    ]


SLEEP_3 = "<function=sleep>\n<parameter=seconds>\n0.03\n</parameter>\n</function>"


def test_arguments_without_types_take_those_of_the_schema(tools, said):
    found = step(tools, said, f"<tool_call>\n{SLEEP_3}\n</tool_call>")
    assert found.observation == [{"role": "tool", "name": "sleep", "content": '{"slept": 0.03}'}]
    found = step(
        tools,
        said,
        "<tool_call>calculator\n<arg_key>expression</arg_key><arg_value>7</arg_value></tool_call>",
    )
    assert found.observation[0]["content"] == "7"  # text, as the schema says


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('{"name": "f", "parameters": {"x": 1}}', [("f", {"x": 1}, "")]),
        ('{"name": "f", "parameters": 3}', [("f", {}, '"arguments" must be an object')]),
        ('{"name": "f", "age": 3}', []),  # an answer in JSON
        ("[f(x=1), g(y='a, b()')]", [("f", {"x": 1}, ""), ("g", {"y": "a, b()"}, "")]),
        ("[f(1)]", [("f", {}, "every argument must be given by its name")]),
        ("[f(x=y)]", [("f", {}, "the arguments are not Python literals")]),
        ("[f(x=1]", []),
        ("[1, 2]", []),
        (
            ' to=functions.f<|channel|>commentary json<|message|>{"x": 1}<|call|>',
            [("f", {"x": 1}, "")],
        ),
        (' to=functions.fcommentary json{"x": }', [("f", {}, "the arguments are not JSON")]),
        ("<tool_call><function=f></function></tool_call>", [("f", {}, "")]),
        (
            '<|tool_call>call:f{a:{b:[1,<|"|>x: {y}, z<|"|>]},ok:true}<tool_call|><|tool_call>call:g{}<tool_call|>',
            [("f", {"a": {"b": [1, "x: {y}, z"]}, "ok": True}, ""), ("g", {}, "")],
        ),
        ('call:f{a:<|"|>}<|"|>}call:g{b:2}', [("f", {"a": "}"}, ""), ("g", {"b": 2}, "")]),
        ("call:f{a:Rome}", [("f", {}, "the arguments are not JSON")]),
        ("I shall call: f", []),
        (
            '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}, "id": "a"}, {"name": "g", "arguments": {}}]',
            [("f", {"x": 1}, ""), ("g", {}, "")],
        ),
        (' [{"name": "f", "arguments": {"x": 1}}]', [("f", {"x": 1}, "")]),
        ('[{"name": "f"}]', []),
        ("[{]", []),
        ('[{"name": 3, "arguments": {}}]', []),
        (
            '[TOOL_CALLS]f[ARGS]{"x": {"y": 1}}[TOOL_CALLS]g[ARGS]{}',
            [("f", {"x": {"y": 1}}, ""), ("g", {}, "")],
        ),
        ('f{"x": "} g"}g{"y": 2}', [("f", {"x": "} g"}, ""), ("g", {"y": 2}, "")]),
        ('The set{"x"} is small', []),
        ("[f(x=1), 2, g(1)]", []),
        ("<tool_call><function=f></tool_call>", [("", {}, "the call is not JSON")]),
        ('<think>Shall I <tool_call>{"name": "f"}</tool_call>?</think>\n\nNo.', []),
        ('of f(x)</think>\n<tool_call>{"name": "f"}</tool_call>', [("f", {}, "")]),
        ('By f.</think>\n\n{"name": "f", "parameters": {}}', [("f", {}, "")]),
    ],
)
def test_calls_in_the_formats_of_other_families(text, calls):
    found = parse_calls(text)
    assert [(name, arguments) for name, arguments, _ in found] == [
        (name, arguments) for name, arguments, _ in calls
    ]
    assert all(
        problem.startswith(start) and bool(problem) == bool(start)
        for (*_, problem), (*_, start) in zip(found, calls, strict=True)
    )


@pytest.mark.parametrize(
    "text",
    [
        "body{margin:0}" + "p{color:red}" * 20 + "\n\nThis is it.",
        "call:f{a:" + '<|"|>1<|"|>' * 18,
        "<tool_call>f" + " " * 20_000 + "g</tool_call>",
    ],
)
def test_a_text_that_only_looks_like_calls_is_read_at_once(text):
    """The event loop of all conversations reads it, and a policy may well say the same again and
    again.
    """
    begun = time.process_time()
    assert all(problem for _, _, problem in parse_calls(text))
    assert time.process_time() - begun < 0.3


HALVES = [  # begins of calls, and what ends the last one
    ("call:a{", ""),
    ("call:a{", "} no end"),
    ("call:a{x", "}<tool_call|>"),
    ("a", '<|"|>'),
    ("<arg_key>", "</arg_value></tool_call>"),
    ("<arg_key></arg_key><arg_value>", "</arg_value></tool_call>"),
    ("<parameter=a>", "</function></tool_call>"),
    ("<parameter=", "</parameter></function></tool_call>"),
    ('<atem:invoke name="a">', "</atem:invoke>"),
    ('<atem:invoke name="a">', ""),
    ("<｜tool▁sep｜>", "\n```"),
    ("<｜tool▁sep｜>a\n```json\n", ""),
    ("to=functions.acommentary json{", ""),
    ("[TOOL_CALLS]a{", ""),
    ("a{}", ""),
]


@pytest.mark.parametrize(
    "begin", ["", "call:a{", "<tool_call>f<arg_key>", "<tool_call><function=f>"]
)
@pytest.mark.parametrize(("half", "end"), HALVES)
def test_a_text_of_halves_of_calls_is_read_in_linear_time(half, end, begin):
    text = begin + half * (64_000 // len(half)) + end
    begun = time.process_time()
    parse_calls(text)
    assert time.process_time() - begun < 1.0


@pytest.mark.parametrize(
    "text", ["[f(a={[]: 1})]", "[f(a=" + "-" * 5000 + "1)]", "[a" + ".b" * 5000 + "(c=1)]"]
)
def test_what_is_no_literal_is_said_back_or_is_no_call(text):
    assert all(problem for _, _, problem in parse_calls(text))


def test_a_text_in_quotes_without_an_end_is_said_back():
    for quotes in (1, 3):
        ((name, _, problem),) = parse_calls("call:f{a:" + '<|"|>x' * quotes + "}")
        assert name == "f" and problem.startswith("the arguments are not JSON")


def test_an_unclosed_call_does_not_swallow_the_next():
    first, second = parse_calls(
        '<tool_call>{"name": "f"}\n<tool_call>{"name": "g"}</tool_call> and so on'
    )
    assert first == ("", {}, "a call must end with </tool_call>") and second == ("g", {}, "")


def test_a_result_that_has_no_json_is_the_tools_error(said):
    def pairs() -> dict:
        """Return pairs."""
        return {(1, 2): 3}

    found = step(Tools([pairs]), said, call("pairs"))
    assert found.observation[0]["content"].startswith("error: TypeError: keys must be str")
    assert found.counts == {"tool_calls": 1, "tool_failures": 1}


def test_a_long_result_is_cut(said):
    def noisy() -> str:
        """Make noise."""
        return "x" * 100

    found = step(Tools([noisy], longest=10), said, call("noisy"))
    assert found.observation[0]["content"] == "x" * 10 + "... (cut)"


def test_schemas_come_from_signatures_and_docstrings(tools):
    schema = tools.schemas[0]["function"]
    assert schema["name"] == "calculator" and schema["parameters"]["required"] == ["expression"]
    assert schema["parameters"]["properties"]["expression"]["type"] == "string"


def test_a_function_that_cannot_be_described_is_refused():
    def vague(x):
        return x

    with pytest.raises(
        ValueError, match=r"tools: vague can't be described to the model.*type hint"
    ):
        Tools([vague])
    with pytest.raises(ValueError, match="names must differ, got calculator, calculator"):
        Tools([calculator, calculator])


def test_tags_that_decoding_would_drop_are_refused(byte_tokenizer):
    tokenizer = byte_tokenizer("{{ tools | tojson if tools }}" + byte_tokenizer().chat_template)
    tokenizer.add_tokens(["<tool_call>"])
    turns_for(lambda: Tools([calculator], role="user"), tokenizer)
    hidden = byte_tokenizer()
    hidden.add_tokens(["<tool_call>"], special_tokens=True)
    with pytest.raises(ValueError, match="tools: <tool_call> is a special token of this tokenizer"):
        turns_for(lambda: Tools([calculator]), hidden)
    hidden = byte_tokenizer()
    hidden.add_tokens(['<|"|>'], special_tokens=True)
    with pytest.raises(ValueError, match=r'tools: <\|"\|> is a special token of this tokenizer'):
        turns_for(lambda: Tools([calculator]), hidden)


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        (
            "gptoss",
            "turns: role tool: .*no previous assistant message with a tool call.*say it as 'user'",
        ),
        (
            "gemma4",
            "turns: the chat template leaves out messages of the role tool; say it as 'user'",
        ),
    ],
)
def test_a_template_that_wants_the_call_before_its_result_is_refused_before_training(
    byte_tokenizer, templates_of_the_peer, template, wanted
):
    tokenizer = byte_tokenizer((templates_of_the_peer / f"{template}.jinja").read_text())
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>", "<turn|>"]})
    with pytest.raises(ValueError, match=wanted):
        turns_for(lambda: Tools([calculator]), tokenizer)
    turns = turns_for(lambda: Tools([calculator], role="user"), tokenizer)
    assert "391" in tokenizer.decode(turns.suffix([{"role": "user", "content": "391"}]))


@pytest.mark.parametrize("template", ["gemma4", "gemma4_v2", "gemma4_v3", "gemma4_v4", "gemma4_v5"])
def test_calls_under_gemmas_template_come_back(byte_tokenizer, templates_of_the_peer, template):
    tokenizer = byte_tokenizer((templates_of_the_peer / f"{template}.jinja").read_text())
    arguments = {"city": 'Rome, {x} "y"', "days": 3, "deep": {"a": [1.5, "b:c"]}, "ok": True}
    calls = [
        {"function": {"name": "weather", "arguments": arguments}},
        {"function": {"name": "g", "arguments": {}}},
    ]
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": calls},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    written = text[text.index("<|tool_call>") : text.rindex("<tool_call|>") + len("<tool_call|>")]
    assert parse_calls(written) == [("weather", arguments, ""), ("g", {}, "")]


def test_metrics_have_the_peers_names(tokenizer, turns, scripted, request_for):
    scripts = {
        0: [call("calculator", expression="6 * 7"), "42"],
        1: [call("nothing"), "41"],
        2: ["40"],
    }
    make = resolve_environment({"tools": {"tools": ["calculator"], "role": "user"}})
    source = scripted(tokenizer, lambda index, turn: scripts[index][turn])
    conversations = MultiTurnSource(
        source, make, lambda task: {"prompt": [{"role": "user", "content": "?"}]}, turns
    )
    samples = asyncio.run(conversations.sample(request_for(0, 1, 2)))
    assert [sample.info["turns"] for sample in samples] == [2, 2, 1]
    assert tool_metrics(samples) == {
        "tools/call_frequency": 2 / 3,
        "tools/failure_frequency": 1 / 2,
    }
    assert tool_metrics(samples[2:]) == {"tools/call_frequency": 0.0} and tool_metrics([]) == {}
    assert samples[0].info["messages"][1] == {"role": "user", "name": "calculator", "content": "42"}


def test_tools_are_described_in_the_prompt(byte_tokenizer, templates_of_the_peer):
    tokenizer = byte_tokenizer((templates_of_the_peer / "qwen2_5.jinja").read_text())
    turns = turns_for(resolve_environment({"tools": {"tools": ["calculator"]}}), tokenizer)
    prompt = tokenizer.decode(turns.prompt([{"role": "user", "content": "?"}]))
    assert '"name": "calculator"' in prompt and "Compute an arithmetic expression" in prompt


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("(17 + 4) * 2", "42"),
        ("2**10", "1024"),
        ("2^10", "1024"),
        ("-7 // 2", "-4"),
        ("7 % 4", "3"),
        ("1/4", "0.25"),
        (" 3 ", "3"),
        ("1.5e3", "1500.0"),
        ("+-+5", "-5"),
        ("10**400 - 10**400", "0"),
    ],
)
def test_the_calculator_computes(expression, value):
    assert calculator(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os').system('true')",
        "().__class__",
        "x",
        "True",
        "'a' * 9",
        "[1] * 9",
        "1 if 1 else 2",
        "1 < 2",
        "(lambda: 1)()",
        "f'{1}'",
        "1j",
        "(-8) ** 0.5",
        "9**9**9**9",
        "9**-9**9",
        "10**999 * 10**999",
        "1 << 99999999999",
        "",
        "1 +",
        "1" * 2000,
        "(" * 500 + "1" + ")" * 500,
    ],
)
def test_the_calculator_refuses_everything_else_at_once(expression):
    begun = time.process_time()
    with pytest.raises((ValueError, SyntaxError, MemoryError, RecursionError)):
        calculator(expression)
    assert time.process_time() - begun < 1
