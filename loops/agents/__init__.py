"""Agents that ask the policy over OpenAI's Chat Completions, and know nothing of training.

An agent is a function, plain or async, or a program. One of your own, in a file of the working
directory, my_agent.py:

    from openai import AsyncOpenAI

    async def run(row, url, key):
        client = AsyncOpenAI(base_url=url, api_key=key)
        messages = [{"role": "user", "content": row["question"]}]
        answer = await client.chat.completions.create(model="policy", messages=messages)
        return float(answer.choices[0].message.content.strip() == row["answer"])

and in the configuration: ``agent: my_agent:run``. Each conversation is one call of it, with a row
of the data, and a URL and a key of its own; it returns the reward, or None for none. What the
policy says to it becomes samples with the very tokens that were drawn: nothing is tokenized again,
and each drawn token is trained once. See `AgentSource`, docs/agents.md.

source        one conversation for each completion that a scheduler asks for; limits and failures
conversation  calls of one agent: which known beginning one continues, what is drawn, retries, seeds
tree          completions as a tree, and its branches as contexts to train on
chat          the JSON of Chat Completions: what is read, refused, and told
server        sessions and their keys, over HTTP
process       an agent as a program
resolve       the name in a configuration
"""

from typing import TYPE_CHECKING

from ...lazy import lazy_exports

if TYPE_CHECKING:
    from ..config import Limits as Limits
    from .process import AgentProcess as AgentProcess
    from .resolve import resolve_agent as resolve_agent
    from .server import AgentServer as AgentServer
    from .source import AgentSource as AgentSource

__getattr__ = lazy_exports(__name__)
