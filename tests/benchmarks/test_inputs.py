"""Random hidden states, and those of a real model."""

import pytest
import torch
from burnish.benchmarks.kernels import OPERATION, SPREAD
from burnish.benchmarks.real_model import Unavailable, smollm2


def test_random_inputs_are_the_same_at_every_call_and_reach_the_last_column():
    one, two = (OPERATION.make_inputs((256, 64, 1031), torch.float32) for _ in range(2))
    assert all(
        torch.equal(one.tensors[name], two.tensors[name]) for name in ("hidden", "weight", "target")
    )
    assert one.tensors["target"][-1] == 1030
    assert (one.tensors["hidden"] @ one.tensors["weight"].t()).std().item() == pytest.approx(
        SPREAD, rel=0.05
    )


def test_a_dead_row_has_no_gradient_from_any_output():
    upstream = OPERATION.make_inputs((200, 8, 61), torch.float32, dead_rows=0.8).upstream
    dead = [upstream[output] == 0 for output in ("logprob", "entropy", "logsumexp")]
    assert dead[0].sum() == 160
    assert torch.equal(dead[0], dead[1]) and torch.equal(dead[0], dead[2])


@pytest.mark.slow
def test_real_hidden_states_predict_their_targets():
    try:
        smollm2()
    except Unavailable as reason:
        pytest.skip(str(reason))
    inputs = OPERATION.make_inputs((40, 576, 49152), torch.float32, source="smollm2")
    assert inputs.shape == (40, 576, 49152)
    hidden, weight, target = inputs.tensors.values()
    logp = (hidden @ weight.t()).log_softmax(-1).gather(1, target[:, None])[:, 0]
    assert logp.mean() > -6  # the next token; any other is at −log 49152 = −10.8 or below
    with pytest.raises(
        ValueError, match="smollm2 has width and vocabulary 576x49152, got the shape 64x32x257"
    ):
        OPERATION.make_inputs((64, 32, 257), torch.float32, source="smollm2")
