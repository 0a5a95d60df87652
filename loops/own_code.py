"""Whose code a configuration runs, and a look at what it names before any of it is called.

A configuration names code as ``module:object``: rewards, environments, agents, tools, an order of
prompts, losses, an optimizer, a teacher's prompts. Importing a module runs it, so the names are
checked first: nothing of Python's standard library is what a configuration may name, and under
``--no_code`` nothing but burnish's own. What was found must be defined where it was looked for, so
that a module does not lend what it has merely imported.
"""

import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_BURNISH = __name__.partition(".")[0]
_VARIABLE = "BURNISH_NO_CODE"


@contextmanager
def burnish_alone(refuse: bool = True) -> Iterator[None]:
    """Refuse all code but burnish's own that a configuration names, as ``--no_code`` does.

    Processes that are started meanwhile refuse it, too: it is a variable of the environment.
    """
    before = os.environ.get(_VARIABLE)
    if refuse:
        os.environ[_VARIABLE] = "1"
    try:
        yield
    finally:
        if refuse and before is None:
            del os.environ[_VARIABLE]


def check_module(who: str, module: str) -> None:
    """Check the name of a module before it is imported.

    Args:
        who: the setting and the name in it, for the message.

    Raises:
        ValueError: if the module is of the standard library, or is not burnish's and ``--no_code``
            was given.
    """
    package = package_of(module)
    if package in sys.stdlib_module_names:
        raise ValueError(
            f"{who}: {package} is Python's standard library, which has nothing that a configuration may name; name a "
            "module of yours, or of a package (a file of yours that has this name needs another)"
        )
    if package != _BURNISH and os.environ.get(_VARIABLE):
        raise ValueError(
            f"{who}: refused, as --no_code allows no code but burnish's; read {module}, then leave it out"
        )


def check_home(who: str, module: str, found: object) -> None:
    """Check that an object is defined in the named module, or in another one of the same package.

    Raises:
        ValueError: if the module has imported the object from elsewhere, or the object is itself a
            module.
    """
    if inspect.ismodule(found):
        raise ValueError(f"{who}: is a module; name a function or a class in it")
    if not callable(found):
        return  # what it is for says what it wants
    defined = home_of(found)
    if package_of(defined) != package_of(module):
        raise ValueError(
            f"{who}: {module} only imports it; name it where it is defined, in {defined}, or define your own"
        )


def home_of(found: object) -> str:
    """The module that defines a function or a class; of another object, its class's module."""
    while isinstance(found, partial):
        found = found.func
    if not isinstance(getattr(found, "__module__", None), str):
        found = type(found)
    return str(found.__module__)


def package_of(module: str) -> str:
    return module.partition(".")[0]


def code_names(config: object) -> Iterator[tuple[str, str]]:
    """Yield each setting of a configuration that names code as ``module:object``, and the name.

    Args:
        config: of any recipe; a setting that it has not names nothing.
    """
    environment = getattr(config, "environment", None)
    named = {
        "optimizer": _names(getattr(config, "optimizer", None)),
        "loss": _names(getattr(config, "loss", None)),
        "reward": _rewards(getattr(config, "rewards", None)),
        "environment": _names(environment),
        "agent": _names(getattr(config, "agent", None)),
        "tool": _tools(environment),
        "order": _names(getattr(config, "order", None)),
        "teacher.reprompt": _names(getattr(getattr(config, "teacher", None), "reprompt", None)),
    }
    for setting, names in named.items():
        for name in names:
            if isinstance(name, str) and ":" in name:  # else burnish's, or an object itself
                yield setting, name


def _names(value: object) -> Iterable[object]:
    """The names in a setting that is one name, a list of names, or a mapping with names as keys."""
    if value is None:
        return ()
    return value if isinstance(value, Mapping | list | tuple) else [value]


def _rewards(spec: object) -> Iterator[object]:
    """The names of rewards, and of other rewards that these ask."""
    for key in _names(spec):
        settings = spec[key] if isinstance(spec, Mapping) else None
        if isinstance(settings, Mapping):
            yield settings.get("function", key)  # one function may be named by several rewards
            yield settings.get("correct")
        else:
            yield key


def _tools(environment: object) -> Iterator[object]:
    """The tools that environments offer: ``{tools: {tools: [my_tools:search]}}``."""
    if isinstance(environment, Mapping):
        for settings in environment.values():
            if isinstance(settings, Mapping):
                yield from _names(settings.get("tools"))


def module_of(name: str) -> str:
    """The module in ``module:object`` or ``module.py:object``."""
    return name.replace(".py:", ":").partition(":")[0]


def check_names(config: object) -> None:
    """Check all names of a configuration before anything is imported, as `check_module` does.

    Raises:
        ValueError: as `check_module` does; under ``--no_code`` also for an agent that is a program,
            and for settings of a vLLM server that could run code.
    """
    for setting, name in code_names(config):
        check_module(f"{setting} {name}", module_of(name))
    if not os.environ.get(_VARIABLE):
        return
    for setting, named in _programs(config):
        raise ValueError(
            f"{setting}: refused ({named}), as it could run code and --no_code was given"
        )


def _programs(config: object) -> Iterator[tuple[str, str]]:
    """Yield settings that start programs which could run code, and what of them could."""
    agent = getattr(config, "agent", None)
    if isinstance(agent, Mapping) and "process" in agent:
        settings = agent["process"]
        command = settings.get("command") if isinstance(settings, Mapping) else settings
        yield "agent.process", str(command)
    yield from _server_code(config)


def _server_code(config: object) -> Iterator[tuple[str, str]]:
    """Yield settings of a vLLM server that could run code in it, and what of them could.

    They are an interpreter, and texts among its flags and variables.
    """
    vllm = getattr(config, "vllm", None)
    python = getattr(vllm, "python", None)
    if python:
        yield "vllm.python", str(python)
    for setting in ("environment", "options"):
        values = getattr(vllm, setting, None) or {}
        named = [key for key, value in values.items() if not _is_harmless(key, value)]
        if named:
            yield f"vllm.{setting}", ", ".join(named)


def _is_harmless(key: str, value: object) -> bool:
    """True for numbers and switches, such as a length or the devices 0,1.

    A text may name a file or a module, and the switch trust_remote_code runs a model's.
    """
    if isinstance(value, str):
        return re.fullmatch(r"[\d.,]*", value) is not None
    return isinstance(value, int | float) and "code" not in key


def whose_code(config: object) -> str:
    """Say in one line whose code a configuration runs besides burnish's; nothing is imported."""
    packages = {package_of(module_of(name)) for _, name in code_names(config)} - {_BURNISH}
    sources = [_source(package) for package in sorted(packages)]
    sources += [f"{setting} ({named})" for setting, named in _programs(config)]
    if not sources:
        return "this configuration runs no code but burnish's own"
    return f"this configuration runs code of: {', '.join(sources)}"


def _source(package: str) -> str:
    """A package with its version, or a module with its file."""
    with suppress(PackageNotFoundError):
        return f"{package} {version(package)}"
    file = Path(f"{package}.py").absolute()
    with suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(package)  # a name without a dot: nothing is imported
        if spec:
            return f"{package} ({spec.origin or 'a folder'})"
    if file.exists():
        return f"{package} ({file})"
    folder = file.with_suffix("")
    return f"{package} ({folder})" if folder.is_dir() else f"{package} (not found)"
