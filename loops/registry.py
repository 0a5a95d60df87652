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
from typing import Any

from .own_code import check_home, check_module, module_of

# Errors by which libraries refuse a value.
_REFUSALS = (ValueError, OSError, RuntimeError, ImportError, pickle.UnpicklingError)
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
MEANT = {"batch_size": "prompts_per_rollout", "old": "old_logprobs", "lr": "learning_rate"}
MEANT |= {name: "dtype" for name in ("bf16", "precision", "mixed_precision")}
_LISTED = 30  # maximal number of names that a message lists


def nearest(complaint: str, name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """``complaint 'name'``, followed by the known name that begins with it or is nearest; if none
    is near, by all of them unless they are many."""
    names = sorted(map(str, known))
    near = (
        [MEANT[name]]
        if MEANT.get(name) in names
        else [each for each in names if name and each.startswith(name)]
    )
    near = near or difflib.get_close_matches(name, names, 3, cutoff)
    if near:  # typing errors are rarely in the first letter
        return f"{complaint} {name!r}, did you mean {max(near, key=lambda each: each[:1] == name[:1])!r}?"
    return f"{complaint} {name!r}" + (
        f"; there are {', '.join(names)}" if len(names) <= _LISTED else ""
    )


@contextmanager
def as_setting_error(setting: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turn an error of a library, or of the user's own code, about a setting into a ValueError that
    names the setting.

    Args:
        kinds: errors to turn; by default those by which libraries refuse a value. With `Exception`,
            for the user's code, all of them, and the message names the line.
    """
    try:
        yield
    except Exception as error:
        if not isinstance(error, kinds or _REFUSALS) or type(error).__name__ == "OutOfMemoryError":
            raise
        text = (
            " ".join(line.strip() for line in str(error).strip().splitlines()[:3])
            or type(error).__name__
        )
        if "trust_remote_code" in str(error):
            text = (
                "needs code that comes with it, which is not run; read that code, load model and tokenizer in Python "
                "with trust_remote_code=True, and pass these instead of the name"
            )
        elif isinstance(error, pickle.UnpicklingError):
            text = "is pickled with more than tensors, which could run code, and is not loaded; save it as safetensors"
        if Exception in kinds:
            last: Any = traceback.extract_tb(error.__traceback__)[-1]
            last, text = (error, error.msg) if isinstance(error, SyntaxError) else (last, text)
            text = f"{last.filename} line {last.lineno}: {type(error).__name__}: {text}"
        raise ValueError(f"{setting}: {text}") from error


def find(kind: str, name: str, shipped: Mapping[str, str], package: str) -> Any:
    """The object of a shipped name, or of ``module:object``; modules of the working directory are
    found too.

    Raises:
        ValueError: names the nearest or all known names; or if the module may not be named, or has
            only imported the object, see `own_code`.
    """
    place = shipped.get(name, name)
    if ":" not in place:
        raise ValueError(
            nearest(f"{kind}: no", name, shipped) + " (your own is named module:function)"
        )
    module, attribute = module_of(place), place.rpartition(":")[2]
    if name not in shipped:
        check_module(f"{kind} {name}", module)
    if name not in shipped and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a console script does not look there
    try:
        found = importlib.import_module(module, package if name in shipped else None)
    except Exception as error:
        if (
            isinstance(error, ModuleNotFoundError)
            and error.name is not None
            and module.startswith(error.name)
        ):
            problem = f"no module {module!r} in {os.getcwd()} or among the installed packages"
            raise ValueError(f"{kind} {name}: {problem}") from error
        if name in shipped:
            raise
        with as_setting_error(f"{kind} {name}", Exception):
            raise
    if not hasattr(found, attribute):
        public = [
            word
            for word, value in vars(found).items()
            if callable(value) and not word.startswith("_")
        ]
        raise ValueError(nearest(f"{kind} {name}: {module} has no", attribute, public))
    named = getattr(found, attribute)
    if name not in shipped:
        check_home(f"{kind} {name}", module, named)
    return named


def build(
    who: str, found: Any, settings: Mapping[str, Any], *, factory: bool = False, **given: Any
) -> Any:
    """The object itself; for a class, or another ``factory``, its result for these settings, in
    which a mapping may stand for a dataclass.

    Args:
        given: further values, passed to parameters of the same name, such as the tokenizer.

    Raises:
        ValueError: if there is no such setting, or one is missing.
    """
    if not (factory or inspect.isclass(found)):
        if settings:
            raise ValueError(
                f"{who}: a function has no settings, got {', '.join(settings)}; make it a class with fields and "
                "__call__"
            )
        return found
    parameters = inspect.signature(found).parameters
    for name in settings:
        if name not in parameters:
            raise ValueError(nearest(f"{who}: no setting", name, parameters))
    values = {**{name: value for name, value in given.items() if name in parameters}, **settings}
    for name, value in settings.items():
        if is_dataclass(kind := parameters[name].annotation) and isinstance(value, Mapping):
            values[name] = build(f"{who}: {name}", kind, value)
    needed = [
        name for name, parameter in parameters.items() if parameter.default is parameter.empty
    ]
    # *args, **kwargs
    missing = [
        name for name in needed if name not in values and parameters[name].kind not in (2, 4)
    ]
    if missing:
        example = f", such as {{{who.split()[-1]}: {{{missing[0]}: ...}}}}" if " " in who else ""
        raise ValueError(f"{who}: needs {', '.join(missing)}{example}")
    with as_setting_error(
        who, *[] if found.__module__.partition(".")[0] in _LIBRARIES else [Exception]
    ):
        return found(**values)
