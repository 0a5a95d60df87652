"""The shapes and ranges that signatures of objectives state, and checks that arguments fit together
and are in range.

The annotations cost nothing at run time: the test suite has jaxtyping enforce the shapes, and
recipes check hyper-parameters before they load anything.
"""

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

# token objectives are elementwise: any shape, usually flat [tokens]
PerToken = Float[Tensor, "*tokens"]
PerSequence = Float[Tensor, " sequences"]
PerPair = Float[Tensor, " pairs"]

# one entry per trained token, the sequences one after the other
FlatTokens = Float[Tensor, " tokens"]
SequenceIds = Int[Tensor, " tokens"]  # int64, sorted: the sequence each token belongs to
IntPerSequence = Int[Tensor, " sequences"]  # a group, a rank, or a length in trained tokens

Stats = dict[str, Tensor]  # detached, each of the loss's shape


class Range(NamedTuple):
    """Values that a hyper-parameter may have: in words, and as a test of it among all of its
    function.
    """

    words: str
    holds: Callable[[float, Mapping[str, float]], bool]


Share = Annotated[float, Range("in [0, 1]", lambda x, _: 0 <= x <= 1)]
Positive = Annotated[float, Range("> 0", lambda x, _: 0 < x < math.inf)]
Margin = Annotated[float, Range(">= 0", lambda x, _: 0 <= x < math.inf)]
Bound = Annotated[float, Range(">= 0", lambda x, _: x >= 0)]  # of a clip; infinity is none
# share of labels that are wrong
Noise = Annotated[float, Range("in [0, 0.5)", lambda x, _: 0 <= x < 0.5)]


def same_shape(who: str, **tensors: Tensor) -> None:
    """Raise ValueError unless all are tensors of one shape: broadcasting would turn pairs into all
    pairs of pairs.
    """
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise ValueError(
                f"{who}: {name} must be a tensor, got {type(tensor).__name__}; make it one, torch.tensor"
            )
    (first, expected), *others = tensors.items()
    for name, tensor in others:
        if tensor.shape != expected.shape:
            raise ValueError(
                f"{who}: {name} must have the shape of {first}, {list(expected.shape)}, got {list(tensor.shape)}"
            )


def one_per(who: str, unit: str, **tensors: Tensor) -> None:
    """Raise ValueError for a tensor of more than one dimension where there is one entry per pair or
    completion.

    Most equations would compute on per-token [B, T] as well, and train on something else.
    """
    for name, tensor in tensors.items():
        if tensor.ndim > 1:
            raise ValueError(
                f"{who}: {name} must have one entry per {unit}, [{unit}s], got {list(tensor.shape)}; "
                "reduce the tokens of each completion first, with sequence_sum or sequence_mean"
            )


def flat(who: str, **tensors: Tensor) -> None:
    """Raise ValueError for a tensor that is not one-dimensional where there is one entry per
    trained token.
    """
    for name, tensor in tensors.items():
        if tensor.ndim != 1:
            raise ValueError(
                f"{who}: {name} must be flat, [tokens], got {list(tensor.shape)}; "
                "take the trained tokens of padded rows with a mask, x[mask]"
            )


def check_roles(who: str, trained: Mapping[str, Tensor], **constants: Tensor) -> None:
    """Raise ValueError where what should be trained and what should be constant are swapped, or a
    dtype overflows.

    Swapped arguments have the right shape and reverse the gradient. Autograd tells them apart: a
    constant that requires grad beside a policy that does not. Where neither does, as in an
    evaluation, there is nothing to tell.

    Args:
        trained: what the gradient should reach, by the name of its argument.
        constants: the other arguments: log-probs of a reference or a sampler, advantages, labels.
    """
    for name, tensor in {**trained, **constants}.items():
        if tensor.dtype == torch.float16:
            raise ValueError(
                f"{who}: {name} is float16, in which ratios and squares overflow beyond 65504; pass {name}.float()"
            )
    if not torch.is_grad_enabled() or any(tensor.requires_grad for tensor in trained.values()):
        return
    for name, tensor in constants.items():
        if tensor.requires_grad:
            policy = " and ".join(trained)
            raise ValueError(
                f"{who}: {name} requires grad and {policy} does not, so {name} would be trained: "
                f"swap the arguments if they are swapped, else pass {name}.detach()"
            )


def within(who: str, kind: Any, **values: float) -> None:
    """Raise ValueError unless every value is in the `Range` of this type."""
    (allowed,) = kind.__metadata__
    for name, value in values.items():
        if not allowed.holds(value, values):
            raise ValueError(f"{who}: {name} must be {allowed.words}, got {value}")


def require(who: str, condition: bool, complaint: str, *got: object) -> None:
    """Raise ValueError with the complaint unless the condition holds (a comparison with NaN does
    not).

    ``got`` fills the braces of the complaint, and only if it is needed: under torch.compile a
    hyper-parameter becomes a symbol at its second value, and a symbol cannot be printed.
    """
    if not condition:
        raise ValueError(f"{who}: {complaint.format(*got)}")
