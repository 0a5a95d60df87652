"""Tiles on several threads of a CPU give the same numbers, whichever thread is quick."""

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pairs
import pytest
import torch
from burnish.kernels import divergence_passes, passes, threads
from burnish.kernels.head import Head, HeadFactors
from grids import grid
from heads import CASES, assert_as_good_as_the_reference, in_dtype, logprobs, measure, total
from torch import Tensor


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Small tiles on two threads; the thread that each tile was worked on, in a list."""
    monkeypatch.setattr(threads, "FEWEST_ROWS", 4)
    monkeypatch.setattr(passes, "THREADS_FROM", 0)
    for name, size in {"ROWS": 24, "COLUMNS": 32, "KEEP": 20_000}.items():
        monkeypatch.setattr(passes, name, size)
        monkeypatch.setattr(divergence_passes, name, size)
    worked: list[int] = []
    for_each_tile = passes.for_each_tile

    def counted(blocks: int, spans: int, count: int, work: Callable[..., None]) -> None:
        def work_and_count(thread: int, *tile: int) -> None:
            worked.append(thread)
            work(thread, *tile)

        for_each_tile(blocks, spans, count, work_and_count)

    monkeypatch.setattr(passes, "for_each_tile", counted)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield worked
    torch.set_num_threads(before)


WIDE = [case for case in CASES if len(CASES[case]["hidden"]) > 16]


@grid(strength=2, case=WIDE, dtype=[torch.float64, torch.float32], keep=[0, 20_000, 2**30])
def test_tiles_on_two_threads_are_as_close_to_float64_as_the_reference(
    case: str,
    dtype: torch.dtype,
    keep: int,
    two_threads: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(passes, "KEEP", keep)
    assert_as_good_as_the_reference(CASES[case], dtype)
    size = CASES[case].get("vocab", len(CASES[case]["weight"]))
    rows = threads.block_rows(len(CASES[case]["hidden"]), 2, 24)
    tiles = -(-len(CASES[case]["hidden"]) // rows) * -(-size // 32)
    assert len(two_threads) == 2 * tiles  # forward and backward


PAIRS = [case for case in pairs.CASES if len(pairs.CASES[case]["student_hidden"]) > 16]


@grid(
    strength=2,
    case=PAIRS,
    beta=pairs.BETAS,
    dtype=[torch.float64, torch.float32],
    keep=[0, 40_000, 2**30],
)
def test_divergences_on_two_threads_are_as_close_to_float64_as_the_reference(
    case: str,
    beta: float,
    dtype: torch.dtype,
    keep: int,
    two_threads: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(divergence_passes, "KEEP", keep)
    pairs.assert_as_good_as_the_reference(pairs.CASES[case], beta, dtype)
    given = pairs.CASES[case]
    rows = threads.block_rows(len(given["student_hidden"]), 2, 24)
    size = given.get("vocab") or len(given["student"].weight)
    tiles = -(-len(given["student_hidden"]) // rows) * -(-size // 32)
    passes_over_tiles = 3 if 0 < beta < 1 else 2
    assert len(two_threads) == passes_over_tiles * tiles


@pytest.mark.parametrize("case", ["plain", "everything"])
def test_the_numbers_do_not_depend_on_which_thread_is_quick(
    case: str, two_threads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = CASES[case] | {"outputs": ("rank", "mean_logprob"), "top_k": 3}
    expected = measure(in_dtype(given, torch.float32), "torch")
    logits = HeadFactors.logits
    for seed in range(3):
        lots = random.Random(seed)

        def late(*arguments: Any, lots: random.Random = lots) -> Tensor:
            time.sleep(lots.choice([0, 0.002]))
            return logits(*arguments)

        monkeypatch.setattr(HeadFactors, "logits", late)
        for name, found in measure(in_dtype(given, torch.float32), "torch").items():
            torch.testing.assert_close(found, expected[name], rtol=0, atol=0)
    assert set(two_threads) == {0, 1}


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_a_divergence_does_not_depend_on_which_thread_is_quick(
    beta: float, two_threads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = pairs.in_dtype(pairs.CASES["everything"], torch.float32)
    expected = pairs.measure(given, "torch", beta=beta)
    logits = HeadFactors.logits
    lots = random.Random(0)

    def late(*arguments: Any) -> Tensor:
        time.sleep(lots.choice([0, 0.002]))
        return logits(*arguments)

    monkeypatch.setattr(HeadFactors, "logits", late)
    again = pairs.in_dtype(pairs.CASES["everything"], torch.float32)
    for name, found in pairs.measure(again, "torch", beta=beta).items():
        torch.testing.assert_close(found, expected[name], rtol=0, atol=0)
    assert set(two_threads) == {0, 1}


@pytest.mark.parametrize("with_gradient", [0.5, 1.0])
def test_rows_without_a_gradient_are_left_out(with_gradient: float, two_threads: list[int]) -> None:
    weights = (torch.arange(63) < 63 * with_gradient).double()
    ours, exact = in_dtype(CASES["bias"], torch.float64), in_dtype(CASES["bias"], torch.float64)
    for given, backend in ((ours, "torch"), (exact, "reference")):
        (logprobs(given, backend=backend).logprob * weights).sum().backward()
    for name in ("hidden", "weight", "bias"):
        torch.testing.assert_close(ours[name].grad, exact[name].grad, rtol=1e-12, atol=1e-11)


def test_gradients_are_added_to_a_buffer(two_threads: list[int]) -> None:
    ours, exact = in_dtype(CASES["plain"], torch.float64), in_dtype(CASES["plain"], torch.float64)
    buffer = torch.ones_like(ours["weight"], requires_grad=False)
    total(logprobs(ours, main_grad=buffer)).backward()
    total(logprobs(exact, backend="reference")).backward()
    torch.testing.assert_close(buffer - 1, exact["weight"].grad, rtol=1e-12, atol=1e-11)
    assert ours["weight"].grad is None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_threads_work_without_gradients_too(
    mode: type[torch.no_grad], two_threads: list[int]
) -> None:
    given = in_dtype(CASES["plain"], torch.float64)
    with mode():
        found = logprobs(given)
    torch.testing.assert_close(found.logprob, logprobs(given, backend="reference").logprob)
    assert two_threads


def factors(n: int = 1000, dtype: torch.dtype = torch.float32, **options: Any) -> HeadFactors:
    given = Head(torch.zeros(100, 4, dtype=dtype), bias=options.pop("bias", None))
    return HeadFactors.of(torch.zeros(n, 4), given, **options)


@pytest.mark.usefixtures("two_threads")
def test_where_each_thread_works_on_a_tile_of_its_own() -> None:
    assert passes.threads_for(factors(), 10, passes.ROWS) == 2
    assert passes.threads_for(factors(n=3), 10, passes.ROWS) == 1
    assert passes.threads_for(factors(dtype=torch.bfloat16), 10, passes.ROWS) == 1
    assert (
        passes.threads_for(factors(bias=torch.zeros(100, dtype=torch.bfloat16)), 10, passes.ROWS)
        == 1
    )
    assert passes.threads_for(factors(compute_dtype=torch.bfloat16), 10, passes.ROWS) == 1
    elsewhere = factors()._replace(hidden=torch.zeros(1000, 4, device="meta"))
    assert passes.threads_for(elsewhere, 10, passes.ROWS) == 1
    torch.set_num_threads(1)
    assert passes.threads_for(factors(), 10, passes.ROWS) == 1


def test_small_calls_share_each_tile() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    assert passes.threads_for(factors(), passes.THREADS_FROM - 1, passes.ROWS) == 1
    assert passes.threads_for(factors(), passes.THREADS_FROM, passes.ROWS) == 2
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("n", "count", "rows"),
    [
        (2048, 2, 512),
        (2100, 2, 448),  # five blocks of equal height, but for the last one
        (1400, 2, 384),  # four blocks, so that no thread waits
        (256, 2, 64),
        (255, 2, 0),
        (2048, 1, 0),
        (2048, 4, 256),
        (2048, 16, 64),
        (2047, 16, 0),
        (4096, 17, 0),
    ],
)
def test_rows_of_a_tile_leave_several_blocks_to_each_thread(n: int, count: int, rows: int) -> None:
    assert threads.block_rows(n, count, 1024) == rows


@pytest.mark.parametrize(("blocks", "spans", "count"), [(4, 7, 2), (1, 5, 2), (5, 1, 3), (9, 9, 4)])
def test_every_tile_comes_after_its_neighbors(blocks: int, spans: int, count: int) -> None:
    lots, lock = random.Random(0), threading.Lock()
    ended: list[tuple[int, int]] = []

    def work(thread: int, block: int, span: int) -> None:
        with lock:
            assert block == 0 or (block - 1, span) in ended
            assert span == 0 or (block, span - 1) in ended
        time.sleep(lots.choice([0, 0.001]))
        with lock:
            ended.append((block, span))

    threads.for_each_tile(blocks, spans, count, work)
    assert sorted(ended) == [(block, span) for block in range(blocks) for span in range(spans)]


def test_a_slow_thread_does_fewer_tiles() -> None:
    done = Counter[int]()

    def work(thread: int, block: int, span: int) -> None:
        time.sleep(0.01 if thread == 0 else 0.001)
        done[thread] += 1

    threads.for_each_tile(4, 12, 2, work)
    assert done[1] > 2 * done[0] > 0


def test_an_error_on_a_thread_ends_all_of_them() -> None:
    def work(thread: int, block: int, span: int) -> None:
        if (block, span) == (1, 1):
            raise ValueError("of this tile")

    with pytest.raises(ValueError, match="of this tile"):
        threads.for_each_tile(4, 12, 2, work)
    done: list[int] = []
    threads.for_each_tile(2, 2, 2, lambda thread, *tile: done.append(thread))
    assert len(done) == 4


def test_on_a_thread_torch_starts_no_others() -> None:
    def seen() -> list[int]:
        found: list[int] = []
        other = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        other.start()
        other.join()
        return found

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    threads._pool.cache_clear()
    found: list[int] = []

    def work(*_: int) -> None:
        torch.zeros(2**16).add_(1)  # an operator that several threads would share
        found.append(torch.get_num_threads())

    threads.for_each_tile(3, 3, 3, work)
    assert found == [1] * 9
    assert torch.get_num_threads() == 3
    assert seen() == [3]
    torch.set_num_threads(before)


def test_a_forked_process_has_threads_of_its_own() -> None:
    threads.for_each_tile(2, 2, 2, lambda *_: None)
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        done: list[int] = []
        threads.for_each_tile(2, 2, 2, lambda thread, *tile: done.append(thread))
        os._exit(len(done))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
