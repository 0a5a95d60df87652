"""A vocabulary split over ranks gives what the whole one gives, on every rank."""

from pathlib import Path
from typing import Any

import pytest
import shards
import torch
from burnish.kernels import Shard
from forked import run_forked
from heads import CASES, in_dtype, logprobs

SPLIT_ROWS = {"d_weight", "d_bias", "d_B"}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank has found."""
    directory = tmp_path_factory.mktemp("shards")
    for status, printed in run_forked(3, "shards", str(directory)):
        assert status == 0, printed
    return [torch.load(Path(directory, f"{rank}.pt")) for rank in range(3)]


@pytest.mark.parametrize("threads", ["one thread", "two threads"])
@pytest.mark.parametrize("name", shards.SPLIT)
def test_shards_together_are_the_whole(
    results: list[dict[str, Any]], name: str, threads: str
) -> None:
    whole = shards.measured(in_dtype(shards.SPLIT[name], torch.float64))
    ranks = [result[threads][name] for result in results]
    for output, expected in whole.items():
        if output in SPLIT_ROWS:
            found = torch.cat([rank[output] for rank in ranks])
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-11)
            continue
        for rank in ranks:
            torch.testing.assert_close(rank[output], expected, rtol=1e-12, atol=1e-11, msg=output)


def test_each_rank_takes_the_road_of_threads(results: list[dict[str, Any]]) -> None:
    assert [result["passes on threads"] for result in results] == [2 * len(shards.SPLIT)] * 3


def test_a_target_that_no_shard_holds_is_an_error_on_every_rank(
    results: list[dict[str, Any]],
) -> None:
    for result in results:
        assert "every target must be in the shard of one rank, 1 of 63 are not" in result["error"]


def test_what_a_shard_can_not_be() -> None:
    group: Any = None
    with pytest.raises(ValueError, match="shard must start at >= 0, got -1"):
        logprobs(CASES["plain"], shard=Shard(group, -1))
    with pytest.raises(ValueError, match="backend='reference' knows neither shards nor main_grad"):
        logprobs(CASES["plain"], shard=Shard(group, 0), backend="reference")
