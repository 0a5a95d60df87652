"""Providers of the head for another process: they crash, hang, are broken where they are imported,
or work.
"""

import os
import signal
import time

from burnish.benchmarks.kernels import naive
from burnish.benchmarks.operation import Provider


def dies(hidden, weight, target):
    os.kill(os.getpid(), signal.SIGSEGV)


def hangs(hidden, weight, target):
    time.sleep(1000)


def well(hidden, weight, target):
    return naive(hidden, weight, target, ("logprob",))[0]


broken = Provider("danger:broken", naive, missing=lambda device: os._exit(5))
stuck = Provider("danger:stuck", naive, missing=lambda device: time.sleep(1000))
