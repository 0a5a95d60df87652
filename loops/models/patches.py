"""Every place where burnish changes what a class or an object of another library does.

    function               what is replaced                             why                                      undone
    ---------------------  -------------------------------------------  ---------------------------------------  ------
    replace_forward        ``forward`` of one module                    a hook can't take or return anything     never
                           (output heads, rotary embeddings)            else than ``forward`` does
    compute_locally        ``forward`` of one module                    torch has no style of its own for        never
                           (layers under tensor parallelism)            replicated parameters as plain tensors
    always_evaluate        ``train`` of one module (routers)            only evaluation mode has no jitter       never
    never_repack           a flag of bitsandbytes' 4-bit layers         repacked weights can't be trained        never
    never_attend_by_cudnn  torch's choice of kernels for attention      gradients of one are not finite          never
    load_weights_by        ``PreTrainedModel._load_pretrained_model``   sharded ranks don't read whole files     at exit
    wrap_attention         ``ALL_ATTENTION_FUNCTIONS.get_interface``    the ranks of a context-parallel group    never
                                                                        exchange states around any
                                                                        attention
    without_values         ``PreTrainedModel.from_pretrained``,         a simulation reads no weights, and       at exit
                           ``nn.Module._apply``,                        fake tensors can't be swapped
                           ``UntypedStorage.resize_``

A module keeps what was replaced for as long as it lives, also when it is copied or pickled.
`wrap_attention` leaves modules alone that it was not told of. transformers offers no hook for the
private methods up to 5.23, torch none up to 2.13: look there first when one of them breaks in a
newer version. `replace_forward` also wraps what others replaced before, such as the hooks of
Accelerate.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Placement, Replicate
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

Function = Callable[..., Any]


def replace_forward(module: nn.Module, forward: Function, *arguments: Any) -> None:
    """Let ``module(...)`` compute ``forward(module, *arguments, original, ...)``, where
    ``original`` is what it did.

    The module stays the same object of the same class: hooks of DDP and FSDP fire, names and ties
    stay. One that was given the same ``forward`` before gets the new arguments and keeps the first
    original.
    """
    # A partial, not a closure, so that a copied or unpickled module calls itself.
    original = vars(module).get("forward", partial(type(module).forward, module))
    if isinstance(original, partial) and original.func is forward:
        original = original.args[-1]
    module.forward = partial(forward, module, *arguments, original)


def compute_locally(module: Any, gradient: Placement) -> None:
    """Let a module whose parameters are replicated DTensors compute with plain tensors.

    Args:
        gradient: what each rank's gradient of the parameters is to the whole one.
    """
    forward = module.forward

    @wraps(forward)
    def locally(*args: Any, **kwargs: Any) -> Any:
        held = {name: each for name, each in module._parameters.items() if each is not None}
        if any(each.placements != (Replicate(),) for each in held.values()):
            raise RuntimeError(
                f"{type(module).__name__}: FSDP gathers weights for what `shard` was given; call that"
            )
        module._parameters |= {
            name: each.to_local(grad_placements=[gradient]) for name, each in held.items()
        }
        try:
            return forward(*args, **kwargs)
        finally:
            module._parameters |= held

    module.forward = locally


def always_evaluate(module: Any) -> None:
    """Let a module stay in evaluation mode in training; the modules in it change as usual."""
    module.train = partial(_train_children, module)


def _train_children(module: nn.Module, mode: bool = True) -> nn.Module:
    nn.Module.train(module, mode)
    module.training = False
    return module


def never_repack(model: nn.Module) -> None:
    """Keep 4-bit weights as they are: on some CPUs bitsandbytes repacks them when it evaluates."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            vars(module)["support_avx512bf16_for_cpu"] = False


def never_attend_by_cudnn() -> None:
    """Take cuDNN's kernel from those that torch chooses attention from.

    It is the first choice for a mask in 16 bits on H100 and H200, from torch 2.11 on, and its
    backward gives queries gradients that are not finite (pytorch issue 196678; seen on an H100).
    The other kernels, such as the memory-efficient one, are right.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


@contextmanager
def load_weights_by(load: Function) -> Iterator[None]:
    """Context in which ``from_pretrained`` fills a model by
    ``load(original, model, state_dict, files, options)``.
    """
    original = PreTrainedModel._load_pretrained_model
    with _replaced(
        PreTrainedModel, "_load_pretrained_model", staticmethod(partial(load, original))
    ):
        yield


def wrap_attention(wrapper: Function) -> None:
    """Let every attention function of `transformers` be called by
    ``wrapper(attention, module, ...)``.

    Its name stays what it was: transformers makes masks by it.
    """
    attentions: Any = ALL_ATTENTION_FUNCTIONS
    chosen_by = attentions.get_interface
    if not isinstance(chosen_by, partial):  # once
        attentions.get_interface = partial(_choose, wrapper, chosen_by)


def _choose(wrapper: Function, choose: Function, *args: object, **kwargs: object) -> Function:
    return partial(wrapper, choose(*args, **kwargs))


@contextmanager
def without_values(
    make: Function, resized: Callable[[torch.UntypedStorage, int], None]
) -> Iterator[None]:
    """Context for models whose tensors have shapes and no values.

    Args:
        make: ``make(kind, name, ...)`` takes the place of ``kind.from_pretrained(name, ...)``.
        resized: is told of each storage that was resized, and its size: so FSDP lets go of gathered
            weights.
    """
    resize = torch.UntypedStorage.resize_

    def resize_and_tell(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        resize(storage, size)
        resized(storage, size)
        return storage

    with (
        _replaced(PreTrainedModel, "from_pretrained", classmethod(make)),
        _replaced(nn.Module, "_apply", _replace_tensors),
        _replaced(torch.UntypedStorage, "resize_", resize_and_tell),
    ):
        yield


def _replace_tensors(module: nn.Module, function: Function, recurse: bool = True) -> nn.Module:
    """``Module._apply``, which ``to`` calls, with new parameters in place of the old ones.

    torch's own swaps fake tensors with others, and refuses where its memo of them refers to one.
    """
    if recurse:
        for child in module.children():
            child._apply(function)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            changed = function(parameter)
            if changed is not parameter:
                module._parameters[name] = nn.Parameter(changed, parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = function(buffer)
    return module


@contextmanager
def _replaced(owner: type[Any], name: str, replacement: object) -> Iterator[None]:
    """Context in which a class has another attribute of this name."""
    inherited = name not in vars(owner)
    original = None if inherited else vars(owner)[name]  # not by getattr, which binds a classmethod
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, original)
