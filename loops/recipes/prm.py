"""Process reward models: is each step of a solution right?"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ...data import Encode, encode_stepwise, step_example
from ...objectives import step_loss
from ..batch import collate
from ..config import Common
from ..models.io import load_classifier
from ..models.scorer import Scorer, scores
from ..runs.context import open_run
from ..runs.training import Training
from ..train.losses import Term, score_tensors
from .settings import PRM


def open_prm(config: PRM) -> Training:
    """Open a run that is ready to train."""
    scorer = partial(Scorer, layout=config.layout)
    context = open_run(config, encoder(config), scorer, load_weights=load_prm)
    keep_separator(context.model.plain, config)
    return context.train({"step_loss": Term(step_loss)}, score_tensors, columns=("label",))


def encoder(config: PRM) -> Encode:
    """The encoder of solutions that are labeled step by step."""
    return partial(
        encode_stepwise,
        separator=config.separator,
        train_on_last_step_only=config.train_on_last_step_only,
    )


def load_prm(config: Common, *, images: bool = False) -> nn.Module:
    """The model to train, with two outputs.

    Args:
        images: whether it will see images, see `load_model`.
    """
    return load_classifier(config, "TOKEN_CLS", {0: "wrong", 1: "right"}, images=images)


def keep_separator(plain: Any, config: PRM) -> None:
    """Have the separator saved with the model, for `step_scores`."""
    plain.config.step_separator = config.separator


def step_scores(
    scorer: Scorer,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | list[dict[str, Any]],
    steps: Sequence[str],
) -> Tensor:
    """The probability [steps] that each step of a solution is right, given those before it.

    `burnish.objectives.step_aggregate` makes one score of a solution of them. The separator is the
    one that the model was trained with, read from its configuration.

    Raises:
        DataError: if there is no step, or a step is empty or no text.
    """
    separator = getattr(scorer.plain.config, "step_separator", "\n")
    solution = step_example(prompt, steps, tokenizer, separator=separator)
    return scores(scorer, [collate([solution], device=scorer.device)]).sigmoid()
