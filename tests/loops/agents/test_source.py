"""Conversations over HTTP: what was drawn is what is trained, once, as it was drawn."""

import asyncio
import logging
import time

import pytest
import torch
from burnish.loops.rollouts.local.source import LocalSource
from burnish.loops.rollouts.sample import check_sample
from burnish.loops.rollouts.source import SourceLost


class Recorded:
    """A source that keeps what it was asked and what it has drawn."""

    def __init__(self, source):
        self.source = source
        self.overlaps, self.stored = source.overlaps, source.stored
        self.context = source.context
        self.drawn = []

    async def sample(self, request):
        samples = await self.source.sample(request)
        self.drawn += [(list(request.prompt), list(sample.tokens)) for sample in samples]
        return samples

    async def close(self):
        await self.source.close()


def talking(client, turns, *, leave_out=()):
    """An agent that says something after each reply, and now and then forgets the beginning."""

    async def run(row, url, key):
        async with client(url, key) as ask:
            messages = [{"role": "user", "content": f"Begin {key[:2]}."}]
            for turn in range(turns):
                if turn in leave_out:
                    messages = messages[-3:]
                reply = await ask.reply(messages)
                messages += [reply, {"role": "user", "content": f"And then, {turn}?"}]
        return 1.0

    return run


def assert_as_drawn(samples, drawn, model, tokenizer):
    """All that was drawn stands in the samples, is trained once, and has its log-probs there.

    Returns how many prompts a tokenizer would have changed.
    """
    contexts = [context for sample in samples for context in sample.contexts]
    whole = [[*context.prompt, *context.tokens] for context in contexts]
    for prompt, tokens in drawn:
        turn = [*prompt, *tokens]
        assert any(tokens_of[: len(turn)] == turn for tokens_of in whole)
    trained = sum(sum(context.trained) for context in contexts)
    assert trained == sum(len(tokens) for _, tokens in drawn)
    for context, ids in zip(contexts, whole, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, len(context.prompt) - 1 : -1]
        own = logits.log_softmax(-1).gather(1, torch.tensor(context.tokens)[:, None])[:, 0]
        is_trained = torch.tensor(context.trained)
        given = torch.tensor(context.logprobs, dtype=own.dtype)
        assert (own - given)[is_trained].abs().max() < 1e-6
        assert not given[~is_trained].any()
    again = [tokenizer(tokenizer.decode(prompt))["input_ids"] for prompt, _ in drawn]
    return sum(ids != prompt for ids, (prompt, _) in zip(again, drawn, strict=True))


def converse(model, tokenizer, client, played, conversations, turns, leave_out=()):
    doubled = model.double()
    source = Recorded(LocalSource(doubled, tokenizer, version=0))
    run = talking(client, turns, leave_out=leave_out)
    samples, _ = played(source, run, *range(conversations), turns=turns)
    return samples, source.drawn, doubled


def test_many_turns_stand_in_the_samples_as_they_were_drawn(
    model, tokenizer, client, played
) -> None:
    samples, drawn, doubled = converse(model, tokenizer, client, played, 10, 10)
    assert len(drawn) == 100
    assert all(len(sample.contexts) == 1 for sample in samples)
    # a random model writes bytes that are no text, which a tokenizer could not give back
    assert assert_as_drawn(samples, drawn, doubled, tokenizer) > 20


@pytest.mark.slow
def test_a_thousand_turns_stand_in_the_samples_as_they_were_drawn(
    model, tokenizer, client, played
) -> None:
    samples, drawn, doubled = converse(model, tokenizer, client, played, 25, 40)
    assert len(drawn) == 1000
    assert assert_as_drawn(samples, drawn, doubled, tokenizer) > 200


def test_a_compacted_history_begins_another_context(model, tokenizer, client, played) -> None:
    samples, drawn, doubled = converse(model, tokenizer, client, played, 2, 6, leave_out=(3,))
    assert [len(sample.contexts) for sample in samples] == [2, 2]
    assert_as_drawn(samples, drawn, doubled, tokenizer)
    for sample in samples:
        check_sample(sample)
        assert sample.info["turns"] == 6


def test_a_sub_agent_begins_another_context(says, client, played, user) -> None:
    async def run(row, url, key):
        async with client(url, key) as ask:
            first = await ask.reply("Plan.")
            await ask.reply("Search, and sum it up.")
            await ask.reply([user("Plan."), first, user("Found it.")])
        return 1.0

    (sample,), _ = played(says("fine"), run)
    assert [sum(context.trained) for context in sample.contexts] == [10, 5]
    assert sample.text == "fine\nfine\nfine"


def test_the_rows_and_the_rewards_are_the_agents(says, client, played) -> None:
    async def run(row, url, key):
        async with client(url, key) as ask:
            await ask.reply(row["question"])
        row["question"] = "changed"
        return row["worth"]

    row = {"question": "Why?", "worth": 2}
    samples, _ = played(says("so"), run, 0, 1, row=row)
    assert [sample.info["environment_reward"] for sample in samples] == [2.0, 2.0]
    assert [sample.finish for sample in samples] == ["stop", "stop"]
    assert row["question"] == "Why?"


def test_a_plain_function_runs_in_a_thread(says, client, played) -> None:
    def run(row, url, key):
        async def ask():
            async with client(url, key) as ask:
                await ask.reply("Well?")

        asyncio.run(ask())
        return 0.5

    (sample,), _ = played(says("yes"), run)
    assert sample.info["environment_reward"] == 0.5


def test_no_reward_leaves_it_to_others(says, client, played) -> None:
    async def run(row, url, key):
        async with client(url, key) as ask:
            await ask.reply("Well?")

    (sample,), _ = played(says("yes"), run)
    assert sample.info["environment_reward"] is None
    assert sample.finish == "stop"


def test_the_same_calls_are_seeded_alike_whatever_their_order(local, client, played) -> None:
    def calls(order):
        async def run(row, url, key):
            async with client(url, key) as ask:
                for text in order:
                    await ask.reply(text)
            return 0.0

        return run

    texts = {}
    for order in (["a", "b", "a"], ["a", "a", "b"]):
        (sample,), _ = played(local(), calls(order))
        drawn = [tuple(context.tokens) for context in sample.contexts]
        texts[order[1]] = dict(zip(["a", order[1] + "1", order[2] + "2"], drawn, strict=True))
    first, second = texts["b"], texts["a"]
    assert first["a"] == second["a"]
    assert first["b1"] == second["b2"]
    assert first["a2"] == second["a1"] != first["a"]


def test_other_conversations_of_a_task_draw_other_tokens(local, client, played) -> None:
    samples, _ = played(local(), talking(client, 1), 0, 1)
    assert samples[0].tokens != samples[1].tokens


def test_an_agent_that_raises_keeps_its_turns_masked(says, client, played, caplog) -> None:
    async def run(row, url, key):
        async with client(url, key) as ask:
            await ask.reply("Well?")
        raise KeyError("lost")

    with caplog.at_level(logging.WARNING):
        samples, source = played(says("yes"), run, 0, 1)
    assert [sample.finish for sample in samples] == ["aborted"] * 2
    assert [sample.info["environment_reward"] for sample in samples] == ["aborted"] * 2
    assert all(sample.tokens for sample in samples)
    assert "KeyError" in source.failures["error"]
    assert caplog.text.count("agent: error") == 1


def test_an_agent_that_fails_before_its_first_call_is_run_again(
    says, client, played, monkeypatch
) -> None:
    monkeypatch.setattr("burnish.loops.agents.source._PAUSE", 0.01)
    runs = []

    async def run(row, url, key):
        runs.append(key)
        if len(runs) < 3:
            raise OSError("no sandbox")
        async with client(url, key) as ask:
            await ask.reply("Well?")
        return 1.0

    (sample,), _ = played(says("yes"), run, attempts=3)
    assert len(set(runs)) == 3
    assert sample.finish == "stop"


def test_an_agent_without_a_call_is_aborted_after_its_attempts(says, played, monkeypatch) -> None:
    monkeypatch.setattr("burnish.loops.agents.source._PAUSE", 0.01)

    async def run(row, url, key):
        return 1.0

    (sample,), source = played(says("yes"), run, attempts=2)
    check_sample(sample)
    assert (sample.finish, sample.tokens) == ("aborted", [])
    assert "ended without a completion" in source.failures["no completion"]


def test_an_agent_that_makes_no_call_runs_out_of_time(says, client, played) -> None:
    ended = []

    async def run(row, url, key):
        async with client(url, key) as ask:
            await ask.reply("Well?")
        try:
            await asyncio.sleep(30)
        finally:
            ended.append(key)

    began = time.monotonic()
    (sample,), source = played(says("yes"), run, seconds=0.3)
    assert time.monotonic() - began < 5
    assert sample.finish == "aborted"
    assert ended and "made no call for 0.3 s" in source.failures["timeout"]


def test_time_in_which_the_policy_answers_does_not_count(says, client, played) -> None:
    source = says("yes", held=True)

    async def run(row, url, key):
        async with client(url, key) as ask:
            asyncio.get_running_loop().call_later(0.6, source.released.set)
            await ask.reply("Well?")
        return 1.0

    (sample,), _ = played(source, run, seconds=0.3)
    assert sample.finish == "stop"


@pytest.mark.parametrize("limit", [{"turns": 2}, {"tokens": 15}], ids=["turns", "tokens"])
def test_at_a_limit_a_call_ends_by_length_and_the_next_is_refused(
    says, client, played, user, limit
) -> None:
    told = []

    async def run(row, url, key):
        async with client(url, key) as ask:
            messages = [user("Go.")]
            for _ in range(4):
                response = await ask.post(messages)
                told.append(response)
                if response.status_code != 200:
                    return 0.25
                choice = response.json()["choices"][0]
                messages += [choice["message"], user("On.")]

    (sample,), _ = played(says("yes"), run, max_tokens=50, **limit)
    replies = [response.json() for response in told]
    *before, at_limit, beyond = replies
    assert all(reply["choices"][0]["finish_reason"] == "stop" for reply in before)
    assert at_limit["choices"][0]["message"]["content"] == ""
    assert at_limit["choices"][0]["finish_reason"] == "length"
    assert "at its limit" in beyond["error"]["message"]
    assert (sample.finish, sample.info["environment_reward"]) == ("length", 0.25)


def test_a_full_context_ends_by_length(says, client, played, user) -> None:
    source = says("yes, and much more")
    source.context = 40
    finishes = []

    async def run(row, url, key):
        async with client(url, key) as ask:
            response = (await ask.post("0123456789")).json()
            finishes.append(response["choices"][0]["finish_reason"])
        return 1.0

    (sample,), _ = played(source, run, max_tokens=50)
    assert finishes == ["length"]
    assert len(sample.prompt) + len(sample.tokens) == 40


def test_a_lost_source_is_told_as_503_and_raised(says, client, played) -> None:
    source = says("yes")
    told = []

    async def lose(request):
        raise SourceLost("the server died")

    async def run(row, url, key):
        async with client(url, key) as ask:
            told.append(await ask.post("Well?"))
            await asyncio.sleep(30)

    source.sample = lose
    with pytest.raises(SourceLost, match="the server died"):
        played(source, run)
    assert [response.status_code for response in told] in ([503], [])


def test_a_conversation_given_up_by_the_sampler_is_aborted(says, client, played) -> None:
    source = says("yes")
    usual = source.sample

    async def aborted(request):
        (sample,) = await usual(request)
        if len(source.asked) == 2:
            sample.finish = "aborted"
        return [sample]

    async def run(row, url, key):
        async with client(url, key) as ask:
            assert (await ask.post("Well?")).status_code == 200
            assert (await ask.post("And?")).status_code == 503
        return 1.0

    source.sample = aborted
    (sample,), _ = played(source, run, attempts=1)
    assert sample.finish == "aborted"
