"""Environments from the name in a configuration.

environment: guess_number
environment: {guess_number: {guesses: 3}}
environment: {tools: {tools: [calculator, my_module:search]}}
environment: my_module:Environment
"""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from ...data.chat import Encoder
from ..redaction import resolved
from ..registry import build, find, find_one
from ..rollouts.event_loops import run
from .chat_turns import ChatTurns
from .multi_turn import close
from .tool_formats import GEMMA_QUOTE
from .tools import CLOSE, OPEN

SHIPPED = {
    "guess_number": ".games:GuessNumber",
    "reasoning_gym": ".games:reasoning_gym",
    "tools": ".tools:Tools",
}
TOOLS = {"calculator": ".tools:calculator"}


def resolve_environment(
    spec: str | Mapping[str, Mapping[str, Any]] | Callable[[], Any],
) -> Callable[[], Any]:
    """Return a function that makes an environment for each conversation.

    Args:
        spec: what a configuration names, or the class itself.

    Raises:
        ValueError: names the available environments if this one is not found, or the method that it
            lacks.
    """
    name, factory, settings = find_one("environment", spec, SHIPPED, __package__)
    if name == "tools":
        tools: Any = settings.get("tools", ())
        settings = {**settings, "tools": [_tool(tool) for tool in tools]}
    if name not in SHIPPED:
        _look_at(name, factory)
    make = partial(build, f"environment {name}", factory, resolved(settings), factory=True)
    environment = make()
    run(close(environment))
    _check_parts(name, environment)
    return make


def _look_at(name: str, found: object) -> None:
    """Check that the object a configuration names makes environments, before it is called.

    Raises:
        ValueError: if it is neither a class with ``reset`` and ``step`` nor a function that is
            annotated to return one.
    """
    made = found
    if not inspect.isclass(found):
        made = _annotated(found)
    if not inspect.isclass(made):
        raise ValueError(
            f"environment {name}: wanted a class with reset(row) and step(completion), or a function whose annotation "
            f"says that it returns one, got {found!r}"
        )
    _check_parts(name, made)


def _annotated(function: Any) -> Any:
    """The annotation of a function's return value; None without one that can be read."""
    try:
        annotation = inspect.signature(function, eval_str=True).return_annotation
    except (TypeError, ValueError, NameError):
        return None
    return None if annotation is inspect.Signature.empty else annotation


def _check_parts(name: str, environment: object) -> None:
    for part in ("reset", "step"):
        if not callable(getattr(environment, part, None)):
            raise ValueError(
                f"environment {name}: has no function {part}; wanted reset(row) and step(completion)"
            )


def _tool(name: str) -> Any:
    """The function that a configuration names as a tool, which the policy will call with arguments
    of its own.

    Raises:
        ValueError: if it is not a function.
    """
    tool = find("tool", name, TOOLS, __package__)
    if inspect.isclass(tool) or not callable(tool) or not hasattr(tool, "__name__"):
        raise ValueError(f"tool {name}: wanted a function, got {tool!r}")
    return tool


def turns_for(
    make: Callable[[], object],
    tokenizer: PreTrainedTokenizerBase,
    chat_template_kwargs: Mapping[str, object] | None = None,
) -> ChatTurns:
    """The turns of these environments' conversations, with their tools described to the template if
    they have some.

    Raises:
        ValueError: if the template can't be followed turn by turn, or the tokenizer hides tool
            calls.
    """
    environment = make()
    schemas = getattr(environment, "schemas", None)
    run(close(environment))
    if schemas:
        refuse_hidden_calls(tokenizer)
    encoder = Encoder(tokenizer, None, chat_template_kwargs or {})
    turns = ChatTurns(encoder, {"tools": schemas} if schemas else {})
    if schemas:
        turns.suffix([{"role": getattr(environment, "role", "tool"), "content": "a result"}])
    return turns


def refuse_hidden_calls(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError if the text of completions, decoded without special tokens, misses the tags
    of tool calls.
    """
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    hidden = sorted({OPEN, CLOSE, GEMMA_QUOTE} & (special | set(tokenizer.all_special_tokens)))
    if hidden:
        raise ValueError(
            f"tools: {hidden[0]} is a special token of this tokenizer, so it is missing from the text of "
            "completions and no call would be seen as it is; add it as a token that is not special"
        )
