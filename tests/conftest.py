"""What has to be said before anything imports torch or Triton, and before pytest reads pyproject.toml's options."""

import importlib.util
import os
from importlib.metadata import version

import pytest
from packaging.version import Version

# Deterministic algorithms, with which tests fill torch.empty with NaN, ask this of cuBLAS. Never set it for timings.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # without a GPU kernels run in the interpreter, on the CPU


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where jaxtyping is not installed, as on a machine that only runs tests/kernels, its option means nothing."""
    if importlib.util.find_spec("jaxtyping") is None:
        parser.addoption("--jaxtyping-packages")


def pytest_configure() -> None:
    """One message instead of some 300 failures."""
    interpreted = not torch.cuda.is_available() and importlib.util.find_spec("triton") is not None
    if interpreted and Version(version("triton")) < Version("3.7") and Version(version("numpy")) >= Version("2.4"):
        raise pytest.UsageError(
            f"tests: the interpreter of triton {version('triton')} makes an integer of an array of one, "
            f"for which numpy must be < 2.4, got {version('numpy')}; pip install 'numpy<2.4'"
        )
