"""Whole runs whose weights, gradients and optimizer state are in shards end where one process
does.
"""

import functools
import json
import re
import shutil
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from burnish.loops.batch import collate
from burnish.loops.cli import main
from burnish.loops.config import Parallel
from burnish.loops.models.policy import Policy
from burnish.loops.recipes.settings import SFT
from burnish.loops.runs.parallel import check_launcher, check_ranks
from forked import run_forked
from peft import PeftModel
from safetensors.torch import load_file
from sharded import EXACT, SAMPLING, assert_same_end, each_of, runs_on
from shared import found_by_ranks
from split import DISTINCT, FAMILIES, REFUSED
from tiny import make_examples, save_model, sums, write_rows
from transformers import AutoModelForCausalLM

slow, exhaustive = pytest.mark.slow, pytest.mark.exhaustive
QUICK = ("sft", "dpo")
# What is wrapped, gathered or saved in a way of its own; others differ in what a rank does with its
# rows, and end in shards where one process does in test_recipes_resharded. So do four ranks there;
# those that gather and sum in other groups are here: a policy alone and beside its reference or
# teacher, two names of one weight, adapters and a new head.
WRAPPED = ("dpo_adapters", "dpo_adapters_copy", "dpo_tied", "reward_adapters", "distill_top_k")
FOLLOWING = ("dpo_synced", "dpo_averaged")
ROWS = ("kto", "distill", "dpo_precomputed", "orpo", "cpo", "reward", "prm", "grpo")
FOUR, FOUR_REST = ("kto", "distill"), ("sft", "dpo")
PAIRED, PAIRED_REST = (
    ("sft", "dpo", "dpo_tied", "reward_adapters"),
    ("kto", "distill", "dpo_adapters_copy", "grpo"),
)
CASES = [
    *each_of(QUICK, 2, 2),
    *each_of(WRAPPED, 2, 2, marks=slow),
    *each_of(FOLLOWING, 2, 2, marks=slow),
    *each_of(("tpo", "sdpo"), 2, 1, marks=slow),
    *each_of(("sdpo",), 2, 2, marks=slow),
    *each_of(("tpo",), 2, 2, marks=exhaustive),
    *each_of(FOLLOWING, 4, 2, marks=exhaustive),
    *each_of(FOUR, 4, 4, marks=slow),
    *each_of(PAIRED, 4, 2, marks=slow),
    *each_of(ROWS, 2, 2, marks=exhaustive),
    *each_of(FOUR_REST, 4, 4, marks=exhaustive),
    *each_of(PAIRED_REST, 4, 2, marks=exhaustive),
]
# Split over two, in copies or shards. Ranks that split a model have the same rows, whatever these
# are.
SPLIT_CASES = [
    *each_of(("dpo_averaged",), 2, 1, marks=slow),
    *each_of(("sft",), 2, 1),
    *each_of(("kto", "distill", "dpo_tied", "reward", "distill_top_k"), 2, 1, marks=slow),
    *each_of(("sft",), 4, 1, marks=slow),
    *each_of(("dpo_tied", "reward"), 4, 2, marks=slow),
    *each_of(("dpo", "dpo_precomputed", "orpo", "cpo", "prm"), 2, 1, marks=exhaustive),
    *each_of(("dpo", "kto"), 4, 1, marks=exhaustive),
    *each_of(("sft", "dpo", "distill"), 4, 2, marks=exhaustive),
]
# a policy and its reference; a policy
MIXED = [pytest.param("dpo", marks=slow), pytest.param("sft", marks=exhaustive)]
OTHERS = tuple(name for name in FAMILIES if name not in DISTINCT)


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """``trained(names, ranks, shards, tp_size)`` is the directory of the directories of these runs,
    and of what was printed."""

    return partial(runs_on, tmp_path_factory)


@pytest.fixture(scope="session")
def simulated(tmp_path_factory):
    """What one of 64 ranks that don't exist holds and sends, see `simulated.be_rank`."""
    return found_by_ranks(tmp_path_factory, 1, "rank_simulated")


@pytest.fixture(scope="session")
def alone(trained):
    """``alone(name)`` is the directory of this run in one process."""
    return lambda name: trained((name,)) / name


@pytest.mark.parametrize(("name", "names", "ranks", "shards"), CASES)
def test_a_run_in_shards_ends_at_the_weights_and_metrics_of_one_process(
    name, names, ranks, shards, trained, alone
):
    assert_same_end(alone(name), trained(names, ranks, shards) / name)


@pytest.mark.parametrize(("name", "names", "ranks", "shards"), SPLIT_CASES)
def test_a_run_in_slices_ends_at_the_weights_and_metrics_of_one_process(
    name, names, ranks, shards, trained, alone
):
    several = trained(names, ranks, shards, 2)
    assert_same_end(alone(name), several / name)
    size = ranks // shards // 2
    copies = "one copy of the model, " if size == 1 else f"{size} copies of the model, each "
    parts = f"sharded over {shards} and split over 2" if shards > 1 else "split over 2"
    assert f"{ranks} ranks: {copies}{parts}\n" in (several / "printed.txt").read_text()


@pytest.mark.parametrize(
    ("names", "ranks", "shards"),
    [
        (QUICK, 2, 2),
        pytest.param(WRAPPED, 2, 2, marks=slow),
        pytest.param(FOUR, 4, 4, marks=slow),
        pytest.param(PAIRED, 4, 2, marks=slow),
        pytest.param(ROWS, 2, 2, marks=exhaustive),
    ],
)
def test_no_rank_holds_more_than_its_shard_of_any_model_or_gradient(
    names, ranks, shards, trained, alone
):
    several = trained(names, ranks, shards)
    for name in set(names).difference(
        SAMPLING
    ):  # of references and teachers, too; to sample, each rank has a whole copy
        (most,), (held,) = (
            json.loads((run / "most.json").read_text()) for run in (alone(name), several / name)
        )
        assert held <= 1.1 * most / shards, name
    copies = (
        "one copy of the model, sharded"
        if ranks == shards
        else "2 copies of the model, each sharded"
    )
    assert f"{ranks} ranks: {copies} over {shards}\n" in (several / "printed.txt").read_text()


@pytest.mark.parametrize("recipe", MIXED)
def test_autocast_computes_the_same_in_shards_and_saves_the_model_as_it_was_loaded(recipe, trained):
    name = f"{recipe}_bfloat16"
    copies, shards = (
        trained((name,), 2, size) / name / "model/model.safetensors" for size in (1, 2)
    )
    start = load_file(copies.parents[3] / "sharded-start/bfloat16/model.safetensors")
    copies, shards = load_file(copies), load_file(shards)
    assert {weight.dtype for weight in shards.values()} == {torch.bfloat16}
    for key, weight in copies.items():
        moved = (weight - start[key]).double().norm()
        # The order of sums over micro-batches and ranks is another one, which rounding to bfloat16
        # mostly hides.
        assert moved > 0 and (shards[key] - weight).double().norm() <= 0.01 * moved, key


@pytest.mark.parametrize("recipe", MIXED)
@pytest.mark.parametrize(("shards", "tp_size", "bound"), [(2, 1, 1.01), (1, 2, 2.0)])
def test_bfloat16_on_two_ranks_ends_as_near_to_float32_as_in_one_process(
    recipe, shards, tp_size, bound, trained, alone
):
    name = f"{recipe}_bfloat16"
    runs = (alone(f"{recipe}_float32"), alone(name), trained((name,), 2, shards, tp_size) / name)
    exact, alone, together = (load_file(run / "model/model.safetensors") for run in runs)
    assert {weight.dtype for weight in together.values()} == {torch.bfloat16}

    def error(weights):
        return torch.stack([(weights[key] - exact[key]).double().norm() for key in exact]).norm()

    # A slice's part of a sum over features is rounded to bfloat16, too.
    assert 0 < error(together) <= bound * error(alone)


@pytest.mark.slow
def test_adapters_trained_in_shards_load_elsewhere_with_the_log_probs_of_one_process(
    trained, alone
):
    one, two = alone("dpo_adapters"), trained(WRAPPED, 2, 2) / "dpo_adapters"
    batch = collate(make_examples(3))

    def logprobs(model):
        return Policy(model)(batch).logprob

    start = AutoModelForCausalLM.from_pretrained(
        one / "../../sharded-start/start", dtype=torch.float64
    )
    before, expected = (
        logprobs(start),
        logprobs(AutoModelForCausalLM.from_pretrained(one / "model", dtype="auto")),
    )
    assert (expected - before).abs().max() > 1e-3
    loaded = AutoModelForCausalLM.from_pretrained(two / "model", dtype="auto")
    torch.testing.assert_close(logprobs(loaded), expected, rtol=0, atol=EXACT)
    adapted = PeftModel.from_pretrained(start, two / "adapter").double()
    torch.testing.assert_close(logprobs(adapted), expected, rtol=0, atol=1e-6)


@pytest.fixture(scope="session")
def split(tmp_path_factory):
    """``split(families)`` is what two ranks found that split a model of each, see
    `split.be_rank`.
    """
    return functools.cache(partial(found_by_ranks, tmp_path_factory, 2, "split"))


@pytest.mark.parametrize(
    "family", [*DISTINCT, *(pytest.param(family, marks=slow) for family in OTHERS)]
)
def test_a_model_in_slices_has_the_log_probs_and_gradients_of_the_whole(family, split):
    results = split(DISTINCT if family in DISTINCT else OTHERS)["families"][family]
    assert results["largest"] > 1e-3  # of the smallest gradient
    # it computes its norms of heads, and their gradient, in float32
    exact = 1e-6 if family == "gemma3" else EXACT
    for name, difference in results["differences"].items():
        assert difference <= exact * results["largest"], name
    assert results["norm"] == pytest.approx(results["expected_norm"], rel=exact)
    assert results["held"] == results["outside"] + results["split"] / 2 and results["split"] > 0
    # rounding to bfloat16 is not taken for a wrong layout
    assert results["layouts"][0] == results["layouts"][1]


@pytest.mark.parametrize("refused", REFUSED)
def test_what_can_not_be_split_is_refused_in_a_line(refused, split):
    message = split(DISTINCT)["refused"][refused]
    assert message.startswith("ValueError: parallel.tp_size: ") and "\n" not in message
    assert REFUSED[refused][1] in message


def test_no_module_computes_with_weights_that_were_not_gathered_for_it(split):
    call = split(DISTINCT)["refused"]["a call that nothing is gathered for"]
    assert call == "Embedding: FSDP gathers weights for what `shard` was given; call that"


def test_slices_that_the_ranks_or_recipes_cannot_hold_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    ranks, start = (
        SimpleNamespace(num_processes=4, print=print),
        {"model": "", "data": "", "output": ""},
    )
    for parallel, message in (
        (Parallel(1, 3), "must divide the number of ranks, which is 4, got 3"),
        (
            Parallel(4, 2),
            "times dp_shard_size=4, must divide the number of ranks, which is 4, got 8",
        ),
    ):
        with pytest.raises(ValueError, match=r"^parallel\.tp_size: ") as error:
            check_ranks(SFT(**start, parallel=parallel), ranks)
        assert message in str(error.value)


@pytest.mark.slow
def test_a_run_in_slices_goes_on_in_one_process_and_the_other_way_round(trained, tmp_path):
    start, whole, noisy = (
        trained(("sft",)).parent / "sharded-start",
        tmp_path / "whole",
        {"neftune_noise_alpha": 5.0},
    )

    def run(ranks, directory, **orders):
        runs = [("sft", str(directory), {**noisy, **orders})]
        for status, printed in run_forked(ranks, "sharded", str(start), 1, runs, ranks):
            assert status == 0, printed[-3000:]

    run(1, whole)
    for ranks, then in ((2, 1), (1, 2)):
        directory = tmp_path / f"{ranks} to {then}"
        run(ranks, directory, save_every=2)
        shutil.rmtree(directory / "checkpoints/step-00000003")
        shutil.rmtree(directory / "model")
        run(then, directory, resume=True)
        assert_same_end(whole, directory)  # with the same noise


# Configuration files of Accelerate, as TRL carries them; what each is refused by, and the settings
# to use instead.
FSDP = {
    "distributed_type": "FSDP",
    "fsdp_config": {"fsdp_version": 2, "fsdp_cpu_ram_efficient_loading": True},
}
MESH = {"parallelism_config_tp_size": 2, "parallelism_config_cp_size": 1}
CHECKPOINTED = {"fsdp_activation_checkpointing": True, "fsdp_offload_params": True}
CONFIGS = {
    "fsdp2": (FSDP, "FSDP", "--parallel.dp_shard_size 2 --dtype bfloat16"),
    "fsdp2, checkpointed and offloaded": (
        {**FSDP, "fsdp_config": {**FSDP["fsdp_config"], **CHECKPOINTED}},
        "FSDP",
        "--parallel.dp_shard_size 2 --dtype bfloat16 --gradient_checkpointing true --offload_optimizer true; "
        "parameters stay on the GPU",
    ),
    "tensor and context": (
        {**FSDP, "parallelism_config": MESH},
        "(FSDP|PARALLELISM_CONFIG)",
        "--parallel.dp_shard_size 1 --parallel.tp_size 2 --dtype bfloat16",
    ),
}


def config_of_accelerate(directory, content):
    """The flags of its launcher."""
    usual = {"compute_environment": "LOCAL_MACHINE", "mixed_precision": "bf16", "num_processes": 2}
    (directory / "accelerate.json").write_text(json.dumps({**content, **usual}))
    return ["--config_file", str(directory / "accelerate.json"), "-m", "burnish", "sft"]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_of_accelerate_is_refused_with_the_same_in_our_flags(
    name, tmp_path, monkeypatch
):
    content, wrapper, settings = CONFIGS[name]
    arguments, *_ = _validate_launch_command(
        launch_command_parser().parse_args(config_of_accelerate(tmp_path, content))
    )
    for variable, value in (
        prepare_multi_gpu_env(arguments) | {"WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    ).items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(
        ValueError,
        match=rf"^ACCELERATE_USE_{wrapper}: .* shard the model by {re.escape(settings)}$",
    ):
        check_launcher()


def test_a_rank_started_by_accelerate_names_the_precision_of_its_configuration(
    tmp_path, monkeypatch, capsys
):
    data = write_rows(
        tmp_path / "rows.jsonl", [{"messages": pair["prompt"] + pair["chosen"]} for pair in sums(4)]
    )
    paths = [
        "--model",
        str(save_model(tmp_path / "start")),
        "--data",
        str(data),
        "--output",
        str(tmp_path / "run"),
    ]
    flags = config_of_accelerate(tmp_path, {"distributed_type": "MULTI_GPU"})
    arguments, *_ = _validate_launch_command(launch_command_parser().parse_args(flags))
    name = "ACCELERATE_MIXED_PRECISION"
    monkeypatch.setenv(name, prepare_multi_gpu_env(arguments)[name])
    assert main(["sft", *paths]) == 1 and not (tmp_path / "run").exists()
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("burnish sft: dtype: accelerate launch asks for bf16, got float32; ")


@pytest.mark.parametrize(
    ("kind", "instead"),
    [("PARAM", "; parameters stay on the GPU"), ("OPTIMIZER", " --offload_optimizer true")],
)
def test_what_deepspeed_offloads_is_named_where_it_is_refused(kind, instead, monkeypatch):
    for variable, value in (("USE_DEEPSPEED", "true"), (f"DEEPSPEED_OFFLOAD_{kind}_DEVICE", "cpu")):
        monkeypatch.setenv(f"ACCELERATE_{variable}", value)
    for variable, value in (
        ("ACCELERATE_MIXED_PRECISION", "bf16"),
        ("WORLD_SIZE", "8"),
        ("LOCAL_RANK", "0"),
    ):
        monkeypatch.setenv(variable, value)
    settings = f"--parallel.dp_shard_size 8 --dtype bfloat16{instead}$"
    with pytest.raises(
        ValueError, match=f"^ACCELERATE_USE_DEEPSPEED: .* shard the model by {settings}"
    ):
        check_launcher()


def test_the_precision_that_a_launcher_asks_for_is_that_of_the_run(monkeypatch):
    ranks, start = (
        SimpleNamespace(num_processes=1, print=print),
        {"model": "", "data": "", "output": ""},
    )
    agreed = (("bf16", "bfloat16"), ("fp16", "float16"), ("no", "bfloat16"), ("no", "float32"))
    for launched, computed in agreed:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launched)
        check_ranks(SFT(**start, dtype=computed), ranks)
    for launched, computed in (("bf16", "float32"), ("fp16", "float32"), ("fp8", "bfloat16")):
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launched)
        wanted = {"fp16": "float16"}.get(launched, "bfloat16")
        with pytest.raises(
            ValueError,
            match=f"^dtype: accelerate launch asks for {launched}, got {computed}; pass --dtype {wanted}",
        ):
            check_ranks(SFT(**start, dtype=computed), ranks)


def test_one_of_64_ranks_holds_a_64th_and_sends_what_its_units_take(simulated):
    assert simulated["held"] == pytest.approx(simulated["parameters"] / 64)
    assert simulated["gradient"] == pytest.approx(simulated["parameters"] / 64)
    units = simulated["layers"] + 1
    # Each unit is gathered before its forward and its backward pass of each of two micro-batches,
    # and its gradient is reduced after each.
    counts = {"allgather": 4 * units, "reduce_scatter": 2 * units, "allreduce": 0}
    assert simulated["one copy"] == counts
    assert simulated["8 copies"] == counts | {"allreduce": 2 * units}


@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
def test_autocast_gathers_layers_in_the_wanted_dtype_and_sums_gradients_in_float32(
    param_dtype, simulated
):
    # the embeddings always in their own
    gathered = {str(param_dtype or torch.float32), "torch.float32"}
    sent = {"allgather": sorted(gathered), "reduce_scatter": ["torch.float32"]}
    assert simulated[f"autocast {param_dtype}"] == sent
