"""Measurements in order: as many as fit into the time, none twice, and none of a provider that was
given up.
"""

import json
import time

import pytest
from burnish.benchmarks.gpu import chain as chains
from burnish.benchmarks.gpu.chain import Book, Unit, attempted, chain, version
from burnish.benchmarks.worker import Lost, Worker
from tasks import no_memory, returns, sleeps


class Time:
    """A clock that goes on when something is measured."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def run(tmp_path):
    """Runs units, each of which takes the seconds in its arguments, with a fresh book of the same
    file.
    """

    def run(units, minutes, attempt=None):
        clock, order = Time(), []

        def take(unit, limit):
            order.append((unit.case, unit.provider))
            seconds = unit.arguments[0]
            clock.now += min(seconds, limit)
            status = "done" if seconds <= limit else "cut"
            return {
                "status": status,
                "found": {},
                "took": min(seconds, limit),
                "reason": "too long",
            }

        book = Book(tmp_path / "gpu.jsonl", "cpu")
        rest = chain(
            units, book, lambda: 60 * minutes - clock(), attempt or take, lambda record: None
        )
        return order, [(unit.case, unit.provider) for unit in rest], book

    return run


def unit(case, provider, seconds, *, guess=None, setup=0.0, part="head"):
    return Unit(part, case, provider, seconds if guess is None else guess, setup, None, (seconds,))


def test_what_does_not_fit_is_left_and_the_next_call_goes_on_there(run):
    units = [unit("a", "x", 40), unit("a", "y", 30), unit("b", "x", 15)]
    order, rest, _ = run(units, 1)
    # 30 do not fit after 40, 15 do
    assert order == [("a", "x"), ("b", "x")] and rest == [("a", "y")]
    order, rest, _ = run(units, 1)
    assert order == [("a", "y")] and rest == []
    assert run(units, 1)[:2] == ([], [])


def test_what_a_case_needs_before_it_is_counted_once(run):
    units = [
        unit("a", "x", 10, setup=25),
        unit("a", "y", 10, setup=25),
        unit("b", "x", 10, setup=25),
    ]
    order, rest, _ = run(units, 44 / 60)
    # each takes 10; guessed are 35, 10, 35
    assert order == [("a", "x"), ("a", "y")] and rest == [("b", "x")]


def test_no_time_measures_nothing_and_leaves_all(run):
    assert run([unit("a", "x", 1)], 0)[:2] == ([], [("a", "x")])


def test_a_unit_that_takes_longer_than_guessed_is_cut_and_gets_more_time_later(run):
    units = [unit("a", "x", 50, guess=10)]
    order, rest, book = run(units, 0.5)
    assert order == rest == [("a", "x")]
    assert book.estimate(units[0], 10) == 45  # half as much again as the 30 that were not enough
    # it does not fit, and does not cost the time of the others
    assert run(units, 0.5)[:2] == ([], [("a", "x")])
    assert run(units, 1)[:2] == ([("a", "x")], [])


def test_guesses_are_corrected_by_what_the_others_took(run):
    units = [unit("a", str(i), 20, guess=10) for i in range(5)]
    *_, book = run(units[:4], 9)
    assert book.estimate(units[4], 10) == 20


def test_new_code_of_ours_is_measured_again_and_the_peers_are_not(run, tmp_path, monkeypatch):
    for room in ("benchmarks/gpu", "kernels", "objectives"):
        (tmp_path / "tree" / room).mkdir(parents=True)
    for name in ("measure", "operation", "kernels", "gpu/ceilings"):
        (tmp_path / "tree" / "benchmarks" / f"{name}.py").write_text(name)
    kernel = tmp_path / "tree" / "kernels" / "passes.py"
    kernel.write_text("old")
    monkeypatch.setattr(chains, "ROOT", tmp_path / "tree")
    version.cache_clear()
    units = [unit("a", "burnish-torch", 1), unit("a", "naive", 1)]
    assert len(run(units, 1)[0]) == 2
    kernel.write_text("new")
    version.cache_clear()
    assert run(units, 1)[0] == [("a", "burnish-torch")]
    kernel.write_text("old")
    version.cache_clear()
    order, _, book = run(units, 1)
    assert order == [] and len(book.records) == 2  # that of the old code is still there
    (tmp_path / "tree" / "benchmarks" / "measure.py").write_text("other rules")
    version.cache_clear()
    assert len(run(units, 1)[0]) == 2
    monkeypatch.undo()
    version.cache_clear()


def test_another_device_is_another_measurement(monkeypatch):
    monkeypatch.setattr(chains.torch.cuda, "get_device_name", lambda device: "H200")
    assert version("naive", "cpu") != version("naive", "cuda")
    version.cache_clear()


def test_a_line_that_was_cut_off_is_measured_again_and_spoils_no_other(run, tmp_path):
    units = [unit("a", name, 1) for name in "xyz"]
    run(units[:2], 1)
    path = tmp_path / "gpu.jsonl"
    path.write_text(path.read_text()[:-20])
    assert run(units, 1)[0] == [("a", "y"), ("a", "z")]
    assert [json.loads(line)["provider"] for line in path.read_text().splitlines()] == [
        "x",
        "y",
        "z",
    ]


def test_a_provider_that_hangs_once_or_crashes_twice_costs_no_more_time(run):
    def attempt(unit, limit):
        if unit.provider == "fine":
            return {"status": "done", "found": {}, "took": 1}
        return {"status": "lost", "reason": "gone", "silent": unit.provider == "hangs", "took": 1}

    asked = []
    units = [unit(case, name, 1) for case in "abc" for name in ("hangs", "crashes", "fine")]
    _, rest, book = run(
        units,
        9,
        lambda unit, limit: asked.append((unit.case, unit.provider)) or attempt(unit, limit),
    )
    assert asked == [
        ("a", "hangs"),
        ("a", "crashes"),
        ("a", "fine"),
        ("b", "crashes"),
        ("b", "fine"),
        ("c", "fine"),
    ]
    assert rest == []
    given_up = {"hangs": "head, a: gone", "crashes": "head, a: gone; head, b: gone"}
    assert book.given_up() == given_up
    again, _, book = run(units, 9)
    assert again == [] and book.given_up() == given_up


def test_an_error_is_tried_again_by_the_next_call_and_a_row_that_failed_too(run):
    failed = {"status": "done", "found": [{"rows": [{"status": "failed"}]}], "took": 1}
    found = iter([{"status": "failed", "reason": "KeyError()", "took": 1}, failed])
    units = [unit("a", "x", 1), unit("a", "y", 1)]
    assert run(units, 1, lambda unit, limit: next(found))[1] == []  # not left: it would fail again
    assert run(units, 1)[0] == [("a", "x"), ("a", "y")]
    assert run(units, 1)[0] == []


@pytest.mark.slow
def test_each_way_to_end_is_a_record():
    worker = Worker()

    def record(function, *arguments, worker=worker, limit=60.0):
        measured = Unit("head", "a", "x", 0.5, 1, function, arguments)
        found = attempted(worker, measured, limit, patience=1.5, clock=time.monotonic)
        return found["status"], found.get("found", found.get("reason"))

    try:
        assert record(returns, 7) == ("done", 7)
        assert record(no_memory) == ("failed", "RuntimeError: no room for the truth")
        assert record(sleeps) == ("lost", "no answer in 1.5 s")
        assert record(returns, 8) == ("done", 8)
        assert record(sleeps, limit=1.0) == ("cut", "not done after 1 s")
    finally:
        worker.close()
    here = Worker(isolated=False)
    assert record(returns, 9, worker=here) == ("done", 9)
    assert record(no_memory, worker=here) == ("failed", "RuntimeError('no room for the truth')")

    def lost():
        raise Lost("gone")

    assert record(lost, worker=here) == ("lost", "gone")
