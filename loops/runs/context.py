"""An open run: its settings, ranks, tokenizer, model and data, and how losses train on them.

config.yaml      the resolved configuration
metrics.jsonl    one JSON object per step
checkpoints/     see `checkpoint`
model/           the trained model, as transformers loads it; adapter/ beside it where adapters were trained
curves.png       the metrics over the steps
"""

import fcntl
import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import yaml
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.tracking import get_available_trackers
from accelerate.utils import LoggerType, set_seed
from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, get_scheduler

from ...data import Accounting, Batches, Records, Tokenization, load, token_cost
from ..config import Common
from ..models.backbone import Backbone
from ..models.io import load_model, load_tokenizer
from ..models.policy import Policy
from ..registry import build, find, nearest
from ..train.losses import Losses, TensorReader, compose, weightings
from ..train.mix import STEP_COUPLED
from . import checkpoint
from .feed import Feed, digest, stored_tokens
from .reference import Reference, adapters_off, column, frozen_copy
from .training import Training

Model = TypeVar("Model", bound=Backbone)
TokenColumns = Callable[[Dataset], Mapping[str, Sequence[Tensor]]]

log = logging.getLogger(__name__)

# What may differ when a run is resumed: none of it changes the steps that were already taken. A checkpoint knows its
# data by content, wherever it lies now.
_FREE = {"resume", "output", "data", "steps", "epochs", "eval_every", "report_to", "vllm"}
_FREE |= {"save_every", "save_minutes", "keep", "keep_best", "dataset_num_proc"}


@dataclass
class RunContext(Generic[Model]):
    """An open run, and what its losses are applied to. `open_run` makes one from a configuration.

    Attributes:
        config: the recipe's settings.
        model: the policy, or the scorer, that is trained.
        data: encoded examples; in online recipes, prompts.
        description: the configuration as it was opened, in YAML; see `to_yaml`.
    """

    config: Any
    accelerator: Accelerator
    tokenizer: PreTrainedTokenizerBase
    model: Model
    data: Dataset
    eval_data: Dataset | None = None
    description: str = ""

    @property
    def directory(self) -> Path:
        if self.config.output is None:
            raise ValueError("output: this run keeps something in its directory, and has none; name one")
        return Path(self.config.output)

    def file(self, name: str) -> Path | None:
        """A file in the directory of the run; None if it has none."""
        return None if self.config.output is None else self.directory / name

    def feed(
        self, data: Dataset, *, whole: bool = False, per_token: Sequence[TokenColumns] = (), **options: Any
    ) -> Feed:
        """Training batches of ``data``, or the ``whole`` of it as one step.

        Args:
            per_token: each ``columns(data)`` gives columns that are computed before training, by name.
            options: further ones of `Feed`.
        """
        config, accelerator = self.config, self.accelerator
        for name in options.get("columns", ()):
            if name not in data.column_names:
                raise ValueError(f"data: no numeric column {name!r}, which a loss reads; add it, or leave it out")
        steps = 1 if whole else config.steps
        batches = Batches(
            token_cost(data, shared_prompt=self.model.layout == "shared"),
            batch_size=len(data) if whole else config.batch_size,
            micro_tokens=config.micro_tokens,
            seed=config.seed,
            shuffle=config.shuffle and not whole,
            epochs=config.epochs if steps is None else None,
            steps=steps,
            ranks=accelerator.num_processes,
        )
        computed = {name: tensors for columns in per_token for name, tensors in columns(data).items()}
        return Feed(data, batches, accelerator.process_index, accelerator.device, per_token=computed, **options)

    def reference(
        self, kind: str, *, needed: bool = True, temperature: float = 1.0
    ) -> tuple[Reference | None, TokenColumns]:
        """The policy as it is before the first step, frozen; and the columns that it reads where it is precomputed.

        Args:
            kind: a frozen copy, the policy without its adapters, or one pass over the data before training, cached in
                the run directory; auto is adapters_off where there are some, and otherwise copy.
            needed: whether any loss takes a reference; none is made otherwise.
            temperature: of its softmax, where it is not precomputed: that of the policy it is compared with.
        """
        if not needed:
            return None, lambda data: {}
        policy: Any = self.model
        # In the precision of the policy: rounding in one of the two alone would look like a difference.
        autocast = self.accelerator.autocast()
        if kind == "precompute":
            # Before the first step the policy is its own reference: new adapters add nothing.
            current = autocast(torch.no_grad()(lambda batch: {"logprob": policy(batch).logprob}))

            def columns(data: Dataset) -> Mapping[str, Sequence[Tensor]]:
                path = self.directory / f"reference-{data._fingerprint}.safetensors"
                tensors, _ = stored_tokens(path, self.feed(data, whole=True), current, self.accelerator)
                return {"ref_logprob": tensors["logprob"]}

            return column("ref_logprob"), columns
        without_adapters = kind == "adapters_off" or (kind == "auto" and hasattr(policy.model, "disable_adapter"))
        make = adapters_off if without_adapters else frozen_copy
        return autocast(make(policy, temperature=temperature)), lambda data: {}

    def train(
        self,
        losses: Losses,
        read: TensorReader,
        feed: Any = None,
        *,
        evaluation: Feed | Callable[[int], Mapping[str, float]] | None = None,
        memory: checkpoint.StepMemory | None = None,
        report: Callable[[], Mapping[str, float]] = dict,
        save: Callable[[], None] = lambda: None,
        resources: AbstractContextManager[Any] | None = None,
        **options: Any,
    ) -> Training:
        """Get ready to optimize, evaluate, save and report, from the newest checkpoint where the run is resumed.

        Args:
            losses: with those that are only measured.
            read: lays out the tensors of a batch for them.
            feed: ``feed(step)`` gives the micro-batches of each of so many ``feed.steps``; those of the data unless
                given, evaluated on all held-out data, with the ``options`` of `RunContext.feed`.
            evaluation: what the losses are measured on, or ``evaluation(steps taken)``, which gives other metrics.
            memory: what is remembered from step to step, and in checkpoints.
            report: further metrics of the step that was just taken.
            save: writes, on the main process, what is left in the directory beside the model.
            resources: closed at the end of the run, however it ends.

        Raises:
            ValueError: if a loss couples all pairs of a step, which are split.
        """
        config, accelerator = self.config, self.accelerator
        coupled = sorted(STEP_COUPLED & losses.keys())
        if coupled and (config.micro_tokens is not None or accelerator.num_processes > 1):
            raise ValueError(
                f"{coupled[0]}: couples all pairs of a step, so they must be in one micro-batch on one rank; "
                "pass --micro_tokens null and run one process"
            )
        if feed is None:
            evaluation = None if self.eval_data is None else self.feed(self.eval_data, whole=True, **options)
            feed = self.feed(self.data, **options)
        accelerator.wait_for_everyone()  # every rank has looked at the directory before the main process writes to it
        optimizer: Any = make_optimizer(config, [each for each in self.model.parameters() if each.requires_grad])
        warmup = round(config.warmup * feed.steps) if config.warmup < 1 else int(config.warmup)
        shape = "constant_with_warmup" if config.schedule == "constant" and warmup else config.schedule
        schedule = get_scheduler(shape, optimizer, num_warmup_steps=warmup, num_training_steps=feed.steps)
        policy, optimizer = accelerator.prepare(self.model, optimizer)
        state: dict[str, Any] = {"accelerator": accelerator, "policy": policy, "data": digest(self.data)}
        state["parts"] = {"optimizer": optimizer, "schedule": schedule} | ({} if memory is None else {"memory": memory})
        start = checkpoint.load_newest(self.directory / "checkpoints", **state) if config.resume else 0
        objective, weighed, closed = compose(losses, read), weightings(losses), resources or nullcontext()
        return Training(self, feed, objective, weighed, state, start, evaluation, memory, report, save, closed)

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Write the configuration, and hold the lock of the directory, which ends with the process at the latest.

        Raises:
            ValueError: if another process trains in the directory, or has begun to since it was looked at.
        """
        if self.config.output is None or not self.accelerator.is_main_process:
            yield
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        with (self.directory / ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                message = f"output: another process trains in {self.directory}; wait for it, or name another directory"
                raise ValueError(message) from error
            if not self.config.resume:
                _check_directory(self.config)
            (self.directory / "config.yaml").write_text(self.description)
            yield


def open_run(
    config: Common,
    encode: Callable[..., tuple[Dataset, Accounting]],
    wrap: Callable[[nn.Module], Any] | None = None,
    *,
    load: Callable[[Any], Records] = load,
    load_weights: Callable[[Common], nn.Module] | None = None,
    accelerator: Accelerator | None = None,
    **options: Any,
) -> RunContext[Any]:
    """Open the run directory, encode the data, and load the model.

    Args:
        encode: ``encode(records, tokenizer, ..., **options)``, see `burnish.data`.
        wrap: makes a `Policy` or a `Scorer` of the model; a policy by default.
        load: reads the data that a configuration names.
        load_weights: loads the model; a causal language model by default.
        accelerator: of a run that is open already.

    Raises:
        ValueError: if the directory holds another run, or holds a run and ``config.resume`` is false.
    """
    accelerator = accelerator or open_accelerator(config)
    description = "" if config.output is None else to_yaml(config)  # before training changes a model that was given
    tokenizer = load_tokenizer(config)
    tokenization = Tokenization(
        config.longest,
        config.truncation,
        config.on_bad_row,
        chat_template_kwargs=config.chat_template_kwargs,
        processes=config.dataset_num_proc,
    )

    def encoded(source: Any) -> Dataset:
        with accelerator.main_process_first():
            data, accounting = encode(load(source), tokenizer, tokenization, **options)
        accelerator.print(accounting)
        return data

    data = encoded(config.data)
    eval_data = None if config.eval_data is None else encoded(config.eval_data)
    model = (load_weights or load_model)(config)
    if config.quantize is None and not getattr(model, "is_quantized", False):
        model = model.to(accelerator.device)
    wrapped = Policy(model, **config.kernel) if wrap is None else wrap(model)
    return RunContext(config, accelerator, tokenizer, wrapped, data, eval_data, description)


def open_accelerator(config: Common) -> Accelerator:
    """The `Accelerator` of a run whose directory is free, or holds the same run to go on with.

    Raises:
        ValueError: if the directory holds another run, or holds a run and ``config.resume`` is false.
    """
    AcceleratorState._reset_state()  # an earlier run in this process may have had another precision
    named = [config.report_to] if isinstance(config.report_to, str) else config.report_to or []
    trackers = [name for name in named if name != "none"]
    for name in (tracker for tracker in trackers if isinstance(tracker, str)):
        if name not in LoggerType.list():
            raise ValueError(nearest("report_to: no tracker", name, [*LoggerType.list(), "none"]))
        if name != "all" and name not in map(str, get_available_trackers()):
            raise ValueError(f"report_to: {name} is not installed; install it, or leave it out")
    held_out = config.eval_data is not None
    if config.keep_best and not (held_out and config.keep_best.removeprefix("max:").startswith("eval/")):
        raise ValueError(
            f"keep_best: wanted a metric of eval_data, such as eval/loss or max:eval/reward, got {config.keep_best!r}"
            + ("" if held_out else " and no eval_data")
        )
    for name in ("resume", "keep_best", "save_every"):
        if config.output is None and getattr(config, name):
            raise ValueError(f"{name}: checkpoints are kept in the run's directory, and it has none; set output")
    accelerator = Accelerator(
        mixed_precision="bf16" if config.dtype == "bfloat16" else "no",
        log_with=trackers or None,
        project_dir=config.output,
    )
    accelerator.gradient_state._set_sync_gradients(True)  # one that died between two micro-batches
    set_seed(config.seed)
    _check_directory(config)
    return accelerator


def _check_directory(config: Common) -> None:
    path = Path(config.output or "") / "config.yaml"
    if config.output is None or not path.exists():
        return
    if not config.resume:
        raise ValueError(
            f"output: {config.output} already holds a run; go on with it (--resume true) or name another directory"
        )
    before, now = yaml.safe_load(path.read_text()), yaml.safe_load(to_yaml(config))
    for key in now:
        if key not in _FREE and before.get(key) != now[key]:
            raise ValueError(
                f"resume: {config.output} was run with {key}={before.get(key)!r}, now it is {now[key]!r}; "
                "set it back, or name another output directory"
            )
        if key in ("steps", "epochs") and before.get(key) != now[key] and config.schedule != "constant":
            log.warning("resume: %s was %s, now it is %s: the learning rate goes on as if it had been so all along",
                        key, before.get(key), now[key])  # fmt: skip


def make_optimizer(config: Common, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer that was given, or is named, or what the class or function that was given makes."""
    optimizer: Any = config.optimizer
    if isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    options: dict[str, Any] = {"params": params, "lr": config.learning_rate, "weight_decay": config.weight_decay}
    if isinstance(optimizer, str):
        options |= {"fused": True} if optimizer == "adamw" else {}
        optimizer = find("optimizer", optimizer, {"adamw": "torch.optim:AdamW"}, "")
    made: torch.optim.Optimizer = build("optimizer", optimizer, {}, factory=True, **options)
    return made


def to_yaml(config: Common) -> str:
    """The configuration; an object in it by its name or type, a model also by a digest of its weights.

    That of data is in the checkpoints.
    """
    return str(yaml.safe_dump(_described(config), sort_keys=False, allow_unicode=True))


def _described(value: Any, name: str = "") -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _described(getattr(value, field.name), field.name) for field in fields(value)}
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if name in ("data", "eval_data") and not isinstance(value, Mapping):
        return type(value).__name__
    if isinstance(value, Mapping):
        return {_described(key): _described(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_described(each) for each in value]
    if isinstance(value, nn.Module):
        return f"{type(value).__name__} {weights_digest(value)[:16]}"
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}:{named.__qualname__}"


def weights_digest(model: nn.Module) -> str:
    """SHA-256 of all parameters and buffers, with their names and types."""
    sha256 = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        sha256.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        sha256.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return sha256.hexdigest()
