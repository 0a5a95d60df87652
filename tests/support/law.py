"""One optimizer step of a recipe's objective under a given split; run on its own it is one rank of several.

Prints a JSON object: loss, metrics and a flat gradient, float64.
"""

import json
import sys
from functools import partial

import torch
from accelerate import Accelerator
from burnish.data import Batches
from burnish.loops.batch import collate
from burnish.loops.dpo import preference_objective
from burnish.loops.optimize import train_step
from burnish.loops.policy import Policy
from burnish.loops.reference import frozen_copy
from burnish.loops.sft import sft_objective
from burnish.loops.weights import pair_mean, sequence_mean, token_mean
from burnish.objectives import dpo, nll
from tiny import in_full_precision, make_examples, make_model

PAIRS = 9


def recipe(name, policy):
    """(objective, expression, completions per example)"""
    if name.startswith("sft"):
        weighting = {"sft": token_mean, "sft_sequence": sequence_mean}[name]
        return sft_objective("nll"), {"nll": (1.0, weighting)}, 1
    reference = frozen_copy(Policy(in_full_precision(make_model("llama", seed=1))))
    losses = {"dpo": partial(dpo, beta=0.3)}
    expression = {"dpo": (1.0, pair_mean), "entropy": (0.0, token_mean)}
    if name == "mix":
        losses["nll"] = nll
        expression["nll"] = (0.2, partial(token_mean, of=0))
    return preference_objective(losses, reference), expression, 2


def one_step(name, layout, micro_tokens):
    accelerator = Accelerator(cpu=True)
    policy = Policy(in_full_precision(make_model("llama")), layout=layout)
    objective, expression, completions = recipe(name, policy)
    examples = make_examples(PAIRS, completions=completions)
    lengths = [len(e.prompt) * completions + sum(map(len, e.completions)) for e in examples]
    batches = Batches(
        lengths,
        batch_size=PAIRS,
        micro_tokens=micro_tokens,
        seed=0,
        shuffle=False,
        epochs=1,
        ranks=accelerator.num_processes,
    )
    mine = [collate([examples[i] for i in indices]) for indices in batches.plan(0)[accelerator.process_index]]
    optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
    before = [parameter.detach().clone() for parameter in policy.parameters()]
    prepared, optimizer = accelerator.prepare(policy, optimizer)
    metrics = train_step(accelerator, prepared, optimizer, mine, objective, expression, max_grad_norm=float("inf"))
    # Plain SGD with learning rate 1: the step is the gradient.
    gradient = torch.cat([(b - p.detach()).flatten() for b, p in zip(before, policy.parameters(), strict=True)])
    return {
        "micro_batches": len(mine),
        "metrics": metrics,
        "gradient": gradient.tolist(),
        "rank": accelerator.process_index,
    }


if __name__ == "__main__":
    name, output, *settings = sys.argv[1:]
    results = []
    for setting in settings:
        layout, micro_tokens = setting.split(":")
        results.append(one_step(name, layout, int(micro_tokens) if micro_tokens else None))
    if results[0]["rank"] == 0:
        with open(output, "w") as file:
            json.dump(results, file)
