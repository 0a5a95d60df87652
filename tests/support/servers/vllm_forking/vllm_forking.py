"""A plugin of vLLM's for tests: the processes of a server are forked from its first one, as they
are on GPUs.

On CPUs vLLM starts them anew, and each of the two imports vLLM for ten seconds.
"""

import multiprocessing

_context = multiprocessing.get_context


def register():
    multiprocessing.get_context = lambda method=None: _context(
        "fork" if method == "spawn" else method
    )
