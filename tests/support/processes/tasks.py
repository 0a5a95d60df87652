"""Functions for another process, in a module that it can import: return, fail, or hang."""

import time


def returns(value):
    return value


def no_memory():
    raise RuntimeError("no room for the truth")


def sleeps():
    time.sleep(60)
