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
    "prime-rl": "prime_rl.trainer.rl.loss",
    "AReaL": "areal.utils.functional.functional",
    "slime": "slime.utils.ppo_utils",
    "LLaMA-Factory": "llamafactory.train.trainer_utils",
}
# Packages whose own imports need a cluster, so that only files in them are run.
PACKAGES = {
    "prime-rl": ["prime_rl", "prime_rl.orchestrator", "prime_rl.orchestrator.algo"],
    "AReaL": ["areal", "areal.trainer", "areal.trainer.ppo", "areal.utils"],
    "slime": ["slime", "slime.backends", "slime.backends.megatron_utils", "slime.utils"],
    "LLaMA-Factory": [
        "llamafactory",
        "llamafactory.extras",
        "llamafactory.train",
        "llamafactory.v1",
        "llamafactory.v1.trainers",
    ],
}
# Modules that those files import from, and no loss calls.
UNUSED = {
    "prime-rl": [
        "prime_rl.configs.algorithm",
        "prime_rl.configs.trainer",
        "prime_rl.orchestrator.algo.base",
        "prime_rl.orchestrator.algo.routing",
        "prime_rl.utils.utils",
        "verifiers.v1",
    ],
    "AReaL": [
        "areal.api",
        "areal.api.cli_args",
        "areal.experimental.training_service.controller.controller",
        "areal.infra",
        "areal.infra.platforms",
        "areal.infra.rpc.serialization",
        "areal.trainer.ppo.stats",
        "areal.utils.constants",
        "areal.utils.data",
        "areal.utils.logging",
        "areal.utils.perf_tracer",
        "areal.utils.stats_tracker",
    ],
    "slime": [
        "megatron.core",
        "slime.backends.megatron_utils.cp_utils",
        "slime.utils.distributed_utils",
        "slime.utils.misc",
        "slime.utils.types",
    ],
    "LLaMA-Factory": [
        "llamafactory.extras.constants",
        "llamafactory.extras.logging",
        "llamafactory.extras.misc",
        "llamafactory.extras.packages",
        "llamafactory.hparams",
        "llamafactory.model",
        "llamafactory.v1.accelerator.interface",
        "llamafactory.v1.config",
        "llamafactory.v1.core.base_trainer",
        "llamafactory.v1.core.data_engine",
        "llamafactory.v1.core.model_engine",
        "llamafactory.v1.utils.constants",
        "llamafactory.v1.utils.logging",
        "llamafactory.v1.utils.types",
    ],
}


def peer(name: str) -> Any:
    """The module of a framework's losses; the test is skipped where it is not installed."""
    package = MODULES[name].partition(".")[0]
    missing = f"{name} is not installed; see tests/support/tools/install_peers"
    if name not in PACKAGES:
        pytest.importorskip(package, reason=missing)
    elif package not in sys.modules and importlib.util.find_spec(package) is None:
        pytest.skip(missing)
    if name == "SkyRL":
        # It is made for Python 3.12, where pydantic takes the TypedDict of typing.
        typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment]
    if name == "OpenRLHF":
        _without_its_models()
    if name in PACKAGES and MODULES[name] not in sys.modules:
        _without_its_cluster(name)
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


def _without_its_cluster(name: str) -> None:
    """Import the files of losses alone, with classes of no content for all that they only name."""
    top = PACKAGES[name][0]
    spec = importlib.util.find_spec(top)
    assert spec is not None
    assert spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0])
    for package in PACKAGES[name]:
        _stand_in(package, folder.joinpath(*package.split(".")[1:]))
    for unused in UNUSED[name]:
        _Unused(unused)


class _Unused(ModuleType):
    """A module in which every name is a class without content."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        parent, _, own = name.rpartition(".")
        if parent and parent not in sys.modules:
            _Unused(parent)
        self.__spec__ = ModuleSpec(name, None, is_package=True)
        self.__path__ = []
        sys.modules[name] = self
        if parent:
            setattr(sys.modules[parent], own, self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = type(name, (_Empty,), {})
        setattr(self, name, value)
        return value


class _Empty:
    """What an unused module gives for a class, a decorator that changes nothing, or a condition,
    which is false.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None: ...

    def __call__(self, function: Any) -> Any:
        return function

    def __class_getitem__(cls, item: Any) -> Any:
        return cls

    def __bool__(self) -> bool:
        return False


def _stand_in(name: str, folder: Path | None) -> None:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None, is_package=True)
    module.__path__ = [str(folder)] if folder else []
    sys.modules[name] = module
