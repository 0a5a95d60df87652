"""The state of training by name, so that it does not depend on the number of ranks, or on what is sharded over them.

`torch.distributed.checkpoint.state_dict` would cast an optimizer's state to the dtype of the parameters, and take a
step, which counts, with one that has taken none. Here a state is any number of tensors, of any dtype, and of numbers.
"""

import io
import random
from collections.abc import Mapping
from typing import Any, cast

import numpy
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer
from torch.utils.serialization import config as serialization


def trained_state(policy: nn.Module) -> dict[str, Tensor]:
    """The parameters that training changes, and all buffers, each once. What is frozen comes from the model's own
    files. Where the policy is sharded, so are these."""
    state = policy.state_dict(keep_vars=True)
    trained = {name for name, tensor in policy.named_parameters(remove_duplicate=False) if tensor.requires_grad}
    buffers = {name for name, _ in policy.named_buffers(remove_duplicate=False)}
    assert trained <= state.keys()
    first = {id(tensor): name for name, tensor in reversed(state.items())}  # of tied weights
    return {name: state[name] for name in state if name in trained | buffers and first[id(state[name])] == name}


def capture(policy: nn.Module, parts: Mapping[str, Stateful]) -> tuple[dict[str, Tensor], dict[str, Any]]:
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
        numbers: dict[str, dict[str, Any]] = {}
        for parameter, state in stateful.state.items():
            for key, value in state.items():
                if not isinstance(value, Tensor):
                    numbers.setdefault(names[parameter], {})[key] = value
                    continue
                if isinstance(parameter, DTensor) and value.ndim and not isinstance(value, DTensor):
                    raise ValueError(
                        f"optimizer: wanted a DTensor as its {key} of {names[parameter]}, which is sharded, got a "
                        "tensor of one rank, which no other number of ranks could go on with; use another optimizer"
                    )
                tensors[f"{part}/{names[parameter]}/{key}"] = value
        groups = [{**group, "params": [names[each] for each in group["params"]]} for group in stateful.param_groups]
        rest[part] = {"numbers": numbers, "groups": groups}
    return tensors, rest


def restore(
    policy: nn.Module, parts: Mapping[str, Stateful], rest: Mapping[str, Any], saved: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Restore the ``rest`` of what `capture` gave, and return the tensors in use, which are to be filled.

    Args:
        saved: size and dtype of each tensor, see `torch.distributed.checkpoint.metadata`.
    """
    targets = {f"model/{name}": tensor for name, tensor in trained_state(policy).items()}
    parameters = dict(policy.named_parameters())
    for part, stateful in parts.items():
        if isinstance(stateful, Optimizer):
            targets |= _prepare(stateful, part, rest[part], parameters, saved)
        else:
            stateful.load_state_dict(rest[part])
    return targets


def _prepare(
    optimizer: Optimizer,
    part: str,
    rest: Mapping[str, Any],
    parameters: Mapping[str, nn.Parameter],
    saved: Mapping[str, Any],
) -> dict[str, Tensor]:
    """Restore the settings and numbers of an optimizer, and give it empty tensors, which are returned to be filled."""
    optimizer.state.clear()
    place: dict[str, Any] = {}
    for group, before in zip(optimizer.param_groups, rest["groups"], strict=True):
        assert all(parameters[name] is each for name, each in zip(before["params"], group["params"], strict=True))
        group |= {**before, "params": group["params"]}
        on_device = group.get("fused") or group.get("capturable")  # as torch.optim places its counts of steps
        place |= {name: parameters[name].device if on_device else "cpu" for name in before["params"]}
    for name, numbers in rest["numbers"].items():
        optimizer.state[parameters[name]].update(numbers)
    targets = {}
    for path, about in saved.items():
        owner, _, path_in_part = path.partition("/")
        if owner == part:
            name, _, key = path_in_part.rpartition("/")
            parameter, size, dtype = parameters[name], about.size, about.properties.dtype
            if size == parameter.shape:
                tensor = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
            else:
                tensor = torch.empty(size, dtype=dtype, device=parameter.device if size else place[name])
                if isinstance(parameter, DTensor) and size:
                    mesh = parameter.device_mesh
                    tensor = DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim)
            targets[path] = optimizer.state[parameter][key] = tensor
    return targets


def dump(state: Any) -> memoryview:
    """The content of a file for torch.load."""
    buffer = io.BytesIO()
    # The SHA-256 stands for the checksum that torch computes of every tensor.
    options: Any = serialization
    with options.patch("save.compute_crc32", False):
        torch.save(state, buffer)
    return buffer.getbuffer()


def random_state() -> dict[str, Any]:
    name, keys, *rest = cast(tuple[Any, ...], numpy.random.get_state(legacy=True))
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": (name, keys.tolist(), *rest),
        "python": random.getstate(),
    }


def set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
    numpy.random.set_state(state["numpy"])
    random.setstate(state["python"])
