"""What ratios are to, what is clipped where nothing was learned, and how often the reference is
run.
"""

import random
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from burnish.loops.recipes.grpo import VARIANTS, grpo_losses, open_grpo
from burnish.loops.recipes.ppo import open_ppo, ppo_losses
from burnish.loops.recipes.settings import GRPO, PPO, RLOO
from burnish.loops.rl.policy_gradient import SamplerMismatch, ratio_denominator
from burnish.loops.rollouts.replay import ReplaySource, read_samples
from burnish.loops.rollouts.source import SourceError
from burnish.loops.runs.context import RunContext
from online import lines, prepare, stored

NOISE = 0.02  # of a token's log-prob, between two ways to compute it in bfloat16
WARNING = "clipped in the first step on a rollout"
SUMS = sys.modules["burnish.loops.train.step"].Sums  # the package has a function of that name


@pytest.fixture(scope="module")
def common(tmp_path_factory):
    """Nothing is learned, and completions are so long that their rounding adds up."""
    still = {"max_tokens": 256, "learning_rate": 0.0, "steps": 1}
    return {**prepare(tmp_path_factory.mktemp("start")), **still}


@pytest.fixture(scope="module")
def samples(common, tmp_path_factory):
    """Two rollouts."""
    directory = tmp_path_factory.mktemp("sampled")
    open_grpo(GRPO(**{**common, "steps": 2}, output=str(directory))).train()
    return list(read_samples(directory / "samples.jsonl"))


@pytest.fixture
def noisy(samples, monkeypatch):
    """The sampler is off by the noise in every log-prob, and by nothing else."""
    draw = random.Random(0)
    off = [
        replace(s, logprobs=[logp + draw.gauss(0, NOISE) for logp in s.logprobs]) for s in samples
    ]
    monkeypatch.setattr("burnish.loops.rl.sources.open_local", lambda *_, **__: ReplaySource(off))


@pytest.fixture
def clipped(monkeypatch):
    """Of each unit, in parts: whether it is clipped, or its weight, where that fades instead, is 20
    % off.
    """
    found, add = [], SUMS.add
    counted = {"clip_ratio/region": 0.0, "cispo_clip_ratio": 0.0, "vespo/phi_seq": 1.0}

    def watched(self, i, losses):
        for name, (_, stats) in losses.items():
            known = {**counted, "ratio": 1.0} if name == "sapo" else counted
            found.extend(
                (stats[stat] - known[stat]).abs() > 0.2 for stat in known.keys() & stats.keys()
            )
        return add(self, i, losses)

    monkeypatch.setattr(SUMS, "add", watched)
    return found


@pytest.mark.parametrize("recipe", [*VARIANTS, "the recipe rloo"])
def test_rounding_alone_clips_nothing(recipe, common, noisy, clipped, tmp_path, caplog):
    """At learning rate 0 a ratio can show nothing but that sampler and trainer round
    differently.
    """
    config = {**common, "output": str(tmp_path)}
    open_grpo(
        GRPO(**config, variant=recipe, dynamic_sampling=False)
        if recipe in VARIANTS
        else RLOO(**config)
    ).train()
    (line,) = lines(tmp_path)
    assert line["sampling/logp_difference"] == pytest.approx(NOISE * (2 / torch.pi) ** 0.5, rel=0.1)
    units = torch.cat(clipped)
    assert len(units) >= 16
    assert units.double().mean() < 0.01
    assert WARNING not in caplog.text


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"variant": "grpo"}, "sampled"),
        ({"variant": "cispo"}, "sampled"),
        ({"variant": "gspo"}, "recomputed"),
        ({"variant": "gspo_token"}, "recomputed"),
        ({"variant": "vespo"}, "recomputed"),
        ({"variant": "rloo"}, "recomputed"),
        ({"variant": "rloo", "old_logprobs": "sampled"}, "sampled"),
        ({"variant": "grpo", "old_logprobs": "recomputed"}, "recomputed"),
        ({"variant": "grpo", "correction": "tis"}, "recomputed"),
        ({"loss": {"clipped_surrogate": 1, "completion_surrogate": 0.1}}, "recomputed"),
    ],
    ids=str,
)
def test_a_ratio_of_whole_completions_is_to_the_trainers_own_log_probs(config, expected):
    config = GRPO(model="", data="", output="", **config)
    assert ratio_denominator(config, grpo_losses(config)) == expected


def test_ratios_of_ppo_are_to_the_policy_that_begins_the_rollout():
    config = PPO(model="", data="", output="")
    assert ratio_denominator(config, ppo_losses(config)) == "recomputed"


def test_what_is_clipped_before_anything_was_learned_is_warned_of_once(
    common, noisy, tmp_path, caplog
):
    config = {
        **common,
        "steps": 2,
        "output": str(tmp_path),
        "old_logprobs": "sampled",
        "variant": "gspo",
    }
    open_grpo(GRPO(**config)).train()
    assert all(line["clip_ratio/region"] > 0.05 for line in lines(tmp_path))
    (warning,) = [
        record.getMessage() for record in caplog.records if WARNING in record.getMessage()
    ]
    assert "50 % clipped" in warning
    assert "differ from the trainer's by 0.016 per token; set old_logprobs to recomputed" in warning


def test_what_is_clipped_because_something_was_learned_is_no_warning(common, tmp_path, caplog):
    several = {
        "max_tokens": 6,
        "learning_rate": 1e-3,
        "steps": 3,
        "epochs_per_rollout": 3,
        "variant": "gspo",
    }
    open_grpo(GRPO(**{**common, **several}, output=str(tmp_path))).train()
    first, *later = [line["clip_ratio/region"] for line in lines(tmp_path)]
    assert first == 0
    assert max(later) > 0.05
    assert WARNING not in caplog.text


def test_the_bound_of_log_probs_is_for_step_weights_and_a_whole_distribution():
    for rank in (SimpleNamespace(is_main_process=True), SimpleNamespace(is_main_process=False)):
        mismatch = SamplerMismatch(rank, "sampled", bound=0.5)
        mismatch.check_first_step({"sampling/logp_difference": 0.49, "age/max": 0.0})
        mismatch.check_first_step({"sampling/logp_difference": 9.0, "age/max": 1.0})
        mismatch.check_first_step({})  # every completion was masked
        with pytest.raises(
            SourceError,
            match=r"differ from the trainer's by 0\.51 nats .*max_logp_difference is 0\.5",
        ):
            mismatch.check_first_step({"sampling/logp_difference": 0.51, "age/max": 0.0})
    some = {"model": "m", "data": "d", "output": "o"}
    assert GRPO(**some).logp_bound == 1.0
    assert GRPO(**some, correction="tis").logp_bound == 1.0
    for cut in ({"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"repetition_penalty": 1.1}):
        assert GRPO(**some, **cut).logp_bound == float("inf")
    assert GRPO(**some, top_k=5, max_logp_difference=2.0).logp_bound == 2.0


def test_completions_of_older_weights_and_other_ranks_are_no_warning(caplog):
    metrics = {"clip_ratio/region": 0.4, "sampling/logp_difference": 0.1, "age/max": 0.0}
    main, other = SimpleNamespace(is_main_process=True), SimpleNamespace(is_main_process=False)
    SamplerMismatch(main, "sampled").check_first_step({**metrics, "age/max": 1.0})
    SamplerMismatch(main, "sampled").check_first_step({**metrics, "clip_ratio/region": 0.04})
    SamplerMismatch(other, "sampled").check_first_step(metrics)
    assert not caplog.text
    SamplerMismatch(main, "recomputed").check_first_step(metrics)
    assert (
        "40 % clipped" in caplog.text
        and "set epochs_per_rollout and minibatches to 1" in caplog.text
    )


@pytest.fixture
def referred(monkeypatch):
    """How many tokens each call of the reference is about."""
    counts = []

    opened = RunContext.reference

    def watched(*arguments, **options):
        reference, columns = opened(*arguments, **options)

        def counted(batch):
            counts.append(len(batch.target))
            return reference(batch)

        return counted, columns

    monkeypatch.setattr(RunContext, "reference", watched)
    return counts


@pytest.mark.parametrize(
    ("open_recipe", "config"),
    [
        (open_ppo, PPO(model="", data="", output="", epochs_per_rollout=3, minibatches=2)),
        (open_grpo, RLOO(model="", data="", output="")),
        (open_grpo, RLOO(model="", data="", output="", epochs_per_rollout=3, minibatches=2)),
        (open_grpo, GRPO(model="", data="", output="", beta=0.1, minibatches=2)),
        (open_grpo, GRPO(model="", data="", output="", beta=0.1, epochs_per_rollout=3)),
    ],
    ids=["ppo", "rloo", "rloo, several steps", "grpo, one epoch", "grpo, several epochs"],
)
def test_the_reference_says_each_token_of_a_rollout_once(
    open_recipe, config, common, referred, tmp_path
):
    short = {
        **common,
        "max_tokens": 6,
        "learning_rate": 1e-3,
        "steps": config.epochs_per_rollout * config.minibatches,
    }
    open_recipe(replace(config, **short, output=str(tmp_path))).train()
    assert sum(referred) == sum(sum(sample["trained"]) for sample in stored(tmp_path)) > 0
    assert all(line["kl"] >= 0 for line in lines(tmp_path))
    if len(lines(tmp_path)) > 1:
        assert lines(tmp_path)[-1]["kl"] > 1e-9
