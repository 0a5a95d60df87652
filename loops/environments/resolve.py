"""Environments from the name in a configuration.

environment: guess_number
environment: {guess_number: {guesses: 3}}
environment: {tools: {tools: [calculator, my_module:search]}}
environment: my_module:Environment
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from ...data.chat import Encoder
from ..registry import build, find
from ..rollouts.event_loops import run
from .chat_turns import ChatTurns
from .multi_turn import close
from .tool_formats import GEMMA_QUOTE
from .tools import CLOSE, OPEN

SHIPPED = {"guess_number": ".games:GuessNumber", "reasoning_gym": ".games:reasoning_gym", "tools": ".tools:Tools"}
TOOLS = {"calculator": ".tools:calculator"}


def resolve_environment(spec: str | Mapping[str, Mapping[str, Any]]) -> Callable[[], Any]:
    """Return a function that makes an environment for each conversation.

    Raises:
        ValueError: names the available environments if this one is not found, or what the found object lacks.
    """
    if not isinstance(spec, str) and len(spec) != 1:
        raise ValueError(f"environment: wanted one name, got {', '.join(spec) or 'none'}")
    name, settings = (spec, {}) if isinstance(spec, str) else next(iter(spec.items()))
    if name == "tools":
        settings = {**settings, "tools": [find("tool", t, TOOLS, __package__) for t in settings.get("tools", ())]}
    factory = find("environment", name, SHIPPED, __package__)
    make = partial(build, f"environment {name}", factory, settings, factory=True)
    environment = make()
    run(close(environment))
    for part in ("reset", "step"):
        if not callable(getattr(environment, part, None)):
            raise ValueError(f"environment {name}: has no function {part}; wanted reset(row) and step(completion)")
    return make


def turns_for(
    make: Callable[[], Any], tokenizer: PreTrainedTokenizerBase, chat_template_kwargs: Mapping[str, Any] | None = None
) -> ChatTurns:
    """The turns of these environments' conversations, with their tools described to the template if they have some.

    Raises:
        ValueError: if the template can't be followed turn by turn, or the tokenizer hides tool calls.
    """
    environment = make()
    schemas = getattr(environment, "schemas", None)
    run(close(environment))
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    hidden = sorted({OPEN, CLOSE, GEMMA_QUOTE} & (special | set(tokenizer.all_special_tokens)))
    if schemas and hidden:  # completions are decoded without special tokens
        raise ValueError(
            f"tools: {hidden[0]} is a special token of this tokenizer, so it is missing from the text of "
            "completions and no call would be seen as it is; add it as a token that is not special"
        )
    turns = ChatTurns(Encoder(tokenizer, None, chat_template_kwargs or {}), {"tools": schemas} if schemas else {})
    if schemas:
        turns.suffix([{"role": getattr(environment, "role", "tool"), "content": "a result"}])
    return turns
