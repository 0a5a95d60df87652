"""Launch lines of accelerate, torchrun and deepspeed: what they start is started sharded as they
say, or refused.
"""

import importlib.util
import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from burnish.loops.cli import main
from burnish.loops.cli.launch import names
from burnish.loops.cli.trl import entries, from_command, read
from burnish.loops.recipes import settings_of
from tiny import save_model, sums, write_rows

TRL = importlib.util.find_spec("trl")
SHIPPED = Path(TRL.submodule_search_locations[0], "accelerate_configs") if TRL else Path("nowhere")


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """No ranks were started, no file of accelerate's is on this machine, and none lies in this
    directory.
    """
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


def translated(command):
    """Our fields, the translation and the command, of a pasted line."""
    found = from_command(shlex.split(command))
    ours, left, out = read(found.recipe, settings_of(found.recipe), found.flags, to_run=False)
    assert left == []
    return ours, out, found


def accounted(out):
    return {name for each in (*out.sources.values(), *out.ignored.values()) for name in each} | set(
        out.refused
    )


def flags_of_accelerate():
    from accelerate.commands.launch import launch_command_parser

    for action in launch_command_parser()._actions:
        long = [each for each in action.option_strings if each.startswith("--")]
        if long and long[0] != "--help":
            value = (
                [] if action.nargs == 0 else [str(action.choices[-1]) if action.choices else "2"]
            )
            yield long[0], value


FLAGS = dict(flags_of_accelerate())


def test_the_flags_are_those_of_accelerate():
    assert len(FLAGS) > 120
    assert {
        "--config_file",
        "--use_fsdp",
        "--zero_stage",
        "--mixed_precision",
        "--num_machines",
    } <= FLAGS.keys()


@pytest.mark.parametrize("flag", FLAGS)
def test_every_flag_of_accelerate_launch_is_translated_told_or_refused(flag):
    given = [flag, *FLAGS[flag]]
    for spelled in (given, [flag.replace("_", "-"), *FLAGS[flag]]):
        _, out, _ = translated(
            shlex.join(["accelerate", "launch", *spelled, "a/dpo.py", "--max_steps", "3"])
        )
        name = flag.removeprefix("--")
        assert names()["renamed"].get(name, name) in accounted(out)
        assert not [why for why in out.refused.values() if "no field" in why]


def test_every_flag_of_torchrun_is_translated_told_or_refused():
    from torch.distributed.run import get_args_parser

    for action in get_args_parser()._actions:
        for flag in (
            each for each in action.option_strings if each.startswith("--") and "-" not in each[2:]
        ):
            if flag == "--help":
                continue
            value = [] if action.nargs == 0 else ["2"]
            _, out, _ = translated(
                shlex.join(["torchrun", flag, *value, "dpo.py", "--max_steps", "3"])
            )
            name = names()["renamed"].get(flag.removeprefix("--"), flag.removeprefix("--"))
            assert {name, "num_processes"} & accounted(out), flag


def test_every_key_of_a_file_of_accelerate_is_in_the_table():
    from accelerate.commands.config.config_args import ClusterConfig

    keys = {field for field in ClusterConfig.__dataclass_fields__ if not field.endswith("_config")}
    assert {names()["renamed"].get(key, key) for key in keys} - set(entries("dpo")) == set()


# The files that TRL ships, with what each of them is to make of 4 ranks on one machine.
PRESETS = {
    "zero1": 4,
    "zero2": 4,
    "zero3": 4,
    "fsdp1": 4,
    "fsdp2": 4,
    "multi_gpu": None,
    "single_gpu": None,
}


@pytest.mark.skipif(not SHIPPED.is_dir(), reason="needs TRL")
def test_the_presets_are_those_that_trl_ships():
    assert {path.stem for path in SHIPPED.glob("*.yaml")} == PRESETS.keys()


@pytest.mark.parametrize("by", ["file", "path that is not here", "name of TRL's"])
@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_of_trl_shards_as_it_says(preset, by):
    if by == "file" and not SHIPPED.is_dir():
        pytest.skip("needs TRL")
    named = {
        "file": f"--config_file {SHIPPED}/{preset}.yaml",
        "path that is not here": f"--config_file a/{preset}.yaml",
    }
    command = f"accelerate launch {named.get(by)} --num_processes 4 dpo.py"
    if by == "name of TRL's":
        command = f"trl dpo --accelerate_config {preset} --num_processes 4"
    ours, out, _ = translated(f"{command} --per_device_train_batch_size 2")
    assert out.refused == {}
    assert ours.get("parallel", {}).get("dp_shard_size") == PRESETS[preset]
    assert ours["batch_size"] == 8
    assert ours["dtype"] == "bfloat16"
    assert by != "path that is not here" or any(
        "it is read by its name" in note for note in out.notes
    )


@pytest.mark.parametrize(
    ("file", "shards"),
    [("recipes/accelerate_configs/deepspeed_zero3.yaml", 8), ("ddp.yaml", None), ("fsdp_qlora.yaml", 8),
     ("fsdp.yaml", 8), ("ds-zero2-config.yaml", 8), ("deepspeed_zero_stage_1.yaml", 8)],
)  # fmt: skip
def test_a_file_of_the_handbooks_is_read_by_its_name(file, shards):
    ours, out, _ = translated(
        f"accelerate launch --config_file={file} --num_processes=8 scripts/sft.py --max_steps 3"
    )
    assert out.refused == {}
    assert ours.get("parallel", {}).get("dp_shard_size") == shards


FSDP = "accelerate launch --num_processes 8 --use_fsdp"
DEEPSPEED = "accelerate launch --num_processes 8 --use_deepspeed"
PARALLEL = f"{FSDP} --fsdp_version 2 --use_parallelism_config --parallelism_config_dp_shard_size 2"


@pytest.mark.parametrize(
    ("launcher", "expected"),
    [
        ("accelerate launch --num_processes 8 --multi_gpu", {}),
        (f"{FSDP} --fsdp_version 2", {"parallel": {"dp_shard_size": 8}}),
        (f"{FSDP} --fsdp_sharding_strategy NO_SHARD", {}),
        (f"{FSDP} --fsdp_sharding_strategy 4 --num_machines 2", {"parallel": {"dp_shard_size": 4}}),
        (f"{FSDP} --fsdp_sharding_strategy SHARD_GRAD_OP", {"parallel": {"dp_shard_size": 8}}),
        (f"{FSDP} --fsdp_activation_checkpointing true",
         {"parallel": {"dp_shard_size": 8}, "gradient_checkpointing": True}),
        (f"{FSDP} --fsdp_activation_checkpointing false", {"parallel": {"dp_shard_size": 8}}),
        (f"{DEEPSPEED} --zero_stage 3", {"parallel": {"dp_shard_size": 8}}),
        (DEEPSPEED, {"parallel": {"dp_shard_size": 8}}),  # stage 2, accelerate's default
        (f"{DEEPSPEED} --zero_stage 0", {}),
        (f"{DEEPSPEED} --offload_optimizer_device cpu", {"parallel": {"dp_shard_size": 8}, "offload_optimizer": True}),
        (f"{PARALLEL} --parallelism_config_dp_replicate_size 4", {"parallel": {"dp_shard_size": 2}}),
        (f"{PARALLEL} --parallelism_config_tp_size 4", {"parallel": {"dp_shard_size": 2, "tp_size": 4}}),
        (f"{PARALLEL} --parallelism_config_cp_size 2 --parallelism_config_sp_size 2",
         {"parallel": {"dp_shard_size": 2, "cp_size": 4}}),
        ("accelerate launch --num_processes 8 --mixed_precision bf16", {"dtype": "bfloat16"}),
        ("accelerate launch --num_processes 8 --mixed_precision fp16", {"dtype": "float16"}),
    ],
)  # fmt: skip
def test_flags_of_a_launcher_shard_as_they_say(launcher, expected):
    ours, out, _ = translated(f"{launcher} dpo.py --max_steps 3")
    assert out.refused == {}
    assert ours == {"steps": 3, "batch_size": 64, **expected}


@pytest.mark.parametrize(
    ("command", "name", "why"),
    [
        ("accelerate launch --use_fsdp dpo.py", "use_fsdp", "nothing says how many there are; add --num_processes"),
        ("accelerate launch --config_file mine.yaml dpo.py", "accelerate_config", "there is no mine.yaml here"),
        ("accelerate launch --config_file zero3_offload.yaml dpo.py", "accelerate_config", "its name is none of zero1"),
        (f"{FSDP} --fsdp_offload_params true dpo.py", "fsdp_offload_params", "parameters stay on the GPU"),
        (f"{FSDP} --fsdp_sharding_strategy ODD dpo.py", "fsdp_sharding_strategy", "'ODD' is no way to shard"),
        (f"{DEEPSPEED} --offload_param_device cpu dpo.py", "offload_param_device", "parameters stay on the GPU"),
        (f"{DEEPSPEED} --offload_optimizer_device nvme dpo.py", "offload_optimizer_device", "not to nvme"),
        (f"{DEEPSPEED} --deepspeed_hostfile h dpo.py", "deepspeed_hostfile", "ranks are started by torchrun"),
        (f"{PARALLEL} dpo.py", "use_parallelism_config", "its sizes make 2 ranks, and 8 are started"),
        ("accelerate launch --use_megatron_lm dpo.py", "use_megatron_lm", "Megatron-LM is not used"),
        ("accelerate launch --tpu dpo.py", "tpu", "no TPUs"),
        ("accelerate launch --dynamo_backend inductor dpo.py", "dynamo_backend", "uncompiled"),
        ("accelerate launch --mixed_precision fp8 dpo.py", "mixed_precision", "there is no fp8"),
        ("accelerate launch --num_processes 8 --no_such_flag 1 dpo.py", "no_such_flag", "no field 'no_such_flag'"),
    ],
)  # fmt: skip
def test_what_a_launch_line_asks_for_in_vain_is_refused_in_a_sentence(command, name, why, capsys):
    assert main(["translate", *shlex.split(command), "--beta", "0.2"]) == 1
    refused = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("# refused: ")
    ]
    assert any(name in line and why in line for line in refused), refused


STAGE_3 = {
    "zero_optimization": {"stage": 3, "overlap_comm": True},
    "bf16": {"enabled": True},
    "gradient_clipping": "auto",
}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"fsdp": "full_shard auto_wrap"}, {"parallel": {"dp_shard_size": 4}}),
        ({"fsdp": ["full_shard"], "fsdp_config": {"version": 2, "activation_checkpointing": True}},
         {"parallel": {"dp_shard_size": 4}, "gradient_checkpointing": True}),
        ({"fsdp": True, "fsdp_config": {"reshard_after_forward": True}}, {"parallel": {"dp_shard_size": 4}}),
        ({"fsdp": "", "fsdp_config": None, "deepspeed": None}, {}),
        ({"deepspeed": STAGE_3}, {"parallel": {"dp_shard_size": 4}, "dtype": "bfloat16"}),
        ({"deepspeed": "ds.json"}, {"parallel": {"dp_shard_size": 4}, "dtype": "bfloat16"}),
        ({"deepspeed": "nowhere/zero3.json"}, {"parallel": {"dp_shard_size": 4}, "dtype": "bfloat16"}),
        ({"deepspeed": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}},
         {"parallel": {"dp_shard_size": 4}, "offload_optimizer": True}),
        ({"deepspeed": {"train_batch_size": "auto"}}, {}),  # no stage is stage 0
    ],
)  # fmt: skip
def test_keys_of_trl_shard_over_the_ranks_that_were_started(keys, expected, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    (tmp_path / "ds.json").write_text(json.dumps(STAGE_3))
    (tmp_path / "trl.yaml").write_text(json.dumps(keys))
    ours, _, out = read("dpo", settings_of("dpo"), ["--config", "trl.yaml"])
    assert out.refused == {}
    assert ours == expected
    monkeypatch.delenv("WORLD_SIZE")
    # over one rank
    assert "parallel" not in read("dpo", settings_of("dpo"), ["--config", "trl.yaml"])[0]


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"fsdp": "full_shard offload"}, "fsdp_offload_params: parameters stay on the GPU"),
        ({"fsdp": "full_shards"}, "fsdp: 'full_shards' is none of full_shard"),
        (
            {"fsdp": True, "fsdp_config": {"xla": True}},
            "fsdp_xla: there are GPUs and CPUs here, no TPUs",
        ),
        (
            {"deepspeed": "nowhere.json"},
            "deepspeed: there is no nowhere.json here, and its name says no stage",
        ),
        (
            {"deepspeed": {"sparse_attention": {}}},
            "deepspeed: sparse_attention has no equivalent here",
        ),
        (
            {"deepspeed": {"optimizer": {"type": "AdamW"}}},
            "deepspeed: its optimizer is DeepSpeed's own",
        ),
    ],
)
def test_keys_of_trl_that_ask_in_vain_are_refused(keys, why, tmp_path):
    (tmp_path / "trl.yaml").write_text(json.dumps(keys))
    refused = read("dpo", settings_of("dpo"), ["--config", "trl.yaml"])[2].refused
    assert any(each.startswith(why) for each in refused.values()), refused


def test_a_setting_of_ours_wins_over_a_launch_line():
    command = f"{FSDP} --fsdp_offload_params true dpo.py --parallel.dp_shard_size 2 --offload_optimizer true"
    found = from_command(shlex.split(command))
    ours, left, out = read("dpo", settings_of("dpo"), found.flags, to_run=False)
    assert out.refused == {}
    assert "parallel" not in ours
    assert left == ["--parallel.dp_shard_size", "2", "--offload_optimizer", "true"]


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("accelerate launch --num_processes 8 dpo.py", "torchrun --nproc_per_node 8 -m burnish dpo"),
        ("CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node=2 dpo.py",
         "CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node 2 -m burnish dpo"),
        ("accelerate launch --num_processes 16 --num_machines 2 --machine_rank 1 --main_process_ip h "
         "--main_process_port 9 dpo.py",
         "torchrun --nproc_per_node 8 --nnodes 2 --node_rank 1 --master_addr h --master_port 9 -m burnish dpo"),
        ("accelerate launch --num_processes 16 --num_machines 2 dpo.py",
         "torchrun --nproc_per_node 8 --nnodes 2 --node_rank 0 -m burnish dpo"),
        ("torchrun --nproc_per_node=gpu --standalone dpo.py",
         "torchrun --nproc_per_node gpu --standalone -m burnish dpo"),
        ("torchrun --nnodes=2 --nproc_per_node=4 --rdzv_backend=c10d --rdzv_endpoint=h:1 dpo.py",
         "torchrun --nproc_per_node 4 --nnodes 2 --rdzv_backend c10d --rdzv_endpoint h:1 --node_rank 0 -m burnish dpo"),
        ("accelerate launch --num_processes 2 --gpu_ids 0,3 --num_cpu_threads_per_process 4 --cpu dpo.py",
         "CUDA_VISIBLE_DEVICES=0,3 OMP_NUM_THREADS=4 ACCELERATE_USE_CPU=true "
         "torchrun --nproc_per_node 2 -m burnish dpo"),
        ("deepspeed --num_gpus 2 dpo.py", "torchrun --nproc_per_node 2 -m burnish dpo"),
        ("python dpo.py", "burnish dpo"),
    ],
)  # fmt: skip
def test_the_line_of_torchrun_starts_the_same_ranks(command, line, capsys):
    assert main(["translate", *shlex.split(command), "--max_steps", "3"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"# {line} --config with this file"


def test_words_before_a_launcher_and_ranks_that_nobody_counts_are_told(capsys):
    assert main(["translate", "srun", "accelerate", "launch", "dpo.py", "--max_steps", "3"]) == 0
    printed = capsys.readouterr().out
    assert "# left out, as no launcher that burnish knows: srun" in printed
    assert (
        "# accelerate launch starts a process for each GPU of the machine; add --num_processes"
        in printed
    )


def test_the_file_that_accelerate_config_left_is_read(tmp_path):
    default = tmp_path / "home/accelerate/default_config.yaml"
    default.parent.mkdir(parents=True)
    default.write_text("distributed_type: FSDP\nnum_processes: 6\nfsdp_config: {fsdp_version: 2}\n")
    ours, out, _ = translated("accelerate launch dpo.py --per_device_train_batch_size 1")
    assert (ours["parallel"], ours["batch_size"], out.refused) == ({"dp_shard_size": 6}, 6, {})


@pytest.mark.parametrize(
    ("text", "why"),
    [("[1, 2", "can't be read"), ("text", "no keys and values"), ("odd: 1", "no key")],
)
def test_a_file_that_is_none_of_accelerate_is_refused(text, why, tmp_path):
    (tmp_path / "a.yaml").write_text(text)
    _, out, _ = translated("accelerate launch --config_file a.yaml dpo.py --max_steps 3")
    assert any(why in each for each in out.refused.values())


@pytest.mark.slow
def test_two_ranks_shard_the_model_as_the_printed_line_and_file_say(tmp_path, capsys):
    data = write_rows(
        tmp_path / "rows.jsonl", [{"messages": pair["prompt"] + pair["chosen"]} for pair in sums(8)]
    )
    trl = f"--model_name_or_path {save_model(tmp_path / 'start')} --data {data} --output_dir run --max_steps 2"
    launch = "accelerate launch --config_file zero3.yaml --cpu --num_processes 2"
    assert (
        main(["translate", *shlex.split(f"{launch} sft.py {trl} --per_device_train_batch_size 2")])
        == 0
    )
    printed = capsys.readouterr().out
    (tmp_path / "ours.yaml").write_text(printed)
    assert yaml.safe_load(printed)["parallel"] == {"dp_shard_size": 2}
    line = printed.splitlines()[0].removeprefix("# ").replace(" with this file", " ours.yaml")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_PORT": "0"}
    done = subprocess.run(
        line, shell=True, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert "2 ranks: one copy of the model, sharded over 2" in done.stdout
