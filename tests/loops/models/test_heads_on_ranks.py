"""The fused head on several ranks: whoever wraps it, log-probs, entropies and gradients are the
plain model's.
"""

import pytest
import torch
import transformers
import wrapped
from burnish.kernels import passes
from burnish.loops.models.policy import Policy
from wrapped import (
    EXAMPLES,
    TILES,
    VOCABULARY,
    ask,
    hidden_states,
    make_model,
    plain_head,
    plain_run,
    run,
    with_lora,
)

RANKS = 2
EXACT = 1e-10
FULL = [(f"burnish::linear_logprob{part}", (VOCABULARY, 32)) for part in ("", "_backward")]


@pytest.fixture(scope="module")
def found(heads_on_ranks):
    """What two ranks found in every scenario, and what they printed."""
    results, printed = heads_on_ranks
    return {"warnings": printed, **results}


@pytest.fixture(scope="module")
def expected():
    """Outputs and gradients of plain models in one process, made once each."""
    made = {}

    def of(kind):
        if kind not in made:
            model = {
                "plain": make_model,
                "tied": lambda: make_model(tied=True),
                "lora": lambda: with_lora(make_model()),
            }
            model = model[kind]()
            made[kind] = plain_run(model, EXAMPLES), wrapped.gradients(model)
        return made[kind]

    return of


def assert_same(found, expected):
    outputs, gradients = expected
    torch.testing.assert_close(found["outputs"], outputs, rtol=0, atol=EXACT)
    assert found["gradients"].keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert gradient.abs().max() > 1e-6, name
        torch.testing.assert_close(
            found["gradients"][name], gradient, rtol=EXACT, atol=EXACT, msg=name
        )


def assert_no_logits(found, *, ranks=RANKS):
    """Nothing as large as [tokens, vocabulary] of one rank was allocated."""
    tokens = found["outputs"].shape[1] / ranks
    assert found["largest"] < 0.8 * tokens * VOCABULARY * found["outputs"].element_size()


@pytest.mark.parametrize(
    ("scenario", "kind"),
    [
        ("ddp", "plain"),
        ("ddp, adapters", "lora"),
        ("fsdp, head in the root unit", "plain"),
        ("fsdp, head as its own unit", "plain"),
        ("fsdp, tied", "tied"),
        ("fsdp, adapters", "lora"),
    ],
)
def test_data_parallel_ranks_find_what_one_process_finds_with_plain_logits(
    found, expected, scenario, kind
):
    assert_same(found[scenario], expected(kind))
    assert [(name, shape) for name, shape, _ in found[scenario]["weights"]] == FULL
    assert_no_logits(found[scenario])


@pytest.mark.parametrize(
    "unit", ["head in the root unit", "head as its own unit", "tied", "adapters", "bfloat16"]
)
def test_hooks_of_fsdp_gather_the_weight_for_the_kernel_and_for_nobody_else(found, unit):
    scenario = found[f"fsdp, {unit}"]
    assert [(name, shape) for name, shape, _ in scenario["weights"]] == FULL
    assert {kind.__name__ for kind in scenario["at rest"]} == {"DTensor"}


def test_fsdp_has_no_cause_to_warn(found):
    assert "view tensor" not in found["warnings"]


def test_a_sharded_head_whose_hooks_did_not_fire_says_so(found):
    assert (
        "the weight is (Shard(dim=0),) and hidden states are plain"
        in found["fsdp, no hooks"]["error"]
    )
    assert "call what fully_shard was given (the policy)" in found["fsdp, no hooks"]["error"]


def test_mixed_precision_of_fsdp_computes_in_bfloat16_and_reduces_in_float32(found, monkeypatch):
    for name, size in TILES.items():  # for the bits of the ranks
        monkeypatch.setattr(passes, name, size)
    scenario = found["fsdp, bfloat16"]
    assert {dtype for *_, dtype in scenario["weights"]} == {torch.bfloat16}
    assert {gradient.dtype for gradient in scenario["gradients"].values()} == {torch.float32}
    ranks = []
    for rank in range(RANKS):
        model = make_model(dtype=torch.float32)
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
        run(Policy(model, layout="padded"), EXAMPLES[rank::RANKS])
        ranks.append(wrapped.gradients(model))
    for name, gradient in scenario["gradients"].items():
        expected = sum(grads[name].float() for grads in ranks)
        torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-7, msg=name)


def skip_what_is_refused(scenario):
    if "refused" in scenario:
        pytest.skip(f"transformers {transformers.__version__}: {scenario['refused']}")


@pytest.mark.parametrize("scenario", ["colwise", "transformers"])
def test_a_vocabulary_split_by_tensor_parallelism_stays_split(found, expected, scenario):
    skip_what_is_refused(found[scenario])
    half = -(-VOCABULARY // RANKS)
    assert found[scenario]["fused"]
    assert_same(found[scenario], expected("plain"))
    assert found[scenario]["alike"]  # on both ranks, to the bit
    assert [shape for _, shape, _ in found[scenario]["weights"]] == [(half, 32), (half, 32)]
    assert_no_logits(found[scenario], ranks=1)


@pytest.mark.parametrize("scenario", ["colwise", "transformers"])
def test_a_fused_head_under_tensor_parallelism_still_gives_logits(found, scenario):
    skip_what_is_refused(found[scenario])
    expected = make_model()(torch.tensor([[3, 4, 5]]), use_cache=False).logits
    torch.testing.assert_close(found[scenario]["logits"], expected, rtol=0, atol=EXACT)


@pytest.mark.parametrize(
    "scenario", ["replicated weight", "replicated weight and states", "split weight"]
)
def test_a_head_on_a_mesh_answers_as_one_in_one_piece(found, scenario):
    expected = ask(plain_head(), hidden_states())
    torch.testing.assert_close(found[scenario]["values"], expected["values"], rtol=0, atol=EXACT)
    assert expected["gradients"].keys() == {"hidden", "weight", "bias"}
    for name, gradient in expected["gradients"].items():
        torch.testing.assert_close(
            found[scenario]["gradients"][name], gradient, rtol=EXACT, atol=EXACT, msg=name
        )


def test_gradients_lie_on_the_mesh_as_their_tensors_do(found):
    layouts = {
        name: str(found["split weight"]["layouts"][name]) for name in ("hidden", "weight", "bias")
    }
    assert layouts == {
        "hidden": "(Replicate(),)",
        "weight": "(Shard(dim=0),)",
        "bias": "(Shard(dim=0),)",
    }
    layouts = {name: str(layout) for name, layout in found["replicated weight"]["layouts"].items()}
    assert layouts == {"hidden": "None", "weight": "(Replicate(),)", "bias": "(Replicate(),)"}


@pytest.mark.parametrize(
    ("scenario", "message"),
    [
        ("split weight, plain states", "hidden states are plain"),
        ("split weight and states", r"hidden states are (Shard(dim=0),)"),
        ("weight split by width", "the weight is (Shard(dim=1),)"),
        ("plain weight, split states", "the weight is plain and hidden states are (Shard(dim=0),)"),
    ],
)
def test_what_would_sum_over_the_wrong_ranks_is_refused(found, scenario, message):
    assert message in found[scenario]["error"]
    assert "replicated on the same mesh" in found[scenario]["error"]
