"""``linear_divergence``: backend "torch" against the definition, and the definition against the
equations.
"""

import math
from typing import Any

import pytest
import tensor_cores
import torch
from burnish.kernels import Head, divergence_passes, linear_divergence, softmax
from burnish.kernels.head import Shard
from grids import grid
from heads import allocations, recorded
from pairs import (
    BETAS,
    CASES,
    arriving,
    assert_as_good_as_the_reference,
    biased,
    in_dtype,
    leaves,
    measure,
    normal,
    opposed,
    problem,
)
from torch import Tensor

KEPT = [0, 40_000]  # bytes: all tiles are recomputed, or some are kept


def cut(monkeypatch: pytest.MonkeyPatch, keep: int) -> None:
    """Several tiles in both directions, the last ones ragged, at sizes where float64 references are
    cheap.
    """
    monkeypatch.setattr(divergence_passes, "ROWS", 24)
    monkeypatch.setattr(divergence_passes, "COLUMNS", 32)
    monkeypatch.setattr(divergence_passes, "KEEP", keep)


@pytest.fixture(params=KEPT, ids=["all_recomputed", "some_kept"])
def small_tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    cut(monkeypatch, request.param)


@grid(strength=2, case=CASES, beta=BETAS, dtype=[torch.float32, torch.bfloat16], keep=KEPT)
def test_it_is_as_close_to_float64_as_the_reference(
    case: str, beta: float, dtype: torch.dtype, keep: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut(monkeypatch, keep)
    assert_as_good_as_the_reference(CASES[case], beta, dtype)


@grid(strength=2, case=CASES, beta=BETAS, keep=KEPT)
def test_float64_agrees_to_the_last_digits(
    case: str, beta: float, keep: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut(monkeypatch, keep)
    ours, exact = (
        measure(in_dtype(CASES[case], torch.float64), b, beta=beta) for b in ("torch", "reference")
    )
    for name, truth in exact.items():
        torch.testing.assert_close(ours[name], truth, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_tiles_of_real_size_are_exact_too(beta: float) -> None:
    size = 2 * divergence_passes.COLUMNS + 5
    assert_as_good_as_the_reference(problem(divergence_passes.ROWS + 7, size), beta, torch.float32)


@pytest.fixture
def products_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor_cores.emulate(monkeypatch)


@grid(strength=2, case=CASES, beta=BETAS, dtype=[torch.float16, torch.bfloat16])
@pytest.mark.parametrize("small_tiles", [40_000], indirect=True, ids=["some_kept"])
@pytest.mark.usefixtures("small_tiles", "products_of_a_gpu")
def test_products_of_16_bits_are_closer_to_float64_than_the_usual_ones(
    case: str, beta: float, dtype: torch.dtype
) -> None:
    assert_as_good_as_the_reference(CASES[case], beta, dtype, products="of 16 bits")


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.usefixtures("small_tiles", "products_of_a_gpu")
def test_a_mean_over_many_tokens_does_not_vanish_in_float16(beta: float) -> None:
    case = in_dtype(CASES["plain"], torch.float16)
    # so that its gradient is not rounded to float16
    case["student"] = in_dtype(case["student"], torch.float32)
    weight, upstream = case["student"].weight, arriving(63)
    large, small = (
        torch.autograd.grad(linear_divergence(**case, beta=beta), weight, upstream * size)[0]
        for size in (1, 2.0**-30)
    )
    assert torch.equal(large, small * 2.0**30)


def probabilities(hidden: Tensor, head: Head, temperature: Any, vocab: int) -> Tensor:
    weight, bias, scale, softcap, (down, up, scaling), _ = head
    c = scale * (hidden @ (weight + scaling * up @ down).T + bias)
    e = (softcap * torch.tanh(c / softcap) / temperature[:, None])[:, :vocab].exp()
    return e / e.sum(1, keepdim=True)


def kl(p: Tensor, q: Tensor) -> Tensor:
    return (p * (p / q).log()).sum(1)


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.usefixtures("small_tiles")
def test_it_equals_the_equations(backend: str) -> None:
    case = CASES["everything"]
    s, t = (
        probabilities(case[f"{w}_hidden"], case[w], case["temperature"], 100)
        for w in ("student", "teacher")
    )
    for beta in (0.1, 0.5, 0.9):
        m = beta * t + (1 - beta) * s
        expected = beta * kl(t, m) + (1 - beta) * kl(s, m)
        torch.testing.assert_close(linear_divergence(**case, beta=beta, backend=backend), expected)
    torch.testing.assert_close(linear_divergence(**case, beta=0.0, backend=backend), kl(t, s))
    torch.testing.assert_close(linear_divergence(**case, beta=1.0, backend=backend), kl(s, t))


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.usefixtures("small_tiles")
def test_a_student_that_equals_its_teacher_is_at_zero_and_stays_there(beta: float) -> None:
    case = problem()
    case |= {"student_hidden": case["teacher_hidden"], "student": case["teacher"]}
    for name, value in measure(in_dtype(case, torch.float64), "torch", beta=beta).items():
        torch.testing.assert_close(value, torch.zeros_like(value), rtol=0, atol=1e-14, msg=name)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.usefixtures("small_tiles")
def test_exchanging_student_and_teacher_exchanges_beta_and_its_complement(beta: float) -> None:
    case = CASES["plain"]
    other = {"student_hidden": case["teacher_hidden"], "student": case["teacher"]}
    other |= {"teacher_hidden": case["student_hidden"], "teacher": case["student"]}
    torch.testing.assert_close(
        linear_divergence(**case, beta=beta), linear_divergence(**other, beta=1 - beta)
    )


@pytest.mark.usefixtures("small_tiles")
def test_divided_by_beta_it_tends_to_forward_kl_and_by_its_complement_to_reverse_kl() -> None:
    case, small = problem(temperature=5.0), 1e-7
    for beta, limit in ((small, 0.0), (1 - small, 1.0)):
        ours = linear_divergence(**case, beta=beta) / small
        torch.testing.assert_close(ours, linear_divergence(**case, beta=limit), rtol=1e-3, atol=0)


@pytest.mark.usefixtures("small_tiles")
def test_a_mixture_is_bounded_by_the_entropy_of_its_coin() -> None:
    beta = 0.3
    bound = -beta * math.log(beta) - (1 - beta) * math.log(1 - beta)
    case = opposed() | {"temperature": 0.01}
    for dtype in (torch.float64, torch.float32):
        found = measure(in_dtype(case, dtype), "torch", beta=beta)
        torch.testing.assert_close(
            found["divergence"], torch.full((63,), bound).double(), rtol=1e-6, atol=0
        )
        assert all(value.isfinite().all() for value in found.values())


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.usefixtures("small_tiles")
def test_gradcheck(backend: str, beta: float) -> None:
    student = normal.head(
        3, 35, bias=normal(35), scale=1.5, softcap=4.0, adapter=normal.lora(3, 35, rank=2)
    )
    case = in_dtype(
        problem(26, 33, student=student, temperature=normal(26).exp(), vocab=33), torch.float64
    )
    case["student_hidden"] = normal(26, 3).requires_grad_()

    def divergence(
        hidden: Tensor, weight: Tensor, bias: Tensor, down: Tensor, up: Tensor
    ) -> Tensor:
        head = student._replace(weight=weight, bias=bias, adapter=(down, up, 0.7))
        return linear_divergence(
            **case | {"student_hidden": hidden, "student": head}, beta=beta, backend=backend
        )

    assert torch.autograd.gradcheck(divergence, tuple(leaves(case).values()), fast_mode=True)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_teacher_and_temperature_are_constants(backend: str, beta: float) -> None:
    case = in_dtype(CASES["everything"], torch.float32)
    measure(case, backend, beta=beta)
    assert all(leaf.grad is None for leaf in leaves(case, "teacher").values())
    assert case["temperature"].grad is None
    assert all(leaf.grad is not None for leaf in leaves(case).values())


def forbidding(span: slice) -> Tensor:
    bias = torch.zeros(100, dtype=torch.float64)
    bias[span] = -torch.inf
    return bias


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.usefixtures("small_tiles")
def test_what_both_forbid_is_not_there(backend: str, beta: float) -> None:
    bias = forbidding(slice(40))  # one tile whole, part of the next
    case = biased(student=bias, teacher=bias) | {"temperature": normal(63).exp()}
    without = case | {
        name: Head(case[name].weight[40:], bias[40:]) for name in ("student", "teacher")
    }
    ours, expected = (
        measure(in_dtype(a, torch.float32), backend, beta=beta) for a in (case, without)
    )
    for name in ("divergence", "d_hidden"):
        torch.testing.assert_close(ours[name], expected[name], rtol=1e-4, atol=1e-5)
    for name in ("d_weight", "d_bias"):
        assert (ours[name][:40] == 0).all()
        torch.testing.assert_close(ours[name][40:], expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.usefixtures("small_tiles")
def test_divergence_from_the_impossible_is_infinite_and_a_mixture_finite(backend: str) -> None:
    hot = {"temperature": 3.0, "backend": backend}  # so that no probability underflows
    student = biased(student=forbidding(slice(90, 95))) | hot
    teacher = biased(teacher=forbidding(slice(90, 95))) | hot
    assert linear_divergence(**student, beta=0.0).isposinf().all()
    assert linear_divergence(**student, beta=1.0).isfinite().all()
    assert linear_divergence(**teacher, beta=0.0).isfinite().all()
    assert linear_divergence(**teacher, beta=1.0).isposinf().all()
    for case in (student, teacher):
        exact = linear_divergence(**case | {"backend": "reference"}, beta=0.5)
        torch.testing.assert_close(linear_divergence(**case, beta=0.5), exact)
    assert all(
        value.isfinite().all()
        for n, value in measure(in_dtype(student, torch.float32), backend, beta=0.5).items()
    )


@pytest.mark.usefixtures("small_tiles")
def test_a_capped_bias_forbids_nothing() -> None:
    case = biased(student=forbidding(slice(7)))
    case["student"] = case["student"]._replace(softcap=5.0)
    ours, expected = (
        linear_divergence(**case, beta=0.0, backend=backend) for backend in ("torch", "reference")
    )
    assert ours.isfinite().all()
    torch.testing.assert_close(ours, expected)
    both = biased(student=forbidding(slice(7)), teacher=forbidding(slice(7)))
    both["teacher"] = both["teacher"]._replace(softcap=5.0)
    assert linear_divergence(**both, beta=0.0).isposinf().all()


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_padding_has_no_probability_and_no_gradient(backend: str, beta: float) -> None:
    case = in_dtype(CASES["padded_vocabularies"], torch.float64)
    shorter = (
        case
        | {name: Head(case[name].weight[:100].detach()) for name in ("student", "teacher")}
        | {"vocab": None}
    )
    ours, expected = (linear_divergence(**a, beta=beta, backend=backend) for a in (case, shorter))
    torch.testing.assert_close(ours, expected)
    assert (measure(case, backend, beta=beta)["d_weight"][100:] == 0).all()


def test_without_a_limit_the_vocabulary_is_the_smaller_one() -> None:
    case = CASES["padded_vocabularies"] | {"beta": 0.5}
    torch.testing.assert_close(
        linear_divergence(**case | {"vocab": None}), linear_divergence(**case | {"vocab": 103})
    )


@pytest.mark.parametrize("beta", [0.0, 0.5])
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_no_tokens_give_a_differentiable_zero(backend: str, beta: float) -> None:
    student = normal.head(20, 100, bias=normal(100), adapter=normal.lora(20, 100))
    case = in_dtype(problem(tokens=0, student=student, temperature=torch.ones(0)), torch.float32)
    assert measure(case, backend, beta=beta)["divergence"].shape == (0,)
    for name, leaf in leaves(case).items():
        assert leaf.grad is not None and (leaf.grad == 0).all(), name


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_precision_is_the_students_and_every_gradient_has_that_of_its_input(backend: str) -> None:
    case = in_dtype(CASES["everything"], torch.bfloat16)
    exact = in_dtype(CASES["everything"], torch.float64)
    case |= {"teacher": exact["teacher"], "teacher_hidden": exact["teacher_hidden"]}
    case["student"] = case["student"]._replace(
        weight=in_dtype(case["student"].weight, torch.float32)
    )
    divergence = linear_divergence(**case, beta=0.5, backend=backend)
    assert divergence.dtype == torch.float32
    divergence.sum().backward()
    assert all(
        leaf.grad is not None and leaf.grad.dtype == leaf.dtype for leaf in leaves(case).values()
    )


def both_passes(case: dict[str, Any], upstream: Tensor | None, options: dict[str, Any]) -> None:
    divergence = linear_divergence(**case, **options)
    if divergence.requires_grad:
        divergence.backward(torch.ones_like(divergence) if upstream is None else upstream)


def multiplications(case: dict[str, Any], upstream: Tensor | None = None, **options: Any) -> float:
    """Of the matrix products, inside the ops too, in units of N·V."""
    _, events = recorded(both_passes, case, upstream, options, record_shapes=True)
    found = 0
    for event in events:
        if event.name() in ("aten::mm", "aten::addmm", "aten::addmm_"):
            (rows, inner), (_, columns) = (
                event.shapes()[:2] if event.name() == "aten::mm" else event.shapes()[1:3]
            )
            found += rows * inner * columns
    return found / (len(case["student_hidden"]) * len(case["student"].weight))


@pytest.fixture(params=[0, 1 / 3], ids=["all_recomputed", "a_third_kept"])
def kept(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> float:
    """How much of the six tiles of each head in the case "exact_tiles"."""
    monkeypatch.setattr(divergence_passes, "ROWS", 24)
    monkeypatch.setattr(divergence_passes, "COLUMNS", 32)
    monkeypatch.setattr(divergence_passes, "KEEP", 2 * (4 * 48 * 32 + 1) if request.param else 0)
    return float(request.param)


@pytest.mark.parametrize(("beta", "passes"), [(0.0, 1), (0.5, 2), (1.0, 1)])
def test_a_pass_multiplies_what_was_not_kept_and_what_is_frozen_costs_nothing(
    kept: float, beta: float, passes: int
) -> None:
    # the teacher's leaves require gradients too
    case = in_dtype(CASES["exact_tiles"], torch.float32)
    student, teacher = 20, 12
    both, again = student + teacher, (student + teacher) * (1 - kept)
    assert multiplications(case, beta=beta) == pytest.approx(both + passes * again + 2 * student)
    case["student"] = case["student"].detach()
    assert multiplications(case, beta=beta) == pytest.approx(both + passes * again + student)
    case["student_hidden"] = case["student_hidden"].detach()
    assert multiplications(case, beta=beta) == pytest.approx(both + (passes - 1) * again)


@pytest.mark.parametrize(("beta", "passes"), [(0.0, 1), (0.5, 2), (1.0, 1)])
def test_rows_that_no_gradient_arrives_at_cost_nothing_in_backward(
    kept: float, beta: float, passes: int
) -> None:
    case, upstream = in_dtype(CASES["exact_tiles"], torch.float32), arriving(48)
    upstream[1::4] = upstream[2::4] = upstream[3::4] = 0
    both, again = 32, 32 * (1 - kept)
    backward = again + 2 * 20
    found = multiplications(case, upstream, beta=beta)
    assert found == pytest.approx(both + (passes - 1) * again + backward / 4)
    assert multiplications(case, torch.zeros(48), beta=beta) == pytest.approx(
        both + (passes - 1) * again
    )


@grid(strength=2, share=[0.0, 0.05, 0.3, 1.0], beta=BETAS, keep=KEPT)
def test_gradients_are_those_of_all_rows_however_many_are_left_out(
    beta: float, share: float, keep: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut(monkeypatch, keep)
    upstream = arriving(63).double()
    upstream[torch.arange(63) % 20 < 20 * share] = 0
    case = CASES["everything"]
    ours, exact = (
        measure(in_dtype(case, torch.float64), b, upstream, beta=beta)
        for b in ("torch", "reference")
    )
    assert ours.keys() == exact.keys()
    for name, truth in exact.items():
        torch.testing.assert_close(ours[name], truth, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    "left_out", [slice(1), slice(0, None, 2)], ids=["one_row", "half_the_rows"]
)
@pytest.mark.usefixtures("small_tiles")
def test_a_row_that_diverges_spoils_no_gradient_if_none_arrives_at_it(left_out: slice) -> None:
    case = in_dtype(biased(teacher=forbidding(slice(90, 95))), torch.float32)
    upstream = torch.zeros(63)
    found = measure(case, "torch", upstream, beta=1.0)
    assert found["divergence"].isposinf().all()
    assert all((value == 0).all() for name, value in found.items() if name != "divergence")
    upstream[:] = 1
    upstream[left_out] = 0
    assert (measure(case, "torch", upstream, beta=1.0)["d_hidden"][left_out] == 0).all()


def test_the_logits_are_never_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divergence_passes, "ROWS", 100)
    monkeypatch.setattr(divergence_passes, "COLUMNS", 100)
    tile, weight = 4 * 200 * 100, 4 * 1000 * 25  # of all rows; the gradient of the weight
    heads = {"student": normal.head(25, 1000, softcap=5.0), "teacher": normal.head(12, 1000)}
    for keep_bytes, kept in ((0, []), (4 * (tile + 1), [2 * tile] * 2)):
        for beta in (0.0, 0.5):
            case = problem(
                200, 1000, student_hidden=normal(200, 25), temperature=normal(200).exp(), **heads
            )
            case = in_dtype(case, torch.float32)
            _, taken = allocations(
                both_passes, case, None, {"beta": beta, "keep_bytes": keep_bytes}
            )
            assert [size for size in taken if size > tile] == [*kept, weight]


def test_as_much_is_kept_as_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    case = in_dtype(CASES["exact_tiles"], torch.float32)
    monkeypatch.setattr(divergence_passes, "ROWS", 24)
    monkeypatch.setattr(divergence_passes, "COLUMNS", 32)
    one = 2 * 4 * 48 * 32  # bytes: a tile of all rows, of either head
    for keep_bytes, share in (
        (0, 0),
        (one - 1, 0),
        (one, 1 / 3),
        (2 * one, 2 / 3),
        (3 * one, 1),
        (None, 1),
    ):
        found = multiplications(case, beta=0.0, keep_bytes=keep_bytes)
        assert found == pytest.approx(32 + 32 * (1 - share) + 40), keep_bytes


def test_nothing_is_kept_when_no_gradient_and_no_second_pass_needs_it(
    monkeypatch: pytest.MonkeyPatch, columns_kept: list[int]
) -> None:
    case = in_dtype(CASES["plain"], torch.float32)
    monkeypatch.setattr(divergence_passes, "COLUMNS", 32)
    frozen = case | {
        "student_hidden": case["student_hidden"].detach(),
        "student": case["student"].detach(),
    }
    with torch.no_grad():
        assert linear_divergence(**case, beta=1.0).grad_fn is None
    assert linear_divergence(**frozen, beta=0.0).grad_fn is None
    assert linear_divergence(**frozen, beta=0.5).grad_fn is None
    assert linear_divergence(
        **frozen | {"student_hidden": case["student_hidden"]}, beta=1.0
    ).requires_grad
    assert columns_kept == [0, 0, 0, 0, 100, 100, 100, 100]  # of either head


@pytest.mark.usefixtures("small_tiles")
def test_bfloat16_logits_are_not_rounded() -> None:
    case = in_dtype(CASES["peaked"], torch.bfloat16)
    exact = linear_divergence(**in_dtype(case, torch.float64), beta=0.0)
    with torch.autocast("cpu", torch.bfloat16):
        ours = linear_divergence(**case, beta=0.0)
    torch.testing.assert_close(ours.double(), exact, rtol=1e-6, atol=1e-5)


def test_a_second_derivative_is_an_error_and_not_a_wrong_number() -> None:
    case = in_dtype(CASES["plain"], torch.float64)
    divergence = linear_divergence(**case, beta=0.5).sum()
    (grad,) = torch.autograd.grad(divergence, case["student_hidden"], create_graph=True)
    with pytest.raises(NotImplementedError, match=r"no second derivative.*backend='reference'"):
        grad.sum().backward()


@pytest.mark.parametrize("beta", [0.0, 0.5])
@pytest.mark.usefixtures("small_tiles")
def test_checkpointing_recomputes_the_same_gradients(beta: float) -> None:
    plain, checkpointed = (in_dtype(CASES["everything"], torch.float32) for _ in range(2))
    linear_divergence(**plain, beta=beta).sum().backward()

    def run(hidden: Tensor) -> Tensor:
        return linear_divergence(**checkpointed | {"student_hidden": hidden}, beta=beta)

    torch.utils.checkpoint.checkpoint(
        run, checkpointed["student_hidden"], use_reentrant=False
    ).sum().backward()
    for name, leaf in leaves(checkpointed).items():
        torch.testing.assert_close(leaf.grad, leaves(plain)[name].grad, rtol=0, atol=0)


@pytest.mark.parametrize("beta", [0.0, 0.5])
@pytest.mark.usefixtures("small_tiles")
def test_fullgraph_compile_serves_every_number_of_tokens_with_one_graph(beta: float) -> None:
    compiled = torch.compile(linear_divergence, fullgraph=True, dynamic=True, backend="aot_eager")
    heads = {"student": normal.head(20, 107, bias=normal(107)), "teacher": normal.head(12, 103)}
    for tokens, stance in ((63, "default"), (40, "fail_on_recompile"), (7, "fail_on_recompile")):
        case, same = (in_dtype(a, torch.float32) for a in [problem(tokens, vocab=100, **heads)] * 2)
        with torch.compiler.set_stance(stance):
            ours, expected = compiled(**case, beta=beta), linear_divergence(**same, beta=beta)
            torch.testing.assert_close(ours, expected, rtol=0, atol=0)
            ours.sum().backward()
        expected.sum().backward()
        for name, leaf in leaves(same).items():
            torch.testing.assert_close(leaves(case)[name].grad, leaf.grad, rtol=0, atol=0)


@pytest.mark.slow  # by default those of a log-prob are compiled
@pytest.mark.filterwarnings("ignore")  # of the compiler about itself
@pytest.mark.parametrize("small_tiles", [40_000], indirect=True, ids=["some_kept"])
@pytest.mark.usefixtures("small_tiles")
def test_compiled_tiles_are_as_good_and_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(softmax, "COMPILE_FROM", 0)
    monkeypatch.setattr(softmax, "_uncompilable", set())
    torch._dynamo.reset()
    case = CASES["everything"]
    rows = ("student_hidden", "teacher_hidden", "temperature")
    for beta in (0.0, 0.5):
        assert_as_good_as_the_reference(case, beta, torch.float32)
        with torch.compiler.set_stance("fail_on_recompile"):
            assert_as_good_as_the_reference(
                case | {name: case[name][:30] for name in rows}, beta, torch.float32
            )
    assert not softmax._uncompilable


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"beta": 1.5}, r"beta must be in \[0, 1\], got 1.5"),
        ({"beta": math.nan}, r"beta must be in \[0, 1\], got nan"),
        (
            {"student_hidden": torch.zeros(1, 3, 20)},
            r"student hidden must be \[N, D\].* got \[1, 3, 20\]",
        ),
        (
            {"student_hidden": torch.zeros(4, 20)},
            r"teacher hidden must be \[4, 12\], got \[3, 12\]",
        ),
        (
            {"teacher_hidden": torch.zeros(3, 13)},
            r"teacher weight must be \[100, 13\], got \[100, 12\]",
        ),
        ({"teacher_hidden": torch.zeros(3, 12, device="meta")}, "teacher weight must be on meta"),
        (
            {"student": Head(torch.zeros(100, 21))},
            r"student weight must be \[100, 20\], got \[100, 21\]",
        ),
        (
            {"student": Head(torch.zeros(100, 20, dtype=torch.int8))},
            "student weight must be floating-point",
        ),
        (
            {"teacher": Head(torch.zeros(100, 12), bias=torch.zeros(1))},
            r"teacher bias must be \[100\], got \[1\]",
        ),
        (
            {"student": Head(torch.zeros(100, 20), scale=0.0)},
            "student scale must be positive and finite, got 0.0",
        ),
        (
            {"teacher": Head(torch.zeros(100, 12), softcap=0.0)},
            "teacher softcap must be positive and finite, got 0.0",
        ),
        (
            {
                "student": Head(
                    torch.zeros(100, 20), adapter=(torch.zeros(4, 20), torch.zeros(100, 5), 1.0)
                )
            },
            r"student adapter B must be \[100, 4\], got \[100, 5\]",
        ),
        ({"temperature": 0.0}, "temperature must be positive and finite, got 0.0"),
        ({"temperature": torch.tensor([1.0, 0.0, 2.0])}, "every temperature must be > 0, got 0.0"),
        ({"temperature": torch.ones(3, 1)}, r"temperature must be \[3\], got \[3, 1\]"),
        ({"vocab": 101}, r"vocab must be in \[1, 100\], got 101"),
        ({"keep_bytes": -1}, "keep_bytes must be >= 0, where 0 keeps nothing, got -1"),
        ({"backend": "cuda"}, "backend must be 'auto'.* got 'cuda'"),
        (
            {"student": Head(torch.zeros(100, 20), shard=Shard(None, 0))},  # type: ignore[arg-type]
            "both heads must hold their whole vocabulary, got a shard; gather its weight before",
        ),
    ],
)
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_what_cannot_be_meant_is_an_error(
    backend: str, change: dict[str, Any], message: str
) -> None:
    case = in_dtype(problem(tokens=3), torch.float32)
    with pytest.raises(ValueError, match=f"linear_divergence: {message}"):
        linear_divergence(**{"backend": backend, "beta": 0.5} | case | change)
