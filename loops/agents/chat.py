"""OpenAI's Chat Completions as JSON: what a client asks, and what it is told.

A parameter that would draw tokens from another distribution than the run's is refused by its name:
their log-probs would be of another policy than the one that is trained.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...data.columns import BadRow, Message, read_message
from ..environments.tools import OPEN, parse_calls
from ..registry import nearest
from ..rollouts.sample import SamplingParams

_READ = (
    "messages",
    "tools",
    "n",
    "max_tokens",
    "max_completion_tokens",
    "stream",
    "stream_options",
    "model",
)
# Of the run: a client may repeat them, and change nothing.
_OF_THE_RUN = ("temperature", "top_p", "top_k", "min_p")
# Values that change nothing, as clients send them.
_NEUTRAL: dict[str, object] = {
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "logit_bias": {},
    "logprobs": False,
    "top_logprobs": 0,
    "stop": [],
    "response_format": {"type": "text"},
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "modalities": ["text"],
}
# Labels for OpenAI's own books. Seeds are the run's: a seed says nothing about the distribution.
_LABELS = (
    "user",
    "seed",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
)


class Refused(Exception):
    """A request that is not answered.

    Attributes:
        status: of HTTP; clients repeat by themselves what they are refused with 409, 429 and 5xx.
        parameter: the name of what is wrong.
    """

    def __init__(self, status: int, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.parameter = parameter

    @property
    def as_json(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {
            "message": str(self),
            "type": kind,
            "param": self.parameter,
            "code": None,
        }
        return {"error": error}


@dataclass(frozen=True)
class ChatCall:
    """What a client asks.

    Attributes:
        messages: as chat templates read them, the arguments of tool calls as mappings.
        count: how many completions.
        max_tokens: of each; None leaves it to the run.
        streams: whether the reply is told as a stream of events, and ``usage`` with it.
    """

    messages: list[Message]
    tools: list[Any]
    count: int
    max_tokens: int | None
    streams: bool
    usage: bool
    model: str


def read_call(body: bytes, *sampling: SamplingParams) -> ChatCall:
    """Check what a client asks.

    Args:
        sampling: the run's, which a client may repeat.

    Raises:
        Refused: with 400, if it is not understood, or asks for another distribution.
    """
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise Refused(400, "the body must be an object")
    asked = {name: value for name, value in given.items() if value is not None}
    for name, value in asked.items():
        _check_parameter(name, value, sampling)
    options = asked.get("stream_options", {})
    limits = [
        _count(asked, name)
        for name in ("max_tokens", "max_completion_tokens")
        if asked.get(name) is not None
    ]
    tools = asked.get("tools", [])
    if not isinstance(tools, list):
        raise Refused(400, "tools must be a list of JSON schemas", "tools")
    return ChatCall(
        messages=_messages(asked.get("messages")),
        tools=tools,
        count=_count(asked, "n") if "n" in asked else 1,
        max_tokens=min(limits, default=None),
        streams=asked.get("stream") is True,
        usage=isinstance(options, Mapping) and options.get("include_usage") is True,
        model=str(asked.get("model", "")),
    )


def _check_parameter(name: str, value: object, sampling: Sequence[SamplingParams]) -> None:
    """Refuse a parameter that would change the distribution, or is not known."""
    if name in _READ or name in _LABELS:
        return
    if name in _OF_THE_RUN:
        own = [getattr(each, name) for each in sampling]
        if value not in own:
            problem = f"{name} is the run's, {own[0]:g}, so that log-probs are those of the policy"
            raise Refused(400, f"{problem}; got {value!r:.80}, leave it out", name)
        return
    if name in _NEUTRAL:
        if value != _NEUTRAL[name]:
            problem = f"{name} is not supported, as what is drawn must be the policy's own"
            raise Refused(400, f"{problem}; got {value!r:.80}, leave it out", name)
        return
    known = [*_READ, *_OF_THE_RUN, *_NEUTRAL, *_LABELS]
    complaint = nearest("no parameter", name, known)
    raise Refused(400, f"{complaint}; leave it out", name)


def _count(asked: Mapping[str, Any], name: str) -> int:
    value = asked[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise Refused(400, f"{name} must be a whole number >= 1, got {value!r:.80}", name)
    return value


def _messages(given: object) -> list[Message]:
    if not isinstance(given, list) or not given:
        raise Refused(400, "messages must be a list of some {role, content}", "messages")
    names: dict[object, object] = {}  # of the tools that were called, by the ids of the calls
    messages = []
    for number, each in enumerate(given, 1):
        if isinstance(each, Mapping) and each.get("content") is None:
            each = {**each, "content": ""}
        try:
            message = read_message(each, f"message {number}")
        except BadRow as bad:
            raise Refused(400, bad.problem, "messages") from None
        if "images" in message:
            raise Refused(400, f"message {number} shows an image; text alone is read", "messages")
        for call in message.get("tool_calls", ()):
            names[call.get("id")] = call["function"].get("name")
        known = names.get(message.get("tool_call_id"))
        if message["role"] == "tool" and known is not None:
            message.setdefault("name", known)  # which some templates write
        messages.append(message)
    return messages


def canonical(message: Message) -> str:
    """What of a message counts where two are compared: role, text, and tool calls by what they
    say.
    """
    calls = []
    for call in message.get("tool_calls", ()):
        arguments = call["function"].get("arguments")
        if isinstance(arguments, str):  # as a client is told them
            arguments = json.loads(arguments)
        calls.append([call["function"].get("name"), arguments])
    content = message.get("content") or ""
    return json.dumps([message["role"], content, calls], sort_keys=True, default=str)


def reply_of(text: str, tools: Sequence[object], number: int) -> Message:
    """The assistant's message of a completion, as a client is told it.

    Reasoning stands apart; calls of tools are read where some were offered, and a call that can't
    be read stays text.

    Args:
        number: of the completion in its conversation, for the ids of its calls.
    """
    reasoning, closed, content = text.rpartition("</think>")
    reply: Message = {"role": "assistant", "content": content}
    if closed:
        reply["reasoning_content"] = reasoning.removeprefix("<think>")
    calls = parse_calls(content) if tools else []
    if calls and not any(problem for _, _, problem in calls):
        before = content.partition(OPEN)[0].strip() if OPEN in content else ""
        reply["content"] = before or None
        reply["tool_calls"] = [
            {
                # nine letters and digits, as Mistral's template wants them
                "id": f"c{number:05d}{place:03d}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
            }
            for place, (name, arguments, _) in enumerate(calls)
        ]
    return reply


def completion_of(
    call: ChatCall, name: str, replies: Sequence[tuple[Message, str]], usage: Mapping[str, int]
) -> dict[str, Any]:
    """The answer to a call.

    Args:
        name: of the answer, unique.
        replies: messages, and how each ended, ``stop`` or ``length``.
    """
    choices = []
    for index, (message, finish) in enumerate(replies):
        if finish == "stop" and "tool_calls" in message:
            finish = "tool_calls"
        choices.append(
            {"index": index, "message": message, "logprobs": None, "finish_reason": finish}
        )
    return {
        "id": f"chatcmpl-{name}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": call.model,
        "choices": choices,
        "usage": dict(usage),
    }


def as_events(completion: Mapping[str, Any], usage: bool) -> bytes:
    """A completion as a stream of events: the whole of it in one chunk."""
    chunk = {**completion, "object": "chat.completion.chunk", "usage": None}
    chunk["choices"] = [_delta(choice) for choice in completion["choices"]]
    chunks = [chunk]
    if usage:
        chunks.append({**chunk, "choices": [], "usage": completion["usage"]})
    events = [json.dumps(each) for each in chunks] + ["[DONE]"]
    return "".join(f"data: {event}\n\n" for event in events).encode()


def _delta(choice: Mapping[str, Any]) -> dict[str, Any]:
    delta = dict(choice["message"])
    if "tool_calls" in delta:
        delta["tool_calls"] = [
            {"index": index, **call} for index, call in enumerate(delta["tool_calls"])
        ]
    rest = {name: value for name, value in choice.items() if name != "message"}
    return {**rest, "delta": delta}
