"""Small random models of every family that the policy claims to know, and small examples to feed
them.
"""

import copy
import json
import random

import torch
from burnish.data import Example
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    Cohere2Config,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

VOCABULARY = 61

_SMALL = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=256,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
# Windows are shorter than the test's sequences, so a layout that gets them wrong is seen.
FAMILIES = {
    "llama": LlamaConfig(**_SMALL),
    "llama_tied": LlamaConfig(**_SMALL, tie_word_embeddings=True),
    "mistral_windowed": MistralConfig(**_SMALL, sliding_window=4),
    "qwen2": Qwen2Config(**_SMALL),
    "qwen3": Qwen3Config(**_SMALL),
    "gemma2": Gemma2Config(
        **_SMALL,
        sliding_window=4,
        final_logit_softcapping=2.0,
        attn_logit_softcapping=5.0,
        query_pre_attn_scalar=8,
    ),
    "gemma3": Gemma3TextConfig(
        **_SMALL, sliding_window=4, final_logit_softcapping=2.0, query_pre_attn_scalar=8
    ),
    "gpt2": GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=256,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "cohere": CohereConfig(**_SMALL, logit_scale=0.25),
    "cohere2": Cohere2Config(**_SMALL, logit_scale=0.25, sliding_window=4),
    "granite": GraniteConfig(**_SMALL, logits_scaling=3.0),
}


# A teacher of another width whose embedding is padded.
WIDE = LlamaConfig(**{**_SMALL, "hidden_size": 48, "head_dim": 12, "vocab_size": 64})


def make_model(family="llama", *, dtype=torch.float64, attention="sdpa", seed=0, **changes):
    """``changes`` are of its configuration."""
    torch.manual_seed(seed)
    config = copy.deepcopy({**FAMILIES, "llama_wide": WIDE}[family])
    config.update(changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)
    # far from uniform, so that a wrong mask, scale or cap changes the numbers
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0) if parameter.ndim > 1 else None
    return model.eval()


def make_classifier(task, *, labels=None, seed=0):
    """A small Llama for sequence ("SEQ_CLS", one output) or token ("TOKEN_CLS", two)
    classification, float64.
    """
    torch.manual_seed(seed)
    config = LlamaConfig(**_SMALL, num_labels=labels or {"SEQ_CLS": 1, "TOKEN_CLS": 2}[task])
    kind = {
        "SEQ_CLS": AutoModelForSequenceClassification,
        "TOKEN_CLS": AutoModelForTokenClassification,
    }[task]
    model = kind.from_config(config, dtype=torch.float64)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0) if parameter.ndim > 1 else None
    return model.eval()


def in_full_precision(model):
    """A Llama whose norms are computed in the precision of its weights; transformers computes them
    in float32.
    """
    for name, module in list(model.named_modules()):
        if type(module).__name__ == "LlamaRMSNorm":
            exact = torch.nn.RMSNorm(
                module.weight.shape, eps=module.variance_epsilon, dtype=module.weight.dtype
            )
            model.set_submodule(name, exact)
    return model


def make_examples(count, completions=2, seed=0, longest=9):
    rng = random.Random(seed)

    def tokens(low, high):
        return [rng.randrange(3, VOCABULARY) for _ in range(rng.randint(low, high))]

    examples = []
    for _ in range(count):
        answers = [tokens(1, longest) for _ in range(completions)]
        trained = [[rng.random() < 0.8 for _ in answer[:-1]] + [True] for answer in answers]
        examples.append(Example(tokens(1, longest), answers, trained))
    return examples


CHATML = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def sharpened(model, factor=6.0):
    """The model with larger weights: one of random weights hardly looks at its prompt."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(factor)
    return model


def save_sharpened(directory):
    """`save_model`, sharpened."""
    save_model(directory)
    sharpened(AutoModelForCausalLM.from_pretrained(directory)).save_pretrained(directory)
    return directory


def save_model(directory, *, chat=True, seed=0, dtype=torch.float32, eos="<|end|>", **changes):
    """A two-layer Llama on bytes, with a chat template and no pad token, on disk; returns the
    directory.

    ``eos`` is the end token of the tokenizer, ``changes`` are of the model's configuration."""
    special = list(dict.fromkeys(["<|start|>", "<|end|>", eos]))
    vocabulary = {
        token: i for i, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])
    }
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos)
    if chat:
        fast.chat_template = CHATML
    fast.save_pretrained(directory)
    torch.manual_seed(seed)
    config = LlamaConfig(
        **{**_SMALL, "vocab_size": len(vocabulary), "max_position_embeddings": 512, **changes}
    )
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(directory)
    return directory


def sums(count, seed=0):
    """Conversational pairs about small sums, distinct."""
    rng = random.Random(seed)
    pairs = []
    for a, b in rng.sample([(a, b) for a in range(40) for b in range(40)], count):
        pairs.append(
            {
                "prompt": [{"role": "user", "content": f"{a} + {b}?"}],
                "chosen": [{"role": "assistant", "content": str(a + b)}],
                "rejected": [{"role": "assistant", "content": str(a + b + rng.randint(1, 5))}],
            }
        )
    return pairs


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
