"""Tools: plain Python functions that the policy calls by writing JSON.

    <tool_call>{"name": "calculator", "arguments": {"expression": "17 * 23"}}</tool_call>

An answer without a call is the last one. What a tool returns is said back in the role "tool"; so is what was wrong with
a call: the policy can do better next time, and the failure is counted.
"""

import asyncio
import difflib
import inspect
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import get_json_schema

from ..rewards.scoring import Row
from ..rewards.workers import OutOfTime, call, within
from ..rollouts.sample import Sample
from .chat_turns import Message
from .multi_turn import Step

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Call(NamedTuple):
    """What the policy asks for; ``problem`` says why it can't be done, or is empty."""

    name: str = ""
    arguments: dict[str, Any] = {}  # noqa: RUF012
    problem: str = ""


class Tools:
    """An environment of functions.

    Args:
        tools: plain or async functions with type hints and a docstring that describes each argument (Google's style);
            their schemas are for the chat template.
        seconds: that a call may take; a plain function that takes longer goes on in a thread that nothing stops.
        longest: characters of a result; what is beyond is cut.
        role: that results are said in, for templates that know no "tool".

    Raises:
        ValueError: if a function can't be described, or two have the same name.
    """

    def __init__(
        self, tools: Sequence[Callable[..., Any]], *, seconds: float = 10.0, longest: int = 4000, role: str = "tool"
    ) -> None:
        self.tools = {tool.__name__: tool for tool in tools}
        if len(self.tools) < len(tools):
            raise ValueError(f"tools: names must differ, got {', '.join(tool.__name__ for tool in tools)}")
        self.seconds, self.longest, self.role = seconds, longest, role
        self.schemas = [_schema(tool) for tool in tools]

    def reset(self, row: Row) -> Sequence[Message]:
        """The row's prompt; ``ChatTurns(encoder, {"tools": tools.schemas})`` describes the tools to the template."""
        prompt: Sequence[Message] = row["prompt"]
        return prompt

    async def step(self, answer: Sample) -> Step:
        calls = parse_calls(answer.text)
        if not calls:
            return Step(done=True)
        results = await asyncio.gather(*map(self._do, calls))
        said = [
            {"role": self.role, "name": asked.name, "content": text}
            for asked, (_, text) in zip(calls, results, strict=True)
        ]
        return Step(said, counts={"tool_calls": len(calls), "tool_failures": sum(not fine for fine, _ in results)})

    async def _do(self, asked: Call) -> tuple[bool, str]:
        """Whether the call succeeded, and what is said of it."""
        problem = asked.problem or self._mistake(asked)
        if problem:
            return False, f"error: {problem}"
        try:
            result = await within(self.seconds, call(self.tools[asked.name], **asked.arguments))
        except OutOfTime as late:
            return False, f"error: {asked.name} {late}"
        except Exception as error:
            return False, f"error: {type(error).__name__}: {error}"
        text = result if isinstance(result, str) else json.dumps(result, default=str)
        return True, text if len(text) <= self.longest else f"{text[: self.longest]}... (cut)"

    def _mistake(self, asked: Call) -> str:
        if asked.name not in self.tools:
            near = difflib.get_close_matches(asked.name, self.tools, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(self.tools)}"
            return f"no tool {asked.name!r}, {hint}"
        try:
            inspect.signature(self.tools[asked.name]).bind(**asked.arguments)
        except TypeError as error:
            return f"{asked.name}: {error}"
        return ""


def parse_calls(text: str) -> list[Call]:
    """The calls in a text, in order; what is no call but begins like one comes with a problem."""
    return [_parse(piece) for piece in re.findall(f"{OPEN}(.*?)(?={OPEN}|$)", text, re.DOTALL)]


def check_tool_tags(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer that would hide calls.

    Raises:
        ValueError: if a tag is a special token: answers are decoded without those.
    """
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    hidden = sorted({OPEN, CLOSE} & (special | set(tokenizer.all_special_tokens)))
    if hidden:
        raise ValueError(
            f"tools: {hidden[0]} is a special token of this tokenizer, so it is missing from the text of answers and "
            "no call would be seen; add it as a token that is not special"
        )


def tool_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Calls per conversation, and the share of them that failed, under TRL's names."""
    calls = sum(sample.info.get("tool_calls", 0) for sample in samples)
    failures = sum(sample.info.get("tool_failures", 0) for sample in samples)
    metrics = {"tools/call_frequency": calls / len(samples)} if samples else {}
    return metrics | ({"tools/failure_frequency": failures / calls} if calls else {})


def _parse(piece: str) -> Call:
    content, closed, _ = piece.partition(CLOSE)
    if not closed:
        return Call(problem=f"a call must end with {CLOSE}")
    try:
        asked = json.loads(content)
    except (ValueError, RecursionError) as error:
        return Call(problem=f"the call is not JSON: {error}")
    if not isinstance(asked, dict) or not isinstance(asked.get("name"), str):
        return Call(problem='a call is an object with "name" and "arguments"')
    arguments = asked.get("arguments", {})
    if isinstance(arguments, str):  # some models write JSON within JSON
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            return Call(asked["name"], problem=f"the arguments are not JSON: {error}")
    if not isinstance(arguments, dict):
        return Call(asked["name"], problem='"arguments" must be an object')
    return Call(asked["name"], arguments)


def _schema(tool: Callable[..., Any]) -> dict[str, Any]:
    try:
        schema: dict[str, Any] = get_json_schema(tool)
    except Exception as error:  # it raises several kinds
        raise ValueError(
            f"tools: {tool.__name__} can't be described to the model: {error}; give every argument a type hint and a "
            "line under Args: in the docstring"
        ) from error
    return schema
