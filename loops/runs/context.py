"""An open run: its settings, ranks, tokenizer, model and data, and how losses train on them."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from accelerate import Accelerator
from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ...data import Accounting, Batches, Records, Tokenization, load, token_cost
from ..batch import Batch
from ..config import Common, ReferenceKind
from ..models.backbone import Backbone
from ..models.io import load_model, load_tokenizer
from ..models.policy import Policy
from ..train.losses import Losses, TensorReader, compose, refuse_split_steps, weightings
from ..train.step import evaluate, optimize
from . import checkpoint
from .feed import Feed
from .progress import progress
from .reference import Reference, adapters_off, column, frozen_copy, precompute
from .run import Journal, Steps, due, finish, learning_rate_schedule, open_accelerator, to_yaml

Model = TypeVar("Model", bound=Backbone)
TokenColumns = Callable[[Dataset], Mapping[str, Sequence[Tensor]]]


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
        where: dict[str, Any] = {"rank": accelerator.process_index, "device": accelerator.device}
        return Feed(data, batches, per_token=computed, **where, **options)

    def reference(
        self, kind: ReferenceKind, *, needed: bool = True, temperature: float = 1.0
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
        if kind == "precompute":
            # Before the first step the policy is its own reference: new adapters add nothing.
            current = self._in_policy_precision(torch.no_grad()(lambda batch: policy(batch).logprob))

            def columns(data: Dataset) -> Mapping[str, Sequence[Tensor]]:
                feed = self.feed(data, whole=True)
                cache = self.directory / f"reference-{data._fingerprint}.safetensors"
                plan = ((indices, feed.batch(indices)) for indices in feed.plan(0))
                return {"ref_logprob": precompute(current, plan, cache, self.accelerator)}

            return column("ref_logprob"), columns
        without_adapters = kind == "adapters_off" or (kind == "auto" and self.config.lora.r > 0)
        make = adapters_off if without_adapters else frozen_copy
        return self._in_policy_precision(make(policy, temperature=temperature)), lambda data: {}

    def _in_policy_precision(self, reference: Reference) -> Reference:
        """Rounding in one of policy and reference alone would look like a difference."""

        def rounded(batch: Batch) -> Tensor:
            with self.accelerator.autocast():
                return reference(batch)

        return rounded

    def train(
        self,
        losses: Losses,
        read: TensorReader,
        feed: Steps | None = None,
        *,
        evaluation: Steps | Callable[[int], Mapping[str, float]] | None = None,
        memory: checkpoint.StepMemory | None = None,
        report: Callable[[], Mapping[str, float]] = dict,
        **options: Any,
    ) -> dict[str, float]:
        """Optimize, evaluate, save and report; returns the metrics of the last step.

        Args:
            losses: with those that are only measured.
            read: lays out the tensors of a batch for them.
            feed: the micro-batches of every step; those of the data unless given, evaluated on all held-out data, with
                the ``options`` of `RunContext.feed`.
            evaluation: what the losses are measured on, or ``evaluation(steps taken)``, which gives other metrics.
            memory: what is remembered from step to step, and in checkpoints.
            report: further metrics of the step that was just taken.

        Raises:
            ValueError: if a loss couples all pairs of a step, which are split.
        """
        config, accelerator = self.config, self.accelerator
        refuse_split_steps(losses, micro_tokens=config.micro_tokens, ranks=accelerator.num_processes)
        if feed is None:
            evaluation = None if self.eval_data is None else self.feed(self.eval_data, whole=True, **options)
            feed = self.feed(self.data, **options)
        objective, weighed = compose(losses, read), weightings(losses)
        accelerator.wait_for_everyone()  # every rank has looked at the directory before the main process writes to it
        if accelerator.is_main_process:
            self.directory.mkdir(parents=True, exist_ok=True)
            (self.directory / "config.yaml").write_text(to_yaml(config))
        trainable = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        adamw = torch.optim.AdamW(trainable, lr=config.learning_rate, weight_decay=config.weight_decay, fused=True)
        schedule = learning_rate_schedule(config, adamw, feed.steps)
        policy, optimizer = accelerator.prepare(self.model, adamw)
        parts: dict[str, Any] = {"accelerator": accelerator, "policy": policy}
        parts |= {"optimizer": optimizer, "schedule": schedule}
        checkpoints = self.directory / "checkpoints"
        start = checkpoint.load_newest(checkpoints, **parts, memory=memory) if config.resume else 0

        def evaluated(steps: int) -> dict[str, float]:
            assert evaluation is not None
            metrics: Mapping[str, float]
            if isinstance(evaluation, Steps):
                metrics = evaluate(accelerator, policy, evaluation(0), objective, weighed)
            else:
                metrics = evaluation(steps)
            return {f"eval/{name}": value for name, value in metrics.items()}

        metrics: dict[str, float] = {}
        with (
            closing(Journal(self.directory, start, accelerator)) as journal,
            progress(feed.steps, start, visible=accelerator.is_main_process) as show,
        ):
            if evaluation is not None and start == 0:
                journal.write(0, evaluated(0))
            for step in optimize(
                batches=feed,
                objective=objective,
                weightings=weighed,
                steps=feed.steps,
                start=start,
                max_grad_norm=config.max_grad_norm,
                **parts,
            ):
                metrics = {**step.metrics, **report()}
                if memory is not None:
                    memory.observe(metrics)
                last = step.number == feed.steps
                if evaluation is not None and (last or due(step.number, config.eval_every)):
                    metrics = {**metrics, **evaluated(step.number)}
                journal.write(step.number, metrics)
                show(step.number, metrics)
                if last or due(step.number, config.save_every):
                    checkpoint.save(checkpoints, step.number, **parts, memory=memory)
        if accelerator.is_main_process:
            finish(accelerator.unwrap_model(policy), self.tokenizer, self.directory)
        accelerator.wait_for_everyone()
        return metrics


def open_run(
    config: Common,
    encode: Callable[..., tuple[Dataset, Accounting]],
    wrap: Callable[[nn.Module], Any] | None = None,
    *,
    load: Callable[[str], Records] = load,
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
        RunError: if the directory holds another run, or holds a run and ``config.resume`` is false.
    """
    accelerator = accelerator or open_accelerator(config)
    tokenizer = load_tokenizer(config)
    tokenization = Tokenization(config.longest, config.truncation, config.on_bad_row)

    def encoded(source: str) -> Dataset:
        with accelerator.main_process_first():
            data, accounting = encode(load(source), tokenizer, tokenization, **options)
        accelerator.print(accounting)
        return data

    data = encoded(config.data)
    eval_data = encoded(config.eval_data) if config.eval_data else None
    model = (load_weights or load_model)(config)
    if config.quantize is None:
        model = model.to(accelerator.device)
    wrapped = Policy(model, **config.kernel) if wrap is None else wrap(model)
    return RunContext(config, accelerator, tokenizer, wrapped, data, eval_data)
