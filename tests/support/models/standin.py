"""A stand-in for a GPU: torch's device "standin", whose memory is the host's, but which refuses
what a GPU refuses.

An operator of tensors of both devices raises, and so do collectives of tensors of the host in the
ranks' main group, as NCCL's do. Within `no_waits`, so does what would make the host wait for a GPU.
Autograd, autocast, DDP and FSDP2 see a device that is not the CPU; its operators are those of the
CPU, and nothing runs beside the host. Importing this module registers the device, for the rest of
the process.
"""

import os
import weakref
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import DistributedType, PartialState
from torch import nn
from torch._C import (
    DispatchKey,
    DispatchKeySet,
    _acc,
    _construct_storage_from_data_pointer,
    _ExcludeDispatchKeyGuard,
)
from torch.distributed.fsdp._fully_shard import _fsdp_init
from torch.distributed.tensor import DTensor
from torch.library import Library, fallthrough_kernel
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)

aten = torch.ops.aten
HOST = DispatchKeySet(DispatchKey.CPU)
INDEXING = (aten.index, aten.index_put_, aten.index_put, aten._index_put_impl_, aten._unsafe_index)
# by autocast
HALVED = (
    aten.linear,
    aten.matmul,
    aten.mm,
    aten.addmm,
    aten.bmm,
    aten.scaled_dot_product_attention,
)
# The host wants a number, or the shape of the result, which a GPU has yet to compute.
WAITED_FOR = (
    aten._local_scalar_dense,
    aten.equal,
    aten.masked_select,
    aten.nonzero,
    aten._unique2,
)
GATHERED = ("_allgather_base", "_reduce_scatter_base")
LISTS = (
    "allgather",
    "allreduce",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "scatter",
)


class Stream(torch.cpu.Stream):
    """Everything is done by the time it is waited for."""

    def record_event(self, event=None):
        return event or torch.Event("cpu")

    def wait_event(self, event):
        pass


class Module(_DummyBackendModule):
    """``torch.standin``"""

    set_device = get_rng_state = set_rng_state = staticmethod(
        lambda *args, **kwargs: torch.get_rng_state()
    )
    Stream = current_stream = staticmethod(lambda *args, **kwargs: Stream())

    def __getattr__(self, name):
        return getattr(torch.cpu, name)

    def get_amp_supported_dtype(self):
        return [torch.bfloat16, torch.float16]


_setup_privateuseone_for_python_backend("standin", Module())
DEVICE = torch.device("standin", 0)
memory = {}  # the host's tensor that has the memory of each storage, by address


def there(tensor):
    return tensor.device.type == "standin"


def storage_of(host):
    """A storage of the device in the memory of a tensor of the host."""
    whole = host.untyped_storage()
    storage = _construct_storage_from_data_pointer(whole.data_ptr(), DEVICE, whole.nbytes())
    memory[storage._cdata] = host
    weakref.finalize(storage, memory.pop, storage._cdata)
    return storage


def far(storage, host, tensor=None):
    """A tensor of the device, or this one, with the shape and strides of one of the host."""
    tensor = _acc.create_empty_tensor([0], host.dtype) if tensor is None else tensor
    place = storage, host.storage_offset(), host.shape, host.stride()
    return aten.set_.source_Storage_storage_offset.redispatch(HOST, tensor, *place)


def near(tensor):
    """A tensor of the host in the memory of one of the device; which must live as long."""
    if not there(tensor):
        return tensor
    whole, empty = tensor.untyped_storage(), torch.empty(0, dtype=tensor.dtype)
    storage = _construct_storage_from_data_pointer(
        whole.data_ptr(), torch.device("cpu"), whole.nbytes()
    )
    return empty.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def compute(op, *args, **kwargs):
    """Any operator: the host's own, on tensors in the same memory."""
    packet = op._overloadpacket
    if waits_refused:
        refuse_waits(op, packet, args, kwargs)
    if packet is aten.set_:
        return op.redispatch(HOST, *args)
    if packet is aten.resize_:
        host = near(args[0]).clone().resize_(args[1])
        return far(storage_of(host), host, args[0])
    if packet is aten._copy_from:
        near(args[1]).copy_(near(args[0]))
        return args[1]
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    refuse_both(packet, given if packet not in INDEXING else [args[0], *tree_leaves(args[2:])])
    read = {id(leaf) for leaf in tree_leaves(args)}
    hosts = {id(tensor): near(tensor) for tensor in given}
    outs = [kwargs.get(argument.name) for argument in op._schema.arguments if argument.is_out]
    unsized = [out for out in outs if out is not None and not out.numel() and id(out) not in read]
    hosts |= {id(out): torch.empty(0, dtype=out.dtype) for out in unsized}
    kwargs = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory")}
    if any(argument.name == "device" for argument in op._schema.arguments):
        kwargs["device"] = "cpu"
    formal = zip(args, op._schema.arguments, strict=False)
    number = any(
        isinstance(arg, bool | int | float) and str(each.type) == "Tensor" for arg, each in formal
    )
    args, kwargs = tree_map_only(torch.Tensor, lambda tensor: hosts[id(tensor)], (args, kwargs))
    result = (packet if number else op)(*args, **kwargs)
    for out in unsized:
        far(storage_of(hosts[id(out)]), hosts[id(out)], out)
    same = {id(hosts[id(tensor)]): tensor for tensor in given}
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage()
        for tensor in given
        if tensor.numel()
    }

    def back(host):
        if id(host) in same:
            return same[id(host)]
        shared = storages.get(host.untyped_storage().data_ptr()) if host.numel() else None  # a view
        return far(storage_of(host) if shared is None else shared, host)

    return tree_map_only(torch.Tensor, back, result)


waits_refused = False


@contextmanager
def no_waits():
    """Context in which the host is not to wait for the device, as it would for ``.item()``."""
    global waits_refused
    assert not waits_refused
    waits_refused = True
    try:
        yield
    finally:
        waits_refused = False


def refuse_waits(op, packet, args, kwargs):
    """Copies between host and device must be asked for with ``non_blocking``."""
    waits = packet in WAITED_FOR
    if packet is aten._copy_from:
        non_blocking = args[2] if args[2:] else kwargs.get("non_blocking", False)
        waits = there(args[0]) != there(args[1]) and not non_blocking
    if packet in INDEXING:
        waits = any(
            index.dtype == torch.bool for index in tree_leaves(args[1]) if index is not None
        )
    if op is aten.repeat_interleave.Tensor:
        waits = kwargs.get("output_size") is None
    if waits:
        raise RuntimeError(f"the host would wait for the device: {packet}")


def refuse_both(packet, leaves):
    """On a GPU, too, numbers and indices may be the host's."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim]
    if len({there(tensor) for tensor in tensors}) > 1:
        raise RuntimeError(f"Expected all tensors to be on the same device: {packet} of {tensors}")


def cast(op, *args, **kwargs):
    def half(tensor):
        return (
            tensor.to(torch.get_autocast_dtype("standin"))
            if there(tensor) and tensor.is_floating_point()
            else tensor
        )

    with _ExcludeDispatchKeyGuard(DispatchKeySet(DispatchKey.AutocastPrivateUse1)):
        return op(
            *tree_map_only(torch.Tensor, half, args), **tree_map_only(torch.Tensor, half, kwargs)
        )


def empty(make, *shape, dtype=None, **_):
    host = make(*shape, dtype=dtype)
    return far(storage_of(host), host)


every, own = Library("_", "IMPL"), Library("aten", "IMPL")
every.fallback(compute, "PrivateUse1")
every.fallback(fallthrough_kernel, "AutocastPrivateUse1")
own.impl("empty.memory_format", partial(empty, torch.empty), "PrivateUse1")
own.impl("empty_strided", partial(empty, torch.empty_strided), "PrivateUse1")
for packet in HALVED:
    own.impl(
        packet.default._schema.name.removeprefix("aten::"),
        partial(cast, packet.default),
        "AutocastPrivateUse1",
    )


class Group(dist.ProcessGroup):
    """Collectives of the device's tensors, each over gloo and done when it returns."""

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        # which has its name
        self._register_backend(DEVICE, dist.ProcessGroup.BackendType.CUSTOM, self.gloo)

    def getBackendName(self):
        return "standin"


def collective(name, group, *args):
    for leaf in tree_leaves(args):
        if isinstance(leaf, torch.Tensor) and not there(leaf):
            raise RuntimeError(
                f"No backend type associated with device type {leaf.device.type}: {name}"
            )
    # NCCL does not look at the shapes of those that it gathers.
    host = (lambda tensor: near(tensor).view(-1)) if name in GATHERED else near
    work = getattr(group.gloo, name)(*tree_map_only(torch.Tensor, host, args))
    work.wait()  # what it reads may be let go of
    return work


def coalesced(name, group, outputs, inputs, *options):
    return [collective(name, group, *pair) for pair in zip(outputs, inputs, strict=True)][-1]


def method(function, name):
    return lambda group, *args: function(name, group, *args)


for name in (*LISTS, *GATHERED):
    setattr(Group, name, method(collective, name))
Group.all_to_all_single = Group.alltoall_base
Group.all_gather_single, Group.reduce_scatter_single = (
    Group._allgather_base,
    Group._reduce_scatter_base,
)
Group.allgather_into_tensor_coalesced = Group.all_gather_single_coalesced = method(
    coalesced, "_allgather_base"
)
Group.reduce_scatter_tensor_coalesced = Group.reduce_scatter_single_coalesced = method(
    coalesced, "_reduce_scatter_base"
)
dist.Backend.register_backend("standin", Group, devices=["standin"])


class Generator(torch.Generator):
    """One of the host, which the host's operators take."""

    def __new__(cls, device="cpu"):
        return torch._C.Generator("cpu" if torch.device(device).type == "standin" else device)


def clone(original, storage):
    """The device has no allocator of its own, which a copied parameter would ask for a storage."""
    if not there(storage):
        return original(storage)
    host = _construct_storage_from_data_pointer(
        storage.data_ptr(), torch.device("cpu"), storage.nbytes()
    )
    return storage_of(torch.empty(0, dtype=torch.uint8).set_(host).clone())


def resize(original, storage, size):
    """FSDP lets go of memory so, and takes it again: here it is kept."""
    return storage if there(storage) else original(storage, size)


def move(parameters, buffers, device):
    """As FSDP does by `set_data`, which torch allows between the host and devices that it knows."""
    for tensor in (*parameters, *buffers):
        if not isinstance(tensor, DTensor) and tensor.device != device:
            moved = tensor.detach().to(device)
            kept = isinstance(tensor, nn.Parameter)
            torch.utils.swap_tensors(
                tensor, nn.Parameter(moved, tensor.requires_grad) if kept else moved
            )


def choose(state, *_):
    several = int(os.environ.get("WORLD_SIZE", 1)) > 1
    return ("standin", DistributedType.MULTI_CPU) if several else (None, DistributedType.NO)


def open_accelerator(accelerator, *arguments, original=Accelerator.__init__, **options):
    """Accelerate refuses float16 on devices that it does not know; a CPU it leaves to the caller."""
    with patch.object(Accelerator, "device", torch.device("cpu")):
        original(accelerator, *arguments, **options)


Accelerator.__init__ = open_accelerator
torch.Generator = Generator
torch.UntypedStorage.clone = lambda storage, original=torch.UntypedStorage.clone: clone(
    original, storage
)
torch.UntypedStorage.resize_ = lambda storage, size, original=torch.UntypedStorage.resize_: resize(
    original, storage, size
)
_fsdp_init._move_states_to_device = move
PartialState._prepare_backend = choose
PartialState.set_device = lambda state: setattr(state, "device", DEVICE)
