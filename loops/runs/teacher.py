"""What a teacher says of the trained tokens: a second model, or the likeliest tokens that one said before training.

A teaching is a function ``teaching(batch) -> TeacherOutputs``; a policy that is given a lesson says how far it is from the
teacher, per token, from the same forward pass as everything else.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from datasets import Dataset
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..config import Teacher
from ...data import DataError, check_same_vocabulary, example
from ...objectives import PerToken, Stats
from ..models.backbone import evaluating
from ..batch import Batch
from ..models.lm_head import TeacherOutputs
from ..models.policy import Policy
from .context import PerToken as PerTokenColumns
from .context import Recipe

TeacherFn = Callable[[Batch], TeacherOutputs]




def distillation(divergence: PerToken) -> tuple[PerToken, Stats]:
    """Distance to the teacher's distribution of the next token, as `Teacher` measures it."""
    return divergence, {}


def open_teacher(recipe: Recipe[Policy], teacher: Teacher, *, needed: bool) -> tuple[TeacherFn | None, PerTokenColumns]:
    """The teaching of a configuration, and the columns that it reads where the teacher was asked before training.

    Raises:
        ValueError: if a loss needs a teacher and there is none, or one is given that no loss needs.
        DataError: if the teacher has other tokens than the student, or was stored for other data.
    """
    teacher.check(needed=needed)
    if not needed:
        return None, lambda data: {}
    beta = {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": teacher.beta}[teacher.divergence]
    policy, run = recipe.model, recipe.run
    if teacher.logprobs is not None:
        stored = Path(teacher.logprobs)
        return (_told(beta, teacher.temperature), lambda data: load_top_k(stored, data, teacher.temperature))
    tutor = load_teacher(recipe, teacher)
    if teacher.top_k is None:

        def live(batch: Batch) -> TeacherOutputs:
            with run.accelerator.autocast():
                return tutor.lesson(batch, beta=beta, temperature=teacher.temperature, dense=not policy.fused)

        return live, lambda data: {}

    def columns(data: Dataset) -> Mapping[str, Sequence[Tensor]]:
        assert teacher.top_k is not None
        path = run.directory / f"teacher-{data._fingerprint}.safetensors"
        if not path.exists():
            feed = recipe.feed(data, whole=True)
            batches = [(indices, feed.batch(indices)) for indices in feed.plan(0)]
            vocab = min(model.plain.config.get_text_config().vocab_size for model in (tutor, policy))
            if not 1 <= teacher.top_k <= vocab:
                raise ValueError(
                    f"teacher.top_k: must be in [1, {vocab}], the size of the vocabulary, got {teacher.top_k}"
                )
            how: dict[str, Any] = {"k": teacher.top_k, "temperature": teacher.temperature, "vocab": vocab}
            store_top_k(tutor, batches, path, accelerator=run.accelerator, **how)
        return load_top_k(path, data, teacher.temperature)

    return _told(beta, teacher.temperature), columns


def load_teacher(recipe: Recipe[Policy], teacher: Teacher) -> Policy:
    """The teacher's model, frozen.

    Raises:
        DataError: if it has other tokens than the student.
    """
    assert teacher.model is not None
    config, accelerator = recipe.run.config, recipe.run.accelerator
    check_same_vocabulary(recipe.tokenizer, AutoTokenizer.from_pretrained(teacher.model))
    model: Any = AutoModelForCausalLM.from_pretrained(teacher.model, dtype=getattr(torch, config.dtype))
    tutor = Policy(model.to(accelerator.device), **config.kernel)
    return tutor.requires_grad_(False).eval()


@torch.no_grad()
def store_top_k(
    teacher: Policy,
    batches: Sequence[tuple[Sequence[int], Batch]],
    path: Path,
    *,
    k: int,
    temperature: float,
    vocab: int,
    accelerator: Accelerator,
) -> None:
    """Write the teacher's k likeliest tokens at every trained token of the data, with their log-probs.

    Args:
        batches: this rank's part of the data, each batch with the indices of its examples.
        vocab: of the student; what the teacher has beyond is padding.
        path: a safetensors file: ids int32 and logprobs [tokens, k], the number of tokens of each example, and in its
            metadata the temperature and a digest of the examples.
    """
    mine: list[tuple[int, tuple[Tensor, Tensor, str]]] = []
    with evaluating(teacher.model):
        for indices, batch in batches:
            ids, logprobs = teacher.top_k(batch, k=k, temperature=temperature, vocab=vocab)
            lengths = [sum(map(sum, each.trained)) for each in batch.examples]
            parts = (torch.split(x.cpu(), lengths) for x in (ids.int(), logprobs))
            digests = [_digest(*each) for each in batch.examples]
            mine += zip(indices, zip(*parts, digests, strict=True), strict=True)
    everyone = dict(gather_object(mine))
    if accelerator.is_main_process:
        path.parent.mkdir(parents=True, exist_ok=True)
        of_ids, of_logprobs, of_examples = zip(*(everyone[i] for i in sorted(everyone)), strict=True)
        tensors = {
            "ids": torch.cat(of_ids),
            "logprobs": torch.cat(of_logprobs),
            "length": torch.tensor([len(ids) for ids in of_ids]),
        }
        partial = path.with_suffix(".partial")
        save_file(tensors, partial, metadata={"temperature": str(temperature), "examples": _digest(*of_examples)})
        partial.replace(path)
    accelerator.wait_for_everyone()


def load_top_k(path: Path, data: Dataset, temperature: float) -> dict[str, list[Tensor]]:
    """What `store_top_k` wrote, as columns with one tensor per example.

    Raises:
        DataError: if it is not there, or was written for other examples or at another temperature.
    """
    if not path.exists():
        raise DataError(f"{path}: no such file; a run with top_k leaves one, teacher-....safetensors, in its directory")
    with safe_open(path, framework="pt") as file:
        about, stored = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if about["examples"] != _digest(*(_digest(*example(data, i)) for i in range(len(data)))):
        raise DataError(f"{path}: the teacher was asked about other tokens than this data has; ask it again (top_k)")
    if float(about["temperature"]) != temperature:
        at = about["temperature"]
        raise DataError(f"{path}: stored at temperature {at}, and teacher.temperature is {temperature}; use {at}")
    lengths = stored["length"].tolist()
    return {name: list(torch.split(stored[name[8:]], lengths)) for name in ("teacher_ids", "teacher_logprobs")}


def _told(beta: float, temperature: float) -> TeacherFn:
    def told(batch: Batch) -> TeacherOutputs:
        ids, logprobs = batch.columns["teacher_ids"], batch.columns["teacher_logprobs"]
        return TeacherOutputs(beta, temperature, top_k=(ids.long(), logprobs))

    return told


def _digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
