"""An agent with the tools of an MCP server, which it starts.

    agent: {process: {command: [python, examples/agents/mcp_tools.py, python, my_server.py]}}

Rows have a question and an answer. Needs openai and mcp.
"""

import asyncio
import json
import sys

from mcp import Client, StdioServerParameters
from openai import AsyncOpenAI


def schema(tool):
    described = {"name": tool.name, "description": tool.description or ""}
    return {"type": "function", "function": {**described, "parameters": tool.input_schema}}


async def run(row, command):
    policy = AsyncOpenAI()
    messages = [{"role": "user", "content": row["question"]}]
    async with Client(StdioServerParameters(command=command[0], args=command[1:])) as server:
        tools = [schema(tool) for tool in (await server.list_tools()).tools]
        while True:
            asked = {"model": "policy", "messages": messages, "tools": tools}
            reply = (await policy.chat.completions.create(**asked)).choices[0].message
            messages.append(reply.model_dump(exclude_none=True))
            if not reply.tool_calls:
                return float((reply.content or "").strip() == row["answer"])
            for call in reply.tool_calls:
                arguments = json.loads(call.function.arguments)
                result = await server.call_tool(call.function.name, arguments)
                text = "\n".join(part.text for part in result.content if part.type == "text")
                messages.append({"role": "tool", "tool_call_id": call.id, "content": text})


print(asyncio.run(run(json.load(sys.stdin), sys.argv[1:])))
