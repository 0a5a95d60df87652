"""``logits_logprob`` against the definition."""

import importlib
from typing import Any

import pytest
import torch
from burnish.kernels import logits_logprob, reference
from grids import grid
from heads import allocations, total
from torch import Tensor

OUTPUTS = ("logprob", "entropy", "logsumexp")
EXTRAS = ("mean_logprob", "log_sum_squares")
module = importlib.import_module("burnish.kernels.logits_logprob")


@pytest.fixture(autouse=True)
def few_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOGITS_AT_ONCE", 1000)


def problem(tokens: int = 63, columns: int = 107, **changes: Any) -> dict[str, Any]:
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(tokens, columns, generator=random, dtype=torch.float64) * 4
    temperature = torch.rand(tokens, generator=random, dtype=torch.float64) + 0.5
    target = torch.randint(columns, (tokens,), generator=random)
    return {
        "logits": logits,
        "target": target,
        "temperature": temperature,
        "vocab": columns,
    } | changes


def forbidden() -> Tensor:
    logits = problem()["logits"]
    logits[:, 20:50] = -torch.inf
    return logits


CASES = {
    "temperature_per_token": problem(),
    "temperature": problem(temperature=2.0),
    "plain": problem(temperature=1.0),
    "padded": problem(vocab=100, target=torch.arange(63)),
    "target_in_the_last_column": problem(target=torch.full((63,), 106)),
    "peaked": problem(logits=problem()["logits"] * 30),
    "large": problem(logits=problem()["logits"] + 1000),
    "forbidden_tokens": problem(logits=forbidden(), target=torch.arange(63) % 20),
    "one_column": problem(columns=1),
    "several_targets": problem(target=torch.arange(63 * 5).reshape(63, 5) % 107),
    "more_outputs": problem(
        logits=forbidden(), target=torch.arange(63 * 5).reshape(63, 5) % 20, outputs=EXTRAS
    ),
}


def in_dtype(case: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    def leaf(value: Any) -> Any:
        floating = isinstance(value, Tensor) and value.is_floating_point()
        return value.detach().to(dtype).clone().requires_grad_() if floating else value

    return {name: leaf(value) for name, value in case.items()}


def measure(
    function: Any, case: dict[str, Any], outputs: tuple[str, ...] = ()
) -> dict[str, Tensor]:
    result = function(**case)._asdict()
    found = {
        name: output
        for name, output in result.items()
        if isinstance(output, Tensor) and output.requires_grad
    }
    random = torch.Generator().manual_seed(1)
    upstream = {name: torch.randn(output.shape, generator=random) for name, output in found.items()}
    used = {name: found[name] for name in outputs or found}
    torch.autograd.backward(
        list(used.values()), [upstream[name].to(output.dtype) for name, output in used.items()]
    )
    grads = {
        name: case[name].grad
        for name in ("logits", "temperature")
        if isinstance(case[name], Tensor)
    }
    return {name: t.detach().double() for name, t in (found | grads).items()}


@grid(
    strength=2,
    case=CASES,
    dtype=[torch.float64, torch.float32, torch.bfloat16],
    outputs=[(), *((name,) for name in OUTPUTS)],
)
def test_it_is_as_close_to_float64_as_the_reference(
    case: str, dtype: torch.dtype, outputs: tuple[str, ...]
) -> None:
    rounded = in_dtype(CASES[case], dtype)
    exact = measure(reference.logits_logprob, in_dtype(rounded, torch.float64), outputs)
    definition = measure(reference.logits_logprob, in_dtype(rounded, dtype), outputs)
    ours = measure(logits_logprob, in_dtype(rounded, dtype), outputs)
    for name, truth in exact.items():
        allowed = 2 * (definition[name] - truth).abs().max() + 1e-6
        assert (ours[name] - truth).abs().max() <= allowed, name


def test_by_default_it_is_the_log_softmax_of_all_columns() -> None:
    logits, target = problem()["logits"], problem()["target"]
    expected = logits.log_softmax(1).gather(1, target[:, None])[:, 0]
    torch.testing.assert_close(logits_logprob(logits, target).logprob, expected)


def test_gradcheck() -> None:
    case = in_dtype(problem(12, 9, vocab=7, target=torch.arange(12) % 7), torch.float64)

    def outputs(logits: Tensor, temperature: Tensor) -> Any:
        return logits_logprob(**(case | {"logits": logits, "temperature": temperature}))[:3]

    assert torch.autograd.gradcheck(outputs, (case["logits"], case["temperature"]))


def test_a_forbidden_target_has_no_probability() -> None:
    case = in_dtype(problem(logits=forbidden(), target=torch.full((63,), 30)), torch.float32)
    result = logits_logprob(**case)
    assert result.logprob.isneginf().all()
    assert result.entropy.isfinite().all()


@pytest.mark.parametrize("output", EXTRAS)
def test_each_of_more_outputs_has_its_gradient(output: str) -> None:
    case = in_dtype(CASES["more_outputs"], torch.float64)
    ours, exact = (
        measure(f, in_dtype(case, torch.float64), (output,))
        for f in (logits_logprob, reference.logits_logprob)
    )
    for name, truth in exact.items():
        torch.testing.assert_close(ours[name], truth)


def test_padding_has_no_gradient() -> None:
    grads = measure(logits_logprob, in_dtype(CASES["padded"], torch.float32))
    assert (grads["logits"][:, 100:] == 0).all()


def test_no_tokens_give_a_differentiable_zero() -> None:
    case = in_dtype(problem(tokens=0), torch.float32)
    total(logits_logprob(**case)).backward()
    assert case["logits"].grad.shape == (0, 107)


def test_only_the_gradient_is_as_large_as_the_logits() -> None:
    case = in_dtype(problem(tokens=500), torch.float32)
    _, sizes = allocations(lambda: total(logits_logprob(**case)).backward())
    sizes.sort()
    assert sizes[-1] == 4 * 500 * 107
    assert sizes[-2] <= 4 * 1000 + 16 * 500


def test_a_row_may_be_longer_than_all_that_is_taken_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = measure(logits_logprob, in_dtype(CASES["more_outputs"], torch.float64))
    monkeypatch.setattr(module, "LOGITS_AT_ONCE", 106)
    found = measure(logits_logprob, in_dtype(CASES["more_outputs"], torch.float64))
    for name, truth in expected.items():
        torch.testing.assert_close(found[name], truth)


def test_the_given_logits_stay_as_they_are() -> None:
    case = in_dtype(CASES["temperature_per_token"], torch.float32)
    before = case["logits"].detach().clone()
    measure(logits_logprob, case)
    assert torch.equal(case["logits"], before)


@pytest.mark.filterwarnings("ignore")  # of the compiler about itself
def test_opcheck() -> None:
    case = in_dtype(CASES["padded"], torch.float32)
    case["target"] = case["target"][:, None]
    for asked in ((False, False), (True, True)):
        torch.library.opcheck(module._forward, (*case.values(), *asked, False))


def test_fullgraph_compile() -> None:
    compiled = torch.compile(logits_logprob, fullgraph=True, dynamic=True, backend="aot_eager")
    ours, eager = (
        measure(f, in_dtype(CASES["padded"], torch.float32)) for f in (compiled, logits_logprob)
    )
    for name, expected in eager.items():
        torch.testing.assert_close(ours[name], expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"target": torch.tensor([0, 107, 5])},
            IndexError,
            r"in \[0, 107\), got 107 \(1 of 3 are outside\)",
        ),
        (
            {"target": torch.tensor([0, 105, 5]), "vocab": 100},
            IndexError,
            r"in \[0, 100\), got 105",
        ),
        ({"target": torch.tensor([0, 1])}, ValueError, r"target must be \[3\], got \[2\]"),
        (
            {"target": torch.zeros(3, 2, 1, dtype=torch.int64)},
            ValueError,
            r"target must be \[3, 2\], got \[3, 2, 1\]",
        ),
        ({"logits": torch.zeros(3)}, ValueError, r"logits must be \[N, V\], got \[3\]"),
        ({"temperature": -1.0}, ValueError, "temperature must be positive and finite, got -1.0"),
        ({"temperature": torch.ones(1)}, ValueError, r"temperature must be \[3\], got \[1\]"),
        (
            {"temperature": torch.tensor([1.0, torch.nan, 2.0])},
            ValueError,
            "every temperature must be > 0, got nan",
        ),
        (
            {"outputs": ("loss",)},
            ValueError,
            "outputs are some of mean_logprob, log_sum_squares, top1, rank, got 'loss'",
        ),
        ({"vocab": 0}, ValueError, r"vocab must be in \[1, 107\], got 0"),
    ],
)
def test_what_cannot_be_meant_is_an_error(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        logits_logprob(**(problem(tokens=3) | change))
