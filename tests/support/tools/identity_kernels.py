"""Every kernel on small inputs: a SHA-256 of each output and gradient, for `tests/identity.py`."""

import hashlib
import itertools
import re
import zlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from burnish import kernels

BACKENDS = {"torch": "torch", "reference": "reference", "triton": "triton", "fused": "fused"}
MODES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "autocast": torch.float32}

# A tuple of numbers is the shape of a tensor; one with a weight, below the first level, is a
# `Head`.
N, D, V = 13, 20, 100
HEAD = {
    "weight": (V, D),
    "bias": (V,),
    "scale": 1.5,
    "softcap": 4.0,
    "adapter": ((3, D), (V, 3), 0.7),
}
LINEAR = {"hidden": (N, D), "weight": (V, D), "target": (N,)}
LOGITS = {"logits": (N, V), "target": (N,)}
TWO = {
    "student_hidden": (N, D),
    "student": {"weight": (V, D)},
    "teacher_hidden": (N, 12),
    "teacher": {"weight": (V + 3, 12)},
    "beta": 0.5,
}
EXTRAS = {"outputs": ("mean_logprob", "log_sum_squares")}
RANKED = {"outputs": ("top1", "rank"), "top_k": 3}
KERNELS = {
    "linear_logprob": {
        "plain": LINEAR,
        "head": LINEAR | HEAD | {"temperature": (N,), "vocab": 90},
        "extras": LINEAR | EXTRAS | {"temperature": 0.7},
        "ranked": LINEAR | RANKED,
        "several": LINEAR | {"target": (N, 3)},
        "recomputed": LINEAR | {"keep_bytes": 0},
        "main_grad": LINEAR | {"main_grad": (V, D)},
        "tiles": {"hidden": (1100, D), "weight": (2500, D), "target": (1100,), "keep_bytes": 2**22},
        "halves": LINEAR,  # of the vocabulary, on two ranks
        "halves_of_all": LINEAR | HEAD | {"temperature": (N,), "vocab": 90} | EXTRAS,
    },
    "logits_logprob": {
        "plain": LOGITS,
        "extras": LOGITS | EXTRAS | {"temperature": (N,), "vocab": 90},
        "ranked": LOGITS | RANKED,
        "several": LOGITS | {"target": (N, 3)},
    },
    "linear_divergence": {
        "jsd": TWO,
        "forward_kl": TWO | {"beta": 0.0, "temperature": 0.7},
        "reverse_kl": TWO | {"beta": 1.0, "keep_bytes": 0, "vocab": 90},
        "head": TWO | {"student": HEAD, "temperature": (N,)},
        "tiles": TWO | {"student_hidden": (1100, D), "teacher_hidden": (1100, 12), "student": {"weight": (1500, D)},
                        "teacher": {"weight": (1500, 12)}, "keep_bytes": 2**22},
    },
    "linear_gather_logprob": {"several": {"hidden": (N, D), "head": HEAD, "ids": (N, 3), "temperature": (N,)}},
    "linear_logits": {"head": {"hidden": (N, D), "head": HEAD, "vocab": 90}},
}  # fmt: skip
# Kernels of an older file.
RENAMED = {
    "linear_gather_logprob": lambda ids, **rest: kernels.linear_logprob(target=ids, **rest).logprob
}
# Cases that are too large for the interpreter, or alike in all backends; kernels whose "fused" is
# "triton".
ONLY_TORCH = ("tiles", "halves", "halves_of_all", "linear_logits")
AS_TRITON = ("logits_logprob", "linear_divergence")


def run_kernels(only: str, rank: int | None) -> dict[str, dict[str, str]]:
    """What each case whose name matches gives: on a rank of two those of a split vocabulary, else
    the others.
    """
    results = {}
    if rank is not None and not dist.is_initialized():
        dist.init_process_group("gloo")
    for kernel, cases in KERNELS.items():
        for case, backend, mode in itertools.product(cases, BACKENDS, MODES):
            name = f"{kernel}.{case}.{backend}.{mode}" + ("" if rank is None else f".rank{rank}")
            alike = backend != "torch" and (case in ONLY_TORCH or kernel in ONLY_TORCH)
            alike |= backend == "fused" and kernel in AS_TRITON
            if (
                alike
                or case.startswith("halves") != (rank is not None)
                or not re.search(only, name)
            ):
                continue
            options = {} if kernel == "linear_logits" else {"backend": BACKENDS[backend]}
            results[name] = outcome(
                RENAMED.get(kernel) or getattr(kernels, kernel), cases[case], options, mode, rank
            )
    return results


def outcome(
    kernel: Any, case: dict[str, Any], options: dict[str, Any], mode: str, rank: int | None
) -> dict[str, str]:
    """Forward, backward from all outputs, and a SHA-256 of each output and gradient."""
    leaves: dict[str, Any] = {}
    arguments = made(case, "", MODES[mode], leaves) | options
    if rank is not None:
        arguments = {name: half(value, rank) for name, value in arguments.items()}
        arguments["shard"] = kernels.Shard(dist.group.WORLD, rank * V // 2)
    # names are those of an older file, which had no `Head` at the first level
    if "weight" in arguments:
        fields = [field for field in kernels.Head._fields if field in arguments]
        arguments["head"] = kernels.Head(**{field: arguments.pop(field) for field in fields})
    with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
        try:
            outputs = dict(flattened(kernel(**arguments), "output"))
        except ValueError:  # not every backend can do everything
            return {"refused": "ValueError"}
    used = {name: tensor for name, tensor in outputs.items() if tensor.requires_grad}
    upstream = [
        made(tuple(t.shape), f"gradient of {name}", t.dtype, {}).detach()
        for name, t in used.items()
    ]
    torch.autograd.backward(list(used.values()), upstream)
    gradients = {f"d_{name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    gradients |= {name: leaf for name, leaf in leaves.items() if not leaf.requires_grad}
    return {name: sha256(tensor) for name, tensor in (outputs | gradients).items()}


def sha256(tensor: torch.Tensor) -> str:
    return hashlib.sha256(
        tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
    ).hexdigest()


def made(value: Any, name: str, dtype: torch.dtype, leaves: dict[str, Any]) -> Any:
    """The arguments of a kernel; the tensor of a shape is the same for the same name, and goes to
    ``leaves``.
    """
    if isinstance(value, dict):
        parts = {key: made(part, f"{name}{key}", dtype, leaves) for key, part in value.items()}
        return kernels.Head(**parts) if name else parts
    if not isinstance(value, tuple) or isinstance(value[0], str):
        return value
    if isinstance(value[0], tuple):
        return tuple(made(part, f"{name}{i}", dtype, leaves) for i, part in enumerate(value))
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    if name in ("target", "ids"):
        return torch.randint(90, value, generator=generator)
    tensor = torch.randn(value, generator=generator)
    tensor = tensor.exp() if name == "temperature" else tensor
    leaves[name] = tensor if name == "main_grad" else tensor.to(dtype).requires_grad_()
    return leaves[name]


def half(value: Any, rank: int) -> Any:
    """This rank's rows of whatever has one for each token of the vocabulary; gradients go through
    to the whole.
    """
    if isinstance(value, tuple):
        return tuple(half(part, rank) for part in value)
    return (
        value[rank * V // 2 :][: V // 2]
        if isinstance(value, torch.Tensor) and len(value) == V
        else value
    )


def flattened(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of nested results, named by their fields."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif value is not None:
        fields = value._asdict() if hasattr(value, "_asdict") else vars(value)
        for key, part in fields.items():
            yield from flattened(part, f"{name}.{key}")
