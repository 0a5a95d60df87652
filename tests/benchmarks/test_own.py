"""Somebody's own functions in the harness, from Python and from the command line; and what it
tells.
"""

import pytest
import torch
from burnish.benchmarks import harness
from burnish.benchmarks.__main__ import main
from burnish.benchmarks.kernels import OPERATION
from burnish.benchmarks.operation import OWN, Provider
from burnish.benchmarks.own import compare, objective
from burnish.objectives import clipped_surrogate, dpo

QUICK = {"shapes": ["tiny"], "rounds": 1, "seconds": 0.0}
ASKED = {**QUICK, "outputs": ["logprob"]}


def mine(hidden, weight, target):
    return -torch.nn.functional.cross_entropy(hidden @ weight.T, target, reduction="none")


def rows_of(report, number=0):
    return {row["provider"]: row for row in report["cases"][number]["rows"]}


def test_a_bare_function_is_held_to_float64_and_timed_beside_ours(capsys):
    report = compare(OPERATION, {"mine": mine}, beside=["burnish-torch"], **ASKED)
    assert [case["pass"] for case in report["cases"]] == ["forward", "train", "frozen"]
    rows = rows_of(report, 1)
    assert {name: row["status"] for name, row in rows.items()} == dict.fromkeys(
        ["naive", "burnish-torch", "mine"], "measured"
    )
    assert 0 < rows["mine"]["errors"]["d_weight"] < 1e-5
    assert rows["mine"]["ratio"]["naive"] > 0
    assert OPERATION.name not in OWN
    told = capsys.readouterr().err
    for name in rows:
        assert f"{name}, train: right, to " in told
    assert "train: 3 take turns, 1 rounds" in told


def test_one_measurement_knows_nothing_of_the_functions_of_another():
    compare(OPERATION, {"first": mine}, **ASKED)
    report = compare(OPERATION, {"second": mine}, **ASKED)
    assert {name: row["status"] for name, row in rows_of(report).items()} == {
        "naive": "measured",
        "second": "measured",
    }


def test_a_wrong_function_is_told_and_not_timed(capsys):
    def halved(hidden, weight, target):
        return mine(hidden, weight, target) / 2

    report = compare(OPERATION, {"halved": halved}, passes=["train"], **ASKED)
    row = rows_of(report)["halved"]
    assert row["status"] == "failed" and "seconds" not in row
    assert f"halved, train: {row['reason']}" in capsys.readouterr().err


def test_a_function_that_lacks_an_output_is_told(capsys):
    report = compare(OPERATION, {"mine": mine}, **{**QUICK, "outputs": ["logprob+entropy"]})
    row = rows_of(report)["mine"]
    assert row["status"] == "lacks"
    assert row["reason"] == "gives logprob, and not entropy"
    assert "mine lacks: gives logprob, and not entropy" in capsys.readouterr().out


def test_a_provider_says_what_it_gives():
    def both(hidden, weight, target, outputs):
        logp = (hidden @ weight.T).log_softmax(-1)
        found = {"logprob": logp.gather(1, target[:, None])[:, 0]}
        found["entropy"] = -(logp.exp() * logp).sum(-1)
        return tuple(found[name] for name in outputs)

    provider = Provider("both", both, ("logprob", "entropy"))
    report = compare(OPERATION, {"both": provider}, **{**QUICK, "outputs": ["logprob+entropy"]})
    assert rows_of(report)["both"]["status"] == "measured"


def test_the_command_tells_of_a_lack_and_divides_by_the_fastest(tmp_path, monkeypatch, capsys):
    source = "import torch\ndef mine(hidden, weight, target):\n"
    source += "    logp = (hidden @ weight.T).log_softmax(-1)\n"
    source += "    return logp.gather(1, target[:, None])[:, 0]\n"
    (tmp_path / "own_heads.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    providers = ["own_heads:mine", "burnish-torch"]
    flags = ["--shapes", "tiny", "--rounds", "1", "--no-memory", "--passes", "forward"]
    outputs = ["--outputs", "logprob", "logprob+entropy"]
    command = ["kernels", "--providers", *providers, *flags, *outputs]
    assert main([*command, "--output", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    lack = "own_heads:mine lacks: gives logprob, and not entropy; a Provider says in `gives`"
    assert lack in printed.replace("\n", " ")
    assert "÷naive" not in printed
    assert "÷burnish-torch" in printed
    assert (tmp_path / "out" / "kernels.json").exists()


def measured(name, *rounds):
    seconds = {"median": sorted(rounds)[len(rounds) // 2], "rounds": list(rounds)}
    return {"provider": name, "status": "measured", "seconds": seconds, "ratio": {}}


def test_times_are_divided_by_the_fastest_only_where_the_baseline_was_not_measured():
    rows = [measured("slow", 4.0, 9.0), measured("fast", 2.0, 3.0)]
    rows.append({"provider": "wrong", "status": "failed"})
    case = {"baseline": "naive", "rows": rows}
    harness.compare_with_fastest(case)
    assert case["baseline"] == "fast"
    assert rows[0]["ratio"] == {"fast": 2.5}  # the median of 4/2 and 9/3
    assert rows[1]["ratio"] == {"fast": 1.0}
    with_baseline = {"baseline": "slow", "rows": rows}
    harness.compare_with_fastest(with_baseline)
    assert with_baseline["baseline"] == "slow"
    none = {"baseline": "naive", "rows": rows[2:]}
    harness.compare_with_fastest(none)
    assert none["baseline"] == "naive"


@pytest.mark.parametrize(
    ("load", "cores", "warned"),
    [(0.6, 2, True), (0.5, 2, False), (3.0, 16, False), (5.0, 16, True), (None, 2, False)],
)
def test_a_busy_machine_is_told(load, cores, warned, capsys):
    harness.warn_if_busy(load, cores)
    assert ("this machine is busy" in capsys.readouterr().err) == warned


def surrogate(logp, old_logp, advantage, clip_low, clip_high):
    ratio = (logp - old_logp).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - clip_low, 1 + clip_high) * advantage)


def test_an_objective_of_ones_own_is_held_to_its_definition():
    operation = objective(clipped_surrogate, clip_low=0.2, clip_high=0.28)
    quick = {"shapes": ["1000"], "rounds": 1}
    report = compare(operation, {"mine": surrogate}, **quick)
    assert [case["pass"] for case in report["cases"]] == ["forward", "train"]
    rows = rows_of(report, 1)
    assert rows["mine"]["status"] == "measured"
    assert rows["mine"]["errors"]["d_logp"] < 1e-6
    assert rows["mine"]["ratio"]["clipped_surrogate"] > 0
    unclipped = compare(
        operation, {"other": lambda x, old, a, **clips: -(x - old).exp() * a}, **quick
    )
    assert rows_of(unclipped)["other"]["status"] == "failed"


def test_an_objective_of_pairs_draws_what_it_is_told():
    def draw(count, random):
        return {
            name: -torch.rand(count, generator=random, device=random.device)
            for name in ("chosen", "rejected", "ref_chosen", "ref_rejected")
        }

    operation = objective(dpo, trained=("chosen", "rejected"), draw=draw, beta=0.1)
    report = compare(operation, {"again": dpo}, shapes=["100"], rounds=1)
    assert {"d_chosen", "d_rejected"} <= rows_of(report, 1)["again"]["errors"].keys()


def test_a_flag_or_a_tensor_that_there_is_none_is_refused():
    with pytest.raises(ValueError, match="compare: no flag 'round'; there are "):
        compare(OPERATION, {"mine": mine}, round=2)
    with pytest.raises(ValueError, match="clipped_surrogate has no tensor 'x'; it has logp, old"):
        objective(clipped_surrogate, trained=("x",))
