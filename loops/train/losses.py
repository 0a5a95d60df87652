"""Named losses over one forward pass: composition.

    total = dpo + 0.2 · nll + 0.1 · distillation        {name: Term(function, coefficient, ...)}

The signature of an objective names its tensors and their units: ``chosen: PerPair`` is the log-prob
of the chosen completion of each pair, ``logp: PerToken`` that of each trained token,
``logp: PerSequence`` that of each completion. The tensors of a batch are stored under such names
and units, and each loss takes its own, all from one forward pass. ``docs/your-own-loss.md``
lists them.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from typing import Any, cast, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...kernels import Backend, Extra
from ...objectives import (
    PerPair,
    PerToken,
    Stats,
    sequence_length,
    sequence_mean,
    sequence_sum,
    wpo_weight,
)
from ..batch import (
    Batch,
    Weighting,
    Weightings,
    completion_mean,
    length_normalized,
    pair_mean,
    token_mean,
)
from ..models.lm_head import Outputs, TeacherOutputs
from ..models.policy import Policy
from ..models.routers import load_balancing
from .step import Objective, loss_and_stats

Loss = Callable[..., tuple[Tensor, Stats]]
Tensors = dict[tuple[str, str], Tensor]  # (unit, name) -> one entry per unit
TensorReader = Callable[[nn.Module, Batch], Tensors]

CHOSEN, REJECTED, GOLD = 0, 1, 2


def tensor_parameters(function: Callable[..., object]) -> list[inspect.Parameter]:
    """The tensors of a loss: its positional parameters."""
    function = getattr(function, "func", function)  # of a partial, all of them, also those bound
    parameters = inspect.signature(function, eval_str=True).parameters.values()
    return [each for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]


def units_of(function: Callable[..., object]) -> dict[str, str | None]:
    """The unit of each tensor of a loss, by name; None without an annotation that says it."""
    return {each.name: _unit(each.annotation) for each in tensor_parameters(function)}


def _unit(annotation: object) -> str | None:
    """The unit of a jaxtyping annotation, the name of its dimension; "" for one number for the
    whole step.
    """
    # Float[Tensor, "tokens"] has the text "tokens"; of Tensor | None it is one of the arguments.
    for kind in (annotation, *get_args(annotation)):
        if hasattr(kind, "dim_str"):
            return str(kind.dim_str).strip(" *")
    return None


@dataclass(frozen=True)
class Term:
    """One loss of a mix.

    Attributes:
        function: an objective of `burnish.objectives`, or one of the same form, with its
            hyper-parameters bound.
        coefficient: 0 measures without training.
        weighting: weight of each unit; by default every token, completion or pair counts the same.
        of: completions to which a loss with one entry per token or completion applies.
        columns: columns of the data that the loss or its weighting reads.
        factor: name of a tensor, one entry per unit of the loss, that the loss is multiplied by.
        further: ``further(stats, batch)`` makes more stats of those of the loss.
    """

    function: Loss
    coefficient: float = 1.0
    weighting: Weighting | None = None
    of: int | str | None = None
    columns: tuple[str, ...] = ()
    factor: str | None = None
    further: Callable[[Stats, Batch], Stats] | None = None
    # and their units
    _inputs: list[tuple[inspect.Parameter, str]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ValueError(
                f"Term: wanted a function of burnish.objectives or your own, got {self.function!r:.80}"
            )
        if not isinstance(self.coefficient, int | float):
            raise ValueError(
                f"Term: the coefficient must be a number, got {self.coefficient!r:.80}; a weighting is "
                "Term(function, coefficient, weighting)"
            )
        if not (self.weighting is None or callable(self.weighting)):
            raise ValueError(
                f"Term: the weighting must be a function of a batch, such as burnish.loops.token_mean, "
                f"got {self.weighting!r:.80}"
            )
        # Once: reading a signature takes longer than some losses.
        inputs = [(each, _unit(each.annotation) or "") for each in tensor_parameters(self.function)]
        object.__setattr__(self, "_inputs", inputs)  # the dataclass is frozen

    @cached_property
    def unit(self) -> str:
        """Unit of the loss's entries, from its return annotation: tokens, sequences or pairs."""
        returned = get_args(inspect.signature(self.function, eval_str=True).return_annotation)
        if len(returned) != 2:
            raise ValueError(
                f"{self.function}: wanted a return annotation with its unit, as -> tuple[PerPair, Stats]"
            )
        return _unit(returned[0]) or ""

    @cached_property
    def weigh(self) -> Weighting:
        """The given weighting, or the mean over all units."""
        if self.weighting is not None:
            return self.weighting
        if self.unit == "tokens":
            return partial(token_mean, of=self.of)
        if self.unit == "sequences":
            return partial(completion_mean, of=self.of)
        return pair_mean

    def __call__(self, tensors: Tensors, batch: Batch) -> tuple[Tensor, Stats]:
        arguments: dict[str, Tensor] = {}
        for parameter, unit in self._inputs:
            value = tensors.get((unit, parameter.name), batch.columns.get(parameter.name))
            if value is not None:
                arguments[parameter.name] = self._chosen(value, unit, batch)
            elif parameter.default is parameter.empty:
                raise ValueError(self._without(parameter.name, unit))
        loss, stats = loss_and_stats(self._function_name, self.function(**arguments))
        if self.further is not None:
            stats = {**stats, **self.further(stats, batch)}
        if self.factor is not None:
            loss = tensors[self.unit, self.factor] * loss
        return loss, stats

    @property
    def _function_name(self) -> str:
        return str(getattr(self.function, "func", self.function).__name__)

    def _chosen(self, value: Tensor, unit: str, batch: Batch) -> Tensor:
        """The entries of a tensor for the completions that the loss applies to."""
        if unit == "sequences" and len(value) != batch.sequences:
            value = value[batch.example]  # a column with one entry per example
        if self.of is None:
            return value
        if unit == "tokens":
            return value[batch.tokens_of(self.of)]
        if unit == "sequences":
            return value[batch.completions_of(self.of)]
        return value

    def _without(self, name: str, unit: str) -> str:
        """The message that a tensor is missing, and what would give it."""
        source = "a column of the data of that name"
        for argument, names in reversed(_SOURCES.items()):  # the first one counts
            if name in names:
                source = argument
        missing = f"{name} per {unit.removesuffix('s') or 'step'}"
        return f"{self._function_name}: there is no tensor {missing}; {source} would give it"


def _entropy(entropy: PerToken) -> tuple[PerToken, Stats]:
    return entropy.detach(), {}


def _token_accuracy(token_rank: PerToken) -> tuple[PerToken, Stats]:
    """1 where the token is the likeliest one, as TRL's metric of this name."""
    return (token_rank == 0).float(), {}


def _mean_logit(mean_logp: PerToken, logsumexp: PerToken) -> tuple[PerToken, Stats]:
    """The mean over the vocabulary of the logits that the token is chosen by."""
    return (mean_logp + logsumexp).detach(), {}


def _pair_logps(logp_chosen: PerPair, logp_rejected: PerPair) -> tuple[PerPair, Stats]:
    return logp_chosen.detach(), {"logps/rejected": logp_rejected.detach()}


# Also measured, over all completions, and logged under these names.
ENTROPY = {"entropy": Term(_entropy, 0.0)}
PAIR_METRICS = {"logps/chosen": Term(_pair_logps, 0.0), **ENTROPY}


def token_accuracy(backend: Backend, of: int | None = None) -> dict[str, Term]:
    """The share of trained tokens that are the likeliest ones, where the backend ranks tokens.

    Args:
        of: of the completions with this index in their example only.
    """
    if backend == "fused":  # which sees no tile of logits to rank
        return {}
    return {"mean_token_accuracy": Term(_token_accuracy, 0.0, of=of)}


def logit_metrics(chosen: int | str, rejected: int | str) -> dict[str, Term]:
    """The mean logit of the vocabulary at the tokens of chosen and of rejected completions, as
    TRL's.
    """
    return {
        "logits/chosen": Term(_mean_logit, 0.0, of=chosen),
        "logits/rejected": Term(_mean_logit, 0.0, of=rejected),
    }


def _load_balancing(load_balance: PerToken) -> tuple[PerToken, Stats]:
    return load_balance, {}


def router_loss(policy: Policy, coefficient: float | None) -> dict[str, Term]:
    """The load-balancing loss of a mixture of experts, ``aux_loss``, and the policy told to give
    its routers' logits; nothing where the coefficient is 0.

    Args:
        coefficient: None for the model's own, ``router_aux_loss_coef``, if its configuration asks
            for the loss by ``output_router_logits``.

    Raises:
        ValueError: if there is a coefficient and the model has no routers, or does not show them.
    """
    config = policy.plain.config.get_text_config()
    if coefficient is None:
        asks = getattr(config, "output_router_logits", False)
        coefficient = getattr(config, "router_aux_loss_coef", 0.0) if asks else 0.0
    if not coefficient:
        return {}
    top_k = getattr(config, "num_experts_per_tok", None)
    recorded = getattr(policy.plain.base_model, "_can_record_outputs", None) or {}
    if top_k is None or "router_logits" not in recorded or not policy.fused:
        raise ValueError(
            f"router_aux_loss_coef: {type(policy.plain).__name__} gives no logits of routers, so there is nothing to "
            "balance; set it to 0"
        )
    policy.experts_per_token = top_k
    return {"aux_loss": Term(_load_balancing, coefficient, length_normalized)}


def compose(losses: Mapping[str, Term], read: TensorReader) -> Objective:
    """The objective that computes these losses from the one forward pass of ``read``.

    Raises:
        ValueError: if a loss is no `Term`.
    """
    _check_terms("compose", losses)

    def objective(policy: nn.Module, batch: Batch) -> Mapping[str, tuple[Tensor, Stats]]:
        tensors = read(policy, batch)
        return {name: term(tensors, batch) for name, term in losses.items()}

    return objective


def weightings(losses: Mapping[str, Term]) -> Weightings:
    """The coefficient and the weighting of each loss, as `train_step` takes them."""
    _check_terms("weightings", losses)
    return {name: (term.coefficient, term.weigh) for name, term in losses.items()}


def _check_terms(who: str, losses: Mapping[str, Term]) -> None:
    for name, term in losses.items():
        if not isinstance(term, Term):
            raise ValueError(
                f"{who}: wanted a Term for the loss {name}, got {term!r:.80}; make it one: Term({name})"
            )


def _check_policy(who: str, wanted: str, policy: nn.Module) -> None:
    """Raise ValueError for a transformers or peft model, which takes token ids, not a batch."""
    inner = _inner(policy)
    if isinstance(inner, PreTrainedModel) or hasattr(inner, "peft_config"):
        raise ValueError(
            f"{who}: wanted a burnish.loops.{wanted}, got the model itself, {type(inner).__name__}; "
            f"wrap it: {wanted}(model)"
        )


def _inner(policy: nn.Module) -> Any:
    """The policy within what wraps it for several ranks."""
    inner = policy
    while isinstance(getattr(inner, "module", None), nn.Module):
        inner = cast(nn.Module, inner.module)
    return inner


def columns_of(losses: Mapping[str, Term]) -> list[str]:
    """The columns of the data that the losses and their weightings read."""
    return sorted(set(chain.from_iterable(term.columns for term in losses.values())))


def tensors_needed(losses: Mapping[str, Term]) -> set[str]:
    """The names of all tensors that the losses take."""
    return {name for term in losses.values() for name in units_of(term.function)}


def needs_teacher(losses: Mapping[str, Term]) -> bool:
    """Whether a loss takes the divergence from a teacher, of tokens or summed over the completions
    of a pair.
    """
    return not {"divergence", "divergence_chosen", "divergence_rejected"}.isdisjoint(
        tensors_needed(losses)
    )


def outputs_for(losses: Mapping[str, Term]) -> tuple[Extra, ...]:
    """Further outputs of the log-prob kernel that the losses need."""
    outputs: list[Extra] = []
    needed = tensors_needed(losses)
    if "mean_logp" in needed:
        outputs.append("mean_logprob")
    if "token_rank" in needed:
        outputs.append("rank")
    if any(term.factor == "wpo" for term in losses.values()):
        outputs.append("log_sum_squares")
    return tuple(outputs)


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
    """The policy's tensors per token, per completion and per pair, under the names of the
    objectives.

    Args:
        reference: log-probs [tokens] of the reference policy, for the tensors named ``ref_...``.
        reduce: reduces the log-probs of tokens to one per completion; the default is their sum.
        score: maps log-ratios of pairs to f-divergence scores, see
            `burnish.objectives.f_divergence_score`.
        teacher: a teacher's outputs for the batch, for the tensor ``divergence``.
        outputs: further outputs of the log-prob kernel: "mean_logprob" gives ``mean_logp``, for
            label smoothing; "rank" gives ``token_rank``, how many tokens are likelier than each;
            "log_sum_squares" gives ``wpo``, the weight of each completion and of each pair, a
            product of two.
        pairs: whether the examples are pairs of a chosen and a rejected completion.
        temperature: of the policy's softmax, the one that completions were sampled at.
    """

    if isinstance(reference, nn.Module):
        raise ValueError(
            f"policy_tensors: reference must be a function of a batch that gives log-probs [tokens], got the model "
            f"itself, {type(reference).__name__}; make one: frozen_copy(policy), or adapters_off(policy)"
        )

    def read(policy: nn.Module, batch: Batch) -> Tensors:
        _check_policy("policy_tensors", "Policy", policy)
        taught = None if teacher is None else teacher(batch)
        forward: Outputs = policy(batch, outputs=outputs, temperature=temperature, teacher=taught)
        of_tokens = {
            "logp": forward.logprob,
            "entropy": forward.entropy,
            "logsumexp": forward.logsumexp,
            "mean_logp": forward.mean_logprob,
            "token_rank": forward.rank,
            "value": forward.value,
            "divergence": forward.divergence,
            "ref_logp": None if reference is None else reference(batch),
            "sequence": batch.sequence,
        }
        if forward.router_logits is not None:
            of_tokens["load_balance"] = load_balancing(
                forward.router_logits,
                batch.sequence,
                batch.sequences,
                top_k=_inner(policy).experts_per_token,
            )
        tensors: Tensors = {}
        for name, value in of_tokens.items():
            if value is not None:
                tensors["tokens", name] = value
        completions = len(batch.completion)
        for name in ("logp", "ref_logp"):
            of_token = tensors.get(("tokens", name))
            if of_token is None:
                continue
            if reduce is None:
                tensors["sequences", name] = sequence_sum(of_token, batch.sequence, completions)
            else:
                tensors["sequences", name] = reduce(of_token, batch)
        if forward.log_sum_squares is not None:
            weight = wpo_weight(
                forward.logprob, forward.log_sum_squares, batch.sequence, completions
            )
            tensors["sequences", "wpo"] = weight
        if pairs:
            mean = sequence_mean(forward.logprob, batch.sequence, completions)
            tensors |= _tensors_of_pairs(tensors, mean, batch)
            if score is not None:
                _score_ratios(tensors, score)
        return tensors

    return read


def _tensors_of_pairs(tensors: Tensors, mean: Tensor, batch: Batch) -> Tensors:
    """The tensors per pair from those per completion, and from the mean log-probs of
    completions.
    """
    completions = len(batch.completion)
    logp = tensors["sequences", "logp"]
    of_pairs = (
        pair_tensors(logp, batch)
        | pair_tensors(logp, batch, "logp_")
        | pair_tensors(mean, batch, "mean_")
    )
    length = sequence_length(batch.sequence, completions).to(logp.dtype)
    of_pairs |= pair_tensors(length, batch, "length_")
    if ("tokens", "divergence") in tensors:
        divergence = sequence_sum(tensors["tokens", "divergence"], batch.sequence, completions)
        of_pairs |= pair_tensors(divergence, batch, "divergence_")
    if ("sequences", "ref_logp") in tensors:
        of_pairs |= pair_tensors(tensors["sequences", "ref_logp"], batch, "ref_")
    if ("sequences", "wpo") in tensors:
        chosen, rejected = pair_tensors(tensors["sequences", "wpo"], batch).values()
        of_pairs["pairs", "wpo"] = chosen * rejected
    return of_pairs


def _score_ratios(tensors: Tensors, score: Callable[[Tensor], Tensor]) -> None:
    """Replace log-probs of pairs by the scores of their ratios, so that a loss's differences are of
    scores.
    """
    for side in ("chosen", "rejected"):
        ratio = tensors["pairs", side] - tensors["pairs", f"ref_{side}"]
        tensors["pairs", side] = score(ratio)
        tensors["pairs", f"ref_{side}"] = torch.zeros_like(ratio)


def score_tensors(policy: nn.Module, batch: Batch) -> Tensors:
    """A scorer's tensors per step, per completion and per pair, under the names of the
    objectives.
    """
    _check_policy("score_tensors", "Scorer", policy)
    score = policy(batch)
    tensors: Tensors = {("tokens", "logit"): score}
    if len(score) == batch.sequences:  # one marked token per completion
        tensors["sequences", "score"] = score
        tensors["sequences", "group"] = batch.example
        tensors |= pair_tensors(score, batch)
    return tensors


def pair_tensors(value: Tensor, batch: Batch, prefix: str = "") -> Tensors:
    """A value per completion as the two values of each pair."""
    sides = {"chosen": CHOSEN, "rejected": REJECTED}
    return {
        ("pairs", f"{prefix}{side}"): value[batch.completion == index]
        for side, index in sides.items()
    }


_SOURCES = {  # the arguments that provide tensors which a loss may lack
    "policy_tensors(pairs=True)": (
        *("mean_chosen", "mean_rejected", "logp_chosen", "logp_rejected"),
        *("length_chosen", "length_rejected"),
    ),
    "policy_tensors(teacher=..., pairs=True)": ("divergence_chosen", "divergence_rejected"),
    "policy_tensors(pairs=True), or score_tensors for a scorer,": ("chosen", "rejected"),
    "policy_tensors(reference=..., pairs=True)": ("ref_chosen", "ref_rejected"),
    "policy_tensors(reference=...)": ("ref_logp",),
    'policy_tensors(outputs=("mean_logprob",))': ("mean_logp",),
    'policy_tensors(outputs=("rank",))': ("token_rank",),
    "policy_tensors(teacher=...)": ("divergence",),
    "a policy with a value_head or a critic": ("value",),
    "score_tensors": ("logit",),
    "score_tensors, with one marked token per completion,": ("score", "group"),
    "an online recipe": (
        "old_logp",
        "sampled_logp",
        "start_logp",
        "old_value",
        "advantage",
        "correction",
        "mask",
        "penalized",
    ),
}
# All tensors that recipes compute, by name.
TENSORS = {"logp", "teacher_logp", "entropy", "logsumexp", "sequence", "kl", "delta", "target"}
TENSORS.update(*_SOURCES.values())
