"""Deep models are probed by their first layers, and judged as they would be by all of them."""

import logging

import pytest
import torch
from burnish.loops.models.policy import Policy
from burnish.loops.models.probe import objection, shortened
from burnish.loops.models.scorer import Scorer
from burnish.loops.rollouts.local.kv_cache import ContinuousBatch, StaticBatch
from burnish.loops.rollouts.local.source import LocalSource
from tiny import VOCABULARY, make_classifier, make_model
from transformers import AutoModelForCausalLM, BertConfig, Qwen3MoeConfig, XLMConfig
from transformers.models.llama.modeling_llama import LlamaAttention

SLIDING, FULL = "sliding_attention", "full_attention"


def deep(**changes):
    return make_model(num_hidden_layers=8, **changes)


def mixture(dense):
    """Of experts, but for these layers."""
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        mlp_only_layers=dense,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()


def left(model):
    with shortened(model) as cut:
        count = len(model.base_model.layers)
    assert cut == (count < 8)
    assert len(model.base_model.layers) == 8, "the model was not put together again"
    return count


@pytest.mark.parametrize(
    ("types", "count"),
    [
        ([SLIDING, FULL] * 4, 2),
        ([SLIDING, SLIDING, SLIDING, SLIDING, SLIDING, FULL, SLIDING, SLIDING], 6),
        ([FULL] * 7 + [SLIDING], 8),
    ],
)
def test_every_kind_of_attention_is_left(types, count):
    assert left(make_model("gemma3", num_hidden_layers=8, layer_types=types)) == count


@pytest.mark.parametrize(("dense", "count"), [([], 2), ([0], 2), ([0, 1, 2], 4), ([5], 6)])
def test_dense_layers_and_mixtures_of_experts_are_two_kinds(dense, count):
    assert left(mixture(dense)) == count


def test_a_layer_of_another_class_setting_or_shape_is_left():
    assert left(deep()) == 2
    model = deep()
    model.base_model.layers[4].self_attn.scaling = 1.0
    assert left(model) == 5
    model = deep()
    model.base_model.layers[3].mlp.down_proj = torch.nn.Linear(
        48, 32, bias=True, dtype=torch.float64
    )
    assert left(model) == 4
    model = deep()
    model.base_model.layers[6].forward = model.base_model.layers[6].forward
    assert left(model) == 7


@pytest.mark.parametrize("lists", [0, 2])
def test_a_model_whose_layers_are_not_found_or_ambiguous_is_left_whole(lists):
    model = deep()
    if lists:
        model.others = torch.nn.ModuleList([torch.nn.Identity()] * 8)
    else:
        model.config.num_hidden_layers = 5
    with shortened(model) as cut:
        assert not cut and len(model.base_model.layers) == 8


def test_the_model_is_put_together_again_after_an_error():
    model = deep()
    layers = model.base_model.layers
    with pytest.raises(ZeroDivisionError), shortened(model):
        _ = 1 / 0
    assert model.base_model.layers is layers


def test_later_layers_of_one_kind_are_not_run_to_choose_head_layout_and_cache():
    model, calls = deep(), []
    model.base_model.layers[-1].register_forward_pre_hook(lambda *_: calls.append(1))
    # A hook is no setting, so this layer is of the kind of the others.
    assert left(model) == 2
    policy = Policy(model)
    assert (policy.fused, policy.layout, len(calls)) == (True, "shared", 0)
    assert isinstance(LocalSource(policy, version=0)._make_batch(50), ContinuousBatch)
    assert len(calls) == 1  # the bytes of a token's keys and values are those of all layers


class SeesBefore(LlamaAttention):
    """Attends to the row up to the token, whatever the mask."""

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, **rest):
        assert attention_mask is None or attention_mask.ndim == 4
        causal = None if attention_mask is None else torch.ones_like(attention_mask).tril()
        return super().forward(hidden_states, position_embeddings, causal, **rest)


class SeesAll(LlamaAttention):
    """Attends to every token of its sequence, later ones included."""

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, **rest):
        mask = attention_mask if attention_mask is None else attention_mask | attention_mask.mT
        self.is_causal = False
        return super().forward(hidden_states, position_embeddings, mask, **rest)


def test_one_late_layer_that_mixes_sequences_is_found_out():
    model = deep()
    model.base_model.layers[5].self_attn.__class__ = SeesBefore
    with pytest.raises(
        ValueError, match="layout 'shared' lets the sequences of LlamaForCausalLM see each other"
    ):
        Policy(model, layout="shared")
    policy = Policy(model, layout="padded")
    assert isinstance(LocalSource(policy, version=0)._make_batch(50), StaticBatch)


def test_rounding_that_depends_on_all_tokens_as_with_experts_mixes_no_sequences():
    model = deep()
    model.base_model.layers[1].mlp.register_forward_hook(
        lambda module, args, output: output * (1 + 1e-7 * args[0].mean())
    )
    assert Policy(model).layout == "shared"


@pytest.mark.parametrize("layout", ["auto", "packed", "padded"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_one_late_layer_that_sees_later_tokens_is_refused(layout, dtype):
    model = deep(dtype=dtype)
    model.base_model.layers[5].self_attn.__class__ = SeesAll
    with pytest.raises(
        ValueError,
        match="model: LlamaForCausalLM is no causal language model: a later token changes",
    ):
        Policy(model, layout=layout)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_encoder_is_a_policy_only_as_a_decoder(dtype):
    sizes = dict(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=8,
        num_attention_heads=4,
    )
    config = BertConfig(**sizes)
    with pytest.raises(ValueError, match="BertLMHeadModel is no causal language model"):
        Policy(AutoModelForCausalLM.from_config(config, dtype=dtype))
    config.is_decoder = True
    assert not Policy(AutoModelForCausalLM.from_config(config, dtype=dtype)).fused


def test_an_encoder_that_asserts_what_a_mask_is_like_is_refused_as_others_are():
    config = XLMConfig(n_words=VOCABULARY, emb_dim=32, n_layers=2, n_heads=4)
    with pytest.raises(ValueError, match="XLMWithLMHeadModel is no causal language model"):
        Policy(AutoModelForCausalLM.from_config(config))


def test_a_reward_model_may_be_an_encoder_and_a_critic_may_not():
    model = make_classifier("SEQ_CLS")
    for layer in model.base_model.layers:
        layer.self_attn.__class__ = SeesAll
    assert Scorer(model)
    with pytest.raises(
        ValueError, match="LlamaForSequenceClassification is no causal language model"
    ):
        Scorer(model, read="before")


def test_a_model_that_cannot_run_shortened_is_judged_whole(caplog):
    model = deep()
    backbone = model.base_model
    original = type(backbone).forward

    def forward(*arguments, **named):
        _ = backbone.layers[backbone.config.num_hidden_layers - 1]
        return original(backbone, *arguments, **named)

    backbone.forward = forward
    with caplog.at_level(logging.INFO):
        policy = Policy(model)
        batch = LocalSource(policy, version=0)._make_batch(50)
    assert (policy.fused, policy.layout) == (True, "shared")
    assert isinstance(batch, ContinuousBatch)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_a_refusal_counts_only_of_all_layers():
    model, seen = deep(), []

    def probe():
        seen.append(len(model.base_model.layers))
        return "no" if seen[-1] == 2 else None

    assert objection(model, probe) is None
    assert seen == [2, 8]
