"""The settings of recipes beside those that they share."""

from typing import Literal, get_args, get_origin

import pytest
from burnish.loops.config import Settings, _hints
from burnish.loops.recipes import settings
from burnish.loops.recipes.settings import GRPO, SFT

KINDS = [
    each
    for each in vars(settings).values()
    if isinstance(each, type) and issubclass(each, Settings)
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_recipe_with_a_default_of_its_own_keeps_the_range_of_a_setting(kind):
    for base in kind.__mro__[1:]:
        for name, wide in _hints(base).items() if issubclass(base, Settings) else ():
            narrow = _hints(kind)[name]
            choices = get_origin(narrow) is Literal and set(get_args(narrow)) <= set(get_args(wide))
            assert narrow == wide or choices or name == "loss", name


def test_a_range_is_checked_in_every_recipe():
    with pytest.raises(ValueError, match="learning_rate: must be >= 0, got -1"):
        SFT(model="m", data="d", learning_rate=-1.0)


def test_every_schedule_is_one_of_recipes_that_sample():
    assert _hints(GRPO)["schedule"] == _hints(SFT)["schedule"]
