"""Operations on tensors to be measured, and the providers that compute them, each behind one
adapter.

To measure another provider, name an object of your own as ``module:object``: a ``Provider``, or a
function of the operation's tensors.
"""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, NamedTuple

import torch
from torch import Tensor

Compute = Callable[..., tuple[Tensor, ...]]
Json = dict[str, Any]  # an object of JSON: a report, a case of it, a row, a record of a run


@dataclass(frozen=True)
class Provider:
    """One row of every table.

    ``compute(*tensors, outputs, **settings)`` returns the outputs in the order in which they are
    named, differentiable with respect to the floating-point tensors. For the head:
    ``compute(hidden [N, D], weight [V, D], target [N], outputs)``, where outputs are "logprob",
    "entropy" and "logsumexp", ``[N]``, or "loss", the mean of −logprob, of libraries that return
    nothing per token.
    """

    name: str  # as on the command line
    compute: Compute
    # a "loss" is made from the output of which it is the mean
    gives: tuple[str, ...] = ("logprob",)
    # why it can't run there, None if it can
    missing: Callable[[torch.device], str | None] = lambda device: None


class Inputs(NamedTuple):
    """The tensors of one case."""

    operation: "Operation"
    # as on the command line; last the size of a row that is never to be materialized
    shape: tuple[int, ...]
    tensors: dict[str, Tensor]  # in the order in which providers take them
    upstream: dict[str, Tensor]  # gradient of each output, in the output's shape
    settings: dict[str, float]  # keyword arguments of every provider; never written to

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors.values())).device

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.tensors.values())).dtype


class Products(NamedTuple):
    """The steps that no implementation of a pass avoids, such as its matrix products."""

    # each takes a function that marks the time, see `measure`
    steps: dict[str, Callable[..., object]]
    flops: dict[str, int]  # of each step; empty where bytes count
    # how often each step is done, for every way to do the pass; the cheapest first
    floors: dict[str, dict[str, int]]


@dataclass(frozen=True)
class Operation:
    """One benchmark."""

    name: str  # as on the command line, and of the files that are written
    providers: Mapping[str, Provider]
    # its formula in float64 is the truth, its own error sets the limits, and its time is divided by
    baseline: str
    outputs: tuple[str, ...]
    alone: tuple[str, ...]  # outputs that are one number, and can't be joined with others by +
    default_outputs: tuple[str, ...]  # on a GPU the loss, too, where there is one
    # the output of which "loss" is the mean, and its sign; ("", 0) where there is none
    mean: tuple[str, int]
    passes: dict[str, tuple[str, ...]]  # the tensors whose gradients each pass gives
    shapes: Mapping[str, tuple[tuple[int, ...], ...]]
    sizes: str  # what the sizes of a shape are
    shape: Callable[..., tuple[int, ...]]  # makes a shape of the sizes on the command line
    # Tensors by name, from (shape, dtype, generator on the device); the first source is the
    # default.
    inputs: Mapping[str, Callable[..., dict[str, Tensor]]]
    per_row: tuple[str, ...]  # tensors with an entry per token; the others are taken whole
    products: Callable[[Inputs, str, torch.dtype], Products]  # of a pass
    # further numbers, with default values
    settings: dict[str, tuple[float, ...]] = field(default_factory=dict)
    # Outcomes as they are compared, from inputs and outcome.
    collect: Callable[[Inputs, dict[str, Tensor]], dict[str, Tensor]] = lambda inputs, outcome: (
        outcome
    )
    # of names that are not listed
    parse_provider: Callable[[str], Provider | None] = lambda name: None

    def make_inputs(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        dead_rows: float = 0.0,
        settings: Iterable[tuple[str, float]] = (),
        source: str = "random",
    ) -> Inputs:
        """The same at every call, on the same kind of device.

        Gradients of outputs are those of a mean over tokens; of a dead row, such as one with
        advantage 0, they are 0.
        """
        tensors = self.inputs[source](shape, dtype, torch.Generator(device).manual_seed(0))
        random, count = torch.Generator(device).manual_seed(1), shape[0]
        upstream = {output: torch.ones((), device=device) for output in self.alone}
        if per_token := [output for output in self.outputs if output not in self.alone]:
            alive = torch.randperm(count, generator=random, device=device) >= round(
                dead_rows * count
            )
            for output in per_token:
                upstream[output] = (
                    torch.randn(count, generator=random, device=device) * alive / count
                )
        return Inputs(self, tuple(shape), tensors, upstream, dict(settings))

    @property
    def bare(self) -> tuple[str, ...]:
        """What a bare function of the tensors gives: one output, of which the loss is the mean."""
        return (self.mean[0],) if self.mean[0] else self.outputs[:1]

    def lacks(self, provider: Provider, outputs: tuple[str, ...]) -> str:
        """Why a provider takes no part in a case of these outputs."""
        absent = ", ".join(name for name in outputs if name not in provider.gives)
        remedy = "; a Provider says in `gives` what it gives" if ":" in provider.name else ""
        return f"gives {', '.join(provider.gives)}, and not {absent}{remedy}"

    def can_give(self, provider: Provider, outputs: tuple[str, ...]) -> bool:
        return set(outputs) <= set(provider.gives) or (
            outputs == ("loss",) and self.mean[0] in provider.gives
        )

    def parse_outputs(self, text: str) -> tuple[str, ...]:
        """``logprob+entropy`` as a tuple, in the order of ``outputs``.

        Raises:
            ValueError: if a name is unknown, or one that stands alone has company.
        """
        names = text.split("+")
        if unknown := [name for name in names if name not in self.outputs]:
            raise ValueError(
                f"no output {unknown[0]!r}, wanted some of {', '.join(self.outputs)}, joined by +"
            )
        alone = [name for name in names if name in self.alone]
        if alone and len(names) > 1:
            raise ValueError(f"the {alone[0]} is asked for alone, got {text!r}")
        return tuple(output for output in self.outputs if output in names)

    def parse_shapes(self, names: list[str]) -> list[tuple[int, ...]]:
        """Names, or sizes such as 2048x576x49152.

        Raises:
            ValueError: if one is neither.
        """
        return [
            shape for name in names for shape in self.shapes.get(name) or (self._parse_sizes(name),)
        ]

    def _parse_sizes(self, name: str) -> tuple[int, ...]:
        parts = name.replace(",", "x").split("x")
        if all(part.isdecimal() and int(part) > 0 for part in parts):
            try:
                return self.shape(*map(int, parts))
            except TypeError:  # too many of them, or too few
                pass
        raise unknown_name(
            "shape",
            name,
            self.shapes,
            f"wanted {self.sizes}, or one of {', '.join(self.shapes)}",
            0.5,
        )

    def knows(self, name: str) -> bool:
        return ":" in name or name in self.providers or self.parse_provider(name) is not None

    def find(self, name: str) -> Provider:
        """The provider of that name, or the object at ``module:object``.

        Raises:
            ValueError: if there is none, with the nearest name or the reason.
        """
        if ":" in name:
            return self._load(name)
        if provider := self.providers.get(name) or self.parse_provider(name):
            return provider
        known = f"Known are {', '.join(self.providers)}, and your module:object"
        raise unknown_name("provider", name, self.providers, known)

    def _load(self, name: str) -> Provider:
        module, _, attribute = name.partition(":")
        # a console script does not look where it is called, `python -m` does
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
        try:
            loaded = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"provider {name!r} can't be loaded: {first_line(error)}") from error
        if isinstance(loaded, Provider):
            return loaded
        if not callable(loaded):
            raise ValueError(
                f"provider {name!r} must be a Provider or a function, got {type(loaded).__name__}"
            )
        return Provider(
            name, lambda *args, **settings: (loaded(*args[:-1], **settings),), self.bare
        )


OWN: dict[str, Operation] = {}  # operations of this process, while they are measured


def named(name: str) -> Operation:
    """The operation of that benchmark.

    A `ModuleNotFoundError` for one that needs a checkout of the repository.
    """
    if name in OWN:
        return OWN[name]
    module = f".peer.{name}" if name == "objectives" else f".{name}"
    operation: Operation = importlib.import_module(module, __package__).OPERATION
    return operation


def unknown_name(
    kind: str, name: str, known: Iterable[str], hint: str, cutoff: float = 0.0
) -> ValueError:
    nearest = get_close_matches(name, known, n=1, cutoff=cutoff)
    return ValueError(
        f"no {kind} {name!r}{f', did you mean {nearest[0]!r}?' if nearest else ';'} {hint}"
    )


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
        except Exception as error:  # a package that does not fit this machine may raise anything
            return f"{module} can't be imported: {first_line(error)}"
        return None

    return missing


def first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
