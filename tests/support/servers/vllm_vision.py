"""A small vision-language model that vLLM's attention on CPU has a kernel for, with its processor;
peaked, so that weights and images show.
"""

import torch
import vision
from transformers import AutoModelForImageTextToText


def make(family="idefics3", *, seed=0):
    """The model in float32, and its processor."""
    config, processor = vision.FAMILIES[family]()
    shape = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    for name, value in shape.items():
        setattr(config.text_config, name, value)
    processor.chat_template = processor.tokenizer.chat_template = vision.template()
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0) if parameter.ndim > 1 else None
    return model, processor


def save(directory, family="idefics3"):
    model, processor = make(family)
    model.save_pretrained(directory)
    processor.save_pretrained(directory)
    return directory
