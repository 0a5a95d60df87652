"""``burnish chat RUN_OR_MODEL``: talk to a model, a line of standard input each turn.

The model's chat template makes the prompt, and its end tokens end an answer, as they do where it is
served. A model without a chat template continues each line by itself.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

from ..models.end_tokens import end_tokens
from ..models.io import as_missing_model, read_model
from ..registry import as_setting_error
from ..runs.preflight import check_model, is_directory
from .offline import go_offline


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "burnish chat",
        description="Talk to a model, a line of standard input each turn.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "model", metavar="RUN_OR_MODEL", help="directory of a run or a model, or a model on the Hub"
    )
    parser.add_argument("--system", help="the message that the conversation begins with")
    parser.add_argument(
        "--temperature",
        type=float,
        help="0 takes the likeliest token; unless given, the model's own",
    )
    parser.add_argument(
        "--repetition_penalty",
        type=float,
        help="makes tokens that were said less likely, above 1; unless given, the model's own",
    )
    parser.add_argument(
        "--stop", action="append", metavar="WORD", help="ends an answer; may be given several times"
    )
    parser.add_argument("--max_tokens", type=int, default=512, help="of an answer")
    return parser


def run(words: Sequence[str]) -> None:
    options = parser().parse_args(words)
    if options.max_tokens < 1:
        raise ValueError(f"max_tokens: wanted at least 1, got {options.max_tokens}")
    name = model_of(options.model)
    go_offline([name])
    with as_missing_model("model", name):
        tokenizer = AutoTokenizer.from_pretrained(name)
    model = _load(name)
    sampling = _sampling(options.temperature)
    if options.repetition_penalty is not None:
        if not options.repetition_penalty > 0:
            raise ValueError(f"repetition_penalty: wanted > 0, got {options.repetition_penalty}")
        sampling["repetition_penalty"] = options.repetition_penalty
    if options.stop:
        sampling["stop_strings"] = options.stop
    talk(model, tokenizer, system=options.system, max_tokens=options.max_tokens, **sampling)


def model_of(named: str) -> str:
    """The model of a run's directory; any other name is a model's own.

    Raises:
        ValueError: if the run has no model, the directory holds an adapter alone or no model, or
            there is no such directory.
    """
    directory = Path(named)
    if (directory / "adapter_config.json").exists() and not (directory / "config.json").exists():
        raise ValueError(
            f"{named}: holds an adapter alone; burnish merge {named} OUT makes a model of it"
        )
    if not (directory / "config.yaml").exists() or (directory / "config.json").exists():
        if is_directory(named):
            check_model("model", directory)
        return named
    if not (directory / "model/config.json").exists():
        raise ValueError(
            f"{named}: the run has left no model yet; burnish export {named} makes one of a checkpoint"
        )
    return str(directory / "model")


def talk(
    model: Any, tokenizer: Any, *, system: str | None, max_tokens: int, **sampling: Any
) -> None:
    """Answer each line of standard input on standard output, token by token, until the input ends.

    Raises:
        ValueError: if there is a system message and no chat template, or the conversation is longer
            than the model's context.
    """
    templated = bool(tokenizer.chat_template)
    if system is not None and not templated:
        raise ValueError(
            "system: this model has no chat template, so nothing would be a system message; leave it out"
        )
    if not templated:
        print("no chat template: each line is continued by itself", file=sys.stderr)
    beginning = [] if system is None else [{"role": "system", "content": system}]
    messages = list(beginning)
    for line in _lines():
        if templated:
            messages.append({"role": "user", "content": line})
            prompt = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False
            )
        else:
            prompt = tokenizer(line)["input_ids"]
        answer = _answer(model, tokenizer, prompt, max_tokens, sampling)
        messages.append({"role": "assistant", "content": answer})


def _lines() -> Iterator[str]:
    """The lines of standard input that say something; a terminal is asked for them."""
    asks = sys.stdin.isatty()
    while True:
        if asks:
            print("> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            break
        if line.strip():
            yield line.rstrip("\r\n")
    if asks:
        print()


@torch.inference_mode()
def _answer(
    model: Any, tokenizer: Any, prompt: Sequence[int], max_tokens: int, sampling: dict[str, Any]
) -> str:
    """Generate and print the answer to a prompt; returns its text."""
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and len(prompt) + 1 > longest:
        raise ValueError(
            f"the conversation has {len(prompt)} tokens, and the context of this model {longest}; begin anew"
        )
    room = max_tokens if longest is None else min(max_tokens, longest - len(prompt))
    ends = list(end_tokens(model.generation_config, tokenizer))
    inputs = torch.tensor([list(prompt)], device=model.device)
    if "stop_strings" in sampling:
        sampling = {**sampling, "tokenizer": tokenizer}  # in whose text they are looked for
    completion = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=room,
        eos_token_id=ends or None,
        pad_token_id=ends[0] if ends else 0,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        **sampling,
    )
    tokens = completion[0, len(prompt) :]
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


def _load(name: str) -> Any:
    """The model in the dtype of its files, on the accelerator if there is one."""
    with as_setting_error(f"model: {name}"):
        model = read_model(AutoModelForCausalLM, name, dtype="auto")
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    return model.to(device).eval()


def _sampling(temperature: float | None) -> dict[str, Any]:
    """The arguments of ``generate`` for a temperature; none, unless it is given."""
    if temperature is None:
        return {}
    if temperature < 0:
        raise ValueError(f"temperature: wanted at least 0, got {temperature}")
    if temperature == 0:
        # The model's own settings of sampling would be warned of, as they have no effect.
        return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    return {"do_sample": True, "temperature": temperature}
