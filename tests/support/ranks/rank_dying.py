"""The command on several ranks, of which one is killed some time after it went to meet the
others.
"""

import os
import signal
import threading
import time
from pathlib import Path
from unittest.mock import patch

from burnish.loops.cli import main
from burnish.loops.recipes import grpo, ppo  # noqa: F401  imports take seconds, in which nothing is known of ranks
from burnish.loops.runs import context


def be_rank(recipe, fields, mortal, seconds):
    """Exit with the command's status; prints for how long this rank waited, at most, for the other
    one.
    """
    note, check, met = Path(f"{fields['output']}.died"), context.check_launcher, []

    def die():
        note.write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)

    def then_check():
        met.append(time.time())
        if int(os.environ["RANK"]) == mortal:
            timer = threading.Timer(seconds, die)
            timer.daemon = True
            timer.start()
        check()

    with patch.object(context, "check_launcher", then_check):
        status = main([recipe, *(f"--{name}={value}" for name, value in fields.items())])
    waited = time.time() - max(float(note.read_text()), met[0]) if note.exists() else 0.0
    print(f"waited for it {waited:.1f} s, status {status}")
