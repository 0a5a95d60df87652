"""Distillation's teacher: a second model in memory, or its likeliest tokens, stored before training.

A teacher is a function ``teacher(batch) -> TeacherOutputs``. A policy that is given its outputs returns the divergence
from it, per token, from the same forward pass as everything else.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from ...data import DataError, check_same_vocabulary, example
from ..batch import Batch
from ..config import Teacher
from ..models.backbone import evaluating
from ..models.lm_head import TeacherOutputs
from ..models.policy import Policy
from .context import RunContext, TokenColumns
from .token_cache import BatchPlan, load_tokens, store_tokens


def open_teacher(
    context: RunContext[Policy], config: Teacher, *, needed: bool
) -> tuple[Callable[[Batch], TeacherOutputs] | None, TokenColumns]:
    """The teacher of a configuration, and the columns that it reads where its tokens are stored before training.

    Raises:
        ValueError: if a loss needs a teacher and there is none, or one is given that no loss needs.
        DataError: if the teacher has other tokens than the student, or was stored for other data.
    """
    config.check(needed=needed)
    if not needed:
        return None, lambda data: {}
    beta = {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": config.beta}[config.divergence]
    policy, accelerator = context.model, context.accelerator
    if config.logprobs is not None:
        path = Path(config.logprobs)
        return stored_teacher(beta, config.temperature), lambda data: load_top_k(path, data, config.temperature)
    model = load_teacher(context, config)
    if config.top_k is None:

        def live(batch: Batch) -> TeacherOutputs:
            with accelerator.autocast():
                return model.teacher_outputs(batch, beta=beta, temperature=config.temperature, dense=not policy.fused)

        return live, lambda data: {}

    def columns(data: Dataset) -> Mapping[str, Sequence[Tensor]]:
        assert config.top_k is not None
        path = context.directory / f"teacher-{data._fingerprint}.safetensors"
        if not path.exists():
            vocab = min(each.plain.config.get_text_config().vocab_size for each in (model, policy))
            if not 1 <= config.top_k <= vocab:
                raise ValueError(
                    f"teacher.top_k: must be in [1, {vocab}], the size of the vocabulary, got {config.top_k}"
                )
            feed = context.feed(data, whole=True)
            plan = ((indices, feed.batch(indices)) for indices in feed.plan(0))
            options: dict[str, Any] = {"k": config.top_k, "temperature": config.temperature, "vocab": vocab}
            store_top_k(model, data, plan, path, accelerator=accelerator, **options)
        return load_top_k(path, data, config.temperature)

    return stored_teacher(beta, config.temperature), columns


def load_teacher(context: RunContext[Policy], config: Teacher) -> Policy:
    """The teacher's model, frozen.

    Raises:
        DataError: if it has other tokens than the student.
    """
    assert config.model is not None
    student, accelerator = context.config, context.accelerator
    check_same_vocabulary(context.tokenizer, AutoTokenizer.from_pretrained(config.model))
    model: Any = AutoModelForCausalLM.from_pretrained(config.model, dtype=getattr(torch, student.dtype))
    return Policy(model.to(accelerator.device), **student.kernel).requires_grad_(False).eval()


@torch.no_grad()
def store_top_k(
    teacher: Policy,
    data: Dataset,
    plan: BatchPlan,
    path: Path,
    *,
    k: int,
    temperature: float,
    vocab: int,
    accelerator: Accelerator,
) -> None:
    """Write the teacher's k likeliest tokens at every trained token of the data, with their log-probs.

    Args:
        plan: see `token_cache`.
        path: a safetensors file: ids int32 and logprobs [tokens, k], and in its metadata the temperature and a digest
            of the examples.
        vocab: size of the student's vocabulary; the teacher's tokens beyond are padding.
    """

    def likeliest(batch: Batch) -> Mapping[str, Tensor]:
        ids, logprobs = teacher.top_k(batch, k=k, temperature=temperature, vocab=vocab)
        return {"ids": ids.int(), "logprobs": logprobs}

    with evaluating(teacher.model):
        metadata = {"temperature": str(temperature), "examples": _digest_of(data)}
        store_tokens(path, likeliest, plan, accelerator, metadata)


def load_top_k(path: Path, data: Dataset, temperature: float) -> dict[str, list[Tensor]]:
    """Read what `store_top_k` wrote as columns with one tensor per example.

    Raises:
        DataError: if it is not there, or was written for other examples or at another temperature.
    """
    if not path.exists():
        raise DataError(f"{path}: no such file; a run with top_k leaves one, teacher-....safetensors, in its directory")
    tensors, metadata = load_tokens(path)
    if metadata["examples"] != _digest_of(data):
        raise DataError(f"{path}: the teacher was asked about other tokens than this data has; ask it again (top_k)")
    if float(metadata["temperature"]) != temperature:
        at = metadata["temperature"]
        raise DataError(f"{path}: stored at temperature {at}, and teacher.temperature is {temperature}; use {at}")
    return {f"teacher_{name}": tensors[name] for name in ("ids", "logprobs")}


def stored_teacher(beta: float, temperature: float) -> Callable[[Batch], TeacherOutputs]:
    """The teacher whose likeliest tokens are columns of the batch; see `load_top_k`."""

    def outputs(batch: Batch) -> TeacherOutputs:
        ids, logprobs = batch.columns["teacher_ids"], batch.columns["teacher_logprobs"]
        return TeacherOutputs(beta, temperature, top_k=(ids.long(), logprobs))

    return outputs


def _digest_of(data: Dataset) -> str:
    return _digest(*(_digest(*example(data, i)) for i in range(len(data))))


def _digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
