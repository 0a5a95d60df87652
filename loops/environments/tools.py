"""Tools: plain Python functions that the policy calls by writing JSON, or in the format of its
family.

    <tool_call>{"name": "calculator", "arguments": {"expression": "17 * 23"}}</tool_call>     others: `tool_formats`

A completion without a call is the last one. A tool's result is returned in the role "tool"; so is
the error of a wrong call, which the policy can correct, and which is counted.
"""

import ast
import asyncio
import inspect
import json
import math
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

from transformers.utils.chat_template_utils import get_json_schema

from ..registry import nearest
from ..rewards.scoring import OutOfTime, call, within
from ..rollouts.sample import Row, Sample
from .multi_turn import Step
from .tool_formats import ParsedCall, parse_arguments, parse_keyed, parse_untagged

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Tools:
    """An environment of functions.

    Args:
        tools: plain or async functions with type hints and a docstring that describes each argument
            (Google's style); their schemas are for the chat template.
        seconds: the longest that a call may take; a plain function that exceeds it goes on in its
            thread.
        longest: maximal number of characters of a result; the rest is cut.
        role: the role of results, for templates that know no "tool".

    Raises:
        ValueError: if a function can't be described, or two have the same name.
    """

    def __init__(
        self,
        tools: Sequence[Callable[..., object]],
        *,
        seconds: float = 10.0,
        longest: int = 4000,
        role: str = "tool",
    ) -> None:
        self.tools = {tool.__name__: tool for tool in tools}
        if len(self.tools) < len(tools):
            raise ValueError(
                f"tools: names must differ, got {', '.join(tool.__name__ for tool in tools)}"
            )
        self.seconds, self.longest, self.role = seconds, longest, role
        self.schemas: list[dict[str, Any]] = []
        for tool in tools:
            try:
                self.schemas.append(get_json_schema(tool))
            except Exception as error:  # it raises several kinds
                raise ValueError(
                    f"tools: {tool.__name__} can't be described to the model: {error}; give every argument a type hint "
                    "and a line under Args: in the docstring"
                ) from error

    def reset(self, row: Row) -> Any:
        """The row's prompt.

        ``ChatTurns(encoder, {"tools": tools.schemas})`` describes the tools to the template.
        """
        return row["prompt"]

    async def step(self, completion: Sample) -> Step:
        calls = parse_calls(completion.text)
        if not calls:
            return Step(done=True)
        results = await asyncio.gather(*(self._make(*parsed) for parsed in calls))
        messages = []
        failures = 0
        for (name, _, _), (is_fine, text) in zip(calls, results, strict=True):
            messages.append({"role": self.role, "name": name, "content": text})
            failures += not is_fine
        return Step(messages, counts={"tool_calls": len(calls), "tool_failures": failures})

    async def _make(self, name: str, arguments: dict[str, Any], problem: str) -> tuple[bool, str]:
        """Make a call; returns (True, its result) or (False, its error)."""
        if not problem and name not in self.tools:
            problem = nearest("no tool", name, self.tools)
        if problem:
            return False, f"error: {problem}"
        schema = self.schemas[list(self.tools).index(name)]["function"]["parameters"]["properties"]
        arguments = {key: _typed(value, schema.get(key)) for key, value in arguments.items()}
        try:
            inspect.signature(self.tools[name]).bind(**arguments)
        except TypeError as error:
            return False, f"error: {name}: {error}"
        try:
            result = await within(self.seconds, call(self.tools[name], **arguments))
            text = result if isinstance(result, str) else json.dumps(result, default=str)
        except OutOfTime as late:
            return False, f"error: {name} {late}"
        except Exception as error:
            return False, f"error: {type(error).__name__}: {error}"
        if len(text) > self.longest:
            text = f"{text[: self.longest]}... (cut)"
        return True, text


def parse_calls(text: str) -> list[ParsedCall]:
    """The calls in a text after its reasoning: (name, arguments, the problem if it only begins like
    a call).
    """
    text = text.split("</think>", 1)[-1]
    pieces = re.findall(f"{OPEN}(.*?)(?={OPEN}|$)", text, re.DOTALL)
    if not pieces:
        return parse_untagged(text)
    return [_parse(piece) for piece in pieces]


def tool_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Calls per conversation, and the share of them that failed, under TRL's names."""
    calls = sum(sample.info.get("tool_calls", 0) for sample in samples)
    failures = sum(sample.info.get("tool_failures", 0) for sample in samples)
    metrics = {}
    if samples:
        metrics["tools/call_frequency"] = calls / len(samples)
    if calls:
        metrics["tools/failure_frequency"] = failures / calls
    return metrics


def _parse(piece: str) -> ParsedCall:
    content, closed, _ = piece.partition(CLOSE)
    if not closed:
        return "", {}, f"a call must end with {CLOSE}"
    keyed = parse_keyed(content)
    if keyed:
        return keyed
    try:
        request = json.loads(content)
    except (ValueError, RecursionError) as error:
        return "", {}, f"the call is not JSON: {error}"
    if not isinstance(request, dict) or not isinstance(request.get("name"), str):
        return "", {}, 'a call is an object with "name" and "arguments"'
    # some write JSON within JSON
    return parse_arguments(request["name"], request.get("arguments", {}))


def _typed(value: Any, schema: Any) -> Any:
    """An argument that a format without types gives as text, such as XML, by its JSON schema."""
    if not isinstance(value, str) or not schema or schema.get("type", "string") == "string":
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


# The calculator walks the syntax tree: nothing is evaluated that is not listed here.
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_DIGITS = 1000  # of a result; a tower of powers would otherwise stop the program


def calculator(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: Numbers, + - * / // % ** and parentheses, such as "(17 + 4) * 2".
    """
    if len(expression) > 1000:
        raise ValueError("the expression is longer than 1000 characters")
    return str(_value(ast.parse(expression.strip().replace("^", "**"), mode="eval").body))


def _value(node: ast.expr) -> Any:
    value: Any  # int or float
    match node:
        case ast.Constant(value=int() | float()) if not isinstance(node.value, bool):
            value = node.value
        case ast.UnaryOp(op=ast.UAdd()):
            value = _value(node.operand)
        case ast.UnaryOp(op=ast.USub()):
            value = -_value(node.operand)
        case ast.BinOp(op=ast.Pow()):
            base = _value(node.left)
            exponent = _value(node.right)
            if abs(base) > 1 and abs(exponent) * math.log10(abs(base)) > _DIGITS:
                raise ValueError(f"the result has more than {_DIGITS} digits")
            value = base**exponent
            if isinstance(value, complex):
                raise ValueError("the result is not a real number")
        case ast.BinOp() if type(node.op) in _BINARY:
            value = _BINARY[type(node.op)](_value(node.left), _value(node.right))
        case _:
            raise ValueError(f"not arithmetic: {ast.unparse(node)}")
    if isinstance(value, int) and value.bit_length() > _DIGITS * 4:
        raise ValueError(f"the result has more than {_DIGITS} digits")
    return value
