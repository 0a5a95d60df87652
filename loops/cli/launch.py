"""Launch lines of accelerate, torchrun and deepspeed: their ranks, and how these share the model.

`expanded` brings files and flags of all of them to one vocabulary, the names of `accelerate
launch`; the rule `sharding` makes our fields of it, and `command` the line of torchrun that starts
the same ranks.
"""

import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from .trl_rules import Fields, Translation, as_list

# Names of accelerate's flags, as YAML, JSON or words of a command give their values.
Words: TypeAlias = dict[str, Any]

_OFF = (None, False, "", "no", "none", "None", "false", "False", 0)
# Sections of a file of accelerate's, and what its flags have before the names of their keys.
_GROUPS = {"fsdp_config": "fsdp_", "deepspeed_config": "", "parallelism_config": "parallelism_config_",
           "megatron_lm_config": "", "dynamo_config": "dynamo_", "mpirun_config": "", "fp8_config": "fp8_"}  # fmt: skip
# other keys that are off ask nothing
_OFF_IS_ASKED = ("distributed_type", "zero_stage", "fsdp_reshard_after_forward")
_STARTED_BY_TRL = 8  # processes, by each of the files that TRL ships


@cache
def names() -> dict[str, Any]:
    """The table of launchers' names, in `launch_names.yaml`."""
    text = Path(__file__).with_name("launch_names.yaml").read_text()
    parsed: dict[str, Any] = yaml.safe_load(text)
    return parsed


class Unreadable(ValueError):
    """A file of a launch line that can't be read, and whose name is no known preset either."""


def expanded(given: Mapping[str, Any]) -> tuple[Words, list[str], dict[str, str]]:
    """Given names, and the names that files among their values give; flags win over files.

    Returns:
        Names and values; notes; and why a name is refused.
    """
    words = dict(given)
    notes: list[str] = []
    refused: dict[str, str] = {}
    for name, read in _FILES.items():
        value = words.get(name)
        if value in _OFF:
            continue
        try:
            found, said = read(value)
        except Unreadable as error:
            refused[name] = f"{name}: {error}"
            continue
        words = {**found, **words}
        notes += [f"{name}: {each}" for each in said]
    return words, notes, refused


def _accelerate_file(value: object) -> tuple[Words, list[str]]:
    """The keys of a file of accelerate's, or the preset's keys that its name stands for."""
    path = Path(str(value))
    if not path.is_file():
        preset = names()["presets"].get(_plain(path.stem))
        if preset is None:
            known = ", ".join(names()["presets"])
            raise Unreadable(f"there is no {value} here, and its name is none of {known}")
        if path.suffix:
            read_as = f"it is read by its name, as {_plain(path.stem)} in bf16"
            return preset, [f"there is no {value} here; {read_as}"]
        return {**preset, "num_processes": _STARTED_BY_TRL}, []
    keys = _mapping(path)
    found: Words = {}
    for key, each in keys.items():
        if key in _GROUPS:
            found |= _flat(key, each or {})
        else:
            found[names()["renamed"].get(key, key)] = each
    found = {name: each for name, each in found.items() if _asks(name, each)}
    if found.get("compute_environment") == "LOCAL_MACHINE":
        del found["compute_environment"]
    if found.get("distributed_type") == "NO":
        found["num_processes"] = 1  # as accelerate launches it, whatever the file says
    if keys.get("parallelism_config"):
        found["use_parallelism_config"] = True
    return found, []


def _asks(name: str, value: object) -> bool:
    """True unless a key of the file is off, which asks for nothing but with a few names."""
    return name in _OFF_IS_ASKED or (value not in _OFF and value != [])


def _plain(stem: str) -> str:
    """``zero3`` for deepspeed_zero3, ds-zero3-config or zero_stage_3."""
    stem = stem.lower().replace("-", "_")
    stem = re.sub(r"^(deepspeed|ds|accelerate)_|_config$", "", stem)
    return re.sub(r"^zero_?(stage_?)?(\d)$", r"zero\2", stem)


def _flat(group: str, keys: Mapping[str, object]) -> Words:
    """The keys of a section of a file under the names of accelerate's flags."""
    prefix = _GROUPS[group]
    found: Words = {}
    for key, value in keys.items():
        name = key if key.startswith(prefix) else prefix + key
        found[names()["renamed"].get(name, name)] = value
    return found


def _mapping(path: Path) -> Words:
    """The keys of a file; `Unreadable` if it has none."""
    try:
        keys = yaml.safe_load(path.read_text("utf-8"))  # JSON is YAML, too
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise Unreadable(f"{path} can't be read: {error}") from error
    if not isinstance(keys, dict):
        raise Unreadable(f"{path} holds no keys and values")
    return keys


def _deepspeed_file(value: object) -> tuple[Words, list[str]]:
    """What a file of DeepSpeed's or a mapping asks for, in the names of accelerate's flags."""
    path = Path(str(value))
    if isinstance(value, Mapping):
        keys = value
    elif path.is_file():
        keys = _mapping(path)
    else:
        preset = names()["presets"].get(_plain(path.stem), {})
        if "zero_stage" not in preset:
            problem = f"there is no {value} here, and its name says no stage"
            raise Unreadable(f"{problem}, as zero3.json does")
        note = f"there is no {value} here; it is read by its name"
        return {**preset, "use_deepspeed": True}, [note]
    _refuse_deepspeed(keys)
    zero = keys.get("zero_optimization") or {}
    found = {"use_deepspeed": True, "zero_stage": zero.get("stage", 0)}
    for kind in ("optimizer", "param"):
        offload = zero.get(f"offload_{kind}") or {}
        found[f"offload_{kind}_device"] = offload.get("device", "none")
    for precision in ("bf16", "fp16"):
        settings = keys.get(precision) or {}
        if settings.get("enabled") is True:  # or auto: as the flags say
            found["mixed_precision"] = precision
    return found, []


def _refuse_deepspeed(keys: Mapping[str, object]) -> None:
    """Raise `Unreadable` if a file of DeepSpeed's asks for what burnish does otherwise, or not."""
    for key in keys:
        if key not in names()["deepspeed_harmless"]:
            raise Unreadable(f"{key} has no equivalent here; leave it out")
    for part, ours in (("optimizer", "optimizer"), ("scheduler", "schedule")):
        if part in keys:
            raise Unreadable(
                f"its {part} is DeepSpeed's own; leave it out, and give {ours}, whose name burnish knows"
            )


def _fsdp_words(value: object) -> tuple[Words, list[str]]:
    """``full_shard auto_wrap offload`` of transformers' Trainer."""
    words = [str(each) for each in as_list(value)]
    options = {word.lower() for text in words for word in text.split()}
    found: Words = {"use_fsdp": True}
    strategies = [word.upper() for word in options if word.upper() in names()["strategies"]]
    if strategies and strategies[0] not in ("TRUE", "FALSE"):
        found["fsdp_sharding_strategy"] = strategies[0]
    if "offload" in options:
        found["fsdp_offload_params"] = True
    known = {*strategies, "OFFLOAD", "AUTO_WRAP"}
    unknown = sorted(word for word in options if word.upper() not in known)
    if unknown:
        raise Unreadable(
            f"{unknown[0]!r} is none of full_shard, shard_grad_op, hybrid_shard, no_shard, offload, auto_wrap"
        )
    return found, []


def _fsdp_settings(value: object) -> tuple[Words, list[str]]:
    return _settings_of("fsdp_config", value)


def _parallelism_settings(value: object) -> tuple[Words, list[str]]:
    found, notes = _settings_of("parallelism_config", value)
    return {**found, "use_parallelism_config": True}, notes


def _settings_of(group: str, value: Any) -> tuple[Words, list[str]]:
    """A mapping, its JSON, or a file of it."""
    if isinstance(value, str) and not value.lstrip().startswith("{"):
        value = _mapping(Path(value))
    keys = json.loads(value) if isinstance(value, str) else value
    return _flat(group, keys), []


# Names whose values are files, or stand for several settings; in this order, as the first may name
# the second.
_FILES = {
    "accelerate_config": _accelerate_file,
    "deepspeed_config_file": _deepspeed_file,
    "deepspeed": _deepspeed_file,
    "fsdp": _fsdp_words,
    "fsdp_config": _fsdp_settings,
    "parallelism_config": _parallelism_settings,
}


def sharding(trl: Translation) -> Fields:
    """The fields by which ranks share the model as a launch line asks; ours, if set, win."""
    kind = _kind(trl)
    fields: Fields = {}
    if kind == "deepspeed":
        fields = _deepspeed(trl)
    elif kind == "fsdp":
        fields = _fsdp(trl)
    if _on(trl, "use_parallelism_config"):
        fields |= _parallelism(trl)
    sizes = {name for name in fields if name.startswith("parallel.")}
    alone = {name for name in sizes if fields[name] == 1}  # as without the setting
    asked: Fields = {}
    for name, value in fields.items():
        if name not in alone and name not in trl.elsewhere:
            asked[name] = value
    return asked


def _on(trl: Translation, name: str) -> bool:
    value = trl.given.get(name)
    return value not in _OFF and str(value).lower() not in ("false", "no", "none")


def _kind(trl: Translation) -> str:
    """fsdp, deepspeed, copies or one; by flags if there are any, or else by accelerate's file."""
    by_flag = {"use_deepspeed": "deepspeed", "use_fsdp": "fsdp", "multi_gpu": "copies"}
    for name, kind in by_flag.items():
        if _on(trl, name):
            return kind
    asked = str(trl.given.get("distributed_type") or "NO").upper()
    types: Mapping[str, str] = names()["types"]
    if asked not in types:
        why = f"{asked!r} is none of {', '.join(types)}"
        trl.refuse("distributed_type", why, instead="parallel")
    return types.get(asked, "one")


def _ranks(trl: Translation, name: str) -> int | None:
    """Number of ranks, or None and a refusal where nothing says it."""
    given = trl.given.get("num_processes") or os.environ.get("WORLD_SIZE") or trl.ranks
    if given is None:
        why = "shards over all ranks, and nothing says how many there are; add --num_processes"
        trl.refuse(name, why, instead="parallel.dp_shard_size")
    return None if given is None else int(given)


def _first_given(trl: Translation, candidates: Sequence[str]) -> str:
    """The first of some names that is given; empty if none is."""
    for name in candidates:
        if name in trl.given:
            return name
    return ""


def _deepspeed(trl: Translation) -> Fields:
    fields: Fields = {}
    name = _first_given(trl, ["accelerate_config", "deepspeed", "use_deepspeed"]) or "zero_stage"
    given = trl.given.get("zero_stage")
    stage = 2 if given is None else int(given)  # accelerate's
    if stage not in (0, 1, 2, 3):
        why = f"{stage} is none of 0, 1, 2, 3"
        return trl.refuse("zero_stage", why, instead="parallel.dp_shard_size")
    ranks = _ranks(trl, name) if stage else None
    if ranks:
        fields["parallel.dp_shard_size"] = ranks
        if stage < 3 and ranks > 1:
            trl.notes.append(
                f"zero_stage: {stage} leaves each rank all parameters; here they are in shards, too (FSDP)"
            )
    if _device(trl, "optimizer") == "cpu":
        fields["offload_optimizer"] = True
    if _device(trl, "param") != "none":
        why = "parameters stay on the GPU"
        trl.refuse("offload_param_device", why, instead="offload_optimizer")
    return fields


def _device(trl: Translation, kind: str) -> str:
    name = f"offload_{kind}_device"
    device = str(trl.given.get(name) or "none").lower()
    if device not in ("none", "cpu"):
        why = f"states go to the memory of the host (cpu), not to {device}"
        trl.refuse(name, why, instead="offload_optimizer")
    return device


def _fsdp(trl: Translation) -> Fields:
    fields: Fields = {}
    name = _first_given(trl, ["accelerate_config", "fsdp", "use_fsdp"]) or "distributed_type"
    setting = ""
    for each in ("fsdp_sharding_strategy", "fsdp_reshard_after_forward"):  # of FSDP 1, of FSDP 2
        if not setting and trl.given.get(each) is not None:
            setting = each
    strategy = str(trl.given.get(setting, "FULL_SHARD")).upper()
    over = names()["strategies"].get(strategy)
    if over is None:
        why = f"{strategy!r} is no way to shard"
        return trl.refuse(setting, why, instead="parallel.dp_shard_size")
    ranks = _ranks(trl, name) if over != "none" else None
    if ranks:
        machines = int(trl.given.get("num_machines") or 1)
        fields["parallel.dp_shard_size"] = ranks
        if over == "machine":  # each machine holds a copy (HSDP)
            fields["parallel.dp_shard_size"] = ranks // machines
        if strategy in ("SHARD_GRAD_OP", "2", "HYBRID_SHARD_ZERO2", "5", "FALSE"):
            kept = "keeps the parameters between forward and backward"
            trl.notes.append(
                f"{setting}: {strategy} {kept}; here each layer is gathered twice, for less memory"
            )
    if _on(trl, "fsdp_activation_checkpointing"):
        fields["gradient_checkpointing"] = True
    if _on(trl, "fsdp_activation_checkpointing_offload"):
        fields["gradient_checkpointing"] = "offload"
    if _on(trl, "fsdp_offload_params"):
        why = "parameters stay on the GPU; the optimizer's state can go"
        trl.refuse("fsdp_offload_params", why, instead="offload_optimizer")
    return fields


def _parallelism(trl: Translation) -> Fields:
    kinds = ("dp_replicate", "dp_shard", "tp", "cp", "sp")
    sizes = {kind: int(trl.given.get(f"parallelism_config_{kind}_size") or 1) for kind in kinds}
    together = sizes["tp"] * sizes["cp"] * sizes["sp"]
    ranks = _ranks(trl, "use_parallelism_config")
    started = sizes["dp_replicate"] * sizes["dp_shard"] * together
    if ranks is not None and ranks != started:
        why = f"its sizes make {started} ranks, and {ranks} are started"
        return trl.refuse("use_parallelism_config", why, instead="parallel.dp_shard_size")
    return {
        "parallel.dp_shard_size": sizes["dp_shard"],
        "parallel.tp_size": sizes["tp"],
        "parallel.cp_size": sizes["cp"] * sizes["sp"],  # two ways to split a row
    }


def launched(
    words: Sequence[str], flags: Sequence[tuple[str, Sequence[str]]]
) -> tuple[list[str], list[str], list[str]]:
    """The launcher's part of a command.

    Args:
        words: those before the script.
        flags: the flags among them, with their values.

    Returns:
        Its flags under the names of `accelerate launch`; the variables before it; and notes.
    """
    variables = [word for word in words if re.match(r"[A-Za-z_]\w*=", word)]
    programs = {Path(word).name for word in words}
    by_name: dict[str, str] = {}
    for name, values in flags:
        plain = name.replace("-", "_")
        by_name[names()["renamed"].get(plain, plain)] = " ".join(values) or "true"
    if programs.isdisjoint({"accelerate", "torchrun"}):
        by_name.pop("module", None)  # of Python itself
    _count_processes(by_name)
    notes = []
    left_out = _left_out(words)
    if left_out:
        notes.append(f"left out, as no launcher that burnish knows: {' '.join(left_out)}")
    if "accelerate" in words:
        if "accelerate_config" not in by_name:
            default = _default_file()
            if default:
                by_name["accelerate_config"] = str(default)
        if by_name.keys().isdisjoint({"num_processes", "accelerate_config"}):
            notes.append(
                "accelerate launch starts a process for each GPU of the machine; add --num_processes to count them"
            )
    return [f"--{name}={value}" for name, value in by_name.items()], variables, notes


# The words of launchers: of "uv run accelerate launch", "python -m torchrun", "trl dpo".
_LAUNCHERS = (
    "accelerate", "launch", "torchrun", "deepspeed", "trl", "python", "python3", "uv", "run",
)  # fmt: skip


def _left_out(words: Sequence[str]) -> list[str]:
    """The words before the first flag that are neither variables nor launchers that are known."""
    left_out = []
    for word in words:
        if word.startswith("-"):
            break
        is_variable = re.match(r"[A-Za-z_]\w*=", word)
        if not is_variable and Path(word).name not in _LAUNCHERS:
            left_out.append(word)
    return left_out


def _count_processes(flags: dict[str, str]) -> None:
    """Replace the number of processes per machine, as torchrun and DeepSpeed count, by all."""
    per_machine = flags.pop("nproc_per_node", None) or flags.pop("num_gpus", None)
    if per_machine is None:
        return
    machines = flags.get("num_machines", "1")
    if per_machine.isdigit() and machines.isdigit():
        flags["num_processes"] = str(int(per_machine) * int(machines))
    else:  # such as gpu: as many as there are
        flags["nproc_per_node"] = per_machine


def _default_file() -> Path | None:
    """The file that `accelerate config` leaves, and `accelerate launch` reads if given none."""
    cache_home = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = Path(os.environ.get("HF_HOME", f"{cache_home}/huggingface")).expanduser()
    for kind in ("yaml", "json", "yml"):
        path = home / "accelerate" / f"default_config.{kind}"
        if path.is_file():
            return path
    return None


def command(recipe: str, given: Mapping[str, Any], variables: Sequence[str] = ()) -> str:
    """The line that starts the same ranks by torchrun; the configuration is to be added to it."""
    said = {name: given.get(name) for name in ("num_processes", "num_machines", "nproc_per_node")}
    machines = int(said["num_machines"] or 1)
    settings = [*variables, *_variables(given)]
    options: list[str] = []
    for name, theirs in names()["torchrun"].items():
        value = given.get(name)
        for_several = name in ("num_machines", "rdzv_backend", "main_process_ip")
        if value in (*_OFF, "static") or (machines == 1 and for_several):
            continue
        is_switch = value is True or value == "true"
        options.append(f"--{theirs}" if is_switch else f"--{theirs} {shlex.quote(str(value))}")
    if machines > 1 and given.get("machine_rank") in _OFF:
        options.append("--node_rank 0")
    ranks = int(said["num_processes"] or 1)
    each = said["nproc_per_node"] or max(ranks // machines, 1)
    if each == 1 and machines == 1:
        return " ".join([*settings, f"burnish {recipe}"])
    torchrun = ["torchrun", f"--nproc_per_node {each}", *options, f"-m burnish {recipe}"]
    return " ".join([*settings, *torchrun])


def _variables(given: Mapping[str, object]) -> list[str]:
    """Variables of the environment in place of flags that torchrun has not."""
    found: list[str] = []
    for name, variable in names()["variables"].items():
        value = given.get(name)
        if value in _OFF or value == "all":
            continue
        text = "true" if variable == "ACCELERATE_USE_CPU" else str(value)
        found.append(f"{variable}={shlex.quote(text)}")
    return found
