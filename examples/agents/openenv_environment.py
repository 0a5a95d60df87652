"""An environment of OpenEnv as it is, in the process of the agent.

    agent: {process: {command: [python, examples/agents/openenv_environment.py, my_games:Counting, my_games:Say]}}

The policy's reply is the field `text` of the action, and the observation's `text` is what it is
told; the reward is the sum of those of the steps. Needs openai and openenv-core.
"""

import asyncio
import importlib
import json
import sys

from openai import AsyncOpenAI


def find(name):
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


async def run(row, environment, action):
    policy, messages, total = AsyncOpenAI(), [], 0.0
    observed = await environment.reset_async(**row)
    while not observed.done:
        messages.append({"role": "user", "content": observed.text})
        answer = await policy.chat.completions.create(model="policy", messages=messages)
        messages.append(answer.choices[0].message.model_dump(exclude_none=True))
        observed = await environment.step_async(action(text=messages[-1]["content"]))
        total += observed.reward or 0.0
    environment.close()
    return total


sys.path.append(".")
environment, action = map(find, sys.argv[1:])
print(asyncio.run(run(json.load(sys.stdin), environment(), action)))
