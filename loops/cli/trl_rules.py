"""Rules of TRL's names that together make a field, or several; `trl_names.yaml` says which names each of them reads.

A rule returns our fields, by their names, and those of a group with a dot.
"""

import math
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import get_loader

from ..registry import nearest

_HANDBOOK = {"id": "path", "config": "name"}  # other names of the fields of a part of the data; TRL's are ours


@cache
def table() -> dict[str, Any]:
    parsed: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("trl_names.yaml").read_text())
    return parsed


@dataclass
class Translation:
    """One configuration on its way from TRL's names to our fields.

    Attributes:
        given: TRL's names and values; a rule reads those that are missing, or null, from ``defaults``.
        known, elsewhere: our fields, and the values of those among them that are set in our own vocabulary.
        ranks: of this run, unless a name says so; None where no run is started.
        ours, sources: values of our fields, where those of a group have a dot, and the names that each was made of.
        ignored: names without effect here, by the reason.
        notes: differences to know of, of what names and values ask for.
        differ, silent: differences of defaults, and of what no name says.
        refused: why a name can't be translated, in a line that begins with it.
    """

    given: Mapping[str, Any]
    known: Collection[str]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    elsewhere: Mapping[str, Any] = field(default_factory=dict)
    ours: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, list[str]] = field(default_factory=dict)
    ignored: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    differ: str = ""
    silent: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    ranks: int | None = None

    def __getitem__(self, name: str) -> Any:
        value = self.given.get(name)
        return self.defaults.get(name) if value is None else value

    def set(self, names: Sequence[str], fields: Mapping[str, Any]) -> None:
        """Set fields that were made of some names."""
        for key, value in fields.items():
            if key.partition(".")[0] not in self.known:
                for name in names:
                    self.refuse(name, f"this recipe has no {key}")
                continue
            both = isinstance(value, dict) and isinstance(self.ours.get(key), dict)
            self.ours[key] = {**self.ours[key], **value} if both else value
            self.sources.setdefault(key, []).extend(names)

    def refuse(self, name: str, why: str, *, instead: str = "") -> dict[str, Any]:
        """Refuse a name, unless the field that could stand ``instead`` of it is set; returns no fields."""
        if instead.partition(".")[0] not in self.elsewhere:
            self.refused[name] = f"{name}: {why}" + (f"; give {instead} instead" if instead else "")
        return {}


def batch(trl: Translation) -> dict[str, Any]:
    per_device, accumulation = int(trl["per_device_train_batch_size"]), int(trl["gradient_accumulation_steps"])
    if min(per_device, accumulation) < 1:
        raise ValueError("wanted whole numbers > 0")
    processes = int(trl["num_processes"] or os.environ.get("WORLD_SIZE", 1))
    sizes = (trl.elsewhere.get(f"parallel.{name}") for name in ("tp_size", "cp_size"))  # of ranks with the same data
    ranks = processes // math.prod(size for size in sizes if isinstance(size, int) and size > 0)
    trained = per_device * ranks * accumulation
    micro_batched = table()["micro_batched"] if trained > per_device else {}
    for kind in micro_batched.keys() & {*as_list(trl["loss_type"]), *trl.known}:
        theirs = f"TRL's, over each of its {ranks * accumulation} micro-batches"
        trl.notes.append(f"{kind}: {micro_batched[kind]} over the whole step; {theirs}")
    if "prompts_per_rollout" not in trl.known:
        return {"batch_size": trained}
    batches = int(trl["steps_per_generation"] or accumulation)
    completions, group = int(trl["generation_batch_size"] or per_device * ranks * batches), trl["num_generations"]
    if completions % int(group or 1):
        rollout = f"{per_device} per device x {ranks} ranks x {completions // (per_device * ranks)} batches"
        complaint = f"{completions} completions of a rollout ({rollout}) are no multiple of {group} per prompt"
        return trl.refuse("num_generations", complaint, instead="prompts_per_rollout")
    if completions % trained:
        name = "steps_per_generation" if "steps_per_generation" in trl.given else "generation_batch_size"
        complaint = f"{completions} completions of a rollout are no multiple of the {trained} of a step"
        return trl.refuse(name, complaint, instead="minibatches")
    fields = {"prompts_per_rollout": completions // int(group or 1)}
    if group:
        fields["group_size"] = int(group)
    if completions != trained:
        fields["minibatches"] = completions // trained
    return fields


def duration(trl: Translation) -> dict[str, Any]:
    if int(trl["max_steps"]) > 0:
        return {"steps": int(trl["max_steps"])}
    if trl["total_episodes"]:  # of PPO, completions of all rollouts
        rollouts = math.ceil(int(trl["total_episodes"]) / batch(trl)["prompts_per_rollout"])
        return {"steps": rollouts * int(trl["num_ppo_epochs"]) * int(trl["num_mini_batches"])}
    if not float(trl["num_train_epochs"]).is_integer():
        return trl.refuse("num_train_epochs", f"{trl['num_train_epochs']} is a part of an epoch", instead="steps")
    return {"epochs": int(float(trl["num_train_epochs"]))}


def warmup(trl: Translation) -> dict[str, Any]:
    steps = trl["warmup_steps"] or trl["warmup_ratio"]
    if steps and trl["lr_scheduler_type"] == "constant":
        trl.notes.append("warmup: none; transformers' constant schedule has none, constant_with_warmup has one")
        return {}
    return {"warmup": float(steps)} if steps else {}


def precision(trl: Translation) -> dict[str, Any]:
    names = [name for name in ("torch_dtype", "dtype") if trl.given.get(name) not in (None, "auto")]
    loaded = {name: str(trl[name]).removeprefix("torch.") for name in names}
    asked = {**loaded, "fp16": "float16"} if trl["fp16"] else dict(loaded)
    launched = str(trl.given.get("mixed_precision") or "no")
    if launched not in ("no", "bf16"):
        asked["mixed_precision"] = {"fp16": "float16"}.get(launched, launched)
    for name, dtype in asked.items():
        if dtype not in ("bfloat16", "float32", "float64"):
            why = f"there is no {dtype}" + " with loss scaling" * (dtype == "float16")
            trl.refuse(name, f"{why}; there are bfloat16 and float32", instead="dtype")
    if trl.refused.keys() & asked:
        return {}
    bf16 = trl.given.get("bf16")
    if launched == "bf16":  # which transformers' Trainer takes where its own bf16 is off
        bf16 = True
    elif not names and bf16 is None and not trl["fp16"] and "mixed_precision" in trl.given:
        return {}
    dtype = "bfloat16" if bf16 else next(iter(loaded.values()), "bfloat16" if bf16 is None else "float32")
    if bf16 is None and dtype == "float32":
        trl.notes.append("dtype: float32 throughout; TRL's autocasts to bfloat16 unless bf16 is false (dtype bfloat16)")
    if "bfloat16" not in loaded.values() or trl["use_peft"]:
        return {"dtype": dtype}
    trl.notes.append("dtype: bfloat16 weights round each step by chance (see rounding), where TRL's lose small ones")
    return {"dtype": dtype, "weights_dtype": "bfloat16"}


def optimizer(trl: Translation) -> dict[str, Any]:
    optimizers, name, fields = table()["optimizers"], str(trl["optim"]), {}
    if name not in optimizers:
        return trl.refuse("optim", nearest("there is no", name, optimizers), instead="optimizer")
    if "optim" in trl.given:
        fields["optimizer"] = optimizers[name]
    pairs = [pair.partition("=") for pair in str(trl["optim_args"] or "").replace(" ", "").split(",") if pair]
    kwargs: dict[str, Any] = {key: get_loader("yaml")(value) for key, _, value in pairs}
    betas, eps = [float(trl["adam_beta1"]), float(trl["adam_beta2"])], float(trl["adam_epsilon"])
    if "adam" in name and eps != 1e-8:
        kwargs["eps"] = eps
    if "lion" in name or ("adam" in name and betas != [0.9, 0.999]):
        kwargs["betas"] = betas
    return {**fields, "optimizer_kwargs": kwargs} if kwargs else fields


def evaluation(trl: Translation) -> dict[str, Any]:
    if (strategy := trl["eval_strategy"] or trl["evaluation_strategy"] or "no") == "no":
        return {}
    every = trl["eval_steps"] or trl["logging_steps"] or 10
    fields = _interval(trl, strategy, "eval_steps", every, "eval_every")
    if not {"eval_data"} & {*trl.ours, *trl.elsewhere}:
        if trl["dataset_name"] and "data" not in trl.elsewhere:
            return {**fields, "eval_data": {"split": trl["dataset_test_split"] or "test"}}
        trl.notes.append("eval_data: needed for evaluations; give held-out data")
    return fields


def saving(trl: Translation) -> dict[str, Any]:
    if (strategy := trl["save_strategy"] or "no") in ("no", "best"):  # the best is kept by the rule of that name
        return {}
    if trl["save_total_limit"] is None and "keep" not in trl.elsewhere:
        trl.notes.append("keep: the 2 newest checkpoints; TRL keeps all without save_total_limit")
    return _interval(trl, strategy, "save_steps", trl["save_steps"], "save_every")


def _interval(trl: Translation, strategy: str, name: str, every: Any, field: str) -> dict[str, Any]:
    """The interval between two evaluations or checkpoints; below 1, it is a share of all steps in both."""
    if strategy not in ("steps", "epoch"):
        return trl.refuse(name.replace("steps", "strategy"), f"{strategy!r} is none of no, steps, epoch", instead=field)
    if strategy == "epoch":
        return {field: "epoch"}
    every = float(every)
    return {field: every if every < 1 else int(every)}


def best(trl: Translation) -> dict[str, Any]:
    """The metric by which the best checkpoint is kept."""
    if not trl["load_best_model_at_end"] and trl["save_strategy"] != "best":
        return {}
    metric = re.sub("^eval[_/]", "", str(trl["metric_for_best_model"] or "loss"))
    greater = trl["greater_is_better"]
    if greater is None:
        greater = not metric.endswith("loss")  # as in transformers' Trainer
    if trl["load_best_model_at_end"]:
        trl.notes.append(
            "load_best_model_at_end: the best checkpoint is kept, and model/ holds the weights of the last step"
        )
    return {"keep_best": f"max:eval/{metric}" if greater else f"eval/{metric}"}


def supervised_loss(trl: Translation) -> dict[str, Any]:
    kind, smoothing = trl["loss_type"] or "nll", float(trl["label_smoothing_factor"] or 0)
    if kind not in ("nll", "chunked_nll", "dft"):
        return trl.refuse("loss_type", f"{kind!r} is none of nll, chunked_nll, dft", instead="loss")
    if smoothing and kind != "dft":
        return {"loss": {"label_smoothed_nll": {"label_smoothing": smoothing}}}
    return {"loss": kind.removeprefix("chunked_")} if "loss_type" in trl.given else {}


def pair_loss(trl: Translation) -> dict[str, Any]:
    losses, kinds = table()["losses"], as_list(trl["loss_type"])
    weights = as_list(trl["loss_weights"]) or [1.0] * len(kinds)
    means = [kind in table()["means"] for kind in kinds if kind != "sft"]
    mean = ", ".join(kind for kind in kinds if kind in table()["means"])
    if unknown := [kind for kind in kinds if kind not in losses]:
        return trl.refuse("loss_type", nearest("there is no", unknown[0], losses), instead="loss")
    if len(weights) != len(kinds):
        return trl.refuse("loss_weights", f"there are {len(weights)} for {len(kinds)} losses", instead="loss")
    if mean and trl["f_divergence_type"] not in (None, "reverse_kl"):
        complaint = f"of {mean}: TRL's is of sums of log-probs, and here it would be of their means"
        return trl.refuse("f_divergence_type", complaint, instead="divergence")
    if mean and not all(means):
        both = "some take the log-prob of a completion and some that of its tokens on average"
        return trl.refuse("loss_type", f"of {', '.join(kinds)} {both}", instead="loss")
    fields: dict[str, Any] = {"logprob_reduction": "mean"} if mean else {}
    mix = {losses[kind]: float(weight) for kind, weight in zip(kinds, weights, strict=True)}
    regularizer = float(trl.given.get("rpo_alpha") or 0)  # RPO, of TRL up to 0.20
    if regularizer:
        mix["nll"] = mix.get("nll", 0.0) + regularizer
    if "loss_type" in trl.given or regularizer:
        fields["loss"] = next(iter(mix)) if list(mix.values()) == [1.0] else mix
    if "discopop_tau" in trl.given and "discopop" in kinds:
        fields["loss_kwargs"] = {"tau": float(trl["discopop_tau"])}
    if any(kind.startswith("aot") for kind in kinds) and "micro_tokens" not in trl.elsewhere:
        fields["micro_tokens"] = None  # ranks couple the pairs of a step
    if mean:
        trl.notes.append("logprob_reduction: logps and rewards in the log are means over tokens too; TRL's are sums")
    return fields


def alpha(trl: Translation) -> dict[str, Any]:
    """TRL's coefficient is 1 - alpha; at 1 its alpha-divergence is the reverse KL, at 0 the forward one."""
    if (coefficient := float(trl["f_alpha_divergence_coef"])) not in (0, 1):
        return {"divergence_alpha": 1 - coefficient}
    limit = "reverse_kl" if coefficient else "forward_kl"
    return {"divergence": limit} if trl["f_divergence_type"] == "alpha_divergence" else {}


def contrast(trl: Translation) -> dict[str, Any]:
    kind, alpha = trl["loss_type"] or "sigmoid", float(trl["alpha"] or 0)
    if kind == "alphapo":
        return {"loss": "alpha_po", "alpha": alpha, "nll": 0.0}
    loss = {("sigmoid", False): "cpo", ("simpo", False): "simpo", ("simpo", True): "alpha_po"}.get((kind, bool(alpha)))
    if loss is None:
        return trl.refuse("loss_type" if trl["loss_type"] else "alpha", f"no loss here is {kind} with alpha {alpha}")
    return {"loss": loss, "alpha": alpha} if alpha else {"loss": loss}


def policy_loss(trl: Translation) -> dict[str, Any]:
    kind, level, clips = trl["loss_type"], trl["importance_sampling_level"], clipping(trl)["loss_kwargs"]
    losses, levels = table()["policy_losses"], table()["importance_sampling_levels"]
    if kind not in losses:
        return trl.refuse("loss_type", nearest("there is no", str(kind), losses))
    if level != "token" and (kind != "grpo" or level not in levels):
        return trl.refuse("importance_sampling_level", f"{level!r} goes with loss_type grpo, not with {kind}")
    if kind == "cispo" and clips["clip_high"] < 1:
        complaint = f"cispo's epsilon_high is the ratio's bound, wanted >= 1, got {clips['clip_high']}"
        return trl.refuse("loss_type", complaint)
    clipped = losses[kind]["variant"] == "grpo"
    kwargs = {"clip_high": clips["clip_high"] - 1} if kind == "cispo" else {}
    if clipped and (level != "token" or {"epsilon", "epsilon_high"} & trl.given.keys()):
        kwargs = clips
    for name, parameter in table()["hyper_parameters"].items():
        if trl.given.get(name) is not None and (name == "delta" or name.startswith(kind)):
            kwargs[parameter] = float(trl[name])
    fields: dict[str, Any] = {"loss_kwargs": kwargs} if kwargs else {}
    if {"loss_type", "importance_sampling_level"} & trl.given.keys():
        fields |= levels.get(level, losses[kind])
    if entropy := float(trl["entropy_coef"] or 0):
        if not clipped or level != "token":
            trl.refuse("entropy_coef", f"of {kind} there is no mix here", instead="loss")
        bonus = {"coefficient": entropy, "weighting": "token_mean"}
        fields["loss"] = {"clipped_surrogate": 1.0, "entropy_bonus": bonus}
    return fields


def clipping(trl: Translation) -> dict[str, Any]:
    low = next((float(trl[name]) for name in ("epsilon", "cliprange") if trl[name] is not None), 0.2)
    high = low if trl["epsilon_high"] is None else float(trl["epsilon_high"])
    return {"loss_kwargs": {"clip_low": low, "clip_high": high}}


def correction(trl: Translation) -> dict[str, Any]:
    if not trl["use_vllm"] or trl["vllm_importance_sampling_correction"] is False or trl["loss_type"] == "vespo":
        return {}
    corrections, mode = table()["corrections"], trl["vllm_importance_sampling_mode"]
    if mode not in corrections:
        return trl.refuse("vllm_importance_sampling_mode", nearest("there is no", mode, corrections))
    bounds = (trl["vllm_importance_sampling_cap"], trl.given.get("vllm_importance_sampling_clip_max", 3.0), math.inf)
    high = next(bound for bound in bounds if bound is not None)
    low = float(trl["vllm_importance_sampling_clip_min"] or 0)
    return {"correction": corrections[mode], "correction_low": low, "correction_high": float(high)}


def rewards(trl: Translation) -> dict[str, Any]:
    models = [trl[name] for name in ("reward_model_name_or_path", "reward_model_path") if trl[name]]
    names, shipped = [*models, *as_list(trl["reward_funcs"])], table()["rewards"]
    weights = as_list(trl["reward_weights"]) or [1.0] * len(names)
    if len(weights) != len(names):
        return trl.refuse("reward_weights", f"there are {len(weights)} for {len(names)} rewards", instead="rewards")
    fields: dict[str, Any] = {}
    for name, weight in zip(names, map(float, weights), strict=True):
        entry = {"reward_model": {"model": name}} if name in models else shipped.get(name)
        if entry is None and not {".", ":"} & set(name):
            complaint = f"no reward {name!r}; there are {', '.join(sorted(shipped))}, or module:function"
            return trl.refuse("reward_funcs", complaint, instead="rewards")
        module, _, function = name.rpartition(".")
        ((ours, settings),) = (entry or {name if ":" in name else f"{module}:{function}": {}}).items()
        fields[ours] = {**settings, "weight": weight} if settings else weight
    return {"rewards": fields}


def divergence(trl: Translation) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if "temperature" in trl.given:
        gkd = {"lmbda", "max_new_tokens"} & trl.given.keys() and "max_completion_length" not in trl.given
        names = ["temperature"] if gkd else ["temperature", "teacher.temperature"]
        fields = dict.fromkeys(names, float(trl["temperature"]))
    if "beta" in trl.given:
        beta = float(trl["beta"])
        fields["teacher.divergence"] = {0.0: "forward_kl", 1.0: "reverse_kl"}.get(beta, "jsd")
        fields |= {} if beta in (0, 1) else {"teacher.beta": beta}
    return fields


def prompts(trl: Translation) -> dict[str, Any]:
    limit = trl["max_prompt_length"]
    return {"max_prompt_length": limit} if limit is None else {"max_prompt_length": limit, "truncation": "keep_end"}


def data(trl: Translation) -> dict[str, Any]:
    mixture: Mapping[str, Any] = trl["dataset_mixture"] or {name: trl[name] for name in ("datasets", "test_split_size")}
    held_out: Any = mixture.get("test_split_size")
    if mixture.get("datasets"):
        parts = [{_HANDBOOK.get(name, name): value for name, value in part.items()} for part in mixture["datasets"]]
        held_out = held_out if not held_out or held_out < 1 else int(held_out)
    elif trl["dataset_mixer"]:
        configs = trl["dataset_configs"] or [None] * len(trl["dataset_mixer"])
        parts = [
            {"path": path, "split": split, "weight": weight, **({"name": config} if config else {})}
            for (path, weight), config in zip(trl["dataset_mixer"].items(), configs, strict=True)
            for split in trl["dataset_splits"] or ["train"]
        ]
        held_out = [{**part, "weight": 1} for part in parts if "test" in part["split"]]
        parts = [part for part in parts if "test" not in part["split"]]
    elif trl["dataset_name"]:
        parts = [{"path": trl["dataset_name"], "name": trl["dataset_config"], "split": trl["dataset_train_split"]}]
        held_out = None
    else:
        return {}
    parts = [{name: value for name, value in {**part, **_reading(trl)}.items() if value is not None} for part in parts]
    one = parts[0] if len(parts[0]) > 1 else parts[0]["path"]
    fields = {"data": one if len(parts) == 1 else parts}
    return {**fields, "eval_data": held_out} if held_out and "data" not in trl.elsewhere else fields


def _reading(trl: Translation) -> dict[str, Any]:
    """The columns of the data under our names, as conversations where open-r1 makes them of a column."""
    columns = {trl["dataset_prompt_column"]: "prompt", trl["dataset_text_field"]: "text"}
    columns = {theirs: ours for theirs, ours in columns.items() if theirs not in (None, ours)}
    reading: dict[str, Any] = {"columns": columns} if columns else {}
    if trl["system_prompt"] or trl["dataset_prompt_column"]:
        reading["system_prompt"] = trl["system_prompt"] or ""
    return reading


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]
