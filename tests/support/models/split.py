"""Models of several families, split over two ranks that compute together, beside the same model
whole on each.
"""

import copy
import json
import os
from pathlib import Path

import torch
from accelerate import Accelerator
from burnish.loops.batch import collate
from burnish.loops.models.policy import Policy
from peft import LoraConfig, get_peft_model
from tiny import _SMALL, make_examples, make_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Olmo2Config, Phi3Config, Qwen3MoeConfig

# By name: a family of `make_model`, or a configuration.
FAMILIES = {
    name: name
    for name in (
        "llama",
        "llama_tied",
        "mistral_windowed",
        "qwen2",
        "qwen3",
        "gemma2",
        "gemma3",
        "cohere",
        "cohere2",
        "granite",
    )
}
FAMILIES |= {"olmo2": Olmo2Config(**_SMALL), "phi3": Phi3Config(**_SMALL)}
# Plain and tied heads, windows and two kinds of rotary embeddings, norms of heads, layers that hold
# several.
DISTINCT = ("llama", "llama_tied", "gemma3", "cohere", "olmo2", "phi3")


def with_adapters():
    return get_peft_model(
        make_model(), LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"])
    )


# By name: what makes the model, and a part of the message.
REFUSED = {
    "no plan": (
        lambda: make_model("gpt2"),
        "GPT2LMHeadModel: transformers has no plan to split its layers",
    ),
    "heads": (
        lambda: make_model(num_key_value_heads=1),
        "LlamaForCausalLM has num_key_value_heads=1, no multiple of",
    ),
    "features": (
        lambda: make_model(intermediate_size=49),
        "49 features of model.layers.0.mlp.gate_proj are no multi",
    ),
    "adapters": (with_adapters, "self_attn.q_proj is no linear layer of torch, but peft."),
    "experts": (
        lambda: of_config(Qwen3MoeConfig(**_SMALL, num_experts=4)),
        "which is not supported; shard it by",
    ),
}


def of_config(config):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float64).eval()


def made(family):
    return make_model(family, attention="eager") if isinstance(family, str) else of_config(family)


def gradients(policy, accelerator):
    """Log-probs, gradients by name, and their norm, of one batch that every rank reads."""
    outputs = policy(collate(make_examples(5)))
    logprob = outputs.logprob
    (
        logprob.square().sum() + (0.0 if outputs.value is None else outputs.value.square().sum())
    ).backward()
    norm = accelerator.clip_grad_norm_(policy.parameters(), 1e9)
    tensors = {name: parameter.grad for name, parameter in policy.named_parameters()} | {
        "log-probs": logprob.detach()
    }
    return {name: full(each) for name, each in tensors.items()}, float(full(norm))


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def be_rank(output, names):
    accelerator, families, refused = Accelerator(), {}, {}
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "tp"))
    for name in names:
        family = FAMILIES[name]
        expected, expected_norm = gradients(Policy(made(family)), accelerator)
        rounded = Policy(made(family).float(), mesh=mesh, param_dtype=torch.bfloat16)
        policy = Policy(made(family), mesh=mesh)
        found, norm = gradients(policy, accelerator)
        sizes = {False: 0, True: 0}
        for parameter in policy.parameters():
            sizes[any(placement.is_shard() for placement in parameter.placements[1:])] += (
                parameter.nbytes
            )
        families[name] = {
            "differences": {
                name: float((found[name] - expected[name]).abs().max()) for name in expected
            },
            "largest": min(float(each.abs().max()) for each in expected.values()),
            "norm": norm,
            "expected_norm": expected_norm,
            "held": sum(parameter.to_local().nbytes for parameter in policy.parameters()),
            "outside": sizes[False],
            "split": sizes[True],
            "layouts": (policy.layout, rounded.layout),
        }
    for name, (make, _) in REFUSED.items():
        try:
            Policy(make(), mesh=mesh)
        except Exception as error:
            refused[name] = f"{type(error).__name__}: {error}"
    try:
        policy.plain(torch.tensor([[3, 4]]))
    except RuntimeError as error:
        refused["a call that nothing is gathered for"] = str(error)
    if os.environ["RANK"] == "0":
        Path(output).write_text(json.dumps({"families": families, "refused": refused}))
