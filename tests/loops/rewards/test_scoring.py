"""Judging: every failure of a reward function masks what it fails at, and nothing else."""

import asyncio
import logging
import math
import signal
import threading
import time
from fractions import Fraction

import numpy as np
import pytest
import torch
from burnish.loops.rewards import RewardFunction, batched, check_columns
from burnish.loops.rewards.scoring import as_score, returns_nothing, score_samples
from burnish.loops.rewards.text import ExactMatch


def test_each_function_scores_each_sample(groups, judging):
    async def by_index(row, sample):
        await asyncio.sleep(0)
        return sample.index

    rows, samples = groups
    by_task = RewardFunction("task", lambda row, sample: int(row["answer"]))
    unscored = judging([by_task, RewardFunction("i", by_index)], rows, samples)
    assert [sample.rewards for sample in samples] == [
        {"task": t, "i": i} for t in (0.0, 1.0) for i in (0.0, 1.0)
    ]
    assert not unscored


@pytest.mark.parametrize("over", ["group", "step"])
def test_a_batched_function_gets_whole_groups_or_the_whole_step(over, groups, judging):
    calls = []

    def function(rows, samples):
        calls.append(
            [
                (row["answer"], sample.task, sample.index)
                for row, sample in zip(rows, samples, strict=True)
            ]
        )
        return [10 * sample.task + sample.index for sample in samples]

    rows, samples = groups
    order = [2, 0, 3, 1]  # groups need not lie together
    judging(
        [RewardFunction("r", batched(function, over))],
        [rows[i] for i in order],
        [samples[i] for i in order],
    )
    expected = {
        "group": [[("1", 1, 0), ("1", 1, 1)], [("0", 0, 0), ("0", 0, 1)]],
        "step": [[("1", 1, 0), ("0", 0, 0), ("1", 1, 1), ("0", 0, 1)]],
    }
    assert sorted(calls) == sorted(expected[over])
    assert [sample.rewards["r"] for sample in samples] == [0, 1, 10, 11]


def test_an_async_batched_function_is_awaited(groups, judging):
    async def function(rows, samples):
        return torch.arange(len(samples)) / 2

    judging([RewardFunction("r", batched(function))], *groups)
    assert [sample.rewards["r"] for sample in groups[1]] == [0.0, 0.5, 1.0, 1.5]


def _raise(row, sample):
    raise RuntimeError("the oven is cold")


def _exit(row, sample):
    raise SystemExit(3)


async def _exit_async(row, sample):
    raise SystemExit(3)


class Panic(BaseException):
    """As functions of Rust raise, and some time-outs."""


def _panic(row, sample):
    raise Panic("at the disco")


async def _panic_async(row, sample):
    raise Panic("at the disco")


async def _of_another(row, sample):
    """Wait for a call that is shared with others, and whose maker has given up."""
    shared = asyncio.ensure_future(asyncio.sleep(60))
    shared.cancel()
    await shared


async def _cancelled(row, sample):
    await asyncio.sleep(60)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda row, sample: None, "none"),
        (lambda row, sample: math.nan, "nan"),
        (lambda row, sample: torch.tensor(math.nan), "nan"),
        (lambda row, sample: -math.inf, "infinite"),
        (lambda row, sample: 10**400, "infinite"),
        (lambda row, sample: 1e39, "infinite"),  # the sum of two could be, and squares are
        (lambda row, sample: "0.5", "not a number"),
        (lambda row, sample: [0.5], "not a number"),
        (lambda row, sample: torch.zeros(2), "not a number"),
        (lambda row, sample: 1j, "not a number"),
        (_raise, "error"),
        (_exit, "error"),
        (_exit_async, "error"),
        (_panic, "error"),
        (_panic_async, "error"),
        (_of_another, "error"),
        (lambda row, sample: time.sleep(60), "timeout"),
        (_cancelled, "timeout"),
    ],
)
def test_what_is_no_score_is_told_and_counted_and_the_others_are_not_touched(
    function, reason, groups, judging
):
    def sometimes(row, sample):
        return function(row, sample) if sample.index else 0.25

    async def sometimes_async(row, sample):
        return await function(row, sample) if sample.index else 0.25

    one = sometimes_async if asyncio.iscoroutinefunction(function) else sometimes
    begun = time.monotonic()
    unscored = judging(
        [
            RewardFunction("bad", one, timeout=2.0 if reason == "timeout" else 60.0),
            RewardFunction("good", lambda row, sample: 1),
        ],
        *groups,
    )
    assert time.monotonic() - begun < 30
    found = None if reason == "none" else reason
    assert [sample.rewards["bad"] for sample in groups[1]] == [0.25, found, 0.25, found]
    assert [sample.rewards["good"] for sample in groups[1]] == [1.0] * 4
    assert unscored == {("bad", reason): 2}


@pytest.mark.parametrize(
    "value",
    [
        1,
        True,
        np.float32(1),
        np.bool_(True),
        Fraction(1),
        torch.tensor(1),
        torch.ones(1, 1, dtype=torch.bfloat16),
    ],
)
def test_whatever_is_one_number_is_a_score(value):
    assert as_score(value) == 1.0 and type(as_score(value)) is float


@pytest.mark.parametrize("kind", ["text", "trl", "batched"])
def test_a_function_keeps_its_concurrency_whatever_it_is_written_for(kind, groups):
    running, most = 0, 0

    async def judge(*arguments, **named):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return (
            1.0
            if kind == "text"
            else [1.0] * len(named.get("completions", arguments[1:] and arguments[1]))
        )

    async def of_text(completion):
        return await judge(completion)

    async def of_trl(prompts, completions):
        return await judge(prompts=prompts, completions=completions)

    async def of_groups(rows, samples):
        return await judge(rows, samples)

    function = {"text": of_text, "trl": of_trl, "batched": of_groups}[kind]
    function.concurrency = 1
    function = batched(function, "group") if kind == "batched" else function
    reward = RewardFunction("r", function)

    async def twice():
        await asyncio.gather(*(score_samples([reward], *groups) for _ in range(2)))

    asyncio.run(twice())
    assert most == 1 and all(sample.rewards == {"r": 1.0} for sample in groups[1])


def test_false_is_0_and_not_missing():
    assert as_score(False) == 0.0 and as_score(False) is not None


def test_a_list_of_the_wrong_length_masks_all_answers_of_the_call(groups, judging, caplog):
    def short(rows, samples):
        return [1.0] * (len(samples) - (samples[0].task == 1))

    assert judging([RewardFunction("r", batched(short, "group"))], *groups) == {
        ("r", "wrong length"): 2
    }
    assert [sample.rewards["r"] for sample in groups[1]] == [
        1.0,
        1.0,
        "wrong length",
        "wrong length",
    ]
    assert (
        "returned 1 for 2 completions" in caplog.text and "one entry per completion" in caplog.text
    )


def test_a_batched_function_that_returns_one_number_masks_the_step(groups, judging):
    assert judging([RewardFunction("r", batched(lambda rows, samples: 1.0))], *groups) == {
        ("r", "wrong length"): 4
    }


def test_one_bad_entry_of_a_batch_masks_its_own_answer_alone(groups, judging):
    entries = [1.0, None, math.nan, True]
    unscored = judging([RewardFunction("r", batched(lambda rows, samples: entries))], *groups)
    assert [sample.rewards["r"] for sample in groups[1]] == [1.0, None, "nan", 1.0]
    assert unscored == {("r", "none"): 1, ("r", "nan"): 1}


def test_the_first_traceback_is_logged_and_only_the_first(groups, judging, caplog):
    reward = RewardFunction("broken", _raise)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            judging([reward], *groups)
    (record,) = caplog.records
    assert "the oven is cold" in record.getMessage() and "in _raise" in record.getMessage()
    assert "broken" in record.getMessage() and " of task " in record.getMessage()
    # how it was called helps nobody
    assert "loops/rewards" not in record.getMessage().replace(__file__, "")


def test_a_missing_key_is_answered_with_the_columns_that_there_are(groups, judging, caplog):
    judging([RewardFunction("r", lambda row, sample: row["solution"])], *groups)
    assert "the row has the columns (answer, prompt)" in caplog.text


def test_no_column_that_a_function_asks_for_may_be_missing():
    def function(row, sample):
        return 1.0

    function.columns = ("answer",)
    rewards = [RewardFunction("math", function)]
    check_columns(rewards, ["prompt", "answer"])
    with pytest.raises(
        ValueError,
        match=r"reward math: .*; the data has no column 'answer', did you mean 'answers'",
    ):
        check_columns(rewards, ["prompt", "answers"])
    with pytest.raises(
        ValueError, match=r"rename .*; held_out.jsonl has no column 'answer'; there are prompt"
    ):
        check_columns(rewards, ["prompt"], "held_out.jsonl")


def test_rows_and_samples_come_in_pairs(groups, judging):
    with pytest.raises(ValueError, match="one row per sample, 4, got 3"):
        judging([], groups[0][:3], groups[1])


def test_names_must_differ(groups, judging):
    with pytest.raises(ValueError, match="different names, got r, r"):
        judging([RewardFunction("r", _raise), RewardFunction("r", _raise)], *groups)


def test_no_samples_are_judged_without_asking_anyone(judging):
    assert judging([RewardFunction("r", batched(_raise))], [], []) == {}


def test_functions_and_samples_are_judged_at_the_same_time(groups, judging):
    barrier = threading.Barrier(8)  # breaks unless all eight calls are under way at once

    def meets(row, sample):
        barrier.wait(timeout=60)
        return 1.0

    assert (
        judging(
            [RewardFunction("a", meets, timeout=99), RewardFunction("b", meets, timeout=99)],
            *groups,
        )
        == {}
    )


def test_waiting_for_a_turn_costs_a_call_none_of_its_time(answer, judging):
    async def slow(row, sample):
        await asyncio.sleep(0.02)
        return 1.0

    slow.concurrency = 1
    samples = [answer(index=i) for i in range(100)]  # the last one waits for two seconds
    assert judging([RewardFunction("r", slow, timeout=1.9)], [{}] * 100, samples) == {}


def test_groups_that_are_judged_at_the_same_time_share_the_places(answer):
    from burnish.loops.rewards import score_samples

    under_way, most = 0, 0

    async def counts(row, sample):
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.01)
        under_way -= 1
        return 1.0

    counts.concurrency = 2
    reward = RewardFunction("r", counts)

    async def groups():
        await asyncio.gather(
            *(
                score_samples([reward], [{}] * 2, [answer(index=i) for i in range(2)])
                for _ in range(4)
            )
        )

    for _ in range(2):  # in one event loop after the other
        asyncio.run(groups())
    assert most == 2


def test_hanging_functions_leave_room_for_others(answer, judging):
    """More of them than there are places: each gives its place back when its time is up."""

    def hangs(row, sample):
        return time.sleep(60) if sample.index < 3 else 1.0

    hangs.concurrency = 2
    samples = [answer(index=i) for i in range(5)]
    assert judging([RewardFunction("r", hangs, timeout=1.0)], [{}] * 5, samples) == {
        ("r", "timeout"): 3
    }
    assert [sample.rewards["r"] for sample in samples[3:]] == [1.0, 1.0]


def test_a_coroutine_that_refuses_to_be_cancelled_is_not_waited_for(answer):
    from burnish.loops.rewards import score_samples

    async def stubborn(row, sample):
        until = time.monotonic() + 60
        while time.monotonic() < until and not judged:
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue

    async def judged_in():
        begun = time.monotonic()
        await score_samples([RewardFunction("r", stubborn, timeout=0.1)], [{}], [answer()])
        judged.append(True)
        return time.monotonic() - begun

    judged = []
    assert asyncio.run(judged_in()) < 30


def test_a_weight_is_finite_and_a_timeout_above_zero():
    with pytest.raises(ValueError, match="reward r: its weight must be finite, got nan"):
        RewardFunction("r", _raise, weight=math.nan)
    with pytest.raises(ValueError, match="reward r: its timeout must be > 0 seconds, got 0"):
        RewardFunction("r", _raise, timeout=0)


def test_batched_is_over_a_group_or_a_step():
    with pytest.raises(ValueError, match="over must be group or step, got 'batch'"):
        batched(_raise, "batch")


def _spoils(sample):
    for ids in (sample.prompt, sample.tokens, sample.trained, sample.logprobs, sample.spans):
        ids[-1] = 0
        ids.append(0)
    sample.tokens, sample.finish, sample.text = [], "aborted", ""
    sample.rewards["other"] = 9.0


def _of_row_and_sample(row, sample):
    _spoils(sample)
    row["prompt"].pop()
    return 1.0


def _of_a_batch(rows, samples):
    return [_of_row_and_sample(row, sample) for row, sample in zip(rows, samples, strict=True)]


def _of_trl(prompts, completions, completion_ids, **columns):
    for ids, messages in zip(completion_ids, completions, strict=True):
        ids[-1] = 0
        ids.pop()
        messages[0]["content"] = "nothing"
        messages.pop()
    for prompt in prompts:
        prompt.pop()
    return [1.0] * len(prompts)


@pytest.mark.parametrize(
    "function", [_of_row_and_sample, batched(_of_a_batch), batched(_of_a_batch, "group"), _of_trl]
)
def test_nothing_that_a_function_changes_is_trained_on(function, groups, judging):
    said = [{"role": "assistant", "content": "yes"}]
    samples = groups[1]
    for sample in samples:
        sample.info["messages"] = [dict(message) for message in said]
    before = [(sample.copy(), list(sample.tokens)) for sample in samples]
    row = {"prompt": [{"role": "user", "content": "?"}], "answer": "0"}
    seen = []

    def looks(row, sample):
        seen.append((len(row["prompt"]), row["prompt"][0]["content"], sample.info["messages"]))
        return 1.0

    assert (
        judging(
            [RewardFunction("first", function), RewardFunction("then", looks)], [row] * 4, samples
        )
        == {}
    )
    for sample, (copy, tokens) in zip(samples, before, strict=True):
        assert sample.rewards == {"first": 1.0, "then": 1.0}
        copy.rewards = sample.rewards
        assert sample == copy and sample.tokens == tokens and sample.finish == "stop"
    assert row["prompt"] == [{"role": "user", "content": "?"}]
    assert seen == [(1, "?", said)] * 4


def test_what_a_function_stores_in_info_is_kept_also_in_another_info(groups, judging):
    def stores(row, sample):
        sample.info["place"] = sample.index
        return 1.0

    def replaces(row, sample):
        sample.info = {"task": sample.task}
        return 1.0

    judging([RewardFunction("a", stores), RewardFunction("b", replaces)], *groups)
    assert [sample.info for sample in groups[1]] == [
        {"place": i % 2, "task": i // 2} for i in range(4)
    ]


def test_keywords_of_a_function_of_text_are_the_columns(groups, judging):
    seen = []

    def function(completion, **columns):
        seen.append((completion, columns))
        return float(columns["answer"])

    judging([RewardFunction("r", function)], *groups)
    assert sorted(seen)[2] == ("answer 2", {"answer": "1", "prompt": "?"})
    assert [sample.rewards["r"] for sample in groups[1]] == [0.0, 0.0, 1.0, 1.0]


def _yields(rows, samples):
    for sample in samples:
        yield sample.index


async def _yields_async(rows, samples):
    for sample in samples:
        yield sample.index


@pytest.mark.parametrize(
    "function",
    [
        _yields,
        _yields_async,
        lambda rows, samples: map(lambda sample: sample.index, samples),
        lambda rows, samples: np.array([[sample.index] for sample in samples]),
        lambda rows, samples: torch.tensor(
            [[float(sample.index)] for sample in samples], requires_grad=True
        ),
        lambda rows, samples: [torch.tensor([sample.index]) for sample in samples],
        lambda rows, samples: [(sample.index,) for sample in samples],
    ],
    ids=[
        "generator",
        "async generator",
        "map",
        "array [n, 1]",
        "tensor [n, 1]",
        "tensors [1]",
        "tuples",
    ],
)
def test_scores_may_be_generated_or_a_column(function, groups, judging):
    assert judging([RewardFunction("r", batched(function))], *groups) == {}
    assert [sample.rewards["r"] for sample in groups[1]] == [0.0, 1.0, 0.0, 1.0]


def test_a_generator_that_fails_or_hangs_is_a_function_that_does(groups, judging, caplog):
    def fails(rows, samples):
        yield 1.0
        raise SystemExit("the oven is cold")

    def hangs(rows, samples):
        yield 1.0
        time.sleep(60)

    rewards = [
        RewardFunction("fails", batched(fails)),
        RewardFunction("hangs", batched(hangs), timeout=0.5),
    ]
    assert judging(rewards, *groups) == {("fails", "error"): 4, ("hangs", "timeout"): 4}
    assert "the oven is cold" in caplog.text


@pytest.mark.parametrize(
    "rows", [np.zeros((2, 4)), torch.zeros(4, 2), [[1.0, 2.0]] * 4, {"a": 1.0}, "abcd", 1.0]
)
def test_other_shapes_are_no_scores(rows, groups, judging):
    (((_, reason), count),) = judging(
        [RewardFunction("r", batched(lambda *given: rows))], *groups
    ).items()
    assert reason in ("wrong length", "not a number") and count == 4


def test_an_object_whose_number_cannot_be_read_is_none():
    class Odd:
        def item(self):
            raise AttributeError("no number here")

    assert as_score(Odd()) == "not a number"


def test_an_interrupt_that_a_function_raises_is_its_own(groups, judging):
    """Ctrl-C reaches the main thread, and plain functions run in others."""

    def interrupts(row, sample):
        raise KeyboardInterrupt

    assert judging([RewardFunction("r", interrupts)], *groups) == {("r", "error"): 4}


def test_a_function_that_sets_an_alarm_is_told_to_be_isolated(groups, judging, caplog):
    def alarmed(row, sample):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    assert judging([RewardFunction("r", alarmed)], *groups) == {("r", "error"): 4}
    assert (
        "with isolate: true (`isolated` in code) it runs in the main thread of a process"
        in caplog.text
    )


@pytest.mark.parametrize("plain", [False, True])
def test_a_function_that_blocks_the_event_loop_is_named_once(
    plain, groups, judging, caplog, monkeypatch
):
    monkeypatch.setattr("burnish.loops.rollouts.event_loops._BLOCKS", 0.2)

    class Judge:
        async def asks(self, row, sample):
            await asyncio.sleep(0.25)  # others go on meanwhile
            if sample.index:
                time.sleep(0.25)
            return 1.0

    asks = Judge().asks
    function = (lambda row, sample: asks(row, sample)) if plain else asks
    monkeypatch.setattr("burnish.loops.rollouts.event_loops._blocking", set())
    assert judging([RewardFunction("r", function)], *groups) == {}
    (record,) = caplog.records
    name = "<lambda>" if plain else "Judge.asks"
    assert record.getMessage().startswith(f"{name}: it blocked the event loop for 0.")
    assert "make it a plain function (def instead of async def)" in record.getMessage()


def test_functions_without_a_return_statement_are_told_from_those_with_one():
    def forgets(row, sample):
        sample.text.strip()

    async def forgets_too(completion, answer):
        await asyncio.sleep(0)

    def returns_none(row, sample):
        return None if sample.text else 1.0

    def yields(rows, samples):
        yield 1.0

    class Forgets:
        def __call__(self, row, sample):
            """No value."""

    for function in (forgets, forgets_too, Forgets(), batched(forgets)):
        assert returns_nothing(RewardFunction("r", function).function)
    for function in (returns_none, batched(yields), max, lambda completion: 1.0, ExactMatch()):
        assert not returns_nothing(RewardFunction("r", function).function)


class Unshown:
    def __repr__(self):
        raise RuntimeError("not to be shown")


@pytest.mark.parametrize(
    ("function", "batch"), [(lambda *given: Unshown(), False), (lambda *given: Unshown(), True)]
)
def test_what_cannot_be_shown_is_named_by_its_type(function, batch, groups, judging, caplog):
    reward = RewardFunction("r", batched(function) if batch else function)
    assert judging([reward], *groups) == {("r", "wrong length" if batch else "not a number"): 4}
    assert "a Unshown, whose repr raises RuntimeError" in caplog.text


def _endless(rows, samples):
    yielded = 0
    while True:
        yielded += 1
        assert yielded < 9, "its entries would fill the memory"
        yield 1.0


async def _endless_async(rows, samples):
    for entry in _endless(rows, samples):
        yield entry


@pytest.mark.parametrize("function", [_endless, _endless_async])
def test_a_generator_without_an_end_is_left_after_what_is_needed(function, groups, judging):
    assert judging([RewardFunction("r", batched(function))], *groups) == {("r", "wrong length"): 4}


@pytest.mark.parametrize(
    ("attribute", "value", "says"),
    [
        ("concurrency", 0, "concurrency must be >= 1, got 0"),
        ("concurrency", None, "concurrency must be >= 1, got None"),
        ("over", "groups", "over must be sample, group or step, got 'groups'"),
    ],
)
def test_an_attribute_that_could_never_work_is_refused(attribute, value, says):
    def function(row, sample):
        return 1.0

    setattr(function, attribute, value)
    with pytest.raises(ValueError, match=f"reward r: its attribute {says}"):
        RewardFunction("r", function)
