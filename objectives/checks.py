"""Checks of arguments: tensors must fit together, and hyper-parameters must be in range."""

from typing import Any

from torch import Tensor


def same_shape(who: str, **tensors: Tensor) -> None:
    """Raise ValueError unless all shapes are equal: broadcasting would turn pairs into all pairs of pairs."""
    (first, expected), *others = tensors.items()
    for name, tensor in others:
        if tensor.shape != expected.shape:
            raise ValueError(
                f"{who}: {name} must have the shape of {first}, {list(expected.shape)}, got {list(tensor.shape)}"
            )


def within(who: str, kind: Any, **values: float) -> None:
    """Raise ValueError unless every value is in the `Range` of this type."""
    (allowed,) = kind.__metadata__
    for name, value in values.items():
        if not allowed.holds(value, values):
            raise ValueError(f"{who}: {name} must be {allowed.words}, got {value}")


def require(who: str, condition: bool, complaint: str, *got: object) -> None:
    """Raise ValueError with the complaint unless the condition holds (a comparison with NaN does not).

    ``got`` fills the braces of the complaint, and only if it is needed: under torch.compile a hyper-parameter becomes
    a symbol at its second value, and a symbol cannot be printed.
    """
    if not condition:
        raise ValueError(f"{who}: {complaint.format(*got)}")
