"""Groups for every step: in order, never too old, each once, whatever the source does."""

import asyncio
import threading
import time
from collections import Counter
from dataclasses import replace

import pytest
import torch
from burnish.loops.rollouts.sample import Request, SamplingParams, VersionSpan
from burnish.loops.rollouts.scheduler import RolloutScheduler
from burnish.loops.rollouts.source import SourceError, SourceLost
from burnish.loops.rollouts.vllm.client import Rejected
from scripted import B, G, Scripted, Trainer, wait_until


@pytest.fixture(autouse=True)
def nothing_is_left():
    # of which some, left behind by other tests, may end meanwhile
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_tasks_are_trained_on_in_their_order_each_once_and_never_too_old(max_staleness, seed):
    source = Scripted(seed, delay=0.01, crashes=0.2)
    trainer = Trainer(source, max_staleness=max_staleness, attempts=50)
    trained = trainer.all(20, pause=0.003)
    assert [(step, task) for step, task, *_ in trained] == [
        (task // B, task) for task in range(20 * B)
    ]
    assert max(age for *_, age in trained) <= max_staleness
    assert trainer.scheduler.ledger.ends == [(step + 1) * B for step in range(20)]
    assert source.closed and source.crashed > 0


def test_without_staleness_crashes_change_nothing():
    undisturbed = Trainer(Scripted(delay=0.002)).all(8)
    for seed in range(5):
        assert Trainer(Scripted(seed, delay=0.002, crashes=0.2), attempts=50).all(8) == undisturbed


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_answers_are_drawn_ahead_as_far_as_may_be_and_no_further(max_staleness):
    """The trainer is slow: without a bound the source would go on asking."""
    source = Scripted()
    trainer = Trainer(source, max_staleness=max_staleness)
    with trainer.scheduler:
        for step in trainer.run(6):
            # as of version step + 1
            begun = (step + 1) * B if max_staleness == 0 else (step + 2 + max_staleness) * B
            wait_until(lambda begun=begun: source.asked == begun and source.under_way == 0)
            time.sleep(0.01)
            assert source.asked == begun
            assert source.most <= (max_staleness + 1) * B
    assert {age for *_, age in trainer.trained[2 * B * max_staleness :]} == {max_staleness}


def test_answers_under_way_go_on_across_a_publication():
    class Patient(Scripted):
        """Ends what a later step trains on when it has other weights than it began with."""

        async def sample(self, request):
            started = self.at
            while request.task >= B and self.at == started:
                await asyncio.sleep(0.001)
            spans = [VersionSpan(started, 0, 1)] + [VersionSpan(self.at, 1, 2)] * (
                self.at != started
            )
            return [self._answer(request, index, spans) for index in request.indices]

    trained = Trainer(Patient(), max_staleness=2).all(10)
    assert all(
        len(tokens) == 1 + (step > 0) for step, _, answers, _ in trained for tokens in answers
    )


@pytest.mark.parametrize("stop", range(1, 7))
def test_without_staleness_a_resumed_run_trains_on_the_same(stop):
    whole = Trainer(Scripted(delay=0.002)).all(7)
    first = Trainer(Scripted(1, delay=0.002))
    with first.scheduler:
        for step in first.run(7):
            if step + 1 == stop:
                state = first.scheduler.state_dict()
                break
    second = Trainer(Scripted(2, delay=0.002))
    second.scheduler.load_state_dict(state)
    assert first.trained + second.all(7, start=stop) == whole


@pytest.mark.parametrize("stop", range(1, 7))
@pytest.mark.parametrize("when", ["before publishing", "after publishing"])
def test_with_staleness_a_resumed_run_trains_on_each_task_once(stop, when, tmp_path):
    first = Trainer(Scripted(stop, delay=0.004, crashes=0.1), max_staleness=2, attempts=50)
    with first.scheduler:
        first.scheduler.publish()
        for step in range(stop):
            for group in first.scheduler.take(step=step):
                first.trained.append((step, group[0].task, [sample.tokens for sample in group], 0))
            time.sleep(0.004)
            first.version = step + 1
            if step + 1 < stop or when == "after publishing":
                first.scheduler.publish()
        torch.save(first.scheduler.state_dict(), tmp_path / "state.pt")
    second = Trainer(Scripted(99, delay=0.004, crashes=0.1), max_staleness=2, attempts=50)
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    second.scheduler.load_state_dict(state)
    trained = first.trained + second.all(9, start=stop)
    assert [(step, task) for step, task, *_ in trained] == [
        (task // B, task) for task in range(9 * B)
    ]
    assert max(age for *_, age in second.trained) <= 2
    ready = {task: [record["tokens"] for record in group] for task, group in state["ready"].items()}
    assert {task: tokens for _, task, tokens, _ in second.trained if task in ready} == ready
    assert second.scheduler.ledger.ends == [(step + 1) * B for step in range(9)]


def test_a_state_of_another_run_is_refused():
    with Trainer(Scripted()).scheduler as scheduler:
        state = scheduler.state_dict()
    with (
        Trainer(Scripted(), seed=6).scheduler as scheduler,
        pytest.raises(ValueError, match=r"had seed=5, not 6"),
    ):
        scheduler.load_state_dict(state)


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_source_that_is_down_for_good_ends_the_run_and_says_so(max_staleness):
    source = Scripted()
    trainer = Trainer(source, max_staleness=max_staleness, attempts=3)
    with trainer.scheduler:
        run = trainer.run(9)
        next(run)
        source.dead = True
        with pytest.raises(
            SourceError, match=r"in 3 attempts over .* the server is gone; check the source"
        ):
            list(run)


def test_every_failed_attempt_is_a_warning_with_its_reason(caplog):
    class Busy(Scripted):
        async def sample(self, request):
            if request.task == 1 and self.crashed < 3:
                self.crashed += 1
                raise SourceLost(f"refused {self.crashed} times")
            return await super().sample(request)

    trainer = Trainer(Busy(), attempts=8)
    with trainer.scheduler as scheduler:
        scheduler.publish()
        assert len(scheduler.take(step=0)) == B
    assert [record.getMessage() for record in caplog.records] == [
        f"scheduler: {what} could not be sampled in attempt {attempt} of 8: refused {n} times"
        for what, attempt, n in (
            ("task 1", 1, 1),
            ("completion 0 of task 1", 2, 2),
            ("completion 1 of task 1", 2, 3),
        )
    ]


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_source_that_restarted_unnoticed_is_given_the_weights_again(max_staleness):
    source = Scripted()
    trainer = Trainer(source, max_staleness=max_staleness)
    with trainer.scheduler:
        for _ in trainer.run(5):
            source.at = None
    assert source.publications == 6 + 4
    assert len(trainer.trained) == 5 * B


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_source_that_died_before_a_publication_comes_back_by_asking_its_version(
    max_staleness,
):
    class Revived(Scripted):
        async def version(self):
            self.dead = False
            return await super().version()

    source = Revived()
    trainer = Trainer(source, max_staleness=max_staleness, attempts=2)
    with trainer.scheduler:
        for _ in trainer.run(3):
            wait_until(lambda: source.under_way == 0)
            source.dead, source.at = True, None
            trainer.scheduler.publish()
    assert len(trainer.trained) == 3 * B


class Altered(Scripted):
    """A source that gives back what a function makes of its groups."""

    def __init__(self, alter):
        super().__init__()
        self.alter = alter

    async def sample(self, request):
        return self.alter(await super().sample(request))


def with_first(**changes):
    """The group, its first sample changed."""
    return lambda group: [replace(group[0], **changes), *group[1:]]


@pytest.mark.parametrize(
    ("alter", "says"),
    [
        (with_first(task=99), r"asked for its completions \[0, 1\], got \[\(99, 0\)"),
        (lambda group: group[1:], r"got \[\(0, 1\)\]"),
        (lambda group: [group[0], *group], r"got \[\(0, 0\), \(0, 0\), \(0, 1\)\]"),
        (with_first(logprobs=[]), "^Altered: task 0: sample 0 of task 0: .*one entry per token"),
        (with_first(spans=[VersionSpan(9, 0, 1)]), "published"),
    ],
    ids=[
        "another task",
        "one short",
        "one twice",
        "without a log-prob",
        "from the future",
    ],
)
def test_other_questions_answers_and_unknown_versions_are_not_trained_on(alter, says):
    with pytest.raises(SourceError, match=says):
        Trainer(Altered(alter), attempts=2).all(1)


def test_a_source_that_lags_behind_what_was_published_is_not_trained_on():
    def stale(group):
        old = {
            "spans": [VersionSpan(0, 0, 1)],
            "tokens": [1],
            "trained": [True],
            "logprobs": [-1.0],
        }
        return [replace(sample, **old) for sample in group]

    with pytest.raises(
        SourceError, match=r"task 3: its completions come from versions \[0\], published are 1 to 1"
    ):
        Trainer(Altered(stale), attempts=2).all(2)


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_source_that_does_not_take_the_weights_ends_the_run_and_says_so(max_staleness):
    async def ignore(weights, version):
        pass

    trainer = Trainer(source := Scripted(), max_staleness=max_staleness, attempts=2)
    says = r"version 2 could not be published .* Scripted was .* samples from version 1"
    with trainer.scheduler, pytest.raises(SourceError, match=says):
        for _ in trainer.run(5):
            source.publish = ignore


def test_a_checkpoint_holds_all_groups_that_are_ready():
    source = Scripted()
    trainer = Trainer(source, max_staleness=2)
    with trainer.scheduler:
        run = trainer.run(3)
        next(run)
        wait_until(lambda: source.asked == 4 * B and source.under_way == 0)
        time.sleep(0.01)
        assert set(trainer.scheduler.state_dict()["ready"]) == set(range(B, 4 * B))


@pytest.mark.parametrize("max_staleness", [0, 1])
@pytest.mark.parametrize("error", [ValueError, SourceError, lambda why: Rejected(why, 400)])
@pytest.mark.parametrize("what", ["sample", "publish"])
def test_what_the_source_will_never_do_ends_the_run_at_once_with_its_words(
    error, what, max_staleness
):
    async def refuse(*arguments):
        raise error("there is no such parameter")

    source = Scripted()
    setattr(source, what, refuse)
    trainer = Trainer(source, max_staleness=max_staleness)
    with pytest.raises((ValueError, SourceError), match=r"^there is no such parameter$"):
        trainer.all(1)
    assert trainer.scheduler.retries == 0


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_groups_are_scored_as_they_finish(max_staleness):
    """A score that waits for those of the other groups would wait forever if they came one by
    one.
    """
    together = asyncio.Barrier(B)

    async def score(group):
        await asyncio.wait_for(together.wait(), 60)
        for sample in group:
            sample.rewards["length"] = 1.0

    trainer = Trainer(Scripted(delay=0.01), max_staleness=max_staleness, score=score)
    with trainer.scheduler:
        trainer.scheduler.publish()
        groups = trainer.scheduler.take(step=0)
    assert all(sample.rewards == {"length": 1.0} for group in groups for sample in group)


def test_a_score_that_fails_ends_the_run():
    async def score(group):
        raise ZeroDivisionError("the reward's own fault")

    with pytest.raises(ZeroDivisionError, match="own fault"):
        Trainer(Scripted(), score=score).all(1)


def test_a_score_that_takes_long_is_named(caplog, monkeypatch):
    monkeypatch.setattr("burnish.loops.rollouts.scheduler._SLOW_SCORE", 0.05)

    async def score(group):
        await asyncio.sleep(0.2 if group[0].task == 1 else 0)

    Trainer(Scripted(), score=score).all(1)
    said = {record.getMessage() for record in caplog.records}
    assert said and all(
        "the score of task 1 has not returned for 0 s, and its step waits" in each for each in said
    )


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_step_may_take_more_groups(max_staleness):
    trainer = Trainer(Scripted(delay=0.005), max_staleness=max_staleness)
    with trainer.scheduler:
        trainer.scheduler.publish()
        tasks = []
        for step in range(6):
            groups = trainer.scheduler.take(step=step) + trainer.scheduler.take(step % 3, step=step)
            tasks += [group[0].task for group in groups]
            assert all(
                step - sample.oldest <= max_staleness for group in groups for sample in group
            )
            assert len(
                trainer.scheduler.ledger.ends
            ) == step + 1 and trainer.scheduler.tasks == len(tasks)
            trainer.version = step + 1
            trainer.scheduler.publish()
    assert tasks == list(range(6 * B + 6))


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_further_requests_are_repeated_like_those_of_the_run_and_take_none_of_its_tasks(
    max_staleness,
):
    trainer = Trainer(
        Scripted(3, delay=0.003, crashes=0.03), max_staleness=max_staleness, attempts=50
    )
    sampling = SamplingParams(max_tokens=2)
    requests = [Request(task, [5, 7], range(G), sampling, key=-6) for task in range(4)]

    async def sample(source):
        return await asyncio.gather(*map(source.sample, requests))

    with trainer.scheduler as scheduler:
        for step in trainer.run(4):
            groups = scheduler.beside(sample)
            assert [group[0].task for group in groups] == list(range(4))
            versions = {s.version for g in groups for each in g for s in each.spans}
            assert versions == {step + 1}
    assert [task for _, task, *_ in trainer.trained] == list(range(4 * B))


def test_a_source_that_is_down_for_good_ends_further_requests_too():
    source = Scripted()
    trainer = Trainer(source, attempts=2)
    with trainer.scheduler as scheduler:
        scheduler.publish()
        source.sample = None

        async def sample(asked):
            source.dead = True
            return await asyncio.Event().wait()

        source.dead = True
        with pytest.raises(SourceError, match="the server is gone"):
            scheduler.beside(sample)


def test_a_step_trains_the_version_of_its_number():
    with Trainer(Scripted()).scheduler as scheduler:
        with pytest.raises(
            ValueError, match="step 0 trains version 0, published is None; publish first"
        ):
            scheduler.take(step=0)
        scheduler.publish()
        scheduler.take(step=0)
        with pytest.raises(ValueError, match="step 1 trains version 1, published is 0"):
            scheduler.take(step=1)


def test_weights_that_are_being_trained_are_not_drawn_from_meanwhile():
    source = Scripted()
    source.overlaps = False
    with pytest.raises(
        ValueError, match=r"max_staleness 1 .* set max_staleness to 0, or use a DetachedSource or"
    ):
        Trainer(source, max_staleness=1)
    assert len(Trainer(source, max_staleness=0).all(2)) == 2 * B


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_after_a_failure_the_same_groups_can_be_taken_again(max_staleness):
    """In a notebook, say, where the server has been seen to; and a state is at hand in between."""

    attempts, under_way = Counter(), asyncio.Event()

    async def refuse(request):
        attempts[request.task] += 1
        # the last one; the second task's is under way when that of the first fails
        if attempts[request.task] == 2:
            if request.task == 1:
                under_way.set()
                await asyncio.sleep(0.3)
            await under_way.wait()
        raise SourceLost("the server is gone")

    trainer = Trainer(source := Scripted(), max_staleness=max_staleness, attempts=2)
    source.sample, usual = refuse, source.sample
    with trainer.scheduler as scheduler:
        scheduler.publish()
        with pytest.raises(SourceError, match="the server is gone"):
            scheduler.take()
        assert scheduler.state_dict()["ends"] == []
        source.sample = usual
        taken = [group[0].task for group in scheduler.take()]
    assert taken == list(range(B)) and scheduler.ledger.ends == [B]


def test_groups_that_were_cancelled_with_a_failed_publication_can_be_taken_again():
    class Lost(Scripted):
        """Its weights are gone while completions are under way, and can't be replaced at first."""

        async def sample(self, request):
            if self.asked < B:
                self.at, self.asked = None, self.asked + 1
                if self.asked == B:
                    raise SourceLost("restarted")
                await asyncio.sleep(60)
            return await super().sample(request)

        async def publish(self, weights, version):
            if self.asked and self.down:
                self.down -= 1
                raise SourceLost("refuses weights")
            await super().publish(weights, version)

        def _reachable(self):
            pass

    trainer = Trainer(Lost(down=2), attempts=2)
    with trainer.scheduler as scheduler:
        scheduler.publish()
        with pytest.raises(SourceError, match="refuses weights"):
            scheduler.take()
        assert scheduler.state_dict()["ready"] == {}
        assert [group[0].task for group in scheduler.take()] == list(range(B))


def test_a_step_that_was_skipped_is_refused():
    with Trainer(Scripted()).scheduler as scheduler:
        scheduler.publish()
        scheduler.version = 1
        scheduler.source.at = 1
        with pytest.raises(AssertionError, match=r"step 1, on tasks .*, would come after step -1"):
            scheduler.take(step=1)


def test_it_works_where_an_event_loop_is_running_already():
    async def notebook():
        return Trainer(Scripted()).all(2)

    assert len(asyncio.run(notebook())) == 2 * B


def test_a_list_of_prompts_is_gone_through_again_and_again_and_permuted_by_the_seed():
    prompts = [[i + 1, 7] for i in range(4)]

    def taken(**options):
        with RolloutScheduler(
            Scripted(), prompts, group_size=G, weights=lambda: [("v", 0)], **options
        ) as scheduler:
            scheduler.publish()
            return [group[0].prompt[0] - 1 for group in scheduler.take(8)]

    assert taken() == [0, 1, 2, 3] * 2
    first, second = taken(shuffle=True, seed=1)[:4], taken(shuffle=True, seed=1)[4:]
    assert sorted(first) == sorted(second) == [0, 1, 2, 3] and first != second
    assert taken(shuffle=True, seed=1) == first + second != taken(shuffle=True, seed=2)


def test_a_scheduler_without_groups_per_step_samples_what_is_taken_and_nothing_ahead():
    source = Scripted()
    with RolloutScheduler(source, [[5, 7]], group_size=G, weights=lambda: [("v", 0)]) as scheduler:
        assert [len(scheduler.take(count)) for count in (2, 1)] == [2, 1] and source.asked == 3
        with pytest.raises(ValueError, match="how many groups"):
            scheduler.take()
    with pytest.raises(ValueError, match="samples ahead of `take`; give groups_per_step"):
        RolloutScheduler(source, [[5, 7]], group_size=G, max_staleness=1)


def test_text_needs_a_tokenizer():
    with pytest.raises(ValueError, match="prompts of text need a source with a tokenizer"):
        RolloutScheduler(Scripted(), ["2+2="], group_size=G)


def test_rows_need_a_prompt():
    with pytest.raises(
        ValueError, match="row 1 has no column 'prompt', only question, answer; rename one to it"
    ):
        RolloutScheduler(
            Scripted(), [{"prompt": [5, 7]}, {"question": "2+2=", "answer": "4"}], group_size=G
        )


@pytest.mark.parametrize(("prompts", "seed"), [([], 0), ([[5, 7]], -1)])
def test_no_prompt_and_a_negative_seed_are_refused_at_once(prompts, seed):
    with pytest.raises(
        ValueError, match=f"at least one prompt and a seed >= 0, got {len(prompts)} and {seed}"
    ):
        RolloutScheduler(Scripted(), prompts, group_size=G, seed=seed)


def test_a_greedy_completion_is_scored_with_its_group_and_is_none_of_it():
    source = Scripted(delay=0.001)
    asked = []
    sample = source.sample

    async def noted(request):
        asked.append((request.task, list(request.indices), request.sampling.temperature))
        return await sample(request)

    async def score(group):
        for completion in group:
            completion.rewards["place"] = float(completion.index)

    source.sample = noted
    trainer = Trainer(source, greedy=True, score=score)
    with trainer.scheduler as scheduler:
        groups = scheduler.take()
    assert [len(group) for group in groups] == [G] * B
    for group in groups:
        for place, completion in enumerate(group):
            assert completion.rewards == {"place": place}
            assert completion.info == {"greedy": {"finish": "stop", "rewards": {"place": G}}}
    temperature = scheduler.sampling.temperature
    assert temperature > 0
    for task in range(B):
        assert (task, list(range(G)), temperature) in asked and (task, [G], 0.0) in asked
