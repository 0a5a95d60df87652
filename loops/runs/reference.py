"""Log-probs under the frozen reference policy: from a copy, or from the policy without its
adapters.

A reference is a function ``reference(batch) -> log-probs [tokens]``. `RunContext.reference` makes
the configured one, whose log-probs may also be computed before training.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from peft import LoraConfig, get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ...data import DataError, check_same_vocabulary
from ...data.images import ImageReader
from ..batch import Batch
from ..config import Bema, Common, Lora
from ..models.backbone import evaluating
from ..models.io import load_images, load_model, load_tokenizer
from ..models.policy import Policy
from ..models.sharding import local, reshard

Reference = Callable[[Batch], Tensor]


def frozen_policy_like(policy: Policy, model: nn.Module, config: Common) -> Policy:
    """Wrap another model as a frozen `Policy` on the policy's device, sharded as the policy is."""
    model = model.requires_grad_(False)
    model = model if policy.mesh else model.to(policy.device)
    sharding: dict[str, Any] = {"mesh": policy.mesh, "param_dtype": policy.param_dtype}
    return Policy(model, **config.kernel, **sharding, images=policy.images).eval()


def load_reference(config: Any, tokenizer: PreTrainedTokenizerBase, policy: Policy) -> Policy:
    """``config.ref_model``, frozen, in the precision of the computation.

    Raises:
        DataError: if it has other tokens than the policy.
    """
    # What is for a model that trains is left out.
    settings: Common = replace(
        config,
        model=config.ref_model,
        model_revision=None,
        lora=Lora(),
        weights_dtype="float32",
        gradient_checkpointing=False,
        quantize=None,
        quantize_kwargs={},
        neftune_noise_alpha=0.0,
    )
    other = load_tokenizer(settings)
    check_same_vocabulary(tokenizer, other)
    if policy.images is not None:
        check_same_processor("ref_model", policy.images.reader, load_images(settings, other))
    return frozen_policy_like(policy, load_model(settings), settings)


def check_same_processor(who: str, policy: ImageReader, other: ImageReader | None) -> None:
    """Raise DataError unless another model makes of images what the policy does.

    Args:
        who: the setting that names the other model.
    """
    if other is None:
        raise DataError(f"{who}: it sees no images, and the data have some; give one that does")
    if other.processor.image_processor.to_dict() != policy.processor.image_processor.to_dict():
        raise DataError(
            f"{who}: its processor makes other pixels of an image; give one with the policy's processor"
        )


def make_reference(policy: Policy, config: Any, kind: str, *, temperature: float) -> Reference:
    """The reference of this kind, computed during training.

    Args:
        config: the settings of a recipe, among them those of `Referenced`.
        policy: the one that trains, or the one of ``config.ref_model`` if there is one.
    """
    if config.ref_model is not None:
        return frozen(policy, temperature=temperature)
    if config.ref_model_sync_steps:
        return _following(policy, config, temperature=temperature)
    adapters = kind == "auto" and hasattr(policy.model, "disable_adapter")
    # New adapters start at zero; those of a given model may add something.
    unchanged = config.lora.enabled and config.lora.adds_nothing
    if kind == "adapters_off" or (adapters and unchanged):
        return adapters_off(policy, temperature=temperature)
    if policy.mesh is not None:  # shards can't be copied, but can be loaded again
        return frozen(_loaded_again(policy, config), temperature=temperature)
    make = adapters_copy if adapters else frozen_copy
    return make(policy, temperature=temperature)


def _loaded_again(policy: Policy, config: Common) -> Policy:
    """The policy as it was before the first step, in the same shards."""
    if isinstance(config.model, nn.Module):
        raise ValueError(
            "model: one in memory can't be sharded twice, and a copy is its reference; give its name"
        )
    return frozen_policy_like(policy, load_model(config), config)


def _following(policy: Policy, config: Any, *, temperature: float) -> "SyncedReference":
    """The reference that follows the policy, as the settings of `Referenced` say."""
    copied = None if policy.mesh is None else _loaded_again(policy, config)
    interval = config.ref_model_sync_steps
    if config.bema.update_freq:
        return AveragedReference(
            policy, copied, interval=interval, bema=config.bema, temperature=temperature
        )
    alpha = config.ref_model_mixup_alpha
    return SyncedReference(policy, copied, interval=interval, alpha=alpha, temperature=temperature)


def frozen_copy(policy: Policy, *, temperature: float = 1.0) -> Reference:
    """A frozen copy of the current policy, without a critic.

    Takes as much memory again as its weights.

    Args:
        temperature: of its softmax; the policy's own where log-probs of samples are compared.
    """
    policy = getattr(policy, "module", policy)  # of the wrapper that distributes it over ranks
    if not isinstance(policy, Policy):
        raise ValueError(
            f"frozen_copy: wanted a Policy, got {type(policy).__name__}; wrap it: Policy(model)"
        )
    return frozen(_without_critic(policy), temperature=temperature)


def _without_critic(policy: Policy) -> Policy:
    """A copy of a policy; deepcopy takes None for the critic, as if it had copied that already."""
    return copy.deepcopy(policy, {id(policy.critic): None})


def frozen(policy: Policy, *, temperature: float = 1.0) -> Reference:
    """Freeze a policy for good."""
    policy.requires_grad_(False).eval()

    @torch.no_grad()
    def reference(batch: Batch) -> Tensor:
        logprob: Tensor = policy(batch, temperature=temperature).logprob
        return logprob

    return reference


def adapters_off(policy: Policy, *, temperature: float = 1.0) -> Reference:
    """The base model under the policy's own adapters: takes no memory, and is no copy that could
    drift.

    Raises:
        ValueError: if the policy has no adapters, or their start changed the base model.
    """
    model: Any = policy.model
    if not hasattr(model, "disable_adapter"):
        raise ValueError(
            "adapters_off: wanted a model wrapped by peft; without adapters use frozen_copy"
        )
    start = model.peft_config["default"].init_lora_weights
    if start not in (True, False, "gaussian"):
        raise ValueError(
            f"adapters_off: init_lora_weights={start} changed the base model; use auto, a copy of adapters"
        )

    @torch.no_grad()
    def reference(batch: Batch) -> Tensor:
        with model.disable_adapter(), evaluating(model):
            logprob: Tensor = policy(batch, temperature=temperature).logprob
        return logprob

    return reference


def adapters_copy(policy: Policy, *, temperature: float = 1.0) -> Reference:
    """The policy with a frozen copy of its current adapters; the base model is not copied."""
    model: Any = policy.model
    weights = {name: weight.clone() for name, weight in get_peft_model_state_dict(model).items()}
    settings: LoraConfig = copy.deepcopy(model.peft_config["default"])
    settings.init_lora_weights = True  # other starts change the base model
    settings.inference_mode = True
    settings.lora_dropout = 0.0  # it computes while the policy is in training mode
    model.add_adapter("reference", settings)
    set_peft_model_state_dict(model, weights, adapter_name="reference")
    model.set_adapter("default")  # which `add_adapter` may have changed

    @torch.no_grad()
    def reference(batch: Batch) -> Tensor:
        model.set_adapter("reference")
        try:
            logprob: Tensor = policy(batch, temperature=temperature).logprob
        finally:
            model.set_adapter("default")
        return logprob

    return reference


class SyncedReference:
    """A copy of the policy that follows it: ``ref ← α policy + (1 − α) ref`` after every so many
    steps.

    A copy of shards is updated shard by shard, without a message between ranks.

    Args:
        copied: a copy of the policy, under the same names and in the same shards.
        interval: steps between updates.
        alpha: α in (0, 1].

    Paper: Gorbatovski et al. 2024, "Learn your reference model for real good alignment",
    arXiv:2404.09656, Eq. 5 (soft update) and 6 (hard, α = 1).
    """

    def __init__(
        self,
        policy: Policy,
        copied: Policy | None = None,
        *,
        interval: int,
        alpha: float,
        temperature: float = 1.0,
    ) -> None:
        self.interval = interval
        self.alpha = alpha
        self.steps = 0
        self.copied = _without_critic(policy) if copied is None else copied
        # Parameters of the reference and of the policy, by name.
        self.pairs: dict[str, tuple[nn.Parameter, nn.Parameter]] = {}
        for name, each in self.copied.named_parameters():
            followed = policy.get_parameter(name)
            if followed.requires_grad:  # frozen weights stay equal
                self.pairs[name] = (each, followed)
        self.reference = frozen(self.copied, temperature=temperature)

    def __call__(self, batch: Batch) -> Tensor:
        return self.reference(batch)

    @torch.no_grad()
    def observe(self, metrics: Mapping[str, float]) -> None:
        """Count a step of the policy, and update the reference when it is due."""
        self.steps += 1
        # A forward pass may have left a unit gathered: what is updated are the shards.
        reshard(self.copied)
        self._update()

    def _update(self) -> None:
        if self.steps % self.interval:
            return
        for each, followed in self.pairs.values():
            local(each).lerp_(local(followed).to(each.dtype), self.alpha)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "weights" in state:
            raise ValueError(
                "resume: burnish 0.2.0 kept the weights of a reference elsewhere in this checkpoint; resume with that "
                "version, or begin in another directory"
            )
        self.steps = state["steps"]

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of a checkpoint, in the shards of this rank."""
        reshard(self.copied)
        return {f"{name}/weight": each for name, (each, _) in self.pairs.items()}


class AveragedReference(SyncedReference):
    """A copy of the policy that is set to the bias-corrected average of its steps (BEMA).

        avg_t  =  (1 − β_t) avg_(t−φ) + β_t θ_t        β_t = max((ρ + γt)^−κ, β_min)
        ref_t  =  avg_t + α_t (θ_t − θ_τ)              α_t = (ρ + γt)^−η

    An average lags behind the policy that moves away from its start θ_τ; the second term takes it
    along. The average is updated every φ steps after step τ, the reference every ``interval`` steps
    after it. Both averages are in float32 or better, as two more copies of the trained weights. t
    counts the steps of the run, as in TRL's ``BEMACallback``, also with τ > 0.

    Args:
        interval: a multiple of φ.
        bema: φ, κ, η, ρ, γ, β_min and τ; see `Bema`.

    Paper: Block and Zhang 2025, "EMA without the lag: bias-corrected iterate averaging schemes",
    arXiv:2508.00180, Algorithm 1.
    """

    def __init__(
        self,
        policy: Policy,
        copied: Policy | None = None,
        *,
        interval: int,
        bema: Bema,
        temperature: float = 1.0,
    ) -> None:
        super().__init__(policy, copied, interval=interval, alpha=1.0, temperature=temperature)
        self.bema = bema
        self.start: dict[str, Tensor] = {}
        self.average: dict[str, Tensor] = {}
        for name, (_, followed) in self.pairs.items():
            dtype = torch.promote_types(followed.dtype, torch.float32)
            self.start[name] = followed.detach().clone()
            self.average[name] = followed.detach().to(dtype, copy=True)

    def _update(self) -> None:
        since = self.steps - self.bema.update_after
        if since == 0:
            for name, (_, followed) in self.pairs.items():
                local(self.start[name]).copy_(local(followed))
                local(self.average[name]).copy_(local(followed))
        assert self.bema.update_freq is not None
        if since <= 0 or since % self.bema.update_freq:
            return
        weight = self.bema.weight(self.steps)
        correction = self.bema.correction(self.steps)
        for name, (each, followed) in self.pairs.items():
            average = local(self.average[name])
            now = local(followed).to(average.dtype)
            average.lerp_(now, weight)
            if since % self.interval == 0:
                moved = now - local(self.start[name])
                local(each).copy_(average.add(moved, alpha=correction))

    def tensors(self) -> dict[str, Tensor]:
        tensors = super().tensors()
        for name in self.pairs:
            tensors[f"{name}/start"] = self.start[name]
            tensors[f"{name}/average"] = self.average[name]
        return tensors
