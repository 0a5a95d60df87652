"""What recipes have in common: from a configuration to data, policy and feeds, ready for an objective."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..data import Accounting, Batches, load, token_cost
from .config import Common
from .feed import Feed
from .model import load_model, load_tokenizer
from .optimize import Objective
from .policy import Policy
from .run import Run
from .weights import Expression

Encode = Callable[..., tuple[Dataset, Accounting]]
PerToken = Mapping[str, Sequence[Tensor]]


@dataclass(frozen=True)
class Recipe:
    """An open run with all that its objective is applied to."""

    run: Run
    tokenizer: PreTrainedTokenizerBase
    policy: Policy
    data: Dataset
    eval_data: Dataset | None

    def feed(self, data: Dataset, *, whole: bool = False, per_token: PerToken | None = None) -> Feed:
        """Training batches of ``data``, or the ``whole`` of it as one step."""
        config = self.run.config
        steps = 1 if whole else config.steps
        batches = Batches(
            token_cost(data, shared_prompt=self.policy.layout == "shared"),
            batch_size=len(data) if whole else config.batch_size,
            micro_tokens=config.micro_tokens,
            seed=config.seed,
            shuffle=config.shuffle and not whole,
            epochs=config.epochs if steps is None else None,
            steps=steps,
            ranks=self.run.accelerator.num_processes,
        )
        return Feed(
            data,
            batches,
            rank=self.run.accelerator.process_index,
            device=self.run.accelerator.device,
            per_token=per_token,
        )

    def train(
        self,
        objective: Objective,
        expression: Expression,
        per_token: Callable[[Dataset], PerToken] = lambda data: {},
    ) -> dict[str, float]:
        """Train on all of the data; ``per_token(data)`` gives columns that were computed from it."""
        evaluation = None
        if self.eval_data is not None:
            evaluation = self.feed(self.eval_data, whole=True, per_token=per_token(self.eval_data))
        feed = self.feed(self.data, per_token=per_token(self.data))
        return self.run.train(self.policy, self.tokenizer, feed, objective, expression, evaluation=evaluation)


def open_recipe(config: Common, encode: Encode, **options: Any) -> Recipe:
    """Open the run, encode its data with ``encode(records, tokenizer, ..., **options)``, and load its policy."""
    run = Run(config)
    tokenizer = load_tokenizer(config)

    def encoded(source: str) -> Dataset:
        with run.accelerator.main_process_first():
            data, accounting = encode(
                load(source),
                tokenizer,
                max_length=config.max_length,
                truncation=config.truncation,
                on_bad_row=config.on_bad_row,
                **options,
            )
        run.accelerator.print(accounting)
        return data

    data = encoded(config.data)
    eval_data = encoded(config.eval_data) if config.eval_data else None
    model = load_model(config)
    if config.quantize is None:
        model = model.to(run.accelerator.device)
    return Recipe(run, tokenizer, Policy(model, layout=config.layout, backend=config.backend), data, eval_data)
