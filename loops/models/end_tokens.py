"""The tokens at which a completion ends: those that a model was made with, and those that it is
trained to end with.
"""

from collections.abc import Collection

from torch import nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase


def end_tokens(
    config: GenerationConfig | PretrainedConfig | None, tokenizer: PreTrainedTokenizerBase | None
) -> tuple[int, ...]:
    """Those of a generation configuration, and the tokenizer's, in order."""
    ids = {*ends_of(config), getattr(tokenizer, "eos_token_id", None)}
    return tuple(sorted(token for token in ids if token is not None))


def ends_of(config: GenerationConfig | PretrainedConfig | None) -> list[int]:
    """The end tokens of a configuration, which has none, one, or a list; empty without one."""
    found = getattr(config, "eos_token_id", None)
    if found is None:
        return []
    return [found] if isinstance(found, int) else list(found)


def extend(config: GenerationConfig, tokens: Collection[int]) -> list[int]:
    """Add end tokens to a generation configuration, in place: wrappers of a model hold the same
    object. Returns those that it did not have."""
    known = ends_of(config)
    added = sorted(set(tokens) - set(known))
    if added:
        config.eos_token_id = [*known, *added]
    return added


def add_end_tokens(
    model: nn.Module, tokens: Collection[int], tokenizer: PreTrainedTokenizerBase
) -> str:
    """Add to the tokens that end the model's completions, which `save_model` writes to
    generation_config.json.

    A base model ends a document with one token, and the chat template that it is trained under ends
    an answer with another: what has learned the second would run on if only the first one stopped
    it.

    Returns:
        A line that names what was added; empty if there was nothing to add, or if the model
        generates no text.
    """
    config: GenerationConfig | None = getattr(model, "generation_config", None)
    if config is None:
        return ""
    known = ends_of(config)
    added = extend(config, tokens)
    if not added:
        return ""
    new = _listed(added, tokenizer)
    before = _listed(known, tokenizer) or "none"
    return (
        f"end tokens: {new} added to {before} of generation_config.json, as completions end with it"
    )


def _listed(tokens: Collection[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """Tokens for a message: '<|im_end|>' (151645), '<|endoftext|>' (151643)"""
    return ", ".join(f"{tokenizer.decode([token])!r} ({token})" for token in tokens)
