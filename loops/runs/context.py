"""An open run: its settings, ranks, tokenizer, model and data, and how losses train on them.

config.yaml      the resolved configuration
metrics.jsonl    one JSON object per step
checkpoints/     see `checkpoint`
model/           the trained model, as transformers loads it; adapter/ beside it where adapters were trained
curves.png       the metrics over the steps
"""

import fcntl
import json
import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, Generic, TypeVar

import torch
import yaml
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.tracking import get_available_trackers
from accelerate.utils import AutocastKwargs, LoggerType, set_seed
from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, get_scheduler

from ...data import Accounting, Batches, Records, Tokenization, load, token_cost
from ..config import Common
from ..models.backbone import Backbone
from ..models.io import load_model, load_tokenizer, save_model
from ..models.policy import Policy
from ..registry import nearest
from ..train.losses import Losses, TensorReader, compose, weightings
from ..train.mix import STEP_COUPLED
from ..train.step import evaluate, optimize, prepare
from . import checkpoint, stop
from .feed import Feed, digest, stored_tokens
from .ranks import check_launcher, check_ranks, open_mesh
from .reference import Reference, adapters_off, column, frozen, frozen_copy
from .report import Journal, draw_curves, progress, written

Model = TypeVar("Model", bound=Backbone)
TokenColumns = Callable[[Dataset], Mapping[str, Sequence[Tensor]]]

log = logging.getLogger(__name__)

# What may differ when a run is resumed: none of it changes the steps that were already taken. A checkpoint knows its
# data by content, wherever it lies now.
_FREE = {"resume", "output", "data", "steps", "epochs", "eval_every", "report_to", "vllm"}
_FREE |= {"save_every", "save_minutes", "keep", "keep_best", "dataset_num_proc", "parallel"}


@dataclass
class RunContext(Generic[Model]):
    """An open run, and what its losses are applied to. `open_run` makes one from a configuration.

    Attributes:
        config: the recipe's settings.
        model: the policy, or the scorer, that is trained.
        data: encoded examples; in online recipes, prompts.
    """

    config: Any
    accelerator: Accelerator
    tokenizer: PreTrainedTokenizerBase
    model: Model
    data: Dataset
    eval_data: Dataset | None = None

    @property
    def directory(self) -> Path:
        return Path(self.config.output)

    def feed(
        self, data: Dataset, *, whole: bool = False, per_token: Sequence[TokenColumns] = (), **options: Any
    ) -> Feed:
        """Training batches of ``data``, or the ``whole`` of it as one step.

        Args:
            per_token: each ``columns(data)`` gives columns that are computed before training, by name.
            options: further ones of `Feed`.
        """
        config, accelerator = self.config, self.accelerator
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
                the run directory; auto is adapters_off where there are some, and otherwise copy. The copy of a
                policy in shards is read from ``config.model``, and in shards as well, of the same precision: the
                log-probs of weights in bfloat16 would not be those that the policy starts with.
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
        without_adapters = kind == "adapters_off" or (kind == "auto" and self.config.lora.r > 0)
        if policy.mesh is not None and not without_adapters:  # shards can't be copied, but loaded once more
            model = load_model(self.config).requires_grad_(False)
            again = Policy(model, **self.config.kernel, mesh=policy.mesh)
            return autocast(frozen(again, temperature=temperature)), lambda data: {}
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
        **options: Any,
    ) -> dict[str, float]:
        """Optimize, evaluate, save and report; returns the metrics of the last step.

        Args:
            losses: with those that are only measured.
            read: lays out the tensors of a batch for them.
            feed: ``feed(step)`` gives the micro-batches of each of so many ``feed.steps``; those of the data unless
                given, evaluated on all held-out data, with the ``options`` of `RunContext.feed`.
            evaluation: what the losses are measured on, or ``evaluation(steps taken)``, which gives other metrics.
            memory: what is remembered from step to step, and in checkpoints.
            report: further metrics of the step that was just taken.

        Raises:
            ValueError: if a loss couples all pairs of a step, which are split.
            CheckpointError: if the disk is full.
            Stopped: after the step in which SIGINT, SIGTERM or SIGUSR1 reached any rank, which is saved.
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
        objective, weighed = compose(losses, read), weightings(losses)
        accelerator.wait_for_everyone()  # every rank has looked at the directory before the main process writes to it
        trainable = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        adamw = torch.optim.AdamW(trainable, lr=config.learning_rate, weight_decay=config.weight_decay, fused=True)
        warmup = round(config.warmup * feed.steps) if config.warmup < 1 else int(config.warmup)
        shape = "constant_with_warmup" if config.schedule == "constant" and warmup else config.schedule
        schedule = get_scheduler(shape, adamw, num_warmup_steps=warmup, num_training_steps=feed.steps)
        policy, optimizer = prepare(accelerator, self.model, adamw)
        checkpoints = self.directory / "checkpoints"
        state: dict[str, Any] = {"accelerator": accelerator, "policy": policy, "data": digest(self.data)}
        state["parts"] = {"optimizer": optimizer, "schedule": schedule} | ({} if memory is None else {"memory": memory})
        start = checkpoint.load_newest(checkpoints, **state) if config.resume else 0
        best = checkpoint.Best(config.keep_best)
        for line in map(json.loads, written(self.directory / "metrics.jsonl", start)):
            if line["step"] == 0 or checkpoint.path_of(checkpoints, line["step"]).exists():
                best.observe(line["step"], line)

        def evaluated(steps: int) -> dict[str, float]:
            if isinstance(evaluation, Feed):
                metrics: Mapping[str, float] = evaluate(accelerator, policy, evaluation(0), objective, weighed)
            else:
                metrics = {} if evaluation is None else evaluation(steps)
            return {f"eval/{name}": value for name, value in metrics.items()}

        def due(step: int, every: int | None) -> bool:
            return step == feed.steps or (every is not None and step % every == 0)

        def votes() -> dict[str, float]:
            by_clock = accelerator.is_main_process and bool(config.save_minutes)
            return {**received, "save": float(by_clock and monotonic() - saved >= 60 * config.save_minutes)}

        metrics: dict[str, float] = {}
        saved, ended = monotonic(), None
        with (
            stop.signals(visible=accelerator.is_main_process) as received,
            _claimed(config) if accelerator.is_main_process else nullcontext(),
            closing(Journal(self.directory, start, accelerator)) as journal,
            progress(feed.steps, start, visible=accelerator.is_main_process) as show,
        ):
            if evaluation is not None and start == 0:
                held_out = evaluated(0)
                best.observe(0, held_out)
                journal.write(0, held_out)
            for step in optimize(
                policy,
                feed,
                objective,
                weighed,
                accelerator=accelerator,
                optimizer=optimizer,
                schedule=schedule,
                steps=feed.steps,
                start=start,
                max_grad_norm=config.max_grad_norm or math.inf,
                votes=votes,
            ):
                signalled = [name for name in received if step.metrics.pop(name)]
                to_save = step.metrics.pop("save") > 0 or due(step.number, config.save_every) or bool(signalled)
                metrics = {**step.metrics, **report()}
                if memory is not None:
                    memory.observe(metrics)
                if due(step.number, config.eval_every):
                    held_out = evaluated(step.number)
                    metrics |= held_out
                    to_save |= best.observe(step.number, held_out)
                journal.write(step.number, metrics)
                show(step.number, metrics)
                if to_save:
                    checkpoint.save(checkpoints, step.number, **state, keep=config.keep, best=best.step)
                    saved = monotonic()
                if signalled and step.number < feed.steps:
                    message = f"stopped at step {step.number} of {feed.steps}; go on with --resume true"
                    ended = stop.Stopped(message, stop.STATUS[signalled[0]])
                    break
            if ended is None:
                with checkpoint.writing("the model", checkpoints):
                    save_model(self.model, self.tokenizer, self.directory, write=accelerator.is_main_process)
                if accelerator.is_main_process:
                    draw_curves(self.directory / "metrics.jsonl", self.directory / "curves.png")
        accelerator.wait_for_everyone()
        if ended is not None:
            if accelerator.is_main_process:
                print(ended, file=sys.stderr)
            raise ended
        return metrics


def open_run(
    config: Common,
    encode: Callable[..., tuple[Dataset, Accounting]],
    wrap: Callable[..., Any] | None = None,
    *,
    load: Callable[[str], Records] = load,
    load_weights: Callable[[Common], nn.Module] | None = None,
    accelerator: Accelerator | None = None,
    **options: Any,
) -> RunContext[Any]:
    """Open the run directory, encode the data, and load the model.

    Args:
        encode: ``encode(records, tokenizer, ..., **options)``, see `burnish.data`.
        wrap: makes a `Policy` or a `Scorer` of the model; a policy by default. If there are ranks to shard it over,
            ``wrap(model, mesh=...)``.
        load: reads the data that a configuration names.
        load_weights: loads the model; a causal language model by default.
        accelerator: of a run that is open already.

    Raises:
        ValueError: if the directory holds another run, or holds a run and ``config.resume`` is false.
    """
    accelerator = accelerator or open_accelerator(config)
    tokenizer = load_tokenizer(config)
    tokenization = Tokenization(
        config.longest,
        config.truncation,
        config.on_bad_row,
        chat_template_kwargs=config.chat_template_kwargs,
        processes=config.dataset_num_proc,
    )

    def encoded(source: str) -> Dataset:
        with accelerator.main_process_first():
            data, accounting = encode(load(source), tokenizer, tokenization, **options)
        accelerator.print(accounting)
        return data

    data = encoded(config.data)
    eval_data = encoded(config.eval_data) if config.eval_data else None
    model, mesh = (load_weights or load_model)(config), open_mesh(config, accelerator)
    if config.quantize is None and mesh is None:  # shards find their own device
        model = model.to(accelerator.device)
    sharding = {} if mesh is None else {"mesh": mesh}
    make: Callable[..., Any] = wrap or partial(Policy, **config.kernel)
    return RunContext(config, accelerator, tokenizer, make(model, **sharding), data, eval_data)


def open_accelerator(config: Common) -> Accelerator:
    """The `Accelerator` of a run whose directory is free, or holds the same run to go on with.

    Raises:
        ValueError: if the directory holds another run, or holds a run and ``config.resume`` is false.
    """
    check_launcher()
    AcceleratorState._reset_state()  # an earlier run in this process may have had another precision
    named = [config.report_to] if isinstance(config.report_to, str) else config.report_to or []
    trackers = [name for name in named if name != "none"]
    for name in trackers:
        if name not in LoggerType.list():
            raise ValueError(nearest("report_to: no tracker", name, [*LoggerType.list(), "none"]))
        if name != "all" and name not in map(str, get_available_trackers()):
            raise ValueError(f"report_to: {name} is not installed; install it, or leave it out")
    if config.keep_best and not (config.eval_data and config.keep_best.removeprefix("max:").startswith("eval/")):
        raise ValueError(
            f"keep_best: wanted a metric of eval_data, such as eval/loss or max:eval/reward, got {config.keep_best!r}"
            + ("" if config.eval_data else " and no eval_data")
        )
    accelerator = Accelerator(
        mixed_precision="bf16" if config.dtype == "bfloat16" else "no",
        log_with=trackers or None,
        project_dir=config.output,
        # Cached casts of weights would add up to the whole model on each rank.
        kwargs_handlers=[AutocastKwargs(cache_enabled=config.parallel.dp_shard_size == 1)],
    )
    check_ranks(config, accelerator)
    accelerator.gradient_state._set_sync_gradients(True)  # one that died between two micro-batches
    set_seed(config.seed)
    _check_directory(config)
    return accelerator


def _check_directory(config: Common) -> None:
    path = Path(config.output) / "config.yaml"
    if not path.exists():
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


@contextmanager
def _claimed(config: Common) -> Iterator[None]:
    """Write the configuration, and hold the lock of the run directory, which ends with the process at the latest.

    Raises:
        ValueError: if another process trains in the directory, or has begun to since it was looked at.
    """
    directory = Path(config.output)
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            message = f"output: another process trains in {directory}; wait for it, or name another directory"
            raise ValueError(message) from error
        if not config.resume:
            _check_directory(config)
        (directory / "config.yaml").write_text(to_yaml(config))
        yield


def to_yaml(config: Common) -> str:
    return str(yaml.safe_dump(asdict(config), sort_keys=False, allow_unicode=True))
