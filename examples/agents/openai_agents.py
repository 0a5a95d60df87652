"""The OpenAI Agents SDK, whose agent has a tool; any framework with a base URL is used alike.

    agent: {process: {command: [python, examples/agents/openai_agents.py]}}

Rows have a question and an answer. Needs openai-agents.
"""

import json
import sys

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI


@function_tool
def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


set_tracing_disabled(True)  # which would be sent to OpenAI
row = json.load(sys.stdin)
policy = OpenAIChatCompletionsModel(model="policy", openai_client=AsyncOpenAI())
agent = Agent(name="adder", instructions="Use your tool.", tools=[add], model=policy)
result = Runner.run_sync(agent, row["question"])
print(float(str(result.final_output).strip() == row["answer"]))
