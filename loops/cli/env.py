"""``burnish env [config.yaml]``: the facts about the machine that a bug report needs, and nothing private."""

import hashlib
import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("burnish", "torch", "triton", "transformers", "accelerate", "datasets", "peft", "safetensors",
             "tokenizers", "jsonargparse", "numpy", "bitsandbytes", "vllm", "deepspeed", "flash-attn")  # fmt: skip
# Environment variables that say how processes were started; all others may be private.
_LAUNCH = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED",
           "ACCELERATE_USE_CPU", "OMP_NUM_THREADS", "TRITON_INTERPRET", "HF_HUB_OFFLINE")  # fmt: skip


def environment(files: Sequence[str] = ()) -> str:
    """Versions, devices, ranks, and the SHA-256 of configurations, a line each."""
    lines = {"python": platform.python_version(), "platform": platform.platform()}
    for package in _PACKAGES:
        try:
            lines[package] = version(package)
        except PackageNotFoundError:
            continue
    lines["cpu"] = f"{os.cpu_count()} cores, {platform.machine()}"
    lines["gpu"] = _gpus()
    for name in _LAUNCH:
        if name in os.environ:
            lines[name] = os.environ[name]
    for file in files:
        lines[Path(file).name] = f"sha256 {hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]}"
    return "\n".join(f"{name:15} {value}" for name, value in lines.items())


def _gpus() -> str:
    try:
        import torch
    except ImportError:
        return "unknown, without torch"
    if not torch.cuda.is_available():
        return f"none (torch was built for {torch.version.cuda or torch.version.hip or 'CPUs'})"
    described = []
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        described.append(f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, compute {gpu.major}.{gpu.minor}")
    kinds = [f"{described.count(kind)} x {kind}" for kind in dict.fromkeys(described)]
    return f"{'; '.join(kinds)}; CUDA {torch.version.cuda}, HIP {torch.version.hip}"
