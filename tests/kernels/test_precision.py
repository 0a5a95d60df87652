"""The precision policy: every pass rounds the same factors to the same dtype, and sums in
float32.
"""

import importlib
from typing import Any

import pytest
import tensor_cores
import torch
from burnish.kernels import (
    Head,
    backend,
    head,
    linear_divergence,
    linear_logits,
    linear_logprob,
    passes,
    reference,
)
from heads import CASES, in_dtype, leaves, logprobs
from heads import head as head_of
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = ["torch", "triton", "fused", "reference"]
needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    for prefix in ("", "GPU_"):
        # of 63 rows four tiles: two at once come twice
        monkeypatch.setattr(passes, f"{prefix}ROWS", 16)
        monkeypatch.setattr(passes, f"{prefix}COLUMNS", 64)


def autocast(
    dtype: torch.dtype = torch.bfloat16, enabled: bool = True, device: str = DEVICE
) -> Any:
    return torch.autocast(device, dtype=dtype, enabled=enabled)


def on_device(case: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    def move(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(move, value))
        return value.to(DEVICE) if isinstance(value, Tensor) else value

    return in_dtype({name: move(value) for name, value in case.items()}, dtype)


def wide(**changes: Any) -> dict[str, Any]:
    """Logits of about ±4 from 1024 hidden features, where rounding to 16 bits is seen: 5e-3 of a
    log-prob.
    """
    return head_of(20, 1024, 150, **changes)


def exact(case: dict[str, Any], compute: torch.dtype) -> Tensor:
    """Log-probs in float64, of factors that are rounded."""
    weight, bias, adapter = case["weight"], case.get("bias"), case.get("adapter")
    given = Head(weight.double(), bias, adapter=adapter)
    options: dict[str, Any] = {
        "temperature": case.get("temperature", 1.0),
        "vocab": len(weight),
        "outputs": (),
    }
    return reference.linear_logprob(
        case["hidden"].double(), given, case["target"], compute_dtype=compute, **options
    ).logprob


ADAPTER = {"adapter": lambda normal: (normal(3, 1024) / 32, normal(150, 3), 0.7)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "changes", [{}, ADAPTER, {"bias": lambda normal: normal(150)}], ids=["plain", "lora", "bias"]
)
def test_under_autocast_float32_factors_are_rounded_with_gradients_and_without(
    backend: str, changes: dict[str, Any], dtype: torch.dtype
) -> None:
    case = on_device(wide(**changes), torch.float32)
    wanted = exact(case, dtype)
    unrounded = exact(case, torch.float32)
    coarser = torch.finfo(dtype).eps / torch.finfo(torch.bfloat16).eps
    # else nothing is tested
    assert (wanted - unrounded).square().mean().sqrt() > 2e-3 * coarser
    with autocast(dtype):
        trained = logprobs(case, backend=backend).logprob
        with torch.no_grad():
            measured = logprobs(case, backend=backend).logprob
    assert trained.requires_grad and trained.dtype == torch.float32
    for found in (trained, measured):
        assert (found - wanted).abs().max() <= 2e-4 * coarser
    assert (trained - measured).square().mean().sqrt() <= 1e-5


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of Triton's interpreter
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_overflows_in_float16_is_not_finite_and_other_rows_are_as_they_were(
    backend: str,
) -> None:
    case = on_device(wide(), torch.float32)
    with torch.no_grad():
        with autocast(torch.float16):
            before = logprobs(case, backend=backend).logprob
        case["hidden"][3, 0] = 1e5  # the largest float16 is 65504
        with autocast(torch.float16):
            after = logprobs(case, backend=backend).logprob
    others = torch.arange(len(after)) != 3
    assert not after[3].isfinite().any()
    assert torch.equal(after[others], before[others])


@pytest.mark.parametrize("backend", ["torch", "triton", "reference"])
def test_a_gradient_that_overflows_in_float16_is_not_finite(backend: str) -> None:
    """So that the step is skipped: it is neither cut at the largest number nor a finite one."""
    for scale, finite in ((2.0**8, True), (1e12, False)):
        case = on_device(wide(), torch.float32)
        weight = case["weight"]
        hidden = case["hidden"].detach().half().requires_grad_()
        with autocast(torch.float16):
            logprob = logprobs(case | {"hidden": hidden}, backend=backend).logprob
        (logprob.sum() * scale).backward()
        assert hidden.grad is not None and hidden.grad.dtype == torch.float16
        assert bool(hidden.grad.isfinite().all()) == finite
        assert weight.grad.isfinite().all()  # in float32

        other = on_device(wide(weight=spread(0.1)), torch.float32)
        student = case["hidden"].detach().half().requires_grad_()
        heads = Head(weight.detach()), other["hidden"].detach().half(), Head(other["weight"])
        with autocast(torch.float16):
            divergence = linear_divergence(student, *heads, beta=0.0, backend=backend)
        (divergence.sum() * scale).backward()
        assert student.grad is not None and bool(student.grad.isfinite().all()) == finite


def test_gradients_of_16_bit_hidden_states_are_rounded_once_with_an_adapter_too() -> None:
    """Those of the head and of the adapter are added before: bit by bit as for the same numbers in
    float32.
    """
    case = in_dtype(CASES["adapter"], torch.float32)
    gradients = []
    for dtype in (torch.bfloat16, torch.float32):
        hidden = case["hidden"].detach().bfloat16().to(dtype).requires_grad_()
        logprobs(
            case | {"hidden": hidden}, backend="torch", compute_dtype=torch.bfloat16
        ).logprob.sum().backward()
        gradients.append(hidden.grad)
    assert torch.equal(gradients[0], gradients[1].bfloat16())


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_no_gradient_is_rounded_because_its_float32_factor_was(backend: str) -> None:
    case = on_device(wide(**ADAPTER), torch.float32)
    with autocast():
        trained = logprobs(case, backend=backend).logprob
    trained.sum().backward()
    assert not [
        name
        for name, leaf in leaves(case).items()
        if torch.equal(leaf.grad, leaf.grad.bfloat16().float())
    ]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_float32_weight_is_rounded_to_16_bit_hidden_states_in_every_pass(backend: str) -> None:
    case = on_device(wide(), torch.float32)
    case["hidden"] = case["hidden"].detach().bfloat16()
    with torch.no_grad():
        measured = logprobs(case, backend=backend).logprob
    case["hidden"].requires_grad_()
    trained = logprobs(case, backend=backend).logprob
    wanted = exact(case, torch.bfloat16)
    assert (trained - wanted).abs().max() <= 2e-4 and (measured - wanted).abs().max() <= 2e-4


@pytest.mark.parametrize("backend", BACKENDS)
def test_float32_products_can_be_asked_for(backend: str) -> None:
    case = on_device(wide(**ADAPTER), torch.float32)
    off = logprobs(case, backend=backend).logprob
    with autocast():
        asked = logprobs(case, backend=backend, compute_dtype=torch.float32).logprob
    assert torch.equal(off, asked)


def test_a_compute_dtype_is_float32_or_one_of_16_bits() -> None:
    with pytest.raises(
        ValueError,
        match=r"linear_logprob: compute_dtype must be float32, bfloat16, float16 or None",
    ):
        logprobs(in_dtype(CASES["plain"], torch.float32), compute_dtype=torch.float64)


def test_autocast_leaves_float64_alone() -> None:
    case = on_device(wide(), torch.float64)
    with autocast():
        found = logprobs(case, backend="torch").logprob
    torch.testing.assert_close(found, exact(case, torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_drawn_from_is_what_is_trained(dtype: torch.dtype) -> None:
    """The sampler's logits round as the trainer's log-probs: float32 under autocast, and weights of
    16 bits.
    """
    case = on_device(wide(**ADAPTER), dtype)
    target, hidden = case["target"], case["hidden"]
    with autocast(enabled=dtype == torch.float32):
        given = Head(case["weight"], adapter=case["adapter"], scale=0.5, softcap=30.0)
        logits = linear_logits(hidden, given)
        trained = linear_logprob(hidden, given, target).logprob
    assert logits.dtype == torch.float32 and not logits.requires_grad
    drawn = logits.log_softmax(-1).gather(1, target[:, None])[:, 0]
    assert (drawn - trained).abs().max() <= 2e-5


def test_logits_without_padding_and_of_a_shard() -> None:
    hidden, weight = torch.randn(3, 8), torch.randn(20, 8)
    assert torch.equal(
        linear_logits(hidden, Head(weight), vocab=17), linear_logits(hidden, Head(weight))[:, :17]
    )
    with pytest.raises(ValueError, match="linear_logits: the head must hold its whole vocabulary"):
        linear_logits(hidden, Head(weight, shard=head.Shard(None, 0)))  # type: ignore[arg-type]


def spread(size: float) -> Any:
    return lambda normal: normal(150, 1024) * size


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_both_heads_of_a_divergence_are_rounded_under_autocast(dtype: torch.dtype) -> None:
    case, other = (
        on_device(head_of(48, 1024, 150, weight=w), torch.float32)
        for w in (spread(0.1), spread(0.12))
    )
    heads = case["hidden"], Head(case["weight"]), other["hidden"], Head(other["weight"])
    with autocast(dtype):
        found = linear_divergence(*heads, beta=0.0)
    rounded = [
        t.detach().to(dtype).double()
        for t in (case["hidden"], case["weight"], other["hidden"], other["weight"])
    ]
    s, t = ((h @ w.T).log_softmax(-1) for h, w in (rounded[:2], rounded[2:]))
    wanted = (t.exp() * (t - s)).sum(1)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=2e-5)
    found.sum().backward()
    assert case["weight"].grad.dtype == torch.float32 and case["hidden"].grad.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "at_once", [1, 2, 4], ids=["a_tile_at_once", "two_tiles_at_once", "all_rows_at_once"]
)
def test_on_tensor_cores_no_product_has_a_float32_factor(
    dtype: torch.dtype, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a GPU would multiply: float32 weights under autocast, bf16 weights without; LoRA on the
    head as well.
    """
    made = tensor_cores.emulate(monkeypatch)
    monkeypatch.setattr(passes, "TILES_AT_ONCE", {"cpu": at_once, "cuda": at_once})
    n, v, d, r = 63, 150, 32, 3
    case = in_dtype(
        head_of(n, d, v, adapter=lambda normal: (normal(r, d) / d, normal(v, r), 0.7)), dtype
    )
    with autocast(enabled=dtype == torch.float32, device="cpu"):
        logprobs(case, backend="torch", keep_bytes=0).logprob.sum().backward()
    assert made and all(a == b == torch.bfloat16 for _, a, b, _ in made)
    # and of u = h·Aᵀ, its gradient and that of A
    assert sum(operations for *_, operations in made) == 8 * n * v * (d + r) + 6 * n * d * r
    products = 3 * (63 // 16 + 1)  # of spans of the vocabulary and tiles of rows
    blocks = 3 * -(-63 // (16 * at_once))
    # Logits twice, dh, dW: the last two for all rows whose dc is there at once; and the same of u
    # and B.
    assert len(made) == 2 * (2 * products + 2 * blocks) + 3
    written = [out for out, *_ in made[2 * products :]]
    sums_of_16_bits = written.count(torch.bfloat16)
    # dW, dB: rounded at once
    assert sums_of_16_bits == (2 * blocks if dtype == torch.bfloat16 and at_once == 4 else 0)
    grads = {name: leaf.grad for name, leaf in leaves(case).items()}
    monkeypatch.undo()
    with autocast(enabled=dtype == torch.float32, device="cpu"):
        again = {
            name: leaf.detach().clone().requires_grad_() for name, leaf in leaves(case).items()
        }
        plain = case | again | {"adapter": (again["A"], again["B"], 0.7)}
        for name in ("A", "B"):
            del plain[name]
        logprobs(plain, backend="torch").logprob.sum().backward()
    for name, leaf in again.items():
        # dc is rounded to 16 bits as well
        assert (grads[name] - leaf.grad).norm() <= 6e-3 * leaf.grad.norm(), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_on_tensor_cores_an_adapter_is_rounded_once_and_its_gradient_is_not(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """u = scaling·h·Aᵀ of float32 weights under autocast, with an upstream gradient of 1e-7, below
    which float16 has nothing.
    """
    tensor_cores.emulate(monkeypatch)
    case = in_dtype(wide(**ADAPTER), torch.float32)
    wanted = exact(case, dtype)
    with autocast(dtype, device="cpu"):
        trained = logprobs(case, backend="torch").logprob
    assert (trained - wanted).abs().max() <= 2e-4
    (1e-7 * trained.sum()).backward()
    found = {name: leaf.grad for name, leaf in leaves(case).items() if name != "weight"}
    assert not [name for name, grad in found.items() if torch.equal(grad, grad.to(dtype).float())]
    right = in_dtype(case, torch.float64)
    (1e-7 * logprobs(right, backend="reference").logprob.sum()).backward()
    for name, grad in found.items():
        error = (grad - leaves(right)[name].grad).norm() / leaves(right)[name].grad.norm()
        assert error <= 2e-2, name


def test_kept_logits_have_as_many_bits_as_factors_and_in_16_the_most_digits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = importlib.import_module("burnish.kernels.linear_logprob")
    monkeypatch.setattr(backend, "TENSOR_CORES", ("cpu", "cuda"))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        hidden, target = torch.zeros(24, 8, dtype=dtype), torch.zeros(24, 1, dtype=torch.int64)
        given = module.LogprobArguments(hidden, hidden, *[None] * 4, target, None, 1.0, None, 150, 0, None,
                                        *[False] * 3, 0, 24, 64, 2**20, "triton", dtype)  # fmt: skip
        kept, tops, *_ = given.allocate()
        assert kept.dtype == (torch.float32 if dtype == torch.float32 else torch.float16)
        assert tops.dtype == torch.float32


def test_a_gpu_cuts_off_what_is_ragged() -> None:
    """GPT-2's vocabulary, Qwen's without its padding, and one that is smaller than a tile."""
    gpu = torch.device("cuda")
    for vocab, last in ((50257, 17), (151669, 53), (100, 36), (63, 63)):
        found = list(passes.vocabulary_spans(vocab, 8192, gpu))
        assert [s.stop for s in found[:-1]] == [s.start for s in found[1:]]
        assert found[0].start == 0 and found[-1] == slice(vocab - last, vocab)
        assert all((s.stop - s.start) % 64 == 0 for s in found[:-1])
    assert list(passes.vocabulary_spans(100, 64, torch.device("cpu"))) == [
        slice(0, 64),
        slice(64, 100),
    ]


def test_operators_that_wait_are_not_captured_in_graphs() -> None:
    for name in (
        "linear_logprob",
        "linear_logprob_backward",
        "linear_divergence",
        "logits_logprob",
    ):
        assert torch.Tag.cudagraph_unsafe in getattr(torch.ops.burnish, name).default.tags


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_the_fused_kernel_has_tf32_where_torch_has(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = pytest.importorskip("burnish.kernels.triton_forward", reason="needs triton")
    asked: list[str] = []

    class Kernel:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *arguments, PRECISION, **options: asked.append(PRECISION)

    monkeypatch.setattr(forward, "_forward_kernel", Kernel())
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        with torch.no_grad():
            logprobs(on_device(CASES["plain"], torch.float32), backend="fused")
    finally:
        torch.set_float32_matmul_precision(before)
    assert asked == ["ieee" if precision == "highest" else "tf32"]


@needs_gpu
class TestOnTheGpu:
    def step(self, **options: Any) -> None:
        hidden = torch.randn(256, 512, device="cuda", requires_grad=True)
        weight = (torch.randn(5000, 512, device="cuda") / 8).requires_grad_()
        target = torch.randint(5000, (256,), device="cuda")
        adapter = tuple(
            torch.randn(*shape, device="cuda", requires_grad=True)
            for shape in ((8, 512), (5000, 8))
        )
        with torch.autocast("cuda", dtype=torch.bfloat16):
            given = Head(weight, adapter=(*adapter, 0.5))
            linear_logprob(hidden, given, target, **options).logprob.sum().backward()
            with torch.no_grad():
                linear_logprob(hidden, given, target, **options)

    def test_no_product_under_autocast_is_float32(self) -> None:
        self.step()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            self.step()
        names = {event.key.lower() for event in profile.key_averages()}
        words = "gemm", "cutlass", "xmma", "nvjet"
        products = [name for name in names if any(word in name for word in words)]
        assert products, names
        # nvjet names its dtypes: s is float32, t bfloat16, h float16, and the second is of factors
        of_float32 = "sgemm", "f32f32_f32f32", "tf32", "simt", "nvjet_ss"
        assert not [name for name in products if any(word in name for word in of_float32)]

    def test_forward_and_backward_wait_once_each(self) -> None:
        self.step()
        with pytest.warns(UserWarning, match="called a synchronizing") as waits:
            torch.cuda.set_sync_debug_mode("warn")
            try:
                self.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        found = [wait for wait in waits if "called a synchronizing" in str(wait.message)]
        # two forwards, one backward
        assert len(found) == 3, [f"{wait.filename}:{wait.lineno}" for wait in found]
