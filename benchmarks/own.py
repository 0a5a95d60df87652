"""Benchmarks from Python: your own functions beside those of an operation, or of an objective.

    compare(OPERATION, {"mine": function}, shapes=["tiny"])          a kernel, beside those of a benchmark
    compare(objective(reference), {"mine": function})                 an objective, beside its definition

Each function is held to float64 in value and gradient before it is timed, as from the command line.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .harness import bench, forget, new_report, parser
from .operation import OWN, Inputs, Json, Operation, Products, Provider


def compare(
    operation: Operation,
    providers: Mapping[str, Callable[..., Any] | Provider],
    *,
    shapes: Sequence[str] | None = None,
    outputs: Sequence[str] | None = None,
    beside: Sequence[str] = (),
    **flags: Any,
) -> Json:
    """Measure functions of your own in this process, show the tables, and return the report.

    Args:
        operation: such as ``burnish.benchmarks.kernels.OPERATION``, or what `objective` makes.
        providers: by name, a ``Provider``, or a function of the operation's tensors that returns
            its first output per row, ``logprob`` of the head.
        shapes, outputs: as from the command line, such as ``["2048x576x49152"]`` and
            ``["logprob"]``.
        beside: names of the operation's own providers to measure as well; its baseline always is.
        flags: further ones of the command, by name: ``rounds=3``, ``passes=["train"]``.

    Raises:
        ValueError: if there is no such flag, shape, output or provider.
    """
    own = {name: _provider(operation, name, given) for name, given in providers.items()}
    known = {**operation.providers, **own}
    operation = replace(operation, providers=known)
    defaults = vars(parser(operation).parse_args([]))
    names = list(dict.fromkeys([operation.baseline, *beside, *own]))
    # Functions of this process are not known in another one, where a CPU's memory is measured.
    given = {"isolate": False, "memory": False, "output": None, "providers": names, **flags}
    for name in given:
        if name not in defaults:
            raise ValueError(f"compare: no flag {name!r}; there are {', '.join(sorted(defaults))}")
    settings = {**defaults, **given, "shapes": shapes, "outputs": outputs}
    options = type(parser(operation).parse_args([]))(**settings)
    report = new_report(f"compare {operation.name}", options.device)
    OWN[operation.name] = operation
    forget()
    try:
        bench(operation, options, report)
    finally:
        del OWN[operation.name]
        forget()
    return report


def _provider(operation: Operation, name: str, given: Callable[..., Any] | Provider) -> Provider:
    if isinstance(given, Provider):
        return given
    return Provider(name, partial(_first_output, given), operation.bare)


def _first_output(function: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
    """The result of a function of tensors alone; of an objective, without its stats."""
    result = function(*arguments[:-1], **settings)
    return (result[0] if isinstance(result, tuple) else result,)


def objective(
    reference: Callable[..., tuple[Tensor, Mapping[str, Tensor]]],
    *,
    trained: Sequence[str] = ("logp",),
    draw: Callable[[int, torch.Generator], Mapping[str, Tensor]] | None = None,
    **settings: float,
) -> Operation:
    """An objective with one entry per token, completion or pair, to be measured.

    Its shapes are numbers of entries. The floor is to read the policy's tensor and another one of
    its size, and to write the gradient.

    Args:
        reference: its definition, such as one of `burnish.objectives`.
        trained: the tensors whose gradients are measured, by the names of the parameters.
        draw: ``draw(count, generator)`` gives the tensors by name; by default −|N(0, 1)| for
            log-probs, and N(0, 1) for the others.
        settings: hyper-parameters that every provider is given.
    """
    name = reference.__name__
    parameters = [
        parameter.name
        for parameter in inspect.signature(reference).parameters.values()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    for each in trained:
        if each not in parameters:
            raise ValueError(
                f"objective: trained: {name} has no tensor {each!r}; it has {', '.join(parameters)}"
            )
    return Operation(
        name=name,
        providers={name: Provider(name, partial(_first_output, reference), ("loss_of_unit",))},
        baseline=name,
        outputs=("loss_of_unit",),
        alone=(),
        default_outputs=("loss_of_unit",),
        mean=("loss_of_unit", 1),
        passes={"forward": (), "train": tuple(trained)},
        shapes={"small": ((25_000,),), "large": ((200_000,),)},
        sizes="entries",
        shape=lambda entries: (entries,),
        inputs={"random": partial(_random_tensors, draw or partial(_drawn, parameters))},
        per_row=tuple(parameters),
        products=partial(_traffic, trained[0]),
        settings={key: (value,) for key, value in settings.items()},
    )


def _random_tensors(
    draw: Callable[[int, torch.Generator], Mapping[str, Tensor]],
    shape: Sequence[int],
    dtype: torch.dtype,
    random: torch.Generator,
) -> dict[str, Tensor]:
    tensors = draw(shape[0], random)
    return {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }


def _drawn(names: Sequence[str], count: int, random: torch.Generator) -> dict[str, Tensor]:
    """Log-probs that are near one another, as in a step of training, and standard normals."""
    common = -torch.randn(count, generator=random, device=random.device).abs()
    tensors = {}
    for name in names:
        noise = torch.randn(count, generator=random, device=random.device)
        is_logp = "logp" in name or name.endswith(("chosen", "rejected"))
        tensors[name] = (common + 0.1 * noise).clamp(max=-1e-3) if is_logp else noise
    return tensors


def _traffic(trained: str, inputs: Inputs, kind: str, dtype: torch.dtype) -> Products:
    """Two reads and a write of the size of the trained tensor; forward, one read."""
    tensor = inputs.tensors[trained]
    other = torch.zeros_like(tensor)
    written = torch.empty_like(tensor)
    steps: dict[str, Callable[..., object]] = {
        "read": lambda _: tensor.sum(),
        "read+write": lambda _: torch.sub(tensor, other, out=written),
    }
    name = "read+write" if inputs.operation.passes[kind] else "read"
    return Products({name: steps[name]}, {}, {name: {name: 1}})
