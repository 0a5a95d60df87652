"""What the kernels refuse, and in which words."""

from torch import Tensor, int64


def check_tensors(who: str, wanted: dict[str, tuple[Tensor, list[int]]]) -> None:
    """Raises unless every tensor has its shape, and the device of the first one."""
    device = next(tensor.device for tensor, _ in wanted.values())
    for name, (tensor, shape) in wanted.items():
        if list(tensor.shape) != shape:
            raise ValueError(f"{who}: {name} must be {shape}, got {list(tensor.shape)}")
        if tensor.device != device:
            raise ValueError(f"{who}: {name} must be on {device} like {next(iter(wanted))}, got {tensor.device}")
        if name == "target" and tensor.dtype != int64:
            raise ValueError(f"{who}: target must be int64, got {tensor.dtype}")
        if name != "target" and not tensor.is_floating_point():
            raise ValueError(f"{who}: {name} must be floating-point, got {tensor.dtype}")


def check_positive(who: str, name: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise ValueError(f"{who}: {name} must be positive and finite, got {value}")


def checked_vocab(who: str, vocab: int | None, size: int) -> int:
    """The number of columns that are not padding."""
    if vocab is not None and not 1 <= vocab <= size:
        raise ValueError(f"{who}: vocab must be in [1, {size}], got {vocab}")
    return size if vocab is None else vocab


def check_rows(target: Tensor, temperature: float | Tensor | None, vocab: int) -> None:
    """Raises unless every target is in the vocabulary and every temperature positive: such a row trains on noise."""
    wrong = target[(target < 0) | (target >= vocab)]
    if wrong.numel():
        raise IndexError(
            f"logprob: every target must be in [0, {vocab}), got {wrong[0].item()} ({wrong.numel()} of "
            f"{target.numel()} are outside); select the rows that carry a target before the call"
        )
    if isinstance(temperature, Tensor) and not (temperature > 0).all():
        raise ValueError(f"logprob: every temperature must be > 0, got {temperature.min().item()}")
