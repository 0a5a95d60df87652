"""One number per row decides its token."""

import pytest
import torch
from burnish.loops.rollouts.local import decode as module
from burnish.loops.rollouts.local.decode import DecodeSequence, draw, penalize
from burnish.loops.rollouts.sample import Request, SamplingParams
from transformers import RepetitionPenaltyLogitsProcessor

ALL = SamplingParams(max_tokens=1)
P = torch.tensor([0.1, 0.2, 0.0, 0.3, 0.4], dtype=torch.float64)


def drawn(u, how=ALL, p=P):
    token, logprob = draw(p.log()[None], [u], [how])
    return token.item(), logprob.exp().item()


@pytest.mark.parametrize(
    ("u", "token"),
    [
        (0.0, 0),
        (0.0999, 0),
        (0.1001, 1),
        (0.2999, 1),
        (0.3001, 3),
        (0.5999, 3),
        (0.6001, 4),
        (1 - 2**-53, 4),
    ],
)
def test_the_cumulative_distribution_is_inverted(u, token):
    assert drawn(u) == (token, pytest.approx(P[token].item()))


def test_what_has_no_probability_is_never_drawn():
    p = torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0], dtype=torch.float64)
    assert {drawn(u, p=p)[0] for u in (0.0, 0.25, 0.5, 0.75, 1 - 2**-53)} == {1, 3}


@pytest.mark.parametrize(
    ("how", "left"),
    [
        ({"top_k": 2}, {3: 3 / 7, 4: 4 / 7}),
        ({"top_k": 9}, {0: 0.1, 1: 0.2, 3: 0.3, 4: 0.4}),
        ({"top_p": 0.39}, {4: 1.0}),
        ({"top_p": 0.41}, {3: 3 / 7, 4: 4 / 7}),
        ({"top_p": 1e-9}, {4: 1.0}),
        ({"top_k": 2, "top_p": 0.5}, {4: 1.0}),  # of the two that are left, one makes up 4/7
        ({"top_k": 3, "top_p": 0.77}, {3: 3 / 7, 4: 4 / 7}),
        ({"min_p": 0.8}, {4: 1.0}),
        ({"min_p": 0.7}, {3: 3 / 7, 4: 4 / 7}),
        ({"min_p": 1e-9}, {0: 0.1, 1: 0.2, 3: 0.3, 4: 0.4}),
        ({"min_p": 1.0}, {4: 1.0}),
        # of what min_p leaves, 4/9 are not enough, and 7/9 are
        ({"min_p": 0.45, "top_p": 0.5}, {3: 3 / 7, 4: 4 / 7}),
        ({"min_p": 0.45, "top_p": 0.44}, {4: 1.0}),
        ({"temperature": 0.5, "min_p": 0.5}, {3: 9 / 25, 4: 16 / 25}),  # temperature comes first
        ({"temperature": 0.5}, {0: 1 / 30, 1: 4 / 30, 3: 9 / 30, 4: 16 / 30}),
        ({"temperature": 0.5, "top_p": 0.5}, {4: 1.0}),  # temperature comes first
    ],
    ids=str,
)
def test_min_p_top_k_and_top_p_leave_the_likeliest(how, left):
    found = dict(drawn(u / 200, SamplingParams(max_tokens=1, **how)) for u in range(200))
    assert found == {token: pytest.approx(p) for token, p in left.items()}


def test_repetition_penalty_is_that_of_transformers():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 9, generator=generator, dtype=torch.float64)
    texts = [[1, 2, 1], [0, 8, 12], [3, 3, 4], [5, 6, 7]]  # 12 is beyond what may be drawn
    penalties = (1.5, 0.7, 1.0, 2.0)
    sampling = [SamplingParams(1, repetition_penalty=penalty) for penalty in penalties]
    before = logits.clone()
    found = penalize(logits, list(map(set, texts)), sampling)
    assert torch.equal(logits, before)  # they may be needed again
    for row, (text, penalty) in enumerate(zip(texts, penalties, strict=True)):
        known = torch.tensor([[token for token in text if token < 9]])
        expected = RepetitionPenaltyLogitsProcessor(penalty)(known, logits[row : row + 1].clone())
        torch.testing.assert_close(found[row : row + 1], expected, rtol=0, atol=0)
    assert penalize(logits, texts, [SamplingParams(1)] * 4) is logits


def test_temperature_0_takes_the_likeliest_with_its_log_prob_of_temperature_1():
    for how in ({}, {"top_k": 1}, {"top_p": 0.1}, {"min_p": 0.9}):
        assert drawn(0.0, SamplingParams(max_tokens=1, temperature=0.0, **how)) == (
            4,
            pytest.approx(0.4),
        )


def test_rows_do_not_depend_on_their_company(monkeypatch):
    """Each row has a sampling of its own, and rows beyond what is held at once are drawn in
    parts.
    """
    torch.manual_seed(0)
    logits = torch.randn(12, 50, dtype=torch.float64)
    hows = [SamplingParams(1, t, p, k) for t in (0.0, 0.6, 1.0) for p in (0.7, 1.0) for k in (0, 5)]
    numbers = torch.rand(12).tolist()
    alone = [draw(logits[i : i + 1], numbers[i : i + 1], hows[i : i + 1]) for i in range(12)]
    together = draw(logits, numbers, hows)
    monkeypatch.setattr(module, "_ELEMENTS_CPU", 120)
    for tokens, logprobs in (together, draw(logits, numbers, hows)):
        assert tokens.tolist() == [token.item() for token, _ in alone]
        torch.testing.assert_close(
            logprobs, torch.cat([logprob for _, logprob in alone]), rtol=0, atol=1e-14
        )


def test_half_precision_is_normalized_in_float32():
    logits = torch.randn(3, 1000).bfloat16()
    token, logprob = draw(logits, [0.2, 0.5, 0.9], [ALL] * 3)
    expected = logits.double().log_softmax(-1).gather(1, token[:, None])[:, 0]
    torch.testing.assert_close(logprob.double(), expected, rtol=0, atol=1e-5)


def test_a_longer_completion_begins_with_the_same_numbers():
    def uniforms(count, index=0):
        return DecodeSequence(
            Request(0, [1], [0, 1], SamplingParams(max_tokens=count), key=7), index
        ).uniform

    assert uniforms(100)[:10] == uniforms(10) != uniforms(10, index=1)
    numbers = torch.tensor(uniforms(20_000))
    assert numbers.min() >= 0 and numbers.max() < 1 and abs(numbers.mean() - 0.5) < 0.01
