"""Names that people type: what they stand for, and which one was probably meant."""

import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any


def nearest(complaint: str, name: str, known: Iterable[str], *, cutoff: float = 0.5) -> str:
    """``complaint 'name'``, and the known name that begins with it or is nearest; all of them if none is near."""
    names = sorted(known)
    near = [each for each in names if each.startswith(name)] or difflib.get_close_matches(name, names, 1, cutoff)
    return f"{complaint} {name!r}" + (f", did you mean {near[0]!r}?" if near else f"; there are {', '.join(names)}")


def find(kind: str, name: str, shipped: Mapping[str, str], package: str) -> Any:
    """The object of a shipped name, or of ``module:object``, where modules of the working directory are found too.

    Raises:
        ValueError: naming what there is instead.
    """
    module, colon, attribute = shipped.get(name, name).partition(":")
    if not colon:
        raise ValueError(nearest(f"{kind}: no", name, shipped) + " (your own is named module:function)")
    if name not in shipped and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a console script does not look there
    try:
        found = importlib.import_module(module, package if name in shipped else None)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise  # the module is there, and imports one that is not
        raise ValueError(f"{kind} {name}: no module {module!r} in {os.getcwd()} nor among what is installed") from error
    if not hasattr(found, attribute):
        public = [word for word, value in vars(found).items() if callable(value) and not word.startswith("_")]
        raise ValueError(nearest(f"{kind} {name}: {module} has no", attribute, public))
    return getattr(found, attribute)


def build(who: str, found: Any, settings: Mapping[str, Any], *, factory: bool = False, **given: Any) -> Any:
    """The object itself; or what a class, or another ``factory``, makes of its settings.

    Args:
        given: what is passed on where there is a parameter of that name, such as the tokenizer.

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
    needed = [name for name, parameter in parameters.items() if parameter.default is parameter.empty]
    missing = [name for name in needed if name not in values and parameters[name].kind not in (2, 4)]  # *args, **kwargs
    if missing:
        raise ValueError(f"{who}: needs {', '.join(missing)}, such as {{{who.split()[-1]}: {{{missing[0]}: ...}}}}")
    return found(**values)
