"""Runs whose rows are split by columns over ranks that compute together end where one process
does.
"""

import functools
import shutil
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from burnish.loops.config import Parallel
from burnish.loops.recipes.settings import SFT
from burnish.loops.runs.parallel import check_launcher, check_ranks
from columns import CASES, REFUSED
from columns import QUICK as QUICK_CASES
from forked import run_forked
from safetensors.torch import load_file
from sharded import EXACT, assert_same_end, each_of, runs_on
from shared import found_by_ranks

slow, exhaustive = pytest.mark.slow, pytest.mark.exhaustive
# Ranks, shards of groups, and ranks of a group: one group; FSDP2 over both of two; two that sum as
# copies do; one with more ranks than heads of keys, of which the last has the last column. What is
# read, wrapped, gathered or saved in its own way is in one of them: others differ in what a rank
# does with its rows.
RUN_CASES = [
    *each_of(("sft", "dpo"), 2, 1, 2),
    *each_of(
        ("dpo_adapters_copy", "dpo_tied", "reward_adapters", "prm", "distill", "distill_top_k"),
        *(2, 1, 2),
        marks=slow,
    ),
    *each_of(("dpo", "reward_adapters"), 4, 2, 2, marks=slow),
    *each_of(("kto",), 4, 1, 2, marks=slow),
    *each_of(("reward",), 4, 1, 4, marks=slow),
    *each_of(
        ("kto", "reward", "dpo_precomputed", "dpo_adapters", "orpo", "cpo"),
        2,
        1,
        2,
        marks=exhaustive,
    ),
    *each_of(
        ("sft", "kto", "reward", "dpo_adapters_copy", "dpo_tied", "distill"),
        4,
        2,
        2,
        marks=exhaustive,
    ),
    *each_of(("sft",), 4, 1, 2, marks=exhaustive),
    *each_of(("dpo",), 4, 1, 4, marks=exhaustive),
]
OTHER_CASES = tuple(case for case in CASES if case not in QUICK_CASES)


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """``trained(names, ranks, shards, cp_size)`` is the directory of the directories of these
    runs.
    """
    return lambda names, ranks=1, shards=1, cp_size=1: runs_on(
        tmp_path_factory, names, ranks, shards, 1, cp_size
    )


@pytest.fixture(scope="session")
def split(tmp_path_factory):
    """``split(cases)`` is what two ranks found that split the rows of a model of each, see
    `columns.be_rank`.
    """
    return functools.cache(partial(found_by_ranks, tmp_path_factory, 2, "columns"))


@pytest.mark.parametrize(("name", "names", "ranks", "shards", "cp_size"), RUN_CASES)
def test_a_run_in_columns_ends_at_the_weights_and_metrics_of_one_process(
    name, names, ranks, shards, cp_size, trained
):
    several = trained(names, ranks, shards, cp_size)
    assert_same_end(trained((name,)) / name, several / name)
    copies = "2 copies of the model, each" if ranks > shards * cp_size else "one copy of the model,"
    line = f"{ranks} ranks: {copies} sharded over {shards * cp_size}, rows split over {cp_size}\n"
    assert line in (several / "printed.txt").read_text()


@pytest.mark.parametrize(
    "case", [*QUICK_CASES, *(pytest.param(case, marks=slow) for case in OTHER_CASES)]
)
def test_a_model_of_columns_has_the_log_probs_and_gradients_of_whole_rows(case, split):
    results = split(QUICK_CASES if case in QUICK_CASES else OTHER_CASES)["cases"][case]
    # Their norms are computed in float32, and so the sums of their gradients over tokens.
    exact = 1e-6 if case.startswith(("gemma", "cohere")) else EXACT
    for name, difference in results["differences"].items():
        assert difference <= exact, name
    assert results["norm"] == pytest.approx(results["expected_norm"], rel=exact)
    assert results["expected_norm"] > 1


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_not_be_split_by_columns_is_refused_in_a_line(case, split):
    message = split(QUICK_CASES)["refused"][case]
    assert message.startswith("ValueError: parallel.cp_size: ") and "\n" not in message
    assert REFUSED[case][1] in message


@pytest.mark.parametrize(
    "recipe", [pytest.param("dpo", marks=slow), pytest.param("sft", marks=exhaustive)]
)
def test_bfloat16_in_columns_ends_as_near_to_float32_as_in_one_process(recipe, trained):
    worlds = ((f"{recipe}_float32",), (f"{recipe}_bfloat16",), (f"{recipe}_bfloat16", 2, 1, 2))
    runs = [trained((name,), *world) / name for name, *world in worlds]
    exact, alone, together = (load_file(run / "model/model.safetensors") for run in runs)
    assert {weight.dtype for weight in together.values()} == {torch.bfloat16}

    def error(weights):
        return torch.stack([(weights[key] - exact[key]).double().norm() for key in exact]).norm()

    assert 0 < error(together) <= 1.01 * error(alone)


@pytest.mark.slow
def test_a_run_in_columns_goes_on_in_one_process_and_the_other_way_round(trained, tmp_path):
    start, whole = trained(("sft",)).parent / "sharded-start", trained(("sft",)) / "sft"

    def run(ranks, directory, **orders):
        runs = [("sft", str(directory), orders)]
        for status, printed in run_forked(ranks, "sharded", str(start), 1, runs, 1, ranks):
            assert status == 0, printed[-3000:]

    for ranks, then in ((2, 1), (1, 2)):
        directory = tmp_path / f"{ranks} to {then}"
        run(ranks, directory, save_every=2)
        shutil.rmtree(directory / "checkpoints/step-00000003")
        shutil.rmtree(directory / "model")
        run(then, directory, resume=True)
        assert_same_end(whole, directory)


def test_columns_that_the_ranks_or_recipes_cannot_hold_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    ranks, start = (
        SimpleNamespace(num_processes=4, print=print),
        {"model": "", "data": "", "output": ""},
    )
    for parallel, message in (
        (Parallel(cp_size=3), "must divide the number of ranks, which is 4, got 3"),
        (
            Parallel(4, cp_size=2),
            "times dp_shard_size=4, must divide the number of ranks, which is 4, got 8",
        ),
    ):
        with pytest.raises(ValueError, match=r"^parallel\.cp_size: ") as error:
            check_ranks(SFT(**start, parallel=parallel), ranks)
        assert message in str(error.value)


def test_what_accelerate_calls_context_or_sequence_parallel_is_named_in_flags(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    for kind in ("CP", "SP"):
        with monkeypatch.context() as patched:
            patched.setenv(f"PARALLELISM_CONFIG_{kind}_SIZE", "4")
            with pytest.raises(
                ValueError, match=r"--parallel\.dp_shard_size 2 --parallel\.cp_size 4$"
            ):
                check_launcher()
