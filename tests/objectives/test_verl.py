"""The same numbers as verl 0.9: its own policy losses and advantages, on padded batches.

pip install --no-deps verl==0.9.1 omegaconf antlr4-python3-runtime==4.9.3 tensordict hydra-core
codetiming ray pip install --no-deps msgpack pyvers cloudpickle orjson jsonschema
jsonschema-specifications referencing rpds-py
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from burnish import objectives as ob
from torch import Tensor

core = pytest.importorskip("verl.trainer.ppo.core_algos", reason="verl is not installed")
pytestmark = pytest.mark.slow

LENGTHS = torch.tensor([5, 1, 3, 4, 2, 5, 6, 2])
LONGEST = 6
MASK = torch.arange(LONGEST) < LENGTHS[:, None]
SEQUENCE = torch.arange(8)[:, None].expand(-1, LONGEST)[MASK]
GROUP = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
REWARD = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.25, 0.0, 2.0, 0.5], dtype=torch.float64)


def draw(seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(
        8, LONGEST, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


OLD = -0.2 - draw(0).abs()
LOGP = (OLD + draw(1, 0.8)).clamp(max=-1e-3)
ADVANTAGE = draw(2)


class Config(SimpleNamespace):
    """What verl's losses read of an actor's configuration."""

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


def theirs(name: str, logp: Tensor, **settings: Any) -> Tensor:
    of_loss = {
        key: settings.pop(key)
        for key in list(settings)
        if key.startswith(("clip_cov", "kl_cov", "ppo_kl", "dro"))
    }
    clips = {
        "clip_ratio": 0.2,
        "clip_ratio_low": None,
        "clip_ratio_high": None,
        "clip_ratio_c": 20.0,
    }
    config = Config(**(clips | settings), policy_loss=Config(**of_loss), global_batch_info={})
    loss = core.get_policy_loss_fn(name)
    return loss(OLD, logp, ADVANTAGE, MASK.double(), loss_agg_mode="token-mean", config=config)[0]


def assert_same(
    mine: Callable[[Tensor], Tensor], peer: Callable[[Tensor], Tensor], rtol: float = 1e-9
) -> None:
    """Equal gradients by the log-probability of every token: verl's losses may differ from ours by
    a constant.
    """
    logp = LOGP.clone().requires_grad_()
    gradients = [torch.autograd.grad(loss(logp), logp)[0] for loss in (mine, peer)]
    torch.testing.assert_close(*gradients, rtol=rtol, atol=1e-12)
    assert gradients[0][MASK].any() and not gradients[0][~MASK].any()


def flat(padded: Tensor) -> Tensor:
    return padded[MASK]


def test_binary_divergences() -> None:
    clips = {"clip_low": 0.05, "clip_high": 0.1}
    for name, objective in (("dppo_tv", ob.dppo), ("dppo_kl", ob.dppo_kl)):
        assert_same(
            lambda x, objective=objective: objective(flat(x), flat(OLD), flat(ADVANTAGE), **clips)[
                0
            ].mean(),
            lambda x, name=name: theirs(name, x, clip_ratio_low=0.05, clip_ratio_high=0.1),
        )


def test_gpg_and_dro_are_policy_gradient_without_and_with_a_quadratic_penalty() -> None:
    assert_same(
        lambda x: ob.reinforce(flat(x), flat(ADVANTAGE))[0].mean(), lambda x: theirs("gpg", x)
    )

    def mine(logp: Tensor) -> Tensor:
        penalty, _ = ob.kl_estimate(flat(logp), flat(OLD), kind="k2")
        return (ob.reinforce(flat(logp), flat(ADVANTAGE))[0] + 0.3 * penalty).mean()

    assert_same(mine, lambda x: theirs("dro", x, dro_beta=0.3))


def test_kl_cov() -> None:
    def mine(logp: Tensor) -> Tensor:
        covariance = ob.token_covariance(flat(logp), flat(ADVANTAGE))
        penalized = ob.kl_cov_mask(covariance, share=0.2)
        return ob.kl_cov(flat(logp), flat(OLD), flat(ADVANTAGE), penalized, beta=0.7)[0].mean()

    assert_same(mine, lambda x: theirs("kl_cov", x, kl_cov_ratio=0.2, ppo_kl_coef=0.7))


def test_clip_cov_where_all_eligible_tokens_are_dropped() -> None:
    def mine(logp: Tensor) -> Tensor:
        loss, stats = ob.clipped_surrogate(flat(logp), flat(OLD), flat(ADVANTAGE))
        covariance = ob.token_covariance(flat(logp), flat(ADVANTAGE))
        free = covariance.masked_fill(stats["clip_ratio/region"] > 0, -torch.inf)
        mask = ob.clip_cov_mask(
            free, torch.rand(len(free), dtype=torch.float64), share=1.0, low=0.1, high=0.5
        )
        assert 0 < (mask == 0).sum() < len(mask)
        return (mask * loss).mean()

    assert_same(
        mine, lambda x: theirs("clip_cov", x, clip_cov_ratio=1.0, clip_cov_lb=0.1, clip_cov_ub=0.5)
    )


def rewards() -> Tensor:
    """On the last token of each row."""
    padded = torch.zeros(8, LONGEST, dtype=torch.float64)
    padded[torch.arange(8), LENGTHS - 1] = REWARD
    return padded


def estimate(name: str, **settings: Any) -> Tensor:
    """verl's advantages of the tokens that there are."""
    estimator = core.get_adv_estimator_fn(name)
    advantage, _ = estimator(
        rewards(), response_mask=MASK.double(), index=GROUP.numpy().astype(object), **settings
    )
    return flat(advantage)


def test_the_lead_of_the_best() -> None:
    advantage = ob.max_at_k_advantage(REWARD, GROUP, k=4)
    peer = estimate("grpo_passk", config={"norm_adv_by_std_in_grpo": False})
    torch.testing.assert_close(advantage[SEQUENCE], peer)


def test_remax_and_gpg() -> None:
    greedy = torch.linspace(-1, 1, 8, dtype=torch.float64)
    torch.testing.assert_close(
        ob.remax_advantage(REWARD, greedy)[SEQUENCE], estimate("remax", reward_baselines=greedy)
    )
    # verl divides by completions of a reward other than 0, which here are 5 of 8, and not by those
    # that teach.
    ours = ob.gpg_advantage(REWARD, GROUP)[SEQUENCE]
    torch.testing.assert_close(8 / 5 * ours, estimate("gpg"))


@pytest.mark.parametrize("name", ["optimal_token_baseline", "tir_optimal_token_baseline"])
def test_the_optimal_token_baseline(name: str) -> None:
    pi = OLD.exp()
    squares = pi.square() + 0.3 * (1 - pi).square()
    ours = ob.optimal_token_advantage(
        flat(rewards()), flat(OLD), flat(squares.log()), SEQUENCE, GROUP
    )
    peer = estimate(name, old_log_probs=OLD, sum_pi_squared=squares)
    torch.testing.assert_close(ours, peer, rtol=1e-6, atol=1e-7)  # verl adds 1e-8 to the divisor
    assert np.ptp(ours.numpy()) > 0
