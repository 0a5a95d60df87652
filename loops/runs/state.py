"""The state of training by name, so that it does not depend on the number of ranks, or on what is sharded over them.

`torch.distributed.checkpoint.state_dict` would cast an optimizer's state to the dtype of the parameters, and take a
step, which counts, with one that has taken none. Here a state is any number of tensors of any dtype, and of numbers.
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
from torch.utils.serialization import config as serialization


def trained_state(policy: nn.Module) -> dict[str, Tensor]:
    """The parameters that training changes, and all buffers, each once. Frozen parameters come from the model's own
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
        composed = False
        for parameter, state in stateful.state.items():
            for key, value in state.items():
                if not isinstance(value, Tensor):
                    numbers.setdefault(names[parameter], {})[key] = value
                    continue
                sharded = isinstance(value, DTensor) and value.shape == parameter.shape
                if isinstance(parameter, DTensor) and value.ndim and not sharded:
                    raise ValueError(
                        f"optimizer: {names[parameter]} is sharded, and {key!r} in its state is not, so "
                        "no other number of ranks could resume it; use another optimizer, or don't shard"
                    )
                path = f"{part}/{names[parameter]}/{key}"
                components = _components(path, value)
                composed |= path not in components
                tensors |= components
        groups = [{**group, "params": [names[each] for each in group["params"]]} for group in stateful.param_groups]
        rest[part] = {"numbers": numbers, "groups": groups, "composed": composed}
    return tensors, rest


def _components(path: str, tensor: Tensor) -> dict[str, Tensor]:
    """The tensor by its path, or the parts of a tensor subclass, such as those of 8-bit optimizers. Their sizes depend
    on the shard, so each is saved for itself."""
    local: Any = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if not hasattr(local, "__tensor_flatten__"):
        return {path: tensor}
    if isinstance(tensor, DTensor):
        place = zip(tensor.device_mesh.shape, tensor.placements, tensor.device_mesh.get_coordinate() or (), strict=True)
        path += "".join(f"@{at}of{size}" for size, placement, at in place if not placement.is_replicate())
    return {f"{path}.{name}": getattr(local, name) for name in local.__tensor_flatten__()[0]}


def restore(
    policy: nn.Module, parts: Mapping[str, Stateful], rest: Mapping[str, Any], saved: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Restore the ``rest`` of a captured state, and return the tensors in use, to be filled by the caller.

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
    """Restore the settings and numbers of an optimizer, allocate its tensors, and return them to be filled."""
    optimizer.state.clear()
    targets = _composed(optimizer, part, parameters, saved) if rest["composed"] else {}
    place: dict[str, Any] = {}
    for group, before in zip(optimizer.param_groups, rest["groups"], strict=True):
        assert all(parameters[name] is each for name, each in zip(before["params"], group["params"], strict=True))
        group |= {**before, "params": group["params"]}
        on_device = group.get("fused") or group.get("capturable")  # as torch.optim places its counts of steps
        place |= {name: parameters[name].device if on_device else "cpu" for name in before["params"]}
    for name, numbers in rest["numbers"].items():
        optimizer.state[parameters[name]].update(numbers)
    if rest["composed"]:
        return targets
    for path, about in saved.items():
        owner, _, path_in_part = path.partition("/")
        if owner == part:
            name, _, key = path_in_part.rpartition("/")
            parameter, size, dtype = parameters[name], about.size, about.properties.dtype
            if size == parameter.shape:
                tensor = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
            else:
                tensor = torch.empty(size, dtype=dtype, device=parameter.device if size else place[name])
            targets[path] = optimizer.state[parameter][key] = tensor
    return targets


def _composed(
    optimizer: Optimizer, part: str, parameters: Mapping[str, nn.Parameter], saved: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Tensors of an optimizer's own classes, which it makes in its first step. The weights that this
    step moves are restored afterwards, as everything is.

    Raises:
        ValueError: if they were saved of other shards.
    """
    known = {path.rpartition("/")[0].partition("/")[2] for path in saved if path.startswith(f"{part}/")}
    for name in known:
        parameters[name].grad = torch.zeros_like(parameters[name])
    optimizer.step()
    optimizer.zero_grad()
    names: dict[Tensor, str] = {parameter: name for name, parameter in parameters.items()}
    targets: dict[str, Tensor] = {}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                targets |= _components(f"{part}/{names[parameter]}/{key}", value)
    if odd := sorted(targets.keys() - saved.keys()):
        raise ValueError(
            f"resume: this optimizer's state can't be resharded, and {odd[0]!r} is not in the checkpoint; "
            "resume on as many shards as wrote it"
        )
    return targets


def dump(state: Any) -> memoryview:
    """The content of a file for torch.load."""
    buffer = io.BytesIO()
    # The SHA-256 replaces the checksum that torch computes for every tensor.
    options: Any = serialization
    with options.patch("save.compute_crc32", False):
        torch.save(state, buffer)
    return buffer.getbuffer()


def random_state() -> dict[str, Any]:
    name, keys, *rest = cast(tuple[Any, ...], numpy.random.get_state(legacy=True))
    return {
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state()] if torch.cuda.is_available() else [],  # of this rank's device
        "numpy": (name, keys.tolist(), *rest),
        "python": random.getstate(),
    }


def set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        own = min(torch.cuda.current_device(), len(state["cuda"]) - 1)  # earlier versions saved those of all devices
        torch.cuda.set_rng_state(state["cuda"][own])
    numpy.random.set_state(state["numpy"])
    random.setstate(state["python"])
