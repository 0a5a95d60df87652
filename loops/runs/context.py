"""What recipes have in common: from a configuration to data, model and feeds, ready for an objective."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from accelerate import Accelerator
from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ...data import Accounting, Batches, Example, Tokenization, load, token_cost
from ..batch import Batch
from ..config import Common, ReferenceKind
from ..models.backbone import Backbone
from ..models.io import load_model, load_tokenizer
from ..models.policy import Policy
from ..train.step import Objective
from ..train.weighting import Weightings
from .feed import Feed, Prepare
from .reference import Reference, adapters_off, column, frozen_copy, precompute
from .run import Run, StepMemory

Encode = Callable[..., tuple[Dataset, Accounting]]
PerToken = Callable[[Dataset], Mapping[str, Sequence[Tensor]]]
Model = TypeVar("Model", bound=Backbone)


@dataclass(frozen=True)
class Recipe(Generic[Model]):
    """An open run with all that its objective is applied to."""

    run: Run
    tokenizer: PreTrainedTokenizerBase
    model: Model
    data: Dataset
    eval_data: Dataset | None

    def feed(self, data: Dataset, *, whole: bool = False, **options: Any) -> Feed:
        """Training batches of ``data``, or the ``whole`` of it as one step; ``options`` are those of `Feed`."""
        config = self.run.config
        steps = 1 if whole else config.steps
        batches = Batches(
            token_cost(data, shared_prompt=self.model.layout == "shared"),
            batch_size=len(data) if whole else config.batch_size,
            micro_tokens=config.micro_tokens,
            seed=config.seed,
            shuffle=config.shuffle and not whole,
            epochs=config.epochs if steps is None else None,
            steps=steps,
            ranks=self.run.accelerator.num_processes,
        )
        accelerator = self.run.accelerator
        return Feed(data, batches, rank=accelerator.process_index, device=accelerator.device, **options)

    def train(
        self,
        objective: Objective,
        weightings: Weightings,
        *,
        columns: Sequence[str] = (),
        per_token: PerToken = lambda data: {},
        mark: Callable[[Example], Example] = lambda example: example,
        prepare: Prepare = lambda feed, step, micro_batches: micro_batches,
        memory: StepMemory | None = None,
    ) -> dict[str, float]:
        """Train on all of the data.

        Args:
            columns, mark, prepare: see `Feed`.
            per_token: ``per_token(data)`` gives columns that are computed from the data before training.
            memory: what is remembered from step to step, see `Run.train`.
        """

        def feed(data: Dataset, whole: bool) -> Feed:
            options = {"columns": columns, "mark": mark, "prepare": prepare}
            return self.feed(data, whole=whole, per_token=per_token(data), **options)

        evaluation = None if self.eval_data is None else feed(self.eval_data, True)
        return self.run.train(
            self.model,
            self.tokenizer,
            feed(self.data, False),
            objective,
            weightings,
            evaluation=evaluation,
            memory=memory,
        )


def open_recipe(config: Common, encode: Encode, **options: Any) -> Recipe[Policy]:
    """Open the run, encode its data with ``encode(records, tokenizer, ..., **options)``, and load its policy."""
    return open_run(config, encode, lambda model: Policy(model, **config.kernel), load_model, **options)


def open_run(
    config: Common,
    encode: Encode,
    wrap: Callable[[nn.Module], Model],
    load_weights: Callable[[Common], nn.Module],
    *,
    run: Run | None = None,
    **options: Any,
) -> Recipe[Model]:
    """Open the run unless it is open, encode its data, and ``wrap`` the model that ``load_weights(config)`` gives."""
    run = run or Run(config)
    tokenizer = load_tokenizer(config)

    def encoded(source: str) -> Dataset:
        with run.accelerator.main_process_first():
            tokenization = Tokenization(config.max_length, config.truncation, config.on_bad_row)
            data, accounting = encode(load(source), tokenizer, tokenization, **options)
        run.accelerator.print(accounting)
        return data

    data = encoded(config.data)
    eval_data = encoded(config.eval_data) if config.eval_data else None
    model = load_weights(config)
    if config.quantize is None:
        model = model.to(run.accelerator.device)
    return Recipe(run, tokenizer, wrap(model), data, eval_data)


def open_reference(
    recipe: Recipe[Policy], how: ReferenceKind, *, needed: bool = True, temperature: float = 1.0
) -> tuple[Reference | None, PerToken]:
    """The policy as it is before the first step, frozen; and the columns that it reads where it was precomputed.

    Args:
        how: a frozen copy, the policy without its adapters, or one pass over the data before training, cached in the
            run directory; auto is adapters_off where there are some, and otherwise copy.
        needed: whether any loss takes a reference; none is made otherwise.
        temperature: of its softmax, where it is not precomputed: that of the policy it is compared with.
    """
    if not needed:
        return None, lambda data: {}
    policy, accelerator = recipe.model, recipe.run.accelerator
    if how == "precompute":
        # Before the first step the policy is its own reference: new adapters add nothing.
        now = _computed_alike(torch.no_grad()(lambda batch: policy(batch).logprob), accelerator)

        def columns(data: Dataset) -> Mapping[str, Sequence[Tensor]]:
            feed = recipe.feed(data, whole=True)
            cache = recipe.run.directory / f"reference-{data._fingerprint}.safetensors"
            plan = ((indices, feed.batch(indices)) for indices in feed.plan(0))
            return {"ref_logprob": precompute(now, plan, cache, accelerator)}

        return column("ref_logprob"), columns
    if how == "adapters_off" or (how == "auto" and recipe.run.config.lora.r > 0):
        return _computed_alike(adapters_off(policy, temperature=temperature), accelerator), lambda data: {}
    return _computed_alike(frozen_copy(policy, temperature=temperature), accelerator), lambda data: {}


def _computed_alike(reference: Reference, accelerator: Accelerator) -> Reference:
    """The reference in the precision of the policy: rounding in one of the two alone would look like a difference."""

    def alike(batch: Batch) -> Tensor:
        with accelerator.autocast():
            return reference(batch)

    return alike
