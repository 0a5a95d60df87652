"""What can be measured: an operation on tensors, and the providers that compute it, each behind one adapter.

A provider is a name, a function, what the function can be asked for, and whether it runs here. To measure another one,
name an object of your own as ``module:object``: a ``Provider``, or a function of the operation's tensors.
"""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, NamedTuple

import torch
from torch import Tensor

Outputs = tuple[str, ...]
Settings = dict[str, float]
Mark = Callable[[], None]
Step = Callable[[Mark], object]


class Inputs(NamedTuple):
    """What everyone is given in one case.

    Args:
        shape: as on the command line; the last size is that of a row of what is never to be materialized.
        tensors: in the order in which providers take them.
        per_row: of these, the ones with an entry per token. The others are taken whole.
        upstream: gradient of each output, in the output's shape.
        settings: keyword arguments of every provider.
    """

    shape: tuple[int, ...]
    tensors: dict[str, Tensor]
    per_row: tuple[str, ...]
    upstream: dict[str, Tensor]
    settings: Settings = {}  # noqa: RUF012  never written to

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors.values())).device

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.tensors.values())).dtype


def _nothing(device: torch.device) -> None:
    return None


@dataclass(frozen=True)
class Provider:
    """One row of every table.

    Args:
        name: as on the command line.
        compute: ``compute(*tensors, outputs, **settings)`` returns the outputs in the order in which they are named,
            differentiable with respect to the floating-point tensors. Of the head: ``compute(hidden [N, D],
            weight [V, D], target [N], outputs)``, where outputs are "logprob", "entropy" and "logsumexp", ``[N]``, or
            "loss", the mean of −logprob, for those who give nothing per token.
        gives: what it can be asked for. Whoever gives the output of which "loss" is the mean also takes part there.
        missing: why it can't run on a device here, such as a package that is not installed; None if it can.
    """

    name: str
    compute: Callable[..., tuple[Tensor, ...]]
    gives: Outputs = ("logprob",)
    missing: Callable[[torch.device], str | None] = _nothing


class Products(NamedTuple):
    """What a pass can't do without, each on its own.

    Args:
        steps: such as the matrix products.
        flops: of each step; empty where it is bytes that count.
        floors: how often each step is done, for every way to do the pass; the cheapest first.
    """

    steps: dict[str, Step]
    flops: dict[str, int]
    floors: dict[str, dict[str, int]]


@dataclass(frozen=True)
class Operation:
    """Everything that one benchmark knows and the others do not.

    Args:
        name: as on the command line, and of the files that are written.
        providers: those who are known, by name.
        definition: what everyone is held to, in float64; in the dtype of the inputs its error sets the limits.
        baseline: the provider against whom the others are timed.
        needed: the provider who is the definition, if that needs a package.
        outputs: what can be asked for, several at once joined by +.
        alone: of these, the ones that are asked for alone.
        asked: what is asked for unless something else is said, on a CPU and on a GPU.
        mean: the output of which "loss" is the mean, and its sign; ("", 0) where there is none.
        passes: for each, the tensors whose gradients it gives.
        shapes: those with names.
        sizes: what the sizes of a shape are.
        shape: from the sizes of the command line.
        inputs: makers ``(shape, dtype, device, dead_rows, settings) -> Inputs``, the first is the default.
        products: ``(inputs, pass, dtype)``, see `Products`.
        settings: further numbers, each with the values that are measured unless others are given.
        collect: gradients by the names in which they are compared.
        find_more: providers whose names are not in the list.
    """

    name: str
    providers: Mapping[str, Provider]
    definition: Callable[..., tuple[Tensor, ...]]
    baseline: str
    outputs: Outputs
    alone: Outputs
    asked: Callable[[bool], list[str]]
    mean: tuple[str, int]
    passes: dict[str, Outputs]
    shapes: Mapping[str, tuple[tuple[int, ...], ...]]
    sizes: str
    shape: Callable[[tuple[int, ...]], tuple[int, ...]]
    inputs: Mapping[str, Callable[..., Inputs]]
    products: Callable[[Inputs, str, torch.dtype], Products]
    settings: dict[str, tuple[float, ...]] = field(default_factory=dict)
    collect: Callable[[Inputs, dict[str, Tensor]], dict[str, Tensor]] = lambda inputs, gradients: gradients
    needed: str | None = None
    find_more: Callable[[str], Provider | None] = lambda name: None

    def can_give(self, provider: Provider, outputs: Outputs) -> bool:
        return set(outputs) <= set(provider.gives) or (outputs == ("loss",) and self.mean[0] in provider.gives)

    def compute(self, provider: Provider, tensors: dict[str, Tensor], outputs: Outputs, inputs: Inputs) -> list[Tensor]:
        """The outputs, each of its right shape; the loss of those who give it per token is made here."""
        name, sign = self.mean
        if outputs == ("loss",) and "loss" not in provider.gives:
            (value,) = self.compute(provider, tensors, (name,), inputs)
            return [sign * value.mean(dtype=torch.promote_types(value.dtype, torch.float32))]
        results = list(provider.compute(*tensors.values(), outputs, **inputs.settings))
        for output, result in zip(outputs, results, strict=True):
            wanted = inputs.upstream[output].shape
            if result.shape != wanted:
                raise ValueError(f"{provider.name}: {output} must be {list(wanted)}, got {list(result.shape)}")
        return results

    def parse_outputs(self, text: str) -> Outputs:
        """``logprob+entropy`` as a tuple, in the order of ``outputs``.

        Raises:
            ValueError: if a name is unknown, or one that is asked for alone has company.
        """
        names = text.split("+")
        unknown = [name for name in names if name not in self.outputs]
        if unknown:
            raise ValueError(f"no output {unknown[0]!r}, wanted some of {', '.join(self.outputs)}, joined by +")
        lonely = [name for name in names if name in self.alone]
        if lonely and len(names) > 1:
            raise ValueError(f"the {lonely[0]} is asked for alone, got {text!r}")
        return tuple(output for output in self.outputs if output in names)

    def parse_shapes(self, names: list[str]) -> list[tuple[int, ...]]:
        """Names, or sizes such as 2048x576x49152.

        Raises:
            ValueError: if one is neither.
        """
        return [shape for name in names for shape in self.shapes.get(name) or (self._sizes(name),)]

    def _sizes(self, name: str) -> tuple[int, ...]:
        parts = name.replace(",", "x").split("x")
        if all(part.isdecimal() and int(part) > 0 for part in parts):
            try:
                return self.shape(tuple(map(int, parts)))
            except (TypeError, ValueError):  # too many of them, or too few
                pass
        nearest = get_close_matches(name, self.shapes, n=1, cutoff=0.5)
        hint = f", did you mean {nearest[0]!r}?" if nearest else ";"
        raise ValueError(f"no shape {name!r}{hint} wanted {self.sizes}, or one of {', '.join(self.shapes)}")

    def knows(self, name: str) -> bool:
        return ":" in name or name in self.providers or self.find_more(name) is not None

    def find(self, name: str) -> Provider:
        """The provider of that name, or the object at ``module:object``.

        Raises:
            ValueError: if there is none, with the nearest name or with what went wrong.
        """
        if ":" in name:
            return self._load(name)
        if found := self.providers.get(name) or self.find_more(name):
            return found
        nearest = get_close_matches(name, self.providers, n=1, cutoff=0.0)[0]
        known = ", ".join(self.providers)
        raise ValueError(f"no provider {name!r}, did you mean {nearest!r}? Known are {known}, and your module:object")

    def _load(self, name: str) -> Provider:
        module, _, attribute = name.partition(":")
        if os.getcwd() not in sys.path:  # a console script does not look where it is called, `python -m` does
            sys.path.append(os.getcwd())
        try:
            found = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"provider {name!r} can't be loaded: {first_line(error)}") from error
        if isinstance(found, Provider):
            return found
        if not callable(found):
            raise ValueError(f"provider {name!r} must be a Provider or a function, got {type(found).__name__}")

        def compute(*arguments: Any, **settings: Any) -> tuple[Tensor, ...]:
            return (found(*arguments[:-1], **settings),)

        return Provider(name, compute, (self.mean[0],))


def named(name: str) -> Operation:
    """The operation of that benchmark."""
    operation: Operation = importlib.import_module(f".{name}", __package__).OPERATION
    return operation


def on_gpu(device: torch.device) -> str | None:
    """For ``Provider.missing``."""
    return None if device.type == "cuda" else f"runs on a GPU only, this is {device.type}"


def with_triton(device: torch.device) -> str | None:
    """For ``Provider.missing``: a GPU, or Triton's interpreter."""
    return None if os.environ.get("TRITON_INTERPRET") == "1" else on_gpu(device)


def needs(module: str, *, gpu: bool) -> Callable[[torch.device], str | None]:
    """For ``Provider.missing``: a package that has to be importable, and maybe a GPU."""
    package = module.partition(".")[0]

    def missing(device: torch.device) -> str | None:
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
        if gpu and (reason := on_gpu(device)):
            return reason
        try:
            importlib.import_module(module)
        except Exception as error:  # whatever a package that does not fit this machine raises
            return f"{module} can't be imported: {first_line(error)}"
        return None

    return missing


def first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
