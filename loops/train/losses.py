"""Named losses over one forward pass: composition.

    total = dpo + 0.2 · nll + 0.1 · distillation        {name: Term(function, coefficient, ...)}

The signature of an objective names its tensors and their units: ``chosen: PerPair`` is the log-prob of the chosen
completion of each pair, ``logp: PerToken`` that of each trained token, ``logp: PerSequence`` that of each completion.
The tensors of a batch are stored under such names and units, and each loss takes its own, all from one forward pass.
``objectives/SIGNATURES.md`` lists them.
"""

import difflib
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from types import ModuleType
from typing import Any, Literal, cast, get_args, get_origin

import torch
from torch import Tensor, nn

from ...kernels import Extra
from ...objectives import (
    PerPair,
    PerToken,
    Stats,
    preference,
    reference_free,
    sequence_mean,
    sequence_sum,
    supervised,
    wpo_weight,
)
from ..batch import Batch, CompletionSelector
from ..models.lm_head import TeacherOutputs
from . import weighting as weights
from .step import Objective
from .weighting import LossUnit, Weighting, Weightings

Loss = Callable[..., tuple[Tensor, Stats]]
Tensors = dict[tuple[str, str], Tensor]  # (unit, name) -> one entry per unit
TensorReader = Callable[[nn.Module, Batch], Tensors]

CHOSEN, REJECTED = 0, 1
_UNITS = {"completions": "sequences", "steps": "tokens"}  # of objectives on scores
_COMPLETIONS: dict[str, CompletionSelector] = {"all": None, "chosen": CHOSEN, "rejected": REJECTED}


@dataclass(frozen=True)
class Term:
    """One loss of a mix.

    Attributes:
        function: one of `burnish.objectives`, or another of their form, its hyper-parameters bound.
        coefficient: 0 measures without training.
        weighting: weight of each unit; by default every token, completion or pair counts the same.
        of: completions that a loss with one entry per token or completion is applied to.
        columns: columns of the data that its weighting reads.
        factor: name of a tensor, one entry per unit of the loss, that the loss is multiplied by.
    """

    function: Loss
    coefficient: float = 1.0
    weighting: Weighting | None = None
    of: CompletionSelector = None
    columns: tuple[str, ...] = ()
    factor: str | None = None

    @cached_property
    def unit(self) -> LossUnit:
        """Unit of the loss's entries, from its return annotation."""
        loss, _ = get_args(inspect.signature(self.function).return_annotation)
        return cast(LossUnit, _unit(loss))

    def weigh(self, batch: Batch) -> weights.Weights:
        if self.weighting is not None:
            return self.weighting(batch)
        if self.unit == "tokens":
            return weights.token_mean(batch, of=self.of)
        return weights.completion_mean(batch, of=self.of) if self.unit == "sequences" else weights.pair_mean(batch)

    def __call__(self, tensors: Tensors, batch: Batch) -> tuple[Tensor, Stats]:
        arguments = {p.name: self._argument(p, tensors, batch) for p in tensor_parameters(self.function)}
        loss, stats = self.function(**{name: value for name, value in arguments.items() if value is not None})
        return (loss if self.factor is None else tensors[self.unit, self.factor] * loss), stats

    def _argument(self, parameter: inspect.Parameter, tensors: Tensors, batch: Batch) -> Tensor | None:
        unit = _unit(parameter.annotation)
        value = tensors.get((unit, parameter.name))
        if value is None:
            value = _column(batch, parameter.name, unit)
        if value is None:
            if parameter.default is parameter.empty:
                name = getattr(self.function, "func", self.function).__name__
                missing = f"{parameter.name} per {unit.removesuffix('s') or 'step'}"
                sources = [source for source, names in _SOURCES.items() if parameter.name in names]
                source = sources[0] if sources else "a column of the data of that name"
                raise ValueError(f"{name}: there is no tensor {missing}; {source} would give it")
            return None
        if self.of is None or unit not in ("tokens", "sequences"):
            return value
        return value[batch.tokens_of(self.of) if unit == "tokens" else batch.completions_of(self.of)]


Losses = Mapping[str, Term]


def _entropy(entropy: PerToken) -> tuple[PerToken, Stats]:
    return entropy.detach(), {}


def _pair_logps(logp_chosen: PerPair, logp_rejected: PerPair) -> tuple[PerPair, Stats]:
    return logp_chosen.detach(), {"logps/rejected": logp_rejected.detach()}


# Measured beside the losses, over all completions, and logged under these names.
ENTROPY = {"entropy": Term(_entropy, 0.0)}
PAIR_LOGPS = {"logps/chosen": Term(_pair_logps, 0.0)}


def distillation(divergence: PerToken) -> tuple[PerToken, Stats]:
    """Divergence from the teacher's distribution of the next token, see `burnish.loops.runs.teacher`."""
    return divergence, {}


def compose(losses: Losses, read: TensorReader) -> Objective:
    """The objective of these losses, all from one forward pass, that of ``read``."""

    def objective(policy: nn.Module, batch: Batch) -> Mapping[str, tuple[Tensor, Stats]]:
        tensors = read(policy, batch)
        return {name: term(tensors, batch) for name, term in losses.items()}

    return objective


def weightings(losses: Losses) -> Weightings:
    return {name: (term.coefficient, term.weigh) for name, term in losses.items()}


def columns_of(losses: Losses) -> list[str]:
    """The columns of the data that the losses' weightings read."""
    return sorted({name for term in losses.values() for name in term.columns})


def tensors_needed(losses: Losses) -> set[str]:
    """The names of all tensors that the losses take."""
    return {name for term in losses.values() for name in units_of(term.function)}


def outputs_for(losses: Losses) -> tuple[Extra, ...]:
    """Further outputs of the log-prob kernel that the losses need."""
    needed: dict[Extra, bool] = {
        "mean_logprob": "mean_logp" in tensors_needed(losses),
        "log_sum_squares": any(term.factor == "wpo" for term in losses.values()),
    }
    return tuple(name for name, used in needed.items() if used)


def policy_tensors(
    *,
    reference: Callable[[Batch], Tensor] | None = None,
    reduce: Callable[[Tensor, Batch], Tensor] | None = None,
    score: Callable[[Tensor], Tensor] | None = None,
    teacher: Callable[[Batch], TeacherOutputs] | None = None,
    outputs: tuple[Extra, ...] = (),
    pairs: bool = False,
    temperature: float = 1.0,
) -> TensorReader:
    """The policy's tensors per token, per completion and per pair, under the names of the objectives.

    Args:
        reference: log-probs [tokens] of the reference policy, for the tensors named ``ref_...``.
        reduce: reduces the log-probs of tokens to one per completion; the default is their sum.
        score: maps log-ratios of pairs to f-divergence scores, see `burnish.objectives.f_divergence_score`.
        teacher: a teacher's outputs for the batch, for the tensor ``divergence``.
        outputs: further outputs of the log-prob kernel: "mean_logprob" gives ``mean_logp``, for label smoothing;
            "log_sum_squares" gives ``wpo``, the weight of each completion and of each pair, a product of two.
        pairs: whether the examples are pairs of a chosen and a rejected completion.
        temperature: of the policy's softmax, the one that completions were sampled at.
    """
    reduced: Callable[[Tensor, Batch], Tensor] = reduce or (
        lambda x, batch: sequence_sum(x, batch.sequence, batch.sequences)
    )

    def read(policy: nn.Module, batch: Batch) -> Tensors:
        options: dict[str, Any] = {"outputs": outputs} if outputs else {}
        options |= {"temperature": temperature} if temperature != 1.0 else {}
        forward = policy(batch, **options, **({} if teacher is None else {"teacher": teacher(batch)}))
        of_tokens = {
            "logp": forward.logprob,
            "entropy": forward.entropy,
            "logsumexp": forward.logsumexp,
            "mean_logp": forward.mean_logprob,
            "value": forward.value,
            "divergence": forward.divergence,
            "ref_logp": None if reference is None else reference(batch),
            "sequence": batch.sequence,
        }
        tensors: Tensors = {("tokens", name): value for name, value in of_tokens.items() if value is not None}
        for name in ("logp", "ref_logp"):
            if ("tokens", name) in tensors:
                tensors["sequences", name] = reduced(tensors["tokens", name], batch)
        if forward.log_sum_squares is not None:
            wpo = wpo_weight(forward.logprob, forward.log_sum_squares, batch.sequence, batch.sequences)
            tensors["sequences", "wpo"] = wpo
        if pairs:
            logp = tensors["sequences", "logp"]
            tensors |= pair_tensors(logp, batch) | pair_tensors(logp, batch, "logp_")
            tensors |= pair_tensors(sequence_mean(forward.logprob, batch.sequence, batch.sequences), batch, "mean_")
            if reference is not None:
                tensors |= pair_tensors(tensors["sequences", "ref_logp"], batch, "ref_")
            if forward.log_sum_squares is not None:
                chosen, rejected = pair_tensors(wpo, batch).values()
                tensors["pairs", "wpo"] = chosen * rejected
            if score is not None:
                for side in ("chosen", "rejected"):
                    ratio = tensors["pairs", side] - tensors["pairs", f"ref_{side}"]
                    tensors["pairs", side], tensors["pairs", f"ref_{side}"] = score(ratio), torch.zeros_like(ratio)
        return tensors

    return read


def score_tensors(policy: nn.Module, batch: Batch) -> Tensors:
    """A scorer's tensors per step, per completion and per pair, under the names of the objectives."""
    score = policy(batch).score
    tensors: Tensors = {("tokens", "logit"): score}
    if len(score) == batch.sequences:  # one marked token per completion
        tensors |= {("sequences", "score"): score, ("sequences", "group"): batch.example, **pair_tensors(score, batch)}
    return tensors


def pair_tensors(value: Tensor, batch: Batch, prefix: str = "") -> Tensors:
    """A value per completion as the two values of each pair."""
    return {
        ("pairs", f"{prefix}chosen"): value[batch.completion == CHOSEN],
        ("pairs", f"{prefix}rejected"): value[batch.completion == REJECTED],
    }


def parse_losses(
    mix: str | Mapping[str, float | Mapping[str, Any]],
    shared: Mapping[str, float],
    known: Mapping[str, Loss],
    *,
    of: CompletionSelector = None,
    weighting: Callable[..., weights.Weights] = weights.token_mean,
    given: Collection[str] = (),
) -> dict[str, Term]:
    """The losses of a configured mix: ``dpo``, or ``{dpo: 1.0, nll: {coefficient: 0.2, weighting: sequence_mean}}``.

    Beside its hyper-parameters a loss may have ``coefficient``; ``weighting``, one of token_mean, sequence_mean and
    fixed_length (with its ``length``); ``of``, the completions it is applied to: all, chosen, rejected, or the name of
    a bool column; and ``weight``, the name of a column that its units are weighted by.

    Args:
        shared: hyper-parameters for every loss that has one of that name.
        known: the losses of this recipe, by name.
        of, weighting: defaults for losses with one entry per token.
        given: names of the shared hyper-parameters that the user set: each must belong to at least one loss.

    Raises:
        ValueError: if a name or a hyper-parameter is unknown, naming the nearest one there is, or out of range.
    """
    losses = {}
    for name, entry in ({mix: 1.0} if isinstance(mix, str) else mix).items():
        settings: dict[str, Any] = dict(entry) if isinstance(entry, Mapping) else {"coefficient": entry}
        function = _known(name, known)
        coefficient = settings.pop("coefficient", 1.0)
        chosen = settings.pop("of", None)
        completions = of if chosen is None and Term(function).unit == "tokens" else _COMPLETIONS.get(chosen, chosen)
        by = settings.pop("weight", None)
        weigh = _weighting(name, Term(function, of=completions), settings, by, weighting)
        columns = tuple(column for column in (by, completions) if isinstance(column, str))
        losses[name] = Term(_bind(name, function, shared, settings), coefficient, weigh, completions, columns)
    known_parameters = {"beta", "label_smoothing"}.union(*(hyper_parameters(term.function) for term in losses.values()))
    for name in given:
        if name not in known_parameters:
            raise ValueError(
                f"loss_kwargs: no loss of this mix has {name!r}; they have {', '.join(sorted(known_parameters))}"
            )
    return losses


def losses_of(module: ModuleType) -> dict[str, Loss]:
    """Every objective of a module of `burnish.objectives`: its public functions that return loss and stats."""
    return {
        name: function
        for name, function in vars(module).items()
        if inspect.isfunction(function) and function.__module__ == module.__name__ and not name.startswith("_")
        if get_args(inspect.signature(function).return_annotation)[1:] == (Stats,)
    }


def refuse_split_steps(terms: Losses, *, micro_tokens: int | None, ranks: int) -> None:
    """Raises if a loss couples all pairs of a step, and they are not all in one micro-batch on one rank."""
    coupled = sorted(STEP_COUPLED & terms.keys())
    if coupled and (micro_tokens is not None or ranks > 1):
        raise ValueError(
            f"{coupled[0]}: couples all pairs of a step, so they must be in one micro-batch on one rank; "
            "pass --micro_tokens null and run one process"
        )


def tensor_parameters(function: Any) -> list[inspect.Parameter]:
    """The tensors of a loss: its positional parameters."""
    parameters = inspect.signature(getattr(function, "func", function)).parameters.values()
    return [parameter for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]


def units_of(function: Any) -> dict[str, str]:
    """The unit of each tensor of a loss, by name."""
    return {parameter.name: _unit(parameter.annotation) for parameter in tensor_parameters(function)}


def hyper_parameters(function: Any) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(function).parameters.values()
    return {parameter.name: parameter for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}


def _unit(annotation: Any) -> str:
    """The unit of a jaxtyping annotation is the name of its dimension; a number for the whole step has none."""
    for kind in (annotation, *get_args(annotation)):
        if hasattr(kind, "dim_str"):
            return _UNITS.get(name := str(kind.dim_str).strip(" *"), name)
    return ""


def _column(batch: Batch, name: str, unit: str) -> Tensor | None:
    """A column of the data, expanded from examples to completions for a loss that takes it per sequence."""
    value = batch.columns.get(name)
    if value is not None and unit == "sequences" and len(value) != batch.sequences:
        return value[batch.example]
    return value


def _known(name: str, known: Mapping[str, Loss]) -> Loss:
    if name.startswith("{"):
        raise ValueError(f"loss: {name} is no mapping: YAML wants a space after each colon, as in {{dpo: 1, nll: 0.2}}")
    if name not in known:
        nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
        raise ValueError(f"loss: {name!r} is not one of {', '.join(sorted(known))}; did you mean {nearest!r}?")
    return known[name]


def _weighting(
    name: str, term: Term, settings: dict[str, Any], by: str | None, default: Callable[..., weights.Weights]
) -> Weighting:
    """The weighting of a loss; its entries are taken out of ``settings``."""
    kind = settings.pop("weighting", None)
    weighting: Weighting = partial(default, of=term.of) if term.unit == "tokens" else term.weigh
    if kind is not None:
        if term.unit != "tokens" or kind not in ("token_mean", "sequence_mean", "fixed_length"):
            raise ValueError(
                f"loss: {name} has one entry per {term.unit.removesuffix('s')}, weighting={kind!r} does not fit; "
                "wanted token_mean, sequence_mean or fixed_length for a loss of tokens, and none for another"
            )
        if kind == "fixed_length" and (by is not None or "length" not in settings):
            raise ValueError(f"loss: {name}: weighting fixed_length needs its length, and takes no weight column")
        length = {"length": settings.pop("length")} if kind == "fixed_length" else {}
        weighting = partial(getattr(weights, kind), of=term.of, **length)
    return (
        weighting if by is None else partial(weights.weighted, weighting=weighting, by=by, unit=term.unit, of=term.of)
    )


def _bind(name: str, function: Loss, shared: Mapping[str, Any], settings: Mapping[str, Any]) -> Loss:
    """The function with its hyper-parameters: those of its ``settings``, or those ``shared`` by the mix."""
    parameters = hyper_parameters(function)
    for parameter in settings:
        if parameter not in parameters:
            wanted = ", ".join(sorted(parameters)) or "none"
            raise ValueError(f"loss: {name} has no {parameter!r}; it has {wanted}")
    if not parameters:
        return function
    bound = {parameter: value for parameter, value in {**shared, **settings}.items() if parameter in parameters}
    missing = {p.name for p in parameters.values() if p.default is p.empty} - bound.keys()
    if missing:
        example = f"{{{', '.join(f'{parameter}: ...' for parameter in sorted(missing))}}}"
        raise ValueError(f"loss: {name} needs {', '.join(sorted(missing))}; give it with --loss_kwargs '{example}'")
    _check_ranges(name, parameters, bound)
    return partial(function, **bound)


def _check_ranges(name: str, parameters: Mapping[str, inspect.Parameter], bound: Mapping[str, Any]) -> None:
    """Raise ValueError unless each value is among those of its `Literal`, or in the `Range` of its annotation."""
    values = {parameter.name: bound.get(parameter.name, parameter.default) for parameter in parameters.values()}
    for parameter, value in values.items():
        annotation = parameters[parameter].annotation
        if get_origin(annotation) is Literal and value not in get_args(annotation):
            *others, last = get_args(annotation)
            raise ValueError(f"{name}: {parameter} must be {', '.join(others)} or {last}, got {value!r}")
        for allowed in getattr(annotation, "__metadata__", ()):
            if not isinstance(value, int | float) or not allowed.holds(value, values):
                raise ValueError(f"{name}: {parameter} must be {allowed.words}, got {value}")


_SOURCES = {  # what gives the tensors that a loss may lack
    "policy_tensors(pairs=True)": ("mean_chosen", "mean_rejected", "logp_chosen", "logp_rejected"),
    "policy_tensors(pairs=True), or score_tensors for a scorer,": ("chosen", "rejected"),
    "policy_tensors(reference=..., pairs=True)": ("ref_chosen", "ref_rejected"),
    "policy_tensors(reference=...)": ("ref_logp",),
    'policy_tensors(outputs=("mean_logprob",))': ("mean_logp",),
    "policy_tensors(teacher=...)": ("divergence",),
    "a policy with a value_head or a critic": ("value",),
    "score_tensors": ("logit",),
    "score_tensors, with one marked token per completion,": ("score", "group"),
    "an online recipe": ("old_logp", "sampled_logp", "start_logp", "old_value", "advantage", "correction"),
}


# The losses that recipes offer by name: of single tokens, which every recipe on text can add to its own, and of pairs.
TOKEN_LOSSES: dict[str, Loss] = losses_of(supervised)
PAIR_LOSSES: dict[str, Loss] = {
    **losses_of(preference),
    **losses_of(reference_free),
    **TOKEN_LOSSES,
    "distillation": distillation,
}
STEP_COUPLED = {"aot", "aot_unpaired"}  # they sort the pairs of a step
WEIGHTINGS = {"token_mean": weights.token_mean, "sequence_mean": weights.sequence_mean}
