import random
import time

import numpy as np
import pytest
from burnish.data import Batches, balanced, first_fit, token_cost
from datasets import Dataset


def cases(count: int):
    """Seeded settings of every kind: few and many ranks, tight and loose budgets, batches larger
    than the data.
    """
    draw = random.Random(0)
    for _ in range(count):
        size = draw.randint(1, 40)
        yield {
            "lengths": [draw.randint(1, 30) for _ in range(size)],
            "batch_size": draw.randint(1, 50),
            "micro_tokens": draw.choice([None, 1, 20, 64, 1000]),
            "seed": draw.randint(0, 5),
            "shuffle": draw.random() < 0.7,
            "ranks": draw.choice([1, 2, 3, 8]),
            "epochs": draw.randint(1, 4),
        }


CASES = list(cases(40))


def flat(plan) -> list[int]:
    return [index for rank in plan for micro in rank for index in micro]


@pytest.mark.parametrize("case", CASES)
def test_every_epoch_has_every_example_exactly_once(case) -> None:
    batches = Batches(**case)
    stream = [index for step in range(len(batches)) for index in batches.indices(step)]
    size = len(case["lengths"])
    assert len(stream) == size * case["epochs"]
    for epoch in range(case["epochs"]):
        assert sorted(stream[epoch * size : (epoch + 1) * size]) == list(range(size))


@pytest.mark.parametrize("case", CASES)
def test_a_plan_holds_the_examples_of_its_step_and_nothing_else(case) -> None:
    batches = Batches(**case)
    for step in range(len(batches)):
        assert sorted(flat(batches.plan(step))) == sorted(batches.indices(step))


@pytest.mark.parametrize("case", CASES)
def test_a_micro_batch_keeps_to_the_budget_unless_one_example_alone_does_not(case) -> None:
    batches = Batches(**case)
    for step in range(len(batches)):
        for rank in batches.plan(step):
            for micro in rank:
                cost = sum(case["lengths"][index] for index in micro)
                assert (
                    case["micro_tokens"] is None or cost <= case["micro_tokens"] or len(micro) == 1
                )


@pytest.mark.parametrize("case", CASES)
def test_every_rank_has_as_many_micro_batches_and_none_is_empty_on_all(case) -> None:
    batches = Batches(**case)
    for step in range(len(batches)):
        plan = batches.plan(step)
        assert len(plan) == case["ranks"]
        assert len({len(rank) for rank in plan}) == 1
        assert all(any(micros) for micros in zip(*plan, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_ranks_differ_by_no_more_than_one_example(case) -> None:
    batches = Batches(**case)
    for step in range(len(batches)):
        load = [
            sum(case["lengths"][i] for micro in rank for i in micro) for rank in batches.plan(step)
        ]
        assert max(load) - min(load) <= max(
            case["lengths"][index] for index in batches.indices(step)
        )


def test_a_step_is_the_same_whether_or_not_the_steps_before_it_ran() -> None:
    settings = {
        "lengths": list(range(1, 24)),
        "batch_size": 5,
        "micro_tokens": 30,
        "seed": 3,
        "epochs": 7,
        "ranks": 2,
    }
    unbroken = Batches(**settings)
    plans = [unbroken.plan(step) for step in range(len(unbroken))]
    for step in (17, 2, len(plans) - 1):
        assert Batches(**settings).plan(step) == plans[step]


def test_the_order_depends_on_seed_and_epoch() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return Batches([1] * 50, batch_size=50, micro_tokens=None, seed=seed, epochs=2).indices(
            epoch
        )

    assert order(0, 0) != order(1, 0)
    assert order(0, 0) != order(0, 1)
    assert order(0, 0) != order(1, 1) != order(0, 1)


def test_the_shuffled_order_stays_what_it_is() -> None:
    """A run that is resumed after an upgrade goes on with the same data."""
    assert Batches([1] * 10, batch_size=10, micro_tokens=None, seed=0, epochs=1).indices(0) == [
        *(0, 8, 9, 3, 7, 5, 1, 2, 6, 4)
    ]


def test_without_shuffling_one_rank_sees_the_order_of_the_data() -> None:
    batches = Batches(
        [5, 1, 9, 2, 2], batch_size=2, micro_tokens=None, seed=0, shuffle=False, epochs=2
    )
    assert [batches.plan(step) for step in range(len(batches))] == [
        [[[0, 1]]],
        [[[2, 3]]],
        [[[4, 0]]],
        [[[1, 2]]],
        [[[3, 4]]],
    ]


def test_an_epochs_tail_continues_into_the_next_and_only_the_last_step_is_short() -> None:
    batches = Batches([1] * 10, batch_size=4, micro_tokens=None, seed=0, epochs=3)
    assert [len(batches.indices(step)) for step in range(len(batches))] == [4] * 7 + [2]


def test_steps_go_on_over_as_many_epochs_as_they_take() -> None:
    batches = Batches([1] * 3, batch_size=8, micro_tokens=None, seed=0, steps=5)
    assert len(batches) == 5
    assert all(len(batches.indices(step)) == 8 for step in range(5))


def test_micro_batches_are_evenly_filled() -> None:
    batches = Batches(
        [6, 6, 6, 1, 1, 1], batch_size=6, micro_tokens=12, seed=0, shuffle=False, epochs=1
    )
    (rank,) = batches.plan(0)
    assert sorted(sum([6, 6, 6, 1, 1, 1][i] for i in micro) for micro in rank) == [9, 12]


def test_the_budget_comes_before_evenness() -> None:
    lengths = [3, 3, 2, 2, 2]  # longest first to the emptier one would fill 7 and 5
    batches = Batches(lengths, batch_size=5, micro_tokens=6, seed=0, shuffle=False, epochs=1)
    assert batches.plan(0) == [[[0, 1], [2, 3, 4]]]


def spread_by_definition(positions, cost, bins):
    """Longest first, each to the bin with the least so far; of equal ones the one with the fewest,
    then the first.
    """
    filled, load = [[] for _ in range(bins)], [0] * bins
    for position in sorted(positions, key=lambda p: -cost[p]):
        lightest = min(range(bins), key=lambda b: (load[b], len(filled[b])))
        filled[lightest].append(position)
        load[lightest] += cost[position]
    return [sorted(part) for part in filled]


def first_fit_by_definition(positions, cost, limit):
    filled, load = [], []
    for position in sorted(positions, key=lambda p: -cost[p]):
        fits = next(
            (b for b in range(len(filled)) if load[b] + cost[position] <= limit), len(filled)
        )
        if fits == len(filled):
            filled.append([])
            load.append(0)
        filled[fits].append(position)
        load[fits] += cost[position]
    return filled


def balanced_by_definition(cost, ranks, micro_tokens):
    packed = [
        [share] if micro_tokens is None else first_fit_by_definition(share, cost, micro_tokens)
        for share in spread_by_definition(range(len(cost)), cost, ranks)
    ]
    count = max(1, *map(len, packed))
    plan = []
    for parts in packed:
        even = spread_by_definition([position for part in parts for position in part], cost, count)
        if micro_tokens and any(
            len(part) > 1 and sum(cost[p] for p in part) > micro_tokens for part in even
        ):
            even = [sorted(part) for part in parts] + [[] for _ in range(count - len(parts))]
        plan.append(sorted(even, key=lambda part: part[0] if part else len(cost)))
    return plan


def random_costs(draw):
    """Of few values and so with many ties, or of many; 0 among them."""
    highest = draw.choice([1, 3, 10, 1000])
    return [draw.randint(0, highest) for _ in range(draw.choice([1, 2, 7, 40, 200]))]


@pytest.mark.parametrize("seed", range(8))
def test_a_plan_is_the_one_that_its_definition_gives(seed) -> None:
    draw = random.Random(seed)
    for _ in range(50):
        cost, ranks = random_costs(draw), draw.choice([1, 2, 3, 8, 64])
        micro_tokens = draw.choice(
            [None, 1, max(cost) + 1, 2 * max(cost) + 1, sum(cost) // ranks + 1, 500]
        )
        assert balanced(cost, ranks, micro_tokens) == balanced_by_definition(
            cost, ranks, micro_tokens
        )


@pytest.mark.parametrize("seed", range(8))
def test_first_fit_is_what_its_definition_gives(seed) -> None:
    draw = random.Random(seed)
    for _ in range(100):
        cost = random_costs(draw)
        positions = draw.sample(range(len(cost)), draw.randint(0, len(cost)))
        limit = draw.choice([1, max(cost) + 1, 3 * max(cost) + 1, 500])
        assert first_fit(positions, cost, limit) == first_fit_by_definition(positions, cost, limit)


@pytest.mark.parametrize("ranks", [1, 8])
def test_the_time_to_plan_a_step_grows_as_its_size_does(ranks) -> None:
    def seconds(size: int) -> float:
        cost = [20 + 37 * i % 1009 for i in range(size)]
        times = []
        for _ in range(3):
            began = time.process_time()
            balanced(cost, ranks, 4096)
            times.append(time.process_time() - began)
        return min(times)

    # 16 times as many; 256 times as long if each looked at each
    assert seconds(32_000) < 100 * seconds(2_000)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": []}, "at least one example"),
        ({"batch_size": 0}, "batch_size must be >= 1, got 0"),
        ({"micro_tokens": 0}, "micro_tokens must be >= 1, got 0"),
        ({"ranks": 0}, "ranks must be >= 1, got 0"),
        ({"seed": -1}, "seed must be >= 0, got -1"),
        ({"steps": 3}, "epochs or steps, one of them"),
        ({"epochs": None}, "epochs or steps, one of them"),
    ],
)
def test_impossible_settings_are_refused(change, message) -> None:
    settings = {
        "lengths": [1, 2],
        "batch_size": 2,
        "micro_tokens": None,
        "seed": 0,
        "epochs": 1,
    } | change
    with pytest.raises(ValueError, match=message):
        Batches(**settings)


def test_a_step_past_the_end_is_refused() -> None:
    batches = Batches([1, 2], batch_size=2, micro_tokens=None, seed=0, epochs=1)
    with pytest.raises(IndexError, match=r"\[0, 1\), got 1"):
        batches.plan(1)


@pytest.mark.parametrize("kept", [None, [2, 0], [1, 2]])
def test_token_cost_counts_a_prompt_once_or_once_per_completion(kept) -> None:
    dataset = Dataset.from_dict(
        {
            "prompt": [[1, 2, 3], [1], [1, 2]],
            "completions": [[[4], [5, 6]], [[7, 8, 9]], [[4, 5], [6], [7, 8, 9]]],
        }
    )
    once, each = np.array([6, 4, 8]), np.array([9, 4, 12])
    if kept is not None:
        dataset, once, each = dataset.select(kept), once[kept], each[kept]
    np.testing.assert_array_equal(token_cost(dataset, shared_prompt=True), once)
    np.testing.assert_array_equal(token_cost(dataset, shared_prompt=False), each)
