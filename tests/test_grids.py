"""The part of a product of parameters that runs by default."""

import itertools
from collections import Counter

from grids import covering


def test_all_values_of_any_two_factors_meet():
    factors = [range(13), range(3), range(3), range(2)]
    chosen = covering(factors, strength=2)
    for i, j in itertools.combinations(range(4), 2):
        assert {(c[i], c[j]) for c in chosen} == set(itertools.product(factors[i], factors[j]))
    assert len(chosen) <= 2 * 13 * 3


def test_with_strength_1_every_value_is_there_and_the_longest_factor_is_enough():
    assert [sorted(set(column)) for column in zip(*covering("abcde", strength=1), strict=True)] == [
        [0]
    ] * 5
    chosen = covering([range(9), range(4)], strength=1)
    assert len(chosen) == 9 and sorted(Counter(c[1] for c in chosen).values()) == [2, 2, 2, 3]
