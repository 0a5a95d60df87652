"""Conversations of several contexts: each is a sequence that trains, and the conversation counts
once.
"""

import random
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from burnish.loops.recipes.grpo import advantages, open_grpo
from burnish.loops.recipes.online_dpo import open_online_dpo
from burnish.loops.recipes.ppo import advantages as ppo_advantages
from burnish.loops.recipes.ppo import open_ppo, turn_rewards
from burnish.loops.recipes.settings import GRPO, PPO, OnlineDPO
from burnish.loops.rewards import RewardFunction
from burnish.loops.rl.buffer import RolloutBuffer
from burnish.loops.rl.context import RLContext
from burnish.loops.rl.feed import RolloutFeed
from burnish.loops.rl.settings import Limits
from burnish.loops.rollouts.sample import Context, Sample, VersionSpan
from burnish.loops.runs.context import RunContext
from burnish.objectives import group_advantage, whiten
from law import make_policy, numbers, one_step_of, replaying
from online import lines, prepare, stored

REWARDS = [RewardFunction("right", None)]
TASKS, SIZE = 3, 2


def context(draw, prompt=None):
    """One of random tokens, the last of which is drawn."""
    length = draw.randint(1, 6)
    trained = [draw.random() < 0.6 for _ in range(length - 1)] + [True]
    return Context(
        prompt or [draw.randrange(3, 60) for _ in range(draw.randint(1, 5))],
        [draw.randrange(3, 60) for _ in range(length)],
        trained,
        [-draw.uniform(1, 3) for _ in range(length)],
        [VersionSpan(draw.randrange(3), 0, length)],
    )


def conversation(task, index, contexts, reward=0.0):
    first, *further = contexts
    return Sample(
        task, index, **vars(first), finish="stop", rewards={"right": reward}, further=further
    )


@pytest.fixture
def conversations():
    """Of one to three contexts, which begin alike in a group, or do not."""
    draw = random.Random(0)
    samples = []
    for task in range(TASKS):
        start = context(draw).prompt
        for index in range(SIZE):
            first = context(draw, start if task else None)
            others = [context(draw) for _ in range((task + index) % 3)]
            samples.append(conversation(task, index, [first, *others], float(index + task)))
    return samples


def rollout_of(samples, **options):
    rollout = RolloutBuffer(samples, dtype=torch.float64, **options)
    rollout.score(REWARDS)
    return rollout


def sequences(batches):
    """(prompt, tokens, drawn, log-probs) of each sequence that is trained."""
    found = []
    for batch in batches:
        number = 0
        for example in batch.examples:
            for tokens, trained in zip(example.completions, example.trained, strict=True):
                logprobs = batch.columns["sampled_logp"][batch.sequence == number].tolist()
                found.append((example.prompt, tokens, trained, logprobs))
                number += 1
    return found


def drawn(context):
    logprobs = [p for p, drawn in zip(context.logprobs, context.trained, strict=True) if drawn]
    return context.prompt, context.tokens, context.trained, logprobs


@pytest.mark.parametrize("limit", [None, 12, 1])
def test_each_context_is_trained_once_as_a_sequence_of_its_own(limit, conversations):
    batches = rollout_of(conversations).micro_batches(limit)
    wanted = [drawn(context) for sample in conversations for context in sample.contexts]
    assert len(wanted) == 12
    assert sorted(sequences(batches)) == sorted(wanted)


def test_contexts_of_one_prompt_share_an_example_and_others_do_not(conversations):
    rollout = rollout_of(conversations)
    first, *others = rollout.split_groups()
    assert first == [[0], [1], [2]]  # the conversations of task 0 begin differently
    for group in others:
        shared = [example for example in group if len(example) > 1]
        (starts,) = shared
        assert {rollout.contexts[i].prompt is conversations[0].prompt for i in starts} == {False}
        assert len({tuple(rollout.contexts[i].prompt) for i in starts}) == 1
    examples = [i for group in (first, *others) for example in group for i in example]
    assert sorted(examples) == list(range(12))


def test_a_plan_names_the_task_of_every_example(conversations):
    """Also where two tasks have the same prompt, in one list."""
    conversations[2].prompt = conversations[4].prompt
    rollout = rollout_of(conversations)
    (micro_batch,) = rollout.plan()
    tasks = [rollout.task_of(contexts[0]) for contexts in micro_batch]
    assert tasks == sorted(tasks) and set(tasks) == {0, 1, 2}
    (batch,) = rollout.micro_batches()
    assert len(batch.examples) == len(tasks)


def test_a_value_of_a_conversation_is_that_of_the_tokens_of_all_its_contexts(conversations):
    rollout = rollout_of(conversations)
    lengths = [sample.length for sample in conversations]
    assert rollout.lengths.tolist() == lengths
    of_conversations = torch.arange(len(rollout), dtype=torch.float64)
    rollout["number"] = of_conversations[rollout.sequence]
    sums = [number * length for number, length in enumerate(lengths)]
    assert rollout.sum(rollout["number"]).tolist() == sums


def test_the_age_of_a_token_is_that_of_its_context(conversations):
    rollout = rollout_of(conversations, version=4)
    for number, context in enumerate(rollout.contexts):
        ages = rollout["age"][rollout.context == number]
        assert ages.tolist() == [4.0 - context.spans[0].version] * sum(context.trained)
    assert rollout_of(conversations).version == 2


def test_masking_a_conversation_masks_all_of_its_contexts(conversations):
    masked = conversations[3]
    masked.finish = "aborted"
    rollout = rollout_of(conversations)
    assert len(masked.contexts) == 3
    others = [sample for sample in conversations if sample is not masked]
    wanted = [drawn(context) for sample in others for context in sample.contexts]
    assert sorted(sequences(rollout.micro_batches())) == sorted(wanted)


NAMES = ("group", "rloo", "opo", "gpg", "maxrl", "max_at_k", "reinforce_plus_plus_baseline")


@pytest.mark.parametrize("name", NAMES)
def test_an_advantage_counts_a_conversation_once(name):
    """It is that of one sequence with as many tokens, whatever contexts they are in."""
    draw = random.Random(1)
    several = []
    joined = []
    for task in range(2):
        for index in range(4):
            contexts = [context(draw) for _ in range(1 + index % 3)]
            sample = conversation(task, index, contexts, draw.choice([0.0, 0.3, 1.0]))
            whole = replace(sample, further=[])
            for part in sample.further:
                whole.spans = [*whole.spans, *_after(part.spans, len(whole.tokens))]
                for field in ("tokens", "trained", "logprobs"):
                    setattr(whole, field, getattr(whole, field) + getattr(part, field))
            several.append(sample)
            joined.append(whole)
    config = GRPO(model="", data="", output="", group_size=4, advantage=name)
    of_several, of_joined = (rollout_of(samples) for samples in (several, joined))
    assert len(of_several.contexts) > len(of_joined.contexts)
    given = advantages(of_several, config=config)["advantage"]
    assert torch.equal(given, advantages(of_joined, config=config)["advantage"])
    assert given.abs().max() > 0


def _after(spans, start):
    return [VersionSpan(version, start + first, start + end) for version, first, end in spans]


# Written out: the loss of a token or of a context, by its ratio, and its weight.
CLIP = 0.5


def surrogate(ratio, advantage):
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)


def token_mean(differences, advantages):
    losses = [surrogate(d.exp(), a).sum() for d, a in zip(differences, advantages, strict=True)]
    return sum(losses) / sum(map(len, differences))


def grpo(differences, advantages):
    losses = [surrogate(d.exp(), a).mean() for d, a in zip(differences, advantages, strict=True)]
    return sum(losses) / len(losses)


def dr_grpo(differences, advantages):
    losses = [surrogate(d.exp(), a).sum() / 6 for d, a in zip(differences, advantages, strict=True)]
    return sum(losses) / len(losses)


def gspo(differences, advantages):
    losses = [surrogate(d.mean().exp(), a) for d, a in zip(differences, advantages, strict=True)]
    return sum(losses) / len(losses)


def rloo(differences, advantages):
    losses = [surrogate(d.sum().exp(), a) for d, a in zip(differences, advantages, strict=True)]
    return sum(losses) / len(losses)


@pytest.mark.parametrize(
    ("expected", "settings"),
    [
        (token_mean, {"weighting": "token_mean"}),
        (grpo, {}),
        (dr_grpo, {"weighting": "fixed_length"}),
        (gspo, {"variant": "gspo"}),
        (rloo, {"variant": "rloo"}),
    ],
)
def test_a_step_is_that_of_each_context_alone_under_the_advantage_of_its_conversation(
    expected, settings, conversations
):
    """From a model of transformers, one context at a time, without a batch or a rollout."""
    config = GRPO(
        model="",
        data="",
        output="",
        prompts_per_rollout=TASKS,
        group_size=SIZE,
        max_tokens=6,
        rewards={"right": 1.0},
        old_logprobs="sampled",
        advantage="group",
        scale="group",
        loss_kwargs={"clip_low": CLIP, "clip_high": CLIP},
        **settings,
    )
    for sample in conversations:
        sample.rewards = {"right": random.Random(f"{sample.task} {sample.index}").random()}
    with numbers(torch.float64):
        accelerator = Accelerator(cpu=True)
        policy = make_policy()
        for sample in conversations:  # near the policy, so that some ratios are clipped, some not
            for context in sample.contexts:
                for t, logprob in enumerate(log_probs(policy.model, context).tolist()):
                    context.logprobs[t] = logprob - (t % 3) * 0.3
        reward = torch.tensor([sample.rewards["right"] for sample in conversations])
        task = torch.tensor([sample.task for sample in conversations])
        advantage = group_advantage(reward, task, scale="group")
        differences, of_contexts = [], []
        for number, sample in enumerate(conversations):
            for context in sample.contexts:
                drawn = torch.tensor(context.trained)
                old = torch.tensor(context.logprobs)[drawn]
                differences.append(log_probs(policy.model, context)[drawn] - old)
                of_contexts.append(advantage[number])
        parameters = list(policy.parameters())
        gradients = torch.autograd.grad(expected(differences, of_contexts), parameters)
        wanted = torch.cat([gradient.flatten() for gradient in gradients])
        given = one_step_of(config, policy, None, conversations, accelerator, step=0)
    assert wanted.abs().max() > 1e-3
    torch.testing.assert_close(given["gradient"], wanted, rtol=1e-10, atol=1e-10)


def log_probs(model, context):
    """[tokens of a context], each given all before it."""
    ids = torch.tensor([[*context.prompt, *context.tokens]])
    logits = model(ids, use_cache=False).logits[0, len(context.prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, ids[0, len(context.prompt) :, None])[:, 0]


def test_each_context_is_an_episode_that_ends_with_the_conversations_reward(conversations):
    """Generalized advantages written out, of each context alone."""
    gamma, lam, beta = 0.9, 0.8, 0.1
    rollout = rollout_of(conversations)
    draw = torch.Generator().manual_seed(0)
    for name in ("old_value", "old_logp", "ref_logp"):
        column = torch.randn(len(rollout.context), generator=draw, dtype=torch.float64)
        rollout[name] = column
    advantage, target = [], []
    for number, completion in enumerate(rollout.completion_of.tolist()):
        mine = rollout.context == number
        value = rollout["old_value"][mine].tolist()
        reward = (-beta * (rollout["old_logp"] - rollout["ref_logp"])[mine]).tolist()
        reward[-1] += conversations[completion].rewards["right"]
        carried, backward = 0.0, []
        for t in reversed(range(len(value))):
            following = value[t + 1] if t + 1 < len(value) else 0.0
            carried = reward[t] + gamma * following - value[t] + gamma * lam * carried
            backward.append(carried)
        advantage += reversed(backward)
        target += [a + v for a, v in zip(reversed(backward), value, strict=True)]
    config = PPO(model="", data="", output="", gamma=gamma, lam=lam, beta=beta, kl="k1")
    columns = ppo_advantages(rollout, config=config)
    torch.testing.assert_close(columns["target"], torch.tensor(target).double())
    torch.testing.assert_close(
        columns["advantage"], whiten(torch.tensor(advantage, dtype=torch.float64))
    )


def test_a_penalized_return_is_that_of_its_context(conversations):
    """REINFORCE++: from each token on, to the end of the context."""
    rollout = rollout_of(conversations)
    draw = torch.Generator().manual_seed(0)
    for name in ("old_logp", "ref_logp"):
        column = torch.randn(len(rollout.context), generator=draw, dtype=torch.float64)
        rollout[name] = column
    returns = []
    for number, completion in enumerate(rollout.completion_of.tolist()):
        mine = rollout.context == number
        kl = (rollout["old_logp"] - rollout["ref_logp"])[mine]
        reward = conversations[completion].rewards["right"]
        returns += [reward - 0.2 * float(kl[t:].sum()) for t in range(len(kl))]
    config = GRPO(
        model="",
        data="",
        output="",
        advantage="reinforce_plus_plus",
        kl_as="reward",
        kl="k1",
        beta=0.2,
    )
    given = advantages(rollout, config=config)["advantage"]
    torch.testing.assert_close(given, whiten(torch.tensor(returns, dtype=torch.float64)))


@pytest.fixture
def open_feed():
    """A feed of these samples, whose policy takes no step."""
    opened = []

    def open_feed(samples, **options):
        config = GRPO(
            model="",
            data="",
            output="",
            prompts_per_rollout=TASKS,
            group_size=SIZE,
            micro_tokens=None,
            **options.pop("settings", {}),
        )
        data = {sample.task: sample.prompt for sample in samples}
        run = RunContext(config, Accelerator(cpu=True), None, make_policy(), data)
        context = RLContext(run, REWARDS, replaying(samples, config), order=lambda task: -task)
        opened.append(RolloutFeed(context, **options))
        return opened[-1]

    yield open_feed
    for feed in opened:
        feed.close()


def test_metrics_count_a_conversation_once(open_feed, conversations):
    feed = open_feed(conversations)
    feed(0)
    lengths = [sample.length for sample in conversations]
    assert feed.metrics["completions/mean_length"] == sum(lengths) / len(lengths)
    assert feed.metrics["completions/max_length"] == max(lengths)
    assert feed.metrics["reward"] == sum(s.rewards["right"] for s in conversations) / 6
    assert feed.metrics["contexts/mean"] == 2


def test_a_feed_names_the_rows_of_its_micro_batches(open_feed, conversations):
    feed = open_feed(conversations, settings={"minibatches": 2})
    batches = [feed(step) for step in range(2)]
    plans = [feed.plan(step) for step in range(2)]
    for step, (batch,) in enumerate(batches):
        assert len(plans[step][0]) == len(batch.examples)
    assert {row for (rows,) in plans for row in rows} == {0, -1, -2}


def test_groups_that_vary_are_groups_of_conversations(open_feed, conversations):
    """Contexts of one conversation do not make a group that varies, nor are two of them a group."""
    conversations[2].rewards["right"] = conversations[3].rewards["right"]
    assert len(conversations[3].contexts) == 3
    samples = [
        *conversations,
        *(replace(sample, task=sample.task + TASKS) for sample in conversations),
    ]
    feed = open_feed(samples, dynamic_sampling=True)
    feed(0)
    assert {sample.task for sample in feed.rollout.samples} == {0, 2, 3}
    assert feed.metrics["groups_passed_over"] == 1


def test_a_rollout_is_resumed_in_its_middle(open_feed, conversations):
    several = {
        "settings": {"epochs_per_rollout": 2, "minibatches": 2},
        "advantages": lambda rollout: {"advantage": rollout["age"] + 3},
    }
    first = open_feed(conversations, **several)
    first(0)
    second = open_feed(conversations, **several)
    second.load_state_dict(first.state_dict())
    second.scheduler.take = lambda *_, **__: pytest.fail("it sampled again")
    for step in (1, 2, 3):
        for one, other in zip(first(step), second(step), strict=True):
            assert one.examples == other.examples
            assert all(torch.equal(one.columns[name], other.columns[name]) for name in one.columns)
    assert second.rollout.samples == conversations


@pytest.fixture(scope="module")
def common(tmp_path_factory):
    fields = prepare(tmp_path_factory.mktemp("start"))
    return {**fields, "rewards": {}, "limits": Limits(turns=2), "environment": "online:Elsewhere"}


def test_turns_are_those_of_the_first_context(conversations):
    masked, sample = conversations[1], conversations[3]
    sample.tokens, sample.trained = [5, 6, 7, 8], [True, False, True, True]
    sample.logprobs = [-1.0] * 4
    for one in (masked, sample):
        one.info = {"turn_rewards": [0.5, 0.25], "turn_ends": [1, 4]}
    masked.finish = "aborted"
    for one in conversations:
        one.rewards = {"environment": 1.0}
    rollout = RolloutBuffer(conversations, dtype=torch.float64)
    rollout.score([RewardFunction("environment", None)])
    first = next(i for i, of in enumerate(rollout.completion_of.tolist()) if of == 3)
    wanted = torch.zeros(len(rollout.context), dtype=torch.float64)
    wanted[int((rollout.context == first).nonzero()[0])] = 0.5
    assert torch.equal(turn_rewards(rollout), wanted)
    rollout["old_value"] = torch.zeros_like(wanted)
    rollout["old_logp"] = torch.zeros_like(wanted)
    config = PPO(model="", data="", output="", gamma=1.0, lam=1.0, beta=0.0)
    target = ppo_advantages(rollout, config=config)["target"]
    assert target[rollout.context == first].tolist() == [1.0, 0.5, 0.5]
    assert set(target[rollout.context != first].tolist()) == {1.0}


@pytest.mark.parametrize(
    ("open_recipe", "settings"),
    [(open_grpo, GRPO), (open_ppo, partial(PPO, epochs_per_rollout=1, minibatches=1))],
)
def test_an_environment_that_begins_each_conversation_elsewhere_trains(
    open_recipe, settings, common, tmp_path
):
    open_recipe(settings(**common, output=str(tmp_path / "run"))).train()
    groups = {}
    for sample in stored(tmp_path / "run"):
        groups.setdefault(sample["task"], []).append(tuple(sample["prompt"]))
    assert len(groups) == 8
    assert all(len(set(prompts)) == 4 for prompts in groups.values())
    for line in lines(tmp_path / "run"):
        assert line["frac_unscored"] == line["completions/masked_ratio"] == 0
        assert line["grad_norm"] > 0 and "contexts/mean" not in line


def test_pairs_of_conversations_that_begin_elsewhere_are_refused(common, tmp_path):
    with pytest.raises(ValueError, match=r"online_dpo: .* begin with different prompts"):
        open_online_dpo(OnlineDPO(**common, output=str(tmp_path / "run"))).train()
    assert Path(tmp_path / "run").is_dir()
