"""What the custom operators of torch have in common."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

WAITS = (torch.Tag.cudagraph_unsafe,)  # operators that wait for the GPU can't be captured in a graph of launches


def operator_schema(arguments: type, results: int, *, mutates: Sequence[str] = (), **leading: Any) -> str:
    """The schema of an operator that returns so many tensors.

    Args:
        arguments: a NamedTuple, whose fields are the operator's arguments.
        mutates: names of arguments that it writes to.
        leading: names and types of arguments that come before those of ``arguments``.
    """

    def prototype() -> None: ...

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    types = (leading | arguments.__annotations__).items()
    parameters = [inspect.Parameter(name, kind, annotation=annotation) for name, annotation in types]
    signature = inspect.Signature(parameters, return_annotation=tuple[(Tensor,) * results])  # type: ignore[misc]
    prototype.__signature__ = signature  # type: ignore[attr-defined]
    return torch.library.infer_schema(prototype, mutates_args=mutates)


def no_second_derivative(ctx: Any, *_: Any) -> None:
    """The backward of a backward."""
    raise NotImplementedError(
        "kernels: this backend has no second derivative, use backend='reference', which has them all"
    )
