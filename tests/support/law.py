"""One optimizer step of a recipe's objective under a given split; run on its own it is one rank of several.

Prints a JSON object: loss, metrics and a flat gradient, float64.
"""

import json
import random
import sys
from dataclasses import replace
from functools import partial

import torch
from accelerate import Accelerator
from burnish.data import Batches, Example
from burnish.loops.dpo import PAIR_LOSSES
from burnish.loops.feed import Feed
from burnish.loops.kto import FEEDBACK_LOSSES, RunningMean, feedback_metrics, prepare_feedback
from burnish.loops.optimize import train_step
from burnish.loops.policy import Policy
from burnish.loops.reference import frozen_copy
from burnish.loops.reward import TERMS as REWARD_TERMS
from burnish.loops.reward import read_scores
from burnish.loops.scorer import Scorer, ends_marked
from burnish.loops.sft import TOKEN_LOSSES
from burnish.loops.teacher import distillation
from burnish.loops.terms import (
    CHOSEN,
    ENTROPY,
    PAIR_LOGPS,
    Term,
    compose,
    expression,
    outputs_for,
    parse,
    policy_tensors,
    score_tensors,
)
from burnish.loops.weights import fixed_length, sequence_mean
from burnish.objectives import centering, clipped_surrogate, entropy_bonus, kl_estimate, nll, step_loss, value_loss
from datasets import Dataset
from tiny import in_full_precision, make_classifier, make_examples, make_model

EXAMPLES = 9
PAIRS = {
    "dpo": {"dpo": 1.0},
    "orpo": {"nll": 1.0, "orpo": 0.1},
    "cpo": {"cpo": 1.0, "nll": 1.0},
    "simpo": {"simpo": {"gamma": 0.5}, "alpha_po": {"coefficient": 0.5, "gamma": 0.5, "alpha": 0.25}},
}
SCORERS = ("reward", "regression", "ranking", "prm")
RECIPES = ("sft", *PAIRS, "composition", "kto", "bco", *SCORERS, "distill", "ppo")


def make_policy(family="llama", seed=0, **options):
    return Policy(in_full_precision(make_model(family, seed=seed)), **options)


def make_scorer(task):
    return Scorer(in_full_precision(make_classifier(task)))


def setup(name, accelerator):
    """(model, examples, columns of the data, terms, reader, further arguments of Feed)"""
    draw = random.Random(1)
    importance = [draw.uniform(0.1, 2) for _ in range(EXAMPLES)]
    single, pairs, triples = (make_examples(EXAMPLES, completions=count) for count in (1, 2, 3))
    tokens = [sum(example.trained[0]) for example in single]

    def per_token(low, high):
        return [[draw.uniform(low, high) for _ in range(count)] for count in tokens]

    ends = {"mark": partial(ends_marked, pad=0)}
    if name == "prm":
        return (
            make_scorer("TOKEN_CLS"),
            single,
            {"label": per_token(0, 1)},
            {"step_loss": Term(step_loss)},
            score_tensors,
            {},
        )
    if name == "reward":
        terms = {**REWARD_TERMS["bradley_terry"], "centering": Term(centering, 0.1)}
        return make_scorer("SEQ_CLS"), pairs, {"margin": importance}, terms, read_scores, ends
    if name == "regression":
        return (
            make_scorer("SEQ_CLS"),
            single,
            {"score": importance},
            REWARD_TERMS["score_regression"],
            read_scores,
            ends,
        )
    if name == "ranking":
        ranks = {"rank": [draw.sample(range(3), 3) for _ in range(EXAMPLES)]}
        return make_scorer("SEQ_CLS"), triples, ranks, REWARD_TERMS["plackett_luce"], read_scores, ends

    head = torch.nn.Linear(32, 1, dtype=torch.float64) if name == "ppo" else None
    policy = make_policy(value_head=head)
    reference = frozen_copy(make_policy(seed=1))
    teacher = make_policy("llama_wide", seed=2)
    lesson = partial(teacher.lesson, beta=0.3, temperature=0.7)
    hyper = {"beta": 0.3}
    if name == "sft":
        mix = {
            "nll": {"weighting": "sequence_mean", "weight": "importance"},
            "dft": {"coefficient": 0.5},
            "label_smoothed_nll": {"coefficient": 0.3, "label_smoothing": 0.1},
            "z_loss": {"coefficient": 1e-2, "weighting": "fixed_length", "length": 20},
        }
        terms = {**parse(mix, {}, TOKEN_LOSSES), **ENTROPY}
        read = policy_tensors(outputs=outputs_for(terms))
        return policy, single, {"importance": importance}, terms, read, {}
    if name == "distill":
        terms = {"distillation": Term(distillation), "nll": Term(nll, 0.5), **ENTROPY}
        return policy, single, {}, terms, policy_tensors(teaching=lesson), {}
    if name in PAIRS:
        terms = {**parse(PAIRS[name], hyper, PAIR_LOSSES, of=CHOSEN), **PAIR_LOGPS, **ENTROPY}
        return policy, pairs, {}, terms, policy_tensors(reference=reference, pairs=True), {}
    if name == "composition":
        mix = {
            "dpo": {"coefficient": 0.7, "weight": "importance"},
            "bco_pair": 0.3,
            "nll": 0.2,
            "distillation": {"coefficient": 0.1, "weighting": "sequence_mean", "of": "all"},
        }
        terms = {**parse(mix, hyper, PAIR_LOSSES, of=CHOSEN), **PAIR_LOGPS, **ENTROPY}
        terms["bco_pair"] = replace(terms["bco_pair"], factor="wpo")
        read = policy_tensors(reference=reference, teaching=lesson, outputs=outputs_for(terms), pairs=True)
        return policy, pairs, {"importance": importance}, terms, read, {}
    if name in ("kto", "bco"):
        terms = {**parse({name: 1.0, "nll": 0.2}, hyper, FEEDBACK_LOSSES, of="desirable"), **feedback_metrics(0.3)}
        rewards = RunningMean()
        rewards.observe({"rewards": 0.4})
        prepare = prepare_feedback(terms, rewards, policy, reference, accelerator)
        labels = {"desirable": [draw.random() < 0.5 for _ in range(EXAMPLES)]}
        return policy, single, labels, terms, policy_tensors(reference=reference), {"prepare": prepare}
    assert name == "ppo"
    terms = {
        "surrogate": Term(clipped_surrogate),
        "value": Term(value_loss, 0.5),
        "entropy_bonus": Term(entropy_bonus, 0.01, sequence_mean),
        "kl": Term(partial(kl_estimate, kind="k3"), 0.1, partial(fixed_length, length=12)),
    }
    bounds = {"old_logp": (-5, -3), "advantage": (-1, 1), "old_value": (-1, 1), "target": (-1, 1)}
    columns = {column: per_token(*bound) for column, bound in bounds.items()}
    return policy, single, columns, terms, policy_tensors(reference=reference), {}


def one_step(name, layout, micro_tokens):
    accelerator = Accelerator(cpu=True)
    model, examples, columns, terms, read, options = setup(name, accelerator)
    model.layout = layout
    data = Dataset.from_dict({**{field: [getattr(e, field) for e in examples] for field in Example._fields}, **columns})
    batches = Batches(
        [len(e.prompt) * len(e.completions) + sum(map(len, e.completions)) for e in examples],
        batch_size=EXAMPLES,
        micro_tokens=micro_tokens,
        seed=0,
        shuffle=False,
        epochs=1,
        ranks=accelerator.num_processes,
    )
    feed = Feed(data, batches, rank=accelerator.process_index, columns=list(columns), **options)
    mine = feed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    prepared, optimizer = accelerator.prepare(model, optimizer)
    objective = compose(terms, read)
    metrics = train_step(
        accelerator, prepared, optimizer, mine, objective, expression(terms), max_grad_norm=float("inf")
    )
    # Plain SGD with learning rate 1: the step is the gradient.
    gradient = torch.cat([(b - p.detach()).flatten() for b, p in zip(before, model.parameters(), strict=True)])
    return {"micro_batches": len(mine), "metrics": metrics, "gradient": gradient, "rank": accelerator.process_index}


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    output, *settings = sys.argv[1:]
    results = {}
    for name in RECIPES:
        for setting in settings:
            layout, micro_tokens = setting.split(":")
            result = one_step(name, layout, int(micro_tokens) if micro_tokens else None)
            results[f"{name}:{setting}"] = {**result, "gradient": result["gradient"].tolist()}
    if result["rank"] == 0:
        with open(output, "w") as file:
            json.dump(results, file)
