"""What every objective refuses: swapped arguments, tokens in place of completions, lists, and
float16.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any, get_args, get_origin

import pytest
import torch
from burnish import objectives as ob
from torch import Tensor

SEQUENCES = 3
TRAINED = {
    "logp",
    "chosen",
    "rejected",
    "mean_chosen",
    "mean_rejected",
    "value",
    "divergence",
    "score",
    "logit",
    "mean_logp",
}
TRAINED |= {"divergence_chosen", "divergence_rejected"}
LENGTHS = {"length_chosen", "length_rejected"}
HYPER: dict[str, Any] = {
    "beta": 0.1,
    "label_smoothing": 0.1,
    "clip_low": 0.2,
    "clip_high": 0.3,
    "gamma": 0.5,
    "alpha": 0.5,
    "kind": "k3",
    "penalty": 1.5,
    "threshold": 0.75,
    "t": 0.5,
    "low": -1.0,
    "high": 1.0,
    "sigma": 0.3,
}


def is_loss(function: Any) -> bool:
    """Whether it returns (loss, stats)."""
    returned = inspect.signature(function, eval_str=True).return_annotation
    return get_origin(returned) is tuple and get_origin(get_args(returned)[1]) is dict


LOSSES = [f for f in vars(ob).values() if inspect.isfunction(f) and is_loss(f)]


def tensors_of(loss: Callable[..., Any]) -> dict[str, Any]:
    """The parameters that may be floating-point tensors, and the annotations of such tensors."""
    found = {}
    for parameter in inspect.signature(loss, eval_str=True).parameters.values():
        for annotation in (parameter.annotation, *get_args(parameter.annotation)):
            if "float64" in getattr(annotation, "dtypes", ()):
                found[parameter.name] = annotation
    return found


def dimensions(annotation: Any) -> str:
    return str(annotation.dim_str).strip()


def arguments(loss: Callable[..., Any], dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """Ordinary arguments by name: three completions, pairs or tokens, with a vocabulary of four
    where one is wanted.
    """
    generator = torch.Generator().manual_seed(0)
    found: dict[str, Any] = {}
    floats = tensors_of(loss)
    for name, parameter in inspect.signature(loss, eval_str=True).parameters.items():
        if name in floats:
            of_rows = {
                "": (),
                "*tokens vocabulary": (SEQUENCES, 4),
                "*tokens bins": (SEQUENCES, 4),
                "*tokens teacher_vocabulary": (SEQUENCES, 5),
            }
            shape = of_rows.get(dimensions(floats[name]), (SEQUENCES,))
            value = torch.rand(shape, generator=generator, dtype=torch.float64)
            found[name] = (-value if "logp" in name or name in TRAINED else value).to(dtype)
        elif name in ("sequence", "group", "rank"):
            found[name] = torch.arange(SEQUENCES)
        elif name == "sequences":
            found[name] = SEQUENCES
        elif name in ("desirable", "label", "penalized", "tied"):
            found[name] = torch.tensor([True, False, True])
        elif parameter.kind is parameter.KEYWORD_ONLY and name in HYPER:
            found[name] = HYPER[name]
    return found


SWAPPABLE = [
    (loss, name)
    for loss in LOSSES
    for name, annotation in tensors_of(loss).items()
    if name not in TRAINED
    and not name.startswith("length")
    and dimensions(annotation)
    and TRAINED & tensors_of(loss).keys()
]
COMPLETIONS = [
    (loss, name)
    for loss in LOSSES
    for name, annotation in tensors_of(loss).items()
    if dimensions(annotation) in ("pairs", "sequences")
]

# tensors, which ratios and squares are made of
OF_SEVERAL = dict.fromkeys(loss for loss, _ in SWAPPABLE + COMPLETIONS)


def ids(cases: list[tuple[Any, str]]) -> list[str]:
    return [f"{loss.__name__}-{name}" for loss, name in cases]


def test_the_cases_are_all_of_them() -> None:
    assert {"dpo", "kto", "clipped_surrogate", "reverse_kl", "value_loss"} <= {
        loss.__name__ for loss, _ in SWAPPABLE
    }
    either = {(loss.__name__, name) for loss, name in SWAPPABLE}
    assert {("bradley_terry", "margin"), ("step_loss", "label")} <= either
    assert {"dpo", "simpo", "kto", "gspo", "bradley_terry"} <= {
        loss.__name__ for loss, _ in COMPLETIONS
    }


@pytest.mark.parametrize(("loss", "name"), SWAPPABLE, ids=ids(SWAPPABLE))
def test_a_constant_that_requires_grad_beside_a_policy_that_does_not_is_refused(
    loss: Any, name: str
) -> None:
    inputs = arguments(loss)
    inputs[name].requires_grad_()
    with pytest.raises(
        ValueError,
        match=rf"^{loss.__name__}: {name} requires grad and .* does not, so {name} would",
    ):
        loss(**inputs)
    with torch.no_grad():
        loss(**inputs)  # an evaluation
    for trained in TRAINED & inputs.keys():
        inputs[trained] = inputs[trained].clone().requires_grad_()
    loss(**inputs)  # both, as in a check of gradients


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_nothing_is_refused_where_nothing_or_the_policy_alone_requires_grad(loss: Any) -> None:
    inputs = arguments(loss)
    loss(**inputs)
    for name in TRAINED & inputs.keys():
        loss(**{**inputs, name: inputs[name].clone().requires_grad_()})


@pytest.mark.parametrize("argument", ["old_logp", "sampled"])
def test_the_surrogate_with_swapped_log_probs_no_longer_trains_uphill(argument: str) -> None:
    logp = torch.full((3,), -1.0, requires_grad=True)
    with pytest.raises(
        ValueError,
        match=r"^clipped_surrogate: old_logp requires grad and logp does not, .* swap the",
    ):
        ob.clipped_surrogate(torch.full((3,), -1.0), logp, torch.ones(3))


@pytest.mark.parametrize(("loss", "name"), COMPLETIONS, ids=ids(COMPLETIONS))
def test_tokens_in_place_of_completions_are_refused(
    loss: Any, name: str, as_users_run_it: None
) -> None:
    unit = dimensions(tensors_of(loss)[name])
    inputs = {
        key: value[:, None].expand(-1, 4)
        if isinstance(value, Tensor) and value.ndim and same(loss, key, unit)
        else value
        for key, value in arguments(loss).items()
    }
    wanted = {"pairs": "pair", "sequences": "completion"}[unit]
    with pytest.raises(
        ValueError,
        match=rf"^{loss.__name__}: \w+ must have one entry per {wanted}, .* got \[3, 4\]",
    ):
        loss(**inputs)


# Elementwise: each entry is what it is, whatever its place.
ELEMENTWISE = {"elo"}
NO_LOSSES = [
    (function, unit)
    for function in vars(ob).values()
    if inspect.isfunction(function) and not is_loss(function)
    for unit in ("sequences", "tokens", "units")
    if unit in map(dimensions, tensors_of(function).values())
    and function.__name__ not in ELEMENTWISE
]
FURTHER: dict[str, Any] = {
    "k": 2,
    "lam": 0.9,
    "how": "min",
    "low": 0.1,
    "high": 0.9,
    "length": torch.ones(SEQUENCES, dtype=torch.int64),
    "public_length": torch.ones(SEQUENCES, dtype=torch.int64),
}


@pytest.mark.parametrize(("function", "unit"), NO_LOSSES, ids=ids(NO_LOSSES))
def test_padded_rows_in_place_of_flat_entries_are_refused(
    function: Any, unit: str, as_users_run_it: None
) -> None:
    """Advantages, weights, masks and sums: of tokens and completions alike."""
    inputs = arguments(function)
    named = inspect.signature(function).parameters
    inputs |= {name: value for name, value in FURTHER.items() if name in named}
    function(**inputs)
    for name, value in inputs.items():
        is_padded = isinstance(value, Tensor) and value.ndim == 1 and same(function, name, unit)
        if is_padded:
            inputs[name] = value[:, None].expand(-1, 4).clone()
    with pytest.raises(ValueError, match=r"must (have one entry per completion|be flat), \["):
        function(**inputs)


def same(loss: Any, name: str, unit: str) -> bool:
    annotation = inspect.signature(loss, eval_str=True).parameters[name].annotation
    annotation = tensors_of(loss).get(name, annotation)
    return bool(unit == str(getattr(annotation, "dim_str", "")).strip())


def test_padded_tokens_in_place_of_flat_ones_are_refused(as_users_run_it: None) -> None:
    padded = torch.zeros(2, 4)
    sequence = torch.zeros(2, 4, dtype=torch.int64)
    for reduce in (ob.sequence_sum, ob.sequence_mean):
        with pytest.raises(
            ValueError,
            match=rf"^{reduce.__name__}: x must be flat, \[tokens\], got \[2, 4\]; take the .* mask",
        ):
            reduce(padded, sequence, 2)
    with pytest.raises(ValueError, match=r"^gspo: logp must be flat"):
        ob.gspo(padded, padded, torch.zeros(2), sequence, clip_low=0.2, clip_high=0.2)
    with pytest.raises(
        ValueError, match=r"^group_advantage: reward must have one entry per completion"
    ):
        ob.group_advantage(torch.zeros(2, 4), sequence)
    with pytest.raises(ValueError, match=r"^whiten: x must be flat"):
        ob.whiten(padded)


def test_lists_and_numbers_in_place_of_tensors_are_named(as_users_run_it: None) -> None:
    one = torch.zeros(1)
    with pytest.raises(
        ValueError, match=r"^dpo: chosen must be a tensor, got list; make it one, torch\.tensor$"
    ):
        ob.dpo([-1.0], one, one, one, beta=0.1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^reinforce: advantage must be a tensor, got float"):
        ob.reinforce(one, 1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("loss", OF_SEVERAL, ids=lambda loss: loss.__name__)
def test_float16_is_refused_and_bfloat16_computes_what_its_digits_allow(loss: Any) -> None:
    with pytest.raises(
        ValueError, match=rf"^{loss.__name__}: \w+ is float16, in which .* pass \w+\.float\(\)$"
    ):
        loss(**arguments(loss, torch.float16))
    inputs = arguments(loss, torch.bfloat16)
    exact = {
        name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in inputs.items()
    }
    found, _ = loss(**inputs)
    expected, _ = loss(**exact)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), expected, rtol=0.05, atol=0.05)


def swapped_in_a_graph(logp: Tensor, old_logp: Tensor, advantage: Tensor) -> Tensor:
    return ob.clipped_surrogate(logp, old_logp, advantage)[0].sum()


def dpo_in_a_graph(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor
) -> Tensor:
    return ob.dpo(chosen, rejected, ref_chosen, ref_rejected, beta=0.1)[0].sum()


@pytest.mark.parametrize("function", [swapped_in_a_graph, dpo_in_a_graph])
def test_the_checks_compile_into_one_graph_with_and_without_gradients(
    function: Any, as_users_run_it: None
) -> None:
    inputs = [torch.tensor([-1.0, -2.0, -0.5])] * len(inspect.signature(function).parameters)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    policy = inputs[0].clone().requires_grad_()
    expected = function(policy, *inputs[1:])
    torch.testing.assert_close(compiled(policy, *inputs[1:]), expected)
    torch.testing.assert_close(compiled(*inputs), expected.detach())
    with torch.no_grad():
        torch.testing.assert_close(compiled(*inputs[:-1], policy.clone()), expected.detach())


# torch's own, as it imports its jvp rules
@pytest.mark.filterwarnings("ignore:.torch.jit.script")
def test_the_checks_stand_in_no_transform_s_way(as_users_run_it: None) -> None:
    inputs = [-torch.rand(5, dtype=torch.float64) for _ in range(4)]
    expected = torch.autograd.grad(
        dpo_in_a_graph(inputs[0].requires_grad_(), *inputs[1:]), inputs[0]
    )[0]
    inputs = [x.detach() for x in inputs]
    torch.testing.assert_close(torch.func.grad(dpo_in_a_graph)(*inputs), expected)
    # inside, an entry has no dimension
    per_pair = torch.func.vmap(torch.func.grad(dpo_in_a_graph))(*inputs)
    torch.testing.assert_close(per_pair, expected)
    _, slope = torch.func.jvp(
        dpo_in_a_graph,
        tuple(inputs),
        (torch.ones_like(inputs[0]), *map(torch.zeros_like, inputs[1:])),
    )
    torch.testing.assert_close(slope, expected.sum())
    assert math.isfinite(float(torch.func.hessian(dpo_in_a_graph)(*inputs).sum()))
