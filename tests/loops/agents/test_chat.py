"""What is read of Chat Completions, what is refused, and what is told."""

import json

import pytest
from burnish.loops.agents.chat import Refused, canonical, read_call, reply_of
from burnish.loops.rollouts.sample import SamplingParams

SAMPLING = SamplingParams(64, temperature=0.7)
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def body(**parameters):
    asked = {"model": "m", "messages": [{"role": "user", "content": "Hi."}], **parameters}
    return json.dumps(asked).encode()


@pytest.mark.parametrize(
    "parameters",
    [
        {"temperature": 0.7, "top_p": 1},
        {"temperature": None, "stop": None},
        {"frequency_penalty": 0, "response_format": {"type": "text"}, "tool_choice": "auto"},
        {"seed": 3, "user": "me", "metadata": {}, "stream_options": {"include_usage": True}},
    ],
)
def test_what_changes_nothing_is_accepted(parameters) -> None:
    assert read_call(body(**parameters), SAMPLING).messages == [{"role": "user", "content": "Hi."}]


@pytest.mark.parametrize(
    ("parameters", "name", "told"),
    [
        ({"temperature": 0.2}, "temperature", "temperature is the run's, 0.7"),
        ({"top_k": 5}, "top_k", "top_k is the run's, 0"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "logit_bias is not supported"),
        ({"stop": ["\n"]}, "stop", "stop is not supported"),
        ({"tool_choice": "required"}, "tool_choice", "tool_choice is not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
        ({"temprature": 1}, "temprature", "did you mean 'temperature'?"),
        ({"n": 0}, "n", "n must be a whole number >= 1"),
        ({"max_tokens": True}, "max_tokens", "max_tokens must be a whole number"),
        ({"messages": []}, "messages", "messages must be a list"),
        ({"messages": [{"role": "poet", "content": "O"}]}, "messages", "message 1 has the role"),
        ({"messages": ["Hi"]}, "messages", "message 1"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
            "messages",
            "",
        ),
        ({"tools": "add"}, "tools", "tools must be a list"),
    ],
)
def test_the_rest_is_refused_by_its_name(parameters, name, told) -> None:
    with pytest.raises(Refused) as refused:
        read_call(body(**parameters), SAMPLING)
    assert refused.value.status == 400
    assert refused.value.parameter == name
    assert told in str(refused.value)
    assert refused.value.as_json["error"]["param"] == name


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b"\xff", b"[" * 100_000])
def test_a_body_that_is_no_object_is_refused(raw) -> None:
    with pytest.raises(Refused):
        read_call(raw, SAMPLING)


def test_the_smaller_limit_of_tokens_holds() -> None:
    assert read_call(body(), SAMPLING).max_tokens is None
    call = read_call(body(max_tokens=9, max_completion_tokens=7), SAMPLING)
    assert call.max_tokens == 7


def test_tool_calls_are_read_where_tools_were_offered() -> None:
    reply = reply_of(f"<think>1?</think>So. {CALL}", [TOOL], 12)
    assert reply["content"] == "So."
    assert reply["reasoning_content"] == "1?"
    (call,) = reply["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert len(call["id"]) == 9 and call["id"].isalnum()
    assert reply_of(CALL, [], 0) == {"role": "assistant", "content": CALL}


def test_a_call_that_cannot_be_read_stays_text() -> None:
    text = f"{CALL}<tool_call>{{add}}</tool_call>"
    assert reply_of(text, [TOOL], 0) == {"role": "assistant", "content": text}


def test_a_reply_and_what_a_client_makes_of_it_are_the_same() -> None:
    reply = reply_of(CALL, [TOOL], 0)
    function = {"name": "add", "arguments": '{"a":1}'}
    again = {
        "role": "assistant",
        "tool_calls": [{"id": "x", "type": "function", "function": function}],
    }
    read = read_call(body(messages=[{"role": "user", "content": "1+0?"}, again]), SAMPLING)
    assert canonical(read.messages[1]) == canonical(reply)
    other = {**again, "tool_calls": [{"function": {"name": "add", "arguments": '{"a":2}'}}]}
    read = read_call(body(messages=[other]), SAMPLING)
    assert canonical(read.messages[0]) != canonical(reply)


def test_a_tool_is_called_and_its_result_continues_the_context(says, client, played, user) -> None:
    source = says(lambda heard, turn: [CALL, "It is 1."][turn])

    async def run(row, url, key):
        async with client(url, key) as ask:
            response = (await ask.post("1+0?", tools=[TOOL])).json()
            assert response["choices"][0]["finish_reason"] == "tool_calls"
            reply = response["choices"][0]["message"]
            (call,) = reply["tool_calls"]
            result = {"role": "tool", "tool_call_id": call["id"], "content": "1"}
            last = await ask.reply([user("1+0?"), reply, result], tools=[TOOL])
            assert last["content"] == "It is 1."
        return 1.0

    (sample,), _ = played(source, run, max_tokens=99)
    assert len(sample.contexts) == 1
    assert [message["role"] for message in sample.info["messages"]] == [
        "assistant",
        "tool",
        "assistant",
    ]


def test_other_tools_begin_another_context(says, client, played, user) -> None:
    async def run(row, url, key):
        async with client(url, key) as ask:
            reply = await ask.reply("1+0?")
            await ask.reply([user("1+0?"), reply, user("And?")], tools=[TOOL])
        return 1.0

    (sample,), _ = played(says("1"), run)
    assert len(sample.contexts) == 2


def test_a_stream_is_one_chunk_of_the_whole(says, client, played) -> None:
    source = says(CALL)

    async def run(row, url, key):
        async with client(url, key) as ask:
            response = await ask.post(
                "1+0?", stream=True, stream_options={"include_usage": True}, tools=[TOOL]
            )
        assert response.headers["content-type"] == "text/event-stream"
        events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        chunk, usage, done = events
        assert done == "[DONE]"
        (choice,) = json.loads(chunk)["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["delta"]["tool_calls"][0]["index"] == 0
        assert json.loads(usage)["usage"]["completion_tokens"] == len(CALL) + 1
        return 1.0

    (sample,), _ = played(source, run, max_tokens=99)
    assert sample.finish == "stop"


def test_max_tokens_of_a_call_shorten_its_completion(says, client, played) -> None:
    async def run(row, url, key):
        async with client(url, key) as ask:
            response = (await ask.post("Well?", max_completion_tokens=2)).json()
            assert response["choices"][0]["finish_reason"] == "length"
            response = (await ask.post("Well?", max_tokens=200)).json()
            assert response["choices"][0]["finish_reason"] == "stop"
        return 1.0

    (sample,), _ = played(says("yes"), run)
    assert [len(context.tokens) for context in sample.contexts] == [2, 4]


def test_a_completion_that_was_cut_is_ended_by_the_template(
    says, client, played, user, turns
) -> None:
    async def run(row, url, key):
        async with client(url, key) as ask:
            reply = await ask.reply("Well?", max_tokens=2)
            await ask.reply([user("Well?"), reply, user("On.")])
        return 1.0

    (sample,), _ = played(says("yes"), run)
    suffix = turns.suffix([user("On.")])
    assert sample.tokens[2 : 2 + len(suffix)] == suffix
    assert sum(sample.trained) == 2 + 4


def test_a_template_that_refuses_the_messages_is_told(says, client, played, turns) -> None:
    refusing = turns.encoder.tokenizer.chat_template + (
        "{% for m in messages %}{% if m.role == 'system' %}"
        "{{ raise_exception('no system, please') }}{% endif %}{% endfor %}"
    )
    turns.encoder.tokenizer.chat_template, usual = refusing, turns.encoder.tokenizer.chat_template

    async def run(row, url, key):
        async with client(url, key) as ask:
            response = await ask.post([{"role": "system", "content": "Be."}])
            assert response.status_code == 400
            assert "no system, please" in response.json()["error"]["message"]
            await ask.reply("Well?")
        return 1.0

    try:
        (sample,), source = played(says("yes"), run)
    finally:
        turns.encoder.tokenizer.chat_template = usual
    assert sample.finish == "stop", source.failures


def test_a_run_may_be_named_where_an_evaluation_is_greedy(says, client, played) -> None:
    async def run(row, url, key):
        async with client(url, key) as ask:
            assert (await ask.post("Well?", temperature=0.7)).status_code == 200
            assert (await ask.post("Well?", temperature=1.0)).status_code == 200
            assert (await ask.post("Well?", temperature=0.1)).status_code == 400
        return 1.0

    (sample,), source = played(says("yes"), run, options={"sampling": SAMPLING})
    assert sample.finish == "stop", source.failures
