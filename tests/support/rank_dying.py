"""The command on several ranks, of which one is killed after some time, at whatever it then does."""

import os
import signal
import threading
import time
from pathlib import Path

from burnish.loops.cli import main
from burnish.loops.recipes import grpo, ppo  # noqa: F401  imports take seconds, in which nothing is known of ranks


def be_rank(recipe, fields, mortal, seconds):
    """Exit with the command's status; prints for how long this rank outlived the other one."""
    note = Path(f"{fields['output']}.died")

    def die():
        note.write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)

    if int(os.environ["RANK"]) == mortal:
        timer = threading.Timer(seconds, die)
        timer.daemon = True
        timer.start()
    status = main([recipe, *(f"--{name}={value}" for name, value in fields.items())])
    outlived = time.time() - float(note.read_text()) if note.exists() else 0.0
    print(f"outlived it by {outlived:.1f} s with status {status}")
