"""Every causal language model of the `transformers` at hand, a small one: policy and sampler
compute what it does.
"""

import pytest
import torch
from burnish.loops.batch import collate
from burnish.loops.models.policy import Policy
from burnish.loops.rollouts.local.source import LocalSource
from burnish.loops.rollouts.sample import SamplingParams
from burnish.loops.rollouts.scheduler import RolloutScheduler
from tiny import _SMALL, make_examples
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as FAMILIES

# By the names of all architectures; each takes those that its configuration has.
SIZES = {
    **{name: value for name, value in _SMALL.items() if name != "head_dim"},
    **dict.fromkeys(("n_layer", "num_layers", "decoder_layers", "num_experts_per_tok"), 2),
    **dict.fromkeys(
        ("n_head", "num_heads", "decoder_attention_heads", "num_experts", "num_local_experts"), 4
    ),
    **dict.fromkeys(("n_routed_experts", "rotary_dim", "state_size"), 4),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "d_kv"), 8),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "moe_intermediate_size"), 16),
    **dict.fromkeys(("d_model", "n_embd"), 32),
    **dict.fromkeys(("n_inner", "ffn_dim", "decoder_ffn_dim", "d_ff"), 48),
    **{
        "n_group": 1,
        "topk_group": 1,
        "hidden_act": "silu",
        "unpadded_vocab_size": _SMALL["vocab_size"],
    },
}
LARGEST = 30_000_000  # parameters, which a default that SIZES does not know may make


def build(kind, **changes):
    default = AutoConfig.for_model(kind)
    known = {
        n: v
        for n, v in {**SIZES, **changes}.items()
        if isinstance(getattr(default, n, ""), int | str | None)
    }
    known = {name: value for name, value in known.items() if hasattr(default, name)}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **known))
    size = sum(parameter.numel() for parameter in model.parameters())
    assert size < LARGEST, f"{size} parameters"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **known), dtype=torch.float32
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0) if parameter.ndim > 1 else None
    model(torch.tensor([[3, 4, 5]]), use_cache=False)
    return model


def make(kind):
    """One with fewer heads for keys than for queries, or as many; skips what can't be made small by
    numbers alone.
    """
    reasons = []
    for heads in (2, 4):
        try:
            return build(kind, num_key_value_heads=heads)
        except Exception as error:  # of its configuration, which checks whatever it likes
            reasons.append(f"{type(error).__name__}: {error}")
    pytest.skip(reasons[-1].splitlines()[0][:200])


@torch.no_grad()
def log_probs(model, prompt, tokens):
    logits = model(torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[
        0, len(prompt) - 1 : -1
    ]
    return logits.double().log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_policy_and_sampler_compute_what_the_model_does(kind):
    model = make(kind)
    try:
        policy, batch = Policy(model), collate(make_examples(3))
    except ValueError as error:  # of an encoder
        assert "is no causal language model" in str(error)
        pytest.skip(str(error)[:60])
    expected = [
        log_probs(model, example.prompt, completion)[torch.tensor(trained)]
        for example in batch.examples
        for completion, trained in zip(example.completions, example.trained, strict=True)
    ]
    torch.testing.assert_close(
        policy(batch).logprob.double(), torch.cat(expected), rtol=0, atol=1e-4
    )
    sampling = SamplingParams(max_tokens=6, stop=(2,))
    scheduler = RolloutScheduler(
        LocalSource(policy, version=0), [[5, 7, 9], [3, 4]], group_size=3, sampling=sampling
    )
    with scheduler:
        for sample in [sample for group in scheduler.take(2) for sample in group]:
            expected = log_probs(model, sample.prompt, sample.tokens)
            torch.testing.assert_close(
                torch.tensor(sample.logprobs).double(), expected, rtol=0, atol=1e-4
            )
