"""Stored samples come back as they were."""

import asyncio
import dataclasses
import json

import pytest
from burnish.loops.rollouts.replay import ReplaySource, open_sample_log, read_samples, write_samples
from burnish.loops.rollouts.sample import (
    Context,
    Request,
    Sample,
    SamplingParams,
    VersionSpan,
    from_record,
    to_record,
)
from burnish.loops.rollouts.scheduler import RolloutScheduler
from burnish.loops.rollouts.source import SourceError


def completion(task, index, length=3):
    """A conversation of a sort: its second token was said by others."""
    return Sample(
        task=task,
        index=index,
        prompt=[task + 1, 2],
        tokens=[index + t for t in range(length)],
        trained=[t != 1 for t in range(length)],
        logprobs=[-0.1 * (t != 1) - 1e-17 for t in range(length)],
        spans=[VersionSpan(task, 0, 1), VersionSpan(task + 1, 1, length)],
        finish="stop",
        text="naïve\n",
        rewards={"right": 1 / 3, "format": None},
        info={"asked": [1, {"by": "us"}]},
    )


STORED = [completion(task, index) for task in range(4) for index in range(2)]


AGENT = dataclasses.replace(
    STORED[0],
    further=[
        Context([7], [4, 4], [False, True], [0.0, -1e-17], [VersionSpan(3, 1, 2)]),
        Context([8], [5], [True], [-1 / 3], [VersionSpan(4, 0, 1)]),
    ],
)


def asked(task=0, indices=(0, 1), prompt=None, max_tokens=5):
    return Request(task, prompt or [task + 1, 2], list(indices), SamplingParams(max_tokens), key=0)


@pytest.mark.parametrize("name", ["samples.jsonl", "samples.parquet"])
def test_what_is_written_is_read(name, tmp_path):
    path = tmp_path / "run" / name
    stored = [AGENT, *STORED]
    write_samples(path, iter(stored))
    read = list(read_samples(path))
    assert read == stored
    contexts = [context for sample in read for context in sample.contexts]
    assert all(type(span) is VersionSpan for context in contexts for span in context.spans)


def test_half_a_surrogate_which_a_model_may_write_in_json_is_stored(tmp_path):
    sample = dataclasses.replace(
        completion(0, 0), info={"arguments": json.loads('{"city": "\\ud83d Zürich"}')}
    )
    write_samples(path := tmp_path / "samples.jsonl", [sample])
    assert list(read_samples(path)) == [sample] and "Zürich" in path.read_text()


def test_lines_are_appended(tmp_path):
    for part in (STORED[:2], [], STORED[2:]):
        write_samples(tmp_path / "samples.jsonl", part)
    assert list(read_samples(tmp_path / "samples.jsonl")) == STORED


def test_a_parquet_file_is_written_anew_and_only_as_a_whole(tmp_path):
    path = tmp_path / "samples.parquet"
    write_samples(path, STORED)
    with pytest.raises(AttributeError):
        write_samples(path, [STORED[0], None])
    assert list(read_samples(path)) == STORED
    write_samples(path, STORED[:2])
    assert list(read_samples(path)) == STORED[:2] and list(tmp_path.iterdir()) == [path]


def test_half_a_line_at_the_end_is_left_out_and_one_in_the_middle_is_named(tmp_path):
    path = tmp_path / "samples.jsonl"
    write_samples(path, STORED)
    whole = path.read_text()
    path.write_text(whole[:-9])
    assert list(read_samples(path)) == STORED[:-1]
    path.write_text(whole[:40] + "\n" + whole[40:])
    with pytest.raises(ValueError, match="sample number 1 can't be read: Expecting"):
        list(read_samples(path))


@pytest.mark.parametrize("line", [b"{", b"[]", b"{}", b"\0\0", b'{"task": "\xff"}', b'{"task": 0}'])
def test_a_line_that_cannot_be_read_is_set_aside_when_a_run_goes_on(line, tmp_path, caplog):
    path = tmp_path / "samples.jsonl"
    write_samples(path, STORED)
    whole = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([whole[0], line + b"\n", *whole[1:]]))
    new = completion(9, 0)
    open_sample_log(path, 0)([new])
    assert list(read_samples(path)) == [*(sample for sample in STORED if sample.task < 9), new]
    assert (tmp_path / "samples.jsonl.damaged").read_bytes() == line + b"\n"
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "samples.jsonl: 1 of its lines can't be read" in warning


def test_a_run_that_takes_tasks_in_another_order_records_each_once(tmp_path):
    """A dead process has recorded task 1, which the resumed run takes later, and task 5, which it
    takes first.
    """
    path = tmp_path / "samples.jsonl"
    taken = {0, 3}
    write_samples(path, [completion(task, 0) for task in (0, 3, 1, 5)])
    write = open_sample_log(path, 0, taken=taken.__contains__)
    for task in (5, 1):
        taken.add(task)
        write([completion(task, 0)])
    assert [sample.task for sample in read_samples(path)] == [0, 3, 5, 1]


def test_samples_are_read_one_at_a_time(tmp_path):
    path = tmp_path / "samples.jsonl"
    write_samples(path, STORED)
    path.write_text(path.read_text() + "damaged\n")
    samples = read_samples(path)
    assert [next(samples) for _ in STORED] == STORED
    with pytest.raises(ValueError, match="sample number 9 can't be read: Expecting value"):
        next(samples)


def test_a_sample_that_does_not_agree_with_itself_is_named(tmp_path):
    path = tmp_path / "samples.jsonl"
    write_samples(path, [STORED[0], dataclasses.replace(STORED[1], logprobs=[-1.0])])
    with pytest.raises(
        ValueError, match=r"sample number 2 .* logprobs must have one entry per token, 3, got 1"
    ):
        list(read_samples(path))


def test_a_record_of_other_fields_is_refused():
    record = to_record(STORED[0])
    for wrong in ({k: v for k, v in record.items() if k != "spans"}, record | {"reward": 1}):
        with pytest.raises(
            ValueError, match=r"missing or unknown: reward|missing or unknown: spans"
        ):
            from_record(wrong)


def test_a_record_from_before_there_were_contexts_is_read():
    record = to_record(STORED[0])
    del record["further"]
    assert from_record(record) == STORED[0]


def test_a_context_of_other_fields_is_refused():
    record = to_record(AGENT)
    del record["further"][1]["prompt"]
    with pytest.raises(ValueError, match=r"context: wanted .* missing or unknown: prompt"):
        from_record(record)


def test_conversations_have_prompts_and_contexts_of_their_own():
    conversations = ReplaySource([AGENT], conversations=True)
    request = asked(indices=[0], prompt=[9], max_tokens=1)
    assert asyncio.run(conversations.sample(request)) == [AGENT]
    with pytest.raises(ValueError, match=r"several contexts: ReplaySource\(samples, conv"):
        asyncio.run(ReplaySource([AGENT]).sample(asked(indices=[0])))


def test_completions_come_back_with_their_versions_and_log_probs():
    source = ReplaySource([completion(task, index) for task in range(4) for index in range(2)])
    given = asyncio.run(source.sample(asked(2, indices=[1, 0])))
    assert given == [STORED[5], STORED[4]]
    given[0].rewards["right"] = 0.0
    given[0].info["asked"] = None
    assert asyncio.run(source.sample(asked(2, indices=[1]))) == [completion(2, 1)]


def test_of_two_with_one_name_the_later_counts():
    later = dataclasses.replace(STORED[0], text="again")
    assert asyncio.run(ReplaySource([*STORED, later]).sample(asked(indices=[0]))) == [later]


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (asked(9), "completion 0 of task 9 is not stored; what is: tasks 0 to 3"),
        (asked(indices=[0, 2]), "completion 2 of task 0 is not stored"),
        (asked(prompt=[9]), "task 0 was stored with another prompt"),
        (asked(max_tokens=2), "set max_tokens >= 3, got 2"),
        (asked(indices=[]), "indices"),
    ],
)
def test_what_is_not_there_is_an_error(request_, says):
    with pytest.raises(ValueError, match=says):
        asyncio.run(ReplaySource(STORED).sample(request_))


def test_old_completions_can_be_trained_on_at_any_step(tmp_path):
    """Stored versions are those of another run: their age is no matter of this one's."""
    options = {"groups_per_step": 2, "group_size": 2, "sampling": SamplingParams(max_tokens=5)}
    with RolloutScheduler(ReplaySource(STORED), lambda task: [task + 1, 2], **options) as scheduler:
        taken = []
        for step in range(2):
            scheduler.publish()
            taken += [sample for group in scheduler.take(step=step) for sample in group]
    assert taken == STORED


def test_it_is_of_the_version_that_is_published_and_ends_when_closed():
    async def life(source):
        assert await source.version() is None
        await source.publish(iter(()), 3)
        assert await source.version() == 3
        await source.close()
        with pytest.raises(SourceError, match="closed"):
            await source.sample(asked())
        with pytest.raises(SourceError, match="closed"):
            await source.publish(iter(()), 4)

    asyncio.run(life(ReplaySource(STORED)))
