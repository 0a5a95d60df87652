"""The loop: sampled tokens stay as they are, others are context, and limits hold."""

import asyncio
import logging
import random
import time

import numpy as np
import pytest
import torch
from burnish.loops.environments import Limits, MultiTurnSource, Step
from burnish.loops.rollouts.sample import Sample, VersionSpan, check_sample, from_record, to_record
from burnish.loops.rollouts.source import SourceError, SourceLost

PROMPT = [{"role": "user", "content": "Begin."}]
ROW = {"prompt": PROMPT}


class Echo:
    """Says what it hears, two times, and then ends; a reward of 0.5 each time."""

    def __init__(self, ends_after=3, reward=0.5):
        self.ends_after, self.reward, self.heard = ends_after, reward, []

    def reset(self, row):
        return row["prompt"]

    def step(self, answer):
        self.heard.append(answer.text)
        return Step(
            f"you said {answer.text}", len(self.heard) == self.ends_after, self.reward, {"heard": 1}
        )


@pytest.fixture
def talk(turns):
    def run(source, make, request, *, row=ROW, turns=turns, limit=8, **limits):
        conversations = MultiTurnSource(
            source, make, lambda task: row, turns, Limits(limit, **limits)
        )
        return asyncio.run(conversations.sample(request)), conversations

    return run


def test_a_conversation_is_one_sample_of_what_was_sampled_and_said(
    tokenizer, turns, scripted, request_for, talk
):
    source = scripted(tokenizer, ["he 10", "in", "end"])
    (sample,), _ = talk(source, Echo, request_for(5, task=2))
    check_sample(sample)

    pieces = []
    for text, reply in (("he 10", "you said he 10"), ("in", "you said in"), ("end", None)):
        answer = [*tokenizer(text)["input_ids"], turns.end]
        pieces.append((answer, True))
        if reply:
            pieces.append((turns.suffix([{"role": "user", "content": reply}])[1:], False))
    assert (sample.task, sample.index, sample.finish) == (2, 5, "stop")
    assert sample.prompt == turns.prompt(PROMPT)
    assert sample.tokens == [token for tokens, _ in pieces for token in tokens]
    assert sample.trained == [sampled for tokens, sampled in pieces for _ in tokens]
    expected = []
    for i, (tokens, sampled) in enumerate(pieces):
        expected += [-(i // 2 + 1) - t / 100 if sampled else 0.0 for t in range(len(tokens))]
    assert sample.logprobs == expected
    assert sample.text == "he 10\nin\nend"


def test_it_is_what_the_template_renders_of_the_messages(
    tokenizer, turns, scripted, request_for, talk
):
    (sample,), _ = talk(scripted(tokenizer, ["he 10", "in", "end"]), Echo, request_for())
    rendered = turns.encoder.chat([*PROMPT, *sample.info["messages"]], {})
    assert rendered[: len(sample.prompt) + len(sample.tokens)] == [*sample.prompt, *sample.tokens]
    assert [message["role"] for message in sample.info["messages"]] == ["assistant", "user"] * 2 + [
        "assistant"
    ]


def test_each_turn_is_asked_with_everything_so_far(tokenizer, scripted, request_for, talk):
    source = scripted(tokenizer, ["he", "in", "end"])
    (sample,), _ = talk(source, Echo, request_for(3, task=7, temperature=0.5))
    whole = [*sample.prompt, *sample.tokens]
    assert [request.turn for request in source.asked] == [0, 1, 2]
    for request in source.asked:
        assert (request.task, request.indices, request.key, request.sampling.temperature) == (
            7,
            [3],
            11,
            0.5,
        )
        assert list(request.prompt) == whole[: len(request.prompt)]
    assert len({request.seed(3) for request in source.asked}) == 3
    begins = [len(request.prompt) for request in source.asked]
    starts = [
        t
        for t, sampled in enumerate(sample.trained)
        if sampled and (t == 0 or not sample.trained[t - 1])
    ]
    assert begins == [len(sample.prompt) + start for start in starts]


def test_sampled_tokens_are_never_tokenized_again(tokenizer, turns, scripted, request_for, talk):
    """A policy may write "he" in two tokens where the tokenizer has one."""

    class Spells(scripted):
        async def sample(self, request):
            (sample,) = await super().sample(request)
            tokens = [tokenizer.convert_tokens_to_ids(letter) for letter in ("h", "e")]
            sample.tokens = [*tokens, turns.end]
            sample.trained, sample.logprobs, sample.spans = (
                [True] * 3,
                [-1.0] * 3,
                [VersionSpan(0, 0, 3)],
            )
            sample.text = "he"
            return [sample]

    (sample,), _ = talk(Spells(tokenizer, ["he"] * 3), Echo, request_for())
    spelled = [tokenizer.convert_tokens_to_ids(letter) for letter in ("h", "e")]
    assert sample.tokens[:2] == spelled != tokenizer("he")["input_ids"]


def test_spans_follow_their_tokens(tokenizer, turns, scripted, request_for, talk):
    (sample,), _ = talk(scripted(tokenizer, ["abc", "defgh", "end"]), Echo, request_for())
    first = len("abc") + 1
    gap = len(turns.suffix([{"role": "user", "content": "you said abc"}])) - 1
    assert sample.spans[:4] == [
        VersionSpan(3, 0, 2),
        VersionSpan(4, 2, first),
        VersionSpan(3, first + gap, first + gap + 3),
        VersionSpan(4, first + gap + 3, first + gap + 6),
    ]
    covered = {t for span in sample.spans for t in range(span.start, span.end)}
    assert covered == {t for t, sampled in enumerate(sample.trained) if sampled}


def test_conversations_of_a_group_run_at_the_same_time_and_keep_their_order(
    tokenizer, scripted, request_for, talk
):
    together = asyncio.Barrier(3)

    class Waits(Echo):
        async def step(self, answer):
            await together.wait()
            await asyncio.sleep(0.05 / (answer.index + 1))
            return super().step(answer)

    samples, _ = talk(
        scripted(tokenizer, lambda index, turn: f"{index}.{turn}"), Waits, request_for(4, 1, 2)
    )
    assert [sample.index for sample in samples] == [4, 1, 2]
    assert [sample.text for sample in samples] == [f"{i}.0\n{i}.1\n{i}.2" for i in (4, 1, 2)]


def test_rewards_and_counts_add_up_over_the_turns(tokenizer, scripted, request_for, talk):
    (sample,), _ = talk(scripted(tokenizer, ["a", "b", "c"]), Echo, request_for())
    assert sample.info["environment_reward"] == 1.5 and sample.info["turn_rewards"] == [0.5] * 3
    assert sample.info["turns"] == 3 and sample.info["heard"] == 3
    ends = sample.info["turn_ends"]
    assert len(ends) == 3 and ends[-1] == len(sample.tokens)
    for end in ends:  # of what the policy drew, with its end token
        assert sample.trained[end - 1] and not any(sample.trained[end : end + 1])


@pytest.mark.parametrize("reward", [None, float("nan"), "good"])
def test_no_reward_is_none_and_what_is_no_number_is_told_and_neither_is_0(
    reward, tokenizer, scripted, request_for, talk
):
    (sample,), _ = talk(scripted(tokenizer, ["a"]), lambda: Echo(1, reward), request_for())
    assert sample.info["environment_reward"] == {None: None, "good": "not a number"}.get(
        reward, "nan"
    )


def test_a_turn_without_a_reward_is_left_out_and_a_failed_one_leaves_all_unknown(
    tokenizer, scripted, request_for, talk
):
    for rewards, whole in (([0.5, None, 1.0], 1.5), ([0.5, float("nan"), 1.0], "nan")):
        told = iter(rewards)

        class Tells(Echo):
            def step(self, answer, told=told):
                return super().step(answer)._replace(reward=next(told))

        (sample,), _ = talk(scripted(tokenizer, ["a", "b", "c"]), Tells, request_for())
        assert sample.info["environment_reward"] == whole
        assert sample.info["turn_rewards"] == ["nan" if r != r else r for r in rewards]


@pytest.mark.parametrize(
    "number", [np.float64(0.5), np.float32(0.5), torch.tensor(0.5), np.int64(2)]
)
def test_counts_become_plain_numbers(number, tokenizer, scripted, request_for, talk):
    class Counts(Echo):
        def step(self, answer):
            return super().step(answer)._replace(counts={"found": number})

    (sample,), _ = talk(scripted(tokenizer, ["a", "b", "c"]), Counts, request_for())
    assert sample.info["found"] == 3 * number and type(sample.info["found"]) in (int, float)


def test_a_count_that_is_no_number_is_refused_by_name(tokenizer, scripted, request_for, talk):
    for count, message in (
        ("two", "counts\\['found'\\] must be a number, .* got 'two'"),
        ({1}, "counts.* got set"),
    ):

        class Counts(Echo):
            def step(self, answer, count=count):
                return super().step(answer)._replace(counts={"found": count})

        with pytest.raises(ValueError, match=message):
            talk(scripted(tokenizer, ["a"]), Counts, request_for())


@pytest.mark.parametrize(
    "name", ["turns", "turn_rewards", "turn_ends", "messages", "environment_reward"]
)
def test_a_count_does_not_change_what_is_known_of_the_conversation(
    name, tokenizer, scripted, request_for, talk
):
    class Counts(Echo):
        def step(self, answer):
            return super().step(answer)._replace(counts={name: 1})

    with pytest.raises(
        ValueError,
        match=rf"counts\['{name}'\]: sample.info has a {name} of its own; .* another name",
    ):
        talk(scripted(tokenizer, ["a", "b", "c"]), Counts, request_for())


@pytest.mark.parametrize(
    ("most", "finish"), [(1, "length"), (2, "length"), (3, "stop"), (8, "stop")]
)
def test_no_more_turns_than_the_limit(most, finish, tokenizer, scripted, request_for, talk):
    (sample,), _ = talk(scripted(tokenizer, ["a", "b", "c"]), Echo, request_for(), limit=most)
    assert sample.info["turns"] == min(most, 3) and sample.finish == finish and sample.trained[-1]
    assert sample.info["environment_reward"] == 0.5 * min(most, 3)


@pytest.mark.parametrize("tokens", range(1, 90, 4))
def test_no_more_tokens_than_the_limit_and_no_reply_without_an_answer(
    tokens, tokenizer, scripted, request_for, talk
):
    (sample,), _ = talk(
        scripted(tokenizer, ["abc", "defgh", "end"]), Echo, request_for(), tokens=tokens
    )
    check_sample(sample)
    assert len(sample.tokens) <= tokens and sample.trained[-1]
    assert sample.finish == (
        "stop" if sample.info["turns"] == 3 and sample.text.endswith("end") else "length"
    )


@pytest.mark.parametrize("room", range(1, 90, 11))
def test_a_conversation_ends_where_the_models_context_does(
    room, tokenizer, turns, scripted, request_for, talk
):
    source = scripted(tokenizer, ["abc", "defgh", "end"])
    source.context = len(turns.prompt(PROMPT)) + room
    (sample,), _ = talk(source, Echo, request_for())
    check_sample(sample)
    assert len(sample.tokens) <= room and sample.trained[-1]
    assert all(
        len(asked.prompt) + asked.sampling.max_tokens <= source.context for asked in source.asked
    )
    source.context -= room
    with pytest.raises(
        ValueError,
        match=f"a prompt of {source.context} tokens, which leaves nothing of the model's",
    ):
        talk(source, Echo, request_for())


def test_a_turn_that_is_cut_is_judged_and_is_the_last(tokenizer, scripted, request_for, talk):
    source = scripted(tokenizer, ["abcdefgh", "b", "c"])
    (sample,), _ = talk(source, Echo, request_for(max_tokens=4))
    assert (
        sample.finish == "length"
        and len(sample.tokens) == 4
        and sample.info["turn_rewards"] == [0.5]
    )


def test_the_templates_end_token_stops_a_turn(tokenizer, turns, scripted, request_for, talk):
    source = scripted(tokenizer, ["a", "b", "c"])
    talk(source, Echo, request_for(stop=(9,)))
    assert {request.sampling.stop for request in source.asked} == {(9, turns.end)}


def test_another_end_token_that_was_sampled_stands_for_the_templates(
    tokenizer, turns, scripted, request_for, talk
):
    other = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    source = scripted(tokenizer, ["a", "b", "c"], end="<|endoftext|>")
    (sample,), _ = talk(source, Echo, request_for(stop=(other,)))
    suffix = turns.suffix([{"role": "user", "content": "you said a"}])
    assert sample.tokens[1 : 2 + len(suffix) - 1] == [other, *suffix[1:]]


def test_an_answer_without_an_end_token_is_ended_by_the_templates(
    tokenizer, turns, scripted, request_for, talk
):
    (sample,), _ = talk(scripted(tokenizer, ["a", "b", "c"], end=None), Echo, request_for())
    assert sample.tokens[1] == turns.end and sample.trained[:2] == [True, False]


def test_an_environment_may_speak_in_tokens(tokenizer, scripted, request_for, talk):
    class Tokens(Echo):
        def reset(self, row):
            return [5, 6]

        def step(self, answer):
            self.heard.append(answer.tokens)
            return Step([7, 8], done=len(self.heard) == 2, reward=1)

    (sample,), _ = talk(
        scripted(tokenizer, ["a", "b"], end=None), Tokens, request_for(), turns=None
    )
    a, b = (tokenizer(letter)["input_ids"][0] for letter in "ab")
    assert (sample.prompt, sample.tokens, sample.trained) == (
        [5, 6],
        [a, 7, 8, b],
        [True, False, False, True],
    )


def test_messages_need_a_chat_template(tokenizer, scripted, request_for, talk):
    with pytest.raises(
        ValueError, match="it speaks in messages; give MultiTurnSource the turns of a chat template"
    ):
        talk(scripted(tokenizer, ["a"]), Echo, request_for(), turns=None)


def _fails(self, answer):
    raise RuntimeError("the board fell off the table")


def _hangs(self, answer):
    time.sleep(60)


@pytest.mark.parametrize(
    ("step", "kind", "seconds"), [(_fails, "error", 60.0), (_hangs, "timeout", 2.0)]
)
def test_an_environment_that_fails_aborts_its_conversation_alone(
    step, kind, seconds, tokenizer, scripted, request_for, talk, caplog
):
    class Sometimes(Echo):
        def step(self, answer):
            if answer.index == 1 and len(self.heard) == 1:
                return step(self, answer)
            return super().step(answer)

    begun = time.monotonic()
    with caplog.at_level(logging.WARNING):
        samples, _ = talk(
            scripted(tokenizer, ["a", "b", "c"]), Sometimes, request_for(0, 1), seconds=seconds
        )
    assert time.monotonic() - begun < 30
    assert [sample.finish for sample in samples] == ["stop", "aborted"]
    assert [sample.info["environment_reward"] for sample in samples] == [1.5, "aborted"]
    assert samples[1].text == "a\nb"
    check_sample(samples[1])
    assert f"environment: {kind} in step (task 0, completion 1)" in caplog.text


def test_a_conversation_whose_source_gives_up_is_aborted(
    tokenizer, scripted, request_for, talk, caplog
):
    (sample,), _ = talk(scripted(tokenizer, ["a"], finish="aborted"), Echo, request_for())
    assert (
        sample.finish == "aborted"
        and sample.info["environment_reward"] == "aborted"
        and not caplog.text
    )


class Flaky(Echo):
    """Its constructor, or `reset`, fails so many times in all; every one is counted."""

    made, closed = 0, 0

    def __init__(self, where, left):
        super().__init__()
        Flaky.made += 1
        self.where, self.left = where, left
        self._fail_in("constructor")

    def _fail_in(self, where):
        if self.where == where:
            self.left[0] -= 1
            if self.left[0] >= 0:
                raise RuntimeError("no free port")

    def reset(self, row):
        self._fail_in("reset")
        return super().reset(row)

    def close(self):
        Flaky.closed += 1


@pytest.fixture
def flaky(monkeypatch):
    monkeypatch.setattr("burnish.loops.environments.multi_turn._PAUSE", 0.0)
    monkeypatch.setattr(Flaky, "made", 0)
    monkeypatch.setattr(Flaky, "closed", 0)
    return Flaky


@pytest.mark.parametrize("where", ["constructor", "reset"])
@pytest.mark.parametrize("failures", [0, 1, 2])
def test_an_environment_that_cannot_begin_is_made_again(
    failures, where, flaky, tokenizer, scripted, request_for, talk, caplog
):
    left = [failures]
    undisturbed, _ = talk(scripted(tokenizer, ["a", "b", "c"]), Echo, request_for(task=4))
    samples, _ = talk(
        scripted(tokenizer, ["a", "b", "c"]), lambda: flaky(where, left), request_for(task=4)
    )
    assert samples == undisturbed
    assert flaky.made == failures + 1 and flaky.closed == flaky.made - failures * (
        where == "constructor"
    )
    said = f"environment: error in {'its constructor' if where == 'constructor' else 'reset'} (task 4, completion 0)"
    assert caplog.text.count(said) == (failures > 0)


@pytest.mark.parametrize("where", ["constructor", "reset"])
def test_a_conversation_whose_environment_cannot_begin_is_aborted_alone(
    where, flaky, tokenizer, scripted, request_for, talk
):
    """It has no prompt and no token."""

    def make():
        if talked.setdefault("made", 0) < 3:
            talked["made"] += 1
            return flaky(where, [1])
        return Echo()

    talked = {}
    samples, conversations = talk(
        scripted(tokenizer, ["a", "b", "c"]), make, request_for(0, 1, 2), concurrency=1
    )
    assert [sample.finish for sample in samples] == ["aborted", "stop", "stop"]
    first = samples[0]
    assert first.prompt == first.tokens == first.spans == [] and first.text == ""
    assert first.info == {
        "messages": [],
        "turn_rewards": [],
        "turn_ends": [],
        "turns": 0,
        "environment_reward": "aborted",
    }
    for sample in samples:
        check_sample(sample)
        assert from_record(to_record(sample)) == sample
    (failure,) = conversations.failures.values()
    assert "no free port" in failure and "in _" not in failure.splitlines()[0]


def test_limits_say_how_often_an_environment_is_made(flaky, tokenizer, scripted, request_for, talk):
    for attempts in (1, 2, 5):
        flaky.made = 0
        make = lambda: flaky("reset", [1])  # noqa: E731
        (sample,), _ = talk(scripted(tokenizer, ["a"]), make, request_for(), attempts=attempts)
        assert sample.finish == "aborted" and flaky.made == attempts


def test_a_slow_reset_is_one_that_fails(flaky, tokenizer, scripted, request_for, talk, caplog):
    class Slow(Echo):
        async def reset(self, row):
            await asyncio.sleep(60 * (self.ends_after == 1))
            return row["prompt"]

    ends = iter([1, 3])
    (sample,), _ = talk(
        scripted(tokenizer, ["a"] * 3), lambda: Slow(next(ends)), request_for(), seconds=0.5
    )
    assert sample.finish == "stop" and sample.info["turns"] == 3
    assert "environment: timeout in reset (task 0, completion 0)" in caplog.text


def test_environments_that_fail_at_times_leave_nothing_open(
    flaky, tokenizer, turns, scripted, request_for
):
    """2,000 conversations, of whose resets one in a hundred fails."""
    rng, opened = random.Random(0), []

    class Counted(Echo):
        def __init__(self):
            super().__init__(1)
            self.closed = 0
            opened.append(self)

        async def reset(self, row):
            if rng.random() < 0.01:
                raise ConnectionError("the sandbox is gone")
            return row["prompt"]

        async def step(self, answer):
            return super().step(answer)

        async def close(self):
            self.closed += 1

    source = scripted(tokenizer, ["a"])
    conversations = MultiTurnSource(source, Counted, lambda task: ROW, turns)

    async def run():
        groups = (conversations.sample(request_for(*range(8), task=task)) for task in range(250))
        samples = [sample for group in await asyncio.gather(*groups) for sample in group]
        await conversations.close()
        return samples

    samples = asyncio.run(run())
    assert len(samples) == 2000 and all(sample.finish == "stop" for sample in samples)
    assert len(source.asked) == 2000 < len(opened) < 2040
    assert {environment.closed for environment in opened} == {1}


def test_conversations_of_one_task_may_begin_differently(tokenizer, scripted, request_for, talk):
    begun = iter(range(9))

    class Moody(Echo):
        def reset(self, row):
            return [{"role": "user", "content": str(next(begun))}]

    source = scripted(tokenizer, ["a"] * 6)
    samples, _ = talk(source, Moody, request_for(0, 1))
    assert samples[0].prompt != samples[1].prompt
    for sample in samples:
        first = next(asked for asked in source.asked if asked.indices == [sample.index])
        assert sample.prompt == list(first.prompt)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: type("Silent", (Echo,), {"step": lambda self, answer: Step()})(),
            "observed nothing and is not done",
        ),
        (
            lambda: type("Blank", (Echo,), {"reset": lambda self, row: []})(),
            "gave task 0 an empty prompt",
        ),
        (
            lambda: type("Mute", (Echo,), {"reset": lambda self, row: ""})(),
            "gave task 0 an empty prompt",
        ),
        (
            lambda: type("Gym", (Echo,), {"step": lambda self, answer: ("lower", 0.5)})(),
            r"step returned \('lower', 0.5\)",
        ),
    ],
)
def test_an_environment_must_say_something(make, message, tokenizer, scripted, request_for, talk):
    with pytest.raises(ValueError, match=message):
        talk(scripted(tokenizer, ["a"]), make, request_for())


def test_a_source_that_answers_something_else_is_an_error(tokenizer, scripted, request_for, talk):
    class Mixed(scripted):
        async def sample(self, request):
            (sample,) = await super().sample(request)
            sample.index += 1
            return [sample]

    with pytest.raises(
        SourceError, match=r"task 0: asked for its completions \[0\], got \[\(0, 1\)\]"
    ):
        talk(Mixed(tokenizer, ["a"]), Echo, request_for())


def test_log_probs_of_another_length_are_an_error(tokenizer, scripted, request_for, talk):
    class Short(scripted):
        async def sample(self, request):
            (sample,) = await super().sample(request)
            sample.logprobs.pop()
            return [sample]

    with pytest.raises(SourceError, match="logprobs must have one entry per token"):
        talk(Short(tokenizer, ["a"]), Echo, request_for())


def test_an_answer_longer_than_asked_for_is_an_error(tokenizer, scripted, request_for, talk):
    class Long(scripted):
        async def sample(self, request):
            (sample,) = await super().sample(request)
            return [
                Sample(
                    0,
                    0,
                    sample.prompt,
                    [1] * 9,
                    [True] * 9,
                    [-1.0] * 9,
                    [VersionSpan(0, 0, 9)],
                    "stop",
                )
            ]

    with pytest.raises(SourceError, match="at most 5 tokens, got 9"):
        talk(Long(tokenizer, ["a"]), Echo, request_for(max_tokens=5))


def test_weights_and_versions_and_what_may_go_on_meanwhile_are_the_sources(
    tokenizer, scripted, turns
):
    source = scripted(tokenizer, [])
    conversations = MultiTurnSource(source, Echo, lambda task: ROW, turns)

    async def through():
        await conversations.publish([], 7)
        version = await conversations.version()
        await conversations.close()
        return version

    assert asyncio.run(through()) == 4 and source.published == 7 and source.closed
    for source.overlaps, source.stored in ((True, False), (False, True)):
        conversations = MultiTurnSource(source, Echo, lambda task: ROW, turns)
        assert (conversations.overlaps, conversations.stored) == (source.overlaps, source.stored)


def test_limits_are_above_zero():
    with pytest.raises(ValueError, match=r"limits\.turns: must be > 0, got 0"):
        Limits(turns=0)


@pytest.mark.parametrize(("limit", "most"), [(None, 9), (2, 2)])
def test_no_more_environments_are_open_than_the_limit(
    limit, most, tokenizer, turns, scripted, request_for
):
    opened, counts = [], []

    class Counted(Echo):
        def __init__(self):
            super().__init__()
            opened.append(self)
            counts.append(len(opened))

        async def close(self):
            await asyncio.sleep(0.001)
            opened.remove(self)

    source = scripted(tokenizer, ["he", "in", "10"])
    conversations = MultiTurnSource(
        source, Counted, lambda task: ROW, turns, Limits(concurrency=limit)
    )

    async def run():
        return await asyncio.gather(
            *(conversations.sample(request_for(0, 1, 2, task=task)) for task in range(3))
        )

    samples = [sample for group in asyncio.run(run()) for sample in group]
    assert [(sample.task, sample.index) for sample in samples] == [
        (t, i) for t in range(3) for i in range(3)
    ]
    assert {sample.info["turns"] for sample in samples} == {3}
    assert max(counts) == most and not opened


class Sandbox:
    """What must be closed; it fails at times, and takes longer than it may. Its functions are
    plain.
    """

    def __init__(self, rng, opened):
        self.rng, self.inside, self.closed = rng, False, 0
        opened.append(self)

    def reset(self, row):
        return self._work(row["prompt"])

    def step(self, answer):
        return self._work(Step("and?", done=self.rng.random() < 0.2))

    def close(self):
        assert not self.inside
        self.closed += 1
        if self.rng.random() < 0.1:
            raise OSError("it is gone already")

    @property
    def seconds(self):
        return self.rng.choice([0.0] * 7 + [0.3])

    def _work(self, result):
        assert not self.closed
        self.inside = True
        time.sleep(self.seconds)
        self.inside = False
        if self.rng.random() < 0.1:
            raise OSError("broken")
        return result


class AsyncSandbox(Sandbox):
    async def reset(self, row):
        return await self._work(row["prompt"])

    async def step(self, answer):
        return await self._work(Step("and?", done=self.rng.random() < 0.2))

    async def close(self):
        super().close()
        await asyncio.sleep(0.005)

    async def _work(self, result):
        await asyncio.sleep(self.seconds)
        if self.rng.random() < 0.1:
            raise OSError("broken")
        return result


@pytest.mark.parametrize("kind", [Sandbox, AsyncSandbox])
def test_every_environment_is_closed_once_whatever_fails_and_whoever_gives_up(
    kind, tokenizer, turns, scripted, request_for, caplog, monkeypatch
):
    monkeypatch.setattr("burnish.loops.environments.multi_turn._PAUSE", 0.001)
    rng, opened = random.Random(0), []

    class Unsteady(scripted):
        async def sample(self, request):
            await asyncio.sleep(rng.random() * 0.005)
            if rng.random() < 0.05:
                raise SourceLost("the server died")
            return await super().sample(request)

    source = Unsteady(tokenizer, lambda index, turn: "a")
    limits = Limits(turns=4, seconds=0.2)
    conversations = MultiTurnSource(
        source, lambda: kind(rng, opened), lambda task: ROW, turns, limits
    )

    async def given_up(group):
        for _ in range(rng.randrange(3)):
            await asyncio.sleep(rng.random() * 0.03)
            group.cancel()
        return await asyncio.gather(group, return_exceptions=True)

    async def run():
        groups = [
            asyncio.ensure_future(conversations.sample(request_for(0, 1, 2, task=task)))
            for task in range(100)
        ]
        outcomes = await asyncio.gather(*map(given_up, groups))
        await conversations.close()
        return {type(outcome) for (outcome,) in outcomes}

    assert asyncio.run(run()) == {list, SourceLost, asyncio.CancelledError}
    end = time.monotonic() + 60
    while (
        any(not sandbox.closed or sandbox.inside for sandbox in opened) and time.monotonic() < end
    ):
        time.sleep(0.01)  # those that were given up come back
    assert len(opened) > 100 and {sandbox.closed for sandbox in opened} == {1}
    assert all(f"environment: {kind} " in caplog.text for kind in ("timeout", "close"))


def test_a_failed_conversation_ends_the_others_of_its_group(
    tokenizer, turns, scripted, request_for
):
    """Each of them is asked for again, and what goes on beside that would be asked for twice."""

    class Loses(scripted):
        async def sample(self, request):
            # the others wait for the one that fails, however busy the machine is
            if request.turn == 1:
                if request.indices == [1]:
                    lost.set()
                    raise SourceLost("the server died")
                await lost.wait()
            return await super().sample(request)

    lost = asyncio.Event()
    source = Loses(tokenizer, lambda index, turn: "a")
    conversations = MultiTurnSource(
        source, lambda: Echo(50), lambda task: ROW, turns, Limits(60, tokens=10**6)
    )

    async def run():
        with pytest.raises(SourceLost):
            await conversations.sample(request_for(0, 1, 2))
        asked = len(source.asked)
        await asyncio.sleep(0.2)
        assert len(source.asked) == asked < 10

    asyncio.run(run())


class Judged(Echo):
    """Says in the end what the conversation was worth."""

    def __init__(self, ends_after=3, worth=2.0, reward=None):
        super().__init__(ends_after, reward)
        self.worth, self.asked = worth, 0

    def get_reward(self):
        self.asked += 1
        if isinstance(self.worth, Exception):
            raise self.worth
        return self.worth


class JudgedLate:
    """The same under the other name, and async."""

    def __init__(self):
        self.judged = Judged()
        self.reset, self.step = self.judged.reset, self.judged.step

    async def reward(self):
        await asyncio.sleep(0.001)
        return self.judged.get_reward()

    @property
    def asked(self):
        return self.judged.asked


@pytest.mark.parametrize("kind", [Judged, JudgedLate])
@pytest.mark.parametrize(
    ("limits", "options", "finish"),
    [
        ({}, {}, "stop"),
        ({"limit": 2}, {}, "length"),
        ({"tokens": 30}, {}, "length"),
        ({}, {"max_tokens": 2}, "length"),
    ],
    ids=["it ends", "turns run out", "tokens run out", "a turn is cut"],
)
def test_what_a_conversation_is_worth_is_asked_once_at_any_end(
    kind, limits, options, finish, tokenizer, scripted, request_for, talk
):
    made = []

    def make():
        made.append(kind())
        return made[-1]

    source = scripted(tokenizer, ["abc", "defgh", "end"])
    (sample,), _ = talk(source, make, request_for(**options), **limits)
    assert sample.finish == finish and sample.info["environment_reward"] == 2.0
    assert [environment.asked for environment in made] == [1]


def test_the_rewards_of_the_turns_and_of_the_whole_are_summed(
    tokenizer, scripted, request_for, talk
):
    for worth, expected in (
        (2, 3.5),
        (None, 1.5),
        (np.float32(1), 2.5),
        (float("nan"), "nan"),
        ("good", "not a number"),
    ):
        source = scripted(tokenizer, ["a", "b", "c"])
        (sample,), _ = talk(
            source, lambda worth=worth: Judged(worth=worth, reward=0.5), request_for()
        )
        assert (
            sample.info["environment_reward"] == expected
            and sample.info["turn_rewards"] == [0.5] * 3
        )


def test_one_that_fails_at_its_judgement_is_aborted_and_an_aborted_one_is_not_asked(
    tokenizer, scripted, request_for, talk, caplog
):
    make = lambda: Judged(worth=KeyError("board"))  # noqa: E731
    (sample,), _ = talk(scripted(tokenizer, ["a", "b", "c"]), make, request_for())
    assert sample.finish == "aborted" and sample.info["environment_reward"] == "aborted"
    assert "environment: error in get_reward (task 0, completion 0)" in caplog.text
    (sample,), _ = talk(scripted(tokenizer, ["a"], finish="aborted"), make, request_for())
    assert sample.finish == "aborted" and len(caplog.records) == 1


def test_an_attribute_called_reward_is_no_method(tokenizer, scripted, request_for, talk):
    class Holds(Echo):
        def __init__(self):
            super().__init__()
            self.reward = 0.5
            self.get_reward = pytest.fail

    (sample,), _ = talk(scripted(tokenizer, ["a", "b", "c"]), Holds, request_for())
    assert sample.info["environment_reward"] == 1.5


@pytest.mark.parametrize(
    ("prompt", "reply"),
    [
        (np.array([5, 6]), np.array([7, 8])),
        ([np.int64(5), np.int32(6)], (np.int64(7), 8)),
        (torch.tensor([5, 6]), torch.tensor([7, 8])),
        ((5, 6), range(7, 9)),
    ],
    ids=["arrays", "numpy integers", "tensors", "tuples"],
)
def test_token_ids_may_come_in_arrays(prompt, reply, tokenizer, scripted, request_for, talk):
    class Tokens(Echo):
        def reset(self, row):
            return prompt

        def step(self, answer):
            self.heard.append(answer)
            return Step(reply, done=len(self.heard) == 2, reward=1)

    (sample,), _ = talk(
        scripted(tokenizer, ["a", "b"], end=None), Tokens, request_for(), turns=None
    )
    a, b = (tokenizer(letter)["input_ids"][0] for letter in "ab")
    assert (sample.prompt, sample.tokens) == ([5, 6], [a, 7, 8, b])
    assert {type(token) for token in sample.prompt + sample.tokens} == {int}


@pytest.mark.parametrize("text", [np.array("go"), np.str_("go"), np.array(["go"])[0]])
def test_a_text_may_be_one_of_numpy(text, tokenizer, turns, scripted, request_for, talk):
    class Says(Echo):
        def reset(self, row):
            return text

    (sample,), _ = talk(scripted(tokenizer, ["a"] * 3), Says, request_for())
    assert sample.prompt == turns.prompt([{"role": "user", "content": "go"}])


def test_counts_that_are_no_mapping_are_named(tokenizer, scripted, request_for, talk):
    class Counts(Echo):
        def step(self, answer):
            return super().step(answer)._replace(counts=None)

    with pytest.raises(ValueError, match="counts must be a mapping of names to numbers, got None"):
        talk(scripted(tokenizer, ["a"]), Counts, request_for())


@pytest.mark.parametrize(
    "odd",
    [np.array(5), 5, b"text", {"role": "user", "content": "?"}, ["text"], [0.5], [{"text": "?"}]],
)
def test_an_observation_that_is_none_is_named(odd, tokenizer, scripted, request_for, talk):
    class Odd(Echo):
        def step(self, answer):
            return Step(odd)

    says = r"environment: step observed .*; wanted a text, a list of messages with role and content, or token ids"
    with pytest.raises(ValueError, match=says):
        talk(scripted(tokenizer, ["a"]), Odd, request_for())


def test_what_an_environment_changes_is_not_trained_on(tokenizer, scripted, request_for, talk):
    class Spoils(Echo):
        def reset(self, row):
            prompt = [dict(message) for message in row["prompt"]]
            row["prompt"].clear()
            return prompt

        def step(self, answer):
            step = super().step(answer)
            for ids in (
                answer.prompt,
                answer.tokens,
                answer.trained,
                answer.logprobs,
                answer.spans,
            ):
                ids.clear()
            answer.finish = "length"
            return step

    row = {"prompt": list(PROMPT)}
    expected, _ = talk(scripted(tokenizer, ["a", "b", "c"]), Echo, request_for(0, 1), row=row)
    samples, _ = talk(scripted(tokenizer, ["a", "b", "c"]), Spoils, request_for(0, 1), row=row)
    assert samples == expected and row == ROW


def test_a_constructor_that_blocks_is_named(
    tokenizer, scripted, request_for, talk, caplog, monkeypatch
):
    monkeypatch.setattr("burnish.loops.rollouts.event_loops._BLOCKS", 0.2)
    monkeypatch.setattr("burnish.loops.rollouts.event_loops._blocking", set())

    class Slow(Echo):
        def __init__(self):
            super().__init__()
            time.sleep(0.3)

        async def step(self, answer):
            time.sleep(0.3)
            return super().step(answer)

    talk(scripted(tokenizer, ["a", "b", "c"]), Slow, request_for())
    said = [record.getMessage().partition(":")[0] for record in caplog.records]
    assert said == ["the environment's constructor", "Slow.step"]
