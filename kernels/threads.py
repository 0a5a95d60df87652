"""Tiles of logits on the threads of a CPU, each tile on one of them.

A product that all threads share ends with the last of them, and so does a pass. Beside a busy core
one thread is late at every end, and the others wait. Here a thread that has done a tile takes the
next one, so that a slow thread does fewer.

Sums don't depend on which thread is quick: the tiles of a block of rows are done in the order of
the vocabulary, those of a span of the vocabulary in the order of the rows. Threads take tiles along
diagonals, on which none waits for another.
"""

import functools
import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

import torch

# rows of a tile: with fewer, products run slower
FEWEST_ROWS = 64
# A slow thread may be so many tiles behind before others wait for it, for each thread.
ABREAST = 2


def block_rows(n: int, threads: int, rows: int) -> int:
    """How many of ``n`` rows a tile has if each of several threads works on one of its own; 0 if
    there are too few rows for them, or too many threads.

    Args:
        rows: of the tiles of all threads together.
    """
    most = rows // threads
    fewest_blocks = ABREAST * threads
    if threads == 1 or most < FEWEST_ROWS or n < fewest_blocks * FEWEST_ROWS:
        return 0
    blocks = max(fewest_blocks, -(-n // most))
    return -(-n // blocks // FEWEST_ROWS) * FEWEST_ROWS


def diagonals(blocks: int, spans: int, abreast: int) -> list[tuple[int, int]]:
    """Every tile, as the numbers of its block of rows and of its span of the vocabulary; it comes
    ``abreast`` places after the tile above it and the one left of it.

    ``abreast`` spans are under way at once, each a block of rows behind the one before it.
    """

    def place(tile: tuple[int, int]) -> tuple[int, int]:
        block, span = tile
        group, behind = divmod(span, abreast)
        return group * blocks + block + behind, span

    return sorted(itertools.product(range(blocks), range(spans)), key=place)


def for_each_tile(
    blocks: int, spans: int, threads: int, work: Callable[[int, int, int], None]
) -> None:
    """``work(thread, block, span)`` for every tile, after the tile above it and the one left of it.

    Raises:
        Exception: that ``work`` has raised, when every thread has ended.
    """
    order = iter(diagonals(blocks, spans, min(ABREAST * threads, blocks)))
    # a mode of the calling thread is none of the others
    inference = torch.is_inference_mode_enabled()
    done: set[tuple[int, int]] = set()
    failed: list[BaseException] = []
    changed = threading.Condition()

    def may_begin(block: int, span: int) -> bool:
        above = block == 0 or (block - 1, span) in done
        left = span == 0 or (block, span - 1) in done
        return (above and left) or bool(failed)

    def work_on_tiles(thread: int) -> None:
        while True:
            with changed:
                tile = next(order, None)
                if tile is None:
                    return
                changed.wait_for(functools.partial(may_begin, *tile))
                if failed:
                    return
            work(thread, *tile)
            with changed:
                done.add(tile)
                changed.notify_all()

    def run(thread: int) -> None:
        try:
            with torch.inference_mode(inference), torch.no_grad():
                work_on_tiles(thread)
        except BaseException as error:
            with changed:
                failed.append(error)
                changed.notify_all()

    pool = _pool(threads, os.getpid())
    wait([pool.submit(run, thread) for thread in range(threads)])
    if failed:
        raise failed[0]


@functools.cache
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """Threads on which torch starts no others; a forked ``process`` has none of its parent's."""
    started = threading.Barrier(threads + 1)

    def start() -> None:
        torch.get_num_threads()  # otherwise the first operator would undo the next line
        torch.set_num_threads(1)  # of this thread, and of threads to come
        started.wait()

    pool = ThreadPoolExecutor(threads, "burnish-tiles", initializer=start)
    for _ in range(threads):
        pool.submit(int)
    started.wait()
    torch.set_num_threads(threads)  # of threads to come, as it was
    return pool
