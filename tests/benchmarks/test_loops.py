"""`burnish bench loops`: what it makes of the losses, seconds and memory of each process."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from burnish.benchmarks.__main__ import main
from burnish.benchmarks.peer import trainers
from burnish.benchmarks.peer.trainers import RECIPES
from matplotlib.image import imread


def measured(factor, steps, **rest):
    seconds = {
        name: [scale * factor] * (steps - 1)
        for name, scale in (("seconds", 8), ("processor_seconds", 15))
    }
    return {
        "losses": [0.0] * steps,
        "full_length": True,
        "imported_mib": 100,
        "peak_mib": 1000 * factor,
        **seconds,
        **rest,
    }


@pytest.fixture
def processes(monkeypatch):
    """Stands in for training: losses, seconds and memory by provider; returns the order in which
    they ran.
    """
    order = []
    factors = {
        "trl": 1.0,
        "trl without checkpointing": 0.7,
        "burnish": 0.25,
        "burnish precompute": 0.2,
    }

    def run(recipe, provider, model, data, batch_size, steps, dtype="float32", samples=None):
        assert samples is None
        assert len(data.read_text().splitlines()) == steps * batch_size
        order.append((recipe, provider, model.name))
        off = 1e-3 if provider == "burnish precompute" else 1e-6 if provider == "burnish" else 0.0
        if provider == "trl" and dtype == "bfloat16":
            off = 6e-4
        return measured(factors[provider], steps, losses=[0.6 + off] * steps)

    monkeypatch.setattr(trainers, "in_own_process", run)
    return order


def bench(directory, *arguments):
    fixed = [
        "--steps",
        "3",
        "--batch_size",
        "2",
        "--model",
        "some/model",
        "--output",
        str(directory),
    ]
    return main(["loops", *fixed, *arguments])


def test_time_and_memory_are_shares_of_the_peers(processes, tmp_path, capsys):
    assert bench(tmp_path, "--providers", "burnish") == 0
    # the peer in any case, in turns
    assert processes == [("dpo", "trl", "model"), ("dpo", "burnish", "model")] * 2
    row = ["burnish", "1e-06", "2", "2–2", "0.25", "3.75", "0.25", "262", "0.25", "105"]
    assert row in [line.split() for line in capsys.readouterr().out.splitlines()]
    assert f"| {' | '.join(row)} |" in (tmp_path / "loops.md").read_text().splitlines()
    report = json.loads((tmp_path / "loops.json").read_text())
    assert (
        report["figures"]["burnish"]["seconds_median"] == 2.0
        and report["figures"]["burnish"]["peak_mib"] == 250.0
    )
    assert report["load"].keys() == {"before", "after"} and report["recipe"] == "dpo"
    assert imread(tmp_path / "loops.png").size > 0


def test_a_side_whose_losses_are_not_the_peers_has_failed_and_is_not_compared(
    processes, tmp_path, capsys
):
    assert bench(tmp_path) == 1
    assert ["burnish", "precompute", "1e-03", "failed"] in [
        x.split() for x in capsys.readouterr().out.splitlines()
    ]


def test_in_bfloat16_ours_may_be_twice_as_far_from_the_peer_in_float32_as_the_peer_itself(
    processes, tmp_path
):
    assert bench(tmp_path, "--dtype", "bfloat16") == 0
    far = {
        "trl": 6e-4,
        "trl without checkpointing": 0.0,
        "burnish": 1e-6,
        "burnish precompute": 1e-3,
    }
    assert differences(tmp_path) == {
        name: (pytest.approx(each), True) for name, each in far.items()
    }
    assert processes[-1] == ("dpo", "trl", "model")
    assert bench(tmp_path, "--dtype", "bfloat16", "--providers", "burnish precompute") == 0
    assert ", bfloat16, 3 steps" in (tmp_path / "loops.md").read_text()


@pytest.fixture
def samplers(monkeypatch):
    """Stands in for processes of grpo, by provider: the gradient of a step, and whether completions
    are whole.
    """
    gradients = {"trl": [3.0, 4.0], "burnish": [3.0, 4.00001]}
    gradients |= {f"burnish {how}": [3.0, 4.0] for how in ("by groups", "with checkpointing")}
    cut = {name: True for name in (*gradients, "trl without checkpointing")}

    asked = []

    def run(recipe, provider, model, data, batch_size, steps, dtype, samples, *evidence):
        asked.append(dict(samples))
        for directory in evidence:
            name = "trl in bfloat16" if (provider, dtype) == ("trl", "bfloat16") else provider
            torch.save(torch.tensor(gradients[name]), directory / f"{provider}.{dtype}.pt")
            if provider != "trl":
                (directory / "samples.jsonl").touch()
            else:
                # ours draw before the peer is given the completions
                assert any(directory.glob("samples.jsonl"))
        return measured(1.0, steps, full_length=cut[provider])

    monkeypatch.setattr(trainers, "in_own_process", run)
    grpo = replace(RECIPES["grpo"], model=lambda given, directory: given, rows=lambda pairs: pairs)
    monkeypatch.setitem(RECIPES, "grpo", grpo)
    return SimpleNamespace(gradients=gradients, cut=cut, asked=asked)


def differences(directory):
    figures = json.loads((directory / "loops.json").read_text())["figures"]
    return {name: (figure["difference"], figure["agrees"]) for name, figure in figures.items()}


def test_recipes_that_sample_agree_by_the_gradient_of_one_step_on_the_same_completions(
    samplers, tmp_path
):
    assert bench(tmp_path, "--recipe", "grpo") == 0
    assert differences(tmp_path) == {
        "trl": (0.0, True),
        "trl without checkpointing": (None, True),
        "burnish": (pytest.approx(2e-6, rel=0.1), True),
        "burnish by groups": (0.0, True),
        "burnish with checkpointing": (0.0, True),
    }
    samplers.gradients["burnish"][1] = 4.0003
    assert bench(tmp_path, "--recipe", "grpo") == 1
    assert differences(tmp_path)["burnish"] == (pytest.approx(6e-5, rel=0.1), False)


def test_both_sides_sample_as_much_as_is_asked_for(samplers, tmp_path):
    assert bench(tmp_path, "--recipe", "grpo", "--providers", "burnish") == 0
    assert bench(tmp_path, "--recipe", "grpo", "--group_size", "4", "--max_tokens", "32") == 0
    sizes = [{"group": 8, "tokens": 64}, {"group": 4, "tokens": 32}]
    assert samplers.asked[0] == sizes[0]
    assert samplers.asked[-1] == sizes[1]
    assert all(each in sizes for each in samplers.asked)
    assert ", 4 completions of 32 tokens to a prompt" in (tmp_path / "loops.md").read_text()
    assert json.loads((tmp_path / "loops.json").read_text())["answers"] == sizes[1]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (
            ("--group_size", "4"),
            "--recipe dpo samples nothing; leave them out, or take --recipe grpo",
        ),
        (("--recipe", "grpo", "--group_size", "1"), "--group_size must be >= 2, --max_tokens >= 1"),
        (("--recipe", "grpo", "--max_tokens", "0"), "--group_size must be >= 2, --max_tokens >= 1"),
    ],
)
def test_sizes_of_samples_that_can_not_be_are_refused(
    processes, tmp_path, capsys, arguments, problem
):
    assert bench(tmp_path, *arguments) == 2
    assert problem in capsys.readouterr().err
    assert processes == []


@pytest.mark.parametrize(("far", "agrees"), [(4.0002, True), (4.0001, False)])
def test_in_bfloat16_the_gradients_may_be_twice_as_far_as_the_peers(
    samplers, tmp_path, far, agrees
):
    samplers.gradients |= {"trl in bfloat16": [3.0, far], "burnish": [3.0, 4.0003]}
    assert bench(tmp_path, "--recipe", "grpo", "--dtype", "bfloat16") == (0 if agrees else 1)
    assert differences(tmp_path)["burnish"] == (pytest.approx(6e-5, rel=0.1), agrees)
    assert differences(tmp_path)["trl"] == (pytest.approx((far - 4) / 5, rel=0.1), True)


def test_a_side_that_draws_fewer_tokens_than_the_others_has_failed(samplers, tmp_path):
    samplers.cut["trl without checkpointing"] = False
    assert bench(tmp_path, "--recipe", "grpo") == 1
    assert [agrees for _, agrees in differences(tmp_path).values()] == [
        True,
        False,
        True,
        True,
        True,
    ]


def test_a_mistake_is_named_with_the_fix(processes, tmp_path, capsys):
    assert bench(tmp_path, "--providers", "burnisch") == 2
    assert "no provider 'burnisch', did you mean 'burnish'?" in capsys.readouterr().err
    assert bench(tmp_path, "--recipe", "sft", "--providers", "burnish precompute") == 2
    assert "no provider 'burnish precompute'" in capsys.readouterr().err
    assert bench(tmp_path, "--rounds", "0") == 2
    assert "--rounds" in capsys.readouterr().err
    assert processes == []


def test_both_sides_are_given_the_same_completions():
    pairs = [
        {"prompt": [f"{i}?"], "chosen": [f"right {i}"], "rejected": [f"wrong {i}"]}
        for i in range(3)
    ]  # as conversations, of which only the order of the parts matters here
    assert list(RECIPES["dpo"].rows(iter(pairs))) == pairs
    assert [row["completion"] for row in RECIPES["sft"].rows(iter(pairs))] == [
        ["right 0"],
        ["right 1"],
        ["right 2"],
    ]
    kto = list(RECIPES["kto"].rows(iter(pairs)))
    assert [(row["completion"], row["label"]) for row in kto] == [
        (["right 0"], True),
        (["wrong 1"], False),
        (["right 2"], True),
    ]
