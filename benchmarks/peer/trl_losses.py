"""The loss code of TRL 1.16 on tensors: its trainers' own ``_compute_loss``, without a trainer or a
model.

The tests hold our objectives to it, and ``burnish bench objectives`` times it. TRL's rows are
padded; the chosen ones stand above the rejected ones.
"""

from collections import defaultdict
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

LossAndMetrics = tuple[Tensor, dict[str, list[float]]]


class Rows(NamedTuple):
    """Tensors that TRL's collator and model hand to its losses, after a prompt of one token."""

    logp: Tensor  # [rows, T]
    mask: Tensor  # bool [rows, T]
    zeros: Tensor  # [rows, T], for whatever else a model gives
    ids: Tensor  # [rows, 1 + T]
    row_mask: Tensor  # int64 [rows, 1 + T]


def make_rows(logp: Tensor, mask: Tensor | None = None) -> Rows:
    """Rows of completions with these log-probs; without a mask all of each is a completion."""
    mask = torch.ones_like(logp, dtype=torch.bool) if mask is None else mask
    ids = torch.zeros(len(logp), 1 + logp.shape[1], dtype=torch.int64, device=logp.device)
    return Rows(logp, mask, torch.zeros_like(logp), ids, torch.cat([ids[:, :1], mask.long()], 1))


def fake_trainer(device: torch.device | str = "cpu", **settings: object) -> SimpleNamespace:
    """The attributes that TRL's losses read, on one rank; metrics are in ``_metrics["train"]``."""
    accelerator = SimpleNamespace(
        device=device,
        num_processes=1,
        gather=lambda x: x,
        gather_for_metrics=lambda x: x,
        pad_across_processes=lambda x, **_: x,
        reduce=lambda x, **_: x,
    )
    common: dict[str, Any] = {
        "model": SimpleNamespace(training=True),
        "accelerator": accelerator,
        "aux_loss_enabled": False,
        "_metrics": defaultdict(lambda: defaultdict(list)),
        "_total_train_tokens": 0,
        "_tp_size": 1,
    }
    return SimpleNamespace(**(common | settings))


def _model_and_inputs(rows: Rows, **outputs: Tensor) -> tuple[Any, dict[str, Any]]:
    output = SimpleNamespace(
        log_probs=rows.logp,
        entropy=rows.zeros,
        mean_logits=rows.zeros,
        is_top1=rows.mask,
        **outputs,
    )
    inputs = {
        "input_ids": rows.ids,
        "attention_mask": rows.row_mask,
        "completion_mask": rows.row_mask,
    }
    return lambda **_: output, inputs


def dpo_loss(
    rows: Rows, ref: Tensor, log_sum_squares: Tensor | None = None, **settings: object
) -> Tensor:
    """DPOTrainer's loss.

    Args:
        ref: the reference's log-probs of whole completions, [rows].
        settings: attributes of the trainer, of which ``beta`` has no default.
    """
    from trl import DPOTrainer

    defaults: dict[str, Any] = {
        "args": SimpleNamespace(discopop_tau=0.05),
        "f_divergence_type": "reverse_kl",
        "label_smoothing": 0.0,
        "ld_alpha": None,
        "loss_types": ["sigmoid"],
        "loss_weights": [1.0],
        "precompute_ref_logps": True,
        "use_weighting": False,
    }
    more = {} if log_sum_squares is None else {"log_sum_sq_probs": log_sum_squares}
    model, inputs = _model_and_inputs(rows, **more)
    inputs["ref_chosen_logps"], inputs["ref_rejected_logps"] = ref.chunk(2)
    trainer = fake_trainer(rows.logp.device, **(defaults | settings))
    loss: Tensor = DPOTrainer._compute_loss(trainer, model, inputs, return_outputs=False)
    return loss


def kto_loss(
    rows: Rows,
    ref: Tensor,
    desirable: Tensor,
    mismatched: Sequence[Tensor] | None = None,
    **settings: object,
) -> LossAndMetrics:
    """KTOTrainer's loss and metrics.

    Args:
        ref: the reference's log-probs of whole completions, [rows].
        mismatched: log-probs of completions after other prompts, the policy's and the reference's,
            for z₀.
        settings: attributes of the trainer, of which ``beta`` and ``loss_type`` have no default.
    """
    from trl import KTOTrainer

    defaults: dict[str, Any] = {
        "calculate_KL": mismatched is not None,
        "desirable_weight": 1.0,
        "precompute_ref_logps": True,
        "undesirable_weight": 1.0,
        "_compute_kl_logps": lambda model, batch: mismatched and mismatched[0],
    }
    model, inputs = _model_and_inputs(rows)
    inputs |= {"label": desirable, "ref_logps": ref, "ref_KL_logps": mismatched and mismatched[1]}
    trainer = fake_trainer(rows.logp.device, **(defaults | settings))
    loss: Tensor = KTOTrainer._compute_loss(trainer, model, inputs, return_outputs=False)
    return loss, trainer._metrics["train"]


def policy_loss(
    trainer: Any,
    rows: Rows,
    inputs: dict[str, Tensor],
    entropy: Tensor | None = None,
    args: dict[str, Any] | None = None,
    **settings: Any,
) -> LossAndMetrics:
    """The loss and metrics of GRPOTrainer, or of another class with its attributes.

    Args:
        inputs: ``advantages`` and ``old_logps``, [rows]; ``old_per_token_logps`` and
            ``ref_per_token_logps``, [rows, T]; ``num_items_in_batch``; ``completion_mask``, int64
            [rows, T].
        args: of the trainer's configuration.
        settings: attributes of the trainer, of which ``max_completion_length`` has no default.
    """
    entropies = rows.zeros if entropy is None else entropy
    config: dict[str, Any] = {
        "delta": None,
        "use_bias_correction_kl": False,
        "steps_per_generation": 1,
    }
    config |= {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}
    config |= {
        "vespo_k_pos": 2.0,
        "vespo_lambda_pos": 3.0,
        "vespo_k_neg": 3.0,
        "vespo_lambda_neg": 2.0,
    }
    defaults: dict[str, Any] = {
        "args": SimpleNamespace(**(config | (args or {}))),
        "beta": 0.0,
        "current_gradient_accumulation_steps": 1,
        "epsilon_low": 0.2,
        "epsilon_high": 0.28,
        "importance_sampling_level": "token",
        "loss_type": "grpo",
        "off_policy_mask_threshold": None,
        "top_entropy_quantile": 1.0,
        "use_vllm": False,
        "vllm_importance_sampling_correction": False,
        "_entropy_bonus_enabled": False,
        "_get_per_token_logps_and_entropies": lambda *_, **__: (rows.logp, entropies, None),
    }
    fake = fake_trainer(rows.logp.device, **(defaults | settings))
    for name in ("get_high_entropy_mask", "get_off_policy_mask", "get_gamma_weights"):
        if function := vars(trainer).get(name):
            setattr(fake, name, function.__get__(fake))
    prompt = {
        "prompt_ids": rows.ids[:, :1],
        "prompt_mask": rows.ids[:, :1] + 1,
        "completion_ids": rows.ids[:, 1:],
    }
    loss: Tensor = trainer._compute_loss(fake, None, {**prompt, **inputs})
    return loss, fake._metrics["train"]
