"""The Triton backends of ``linear_logprob`` and ``logits_logprob``: on a GPU where there is one,
else interpreted.
"""

import importlib
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from burnish.kernels import Head, backend, launch_table, linear_logprob, logits_logprob, passes
from burnish.kernels.head import HeadFactors
from grids import slow
from heads import (
    CASES,
    EXTRAS,
    OUTPUTS,
    assert_as_good_as_the_reference,
    head,
    in_dtype,
    leaves,
    logprobs,
    measure,
    total,
)
from torch import Tensor
from torch._subclasses import FakeTensorMode

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def small_tiles_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    for prefix in ("", "GPU_"):
        monkeypatch.setattr(passes, f"{prefix}ROWS", 8)
        monkeypatch.setattr(passes, f"{prefix}COLUMNS", 64)


def on_device(case: dict[str, Any]) -> dict[str, Any]:
    """The case with no more rows than a tile and a bit: the interpreter is slow."""

    def move(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(move(item) for item in value)
        return value.to(DEVICE) if isinstance(value, Tensor) else value

    rows = {
        name: case[name][:11]
        for name in ("hidden", "target", "temperature")
        if isinstance(case.get(name), Tensor)
    }
    return {name: move(value) for name, value in (case | rows).items()}


# the interpreter is slow
FEW = ["plain", "one_column", "peaked", "padded_vocabulary", "more_of_everything"]
SOME = [case if case in FEW else slow(case) for case in CASES]


@pytest.mark.parametrize(
    ("case", "keep_bytes"),
    [
        *((case, 0) if case in FEW else slow(case, 0) for case in CASES),
        ("everything", 2**20),
        slow("plain", 2**20),
    ],
)
def test_triton_is_as_close_to_float64_as_the_reference(case: str, keep_bytes: int) -> None:
    case_with = on_device(CASES[case]) | {"keep_bytes": keep_bytes}
    assert_as_good_as_the_reference(case_with, torch.float32, "triton")


@pytest.mark.parametrize("case", SOME)
def test_fused_is_as_close_to_float64_as_the_reference(case: str) -> None:
    assert_as_good_as_the_reference(on_device(CASES[case]), torch.float32, "fused")


@pytest.mark.parametrize(
    "outputs", [(OUTPUTS[0],), (EXTRAS[0],), *(slow((n,)) for n in (*OUTPUTS[1:], EXTRAS[1]))]
)
def test_each_output_alone_has_its_gradient(outputs: tuple[str, ...]) -> None:
    case = on_device(CASES["more_of_everything"])
    assert_as_good_as_the_reference(case, torch.float32, "triton", outputs=outputs)


@pytest.mark.parametrize("keep_bytes", [0, 2**20])
@pytest.mark.parametrize("backend", ["torch", "triton", "fused", "reference"])
def test_a_row_without_a_possible_token_has_no_distribution(backend: str, keep_bytes: int) -> None:
    """NaN, as by the definition, so that a step with it is refused: not numbers that depend on how
    the vocabulary is cut.
    """
    case = on_device(head(5, 20, 100, bias=torch.full((100,), -torch.inf)))
    case = in_dtype(case | {"outputs": EXTRAS}, torch.float32)
    found = logprobs(case, backend=backend, keep_bytes=keep_bytes)
    assert found.logprob.isnan().all() and found.entropy.isnan().all()
    assert found.mean_logprob is not None and found.mean_logprob.isnan().all()
    assert found.logsumexp.isneginf().all()
    if backend != "reference":
        found.entropy.sum().backward()
        assert case["hidden"].grad.isnan().all()


@pytest.mark.parametrize("backend", ["triton", "fused"])
def test_no_tokens_give_a_differentiable_zero(backend: str) -> None:
    case = in_dtype(on_device(head(0, 20, 100)), torch.float32)
    total(logprobs(case, backend=backend)).backward()
    assert all((leaf.grad == 0).all() for leaf in leaves(case).values())


@pytest.mark.parametrize("backend", ["triton", "fused"])
def test_two_runs_give_the_same_bits(backend: str) -> None:
    once, again = (
        measure(in_dtype(on_device(CASES["everything"]), torch.float32), backend) for _ in range(2)
    )
    for name, expected in once.items():
        torch.testing.assert_close(again[name], expected, rtol=0, atol=0)


@pytest.mark.parametrize("columns_apart", [False, True])
def test_logits_by_triton_are_as_close_to_float64_as_the_reference(columns_apart: bool) -> None:
    random = torch.Generator().manual_seed(0)
    logits, target = torch.randn(15, 107, generator=random) * 4, torch.arange(15) * 4
    logits[:, 64:80] = -torch.inf

    def measured(dtype: torch.dtype, backend: str) -> list[Tensor]:
        z = logits.to(DEVICE, dtype, copy=True).requires_grad_()
        temperature = (torch.arange(15, device=DEVICE, dtype=dtype) / 16 + 0.5).requires_grad_()
        given: Any = {
            "temperature": temperature,
            "vocab": 100,
            "outputs": EXTRAS,
            "backend": backend,
        }
        apart = z.repeat_interleave(2, 1)[:, ::2] if columns_apart else z
        found = logits_logprob(apart, target.to(DEVICE), **given)[:5]
        torch.autograd.backward(
            found, [(torch.arange(15, device=DEVICE, dtype=f.dtype) - 7) / 8 for f in found]
        )
        return [t.double() for t in (*found, z.grad, temperature.grad)]

    exact, plain, ours = (
        measured(torch.float64, "reference"),
        measured(torch.float32, "reference"),
        None,
    )
    ours = measured(torch.float32, "triton")
    for truth, reference, found in zip(exact, plain, ours, strict=True):
        finite = truth.isfinite()
        assert torch.equal(truth[~finite], found[~finite])
        allowed = 2 * (reference - truth)[finite].abs().max() + 1e-6
        assert (found - truth)[finite].abs().max() <= allowed


def test_auto_has_triton_on_a_gpu_where_it_is_installed_and_numbers_below_float64(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for device, dtype, installed in itertools.product(
        ["cpu", "cuda"], [torch.float32, torch.float64], [True, False]
    ):
        monkeypatch.setattr(backend, "_TRITON", installed)
        with FakeTensorMode():
            found = backend.choose_backend(
                "me", "auto", torch.empty(3, 4, dtype=dtype, device=device)
            )
        assert found == (
            "auto" if (device, dtype, installed) == ("cuda", torch.float32, True) else "torch"
        )


# architecture, dtype of factors, dtype of W, D: where the fused kernel is predicted to be faster
PLANS = {
    (90, "bfloat16", "bfloat16", 576): "fused",  # measured
    (90, "float16", "float16", 2048): "fused",
    (90, "bfloat16", "bfloat16", 2049): "triton",  # too wide
    (90, "bfloat16", "bfloat16", 4096): "triton",
    (90, "float32", "float32", 576): "triton",  # no tensor cores
    (90, "bfloat16", "float32", 576): "triton",  # there would have to be a copy of W
    (80, "bfloat16", "bfloat16", 2048): "triton",  # not measured
    (86, "bfloat16", "bfloat16", 2048): "triton",
    (89, "float16", "float16", 576): "triton",
    (100, "bfloat16", "bfloat16", 1024): "triton",
    (103, "bfloat16", "bfloat16", 1024): "triton",
    (120, "bfloat16", "bfloat16", 1024): "triton",
    (121, "bfloat16", "bfloat16", 1024): "triton",
    ("gfx942", "bfloat16", "bfloat16", 1024): "triton",
    ("gfx950", "bfloat16", "bfloat16", 1024): "triton",
    (70, "float16", "float16", 576): "triton",  # no row in the launch table
    (75, "float16", "float16", 576): "triton",
}


@pytest.mark.parametrize(("graph", "ranked"), [(False, False), (True, False), (False, True)])
def test_auto_is_fused_only_where_it_was_measured_to_be_faster(
    graph: bool, ranked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = importlib.import_module("burnish.kernels.linear_logprob").plan
    for (architecture, compute, weight, width), expected in PLANS.items():
        monkeypatch.setattr(
            launch_table, "architecture_of", lambda device, found=architecture: found
        )
        hidden = torch.zeros(3, width, dtype=getattr(torch, compute))
        head = Head(torch.zeros(5, width, dtype=getattr(torch, weight)))
        factors = HeadFactors.of(hidden, head, getattr(torch, compute))
        found = plan(factors, "auto", None, graph=graph, ranked=ranked).backend
        assert found == (expected if not graph and not ranked else "triton"), (
            architecture,
            compute,
            width,
        )
        # who asks for it has it
        assert plan(factors, "fused", None, graph=graph, ranked=ranked).backend == "fused"


def test_what_is_fused_has_a_row_in_the_launch_table() -> None:
    assert set(launch_table.SIXTEEN_BITS) >= launch_table.FUSED_WITHOUT_GRADIENTS


def test_only_a_gradient_makes_forward_keep_logits() -> None:
    plan = importlib.import_module("burnish.kernels.linear_logprob").plan
    plain = HeadFactors.of(torch.zeros(3, 4), Head(torch.zeros(5, 4)))
    assert plan(plain, "triton", None, graph=False, ranked=False).keep_bytes == 0
    # the device's default
    assert plan(plain, "triton", None, graph=True, ranked=False).keep_bytes is None


def test_the_architecture_of_a_gpu_is_its_compute_capability(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert launch_table.architecture_of(torch.device("cuda", 0)) == 89
    monkeypatch.setattr(torch.version, "hip", "6.4")
    gpu = SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    assert launch_table.architecture_of(torch.device("cuda", 0)) == "gfx942"


@pytest.mark.parametrize(
    "asked", [{"outputs": ("top1",)}, {"outputs": ("rank",)}, {"top_k": 1}], ids=str
)
def test_what_is_ranked_auto_does_not_leave_to_a_kernel_without_tiles(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU "auto" remains until the plan; here it is made to."""
    module = importlib.import_module("burnish.kernels.linear_logprob")
    monkeypatch.setattr(module, "choose_backend", lambda who, backend, like: backend)
    case = on_device(in_dtype(CASES["plain"], torch.float32))
    with torch.no_grad():
        found, expected = (
            logprobs(case, **asked, backend=backend) for backend in ("auto", "reference")
        )
    assert found.top1 is None or torch.equal(found.top1, expected.top1)
    assert found.rank is None or torch.equal(found.rank, expected.rank)
    assert found.top_k is None or torch.equal(found.top_k.ids, expected.top_k.ids)


def test_ranks_need_tiles() -> None:
    case = on_device(in_dtype(CASES["plain"], torch.float32))
    with pytest.raises(ValueError, match="backend='fused' sees no tile of logits to rank"):
        logprobs(case, outputs=("rank",), backend="fused")


@pytest.mark.parametrize("backend", ["triton", "fused"])
def test_triton_without_a_gpu_or_in_float64_says_what_to_do(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        ValueError, match=f"backend='{backend}' has no float64; use 'torch' or 'reference'"
    ):
        logprobs(CASES["plain"], backend=backend)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(
        ValueError,
        match=r"runs on a GPU, and the tensors are on cpu; use 'torch', or Triton's inter",
    ):
        logprobs(in_dtype(CASES["plain"], torch.float32), backend=backend)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
class TestOnTheGpu:
    """What the interpreter can't show: 16 bits, memory, and the products of tensor cores."""

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("backend", ["triton", "fused"])
    @pytest.mark.parametrize("case", CASES)
    def test_sixteen_bits_are_as_close_to_float64_as_the_reference(
        self, case: str, backend: str, dtype: torch.dtype
    ) -> None:
        for keep_bytes in (0, 2**20):
            if not (backend == "fused" and keep_bytes):
                case_with = on_device(CASES[case]) | {"keep_bytes": keep_bytes}
                assert_as_good_as_the_reference(case_with, dtype, backend, "of 16 bits")

    @pytest.mark.parametrize("backend", ["triton", "fused"])
    def test_bfloat16_logprobs_are_within_1e_4_of_float64(self, backend: str) -> None:
        """Hopper's tensor cores truncate their sums after every 16 products: 2e-5 at D = 1024 in
        simulation.
        """
        random = torch.Generator("cuda").manual_seed(0)
        hidden = torch.randn(512, 1024, generator=random, device="cuda").bfloat16()
        weight = (torch.randn(32768, 1024, generator=random, device="cuda") / 8).bfloat16()
        target = torch.randint(32768, (512,), generator=random, device="cuda")
        exact = linear_logprob(hidden.double(), weight.double(), target, backend="reference")
        ours = linear_logprob(hidden, weight, target, backend=backend)
        assert (ours.logprob - exact.logprob).abs().max() <= 1e-4
        assert (ours.entropy - exact.entropy).abs().max() <= 1e-4

    @pytest.mark.parametrize("backend", ["triton", "fused"])
    def test_logits_are_never_in_memory(
        self, backend: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(passes, "GPU_ROWS", 256)
        monkeypatch.setattr(passes, "GPU_COLUMNS", 1024)
        hidden = torch.randn(1024, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        weight = torch.randn(65536, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        target = torch.randint(65536, (1024,), device="cuda")
        for _ in range(2):  # the first run compiles
            hidden.grad = weight.grad = None
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            linear_logprob(
                hidden, weight, target, keep_bytes=0, backend=backend
            ).logprob.sum().backward()
        used = torch.cuda.max_memory_allocated() - before
        assert used <= 2 * weight.nbytes + 8 * 256 * 1024 + 2**22 < 1024 * 65536
