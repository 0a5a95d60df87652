"""``linear_divergence``: the tiled backend against the definition, and the definition against the equations."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from burnish.kernels import Head, linear_divergence, tiled_divergence, tiles
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

BETAS = (0.0, 0.1, 0.5, 1.0)


@pytest.fixture(params=[0, 20_000], ids=["all_recomputed", "some_kept"])
def small_tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles in both directions, the last ones ragged, at sizes where float64 references are cheap."""
    monkeypatch.setattr(tiled_divergence, "ROWS", 24)
    monkeypatch.setattr(tiled_divergence, "COLUMNS", 32)
    monkeypatch.setattr(tiled_divergence, "KEEP", request.param)


class Normal:
    """Random numbers in float64, always the same."""

    def __init__(self) -> None:
        self.random = torch.Generator().manual_seed(0)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.random, dtype=torch.float64)

    def head(self, width: int, size: int, **changes: Any) -> Head:
        """Logits of about ±4 for normal hidden states."""
        return Head(self(size, width) * 4 / width**0.5, **changes)

    def lora(self, width: int, size: int, rank: int = 3) -> tuple[Tensor, Tensor, float]:
        return self(rank, width), self(size, rank), 0.7


normal = Normal()


def problem(tokens: int = 63, size: int = 100, **changes: Any) -> dict[str, Any]:
    """The arguments of ``linear_divergence``: a student of width 20, a teacher of width 12."""
    heads = {"student": normal.head(20, size), "teacher": normal.head(12, size)}
    return {"student_hidden": normal(tokens, 20), "teacher_hidden": normal(tokens, 12)} | heads | changes


def biased(**biases: Tensor) -> dict[str, Any]:
    case = problem()
    return case | {name: case[name]._replace(bias=bias) for name, bias in biases.items()}


def opposed() -> dict[str, Any]:
    """Each is nearly certain, of different tokens."""
    student, teacher = torch.zeros(100, dtype=torch.float64), torch.zeros(100, dtype=torch.float64)
    student[7], teacher[91] = 60, 60
    return biased(student=student, teacher=teacher)


def distilled() -> dict[str, Any]:
    """A student that has nearly arrived."""
    teacher, hidden = normal.head(20, 100), normal(63, 20)
    student = teacher._replace(weight=teacher.weight + normal(100, 20) * 1e-3)
    return problem(student_hidden=hidden, student=student, teacher_hidden=hidden, teacher=teacher)


rising = torch.arange(100, dtype=torch.float64) * 3
CASES = {
    "plain": problem(),
    "one_token": problem(tokens=1),
    "one_column": problem(tokens=5, size=1),
    "exact_tiles": problem(tokens=48, size=96),
    "peaked": problem(student_hidden=normal(63, 20) * 10, teacher_hidden=normal(63, 12) * 10),
    "peaked_on_different_tokens": opposed(),
    "flat": problem(student_hidden=torch.zeros(63, 20).double(), teacher_hidden=torch.zeros(63, 12).double()),
    "nearly_equal": distilled(),
    "all_logits_negative": biased(student=normal(100) - 1000, teacher=normal(100) - 1000),
    "one_large_one_negative": biased(student=normal(100) + 1000, teacher=normal(100) - 1000),
    "rising_and_falling_over_the_vocabulary": biased(student=rising, teacher=-rising),
    "temperature": problem(temperature=0.6),
    "temperature_per_token": problem(temperature=normal(63).exp()),
    "softcaps": problem(student=normal.head(20, 100, softcap=3.0), teacher=normal.head(12, 100, softcap=5.0)),
    "scales": problem(student=normal.head(20, 100, scale=0.25), teacher=normal.head(12, 100, scale=1.7)),
    "adapters": problem(
        student=normal.head(20, 100, adapter=normal.lora(20, 100)),
        teacher=normal.head(12, 100, adapter=normal.lora(12, 100)),
    ),
    "padded_vocabularies": problem(student=normal.head(20, 107), teacher=normal.head(12, 103), vocab=100),
    "everything": problem(
        student=normal.head(20, 107, bias=normal(107), scale=1.5, softcap=4.0, adapter=normal.lora(20, 107)),
        teacher=normal.head(12, 103, bias=normal(103), scale=0.8, softcap=6.0, adapter=normal.lora(12, 103)),
        temperature=normal(63).exp(), vocab=100,
    ),
}  # fmt: skip


def in_dtype(case: Any, dtype: torch.dtype) -> Any:
    """Fresh leaves, rounded to ``dtype``, that require gradients: the teacher's too."""
    if isinstance(case, Tensor):
        return case.detach().to(dtype).clone().requires_grad_()
    if isinstance(case, Head):
        return Head(*(in_dtype(value, dtype) for value in case))
    if isinstance(case, tuple):
        return tuple(in_dtype(value, dtype) for value in case)
    return {name: in_dtype(value, dtype) for name, value in case.items()} if isinstance(case, dict) else case


def leaves(case: dict[str, Any], who: str = "student") -> dict[str, Tensor]:
    head = case[who]
    adapter = dict(zip(("A", "B"), head.adapter or (), strict=False))
    found = {"hidden": case[f"{who}_hidden"], "weight": head.weight, "bias": head.bias, **adapter}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def measure(case: dict[str, Any], backend: str, **changes: Any) -> dict[str, Tensor]:
    """The divergence, and the student's gradients for fixed random upstream gradients, all in float64."""
    divergence = linear_divergence(**case | {"backend": backend} | changes)
    random = torch.Generator().manual_seed(1)
    divergence.backward(torch.randn(len(divergence), generator=random).to(divergence.dtype) / max(len(divergence), 1))
    grads = {f"d_{name}": leaf.grad for name, leaf in leaves(case).items() if leaf.grad is not None}
    return {name: t.detach().double() for name, t in ({"divergence": divergence} | grads).items()}


def assert_as_good_as_the_reference(case: dict[str, Any], beta: float, dtype: torch.dtype) -> None:
    """Error against float64 at most twice the reference's own in the same precision, plus 1e-6."""
    rounded = in_dtype(case, dtype)
    exact = measure(in_dtype(rounded, torch.float64), "reference", beta=beta)
    definition = measure(in_dtype(rounded, dtype), "reference", beta=beta)
    ours = measure(in_dtype(rounded, dtype), "tiled", beta=beta)
    assert ours.keys() == exact.keys()
    for name, truth in exact.items():
        allowed = 2 * (definition[name] - truth).abs().max() + 1e-6
        assert (ours[name] - truth).abs().max() <= allowed, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("small_tiles")
def test_tiled_is_as_close_to_float64_as_the_reference(case: str, beta: float, dtype: torch.dtype) -> None:
    assert_as_good_as_the_reference(CASES[case], beta, dtype)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("small_tiles")
def test_float64_agrees_to_the_last_digits(case: str, beta: float) -> None:
    ours, exact = (measure(in_dtype(CASES[case], torch.float64), b, beta=beta) for b in ("tiled", "reference"))
    for name, truth in exact.items():
        torch.testing.assert_close(ours[name], truth, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_tiles_of_real_size_are_exact_too(beta: float) -> None:
    size = 2 * tiled_divergence.COLUMNS + 5
    assert_as_good_as_the_reference(problem(tiled_divergence.ROWS + 7, size), beta, torch.float32)


def probabilities(hidden: Tensor, head: Head, temperature: Any, vocab: int) -> Tensor:
    weight, bias, scale, softcap, (down, up, scaling) = head
    c = scale * (hidden @ (weight + scaling * up @ down).T + bias)
    e = (softcap * torch.tanh(c / softcap) / temperature[:, None])[:, :vocab].exp()
    return e / e.sum(1, keepdim=True)


def kl(p: Tensor, q: Tensor) -> Tensor:
    return (p * (p / q).log()).sum(1)


@pytest.mark.parametrize("backend", ["reference", "tiled"])
@pytest.mark.usefixtures("small_tiles")
def test_it_equals_the_equations(backend: str) -> None:
    case = CASES["everything"]
    s, t = (probabilities(case[f"{w}_hidden"], case[w], case["temperature"], 100) for w in ("student", "teacher"))
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
    for name, value in measure(in_dtype(case, torch.float64), "tiled", beta=beta).items():
        torch.testing.assert_close(value, torch.zeros_like(value), rtol=0, atol=1e-14, msg=name)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.usefixtures("small_tiles")
def test_exchanging_student_and_teacher_exchanges_beta_and_its_complement(beta: float) -> None:
    case = CASES["plain"]
    other = {"student_hidden": case["teacher_hidden"], "student": case["teacher"]}
    other |= {"teacher_hidden": case["student_hidden"], "teacher": case["student"]}
    torch.testing.assert_close(linear_divergence(**case, beta=beta), linear_divergence(**other, beta=1 - beta))


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
        found = measure(in_dtype(case, dtype), "tiled", beta=beta)
        torch.testing.assert_close(found["divergence"], torch.full((63,), bound).double(), rtol=1e-6, atol=0)
        assert all(value.isfinite().all() for value in found.values())


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("backend", ["reference", "tiled"])
@pytest.mark.usefixtures("small_tiles")
def test_gradcheck(backend: str, beta: float) -> None:
    student = normal.head(3, 35, bias=normal(35), scale=1.5, softcap=4.0, adapter=normal.lora(3, 35, rank=2))
    case = in_dtype(problem(26, 33, student=student, temperature=normal(26).exp(), vocab=33), torch.float64)
    case["student_hidden"] = normal(26, 3).requires_grad_()

    def divergence(hidden: Tensor, weight: Tensor, bias: Tensor, down: Tensor, up: Tensor) -> Tensor:
        head = student._replace(weight=weight, bias=bias, adapter=(down, up, 0.7))
        return linear_divergence(**case | {"student_hidden": hidden, "student": head}, beta=beta, backend=backend)

    assert torch.autograd.gradcheck(divergence, tuple(leaves(case).values()), fast_mode=True)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("backend", ["reference", "tiled"])
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
@pytest.mark.parametrize("backend", ["reference", "tiled"])
@pytest.mark.usefixtures("small_tiles")
def test_what_both_forbid_is_not_there(backend: str, beta: float) -> None:
    bias = forbidding(slice(40))  # one tile whole, part of the next
    case = biased(student=bias, teacher=bias) | {"temperature": normal(63).exp()}
    without = case | {name: Head(case[name].weight[40:], bias[40:]) for name in ("student", "teacher")}
    ours, expected = (measure(in_dtype(a, torch.float32), backend, beta=beta) for a in (case, without))
    for name in ("divergence", "d_hidden"):
        torch.testing.assert_close(ours[name], expected[name], rtol=1e-4, atol=1e-5)
    for name in ("d_weight", "d_bias"):
        assert (ours[name][:40] == 0).all()
        torch.testing.assert_close(ours[name][40:], expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["reference", "tiled"])
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
        value.isfinite().all() for n, value in measure(in_dtype(student, torch.float32), backend, beta=0.5).items()
    )


@pytest.mark.usefixtures("small_tiles")
def test_a_capped_bias_forbids_nothing() -> None:
    case = biased(student=forbidding(slice(7)))
    case["student"] = case["student"]._replace(softcap=5.0)
    ours, expected = (linear_divergence(**case, beta=0.0, backend=backend) for backend in ("tiled", "reference"))
    assert ours.isfinite().all()
    torch.testing.assert_close(ours, expected)
    both = biased(student=forbidding(slice(7)), teacher=forbidding(slice(7)))
    both["teacher"] = both["teacher"]._replace(softcap=5.0)
    assert linear_divergence(**both, beta=0.0).isposinf().all()


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("backend", ["reference", "tiled"])
def test_padding_has_no_probability_and_no_gradient(backend: str, beta: float) -> None:
    case = in_dtype(CASES["padded_vocabularies"], torch.float64)
    shorter = case | {name: Head(case[name].weight[:100].detach()) for name in ("student", "teacher")} | {"vocab": None}
    ours, expected = (linear_divergence(**a, beta=beta, backend=backend) for a in (case, shorter))
    torch.testing.assert_close(ours, expected)
    assert (measure(case, backend, beta=beta)["d_weight"][100:] == 0).all()


def test_without_a_limit_the_vocabulary_is_the_smaller_one() -> None:
    case = CASES["padded_vocabularies"] | {"beta": 0.5}
    torch.testing.assert_close(linear_divergence(**case | {"vocab": None}), linear_divergence(**case | {"vocab": 103}))


@pytest.mark.parametrize("beta", [0.0, 0.5])
@pytest.mark.parametrize("backend", ["reference", "tiled"])
def test_no_tokens_give_a_differentiable_zero(backend: str, beta: float) -> None:
    student = normal.head(20, 100, bias=normal(100), adapter=normal.lora(20, 100))
    case = in_dtype(problem(tokens=0, student=student, temperature=torch.ones(0)), torch.float32)
    assert measure(case, backend, beta=beta)["divergence"].shape == (0,)
    for name, leaf in leaves(case).items():
        assert leaf.grad is not None and (leaf.grad == 0).all(), name


@pytest.mark.parametrize("backend", ["reference", "tiled"])
def test_precision_is_the_students_and_every_gradient_has_that_of_its_input(backend: str) -> None:
    case = in_dtype(CASES["everything"], torch.bfloat16)
    exact = in_dtype(CASES["everything"], torch.float64)
    case |= {"teacher": exact["teacher"], "teacher_hidden": exact["teacher_hidden"]}
    case["student"] = case["student"]._replace(weight=in_dtype(case["student"].weight, torch.float32))
    divergence = linear_divergence(**case, beta=0.5, backend=backend)
    assert divergence.dtype == torch.float32
    divergence.sum().backward()
    assert all(leaf.grad is not None and leaf.grad.dtype == leaf.dtype for leaf in leaves(case).values())


def operations(case: dict[str, Any], **options: Any) -> Counter[str]:
    """How often each torch operation runs, inside the ops too."""
    with profile(activities=[ProfilerActivity.CPU]) as record:
        divergence = linear_divergence(**case, **options)
        if divergence.requires_grad:
            divergence.sum().backward()
    return Counter(event.name for event in record.events())


@pytest.mark.parametrize(("keep", "computed_again"), [(0, 12), (4 * 48 * 32 + 10, 8)])
@pytest.mark.parametrize(("beta", "passes"), [(0.0, 1), (0.5, 2), (1.0, 1)])
def test_a_pass_computes_what_was_not_kept_and_what_is_frozen_costs_nothing(
    keep: int, computed_again: int, beta: float, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = in_dtype(CASES["exact_tiles"], torch.float32)  # 2 × 3 tiles of each head
    for name, value in (("ROWS", 24), ("COLUMNS", 32), ("KEEP", keep)):
        monkeypatch.setattr(tiled_divergence, name, value)
    trained = operations(case, beta=beta)
    assert trained["aten::mm"] == 12 + passes * computed_again
    assert trained["aten::addmm_"] == 12
    case["student"] = case["student"].detach()
    assert operations(case, beta=beta)["aten::addmm_"] == 6
    case["student_hidden"] = case["student_hidden"].detach()
    assert operations(case, beta=beta)["aten::mm"] == 12 + (passes - 1) * computed_again


def test_the_logits_are_never_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled_divergence, "ROWS", 100)
    monkeypatch.setattr(tiled_divergence, "COLUMNS", 100)
    heads = {"student": normal.head(20, 1000, softcap=5.0), "teacher": normal.head(12, 1000)}
    for keep, largest in ((0, 4 * 1000 * 20), (100_000, 100_000)):  # the gradient of the weight; the tiles kept
        monkeypatch.setattr(tiled_divergence, "KEEP", keep)
        for beta in (0.0, 0.5):
            case = in_dtype(problem(200, 1000, temperature=normal(200).exp(), **heads), torch.float32)
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
                linear_divergence(**case, beta=beta).sum().backward()
            assert 0 < max(event.self_cpu_memory_usage for event in record.events()) <= largest


def test_nothing_is_kept_when_no_gradient_is_needed() -> None:
    case = in_dtype(CASES["plain"], torch.float32)
    with torch.no_grad():
        assert linear_divergence(**case, beta=0.5).grad_fn is None
    frozen = case | {"student_hidden": case["student_hidden"].detach(), "student": case["student"].detach()}
    assert linear_divergence(**frozen, beta=0.5).grad_fn is None


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

    torch.utils.checkpoint.checkpoint(run, checkpointed["student_hidden"], use_reentrant=False).sum().backward()
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


@pytest.mark.filterwarnings("ignore")  # of the compiler about itself
@pytest.mark.parametrize("small_tiles", [20_000], indirect=True, ids=["some_kept"])
@pytest.mark.usefixtures("small_tiles")
def test_opcheck() -> None:
    case = in_dtype(CASES["everything"], torch.float32)
    student, teacher = (
        [case[f"{w}_hidden"], case[w].weight, case[w].bias, case[f"{w}_hidden"].detach()[:, :3], case[w].adapter[1]]
        for w in ("student", "teacher")
    )
    frozen = [t.detach() for t in student]
    rest = *(t.detach() for t in teacher), case["temperature"].detach(), 1.5, 4.0, 0.8, 6.0
    for beta in (0.0, 0.5):
        torch.library.opcheck(tiled_divergence._forward, (*student, *rest, beta, 100, 20_000))
        divergence, *known = (t.detach() for t in tiled_divergence._forward(*student, *rest, beta, 100, 20_000))
        inputs = (divergence, *known, *frozen, *rest, beta, 100, [True, False, True, True, True])
        torch.library.opcheck(tiled_divergence._backward, inputs)


@pytest.mark.filterwarnings("ignore")  # of the compiler about itself
@pytest.mark.parametrize("small_tiles", [20_000], indirect=True, ids=["some_kept"])
@pytest.mark.usefixtures("small_tiles")
def test_compiled_tiles_are_as_good_and_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "COMPILE_FROM", 0)
    monkeypatch.setattr(tiles, "_uncompilable", set())
    torch._dynamo.reset()
    case = CASES["everything"]
    rows = ("student_hidden", "teacher_hidden", "temperature")
    for beta in (0.0, 0.5):
        assert_as_good_as_the_reference(case, beta, torch.float32)
        with torch.compiler.set_stance("fail_on_recompile"):
            assert_as_good_as_the_reference(case | {name: case[name][:30] for name in rows}, beta, torch.float32)
    assert not tiles._uncompilable


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"beta": 1.5}, r"beta must be in \[0, 1\], got 1.5"),
        ({"beta": math.nan}, r"beta must be in \[0, 1\], got nan"),
        ({"student_hidden": torch.zeros(1, 3, 20)}, r"student hidden must be \[N, D\].* got \[1, 3, 20\]"),
        ({"student_hidden": torch.zeros(4, 20)}, r"teacher hidden must be \[4, 12\], got \[3, 12\]"),
        ({"teacher_hidden": torch.zeros(3, 13)}, r"teacher weight must be \[100, 13\], got \[100, 12\]"),
        ({"teacher_hidden": torch.zeros(3, 12, device="meta")}, "teacher weight must be on meta"),
        ({"student": Head(torch.zeros(100, 21))}, r"student weight must be \[100, 20\], got \[100, 21\]"),
        ({"student": Head(torch.zeros(100, 20, dtype=torch.int8))}, "student weight must be floating-point"),
        ({"teacher": Head(torch.zeros(100, 12), bias=torch.zeros(1))}, r"teacher bias must be \[100\], got \[1\]"),
        ({"student": Head(torch.zeros(100, 20), scale=0.0)}, "student scale must be positive and finite, got 0.0"),
        ({"teacher": Head(torch.zeros(100, 12), softcap=0.0)}, "teacher softcap must be positive and finite, got 0.0"),
        (
            {"student": Head(torch.zeros(100, 20), adapter=(torch.zeros(4, 20), torch.zeros(100, 5), 1.0))},
            r"student adapter B must be \[100, 4\], got \[100, 5\]",
        ),
        ({"temperature": 0.0}, "temperature must be positive and finite, got 0.0"),
        ({"temperature": torch.tensor([1.0, 0.0, 2.0])}, "every temperature must be > 0, got 0.0"),
        ({"temperature": torch.ones(3, 1)}, r"temperature must be \[3\], got \[3, 1\]"),
        ({"vocab": 101}, r"vocab must be in \[1, 100\], got 101"),
        ({"backend": "triton"}, "backend must be 'auto', 'tiled' or 'reference', got 'triton'"),
    ],
)
@pytest.mark.parametrize("backend", ["reference", "tiled"])
def test_what_cannot_be_meant_is_an_error(backend: str, change: dict[str, Any], message: str) -> None:
    case = in_dtype(problem(tokens=3), torch.float32)
    with pytest.raises(ValueError, match=f"linear_divergence: {message}"):
        linear_divergence(**{"backend": backend, "beta": 0.5} | case | change)
