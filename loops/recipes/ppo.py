"""Proximal policy optimization: with a value function, one completion of a prompt is enough.

    r_t          −β log π_old/π_ref of token t, and at the last token the reward of the completion;
                 what an environment pays for a turn, at the last token of the turn
    V            a linear head, zero at first, on the policy's own backbone, or on a model of its own
    A_t, R_t     generalized advantage estimates and returns, from the values of the policy that
                 begins the rollout
    loss         clipped surrogate of A, whitened over all tokens of the rollout,
                 + c · clipped squared error of V to R

Sharing the backbone needs no second model, and c limits the values' effect on it; `value_model` is
the paper's critic.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedTokenizerBase

from ...objectives import (
    gae,
    kl_estimate,
    kl_penalized_reward,
    sequence_sum,
    value_loss,
    whiten,
)
from ..config import Parallel
from ..models.images import ImageInputs
from ..models.io import load_classifier, load_images, load_tokenizer, save_model
from ..models.policy import Policy
from ..models.scorer import Scorer
from ..models.sharding import whole
from ..registry import as_setting_error
from ..rl.buffer import RolloutBuffer
from ..rl.context import RLContext, open_rl
from ..rl.policy_gradient import policy_losses, refuse_completion_losses, train_policy
from ..runs.context import RunContext
from ..runs.reference import check_same_processor
from ..runs.training import Training
from ..train.losses import Term, tensors_needed
from .settings import PPO

log = logging.getLogger(__name__)

ENVIRONMENT = "environment"  # the reward by this name is the sum of those of turns


def open_ppo(config: PPO, context: RLContext | None = None) -> Training:
    """Open a run that is ready to train, in ``context`` if it is already open.

    The critic or the value head is saved beside the model, for `value_model` or `value_head` of a
    later run.
    """
    losses = ppo_losses(config)
    context = context or open_rl(config, partial(with_values, config=config))
    return train_policy(
        context,
        losses,
        advantages=partial(advantages, config=config),
        kl_in_reward=True,
        save=partial(save_values_of_run, context.run),
        report=partial(objective_metrics, config=config),
    )


def save_values_of_run(run: RunContext[Policy]) -> None:
    policy = run.model
    write = run.accelerator.is_main_process
    save_values(policy.critic, policy.value_head, run.tokenizer, run.directory, write=write)


def save_values(
    critic: Scorer | None,
    value_head: nn.Module | None,
    tokenizer: PreTrainedTokenizerBase,
    directory: Path,
    *,
    write: bool = True,
) -> None:
    """Write ``critic/``, or ``value_head.safetensors``.

    All ranks that hold shards call it, as gathering takes all of them; one of them writes.
    """
    if critic is not None:
        save_model(critic, tokenizer, directory / "critic", write=write)
    if value_head is not None:
        state = {}
        for name, tensor in value_head.state_dict().items():
            state[name] = whole(tensor.detach()).cpu()
        if write:
            directory.mkdir(parents=True, exist_ok=True)
            save_file(state, directory / "value_head.safetensors")


def with_values(model: nn.Module, config: PPO, **sharding: Any) -> Policy:
    """A policy with a critic, or with a value head.

    Raises:
        ValueError: if the head belongs to a model of another width.
    """
    device = next(model.parameters()).device
    if config.value_model is not None:
        if "mesh" in sharding:
            log.warning("value_model: probed before sharding, so each rank loads the whole model")
        critic = open_critic(config, sharding.get("images")).to(device)
        return Policy(model, **config.kernel, **sharding, critic=critic)
    head = open_value_head(model, config).to(device)
    return Policy(model, **config.kernel, **sharding, value_head=head)


def open_value_head(model: nn.Module, config: PPO) -> nn.Module:
    """The head on the policy's own hidden states: zero, or as a run has left it."""
    plain: Any = getattr(model, "get_base_model", lambda: model)()
    width = plain.config.get_text_config().hidden_size
    head = nn.Linear(width, 1, dtype=torch.promote_types(plain.dtype, torch.float32))
    for parameter in head.parameters():
        nn.init.zeros_(parameter)
    if config.value_head is not None:
        wanted = "wanted value_head.safetensors of a run of ppo with this model"
        setting = f"value_head: {config.value_head}: {wanted}"
        with as_setting_error(setting, SafetensorError, OSError, RuntimeError):
            head.load_state_dict(load_file(config.value_head))
    return head


def open_critic(config: PPO, images: ImageInputs | None = None) -> Scorer:
    """The model for the values; where its head is new, it begins at 0.

    Args:
        images: as the policy reads them, if it sees some.

    Raises:
        DataError: if it makes other pixels of images than the policy.
    """
    assert config.value_model is not None
    # It is probed before it is sharded.
    settings = replace(config, model=config.value_model, model_revision=None, parallel=Parallel())
    if images is not None:
        own = load_images(settings, load_tokenizer(settings))
        check_same_processor("value_model", images.reader, own)
    model = load_classifier(settings, "SEQ_CLS", {0: "value"}, images=images is not None)
    critic = Scorer(model, layout=config.layout, read="before", images=images)
    saved = critic.plain.config.get_text_config()
    if saved.pad_token_id is None:
        # transformers can't load it otherwise
        saved.pad_token_id = load_tokenizer(config).eos_token_id
    # The model in memory is a classifier whatever it was; its file says whether its head is new.
    architecture = critic.plain.config
    if isinstance(config.value_model, str):
        with as_setting_error(f"value_model: {config.value_model}"):
            architecture = AutoConfig.from_pretrained(config.value_model)
    architectures = architecture.architectures or []
    if not any("SequenceClassification" in name for name in architectures):
        for parameter in critic.head.parameters():
            nn.init.zeros_(parameter)
    return critic


def ppo_losses(config: PPO) -> dict[str, Term]:
    """The losses of this configuration; ValueError if settings contradict each other."""
    losses = policy_losses(config, "clipped_surrogate", {})
    refuse_completion_losses("ppo", losses)
    if "advantage" not in tensors_needed(losses):
        problem = f"none of {', '.join(losses)} learns from the rewards"
        raise ValueError(f"loss: {problem}; add clipped_surrogate")
    clipped = partial(value_loss, clip=config.value_clip)
    losses["value_loss"] = Term(clipped, config.value_coefficient)
    return losses


def advantages(rollout: RolloutBuffer, *, config: PPO) -> dict[str, Tensor]:
    """Per-token advantages, whitened over the rollout, and the returns that the values learn.

    Each context is an episode of its own, which ends with the conversation's reward: what follows
    it may have been drawn at the same time, or have a shortened history.
    """
    context = rollout.context
    value = rollout["old_value"].double()
    scores = rollout.reward - config.missing_eos_penalty * rollout.unfinished
    paid = turn_rewards(rollout)
    rest = scores[rollout.completion_of] - sequence_sum(paid, context, len(rollout.contexts))
    reward = kl_penalized_reward(rest, divergence(rollout, config), context, beta=config.beta)
    reward = reward + paid
    advantage, returns = gae(reward, value, context, gamma=config.gamma, lam=config.lam)
    return {"advantage": whiten(advantage), "target": returns}


def turn_rewards(rollout: RolloutBuffer) -> Tensor:
    """float64 [tokens]: what the environment paid for each turn, weighted, at the turn's last token.

    Not for a conversation's last turn, which ends with the rest of the conversation's reward.
    """
    paid = torch.zeros(len(rollout.context), dtype=torch.float64)
    names = list(rollout.scores.numbers)
    if ENVIRONMENT not in names:
        return paid
    weight = float(rollout.scores.weight[names.index(ENVIRONMENT)])
    counts = torch.bincount(rollout.context, minlength=len(rollout.contexts))
    begins = (counts.cumsum(0) - counts).tolist()
    first_contexts: dict[int, int] = {}  # by completion; turns are those of the first context
    for i, completion in enumerate(rollout.completion_of.tolist()):
        first_contexts.setdefault(completion, i)
    for completion, i in first_contexts.items():
        trained = rollout.trained[i]
        if not any(trained):
            continue
        info = rollout.samples[completion].info
        turns = zip(info.get("turn_rewards", ()), info.get("turn_ends", ()), strict=False)
        for turn_reward, end in list(turns)[:-1]:
            if isinstance(turn_reward, float):  # not None, of a turn without a reward
                drawn = sum(trained[:end])
                paid[begins[i] + drawn - 1] = weight * turn_reward
    return paid


def divergence(rollout: RolloutBuffer, config: PPO) -> Tensor:
    """float64 [tokens]: how far the policy that began the rollout is from the reference."""
    old = rollout["old_logp"].double()
    if not config.beta:
        return torch.zeros_like(old)
    return kl_estimate(old, rollout["ref_logp"].double(), kind=config.kl or "k1")[0]


def objective_metrics(rollout: RolloutBuffer, *, config: PPO) -> Mapping[str, float]:
    """Means over the completions that are trained on, under the names that TRL's PPO had.

    objective/kl                  Σ kl over the tokens
    objective/non_score_reward    −β Σ kl
    objective/scores              the reward
    objective/rlhf_reward         the sum of these two
    val/explained_variance        of the returns, by the values at the start
    """
    trained = rollout.lengths > 0
    if not trained.any():
        return {}
    kl = rollout.sum(divergence(rollout, config))[trained]
    scores = (rollout.reward - config.missing_eos_penalty * rollout.unfinished)[trained]
    metrics = {
        "objective/kl": kl.mean(),
        "objective/non_score_reward": -config.beta * kl.mean(),
        "objective/scores": scores.mean(),
        "objective/rlhf_reward": (scores - config.beta * kl).mean(),
    }
    target = rollout["target"].double()
    value = rollout["old_value"].double()
    spread = float(target.var(correction=0))
    if spread:  # of equal returns nothing is to be explained
        metrics["val/explained_variance"] = 1 - (target - value).var(correction=0) / spread
    return {name: float(metric) for name, metric in metrics.items()}
