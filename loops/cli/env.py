"""``burnish env [config.yaml]``: the facts about the machine that a bug report needs.

Nothing of them is private: of a configuration there is its digest alone.
"""

import hashlib
import os
import platform
from collections.abc import Sequence
from pathlib import Path

from ..versions import launch_variables, versions


def environment(files: Sequence[str] = ()) -> str:
    """Versions, devices, ranks, and the SHA-256 of configurations, a line each."""
    lines = versions()
    lines["cpu"] = f"{os.cpu_count()} cores, {platform.machine()}"
    lines["gpu"] = _gpus()
    lines |= launch_variables()
    for file in files:
        digest = hashlib.sha256(Path(file).read_bytes()).hexdigest()
        lines[Path(file).name] = f"sha256 {digest[:16]}"
    return "\n".join(f"{name:15} {value}" for name, value in lines.items())


def _gpus() -> str:
    """Such as "2 x NVIDIA H100 80GB HBM3, 79 GiB, compute 9.0; CUDA 12.8, HIP None"."""
    try:
        import torch
    except ImportError:
        return "unknown, without torch"
    if not torch.cuda.is_available():
        return f"none (torch was built for {torch.version.cuda or torch.version.hip or 'CPUs'})"
    described = []
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        memory = f"{gpu.total_memory / 2**30:.0f} GiB"
        described.append(f"{gpu.name}, {memory}, compute {gpu.major}.{gpu.minor}")
    kinds = [f"{described.count(kind)} x {kind}" for kind in dict.fromkeys(described)]
    return f"{'; '.join(kinds)}; CUDA {torch.version.cuda}, HIP {torch.version.hip}"
