"""Products of parameters of which a part runs by default, and the rest where slow tests do."""

import itertools
from collections import Counter

import pytest


def slow(*values):
    """A parameter of `pytest.mark.parametrize` that runs where slow tests do."""
    return pytest.param(*values, marks=pytest.mark.slow)


def exhaustive(*values):
    """One that runs where it is asked for: others stand for it, where slow tests run."""
    return pytest.param(*values, marks=pytest.mark.exhaustive)


def covering(factors, strength):
    """Combinations in which all values of any ``strength`` factors meet at least once."""
    places = list(itertools.combinations(range(len(factors)), strength))

    def meetings(combination):
        return {(where, tuple(combination[i] for i in where)) for where in places}

    combinations = list(itertools.product(*(range(len(values)) for values in factors)))
    missing, chosen, uses = set().union(*map(meetings, combinations)), [], Counter()

    def gain(combination):
        return len(meetings(combination) & missing), -sum(
            uses[place] for place in enumerate(combination)
        )

    while missing:
        # most new meetings, and of those the values that were taken least
        best = max(combinations, key=gain)
        missing -= meetings(best)
        uses.update(enumerate(best))
        chosen.append(best)
    return chosen


def grid(*, strength, **factors):
    """Parametrize by the product of the factors; what a covering set of this strength can do
    without is slow.
    """
    names, values = ",".join(factors), [list(choices) for choices in factors.values()]
    chosen = covering(values, strength)
    parameters = [
        pytest.param(
            *(values[i][k] for i, k in enumerate(combination)),
            marks=[] if combination in chosen else pytest.mark.slow,
        )
        for combination in itertools.product(*(range(len(choices)) for choices in values))
    ]
    return pytest.mark.parametrize(names, parameters)
