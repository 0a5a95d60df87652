"""A Llama that vLLM's attention on CPU has a kernel for, with a byte tokenizer; peaked, so that
weights show.
"""

import tiny
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig


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
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0) if parameter.ndim > 1 else None
    return model


def save_model(directory, *, seed=0, layers=2):
    tiny.save_model(directory)
    model = make_model(len(AutoTokenizer.from_pretrained(directory)), seed=seed, layers=layers)
    model.save_pretrained(directory)
    return directory
