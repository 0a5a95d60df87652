"""Whole runs of every recipe, on as many ranks and in as many shards as are asked for."""

import gc
import itertools
import json
import os
import signal
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import transformers
from accelerate import Accelerator
from burnish.loops.config import Bema, Lora, Parallel, Teacher
from burnish.loops.recipes.distill import open_distill
from burnish.loops.recipes.grpo import open_grpo
from burnish.loops.recipes.kto import open_kto
from burnish.loops.recipes.online_dpo import open_online_dpo
from burnish.loops.recipes.ppo import open_ppo
from burnish.loops.recipes.preference import open_cpo, open_dpo, open_orpo
from burnish.loops.recipes.prm import open_prm
from burnish.loops.recipes.reward import open_reward
from burnish.loops.recipes.settings import (
    CPO,
    DPO,
    GRPO,
    KTO,
    ORPO,
    PPO,
    PRM,
    SFT,
    Distill,
    OnlineDPO,
    Reward,
)
from burnish.loops.recipes.sft import open_sft
from burnish.loops.runs import liveness
from forked import run_forked
from safetensors.torch import load_file
from shared import made_once
from signalled import in_step
from tiny import save_model, sums, write_rows
from torch.distributed.tensor import DTensor

EXACT = 1e-10
ROWS = 17  # in batches of five, which neither two nor four ranks share evenly
_COMMON = {
    "steps": 3,
    "batch_size": 5,
    "micro_tokens": 40,
    "learning_rate": 1e-2,
    "schedule": "constant",
}
_COMMON |= {"dtype": "float64", "max_grad_norm": 0.5, "weight_decay": 0.1}
# Four steps on each rollout, so that a checkpoint may hold one that has further steps.
_ONLINE = {
    "rewards": {"online:even": 1.0},
    "prompts_per_rollout": 3,
    "group_size": 3,
    "max_tokens": 6,
    "show_every": 0,
}
_ONLINE |= {"epochs_per_rollout": 2, "minibatches": 2, "beta": 0.1}

# By name: recipe, its settings, which data, and what differs from the settings that all share.
RUNS = {
    "sft": (open_sft, SFT, "messages", {"gradient_checkpointing": True}),
    "dpo": (open_dpo, DPO, "pairs", {}),
    "dpo_precomputed": (open_dpo, DPO, "pairs", {"reference": "precompute"}),
    "dpo_adapters": (open_dpo, DPO, "pairs", {"lora": Lora(r=4)}),
    "dpo_adapters_copy": (open_dpo, DPO, "pairs", {"lora": Lora(r=4), "reference": "copy"}),
    "dpo_synced": (open_dpo, DPO, "pairs", {"ref_model_sync_steps": 1}),
    "dpo_averaged": (
        open_dpo,
        DPO,
        "pairs",
        {"ref_model_sync_steps": 2, "bema": Bema(update_freq=1, lag=2)},
    ),
    "dpo_tied": (open_dpo, DPO, "pairs", {"model": "tied"}),
    "kto": (open_kto, KTO, "feedback", {}),
    "orpo": (open_orpo, ORPO, "pairs", {}),
    "cpo": (open_cpo, CPO, "pairs", {"loss": "alpha_po"}),
    "tpo": (open_cpo, CPO, "triples", {"nll_of": "reference", "nll": 0.5}),
    "reward": (open_reward, Reward, "pairs", {}),
    "reward_adapters": (open_reward, Reward, "pairs", {"lora": Lora(r=4)}),
    "prm": (open_prm, PRM, "steps", {}),
    "distill": (open_distill, Distill, "messages", {"teacher": Teacher(model="teacher")}),
    "sft_bfloat16": (open_sft, SFT, "messages", {"model": "bfloat16", "dtype": "bfloat16"}),
    "dpo_bfloat16": (open_dpo, DPO, "pairs", {"model": "bfloat16", "dtype": "bfloat16"}),
    "sft_float16": (open_sft, SFT, "messages", {"dtype": "float16"}),
    "dpo_float16": (open_dpo, DPO, "pairs", {"dtype": "float16"}),
    "sft_float32": (open_sft, SFT, "messages", {"model": "bfloat16", "dtype": "float32"}),
    "dpo_float32": (open_dpo, DPO, "pairs", {"model": "bfloat16", "dtype": "float32"}),
    "distill_top_k": (
        open_distill,
        Distill,
        "messages",
        {"teacher": Teacher(model="teacher", top_k=5)},
    ),
    "sdpo": (
        open_distill,
        Distill,
        "messages",
        {
            "teacher": Teacher(
                model="start",
                reprompt="online:told",
                divergence="reverse_kl",
                sync_steps=1,
                mixup_alpha=0.5,
            ),
            "on_policy": 1.0,
            "group_size": 2,
            "max_tokens": 6,
            "show_every": 0,
        },
    ),
    "grpo": (open_grpo, GRPO, "prompts", {**_ONLINE, "old_logprobs": "recomputed"}),
    "ppo": (open_ppo, PPO, "prompts", {**_ONLINE, "lam": 0.9, "max_tokens": 8}),
    "ppo_critic": (open_ppo, PPO, "prompts", {**_ONLINE, "value_model": "judge"}),
    "online_dpo": (
        open_online_dpo,
        OnlineDPO,
        "prompts",
        {**_ONLINE, "rewards": {"reward_model": {"model": "judge"}}},
    ),
}
SAMPLING = tuple(name for name, (*_, data, _) in RUNS.items() if data == "prompts")


def prepare(directory):
    """Models and data for `RUNS`."""
    for seed, name in enumerate(("start", "teacher", "tied", "bfloat16")):
        dtype = torch.bfloat16 if name == "bfloat16" else torch.float32
        save_model(directory / name, seed=seed, dtype=dtype, tie_word_embeddings=name == "tied")
    judge = transformers.AutoConfig.from_pretrained(
        save_model(directory / "judge"), num_labels=1, pad_token_id=0
    )
    transformers.AutoModelForSequenceClassification.from_config(judge).save_pretrained(
        directory / "judge"
    )
    pairs = sums(ROWS)
    feedback = [
        {"prompt": pair["prompt"], "completion": pair[kind], "label": kind == "chosen"}
        for pair, kind in zip(pairs, ["chosen", "rejected", "chosen"] * ROWS, strict=False)
    ]
    completions = ["1+1", "=2", "2"]
    steps = [
        {"prompt": f"{i}=", "completions": completions, "labels": [True, False, i % 2 == 0]}
        for i in range(ROWS)
    ]
    write_rows(directory / "pairs.jsonl", pairs)
    golds = [*pairs[1:], pairs[0]]
    triples = [
        {**pair, "reference": gold["chosen"]} for pair, gold in zip(pairs, golds, strict=True)
    ]
    write_rows(directory / "triples.jsonl", triples)
    write_rows(directory / "prompts.jsonl", [{"prompt": pair["prompt"]} for pair in pairs])
    write_rows(
        directory / "messages.jsonl",
        [{"messages": pair["prompt"] + pair["chosen"]} for pair in pairs],
    )
    write_rows(directory / "feedback.jsonl", feedback)
    write_rows(directory / "steps.jsonl", steps)


def each_of(names, *world, marks=()):
    """Parameters of tests of runs that are made together: the name of one, those of all, and the
    world.
    """
    return [
        pytest.param(name, names, *world, marks=marks, id="-".join(map(str, (name, *world))))
        for name in names
    ]


def runs_on(
    tmp_path_factory, names, ranks=1, shards=1, tp_size=1, cp_size=1, *, module="sharded", **orders
):
    """The directory of the directories of these runs, and of what was printed; made once for all
    tests.
    """
    start = made_once(tmp_path_factory, "sharded-start", prepare)

    def make(folder):
        runs = [(name, str(folder / name), orders) for name in names]
        outcomes = run_forked(ranks, module, str(start), shards, runs, tp_size, cp_size)
        for status, printed in outcomes:
            assert status == 0, printed[-3000:]
        (folder / "printed.txt").write_text(outcomes[0][1])

    split = "-".join(map(str, (ranks, shards, tp_size, cp_size, *orders.values())))
    return made_once(tmp_path_factory, f"{module}-{'-'.join(names)}-{split}", make)


def assert_same_end(one, several):
    expected, weights = (load_file(run / "model/model.safetensors") for run in (one, several))
    assert weights.keys() == expected.keys()
    for key, weight in expected.items():
        torch.testing.assert_close(weights[key], weight, rtol=0, atol=EXACT, msg=key)
    assert last_metrics(several) == pytest.approx(last_metrics(one), rel=EXACT, abs=EXACT)
    assert last_metrics(one)["grad_norm"] > 1e-3


def last_metrics(run):
    line = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    return {
        name: value
        for name, value in line.items()
        if not name.endswith(("seconds", "ranks/slowest"))
    }


def be_rank(start, shards, runs, tp_size=1, cp_size=1):
    """Run these of `RUNS` one after another, each a name, a directory and its orders, in shards
    over so many ranks.
    """
    for name, output, orders in runs:
        with measured() as most:
            train(start, shards, name, output, together=(tp_size, cp_size), **orders)
        if int(os.environ.get("RANK", 0)) == 0:
            Path(output, "most.json").write_text(json.dumps(most))


def train(start, shards, name, output, mortal=None, together=(1, 1), **fields):
    """Train, to the end unless one rank is mortal: (rank, step) is where it dies by SIGKILL."""
    recipe, settings, data, differences = RUNS[name]
    directory = Path(start)
    fields = {
        **_COMMON,
        "model": "start",
        **differences,
        **fields,
        "parallel": Parallel(shards, *together),
        "output": output,
    }
    fields |= {"data": str(directory / f"{data}.jsonl"), "model": str(directory / fields["model"])}
    if data == "prompts":
        del fields["batch_size"]
    if teacher := fields.get("teacher"):
        fields["teacher"] = replace(teacher, model=str(directory / teacher.model))
    if "value_model" in fields:
        fields["value_model"] = str(directory / fields["value_model"])
    if judge := fields.get("rewards", {}).get("reward_model"):
        fields["rewards"] = {"reward_model": {"model": str(directory / judge["model"])}}
    norm = transformers.models.llama.modeling_llama.LlamaRMSNorm
    with ExitStack() as patches:
        patches.enter_context(patch.object(norm, "forward", _in_full_precision))
        # it takes longer than the run
        patches.enter_context(patch("burnish.loops.runs.training.draw_curves"))
        patches.enter_context(patch.object(liveness, "GRACE", 1.0))
        if mortal is not None and mortal[0] == int(os.environ.get("RANK", 0)):
            patches.enter_context(in_step(mortal[1], lambda: os.kill(os.getpid(), signal.SIGKILL)))
        recipe(settings(**fields)).train()


@contextmanager
def measured():
    """Yield the most bytes that this rank holds after a backward pass: weights and gradients of all
    models.

    On a busy machine a thread of gloo lets go of what it gathered a moment after it is done, so a
    rank is looked at twice.
    """
    most, backward, calls = [0], Accelerator.backward, itertools.count()
    gc.collect()
    gc.freeze()  # what was there before is not looked at, of which there is a million

    def measure(*arguments):
        backward(*arguments)
        if next(calls) % 3:
            return
        at_once = _bytes_held()
        time.sleep(0.1)
        most[0] = max(most[0], min(at_once, _bytes_held()))

    with patch.object(Accelerator, "backward", measure):
        yield most


def _bytes_held():
    """The bytes of this rank's floating-point tensors and their gradients."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
    tensors += [each.grad for each in tensors if each.is_leaf and each.grad is not None]
    local = [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
    storages = [
        each.untyped_storage() for each in local if each.is_floating_point() and not each.is_meta
    ]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _in_full_precision(norm, hidden):
    """transformers computes it in float32, in which the roundings of two splits may differ. Under
    autocast the weight is rounded, as it is where it is gathered from shards."""
    device = hidden.device.type
    rounded = norm.weight
    if torch.is_autocast_enabled(device):
        rounded = rounded.to(torch.get_autocast_dtype(device))
    return torch.nn.functional.rms_norm(
        hidden, norm.weight.shape, rounded.to(hidden.dtype), norm.variance_epsilon
    )
