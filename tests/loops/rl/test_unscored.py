"""Rewards that give no score, from the command line to what a run leaves behind."""

import json

import pytest
import torch
from burnish.loops.cli import main
from burnish.loops.recipes import grpo
from forked import run_forked
from online import Killed, dying_in_step, lines, prepare, stored

MATH = {"judges:math": {"weight": 1.0, "timeout": 0.3}, "judges:form": 0.2}


@pytest.fixture(scope="module")
def common(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("start"))


@pytest.fixture
def burnish(common, tmp_path):
    """A recipe of the command line: its exit status, from settings that differ from the common
    ones.
    """

    def burnish(recipe="grpo", **settings):
        fields = {**common, "output": tmp_path / "run", "steps": 1, **settings}
        flags = (
            f"--{k}={json.dumps(v) if isinstance(v, dict | bool) else v}" for k, v in fields.items()
        )
        return main([recipe, *flags])

    return burnish


@pytest.fixture
def advantages(monkeypatch):
    """What the recipe has computed: the rollout, and its columns."""
    seen, compute = [], grpo.advantages

    def remember(rollout, **options):
        seen.append((rollout, compute(rollout, **options)))
        return seen[-1][1]

    monkeypatch.setattr(grpo, "advantages", remember)
    return seen


def normalized(values, eps=1e-4):
    """(x − mean) / (std + ε), the standard deviation that of a sample."""
    values = torch.tensor(values, dtype=torch.float64)
    return ((values - values.mean()) / (values.std() + eps)).tolist()


def of_answers(rollout, column):
    """One number for each answer that is trained on: that of its tokens."""
    found = {}
    for i, value in zip(rollout.sequence.tolist(), column.tolist(), strict=True):
        assert found.setdefault(i, value) == value
    return found


def test_a_failed_reward_masks_and_one_that_does_not_apply_is_left_out_of_the_sum(
    burnish, advantages, tmp_path, capsys
):
    """Of four answers to each prompt math times out on the first, and does not apply to the
    second.
    """
    assert burnish(rewards=MATH, show_every=1) == 0
    samples, (line,) = stored(tmp_path / "run"), lines(tmp_path / "run")
    right = [sample["rewards"]["math"] for sample in samples]
    assert right[0::4] == ["timeout"] * 4 and right[1::4] == [None] * 4
    assert all(isinstance(score, float) for i in (2, 3) for score in right[i::4])
    assert [sample["rewards"]["form"] for sample in samples] == [1.0, 0.75, 0.5, 0.5] * 4

    assert (line["rewards/math/unscored"], line["rewards/form/unscored"]) == (8, 0)
    assert (line["rewards/math/unscored/timeout"], line["rewards/math/unscored/none"]) == (4, 4)
    assert line["completions/masked_ratio"] == line["frac_unscored"] == 0.25
    assert line["rewards/form/mean"] == 0.6875  # of all scores that it gave
    assert line["tokens"] == sum(len(sample["tokens"]) for sample in samples if sample["index"])
    totals = [0.15 if score is None else score + 0.1 for score in right if score != "timeout"]
    assert line["reward"] == pytest.approx(sum(totals) / 12)

    ((rollout, columns),) = advantages
    found = of_answers(rollout, columns["advantage"])
    assert sorted(found) == [i for i in range(16) if i % 4]
    expected = [
        value for group in range(4) for value in normalized(totals[3 * group : 3 * group + 3])
    ]
    assert [found[i] for i in sorted(found)] == pytest.approx(expected, abs=1e-9)
    shown = " ".join(capsys.readouterr().out.split())
    assert "math timeout" in shown and "math none" in shown


def test_what_is_unknown_is_in_no_rewards_group_statistics(burnish, advantages):
    """GDPO: the form of an answer that math has failed at is compared with no other."""
    assert burnish(rewards=MATH, reward_aggregation="normalize") == 0
    ((rollout, columns),) = advantages
    found = of_answers(rollout, columns["advantage"])
    assert sorted(found) == [i for i in range(16) if i % 4]
    summed = []
    for group in range(4):
        scores = [rollout.samples[4 * group + i].rewards["math"] for i in (2, 3)]
        form = normalized([0.75, 0.5, 0.5])
        right = normalized(scores) if scores[0] != scores[1] else [0.0, 0.0]
        summed += [0.2 * form[0], *(r + 0.2 * f for r, f in zip(right, form[1:], strict=True))]
    assert [found[i] for i in sorted(found)] == pytest.approx(normalized(summed), abs=1e-9)


def test_a_failed_reward_of_weight_0_is_counted_and_masks_nothing(burnish, tmp_path):
    assert (
        burnish(rewards={"judges:math": {"weight": 0.0, "timeout": 0.3}, "judges:form": 1.0}) == 0
    )
    (line,) = lines(tmp_path / "run")
    assert line["rewards/math/unscored/timeout"] == 4
    assert line["completions/masked_ratio"] == line["frac_unscored"] == 0


def test_dynamic_sampling_does_not_take_what_is_unknown_for_a_difference(burnish, tmp_path, caplog):
    """Of two answers math fails at one, so that their forms, which differ, are not compared."""
    slow = {"judges:math": {"weight": 1.0, "timeout": 0.01}, "judges:form": 1.0}
    assert burnish(rewards=slow, dynamic_sampling=True, group_size=2, max_tokens=1) == 0
    assert "only 0 of 4 groups have completions of different reward" in caplog.text
    (line,) = lines(tmp_path / "run")
    assert line["reward/sampled"] == 0.75 and line["skipped"] == 1


def test_no_pair_is_made_of_an_answer_of_unknown_worth(burnish, tmp_path):
    """Of two answers to each prompt math fails at one, and does not apply to the other, whose form
    is worse.
    """
    assert burnish("online_dpo", rewards=MATH, group_size=2) == 0
    (line,) = lines(tmp_path / "run")
    assert (line["pairs"], line["ties"], line["completions/masked_ratio"]) == (0, 4, 0.5)


@pytest.mark.parametrize("settings", [{}, {"dynamic_sampling": True}, {"max_staleness": 1}])
def test_a_reward_that_raises_in_all_calls_of_the_first_rollout_ends_the_run(
    settings, burnish, tmp_path, capsys
):
    assert burnish(rewards={"online:even": 1.0, "judges:broken": 0.1}, steps=2, **settings) == 1
    said = capsys.readouterr().err
    assert (
        "reward broken: error in every one of its calls, for all 16 completions of the first rollout"
        in said
    )
    assert "in broken" in said and "KeyError: 'solution'" in said
    assert "the row has the columns (" in said
    assert lines(tmp_path / "run") == []


def test_a_reward_without_any_number_in_the_first_rollout_ends_the_run(burnish, tmp_path, capsys):
    assert burnish(rewards={"judges:wordy": 1.0}, steps=2) == 1
    said = capsys.readouterr().err
    assert (
        "reward wordy: not a number in every one of its calls, for all 16 completions" in said
        and "'good'" in said
    )
    assert lines(tmp_path / "run") == []


@pytest.mark.parametrize(
    ("function", "kinds", "first"),
    [
        ("not_numbers", "not a number or nan", "'good'"),
        ("too_few", "wrong length", "returned 1 for "),
    ],
)
def test_one_that_fails_in_other_ways_in_all_calls_ends_the_run_too(
    function, kinds, first, burnish, tmp_path, capsys
):
    assert burnish(rewards={"online:even": 1.0, f"judges:{function}": 0.1}, steps=2) == 1
    said = capsys.readouterr().err
    assert (
        f"reward {function}: {kinds} in every one of its calls, for all 16 completions" in said
        and first in said
    )
    assert lines(tmp_path / "run") == []


@pytest.mark.parametrize("others", [{}, {"online:even": 1.0}])
def test_one_without_a_return_statement_ends_the_run(others, burnish, tmp_path, capsys):
    assert burnish(rewards={**others, "judges:forgets": 1.0}, steps=2) == 1
    said = capsys.readouterr().err
    assert (
        "reward forgets: returned None in every one of its calls, for all 16 completions of the first"
        in said
    )
    assert "return a number, or leave it out" in said and lines(tmp_path / "run") == []


def test_one_that_applies_to_later_prompts_goes_on(burnish, tmp_path):
    assert burnish(rewards={"online:even": 1.0, "judges:of_other_prompts": 1.0}, steps=2) == 0
    assert [line["rewards/of_other_prompts/unscored"] for line in lines(tmp_path / "run")] == [
        16,
        0,
    ]


def test_a_reward_that_changes_the_ids_that_it_is_given_trains_the_same_weights(burnish, tmp_path):
    for name in ("online:even", "judges:spoils_ids"):
        assert burnish(rewards={name: 1.0}, steps=2, output=tmp_path / name) == 0
    weights = [
        (tmp_path / name / "model/model.safetensors").read_bytes()
        for name in ("online:even", "judges:spoils_ids")
    ]
    assert weights[0] == weights[1]


@pytest.mark.parametrize(
    ("function", "failed"), [("works_once", [15, 16]), ("broken_later", [0, 16])]
)
def test_one_that_works_for_an_answer_of_the_first_rollout_goes_on(
    function, failed, burnish, tmp_path
):
    assert burnish(rewards={f"judges:{function}": 1.0}, steps=2) == 0
    logged = lines(tmp_path / "run")
    assert [line.get(f"rewards/{function}/unscored/error", 0) for line in logged] == failed
    assert [line["completions/masked_ratio"] for line in logged] == [count / 16 for count in failed]


def test_every_rank_is_told_why_the_run_ends(common, tmp_path):
    """Two processes that nobody else ends."""
    fields = {**common, "rewards": {"judges:broken": 1.0}, "output": str(tmp_path / "run")}
    statuses, said = zip(*run_forked(2, "online", fields), strict=True)
    assert statuses == (1, 1)
    for text in said:
        last = text[text.rindex("Error: reward broken: error in every one of its calls") :]
        assert "KeyError: 'solution'" in last
    assert "MainProcessError: rank 1: the main process failed: ValueError: reward broken" in said[1]


def test_the_counts_of_a_rollout_are_its_own_while_others_are_drawn_and_judged(burnish, tmp_path):
    rewards = {"judges:broken_in_odd_rollouts": 1.0, "judges:form": 0.5}
    assert burnish(rewards=rewards, steps=6, max_staleness=1) == 0
    counts = [
        line.get("rewards/broken_in_odd_rollouts/unscored/error", 0)
        for line in lines(tmp_path / "run")
    ]
    assert counts == [0, 16] * 3


LEFT = {
    "judges:logs_numbers": lambda n, mean: {
        "float64": float(n), "float32": float(n), "int64": n, "tensor": n, "array": [n, n + 1], "mean_length": mean,
    },
    "judges:leaves_a_float64": lambda n, mean: {"entropy": 0.5},
    "judges:leaves_numbers": lambda n, mean: {"seen": {"by": [3, [1.0, 1.0]]}},
}  # fmt: skip


# the dead leave files open
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", LEFT)
def test_numbers_of_numpy_and_torch_in_info_are_stored_and_resumed_from(name, burnish, tmp_path):
    """The process dies in the second step of a rollout of two, so the next one reads the rollout's
    samples.
    """
    settings = {
        "rewards": {name: 1.0},
        "epochs_per_rollout": 2,
        "old_logprobs": "recomputed",
        "save_every": 1,
        "steps": 4,
    }
    with pytest.raises(Killed), dying_in_step(2):
        burnish(**settings)
    assert burnish(**settings, resume=True) == 0
    samples = stored(tmp_path / "run")
    assert len(samples) == 2 * 16 and len(lines(tmp_path / "run")) == 4
    for i in range(0, 32, 4):  # rewards are called for each group
        lengths = [len(sample["tokens"]) for sample in samples[i : i + 4]]
        expected = [LEFT[name](n, sum(lengths) / 4) for n in lengths]
        assert [sample["info"] for sample in samples[i : i + 4]] == expected


def test_what_cannot_be_stored_is_refused_and_named(burnish, capsys):
    assert burnish(rewards={"judges:leaves_an_object": 1.0, "judges:form": 0.5}) == 1
    said = capsys.readouterr().err
    assert (
        "scored by leaves_an_object, form: sample.info['tree']: wanted numbers, text, lists or mappings"
        in said
    )
    assert "got object" in said
