"""The teacher of distillation: a second model in memory, or its likeliest tokens, stored before
training.

A teacher is a function ``teacher(batch) -> TeacherOutputs``. Given these outputs, a policy also
returns the per-token divergence from the teacher, in the same forward pass.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from ...data import DataError, Example, check_same_vocabulary
from ..batch import Batch
from ..config import Teacher
from ..models.io import read_model
from ..models.lm_head import TeacherOutputs
from ..models.policy import Policy
from ..models.sharding import left_in_files
from ..registry import as_setting_error
from .context import RunContext, TokenColumns
from .feed import digest, stored_tokens
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
    beta = {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": config.beta}[config.divergence]
    temperature, policy, accelerator = config.temperature, context.model, context.accelerator
    if model is None and config.model is not None:
        model = load_teacher(context, config)
    if model is not None and config.top_k is None:

        def live(batch: Batch) -> TeacherOutputs:
            with accelerator.autocast():
                return model.teacher_outputs(
                    batch, beta=beta, temperature=temperature, dense=not policy.fused
                )

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
        return TeacherOutputs(beta, temperature, top_k=(ids.long(), logprobs))

    return from_columns, columns


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
