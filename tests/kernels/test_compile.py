"""The operators inside the machinery of torch: compiled with any number of tokens, checkpointed,
under autocast.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from burnish.kernels import Head, linear_divergence, linear_logprob, logits_logprob
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

pytestmark = [
    pytest.mark.usefixtures("small_tiles"),
    pytest.mark.parametrize("small_tiles", [10**6], indirect=True),  # all that can be kept is kept
]

D, V, R = 20, 100, 3


def logprob(hidden, weight, bias, down, up, temperature, target):
    head = Head(weight, bias, adapter=(down, up, 0.7), softcap=4.0)
    return linear_logprob(hidden, head, target, temperature=temperature)


def more_logprobs(hidden, weight, bias, down, up, temperature, target):
    outputs = ("mean_logprob", "log_sum_squares", "top1", "rank")
    return linear_logprob(
        hidden, Head(weight, bias), target, temperature=0.8, outputs=outputs, top_k=3, vocab=V - 2
    )


def gathered(hidden, weight, bias, down, up, temperature, target):
    return linear_logprob(hidden, weight, torch.stack((target, target // 2), 1)).logprob


def from_logits(hidden, weight, bias, down, up, temperature, target):
    with torch.autocast("cpu", enabled=False):
        logits = hidden @ weight.t()
    return logits_logprob(logits, target, temperature=temperature)


def divergence(beta: float) -> Callable[..., Tensor]:
    def compute(hidden, weight, bias, down, up, temperature, target):
        student, teacher = (
            Head(weight, bias, softcap=4.0, adapter=(down, up, 0.7)),
            Head(weight.detach() * 0.5),
        )
        return linear_divergence(
            hidden, student, hidden.detach().flip(1), teacher, beta=beta, temperature=0.9
        )

    return compute


FUNCTIONS = {
    "linear_logprob": logprob,
    "more_logprobs": more_logprobs,
    "several_targets": gathered,
    "logits_logprob": from_logits,
    "forward_kl": divergence(0.0),
    "jsd": divergence(0.3),
}
each_function = pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)


def inputs(tokens: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(tokens)

    def leaf(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=random) * scale).requires_grad_()

    floats = {
        "hidden": leaf(tokens, D),
        "weight": leaf(V, D, scale=0.9),
        "bias": leaf(V),
        "down": leaf(R, D),
    }
    temperature = torch.rand(tokens, generator=random).add_(0.5).requires_grad_()
    target = torch.randint(V - 2, (tokens,), generator=random)
    return {**floats, "up": leaf(V, R), "temperature": temperature, "target": target}


def measure(function: Callable[..., Any], given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every output, and the gradient of every input for fixed random upstream gradients."""
    result = function(**given)
    outputs = {
        f"output {i}": value for i, value in enumerate(tree_leaves(result)) if value is not None
    }
    random, trained = (
        torch.Generator().manual_seed(1),
        [value for value in outputs.values() if value.requires_grad],
    )
    torch.autograd.backward(
        trained, [torch.randn(value.shape, generator=random) for value in trained]
    )
    grads = {f"gradient of {name}": t.grad for name, t in given.items() if t.grad is not None}
    return {name: value.detach() for name, value in (outputs | grads).items()}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys() >= {"gradient of hidden", "gradient of weight"}
    for name, value in expected.items():
        assert value.abs().max() > 0, name
        assert torch.equal(found[name], value), name


class Operators(TorchDispatchMode):
    """Every call of an operator of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "burnish":
            assert not kwargs
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))

    @property
    def names(self) -> list[str]:
        return [func._schema.name.removeprefix("burnish::") for func, _ in self.calls]


@each_function
def test_every_number_of_tokens_is_served_by_one_graph_with_the_bits_of_eager(
    function: Callable[..., Any],
) -> None:
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    for tokens in (33, 7, 64, 100):
        assert_equal(measure(compiled, inputs(tokens)), measure(function, inputs(tokens)))
    assert counter.frame_count <= len(["33 tokens", "any number of tokens"])


@pytest.mark.parametrize("reentrant", [False, True])
@each_function
def test_a_checkpoint_computes_twice_and_changes_no_bit(
    function: Callable[..., Any], reentrant: bool
) -> None:
    def checkpointed(**given: Tensor) -> Any:
        return checkpoint(lambda *values: function(**dict(zip(given, values, strict=True))), *given.values(),
                          use_reentrant=reentrant)  # fmt: skip

    with Operators() as plain:
        expected = measure(function, inputs(40))
    with Operators() as recomputed:
        found = measure(checkpointed, inputs(40))
    assert_equal(found, expected)
    forward, backward = plain.names
    assert backward == f"{forward}_backward"
    assert recomputed.names == [forward, forward, backward]


@pytest.mark.filterwarnings("ignore:.torch.jit.script")  # which torch itself calls
@each_function
def test_a_forward_mode_derivative_is_an_error_and_not_zero(function: Callable[..., Any]) -> None:
    given = {name: value.detach() for name, value in inputs(5).items()}
    with pytest.raises(
        NotImplementedError, match=r"no forward-mode derivative.*backend='reference'"
    ):
        torch.func.jvp(
            lambda h: function(**given | {"hidden": h}), (given["hidden"],), (given["hidden"],)
        )


@pytest.mark.filterwarnings("ignore")  # of the compiler about itself
@each_function
def test_autocast_rounds_the_same_compiled_or_not(function: Callable[..., Any]) -> None:
    def cast(**given: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return function(**given)

    found = measure(cast, inputs(40))
    assert_equal(
        measure(torch.compile(cast, fullgraph=True, backend="aot_eager"), inputs(40)), found
    )
    plain = measure(function, inputs(40))
    of_logits = function is from_logits  # logits are what they are
    outputs = [
        name
        for name, value in found.items()
        if name.startswith("output") and value.is_floating_point()
    ]
    assert all(torch.equal(found[name], plain[name]) == of_logits for name in outputs)


@pytest.mark.filterwarnings("ignore")  # of the compiler about itself
@each_function
def test_opcheck_of_every_operator_that_is_called(function: Callable[..., Any]) -> None:
    with Operators() as seen:
        measure(function, inputs(13))
    forward, backward = seen.calls
    trained = tree_map_only(
        Tensor, lambda t: t.detach().requires_grad_(t.is_floating_point()), forward[1]
    )
    torch.library.opcheck(forward[0], trained)
    torch.library.opcheck(backward[0], tree_map_only(Tensor, torch.detach, backward[1]))


@pytest.mark.filterwarnings("ignore")  # of the compiler about itself
@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_opcheck_where_a_factor_is_frozen(frozen: str) -> None:
    given = inputs(13)
    given[frozen] = given[frozen].detach()
    with Operators() as seen:
        linear_logprob(given["hidden"], given["weight"], given["target"]).logprob.sum().backward()
    operator, arguments = seen.calls[1]
    torch.library.opcheck(operator, tree_map_only(Tensor, torch.detach, arguments))


@pytest.mark.filterwarnings("ignore")  # of the compiler about itself
def test_opcheck_of_a_main_gradient() -> None:
    given = inputs(13)
    with Operators() as seen:
        result = linear_logprob(
            given["hidden"], given["weight"], given["target"], main_grad=torch.zeros(V, D)
        )
        result.logprob.sum().backward()
    operator, arguments = seen.calls[1]
    torch.library.opcheck(operator, tree_map_only(Tensor, torch.detach, arguments))
