"""Agreement and fairness of recipes that sample their own completions.

No two sides draw the same completions, so losses of steps can't be compared. Instead our recipe
takes one step on what it draws, the peer takes that step on the very same completions, through
rewards, advantages and loss, and the gradients that reach the optimizers are compared: ‖ours −
theirs‖ / ‖theirs‖ must be within 1e-5, and so must the losses. While they are timed, both draw as
many tokens: the end token is one that the model does not say, and the mean length of completions
must be within 2% of the longest in every step.
"""

import json
import string
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..operation import Json
from ..real_model import smollm2

AGREEMENT, CUT = 1e-5, 0.02
SAMPLES = "samples.jsonl"
COMPARED = 2  # prompts of that step
# answered questions before the one that is asked, and letters of none: 256 tokens or so
_SHOTS, _LONG = 6, 280
_TINY: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6}
_TINY |= {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 1024}


def questions(pairs: Iterator[Json]) -> Iterator[Json]:
    """As many questions as there are pairs, each after some others that are answered; not the long
    ones.
    """
    solved = [
        f"Question: {p['prompt'][0]['content']}\nAnswer: {p['chosen'][0]['content']}\n\n"
        for p in pairs
    ]
    short = [text for text in solved if len(text) < _LONG] or solved
    for i in range(len(solved)):
        *shots, last = (short[(i + k) % len(short)] for k in range(_SHOTS + 1))
        question = last[: last.rindex("Answer:") + len("Answer:")]
        yield {"prompt": [{"role": "user", "content": "".join(shots) + question}]}


def talkative(given: Path | None, directory: Path) -> Path:
    """The model with another end token, one that it never says.

    A small and new one if none is given.

    Its weights are not copied, and a new model has SmolLM2's vocabulary.
    """
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoTokenizer,
        GenerationConfig,
        LlamaConfig,
    )

    source, target = (
        given or smollm2(),
        directory / (given.resolve().name if given else "llama-6x256"),
    )
    tokenizer, config = AutoTokenizer.from_pretrained(source), AutoConfig.from_pretrained(source)
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    unsaid = special - {tokenizer.eos_token_id}
    if not unsaid:
        raise ValueError(
            f"{source}: its tokenizer knows no special token but the one that ends a completion, and "
            "completions of one length need another; add one"
        )
    end = max(unsaid)
    ids = {"eos_token_id": end, "pad_token_id": pad}
    if given is None:
        torch.manual_seed(0)
        config = LlamaConfig(vocab_size=config.vocab_size, tie_word_embeddings=True, **_TINY)
        build: Any = AutoModelForCausalLM.from_config
        build(config).save_pretrained(target)
    else:
        target.mkdir()
        for file in (*given.glob("*.safetensors"), *given.glob("*.index.json")):
            (target / file.name).symlink_to(file.resolve())
    config.update(ids)
    config.save_pretrained(target)
    generation: Any = GenerationConfig
    generation(**ids).save_pretrained(target)
    ended = tokenizer.eos_token
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
    if tokenizer.chat_template is not None:
        # our side also ends a completion where the template ends an answer
        tokenizer.chat_template = tokenizer.chat_template.replace(ended, tokenizer.eos_token)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad)
    tokenizer.save_pretrained(target)
    return target


def vowels(completions: Sequence[Any], **columns: Any) -> list[float]:
    """The reward of both: the share of vowels among the letters of a completion."""
    texts = (completion[0]["content"].lower() for completion in completions)
    letters = ([letter for letter in text if letter in string.ascii_lowercase] for text in texts)
    return [sum(letter in "aeiou" for letter in each) / max(len(each), 1) for each in letters]


@contextmanager
def gradient_kept(path: Path) -> Iterator[None]:
    """Write the gradient of the last step that is taken, matrices first: in the order of both
    sides' groups.
    """

    def keep(optimizer: Optimizer, *step: object) -> None:
        parameters = [
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ]
        parameters.sort(key=lambda parameter: parameter.ndim == 1)
        torch.save(torch.cat([parameter.grad.flatten() for parameter in parameters]), path)

    hook = register_optimizer_step_pre_hook(keep)
    try:
        yield
    finally:
        hook.remove()


def full_length(metrics: Sequence[Json], tokens: int) -> bool:
    """True if hardly a completion ended before it was cut at so many tokens."""
    return all(line["completions/mean_length"] >= (1 - CUT) * tokens for line in metrics)


def replay(samples: Path) -> Callable[[Sequence[Any], Any], Json]:
    """For the peer's trainer: the completions that were drawn on our side, to the prompts that it
    asks for in turn.
    """
    lines = map(json.loads, samples.read_text().splitlines())

    def rollout(prompts: Sequence[Any], trainer: Any) -> Json:
        drawn = list(islice(lines, len(prompts)))
        tokenized = trainer.processing_class.apply_chat_template(
            prompts, add_generation_prompt=True, return_dict=True
        )
        if [sample["prompt"] for sample in drawn] != tokenized["input_ids"]:
            raise RuntimeError("the two sides ask other prompts, or in another order")
        names = {"prompt_ids": "prompt", "completion_ids": "tokens", "logprobs": "logprobs"}
        return {theirs: [sample[ours] for sample in drawn] for theirs, ours in names.items()}

    return rollout


def distance(gradient: Path, peer: Path) -> float:
    """Between two gradients, relative to the peer's."""
    ours, theirs = (torch.load(path).double() for path in (gradient, peer))
    return float((ours - theirs).norm() / theirs.norm())
