"""Models are looked for in the cache alone where the Hub is out of reach."""

import os
import socket
from collections.abc import Iterable
from urllib.parse import urlsplit
from urllib.request import getproxies


def go_offline(names: Iterable[object]) -> None:
    """Keep libraries from asking for these models where the Hub has no address: tries take minutes.

    Args:
        names: of models on the Hub or directories; models themselves and None ask for nothing.
    """
    from huggingface_hub import constants

    missing = [name for name in names if isinstance(name, str) and not os.path.exists(name)]
    if not missing or getproxies():  # a proxy looks up the Hub's address itself
        return
    try:
        socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, None)
    except OSError:
        constants.HF_HUB_OFFLINE = True
