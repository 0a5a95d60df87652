"""Families of `transformers` with more to them than Llama: routers, recurrences, caps, and text
beside images.
"""

import pytest
import torch
from burnish.loops.batch import collate
from burnish.loops.config import Common, Lora
from burnish.loops.models.io import load_classifier, load_model
from burnish.loops.models.policy import Policy
from burnish.loops.models.scorer import Scorer
from tiny import _SMALL, make_examples
from transformers import AutoConfig, AutoModelForCausalLM

ROUTED = {"num_experts_per_tok": 2, "attention_dropout": 0.3}
JITTERED = {
    kind: {**ROUTED, "router_jitter_noise": 0.3} for kind in ("mixtral", "minimax", "minimax_m2")
}
JITTERED["phimoe"] = {**ROUTED, "router_jitter_noise": 0.01, "input_jitter_noise": 0.3}
JITTERED["dbrx"] = {
    **{"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 256, "resid_pdrop": 0.3},
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    "ffn_config": {
        "ffn_hidden_size": 48,
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "moe_jitter_eps": 0.3,
    },
}
MAMBA = {
    "mamba_d_state": 8,
    "mamba_d_ssm": 32,
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
}
TEXT = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "layer_types": ["full_attention"] * 2,
}
SEEN = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
}
SIZES = {
    **JITTERED,
    "falcon_h1": MAMBA,
    "gemma3": {
        "text_config": _SMALL,
        "vision_config": {**SEEN, "patch_size": 14},
        "mm_tokens_per_image": 4,
    },
    "llama4_text": {
        "num_local_experts": 4,
        "intermediate_size_mlp": 48,
        "attn_temperature_tuning": False,
    },
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1, "state_size": 8},
    "qwen3_5_moe_text": TEXT,
    "recurrent_gemma": {"lru_width": 32, "attention_window_size": 8, "logits_soft_cap": 3.0},
}


def make(kind, dtype=torch.float32):
    torch.manual_seed(0)
    sizes = (
        {}
        if kind == "gemma3"
        else {"vocab_size": _SMALL["vocab_size"]}
        if kind == "dbrx"
        else _SMALL
    )
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **{**sizes, **SIZES[kind]}), dtype=dtype
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0) if parameter.ndim > 1 else None
    return model


def settings(model, **fields):
    return Common(model=model, data="", output="", **fields)


@pytest.mark.parametrize("kind", JITTERED)
def test_routers_do_not_draw_in_training_what_they_would_not_in_evaluation(kind):
    model, batch = make(kind).train(), collate(make_examples(3))
    untouched = Policy(model)
    assert not torch.equal(untouched(batch).logprob, untouched(batch).logprob)
    policy = Policy(load_model(settings(model)))
    trained = [policy(batch).logprob for _ in range(2)]
    assert policy.training and torch.equal(*trained)
    assert torch.equal(policy.eval()(batch).logprob, trained[0])
    policy.train()
    assert all(
        each.training
        for each in policy.modules()
        if not any("jitter" in name for name in vars(each))
    )


@pytest.mark.parametrize("kind", ["phimoe", "llama4_text", "falcon_h1"])
def test_adapters_on_all_linear_layers_leave_out_what_only_looks_like_one(kind):
    policy = Policy(load_model(settings(make(kind), lora=Lora(r=2))))
    policy(collate(make_examples(3))).logprob.sum().backward()
    adapted = {name: each for name, each in policy.named_parameters() if "lora_B" in name}
    assert len(adapted) > 4 and all(
        each.grad is not None and each.grad.any() for each in adapted.values()
    )
    assert not any("router" in name or "mamba.out_proj" in name for name in adapted)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("recurrent_gemma", torch.float32), ("mamba2", torch.bfloat16)],
    ids=["capped", "rounded and converted"],
)
def test_logits_are_recognized_by_their_cap_and_precision(kind, dtype):
    model = make(kind, dtype)
    assert Policy(model).fused


@pytest.mark.parametrize("kind", ["qwen3_5_moe_text", "falcon_h1", "gemma3"])
def test_a_reward_model_has_the_sizes_and_buffers_of_the_language_model(kind, tmp_path):
    make(kind).save_pretrained(tmp_path)
    scorer = Scorer(load_classifier(settings(str(tmp_path)), "SEQ_CLS", {0: "score"}))
    body = AutoModelForCausalLM.from_pretrained(tmp_path).base_model
    for expected, found in (
        (body.state_dict(), scorer.plain.model.state_dict()),
        (body.named_buffers(), None),
    ):
        expected, found = dict(expected), dict(found or scorer.plain.model.named_buffers())
        assert expected.keys() == found.keys()
        assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())


@pytest.mark.parametrize("where", ["object", "directory", "adapters"])
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_5_moe_text"])
def test_experts_are_trained_in_float64(kind, where, tmp_path):
    """Where torch multiplies groups of rows by their experts at once, it takes no float64."""
    model = make(kind)
    expected = Policy(load_model(settings(make(kind))))(collate(make_examples(3))).logprob
    fields = {"dtype": "float64"}
    if where == "directory":
        model.save_pretrained(tmp_path)
        model = str(tmp_path)
    if where == "adapters":
        fields["lora"] = Lora(r=2, target_modules=["q_proj"])
    policy = Policy(load_model(settings(model, **fields)))
    found = policy(collate(make_examples(3))).logprob
    found.sum().backward()
    assert any(
        parameter.grad is not None and parameter.grad.dtype == torch.float64
        for parameter in policy.parameters()
    )
    torch.testing.assert_close(found.float(), expected.float(), rtol=0, atol=1e-3)
