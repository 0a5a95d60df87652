"""The losses that a configuration can name, and the mixes of them: hyper-parameters, ranges, weightings."""

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


def parse_losses(
    mix: LossMix,
    shared: Mapping[str, float],
    known: Mapping[str, Loss],
    *,
    of: int | str | None = None,
    weighting: Callable[..., Weights] = token_mean,
    given: Collection[str] = (),
) -> dict[str, Term]:
    """The losses of a configured mix: ``dpo``, or ``{dpo: 1, nll: {coefficient: 0.2, weighting: length_normalized}}``.

    Your own is named ``module:function``, or is the function itself, in the form of `burnish.objectives`: positional
    parameters are tensors, by name and annotation, or columns of the data; keyword-only ones are hyper-parameters.

    Beside its hyper-parameters a loss may have ``coefficient``; ``weighting``, one of token_mean, length_normalized and
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
    losses: dict[str, Term] = {}
    if not mix:
        raise ValueError(f"loss: {mix!r} names no loss; there are {', '.join(sorted(known))}")
    for key, entry in (mix if isinstance(mix, Mapping) else {mix: 1.0}).items():
        settings: dict[str, Any] = dict(entry) if isinstance(entry, Mapping) else {"coefficient": entry}
        name = loss_name(key)
        if name in losses:
            raise ValueError(f"loss: two are called {name}; rename your own")
        coefficient, by = settings.pop("coefficient", 1.0), settings.pop("weight", None)
        if isinstance(coefficient, bool) or not isinstance(coefficient, int | float) or not math.isfinite(coefficient):
            hint = "; your own function is a key: {function: 1.0}" if callable(coefficient) else ""
            raise ValueError(f"loss: {name}: wanted a number for its coefficient, got {coefficient!r}{hint}")
        function = _function(key, known)
        if coefficient < 0:
            log.warning("loss: %s has the coefficient %s, so it is raised instead of lowered", name, coefficient)
        completions: int | str | None = of if Term(function).unit == "tokens" else None
        if (applies_to := settings.pop("of", None)) is not None:
            completions = {"all": None, "chosen": CHOSEN, "rejected": REJECTED}.get(applies_to, applies_to)
        weigh = _weighting(name, Term(function, of=completions), settings, by, weighting)
        columns = tuple(column for column in (by, completions) if isinstance(column, str))
        if function is not known.get(name):  # tensors that no recipe computes are columns of the data
            columns += tuple(units_of(function).keys() - TENSORS)
        losses[name] = Term(_bind(name, function, shared, settings), coefficient, weigh, completions, columns)
    known_parameters = {"beta", "label_smoothing"}.union(*(hyper_parameters(term.function) for term in losses.values()))
    for name in sorted(set(given) - known_parameters):
        listed = ", ".join(sorted(known_parameters))
        raise ValueError(f"loss: no loss of this mix has {name!r}; they have {listed}")
    return losses


def loss_name(loss: Any) -> str:
    """The name of a loss in metrics and mixes; for your own loss, the name of its function."""
    function = getattr(loss, "func", loss)
    return loss.rpartition(":")[2] if isinstance(loss, str) else getattr(function, "__name__", type(loss).__name__)


def _function(loss: Any, known: Mapping[str, Loss]) -> Loss:
    """The loss of this name; or that of ``module:function``, or the function itself, in the form of an objective.

    Raises:
        ValueError: if there is none, or it has another form.
    """
    if isinstance(loss, str) and loss.startswith("{"):
        wanted = "YAML wants a space after each colon, and then there is a number, as in {dpo: 1, nll: 0.2}"
        raise ValueError(f"loss: {loss} is no mapping: {wanted}")
    if isinstance(loss, str) and ":" not in loss:
        if loss not in known:
            near = nearest("", loss, known).partition(", did")
            raise ValueError(f"loss: {loss!r} is not one of {', '.join(sorted(known))}{''.join(near[1:])}")
        return known[loss]
    function: Any = find("loss", loss, {}, "") if isinstance(loss, str) else loss
    name = loss_name(loss)
    if not callable(function) or inspect.isclass(function):
        raise ValueError(f"loss {name}: wanted a function of tensors, got {function!r}")
    signature, units = inspect.signature(function, eval_str=True), units_of(function)
    returned = Term(function).unit if len(get_args(signature.return_annotation)) == 2 else ""
    if None in units.values() or returned not in ("tokens", "sequences", "pairs"):
        annotation = "PerPair" if any("chosen" in tensor for tensor in units) else "PerToken"
        numbers = [name for name, each in signature.parameters.items() if each.default is not each.empty]
        tensors = [f"{tensor}: {annotation}" for tensor in units if tensor not in numbers]
        form = ", ".join([*tensors, *(["*"] if numbers else []), *numbers])
        raise ValueError(
            f"loss {name}: wanted the unit of each tensor, and a loss with its stats, as annotations of "
            f"burnish.objectives; such as def {name}({form}) -> tuple[{annotation}, Stats]"
        )
    return function  # type: ignore[no-any-return]


def _weighting(
    name: str, term: Term, settings: dict[str, Any], by: str | None, default: Callable[..., Weights]
) -> Weighting:
    """The weighting of a loss; removes its entries from ``settings``."""
    kind = settings.pop("weighting", None)
    weighting = partial(default, of=term.of) if term.unit == "tokens" else term.weigh
    if kind is not None:
        if term.unit != "tokens" or kind not in tuple(WEIGHTINGS):
            raise ValueError(
                f"loss: {name} has one entry per {term.unit.removesuffix('s')}, weighting={kind!r} does not fit; "
                "wanted token_mean, length_normalized or fixed_length for a loss of tokens, and none for another"
            )
        if kind == "fixed_length" and (by is not None or "length" not in settings):
            raise ValueError(f"loss: {name}: weighting fixed_length needs its length, and takes no weight column")
        length = {"length": settings.pop("length")} if kind == "fixed_length" else {}
        weighting = partial(WEIGHTINGS[kind], of=term.of, **length)
    if by is None:
        return weighting
    return partial(weighted, weighting=weighting, by=by, unit=term.unit, of=term.of)


def _bind(name: str, function: Loss, shared: Mapping[str, Any], settings: Mapping[str, Any]) -> Loss:
    """The function with its hyper-parameters: those of its ``settings``, or those ``shared`` by the mix."""
    parameters = hyper_parameters(function)
    for parameter in settings:
        if parameter not in parameters:
            wanted = ", ".join(sorted(parameters)) or "none"
            raise ValueError(f"loss: {name} has no {parameter!r}; it has {wanted}")
    bound = {parameter: value for parameter, value in {**shared, **settings}.items() if parameter in parameters}
    values = {name: parameter.default for name, parameter in parameters.items()} | bound
    if missing := sorted(parameter for parameter, value in values.items() if value is inspect.Parameter.empty):
        example = f"{{{', '.join(f'{parameter}: ...' for parameter in missing)}}}"
        raise ValueError(f"loss: {name} needs {', '.join(missing)}; give it with --loss_kwargs '{example}'")
    for parameter, value in values.items():
        annotation = parameters[parameter].annotation
        if get_origin(annotation) is Literal and value not in get_args(annotation):
            *others, last = get_args(annotation)
            raise ValueError(f"{name}: {parameter} must be {', '.join(others)} or {last}, got {value!r}")
        for allowed in getattr(annotation, "__metadata__", ()):  # a `Range`
            if not isinstance(value, int | float) or not allowed.holds(value, values):
                raise ValueError(f"{name}: {parameter} must be {allowed.words}, got {value}")
    return partial(function, **bound) if parameters else function


def hyper_parameters(function: Any) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(function, eval_str=True).parameters.values()
    return {parameter.name: parameter for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}


def losses_of(module: ModuleType) -> dict[str, Loss]:
    """Every objective of a module of `burnish.objectives`: its public functions that return loss and stats."""
    return {
        name: function
        for name, function in vars(module).items()
        if inspect.isfunction(function) and function.__module__ == module.__name__ and not name.startswith("_")
        if get_args(inspect.signature(function).return_annotation)[1:] == (Stats,)
    }


def distillation(divergence: PerToken) -> tuple[PerToken, Stats]:
    """Divergence from the teacher's distribution of the next token, see `burnish.loops.runs.teacher`."""
    return divergence, {}


# The losses that recipes offer by name: losses of tokens, which every recipe on text can add to its own, and of pairs.
TOKEN_LOSSES = losses_of(supervised)
PAIR_LOSSES = {**losses_of(preference), **losses_of(reference_free), **TOKEN_LOSSES, "distillation": distillation}
WEIGHTINGS: dict[str, Callable[..., Weights]] = {f.__name__: f for f in (token_mean, length_normalized, fixed_length)}
STEP_COUPLED = {"aot", "aot_unpaired"}  # losses that sort the pairs of a step
