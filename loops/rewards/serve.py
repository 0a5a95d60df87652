"""The other end of `isolated`: a process that answers one call after the other.

It is run as a file, so that it imports no more than what it is sent: math equivalence starts in a second, and torch
alone takes several, and hundreds of megabytes.
"""

import asyncio
import importlib.util
import inspect
import os
import pickle
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any


def serve(connection: Connection) -> None:
    """Receive a function, then arguments, and send (whether it returned, what it returned or its traceback)."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    function: Any = None
    received = connection.recv_bytes()
    while True:
        try:
            asked = connection.recv_bytes()
        except EOFError:
            return
        try:
            function = function or pickle.loads(received)
            value = function(*pickle.loads(asked))
            answer = pickle.dumps((True, asyncio.run(_result(value)) if inspect.isawaitable(value) else value))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        connection.send_bytes(answer)


def postpone(package: str) -> None:
    """Import a package, and run its ``__init__`` when something of it is asked for: ours import torch."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.loader is not None
    load = spec.loader.exec_module
    module = importlib.util.module_from_spec(spec)

    def attribute(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        del module.__dict__["__getattr__"]
        load(module)
        return getattr(module, name)

    module.__dict__["__getattr__"] = attribute
    sys.modules[package] = module


async def _result(value: Any) -> Any:
    return await value


def _end_with(parent: int) -> None:
    """A parent that was killed can't end its children."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


if __name__ == "__main__":
    for name in sys.argv[2:]:
        postpone(name)
    serve(Connection(int(sys.argv[1])))
