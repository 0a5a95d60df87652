"""Time, memory and error of the language-model head, provider by provider: ``burnish bench kernels``.

For each shape everyone is first held to float64, in values and gradients; who fails is shown with the error and not
timed. The others take turns, and so do the matrix products alone, which are the floor: 2NDV forward; 6NDV forward and
backward if all logits are kept, 8NDV if they are computed again; 4NDV and 6NDV without the gradient of the head. See
``measure.py`` for the rules, ``providers.py`` for who takes part, ``operation.py`` for how to add your own.
"""

from collections.abc import Sequence

import torch

from . import harness
from .inputs import INPUTS, NAMED, Shape
from .operation import Inputs, Operation, Products
from .providers import OUTPUTS, PROVIDERS, find_more, naive

PASSES = {"forward": (), "train": ("hidden", "weight"), "frozen": ("hidden",)}


def products(inputs: Inputs, kind: str, dtype: torch.dtype) -> Products:
    """The matrix products of a pass, into memory that is there already."""
    hidden, weight = (inputs.tensors[name].to(dtype) for name in ("hidden", "weight"))
    logits = hidden @ weight.t()
    d_hidden, d_weight = torch.empty_like(hidden), torch.empty_like(weight)
    steps = {
        "logits": lambda _: torch.mm(hidden, weight.t(), out=logits),
        "d_hidden": lambda _: torch.mm(logits, weight, out=d_hidden),
        "d_weight": lambda _: torch.mm(logits.t(), hidden, out=d_weight),
    }
    wanted = ["logits", *(f"d_{name}" for name in PASSES[kind])]
    once = dict.fromkeys(wanted, 1)
    floors = {f"{2 * len(wanted)}NDV": once}
    if kind != "forward":
        floors[f"{2 * len(wanted) + 2}NDV"] = once | {"logits": 2}
    flops = 2 * Shape(*inputs.shape).flops
    return Products({name: steps[name] for name in wanted}, dict.fromkeys(wanted, flops), floors)


OPERATION = Operation(
    name="kernels",
    providers=PROVIDERS,
    find_more=find_more,
    definition=naive,
    baseline="naive",
    outputs=OUTPUTS,
    alone=("loss",),
    asked=lambda gpu: [*(["loss"] if gpu else []), "logprob", "logprob+entropy"],
    mean=("logprob", -1),
    passes=PASSES,
    shapes=NAMED,
    sizes="tokens x width x vocabulary as in 2048x576x49152",
    shape=lambda sizes: Shape(*sizes),
    inputs=INPUTS,
    products=products,
)


def main(arguments: Sequence[str] | None = None) -> int:
    return harness.main(OPERATION, arguments, __doc__)
