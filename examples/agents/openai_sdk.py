"""A program that asks by the OpenAI SDK, and is rewarded for the right answer.

    agent: {process: {command: [python, examples/agents/openai_sdk.py]}}

Rows have a question and an answer. The URL and the key are in the environment, where the SDK looks.
"""

import json
import sys

from openai import OpenAI

row = json.load(sys.stdin)
messages = [{"role": "user", "content": row["question"]}]
answer = OpenAI().chat.completions.create(model="policy", messages=messages)
print(float((answer.choices[0].message.content or "").strip() == row["answer"]))
