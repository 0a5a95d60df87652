"""Run the library's own code on tensors with a shape and no values, and count the bytes in use at
its peak.

    with simulate() as simulation:
        open_dpo(config)                the recipe as it is: its models, probes, losses, optimizer

Nothing is estimated: the simulation makes the allocations of a run, without memory behind them. It
can't see two things: temporary allocations inside an operator, and fragmentation between
allocations.
"""

import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
import transformers
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .patches import without_values
from .sharding import local

aten = torch.ops.aten

_FACTORIES = (aten.empty, aten.ones, aten.zeros, aten.full, aten.randn)
_INDEXING = (
    aten.index,
    aten.index_put,
    aten.index_put_,
    aten._unsafe_index,
    aten._unsafe_index_put,
)
_LARGE = 1 << 24  # elements of a tensor of the data, such as a mask, that is not worth computing
# of the results of operators of other packages
_LABELS = {"fsdp": "gathered weights", "c10d": "gathered weights"}


class Simulation(TorchDispatchMode):
    """Context in which new floating-point tensors are fake, as are weights and everything computed
    from them.

    Integers and small masks of the data stay real: batches are laid out, and tensors cut, as in a
    run. Where a fake value decides what to do next, it is the ordinary one: comparisons hold,
    nothing is infinite, all weights differ from 0.

    Args:
        gpu: an update by bitsandbytes is one kernel; on a CPU it computes whole tensors in float32.

    Attributes:
        label: label of new allocations; `labeled` changes it for a while. None counts none of them.
        live: bytes of all tensors by label.
        peak: a copy of it when their sum was highest.
    """

    def __init__(self, *, gpu: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.gpu = gpu
        self.label: str | None = "others"
        self.live: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        # by address: a weak reference, bytes, label
        self._storages: dict[int, tuple[Any, int, str]] = {}

    @contextmanager
    def labeled(self, label: str | None) -> Iterator[None]:
        before = self.label
        self.label = label
        try:
            yield
        finally:
            self.label = before

    def relabel(self, tensor: Tensor, label: str) -> None:
        """Count a tensor that exists already under another label."""
        address = local(tensor).untyped_storage()._cdata
        if address in self._storages:
            self._set(address, label)

    def resize(self, storage: torch.UntypedStorage, size: int) -> None:
        """Count a storage of gathered weights, which FSDP lets go of by resizing it, by its new
        size.
        """
        if storage._cdata in self._storages:
            self._set(storage._cdata, "gathered weights", size)

    def rename(self, before: str, label: str) -> None:
        """Count all that is counted under one label under another."""
        for address, (_, _, labeled) in self._storages.items():
            if labeled == before:
                self._set(address, label)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # counted again with the local tensors
        if func is torch.ops.prim.device.default:  # half of all calls
            return args[0].fake_device
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(isinstance(tensor, FakeTensor) for tensor in tensors):
            # Its shape and dtype, by torch's own rules for each operator.
            result = self._compute_fake(func, args, kwargs)
        elif _has_no_values(func._overloadpacket, args, kwargs, tensors):
            with self._fake:
                result = func(*args, **kwargs)
        else:
            result = func(*args, **kwargs)
        label = self._label_of(func)
        if label is not None:
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor):
                    self.count(leaf, label)
        return result

    def _compute_fake(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operator of which an argument has no values."""
        packet = func._overloadpacket
        if packet in _ORDINARY:
            return _ORDINARY[packet](args[0])
        if packet in (aten.any, aten.all) and len(args) == 1:
            return torch.tensor(packet is aten.all)
        # an optimizer's update, in place
        if func.namespace == "bitsandbytes" and not func._schema.returns:
            if not self.gpu:  # its kernel is written in Python
                with self:
                    func.redispatch(DispatchKeySet(DispatchKey.CPU), *args, **kwargs)
            return None
        if packet in _INDEXING:
            places = [place for index in args[1] for place in _places(index)]
            args = (args[0], places, *args[2:])
        return func(*args, **kwargs)

    def _label_of(self, func: Any) -> str | None:
        """What the results of an operator are counted as."""
        is_backward = str(func._overloadpacket).endswith("_backward")
        if func.namespace == "burnish" and not is_backward:
            return "logits"
        return _LABELS.get(func.namespace, self.label)

    def count(self, tensor: Tensor, label: str) -> None:
        """Count a tensor until it is freed; nothing, if it is counted already."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._storages or tensor.device.type == "meta":
            return

        # Called when Python drops the last reference, as memory would be freed in a run.
        def freed(reference: object) -> None:
            self._set(address, label, 0)
            del self._storages[address]

        self._storages[address] = (weakref.ref(storage, freed), 0, label)
        self._set(address, label, storage.nbytes())

    def _set(self, address: int, label: str, size: int | None = None) -> None:
        reference, size_before, before = self._storages[address]
        if size is None:
            size = size_before
        self._storages[address] = (reference, size, label)
        self.live[before] -= size_before
        self.live[label] += size
        if size > size_before and self.live.total() > self.peak.total():
            self.peak = self.live.copy()


@contextmanager
def simulate(*, gpu: bool = False) -> Iterator[Simulation]:
    """Within a `Simulation`, models of transformers have the shapes of their configuration.

    No weights are read.
    """
    simulation = Simulation(gpu=gpu)

    def from_pretrained(
        kind: Any, /, name: Any, *args: Any, config: Any = None, dtype: Any = None, **options: Any
    ) -> tuple[Any, dict[str, Any]]:
        attention: dict[str, Any] = {}
        if "attn_implementation" in options:
            attention["attn_implementation"] = options.pop("attn_implementation")
        # weights are made whole, and counted as what they are held in
        options.pop("quantization_config", None)
        if config is None:
            config = transformers.AutoConfig.from_pretrained(name, **options)
        with simulation.labeled(f"weights of {name}"):
            model = kind._from_config(
                config, dtype=dtype or config.dtype or torch.float32, **attention
            )
        return model, {"missing_keys": ()}

    with without_values(from_pretrained, simulation.resize), warnings.catch_warnings():
        # which a copy of a model does
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        with simulation:
            yield simulation


def _number(tensor: Tensor) -> bool | float | int:
    """A true comparison, a small difference that is not 0, or a count."""
    if tensor.dtype is torch.bool:
        return True
    return 1e-9 if tensor.is_floating_point() else 1


def _unique(tensor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The unique values, the inverse and the counts of equal values."""
    return tensor[:1], torch.zeros_like(tensor), tensor[:1]


# Operators whose result decides what to do next: the ordinary one, of their first argument.
_ORDINARY: dict[Any, Callable[[Tensor], Any]] = {
    aten._local_scalar_dense: _number,
    aten.equal: lambda tensor: True,
    aten._unique2: _unique,
}


def _places(index: Tensor | None) -> list[Tensor | None]:
    """An index by a mask as indices by positions; of a mask without values, all."""
    if index is None or index.dtype is not torch.bool:
        return [index]
    mask = torch.ones(index.shape, dtype=torch.bool) if isinstance(index, FakeTensor) else index
    return list(mask.nonzero().unbind(1))


def _has_no_values(packet: Any, args: Any, kwargs: dict[str, Any], tensors: list[Tensor]) -> bool:
    """Weights that a factory makes, and what real tensors broadcast to where it is large, such as
    the mask of a row.
    """
    if packet in _FACTORIES:
        dtype: torch.dtype = kwargs.get("dtype") or torch.get_default_dtype()
        return dtype.is_floating_point or prod(args[0]) > _LARGE
    if len(tensors) < 2 or packet in _INDEXING:
        return False
    try:
        shape: Any = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))  # type: ignore[no-untyped-call]
    except RuntimeError:
        return False
    return bool(prod(shape) > _LARGE)
