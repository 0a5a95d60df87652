"""KTO and its relatives in the loop: what an answer is compared with comes from the whole step."""

import json
from functools import partial

import pytest
import torch
from accelerate import Accelerator
from burnish.data import Batches, Example
from burnish.loops.cli import main
from burnish.loops.models.policy import Policy
from burnish.loops.recipes.kto import RunningMean, kl_of_mismatched, prepare_feedback
from burnish.loops.runs.feed import Feed
from burnish.loops.runs.reference import frozen_copy
from burnish.loops.train.losses import Term, compose, policy_tensors, weightings
from burnish.loops.train.step import train_step
from burnish.objectives import bco, kto
from datasets import Dataset
from tiny import make_examples, make_model, save_model, write_rows

COUNT = 6


def feed_of(examples, desirable, **options):
    columns = {
        field: [getattr(example, field) for example in examples] for field in Example._fields
    }
    data = Dataset.from_dict({**columns, "desirable": desirable})
    lengths = [len(example.prompt) + len(example.completions[0]) for example in examples]
    batches = Batches(lengths, batch_size=COUNT, micro_tokens=30, seed=0, shuffle=False, epochs=1)
    return Feed(data, batches, columns=["desirable"], **options)


@pytest.fixture
def policy():
    return Policy(make_model("llama"))


@pytest.fixture
def reference():
    return frozen_copy(Policy(make_model("llama", seed=1)))


def answer_logp(policy, prompt, completion):
    logprob = policy.plain(torch.tensor([prompt + completion])).logits[0].log_softmax(-1)
    return sum(logprob[len(prompt) + t - 1, token] for t, token in enumerate(completion))


def test_z0_is_the_mean_log_ratio_of_answers_given_to_other_prompts(policy):
    other = Policy(make_model("llama", seed=1))
    examples = [
        Example(e.prompt, e.completions, [[True] * len(e.completions[0])])
        for e in make_examples(COUNT, 1)
    ]
    for swapped in (False, True):
        now, before = (other, policy) if swapped else (policy, other)
        feed = feed_of(examples, [True] * COUNT)
        kl = kl_of_mismatched(feed, 0, now, frozen_copy(before), Accelerator())
        ratios = [
            answer_logp(now, examples[i].prompt, answer)
            - answer_logp(before, examples[i].prompt, answer)
            for i in range(COUNT)
            for answer in examples[(i + COUNT // 2) % COUNT].completions
        ]
        mean = sum(ratios).item() / COUNT
        assert float(kl) == pytest.approx(max(mean, 0.0), rel=1e-6)


@pytest.mark.parametrize("max_length", [24, 100, None])
def test_an_answer_to_another_prompt_ends_where_the_model_does(max_length):
    """A long answer after a long prompt, as TRL truncates it."""
    lengths = [(20, 4), (3, 21), (12, 12), (18, 2), (2, 20), (5, 5)]
    examples = [Example([3] * p, [list(range(4, 4 + c))], [[True] * c]) for p, c in lengths]
    now, before = (Policy(make_model("gpt2", seed=seed, n_positions=24)) for seed in (0, 1))
    for policy, reference in ((now, before), (before, now)):
        feed = feed_of(examples, [True] * COUNT)
        kl = kl_of_mismatched(feed, 0, policy, frozen_copy(reference), Accelerator(), max_length)
        ratios = []
        for i, example in enumerate(examples):
            answer = examples[(i + COUNT // 2) % COUNT].completions[0][: 24 - len(example.prompt)]
            logps = (answer_logp(each, example.prompt, answer) for each in (policy, reference))
            ratios.append(next(logps) - next(logps))
        assert float(kl) == pytest.approx(max(sum(ratios).item() / COUNT, 0.0), rel=1e-6)


@pytest.mark.parametrize("desirable", [True, False])
def test_a_step_of_one_class_trains(policy, reference, desirable):
    terms = {"kto": Term(partial(kto, beta=0.1))}
    accelerator = Accelerator()
    prepare = partial(prepare_feedback, terms, RunningMean(), policy, reference, accelerator, None)
    feed = feed_of(make_examples(COUNT, 1), [desirable] * COUNT, prepare=prepare)
    optimizer = torch.optim.SGD(policy.parameters(), lr=1e-2)
    objective = compose(terms, policy_tensors(reference=reference))
    metrics = train_step(
        accelerator, policy, optimizer, feed(0), objective, weightings(terms), max_grad_norm=1.0
    )
    assert 0 < metrics["kto"] < 1
    assert 0 < metrics["grad_norm"] < 100
    assert metrics["skipped"] == 0


def test_bco_shifts_by_the_mean_reward_of_the_steps_before(policy, reference):
    terms = {"bco": Term(partial(bco, beta=0.1))}
    rewards = RunningMean()
    prepare = partial(prepare_feedback, terms, rewards, policy, reference, Accelerator(), None)
    feed = feed_of(make_examples(COUNT, 1), [True, False] * 3, prepare=prepare)
    assert [float(batch.columns["delta"]) for batch in feed(0)] == [0.0] * len(feed(0))
    for reward in (1.0, 2.0):
        rewards.observe({"rewards": reward})
    assert float(feed(0)[0].columns["delta"]) == 1.5
    restored = RunningMean()
    restored.load_state_dict(rewards.state_dict())
    assert restored.mean == 1.5


ANSWERS = [
    {"prompt": f"{i}+1=", "completion": str(i + 1 + i % 2), "label": i % 2 == 0} for i in range(12)
]


@pytest.fixture
def run(tmp_path, capsys):
    model = save_model(tmp_path / "model")

    def run(*flags, output="run", rows=ANSWERS):
        data = write_rows(tmp_path / "data.jsonl", rows)
        place = ["--model", str(model), "--data", str(data), "--output", str(tmp_path / output)]
        status = main(["kto", *place, "--schedule", "constant", "--learning_rate", "1e-3", *flags])
        said = capsys.readouterr()
        path = tmp_path / output / "metrics.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if status == 0 else []
        return status, said.out + said.err, lines

    return run


def test_a_resumed_bco_run_remembers_its_mean_reward(run):
    flags = ["--loss", "bco", "--batch_size", "4", "--save_every", "1"]
    _, _, unbroken = run(*flags, "--steps", "6", output="unbroken")
    run(*flags, "--steps", "3", output="broken")
    _, _, resumed = run(*flags, "--steps", "6", "--resume", "true", output="broken")
    assert [line["delta"] for line in resumed] == [line["delta"] for line in unbroken]
    assert len({line["delta"] for line in unbroken}) > 3
    assert [line["loss"] for line in resumed] == [line["loss"] for line in unbroken]


def test_both_classes_are_logged_on_their_own(run):
    status, said, lines = run("--steps", "3", "--batch_size", "12")
    assert status == 0, said
    assert "6 desirable, 6 undesirable" in said
    for line in lines:
        mean = (line["rewards/chosen"] + line["rewards/rejected"]) / 2
        assert line["rewards"] == pytest.approx(mean, abs=1e-7)
    assert lines[-1]["rewards/chosen"] > lines[-1]["rewards/rejected"]


def test_no_pass_is_longer_than_max_length(run, monkeypatch):
    """Neither those of completions after prompts of others."""
    longest = []
    read = Policy.arranged
    monkeypatch.setattr(
        Policy,
        "arranged",
        lambda *args, **options: longest.append(args[1]) or read(*args, **options),
    )
    rows = [
        {"prompt": "a" * 9, "completion": "b", "label": True},
        {"prompt": "a", "completion": "b" * 9, "label": True},
    ]
    status, said, _ = run("--steps", "1", "--batch_size", "2", "--max_length", "10", rows=rows)
    assert status == 0, said
    sizes = [
        len(e.prompt) + len(c) for examples in longest for e in examples for c in e.completions
    ]
    assert max(sizes) == 10


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--loss", "dpo"], "loss: 'dpo' is not one of apo_zero_unpaired, bco"),
        (
            ["--loss", "{kto: 1, distillation: 1}"],
            "distillation needs one; give --teacher.model, --teacher.server, or --teacher.logprobs",
        ),
        (["--teacher.model", "x"], "no loss of this mix learns from it"),
    ],
)
def test_what_cannot_work_is_refused_with_the_way_out(run, flags, message):
    status, said, _ = run("--steps", "1", *flags)
    assert status == 1
    assert message in said
