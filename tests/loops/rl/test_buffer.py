"""From samples to micro-batches. (That a step does not depend on its split is shown in
test_law_online.)
"""

import random
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from accelerate import Accelerator
from burnish.loops.config import Limits
from burnish.loops.models.policy import Policy
from burnish.loops.recipes.settings import GRPO
from burnish.loops.rewards import RewardFunction
from burnish.loops.rl import buffer
from burnish.loops.rl.buffer import RolloutBuffer
from burnish.loops.rl.context import RLContext
from burnish.loops.rl.feed import RolloutFeed
from burnish.loops.rl.settings import VLLM
from burnish.loops.rollouts.replay import ReplaySource, open_sample_log, read_samples, write_samples
from burnish.loops.rollouts.sample import Sample, SamplingParams, VersionSpan
from burnish.loops.rollouts.scheduler import RolloutScheduler
from burnish.loops.runs.context import RunContext
from tiny import make_model

GROUPS, ANSWERS = 4, 3
ALL = [(task, index) for task in range(GROUPS) for index in range(ANSWERS)]
REWARDS = [RewardFunction("right", None)]


@pytest.fixture(scope="module")
def policy():
    return Policy(make_model(), layout="shared")


def answers(tasks=GROUPS, finish="stop", reward=None, version=0):
    """The tokens of an answer say whose they are, as far as the vocabulary goes; its log-probs say
    it exactly.
    """
    draw, found = random.Random(0), []
    for task in range(tasks):
        prompt = [draw.randrange(3, 60) for _ in range(draw.randint(2, 6))]
        for index in range(ANSWERS):
            length = draw.randint(2, 7)
            tokens = [draw.randrange(3, 60) for _ in range(length)]
            trained = [True, *(draw.random() < 0.7 for _ in range(length - 1))]
            logprobs = [-(1 + task + index / 10 + t / 1000) for t in range(length)]
            score = {"right": float(index) if reward is None else reward(task, index)}
            spans = [VersionSpan(version, 0, 1), VersionSpan(version + 1, 1, length)]
            found.append(
                Sample(task, index, prompt, tokens, trained, logprobs, spans, finish, rewards=score)
            )
    return found


@pytest.fixture
def open_feed(policy):
    opened = []

    def open_feed(
        samples,
        sample_log=lambda samples: None,
        groups=GROUPS,
        rewards=REWARDS,
        settings=None,
        **hooks,
    ):
        prompts = {sample.task: sample.prompt for sample in samples}
        scheduler = RolloutScheduler(
            ReplaySource(samples),
            prompts.__getitem__,
            groups_per_step=groups,
            group_size=ANSWERS,
            sampling=SamplingParams(9),
        )
        settings = {"micro_tokens": None, "prompts_per_rollout": groups, **(settings or {})}
        config = GRPO(model="", data="", output="", **settings)
        run = RunContext(config, Accelerator(), None, policy, prompts)
        context = RLContext(run, rewards, scheduler, sample_log=sample_log)
        opened.append(RolloutFeed(context, **hooks))
        return opened[-1]

    yield open_feed
    for feed in opened:
        feed.close()


def whose(batches):
    """(task, index) of the answers of each example, by the log-probs of their tokens."""
    found = []
    for batch in batches:
        for i in range(len(batch.examples)):
            mine = batch.columns["sampled_logp"][batch.example[batch.sequence] == i]
            found.append(
                sorted({(int(-p) - 1, round((-p % 1) * 1000) // 100) for p in mine.tolist()})
            )
    return found


@pytest.mark.parametrize(
    ("settings", "longest"),
    [
        ({}, 30.0),
        ({"environment": "guess_number", "limits": Limits(seconds=900)}, 900.0),
        ({"agent": "mine:agent", "limits": Limits(seconds=900)}, 900.0),
        ({"source": "vllm", "agent": "mine:agent", "vllm": VLLM(patience=1500)}, 1500.0),
    ],
    ids=["reward", "environment", "agent", "server"],
)
def test_a_rollout_may_stand_for_as_long_as_what_it_waits_for(
    open_feed, settings, longest, monkeypatch
):
    allowed = []
    found = {}

    @contextmanager
    def may_stand(seconds):
        allowed.append(seconds)
        yield
        allowed.pop()

    def noted(name, method, *arguments, **options):
        found[name] = sum(allowed)
        return method(*arguments, **options)

    monkeypatch.setattr("burnish.loops.rl.feed.may_stand", may_stand)
    feed = open_feed(answers(), settings=settings)
    for name in ("publish", "select"):
        method = partial(noted, name, getattr(feed.scheduler, name))
        monkeypatch.setattr(feed.scheduler, name, method)
    feed(0)
    assert found == {"publish": longest, "select": longest}


def test_completions_of_a_prompt_share_an_example_with_columns_of_their_own_tokens(open_feed):
    samples = answers()
    (batch,) = open_feed(samples)(0)
    assert whose([batch]) == [[(task, index) for index in range(ANSWERS)] for task in range(GROUPS)]
    expected = [p for s in samples for p, drawn in zip(s.logprobs, s.trained, strict=True) if drawn]
    target = [t for s in samples for t, drawn in zip(s.tokens, s.trained, strict=True) if drawn]
    torch.testing.assert_close(batch.columns["sampled_logp"], torch.tensor(expected).double())
    assert batch.target.tolist() == target
    versions = [min(t, 1) for s in samples for t in range(len(s.tokens)) if s.trained[t]]
    assert batch.columns["age"].tolist() == [-version for version in versions]


def test_a_group_too_large_for_a_micro_batch_is_split_and_nothing_is_lost(open_feed):
    limit = 14
    batches = open_feed(answers(), settings={"micro_tokens": limit})(0)
    assert len(batches) > GROUPS / 2
    for batch in batches:
        assert sum(len(e.prompt) + sum(map(len, e.completions)) for e in batch.examples) <= limit
    parts = whose(batches)
    assert len(parts) > GROUPS
    assert all(len({task for task, _ in part}) == 1 for part in parts)
    assert sorted(answer for part in parts for answer in part) == ALL


def test_an_answer_larger_than_a_micro_batch_stands_alone(open_feed):
    assert [len(part) for part in whose(open_feed(answers(), settings={"micro_tokens": 1})(0))] == [
        1
    ] * GROUPS * ANSWERS


@pytest.mark.parametrize("micro_tokens", [None, 14])
def test_each_epoch_takes_every_group_once_in_an_order_of_its_own(open_feed, micro_tokens):
    settings = {"epochs_per_rollout": 3, "minibatches": 2, "micro_tokens": micro_tokens}
    feed = open_feed(answers(), settings=settings)
    steps = [sorted({task for part in whose(feed(step)) for task, _ in part}) for step in range(6)]
    assert [sorted(steps[i] + steps[i + 1]) for i in (0, 2, 4)] == [list(range(GROUPS))] * 3
    assert len({tuple(step) for step in steps}) > 2
    assert all(len(step) == GROUPS / 2 for step in steps)


def test_which_groups_a_step_takes_does_not_depend_on_micro_batches(open_feed):
    several = {"epochs_per_rollout": 2, "minibatches": 2}
    one, other = (
        [sorted({t for part in whose(e(step)) for t, _ in part}) for step in range(4)]
        for e in (open_feed(answers(), settings={**several, "micro_tokens": m}) for m in (None, 1))
    )
    assert one == other


def test_masked_is_what_has_no_score_was_given_up_or_was_cut(open_feed):
    samples = answers(reward=lambda task, index: None if (task, index) == (1, 2) else 0.5)
    samples[0].finish = "aborted"
    samples[3].finish = "length"
    feed = open_feed(samples, settings={"mask_truncated": True})
    trained = {answer for part in whose(feed(0)) for answer in part}
    assert trained == {*ALL} - {(0, 0), (1, 0), (1, 2)}
    # of one that was cut, the score counts
    assert feed.rollout.reward.isnan().nonzero().tolist() == [[0], [5]]
    assert feed.metrics["completions/masked_ratio"] == pytest.approx(3 / 12)
    assert feed.metrics["completions/clipped_ratio"] == pytest.approx(2 / 12)
    kept = {answer for part in whose(open_feed(samples)(0)) for answer in part}
    assert (1, 0) in kept


def test_without_rewards_nothing_is_masked_for_want_of_one(open_feed):
    feed = open_feed(answers(reward=lambda *_: None), rewards=[])
    assert sum(map(len, whose(feed(0)))) == GROUPS * ANSWERS


def test_what_is_measured_goes_to_its_own_tokens_whatever_the_micro_batches(open_feed, policy):
    def measure(batch):
        return {"old_logp": policy(batch).logprob}

    for limit in (None, 40, 25, 14, 1):
        feed = open_feed(answers(), measure=measure, settings={"micro_tokens": limit})
        for batch in feed(0):
            torch.testing.assert_close(
                batch.columns["old_logp"], policy(batch).logprob.detach(), rtol=0, atol=1e-10
            )
        assert len(feed.rollout["old_logp"]) == len(feed.rollout.sequence)


def test_a_rollout_whose_answers_are_all_masked_is_an_empty_batch(open_feed, policy):
    seen = []

    def advantages(rollout):
        seen.append(len(rollout["old_logp"]))
        return {"advantage": rollout["old_logp"]}

    samples = answers()
    for sample in samples:
        sample.finish = "aborted"
    feed = open_feed(
        samples, measure=lambda b: {"old_logp": policy(b).logprob}, advantages=advantages
    )
    (batch,) = feed(0)
    assert len(batch.examples) == len(batch.target) == len(batch.columns["advantage"]) == 0
    assert seen == [0]
    assert feed.metrics["completions/masked_ratio"] == 1


def test_state_in_the_middle_of_a_rollout_gives_its_other_steps_without_sampling(open_feed):
    several = {"epochs_per_rollout": 2, "minibatches": 2}
    options = {"settings": several, "advantages": lambda r: {"advantage": r["age"] + 3}}
    first = open_feed(answers(), **options)
    first(0)
    state = first.state_dict()
    second = open_feed(answers(), **options)
    second.load_state_dict(state)
    second.scheduler.take = lambda *_, **__: pytest.fail("it sampled again")
    for step in (1, 2, 3):
        for one, other in zip(first(step), second(step), strict=True):
            assert one.examples == other.examples
            assert all(torch.equal(one.columns[name], other.columns[name]) for name in one.columns)
    assert first.metrics == second.metrics
    assert second.state_dict()["rollout"] is None  # used up: the next step samples anew


def test_dynamic_sampling_takes_the_next_groups_in_place_of_those_alike(open_feed):
    samples = answers(
        tasks=16, reward=lambda task, index: 5.0 if task in (0, 2, 3, 5) else float(index)
    )
    # it is given up, and compared with no other
    alone = next(sample for sample in samples if sample.task == 2)
    alone.finish, alone.rewards["right"] = "aborted", 8.0
    stored = []
    feed = open_feed(samples, stored.extend, dynamic_sampling=True)
    assert [part[0][0] for part in whose(feed(0))] == [1, 4, 6, 7]
    assert feed.metrics["groups_passed_over"] == 4
    assert feed.metrics["groups_wasted"] == 8  # of 16 that were asked for
    assert feed.metrics["reward/sampled"] == (4 * 5 + 1 + 4 * 1) / 8  # of all that was sampled
    assert [sample.task for sample in stored][::ANSWERS] == list(range(8))
    assert feed.scheduler.tasks == 8


def test_samples_of_a_run_that_was_killed_are_on_record_once(open_feed, tmp_path):
    path = tmp_path / "samples.jsonl"
    samples = answers(tasks=3)
    write_samples(path, samples)  # the dead run had a checkpoint after task 0
    path.write_text(path.read_text()[:-20])  # and died while it wrote
    feed = open_feed(samples, open_sample_log(path, show_every=0), groups=1)
    feed.scheduler.ledger.take([0], 0)
    feed(1)
    feed(2)
    assert list(read_samples(path)) == samples


def test_a_few_answers_are_shown_of_some_rollouts(tmp_path, capsys):
    write = open_sample_log(
        tmp_path / "samples.jsonl", show_every=2, decode=lambda prompt: f"asked {prompt[0]}"
    )
    for task in range(3):
        group = [sample for sample in answers() if sample.task == task]
        for sample in group:
            sample.text = f"answer to {task}"
        write(group)
    shown = capsys.readouterr().out
    assert "answer to 0" in shown and "asked " in shown
    assert "answer to 1" not in shown
    assert "answer to 2" in shown


def test_masking_drops_the_tokens_of_a_completion_from_every_column():
    samples = answers(tasks=2)
    rollout = RolloutBuffer(samples, dtype=torch.float64)
    rollout["number"] = rollout.sequence.double()
    before = len(rollout.sequence)
    rollout.mask([i == 2 for i in range(len(samples))])
    assert (
        len(rollout["number"]) == len(rollout["sampled_logp"]) == before - sum(samples[2].trained)
    )
    assert torch.equal(rollout["number"], rollout.sequence.double()) and 2 not in rollout.sequence
    with pytest.raises(ValueError, match="number must have one entry per trained token"):
        rollout["number"] = torch.zeros(before)


def test_a_limit_below_one_token_is_refused():
    with pytest.raises(ValueError, match="rollout: max_tokens must be >= 1, got 0"):
        RolloutBuffer(answers()).micro_batches(0)


def test_ranks_with_other_scores_do_not_train_completions_twice_or_never(monkeypatch):
    one, two = RolloutBuffer(answers()), RolloutBuffer(answers())
    sent = []
    monkeypatch.setattr(buffer, "gather_object", lambda mine: sent.extend(mine) or [*sent])
    assert one.micro_batches(100)
    two.mask([i == 2 for i in range(len(two))])
    with pytest.raises(
        ValueError, match=r"or their scores differ between ranks.* from_main\(accelerator"
    ):
        two.micro_batches(100)


def test_ranks_whose_scores_differ_by_more_than_rounding_do_not_train(monkeypatch):
    """Each would have the advantages of its own scores, of which the others know nothing."""

    def scored(change):
        rollout = RolloutBuffer(answers(reward=lambda task, index: index + change * (task == 2)))
        rollout.score(REWARDS)
        return rollout

    judged, rounded, otherwise = map(scored, (0.0, 1e-3, 0.2))
    sent = []
    monkeypatch.setattr(buffer, "gather_object", lambda mine: sent.extend(mine) or [*sent])
    assert judged.micro_batches(100) and rounded.micro_batches(100)
    with pytest.raises(
        ValueError, match=r"or their scores differ between ranks.* from_main\(accelerator"
    ):
        otherwise.micro_batches(100)
