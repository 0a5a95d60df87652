"""Preference training: what its fields change in the loss, against their definitions on plain
logits.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
from accelerate import Accelerator
from burnish.loops.batch import collate
from burnish.loops.config import Teacher
from burnish.loops.models.policy import Policy
from burnish.loops.recipes.preference import completion_logprob, dpo_losses
from burnish.loops.recipes.settings import DPO
from burnish.loops.runs.reference import frozen_copy
from burnish.loops.train.losses import PAIR_METRICS, Term, compose, outputs_for, policy_tensors
from burnish.objectives import dpo, f_divergence_score, length_regularized_dpo, sequence_sum, tdpo1
from law import EXAMPLES, assert_as_near, make_policy, numbers, one_step
from peer import dpo_trainer_loss
from tiny import make_examples, make_model

COUNT = 4
CONFIG = DPO(model="", data="", output="")


@pytest.fixture
def policy():
    return Policy(make_model("llama"))


@pytest.fixture
def batch():
    return collate(make_examples(COUNT))


def log_softmax_of_answers(policy, batch):
    """[trained tokens of the answer, vocabulary] and their targets, one answer at a time."""
    for example in batch.examples:
        for completion, trained in zip(example.completions, example.trained, strict=True):
            logits = policy.plain(torch.tensor([example.prompt + completion])).logits[0]
            at = [t for t, marked in enumerate(trained) if marked]
            rows = logits.log_softmax(-1)[[len(example.prompt) + t - 1 for t in at]]
            yield rows, torch.tensor([completion[t] for t in at])


def reference(batch):
    return torch.linspace(-4, -1, len(batch.target), dtype=torch.float64)


@pytest.mark.parametrize("alpha", [0.0, 0.3])
def test_ld_alpha_discounts_what_an_answer_says_beyond_the_other(policy, batch, alpha):
    config = replace(CONFIG, ld_alpha=alpha)
    read = policy_tensors(reference=reference, reduce=completion_logprob(config), pairs=True)
    loss, _ = compose({"dpo": Term(partial(dpo, beta=0.1))}, read)(policy, batch)["dpo"]
    now = [
        rows.gather(1, target[:, None])[:, 0]
        for rows, target in log_softmax_of_answers(policy, batch)
    ]
    before = list(reference(batch).split([len(x) for x in now]))
    for pair in range(COUNT):
        chosen, rejected = 2 * pair, 2 * pair + 1
        shared = min(len(now[chosen]), len(now[rejected]))
        tensors = [
            x[i][:shared].sum() + alpha * x[i][shared:].sum()
            for x in (now, before)
            for i in (chosen, rejected)
        ]
        expected, _ = dpo(*(tensor[None] for tensor in tensors), beta=0.1)
        torch.testing.assert_close(loss[pair], expected[0], rtol=1e-6, atol=1e-8)


def test_wpo_weighs_a_pair_by_how_likely_the_policy_is_to_say_it(policy, batch):
    plain = {"dpo": Term(partial(dpo, beta=0.1))}
    weighted = {"dpo": replace(plain["dpo"], factor="wpo")}
    assert (outputs_for(plain), outputs_for(weighted)) == ((), ("log_sum_squares",))
    losses = []
    for terms in (plain, weighted):
        read = policy_tensors(reference=reference, outputs=outputs_for(terms), pairs=True)
        losses.append(compose(terms, read)(policy, batch)["dpo"][0].detach())
    weight = torch.stack(
        [
            (rows.gather(1, target[:, None])[:, 0] - (2 * rows).logsumexp(-1)).mean().exp()
            for rows, target in log_softmax_of_answers(policy, batch)
        ]
    ).detach()
    torch.testing.assert_close(
        losses[1], losses[0] * weight[0::2] * weight[1::2], rtol=1e-5, atol=1e-8
    )


def test_token_level_dpo_reads_the_divergence_of_completions_from_the_reference(policy, batch):
    reference_model = Policy(make_model("llama", seed=1))
    terms = {
        "tdpo1": Term(partial(tdpo1, beta=0.1)),
        "r_dpo": Term(partial(length_regularized_dpo, beta=0.1, alpha=0.02)),
    }
    teacher = partial(reference_model.teacher_outputs, beta=0.0, temperature=1.0)
    read = policy_tensors(reference=frozen_copy(reference_model), teacher=teacher, pairs=True)
    losses = {
        name: loss.detach() for name, (loss, _) in compose(terms, read)(policy, batch).items()
    }
    sums, divergences, lengths = [], [], []
    pairs = zip(
        log_softmax_of_answers(policy, batch),
        log_softmax_of_answers(reference_model, batch),
        strict=True,
    )
    for (now, target), (before, _) in pairs:
        sums.append([x.gather(1, target[:, None]).sum() for x in (now, before)])
        divergences.append((before.exp() * (before - now)).sum())
        lengths.append(float(len(target)))
    for pair in range(COUNT):
        chosen, rejected = 2 * pair, 2 * pair + 1
        h = sums[chosen][0] - sums[chosen][1] - sums[rejected][0] + sums[rejected][1]
        spread = divergences[rejected] - divergences[chosen]
        longer = lengths[chosen] - lengths[rejected]
        expected = [
            -(0.1 * (h - spread)).sigmoid().log(),
            -(0.1 * h + 0.02 * longer).sigmoid().log(),
        ]
        for loss, wanted in zip(losses.values(), expected, strict=True):
            torch.testing.assert_close(loss[pair], wanted, rtol=1e-5, atol=1e-7)


def test_token_level_dpo_wants_a_teacher_and_the_divergence_of_its_paper():
    with pytest.raises(ValueError, match="teacher: distillation needs one"):
        dpo_losses(replace(CONFIG, loss="tdpo1"))
    mix = {"tdpo2": {"alpha": 0.5}}
    wrong = Teacher(model="reference", divergence="reverse_kl")
    with pytest.raises(
        ValueError,
        match=r"^teacher\.divergence: TDPO sums KL\(reference\|\|policy\), wanted forward",
    ):
        dpo_losses(replace(CONFIG, loss=mix, teacher=wrong))
    losses = dpo_losses(replace(CONFIG, loss=mix, teacher=Teacher(model="reference")))
    assert losses["tdpo2"].function.keywords == {"beta": 0.1, "alpha": 0.5}


def test_an_f_divergence_scores_ratios_and_leaves_log_probs_as_they_are(policy, batch):
    score = partial(f_divergence_score, divergence="forward_kl")
    terms = {"dpo": Term(partial(dpo, beta=0.1)), **PAIR_METRICS}
    plain, scored = (
        compose(terms, policy_tensors(reference=reference, score=how, pairs=True))(policy, batch)
        for how in (None, score)
    )
    now, before = (
        sequence_sum(x, batch.sequence, 2 * COUNT)
        for x in (policy(batch).logprob, reference(batch))
    )
    chosen, rejected = (score(now - before)[which::2] for which in (0, 1))
    zero = torch.zeros(COUNT, dtype=torch.float64)
    torch.testing.assert_close(scored["dpo"][0], dpo(chosen, rejected, zero, zero, beta=0.1)[0])
    torch.testing.assert_close(scored["logps/chosen"][0], now[0::2].detach())
    torch.testing.assert_close(plain["logps/chosen"][1]["logps/rejected"], now[1::2].detach())


def test_a_share_of_a_log_prob_above_1_is_refused():
    with pytest.raises(ValueError, match=r"ld_alpha: must be >= 0 and <= 1, got 1\.5"):
        replace(CONFIG, ld_alpha=1.5)


def gradient_of_trl():
    """Of DPOTrainer's loss on the pairs of the law, each answer in a row of its own."""
    policy, reference, batch = make_policy(), make_policy(seed=1), collate(make_examples(EXAMPLES))
    with Accelerator().autocast():
        now, before = (
            torch.stack(
                [
                    rows.gather(1, t[:, None]).sum()
                    for rows, t in log_softmax_of_answers(which, batch)
                ]
            )
            for which in (policy, reference)
        )
        loss = dpo_trainer_loss([now[::2], now[1::2], before[::2].detach(), before[1::2].detach()])
    return torch.cat(
        [gradient.flatten() for gradient in torch.autograd.grad(loss, list(policy.parameters()))]
    )


def test_under_autocast_our_gradient_is_as_near_to_the_exact_one_as_that_of_trl():
    pytest.importorskip("trl", reason="the peer is not installed")
    with numbers(torch.float64):
        exact = one_step("dpo", "padded", None)
        torch.testing.assert_close(exact["gradient"], gradient_of_trl(), rtol=1e-7, atol=1e-9)
    with numbers(torch.bfloat16):
        assert_as_near(one_step("dpo", "shared", 60), gradient_of_trl(), exact)
