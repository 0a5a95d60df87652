"""The peer's trainers and ours on the same rows in the same order: the same losses and gradients,
step by step.

A case is a configuration of the peer's, which the command line translates to ours.
"""

import json
import random
from pathlib import Path

import pytest
import torch
from both import (
    AGREEMENT,
    DRAWN,
    PROMPTS,
    UNEVEN,
    answers,
    assert_alike,
    halves,
    train_both,
    uneven_pairs,
)
from burnish.benchmarks.peer.trainers import completions
from forked import run_forked
from small_tokenizers import on_bytes
from tiny import save_model, sums

PAIRS = sums(16)
COMPLETIONS = list(completions(iter(PAIRS)))
PLAIN = [
    {
        "prompt": f"{p['prompt'][0]['content']} ",
        **{k: p[k][0]["content"] for k in ("chosen", "rejected")},
    }
    for p in PAIRS
]
MIX = {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]}
# In the way of DAPO: over completions, the first loss would be the sum of advantages, which is 0.
SAMPLED = {
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 8,
    "loss_type": "dapo",
}
SAMPLED |= {"epsilon_high": 0.28, "num_iterations": 2, "beta": 0.0}
UNCLIPPED = {name: SAMPLED[name] for name in SAMPLED if name != "loss_type"}
# Its loss is of log-probs at temperature 1, of pairs without ties; its gradient, of one
# micro-batch.
ONLINE = {"temperature": 1.0, "max_new_tokens": 12}
# Micro-batches of two, of rows of very different lengths.
SPLIT = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
APO, CUT = {"loss_type": "apo_zero_unpaired"}, {"max_length": 60}
# The third completion is the chosen one in every third row.
TRIPLES = [
    {**row, "reference": row["chosen"] if i % 3 == 0 else other["chosen"]}
    for i, (row, other) in enumerate(zip(UNEVEN, uneven_pairs(24, seed=5), strict=True))
]
# Each of 16 tokens, its EOS included: two in a row of 32.
TEXTS = [{"text": "".join(random.Random(i).choices("abcdefg", k=15))} for i in range(16)]
PACKED = {
    "packing": True,
    "max_length": 32,
    "per_device_train_batch_size": 2,
    "shuffle_dataset": False,
}
CHATS = [
    {
        "messages": [
            message
            for pair in PAIRS[i : i + 1 + i % 3]
            for message in pair["prompt"] + pair["chosen"]
        ]
    }
    for i in range(16)
]
AFTER = [{"prompt": row["messages"][:1], "completion": row["messages"][1:]} for row in CHATS]
LAST = [{"prompt": row["messages"][:-1], "completion": row["messages"][-1:]} for row in CHATS]
MARKED = {
    "chat_template_path": str(Path(__file__).parent / "support/trl/marked.jinja"),
    "assistant_only_loss": True,
}
# In two micro-batches.
HALVES = {**DRAWN, "gradient_accumulation_steps": 2, "beta": 0.0, "epsilon_high": 0.28}
# Both estimate KTO's KL from the completions of other prompts; of two rows there is one choice.
CASES = {
    "sft": ("sft", COMPLETIONS, {}),
    "sft by dft": ("sft", COMPLETIONS, {"loss_type": "dft"}),
    "sft with smooth labels": (
        "sft",
        COMPLETIONS,
        {"loss_type": "chunked_nll", "label_smoothing_factor": 0.1},
    ),
    "dpo": ("dpo", PAIRS, {"gradient_accumulation_steps": 2}),
    "dpo by another divergence": (
        *("dpo", PAIRS),
        {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.75},
    ),
    "dpo by a mix": ("dpo", PAIRS, MIX),
    "dpo by ranks": ("dpo", PAIRS, {"loss_type": ["aot"], "label_smoothing": 0.1}),
    "dpo after a warmup": ("dpo", PAIRS, {"lr_scheduler_type": "cosine", "warmup_steps": 0.3}),
    "dpo at a constant rate": ("dpo", PAIRS, {"warmup_steps": 2}),
    "cpo": ("cpo", PLAIN, {"label_smoothing": 0.1}),
    "tpo": ("cpo", TRIPLES, {"tpo_alpha": 0.7, "beta": 0.2, "label_smoothing": 0.1}),
    "tpo, by the token": ("cpo", TRIPLES, {"loss_type": "tpo-l", "tpo_l_gamma": 0.4, "beta": 2.0}),
    "cpo by alphapo": ("cpo", PLAIN, {"loss_type": "alphapo", "alpha": 0.3}),
    "distill": ("distill", COMPLETIONS, {"lmbda": 0.0, "beta": 0.3, "temperature": 0.9}),
    "distill on-policy": (
        "distill",
        COMPLETIONS,
        {"lmbda": 1.0, "beta": 0.3, "max_completion_length": 8},
    ),
    "kto": ("kto", halves(PAIRS), {"per_device_train_batch_size": 2}),
    "reward": ("reward", PAIRS, {"center_rewards_coefficient": 0.01}),
    "grpo": ("grpo", PROMPTS, SAMPLED),
    "grpo by its reference": (
        "grpo",
        PROMPTS,
        {**SAMPLED, "beta": 0.1, "use_bias_correction_kl": True},
    ),
    "rloo": ("rloo", PROMPTS, {**UNCLIPPED, "beta": 0.05, "normalize_advantages": True}),
    "online_dpo": ("online_dpo", PROMPTS, ONLINE),
    "sft in uneven parts": ("sft", answers(UNEVEN), SPLIT),
    "sft by dft in uneven parts": ("sft", answers(UNEVEN), {**SPLIT, "loss_type": "dft"}),
    "dpo in uneven parts": ("dpo", UNEVEN, SPLIT),
    "kto in uneven parts": ("kto", halves(UNEVEN), {**SPLIT, **APO}),
    "reward in uneven parts": ("reward", UNEVEN, SPLIT),
    "cpo in uneven parts": ("cpo", UNEVEN, {**SPLIT, "cpo_alpha": 0.0}),
    "sft, the starts of rows": ("sft", answers(UNEVEN), {**CUT, "truncation_mode": "keep_start"}),
    "sft, the ends of rows": ("sft", answers(UNEVEN), {**CUT, "truncation_mode": "keep_end"}),
    "dpo, the starts of rows": ("dpo", UNEVEN, {**CUT, "truncation_mode": "keep_start"}),
    "kto, the starts of rows": ("kto", halves(UNEVEN), {**CUT, **APO}),
    "cpo, the starts of rows": ("cpo", UNEVEN, CUT),
    "reward, without long rows": ("reward", uneven_pairs(200), {"max_length": 60}),
    "sft in packs": ("sft", TEXTS, {**PACKED, "packing_strategy": "bfd"}),
    "sft in packs that split": ("sft", TEXTS, {**PACKED, "packing_strategy": "bfd_split"}),
    "sft without padding": ("sft", TEXTS, {"padding_free": True, "max_length": None}),
    "sft of the assistants": ("sft", CHATS, MARKED),
    "sft of the assistants after a prompt": ("sft", AFTER, MARKED),
    "sft of the last assistant": ("sft", LAST, {**MARKED, "completion_only_loss": True}),
    "sft of a completion": ("sft", LAST, {"completion_only_loss": True}),
    "sft of prompts too": ("sft", AFTER, {"completion_only_loss": False}),
    "sft of all messages": ("sft", CHATS, {}),
    "grpo in parts": ("grpo", PROMPTS, {**HALVES, "loss_type": "grpo"}),
    "dapo in parts": ("grpo", PROMPTS, {**HALVES, "loss_type": "dapo"}),
    "dr_grpo in parts": (
        "grpo",
        PROMPTS,
        {**HALVES, "loss_type": "dr_grpo", "scale_rewards": False},
    ),
    "cispo in parts": ("grpo", PROMPTS, {**HALVES, "loss_type": "cispo", "epsilon_high": 5.0}),
    "sapo in parts": ("grpo", PROMPTS, {**HALVES, "loss_type": "sapo"}),
    "vespo in parts": ("grpo", PROMPTS, {**HALVES, "loss_type": "vespo"}),
    "bnpo": ("grpo", PROMPTS, {**SAMPLED, "loss_type": "bnpo"}),
    "gspo": (
        "grpo",
        PROMPTS,
        {**HALVES, "loss_type": "grpo", "importance_sampling_level": "sequence"},
    ),
    "dapo of completions": (
        "grpo",
        PROMPTS,
        {**HALVES, "loss_type": "dapo", "importance_sampling_level": "sequence"},
    ),
    "dr_grpo of completions": (
        "grpo",
        PROMPTS,
        {**HALVES, "loss_type": "dr_grpo", "importance_sampling_level": "sequence"},
    ),
    "grpo of a batch's scale": (
        "grpo",
        PROMPTS,
        {**HALVES, "loss_type": "dapo", "scale_rewards": "batch"},
    ),
    "grpo without a scale": (
        "grpo",
        PROMPTS,
        {**HALVES, "loss_type": "dapo", "scale_rewards": "none"},
    ),
    "grpo with a bound on ratios": (
        "grpo",
        PROMPTS,
        {**HALVES, "loss_type": "dapo", "epsilon_high": 0.04, "delta": 1.05},
    ),
    "grpo of what ended": (
        "grpo",
        PROMPTS,
        {**HALVES, "loss_type": "dapo", "mask_truncated_completions": True},
    ),
}
# Of the peer, where it is not the recipe's.
TPO = "trl.experimental.tpo:TPO"
PEERS = {"distill on-policy": "trl:Distillation", "tpo": TPO, "tpo, by the token": TPO}
# The peer has conversations, or prompts, where ours reads their parts.
ROWS_OF_PEERS = {
    "distill": [{"messages": row["prompt"] + row["completion"]} for row in COMPLETIONS]
}
ROWS_OF_PEERS |= {"distill on-policy": PROMPTS}
# Ours, where the note at the start says what is to be set.
CHANGES = {
    "reward, without long rows": {"truncation": "error", "on_bad_row": "skip"},
    "sft in packs": {"batch_size": 4},
    "sft in packs that split": {"batch_size": 4},
    "sft of all messages": {"train_on": "all"},
}


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the peer's own
@pytest.mark.parametrize("case", CASES)
def test_a_configuration_of_the_peer_trains_as_its_trainer_does(case, tmp_path):
    recipe, rows, settings = CASES[case]
    parts = {
        "peer": PEERS.get(case),
        "rows_of_peer": ROWS_OF_PEERS.get(case),
        "changes": CHANGES.get(case),
    }
    steps, log = train_both(
        recipe, rows, settings, save_model(tmp_path / "model"), tmp_path, **parts
    )
    assert_alike(
        steps, log, told=AGREEMENT if recipe != "online_dpo" else 1e-4
    )  # of which the peer tells four decimals


# Of the trainer of GOLD, on the completions of the data.
OF_GOLD = {"lmbda": 0.0, "max_completion_length": 8}
# Every span is trained, where TRL leaves the ends out by default.
OVER_SPANS = {
    **OF_GOLD,
    "use_uld_loss": True,
    "uld_token_merge_strategy": "bayesian",
    "uld_skip_student_eos": False,
    "uld_skip_teacher_eos": False,
    "uld_student_temperature": 0.7,
    "uld_teacher_temperature": 0.7,
}
HYBRID = {**OVER_SPANS, "uld_use_hybrid_loss": True, "beta": 0.3}
WEIGHTS = {"uld_hybrid_matched_weight": 0.3, "uld_hybrid_unmatched_weight": 0.9}


def gold_in_order():
    """The peer's trainer, which has no setting for the order of its rows."""
    from trl.experimental import gold

    class GOLDTrainer(gold.GOLDTrainer):
        def _get_train_sampler(self, dataset=None):
            sampler = super()._get_train_sampler(dataset)
            sampler.shuffle = False
            return sampler

    GOLDTrainer.__module__ = gold.__name__
    return GOLDTrainer


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    "settings",
    [
        {**OF_GOLD, "beta": 0.3, "temperature": 0.9},
        {**OF_GOLD, "beta": 0.3, "temperature": 0.8, "num_generations": 2},
        OVER_SPANS,
        {**OVER_SPANS, "uld_distillation_weight": 0.5, "uld_crossentropy_weight": 0.2},
        HYBRID,
        {**HYBRID, **WEIGHTS},
    ],
    ids=["jsd", "jsd, twice each", "uld", "uld and cross-entropy", "gold", "gold, weighted"],
)
def test_gold_trains_as_with_the_peers_trainer(settings, tmp_path):
    model = save_model(tmp_path / "model")
    parts = {"peer": gold_in_order()}
    if "use_uld_loss" in settings:  # the teacher has other tokens
        # whose end is spelled as the student's: only such tokens are matched by TRL
        tokenizer = on_bytes(340, eos="<|end|>")
        parts["teacher"] = save_model(tmp_path / "teacher", vocab_size=len(tokenizer))
        tokenizer.save_pretrained(parts["teacher"])
    # all of one byte: TRL's spans end within characters, too
    texts = ["the cats sat", "the rats sat on hats", "the hats  and mats", "a mat", "hats"]
    rows = [{"prompt": f"{n}, on ", "completion": texts[n % len(texts)]} for n in range(16)]
    steps, log = train_both("distill", rows, settings, model, tmp_path, **parts)
    assert_alike(steps, log)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_the_odds_ratio_alone_trains_as_that_of_the_peer(tmp_path):
    """ORPO's NLL is that of prompts, too, with the peer: without it, both have one loss."""
    from trl.experimental import orpo

    class ORPOTrainer(orpo.ORPOTrainer):
        def concatenated_forward(self, *arguments):
            *outputs, nll = super().concatenated_forward(*arguments)
            return *outputs, 0 * nll

    ORPOTrainer.__module__ = orpo.__name__
    parts = {"peer": ORPOTrainer, "changes": {"loss": {"orpo": 0.7}}}
    settings = {"beta": 0.7, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
    steps, log = train_both(
        "dpo", UNEVEN, settings, save_model(tmp_path / "model"), tmp_path, **parts
    )
    assert_alike(steps, log)


EVALUATED = {
    "sft": ("sft", answers(UNEVEN), answers(uneven_pairs(7, seed=4)), {}),
    "dpo": ("dpo", UNEVEN, uneven_pairs(7, seed=4), {}),
    "kto": ("kto", halves(UNEVEN), halves(uneven_pairs(8, seed=4)), APO),
    "reward": ("reward", UNEVEN, uneven_pairs(7, seed=4), {}),
    "cpo": ("cpo", UNEVEN, uneven_pairs(7, seed=4), {"cpo_alpha": 0.0}),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("case", EVALUATED)
def test_evaluations_are_those_of_the_peer_in_one_batch(case, tmp_path):
    recipe, rows, held_out, settings = EVALUATED[case]
    settings = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "per_device_eval_batch_size": 8,
        **settings,
    }
    _, log = train_both(
        recipe, rows, settings, save_model(tmp_path / "model"), tmp_path, held_out=held_out
    )
    lines = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    ours = [line for line in lines if "eval/loss" in line][1:]  # without that before the first step
    peers = [line for line in log if "eval_loss" in line]
    assert [line["step"] for line in ours] == [line["step"] for line in peers] == [2, 4]
    names = {name.removeprefix("eval/") for name in ours[0]} & {
        name.removeprefix("eval_") for name in peers[0]
    }
    if case == "cpo":  # whose peer takes those of prompts and padding into its mean
        names -= {"logits/chosen", "logits/rejected"}
    assert len(names - {"step"}) >= (2 if case == "sft" else 4)
    for line, peer in zip(ours, peers, strict=True):
        for name in names - {"step"}:
            assert line[f"eval/{name}"] == pytest.approx(
                peer[f"eval_{name}"], rel=1e-4, abs=1e-4
            ), name


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_noise_on_embeddings_is_as_large_as_that_of_the_peer(tmp_path, monkeypatch):
    """On one sequence a step, with noise that is a function of the place; the last of 16 tokens is
    no input of ours.
    """

    def fixed(self, low=0.0, high=1.0, **options):
        wave = torch.arange(self.numel(), dtype=self.dtype).mul(0.7).sin().view_as(self)
        return self.copy_(low + (high - low) * (wave + 1) / 2)

    saved = save_model(tmp_path / "model")
    monkeypatch.setattr(torch.Tensor, "uniform_", fixed)
    quiet, changes = (
        {"per_device_train_batch_size": 1},
        {"neftune_noise_alpha": 30 * (15 / 16) ** 0.5},
    )
    noisy = {**quiet, "neftune_noise_alpha": 30.0}
    steps, log = train_both("sft", TEXTS, noisy, saved, tmp_path / "noisy", changes=changes)
    assert_alike(steps, log)
    without, _ = train_both("sft", TEXTS, quiet, saved, tmp_path / "quiet")
    assert abs(without[0]["loss"] - steps[0]["loss"]) > 100 * AGREEMENT


@pytest.mark.slow
def test_two_ranks_train_as_two_ranks_of_the_peer(tmp_path):
    """The loss, the norm of the gradient and every metric that both have, of steps of several
    micro-batches.
    """
    for status, printed in run_forked(
        2, "both", str(save_model(tmp_path / "model")), str(tmp_path)
    ):
        assert status == 0, printed[-3000:]
