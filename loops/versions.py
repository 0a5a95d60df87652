"""The versions of what a run depends on."""

import os
import platform
import re
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("burnish", "torch", "triton", "transformers", "accelerate", "datasets", "peft", "safetensors",
             "tokenizers", "jsonargparse", "numpy", "bitsandbytes", "vllm", "deepspeed", "flash-attn")  # fmt: skip
# Environment variables that say how processes were started; all others may be private.
_LAUNCH = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED",
           "ACCELERATE_USE_CPU", "OMP_NUM_THREADS", "TRITON_INTERPRET", "HF_HUB_OFFLINE")  # fmt: skip
# Names of variables by which a process knows that it is a rank, as launchers set them.
_OF_RANKS = re.compile(
    "(RANK|WORLD_SIZE)$|(LOCAL|GROUP|ROLE|MASTER|TORCHELASTIC|ACCELERATE|FSDP|PARALLELISM_CONFIG)_"
)
_ROOT = Path(__file__).parents[1]


def versions() -> dict[str, str]:
    """The versions of Python, of the platform, and of those packages that are installed."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def launch_variables() -> dict[str, str]:
    """The environment variables that say how the processes were started."""
    return {name: os.environ[name] for name in _LAUNCH if name in os.environ}


def variables_of_no_rank() -> dict[str, str]:
    """The environment variables without those that say which rank this process is, for a program
    that is started and is none.
    """
    return {name: value for name, value in os.environ.items() if not _OF_RANKS.match(name)}


@cache
def git_revision(root: Path = _ROOT) -> str | None:
    """The commit of a checkout, with ``-dirty`` if tracked files were changed; None without one."""
    if not (root / ".git").exists():
        return None
    # Without optional locks git writes nothing: others may work in this checkout. Without the tags,
    # a commit is described by its full hash.
    options = ["--always", "--dirty", "--abbrev=40", "--exclude", "*"]
    command = ["git", "--no-optional-locks", "-C", str(root), "describe", *options]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return told.stdout.strip()
