"""vLLM servers for tests: where vLLM is found, which lives in an environment of its own, and how
one is started.
"""

import os
from pathlib import Path

import pytest
import torch
import vllm_model
from burnish.loops.rollouts.vllm.launch import ServerProcess
from burnish.loops.rollouts.vllm.server import VLLMServer
from transformers import AutoConfig, AutoTokenizer

CONTEXT = 500
VOCABULARY = 258
TOLERANCE = 1e-4

ENVIRONMENT = {  # for a server that shares two cores with the tests, and needs no network
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}
FORKING = {"PYTHONPATH": str(Path(__file__).parent / "vllm_forking")}
FLAGS = ["--enforce-eager", "--max-num-seqs", "32", "--max-model-len", str(CONTEXT)]


def vllm_python():
    """The interpreter that ``BURNISH_VLLM_PYTHON`` names; tests that need it are skipped where it
    names none.
    """
    if named := os.environ.get("BURNISH_VLLM_PYTHON"):
        return named
    pytest.skip(
        "no vLLM: make an environment with tests/support/tools/install_vllm, name its python in BURNISH_VLLM_PYTHON"
    )


def start(directory, **options):
    vllm_model.save_model(directory / "model")
    usual = {"dtype": "float32", "flags": FLAGS, "environment": ENVIRONMENT | FORKING}
    options = {"log": directory / "log.txt", "python": vllm_python(), **usual, **options}
    return ServerProcess(directory / "model", **options)


def connect(server, updates, model, **options):
    config, tokenizer = AutoConfig.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    return VLLMServer(
        server.url,
        config=config,
        tokenizer=tokenizer,
        updates=updates,
        dtype="float32",
        key=server.key,
        revive=server.revive,
        **options,
    )


def furthest(samples, model):
    """The largest difference of a log-prob from the model's own, in nats."""
    worst = 0.0
    for sample in samples:
        with torch.no_grad():
            logits = model(torch.tensor([sample.prompt + sample.tokens])).logits[
                0, len(sample.prompt) - 1 : -1
            ]
        own = logits.log_softmax(-1).gather(1, torch.tensor(sample.tokens)[:, None])[:, 0]
        worst = max(worst, (own - torch.tensor(sample.logprobs)).abs().max().item())
    return worst
