"""A rank of two whose partner never starts."""

import os
import socket

from burnish.loops.cli import main


def be_rank(rank, *arguments):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    os.environ |= {
        "WORLD_SIZE": "2",
        "RANK": rank,
        "LOCAL_RANK": rank,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    os.environ["ACCELERATE_USE_CPU"] = "true"
    assert main([*arguments, "--hang_seconds", "2"]) == 1
