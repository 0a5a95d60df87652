"""Classes written for TRL's `environment_factory`: their public methods are the tools.

    environment: {examples.agents.trl_environment:FromTRL: {factory: my_environments:Counter}}

`reset(**row)` may return a text, which is added to the last message of the prompt, and
`get_reward()` is asked at the end, as in TRL.
"""

import importlib
import inspect

from burnish.loops.environments import Tools
from burnish.loops.rewards.scoring import call

NOT_TOOLS = ("reset", "get_reward")


class FromTRL(Tools):
    def __init__(self, factory: str):
        module, _, name = factory.partition(":")
        self.environment = getattr(importlib.import_module(module), name)()
        methods = inspect.getmembers(type(self.environment), inspect.isfunction)
        names = [name for name, _ in methods if not name.startswith("_") and name not in NOT_TOOLS]
        super().__init__([getattr(self.environment, name) for name in names])

    async def reset(self, row):
        text = await call(self.environment.reset, **row)
        prompt = [dict(message) for message in row["prompt"]]
        if text:
            prompt[-1]["content"] += text
        return prompt

    async def get_reward(self):
        reward = getattr(self.environment, "get_reward", None)
        return None if reward is None else await call(reward)
