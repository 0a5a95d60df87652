"""One optimizer step of a recipe's objective under a given split: loss, metrics and a flat
gradient, float64.
"""

import math
import os
import random
import tempfile
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from burnish.data import Batches, Example
from burnish.loops.batch import fixed_length, length_normalized
from burnish.loops.config import Teacher
from burnish.loops.models.policy import Policy
from burnish.loops.models.scorer import Scorer, ends_marked
from burnish.loops.models.sharding import whole
from burnish.loops.recipes.grpo import open_grpo
from burnish.loops.recipes.kto import (
    FEEDBACK_LOSSES,
    RunningMean,
    feedback_metrics,
    prepare_feedback,
)
from burnish.loops.recipes.ppo import open_ppo
from burnish.loops.recipes.reward import LOSSES as REWARD_LOSSES
from burnish.loops.recipes.reward import (
    RANGE,
    bin_labels,
    read_histograms,
    read_scores,
    reward_losses,
)
from burnish.loops.recipes.settings import GRPO, PPO, RLOO, Reward
from burnish.loops.rewards import RewardFunction
from burnish.loops.rl.context import RLContext
from burnish.loops.rollouts.replay import ReplaySource
from burnish.loops.rollouts.sample import Context, Sample, VersionSpan
from burnish.loops.rollouts.scheduler import RolloutScheduler
from burnish.loops.runs.context import RunContext, scale_loss
from burnish.loops.runs.cross_tokenizer import Aligner, losses_of_spans, open_cross_tokenizer
from burnish.loops.runs.feed import Feed
from burnish.loops.runs.reference import frozen
from burnish.loops.runs.teacher import PROMPT_COLUMN, add_teacher_prompts, as_the_teacher_reads
from burnish.loops.train.losses import (
    CHOSEN,
    ENTROPY,
    PAIR_METRICS,
    REJECTED,
    Term,
    compose,
    logit_metrics,
    outputs_for,
    policy_tensors,
    score_tensors,
    token_accuracy,
    weightings,
)
from burnish.loops.train.mix import PAIR_LOSSES, TOKEN_LOSSES, distillation, parse_losses
from burnish.loops.train.step import prepare, train_step
from burnish.objectives import (
    PerPair,
    PerToken,
    Stats,
    centering,
    clipped_surrogate,
    entropy_bonus,
    kl_estimate,
    nll,
    skew_reverse_kl,
    step_loss,
    value_loss,
)
from datasets import Dataset
from small_tokenizers import of_letters
from tiny import in_full_precision, make_classifier, make_examples, make_model
from torch.distributed.device_mesh import init_device_mesh

EXACT = 1e-12
UNIT = 2.0**-8  # roundoff of bfloat16: half of the distance from 1 to the next number
UNITS = {torch.bfloat16: UNIT, torch.float16: 2.0**-11}
EXAMPLES = 9
PAIRS = {
    "dpo": {"dpo": 1.0},
    "orpo": {"nll": 1.0, "orpo": 0.1},
    "cpo": {"cpo": 1.0, "nll": 1.0},
    "simpo": {
        "simpo": {"gamma": 0.5},
        "alpha_po": {"coefficient": 0.5, "gamma": 0.5, "alpha": 0.25},
    },
    "own": {
        "dpo": 0.7,
        "law:contrast": {"coefficient": 0.5, "gap": 2.0},
        "law:near_reference": {"coefficient": 0.1, "weighting": "length_normalized", "of": "all"},
    },
}
SCORERS = ("reward", "ties", "degrees", "regression", "histogram", "ranking", "prm")
IN_SIXTEEN_BITS = (
    "sft",
    "dpo",
    "histogram",
    "grpo",
    "opo_vetoed",
    "plus_plus_baseline",
    "optimal_token",
    "grpo_contexts",
    "distill",
    "gold_matched",
    "gold",
    "uld",
)
# |S − T| of sorted probabilities has a kink at 0: where the two cross, rounding flips signs.
KINKED = ("gold", "uld")
IN_FLOAT16 = ("sft", "grpo")
RECIPES = (
    "sft",
    *PAIRS,
    "composition",
    "kto",
    "bco",
    *SCORERS,
    "distill",
    "skewed",
    "gold",
    "uld",
    "self_taught",
    "ppo",
)

GROUPS, ANSWERS, LONGEST = 5, 3, 8
# What all share: two epochs of two minibatches, of which the third step is looked at, so that a
# rollout is split and the order of its second epoch is drawn.
STEP = 2
_SPLIT = {
    "model": "",
    "data": "",
    "output": "",
    "prompts_per_rollout": GROUPS,
    "group_size": ANSWERS,
}
_SPLIT |= {
    "max_tokens": LONGEST,
    "rewards": {"right": 1.0, "brief": 0.3},
    "steps": 4,
    "epochs_per_rollout": 2,
    "minibatches": 2,
}
_SPLIT |= {"mask_truncated": True, "temperature": 0.7}
_WIDE = {"clip_low": 0.95, "clip_high": 9.0}  # the scripted sampler is far from the policy
ONLINE = {
    "grpo": GRPO(**_SPLIT, old_logprobs="recomputed", beta=0.1),
    "grpo_token_mean": GRPO(
        **_SPLIT, variant="dapo", dynamic_sampling=False, loss_kwargs=_WIDE, scale="batch"
    ),
    "grpo_fixed_length": GRPO(
        **_SPLIT, variant="dr_grpo", loss_kwargs=_WIDE, loss={"clipped_surrogate": 1, "nll": 0.1}
    ),
    "grpo_corrected": GRPO(**_SPLIT, correction="tis", beta=0.1, kl_as="reward"),
    "gdpo": GRPO(**_SPLIT, reward_aggregation="normalize", loss_kwargs=_WIDE),
    "gspo": GRPO(**_SPLIT, variant="gspo", old_logprobs="sampled", loss_kwargs=_WIDE),
    "gspo_corrected": GRPO(**_SPLIT, variant="gspo", correction="sequence_tis"),
    "rloo": RLOO(**_SPLIT),
    "opo_vetoed": GRPO(
        **_SPLIT,
        advantage="opo",
        correction="decoupled",
        masks={"veto": {"threshold": 0.15}, "off_policy": {"threshold": 0.4}},
    ),
    "gpg_entropy": GRPO(
        **_SPLIT,
        advantage="gpg",
        scale="batch",
        loss="reinforce",
        masks={"high_entropy": {"quantile": 0.5}},
    ),
    "maxrl_clip_cov": GRPO(
        **_SPLIT,
        advantage="maxrl",
        loss_kwargs=_WIDE,
        masks={"clip_cov": {"share": 0.2, "low": -1.0}},
    ),
    "max_at_k_m2po": GRPO(
        **_SPLIT,
        advantage="max_at_k",
        advantage_k=2,
        loss_kwargs=_WIDE,
        masks={"m2po": {"threshold": 0.1}, "total_variation": {"low": 0.005, "high": 0.005}},
    ),
    "remax": GRPO(**_SPLIT, advantage="remax", beta=0.1, kl_as="reward", loss_kwargs=_WIDE),
    "plus_plus_kl_cov": GRPO(
        **_SPLIT,
        advantage="reinforce_plus_plus",
        loss="kl_cov",
        kl_cov_share=0.2,
        beta=0.1,
        kl_as="reward",
    ),
    "plus_plus_baseline": GRPO(
        **_SPLIT, advantage="reinforce_plus_plus_baseline", beta=0.1, loss_kwargs=_WIDE
    ),
    "optimal_token": GRPO(
        **_SPLIT, advantage="optimal_token", beta=0.1, kl_as="reward", loss_kwargs=_WIDE
    ),
    "ppo_online": PPO(
        **_SPLIT,
        missing_eos_penalty=0.5,
        loss_kwargs=_WIDE,
        loss={"clipped_surrogate": 1, "entropy_bonus": 0.1},
    ),
    # of conversations of one to three contexts
    "grpo_contexts": GRPO(**_SPLIT, old_logprobs="recomputed", beta=0.1),
    "grpo_token_mean_contexts": GRPO(
        **_SPLIT,
        variant="dapo",
        dynamic_sampling=False,
        loss_kwargs=_WIDE,
        correction="sequence_tis",
        masks={"off_policy": {"threshold": 0.4}},
    ),
    "gspo_contexts": GRPO(
        **_SPLIT, variant="gspo", old_logprobs="sampled", loss_kwargs=_WIDE, scale="batch"
    ),
    "optimal_token_contexts": GRPO(
        **_SPLIT,
        advantage="optimal_token",
        beta=0.1,
        kl_as="reward",
        variant="dr_grpo",
        loss_kwargs=_WIDE,
    ),
    "ppo_contexts": PPO(**_SPLIT, missing_eos_penalty=0.5, loss_kwargs=_WIDE, beta=0.1),
}


def contrast(mean_chosen: PerPair, mean_rejected: PerPair, *, gap: float) -> tuple[PerPair, Stats]:
    """A loss of one's own."""
    loss = (gap - mean_chosen + mean_rejected).square()
    return loss, {"contrast/far": (loss > 1).to(loss.dtype).detach()}


def near_reference(logp: PerToken, ref_logp: PerToken) -> tuple[PerToken, Stats]:
    """Another one, of tokens."""
    return (logp - ref_logp).square(), {}


def make_policy(family="llama", seed=0, **options):
    """In the default dtype; its weights are the same in each."""
    model = make_model(family, seed=seed).float().to(torch.get_default_dtype())
    return Policy(in_full_precision(model), **options)


def make_scorer(task, mesh):
    return Scorer(in_full_precision(make_classifier(task)), mesh=mesh)


def setup(name, accelerator, mesh=None):
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
            make_scorer("TOKEN_CLS", mesh),
            single,
            {"label": per_token(0, 1)},
            {"step_loss": Term(step_loss)},
            score_tensors,
            {},
        )
    if name == "reward":
        terms = {**REWARD_LOSSES["bradley_terry"], "centering": Term(centering, 0.1)}
        return make_scorer("SEQ_CLS", mesh), pairs, {"margin": importance}, terms, read_scores, ends
    if name in ("ties", "degrees"):
        shares = [draw.choice([0.5, 1.0]) for _ in range(EXAMPLES)]
        terms = REWARD_LOSSES["ordinal_preference"]
        if name == "ties":
            config = Reward("", "", "", loss="bradley_terry_ties", tie_threshold=0.3)
            terms = reward_losses(config)
        scorer = make_scorer("SEQ_CLS", mesh)
        return scorer, pairs, {"preference": shares}, terms, read_scores, ends
    if name == "regression":
        return (
            make_scorer("SEQ_CLS", mesh),
            single,
            {"score": importance},
            {**RANGE, **REWARD_LOSSES["score_regression"]},
            read_scores,
            ends,
        )
    if name == "histogram":
        config = Reward(
            "", "", "", loss="hl_gauss", lowest_score=0.0, highest_score=2.0, bins=5, sigma=0.5
        )
        model = in_full_precision(make_classifier("SEQ_CLS", labels=5))
        model.float().to(torch.get_default_dtype())
        model.config.id2label = bin_labels(config)
        scorer = Scorer(model, mesh=mesh)
        columns = {"score": importance}
        return scorer, single, columns, reward_losses(config), read_histograms, ends
    if name == "ranking":
        ranks = {"rank": [draw.sample(range(3), 3) for _ in range(EXAMPLES)]}
        return (
            make_scorer("SEQ_CLS", mesh),
            triples,
            ranks,
            REWARD_LOSSES["plackett_luce"],
            read_scores,
            ends,
        )

    torch.manual_seed(5)
    head = torch.nn.Linear(32, 1, dtype=torch.float64) if name == "ppo" else None
    policy = make_policy(value_head=head, mesh=mesh)
    reference = alike(frozen(make_policy(seed=1, mesh=mesh)), accelerator)
    teacher = make_policy("llama_wide", seed=2, mesh=mesh)
    teacher_outputs = partial(teacher.teacher_outputs, beta=0.3, temperature=0.7)
    loss_kwargs = {"beta": 0.3}
    if name == "sft":
        mix = {
            "nll": {"weighting": "length_normalized", "weight": "importance"},
            "dft": {"coefficient": 0.5},
            "label_smoothed_nll": {"coefficient": 0.3, "label_smoothing": 0.1},
            "z_loss": {"coefficient": 1e-2, "weighting": "fixed_length", "length": 20},
        }
        terms = {**parse_losses(mix, {}, TOKEN_LOSSES), **ENTROPY}
        read = policy_tensors(outputs=outputs_for(terms))
        return policy, single, {"importance": importance}, terms, read, {}
    if name == "distill":
        terms = {"distillation": Term(distillation), "nll": Term(nll, 0.5), **ENTROPY}
        return policy, single, {}, terms, policy_tensors(teacher=teacher_outputs), {}
    if name == "self_taught":  # the teacher reads another prompt, longer or shorter
        others = [example.prompt for example in make_examples(EXAMPLES, seed=7, completions=1)]
        prompts = [{PROMPT_COLUMN: prompt} for prompt in others]

        def prompted(feed, step, micro_batches):
            return add_teacher_prompts(prompts, feed.plan(step), micro_batches)

        def self_taught(batch):
            return teacher_outputs(as_the_teacher_reads(batch))

        terms = {"distillation": Term(distillation), **ENTROPY}
        read = policy_tensors(teacher=self_taught)
        return policy, single, {}, terms, read, {"prepare": prompted}
    if name in ("gold", "gold_matched", "uld"):
        # the teacher has other pairs of the same letters
        tokenizers = of_letters(61, seed=3), of_letters(64, seed=4)
        aligner = Aligner(*tokenizers)
        run = SimpleNamespace(tokenizer=tokenizers[0], model=policy, accelerator=accelerator)
        config = Teacher(model="t", divergence=name.removesuffix("_matched"), temperature=0.7)
        if name == "gold_matched":  # of the tokens that both have alone
            config = replace(config, matched_weight=1.0)
        read = policy_tensors(teacher=open_cross_tokenizer(run, config, teacher, tokenizers[1]))
        terms = {"distillation": Term(distillation), "nll": Term(nll, 0.5), **ENTROPY}
        if name == "gold_matched":
            terms = {"distillation": Term(distillation)}
        if name == "uld":
            terms = {"distillation": Term(distillation, 1.0, length_normalized)}

        def aligned(feed, step, micro_batches):
            return aligner.prepare(micro_batches)

        return policy, single, {}, losses_of_spans(terms), read, {"prepare": aligned}
    if name == "skewed":

        def skewed(batch):
            return replace(teacher_outputs(batch), objective=partial(skew_reverse_kl, alpha=0.1))

        terms = {"distillation": Term(distillation), **ENTROPY}
        return policy, single, {}, terms, policy_tensors(teacher=skewed), {}
    if name in PAIRS:
        terms = {
            **parse_losses(PAIRS[name], loss_kwargs, PAIR_LOSSES, of=CHOSEN),
            **PAIR_METRICS,
            **logit_metrics(CHOSEN, REJECTED),
            **token_accuracy("torch", of=CHOSEN),
        }
        read = policy_tensors(reference=reference, outputs=outputs_for(terms), pairs=True)
        return policy, pairs, {}, terms, read, {}
    if name == "composition":
        mix = {
            "dpo": {"coefficient": 0.7, "weight": "importance"},
            "bco_pair": 0.3,
            "nll": 0.2,
            "distillation": {"coefficient": 0.1, "weighting": "length_normalized", "of": "all"},
        }
        terms = {**parse_losses(mix, loss_kwargs, PAIR_LOSSES, of=CHOSEN), **PAIR_METRICS}
        terms["bco_pair"] = replace(terms["bco_pair"], factor="wpo")
        read = policy_tensors(
            reference=reference, teacher=teacher_outputs, outputs=outputs_for(terms), pairs=True
        )
        return policy, pairs, {"importance": importance}, terms, read, {}
    if name in ("kto", "bco"):
        terms = {
            **parse_losses({name: 1.0, "nll": 0.2}, loss_kwargs, FEEDBACK_LOSSES, of="desirable"),
            **feedback_metrics(0.3),
        }
        rewards = RunningMean()
        rewards.observe({"rewards": 0.4})
        prepare = partial(prepare_feedback, terms, rewards, policy, reference, accelerator, None)
        labels = {"desirable": [draw.random() < 0.5 for _ in range(EXAMPLES)]}
        return (
            policy,
            single,
            labels,
            terms,
            policy_tensors(reference=reference),
            {"prepare": prepare},
        )
    assert name == "ppo"
    terms = {
        "surrogate": Term(clipped_surrogate),
        "value": Term(value_loss, 0.5),
        "entropy_bonus": Term(entropy_bonus, 0.01, length_normalized),
        "kl": Term(partial(kl_estimate, kind="k3"), 0.1, partial(fixed_length, length=12)),
    }
    bounds = {"old_logp": (-5, -3), "advantage": (-1, 1), "old_value": (-1, 1), "target": (-1, 1)}
    columns = {column: per_token(*bound) for column, bound in bounds.items()}
    return policy, single, columns, terms, policy_tensors(reference=reference), {}


def alike(reference, accelerator):
    """The reference in the precision of the policy."""

    def computed(batch):
        with accelerator.autocast():
            return reference(batch)

    return computed


def scripted(seed=3, *, contexts=1):
    """Answers that nobody sampled, with every reason to leave one out: no score, given up, cut.

    Of more contexts than 1 there are conversations of all numbers up to it, and those of every
    second task begin each with a prompt of its own.
    """
    draw = random.Random(seed)
    samples = []

    def start():
        return [draw.randrange(3, 60) for _ in range(draw.randint(1, 9))]

    for task in range(GROUPS):
        prompt = start()
        # what the completion at temperature 0 was worth; nobody knows it of the last prompt
        greedy = {"right": None if task == GROUPS - 1 else 0.2 * task, "brief": None}
        info = {"greedy": {"finish": "stop", "rewards": greedy}}
        for index in range(ANSWERS):
            parts = []
            for number in range(1 + (task + index) % contexts):
                own = number or (contexts > 1 and task % 2)
                tokens = [draw.randrange(3, 60) for _ in range(draw.randint(1, LONGEST))]
                trained = [draw.random() < 0.8 for _ in tokens[:-1]] + [True]
                logprobs = [-draw.uniform(3, 5) for _ in tokens]
                span = [VersionSpan(0, 0, len(tokens))]
                given = start() if own else prompt
                parts.append(Context(given, tokens, trained, logprobs, span))
            first, *further = parts
            finish = {(0, 1): "aborted", (3, 2): "length"}.get((task, index), "stop")
            score = None if (task, index) == (1, 0) else draw.choice([0.0, 0.5, 1.0])
            rewards = {"right": score, "brief": None if score is None else draw.random()}
            sample = Sample(task, index, **vars(first), finish=finish, further=further)
            sample.rewards = rewards
            sample.info = info
            samples.append(sample)
    return samples


def replaying(samples, config):
    """A scheduler that gives back these samples."""
    prompts = {sample.task: sample.prompt for sample in samples}
    return RolloutScheduler(
        ReplaySource(samples, conversations=True),
        prompts.__getitem__,
        groups_per_step=config.prompts_per_rollout,
        group_size=config.group_size,
        sampling=config.sampling,
    )


class OneStep(RunContext):
    """A run of its parts in which a recipe takes one step of plain SGD, with learning rate 1."""

    def __init__(self, config, policy, reference, accelerator, *, step=STEP):
        super().__init__(
            config, accelerator, None, policy, Dataset.from_dict({"prompt": [[1]] * GROUPS})
        )
        self.frozen, self.step = reference, step

    def reference(self, kind, *, needed, temperature):
        return (self.frozen if needed else None), None

    def train(self, losses, read, feed, *, save):
        micro_batches = feed(self.step)
        result = stepped(
            self.accelerator, self.model, micro_batches, compose(losses, read), weightings(losses)
        )
        further = {
            name: value
            for name, value in feed.step_metrics().items()
            if name not in _OF_THE_SAMPLER
        }
        result["metrics"] |= further
        feed.close()
        return SimpleNamespace(train=lambda: result)


def given_samples(run, samples):
    """A context in which these are the samples of the run."""
    scheduler = replaying(samples, run.config) if run.accelerator.is_main_process else None
    rewards = [RewardFunction(name, None, weight) for name, weight in run.config.rewards.items()]
    return RLContext(run, rewards, scheduler)


def one_step_of(config, policy, reference, samples, accelerator, **options):
    """The result of the recipe itself, see `stepped`, where samples, reference and policy are
    these.
    """
    open_recipe = open_ppo if isinstance(config, PPO) else open_grpo
    with tempfile.TemporaryDirectory() as directory:
        config = replace(config, output=directory)
        return open_recipe(
            config,
            given_samples(OneStep(config, policy, reference, accelerator, **options), samples),
        ).train()


def online_step(config, layout, accelerator, samples, mesh=None):
    torch.manual_seed(5)
    head = torch.nn.Linear(32, 1, dtype=torch.float64) if isinstance(config, PPO) else None
    policy = make_policy(value_head=head, mesh=mesh)
    policy.layout = layout
    reference = alike(
        frozen(make_policy(seed=1, mesh=mesh), temperature=config.temperature), accelerator
    )
    return one_step_of(config, policy, reference, samples, accelerator)


_OF_THE_SAMPLER = ("sampling/seconds", "sampling/retries")


@contextmanager
def numbers(dtype):
    """Whole steps in this dtype; in 16 bits forward passes are under autocast and weights in
    float32, as in runs.
    """
    before, mixed = torch.get_default_dtype(), dtype in UNITS
    torch.set_default_dtype(torch.float32 if mixed else dtype)
    AcceleratorState._reset_state()
    # all that follow are like the first
    kinds = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    Accelerator(cpu=True, mixed_precision=kinds.get(dtype, "no"))
    try:
        yield
    finally:
        AcceleratorState._reset_state()
        torch.set_default_dtype(before)


def one_step(name, layout, micro_tokens, shards=1):
    accelerator = Accelerator(cpu=True)
    if accelerator.mixed_precision == "fp16":
        scale_loss(accelerator)
    mesh = None if shards == 1 else init_device_mesh("cpu", (shards,))
    if name in ONLINE:
        config = replace(ONLINE[name], micro_tokens=micro_tokens)
        samples = scripted(contexts=3 if name.endswith("contexts") else 1)
        return online_step(config, layout, accelerator, samples, mesh)
    model, examples, columns, terms, read, options = setup(name, accelerator, mesh)
    model.layout = layout
    data = Dataset.from_dict(
        {**{field: [getattr(e, field) for e in examples] for field in Example._fields}, **columns}
    )
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
    return stepped(accelerator, model, feed(0), compose(terms, read), weightings(terms))


def stepped(accelerator, model, mine, objective, weightings):
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = [whole(parameter.detach()).clone() for parameter in model.parameters()]
    prepared, optimizer = prepare(accelerator, model, optimizer)
    metrics = train_step(
        accelerator, prepared, optimizer, mine, objective, weightings, max_grad_norm=float("inf")
    )
    # Plain SGD with learning rate 1: the step is the gradient.
    after = [whole(parameter.detach()) for parameter in model.parameters()]
    gradient = torch.cat([(b - a).flatten() for b, a in zip(before, after, strict=True)])
    weight = torch.cat([b.flatten() for b in before])
    found = {"micro_batches": len(mine), "metrics": metrics, "rank": accelerator.process_index}
    return found | {"gradient": gradient.double(), "weight": weight.double()}


def assert_same(result, expected):
    assert result["metrics"].keys() == expected["metrics"].keys()
    for name, value in expected["metrics"].items():
        assert result["metrics"][name] == pytest.approx(value, rel=EXACT, abs=EXACT), name
    gradient = torch.as_tensor(result["gradient"], dtype=torch.float64)
    assert float(gradient.abs().max()) > 1e-6
    torch.testing.assert_close(gradient, expected["gradient"], rtol=EXACT, atol=EXACT)


def assert_same_but_rounded(result, whole, exact, unit):
    """Agreement of a split of a step with the ``whole`` of it, as far as numbers of 16 bits with
    this roundoff go; ``exact`` is it in float64.

    Two gradients whose roundings have nothing in common, each as far from the exact one as that of
    the whole step, would be √2 times as far from each other. What has nothing to do with the
    policy's numbers is the same.
    """
    gradient = torch.as_tensor(result["gradient"], dtype=torch.float64)
    error = (whole["gradient"] - exact["gradient"]).norm()
    assert (gradient - whole["gradient"]).norm() <= math.sqrt(2) * error
    metrics, expected = result["metrics"], whole["metrics"]
    assert metrics.keys() == expected.keys()
    assert expected.keys() - {"loss_scale"} == exact["metrics"].keys()
    rounding = unit / UNIT * rounding_of_the_loss(exact)
    assert metrics["loss"] == pytest.approx(expected["loss"], abs=3 * rounding)
    for name, value in exact["metrics"].items():
        if value == expected[name] and name != "ratio":
            assert metrics[name] == pytest.approx(value, rel=EXACT, abs=EXACT), name


def assert_loss_is_rounded_once(whole, exact, unit):
    """The loss of the whole step is as near to it in float64 as roundings of all weights move it."""
    rounding = unit / UNIT * rounding_of_the_loss(exact)
    assert whole["metrics"]["loss"] == pytest.approx(exact["metrics"]["loss"], abs=3 * rounding)


def assert_rounded_once(whole, exact, unit):
    """Nothing but numbers of 16 bits with this roundoff is between the whole step and it in
    float64: each linear map rounds once each way.

    There are four in sequence in each of the two layers, and the head. Roundings are independent,
    so that their squares add: unit √(2·9) of the gradient's norm.
    """
    error = (whole["gradient"] - exact["gradient"]).norm()
    assert 0.1 * unit < error / exact["gradient"].norm() <= math.sqrt(18) * unit
    assert_loss_is_rounded_once(whole, exact, unit)


def assert_as_near(result, peer, exact):
    """The rule for kernels: at most twice as far from float64 as the peer's gradient under the same
    autocast.
    """
    error = (peer.double() - exact["gradient"]).norm()
    assert error > 0.1 * UNIT * exact["gradient"].norm()
    assert (result["gradient"] - exact["gradient"]).norm() <= 2 * error
    assert result["metrics"]["loss"] == pytest.approx(
        exact["metrics"]["loss"], abs=3 * rounding_of_the_loss(exact)
    )


def rounding_of_the_loss(exact):
    """UNIT ‖g ∘ θ‖: how far independent roundings of all weights move it, to first order. Those of
    what they are multiplied with, and of the products, are as many again, so that three times that
    bounds the error.
    """
    return UNIT * float((exact["gradient"] * exact["weight"]).norm())


# by kind: recipes, their dtype, and the splits of a step that two ranks take, the last one in
# shards
KINDS = {
    "offline": (RECIPES, torch.float64, (("packed", 30), ("padded", 1), ("shared", 60, 2))),
    "online": (tuple(ONLINE), torch.float64, (("shared", 30), ("padded", 1), ("packed", 60, 2))),
    "bfloat16": (IN_SIXTEEN_BITS, torch.bfloat16, (("padded", 30), ("shared", 40, 2))),
    "float16": (IN_FLOAT16, torch.float16, (("padded", 30), ("shared", 40, 2))),
}


def splits_on_ranks(kind, name):
    """Those of this recipe: one of the splits in turn, and the one in shards."""
    names, _, (*copies, shards) = KINDS[kind]
    return copies[names.index(name) % len(copies)], shards


def be_rank(output, kind):
    """Take the step of every recipe of this kind under its splits, as one of several ranks; rank 0
    saves them.
    """
    names, dtype, _ = KINDS[kind]
    with numbers(dtype):
        results = {
            (name, split): one_step(name, *split)
            for name in names
            for split in splits_on_ranks(kind, name)
        }
    if int(os.environ["RANK"]) == 0:
        torch.save(results, output)
