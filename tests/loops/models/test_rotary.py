"""Rotary frequencies that depend on the length: each sequence has those of transformers for it
alone.
"""

import copy

import pytest
import torch
from burnish.data import Example
from burnish.loops.batch import collate
from burnish.loops.models.policy import Policy
from tiny import VOCABULARY, make_model
from transformers import AutoModelForCausalLM, Phi3Config

LIMIT = 12
LENGTHS = (5, 30, 9, 13, 12, 22)


def longrope():
    torch.manual_seed(0)
    scaling = {
        "rope_type": "longrope",
        "short_factor": [1.0, 1.5, 2.0, 2.5],
        "long_factor": [3.0, 5.0, 7.0, 9.0],
    }
    sizes = dict(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        pad_token_id=0,
    )
    limits = dict(max_position_embeddings=64, original_max_position_embeddings=LIMIT)
    config = Phi3Config(
        vocab_size=VOCABULARY, **sizes, **limits, rope_parameters=scaling | {"rope_theta": 100.0}
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0) if parameter.ndim > 1 else None
    return model


def dynamic(kind="llama", scaling=None, **changes):
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0}
    return make_model(
        kind, max_position_embeddings=LIMIT, rope_parameters=scaling or rope, **changes
    )


def by_layers():
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0}
    plain = {"rope_type": "default", "rope_theta": 100.0}
    return dynamic(
        "gemma3", {"full_attention": rope, "sliding_attention": plain}, sliding_window=64
    )


def example(length, completions=1):
    """``length`` tokens are read: the last of the longest completion is only predicted."""
    tokens = [(7 * length + 5 * place) % (VOCABULARY - 3) + 3 for place in range(length + 1)]
    answers = [tokens[3:], *[tokens[5:8]] * (completions - 1)]
    return Example(tokens[:3], answers, [[True] * len(answer) for answer in answers])


def alone(fresh, text):
    """By transformers, of each completion to itself."""
    logps = []
    for completion in text.completions:
        ids = torch.tensor([text.prompt + completion])
        with torch.no_grad():
            logits = copy.deepcopy(fresh)(ids[:, :-1], use_cache=False).logits
        logps.append(
            logits[0].log_softmax(-1).gather(1, ids[0, 1:, None])[len(text.prompt) - 1 :, 0]
        )
    return torch.cat(logps)


@pytest.mark.parametrize(
    ("make", "layout"),
    [(make, layout) for make in (longrope, dynamic) for layout in ("padded", "packed", "shared")]
    + [(by_layers, "packed"), (by_layers, "padded")],
)
@pytest.mark.parametrize("completions", [1, 2])
def test_neighbors_and_earlier_batches_change_no_frequency(make, layout, completions):
    fresh = make()
    policy, examples = (
        Policy(copy.deepcopy(fresh), layout=layout),
        [example(n, completions) for n in LENGTHS],
    )
    expected = torch.cat([alone(fresh, each) for each in examples])
    for batch in (examples, examples[::-1], examples[:1], examples):
        logprob = policy(collate(batch)).logprob
        torch.testing.assert_close(
            logprob, torch.cat([alone(fresh, each) for each in batch]), rtol=0, atol=1e-5
        )
    torch.testing.assert_close(logprob, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("make", [longrope, dynamic])
def test_under_autocast_neighbors_cost_no_more_than_its_rounding(make):
    examples, exact = [example(n) for n in LENGTHS], make()
    expected, fresh = torch.cat([alone(exact, each) for each in examples]), make().float()
    policy = Policy(copy.deepcopy(fresh), layout="packed")
    with torch.autocast("cpu", torch.bfloat16):
        rounding = (torch.cat([alone(fresh, each) for each in examples]) - expected).abs()
        found = (policy(collate(examples)).logprob - expected).abs()
    assert found.mean() <= 1.5 * rounding.mean() and found.max() <= 2 * rounding.max()


def test_short_sequences_keep_their_shared_prompt():
    policy = Policy(longrope())
    assert policy.layout == "shared"
    assert policy.arranged([example(LIMIT - 1, 2)], "shared").attention_mask is not None
    assert (
        policy.arranged([example(LIMIT - 1, 2), example(LIMIT + 1, 2)], "shared").attention_mask
        is None
    )


def test_a_copy_of_a_model_rotates_by_itself():
    policy = Policy(longrope())
    copied = copy.deepcopy(policy)
    rotary = copied.plain.base_model.rotary_emb
    assert rotary.forward.args[0] is rotary


def test_a_token_that_is_decoded_has_the_frequencies_of_its_own_length():
    policy = Policy(longrope())
    rotary, x = policy.plain.base_model.rotary_emb, torch.zeros(1, 1, 32, dtype=torch.float64)
    alone = {place: rotary(x, torch.tensor([[place]]))[0] for place in (4, LIMIT, LIMIT + 9)}
    together = rotary(x, torch.tensor([[place] for place in alone]))[0]
    assert torch.equal(together, torch.cat(list(alone.values())))
    assert not torch.equal(rotary(x, torch.tensor([[*range(LIMIT + 1)]]))[0][:, 4:5], alone[4])
