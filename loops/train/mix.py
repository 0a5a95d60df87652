"""The losses that a configuration can name, and the mixes of them: hyper-parameters, ranges,
weightings.
"""

import inspect
import logging
import math
from collections.abc import Callable, Collection, Mapping
from functools import partial
from types import ModuleType
from typing import Any, Literal, get_args, get_origin

from ...objectives import PerToken, Stats, preference, reference_free, supervised
from ..batch import Weighting, Weights, fixed_length, length_normalized, token_mean, weighted
from ..config import LossMix
from ..registry import find, nearest
from .losses import CHOSEN, REJECTED, TENSORS, Loss, Term, units_of

log = logging.getLogger(__name__)

# What ``of`` may say in place of the index of a completion, or the name of a column.
_SIDES: Mapping[str, int | None] = {"all": None, "chosen": CHOSEN, "rejected": REJECTED}


def parse_losses(
    mix: LossMix,
    shared: Mapping[str, float],
    known: Mapping[str, Loss],
    *,
    of: int | str | None = None,
    weighting: Callable[..., Weights] = token_mean,
    given: Collection[str] = (),
) -> dict[str, Term]:
    """The losses of a configured mix: ``dpo``, or
    ``{dpo: 1, nll: {coefficient: 0.2, weighting: length_normalized}}``.

    Your own is named ``module:function``, or is the function itself, in the form of
    `burnish.objectives`: positional parameters are tensors, by name and annotation, or columns of
    the data; keyword-only ones are hyper-parameters.

    Beside its hyper-parameters a loss may have ``coefficient``; ``weighting``, one of token_mean,
    length_normalized and fixed_length (with its ``length``); ``of``, the completions it is applied
    to: all, chosen, rejected, or the name of a bool column; and ``weight``, the name of a column
    that its units are weighted by.

    Args:
        shared: hyper-parameters for every loss that has one of that name.
        known: the losses of this recipe, by name.
        of, weighting: defaults for losses with one entry per token.
        given: names of the shared hyper-parameters that the user set: each must belong to at least
            one loss.

    Raises:
        ValueError: if a name or a hyper-parameter is unknown, naming the nearest one there is, or
            out of range.
    """
    if not mix:
        raise ValueError(f"loss: {mix!r} names no loss; there are {', '.join(sorted(known))}")
    entries: Mapping[Any, Any] = mix if isinstance(mix, Mapping) else {mix: 1.0}
    losses: dict[str, Term] = {}
    for key, entry in entries.items():
        name = loss_name(key)
        if name in losses:
            raise ValueError(f"loss: two are called {name}; rename your own")
        losses[name] = _term(key, entry, shared, known, of=of, default=weighting)
    known_parameters = {"beta", "label_smoothing"}
    for term in losses.values():
        known_parameters.update(hyper_parameters(term.function))
    for name in sorted(set(given) - known_parameters):
        listed = ", ".join(sorted(known_parameters))
        raise ValueError(f"loss: no loss of this mix has {name!r}; they have {listed}")
    return losses


def _term(
    key: object,
    entry: object,
    shared: Mapping[str, float],
    known: Mapping[str, Loss],
    *,
    of: int | str | None,
    default: Callable[..., Weights],
) -> Term:
    """One entry of a mix: ``nll: 0.2``, or
    ``nll: {coefficient: 0.2, weighting: length_normalized}``.
    """
    name = loss_name(key)
    settings: dict[str, Any] = dict(entry) if isinstance(entry, Mapping) else {"coefficient": entry}
    coefficient = _coefficient(name, settings.pop("coefficient", 1.0))
    weighted_by: str | None = settings.pop("weight", None)
    function = _function(key, known)
    if coefficient < 0:
        log.warning(
            "loss: %s has the coefficient %s, so it is raised instead of lowered", name, coefficient
        )
    completions: int | str | None = of if Term(function).unit == "tokens" else None
    applies_to = settings.pop("of", None)
    if applies_to is not None:
        completions = _SIDES.get(applies_to, applies_to)
    weigh = _weighting(name, Term(function, of=completions), settings, weighted_by, default)
    columns = [column for column in (weighted_by, completions) if isinstance(column, str)]
    if function is not known.get(name):  # tensors that no recipe computes are columns of the data
        columns += units_of(function).keys() - TENSORS
    # What is left of the settings are hyper-parameters.
    bound = _bind(name, function, shared, settings)
    return Term(bound, coefficient, weigh, completions, tuple(columns))


def _coefficient(name: str, value: object) -> float:
    """The number itself; raises ValueError if it is none."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(value, int | float) and is_number and math.isfinite(value):
        return value
    hint = "; your own function is a key: {function: 1.0}" if callable(value) else ""
    raise ValueError(f"loss: {name}: wanted a number for its coefficient, got {value!r}{hint}")


def loss_name(loss: object) -> str:
    """The name of a loss in metrics and mixes; for your own loss, the name of its function."""
    if isinstance(loss, str):
        return loss.rpartition(":")[2]
    function = getattr(loss, "func", loss)
    return str(getattr(function, "__name__", type(loss).__name__))


def _function(loss: object, known: Mapping[str, Loss]) -> Loss:
    """The loss of this name; or that of ``module:function``, or the function itself, in the form of
    an objective.

    Raises:
        ValueError: if there is none, or it has another form.
    """
    if isinstance(loss, str) and loss.startswith("{"):
        wanted = "YAML wants a space after each colon, and then there is a number, as in {dpo: 1, nll: 0.2}"
        raise ValueError(f"loss: {loss} is no mapping: {wanted}")
    if isinstance(loss, str) and ":" not in loss:
        return _shipped(loss, known)
    function: Any = find("loss", loss, {}, "") if isinstance(loss, str) else loss
    name = loss_name(loss)
    if not callable(function) or inspect.isclass(function):
        raise ValueError(f"loss {name}: wanted a function of tensors, got {function!r}")
    signature = inspect.signature(function, eval_str=True)
    units = units_of(function)
    returned = Term(function).unit if len(get_args(signature.return_annotation)) == 2 else ""
    if None in units.values() or returned not in ("tokens", "sequences", "pairs"):
        raise ValueError(
            f"loss {name}: wanted the unit of each tensor, and a loss with its stats, as annotations of "
            f"burnish.objectives; such as {_annotated(name, signature, list(units))}"
        )
    return function  # type: ignore[no-any-return]


def _shipped(name: str, known: Mapping[str, Loss]) -> Loss:
    """The recipe's loss of this name."""
    if name not in known:
        _, comma, suggestion = nearest("", name, known).partition(", did")
        listed = ", ".join(sorted(known))
        raise ValueError(f"loss: {name!r} is not one of {listed}{comma}{suggestion}")
    return known[name]


def _annotated(name: str, signature: inspect.Signature, tensors: list[str]) -> str:
    """The head of a function with the annotations that it lacks."""
    annotation = "PerPair" if any("chosen" in tensor for tensor in tensors) else "PerToken"
    numbers = [
        each.name for each in signature.parameters.values() if each.default is not each.empty
    ]
    parameters = [f"{tensor}: {annotation}" for tensor in tensors if tensor not in numbers]
    if numbers:
        parameters += ["*", *numbers]
    return f"def {name}({', '.join(parameters)}) -> tuple[{annotation}, Stats]"


def _weighting(
    name: str, term: Term, settings: dict[str, Any], by: str | None, default: Callable[..., Weights]
) -> Weighting:
    """The weighting of a loss; removes its entries from ``settings``."""
    kind = settings.pop("weighting", None)
    weighting: Weighting
    if kind is not None:
        weighting = _named_weighting(name, term, kind, settings, has_weights=by is not None)
    elif term.unit == "tokens":
        weighting = partial(default, of=term.of)
    else:
        weighting = term.weigh
    if by is None:
        return weighting
    return partial(weighted, weighting=weighting, by=by, unit=term.unit, of=term.of)


def _named_weighting(
    name: str, term: Term, kind: object, settings: dict[str, Any], *, has_weights: bool
) -> Weighting:
    """The weighting of tokens of this name; removes its ``length`` from ``settings``."""
    if term.unit != "tokens" or kind not in tuple(WEIGHTINGS):
        raise ValueError(
            f"loss: {name} has one entry per {term.unit.removesuffix('s')}, weighting={kind!r} does not fit; "
            "wanted token_mean, length_normalized or fixed_length for a loss of tokens, and none for another"
        )
    if kind != "fixed_length":
        return partial(WEIGHTINGS[kind], of=term.of)
    if has_weights or "length" not in settings:
        raise ValueError(
            f"loss: {name}: weighting fixed_length needs its length, and takes no weight column"
        )
    return partial(fixed_length, of=term.of, length=settings.pop("length"))


def _bind(
    name: str, function: Loss, shared: Mapping[str, object], settings: Mapping[str, object]
) -> Loss:
    """The function with its hyper-parameters: those of its ``settings``, or those ``shared`` by the
    mix.
    """
    parameters = hyper_parameters(function)
    for parameter in settings:
        if parameter not in parameters:
            wanted = ", ".join(sorted(parameters)) or "none"
            raise ValueError(f"loss: {name} has no {parameter!r}; it has {wanted}")
    bound = {}
    for parameter, value in {**shared, **settings}.items():
        if parameter in parameters:
            bound[parameter] = value
    values = {name: parameter.default for name, parameter in parameters.items()} | bound
    empty = inspect.Parameter.empty  # a hyper-parameter without a default
    missing = sorted(parameter for parameter, value in values.items() if value is empty)
    if missing:
        example = ", ".join(f"{parameter}: ..." for parameter in missing)
        raise ValueError(
            f"loss: {name} needs {', '.join(missing)}; give it with --loss_kwargs '{{{example}}}'"
        )
    for parameter, value in values.items():
        _check_range(name, parameter, parameters[parameter].annotation, value, values)
    return partial(function, **bound) if parameters else function


def _check_range(
    name: str, parameter: str, annotation: object, value: object, values: Mapping[str, object]
) -> None:
    """Raise ValueError unless a hyper-parameter is what its annotation allows."""
    if get_origin(annotation) is Literal and value not in get_args(annotation):
        *others, last = get_args(annotation)
        raise ValueError(
            f"{name}: {parameter} must be {', '.join(others)} or {last}, got {value!r}"
        )
    # a `Range`, which may depend on the other values
    for allowed in getattr(annotation, "__metadata__", ()):
        if not isinstance(value, int | float) or not allowed.holds(value, values):
            raise ValueError(f"{name}: {parameter} must be {allowed.words}, got {value}")


def hyper_parameters(function: Callable[..., object]) -> dict[str, inspect.Parameter]:
    """The keyword-only parameters of a loss, by name."""
    parameters = inspect.signature(function, eval_str=True).parameters.values()
    return {each.name: each for each in parameters if each.kind is each.KEYWORD_ONLY}


def losses_of(module: ModuleType) -> dict[str, Loss]:
    """Every objective of a module of `burnish.objectives`: its public functions that return loss
    and stats.
    """
    losses: dict[str, Loss] = {}
    for name, function in vars(module).items():
        is_own = inspect.isfunction(function) and function.__module__ == module.__name__
        if is_own and not name.startswith("_"):
            returned = get_args(inspect.signature(function).return_annotation)
            if returned[1:] == (Stats,):
                losses[name] = function
    return losses


def distillation(divergence: PerToken) -> tuple[PerToken, Stats]:
    """Divergence from the teacher's distribution of the next token, see
    `burnish.loops.runs.teacher`.
    """
    return divergence, {}


# The losses that recipes offer by name: losses of tokens, which every recipe on text can add to its
# own, and of pairs.
TOKEN_LOSSES = losses_of(supervised)
PAIR_LOSSES = {
    **losses_of(preference),
    **losses_of(reference_free),
    **TOKEN_LOSSES,
    "distillation": distillation,
}
WEIGHTINGS: dict[str, Callable[..., Weights]] = {
    f.__name__: f for f in (token_mean, length_normalized, fixed_length)
}
STEP_COUPLED = {"aot", "aot_unpaired"}  # losses that sort the pairs of a step
