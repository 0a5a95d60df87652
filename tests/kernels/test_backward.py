"""What backward leaves out and where it adds: rows without a gradient, a budget of logits, a main
gradient.
"""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from burnish.kernels import Head, linear_logprob, passes
from heads import CASES, EXTRAS, in_dtype, leaves, logprobs, total
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

SPARSE = ["plain", "everything", "more_of_everything", "exact_tiles"]


def gradients(case: dict[str, Any], alive: Tensor, **options: Any) -> dict[str, Tensor]:
    """For upstream gradients that are 0 except in the rows that are alive."""
    leaf = in_dtype(case, torch.float64)
    result = logprobs(leaf, **options)
    found = [t for t in result if isinstance(t, Tensor) and t.requires_grad]
    random = torch.Generator().manual_seed(3)
    upstream = [torch.randn(t.shape, generator=random, dtype=t.dtype) for t in found]
    torch.autograd.backward(found, [u * alive.reshape(-1, *[1] * (u.ndim - 1)) for u in upstream])
    return {name: t.grad for name, t in leaves(leaf).items() if t.grad is not None}


@pytest.mark.parametrize("share", [0.0, 0.2, 0.85, 0.95, 1.0])
@pytest.mark.parametrize("case", SPARSE)
@pytest.mark.usefixtures("small_tiles")
def test_rows_without_a_gradient_change_nothing(case: str, share: float) -> None:
    n = len(CASES[case]["hidden"])
    alive = torch.randperm(n, generator=torch.Generator().manual_seed(4)) < share * n
    ours, exact = (
        gradients(CASES[case], alive, backend=backend) for backend in ("torch", "reference")
    )
    assert (ours["hidden"][~alive] == 0).all()
    for name, truth in exact.items():
        torch.testing.assert_close(ours[name], truth, rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize("rows", [0, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_where_no_gradient_arrives_the_weight_gets_zeros(dtype: torch.dtype, rows: int) -> None:
    """Sums of another dtype than the weight's were written into it without a product."""
    hidden, weight, bias = (
        torch.randn(shape, dtype=dtype) for shape in ((rows, 8), (63, 8), (63,))
    )
    leaves = [each.requires_grad_() for each in (hidden, weight, bias)]
    found = linear_logprob(hidden, Head(weight, bias), torch.zeros(rows, dtype=torch.int64))
    assert all((each == 0).all() for each in torch.autograd.grad((0 * found.logprob).sum(), leaves))


@pytest.mark.parametrize("keep_bytes", [0, 2**30])
def test_backward_costs_in_proportion_to_the_rows_with_a_gradient(
    keep_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, "COLUMNS", 32)

    def work(alive: int) -> int:
        case = in_dtype(CASES["exact_tiles"], torch.float32)
        logprob = logprobs(case, keep_bytes=keep_bytes).logprob
        with profile(activities=[ProfilerActivity.CPU], with_flops=True) as record:
            logprob.backward((torch.arange(len(logprob)) < alive).float())
        return sum(event.flops for event in record.events() if event.name == "aten::addmm")

    assert 0 < work(12) == work(48) / 4
    assert work(0) == 0


@pytest.mark.usefixtures("small_tiles")
def test_a_nan_that_arrives_is_not_taken_for_nothing() -> None:
    alive = torch.zeros(63, dtype=torch.float64)
    alive[7] = torch.nan
    assert gradients(CASES["plain"], alive)["hidden"][7].isnan().any()


def forward_and_backward(
    case: dict[str, Any], **options: Any
) -> tuple[dict[str, Tensor], Counter[str]]:
    leaf = in_dtype(case, torch.float32)
    with profile(activities=[ProfilerActivity.CPU]) as record:
        logprobs(leaf, **options).logprob.sum().backward()
    return {n: t.grad for n, t in leaves(leaf).items()}, Counter(
        event.name for event in record.events()
    )


def test_a_budget_saves_products_and_no_bits_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "ROWS", 48)
    monkeypatch.setattr(passes, "COLUMNS", 32)
    tile = 48 * 32 * 4
    counts = []
    for keep_bytes in (0, tile, 5 * tile, 2**40):
        grads, operations = forward_and_backward(CASES["exact_tiles"], keep_bytes=keep_bytes)
        counts.append(operations["aten::addmm"])
        if keep_bytes == 0:
            first = grads
        assert all(torch.equal(grads[name], first[name]) for name in first)
    # Three tiles forward, two products each backward, and those tiles again that were not kept.
    assert counts == [3 + 6 + 3, 3 + 6 + 2, 3 + 6 + 0, 3 + 6 + 0]


def test_every_span_that_fits_is_kept_the_last_one_too() -> None:
    """Two spans of a head of Llama 3 70B on 8 ranks: 250 MiB of logits, of which half used to be
    computed again.
    """
    with FakeTensorMode():
        hidden = torch.empty(8192, 8, dtype=torch.bfloat16)
        for keep_bytes, columns in (
            (2**40, 16032),
            (2 * 8192 * 16032, 16032),
            (2 * 8192 * 16032 - 1, 8192),
            (2**27, 8192),
        ):
            kept = passes.allocate_kept(hidden, 16032, 8192, torch.bfloat16, keep_bytes, 0)
            assert kept.nbytes == 2 * 8192 * columns, keep_bytes
        assert passes.allocate_kept(hidden[:0], 16032, 8192, torch.bfloat16, 2**30, 0).shape == (
            16032,
            0,
        )


@pytest.mark.parametrize(
    ("memory", "kept"), [(2**34, 2**29), (2**40, 2**32)], ids=["16 GiB", "1 TiB"]
)
def test_by_default_a_gpu_keeps_a_thirty_second_of_its_memory_and_at_most_4_gib(
    memory: int, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.is_available():
        torch.cuda.init()  # which asks for the properties of the device that is there
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=memory)
    )
    with FakeTensorMode():
        hidden = torch.empty(1024, 8, dtype=torch.bfloat16, device="cuda")
        assert passes.allocate_kept(hidden, 2**24, 256, torch.bfloat16, None, 0).nbytes == kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("small_tiles")
def test_a_main_gradient_takes_what_the_weight_would_get(dtype: torch.dtype) -> None:
    case = CASES["everything"] | {"outputs": EXTRAS}
    whole = in_dtype(in_dtype(case, dtype), torch.float32)
    total(logprobs(whole, compute_dtype=dtype)).backward()
    given, main_grad = in_dtype(case, dtype), torch.full_like(whole["weight"].detach(), 3.0)
    for _ in range(2):  # micro-batches: their gradients are added without rounding
        total(logprobs(given, main_grad=main_grad)).backward()
    assert given["weight"].grad is None
    assert given["bias"].grad is not None and given["hidden"].grad is not None
    torch.testing.assert_close(main_grad, 3.0 + 2 * whole["weight"].grad, rtol=1e-5, atol=1e-5)


def test_the_main_gradient_of_a_frozen_weight_stays_as_it_is() -> None:
    case = in_dtype(CASES["plain"], torch.float32)
    case["weight"] = case["weight"].detach()
    main_grad = torch.zeros_like(case["weight"])
    logprobs(case, main_grad=main_grad).logprob.sum().backward()
    assert (main_grad == 0).all()


def test_a_main_gradient_of_a_half_empty_batch_is_the_same() -> None:
    found = []
    for rows in (slice(None), slice(0, 9)):
        case = in_dtype(CASES["plain"], torch.float32)
        main_grad = torch.zeros_like(case["weight"].detach())
        chosen = case | {"hidden": case["hidden"][rows], "target": case["target"][rows]}
        logprob = logprobs(chosen, main_grad=main_grad).logprob
        logprob.backward((torch.arange(len(logprob)) < 9).float())
        found.append(main_grad)
    torch.testing.assert_close(*found)
