"""The loss code of TRL 1.16 on tensors: its trainers' own ``_compute_loss``, without a trainer or a model."""

import importlib
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

BETA = 0.1
LOW, HIGH = 0.2, 0.28
LIMIT = 1024  # Dr. GRPO's constant length


class Tensors(NamedTuple):
    """What an objective may read: per token, flat and in padded rows, and per answer.

    The last ones are what TRL's collator and model hand to its loss: made beforehand, since they are not its loss code.
    """

    logp: Tensor
    old: Tensor
    ref: Tensor
    padded: Tensor
    padded_old: Tensor
    padded_ref: Tensor
    mask: Tensor
    sequence: Tensor
    length: Tensor
    advantage: Tensor
    desirable: Tensor
    mismatched: Tensor
    completion_mask: Tensor
    zeros: Tensor
    ids: Tensor
    row_mask: Tensor
    ref_sum: Tensor
    old_sum: Tensor


def _alone(device: torch.device) -> SimpleNamespace:
    """An accelerator of one process."""
    return SimpleNamespace(
        device=device,
        num_processes=1,
        gather=lambda x: x,
        gather_for_metrics=lambda x: x,
        pad_across_processes=lambda x, **_: x,
        reduce=lambda x, **_: x,
    )


def _trainer(t: Tensors, **settings: Any) -> SimpleNamespace:
    common = {
        "model": SimpleNamespace(training=True),
        "accelerator": _alone(t.padded.device),
        "aux_loss_enabled": False,
        "_metrics": defaultdict(lambda: defaultdict(list)),
        "_total_train_tokens": 0,
        "_tp_size": 1,
    }
    return SimpleNamespace(**common, **settings)


def _answers(t: Tensors) -> tuple[SimpleNamespace, dict[str, Any]]:
    """The output of a model that has given these log-probs after a prompt of one token, and the batch behind it."""
    output = SimpleNamespace(log_probs=t.padded, entropy=t.zeros, mean_logits=t.zeros, is_top1=t.mask)
    return output, {"input_ids": t.ids, "attention_mask": t.row_mask, "completion_mask": t.row_mask}


def _preference(loss_type: str) -> Callable[[Tensors], Tensor]:
    def loss(t: Tensors) -> Tensor:
        trainer = _trainer(
            t,
            args=SimpleNamespace(discopop_tau=0.05),
            beta=BETA,
            f_divergence_type="reverse_kl",
            label_smoothing=0.0,
            ld_alpha=None,
            loss_types=[loss_type],
            loss_weights=[1.0],
            precompute_ref_logps=True,
            use_weighting=False,
        )
        output, inputs = _answers(t)
        ref_chosen, ref_rejected = t.ref_sum.chunk(2)
        inputs |= {"ref_chosen_logps": ref_chosen, "ref_rejected_logps": ref_rejected}
        found: Tensor = _class("DPOTrainer")._compute_loss(trainer, lambda **_: output, inputs, return_outputs=False)
        return found

    return loss


def _feedback(t: Tensors) -> Tensor:
    trainer = _trainer(
        t,
        beta=BETA,
        calculate_KL=True,
        desirable_weight=1.0,
        loss_type="kto",
        precompute_ref_logps=True,
        undesirable_weight=1.0,
        _compute_kl_logps=lambda model, batch: t.mismatched,
    )
    output, inputs = _answers(t)
    inputs |= {
        "label": t.desirable,
        "ref_logps": t.ref_sum,
        "ref_KL_logps": torch.zeros_like(t.mismatched),
    }
    found: Tensor = _class("KTOTrainer")._compute_loss(trainer, lambda **_: output, inputs, return_outputs=False)
    return found


def _policy(
    loss_type: str, *, level: str = "token", beta: float = 0.0, trainer: str = "GRPOTrainer", **more: Any
) -> Callable[[Tensors], Tensor]:
    def loss(t: Tensors) -> Tensor:
        cls = _class(trainer)
        fake = _trainer(
            t,
            args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
            beta=beta,
            current_gradient_accumulation_steps=1,
            epsilon_low=LOW,
            importance_sampling_level=level,
            loss_type=loss_type,
            max_completion_length=LIMIT,
            off_policy_mask_threshold=None,
            top_entropy_quantile=1.0,
            use_vllm=False,
            vllm_importance_sampling_correction=False,
            _entropy_bonus_enabled=False,
            _get_per_token_logps_and_entropies=lambda *_, **__: (t.padded, t.zeros, None),
            **({"epsilon_high": HIGH} | more),
        )
        inputs = {
            "prompt_ids": t.ids[:, :1],
            "prompt_mask": t.completion_mask[:, :1],
            "completion_ids": t.ids[:, 1:],
            "completion_mask": t.completion_mask,
            "advantages": t.advantage,
            "old_per_token_logps": t.padded_old,
            "old_logps": t.old_sum,
            "ref_per_token_logps": t.padded_ref,
            "num_items_in_batch": t.length.sum(),
        }
        found: Tensor = cls._compute_loss(fake, None, inputs)
        return found

    return loss


def _class(name: str) -> Any:
    return getattr(importlib.import_module("trl"), name)


LOSSES: dict[str, Callable[[Tensors], Tensor]] = {
    "nll": _preference("sft"),
    "dpo": _preference("sigmoid"),
    "ipo": _preference("ipo"),
    "kto": _feedback,
    "grpo": _policy("grpo"),
    "grpo_kl": _policy("grpo", beta=BETA),
    "dr_grpo": _policy("dr_grpo"),
    "dapo": _policy("dapo"),
    "cispo": _policy("cispo", epsilon_high=1 + HIGH),
    "gspo": _policy("grpo", level="sequence"),
    "rloo": _policy("", trainer="RLOOTrainer"),
}
