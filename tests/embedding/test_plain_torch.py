"""A plain torch loop: a model of one's own, padded tensors, and from burnish nothing but
functions.
"""

import copy

import torch
from burnish.kernels import Head, linear_logprob
from burnish.objectives import clipped_surrogate, dpo, sequence_sum
from torch import Tensor


class Recurrent(torch.nn.Module):
    """A language model that no library has heard of."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(vocabulary, width)
        self.layers = torch.nn.GRU(width, width, batch_first=True)
        self.head = torch.nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layers(self.embedding(tokens))[0]


def answer_logprobs(model: Recurrent, tokens: Tensor, mask: Tensor) -> Tensor:
    """Log-probabilities of the tokens under the mask, both [rows, length]: flat, row by row,
    without logits.
    """
    here = mask[:, 1:]
    hidden = model(tokens)[:, :-1][here]
    return linear_logprob(
        hidden, Head(model.head.weight, model.head.bias), tokens[:, 1:][here]
    ).logprob


def grpo_loss(
    model: Recurrent, tokens: Tensor, mask: Tensor, old_logprob: Tensor, advantage: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Tokens, mask and old log-probabilities are [rows, length], the advantage is one number per
    row.
    """
    per_token = {"advantage": advantage[:, None], "length": mask.sum(1, keepdim=True)}
    per_token = {name: x.expand_as(mask)[mask] for name, x in per_token.items()}
    logprob = answer_logprobs(model, tokens, mask)
    loss, stats = clipped_surrogate(
        logprob, old_logprob[mask], per_token["advantage"], clip_high=0.28
    )
    return (loss / per_token["length"]).sum() / len(tokens), stats


def dpo_loss(
    model: Recurrent, reference: Recurrent, tokens: Tensor, mask: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """The first half of the rows are the chosen answers, the second half the rejected ones, in the
    same order.
    """
    row = mask.nonzero()[:, 0]
    now = sequence_sum(answer_logprobs(model, tokens, mask), row, len(tokens))
    with torch.no_grad():
        before = sequence_sum(answer_logprobs(reference, tokens, mask), row, len(tokens))
    loss, stats = dpo(*now.chunk(2), *before.chunk(2), beta=0.1)
    return loss.mean(), stats


def train(model, loss, *batch, steps):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        value, stats = loss(model, *batch)
        value.backward()
        optimizer.step()
    return value.item(), stats


# What the examples claim.

ROWS, LENGTH, VOCABULARY = 6, 11, 23


def model_and_rows(seed=0):
    """A model, tokens, and a mask of answers that begin and end anywhere; padding is whatever
    tokens there are.
    """
    torch.manual_seed(seed)
    model = Recurrent(VOCABULARY, 16).double()
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH))
    place = torch.arange(LENGTH)
    mask = (place >= torch.randint(1, 4, (ROWS, 1))) & (place < torch.randint(5, LENGTH, (ROWS, 1)))
    return model, tokens, mask


def padded_logprobs(model, tokens):
    """The textbook way: logits of every position, log_softmax, gather; the first token has none."""
    logprob = model.head(model(tokens)[:, :-1]).log_softmax(-1)
    return torch.nn.functional.pad(logprob.gather(-1, tokens[:, 1:, None])[..., 0], (1, 0))


def gradients(loss, model):
    return torch.autograd.grad(loss, list(model.parameters()))


def test_grpo_equals_its_equation_on_padded_tensors():
    model, tokens, mask = model_and_rows()
    old = padded_logprobs(model, tokens).detach() + 0.3 * torch.randn(
        ROWS, LENGTH, dtype=torch.float64
    )
    advantage = torch.randn(ROWS, dtype=torch.float64)
    ratio, a = (padded_logprobs(model, tokens) - old).exp(), advantage[:, None]
    surrogate = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.28) * a)
    expected = ((surrogate * mask).sum(1) / mask.sum(1)).mean()
    loss, stats = grpo_loss(model, tokens, mask, old, advantage)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(
        gradients(loss, model), gradients(expected, model), rtol=1e-10, atol=1e-14
    )
    assert 0 < stats["clip_ratio/region"].mean() < 1  # the clip is not idle


def test_more_padding_changes_nothing():
    model, tokens, mask = model_and_rows()
    old = padded_logprobs(model, tokens).detach()
    advantage = torch.randn(ROWS, dtype=torch.float64)
    expected = grpo_loss(model, tokens, mask, old, advantage)[0]
    longer = [
        torch.nn.functional.pad(x, (0, 5), value=fill)
        for x, fill in ((tokens, 7), (mask, False), (old, -9.0))
    ]
    torch.testing.assert_close(
        grpo_loss(model, *longer, advantage)[0], expected, rtol=1e-12, atol=0
    )


def test_grpo_makes_good_answers_likelier_and_bad_ones_less_likely():
    model, tokens, mask = model_and_rows()
    old = padded_logprobs(model, tokens).detach()
    advantage = torch.tensor([1.0, -1.0] * (ROWS // 2), dtype=torch.float64)
    train(model, grpo_loss, tokens, mask, old, advantage, steps=10)
    moved = ((padded_logprobs(model, tokens) - old) * mask).sum(1)
    assert (moved * advantage > 0.5).all()


def test_dpo_starts_at_log_2_and_tells_the_answers_apart():
    model, tokens, mask = model_and_rows()
    reference = copy.deepcopy(model)
    start, stats = dpo_loss(model, reference, tokens, mask)
    torch.testing.assert_close(start, torch.tensor(2.0, dtype=torch.float64).log())
    assert not stats["rewards/accuracies"].any()
    end, stats = train(model, dpo_loss, reference, tokens, mask, steps=40)
    assert end < 0.2
    assert stats["rewards/accuracies"].all()
    scores = ((padded_logprobs(model, tokens) - padded_logprobs(reference, tokens)) * mask).sum(1)
    margin = 0.1 * (scores[: ROWS // 2] - scores[ROWS // 2 :])
    expected = -torch.nn.functional.logsigmoid(margin).mean()
    torch.testing.assert_close(
        dpo_loss(model, reference, tokens, mask)[0], expected, rtol=1e-12, atol=0
    )
