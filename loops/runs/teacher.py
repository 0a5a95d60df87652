"""The teacher of distillation: a second model in memory, or its likeliest tokens, stored before
training.

A teacher is a function ``teacher(batch) -> TeacherOutputs``. Given these outputs, a policy also
returns the per-token divergence from the teacher, in the same forward pass.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from ...data import DataError, Example, check_same_vocabulary
from ...objectives import (
    Stats,
    alpha_beta_divergence,
    skew_forward_kl,
    skew_reverse_kl,
    taid,
)
from ..batch import Batch
from ..config import Teacher
from ..models.io import read_model
from ..models.lm_head import TeacherOutputs
from ..models.policy import Policy
from ..models.sharding import left_in_files
from ..registry import as_setting_error
from .context import RunContext, TokenColumns
from .feed import Feed, digest, stored_tokens
from .reference import frozen_policy_like


def open_teacher(
    context: RunContext[Policy], config: Teacher, *, needed: bool, model: Policy | None = None
) -> tuple[Callable[[Batch], TeacherOutputs] | None, TokenColumns]:
    """The teacher of a checked configuration, loaded unless it is given as ``model``, and the
    columns that hold its outputs if they are stored before training.

    The file of the stored tokens has the k likeliest at every trained token, ids int32 and logprobs
    [tokens, k], and in its metadata the temperature and a digest of the examples.

    Raises:
        DataError: if the teacher has other tokens than the student, or was stored for other data.
    """
    if not needed:
        return None, lambda data: {}
    if context.model.images is not None:
        raise ValueError("teacher: it sees no images so far; train on text alone, or without it")
    beta = {"forward_kl": 0.0, "reverse_kl": 1.0}.get(config.divergence, config.beta)
    temperature, policy, accelerator = config.temperature, context.model, context.accelerator
    if model is None and config.model is not None:
        model = load_teacher(context, config)
    if model is not None and config.top_k is None:

        def live(batch: Batch) -> TeacherOutputs:
            with accelerator.autocast():
                outputs = model.teacher_outputs(
                    batch, beta=beta, temperature=temperature, dense=not policy.fused
                )
            return replace(outputs, objective=objective_of(config, batch))

        return live, lambda data: {}

    def likeliest(batch: Batch) -> Mapping[str, Tensor]:
        if model is None:
            raise DataError(
                f"teacher.logprobs: {config.logprobs} can't be read; store them again (teacher.top_k)"
            )
        assert config.top_k is not None
        # beyond is padding
        vocab = min(each.plain.config.get_text_config().vocab_size for each in (model, policy))
        if not 1 <= config.top_k <= vocab:
            raise ValueError(
                f"teacher.top_k: must be in [1, {vocab}], the size of the vocabulary, got {config.top_k}"
            )
        ids, logprobs = model.top_k(batch, k=config.top_k, temperature=temperature, vocab=vocab)
        return {"ids": ids.int(), "logprobs": logprobs}

    def columns(data: Dataset) -> Mapping[str, Sequence[Tensor]]:
        names = [name for name in Example._fields if name in data.column_names]
        metadata = {
            "temperature": str(temperature),
            "examples": digest(data.select_columns(names)),
        }
        path = Path(
            config.logprobs or context.directory / f"teacher-{data._fingerprint}.safetensors"
        )
        feed, own = (
            context.feed(data, whole=True),
            context.config.resume and path.with_name("config.yaml").exists(),
        )
        tensors, written = stored_tokens(
            path, feed, likeliest, accelerator, own or bool(config.logprobs), metadata
        )
        if written["examples"] != metadata["examples"]:
            raise DataError(
                f"{path}: these are the teacher's log-probs of other data; store them again (teacher.top_k)"
            )
        if float(at := written["temperature"]) != temperature:
            raise DataError(
                f"{path}: stored at temperature {at}, and teacher.temperature is {temperature}; use {at}"
            )
        return {f"teacher_{name}": tensors[name] for name in ("ids", "logprobs")}

    def from_columns(batch: Batch) -> TeacherOutputs:
        ids, logprobs = batch.columns["teacher_ids"], batch.columns["teacher_logprobs"]
        top_k = ids.long(), logprobs
        objective = objective_of(config, batch)
        return TeacherOutputs(beta, temperature, top_k=top_k, objective=objective)

    return from_columns, columns


def objective_of(
    config: Teacher, batch: Batch
) -> Callable[[Tensor, Tensor], tuple[Tensor, Stats]] | None:
    """The divergence of log-probs, of those that no kernel has; None for the others."""
    match config.divergence:
        case "skew_forward_kl":
            return partial(skew_forward_kl, alpha=config.alpha)
        case "skew_reverse_kl":
            return partial(skew_reverse_kl, alpha=config.alpha)
        case "alpha_beta_divergence":
            return partial(alpha_beta_divergence, alpha=config.alpha, beta=config.beta)
        case "taid":
            return partial(taid, t=float(batch.columns[TAID_COLUMN]))
    return None


TAID_COLUMN = "taid_t"


@dataclass
class TaidSchedule:
    """TAID's t, how far the teacher has come: at least in proportion to the steps, and further the
    faster the loss falls. It never goes back.

        t ← min(1, max(t₀ + (1 − t₀) n/N, t + α σ(m) (1 − t))),  m the running mean of (J' − J)/J'

    α = 5e-4 and the decay 0.99 of m are the paper's.

    Paper: Shing et al. 2025, arXiv:2501.16937, Algorithm 1.
    """

    start: float
    t: float
    momentum: float = 0.0
    loss: float | None = None

    def prepare(self, feed: Feed, step: int, micro_batches: list[Batch]) -> list[Batch]:
        """Add t, a column of one number, to the micro-batches of a step."""
        progress = step / max(feed.steps, 1)
        self.t = max(self.t, self.start + (1 - self.start) * progress)
        return [
            replace(batch, columns={**batch.columns, TAID_COLUMN: self._number(batch)})
            for batch in micro_batches
        ]

    def _number(self, batch: Batch) -> Tensor:
        return torch.tensor(self.t, dtype=torch.float64, device=batch.target.device)

    def observe(self, metrics: Mapping[str, float]) -> None:
        """Receive the metrics of a step over all ranks."""
        loss = metrics["distillation"]
        if self.loss is not None:
            fallen = (self.loss - loss) / (self.loss + 1e-15)
            self.momentum = 0.99 * self.momentum + 0.01 * fallen
            pace = 5e-4 / (1 + math.exp(-self.momentum))
            self.t = min(1.0, self.t + pace * (1 - self.t))
        self.loss = loss

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def load_teacher(context: RunContext[Policy], config: Teacher) -> Policy:
    """The teacher's model, frozen.

    Raises:
        DataError: if it has other tokens than the student.
    """
    assert config.model is not None
    student, model = context.config, config.model
    if not isinstance(model, str):
        if {*model.parameters()} & {*context.model.parameters()}:
            raise DataError(
                "teacher.model: it has weights of the student, which training changes; give a copy of it"
            )
        embeddings: Any = model.get_input_embeddings()
        if (size := embeddings.num_embeddings) < len(context.tokenizer):
            raise DataError(
                f"teacher.model: {size} embeddings, and the tokenizer has {len(context.tokenizer)} tokens; "
                "give a teacher with the same tokenizer"
            )
    else:
        named = as_setting_error(f"teacher.model: {model}")
        check_same_vocabulary(context.tokenizer, named(AutoTokenizer.from_pretrained)(model))
        with left_in_files(student.parallel.copy_size > 1):
            model = named(read_model)(
                AutoModelForCausalLM, model, dtype=getattr(torch, student.dtype)
            )
    return frozen_policy_like(context.model, model, student)
