"""Tool calls in the formats of model families, besides JSON between ``<tool_call>`` tags (Hermes,
Qwen2.5, Qwen3).

    Qwen3.5, Qwen3-Coder, Nemotron 3   <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>
    GLM-4.5       <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>
    Muse          <atem:invoke name="NAME"><atem:parameter name="KEY">VALUE</atem:parameter></atem:invoke>
    DeepSeek-V3   <｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME ```json ARGUMENTS ```<｜tool▁call▁end｜>
    gpt-oss       to=functions.NAME<|channel|>commentary json<|message|>ARGUMENTS
    Gemma 4       <|tool_call>call:NAME{KEY:VALUE, ...}<tool_call|>, with <|"|> before and after each text
    Llama 3.1     {"name": NAME, "parameters": ARGUMENTS}, and nothing else
    Mistral       [TOOL_CALLS] [{"name": NAME, "arguments": ARGUMENTS}, ...] or, newer, [TOOL_CALLS]NAME[ARGS]ARGUMENTS
    LFM2          [NAME(KEY=VALUE), ...], and nothing else

Tags that are special tokens are missing from the text of a completion, so they may be left out.
"""

import ast
import json
import re
from typing import Any

# name, arguments, and the problem, empty if there is none
ParsedCall = tuple[str, dict[str, Any], str]

_KEYED = (  # a call, and one of its arguments with the tag that ends it
    (
        r"\s*<function=([^>\n]+)>(.*)</function>\s*",
        (r"<parameter=([^<>\n]+)>\n?(.*?)\n?</parameter>", "</parameter>"),
    ),
    (
        r"\s*([\w.-]+)\s*+((?:<arg_key>.*</arg_value>)?)\s*",
        (
            r"<arg_key>((?:(?!<arg_key>).)*?)</arg_key>\s*<arg_value>(.*?)</arg_value>",
            "</arg_value>",
        ),
    ),
)
_MUSE = (
    (r'<atem:invoke name="([^"]+)">(.*?)</atem:invoke>', "</atem:invoke>"),
    (r'<atem:parameter name="([^"]+)">(.*?)</atem:parameter>', "</atem:parameter>"),
)
_WITH_JSON = (
    (r"<｜tool▁sep｜>([^<\n]+)\n```json\n(.*?)\n```", "\n```"),
    (r"to=functions\.([\w.-]+?)(?:<\|channel\|>)?commentary json(?:<\|message\|>)?(\{.*\})", "}"),
)
# Atomic groups (?>...) read a text that is no call in one way, of the exponentially many to divide
# it.
_GEMMA = (
    r'call:([\w.-]+)(\{(?:(?><\|"\|>.*?<\|"\|>)|<\|"\|>(?!.*<\|"\|>)|[^<])*?\})'
    r"(?=<tool_call\|>|(?:<\|tool_call>)?call:|\s*$)"
)
_GEMMA_BEGIN = r"call:[\w.-]+\{"
GEMMA_QUOTE = '<|"|>'
# Begins of calls, each read to the end of the text in vain, after which a text is taken to hold
# none.
_IN_VAIN = 8
_MISTRAL = r"\s*(?:\[TOOL_CALLS\])?([\w.-]+)(?:\[ARGS\])?(\{.*?\})\s*(?=\[TOOL_CALLS\]|[\w.-]+(?:\[ARGS\])?\{|$)"


def parse_keyed(content: str) -> ParsedCall | None:
    """The call between ``<tool_call>`` tags whose arguments are in tags of their own.

    None for another text.
    """
    for call, argument in _KEYED:
        match = re.fullmatch(call, content, re.DOTALL)
        if match:
            return match[1], dict(_findall(argument, match[2])), ""
    return None


def _findall(ended: tuple[str, str], text: str) -> list[tuple[str, str]]:
    """Pairs that a pattern finds in a text, in time that grows as the text does.

    What follows the last end of a match can hold none. Without it every search for an end succeeds;
    with it, each of many begins without an end would be searched for one through the whole text.
    """
    pattern, end = ended
    last = text.rfind(end)
    return re.findall(pattern, text[: last + len(end)], re.DOTALL) if last >= 0 else []


def _gemma_calls(text: str) -> list[tuple[str, str]]:
    """Names and arguments of the calls in Gemma's format, in time that grows as the text does."""
    calls = []
    position = 0
    in_vain = 0
    while in_vain < _IN_VAIN:
        begin = re.compile(_GEMMA_BEGIN).search(text, position)
        if begin is None:
            break
        call = re.compile(_GEMMA, re.DOTALL).match(text, begin.start())
        if call is None:
            in_vain += 1
            position = begin.end()
        else:
            calls.append((call[1], call[2]))
            position = call.end()
    return calls


def parse_untagged(text: str) -> list[ParsedCall]:
    """The calls in a text without ``<tool_call>``."""
    call, argument = _MUSE
    calls = _findall(call, text)
    if calls:
        return [(name, dict(_findall(argument, body)), "") for name, body in calls]
    for pattern in _WITH_JSON:
        calls = _findall(pattern, text)
        if calls:
            return [parse_arguments(name, arguments) for name, arguments in calls]
    calls = _gemma_calls(text)
    if calls:
        return [parse_arguments(name, _gemma_json(arguments)) for name, arguments in calls]
    bare = text.strip().removeprefix("[TOOL_CALLS]").lstrip()
    if bare.startswith(("{", "[{")):
        return _bare_json_calls(bare)
    if re.fullmatch(rf"(?>{_MISTRAL})+", text, re.DOTALL):
        return [
            parse_arguments(name, arguments)
            for name, arguments in re.findall(_MISTRAL, text, re.DOTALL)
        ]
    match = re.fullmatch(
        r"\s*(?:<\|tool_call_start\|>)?(\[\w+\(.*\)\])(?:<\|tool_call_end\|>)?\s*", text, re.DOTALL
    )
    return _python_calls(match[1]) if match else []


def _bare_json_calls(text: str) -> list[ParsedCall]:
    """The calls of a text that is nothing but JSON: a list with ``arguments``, or one object with
    ``parameters``.
    """
    try:
        requests = json.loads(text)
    except (ValueError, RecursionError):
        return []
    key = "arguments"
    if not isinstance(requests, list):
        key = "parameters"
        requests = [requests]
    for request in requests:
        keys = request.keys() - {"id"} if isinstance(request, dict) else set()
        if keys != {"name", key} or not isinstance(request["name"], str):
            return []
    return [parse_arguments(request["name"], request[key]) for request in requests]


def parse_arguments(name: str, arguments: object) -> ParsedCall:
    """Arguments by name, or the JSON of them."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return name, {}, f"the arguments are not JSON: {error}"
    if not isinstance(arguments, dict):
        return name, {}, '"arguments" must be an object'
    return name, arguments, ""


def _gemma_json(arguments: str) -> str:
    """Arguments with the quotes of JSON around texts and keys."""
    quoted = rf"{re.escape(GEMMA_QUOTE)}(.*?){re.escape(GEMMA_QUOTE)}|(?<![\w.-])([\w.-]++)(?=:)"
    return re.sub(
        quoted, lambda match: json.dumps(match[2] or match[1]), arguments, flags=re.DOTALL
    )


def _python_calls(text: str) -> list[ParsedCall]:
    try:
        body = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    if not isinstance(body, ast.List):
        return []
    calls = [element for element in body.elts if isinstance(element, ast.Call)]
    if len(calls) < len(body.elts):
        return []
    return [_python_call(call) for call in calls]


def _python_call(call: ast.Call) -> ParsedCall:
    try:
        name = ast.unparse(call.func)
    except RecursionError:
        return "", {}, "the name of the function is nested too deeply"
    if call.args or not all(keyword.arg for keyword in call.keywords):
        return name, {}, "every argument must be given by its name"
    try:
        arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
        return name, arguments, ""
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
        return name, {}, f"the arguments are not Python literals: {error}"
