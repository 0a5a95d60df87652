"""Exports that are imported on first use (PEP 562), so that naming a package does not load torch
and transformers.
"""

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def lazy_exports(package: str) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package whose ``__init__`` imports its exports under
    ``if TYPE_CHECKING:``.

    Type checkers and editors read those imports; at run time each import happens when its name is
    first used. ``__all__`` is all of their names.
    """
    module = sys.modules[package]
    source = {
        alias.asname or alias.name: ("." * node.level + (node.module or ""), alias.name)
        for block in ast.parse(Path(str(module.__file__)).read_text()).body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    def __getattr__(name: str) -> Any:
        if name == "__all__":
            return sorted(source)
        if name not in source:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        path, attribute = source[name]
        value = getattr(import_module(path, package), attribute)
        setattr(module, name, value)
        return value

    vars(module)["__dir__"] = lambda: sorted({*vars(module), *source})  # what a notebook completes
    return __getattr__
