"""Fixtures for the objectives: their shapes are checked by jaxtyping in tests, which is not what a
user meets.
"""

from collections.abc import Iterator

import jaxtyping
import pytest


@pytest.fixture
def as_users_run_it() -> Iterator[None]:
    """Without the type checks of the test suite, so that our own errors are the ones that show."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
