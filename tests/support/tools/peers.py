"""Losses of other frameworks, imported without what those frameworks need to train: run
``install_peers`` first.
"""

import importlib
import sys
import typing
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typing_extensions

MODULES = {
    "verl": "verl.trainer.ppo.core_algos",
    "SkyRL": "skyrl.backends.skyrl_train.utils.ppo_utils",
    "OpenRLHF": "openrlhf.models.loss",
    "torchtune": "torchtune.rlhf.loss",
    "Liger": "liger_kernel.chunked_loss",
}


def peer(name: str) -> Any:
    """The module of a framework's losses; the test is skipped where it is not installed."""
    package = MODULES[name].partition(".")[0]
    pytest.importorskip(
        package, reason=f"{name} is not installed; see tests/support/tools/install_peers"
    )
    if name == "SkyRL":
        # It is made for Python 3.12, where pydantic takes the TypedDict of typing.
        typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment]
    if name == "OpenRLHF":
        _without_its_models()
    return importlib.import_module(MODULES[name])


def part(name: str) -> Any:
    """A further module of a framework that ``peer`` has found."""
    return importlib.import_module(name)


def _without_its_models() -> None:
    """Import the file of losses alone: the package around it needs flash attention and deepspeed,
    which no loss calls.
    """
    if "openrlhf.models" in sys.modules:
        return
    package = importlib.import_module("openrlhf")
    assert package.__file__ is not None
    _stand_in("openrlhf.models", Path(package.__file__).parent / "models")
    if importlib.util.find_spec("deepspeed") is None:
        _stand_in("deepspeed", None)


def _stand_in(name: str, folder: Path | None) -> None:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None, is_package=True)
    module.__path__ = [str(folder)] if folder else []
    sys.modules[name] = module
