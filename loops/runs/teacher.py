"""The teacher of distillation: a second model in memory, or its likeliest tokens, stored before
training or asked of a server.

A teacher is a function ``teacher(batch) -> TeacherOutputs``. Given these outputs, a policy also
returns the per-token divergence from the teacher, in the same forward pass.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from datasets import Dataset
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ...data import (
    Accounting,
    DataError,
    Example,
    Parts,
    Records,
    Stream,
    Tokenization,
    check_same_vocabulary,
    encode_prompts,
    encode_supervised,
    load_data,
    where,
)
from ...data.columns import OPTION_COLUMNS
from ...data.examples import TrainOn
from ...objectives import (
    Stats,
    alpha_beta_divergence,
    skew_forward_kl,
    skew_reverse_kl,
    taid,
)
from ..batch import Batch
from ..config import Teacher
from ..models.io import language_model_class, load_images, read_model
from ..models.lm_head import TeacherOutputs
from ..models.policy import Policy
from ..models.sharding import left_in_files
from ..registry import as_setting_error
from .context import RunContext, TokenColumns
from .feed import StepFeed, digest, stored_tokens
from .reference import SyncedReference, check_same_processor, frozen_policy_like


def open_teacher(
    context: RunContext[Policy], config: Teacher, *, needed: bool, model: Policy | None = None
) -> tuple[Callable[[Batch], TeacherOutputs] | None, TokenColumns]:
    """The teacher of a checked configuration, loaded unless it is given as ``model``, and the
    columns that hold its outputs if they are stored before training. A server's are columns of
    each step's batches.

    The file of the stored tokens has the k likeliest at every trained token, ids int32 and logprobs
    [tokens, k], and in its metadata the temperature and a digest of the examples.

    Raises:
        DataError: if the teacher has other tokens than the student, or was stored for other data.
    """
    if not needed:
        return None, lambda data: {}
    if model is None and config.model is not None:
        model = load_teacher(context, config)
    if config.server is not None:
        return partial(outputs_of_columns, config), lambda data: {}
    if model is None or config.top_k is not None:
        stored = _Stored(context, config, model)
        return partial(outputs_of_columns, config), stored.columns

    def live(batch: Batch) -> TeacherOutputs:
        seen = as_the_teacher_reads(batch)
        with context.accelerator.autocast():
            outputs = model.teacher_outputs(
                seen,
                beta=beta_of(config),
                temperature=config.temperature,
                dense=not context.model.fused,
            )
        return replace(outputs, objective=objective_of(config, batch))

    return live, lambda data: {}


def beta_of(config: Teacher) -> float:
    """β of the generalized Jensen-Shannon divergence: 0 and 1 are its limits, the two KLs."""
    limits = {"forward_kl": 0.0, "reverse_kl": 1.0}
    return limits.get(config.divergence, config.beta)


@dataclass
class _Stored:
    """A teacher whose likeliest tokens are stored before training.

    Attributes:
        model: None where they were stored by an earlier run.
    """

    context: RunContext[Policy]
    config: Teacher
    model: Policy | None

    def columns(self, data: Dataset) -> Mapping[str, Sequence[Tensor]]:
        """The likeliest tokens of every trained token, as `outputs_of_columns` reads them."""
        config = self.config
        context = self.context
        # What a row was made of, so that the file serves other runs on the same data.
        names = [name for name in Example._fields if name in data.column_names]
        metadata = {
            "temperature": str(config.temperature),
            "examples": digest(data.select_columns(names)),
        }
        path = Path(
            config.logprobs or context.directory / f"teacher-{data._fingerprint}.safetensors"
        )
        own = context.config.resume and path.with_name("config.yaml").exists()
        reuse = own or bool(config.logprobs)
        feed = context.feed(data, whole=True)
        tensors, written = stored_tokens(
            path, feed, self.likeliest, context.accelerator, reuse, metadata
        )
        if written["examples"] != metadata["examples"]:
            raise DataError(
                f"{path}: these are the teacher's log-probs of other data; store them again (teacher.top_k)"
            )
        at = written["temperature"]
        if float(at) != config.temperature:
            raise DataError(
                f"{path}: stored at temperature {at}, and teacher.temperature is {config.temperature}; use {at}"
            )
        return top_k_columns(tensors["ids"], tensors["logprobs"])

    def likeliest(self, batch: Batch) -> Mapping[str, Tensor]:
        """The k likeliest tokens at every trained token, computed by the teacher."""
        config = self.config
        if self.model is None:
            raise DataError(
                f"teacher.logprobs: {config.logprobs} can't be read; store them again (teacher.top_k)"
            )
        assert config.top_k is not None
        # The larger of the two has rows of padding beyond the other's vocabulary.
        both = (self.model, self.context.model)
        vocab = min(each.plain.config.get_text_config().vocab_size for each in both)
        if not 1 <= config.top_k <= vocab:
            raise ValueError(
                f"teacher.top_k: must be in [1, {vocab}], the size of the vocabulary, got {config.top_k}"
            )
        ids, logprobs = self.model.top_k(
            batch, k=config.top_k, temperature=config.temperature, vocab=vocab
        )
        return {"ids": ids.int(), "logprobs": logprobs}


LOGP_COLUMN = "teacher_logp"
Entries = TypeVar("Entries")


def top_k_columns(ids: Entries, logprobs: Entries) -> dict[str, Entries]:
    """The columns of a teacher's likeliest tokens, int32 and float32 [tokens, k]."""
    return {"teacher_ids": ids, "teacher_logprobs": logprobs}


def outputs_of_columns(config: Teacher, batch: Batch) -> TeacherOutputs:
    """The outputs of a teacher whose likeliest tokens are columns of the batch."""
    ids = batch.columns["teacher_ids"].long()
    return TeacherOutputs(
        beta_of(config),
        config.temperature,
        top_k=(ids, batch.columns["teacher_logprobs"]),
        objective=objective_of(config, batch),
    )


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


PROMPT_COLUMN = "teacher_prompt"


def encode_with_teacher_prompts(
    records: Parts,
    tokenizer: PreTrainedTokenizerBase,
    options: Tokenization,
    *,
    train_on: TrainOn,
    column: str,
    reader: Callable[[], PreTrainedTokenizerBase] | None = None,
) -> tuple[Dataset, Accounting]:
    """Demonstrations with a column ``teacher_prompt``, the token ids that a teacher reads in place
    of the prompt.

    Args:
        column: of the records, with the teacher's prompts, as text or messages.
        reader: the teacher's tokenizer and chat template, if they are not the student's.

    Raises:
        DataError: if there is no such column, or if an example's prompt is not its row's, so that
            another can't take its place.
    """
    parts, _ = load_data(records)
    for part in parts:
        for name in ("prompt", column):
            if name not in part.dataset.column_names:
                there = ", ".join(part.dataset.column_names)
                raise DataError(
                    f"{part.source}: teacher.prompt wants rows with a column prompt, a completion, and a column "
                    f"{column}; there are {there}"
                )
    data, accounting = encode_supervised(parts, tokenizer, options, train_on=train_on)
    whole = replace(options, max_length=None, truncation=None)
    own = _prompts_by_row(parts, tokenizer, whole, "prompt")
    theirs = _prompts_by_row(parts, tokenizer if reader is None else reader(), whole, column)
    prompts = []
    for row, prompt in zip(data["_row"], data["prompt"], strict=True):
        if prompt != own[row]:
            raise DataError(
                f"{where(parts, row)}: what the student reads before the tokens that train is not its prompt, so the "
                "teacher's can't take its place; set train_on to completion, and a max_length that cuts no prompt"
            )
        prompts.append(theirs[row])
    return data.add_column(PROMPT_COLUMN, prompts), accounting


def _prompts_by_row(
    parts: Sequence[Records], tokenizer: PreTrainedTokenizerBase, options: Tokenization, column: str
) -> dict[int, list[int]]:
    """The token ids of a column of prompts, by the row of the records."""
    renamed = []
    for part in parts:
        kept = [name for name in (column, *OPTION_COLUMNS) if name in part.dataset.column_names]
        dataset = part.dataset.select_columns(kept).rename_columns({column: "prompt"})
        renamed.append(replace(part, dataset=dataset))
    encoded, _ = encode_prompts(renamed, tokenizer, options)
    return dict(zip(encoded["row"], encoded["prompt"], strict=True))


def add_teacher_prompts(
    data: Dataset | Stream, plan: Sequence[Sequence[int]], micro_batches: Sequence[Batch]
) -> list[Batch]:
    """The micro-batches with the teacher's prompts, a column [examples, longest], filled up by −1.

    Args:
        data: examples of `encode_with_teacher_prompts`.
        plan: the indices of the examples of each micro-batch.
    """
    prepared = []
    for batch, indices in zip(micro_batches, plan, strict=True):
        prompts = [data[index][PROMPT_COLUMN] for index in indices]
        prepared.append(with_teacher_prompts(batch, prompts))
    return prepared


def with_teacher_prompts(batch: Batch, prompts: Sequence[Sequence[int]]) -> Batch:
    """The batch with a teacher's prompt for each example, as `add_teacher_prompts` adds them."""
    column = torch.zeros(0, 0, dtype=torch.int64)
    if prompts:
        tensors = [torch.tensor(prompt) for prompt in prompts]
        column = pad_sequence(tensors, batch_first=True, padding_value=-1)
    columns = {**batch.columns, PROMPT_COLUMN: column.to(batch.target.device)}
    return replace(batch, columns=columns)


def as_the_teacher_reads(batch: Batch) -> Batch:
    """The same completions, after the teacher's prompts where it has its own."""
    if PROMPT_COLUMN not in batch.columns:
        return batch
    examples = []
    for example, ids in zip(batch.examples, batch.columns[PROMPT_COLUMN].tolist(), strict=True):
        examples.append(example._replace(prompt=[token for token in ids if token >= 0]))
    return replace(batch, examples=examples)


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

    def prepare(self, feed: StepFeed, step: int, micro_batches: list[Batch]) -> list[Batch]:
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


def load_teacher(
    context: RunContext[Policy],
    config: Teacher,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Policy:
    """The teacher's model, frozen.

    Args:
        tokenizer: of a teacher that has its own; None for one that must have the student's.

    Raises:
        DataError: if it has other tokens than the student, or makes other pixels of images.
    """
    assert config.model is not None
    model = config.model
    if isinstance(model, str):
        model = _read_teacher(context, config, model, tokenizer)
    else:
        _check_given_teacher(context, model, tokenizer or context.tokenizer)
    return frozen_policy_like(context.model, model, context.config)


def follow_student(context: RunContext[Policy], config: Teacher, teacher: Policy) -> None:
    """Have the teacher follow the student from now on, as a part of the run's checkpoints.

    Raises:
        ValueError: if it has other weights than the student.
    """
    assert config.sync_steps is not None
    shapes = {name: each.shape for name, each in context.model.named_parameters()}
    if {name: each.shape for name, each in teacher.named_parameters()} != shapes:
        raise ValueError(
            "teacher.sync_steps: the teacher has other weights than the student, which it can't follow; give a copy "
            "of the student as teacher.model, or leave sync_steps out"
        )
    context.synced = SyncedReference(
        context.model, teacher, interval=config.sync_steps, alpha=config.mixup_alpha
    )


def _check_given_teacher(
    context: RunContext[Policy], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Raise DataError if a model passed as an object shares weights, or lacks tokens."""
    if {*model.parameters()} & {*context.model.parameters()}:
        raise DataError(
            "teacher.model: it has weights of the student, which training changes; give a copy of it"
        )
    embeddings: Any = model.get_input_embeddings()
    size = embeddings.num_embeddings
    if size < len(tokenizer):
        raise DataError(
            f"teacher.model: {size} embeddings, and the tokenizer has {len(tokenizer)} tokens; "
            "give a teacher with the same tokenizer"
        )


def _read_teacher(
    context: RunContext[Policy],
    config: Teacher,
    name: str,
    tokenizer: PreTrainedTokenizerBase | None,
) -> Any:
    """Read a teacher by its name, after its tokenizer and processor were compared."""
    student = context.config
    named = as_setting_error(f"teacher.model: {name}")
    if tokenizer is None:
        tokenizer = named(AutoTokenizer.from_pretrained)(name)
        check_same_vocabulary(context.tokenizer, tokenizer)
    architecture = named(AutoConfig.from_pretrained)(name)
    images = context.model.images
    if images is not None:
        settings = replace(student, model=name, model_revision=None, tokenizer=None)
        check_same_processor("teacher.model", images.reader, load_images(settings, tokenizer))
    dtype = getattr(torch, student.dtype)
    if config.sync_steps:  # 16 bits would lose small updates
        dtype = torch.promote_types(dtype, torch.float32)
    with left_in_files(student.parallel.copy_size > 1):
        return named(read_model)(language_model_class(architecture), name, dtype=dtype)
