"""Calls side by side, several answers to one, repeated and given up: each token is drawn once."""

import asyncio

import httpx2
import pytest
from burnish.loops.rollouts.sample import check_sample


def trained_of(sample):
    return [sum(context.trained) for context in sample.contexts]


def test_three_parallel_calls_share_their_beginning_once(local, client, played, user) -> None:
    async def run(row, url, key):
        async with client(url, key) as ask:
            first = await ask.reply("Plan.")
            history = [user("Plan."), first]
            await asyncio.gather(
                *(ask.reply([*history, user(f"Do {part}.")]) for part in ("a", "b", "c"))
            )
        return 1.0

    (sample,), _ = played(local(), run)
    check_sample(sample)
    drawn = sum(trained_of(sample))
    assert len(sample.contexts) == 3
    first, second, third = sample.contexts
    shared = len(first.prompt) + first.trained.index(False)
    whole = [*first.prompt, *first.tokens]
    for other in (second, third):
        assert other.prompt[:shared] == whole[:shared]
        assert len(other.prompt) > shared  # what is drawn here begins later
        assert all(other.trained)
    assert drawn == 8 + 3 * 8 or sample.info["turns"] == 4  # a turn may end before its 8 tokens


def test_the_best_of_three_is_three_contexts(local, client, played) -> None:
    async def run(row, url, key):
        async with client(url, key) as ask:
            response = (await ask.post("Well?", n=3)).json()
        assert [choice["index"] for choice in response["choices"]] == [0, 1, 2]
        return 1.0

    (sample,), _ = played(local(), run)
    assert len(sample.contexts) == 3
    assert len({tuple(context.tokens) for context in sample.contexts}) == 3
    assert len({tuple(context.prompt) for context in sample.contexts}) == 1
    assert sample.info["turns"] == 3


def test_the_best_of_three_by_three_calls_differ_too(local, client, played) -> None:
    async def run(row, url, key):
        async with client(url, key) as ask:
            await asyncio.gather(*(ask.reply("Well?") for _ in range(3)))
        return 1.0

    (sample,), _ = played(local(), run)
    assert len({tuple(context.tokens) for context in sample.contexts}) == 3


def test_what_follows_the_best_continues_it(local, client, played, user) -> None:
    async def run(row, url, key):
        async with client(url, key) as ask:
            response = (await ask.post("Well?", n=3)).json()
            best = response["choices"][1]["message"]
            await ask.reply([user("Well?"), best, user("And?")])
        return 1.0

    (sample,), _ = played(local(), run)
    lengths = [len(context.tokens) for context in sample.contexts]
    assert len(lengths) == 3
    assert max(lengths) == lengths[1]


def test_completions_beyond_the_limit_of_turns_are_not_begun(says, client, played) -> None:
    source = says("yes")

    async def run(row, url, key):
        async with client(url, key) as ask:
            response = (await ask.post("Well?", n=3)).json()
            assert [choice["finish_reason"] for choice in response["choices"]] == ["length"] * 3
            await ask.reply("Well?", n=1)
        return 1.0

    (sample,), _ = played(source, run, turns=2)
    assert len(source.asked) == 1
    assert sample.finish == "length"


def test_a_repeated_request_is_told_the_same(local, client, played) -> None:
    told = []

    async def run(row, url, key):
        async with client(url, key) as ask:
            told.append(await ask.reply("Well?"))
            told.append(await ask.reply("Well?", retry=1))
            told.append(await ask.reply("Well?", retry=2))
            told.append(await ask.reply("Well?"))
        return 1.0

    (sample,), _ = played(local(), run)
    assert told[0] == told[1] == told[2] != told[3]
    assert sample.info["turns"] == 2


def test_a_first_request_that_says_it_is_repeated_is_drawn(says, client, played) -> None:
    async def run(row, url, key):
        async with client(url, key) as ask:
            await ask.reply("Well?", retry=1)
        return 1.0

    (sample,), _ = played(says("yes"), run)
    assert sample.info["turns"] == 1


def test_a_client_that_hangs_up_and_asks_again_gets_what_was_begun(says, client, played) -> None:
    source = says("yes", held=True)

    async def run(row, url, key):
        async with client(url, key) as ask:
            ask.http.timeout = httpx2.Timeout(0.2)
            with pytest.raises(httpx2.ReadTimeout):
                await ask.post("Well?")
            ask.http.timeout = httpx2.Timeout(30)
            again = asyncio.create_task(ask.reply("Well?", retry=1))
            await asyncio.sleep(0.1)
            source.released.set()
            assert (await again)["content"] == "yes"
        return 1.0

    (sample,), _ = played(source, run)
    assert len(source.asked) == 1
    assert trained_of(sample) == [4]


def test_of_parallel_calls_the_one_that_hung_up_is_repeated(says, client, played) -> None:
    source = says(lambda heard, turn: "abc"[len(source.asked) - 1], held=True)

    async def run(row, url, key):
        async with client(url, key) as ask:
            asking = [asyncio.create_task(ask.reply("Well?")) for _ in range(3)]
            await asyncio.sleep(0.2)
            asking[1].cancel()
            await asyncio.sleep(0.1)
            again = asyncio.create_task(ask.reply("Well?", retry=1))
            await asyncio.sleep(0.1)
            source.released.set()
            await asyncio.gather(asking[0], asking[2], again)
        return 1.0

    (sample,), _ = played(source, run)
    assert len(source.asked) == 3
    assert trained_of(sample) == [2, 2, 2]


def test_what_no_client_was_told_is_not_trained(says, client, played) -> None:
    source = says("yes", held=True)

    async def run(row, url, key):
        async with client(url, key) as ask:
            slow = asyncio.create_task(ask.reply("Slow."))
            await asyncio.sleep(0.2)
            slow.cancel()
            await asyncio.sleep(0.1)
            source.released.set()
            await ask.reply("Fast.")
        return 1.0

    (sample,), _ = played(source, run)
    assert sample.info["turns"] == 2
    assert trained_of(sample) == [4]
    assert sample.finish == "stop"


def test_what_is_under_way_ends_with_the_agent(says, client, played) -> None:
    source = says("yes")
    usual = source.sample
    cancelled = []

    async def slow(request):
        if request.turn == 0 and len(source.asked):
            try:
                await asyncio.sleep(30)
            finally:
                cancelled.append(request)
        return await usual(request)

    source.sample = slow

    async def run(row, url, key):
        async with client(url, key) as ask:
            await ask.reply("Fast.")
            asking = asyncio.create_task(ask.reply("Slow."))
            await asyncio.sleep(0.1)
            asking.cancel()
        return 1.0

    (sample,), _ = played(source, run)
    assert len(cancelled) == 1
    assert (sample.finish, sample.info["turns"]) == ("stop", 1)


def test_messages_are_the_same_whatever_a_client_leaves_out(says, client, played, user) -> None:
    """Unknown fields, reasoning, and the form of an empty or a parted content."""

    async def run(row, url, key):
        async with client(url, key) as ask:
            first = await ask.reply("Well?")
            assert first == {
                "role": "assistant",
                "content": " yes",
                "reasoning_content": "hm",
            }
            text = {"type": "text", "text": " yes"}
            for number, content in enumerate((" yes", [text])):
                reply = {"role": "assistant", "content": content, "refusal": None, "x": number}
                await ask.reply([user("Well?"), reply, user(f"And {number}?")])
        return 1.0

    (sample,), _ = played(says("<think>hm</think> yes"), run, max_tokens=99)
    first = len("<think>hm</think> yes") + 1
    assert trained_of(sample) == [2 * first, first]


def test_another_history_begins_another_context(says, client, played, user) -> None:
    async def run(row, url, key):
        async with client(url, key) as ask:
            reply = await ask.reply("Well?")
            await ask.reply([user("Well, well?"), reply, user("And?")])
            await ask.reply([user("Well?"), {**reply, "content": "no"}, user("And?")])
        return 1.0

    (sample,), _ = played(says("yes"), run)
    assert trained_of(sample) == [4, 4, 4]
