"""From a configuration's name to environments.

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
from ..rewards.reasoning_gym import ReasoningGym
from ..rollouts.event_loops import run
from .chat_turns import ChatTurns
from .multi_turn import Environment, close
from .single_turn import SingleTurn
from .tools import check_tool_tags

SHIPPED = {
    "guess_number": ".games:GuessNumber",
    "reasoning_gym": ".resolve:reasoning_gym",
    "tools": ".tools:Tools",
}
TOOLS = {"calculator": ".tools:calculator"}


def resolve_environment(spec: str | Mapping[str, Mapping[str, Any]]) -> Callable[[], Environment]:
    """Return a function that makes an environment for each conversation.

    Raises:
        ValueError: names what there is instead of what is not found, or what it is not.
    """
    if not isinstance(spec, str) and len(spec) != 1:
        raise ValueError(f"environment: wanted one name, got {', '.join(spec) or 'none'}")
    name, settings = (spec, {}) if isinstance(spec, str) else next(iter(spec.items()))
    settings = dict(settings)
    if name == "tools":
        settings["tools"] = [find("tool", tool, TOOLS, __package__) for tool in settings.get("tools", ())]
    found = find("environment", name, SHIPPED, __package__)
    make = partial(build, f"environment {name}", found, settings, factory=True)
    one = make()
    run(close(one))
    for part in ("reset", "step"):
        if not callable(getattr(one, part, None)):
            raise ValueError(f"environment {name}: has no function {part}; wanted reset(row) and step(completion)")
    return make


def turns_for(
    make: Callable[[], Environment], tokenizer: PreTrainedTokenizerBase, *, chat_template: str | None = None
) -> ChatTurns:
    """The turns of these environments' conversations, with their tools described to the template if they have some.

    Raises:
        ValueError: if the template can't be followed turn by turn, or the tokenizer hides tool calls.
    """
    one = make()
    schemas = getattr(one, "schemas", None)
    run(close(one))
    if schemas:
        check_tool_tags(tokenizer)
    return ChatTurns(Encoder(tokenizer, chat_template), {"tools": schemas} if schemas else {})


def reasoning_gym(tag: str = "answer") -> Environment:
    return SingleTurn(ReasoningGym(tag))
