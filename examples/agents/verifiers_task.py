"""A task of verifiers as it is, under its null harness.

    agent: {process: {command: [python, examples/agents/verifiers_task.py, my_tasks:Answering, my_tasks:Question]}}

Its relay asks the policy at the URL of the conversation. Rows have the fields of the task's data,
and the reward is that of its trace. Needs verifiers and uv.
"""

import asyncio
import importlib
import json
import os
import sys

import verifiers.v1 as vf
from verifiers.v1.harnesses.null import NullHarnessConfig
from verifiers.v1.runtimes import SubprocessConfig


def find(name):
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


async def run(task):
    url = os.environ["OPENAI_BASE_URL"]
    client = vf.EvalClientConfig(base_url=url, api_key_var="OPENAI_API_KEY")
    harness, runtime = NullHarnessConfig(id="null"), SubprocessConfig()
    config = vf.AgentConfig(model="policy", client=client, harness=harness, runtime=runtime)
    trace = await vf.Agent(config).run(task)
    if trace.errors:
        raise RuntimeError(trace.errors[-1])
    return trace.reward


sys.path.append(".")
task, data = map(find, sys.argv[1:])
print(asyncio.run(run(task(data(**json.load(sys.stdin))))))
