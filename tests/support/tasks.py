"""What a process is given to do, in a module that it can import: return, fail, or hang."""

import time


def returns(value, notice):
    notice("it")
    return value


def no_memory(notice):
    raise RuntimeError("no room for the truth")


def sleeps(notice):
    notice("sleeper")
    time.sleep(60)
