"""Sums and means over ragged sequences, against Python lists that never heard of segments."""

import math
from collections.abc import Callable

import pytest
import torch
from burnish import objectives as ob
from torch import Tensor

LENGTHS = [3, 1, 0, 4, 0]  # an empty sequence in the middle and one at the end
SEQUENCE = torch.tensor([0, 0, 0, 1, 3, 3, 3, 3])
PUBLIC = torch.tensor([2, 1, 0, 2, 5])


def tokens(seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return (-9 * torch.rand(len(SEQUENCE), generator=draw, dtype=torch.float64)).requires_grad_()


def completions(x: Tensor) -> list[list[float]]:
    return [part.tolist() for part in x.detach().split(LENGTHS)]


def desensitized(x: Tensor) -> Tensor:
    return ob.length_desensitized_sum(x, SEQUENCE, PUBLIC, alpha=0.3)


FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[list[float], int], float]]] = {
    "sequence_sum": (lambda x: ob.sequence_sum(x, SEQUENCE, 5), lambda y, _: math.fsum(y)),
    "sequence_mean": (
        lambda x: ob.sequence_mean(x, SEQUENCE, 5),
        lambda y, _: math.fsum(y) / max(len(y), 1),
    ),
    "length_desensitized_sum": (
        desensitized,
        lambda y, n: math.fsum(y[:n]) + 0.3 * math.fsum(y[n:]),
    ),
}
every = pytest.mark.parametrize("name", FUNCTIONS)


@every
def test_values_equal_the_sums_over_python_lists(name: str) -> None:
    function, equation = FUNCTIONS[name]
    x = tokens()
    expected = [
        equation(y, public) for y, public in zip(completions(x), PUBLIC.tolist(), strict=True)
    ]
    assert function(x).tolist() == pytest.approx(expected, rel=1e-15)


@every
def test_sequences_do_not_interact_and_empty_ones_pass_no_gradient(name: str) -> None:
    function, _ = FUNCTIONS[name]
    jacobian = torch.autograd.functional.jacobian(function, tokens())
    assert torch.equal(jacobian != 0, torch.arange(5)[:, None] == SEQUENCE)
    assert torch.autograd.gradcheck(function, (tokens(),))


def test_lengths_count_tokens() -> None:
    assert ob.sequence_length(SEQUENCE, 5).tolist() == LENGTHS


def test_no_tokens_at_all_is_a_differentiable_zero() -> None:
    x = torch.zeros(0, requires_grad=True)
    none = torch.zeros(0, dtype=torch.int64)
    for total in (
        ob.sequence_sum(x, none, 2),
        ob.sequence_mean(x, none, 2),
        ob.length_desensitized_sum(x, none, torch.tensor([3, 0]), alpha=0.5),
    ):
        assert total.tolist() == [0, 0]
        total.sum().backward()


def test_desensitizing_goes_from_a_common_length_to_the_plain_sum() -> None:
    x = tokens()
    plain = ob.sequence_sum(x, SEQUENCE, 5)
    cut = [math.fsum(y[:public]) for y, public in zip(completions(x), PUBLIC.tolist(), strict=True)]
    assert torch.equal(ob.length_desensitized_sum(x, SEQUENCE, PUBLIC, alpha=1.0), plain)
    assert ob.length_desensitized_sum(x, SEQUENCE, PUBLIC, alpha=0.0).tolist() == pytest.approx(
        cut, rel=1e-15
    )


def test_wpo_weight_is_the_geometric_mean_of_likelihood_over_expected_likelihood() -> None:
    logits = torch.randn(
        8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    ).requires_grad_()
    p = logits.softmax(-1)
    target = torch.tensor([0, 5, 2, 2, 1, 1, 0, 4])
    logp = p[torch.arange(8), target].log()
    weight = ob.wpo_weight(logp, p.square().sum(-1).log(), SEQUENCE, 5)
    assert not weight.requires_grad

    rows = p.tolist()
    ratio = torch.tensor(
        [rows[t][v] / math.fsum(q * q for q in rows[t]) for t, v in enumerate(target.tolist())]
    )
    expected = [math.prod(y) ** (1 / max(len(y), 1)) for y in completions(ratio)]
    assert weight.tolist() == pytest.approx(expected, rel=1e-6)


def test_wpo_weighs_every_completion_of_a_uniform_policy_by_one() -> None:
    uniform = torch.full((8,), -math.log(50_000.0))
    torch.testing.assert_close(ob.wpo_weight(uniform, uniform, SEQUENCE, 5), torch.ones(5))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda x: ob.sequence_sum(x[:1], SEQUENCE, 5),
            "sequence_sum: sequence must have the shape of x, [1], got [8]",
        ),
        (
            lambda x: ob.sequence_mean(x, SEQUENCE[:1], 5),
            "sequence_mean: sequence must have the shape of x, [8], got [1]",
        ),
        (
            lambda x: ob.length_desensitized_sum(x[:1], SEQUENCE, PUBLIC, alpha=0.5),
            "length_desensitized_sum: sequence must have the shape of x, [1], got [8]",
        ),
        (
            lambda x: ob.wpo_weight(x, x[:1], SEQUENCE, 5),
            "wpo_weight: log_sum_squares must have the shape of logp, [8], got [1]",
        ),
        *(
            (
                lambda x, alpha=alpha: ob.length_desensitized_sum(x, SEQUENCE, PUBLIC, alpha=alpha),
                f"length_desensitized_sum: alpha must be in [0, 1], got {alpha}",
            )
            for alpha in (-0.5, 1.5, math.nan)
        ),
    ],
)
def test_errors_name_the_function_and_what_it_got(
    call: Callable[[Tensor], Tensor], message: str, as_users_run_it: None
) -> None:
    with pytest.raises(ValueError) as error:
        call(tokens())
    assert str(error.value) == message
