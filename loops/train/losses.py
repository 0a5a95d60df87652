"""Named losses over one forward pass: composition.

    total = dpo + 0.2 · nll + 0.1 · distillation        {name: Term(function, coefficient, ...)}

An objective says in its signature what it needs: names and units. ``chosen: PerPair`` is the log-prob of the chosen
answer of each pair, ``logp: PerToken`` that of each trained token, ``logp: PerSequence`` that of each answer. Here the
tensors of a batch are laid out under those names, and every loss takes its own from one forward pass.
"""

import difflib
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from types import ModuleType
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from ...kernels import Extra
from ...objectives import (
    PerPair,
    PerToken,
    preference,
    reference_free,
    sequence_mean,
    sequence_sum,
    supervised,
    wpo_weight,
)
from ..batch import Batch, Of
from ..config import (
    NoiseShare,
    NonNegativeFloat,
    PositiveFloat,
    PositiveNoiseShare,
    PositiveShare,
    ShareBelowOne,
    range_complaint,
)
from ..models.lm_head import TeacherOutputs
from . import weighting as weights
from .step import Objective, Stats
from .weighting import Unit, Weighting, Weightings

Loss = Callable[..., tuple[Tensor, Stats]]
Tensors = dict[tuple[str, str], Tensor]  # (unit, name) -> one entry per unit
Reader = Callable[[nn.Module, Batch], Tensors]
Answer = Callable[[Tensor, Batch], Tensor]  # [tokens] -> [sequences]

CHOSEN, REJECTED = 0, 1
# Ranges of hyper-parameters by name, or by loss and name: those that the objectives check themselves.
RANGES: dict[str, Any] = {
    **dict.fromkeys(("beta", "tau_pos", "tau_neg", "desirable_weight", "undesirable_weight"), PositiveFloat),
    **dict.fromkeys(("k_pos", "lambda_pos", "k_neg", "lambda_neg"), PositiveFloat),
    **dict.fromkeys(("gamma", "clip_low", "clip_high"), NonNegativeFloat),
    "tau": PositiveShare,
    "label_smoothing": NoiseShare,
    "exo.label_smoothing": PositiveNoiseShare,
    "label_smoothed_nll.label_smoothing": ShareBelowOne,
    "kind": Literal["k1", "k2", "k3"],
}
_UNITS = {"completions": "sequences", "steps": "tokens"}  # of scorers
_NAMES_OF_ANSWERS: dict[str, Of] = {"all": None, "chosen": CHOSEN, "rejected": REJECTED}


@dataclass(frozen=True)
class Term:
    """One loss of a mix.

    Attributes:
        function: of `burnish.objectives`, or any other of their form, its hyper-parameters bound.
        coefficient: 0 measures without training.
        weighting: what each unit counts; without one, every token, answer or pair counts the same.
        of: for a loss with one entry per token or answer: which answers it is applied to.
        columns: of the data, that its weighting reads.
        factor: name of a tensor, one entry per unit of the loss, that the loss is multiplied by.
    """

    function: Loss
    coefficient: float = 1.0
    weighting: Weighting | None = None
    of: Of = None
    columns: tuple[str, ...] = ()
    factor: str | None = None

    @cached_property
    def unit(self) -> Unit:
        """What the loss has one entry of, from its return annotation."""
        loss, _ = get_args(inspect.signature(self.function).return_annotation)
        return cast(Unit, _unit(loss))

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
                raise ValueError(f"{name}: nothing here gives its {parameter.name} per {unit or 'step'}")
            return None
        if self.of is None or unit not in ("tokens", "sequences"):
            return value
        return value[batch.tokens_of(self.of) if unit == "tokens" else batch.completions_of(self.of)]


Losses = Mapping[str, Term]


def _entropy(entropy: PerToken) -> tuple[PerToken, Stats]:
    return entropy.detach(), {}


def _pair_logps(logp_chosen: PerPair, logp_rejected: PerPair) -> tuple[PerPair, Stats]:
    return logp_chosen.detach(), {"logps/rejected": logp_rejected.detach()}


# Measured beside the losses, of all answers, and logged under these names.
ENTROPY = {"entropy": Term(_entropy, 0.0)}
PAIR_LOGPS = {"logps/chosen": Term(_pair_logps, 0.0)}


def distillation(divergence: PerToken) -> tuple[PerToken, Stats]:
    """Divergence from the teacher's distribution of the next token, see `burnish.loops.runs.teacher`."""
    return divergence, {}


def compose(terms: Losses, read: Reader) -> Objective:
    """The objective whose losses are these terms, from the one forward pass of ``read``."""

    def objective(policy: nn.Module, batch: Batch) -> Mapping[str, tuple[Tensor, Stats]]:
        tensors = read(policy, batch)
        return {name: term(tensors, batch) for name, term in terms.items()}

    return objective


def weightings(terms: Losses) -> Weightings:
    return {name: (term.coefficient, term.weigh) for name, term in terms.items()}


def columns_of(terms: Losses) -> list[str]:
    """The columns of the data that the terms' weightings read."""
    return sorted({name for term in terms.values() for name in term.columns})


def needs(terms: Losses) -> set[str]:
    """The names of all tensors that the terms take."""
    return {name for term in terms.values() for name in units_of(term.function)}


def outputs_for(terms: Losses) -> tuple[Extra, ...]:
    """What the terms need of the log-prob kernel beside its three outputs."""
    asked: dict[Extra, bool] = {
        "mean_logprob": "mean_logp" in needs(terms),
        "log_sum_squares": any(term.factor == "wpo" for term in terms.values()),
    }
    return tuple(name for name, needed in asked.items() if needed)


def policy_tensors(
    *,
    reference: Callable[[Batch], Tensor] | None = None,
    answer: Answer | None = None,
    score: Callable[[Tensor], Tensor] | None = None,
    teaching: Callable[[Batch], TeacherOutputs] | None = None,
    outputs: tuple[Extra, ...] = (),
    pairs: bool = False,
    temperature: float = 1.0,
) -> Reader:
    """Log-probs and what else the policy says, of tokens, of answers and of pairs, under the names of the objectives.

    Args:
        reference: log-probs [tokens] of the reference policy, for the tensors named ``ref_...``.
        answer: from the log-probs of tokens to that of an answer; the sum over its tokens unless told otherwise.
        score: maps log-ratios of pairs to f-divergence scores, see `burnish.objectives.f_divergence_score`.
        teaching: what a teacher says of the tokens, see `teacher`, for the tensor ``divergence``.
        outputs: of the log-prob kernel: "mean_logprob" gives ``mean_logp``, for label smoothing; "log_sum_squares"
            gives ``wpo``, the weight of each answer and the product of those of each pair.
        pairs: whether the examples are pairs of a chosen and a rejected answer.
        temperature: of the policy's softmax, that which answers were sampled at.
    """
    total: Answer = answer or (lambda x, batch: sequence_sum(x, batch.sequence, batch.sequences))

    def read(policy: nn.Module, batch: Batch) -> Tensors:
        asked: dict[str, Any] = {"outputs": outputs} if outputs else {}
        asked |= {"temperature": temperature} if temperature != 1.0 else {}
        said = policy(batch, **asked, **({} if teaching is None else {"lesson": teaching(batch)}))
        tokens = {"logp": said.logprob, "entropy": said.entropy, "logsumexp": said.logsumexp}
        more = {"value": said.value, "divergence": said.divergence, "mean_logp": said.mean_logprob}
        tokens |= {name: value for name, value in more.items() if value is not None}
        answers = {"logp": total(said.logprob, batch)}
        if said.log_sum_squares is not None:
            answers["wpo"] = wpo_weight(said.logprob, said.log_sum_squares, batch.sequence, batch.sequences)
        if reference is not None:
            tokens["ref_logp"] = reference(batch)
            answers["ref_logp"] = total(tokens["ref_logp"], batch)
        tokens["sequence"] = batch.sequence
        found: Tensors = {("tokens", name): value for name, value in tokens.items()}
        found |= {("sequences", name): value for name, value in answers.items()}
        if pairs:
            found |= pair_tensors(answers["logp"], batch) | pair_tensors(answers["logp"], batch, "logp_")
            found |= pair_tensors(sequence_mean(said.logprob, batch.sequence, batch.sequences), batch, "mean_")
            if reference is not None:
                found |= pair_tensors(answers["ref_logp"], batch, "ref_")
            if "wpo" in answers:
                of_pair = pair_tensors(answers["wpo"], batch)
                found["pairs", "wpo"] = of_pair["pairs", "chosen"] * of_pair["pairs", "rejected"]
            if score is not None:
                for which in ("chosen", "rejected"):
                    ratio = found["pairs", which] - found["pairs", f"ref_{which}"]
                    found["pairs", which], found["pairs", f"ref_{which}"] = score(ratio), torch.zeros_like(ratio)
        return found

    return read


def score_tensors(policy: nn.Module, batch: Batch) -> Tensors:
    """Scores of answers, of the answers of pairs, and of steps, under the names of the objectives."""
    score = policy(batch).score
    found: Tensors = {("tokens", "logit"): score}
    if len(score) == batch.sequences:  # one mark per answer
        found |= {("sequences", "score"): score, ("sequences", "group"): batch.example, **pair_tensors(score, batch)}
    return found


def pair_tensors(value: Tensor, batch: Batch, prefix: str = "") -> Tensors:
    """A value per answer as the two values of each pair."""
    return {
        ("pairs", f"{prefix}chosen"): value[batch.completion == CHOSEN],
        ("pairs", f"{prefix}rejected"): value[batch.completion == REJECTED],
    }


def parse(
    mix: str | Mapping[str, float | Mapping[str, Any]],
    shared: Mapping[str, float],
    known: Mapping[str, Loss],
    *,
    of: Of = None,
    weighting: Callable[..., weights.Weights] = weights.token_mean,
    given: Collection[str] = (),
) -> dict[str, Term]:
    """The terms of a configured mix: ``dpo``, or ``{dpo: 1.0, nll: {coefficient: 0.2, weighting: sequence_mean}}``.

    Beside its hyper-parameters a loss may have ``coefficient``; ``weighting``, one of token_mean, sequence_mean and
    fixed_length (with its ``length``); ``of``, the answers it is applied to: all, chosen, rejected, or a column that
    says so; and ``weight``, the name of a column that its units count by.

    Args:
        shared: hyper-parameters for every loss that has one of that name.
        known: the losses that this recipe has, by name.
        of, weighting: of losses of tokens, unless told otherwise.
        given: those of the shared names that somebody gave, so that one must have some loss to go to.

    Raises:
        ValueError: if a name or a hyper-parameter is unknown or out of range, naming the nearest one there is.
    """
    terms = {}
    for name, entry in ({mix: 1.0} if isinstance(mix, str) else mix).items():
        own: dict[str, Any] = dict(entry) if isinstance(entry, Mapping) else {"coefficient": entry}
        function = _known(name, known)
        coefficient = own.pop("coefficient", 1.0)
        which = own.pop("of", None)
        to = of if which is None and Term(function).unit == "tokens" else _NAMES_OF_ANSWERS.get(which, which)
        by = own.pop("weight", None)
        chosen = _weighting(name, Term(function, of=to), own, by, weighting)
        columns = tuple(column for column in (by, to) if isinstance(column, str))
        terms[name] = Term(_bind(name, function, shared, own), coefficient, chosen, to, columns)
    has = {"beta", "label_smoothing"}.union(*(hyper_parameters(term.function) for term in terms.values()))
    for name in given:
        if name not in has:
            raise ValueError(f"loss_kwargs: no loss of this mix has {name!r}; they have {', '.join(sorted(has))}")
    return terms


def losses_of(module: ModuleType) -> dict[str, Loss]:
    """Every objective that a module of `burnish.objectives` defines: its public functions of loss and stats."""
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
    """The tensors that a loss takes: its positional parameters."""
    parameters = inspect.signature(getattr(function, "func", function)).parameters.values()
    return [parameter for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]


def units_of(function: Any) -> dict[str, str]:
    """The unit of each tensor that a loss takes, by name."""
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
    """A column of the data, per answer where it is asked for so."""
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
    name: str, term: Term, own: dict[str, Any], by: str | None, default: Callable[..., weights.Weights]
) -> Weighting:
    """The weighting that is named in ``own``, which loses its entries."""
    kind = own.pop("weighting", None)
    weighting: Weighting = partial(default, of=term.of) if term.unit == "tokens" else term.weigh
    if kind is not None:
        if term.unit != "tokens" or kind not in ("token_mean", "sequence_mean", "fixed_length"):
            raise ValueError(
                f"loss: {name} has one entry per {term.unit.removesuffix('s')}, weighting={kind!r} does not fit; "
                "wanted token_mean, sequence_mean or fixed_length for a loss of tokens, and none for another"
            )
        if kind == "fixed_length" and (by is not None or "length" not in own):
            raise ValueError(f"loss: {name}: weighting fixed_length needs its length, and takes no weight column")
        fixed = {"length": own.pop("length")} if kind == "fixed_length" else {}
        weighting = partial(getattr(weights, kind), of=term.of, **fixed)
    return (
        weighting if by is None else partial(weights.weighted, weighting=weighting, by=by, unit=term.unit, of=term.of)
    )


def _bind(name: str, function: Loss, shared: Mapping[str, float], own: Mapping[str, Any]) -> Loss:
    """The function with the hyper-parameters it has: its ``own``, or those ``shared`` by the mix, in their ranges."""
    has = hyper_parameters(function)
    for parameter in own:
        if parameter not in has:
            raise ValueError(f"loss: {name} has no {parameter!r}; it has {', '.join(sorted(has)) or 'none'}")
    if not has:
        return function
    bound = {parameter: value for parameter, value in {**shared, **own}.items() if parameter in has}
    missing = {p.name for p in has.values() if p.default is p.empty} - bound.keys()
    if missing:
        example = f"{{{', '.join(f'{parameter}: ...' for parameter in sorted(missing))}}}"
        raise ValueError(f"loss: {name} needs {', '.join(sorted(missing))}; give it with --loss_kwargs '{example}'")
    for parameter, value in bound.items():  # wrong values are refused before any model is loaded
        kind = RANGES.get(f"{name}.{parameter}", RANGES.get(parameter))
        if kind is not None and (complaint := range_complaint(value, kind)):
            raise ValueError(f"{name}: {parameter} {complaint}")
    return partial(function, **bound)


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
