"""Processor time of a token step of the local source, with packed weights and without:
``burnish bench sampling``.

A random model of the shape of SmolLM2-135M continues random prompts, on one thread. The two ways
take turns, and the least of each counts, packing included. A token step is the forward pass that
draws one token for each sequence.
"""

import argparse
import asyncio
import functools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ...loops.rollouts.local import source as local
from ...loops.rollouts.local.source import LocalSource
from ...loops.rollouts.sample import Request, SamplingParams
from ..report import machine, say

PROMPT = 64
VOCABULARY = 49152
NEVER = 1 << 30  # tokens from which packing would be worth it
PRECISIONS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "float32": nullcontext,
    "bfloat16": functools.partial(torch.autocast, "cpu", torch.bfloat16),
}


def make_source(precision: str) -> LocalSource:
    """A source that draws from a random model, in this precision by autocast."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=VOCABULARY,
        tie_word_embeddings=True,
    )
    return LocalSource(LlamaForCausalLM(config), version=0, context=PRECISIONS[precision])


def processor_seconds(source: LocalSource, rows: int, tokens: int) -> float:
    """Of ``rows`` completions of one prompt, so many tokens each."""
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(0, VOCABULARY, (PROMPT,), generator=generator).tolist()
    request = Request(0, prompt, range(rows), SamplingParams(max_tokens=tokens), key=0)
    began = time.process_time()
    asyncio.run(source.sample(request))
    return time.process_time() - began


def measure(source: LocalSource, rows: int, tokens: int, rounds: int) -> dict[str, float]:
    """Milliseconds of a token step, ``packed`` and ``plain``, and the ratio of the two."""
    plain = []
    packed = []
    for _ in range(rounds):
        with mock.patch.object(local, "_WORTH_PACKING", NEVER):
            plain.append(processor_seconds(source, rows, tokens))
        packed.append(processor_seconds(source, rows, tokens))
    ratios = [ours / theirs for ours, theirs in zip(packed, plain, strict=True)]
    return {
        "plain": 1000 * min(plain) / tokens,
        "packed": 1000 * min(packed) / tokens,
        "ratio": statistics.median(ratios),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="burnish bench sampling",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--tokens", type=int, default=32, help="of a completion")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--output", type=Path, help="a JSON file")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    report = {"machine": machine(torch.device("cpu")), "tokens": options.tokens, "results": []}
    say("precision   rows   plain ms   packed ms   packed/plain")
    for precision in options.precisions:
        source = make_source(precision)
        for rows in options.rows:
            result = measure(source, rows, options.tokens, options.rounds)
            say(
                f"{precision:10} {rows:5} {result['plain']:10.1f} {result['packed']:11.1f} "
                f"{result['ratio']:14.2f}"
            )
            report["results"].append({"precision": precision, "rows": rows, **result})
    if options.output is not None:
        options.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0
