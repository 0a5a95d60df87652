"""Schemas and results shared by the custom operators of torch."""

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


def returned(inputs: Sequence[Tensor | None], gradients: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """The gradients as an operator returns them: each in the dtype of its input, empty for one that is not needed."""
    pairs, empty = zip(gradients, inputs, strict=True), inputs[0]
    assert empty is not None
    return tuple(empty.new_empty(0) if grad is None or t is None else grad.to(t.dtype) for grad, t in pairs)


def returned_shapes(inputs: Sequence[Tensor | None], needed: Sequence[bool]) -> tuple[Tensor, ...]:
    """``returned`` for tracing."""
    pairs = zip(inputs, needed, strict=True)
    return returned(inputs, [t.new_empty(t.shape) if n and t is not None else None for t, n in pairs])


def no_second_derivative(ctx: Any, *_: Any) -> None:
    """The backward of a backward."""
    raise NotImplementedError(
        "kernels: this backend has no second derivative, use backend='reference', which has them all"
    )
