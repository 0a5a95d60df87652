"""examples/embedding/fsdp_loop.py: FSDP2 on two ranks, beside the textbook loss on one."""

from pathlib import Path

import pytest
import torch
from forked import run_forked
from rank_fsdp_loop import RATE, STEPS, batch
from tiny import make_model

EXAMPLE = Path(__file__).parents[2] / "examples" / "embedding" / "fsdp_loop.py"


def padded_logprobs(model, tokens):
    """Logits of every position, log_softmax, gather; the first token has none."""
    logprob = model(tokens, use_cache=False).logits[:, :-1].log_softmax(-1)
    logprob = logprob.gather(-1, tokens[:, 1:, None])[..., 0]
    return torch.nn.functional.pad(logprob, (1, 0))


def weights_of_one_rank(ends):
    """The weights after the same steps on all rows, and the largest distance of a ratio from 1."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    tokens, mask, advantage = batch(ends)
    advantage = advantage[:, None]
    old_logp = padded_logprobs(model, tokens).detach()
    for _ in range(STEPS):
        ratio = (padded_logprobs(model, tokens) - old_logp).exp()
        surrogate = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
        optimizer.zero_grad()
        ((surrogate * mask).sum() / mask.sum()).backward()
        optimizer.step()
    moved = (ratio - 1).abs()[mask].max().item()
    return dict(model.named_parameters()), moved


@pytest.mark.parametrize("ends", [[9, 5, 7, 4, 8], [9, 5, 7, 0, 0]], ids=["uneven", "empty"])
def test_a_plain_loop_under_fsdp_takes_the_steps_of_one_rank(tmp_path, ends):
    """Ranks have unlike numbers of trained tokens, and in the second case one of them has none."""
    outcomes = run_forked(2, "rank_fsdp_loop", str(EXAMPLE), ends, str(tmp_path))
    assert [status for status, _ in outcomes] == [0, 0], outcomes
    found = torch.load(tmp_path / "weights.pt")
    expected, moved = weights_of_one_rank(ends)
    assert moved > 0.28  # beyond the clip
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight.detach(), rtol=1e-9, atol=1e-12)
