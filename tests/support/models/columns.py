"""Models whose rows two ranks split by columns, beside the same model on whole rows."""

import json
import os
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator
from burnish.loops.models.activations import add_noise, checkpoint_activations
from burnish.loops.models.policy import Policy
from burnish.loops.models.scorer import Scorer
from split import FAMILIES as SPLIT
from split import gradients, made, of_config
from tiny import _SMALL, make_classifier, make_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import BloomConfig, Lfm2Config, Mamba2Config, Qwen3MoeConfig, Qwen3NextConfig

_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}
_CONVOLVED = {"layer_types": ["conv", "full_attention"]}
_LINEAR = {"layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4}
_LINEAR |= {"linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
_RECURRENT = {
    "hidden_size": 32,
    "num_heads": 4,
    "head_dim": 16,
    "n_groups": 1,
    "num_hidden_layers": 2,
}


def changed(change, **config):
    model = make_model(**config)
    change(model)
    return model.train()


def looks_back(model):
    """Let an MLP read the token before each one."""
    mlp = model.model.layers[1].mlp
    mlp.register_forward_pre_hook(lambda module, args: (args[0] + args[0].roll(1, 1),))


# By name: what makes the model, and options of the policy.
CASES = {name: (partial(made, family), {}) for name, family in SPLIT.items()}
CASES |= {layout: (make_model, {"layout": layout}) for layout in ("padded", "packed", "shared")}
CASES |= {
    "experts": (lambda: of_config(Qwen3MoeConfig(**_SMALL, **_EXPERTS)), {}),
    "one head of keys": (partial(make_model, num_key_value_heads=1), {}),
    "full logits": (lambda: changed(hide_head), {}),
    "recomputed": (
        lambda: changed(partial(checkpoint_activations, keep=True), num_key_value_heads=1),
        {},
    ),
    "selective": (lambda: changed(partial(checkpoint_activations, keep="selective")), {}),
    "noise": (lambda: changed(partial(add_noise, alpha=5.0)), {}),
    "values": (make_model, {"value_head": True}),
}
QUICK = (
    "llama",
    "gemma3",
    "cohere",
    "shared",
    "experts",
    "one head of keys",
    "full logits",
    "recomputed",
    "values",
)
# By name: what makes the model, and a part of the message.
_CAN_NOT = "can't be split along the sequence ("
REFUSED = {
    "heads": (
        lambda: make_model(num_attention_heads=3, num_key_value_heads=1),
        "num_attention_heads=3, no multiple",
    ),
    "a fixed shape": (partial(make_model, "gpt2"), _CAN_NOT),
    "convolutions": (lambda: of_config(Lfm2Config(**_SMALL, **_CONVOLVED)), _CAN_NOT),
    "recurrence": (
        lambda: of_config(Mamba2Config(vocab_size=61, state_size=8, **_RECURRENT)),
        _CAN_NOT,
    ),
    "linear attention": (
        lambda: of_config(Qwen3NextConfig(**_SMALL, **_EXPERTS, **_LINEAR)),
        _CAN_NOT,
    ),
    "own attention": (
        lambda: of_config(BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=61)),
        _CAN_NOT,
    ),
    "a look back": (lambda: changed(looks_back), _CAN_NOT + "it computes something else)"),
    "a critic": (make_model, "the rows of a critic are not split"),
}


def hide_head(model):
    """Give the head a class that can't be fused."""
    model.lm_head.__class__ = type(
        "OtherLinear", (nn.Linear,), {"forward": lambda self, x: nn.Linear.forward(self, x)}
    )


def compared(make, mesh, accelerator, **options):
    """Differences of log-probs and gradients by name, each relative to the largest entry, and norms
    of gradients.
    """
    results = []
    for on in ({}, {"mesh": mesh}):
        if "value_head" in options:
            torch.manual_seed(1)
            options["value_head"] = nn.Linear(32, 1, bias=False).double()
        policy = Policy(make(), **options, **on)
        torch.manual_seed(2)
        results.append(gradients(policy, accelerator))
    (expected, expected_norm), (found, norm) = results
    differences = {
        n: float((found[n] - each).abs().max() / each.abs().max()) for n, each in expected.items()
    }
    return {"differences": differences, "norm": norm, "expected_norm": expected_norm}


def be_rank(output, names):
    accelerator, cases, refused = Accelerator(), {}, {}
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "cp"))
    for name in names:
        make, options = CASES[name]
        try:
            cases[name] = compared(make, mesh, accelerator, **options)
        except Exception as error:
            cases[name] = f"{type(error).__name__}: {error}"
    for name, (make, _) in REFUSED.items():
        options = {"critic": Scorer(make_classifier("SEQ_CLS"))} if name == "a critic" else {}
        try:
            Policy(make(), mesh=mesh, **options)
        except Exception as error:
            refused[name] = f"{type(error).__name__}: {error}"
    if os.environ["RANK"] == "0":
        Path(output).write_text(json.dumps({"cases": cases, "refused": refused}))
