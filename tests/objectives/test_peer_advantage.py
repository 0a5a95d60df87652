"""The same numbers as the peer: advantages, importance weights and masks of TRL 1.16, run from its
own source.

TRL computes most of them in the middle of methods of hundreds of lines that also generate and log.
The statements in question are cut out of the installed source and executed on our tensors.
"""

import inspect
import math
import textwrap
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from burnish.objectives import advantage as adv
from burnish.objectives import correction as co
from burnish.objectives.sequence import sequence_sum
from torch import Tensor

grpo = pytest.importorskip("trl.trainer.grpo_trainer", reason="the peer is not installed")
rloo = pytest.importorskip("trl.trainer.rloo_trainer", reason="the peer is not installed")

# the peer takes n/(n − 1) of a standard deviation in float32
ROUNDING = {"rtol": 1e-7, "atol": 1e-14}
GENERATIONS, PROMPTS, TIMES = 4, 5, 7
COMPLETIONS = GENERATIONS * PROMPTS


def statements(method: Callable[..., Any], first: str, after: str) -> str:
    """The lines of a method from the one that starts with `first` to the next that starts with
    `after`, without it.
    """
    lines = inspect.getsource(method).splitlines()
    begin = next(i for i, line in enumerate(lines) if line.strip().startswith(first))
    end = next(i for i, line in enumerate(lines) if i >= begin and line.strip().startswith(after))
    return textwrap.dedent("\n".join(lines[begin:end]))


def run(source: str, module: Any, **names: Any) -> dict[str, Any]:
    scope = {**vars(module), "num_generations": GENERATIONS, "device": "cpu", **names}
    exec(source, scope)
    return scope


def rewards(functions: int, seed: int = 0) -> Tensor:
    """With gaps: rewards not given, completions not scored at all, and a group of equal rewards."""
    draw = torch.Generator().manual_seed(seed)
    reward = torch.randn(COMPLETIONS, functions, dtype=torch.float64, generator=draw)
    reward[torch.rand(COMPLETIONS, functions, generator=draw) < 0.15] = math.nan
    reward[[2, 13]] = math.nan
    reward[4:8] = 0.25
    return reward


def scattered(function: Callable[[Tensor, Tensor], Tensor], reward: Tensor) -> Tensor:
    """Our function on the completions in another order and with other group names, its result in
    the peer's order.
    """
    order = torch.randperm(COMPLETIONS, generator=torch.Generator().manual_seed(1))
    group = (torch.arange(COMPLETIONS) // GENERATIONS * 17 - 20)[order]
    return function(reward[order], group)[order.argsort()]


def grpo_advantages(reward: Tensor, weight: Tensor, **settings: Any) -> dict[str, Any]:
    block = statements(
        grpo.GRPOTrainer._generate_and_score_completions,
        "unscorable_mask =",
        "# Slice to keep only",
    )
    trainer = SimpleNamespace(reward_weights=weight, reward_funcs=[None] * len(weight), **settings)
    return run(block, grpo, self=trainer, rewards_per_func=reward)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_group_advantages_of_weighted_rewards_equal_grpo_trainer(scale: Any) -> None:
    reward, weight = rewards(3), torch.tensor([1.0, 0.5, -2.0], dtype=torch.float64)
    settings = {"multi_objective_aggregation": "sum_then_normalize", "scale_rewards": scale}
    theirs = grpo_advantages(reward, weight, **settings)
    ours = scattered(
        lambda r, g: adv.group_advantage(adv.weighted_reward(r, weight), g, scale=scale), reward
    )
    torch.testing.assert_close(ours, theirs["advantages"], **ROUNDING)
    torch.testing.assert_close(
        adv.weighted_reward(reward, weight), theirs["rewards"], equal_nan=True
    )


def test_normalized_then_summed_rewards_equal_grpo_trainer() -> None:
    reward, weight = rewards(3), torch.tensor([1.0, 0.5, -2.0], dtype=torch.float64)
    settings = {"multi_objective_aggregation": "normalize_then_sum", "scale_rewards": "group"}
    theirs = grpo_advantages(reward, weight, **settings)["advantages"]
    ours = scattered(lambda r, g: adv.gdpo_advantage(r, g, weight), reward)
    torch.testing.assert_close(ours, theirs, **ROUNDING)


def test_group_stats_equal_what_grpo_trainer_logs() -> None:
    reward, weight = rewards(1), torch.ones(1, dtype=torch.float64)
    settings = {"multi_objective_aggregation": "sum_then_normalize", "scale_rewards": "group"}
    theirs = grpo_advantages(reward, weight, **settings)
    stats = adv.group_stats(reward[:, 0], torch.arange(COMPLETIONS) // GENERATIONS)
    torch.testing.assert_close(stats["frac_reward_zero_std"], theirs["is_std_zero"].double().mean())
    torch.testing.assert_close(stats["reward"], theirs["rewards"].nanmean())
    torch.testing.assert_close(stats["reward_std"], grpo.nanstd(theirs["rewards"]), **ROUNDING)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("beta", [0.0, 0.05])
def test_rloo_advantage_equals_rloo_trainer(normalize: bool, beta: float) -> None:
    reward, weight = rewards(2), torch.tensor([1.0, 0.5], dtype=torch.float64)
    old, ref, mask = padded()
    block = statements(
        rloo.RLOOTrainer._generate_and_score_completions, "unscorable_mask =", "is_std_zero ="
    )
    trainer = SimpleNamespace(
        reward_weights=weight,
        reward_clip_range=None,
        beta=beta,
        normalize_advantages=normalize,
        accelerator=None,
    )
    names = {
        "old_per_token_logps": old,
        "ref_per_token_logps": ref,
        "completion_mask": mask,
        "gather": lambda x: x,
    }
    theirs = run(block, rloo, self=trainer, rewards_per_func=reward, **names)["advantages"]

    penalty = beta * sequence_sum((old - ref)[mask.bool()], ids(mask), COMPLETIONS)
    ours = scattered(adv.rloo_advantage, adv.weighted_reward(reward, weight) - penalty)
    if normalize:  # a completion without a peer has a NaN there, and no part in the mean
        scored = ~reward.isnan().all(1)
        ours = adv.whiten(ours.where(scored, math.nan))
    torch.testing.assert_close(ours, theirs, **ROUNDING)


def padded(seed: int = 3, spread: float = 0.3) -> tuple[Tensor, Tensor, Tensor]:
    """Old and other log-probabilities [completions, times], and the mask of their tokens."""
    draw = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(COMPLETIONS, TIMES, dtype=torch.float64, generator=draw)
    other = old + spread * torch.randn(COMPLETIONS, TIMES, dtype=torch.float64, generator=draw)
    length = torch.randint(1, TIMES + 1, (COMPLETIONS, 1), generator=draw)
    return old, other, (torch.arange(TIMES) < length).to(torch.float64)


def ids(mask: Tensor) -> Tensor:
    return torch.arange(len(mask))[:, None].expand(mask.shape)[mask.bool()]


@pytest.mark.parametrize(("low", "high"), [(None, 1.2), (0.9, 1.2), (0.9, None)])
@pytest.mark.parametrize(
    "mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
)
def test_importance_weights_equal_grpo_trainer(
    mode: str, low: float | None, high: float | None
) -> None:
    old, sampled, mask = padded()
    sampled[0, 0] = sampled[5, 0] = math.nan
    block = statements(
        grpo.GRPOTrainer._generate_and_score_completions,
        "mask = completion_mask if tool_mask",
        "# Compute the per-token log probabilities for the reference model",
    )
    trainer = SimpleNamespace(
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_min=low,
        vllm_importance_sampling_clip_max=high,
    )
    names = {"completion_mask": mask, "tool_mask": None, "old_per_token_logps": old}
    theirs = run(block, grpo, self=trainer, sampling_per_token_logps=sampled, **names)[
        "vllm_importance_sampling_ratio"
    ]

    tokens = mask.bool()
    level, action = mode.split("_")
    if level == "token":
        log_ratio = co.token_log_ratio(old[tokens], sampled[tokens])
    else:
        log_ratio = co.sequence_log_ratio(old[tokens], sampled[tokens], ids(mask))
    if action == "truncate":
        ours = co.truncated_importance(log_ratio, cap=high or math.inf, floor=low or 0.0)
    else:
        ours = co.masked_importance(log_ratio, low=low or 0.0, high=high or math.inf)
    torch.testing.assert_close(ours, theirs.expand_as(mask)[tokens], rtol=1e-13, atol=0)
    assert ours.unique().numel() > 2


@pytest.mark.parametrize("threshold", [0.0, 0.05, 0.2])
def test_off_policy_mask_equals_grpo_trainer(threshold: float) -> None:
    now, sampled, mask = padded()
    sampled[4, 0] = math.nan
    advantage = torch.randn(
        COMPLETIONS, dtype=torch.float64, generator=torch.Generator().manual_seed(5)
    )
    advantage[3] = 0.0
    theirs = grpo.GRPOTrainer.get_off_policy_mask(advantage[:, None], now, sampled, mask, threshold)
    tokens = mask.bool()
    ours = co.off_policy_mask(
        now[tokens], sampled[tokens], advantage, ids(mask), threshold=threshold
    )
    assert torch.equal(ours, theirs.expand_as(mask)[tokens])
    assert ours.unique().tolist() == [0, 1]
