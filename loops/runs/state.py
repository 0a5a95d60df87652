"""The state of training by name, so that it does not depend on the number of ranks, or on what is
sharded over them.

`torch.distributed.checkpoint.state_dict` would cast an optimizer's state to the dtype of the
parameters, and take a step, which counts, with one that has taken none. Here a state is any number
of tensors of any dtype, and of numbers.
"""

import io
import random
from collections.abc import Mapping
from typing import Any, Protocol, cast, runtime_checkable

import numpy
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

# The content of state.pt: numbers, texts, tensors, and lists and mappings of them, which torch.load
# reads without running code.
Rest = dict[str, Any]


@runtime_checkable
class HoldsTensors(Protocol):
    """A part of the state whose tensors may be sharded: they go into the shards of a checkpoint."""

    def tensors(self) -> dict[str, Tensor]: ...


def trained_state(policy: nn.Module) -> dict[str, Tensor]:
    """The parameters that training changes, and all buffers, each once.

    Frozen parameters come from the model's own files. Where the policy is sharded, so are these.
    """
    wanted = {name for name, _ in policy.named_buffers(remove_duplicate=False)}
    trained = set()
    for name, parameter in policy.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            trained.add(name)
    wanted |= trained
    state = policy.state_dict(keep_vars=True)
    assert trained <= state.keys()
    kept: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in state.items():
        if id(tensor) in seen:
            continue  # tied to a weight that came before
        seen.add(id(tensor))
        if name in wanted:
            kept[name] = tensor
    return kept


def capture(policy: nn.Module, parts: Mapping[str, Stateful]) -> tuple[dict[str, Tensor], Rest]:
    """All tensors by name, and the rest of the state, which is the same on every rank.

    Raises:
        ValueError: if an optimizer does not shard its state as the parameters are.
    """
    tensors = {f"model/{name}": tensor for name, tensor in trained_state(policy).items()}
    names: dict[Tensor, str] = {parameter: name for name, parameter in policy.named_parameters()}
    rest: Rest = {}
    for part, stateful in parts.items():
        if isinstance(stateful, Optimizer):
            tensors |= _tensors_of(stateful, part, names)
            rest[part] = {
                "numbers": _numbers_of(stateful, names),
                "groups": _groups_of(stateful, names),
            }
        else:
            tensors |= _held_by(stateful, part)
            rest[part] = stateful.state_dict()
    return tensors, rest


def _held_by(stateful: Stateful, part: str) -> dict[str, Tensor]:
    """The tensors of a part that is no optimizer, by path."""
    if not isinstance(stateful, HoldsTensors):
        return {}
    return {f"{part}/{name}": tensor for name, tensor in stateful.tensors().items()}


def _numbers_of(optimizer: Optimizer, names: Mapping[Tensor, str]) -> dict[str, Rest]:
    """What an optimizer holds of each parameter beside tensors, such as a count of its steps."""
    numbers = {}
    for parameter, state in optimizer.state.items():
        plain = {key: value for key, value in state.items() if not isinstance(value, Tensor)}
        numbers[names[parameter]] = plain
    return numbers


def _groups_of(optimizer: Optimizer, names: Mapping[Tensor, str]) -> list[Rest]:
    """The parameter groups, with names in place of parameters."""
    groups = []
    for group in optimizer.param_groups:
        groups.append({**group, "params": [names[each] for each in group["params"]]})
    return groups


def _tensors_of(optimizer: Optimizer, part: str, names: Mapping[Tensor, str]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if not isinstance(value, Tensor):
                continue
            sharded = isinstance(value, DTensor) and value.shape == parameter.shape
            # A single number, such as a step, is the same on every rank.
            if isinstance(parameter, DTensor) and value.ndim and not sharded:
                raise ValueError(
                    f"optimizer: {names[parameter]} is sharded, and {key!r} in its state is not, so "
                    "no other number of ranks could resume it; use another optimizer, or don't shard"
                )
            tensors |= _components(f"{part}/{names[parameter]}/{key}", value)
    return tensors


def _components(path: str, tensor: Tensor) -> dict[str, Tensor]:
    """The tensor by its path, or the parts of a tensor subclass, such as those of 8-bit optimizers.

    The sizes of these parts depend on the shard, so each is saved for itself, under a path such as
    optimizer/head.weight/exp_avg@0of2.codes.
    """
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if not hasattr(local, "__tensor_flatten__"):
        return {path: tensor}
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        dimensions = zip(mesh.shape, tensor.placements, mesh.get_coordinate() or (), strict=True)
        for size, placement, at in dimensions:
            if not placement.is_replicate():
                path += f"@{at}of{size}"
    return {f"{path}.{name}": getattr(local, name) for name in local.__tensor_flatten__()[0]}


def restore(
    policy: nn.Module,
    parts: Mapping[str, Stateful],
    rest: Mapping[str, Any],
    saved: Mapping[str, TensorStorageMetadata],
) -> dict[str, Tensor]:
    """Restore the ``rest`` of a captured state, and return the tensors in use, to be filled by the
    caller.

    An optimizer makes its tensors in a step without a gradient, after which the weights, too, are
    to be filled.

    Args:
        saved: size and dtype of each tensor.

    Raises:
        ValueError: if the tensors of an optimizer were saved of other shards.
    """
    targets = {f"model/{name}": tensor for name, tensor in trained_state(policy).items()}
    parameters = dict(policy.named_parameters())
    names: dict[Tensor, str] = {parameter: name for name, parameter in parameters.items()}
    for part, stateful in parts.items():
        if not isinstance(stateful, Optimizer):
            stateful.load_state_dict(rest[part])
            targets |= _held_by(stateful, part)
            continue
        targets |= _make_tensors(stateful, part, parameters, saved)
        for group, before in zip(stateful.param_groups, rest[part]["groups"], strict=True):
            assert [names[each] for each in group["params"]] == before["params"]
            group |= {**before, "params": group["params"]}
        for name, numbers in rest[part]["numbers"].items():
            stateful.state[parameters[name]].update(numbers)
    return targets


def _make_tensors(
    optimizer: Optimizer,
    part: str,
    parameters: Mapping[str, nn.Parameter],
    saved: Mapping[str, TensorStorageMetadata],
) -> dict[str, Tensor]:
    """Have an optimizer make the tensors that were saved of it, which a new one has not.

    Returns them by path.
    """
    # Out of Accelerate's wrapper, whose step in float16 needs the scale of a backward pass.
    optimizer = getattr(optimizer, "optimizer", optimizer)
    # optimizer/layers.0.mlp.weight/exp_avg is exp_avg of the parameter layers.0.mlp.weight.
    of_part = {path for path in saved if path.startswith(f"{part}/")}
    optimizer.zero_grad()
    for path in of_part:
        name, _ = _parameter_and_key(path, part)
        parameters[name].grad = torch.zeros_like(parameters[name])
    # Only the optimizer itself knows the dtypes and the shards of its tensors.
    optimizer.step()
    optimizer.zero_grad()
    names: dict[Tensor, str] = {parameter: name for name, parameter in parameters.items()}
    tensors = _tensors_of(optimizer, part, names)
    if odd := sorted(tensors.keys() - of_part):
        raise ValueError(
            f"resume: this optimizer's state can't be resharded, and {odd[0]!r} is not in the checkpoint; "
            "resume on as many shards as wrote it"
        )
    for path in of_part - tensors.keys():  # what a later step made
        name, key = _parameter_and_key(path, part)
        weight = parameters[name]
        size = saved[path].size
        like = weight if size == weight.shape else torch.empty(size, device=weight.device)
        made = torch.empty_like(like, dtype=saved[path].properties.dtype, requires_grad=False)
        optimizer.state[weight][key] = made
        tensors[path] = made
    return tensors


def _parameter_and_key(path: str, part: str) -> tuple[str, str]:
    """("head.weight", "exp_avg") of optimizer/head.weight/exp_avg"""
    name, _, key = path.removeprefix(f"{part}/").rpartition("/")
    return name, key


def dump(state: object) -> memoryview:
    """The content of a file for torch.load."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return memoryview(buffer.getvalue())  # no copy; a view of the buffer itself would outlive it


def random_state() -> Rest:
    name, keys, *rest = cast(tuple[Any, ...], numpy.random.get_state(legacy=True))
    return {
        "torch": torch.get_rng_state(),
        # of this rank's device
        "cuda": [torch.cuda.get_rng_state()] if torch.cuda.is_available() else [],
        "numpy": (name, keys.tolist(), *rest),
        "python": random.getstate(),
    }


def set_random_state(state: Rest) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"][0])
    numpy.random.set_state(state["numpy"])
    random.setstate(state["python"])
