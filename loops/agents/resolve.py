"""Agents from the name in a configuration.

agent: my_agent:run
agent: {my_agent:Agent: {steps: 3}}
agent: {process: {command: [python, agent.py]}}
"""

import inspect
from collections.abc import Mapping
from typing import Any

from ..redaction import resolved
from ..registry import build, find_one
from .source import Agent

SHIPPED = {"process": ".process:AgentProcess"}

_PARAMETERS = 3  # row, url, key


def resolve_agent(spec: str | Mapping[str, Mapping[str, Any]] | Agent) -> Agent:
    """Return the agent that a configuration names, or that is given itself.

    Raises:
        ValueError: if it is not found, or is no function of (row, url, key).
    """
    name, found, settings = find_one("agent", spec, SHIPPED, __package__)
    agent = build(f"agent {name}", found, resolved(settings))
    try:
        inspect.signature(agent).bind(*["argument"] * _PARAMETERS)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"agent {name}: wanted a function of (row, url, key), or a class with such a __call__, that returns a "
            f"reward: {error}"
        ) from None
    run: Agent = agent
    return run
