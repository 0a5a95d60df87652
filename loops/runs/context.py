"""An open run: its settings, ranks, tokenizer, model and data, and how losses train on them.

config.yaml      the resolved configuration
run.json         how and on what the run was started, see `record`
metrics.jsonl    one JSON object per step
checkpoints/     see `checkpoint`
hub/             models that are to be uploaded, see `hub`
model/           the trained model, as transformers loads it; adapter/ beside it where adapters were trained
curves.png       the metrics over the steps
"""

import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.tracking import GeneralTracker, get_available_trackers
from accelerate.utils import AutocastKwargs, LoggerType, set_seed
from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ...data import (
    Accounting,
    Batches,
    Records,
    Stream,
    StreamBatches,
    Tokenization,
    load_data,
    token_cost,
    where,
)
from ...data.images import ImageReader
from ..config import Common, Routed
from ..models.backbone import Backbone, evaluating
from ..models.end_tokens import add_end_tokens
from ..models.images import ImageInputs
from ..models.io import NoProcessorError, load_images, load_model, load_tokenizer
from ..models.policy import Policy
from ..redaction import hide, resolved_data
from ..registry import nearest
from ..train import optimizers
from ..train.losses import TensorReader, Term, router_loss
from ..train.mix import STEP_COUPLED
from .agreement import check_agreement
from .directory import check_directory, to_yaml
from .feed import Feed, StepFeed, stored_tokens
from .hub import check_repository
from .liveness import form_restarted_group, open_watch
from .parallel import check_launcher, check_ranks, open_mesh
from .preflight import check_files, check_tokens
from .ranks import from_main, gloo_group, main_first
from .reference import Reference, SyncedReference, load_reference, make_reference
from .training import Training

Model = TypeVar("Model", bound=Backbone)
TokenColumns = Callable[[Dataset], Mapping[str, Sequence[Tensor]]]

log = logging.getLogger(__name__)

_NAMED = 4  # rows in a message
# Columns of encoded examples that no user named, so that no loss can read them.
_ENCODED = {"prompt", "completions", "trained", "images", "row", "_row", "teacher_prompt"}


@dataclass
class RunContext(Generic[Model]):
    """An open run: its model, data and settings. `open_run` makes one from a configuration.

    Attributes:
        config: the recipe's settings.
        model: the policy, or the scorer, that is trained.
        data: encoded examples; in online recipes, prompts.
        records, eval_records: the parts of the data that the examples were made from.
        stream: the source of every step's examples, if the data are streamed; ``data`` holds those
            of the first step.
        description: the configuration as it was opened, in YAML; see `to_yaml`.
        accounting, eval_accounting: of the data, and of the held-out data if there are any.
        encode: makes examples of further records, as ``data`` was made.
        synced: the reference, or the teacher, if it follows the policy.
    """

    config: Any
    accelerator: Accelerator
    tokenizer: PreTrainedTokenizerBase
    model: Model
    data: Dataset
    eval_data: Dataset | None = None
    records: Sequence[Records] = ()
    eval_records: Sequence[Records] = ()
    stream: Stream | None = None
    description: str = ""
    encode: Callable[[list[Records]], tuple[Dataset, Accounting]] | None = None
    accounting: Accounting | None = None
    eval_accounting: Accounting | None = None
    synced: SyncedReference | None = field(default=None, init=False)

    @property
    def directory(self) -> Path:
        if self.config.output is None:
            raise ValueError(
                "output: this run keeps files in its directory, and has none; name one"
            )
        return Path(self.config.output)

    def file(self, name: str) -> Path | None:
        """Path of a file in the run directory; None if the run has no directory."""
        return None if self.config.output is None else self.directory / name

    def name_rows(self, step: int, examples: Sequence[int]) -> str:
        """Name, for a message, the first few rows that examples of a step were made of."""
        data = self.data
        records = self.records
        if self.stream is not None:
            data = self.stream.open(step)
            records = self.stream.records(step)
        known = next((name for name in ("_row", "row") if name in data.column_names), None)
        if known is None:  # the caller has encoded them
            rows = list(dict.fromkeys(examples))
            names = [f"example {row + 1}" for row in rows[:_NAMED]]
        else:
            rows = list(dict.fromkeys(data[list(examples)][known]))
            names = [where(records, row) for row in rows[:_NAMED]]
        named = ", ".join(names)
        return named if len(rows) <= _NAMED else f"{named} and {len(rows) - _NAMED} more"

    def end_with(self, tokens: Collection[int]) -> None:
        """Have the model end completions with these tokens too, and say so. Every rank calls it."""
        if line := add_end_tokens(self.model.plain, tokens, self.tokenizer):
            self.accelerator.print(line)

    def feed(
        self,
        data: Dataset,
        *,
        whole: bool = False,
        per_token: Sequence[TokenColumns] = (),
        **options: Any,
    ) -> Feed:
        """Training batches of ``data``, or the ``whole`` of it as one step.

        Args:
            per_token: each ``columns(data)`` gives columns that are computed before training, by
                name.
            options: further arguments of `Feed`.
        """
        config = self.config
        device = self.accelerator.device
        # Ranks that compute the same rows together are one reader of the data.
        together = config.parallel.ranks_per_batch
        rank = self.accelerator.process_index // together
        ranks = self.accelerator.num_processes // together
        _check_columns(data, options.get("columns", ()))
        steps = 1 if whole else config.steps
        computed: dict[str, Sequence[Tensor]] = {}
        for columns in per_token:
            computed |= columns(data)
        shared_prompt = self.model.layout == "shared"
        if self.stream is not None and data is self.data:
            if computed:
                raise ValueError(
                    f"streaming: {', '.join(computed)} can't be computed of all data before training"
                )
            streamed = StreamBatches(
                self.stream,
                steps=steps,
                ranks=ranks,
                micro_tokens=config.micro_tokens,
                shared_prompt=shared_prompt,
            )
            return Feed(self.stream, streamed, rank, device, **options)
        batches = Batches(
            token_cost(data, shared_prompt=shared_prompt),
            batch_size=len(data) if whole else config.batch_size,
            micro_tokens=config.micro_tokens,
            seed=config.seed,
            shuffle=config.shuffle and not whole,
            epochs=config.epochs if steps is None else None,
            steps=steps,
            ranks=ranks,
        )
        images = None if self.model.images is None else self.model.images.reader
        return Feed(data, batches, rank, device, per_token=computed, images=images, **options)

    def held_out(self, rows: object, **options: Any) -> Feed:
        """Further rows, encoded as ``data`` was, as one step.

        Every rank calls it with the same rows.

        Raises:
            ValueError: if the reference's log-probs were computed before training, when it was the
                policy.
        """
        precomputed = getattr(self.config, "reference", None) == "precompute"
        if precomputed and self.config.ref_model is None:
            raise ValueError(
                "evaluate: the reference was the policy before training, of which only the log-probs of data and "
                "eval_data are left; pass these rows as eval_data, or set reference to copy"
            )
        assert self.encode is not None  # set by `open_run`
        records, _ = load_data(rows, seed=self.config.seed)
        data, _ = self.encode(records)
        return self.feed(data, whole=True, **options)

    def reference(
        self, kind: str, *, needed: bool = True, temperature: float = 1.0
    ) -> tuple[Reference | None, TokenColumns]:
        """The reference: the policy before the first step, or ``config.ref_model``; and columns of
        its precomputed log-probs.

        Args:
            kind: as the setting `Referenced.reference` says; auto is a copy of the adapters alone
                if they don't start at zero. The copy of a policy in shards is read from
                ``config.model``, in the same precision: bfloat16 weights would give other log-probs
                than the policy starts with.
            needed: whether any loss takes a reference; none is made otherwise.
            temperature: softmax temperature of the policy that it is compared with, unless it is
                precomputed.

        Raises:
            ValueError: if it is to follow the policy and can't.
        """
        config = self.config
        if not needed:
            return None, lambda data: {}
        policy: Any = self.model  # a Policy: no recipe of scorers has a reference
        if config.ref_model is not None:
            policy = load_reference(config, self.tokenizer, policy)
        # In the policy's precision: rounding in only one of the two would look like a difference.
        autocast = self.accelerator.autocast()
        if kind == "precompute":
            # Before the first step the policy is its own reference: new adapters add nothing.
            current = autocast(torch.no_grad()(lambda batch: {"logprob": policy(batch).logprob}))

            def columns(data: Dataset) -> Mapping[str, Sequence[Tensor]]:
                path = self.directory / f"reference-{data._fingerprint}.safetensors"
                # The settings were compared with config.yaml, so that the file is of this run.
                reuse = config.resume and path.with_name("config.yaml").exists()
                feed = self.feed(data, whole=True)
                # without the dropout of adapters that are trained further
                with evaluating(policy.model):
                    tensors, _ = stored_tokens(path, feed, current, self.accelerator, reuse)
                return {"ref_logprob": tensors["logprob"]}

            return lambda batch: batch.columns["ref_logprob"], columns
        reference = make_reference(policy, config, kind, temperature=temperature)
        self.synced = reference if isinstance(reference, SyncedReference) else None
        return autocast(reference), lambda data: {}

    def train(
        self,
        losses: Mapping[str, Term],
        read: TensorReader,
        feed: StepFeed | None = None,
        *,
        save: Callable[[], None] = lambda: None,
        memory: object = None,
        **options: object,
    ) -> Training:
        """Prepare to optimize, evaluate, save and report, from the newest checkpoint if the run is
        resumed.

        Args:
            losses, read, save: see `Training`.
            feed: unless given, that of the data, evaluated on all held-out data. It is closed with
                the run, or at once if the run can't begin.
            memory: of `Feed`, for the feed of the data.
            options: further arguments of `RunContext.feed`.

        Raises:
            ValueError: if a loss couples all pairs of a step and the step is split.
        """
        with ExitStack() as unless_opened:
            if feed is not None:
                unless_opened.callback(feed.close)
            self._check_losses(losses)
            if isinstance(self.config, Routed):
                coefficient = self.config.router_aux_loss_coef
                losses = {**losses, **router_loss(cast(Policy, self.model), coefficient)}
            feed = feed or self._feed_of_data(memory, **options)
            self._warn_of_schedule(feed)
            training = Training(self, losses, read, feed, save)
            unless_opened.pop_all()
        return training

    def _check_losses(self, losses: Mapping[str, Term]) -> None:
        coupled = sorted(STEP_COUPLED & losses.keys())
        if coupled and (self.config.micro_tokens is not None or self.accelerator.num_processes > 1):
            raise ValueError(
                f"{coupled[0]}: couples all pairs of a step, so they must be in one micro-batch on one rank; "
                "pass --micro_tokens null and run one process"
            )
        if not any(loss.coefficient for loss in losses.values()):
            raise ValueError(
                "loss: every coefficient is 0, so nothing would be learned; give one above 0"
            )

    def _warn_of_schedule(self, feed: StepFeed) -> None:
        """Warn of evaluations that have no data, and of a warmup that never ends."""
        if self.config.eval_every and not feed.evaluates:
            log.warning("eval_every: there is no eval_data, so nothing is evaluated")
        if self.config.warmup >= max(feed.steps, 1):
            short = "warmup: %d steps of %d, so the learning rate stays below its peak"
            log.warning(short, self.config.warmup, feed.steps)

    def _feed_of_data(self, memory: Any, **options: Any) -> Feed:
        """The feed of the training data, which evaluates on all held-out data."""
        evaluation = None
        if self.eval_data is not None:
            evaluation = self.feed(self.eval_data, whole=True, **options)
        of_rows = partial(self.held_out, **options)
        return self.feed(
            self.data, **options, memory=memory, evaluation=evaluation, of_rows=of_rows
        )


def _check_columns(data: Dataset, columns: Sequence[str]) -> None:
    """Raise ValueError if a loss reads a column that the data lacks."""
    for name in columns:
        if name not in data.column_names:
            numbers = [name for name in data.column_names if name not in _ENCODED]
            there = f"there are {', '.join(numbers)}" if numbers else "there are none"
            raise ValueError(
                f"data: no column {name!r}, which a loss reads; of columns of numbers, {there}"
            )


def open_run(
    config: Common,
    encode: Callable[..., tuple[Dataset, Accounting]],
    wrap: Callable[..., object] | None = None,
    *,
    records: tuple[list[Records], list[Records]] | None = None,
    load_weights: Callable[..., nn.Module] | None = None,
    accelerator: Accelerator | None = None,
    no_images: str = "",
    **options: object,
) -> RunContext[Any]:
    """Open the run directory, encode the data, and load the model.

    Args:
        encode: ``encode(records, tokenizer, ..., **options)``, see `burnish.data`.
        wrap: makes a `Policy` or a `Scorer` of the model; a policy by default. If there are ranks
            to shard it over, ``wrap(model, mesh=..., param_dtype=...)``.
        records: training and held-out records, as `load_data` returns them.
        load_weights: ``load_weights(config, images=...)`` loads the model, which may see images; a
            causal language model by default.
        accelerator: the one of a run that is already open.
        no_images: why this run can't train on rows with images; "" if it can.

    Raises:
        ValueError: as `open_accelerator` does, or if the data are streamed and no number of steps
            is configured; or if there are images that this run can't train on.
    """
    accelerator = accelerator or open_accelerator(config)
    # Now: of a model that is an object it has a digest of the weights, which training changes.
    description = "" if config.output is None else to_yaml(config)
    # An absolute path: a reward may change the working directory.
    config = replace(config, output=config.output and os.path.abspath(config.output))
    tokenizer = load_tokenizer(config)
    reader, no_images = open_images(config, tokenizer, no_images)
    encoder = tokenizer if reader is None or no_images else reader
    how = tokenization(config, no_images)

    def encoded(parts: list[Records]) -> tuple[Dataset, Accounting]:
        return _encoded(accelerator, partial(encode, parts, encoder, how, **options))

    stream = None
    if config.streaming:
        in_memory = replace(how, cached=False)
        stream = _open_stream(
            config, partial(encode, tokenizer=encoder, options=in_memory, **options)
        )
    if records is None:
        records = _read_records(config, accelerator)
    if stream is None:
        data, accounting = encoded(records[0])
    else:
        data, accounting = stream.open(0), stream.accounting
        _warn(accelerator, accounting)
    eval_data: Dataset | None = None
    eval_accounting: Accounting | None = None
    if records[1]:
        eval_data, eval_accounting = encoded(records[1])
    # Of a stream, nobody knows whether later rows have images.
    may_have_images = stream is not None or _has_images(accounting) or _has_images(eval_accounting)
    sees = encoder is reader and may_have_images
    if sees:
        _check_images(config)
    load = load_weights or load_model
    model = load(config, images=sees)
    check_tokens(model, tokenizer, data, eval_data)
    make: Callable[..., Any] = wrap or partial(Policy, **config.kernel)
    wrapped = _wrapped(config, accelerator, model, make, reader, sees=sees)
    run = RunContext(
        config,
        accelerator,
        tokenizer,
        wrapped,
        data,
        eval_data,
        *records,
        stream,
        description,
        encoded,
    )
    run.accounting = accounting
    run.eval_accounting = eval_accounting
    run.end_with(_end_tokens(config, tokenizer, accounting))
    return run


def _encoded(
    accelerator: Accelerator, encode: Callable[[], tuple[Dataset, Accounting]]
) -> tuple[Dataset, Accounting]:
    """Encoded rows; the main process encodes them first, and the others find them in its cache."""
    data, accounting = main_first(accelerator, encode)
    accelerator.print(hide(str(accounting)))
    _warn(accelerator, accounting)
    return data, accounting


def _warn(accelerator: Accelerator, accounting: Accounting) -> None:
    if accelerator.is_main_process:
        for warning in accounting.warnings():
            log.warning("%s", hide(warning))


def _end_tokens(
    config: Common, tokenizer: PreTrainedTokenizerBase, accounting: Accounting
) -> set[int]:
    """The tokens that end an answer in the data, and the one that is configured to."""
    ends = set(accounting.end_tokens)
    if config.eos_token is not None:
        ends.add(tokenizer.eos_token_id)
    return ends


def _has_images(accounting: Accounting | None) -> bool:
    return accounting is not None and accounting.images > 0


def _open_stream(config: Common, encode: Callable[..., tuple[Dataset, Accounting]]) -> Stream:
    """The source of every step's examples, which encodes a step's rows when they are asked for."""
    settings: Any = config  # of an offline recipe, which has a batch size
    return Stream(
        resolved_data(config.data),
        encode,
        batch_size=settings.batch_size,
        seed=config.seed,
        shuffle=config.shuffle,
    )


def _read_records(config: Common, accelerator: Accelerator) -> tuple[list[Records], list[Records]]:
    """Training and held-out records; the main process reads them first, for its cache."""
    read = partial(
        load_data,
        resolved_data(config.data),
        resolved_data(config.eval_data),
        seed=config.seed,
        streaming=config.streaming,
    )
    return main_first(accelerator, read)


def _wrapped(
    config: Common,
    accelerator: Accelerator,
    model: nn.Module,
    make: Callable[..., Any],
    reader: ImageReader | None,
    *,
    sees: bool,
) -> Any:
    """The policy or scorer of a model, on this rank's device, or in shards of the ranks.

    Args:
        reader: of a vision-language model.
        sees: whether the model is to see images.
    """
    options: dict[str, Any] = {}
    if sees and reader is not None:
        options["images"] = ImageInputs(reader)
    mesh = open_mesh(config, accelerator)
    quantized = config.quantize is not None or getattr(model, "is_quantized", False)
    if mesh is not None:  # shards find their own device
        options["mesh"] = mesh
        autocast = config.dtype in ("bfloat16", "float16")
        options["param_dtype"] = getattr(torch, config.dtype) if autocast else None
    elif not quantized:  # bitsandbytes has placed quantized weights
        model = model.to(accelerator.device)
    wrapped = make(model, **options)
    wrapped.reader = reader
    return wrapped


def open_images(
    config: Common, tokenizer: PreTrainedTokenizerBase, no_images: str = ""
) -> tuple[ImageReader | None, str]:
    """The processor of a vision-language model, and why rows with images can't be trained on; "" if
    they can, or if the model is one of text, for which the encoder says so.

    Args:
        no_images: of `open_run`.
    """
    try:
        reader = load_images(config, tokenizer)
    except NoProcessorError as error:
        return None, str(error)
    return reader, "" if reader is None else no_images


def _check_images(config: Common) -> None:
    """Raise ValueError for settings that no run with images was tried with."""
    refused = {
        "parallel.cp_size": config.parallel.cp_size > 1,
        "parallel.tp_size": config.parallel.tp_size > 1,
        "neftune_noise_alpha": config.neftune_noise_alpha > 0,
        "quantize": config.quantize is not None,
    }
    for name, is_set in refused.items():
        if is_set:
            raise ValueError(
                f"{name}: not with images so far; leave it out, or train on text alone"
            )


def tokenization(config: Common, no_images: str = "") -> Tokenization:
    return Tokenization(
        config.longest,
        config.truncation,
        config.on_bad_row,
        chat_template_kwargs=config.chat_template_kwargs,
        no_images=no_images,
        processes=config.dataset_num_proc,
    )


def open_accelerator(config: Common) -> Accelerator:
    """The `Accelerator` of a run whose directory is free, or holds the same run to resume.

    Raises:
        ValueError: if the directory is taken, or settings contradict each other or what is
            installed.
    """
    config.refuse_contradictions()
    check_launcher()
    AcceleratorState._reset_state()  # an earlier run in this process may have had another precision
    trackers = _trackers(config)
    optimizers.check(config)
    # The order matters: the watch sees a rank that ends while the process group is made, and the
    # group of restarted ranks must be there before Accelerate would make one.
    watched = open_watch(config.hang_seconds)
    form_restarted_group()
    accelerator = Accelerator(
        cpu=not torch.accelerator.is_available(),
        mixed_precision={"bfloat16": "bf16", "float16": "fp16"}.get(config.dtype, "no"),
        log_with=trackers or None,
        project_dir=config.output,
        # Cached casts of weights would add up to the whole model on each rank.
        kwargs_handlers=[AutocastKwargs(cache_enabled=config.parallel.copy_size == 1)],
    )
    if not watched:  # the launcher is not torch's: only the group told of other ranks
        open_watch(config.hang_seconds)
    gloo_group("control")
    check_agreement(config, accelerator)  # before anything else may end, or wait, on one rank alone
    check_files(config)
    # Its own: the shared one is changed by runs of another precision, and by the
    # `TrainingArguments` of transformers.
    accelerator.state.__dict__ = dict(vars(accelerator.state))
    if config.dtype == "float16":
        scale_loss(accelerator)
    check_ranks(config, accelerator)
    if config.tf32 is not None:
        torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
    # left by a run that failed between two micro-batches
    accelerator.gradient_state._set_sync_gradients(True)
    set_seed(config.seed)
    from_main(accelerator, lambda: check_directory(config))
    if config.hub.id is not None:
        from_main(accelerator, lambda: check_repository(config.hub))
    return accelerator


def scale_loss(accelerator: Accelerator) -> None:
    """Turn float16's autocast and the scale of the loss on where Accelerate does not: on a CPU."""
    if accelerator.scaler is None:
        accelerator.native_amp = True
        accelerator.scaler = torch.amp.GradScaler(accelerator.device.type)


def _trackers(config: Common) -> list[str | GeneralTracker]:
    """The configured trackers, by name or as objects.

    Raises:
        ValueError: if there is no such tracker, or it is not installed.
    """
    named = config.report_to or []
    if isinstance(named, str):
        named = [named]
    trackers = [tracker for tracker in named if tracker != "none"]
    for tracker in trackers:
        if not isinstance(tracker, str):
            continue
        if tracker not in LoggerType.list():
            known = [*LoggerType.list(), "none"]
            raise ValueError(nearest("report_to: no tracker", tracker, known))
        if tracker != "all" and tracker not in map(str, get_available_trackers()):
            raise ValueError(f"report_to: {tracker} is not installed; install it, or leave it out")
    return trackers
