"""Agents for the command line to name: ``agents:twice``. They ask by the standard library alone."""

import asyncio
import json
import urllib.request


def ask(url, key, messages, **parameters):
    """The message that the policy replies."""
    body = {"model": "policy", "messages": messages, **parameters}
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode(), headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request) as response:
        return json.load(response)["choices"][0]["message"]


def vowels(text):
    """The share of characters below the letter n: every random model knows how to do better."""
    return sum(character < "n" for character in text) / max(1, len(text))


def twice(row, url, key):
    """Asks the question of the row, and once more; a plain function."""
    messages = [*row["prompt"]]
    reward = 0.0
    for _ in range(2):
        reply = ask(url, key, messages)
        reward += vowels(reply["content"]) / 2
        messages += [reply, {"role": "user", "content": "And?"}]
    return reward


async def parted(row, url, key):
    """Plans, and then does two things at once and a third alone: three contexts."""
    plan = await asyncio.to_thread(ask, url, key, row["prompt"])
    history = [*row["prompt"], plan]
    parts = [[*history, {"role": "user", "content": f"Do {part}."}] for part in "ab"]
    replies = await asyncio.gather(*(asyncio.to_thread(ask, url, key, part) for part in parts))
    end = [{"role": "user", "content": "Sum it up."}]
    replies.append(await asyncio.to_thread(ask, url, key, end))
    return sum(vowels(reply["content"]) for reply in replies) / 3


def broken(row, url, key):
    raise KeyError("no sandbox")
