"""The policy: its log-probs are the model's own, whatever the rows."""

import copy
import logging

import pytest
import torch
from burnish.loops.batch import collate
from burnish.loops.models.policy import Policy
from peft import LoraConfig, get_peft_model
from tiny import FAMILIES, make_examples, make_model
from transformers import AutoModelForCausalLM, Llama4TextConfig

EXACT = 1e-10
# Whatever the precision of the weights, transformers computes RMS norms in float32, which shows in
# gradients.
NORMS = 2e-6
# what each family is shown to keep apart; a family that can do more some day turns this red
LAYOUTS_OF = {
    "llama": "shared",
    "llama_tied": "shared",
    "mistral_windowed": "packed",
    "qwen2": "shared",
    "qwen3": "shared",
    "gemma2": "packed",
    "gemma3": "packed",
    "gpt2": "shared",
    "cohere": "shared",
    "cohere2": "packed",
    "granite": "shared",
}


def plain_logprobs(model, examples):
    """One sequence at a time through the model's own forward, log-softmax and gather."""
    values = []
    for example in examples:
        for completion, trained in zip(example.completions, example.trained, strict=True):
            ids = torch.tensor([example.prompt + completion])
            logprob = model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
            start = len(example.prompt)
            values += [
                logprob[start + t - 1, token] for t, token in enumerate(completion) if trained[t]
            ]
    return torch.stack(values)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_log_probs_and_gradients_are_those_of_the_plain_model(family, attention):
    if family == "gemma2" and attention == "sdpa":
        pytest.skip("Gemma 2 caps attention scores, which SDPA does not")
    # eager attention fills masks with numbers that its own float32 softmax can't hold
    exact = attention == "sdpa"
    model = make_model(family, attention=attention, dtype=torch.float64 if exact else torch.float32)
    examples = make_examples(4)
    expected = plain_logprobs(model, examples)
    weight = torch.randn(len(expected), dtype=expected.dtype)
    (expected * weight).sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    for layout in dict.fromkeys([LAYOUTS_OF[family], "packed", "padded"]):
        model.zero_grad()
        policy = Policy(model, layout=layout)
        assert policy.fused
        logprob = policy(collate(examples)).logprob
        torch.testing.assert_close(logprob, expected, rtol=0, atol=EXACT if exact else 1e-4)
        (logprob * weight).sum().backward()
        for name, parameter in model.named_parameters():
            difference = (parameter.grad - gradients[name]).norm()
            assert difference <= (NORMS if exact else 1e-4) * gradients[name].norm(), (
                f"{layout}: gradient of {name}"
            )


def test_a_policy_leaves_out_the_attention_whose_gradients_are_not_finite():
    torch.backends.cuda.enable_cudnn_sdp(True)
    Policy(make_model("llama"))
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("layout", ["shared", "packed", "padded"])
def test_on_a_gpu_gradients_under_autocast_are_finite_and_near_those_of_float32(layout):
    gradients = []
    for sixteen_bits in (False, True):
        model = make_model("llama", dtype=torch.float32).cuda()
        policy = Policy(model, layout=layout)
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=sixteen_bits):
            logprob = policy(collate(make_examples(4))).logprob
        logprob.mean().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    exact, found = gradients
    assert found.isfinite().all()
    assert (found - exact).norm() <= 0.05 * exact.norm()


@pytest.mark.parametrize("family", FAMILIES)
def test_auto_takes_the_best_layout_that_keeps_sequences_apart(family):
    attention = "eager" if family == "gemma2" else "sdpa"
    assert Policy(make_model(family, attention=attention)).layout == LAYOUTS_OF[family]


def test_a_layout_that_mixes_sequences_is_refused():
    with pytest.raises(
        ValueError, match="layout 'shared' lets the sequences of MistralForCausalLM see each other"
    ):
        Policy(make_model("mistral_windowed"), layout="shared")


def test_the_probe_sees_a_model_that_ignores_restarting_positions():
    model = make_model("gpt2")
    backbone = model.base_model
    deaf = type(backbone).forward

    def forward(input_ids, attention_mask=None, **rest):
        if attention_mask is None:  # all of a row is one sequence to it
            attention_mask = torch.ones_like(input_ids)
        return deaf(backbone, input_ids, attention_mask=attention_mask, **rest)

    backbone.forward = forward
    with pytest.raises(ValueError, match="layout 'packed'"):
        Policy(model, layout="packed")


def test_a_head_that_does_not_fuse_falls_back_to_full_logits_and_says_so_once(caplog):
    model = make_model("llama")
    head = torch.nn.Sequential(
        torch.nn.Linear(32, 32), torch.nn.Tanh(), torch.nn.Linear(32, 61)
    ).double()
    model.lm_head = head
    with caplog.at_level(logging.WARNING):
        policy = Policy(model)
    assert not policy.fused
    assert caplog.text.count("full logits: output head is Sequential") == 1
    examples = make_examples(3)
    torch.testing.assert_close(
        policy(collate(examples)).logprob, plain_logprobs(model, examples), rtol=0, atol=EXACT
    )


def test_a_model_that_hides_its_backbone_falls_back(caplog):
    """The text model of Llama 4 has another name for it than the one that transformers looks
    for.
    """
    config = {**FAMILIES["llama"].to_dict(), "intermediate_size_mlp": 48, "num_local_experts": 2}
    model = AutoModelForCausalLM.from_config(
        Llama4TextConfig(**{**config, "model_type": "llama4_text"})
    )
    policy = Policy(model.float().eval())
    assert (
        not policy.fused
        and "full logits: transformers does not say what is below its head" in caplog.text
    )
    examples = make_examples(3)
    torch.testing.assert_close(
        policy(collate(examples)).logprob, plain_logprobs(model, examples), rtol=0, atol=1e-5
    )


def test_logits_that_are_changed_in_an_unknown_way_are_not_fused():
    model = make_model("llama")

    def sharpen(module, inputs, output):
        output.logits = output.logits * 1.5
        return output

    model.register_forward_hook(sharpen)
    policy = Policy(model)
    assert not policy.fused
    examples = make_examples(3)
    torch.testing.assert_close(
        policy(collate(examples)).logprob, plain_logprobs(model, examples), rtol=0, atol=EXACT
    )


@pytest.mark.parametrize("target_modules", ["all-linear", ["q_proj", "lm_head"]])
def test_lora_on_body_and_head_matches_peft(target_modules):
    model = get_peft_model(
        make_model("qwen2"),
        LoraConfig(task_type="CAUSAL_LM", r=3, target_modules=target_modules),
        autocast_adapter_dtype=False,
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    policy = Policy(model)
    assert policy.fused
    examples = make_examples(3)
    torch.testing.assert_close(
        policy(collate(examples)).logprob, plain_logprobs(model, examples), rtol=0, atol=EXACT
    )
    with model.disable_adapter():
        off = policy(collate(examples)).logprob
        torch.testing.assert_close(off, plain_logprobs(model, examples), rtol=0, atol=EXACT)


def test_a_copied_policy_reads_its_own_weights():
    policy = Policy(make_model("llama"))
    frozen = copy.deepcopy(policy)
    batch = collate(make_examples(2))
    before = frozen(batch).logprob
    generated = frozen.plain(torch.tensor([[3, 4]])).logits
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.1)
    assert torch.equal(frozen(batch).logprob, before)
    assert torch.equal(frozen.plain(torch.tensor([[3, 4]])).logits, generated)


def test_temperature_divides_the_logits():
    model = make_model("gemma3")
    examples = make_examples(2)
    halved = Policy(model)(collate(examples), temperature=2.0).logprob

    def cool(module, inputs, output):
        output.logits = output.logits / 2.0
        return output

    model.register_forward_hook(cool)
    torch.testing.assert_close(halved, plain_logprobs(model, examples), rtol=0, atol=EXACT)


def test_an_empty_batch_gives_a_differentiable_zero():
    policy = Policy(make_model("llama"))
    policy(collate([])).logprob.sum().backward()
    assert all(
        parameter.grad is not None and not parameter.grad.any() for parameter in policy.parameters()
    )
