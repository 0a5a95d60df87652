"""The adapters of other libraries against the signatures in their sources, wherever those are
installed.

Read, not imported: these libraries want a GPU, an adapter is to be right before it meets one.
"""

import ast
import importlib
import importlib.util
import inspect
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from burnish.benchmarks import divergence, kernels

N, D, V = 6, 4, 11


def source(module):
    package, *rest = module.split(".")
    spec = importlib.util.find_spec(package)
    if spec is None:
        pytest.skip(f"{package} is not installed")
    place = Path(spec.submodule_search_locations[0]).joinpath(*rest)
    return (place / "__init__.py" if place.is_dir() else place.with_suffix(".py")).read_text()


def signature(module, path):
    """The signature of ``function`` or ``Class.method`` as it is written; decorators aside."""
    body = ast.parse(source(module)).body
    for name in path.split("."):
        node = next(node for node in body if getattr(node, "name", None) == name)
        body = getattr(node, "body", [])
    node.decorator_list, node.body, node.returns = [], [ast.Pass()], None
    every = node.args
    for argument in [*every.posonlyargs, *every.args, *every.kwonlyargs]:
        argument.annotation = None
    # A default may name anything of its module, and only its being there matters.
    every.defaults = [ast.Constant(None)] * len(every.defaults)
    every.kw_defaults = [default and ast.Constant(None) for default in every.kw_defaults]
    space = {}
    exec(compile(ast.fix_missing_locations(ast.Module([node], [])), module, "exec"), space)
    return inspect.signature(space[node.name])


class Stub:
    """Stands in for the library's function: takes what its signature takes, and remembers it."""

    def __init__(self, signature, answer):
        self.__signature__ = signature
        self.answer, self.given = answer, None

    def __call__(self, *arguments, **keywords):
        self.given = self.__signature__.bind(*arguments, **keywords).arguments
        return self.answer

    apply = __call__


def install(monkeypatch, users, module, name, stub):
    """Whatever ``users`` import by this name is a module with the stub; everything else is imported
    as ever.
    """
    real = importlib.import_module
    fake = lambda wanted: SimpleNamespace(**{name: stub}) if wanted == module else real(wanted)  # noqa: E731
    monkeypatch.setattr(users.importlib, "import_module", fake)


def without_ctx(found):
    return found.replace(parameters=list(found.parameters.values())[1:])


NLL, ENTROPY = torch.arange(1.0, N + 1), torch.full((N,), 0.5)
HEAD = tuple(kernels.OPERATION.make_inputs((N, D, V), torch.float32).tensors.values())


@pytest.mark.parametrize(("outputs", "reduction"), [(("loss",), "mean"), (("logprob",), "none")])
def test_liger(monkeypatch, outputs, reduction):
    found = signature("liger_kernel.transformers.functional", "liger_fused_linear_cross_entropy")
    stub = Stub(found, NLL)
    install(
        monkeypatch,
        kernels,
        "liger_kernel.transformers.functional",
        "liger_fused_linear_cross_entropy",
        stub,
    )
    (value,) = kernels.liger(*HEAD, outputs)
    assert stub.given["reduction"] == reduction
    assert [
        stub.given[name] is x for name, x in zip(("input", "weight", "target"), HEAD, strict=True)
    ] == [True] * 3
    assert torch.equal(value, NLL if outputs == ("loss",) else -NLL)


def test_liger_scaled(monkeypatch):
    name = "LigerFusedLinearScaledCrossEntropyFunction"
    assert name in source("liger_kernel.ops")
    found = signature("liger_kernel.ops.fused_linear_scaled_cross_entropy", f"{name}.apply")
    stub = Stub(found, (NLL, ENTROPY))
    install(monkeypatch, kernels, "liger_kernel.ops", name, stub)
    assert kernels.liger_scaled(*HEAD, ("entropy", "logprob"))[0] is ENTROPY
    assert stub.given["return_entropy"] is True and stub.given["_input"] is HEAD[0]
    stub.answer = NLL
    assert torch.equal(kernels.liger_scaled(*HEAD, ("logprob",))[0], -NLL)
    assert "return_entropy" not in stub.given


def test_liger_scaled_on_this_machine_gives_what_it_says():
    """Without a GPU it is a formula in torch, of which only the meaning of its outputs is of
    interest here.
    """
    pytest.importorskip("liger_kernel.ops.fused_linear_scaled_cross_entropy")
    found = kernels.liger_scaled(*HEAD, ("logprob", "entropy"))
    for value, expected in zip(found, kernels.naive(*HEAD, ("logprob", "entropy")), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("exact", [False, True])
def test_cut_cross_entropy(monkeypatch, exact):
    found = signature("cut_cross_entropy.linear_cross_entropy", "linear_cross_entropy")
    stub = Stub(found, NLL)
    install(monkeypatch, kernels, "cut_cross_entropy", "linear_cross_entropy", stub)
    assert torch.equal(kernels.cut_cross_entropy(*HEAD, ("logprob",), exact=exact)[0], -NLL)
    assert [stub.given[name] is x for name, x in zip(("e", "c", "targets"), HEAD, strict=True)] == [
        True
    ] * 3
    newer = "accum_e_fp32" in found.parameters
    assert stub.given["impl"] == ("cce_exact" if exact and newer else "cce")
    assert ("filter_eps" in stub.given) == (exact and not newer)


def test_quack(monkeypatch):
    found = signature("quack.linear_cross_entropy", "chunked_linear_cross_entropy")
    stub = Stub(found, NLL.mean())
    install(
        monkeypatch, kernels, "quack.linear_cross_entropy", "chunked_linear_cross_entropy", stub
    )
    assert torch.equal(kernels.quack(*HEAD, ("loss",))[0], NLL.mean())
    assert [
        stub.given[name] is x for name, x in zip(("x", "weight", "target"), HEAD, strict=True)
    ] == [True] * 3


def test_trl(monkeypatch):
    found = without_ctx(signature("trl.kernels.chunked_logprob", "ChunkedLogProbFunction.forward"))
    stub = Stub(found, (NLL, ENTROPY, None, None, None))
    install(monkeypatch, kernels, "trl.kernels.chunked_logprob", "ChunkedLogProbFunction", stub)
    assert kernels.trl(*HEAD, ("logprob", "entropy")) == (NLL, ENTROPY)
    given = {
        "temperature": 1.0,
        "final_logit_softcapping": None,
        "logit_scale": 1.0,
        "outputs": ("entropy",),
    }
    assert given.items() <= stub.given.items() and stub.given["targets"] is HEAD[2]
    kernels.trl(*HEAD, ("logprob",))
    assert stub.given["outputs"] == ()


def test_trl_divergence(monkeypatch):
    found = without_ctx(
        signature("trl.kernels.chunked_divergence", "ChunkedDivergenceFunction.forward")
    )
    stub = Stub(found, (NLL, ENTROPY))
    install(
        monkeypatch, divergence, "trl.kernels.chunked_divergence", "ChunkedDivergenceFunction", stub
    )
    heads = tuple(
        divergence.OPERATION.make_inputs((N, D, 2 * D, V), torch.float32).tensors.values()
    )
    assert divergence.trl(*heads, ("divergence",), beta=0.3) == (NLL,)
    names = ("student_hidden", "student_weight", "teacher_hidden", "teacher_weight")
    assert [stub.given[name] is x for name, x in zip(names, heads, strict=True)] == [True] * 4
    assert (
        stub.given["beta"] == 0.3
        and stub.given["student_bias"] is None
        and stub.given["teacher_bias"] is None
    )


def test_liger_divergence(monkeypatch):
    found = signature("liger_kernel.transformers.functional", "liger_fused_linear_jsd")
    stub = Stub(found, NLL.mean())
    install(
        monkeypatch,
        divergence,
        "liger_kernel.transformers.functional",
        "liger_fused_linear_jsd",
        stub,
    )
    heads = tuple(
        divergence.OPERATION.make_inputs((N, D, 2 * D, V), torch.float32).tensors.values()
    )
    assert divergence.liger(*heads, ("loss",), beta=0.3, accumulate=torch.float32) == (NLL.mean(),)
    names = ("student_input", "student_weight", "teacher_input", "teacher_weight")
    assert [stub.given[name] is x for name, x in zip(names, heads, strict=True)] == [True] * 4
    assert stub.given["jsd_beta"] == 0.3 and stub.given["accum_dtype"] == torch.float32
