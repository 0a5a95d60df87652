"""`burnish bench objectives`: ours and the peer's loss code on the same tensors."""

import dataclasses

import pytest
import torch
from burnish.benchmarks.peer import objectives
from burnish.benchmarks.peer.objectives import OPERATION, OURS, PROVIDERS, THEIRS, Tensors

pytest.importorskip("trl", reason="the peer is not installed")


@pytest.fixture(scope="module")
def inputs():
    return OPERATION.make_inputs((8, 100), torch.float64)


@pytest.mark.parametrize("name", OURS)
def test_losses_and_gradients_are_the_peers_in_float64(inputs, name):
    tensors = Tensors(*inputs.tensors.values())
    flat, padded = (x.clone().requires_grad_() for x in (tensors.logp, tensors.padded))
    ours, theirs = (
        OURS[name](tensors._replace(logp=flat)),
        THEIRS[name](tensors._replace(padded=padded)),
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    (mine,), (other,) = torch.autograd.grad(ours, flat), torch.autograd.grad(theirs, padded)
    assert mine.any()
    torch.testing.assert_close(mine, other[tensors.mask], rtol=1e-8, atol=1e-12)


def test_both_layouts_hold_the_same_numbers(inputs):
    t = Tensors(*inputs.tensors.values())
    for flat, padded in ((t.logp, t.padded), (t.old, t.padded_old), (t.ref, t.padded_ref)):
        assert torch.equal(padded[t.mask], flat) and not padded[~t.mask].any()
    assert (
        torch.equal(t.sequence.bincount(), t.length)
        and t.length.sum() == 100
        and t.length.min() >= 1
    )
    assert torch.equal(t.ref_sum, t.padded_ref.sum(1)) and torch.equal(
        t.row_mask[:, 1:], t.mask.long()
    )


def test_both_sides_pass_the_gate(bench):
    report = bench("--providers", "trl", "burnish", "--rounds", "1", benchmark="objectives")
    assert [(case["outputs"][0], case["pass"]) for case in report["cases"]] == [
        (name, kind) for name in OURS for kind in ("forward", "train")
    ]
    rows = [row for case in report["cases"] for row in case["rows"]]
    assert [row for row in rows if row["status"] != "measured"] == [] and len(rows) == 2 * len(
        report["cases"]
    )
    assert {tuple(sorted(row["errors"])) for row in rows if "d_logp" in row["errors"]} == {
        tuple(sorted((name, "d_logp"))) for name in OURS
    }


def test_another_loss_than_the_peers_fails_and_so_does_the_command(bench, monkeypatch):
    monkeypatch.setitem(objectives.OURS, "dpo", lambda t: 1.001 * OURS["ipo"](t))
    report = bench(
        "--providers",
        "trl",
        "burnish",
        "--outputs",
        "dpo",
        "--passes",
        "train",
        benchmark="objectives",
    )
    (case,) = report["cases"]
    assert {row["provider"]: row["status"] for row in case["rows"]} == {
        "trl": "measured",
        "burnish": "failed",
    }
    assert report["status"] == 1


def test_without_the_peer_there_is_nothing_to_hold_them_to(bench, monkeypatch, capsys):
    absent = dataclasses.replace(PROVIDERS["trl"], missing=lambda device: "trl is not installed")
    monkeypatch.setitem(PROVIDERS, "trl", absent)
    arguments = ["objectives", "--shapes", "tiny", "--providers", "burnish", "--device", "cpu"]
    from burnish.benchmarks.__main__ import main

    assert main(arguments) == 2
    assert "trl is not installed, and every provider is held to it" in capsys.readouterr().err


@pytest.mark.parametrize("shape", [(7, 100), (8, 15)])
def test_answers_that_can_not_be_paired_or_have_no_tokens_are_refused(shape):
    with pytest.raises(ValueError, match="an even number of completions, 2 tokens for each"):
        OPERATION.make_inputs(shape, torch.float32)
