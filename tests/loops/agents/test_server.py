"""Sessions and their keys, and HTTP as clients speak it."""

import asyncio

import httpx2
import pytest
from burnish.loops.agents import AgentServer


def test_a_wrong_key_is_401_and_so_is_a_conversation_that_is_over(says, client, played) -> None:
    first = []
    told = {}

    async def run(row, url, key):
        async with client(url, key) as ask:
            await ask.reply("Well?")
            if not first:
                first.append((url, key))
                return 1.0
            await asyncio.sleep(0.3)  # the first conversation is over by then
            async with client(*first[0]) as gone:
                told["over"] = await gone.post("Well?")
            wrong = url.replace(key, "f" * len(key))
            async with client(wrong, "e" * len(key)) as stranger:
                told["wrong"] = await stranger.post("Well?")
        return 1.0

    samples, source = played(says("yes"), run, 0, 1)
    assert {name: response.status_code for name, response in told.items()} == {
        "over": 401,
        "wrong": 401,
    }
    assert [sample.finish for sample in samples] == ["stop"] * 2, source.failures
    assert [sample.info["turns"] for sample in samples] == [1, 1]


def test_a_session_is_named_by_its_url_or_by_its_key(says, client, played) -> None:
    async def run(row, url, key):
        base = url.removesuffix(f"/{key}/v1")
        for address, bearer in ((url, "relayed"), (f"{base}/v1", key), (base, key)):
            async with client(address, bearer) as ask:
                assert (await ask.reply("Well?"))["content"] == "yes"
        return 1.0

    (sample,), source = played(says("yes"), run)
    assert sample.info["turns"] == 3, source.failures


def test_other_routes_are_named(says, client, played) -> None:
    async def run(row, url, key):
        async with client(url, key) as ask:
            models = (await ask.http.get(f"{url}/models")).json()
            assert [model["id"] for model in models["data"]] == ["policy"]
            response = await ask.post("Well?", path="/responses")
            assert response.status_code == 404
            assert "no POST responses" in response.json()["error"]["message"]
            await ask.reply("Well?")
        return 1.0

    (sample,), source = played(says("yes"), run)
    assert sample.finish == "stop", source.failures


def test_conversations_have_keys_of_their_own(says, client, played) -> None:
    keys = []

    async def run(row, url, key):
        keys.append(key)
        assert key in url
        async with client(url, key) as ask:
            await ask.reply("Well?")
        return 1.0

    played(says("yes"), run, 0, 1, 2)
    assert len(set(keys)) == 3
    assert all(len(key) == 32 for key in keys)


def test_a_server_listens_while_anybody_is_within() -> None:
    async def within():
        server = AgentServer()
        async with server.listening() as first, server.listening() as second:
            assert first == second
            async with httpx2.AsyncClient(trust_env=False) as http:
                assert (await http.get(f"{first}/models")).status_code == 401
        async with httpx2.AsyncClient(trust_env=False) as http:
            with pytest.raises(httpx2.ConnectError):
                await http.get(first)
            async with server.listening() as third:
                assert (await http.get(f"{third}/models")).status_code == 401

    asyncio.run(within())


def test_an_address_that_is_not_this_machines_is_an_error(says, client, played) -> None:
    server = AgentServer("192.0.2.1")
    with pytest.raises(OSError, match=r"192\.0\.2\.1"):
        played(says("yes"), None, options={"server": server})


def test_a_bug_is_told_as_500_and_logged(says, client, played, monkeypatch, caplog) -> None:
    def broken(*arguments):
        raise ZeroDivisionError

    async def run(row, url, key):
        async with client(url, key) as ask:
            monkeypatch.setattr("burnish.loops.agents.server.read_call", broken)
            assert (await ask.post("Well?")).status_code == 500
            monkeypatch.undo()
            await ask.reply("Well?")
        return 1.0

    (sample,), source = played(says("yes"), run)
    assert sample.finish == "stop", source.failures
    assert "ZeroDivisionError" in caplog.text
