"""TRL's names and values as our fields: the table is `trl_names.yaml`, and these are the rules that it names."""

import dataclasses
import math
import os
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from ..registry import nearest
from . import trl_data, trl_models


@dataclasses.dataclass
class Translation:
    """One configuration on its way from TRL's names to our fields.

    Attributes:
        values: TRL's names and values, its defaults beside those that are ``given``.
        known, elsewhere: our fields, and those among them that are set in our own vocabulary.
        ours, sources: values of our fields, where those of a group have a dot, and the names that each was made of.
        ignored: names without effect here, by the reason.
        notes: differences to know of.
        refused: why a name can't be translated, in a line that begins with it.
    """

    values: Mapping[str, Any]
    given: Collection[str]
    known: Collection[str]
    elsewhere: Collection[str] = ()
    ours: dict[str, Any] = dataclasses.field(default_factory=dict)
    sources: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    ignored: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)
    refused: dict[str, str] = dataclasses.field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.values.get(name)

    def set(self, names: Sequence[str], **fields: Any) -> None:
        for name, value in fields.items():
            field = name.replace("__", ".")
            if field.partition(".")[0] not in self.known:
                for each in self.names(names):
                    self.refuse(each, f"this recipe has no {field}")
                continue
            if isinstance(value, dict) and isinstance(self.ours.get(field), dict):
                value = {**self.ours[field], **value}
            self.ours[field] = value
            self.sources.setdefault(field, []).extend(self.names(names))

    def names(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if name in self.given]

    def refuse(self, name: str, why: str, *, instead: str = "") -> None:
        """Refuse a name, unless the field that could stand ``instead`` of it is set."""
        if instead.partition(".")[0] not in self.elsewhere:
            self.refused[name] = f"{name}: {why}" + (f"; give {instead} instead" if instead else "")


@cache
def table() -> dict[str, Any]:
    parsed: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("trl_names.yaml").read_text())
    return parsed


@cache
def entries(recipe: str) -> dict[str, tuple[str, Any]]:
    """What becomes of each name of TRL in a recipe: (same, renamed, values, ignored, refused or rules; its entry)."""
    found: dict[str, tuple[str, Any]] = {}
    for part in (table(), table()["recipes"].get(recipe, {})):
        found |= {name: ("renamed", name) for name in part.get("same", ())}
        found |= {name: ("renamed", field) for name, field in part.get("renamed", {}).items()}
        found |= {name: ("values", field) for name, field in part.get("values", {}).items()}
        found |= {name: ("ignored", why) for why, names in part.get("ignored", {}).items() for name in names}
        for why, names in part.get("refused", {}).items():
            found |= {name: ("refused", (why, harmless)) for name, harmless in names.items()}
        found |= {name: ("rules", None) for names in part.get("rules", {}).values() for name in names}
    return found


def translate(recipe: str, known: Collection[str], given: Mapping[str, Any], **options: Any) -> Translation:
    """Translate a mapping of TRL's names to values; all of them must be in the table."""
    defaults = table()["defaults"]
    values = {**defaults["all"], **defaults.get(recipe, {}), **given}
    out, overlay = Translation(values, given, known, **options), table()["recipes"].get(recipe, {})
    for name, value in given.items():
        kind, entry = entries(recipe)[name]
        if kind == "renamed" and entry in out.ours:
            out.refuse(name, f"{entry} is given twice, by {out.sources[entry][0]} too")
        elif kind == "renamed":
            out.set([name], **{entry.replace(".", "__"): value})
        elif kind == "values":
            out.set([name], **_choose(out, name, value, entry))
        elif kind == "ignored":
            out.ignored.setdefault(entry, []).append(name)
        elif kind == "refused":
            why, harmless = entry
            harmless = harmless if isinstance(harmless, list) else [harmless]
            if value not in (None, *harmless) and (value or harmless != [None]):
                out.refuse(name, why)
    for rule, names in {**table()["rules"], **overlay.get("rules", {})}.items():
        if out.names(names):
            try:
                # One of the functions below, or of those of data and models.
                apply = globals().get(f"_{rule}") or getattr(trl_data, rule, None) or getattr(trl_models, rule)
                apply(out, names)
            except (TypeError, ValueError) as error:  # a word where a number belongs
                out.refused[rule] = f"{', '.join(f'{each}: {out[each]!r}' for each in out.names(names))}: {error}"
    for name, note in {**table()["notes"], **overlay.get("notes", {})}.items():
        out.notes += [f"{name}: {note}"] * bool(given.get(name))
    done = {*out.refused, *(name for names in (*out.sources.values(), *out.ignored.values()) for name in names)}
    if kept := [name for name in given if name not in done]:
        out.ignored["nothing to change for these values"] = kept
    return out


def _choose(out: Translation, name: str, value: Any, entry: Mapping[Any, Any]) -> dict[str, Any]:
    field, choices = entry["field"], {key: choice for key, choice in entry.items() if key != "field"}
    value = value[0] if isinstance(value, list) and len(value) == 1 else value
    if isinstance(value, list | dict) or value not in choices:
        out.refuse(name, f"{value!r} is none of {', '.join(map(str, choices))}", instead=field)
        return {}
    return {} if choices[value] is None else {field: choices[value]}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _batch(out: Translation, names: Sequence[str]) -> None:
    per_device, accumulation = int(out["per_device_train_batch_size"]), int(out["gradient_accumulation_steps"])
    ranks = int(out["num_processes"] or os.environ.get("WORLD_SIZE", 1))
    if out["num_processes"]:
        out.notes.append("num_processes: the batch is that of so many; torchrun or accelerate launch starts them")
    if "prompts_per_rollout" not in out.known:
        out.set(names, batch_size=per_device * accumulation * ranks)
        return
    batches = int(out["steps_per_generation"] or accumulation)
    completions = int(out["generation_batch_size"] or per_device * ranks * batches)
    group, trained = int(out["num_generations"] or 1), per_device * ranks * accumulation
    named = f"{per_device} per device x {ranks} ranks"
    if completions % group:
        out.refuse(
            "num_generations" if "num_generations" in out.given else out.names(names)[0],
            f"{completions} completions of a rollout ({named} x {completions // (per_device * ranks)} batches) are no "
            f"multiple of {group} per prompt",
            instead="prompts_per_rollout",
        )
    elif completions % trained:
        out.refuse(
            "steps_per_generation" if "steps_per_generation" in out.given else "generation_batch_size",
            f"{completions} completions of a rollout are no multiple of the {trained} of a step",
            instead="minibatches",
        )
    else:
        out.set(names, prompts_per_rollout=completions // group)
        if out["num_generations"]:
            out.set(names, group_size=group)
        if completions != trained:
            out.set(names, minibatches=completions // trained)


def _duration(out: Translation, names: Sequence[str]) -> None:
    if out["max_steps"] is not None and int(out["max_steps"]) > 0:
        out.set(names, steps=int(out["max_steps"]))
    elif not float(out["num_train_epochs"]).is_integer():
        out.refuse("num_train_epochs", f"{out['num_train_epochs']} is a part of an epoch", instead="steps")
    else:
        out.set(names, epochs=int(float(out["num_train_epochs"])))


def _warmup(out: Translation, names: Sequence[str]) -> None:
    out.set(names, warmup=float(out["warmup_steps"] or out["warmup_ratio"] or 0))


def _evaluation(out: Translation, names: Sequence[str]) -> None:
    strategy = out["eval_strategy"] or out["evaluation_strategy"] or "no"
    if strategy == "no":
        return
    every = out["eval_steps"] or out["logging_steps"] or 10
    _interval(out, names, strategy, "eval_steps", every, "eval_every", "there is one at the start and at the end")
    if not trl_data.has_held_out(out):
        out.notes.append("eval_data: needed for evaluations; give held-out data")


def _saving(out: Translation, names: Sequence[str]) -> None:
    strategy = out["save_strategy"] or "no"
    if strategy == "best":
        out.refuse("save_strategy", "the last model is saved, not the best", instead="save_every")
    elif strategy != "no":
        _interval(out, names, strategy, "save_steps", out["save_steps"], "save_every", "there is one at the end")


def _interval(
    out: Translation, names: Sequence[str], strategy: str, name: str, every: Any, field: str, otherwise: str
) -> None:
    """Set the steps between two evaluations or checkpoints; below 1, TRL's are a share of all steps."""
    every, steps = float(every), int(out["max_steps"] or -1)
    if strategy == "epoch":
        out.notes.append(f"{field} counts steps, not epochs; {otherwise}")
    elif every < 1 and steps < 1:
        out.refuse(name, f"{every} is a share of the steps, whose number max_steps does not say", instead=field)
    else:
        out.set(names, **{field: math.ceil(every * steps) if every < 1 else int(every)})


def _trackers(out: Translation, names: Sequence[str]) -> None:
    trackers = _list(out["report_to"])
    if "all" in trackers:
        out.refuse("report_to", "'all' names none; name them", instead="report_to")
    else:
        out.set(names, report_to=[name for name in trackers if name != "none"] or None)


def _supervised_loss(out: Translation, names: Sequence[str]) -> None:
    kind, smoothing = out["loss_type"] or "nll", float(out["label_smoothing_factor"] or 0)
    if kind not in ("nll", "chunked_nll", "dft"):
        out.refuse("loss_type", f"{kind!r} is none of nll, chunked_nll, dft", instead="loss")
    elif smoothing and kind == "nll":
        out.set(names, loss={"label_smoothed_nll": {"label_smoothing": smoothing}})
    elif "loss_type" in out.given:
        out.set(names, loss=kind.removeprefix("chunked_"))


def _pair_loss(out: Translation, names: Sequence[str]) -> None:
    kinds = _list(out["loss_type"])
    weights = _list(out["loss_weights"]) or [1.0] * len(kinds)
    losses, means = table()["losses"], [kind in table()["means"] for kind in kinds if kind != "sft"]
    if unknown := [kind for kind in kinds if kind not in losses]:
        out.refuse("loss_type", nearest("there is no", unknown[0], losses), instead="loss")
    elif len(weights) != len(kinds):
        out.refuse("loss_weights", f"there are {len(weights)} for {len(kinds)} losses", instead="loss")
    elif any(means) and not all(means):
        out.refuse(
            "loss_type",
            f"of {', '.join(kinds)} some take the log-prob of a completion and some that of its tokens on average",
            instead="loss",
        )
    else:
        mix = {losses[kind]: float(weight) for kind, weight in zip(kinds, weights, strict=True)}
        if "loss_type" in out.given:
            out.set(names, loss=next(iter(mix)) if list(mix.values()) == [1.0] else mix)
        if any(means):
            out.set(names, logprob_reduction="mean")
        if "discopop_tau" in out.given and "discopop" in kinds:
            out.set(names, loss_kwargs={"tau": float(out["discopop_tau"])})


def _contrast(out: Translation, names: Sequence[str]) -> None:
    kind, alpha = out["loss_type"] or "sigmoid", float(out["alpha"] or 0)
    loss = {("sigmoid", False): "cpo", ("simpo", False): "simpo", ("simpo", True): "alpha_po"}.get((kind, bool(alpha)))
    if loss is None:
        out.refuse("loss_type" if "loss_type" in out.given else "alpha", f"no loss here is {kind} with alpha {alpha}")
    else:
        out.set(names, loss=loss, **({"alpha": alpha} if alpha else {}))


def _policy_loss(out: Translation, names: Sequence[str]) -> None:
    kind, level, weightings = out["loss_type"], out["importance_sampling_level"] or "token", table()["weightings"]
    kinds = (*weightings, "cispo", "sapo", "vespo")
    if kind not in kinds:
        out.refuse("loss_type", nearest("there is no", str(kind), kinds))
        return
    if level != "token" and kind != "grpo":
        out.refuse("importance_sampling_level", f"{level!r} goes with loss_type grpo, not with {kind}")
        return
    kwargs: dict[str, float] = {}
    clips = _clips(out)
    if kind == "cispo":
        if clips["clip_high"] < 1:
            out.refuse("loss_type", f"cispo's epsilon_high is the ratio's bound, wanted >= 1, got {clips['clip_high']}")
            return
        kwargs["clip_high"] = clips["clip_high"] - 1
    elif kind in weightings and (level != "token" or {"epsilon", "epsilon_high"} & set(out.given)):
        kwargs |= clips
    for name, parameter in table()["hyper_parameters"].items():
        if name in out.given and out[name] is not None and (name == "delta" or name.startswith(kind)):
            kwargs[parameter] = float(out[name])
    if kwargs:
        out.set(names, loss_kwargs=kwargs)
    if {"loss_type", "importance_sampling_level"} & set(out.given):
        variant = {"sequence": "gspo", "sequence_token": "gspo_token"}.get(level)
        out.set(names, variant=variant or ("grpo" if kind in weightings else kind))
        if kind in weightings and variant != "gspo":
            out.set(names, weighting=weightings[kind])
    if entropy := float(out["entropy_coef"] or 0):
        if kind not in weightings or level != "token":
            out.refuse("entropy_coef", f"of {kind} there is no mix here", instead="loss")
        else:
            bonus = {"coefficient": entropy, "weighting": "token_mean"}
            out.set(names, loss={"clipped_surrogate": 1.0, "entropy_bonus": bonus})


def _clipping(out: Translation, names: Sequence[str]) -> None:
    out.set(names, loss_kwargs=_clips(out))


def _clips(out: Translation) -> dict[str, float]:
    low = 0.2 if out["epsilon"] is None else float(out["epsilon"])
    return {"clip_low": low, "clip_high": low if out["epsilon_high"] is None else float(out["epsilon_high"])}


def _correction(out: Translation, names: Sequence[str]) -> None:
    if not out["use_vllm"] or out["vllm_importance_sampling_correction"] is False or out["loss_type"] == "vespo":
        return
    mode = out["vllm_importance_sampling_mode"] or "sequence_mask"
    if mode not in table()["corrections"]:
        out.refuse("vllm_importance_sampling_mode", nearest("there is no", mode, table()["corrections"]))
        return
    high = out["vllm_importance_sampling_clip_max"] or out["vllm_importance_sampling_cap"] or 3.0
    low = float(out["vllm_importance_sampling_clip_min"] or 0)
    out.set(names, correction=table()["corrections"][mode], correction_low=low, correction_high=float(high))


def _rewards(out: Translation, names: Sequence[str]) -> None:
    models = [out[name] for name in ("reward_model_name_or_path", "reward_model_path") if out[name]]
    functions = _list(out["reward_funcs"])
    weights = _list(out["reward_weights"]) or [1.0] * len(models + functions)
    if len(weights) != len(models + functions):
        out.refuse(
            "reward_weights", f"there are {len(weights)} for {len(models + functions)} rewards", instead="rewards"
        )
        return
    rewards: dict[str, Any] = {}
    for name, weight in zip([*models, *functions], map(float, weights), strict=True):
        entry = {"reward_model": {"model": name}} if name in models else table()["rewards"].get(name)
        if entry is None and not {".", ":"} & set(name):
            shipped = ", ".join(sorted(table()["rewards"]))
            out.refuse(
                "reward_funcs", f"no reward {name!r}; there are {shipped}, or module:function", instead="rewards"
            )
            return
        module, _, function = name.rpartition(".")
        ((ours, settings),) = (entry or {name if ":" in name else f"{module}:{function}": {}}).items()
        rewards[ours] = {**settings, "weight": weight} if settings else weight
    out.set(names, rewards=rewards)


def _sampler(out: Translation, names: Sequence[str]) -> None:
    if not out["use_vllm"]:
        out.ignored["without use_vllm the policy samples itself, as in TRL"] = out.names(names)
        return
    out.set(names, source="vllm" if out["vllm_mode"] == "server" else "vllm_engine")
    renamed = {"max_model_length": "max_model_len"}
    options = {
        renamed.get(name.removeprefix("vllm_"), name.removeprefix("vllm_")): out[name]
        for name in out.names(names)
        if name not in ("use_vllm", "vllm_mode", "vllm_enable_sleep_mode") and out[name] is not None
    }
    if options:
        out.set(names, vllm__options=options)


def _prompts(out: Translation, names: Sequence[str]) -> None:
    limit = out["max_prompt_length"]
    out.set(names, max_prompt_length=None if limit is None else int(limit))
    if limit is not None:
        out.set(names, truncation="keep_end")
