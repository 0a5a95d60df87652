"""Rules of TRL's names that together make a field, or several.

`trl_names.yaml` says which names each rule reads. A rule returns our fields by their names; a
group's fields have a dot in theirs: {"loss": "dpo", "lora.r": 16}. Where a name has a value of
another type than the rule expects, its TypeError or ValueError becomes the refusal.
"""

import math
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import yaml
from jsonargparse import get_loader

from ..registry import nearest

Fields: TypeAlias = dict[str, object]  # of ours, by their names

# A handbook's names of the fields of a part of the data; TRL's are ours.
_HANDBOOK = {"id": "path", "config": "name"}


@cache
def table() -> dict[str, Any]:
    """The table of TRL's names, in `trl_names.yaml`."""
    parsed: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("trl_names.yaml").read_text())
    return parsed


@dataclass
class Translation:
    """One configuration on its way from TRL's names to our fields.

    Attributes:
        given: TRL's names and values; a rule reads missing names, and null ones, from ``defaults``.
        known, elsewhere: our fields, and the values of those among them that are set in our own
            vocabulary.
        ranks: of this run, unless a name says so; None where no run is started.
        ours, sources: values of our fields (a group's fields have a dot in their names), and the
            names that each was made of.
        ignored: names without effect here, by the reason.
        notes: differences to know of, of what names and values ask for.
        differ, silent: differences of defaults, and of what no name says.
        refused: why a name can't be translated, in a line that begins with it.
    """

    given: Mapping[str, Any]
    known: Collection[str]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    elsewhere: Mapping[str, Any] = field(default_factory=dict)
    ours: Fields = field(default_factory=dict)
    sources: dict[str, list[str]] = field(default_factory=dict)
    ignored: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    differ: str = ""
    silent: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    ranks: int | None = None

    def __getitem__(self, name: str) -> Any:
        """The value of a name, or else TRL's default; a rule knows what type it expects."""
        value = self.given.get(name)
        return self.defaults.get(name) if value is None else value

    def set(self, names: Sequence[str], fields: Mapping[str, object]) -> None:
        """Set fields that were made of some names."""
        for key, value in fields.items():
            if key.partition(".")[0] not in self.known:
                for name in names:
                    self.refuse(name, f"this recipe has no {key}")
                continue
            present = self.ours.get(key)
            if isinstance(value, dict) and isinstance(present, dict):
                value = {**present, **value}
            self.ours[key] = value
            self.sources.setdefault(key, []).extend(names)

    def refuse(self, name: str, why: str, *, instead: str = "") -> Fields:
        """Refuse a name, unless the field to give ``instead`` of it is set; returns no fields."""
        is_set = any(f"{field}.".startswith(f"{instead}.") for field in self.elsewhere)
        if not (instead and is_set):
            fix = f"; give {instead} instead" if instead else ""
            self.refused[name] = f"{name}: {why}{fix}"
        return {}


def batch(trl: Translation) -> Fields:
    per_device = int(trl["per_device_train_batch_size"])
    accumulation = int(trl["gradient_accumulation_steps"])
    if min(per_device, accumulation) < 1:
        raise ValueError("wanted whole numbers > 0")
    ranks = _ranks_with_own_data(trl)
    trained = per_device * ranks * accumulation
    if trained > per_device:
        _note_micro_batched(trl, ranks * accumulation)
    if "prompts_per_rollout" not in trl.known:
        return _batch_of_rows(trl, trained, per_device * accumulation)
    batches = int(trl["steps_per_generation"] or accumulation)
    completions = int(trl["generation_batch_size"] or per_device * ranks * batches)
    group = int(trl["num_generations"] or 1)
    if completions % group:
        made_of = f"{per_device} per device x {ranks} ranks x {completions // (per_device * ranks)} batches"
        rollout = f"{completions} completions of a rollout ({made_of})"
        complaint = f"{rollout} are no multiple of {trl['num_generations']} per prompt"
        return trl.refuse("num_generations", complaint, instead="prompts_per_rollout")
    if completions % trained:
        by_steps = "steps_per_generation" in trl.given
        name = "steps_per_generation" if by_steps else "generation_batch_size"
        rollout = f"{completions} completions of a rollout"
        complaint = f"{rollout} are no multiple of the {trained} of a step"
        return trl.refuse(name, complaint, instead="minibatches")
    fields: Fields = {"prompts_per_rollout": completions // group}
    if trl["num_generations"]:
        fields["group_size"] = group
    if completions != trained:
        fields["minibatches"] = completions // trained
    return fields


def _batch_of_rows(trl: Translation, trained: int, of_a_rank: int) -> Fields:
    """The rows of a step; of GOLD each counts num_generations times, once a completion.

    Args:
        trained: completions of a step.
        of_a_rank: those of each rank.
    """
    group = int(trl["num_generations"] or 1)
    prompts = int(trl["generation_batch_size"] or of_a_rank // group)
    if prompts * group != of_a_rank:
        made_of = f"{prompts} prompts x {group} completions"
        complaint = f"{made_of} are not the {of_a_rank} completions of a device's step"
        by_prompts = trl["generation_batch_size"] is not None
        name = "generation_batch_size" if by_prompts else "num_generations"
        return trl.refuse(name, complaint, instead="batch_size")
    fields: Fields = {"batch_size": trained // group}
    if "num_generations" in trl.given:
        fields["group_size"] = group
    return fields


def _ranks_with_own_data(trl: Translation) -> int:
    """Number of ranks with rows of their own; ranks that share a layer or a row count as one."""
    processes = int(trl["num_processes"] or os.environ.get("WORLD_SIZE", 1))
    together = 1
    for name in ("tp_size", "cp_size"):
        size = trl.elsewhere.get(f"parallel.{name}")
        if isinstance(size, int) and size > 0:
            together *= size
    return processes // together


def _note_micro_batched(trl: Translation, count: int) -> None:
    """Note what TRL computes over each of ``count`` micro-batches, and burnish over the step."""
    micro_batched = table()["micro_batched"]
    for kind in micro_batched.keys() & {*as_list(trl["loss_type"]), *trl.known}:
        theirs = f"TRL's, over each of its {count} micro-batches"
        trl.notes.append(f"{kind}: {micro_batched[kind]} over the whole step; {theirs}")


def duration(trl: Translation) -> Fields:
    if int(trl["max_steps"]) > 0:
        return {"steps": int(trl["max_steps"])}
    if trl["total_episodes"]:  # of PPO, completions of all rollouts
        prompts = batch(trl)["prompts_per_rollout"]
        assert isinstance(prompts, int)
        rollouts = math.ceil(int(trl["total_episodes"]) / prompts)
        return {"steps": rollouts * int(trl["num_ppo_epochs"]) * int(trl["num_mini_batches"])}
    if not float(trl["num_train_epochs"]).is_integer():
        why = f"{trl['num_train_epochs']} is a part of an epoch"
        return trl.refuse("num_train_epochs", why, instead="steps")
    return {"epochs": int(float(trl["num_train_epochs"]))}


def warmup(trl: Translation) -> Fields:
    steps = trl["warmup_steps"] or trl["warmup_ratio"]
    if steps and trl["lr_scheduler_type"] == "constant":
        trl.notes.append(
            "warmup: none; transformers' constant schedule has none, constant_with_warmup has one"
        )
        return {}
    return {"warmup": float(steps)} if steps else {}


def precision(trl: Translation) -> Fields:
    loaded = _loaded_dtypes(trl)
    launched = str(trl.given.get("mixed_precision") or "no")
    asked = _asked_dtypes(trl, launched)
    _refuse_dtypes(trl, asked)
    if trl.refused.keys() & asked:
        return {}

    bf16 = trl.given.get("bf16")
    if trl["fp16"] and bf16:
        return trl.refuse("fp16", "bf16 is true as well; give one of them", instead="dtype")
    nothing_asked = not loaded and bf16 is None and not trl["fp16"]
    if launched == "bf16" and not trl["fp16"]:
        bf16 = True  # which transformers' Trainer takes where its own bf16 is off
    elif nothing_asked and launched == "no" and "mixed_precision" in trl.given:
        return {}
    if trl["fp16"] or (launched == "fp16" and not bf16):
        return _in_float16(trl)
    dtype = _computing_dtype(bf16, list(loaded.values()))
    if dtype == "float16":
        return _in_float16(trl)
    if bf16 is None and dtype == "float32":
        trl.notes.append(
            "dtype: float32 throughout; TRL's autocasts to bfloat16 unless bf16 is false (dtype bfloat16)"
        )
    return {"dtype": dtype, **_bfloat16_weights(trl, loaded)}


def _bfloat16_weights(trl: Translation, loaded: Mapping[str, str]) -> Fields:
    """bfloat16 weights if they are trained themselves, not adapters to them."""
    if "bfloat16" not in loaded.values() or trl["use_peft"]:
        return {}
    trl.notes.append(
        "dtype: bfloat16 weights round each step by chance (see rounding), where TRL's lose small ones"
    )
    return {"weights_dtype": "bfloat16"}


def _in_float16(trl: Translation) -> Fields:
    if "float16" in _loaded_dtypes(trl).values() and not trl["use_peft"]:
        trl.notes.append(
            "dtype: float16 computes, and weights that are trained stay float32: the loss is scaled, which TRL's "
            "float16 weights refuse or go without"
        )
    return {"dtype": "float16"}


_SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def _loaded_dtypes(trl: Translation) -> dict[str, str]:
    """The dtypes in which the weights are to be loaded, by the name that says so."""
    loaded = {}
    for name in ("torch_dtype", "dtype"):
        if trl.given.get(name) not in (None, "auto"):
            dtype = str(trl[name]).removeprefix("torch.")
            loaded[name] = _SHORT_DTYPES.get(dtype, dtype)
    return loaded


def _asked_dtypes(trl: Translation, launched: str) -> dict[str, str]:
    """Every dtype that is asked for by a name other than bf16, by the name that says so.

    Args:
        launched: the ``mixed_precision`` of Accelerate.
    """
    asked = _loaded_dtypes(trl)
    if trl["fp16"]:
        asked["fp16"] = "float16"
    if launched not in ("no", "bf16"):
        asked["mixed_precision"] = "float16" if launched == "fp16" else launched
    return asked


def _refuse_dtypes(trl: Translation, asked: Mapping[str, str]) -> None:
    for name, dtype in asked.items():
        if dtype not in ("bfloat16", "float16", "float32", "float64"):
            why = f"there is no {dtype}; there are bfloat16, float16 and float32"
            trl.refuse(name, why, instead="dtype")


def _computing_dtype(bf16: bool | None, loaded: Sequence[str]) -> str:
    """bfloat16 by autocast, unless it is false; or else the dtype of the weights."""
    if bf16:
        return "bfloat16"
    if loaded:
        return loaded[0]
    return "bfloat16" if bf16 is None else "float32"


def optimizer(trl: Translation) -> Fields:
    optimizers = table()["optimizers"]
    name = str(trl["optim"])
    if name not in optimizers:
        return trl.refuse("optim", nearest("there is no", name, optimizers), instead="optimizer")
    kwargs = _optimizer_kwargs(trl, name)
    fields: Fields = {}
    if "optim" in trl.given:
        fields["optimizer"] = optimizers[name]
    if kwargs:
        fields["optimizer_kwargs"] = kwargs
    return fields


def _optimizer_kwargs(trl: Translation, name: str) -> Fields:
    """``optim_args``, such as ``foreach=true, eps=1e-6``, and Adam's that differ from torch's."""
    kwargs: Fields = {}
    for pair in str(trl["optim_args"] or "").replace(" ", "").split(","):
        if pair:
            key, _, value = pair.partition("=")
            kwargs[key] = get_loader("yaml")(value)
    eps = float(trl["adam_epsilon"])
    betas = [float(trl["adam_beta1"]), float(trl["adam_beta2"])]
    if "adam" in name and eps != 1e-8:
        kwargs["eps"] = eps
    if "lion" in name or ("adam" in name and betas != [0.9, 0.999]):
        kwargs["betas"] = betas
    return kwargs


def evaluation(trl: Translation) -> Fields:
    strategy = trl["eval_strategy"] or trl["evaluation_strategy"] or "no"
    if strategy == "no":
        return {}
    every = trl["eval_steps"] or trl["logging_steps"] or 10
    fields = _interval(trl, strategy, "eval_steps", every, "eval_every")
    if "eval_data" in trl.ours or "eval_data" in trl.elsewhere:
        return fields
    if trl["dataset_name"] and "data" not in trl.elsewhere:
        return {**fields, "eval_data": {"split": trl["dataset_test_split"] or "test"}}
    trl.notes.append("eval_data: needed for evaluations; give held-out data")
    return fields


def saving(trl: Translation) -> Fields:
    strategy = trl["save_strategy"] or "no"
    if strategy in ("no", "best"):  # the best is kept by the rule of that name
        return {}
    if trl["save_total_limit"] is None and "keep" not in trl.elsewhere:
        trl.notes.append("keep: the 2 newest checkpoints; TRL keeps all without save_total_limit")
    return _interval(trl, strategy, "save_steps", trl["save_steps"], "save_every")


def _interval(trl: Translation, strategy: str, name: str, every: Any, field: str) -> Fields:
    """The interval between evaluations or checkpoints; below 1, a share of all steps, as TRL's."""
    if strategy == "epoch":
        return {field: "epoch"}
    if strategy != "steps":
        complaint = f"{strategy!r} is none of no, steps, epoch"
        return trl.refuse(name.replace("steps", "strategy"), complaint, instead=field)
    interval = float(every)
    return {field: interval if interval < 1 else int(interval)}


def best(trl: Translation) -> Fields:
    """The metric by which a checkpoint is the best, and whether the run ends with its weights."""
    if not trl["load_best_model_at_end"] and trl["save_strategy"] != "best":
        return {}
    metric = re.sub("^eval[_/]", "", str(trl["metric_for_best_model"] or "loss"))
    greater = trl["greater_is_better"]
    if greater is None:
        greater = not metric.endswith("loss")  # as in transformers' Trainer
    fields: Fields = {"keep_best": f"max:eval/{metric}" if greater else f"eval/{metric}"}
    if trl["load_best_model_at_end"]:
        fields["load_best_model_at_end"] = True
    return fields


def hub(trl: Translation) -> Fields:
    """The repository to upload the model to; a token is refused, as others read files and flags."""
    if not trl["push_to_hub"]:
        names = [name for name in table()["rules"]["hub"][1:] if name in trl.given]
        if names:
            trl.ignored["without push_to_hub nothing is uploaded, as in TRL"] = names
        return {}
    for name in ("hub_token", "push_to_hub_token"):
        # what transformers writes in place of a token
        if trl[name] not in (None, "", f"<{name.upper()}>"):
            why = "a token in a file or a flag is read by others; set HF_TOKEN, or log in (hf auth login)"
            trl.refuse(name, why)
    strategy = str(trl["hub_strategy"] or "every_save")
    every = {"end": "end", "every_save": "checkpoint"}
    every |= {"checkpoint": "checkpoint", "all_checkpoints": "checkpoint"}
    if strategy not in every:
        return trl.refuse("hub_strategy", nearest("there is no", strategy, every), instead="hub")
    if strategy.endswith(("checkpoint", "checkpoints")):
        trl.notes.append(
            "hub_strategy: the model of each checkpoint is uploaded; what a run resumes from stays in its directory"
        )
    fields: Fields = {"hub.id": _repository(trl), "hub.every": every[strategy]}
    revision = trl["hub_revision"] or trl["hub_model_revision"]
    if revision and revision != "main":
        fields["hub.revision"] = revision
    if trl["hub_private_repo"] is not None:
        fields["hub.private"] = trl["hub_private_repo"]
    return fields


def _repository(trl: Translation) -> str:
    """The name of the repository: that of the run's directory, unless another is given."""
    output = trl["output_dir"] or trl.elsewhere.get("output") or "burnish"
    name = trl["hub_model_id"] or trl["push_to_hub_model_id"] or Path(str(output)).absolute().name
    organization = trl["push_to_hub_organization"]
    return f"{organization}/{name}" if organization and "/" not in name else str(name)


# Names of vLLM's SamplingParams and of transformers' GenerationConfig, and ours.
_GENERATION = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "stop": "stop",
    "stop_strings": "stop",
    "max_tokens": "max_tokens",
    "max_new_tokens": "max_tokens",
}


def generation(trl: Translation) -> Fields:
    given = trl.given.get("generation_kwargs")
    if not given:
        return {}
    if isinstance(given, str):
        given = get_loader("yaml")(given)
    fields: Fields = {}
    for name, value in dict(given).items():
        if name not in _GENERATION:
            return trl.refuse(
                "generation_kwargs", nearest("there is no setting for", name, _GENERATION)
            )
        if value is not None:
            fields[_GENERATION[name]] = [value] if isinstance(value, str) else value
    return fields


def supervised_loss(trl: Translation) -> Fields:
    kind = trl["loss_type"] or "nll"
    smoothing = float(trl["label_smoothing_factor"] or 0)
    if kind not in ("nll", "chunked_nll", "dft"):
        return trl.refuse("loss_type", f"{kind!r} is none of nll, chunked_nll, dft", instead="loss")
    if smoothing and kind != "dft":
        return {"loss": {"label_smoothed_nll": {"label_smoothing": smoothing}}}
    if "loss_type" in trl.given:
        return {"loss": kind.removeprefix("chunked_")}
    return {}


def pair_loss(trl: Translation) -> Fields:
    kinds = as_list(trl["loss_type"])
    weights = as_list(trl["loss_weights"]) or [1.0] * len(kinds)
    of_means = [kind for kind in kinds if kind in table()["means"]]
    complaint = _complaint_of_pairs(trl, kinds, weights, of_means)
    if complaint:
        name, why, field = complaint
        return trl.refuse(name, why, instead=field)

    fields: Fields = {}
    if of_means:
        fields["logprob_reduction"] = "mean"
    regularizer = float(trl.given.get("rpo_alpha") or 0)  # RPO, of TRL up to 0.20
    mix = _mix_of_pairs(kinds, weights, regularizer)
    if "loss_type" in trl.given or regularizer:
        is_single = list(mix.values()) == [1.0]
        fields["loss"] = next(iter(mix)) if is_single else mix
    if "discopop_tau" in trl.given and "discopop" in kinds:
        fields["loss_kwargs"] = {"tau": float(trl["discopop_tau"])}
    couples_pairs = any(kind.startswith("aot") for kind in kinds)
    if couples_pairs and "micro_tokens" not in trl.elsewhere:
        fields["micro_tokens"] = None  # ranks couple the pairs of a step
    if of_means:
        trl.notes.append(
            "logprob_reduction: logps and rewards in the log are means over tokens too; TRL's are sums"
        )
    return fields


def _complaint_of_pairs(
    trl: Translation, kinds: Sequence[str], weights: Sequence[float], of_means: Sequence[str]
) -> tuple[str, str, str] | None:
    """The name that is wrong, why, and the field that may be given instead; None if all is well.

    Args:
        of_means: the kinds that take the mean of a completion's log-probs, where the others take
            their sum.
    """
    losses = table()["losses"]
    unknown = [kind for kind in kinds if kind not in losses]
    if unknown:
        return "loss_type", nearest("there is no", unknown[0], losses), "loss"
    if len(weights) != len(kinds):
        return "loss_weights", f"there are {len(weights)} for {len(kinds)} losses", "loss"
    if of_means and trl["f_divergence_type"] not in (None, "reverse_kl"):
        differs = "TRL's is of sums of log-probs, and here it would be of their means"
        return "f_divergence_type", f"of {', '.join(of_means)}: {differs}", "divergence"
    of_sums = [kind for kind in kinds if kind not in of_means and kind != "sft"]
    if of_means and of_sums:
        both = "some take the log-prob of a completion and some that of its tokens on average"
        return "loss_type", f"of {', '.join(kinds)} {both}", "loss"
    return None


def _mix_of_pairs(
    kinds: Sequence[str], weights: Sequence[float], regularizer: float
) -> dict[str, float]:
    """Our losses and their weights, the weight of the chosen completion's NLL among them."""
    mix: dict[str, float] = {}
    for kind, weight in zip(kinds, weights, strict=True):
        mix[table()["losses"][kind]] = float(weight)
    if regularizer:
        mix["nll"] = mix.get("nll", 0.0) + regularizer
    return mix


def alpha(trl: Translation) -> Fields:
    """TRL's coefficient is 1 - alpha: 1 is the reverse KL, 0 the forward one."""
    coefficient = float(trl["f_alpha_divergence_coef"])
    if coefficient not in (0, 1):
        return {"divergence_alpha": 1 - coefficient}
    if trl["f_divergence_type"] != "alpha_divergence":
        return {}
    return {"divergence": "reverse_kl" if coefficient else "forward_kl"}


def contrast(trl: Translation) -> Fields:
    kind = trl["loss_type"] or "sigmoid"
    alpha = float(trl["alpha"] or 0)
    if kind == "alphapo":
        return {"loss": "alpha_po", "alpha": alpha, "nll": 0.0}
    if kind == "tpo-l" or trl["tpo_alpha"] is not None:
        return _contrast_of_triples(trl, kind)
    losses = {("sigmoid", False): "cpo", ("simpo", False): "simpo", ("simpo", True): "alpha_po"}
    loss = losses.get((kind, bool(alpha)))
    if loss is None:
        name = "loss_type" if trl["loss_type"] else "alpha"
        return trl.refuse(name, f"no loss here is {kind} with alpha {alpha}")
    return {"loss": loss, "alpha": alpha} if alpha else {"loss": loss}


def _contrast_of_triples(trl: Translation, kind: object) -> Fields:
    """TPO's losses, whose NLL is that of the column `reference`; without a coefficient, there is none."""
    losses = {"sigmoid": "cpo", "tpo-l": "simpo"}
    if kind not in losses:
        return trl.refuse("loss_type", nearest("there is no", str(kind), losses))
    nll = 1.0 if trl["tpo_alpha"] is None else float(trl["tpo_alpha"])
    fields: Fields = {"loss": losses[str(kind)], "nll": nll}
    if nll:
        fields["nll_of"] = "reference"
    return fields


def policy_loss(trl: Translation) -> Fields:
    kind = trl["loss_type"]
    level = trl["importance_sampling_level"]
    clips = _clips(trl)
    losses = table()["policy_losses"]
    levels = table()["importance_sampling_levels"]
    if kind not in losses:
        return trl.refuse("loss_type", nearest("there is no", str(kind), losses))
    if level != "token" and (not _is_clipped(kind) or level not in levels):
        clipped = [each for each in losses if _is_clipped(each)]
        why = f"{level!r} goes with loss_type {', '.join(clipped)}, not with {kind}"
        return trl.refuse("importance_sampling_level", why)
    if kind == "cispo" and clips["clip_high"] < 1:
        bound = f"cispo's epsilon_high is the ratio's bound, wanted >= 1, got {clips['clip_high']}"
        return trl.refuse("loss_type", bound)

    fields: Fields = {}
    kwargs = _policy_kwargs(trl, kind, level, clips)
    if kwargs:
        fields["loss_kwargs"] = kwargs
    if {"loss_type", "importance_sampling_level"} & trl.given.keys():
        fields |= _loss_at_level(kind, level)
    entropy = float(trl["entropy_coef"] or 0)
    if entropy:
        if not _is_clipped(kind) or level != "token":
            trl.refuse("entropy_coef", f"of {kind} there is no mix here", instead="loss")
        bonus = {"coefficient": entropy, "weighting": "token_mean"}
        fields["loss"] = {"clipped_surrogate": 1.0, "entropy_bonus": bonus}
    return fields


def _loss_at_level(kind: str, level: str) -> Fields:
    """The fields of a loss whose ratios are those of tokens, or of completions."""
    loss: Fields = table()["policy_losses"][kind]
    if level == "token":
        return loss
    if kind == "grpo":
        of_level: Fields = table()["importance_sampling_levels"][level]
        return of_level
    # the ratio of a completion at each of its tokens, which are weighted as without it
    return {**loss, "variant": "gspo_token"}


def schedule(trl: Translation) -> Fields:
    kwargs = trl["lr_scheduler_kwargs"]
    if not kwargs:
        return {}
    if trl["lr_scheduler_type"] in ("constant", "constant_with_warmup"):
        trl.notes.append("lr_scheduler_kwargs: transformers' constant schedules heed none")
        return {}
    return {"schedule_kwargs": kwargs}


def _is_clipped(kind: str) -> bool:
    """True for the losses that are variants of the clipped surrogate."""
    return bool(table()["policy_losses"][kind]["variant"] == "grpo")


def _policy_kwargs(
    trl: Translation, kind: str, level: str, clips: Mapping[str, float]
) -> dict[str, float]:
    """The loss's hyper-parameters under our names."""
    kwargs: dict[str, float] = {}
    if kind == "cispo":
        kwargs["clip_high"] = clips["clip_high"] - 1  # TRL's is the bound of the ratio itself
    gives_clips = not trl.given.keys().isdisjoint({"epsilon", "epsilon_high"})
    if _is_clipped(kind) and (level != "token" or gives_clips):
        kwargs = dict(clips)
    for name, parameter in table()["hyper_parameters"].items():
        is_of_loss = name == "delta" or name.startswith(kind)
        if is_of_loss and trl.given.get(name) is not None:
            kwargs[parameter] = float(trl[name])
    return kwargs


def clipping(trl: Translation) -> Fields:
    return {"loss_kwargs": _clips(trl)}


def _clips(trl: Translation) -> dict[str, float]:
    """The bounds of the ratio; TRL's higher one is the lower one unless it is given."""
    given = trl["cliprange"] if trl["epsilon"] is None else trl["epsilon"]
    low = 0.2 if given is None else float(given)
    high = low if trl["epsilon_high"] is None else float(trl["epsilon_high"])
    return {"clip_low": low, "clip_high": high}


def correction(trl: Translation) -> Fields:
    if not trl["use_vllm"] or trl["loss_type"] == "vespo":
        return {}
    if trl["vllm_importance_sampling_correction"] is False:
        return {}
    corrections = table()["corrections"]
    mode = trl["vllm_importance_sampling_mode"]
    if mode not in corrections:
        complaint = nearest("there is no", mode, corrections)
        return trl.refuse("vllm_importance_sampling_mode", complaint)
    high = trl["vllm_importance_sampling_cap"]  # the older name of clip_max
    if high is None:
        high = trl.given.get("vllm_importance_sampling_clip_max", 3.0)
    if high is None:
        high = math.inf
    low = float(trl["vllm_importance_sampling_clip_min"] or 0)
    return {"correction": corrections[mode], "correction_low": low, "correction_high": float(high)}


def masks(trl: Translation) -> Fields:
    found: dict[str, dict[str, float]] = {}
    quantile = trl["top_entropy_quantile"]
    if quantile is not None and float(quantile) < 1:
        found["high_entropy"] = {"quantile": float(quantile)}
    threshold = trl["off_policy_mask_threshold"]
    if threshold is not None:
        found["off_policy"] = {"threshold": float(threshold)}
    return {"masks": found} if found else {}


def rewards(trl: Translation) -> Fields:
    models = []  # of two versions of TRL
    for name in ("reward_model_name_or_path", "reward_model_path"):
        if trl[name]:
            models.append(trl[name])
    names = [*models, *as_list(trl["reward_funcs"])]
    weights = as_list(trl["reward_weights"]) or [1.0] * len(names)
    if len(weights) != len(names):
        counts = f"there are {len(weights)} for {len(names)} rewards"
        return trl.refuse("reward_weights", counts, instead="rewards")
    mix: Fields = {}
    for name, weight in zip(names, map(float, weights), strict=True):
        entry = {"reward_model": {"model": name}} if name in models else _reward(name)
        if entry is None:
            there = ", ".join(sorted(table()["rewards"]))
            complaint = f"no reward {name!r}; there are {there}, or module:function"
            return trl.refuse("reward_funcs", complaint, instead="rewards")
        for ours, settings in entry.items():  # of which there is one
            mix[ours] = {**settings, "weight": weight} if settings else weight
    return {"rewards": mix}


def _reward(name: str) -> dict[str, Fields] | None:
    """Our reward for a name of TRL's, and its settings; None if there is none."""
    shipped: Mapping[str, dict[str, Fields]] = table()["rewards"]
    if name in shipped:
        return shipped[name]
    if ":" in name:
        return {name: {}}
    module, dot, function = name.rpartition(".")  # as TRL imports a function
    return {f"{module}:{function}": {}} if dot else None


def divergence(trl: Translation) -> Fields:
    """The divergence from a teacher of the same tokens; `spans` has that of another's."""
    fields: Fields = {}
    over_spans = bool(trl["use_uld_loss"])
    if "temperature" in trl.given:
        temperature = float(trl["temperature"])
        fields["temperature"] = temperature
        names_of_gkd = not trl.given.keys().isdisjoint({"lmbda", "max_new_tokens"})
        is_gkd = names_of_gkd and "max_completion_length" not in trl.given
        if not is_gkd and not over_spans:  # whose temperature is of sampling only
            fields["teacher.temperature"] = temperature
    if "beta" not in trl.given:
        return fields
    beta = float(trl["beta"])
    if over_spans and not trl["uld_use_hybrid_loss"]:
        trl.ignored["sorted probabilities are compared without it, as in TRL"] = ["beta"]
    elif over_spans and beta in (0, 1):
        why = f"of parts of two vocabularies the divergence at {beta:g} can fall below 0, wanted between 0 and 1"
        trl.refuse("beta", why, instead="teacher.beta")
    elif over_spans:
        fields["teacher.beta"] = beta
    else:
        fields["teacher.divergence"] = {0.0: "forward_kl", 1.0: "reverse_kl"}.get(beta, "jsd")
        if beta not in (0, 1):
            fields["teacher.beta"] = beta
    return fields


def _over_spans(trl: Translation, rule: str) -> bool:
    """Whether the loss is over the spans that two tokenizers share; if not, the names of the rule
    have no effect.
    """
    if trl["use_uld_loss"]:
        return True
    names = table()["recipes"]["distill"]["rules"][rule]
    without = [name for name in names if name in trl.given and name != "use_uld_loss"]
    if without:
        why = "without use_uld_loss the teacher has the same tokens, as in TRL"
        trl.ignored.setdefault(why, []).extend(without)
    return False


def spans(trl: Translation) -> Fields:
    """GOLD's loss over the spans of text that two tokenizers share."""
    if not _over_spans(trl, "spans"):
        return {}
    divergence = "gold" if trl["uld_use_hybrid_loss"] else "uld"
    return {"teacher.divergence": divergence, "weighting": "length_normalized"}


def alignment(trl: Translation) -> Fields:
    """Refuse the spans that are none here, and note where TRL's are others."""
    if not _over_spans(trl, "alignment"):
        return {}
    strategy = trl["uld_token_merge_strategy"]
    late = "reads each distribution one token late"
    if strategy is None:
        trl.notes.append(f"uld_token_merge_strategy: bayesian; observed, TRL's default, {late}")
    elif strategy != "bayesian":
        why = f"there is bayesian alone, got {strategy}"
        trl.refuse("uld_token_merge_strategy", f"{why}; TRL's observed {late}")
    if trl["use_extended_uld"] is False:
        why = "tokens are compared over spans of the same text, not by position; leave it out"
        trl.refuse("use_extended_uld", why)
    if int(trl["gradient_accumulation_steps"]) > 1:
        trl.notes.append(
            "gradient_accumulation_steps: the gradient is the mean over the whole step; TRL's is the sum over its "
            "micro-batches, whose norm is that many times as large"
        )
    ends = [trl["uld_skip_student_eos"], trl["uld_skip_teacher_eos"]]
    if ends != [False, False]:
        trl.notes.append(
            "uld_skip_student_eos: the end tokens are a span of their own, which is trained too; TRL's is only where "
            "neither is skipped"
        )
    return {}


def span_tokenizer(trl: Translation) -> Fields:
    name = trl["teacher_tokenizer_name_or_path"]
    if not _over_spans(trl, "span_tokenizer") or not name:
        return {}
    return {"teacher.tokenizer": name}


def span_temperature(trl: Translation) -> Fields:
    """The temperature of both sides, which is one."""
    if not _over_spans(trl, "span_temperature"):
        return {}
    names = ("uld_student_temperature", "uld_teacher_temperature")
    student, teacher = (1.0 if trl[name] is None else float(trl[name]) for name in names)
    if student != teacher:
        why = f"student and teacher have one temperature, got {student:g} and {teacher:g}"
        return trl.refuse("uld_teacher_temperature", why, instead="teacher.temperature")
    return {"teacher.temperature": student}


def span_weights(trl: Translation) -> Fields:
    """The weights of GOLD's parts: TRL's two of a hybrid are one weight, times the loss's."""
    if not _over_spans(trl, "span_weights"):
        return {}
    fields: Fields = {}
    weight = 1.0
    if trl["uld_distillation_weight"] is not None:
        weight = float(trl["uld_distillation_weight"])
    names = ("uld_hybrid_matched_weight", "uld_hybrid_unmatched_weight")
    parts = [trl[name] for name in names]
    if not trl["uld_use_hybrid_loss"] and parts != [None, None]:
        without = [name for name in names if name in trl.given]
        trl.ignored["without uld_use_hybrid_loss there are no two parts, as in TRL"] = without
    elif parts != [None, None]:
        if None in parts:
            alone, missing = names if parts[1] is None else names[::-1]
            return trl.refuse(alone, f"goes with {missing}: give both, or neither")
        matched, unmatched = map(float, parts)
        together = matched + unmatched
        weight *= together
        if together:
            fields["teacher.matched_weight"] = matched / together
    if weight <= 0:
        why = "nothing is left to learn from the teacher; train with sft"
        return trl.refuse("uld_distillation_weight", why, instead="loss")
    crossentropy = float(trl["uld_crossentropy_weight"] or 0)
    if crossentropy:
        nll = {"coefficient": crossentropy, "weighting": "token_mean", "of": "all"}
        fields["loss"] = {"distillation": weight, "nll": nll}
        trl.notes.append(
            "uld_crossentropy_weight: it is nll in a mix, over all tokens of the step; TRL's, over those of each "
            "micro-batch"
        )
    elif weight != 1:
        fields["loss"] = {"distillation": weight}
    return fields


def prompts(trl: Translation) -> Fields:
    limit = trl["max_prompt_length"]
    if limit is None:
        return {"max_prompt_length": None}
    return {"max_prompt_length": limit, "truncation": "keep_end"}


def data(trl: Translation) -> Fields:
    named, held_out = _parts_named(trl)
    if named is None:
        return {}
    parts = [_without_nulls({**part, **_reading(trl)}) for part in named]
    fields: Fields = {"data": parts}
    if len(parts) == 1:
        fields["data"] = parts[0]
        if parts[0].keys() == {"path"}:
            fields["data"] = parts[0]["path"]
    if held_out and "data" not in trl.elsewhere:
        fields["eval_data"] = held_out
    return fields


def _parts_named(trl: Translation) -> tuple[list[Fields] | None, object]:
    """The parts to train on, or None; and what is held out: parts, a number of rows, or a share."""
    mixture = trl["dataset_mixture"]
    if not mixture:  # its keys may stand by themselves
        mixture = {name: trl[name] for name in ("datasets", "test_split_size")}
    if mixture.get("datasets"):
        size = mixture.get("test_split_size")
        if size and size >= 1:  # rows; below 1, a share of them
            size = int(size)
        return [_part_of_mixture(part) for part in mixture["datasets"]], size
    if trl["dataset_mixer"]:
        train: list[Fields] = []
        held_out: list[Fields] = []
        for part in _parts_of_mixer(trl):
            if "test" in str(part["split"]):  # such as test_sft
                held_out.append({**part, "weight": 1})
            else:
                train.append(part)
        return train, held_out
    if trl["dataset_name"]:
        split = trl["dataset_train_split"]
        part = {"path": trl["dataset_name"], "name": trl["dataset_config"], "split": split}
        return [part], None
    return None, None


def _part_of_mixture(part: Mapping[str, object]) -> Fields:
    """A part of TRL's or of a handbook's mixture under our names."""
    return {_HANDBOOK.get(name, name): value for name, value in part.items()}


def _parts_of_mixer(trl: Translation) -> list[Fields]:
    """Each split of each part of a handbook's ``dataset_mixer``, which has weights by paths."""
    mixer = trl["dataset_mixer"]
    configs = trl["dataset_configs"] or [None] * len(mixer)
    parts: list[Fields] = []
    for (path, weight), config in zip(mixer.items(), configs, strict=True):
        for split in trl["dataset_splits"] or ["train"]:
            part: Fields = {"path": path, "split": split, "weight": weight}
            if config:
                part["name"] = config
            parts.append(part)
    return parts


def _without_nulls(part: Mapping[str, object]) -> Fields:
    return {name: value for name, value in part.items() if value is not None}


def _reading(trl: Translation) -> Fields:
    """The columns of the data under our names, as conversations where open-r1 makes some."""
    reading: Fields = {}
    columns = {trl["dataset_prompt_column"]: "prompt", trl["dataset_text_field"]: "text"}
    renamed = {theirs: ours for theirs, ours in columns.items() if theirs not in (None, ours)}
    if renamed:
        reading["columns"] = renamed
    if trl["system_prompt"] or trl["dataset_prompt_column"]:
        reading["system_prompt"] = trl["system_prompt"] or ""
    return reading


def as_list(value: object) -> list[Any]:
    """A list as it is, nothing as an empty list, and anything else as a list of it."""
    if isinstance(value, list):
        return value
    return [] if value is None else [value]
