"""``linear_logprob``: backend "torch" against the definition, and the definition against the
equations.
"""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from burnish.kernels import Logprobs, linear_logprob, passes, softmax
from grids import grid
from heads import (
    CASES,
    EXTRAS,
    OUTPUTS,
    allocations,
    assert_as_good_as_the_reference,
    head,
    ids,
    in_dtype,
    leaves,
    logprobs,
    lora,
    measure,
    recorded,
    total,
)
from torch import Tensor


@grid(
    strength=2, case=CASES, dtype=[torch.float64, torch.float32, torch.bfloat16], keep=[0, 20_000]
)
def test_it_is_as_close_to_float64_as_the_reference(
    case: str, dtype: torch.dtype, keep: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, size in {"ROWS": 24, "COLUMNS": 32, "KEEP": keep}.items():
        monkeypatch.setattr(passes, name, size)
    assert_as_good_as_the_reference(CASES[case], dtype)


@pytest.mark.parametrize(
    "outputs", [(name,) for name in OUTPUTS] + [OUTPUTS[:2], OUTPUTS[1:]], ids="+".join
)
@pytest.mark.parametrize("case", ["plain", "everything"])
@pytest.mark.usefixtures("small_tiles")
def test_any_subset_of_outputs_has_its_gradient(case: str, outputs: tuple[str, ...]) -> None:
    assert_as_good_as_the_reference(CASES[case], torch.float32, outputs=outputs)


@pytest.mark.parametrize(
    "outputs", [(name,) for name in EXTRAS] + [EXTRAS, ("entropy", *EXTRAS)], ids="+".join
)
@pytest.mark.usefixtures("small_tiles")
def test_any_subset_of_more_outputs_has_its_gradient(outputs: tuple[str, ...]) -> None:
    assert_as_good_as_the_reference(CASES["more_of_everything"], torch.float32, outputs=outputs)


def test_tiles_of_real_size_are_exact_too() -> None:
    case = head(
        passes.ROWS + 7,
        8,
        2 * passes.COLUMNS + 5,
        bias=lambda normal: normal(2 * passes.COLUMNS + 5),
    )
    assert_as_good_as_the_reference(case, torch.float32)


@pytest.mark.usefixtures("small_tiles")
def test_float64_agrees_to_the_last_digits() -> None:
    for case in CASES.values():
        ours, exact = (
            measure(in_dtype(case, torch.float64), backend) for backend in ("torch", "reference")
        )
        for name, truth in exact.items():
            torch.testing.assert_close(ours[name], truth, rtol=1e-12, atol=1e-11)


def test_reference_equals_the_equations() -> None:
    a = CASES["everything"] | {"outputs": EXTRAS}
    (down, up, scaling), n = a["adapter"], len(a["target"])
    c = a["hidden"] @ (a["weight"] + scaling * up @ down).T + a["bias"]
    z = (a["softcap"] * torch.tanh(a["scale"] * c / a["softcap"]) / a["temperature"][:, None])[
        :, : a["vocab"]
    ]
    p = z.exp() / z.exp().sum(1, keepdim=True)
    ours = logprobs(a, backend="reference")
    torch.testing.assert_close(ours.logprob, p[torch.arange(n), a["target"]].log())
    torch.testing.assert_close(ours.entropy, -(p * p.log()).sum(1))
    torch.testing.assert_close(ours.logsumexp, z.exp().sum(1).log())
    torch.testing.assert_close(ours.mean_logprob, p.log().mean(1))
    torch.testing.assert_close(ours.log_sum_squares, (p * p).sum(1).log())


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.usefixtures("small_tiles")
def test_several_targets_are_the_targets_one_by_one(backend: str) -> None:
    case = CASES["everything"] | {"target": ids(63, 4, 100), "backend": backend}
    together = logprobs(case)
    alone = [logprobs(case | {"target": target}) for target in case["target"].unbind(1)]
    torch.testing.assert_close(
        together.logprob, torch.stack([one.logprob for one in alone], 1), rtol=0, atol=1e-14
    )
    torch.testing.assert_close(together[1:3], alone[0][1:3], rtol=0, atol=0)


@pytest.mark.usefixtures("small_tiles")
def test_gathering_the_whole_vocabulary_gives_probabilities_that_sum_to_one() -> None:
    case = CASES["everything"]
    logp = logprobs(case | {"target": torch.arange(100).expand(63, 100)}).logprob
    torch.testing.assert_close(logp.exp().sum(1), torch.ones(63).double())
    expected = logprobs(case).logprob
    torch.testing.assert_close(logp.gather(1, case["target"][:, None])[:, 0], expected)


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.usefixtures("small_tiles")
def test_gradcheck(backend: str) -> None:
    case = in_dtype(
        head(26, 3, 35, vocab=33, target=ids(26, 4, 33), outputs=EXTRAS, bias=lambda normal: normal(35), softcap=4.0,
             scale=1.5, temperature=lambda normal: normal(26).exp(), adapter=lora(3, 35, rank=2)), torch.float64,
    )  # fmt: skip
    tensors = leaves(case)

    def outputs(
        hidden: Tensor, weight: Tensor, bias: Tensor, temperature: Tensor, down: Tensor, up: Tensor
    ) -> tuple[Tensor, ...]:
        adapter = (down, up, case["adapter"][2])
        given = {
            "hidden": hidden,
            "weight": weight,
            "bias": bias,
            "temperature": temperature,
            "adapter": adapter,
        }
        return logprobs(case | given, backend=backend)[:5]

    assert torch.autograd.gradcheck(outputs, tuple(tensors.values()), fast_mode=True)


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.usefixtures("small_tiles")
def test_a_forbidden_token_keeps_everything_finite(backend: str) -> None:
    bias = torch.zeros(100, dtype=torch.float64)
    bias[:40] = -torch.inf  # one tile whole, part of the next
    temperature = lambda normal: normal(63).exp()  # noqa: E731
    case = head(
        63,
        20,
        100,
        bias=bias,
        target=torch.arange(63) % 60 + 40,
        temperature=temperature,
        outputs=EXTRAS,
    )
    without = case | {
        "weight": case["weight"][40:],
        "bias": bias[40:],
        "target": case["target"] - 40,
    }
    ours, expected = (measure(in_dtype(a, torch.float32), backend) for a in (case, without))
    for name in (*OUTPUTS, *EXTRAS, "d_hidden", "d_temperature"):
        torch.testing.assert_close(ours[name], expected[name], rtol=1e-4, atol=1e-4)
    for name in ("d_weight", "d_bias"):
        assert (ours[name][:40] == 0).all()
        assert ours[name].isfinite().all()


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_a_forbidden_target_has_the_logprob_of_the_definition(softcap: float | None) -> None:
    bias = torch.zeros(100)
    bias[7] = -torch.inf
    case = in_dtype(
        head(4, 20, 100, bias=bias, target=torch.tensor([7, 8, 7, 9]), softcap=softcap),
        torch.float32,
    )
    ours, expected = (logprobs(case, backend=backend) for backend in ("torch", "reference"))
    assert ours.logprob.isneginf().any() == (softcap is None)
    torch.testing.assert_close(ours[:3], expected[:3])


def test_padding_has_no_probability_and_no_gradient() -> None:
    case = in_dtype(head(9, 20, 107, vocab=100, target=torch.arange(9)), torch.float64)
    shorter = case | {"weight": case["weight"][:100].detach(), "vocab": None}
    torch.testing.assert_close(logprobs(case)[:3], logprobs(shorter)[:3])
    assert (measure(case, "torch")["d_weight"][100:] == 0).all()


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_no_tokens_give_a_differentiable_zero(backend: str) -> None:
    case = in_dtype(
        head(0, 20, 100, temperature=torch.ones(0), adapter=lora(20, 100)), torch.float32
    )
    result = logprobs(case, backend=backend)
    assert result.logprob.shape == (0,)
    total(result).backward()
    for name, leaf in leaves(case).items():
        assert leaf.grad is not None and (leaf.grad == 0).all(), name


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize(
    "dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str
)
def test_every_gradient_has_the_dtype_of_its_input(
    backend: str, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    case = in_dtype(CASES["everything"], dtypes[0]) | {
        "weight": CASES["plain"]["weight"].to(dtypes[1])
    }
    case |= {"weight": in_dtype(CASES["everything"], dtypes[1])["weight"]}
    result = logprobs(case, backend=backend)
    assert all(output.dtype == torch.float32 for output in result[:3])
    total(result).backward()
    assert all(
        leaf.grad is not None and leaf.grad.dtype == leaf.dtype for leaf in leaves(case).values()
    )


def operations(case: dict[str, Any], *outputs: str) -> Counter[str]:
    """How often each torch operation runs, inside the ops too."""

    def both_passes() -> None:
        result = logprobs(case, backend="torch")
        sum(getattr(result, name).sum() for name in outputs).backward()

    return Counter(event.name() for event in recorded(both_passes)[1])


@pytest.mark.usefixtures("small_tiles")
def test_what_is_frozen_costs_no_matrix_product() -> None:
    case = in_dtype(CASES["exact_tiles"], torch.float32)  # 2 × 3 tiles, all of which may be kept
    logits = 6 + (6 if passes.KEEP == 0 else 0)
    assert operations(case, "logprob")["aten::addmm"] == logits + 6 + 6
    assert (
        operations(case | {"weight": case["weight"].detach()}, "logprob")["aten::addmm"]
        == logits + 6
    )
    assert (
        operations(case | {"hidden": case["hidden"].detach()}, "logprob")["aten::addmm"]
        == logits + 6
    )


@pytest.mark.usefixtures("small_tiles")
def test_an_unused_output_costs_nothing() -> None:
    case = in_dtype(CASES["exact_tiles"], torch.float32)
    assert operations(case, "logprob")["aten::topk"] == 0
    assert operations(case, "logsumexp")["aten::scatter_add_"] == 0
    assert operations(case, "logprob")["aten::addcmul"] == 0
    assert operations(case, "entropy")["aten::addcmul"] == 6
    assert operations(case, "entropy")["aten::square"] == 0
    more = case | {"outputs": EXTRAS}
    assert operations(more, "logprob")["aten::addcmul"] == 0
    assert operations(more, "log_sum_squares")["aten::addcmul"] == 6


def test_nothing_is_kept_when_no_gradient_is_needed(
    monkeypatch: pytest.MonkeyPatch, columns_kept: list[int]
) -> None:
    case = in_dtype(CASES["plain"], torch.float32)
    monkeypatch.setattr(passes, "COLUMNS", 32)
    with torch.no_grad():
        assert logprobs(case).logprob.grad_fn is None
    frozen = {
        name: value.detach() if isinstance(value, Tensor) else value for name, value in case.items()
    }
    assert logprobs(frozen).logprob.grad_fn is None
    assert logprobs(frozen | {"hidden": case["hidden"]}).logprob.requires_grad
    assert columns_kept == [0, 0, 100]


def both_passes(case: dict[str, Any]) -> None:
    total(logprobs(case)).backward()


def test_the_logits_are_never_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "ROWS", 64)
    monkeypatch.setattr(passes, "COLUMNS", 64)
    # the gradient of the weight; the tiles kept
    for keep, largest in ((0, 4 * 1000 * 8), (100_000, 100_000)):
        monkeypatch.setattr(passes, "KEEP", keep)
        case = head(
            300,
            8,
            1000,
            temperature=lambda normal: normal(300).exp(),
            softcap=5.0,
            adapter=lora(8, 1000),
        )
        case |= {"target": ids(300, 25, 1000), "outputs": EXTRAS}
        _, sizes = allocations(both_passes, in_dtype(case, torch.float32))
        assert 0 < max(sizes) <= largest


@pytest.mark.usefixtures("small_tiles")
def test_bfloat16_logits_are_not_rounded() -> None:
    case = {n: v.bfloat16() if v.is_floating_point() else v for n, v in CASES["peaked"].items()}
    exact = linear_logprob(case["hidden"].double(), case["weight"].double(), case["target"])
    with torch.autocast("cpu", torch.bfloat16):
        ours = logprobs(case)
    torch.testing.assert_close(ours.logprob.double(), exact.logprob, rtol=1e-6, atol=1e-6)


def test_a_second_derivative_is_an_error_and_not_a_wrong_number() -> None:
    case = in_dtype(CASES["plain"], torch.float64)
    (grad,) = torch.autograd.grad(logprobs(case).logprob.sum(), case["hidden"], create_graph=True)
    with pytest.raises(NotImplementedError, match=r"no second derivative.*backend='reference'"):
        grad.sum().backward()


def test_checkpointing_recomputes_the_same_gradients() -> None:
    plain, checkpointed = (in_dtype(CASES["everything"], torch.float32) for _ in range(2))
    expected = measure(plain, "torch")

    def run(hidden: Tensor) -> Logprobs:
        return logprobs(checkpointed | {"hidden": hidden}, backend="torch")

    result = torch.utils.checkpoint.checkpoint(run, checkpointed["hidden"], use_reentrant=False)
    random = torch.Generator().manual_seed(1)
    torch.autograd.backward(
        list(result[:3]), [torch.randn(63, generator=random) / 63 for _ in OUTPUTS]
    )
    for name, leaf in leaves(checkpointed).items():
        torch.testing.assert_close(leaf.grad.double(), expected[f"d_{name}"], rtol=0, atol=0)


@pytest.mark.usefixtures("small_tiles")
def test_fullgraph_compile_serves_every_number_of_tokens_with_one_graph() -> None:
    compiled = torch.compile(logprobs, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens, stance in ((63, "default"), (40, "fail_on_recompile"), (7, "fail_on_recompile")):
        case, same = (
            in_dtype(head(tokens, 20, 100, bias=lambda normal: normal(100)), torch.float32)
            for _ in range(2)
        )
        with torch.compiler.set_stance(stance):
            ours, expected = compiled(case), logprobs(same)
            torch.testing.assert_close(ours[:3], expected[:3], rtol=0, atol=0)
            (ours.entropy.sum() + ours.logprob.sum()).backward()
        (expected.entropy.sum() + expected.logprob.sum()).backward()
        for name, leaf in leaves(same).items():
            torch.testing.assert_close(case[name].grad, leaf.grad, rtol=0, atol=0)


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(softmax, "COMPILE_FROM", 0)
    monkeypatch.setattr(softmax, "_uncompilable", set())
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler about itself
@pytest.mark.parametrize("case", ["plain", "more_of_everything"])
@pytest.mark.parametrize("small_tiles", [20_000], indirect=True, ids=["some_kept"])
@pytest.mark.usefixtures("small_tiles", "compiling")
def test_compiled_tiles_are_as_good_and_compiled_once(case: str) -> None:
    assert_as_good_as_the_reference(CASES[case], torch.float32)
    assert not softmax._uncompilable
    with torch.compiler.set_stance("fail_on_recompile"):
        shorter = CASES[case] | {
            "hidden": CASES[case]["hidden"][:30],
            "target": CASES[case]["target"][:30],
        }
        if "temperature" in shorter:
            shorter["temperature"] = shorter["temperature"][:30]
        assert_as_good_as_the_reference(shorter, torch.float32)
    assert not softmax._uncompilable


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("small_tiles", [20_000], indirect=True, ids=["some_kept"])
@pytest.mark.usefixtures("small_tiles", "compiling")
def test_without_a_compiler_the_same_numbers_come_out_eagerly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch._inductor.utils import fresh_cache

    case = CASES["exact_tiles"]
    with fresh_cache(), torch._inductor.config.patch({"cpp.cxx": (None, "no-such-compiler")}):
        ours = measure(in_dtype(case, torch.float32), "torch")
    assert softmax._uncompilable == {softmax.fold, softmax.backward_tile}
    monkeypatch.setattr(softmax, "COMPILE_FROM", math.inf)
    for name, expected in measure(in_dtype(case, torch.float32), "torch").items():
        torch.testing.assert_close(ours[name], expected, rtol=0, atol=0)


def test_only_large_calls_on_a_cpu_are_compiled() -> None:
    tile = torch.empty(1024, 1024)
    assert softmax.worth_compiling(tile, 2048 * 49152)
    assert not softmax.worth_compiling(tile, 4096 * 256)
    assert not softmax.worth_compiling(tile.to("meta"), 2048 * 49152)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"target": torch.tensor([0, 100, -1])},
            IndexError,
            r"in \[0, 100\), got 100 \(2 of 3 are outside\)",
        ),
        (
            {"target": torch.tensor([0, -100, 1])},
            IndexError,
            "got -100.*select the rows that carry a target",
        ),
        ({"target": torch.tensor([0, 99, 1]), "vocab": 99}, IndexError, r"in \[0, 99\), got 99"),
        (
            {"target": torch.tensor([[0, 1], [99, 3], [5, 100]])},
            IndexError,
            r"got 100 \(1 of 6 are outside\)",
        ),
        (
            {"target": torch.zeros(3, 2, 1, dtype=torch.int64)},
            ValueError,
            r"target must be \[3, 2\], got \[3, 2, 1\]",
        ),
        (
            {"outputs": ("loss",)},
            ValueError,
            "outputs are some of mean_logprob, log_sum_squares, top1, rank, got 'loss'",
        ),
        ({"target": torch.tensor([0, 1])}, ValueError, r"target must be \[3\], got \[2\]"),
        (
            {"target": torch.tensor([0, 1, 2], dtype=torch.int32)},
            ValueError,
            "target must be int64, got torch.int32",
        ),
        (
            {"hidden": torch.zeros(1, 3, 20)},
            ValueError,
            r"hidden must be \[N, D\].* got \[1, 3, 20\]",
        ),
        (
            {"weight": torch.zeros(100, 21)},
            ValueError,
            r"weight must be \[100, 20\], got \[100, 21\]",
        ),
        (
            {"weight": torch.zeros(100, 20, dtype=torch.int8)},
            ValueError,
            "weight must be floating-point, got torch.int8",
        ),
        (
            {"weight": torch.zeros(100, 20, device="meta")},
            ValueError,
            "weight must be on cpu like hidden, got meta",
        ),
        ({"bias": torch.zeros(1)}, ValueError, r"bias must be \[100\], got \[1\]"),
        ({"temperature": 0.0}, ValueError, "temperature must be positive and finite, got 0.0"),
        (
            {"temperature": torch.tensor([1.0, 0.0, 2.0])},
            ValueError,
            "every temperature must be > 0, got 0.0",
        ),
        ({"temperature": torch.ones(3, 1)}, ValueError, r"temperature must be \[3\], got \[3, 1\]"),
        ({"softcap": 0.0}, ValueError, "softcap must be positive and finite, got 0.0"),
        ({"softcap": math.inf}, ValueError, "softcap must be positive and finite, got inf"),
        ({"scale": 0.0}, ValueError, "scale must be positive and finite, got 0.0"),
        ({"vocab": 101}, ValueError, r"vocab must be in \[1, 100\], got 101"),
        (
            {"adapter": (torch.zeros(4, 20), torch.zeros(100, 5), 1.0)},
            ValueError,
            r"adapter B must be \[100, 4\]",
        ),
        (
            {"outputs": ("rank",), "target": torch.zeros(3, 2, dtype=torch.int64)},
            ValueError,
            "a rank is that of one",
        ),
        ({"top_k": 101}, ValueError, r"top_k must be in \[1, 100\], got 101"),
        ({"keep_bytes": -1}, ValueError, "keep_bytes must be >= 0, where 0 keeps nothing, got -1"),
        (
            {"main_grad": torch.zeros(100, 20).half()},
            ValueError,
            r"main_grad must be torch.float32 \[100, 20\] on cpu",
        ),
        (
            {"main_grad": torch.zeros(100, 2)},
            ValueError,
            r"like weight, got torch.float32 \[100, 2\] on cpu",
        ),
        (
            {"main_grad": torch.zeros(100, 20).requires_grad_()},
            ValueError,
            "must not require a gradient itself",
        ),
        (
            {"backend": "cuda"},
            ValueError,
            "backend must be 'auto', 'triton', 'fused', 'torch' or 'reference', got 'cu",
        ),
    ],
)
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_what_cannot_be_meant_is_an_error(
    backend: str, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    case = {n: v.float() if v.is_floating_point() else v for n, v in head(3, 20, 100).items()}
    with pytest.raises(error, match=message):
        logprobs({"backend": backend} | case | change)
