"""`burnish plan`: the memory of a run is known without a weight, and nothing of it is left
behind.
"""

import dataclasses
import os
import shutil

import pytest
import torch
from burnish.benchmarks.experiments.memory import configured, measured_peak
from burnish.loops.cli import main
from burnish.loops.cli.plan import alternatives, gpus_of
from burnish.loops.cli.rehearsal import rehearse
from burnish.loops.models.simulation import simulate
from forked import run_forked
from grids import slow
from tiny import save_model, sums, write_rows
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

PAIRS = sums(24)
ROWS = {
    "pairs": PAIRS,
    "texts": [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in PAIRS],
    "prompts": [
        {"prompt": pair["prompt"], "answer": pair["chosen"][0]["content"]} for pair in PAIRS
    ],
    "long": [{"prompt": "1+1=" * 25, "completion": "2" * 380}] * 4,
    "marked": [
        {"prompt": p["prompt"], "completion": p["chosen"], "label": i % 2 == 0}
        for i, p in enumerate(PAIRS)
    ],
}
ONLINE = {
    "rewards": {"varied": {"function": "burnish.benchmarks.experiments.memory:varied"}},
    "prompts_per_rollout": 3,
    "max_tokens": 24,
    "show_every": 0,
}
BFLOAT16 = {"dtype": "bfloat16"}
RUNS = {
    "sft": ("sft", "texts", {"micro_tokens": 150}),
    "sft, bfloat16 weights": (
        "sft",
        "texts",
        {**BFLOAT16, "weights_dtype": "bfloat16", "optimizer": "adamw_8bit"},
    ),
    "dpo": ("dpo", "pairs", {}),
    "grpo": ("grpo", "prompts", {**ONLINE, "group_size": 4, "beta": 0.1}),
}
# Each setting that the plan counts in its own way, in some recipe.
MORE = {
    "kto, recomputed": ("kto", "marked", {**BFLOAT16, "gradient_checkpointing": True}),
    "reward, selective": ("reward", "pairs", {"gradient_checkpointing": "selective"}),
    "dpo, precomputed, padded": ("dpo", "pairs", {"reference": "precompute", "layout": "padded"}),
    "dpo, QLoRA": ("dpo", "pairs", {**BFLOAT16, "lora": {"r": 8}, "quantize": "4bit"}),
    "sft, nested QLoRA": (
        "sft",
        "texts",
        {
            "lora": {"r": 8},
            "quantize": "4bit",
            "quantize_kwargs": {"bnb_4bit_use_double_quant": True},
        },
    ),
    "sft, LoRA, float16": ("sft", "texts", {"dtype": "float16", "lora": {"r": 8}}),
    "online_dpo, ahead": ("online_dpo", "prompts", {**ONLINE, "group_size": 2, "max_staleness": 1}),
    "ppo, LoRA": (
        "ppo",
        "prompts",
        {**ONLINE, "group_size": 2, "minibatches": 3, "lora": {"r": 8}},
    ),
}
SHARDED = {
    "sft, long": ("sft", "long", {"batch_size": 1}),
    "dpo, bfloat16, recomputed": ("dpo", "pairs", {**BFLOAT16, "gradient_checkpointing": True}),
    # As many groups on each rank: of three, one rank would have fewer, and its peak would be lower.
    "grpo": ("grpo", "prompts", {**ONLINE, "prompts_per_rollout": 4, "group_size": 4, "beta": 0.1}),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Large enough for its tensors to outweigh those of the data."""
    directory = save_model(tmp_path_factory.mktemp("model"))
    shape = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    ends = {"bos_token_id": 0, "eos_token_id": 1, "max_position_embeddings": 512}
    LlamaForCausalLM(
        LlamaConfig(vocab_size=258, num_key_value_heads=2, **shape, **ends)
    ).save_pretrained(directory)
    return directory


@pytest.fixture
def values(model, tmp_path):
    """``values(kind of rows, **values)`` returns the values of a configuration, by name."""

    def values(kind, **values):
        data = write_rows(tmp_path / "data.jsonl", ROWS[kind])
        where = {
            "model": str(model),
            "data": str(data),
            "output": str(tmp_path / "run"),
            "steps": 2,
        }
        return {**where, **values}

    return values


@pytest.fixture
def settings(values):
    """``settings(recipe, kind of rows, **values)`` returns the function that opens a recipe and its
    configuration.
    """
    return lambda recipe, kind, **fields: configured(recipe, values(kind, **fields))


@pytest.fixture
def flags(settings):
    """``flags(recipe, kind of rows)`` returns the flags of a run."""

    def flags(recipe, kind):
        _, config = settings(recipe, kind, **(ONLINE if kind == "prompts" else {}))
        return [
            word
            for name in ("model", "data", "output")
            for word in (f"--{name}", getattr(config, name))
        ]

    return flags


def within_15_percent(recipe, kind, fields, settings):
    function, config = settings(recipe, kind, **fields)
    predicted = rehearse(function, config).total
    return predicted == pytest.approx(measured_peak(function, config), rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize("run", MORE)
def test_every_recipes_predicted_peak_is_within_15_percent_of_the_allocators(run, settings):
    assert within_15_percent(*MORE[run], settings)


@pytest.mark.parametrize("run", [run if run == "dpo" else slow(run) for run in RUNS])
def test_the_predicted_peak_is_within_15_percent_of_what_the_allocator_counts(run, settings):
    assert within_15_percent(*RUNS[run], settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "setting"),
    [
        ("grpo", "dp_shard_size"),
        ("sft, long", "cp_size"),
        *(("dpo, bfloat16, recomputed", setting) for setting in ("dp_shard_size", "cp_size")),
    ],
)
def test_the_predicted_peak_of_a_rank_with_shards_is_within_15_percent(run, setting, values):
    recipe, kind, fields = SHARDED[run]
    fields = values(kind, **fields, parallel={setting: 2})
    predicted = rehearse(*configured(recipe, fields)).total
    for status, printed in run_forked(2, "rank_measured", recipe, fields):
        assert status == 0, printed
        measured = int(printed.rpartition("measured ")[2].split()[0])
        assert predicted == pytest.approx(measured, rel=0.15)


def test_a_plan_reads_no_weights_and_leaves_nothing_behind(settings, model, tmp_path, monkeypatch):
    weights = model / "model.safetensors"
    held = weights.read_bytes()
    function, config = settings("grpo", "prompts", **ONLINE, group_size=4, beta=0.1)
    before, load, apply = (
        sorted(tmp_path.rglob("*")),
        PreTrainedModel.from_pretrained.__func__,
        torch.nn.Module._apply,
    )
    environment = dict(os.environ)
    weights.write_bytes(b"")
    try:
        assert rehearse(function, config).steps == 2
    finally:
        weights.write_bytes(held)
    assert sorted(tmp_path.rglob("*")) == before
    assert (PreTrainedModel.from_pretrained.__func__, torch.nn.Module._apply) == (load, apply)
    assert torch.zeros(1).item() == 0 and dict(os.environ) == environment


@pytest.mark.slow
def test_memory_is_what_the_settings_make_it(settings):
    whole = rehearse(*settings("dpo", "pairs"))
    weights = 4 * whole.parameters
    assert whole.memory["weights, trained"] == pytest.approx(weights, rel=0.01)
    assert whole.memory["reference"] == pytest.approx(weights, rel=0.01)
    assert whole.memory["optimizer"] == pytest.approx(2 * weights, rel=0.01)
    offloaded = settings("dpo", "pairs", offload_optimizer=True)
    # nothing of it is on the GPU
    assert rehearse(*offloaded, *gpus_of("80GB")).memory["optimizer"] == 0
    assert rehearse(*offloaded).memory == whole.memory
    assert (
        rehearse(*settings("dpo", "pairs", reference="precompute")).memory["reference"]
        < 0.01 * weights
    )
    adapters = rehearse(*settings("dpo", "pairs", lora={"r": 4}))
    assert adapters.memory["weights, frozen"] == pytest.approx(weights, rel=0.01)
    assert adapters.memory["optimizer"] == pytest.approx(8 * adapters.trained, rel=0.01)
    assert adapters.memory["reference"] < 0.01 * weights


@pytest.mark.slow
def test_weights_to_be_saved_are_held_in_the_checkpoints_dtype_but_not_on_a_gpu(settings):
    fields = {
        **BFLOAT16,
        "lora": {"r": 8},
        "quantize": "4bit",
        "gradient_checkpointing": True,
        "micro_tokens": 100,
    }
    run = settings("sft", "texts", **fields)
    on_cpu, on_gpu, unsaved = (
        rehearse(*run),
        rehearse(*run, *gpus_of("80GB")),
        rehearse(run[0], dataclasses.replace(run[1], output=None)),
    )
    held = 4 * (on_cpu.parameters - on_cpu.trained)
    assert held < on_cpu.memory["weights, to be saved"] < 1.1 * held
    assert on_gpu.memory["weights, to be saved"] < 0.2 * held
    assert unsaved.memory["weights, to be saved"] == 0


@pytest.mark.slow
def test_shards_divide_what_a_rank_keeps_and_layers_are_gathered_to_compute(
    settings,
):
    """Eight ranks, of which each has an eighth; in bfloat16 what is trained and kept stays in
    float32.
    """
    fields = {"parallel": {"dp_shard_size": 8}}
    float32, bfloat16 = (
        rehearse(*settings("dpo", "pairs", **fields, **x), *gpus_of("8x80GB"))
        for x in ({}, BFLOAT16)
    )
    kept = 4 * float32.parameters / 8
    for label, size in {"weights, trained": kept, "reference": kept, "optimizer": 2 * kept}.items():
        assert float32.memory[label] == pytest.approx(size, rel=0.02)
    layer = 4 * (float32.parameters - 258 * 256 * 2) / 2
    assert layer < float32.memory["gathered weights"] < 0.9 * 8 * kept
    assert bfloat16.memory["gathered weights"] < 0.65 * float32.memory["gathered weights"]
    assert bfloat16.memory["weights, trained"] == float32.memory["weights, trained"]


@pytest.mark.slow
def test_two_ranks_that_split_a_long_row_by_columns_hold_half_of_its_activations(
    values, model, tmp_path
):
    # the layers, which are halved, outweigh the logits
    deeper = shutil.copytree(model, tmp_path / "deeper")
    LlamaConfig.from_pretrained(model, num_hidden_layers=3).save_pretrained(deeper)
    fields = values("long", batch_size=1, micro_tokens=None, model=str(deeper))
    alone, halves = (
        rehearse(*configured("sft", {**fields, "parallel": {name: 2}}))
        for name in ("dp_shard_size", "cp_size")
    )
    assert halves.tokens == alone.tokens and halves.largest == alone.largest > 450
    assert 0.5 < halves.memory["activations"] / alone.memory["activations"] < 0.6


@pytest.mark.slow
def test_ranks_share_a_step_and_each_has_buckets_for_the_gradient(settings):
    function, config = settings("sft", "texts", batch_size=24, micro_tokens=200)
    one, four = (
        rehearse(function, config, *gpus_of("1x80GB")),
        rehearse(function, config, *gpus_of("4x80GB")),
    )
    assert four.ranks == 4 and four.tokens == one.tokens
    assert four.micro_batches < one.micro_batches
    assert four.memory["DDP buckets"] == 4 * four.trained and "DDP buckets" not in one.memory


@pytest.mark.slow
def test_sampling_counts_keys_and_values_of_all_that_are_read_together(settings):
    fields = {
        **ONLINE,
        "prompts_per_rollout": 40,
        "max_tokens": 300,
        "group_size": 4,
        "lora": {"r": 1},
    }
    few, many = (
        rehearse(*settings("grpo", "prompts", **fields, micro_tokens=400, cache_bytes=size))
        for size in (10_000_000, 100_000_000)
    )
    assert 80e6 < many.total - few.total < 120e6
    assert many.memory["keys and values"] > 80e6


@pytest.mark.slow
def test_sampling_on_a_cpu_counts_packed_weights(settings, monkeypatch):
    monkeypatch.setattr("burnish.loops.rollouts.local.packed.SMALLEST", 0)
    fields = {**ONLINE, "prompts_per_rollout": 40, "max_tokens": 300, "cache_bytes": 100_000_000}
    function, config = settings("grpo", "prompts", **fields, micro_tokens=400)
    on_cpu = rehearse(function, config)
    on_gpu = rehearse(function, config, *gpus_of("1x80GB"))
    model = LlamaForCausalLM.from_pretrained(config.model)
    linear = [each.weight for each in model.modules() if isinstance(each, torch.nn.Linear)]
    assert on_cpu.memory["weights packed to sample"] == sum(weight.nbytes for weight in linear)
    assert "weights packed to sample" not in on_gpu.memory


@pytest.mark.slow
def test_a_run_that_does_not_fit_is_told_what_would_make_it_smaller(flags, capsys):
    assert main(["plan", "dpo", *flags("dpo", "pairs"), "--gpus", "2x1.02GB"]) == 1
    printed = capsys.readouterr().out
    assert "NOT FIT" in printed and "on 2 ranks" in printed
    saved = {
        line.split()[0]: float(line.split()[2])
        for line in printed.splitlines()
        if line.startswith("  --")
    }
    assert {
        "--dtype",
        "--gradient_checkpointing",
        "--parallel.dp_shard_size",
        "--reference",
        "--lora.r",
    } <= set(saved)
    assert saved["--lora.r"] > saved["--reference"] > 0 and saved["--parallel.dp_shard_size"] > 0


def test_alternatives_are_settings_of_the_recipe_that_are_not_set_already(settings):
    fields = {
        "lora": {"r": 8},
        "gradient_checkpointing": True,
        "micro_tokens": 512,
        "quantize": "4bit",
        **BFLOAT16,
    }
    assert (
        list(alternatives(settings("sft", "texts", **fields, parallel={"dp_shard_size": 8})[1], 8))
        == []
    )
    _, config = settings("sft", "texts")
    assert all(changed != config for _, changed in alternatives(config, 8))
    assert "reference precompute" not in dict(alternatives(config, 8))
    assert "parallel.dp_shard_size 8" in dict(alternatives(config, 8))


@pytest.mark.parametrize(
    ("recipe", "data", "fields", "refused"),
    [
        ("dpo", "pairs", {"ref_model_sync_steps": 4}, {"reference precompute", "lora.r 16"}),
        ("kto", "pairs", {}, {"reference precompute"}),
    ],
)
def test_no_alternative_contradicts_the_other_settings(recipe, data, fields, refused, settings):
    _, config = settings(recipe, data, **fields)
    advised = {name: changed for name, changed in alternatives(config, 8)}
    assert not refused & advised.keys() and "gradient_checkpointing true" in advised
    for changed in advised.values():
        changed.refuse_contradictions()


@pytest.mark.parametrize("words", [["plan", "grpo"], slow(["grpo", "--dry_run", "--gpus", "80GB"])])
def test_a_dry_run_ends_with_the_account_and_no_directory(words, flags, tmp_path, capsys):
    assert (
        main(
            [
                *words,
                *flags("grpo", "prompts"),
                "--rewards",
                "{exact_match: 1.0}",
                "--max_tokens",
                "8",
            ]
        )
        == 0
    )
    printed = capsys.readouterr().out
    assert "24 rows read, 24 kept" in printed and "total" in printed
    assert not (tmp_path / "run").exists()
    assert ("It fits" in printed) == ("80GB" in words)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--rewards", "{exact_mach: 1.0}"], "exact_match"),
        (
            ["--rewards", "{exact_match: 1.0}", "--max_tokens", "600"],
            "do not fit the model's context of 512",
        ),
        (
            ["--rewards", "{exact_match: 1.0}", "--gpus", "many"],
            "wanted number and memory, such as 8x80GB",
        ),
        (
            [
                "--rewards",
                "{exact_match: 1.0}",
                "--gpus",
                "3x80GB",
                "--parallel.dp_shard_size",
                "2",
            ],
            "must divide",
        ),
        (["--rewards", "{exact_match: 1.0}", "--data", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_a_dry_run_finds_the_mistake_that_would_end_the_run(more, message, flags, tmp_path, capsys):
    assert main(["grpo", "--dry_run", *flags("grpo", "prompts"), *more]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_gpus_are_read_with_their_number_and_kind():
    assert gpus_of("8x80GB") == (8, 80 * 10**9)
    assert gpus_of("24GiB") == (1, 24 << 30)
    for wrong in ("8x", "0x80GB", "x80GB", "8xT1000", "80", "0GB"):
        with pytest.raises(ValueError, match="such as 8x80GB"):
            gpus_of(wrong)


def test_a_simulation_counts_what_lives_and_forgets_what_is_freed():
    with simulate() as simulation:
        weight = torch.nn.Parameter(torch.empty(1000, 100))
        part = weight[:10]
        assert simulation.live["others"] == 400_000
        twice = weight * 2
        del twice
        assert simulation.live["others"] == 400_000 and simulation.peak["others"] == 800_000
        del weight
        assert simulation.live["others"] == 400_000  # a view keeps all of it
        del part
        assert simulation.live["others"] == 0


@pytest.mark.parametrize(("gpu", "tensors"), [(True, 0), (False, 5)])
def test_an_8_bit_update_computes_tensors_in_float32_on_a_cpu_alone(gpu, tensors):
    optimizers = pytest.importorskip(
        "bitsandbytes", reason="the extra 'quant' is not installed"
    ).optim
    with simulate(gpu=gpu) as simulation:
        weight = torch.nn.Parameter(torch.empty(1000, 1000))
        optimizer = optimizers.AdamW8bit([weight])
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
        live = simulation.live.total()
        simulation.peak.clear()
        optimizer.step()
        assert simulation.peak.total() == pytest.approx(
            live + tensors * 4_000_000 if tensors else 0, rel=0.01
        )


def test_values_that_decide_are_ordinary_and_masks_of_the_data_cut():
    with simulate():
        x = torch.empty(5) + 1
        assert x.isfinite().all() and not x.isnan().any() and 0 < float(x.sum()) < 1e-6
        assert x[torch.tensor([True, False, True, False, False])].shape == (2,)
        x[torch.tensor([True, False, False, False, False])] = 0.0
        assert torch.arange(3).tolist() == [0, 1, 2]


def test_planning_is_part_of_no_configuration(settings):
    assert "dry_run" not in {
        field.name for field in dataclasses.fields(settings("sft", "texts")[1])
    }
