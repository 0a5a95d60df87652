"""A Llama that vLLM's attention on CPU has a kernel for, with a byte tokenizer, and a mixture of
experts; peaked, so that weights show.
"""

import tiny
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Qwen3MoeConfig


def make_model(vocabulary, *, seed=0, layers=2):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        eos_token_id=1,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    return tiny.sharpened(model, 3.0)


def make_experts(vocabulary, *, seed=0, intermediate=32):
    """A mixture of four experts, of which each token takes two."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        moe_intermediate_size=intermediate,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        eos_token_id=1,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    return tiny.sharpened(model, 3.0)


def save_model(directory, *, seed=0, layers=2):
    tiny.save_model(directory)
    model = make_model(len(AutoTokenizer.from_pretrained(directory)), seed=seed, layers=layers)
    model.save_pretrained(directory)
    return directory
