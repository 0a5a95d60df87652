"""Environments that fail, from the command line to what a run leaves behind."""

import json
import math

import flaky
import pytest
from burnish.loops.cli import main
from burnish.loops.rollouts.replay import read_samples
from forked import run_forked
from online import Killed, dying_in_step, lines, prepare, stored


@pytest.fixture(scope="module")
def common(tmp_path_factory):
    fields = prepare(tmp_path_factory.mktemp("start"))
    return {**fields, "rewards": {}, "limits.turns": 3, "steps": 2}


@pytest.fixture
def burnish(common, tmp_path, monkeypatch):
    """A recipe of the command line: its exit status, from settings that differ from the common
    ones.
    """
    monkeypatch.setattr("burnish.loops.environments.multi_turn._PAUSE", 0.0)

    def burnish(recipe="grpo", **settings):
        fields = {**common, "output": tmp_path / "run", **settings}
        flags = (
            f"--{k}={json.dumps(v) if isinstance(v, dict | bool) else v}" for k, v in fields.items()
        )
        return main([recipe, *flags])

    return burnish


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Steps", ("error in step", "KeyError: 'board'")),
        ("Resets", ("error in reset", "ConnectionError: no sandbox")),
    ],
)
def test_an_environment_that_fails_in_all_of_the_first_rollout_ends_the_run(
    name, says, burnish, tmp_path, capsys
):
    assert burnish(environment=f"flaky:{name}") == 1
    said = capsys.readouterr().err
    assert "environment: it failed in all 16 conversations of the first rollout" in said
    assert all(part in said for part in says) and "flaky.py" in said
    assert lines(tmp_path / "run") == []


def test_an_environment_that_pays_nan_ends_the_run(burnish, capsys):
    assert burnish(environment="flaky:NaN") == 1
    assert (
        "reward environment: nan in every one of its calls, for all 16 completions"
        in capsys.readouterr().err
    )


def test_an_environment_that_never_pays_ends_the_run(burnish, capsys):
    assert burnish(environment="judges:NeverPays") == 1
    assert "reward environment: returned None in every one of its calls" in capsys.readouterr().err


@pytest.mark.parametrize("recipe", ["grpo", "rloo", "ppo", "online_dpo"])
def test_conversations_that_never_begin_are_masked_and_counted(recipe, burnish, tmp_path):
    opened, closed = flaky.Game.opened, flaky.Game.closed
    settings = {"environment": "flaky:SomeResets", "limits.attempts": 1, "limits.concurrency": 1}
    assert burnish(recipe, **settings) == 0
    for line in lines(tmp_path / "run"):
        assert line["turns/aborted"] == line["rewards/environment/unscored/aborted"] == 6
        assert line["completions/masked_ratio"] == line["frac_unscored"] == 6 / 16
        assert math.isfinite(line["loss"]) and line["grad_norm"] > 0
    samples = stored(tmp_path / "run")
    never = [sample for sample in samples if not sample["tokens"]]
    assert len(never) == 6 * len(samples) / 16 and {sample["finish"] for sample in never} == {
        "aborted"
    }
    assert len(list(read_samples(tmp_path / "run/samples.jsonl"))) == len(samples) >= 16
    assert flaky.Game.opened - opened == flaky.Game.closed - closed > len(samples)


# the dead leave files open
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_rollout_in_which_some_never_began_is_resumed(burnish, tmp_path):
    """In the second step on it, with what was measured in the first."""
    settings = {
        "environment": "flaky:SomeResets",
        "limits.attempts": 1,
        "epochs_per_rollout": 2,
        "old_logprobs": "recomputed",
        "save_every": 1,
    }
    with pytest.raises(Killed), dying_in_step(2):
        burnish(**settings)
    assert burnish(**settings, resume=True) == 0
    assert [line["turns/aborted"] for line in lines(tmp_path / "run")] == [6, 6]


@pytest.mark.parametrize("staleness", [0, 1])
def test_with_more_attempts_all_of_them_begin(staleness, burnish, tmp_path):
    assert (
        burnish(environment="flaky:SomeResets", max_staleness=staleness, **{"limits.attempts": 9})
        == 0
    )
    assert [line["turns/aborted"] for line in lines(tmp_path / "run")] == [0, 0]


def test_a_conversation_that_runs_out_of_turns_has_the_reward_of_its_end(burnish, tmp_path):
    assert burnish(environment="flaky:Verdict", dtype="bfloat16") == 0
    for line in lines(tmp_path / "run"):
        assert (
            line["rewards/environment/unscored"] == 0 and line["completions/clipped_ratio"] == 1.0
        )
        assert 0 < line["reward"] < 3 and line["grad_norm"] > 0


def test_it_is_so_on_two_ranks(common, tmp_path):
    fields = {name: value for name, value in common.items() if "." not in name}
    fields |= {"environment": "flaky:SomeResets", "output": str(tmp_path / "run")}
    fields["limits"] = {"turns": 2, "attempts": 1, "concurrency": 1}
    outcomes = run_forked(2, "online", fields)
    assert [status for status, _ in outcomes] == [0, 0], outcomes[0][1][-3000:]
    assert [line["completions/masked_ratio"] for line in lines(tmp_path / "run")] == [6 / 16] * 2
