"""kill -9 at any moment of online training, and resume: the same weights; above age 0 each answer
once, and in time.
"""

from pathlib import Path

import pytest
from grids import exhaustive, slow
from killed import assert_each_answer_once, assert_undisturbed, kill_and_resume
from online import prepare, stored


@pytest.fixture
def config(tmp_path):
    """A run whose every kind of state matters: rollouts of several steps, momentum, a schedule, a
    reference.
    """
    return {
        **prepare(tmp_path),
        "output": str(tmp_path / "run"),
        "epochs_per_rollout": 2,
        "minibatches": 2,
        "old_logprobs": "recomputed",
        "beta": 0.1,
        "schedule": "cosine",
        "save_every": 3,
    }


@pytest.mark.parametrize(
    ("recipe", "kills"),
    [("grpo", 0), ("ppo", 0), slow("grpo", 3), exhaustive("grpo", 8), exhaustive("ppo", 4)],
)
def test_a_run_that_samples_by_itself_ends_with_the_same_weights(recipe, kills, config):
    config["steps"] = 12 if not kills else 24 if kills == 3 else 36
    happened, _ = kill_and_resume(recipe, config, "write:7", "write:4", f"random:{kills}")
    assert (happened["random"], happened["write"]) == (kills, 2)
    assert_undisturbed(config)
    assert stored(Path(config["output"])) == stored(Path(config["output"] + "-undisturbed"))


@pytest.mark.parametrize("in_flight", [None, 12])
@pytest.mark.parametrize("kills", [0, slow(3), exhaustive(6)])
def test_a_run_that_samples_while_it_trains_has_each_answer_once(kills, in_flight, config):
    config |= {
        "max_staleness": 2 if in_flight is None else 4,
        "in_flight": in_flight,
        "epochs_per_rollout": 1,
        "minibatches": 1,
        "steps": 12 if not kills else 24 if kills == 3 else 36,
    }
    happened, _ = kill_and_resume("grpo", config, "write:7", f"random:{kills}")
    assert (happened["random"], happened["write"]) == (kills, 1)
    assert assert_each_answer_once(config)[2] > 0  # of so many an age of 2


@pytest.mark.slow
def test_a_run_of_an_agent_ends_with_the_same_weights(config):
    # One by one: which calls are completed together depends on the threads of the agents, and the
    # last bit of a log-prob on what it is completed with.
    config |= {"rewards": {}, "agent": "agents:twice", "steps": 12, "cache_bytes": 1}
    happened, _ = kill_and_resume("grpo", config, "write:7", "random:3")
    assert (happened["random"], happened["write"]) == (3, 1)
    assert_undisturbed(config)
    samples = stored(Path(config["output"]))
    assert samples == stored(Path(config["output"] + "-undisturbed"))
    assert all(sample["info"]["turns"] == 2 for sample in samples)
