"""The same samples, rewards and weights: the policy gradient of the recipe is that of TRL 1.16's
GRPOTrainer.

TRL's own ``_compute_loss`` runs on padded rows of the model; the recipe's way is its whole one,
from answers on.
"""

import random
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from burnish.loops.recipes.settings import GRPO, RLOO
from burnish.loops.rollouts.sample import Sample, VersionSpan
from burnish.loops.runs.reference import frozen_copy
from law import alike, assert_as_near, make_policy, numbers, one_step_of
from torch.nn.utils.rnn import pad_sequence

trl = pytest.importorskip("trl", reason="the peer is not installed")

GROUPS, ANSWERS, LIMIT, TEMPERATURE = 3, 4, 8, 0.7
LOW, HIGH = 0.6, 1.5
COMMON = {
    "model": "",
    "data": "",
    "output": "",
    "rewards": {"right": 1.0, "brief": 0.5},
    "steps": 1,
}
COMMON |= {
    "prompts_per_rollout": GROUPS,
    "group_size": ANSWERS,
    "max_tokens": LIMIT,
    "temperature": TEMPERATURE,
}
COMMON |= {"loss_kwargs": {"clip_low": LOW, "clip_high": HIGH}}


@pytest.fixture(autouse=True)
def in_double_precision():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def samples():
    draw, found = random.Random(7), []
    for task in range(GROUPS):
        prompt = [draw.randrange(3, 60) for _ in range(draw.randint(2, 9))]
        for index in range(ANSWERS):
            length = draw.randint(1, LIMIT)
            found.append(
                Sample(
                    task,
                    index,
                    prompt,
                    [draw.randrange(3, 60) for _ in range(length)],
                    [True] * length,
                    [-draw.uniform(3, 5) for _ in range(length)],
                    [VersionSpan(0, 0, length)],
                    "stop",
                    rewards={"right": float(draw.random() < 0.5), "brief": draw.random()},
                )
            )
    return found


def padded(model, found):
    """[answers, LIMIT] log-probs of their tokens, each answer in a row of its own; 0 in the
    padding.
    """
    rows = []
    for sample in found:
        logits = model(torch.tensor([sample.prompt + sample.tokens])).logits[
            0, len(sample.prompt) - 1 : -1
        ]
        logp = (logits / TEMPERATURE).log_softmax(-1)
        rows.append(logp.gather(1, torch.tensor(sample.tokens)[:, None])[:, 0])
    return pad_sequence(rows, batch_first=True)


def theirs(trainer, found, advantage, policy, reference, old=None, args=None, **settings):
    """The gradient of the trainer's loss by all parameters; ``old`` [answers, LIMIT] where it is
    not the sampler's.
    """
    lengths = torch.tensor([len(sample.tokens) for sample in found])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    if old is None:
        old = pad_sequence([torch.tensor(sample.logprobs) for sample in found], batch_first=True)
    ids = torch.zeros(mask.shape, dtype=torch.int64)
    logp = padded(policy.model, found)
    alone = SimpleNamespace(
        num_processes=1,
        gather=lambda x: x,
        gather_for_metrics=lambda x: x,
        pad_across_processes=lambda x, **_: x,
        reduce=lambda x, **_: x,
    )
    options = {
        "delta": None,
        "use_bias_correction_kl": False,
        "steps_per_generation": 1,
        **(args or {}),
    }
    fake = SimpleNamespace(
        **{"importance_sampling_level": "token", "beta": 0.0, **settings},
        epsilon_low=LOW,
        epsilon_high=HIGH,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        args=SimpleNamespace(**options),
        accelerator=alone,
        aux_loss_enabled=False,
        current_gradient_accumulation_steps=1,
        max_completion_length=LIMIT,
        model=SimpleNamespace(training=True),
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *_, **__: (logp, torch.zeros_like(logp), None),
    )
    for name in ("get_high_entropy_mask", "get_off_policy_mask", "get_gamma_weights"):
        if function := vars(trainer).get(name):
            setattr(fake, name, function.__get__(fake))
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1] + 1,
        "completion_ids": ids,
        "completion_mask": mask.long(),
        "advantages": advantage,
        "old_per_token_logps": old,
        "old_logps": (old * mask).sum(1),
        "ref_per_token_logps": padded(reference.model, found).detach(),
        "num_items_in_batch": lengths.sum(),
    }
    loss = trainer._compute_loss(fake, None, inputs)
    return loss.detach(), torch.cat(
        [g.flatten() for g in torch.autograd.grad(loss, list(policy.parameters()))]
    )


def advantages_of(found, *, scaled):
    """(r − mean) / (std + 1e-4) within each group, as TRL computes them."""
    reward = torch.tensor([s.rewards["right"] + 0.5 * s.rewards["brief"] for s in found]).view(
        GROUPS, ANSWERS
    )
    advantage = reward - reward.mean(1, keepdim=True)
    return (advantage / (reward.std(1, keepdim=True) + 1e-4) if scaled else advantage).flatten()


CASES = {
    "grpo": (GRPO(**COMMON), {"loss_type": "grpo"}, True),
    "grpo with KL": (GRPO(**COMMON, beta=0.2), {"loss_type": "grpo", "beta": 0.2}, True),
    "grpo with KL weighted by the ratio": (
        GRPO(**COMMON, beta=0.2, use_bias_correction_kl=True),
        {"loss_type": "grpo", "beta": 0.2, "args": {"use_bias_correction_kl": True}},
        True,
    ),
    "dr_grpo": (GRPO(**COMMON, variant="dr_grpo"), {"loss_type": "dr_grpo"}, False),
    "dapo": (GRPO(**COMMON, variant="dapo", dynamic_sampling=False), {"loss_type": "dapo"}, True),
    "gspo": (
        GRPO(**COMMON, variant="gspo", old_logprobs="sampled"),
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        True,
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("micro_tokens", [None, 40])
def test_grpo(name, micro_tokens):
    config, settings, scaled = CASES[name]
    found, policy, reference = samples(), make_policy(), make_policy(seed=1)
    expected = theirs(
        trl.GRPOTrainer, found, advantages_of(found, scaled=scaled), policy, reference, **settings
    )
    assert_same(
        ours(replace(config, micro_tokens=micro_tokens), found, policy, reference), expected
    )


@pytest.mark.parametrize("old", ["sampled", None])
def test_rloo(old):
    """TRL's own old log-probs are those of its model at the start, as ours are unless we say
    otherwise.
    """
    assert_same(*rloo_of_both(old))


@pytest.mark.parametrize("recipe", ["grpo with KL", "rloo"])
def test_under_autocast_our_gradient_is_as_near_to_the_exact_one_as_theirs(recipe):
    """To the policy itself, where no clip makes a step of a rounding."""

    def both():
        if recipe == "rloo":
            return rloo_of_both(None)
        config, settings, scaled = CASES[recipe]
        found, policy, reference = samples(), make_policy(), make_policy(seed=1)
        with Accelerator().autocast():
            old, advantage = (
                padded(policy.model, found).detach(),
                advantages_of(found, scaled=scaled),
            )
            expected = theirs(trl.GRPOTrainer, found, advantage, policy, reference, old, **settings)
        return ours(replace(config, old_logprobs="recomputed"), found, policy, reference), expected

    with numbers(torch.float64):
        result, (loss, gradient) = both()
        exact = {"metrics": {"loss": loss.item()}, "gradient": gradient, "weight": result["weight"]}
    with numbers(torch.bfloat16):
        result, (_, peer) = both()
    assert_as_near(result, peer, exact)


def rloo_of_both(old):
    """With the reward's penalty on whole answers: R − β Σ (log π_old − log π_ref), each less the
    mean of the others.
    """
    found, policy, reference = samples(), make_policy(), make_policy(seed=1)
    with Accelerator().autocast():
        logp, ref = (padded(which.model, found).detach() for which in (policy, reference))
        reward = torch.tensor([s.rewards["right"] + 0.5 * s.rewards["brief"] for s in found])
        reward = (reward - 0.1 * (logp - ref).sum(1)).view(GROUPS, ANSWERS)
        advantage = (reward - (reward.sum(1, keepdim=True) - reward) / (ANSWERS - 1)).flatten()
        expected = theirs(
            trl.RLOOTrainer, found, advantage, policy, reference, None if old else logp
        )
    return ours(RLOO(**COMMON, beta=0.1, old_logprobs=old), found, policy, reference), expected


def ours(config, found, policy, reference):
    accelerator = Accelerator(cpu=True)
    frozen = alike(frozen_copy(reference, temperature=TEMPERATURE), accelerator)
    return one_step_of(config, policy, frozen, found, accelerator, step=0)


def assert_same(result, expected):
    loss, gradient = expected
    assert gradient.abs().max() > 1e-3
    assert result["metrics"]["loss"] == pytest.approx(loss.item(), abs=1e-9)
    torch.testing.assert_close(result["gradient"], gradient, rtol=1e-7, atol=1e-9)
