"""The state of training by name, so that it does not depend on the number of ranks, or on what is
sharded over them.

`torch.distributed.checkpoint.state_dict` would cast an optimizer's state to the dtype of the
parameters, and take a step, which counts, with one that has taken none. Here a state is any number
of tensors of any dtype, and of numbers.
"""

import io
import random
from collections.abc import Mapping
from typing import Any, cast

import numpy
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


def trained_state(policy: nn.Module) -> dict[str, Tensor]:
    """The parameters that training changes, and all buffers, each once. Frozen parameters come from
    the model's own files. Where the policy is sharded, so are these."""
    state = policy.state_dict(keep_vars=True)
    trained = {
        name
        for name, tensor in policy.named_parameters(remove_duplicate=False)
        if tensor.requires_grad
    }
    buffers = {name for name, _ in policy.named_buffers(remove_duplicate=False)}
    assert trained <= state.keys()
    first = {id(tensor): name for name, tensor in reversed(state.items())}  # of tied weights
    return {
        name: state[name]
        for name in state
        if name in trained | buffers and first[id(state[name])] == name
    }


def capture(
    policy: nn.Module, parts: Mapping[str, Stateful]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """All tensors by name, and the rest of the state, which is the same on every rank.

    Raises:
        ValueError: if an optimizer does not shard its state as the parameters are.
    """
    tensors = {f"model/{name}": tensor for name, tensor in trained_state(policy).items()}
    names: dict[Tensor, str] = {parameter: name for name, parameter in policy.named_parameters()}
    rest: dict[str, Any] = {}
    for part, stateful in parts.items():
        if not isinstance(stateful, Optimizer):
            rest[part] = stateful.state_dict()
            continue
        tensors |= _tensors_of(stateful, part, names)
        numbers = {
            names[parameter]: {
                key: value for key, value in state.items() if not isinstance(value, Tensor)
            }
            for parameter, state in stateful.state.items()
        }
        groups = [
            {**group, "params": [names[each] for each in group["params"]]}
            for group in stateful.param_groups
        ]
        rest[part] = {"numbers": numbers, "groups": groups}
    return tensors, rest


def _tensors_of(optimizer: Optimizer, part: str, names: Mapping[Tensor, str]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if not isinstance(value, Tensor):
                continue
            sharded = isinstance(value, DTensor) and value.shape == parameter.shape
            if isinstance(parameter, DTensor) and value.ndim and not sharded:
                raise ValueError(
                    f"optimizer: {names[parameter]} is sharded, and {key!r} in its state is not, so "
                    "no other number of ranks could resume it; use another optimizer, or don't shard"
                )
            tensors |= _components(f"{part}/{names[parameter]}/{key}", value)
    return tensors


def _components(path: str, tensor: Tensor) -> dict[str, Tensor]:
    """The tensor by its path, or the parts of a tensor subclass, such as those of 8-bit optimizers.
    Their sizes depend on the shard, so each is saved for itself."""
    local: Any = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if not hasattr(local, "__tensor_flatten__"):
        return {path: tensor}
    if isinstance(tensor, DTensor):
        place = zip(
            tensor.device_mesh.shape,
            tensor.placements,
            tensor.device_mesh.get_coordinate() or (),
            strict=True,
        )
        path += "".join(
            f"@{at}of{size}" for size, placement, at in place if not placement.is_replicate()
        )
    return {f"{path}.{name}": getattr(local, name) for name in local.__tensor_flatten__()[0]}


def restore(
    policy: nn.Module,
    parts: Mapping[str, Stateful],
    rest: Mapping[str, Any],
    saved: Mapping[str, Any],
) -> dict[str, Tensor]:
    """Restore the ``rest`` of a captured state, and return the tensors in use, to be filled by the
    caller.

    An optimizer makes its tensors in a step without a gradient, after which the weights, too, are
    to be filled.

    Args:
        saved: size and dtype of each tensor, see `torch.distributed.checkpoint.metadata`.

    Raises:
        ValueError: if the tensors of an optimizer were saved of other shards.
    """
    targets = {f"model/{name}": tensor for name, tensor in trained_state(policy).items()}
    parameters = dict(policy.named_parameters())
    names: dict[Tensor, str] = {parameter: name for name, parameter in parameters.items()}
    for part, stateful in parts.items():
        if not isinstance(stateful, Optimizer):
            stateful.load_state_dict(rest[part])
            continue
        of_part = {path for path in saved if path.startswith(f"{part}/")}
        stateful.zero_grad()
        for name in {path.rpartition("/")[0].removeprefix(f"{part}/") for path in of_part}:
            parameters[name].grad = torch.zeros_like(parameters[name])
        stateful.step()
        stateful.zero_grad()
        tensors = _tensors_of(stateful, part, names)
        if odd := sorted(tensors.keys() - of_part):
            raise ValueError(
                f"resume: this optimizer's state can't be resharded, and {odd[0]!r} is not in the checkpoint; "
                "resume on as many shards as wrote it"
            )
        for path in of_part - tensors.keys():  # what a later step made
            name, _, key = path.removeprefix(f"{part}/").rpartition("/")
            weight, size, dtype = parameters[name], saved[path].size, saved[path].properties.dtype
            like = weight if size == weight.shape else torch.empty(size, device=weight.device)
            tensors[path] = stateful.state[weight][key] = torch.empty_like(
                like, dtype=dtype, requires_grad=False
            )
        targets |= tensors
        for group, before in zip(stateful.param_groups, rest[part]["groups"], strict=True):
            assert [names[each] for each in group["params"]] == before["params"]
            group |= {**before, "params": group["params"]}
        for name, numbers in rest[part]["numbers"].items():
            stateful.state[parameters[name]].update(numbers)
    return targets


def dump(state: object) -> memoryview:
    """The content of a file for torch.load."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return memoryview(buffer.getvalue())  # no copy; a view of the buffer itself would outlive it


def random_state() -> dict[str, Any]:
    name, keys, *rest = cast(tuple[Any, ...], numpy.random.get_state(legacy=True))
    return {
        "torch": torch.get_rng_state(),
        # of this rank's device
        "cuda": [torch.cuda.get_rng_state()] if torch.cuda.is_available() else [],
        "numpy": (name, keys.tolist(), *rest),
        "python": random.getstate(),
    }


def set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"][0])
    numpy.random.set_state(state["numpy"])
    random.setstate(state["python"])
