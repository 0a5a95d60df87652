"""The load-balancing loss of a mixture of experts, `aux_loss`."""

import json

import pytest
import torch
from accelerate import Accelerator
from burnish.loops.batch import collate
from burnish.loops.config import Teacher
from burnish.loops.models.policy import Policy
from burnish.loops.models.routers import load_balancing
from burnish.loops.recipes.distill import open_distill
from burnish.loops.recipes.kto import open_kto
from burnish.loops.recipes.preference import open_cpo, open_dpo, open_orpo
from burnish.loops.recipes.settings import CPO, DPO, KTO, ORPO, SFT, Distill
from burnish.loops.recipes.sft import open_sft
from burnish.loops.train.losses import Term, compose, policy_tensors, router_loss, weightings
from burnish.loops.train.step import train_step
from burnish.objectives import nll
from forked import run_forked
from tiny import _SMALL, make_examples, make_model, save_model, sums, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

ROUTED = {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.1}
FAMILIES = {
    "mixtral": MixtralConfig(**_SMALL, **ROUTED, num_local_experts=4),
    "qwen3_moe": Qwen3MoeConfig(**_SMALL, **ROUTED, num_experts=4, moe_intermediate_size=16),
}
ROWS = [{"messages": pair["prompt"] + pair["chosen"]} for pair in sums(10)]


def make_experts(family, dtype=torch.float64):
    """Routers are computed in float32, whatever the model is."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        FAMILIES[family], dtype=dtype, experts_implementation="eager"
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0) if parameter.ndim > 1 else None
    return model.eval()


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A mixture of experts on disk, whose configuration asks for the loss, and whose routers send
    nearly all tokens to the same two.
    """
    directory = save_model(tmp_path_factory.mktemp("start"))
    size = len(AutoTokenizer.from_pretrained(directory))
    config = Qwen3MoeConfig(**{**FAMILIES["qwen3_moe"].to_dict(), "vocab_size": size})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        model.model.embed_tokens.weight.add_(0.05)  # a direction that all states have in common
        for layer in model.model.layers:
            layer.mlp.gate.weight[:2] += 0.1
    model.save_pretrained(directory)
    return str(directory)


def of_tokens(policy, batch):
    return policy_tensors()(policy, batch)["tokens", "load_balance"]


@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
@pytest.mark.parametrize("family", FAMILIES)
def test_its_mean_over_a_completion_is_transformers_loss_of_the_completion(family, layout):
    model = make_experts(family)
    policy = Policy(model, layout=layout)
    assert router_loss(policy, None)["aux_loss"].coefficient == 0.1
    batch = collate(make_examples(3))
    ours = of_tokens(policy, batch)
    sequences = []
    for each in batch.examples:
        sequences += [(each.prompt, *of) for of in zip(each.completions, each.trained, strict=True)]
    for i, (prompt, completion, trained) in enumerate(sequences):
        ids = torch.tensor([prompt + completion])
        logits = model.model(input_ids=ids, output_router_logits=True).router_logits
        read = torch.zeros_like(ids)  # the position before each trained token
        read[0, len(prompt) - 1 : -1] = torch.tensor(trained)
        theirs = load_balancing_loss_func(logits, 4, 2, read)
        assert ours[batch.sequence == i].mean().item() == pytest.approx(theirs.item(), rel=1e-5)


def test_even_use_of_experts_is_the_minimum():
    even = torch.zeros(4, 1, 4, dtype=torch.float64)
    even[range(4), 0, range(4)] = even[range(4), 0, [1, 2, 3, 0]] = 9.0
    one = torch.zeros(4, dtype=torch.int64)
    assert load_balancing(even, one, 1, top_k=2).mean().item() == pytest.approx(2.0)
    always = even[:1].expand(4, 1, 4)
    assert load_balancing(always, one, 1, top_k=2).mean().item() > 3.9


def test_completions_do_not_interact():
    torch.manual_seed(0)
    logits = torch.randn(7, 2, 4, dtype=torch.float64)
    sequence = torch.tensor([0, 0, 0, 2, 2, 2, 2])
    together = load_balancing(logits, sequence, 3, top_k=2)
    alone = load_balancing(logits[:3], sequence[:3], 1, top_k=2)
    torch.testing.assert_close(together[:3], alone, rtol=1e-14, atol=0)


def test_the_share_of_tokens_has_no_gradient():
    torch.manual_seed(0)
    logits = torch.randn(5, 2, 4, dtype=torch.float64, requires_grad=True)
    sequence = torch.tensor([0, 0, 1, 1, 1])
    assert torch.autograd.gradcheck(
        lambda logits: load_balancing(logits, sequence, 2, top_k=2), (logits,)
    )


def test_the_gradient_is_the_same_for_every_split_and_layout():
    """But for rounding: routers are computed in float32."""
    examples = make_examples(6)
    results = {}
    for layout, size in (("padded", 6), ("packed", 1), ("shared", 2), ("packed", 4)):
        policy = Policy(make_experts("qwen3_moe"), layout=layout)
        terms = {"nll": Term(nll), **router_loss(policy, 3.0)}
        optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
        before = torch.cat([each.detach().flatten().clone() for each in policy.parameters()])
        metrics = train_step(
            Accelerator(cpu=True),
            policy,
            optimizer,
            [collate(examples[i : i + size]) for i in range(0, 6, size)],
            compose(terms, policy_tensors()),
            weightings(terms),
            max_grad_norm=float("inf"),
        )
        after = torch.cat([each.detach().flatten() for each in policy.parameters()])
        assert metrics["loss"] == pytest.approx(metrics["nll"] + 3 * metrics["aux_loss"])
        results[layout, size] = (metrics["aux_loss"], before - after)
    (whole, gradient), *others = results.values()
    for aux_loss, other in others:
        assert aux_loss == pytest.approx(whole, rel=1e-6)
        torch.testing.assert_close(other, gradient, rtol=1e-4, atol=1e-6 * gradient.abs().max())


def test_routers_learn_from_it_alone():
    policy = Policy(make_experts("mixtral"))
    router_loss(policy, 1.0)
    of_tokens(policy, collate(make_examples(3))).mean().backward()
    assert all(layer.mlp.gate.weight.grad.abs().max() > 0 for layer in policy.model.model.layers)
    assert policy.head.weight.grad is None


def test_a_model_that_does_not_ask_has_none(start):
    assert router_loss(Policy(make_model("llama")), None) == {}
    run = open_sft(SFT(model=start, data=ROWS, steps=1, router_aux_loss_coef=0.0))
    assert "aux_loss" not in run.losses


def test_a_model_without_routers_is_refused():
    with pytest.raises(ValueError, match=r"router_aux_loss_coef: Llama.* set it to 0"):
        router_loss(Policy(make_model("llama")), 0.1)


@pytest.mark.parametrize(
    "recipe",
    [
        (open_sft, SFT),
        (open_dpo, DPO),
        (open_cpo, CPO),
        (open_orpo, ORPO),
        (open_kto, KTO),
        (open_distill, Distill),
    ],
)
def test_recipes_lower_it_and_measure_held_out_data(recipe, start):
    open_recipe, settings = recipe
    data = ROWS if issubclass(settings, SFT) else sums(10)
    fields = {"learning_rate": 3e-3, "steps": 8, "batch_size": 10, "gradient_checkpointing": True}
    if settings is Distill:
        fields["teacher"] = Teacher(model=start)
    run = open_recipe(
        settings(model=start, data=data, eval_data=data, router_aux_loss_coef=10.0, **fields)
    )
    first, *_, last = [step.metrics["aux_loss"] for step in run]
    assert 2 < last < first - 0.2
    assert run.metrics["eval/aux_loss"] < first - 0.2


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 2])
def test_it_is_the_same_on_two_ranks_under_autocast(shards, start, tmp_path):
    data = write_rows(tmp_path / "rows.jsonl", ROWS)
    for status, printed in run_forked(
        2, "rank_ended", start, str(data), str(tmp_path / "run"), shards
    ):
        assert status == 0, printed[-3000:]
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    alone = open_sft(SFT(model=start, data=str(data), dtype="bfloat16", batch_size=4, steps=2))
    for step, line in zip(alone, lines[-2:], strict=True):
        assert line["aux_loss"] == pytest.approx(step.metrics["aux_loss"], rel=1e-3)
        assert line["grad_norm"] == pytest.approx(step.metrics["grad_norm"], rel=2e-2)
