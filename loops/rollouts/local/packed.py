"""Large weights of linear layers in oneDNN's own layout, for the token steps of a CPU.

A token step multiplies every weight by one row for each sequence. From four rows on, oneDNN reads
the layout that it makes of a weight faster than the matrix itself. The numbers are the same, their
sums only run in another order. Under autocast the copies are in its precision, where the weights
would be rounded anew for every token.

Processor time of a token step with packed weights over the one without, packing included: 32 tokens
of a model of 135M parameters, one thread, AVX-512 (`burnish bench sampling`):

    rows                       1      2      4      8     16     32     64
    float32                 1.10   1.09   0.91   0.79   0.96   0.97   1.03
    bfloat16 by autocast    0.38   0.39   0.38   0.38   0.40   0.45   0.58

A copy takes as many bytes as the weight does in that precision. It is made for the completions of
one rollout, and let go of before the weights train.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from ....kernels.backend import autocast_dtype

# Numbers of the smallest weight that is packed: smaller ones stay in the caches as they are.
SMALLEST = 1 << 19
# Numbers of rows with which packed weights are faster: see the table. Without them, autocast rounds
# every weight for every token, whatever the number of rows.
_ROWS = {torch.float32: range(4, 33), torch.bfloat16: range(1, 65)}
_HINT = 8  # rows that the layout is chosen for; one for 64 rows is as fast


class PackedWeights:
    """Packed copies of a model's large linear weights; none until `pack` is called.

    Args:
        model: its linear layers, but for the head, use the copies within `in_use`.
        head: the output embedding, whose copy `logits` uses; None if the head is not fused.
    """

    def __init__(self, model: nn.Module, head: nn.Module | None) -> None:
        self.model = model
        self.head = head
        self._layers: dict[nn.Linear, Callable[[Tensor], Tensor]] = {}
        self._head_weight: Tensor | None = None
        self._head_dtype: torch.dtype | None = None

    def __bool__(self) -> bool:
        return bool(self._layers) or self._head_weight is not None

    def layers(self) -> list[nn.Linear]:
        """The layers below the head that `pack` makes copies for."""
        found = []
        for module in self.model.modules():
            if isinstance(module, nn.Linear) and _packable(module):
                found.append(module)
        return found

    def size(self) -> int:
        """Bytes of the copies in the precision of the weights."""
        return sum(weight.nbytes for weight in self._weights())

    def _weights(self) -> list[Tensor]:
        """What `pack` makes copies of."""
        weights: list[Tensor] = [layer.weight for layer in self.layers()]
        head = _packable_head(self.head)
        if head is not None:
            weights.append(head.weight)
        return weights

    def worthwhile(self, rows: int) -> bool:
        """True if copies in the precision of the autocast around this call would be used for so
        many rows.
        """
        dtypes = {autocast_dtype(weight) or weight.dtype for weight in self._weights()}
        return any(_supported(dtype) and rows in _ROWS[dtype] for dtype in dtypes)

    @torch.no_grad()
    def pack(self) -> None:
        """Copy the weights as they are now, in the precision of the autocast around this call."""
        for layer in self.layers():
            dtype = autocast_dtype(layer.weight) or layer.weight.dtype
            if _supported(dtype):
                bias = None if layer.bias is None else layer.bias.to(dtype)
                packed = _packed(layer.weight.to(dtype))
                self._layers[layer] = partial(_multiply, layer, packed, bias)
        head = _packable_head(self.head)
        if head is not None:
            # The head's logits are float32 sums of rounded factors, as log-probs use them: rounded
            # here, and then multiplied in float32, in which products of 16-bit numbers are exact.
            dtype = autocast_dtype(head.weight) or head.weight.dtype
            if _supported(dtype):
                self._head_dtype = dtype
                self._head_weight = _packed(head.weight.to(dtype).float())

    def clear(self) -> None:
        """Let go of the copies."""
        self._layers.clear()
        self._head_weight = None

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Context in which the layers below the head multiply by the copies."""
        replaced = list(self._layers)  # `pack` and `clear` may be called within
        for layer in replaced:
            vars(layer)["forward"] = self._layers[layer]
        try:
            yield
        finally:
            for layer in replaced:
                del vars(layer)["forward"]

    def logits(self, states: Tensor) -> Tensor | None:
        """The head's product with these states [rows, D], in float32; None if there is no copy of
        its weight, or if it would be slower.
        """
        if self._head_weight is None or self._head_dtype is None:
            return None
        if len(states) not in _ROWS[self._head_dtype]:
            return None
        rounded = states.to(self._head_dtype).float()
        return _product(rounded, self._head_weight, None)


def _packable(module: nn.Linear) -> bool:
    """True for a plain linear layer of a CPU whose weight is large.

    Not for a subclass, which may compute something else, nor where ``forward`` is replaced already,
    as the head's and that of a layer split over ranks are.
    """
    if type(module) is not nn.Linear or "forward" in vars(module):
        return False
    return _is_large(module.weight)


def _packable_head(head: nn.Module | None) -> nn.Linear | None:
    """The head, if it is a plain linear layer of a CPU without a bias, and its weight is large."""
    if not isinstance(head, nn.Linear) or type(head) is not nn.Linear or head.bias is not None:
        return None
    return head if _is_large(head.weight) else None


def _is_large(weight: Tensor) -> bool:
    if type(weight) not in (Tensor, nn.Parameter, FakeTensor):
        return False  # a part of one that ranks share
    if weight.device.type != "cpu":
        return False
    return _supported(weight.dtype) and weight.numel() >= SMALLEST


def _supported(dtype: torch.dtype) -> bool:
    """True if this processor's oneDNN multiplies such numbers."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def _packed(weight: Tensor) -> Tensor:
    """The weight in oneDNN's layout, which torch.compile uses for frozen models, too."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _HINT)
    return packed


def _product(rows: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")
    return product


def _multiply(layer: nn.Linear, packed: Tensor, bias: Tensor | None, states: Tensor) -> Tensor:
    """In place of the layer's ``forward``, which it is where another number of rows comes in."""
    rows = states.numel() // states.shape[-1]
    if rows not in _ROWS[packed.dtype]:
        return nn.Linear.forward(layer, states)
    return _product(states.to(packed.dtype), packed, bias)
