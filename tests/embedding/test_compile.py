"""``torch.compile(fullgraph=True)`` of every objective whose entries do not interact: one graph,
the same numbers.

    step = torch.compile(objective, fullgraph=True)

A hyper-parameter is a number that may change from step to step: no value of it costs more graphs
than it would cost in the simplest function there is.
"""

import importlib.util
import inspect
import itertools
import sys
import types
import typing
from functools import partial
from pathlib import Path

import burnish
import pytest
import torch
from grids import exhaustive, slow
from torch import Tensor
from torch._dynamo.testing import CompileCounter

UNITS = 6
# What mixes entries, and so is no matter of one entry's graph. The first test finds out by itself.
COUPLED = {
    "aot": "ranks of the pairs",
    "aot_unpaired": "ranks of the answers",
    "gmpo": "tokens of one answer",
    "gspo": "tokens of one answer",
    "gspo_token": "tokens of one answer",
    "iw_opd": "earlier tokens of one completion",
    "minillm": "later tokens of one answer",
    "plackett_luce": "answers to one prompt",
    "vespo": "tokens of one answer",
}


def preference_loss(objectives, chosen, rejected, ref_chosen, ref_rejected, logp):
    """What a user compiles is a whole loss: DPO of another divergence + 0.2 nll."""
    a, b = (
        objectives.f_divergence_score(x, divergence="js")
        for x in (chosen - ref_chosen, rejected - ref_rejected)
    )
    preference, stats = objectives.dpo(a, b, torch.zeros_like(a), torch.zeros_like(b), beta=0.1)
    return preference.mean() + 0.2 * objectives.nll(logp)[0].mean(), stats[
        "rewards/accuracies"
    ].mean()


def policy_loss(objectives, logp, old_logp, ref_logp, behavior_logp, advantage):
    """Clipped surrogate with truncated importance weights + 0.01 KL to the reference."""
    weight = objectives.truncated_importance(
        objectives.token_log_ratio(old_logp, behavior_logp), cap=2.0
    )
    surrogate, stats = objectives.clipped_surrogate(logp, old_logp, advantage, clip_high=0.28)
    kl, _ = objectives.kl_estimate(logp, ref_logp, kind="k3")
    return (weight * surrogate + 0.01 * kl).mean(), stats["clip_ratio/region"].mean()


def as_users_have_them() -> types.ModuleType:
    """burnish.objectives without the type checks that this suite wraps around each function."""
    root = Path(burnish.__file__).parent / "objectives"
    spec = importlib.util.spec_from_file_location(
        "unchecked_objectives", root / "__init__.py", submodule_search_locations=[str(root)]
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


PLAIN = as_users_have_them()


def objectives():
    """Everything exported that returns (loss, stats), by name."""
    for name, function in vars(PLAIN).items():
        returns = (
            inspect.signature(function).return_annotation if inspect.isfunction(function) else None
        )
        if typing.get_origin(returns) is tuple and typing.get_args(returns)[-1] == PLAIN.Stats:
            yield name, function


def variants(function):
    """One signature for each word that a hyper-parameter may be, and for each type that a tensor
    may have.
    """
    signature = inspect.signature(function)
    choices = []
    for parameter in signature.parameters.values():
        kind = parameter.annotation
        if typing.get_origin(kind) is typing.Literal:
            choices.append([parameter.replace(annotation=word) for word in typing.get_args(kind)])
        elif isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
            choices.append(
                [parameter.replace(annotation=member) for member in typing.get_args(kind)]
            )
        else:
            choices.append([parameter])
    return [list(parameters) for parameters in itertools.product(*choices)]


CASES = [
    pytest.param(name, parameters, id=f"{name}-{i}" if i else name)
    for name, function in objectives()
    for i, parameters in enumerate(variants(function))
]
ELEMENTWISE = [case for case in CASES if case.values[0] not in COUPLED]


def tensor(kind, seed):
    """Random float64 log-probabilities, labels or ids of the shape that the annotation names."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {
        "vocabulary": 5,
        "teacher_vocabulary": 7,
        "bins": 5,
        "tokens": UNITS,
        "sequences": UNITS,
        "pairs": UNITS,
        "completions": UNITS,
        "steps": UNITS,
    }
    shape = [sizes[name.lstrip("*")] for name in kind.dim_str.split()]
    values = -3 * torch.rand(shape, generator=generator, dtype=torch.float64)
    if "bool" in kind.dtypes:
        return values < -1.5
    if "int64" in kind.dtypes and "float64" not in kind.dtypes:
        return torch.arange(UNITS) // 2
    return values.log_softmax(-1) if kind.dim_str.endswith(("vocabulary", "bins")) else values


def arguments(parameters, *, value=0.25, seed=0):
    """Positional and keyword arguments; every number that is a hyper-parameter has the same
    value.
    """
    positional, keyword = [], {}
    for i, parameter in enumerate(parameters):
        kind = parameter.annotation
        number = 2 + value if parameter.name in ("ratio_cap", "high") else value
        if parameter.kind is parameter.KEYWORD_ONLY:
            keyword[parameter.name] = kind if isinstance(kind, str) else number
        elif kind in (int, float):
            positional.append({int: UNITS, float: number}[kind])
        else:
            positional.append(tensor(kind, 100 * seed + i))
    return positional, keyword


@pytest.mark.parametrize(("name", "parameters"), CASES)
def test_an_entry_is_computed_from_its_own_inputs_alone_unless_said_otherwise(name, parameters):
    function = getattr(PLAIN, name)
    positional, keyword = arguments(parameters)
    others = arguments(parameters, seed=1)[0]
    loss = function(*positional, **keyword)[0]
    independent = True
    for unit in range(UNITS):
        changed = [
            torch.cat([x[:unit], y[unit : unit + 1], x[unit + 1 :]])
            if isinstance(x, Tensor) and x.ndim and (x.is_floating_point() or x.dtype == torch.bool)
            else x
            for x, y in zip(positional, others, strict=True)
        ]
        moved = function(*changed, **keyword)[0] != loss
        moved[unit] = False
        independent &= not moved.any()
    assert independent == (name not in COUPLED)


def run(function, positional, keyword):
    """Loss, stats and the gradient of every tensor that can have one."""
    inputs = [
        x.clone().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x
        for x in positional
    ]
    loss, stats = function(*inputs, **keyword)
    (loss * torch.linspace(1, 2, UNITS, dtype=loss.dtype)).sum().backward()
    return (
        loss.detach(),
        stats,
        [x.grad for x in inputs if isinstance(x, Tensor) and x.is_floating_point()],
    )


@pytest.mark.parametrize(("name", "parameters"), ELEMENTWISE)
def test_one_graph_gives_the_values_and_gradients_of_eager(name, parameters):
    torch.compiler.reset()
    function = getattr(PLAIN, name)
    positional, keyword = arguments(parameters)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        run(compiled, positional, keyword),
        run(function, positional, keyword),
        rtol=1e-12,
        atol=1e-14,
    )


def graphs(function, calls):
    """How many graphs it takes to run them all."""
    torch.compiler.reset()
    counter = CompileCounter()
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    for positional, keyword in calls:
        compiled(*positional, **keyword)
    return counter.frame_count


def scaled(x, *, factor):
    return factor * x, {}


VALUES = (0.15, 0.25, 0.35, 0.2)
FEWEST = len(["a constant at first", "any number from the second value on"])


def test_torch_makes_two_graphs_of_a_number_that_changes():
    assert graphs(scaled, [([torch.ones(UNITS)], {"factor": value}) for value in VALUES]) == FEWEST


@pytest.mark.parametrize(("name", "parameters"), ELEMENTWISE)
def test_another_value_of_a_hyper_parameter_is_not_another_graph(name, parameters):
    calls = [arguments(parameters, value=value) for value in VALUES]
    assert graphs(getattr(PLAIN, name), calls) <= FEWEST


# Inductor is torch's; whether a function gets one graph is tested above.
# inductor's imports
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("loss", [slow(preference_loss), exhaustive(policy_loss)])
def test_a_whole_loss_compiles_with_the_default_backend(loss):
    torch.compiler.reset()
    loss = partial(loss, PLAIN)
    first, *rest = (tensor(PLAIN.PerPair, seed) for seed in range(5))
    first.requires_grad_()
    expected, got = loss(first, *rest), torch.compile(loss, fullgraph=True)(first, *rest)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)
    slopes, slopes_of_compiled = (torch.autograd.grad(value, first) for value, _ in (expected, got))
    torch.testing.assert_close(slopes_of_compiled, slopes, rtol=1e-12, atol=1e-14)
