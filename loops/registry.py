"""Look up objects by names that users type, and suggest the name that was probably meant."""

import difflib
import importlib
import inspect
import os
import pickle
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from types import ModuleType
from typing import Any

from .own_code import check_home, check_module, module_of

# Errors by which libraries refuse a value.
_REFUSALS = (ValueError, OSError, RuntimeError, ImportError, pickle.UnpicklingError)
# Packages whose other errors are bugs; an error of any other module is of the user's own code.
_LIBRARIES = (
    __name__.partition(".")[0],
    "torch",
    "transformers",
    "peft",
    "bitsandbytes",
    "torchao",
    "schedulefree",
)
# Names of other libraries, and ours.
MEANT = {
    "batch_size": "prompts_per_rollout",
    "old": "old_logprobs",
    "clip_low": "loss_kwargs",  # {clip_low: 0.2}
    "clip_high": "loss_kwargs",
    "lr": "learning_rate",
    "bf16": "dtype",
    "fp16": "dtype",
    "precision": "dtype",
    "mixed_precision": "dtype",
}
_LISTED = 30  # maximal number of names that a message lists


def nearest(complaint: str, name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Suggest a known name: "complaint 'lerning_rate', did you mean 'learning_rate'?".

    It is the one that is meant by another library's, that begins with the name, or that is nearest
    to it. If there is none, all of them are listed unless they are many.
    """
    names = sorted(map(str, known))
    near: list[str] = []
    if MEANT.get(name) in names:
        near = [MEANT[name]]
    elif name:
        near = [each for each in names if each.startswith(name)]
    if not near:
        near = difflib.get_close_matches(name, names, 3, cutoff)
    if near:
        # typing errors are rarely in the first letter
        same_letter = [each for each in near if each[:1] == name[:1]]
        meant = (same_letter or near)[0]
        return f"{complaint} {name!r}, did you mean {meant!r}?"
    if len(names) > _LISTED:
        return f"{complaint} {name!r}"
    return f"{complaint} {name!r}; there are {', '.join(names)}"


@contextmanager
def as_setting_error(setting: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turn an error of a library or of the user's code into a ValueError that names the setting.

    Args:
        kinds: errors to turn; by default those by which libraries refuse a value. With `Exception`,
            for the user's code, all of them, and the message names the line.
    """
    try:
        yield
    except Exception as error:
        # torch's OutOfMemoryError is a RuntimeError, and no fault of a setting's value
        if not isinstance(error, kinds or _REFUSALS) or type(error).__name__ == "OutOfMemoryError":
            raise
        text = _said_by(error)
        if Exception in kinds:
            text = f"{_where(error)}: {type(error).__name__}: {text}"
        raise ValueError(f"{setting}: {text}") from error


def _said_by(error: Exception) -> str:
    """What an error says, in one line; what to do, where a library's advice is not to be followed."""
    if "trust_remote_code" in str(error):
        return (
            "needs code that comes with it, which is not run; read that code, load model and tokenizer in Python "
            "with trust_remote_code=True, and pass these instead of the name"
        )
    if isinstance(error, pickle.UnpicklingError):
        return "is pickled with more than tensors, which could run code, and is not loaded; save it as safetensors"
    if isinstance(error, SyntaxError):
        return error.msg
    lines = [line.strip() for line in str(error).strip().splitlines()[:3]]
    return " ".join(lines) or type(error).__name__


def _where(error: Exception) -> str:
    """The file and the line of the user's code that raised an error, or can't be parsed."""
    if isinstance(error, SyntaxError):
        return f"{error.filename} line {error.lineno}"
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{last.filename} line {last.lineno}"


def find_one(
    kind: str, spec: object, shipped: Mapping[str, str], package: str
) -> tuple[str, Any, Mapping[str, object]]:
    """The name, the object and the settings that a field means, which takes one of its kind.

    Args:
        spec: a name, a mapping of one name to its settings, or from Python the object itself.

    Raises:
        ValueError: if there are several names, or as `find` does.
    """
    if isinstance(spec, str):
        return spec, find(kind, spec, shipped, package), {}
    if not isinstance(spec, Mapping):
        return str(getattr(spec, "__name__", type(spec).__name__)), spec, {}
    if len(spec) != 1:
        raise ValueError(f"{kind}: wanted one name, got {', '.join(map(str, spec)) or 'none'}")
    ((name, settings),) = spec.items()
    return name, find(kind, name, shipped, package), settings


def find(kind: str, name: str, shipped: Mapping[str, str], package: str) -> Any:
    """Import the object of a shipped name, or of ``module:object``.

    Modules of the working directory are found too.

    Raises:
        ValueError: names the nearest or all known names; or if the module may not be named, or has
            only imported the object, see `own_code`.
    """
    place = shipped.get(name, name)
    if ":" not in place:
        complaint = nearest(f"{kind}: no", name, shipped)
        raise ValueError(f"{complaint} (your own is named module:function)")
    module = module_of(place)
    attribute = place.rpartition(":")[2]
    if name in shipped:
        return getattr(importlib.import_module(module, package), attribute)

    who = f"{kind} {name}"
    check_module(who, module)
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a console script does not look there
    found = _imported(who, module)
    if not hasattr(found, attribute):
        public = []
        for word, value in vars(found).items():
            if callable(value) and not word.startswith("_"):
                public.append(word)
        raise ValueError(nearest(f"{who}: {module} has no", attribute, public))
    named = getattr(found, attribute)
    check_home(who, module, named)
    return named


def _imported(who: str, module: str) -> ModuleType:
    """Import a module of the user's; ValueError if there is none, or it raises an error."""
    try:
        return importlib.import_module(module)
    except Exception as error:
        # a module that it imports may be absent, too, and is the user's code to tell of
        if isinstance(error, ModuleNotFoundError) and module.startswith(error.name or ":"):
            problem = f"no module {module!r} in {os.getcwd()} or among the installed packages"
            raise ValueError(f"{who}: {problem}") from error
        with as_setting_error(who, Exception):
            raise


def build(
    who: str,
    found: Any,
    settings: Mapping[str, object],
    *,
    factory: bool = False,
    **given: object,
) -> Any:
    """Return what was found; of a class or another ``factory``, what it makes of the settings.

    A mapping may stand for a dataclass among them.

    Args:
        given: further values, passed to parameters of the same name, such as the tokenizer.

    Raises:
        ValueError: if there is no such setting, or one is missing.
    """
    if not (factory or inspect.isclass(found)):
        if settings:
            problem = f"a function has no settings, got {', '.join(settings)}"
            raise ValueError(f"{who}: {problem}; make it a class with fields and __call__")
        return found
    parameters = inspect.signature(found).parameters
    for name in settings:
        if name not in parameters:
            raise ValueError(nearest(f"{who}: no setting", name, parameters))
    values: dict[str, object] = {}
    for name, value in given.items():
        if name in parameters:
            values[name] = value
    for name, value in settings.items():
        kind = parameters[name].annotation
        if is_dataclass(kind) and isinstance(value, Mapping):
            value = build(f"{who}: {name}", kind, value)
        values[name] = value
    missing = [name for name in _needed(parameters.values()) if name not in values]
    if missing:
        example = ""
        if " " in who:  # the setting and a name in it, as in "reward format"
            example = f", such as {{{who.split()[-1]}: {{{missing[0]}: ...}}}}"
        raise ValueError(f"{who}: needs {', '.join(missing)}{example}")
    is_library = found.__module__.partition(".")[0] in _LIBRARIES
    kinds: list[type[Exception]] = [] if is_library else [Exception]
    with as_setting_error(who, *kinds):
        return found(**values)


def _needed(parameters: Iterable[inspect.Parameter]) -> list[str]:
    """The names of parameters without a default; *args and **kwargs need nothing."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = []
    for parameter in parameters:
        if parameter.default is parameter.empty and parameter.kind not in variadic:
            needed.append(parameter.name)
    return needed
