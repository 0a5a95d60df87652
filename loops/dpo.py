"""Preference training: DPO, or any other preference objective of `burnish.objectives`, or a weighted mix of them."""

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from accelerate import Accelerator
from datasets import Dataset
from torch import Tensor, nn

from .. import objectives
from ..data import encode_preference
from ..objectives import f_score, nll, sequence_mean, sequence_sum
from .batch import Batch
from .config import Common
from .optimize import Objective, Stats
from .recipe import PerToken, Recipe, open_recipe
from .reference import Reference, adapters_off, column, frozen_copy, precompute
from .weights import Expression, pair_mean, token_mean

CHOSEN, REJECTED = 0, 1
_STEP_COUPLED = {"aot", "aot_unpaired"}

PairLoss = Callable[..., tuple[Tensor, Stats]]


@dataclass(frozen=True)
class DPO(Common):
    """Preference training on pairs of a chosen and a rejected answer to one prompt."""

    learning_rate: float = 1e-6
    """Peak learning rate of AdamW."""
    loss: str | dict[str, float | dict[str, float]] = "dpo"
    """A preference objective of burnish.objectives, or a mix: {dpo: 0.8, bco_pair: 0.2, nll: 1.0}; instead of its
    coefficient, a loss may have {coefficient: 0.8, beta: 0.2, ...}. nll is that of the chosen answers."""
    beta: float = 0.1
    """Strength of the pull towards the reference, for every loss that has a beta."""
    label_smoothing: float = 0.0
    """Assumed share of pairs labelled the wrong way round, for every loss that knows it."""
    answer: Literal["sum", "mean"] = "sum"
    """Whether the log-prob of an answer is the sum over its tokens, as in the papers, or their mean."""
    divergence: Literal["reverse_kl", "forward_kl", "js", "alpha"] = "reverse_kl"
    """The f-divergence from the reference (f-DPO); alpha needs `divergence_alpha`."""
    divergence_alpha: float = 0.5
    """Order of the alpha-divergence."""
    reference: Literal["auto", "copy", "adapters_off", "precompute"] = "auto"
    """Where reference log-probs come from: a frozen copy, the model without its adapters (auto, if it has some), or
    one pass over the data before training, cached in the run directory."""
    hyper: dict[str, float] = field(default_factory=dict)
    """Further hyper-parameters by name, such as {gamma: 0.5, tau: 0.05}, for every loss that has one of that name."""


def pair_losses(config: DPO) -> dict[str, tuple[float, PairLoss]]:
    """Every loss of the configured mix: ``{name: (coefficient, function with its hyper-parameters bound)}``.

    Raises:
        ValueError: if a name or a hyper-parameter is unknown or out of range, naming the nearest one there is.
    """
    mix = {config.loss: 1.0} if isinstance(config.loss, str) else config.loss
    shared = {"beta": config.beta, "label_smoothing": config.label_smoothing, **config.hyper}
    losses: dict[str, tuple[float, PairLoss]] = {}
    for name, given in mix.items():
        own = dict(given) if isinstance(given, dict) else {"coefficient": given}
        losses[name] = (own.pop("coefficient", 1.0), _bind(name, shared, own))
    known = {"beta", "label_smoothing"}.union(*(_hyper_parameters(_function(name)) for name in mix))
    for name in config.hyper.keys() - known:
        raise ValueError(f"hyper: no loss of this mix has {name!r}; they have {', '.join(sorted(known))}")
    return losses


def preference_objective(
    losses: Mapping[str, PairLoss],
    reference: Reference | None,
    *,
    answer: Callable[[Tensor, Tensor, int], Tensor] = sequence_sum,
    score: Callable[[Tensor], Tensor] | None = None,
) -> Objective:
    """Losses of pairs from one forward pass.

    Args:
        losses: functions of `burnish.objectives` by name, their hyper-parameters bound; ``nll`` is that of the
            tokens of the chosen answers.
        reference: log-probs of the reference policy; None where no loss takes ``ref_chosen``.
        answer: how the log-probs of an answer's tokens become one number.
        score: maps log-ratios to f-divergence scores, see `burnish.objectives.f_score`.
    """

    def objective(policy: nn.Module, batch: Batch) -> Mapping[str, tuple[Tensor, Stats]]:
        logprob, entropy, _ = policy(batch)
        pairs = {**_answers(logprob, batch, answer), **_answers(logprob, batch, sequence_mean, "mean_")}
        if reference is not None:
            pairs |= _answers(reference(batch), batch, answer, "ref_")
        if score is not None:
            for which in ("chosen", "rejected"):
                log_ratio = pairs[which] - pairs[f"ref_{which}"]
                pairs |= {which: score(log_ratio), f"ref_{which}": torch.zeros_like(log_ratio)}
        logps = {f"logps/{which}": pairs[which].detach() for which in ("chosen", "rejected")}
        terms: dict[str, tuple[Tensor, Stats]] = {"entropy": (entropy.detach(), {})}
        for name, function in losses.items():
            if function is nll:
                terms[name] = nll(logprob[batch.tokens_of(CHOSEN)])
            else:
                loss, stats = function(*(pairs[tensor] for tensor in _tensors(function)))
                terms[name] = (loss, {**stats, **logps})
        return terms

    return objective


def dpo(config: DPO) -> dict[str, float]:
    """Run the recipe; returns the metrics of its last step."""
    losses = pair_losses(config)
    functions = {name: function for name, (_, function) in losses.items()}
    expression: Expression = {
        name: (coefficient, partial(token_mean, of=CHOSEN) if name == "nll" else pair_mean)
        for name, (coefficient, _) in losses.items()
    }
    expression = {**expression, "entropy": (0.0, token_mean)}
    recipe = open_recipe(config, encode_preference)
    _refuse_split_steps(config, recipe, functions)
    needed = any(name.startswith("ref_") for function in functions.values() for name in _tensors(function))
    reference, columns = _reference(config, recipe) if needed else (None, lambda data: {})
    score = None
    if config.divergence != "reverse_kl":
        score = partial(f_score, divergence=config.divergence, alpha=config.divergence_alpha)
    objective = preference_objective(
        functions, reference, answer=sequence_sum if config.answer == "sum" else sequence_mean, score=score
    )
    return recipe.train(objective, expression, columns)


def _answers(
    logprob: Tensor, batch: Batch, answer: Callable[[Tensor, Tensor, int], Tensor], prefix: str = ""
) -> dict[str, Tensor]:
    values = answer(logprob, batch.sequence, batch.sequences)
    return {
        f"{prefix}chosen": values[batch.completion == CHOSEN],
        f"{prefix}rejected": values[batch.completion == REJECTED],
    }


def _reference(config: DPO, recipe: Recipe) -> tuple[Reference, Callable[[Dataset], PerToken]]:
    policy, accelerator = recipe.policy, recipe.run.accelerator
    adapters = config.lora.r > 0
    if config.reference == "precompute":
        # Before the first step the policy is its own reference: new adapters add nothing.
        now = _computed_alike(torch.no_grad()(lambda batch: policy(batch).logprob), accelerator)

        def columns(data: Dataset) -> PerToken:
            feed = recipe.feed(data, whole=True)
            cache = recipe.run.directory / f"reference-{data._fingerprint}.safetensors"
            plan = ((indices, feed.batch(indices)) for indices in feed.plan(0))
            return {"ref_logprob": precompute(now, plan, len(data), cache, accelerator)}

        return column("ref_logprob"), columns
    if config.reference == "adapters_off" or (config.reference == "auto" and adapters):
        return _computed_alike(adapters_off(policy), accelerator), lambda data: {}
    return _computed_alike(frozen_copy(policy), accelerator), lambda data: {}


def _computed_alike(reference: Reference, accelerator: Accelerator) -> Reference:
    """The reference in the precision of the policy: rounding in one of the two alone would look like a difference."""

    def alike(batch: Batch) -> Tensor:
        with accelerator.autocast():
            return reference(batch)

    return alike


def _refuse_split_steps(config: DPO, recipe: Recipe, functions: Mapping[str, PairLoss]) -> None:
    coupled = sorted(_STEP_COUPLED & functions.keys())
    if coupled and (config.micro_tokens is not None or recipe.run.accelerator.num_processes > 1):
        raise ValueError(
            f"{coupled[0]}: couples all pairs of a step, so they must be in one micro-batch on one rank; "
            "pass --micro_tokens null and run one process"
        )


def _function(name: str) -> PairLoss:
    if name not in _LOSSES:
        nearest = difflib.get_close_matches(name, _LOSSES, n=1, cutoff=0.0)[0]
        raise ValueError(f"loss: {name!r} is not one of {', '.join(sorted(_LOSSES))}; did you mean {nearest!r}?")
    return _LOSSES[name]


def _bind(name: str, shared: Mapping[str, float], own: Mapping[str, float]) -> PairLoss:
    """The function with the hyper-parameters it has: its ``own``, or those ``shared`` by the mix. Tried out at once."""
    function = _function(name)
    has = _hyper_parameters(function)
    for parameter in own:
        if parameter not in has:
            raise ValueError(f"loss: {name} has no {parameter!r}; it has {', '.join(sorted(has)) or 'none'}")
    if not has:
        return function
    bound = {parameter: value for parameter, value in {**shared, **own}.items() if parameter in has}
    missing = {p.name for p in has.values() if p.default is p.empty} - bound.keys()
    if missing:
        example = f"{{{', '.join(f'{parameter}: ...' for parameter in sorted(missing))}}}"
        raise ValueError(f"loss: {name} needs {', '.join(sorted(missing))}; give it with --hyper '{example}'")
    loss = partial(function, **bound)
    loss(*(torch.tensor([-1.0]) for _ in _tensors(function)))  # wrong values are refused before any model is loaded
    return loss


def _hyper_parameters(function: PairLoss) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY}


def _tensors(function: Any) -> list[str]:
    """Names of the tensors that a loss takes: its positional parameters."""
    parameters = inspect.signature(getattr(function, "func", function)).parameters.values()
    return [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]


# Every objective whose tensors are answers of a pair, and nll.
_LOSSES: dict[str, PairLoss] = {
    name: function
    for name, function in vars(objectives).items()
    if inspect.isfunction(function) and any(tensor.endswith("chosen") for tensor in _tensors(function))
} | {"nll": nll}
