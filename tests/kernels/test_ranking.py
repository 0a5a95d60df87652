"""The likeliest tokens and the rank of the target: counted on the logits of the definition."""

from typing import Any

import pytest
import torch
from burnish.kernels import linear_logprob, logits_logprob
from heads import CASES, in_dtype, logprobs
from torch import Tensor

RANKED = [
    "plain",
    "everything",
    "peaked",
    "all_logits_large",
    "one_column",
    "one_token",
    "padded_vocabulary",
]
ASKED: dict[str, Any] = {"outputs": ("top1", "rank")}


def logits(case: dict[str, Any]) -> Tensor:
    """Up to a factor and a constant in each row."""
    down, up, scaling = case.get("adapter") or (
        torch.zeros(1, 20),
        torch.zeros(len(case["weight"]), 1),
        1.0,
    )
    c = case["hidden"] @ (case["weight"] + scaling * up.double() @ down.double()).T + case.get(
        "bias", 0.0
    )
    return c[:, : case.get("vocab")]


@pytest.mark.parametrize("case", RANKED)
@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.usefixtures("small_tiles")
def test_rank_top1_and_top_k_are_those_of_the_sorted_logits(case: str, backend: str) -> None:
    c, target = logits(CASES[case]), CASES[case]["target"]
    k = min(7, c.shape[1])
    found = logprobs(CASES[case], **ASKED, top_k=k, backend=backend)
    order = c.argsort(1, descending=True)
    assert torch.equal(found.top1, order[:, 0])
    assert torch.equal(found.rank, (order == target[:, None]).int().argmax(1))
    assert torch.equal(found.top_k.ids, order[:, :k])
    several = logprobs(CASES[case] | {"target": order[:, :k]}, backend="reference")
    torch.testing.assert_close(found.top_k.logprob, several.logprob, rtol=1e-12, atol=1e-11)


@pytest.mark.usefixtures("small_tiles")
def test_the_target_of_rank_zero_is_the_likeliest_in_float32_too() -> None:
    case = in_dtype(CASES["plain"], torch.float32)
    likeliest = logprobs(case, outputs=("top1",)).top1
    assert (logprobs(case | {"target": likeliest}, outputs=("rank",)).rank == 0).all()


def test_equal_logits_are_not_above_the_target() -> None:
    found = linear_logprob(
        torch.ones(3, 4), torch.ones(9, 4), torch.tensor([0, 4, 8]), outputs=("rank",)
    )
    assert found.rank.tolist() == [0, 0, 0]


@pytest.mark.usefixtures("small_tiles")
def test_a_forbidden_token_is_never_among_the_likeliest() -> None:
    bias = torch.zeros(100, dtype=torch.float64)
    bias[3:] = -torch.inf
    found = logprobs(CASES["plain"] | {"bias": bias, "target": torch.zeros(63).long()}, top_k=5)
    assert (found.top_k.ids[:, :3].sort(1).values == torch.arange(3)).all()
    assert found.top_k.logprob[:, 3:].isneginf().all()


def test_what_was_not_asked_for_is_none_and_the_rest_has_gradients() -> None:
    case = in_dtype(CASES["plain"], torch.float32)
    found = logprobs(case, outputs=("rank",))
    assert found.top1 is None and found.top_k is None and found.mean_logprob is None
    assert not found.rank.requires_grad
    found.logprob.sum().backward()
    assert case["hidden"].grad is not None


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_of_logits_at_hand_the_same(backend: str) -> None:
    case = CASES["plain"]
    expected = logprobs(case, **ASKED, top_k=4, temperature=0.7)
    temperature = torch.full((63,), 0.7, dtype=torch.float64, requires_grad=True)
    found = logits_logprob(
        logits(case), case["target"], temperature=temperature, **ASKED, top_k=4, backend=backend
    )
    assert found.logprob.requires_grad and not found.top_k.logprob.requires_grad
    assert torch.equal(found.top1, expected.top1) and torch.equal(found.rank, expected.rank)
    torch.testing.assert_close(found.top_k.logprob, expected.top_k.logprob)
