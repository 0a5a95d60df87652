"""Rules of TRL's names for what is trained: precision, quantization, adapters and the optimizer."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import yaml

from ..registry import nearest

if TYPE_CHECKING:
    from .trl_rules import Translation


def precision(out: "Translation", names: Sequence[str]) -> None:
    loaded = {name: str(out[name]).removeprefix("torch.") for name in ("torch_dtype", "dtype") if name in out.given}
    half = [name for name, dtype in loaded.items() if dtype == "float16"] + ["fp16"] * bool(out["fp16"])
    for name in half:
        out.refuse(name, "there is no float16 with loss scaling; bfloat16 and float32 there are", instead="dtype")
    if half:
        return
    named = [dtype for dtype in loaded.values() if dtype in ("bfloat16", "float32", "float64")]
    if "bf16" in out.given and out["bf16"] is not None:
        dtype = "bfloat16" if out["bf16"] or named == ["bfloat16"] else (named or ["float32"])[0]
    else:
        dtype = (named or ["bfloat16"])[0]
    out.set(names, dtype=dtype)
    if "bfloat16" in loaded.values() and not out["use_peft"]:
        out.set(names, weights_dtype="bfloat16")
        out.notes.append(
            "dtype: bfloat16 weights round each step by chance (see rounding), where TRL's lose small ones"
        )


def quantization(out: "Translation", names: Sequence[str]) -> None:
    if not (out["load_in_4bit"] or out["load_in_8bit"]):
        return
    out.set(names, quantize="4bit" if out["load_in_4bit"] else "8bit")
    kwargs = {
        "bnb_4bit_quant_type": out["bnb_4bit_quant_type"],
        "bnb_4bit_quant_storage": out["bnb_4bit_quant_storage"],
    }
    kwargs["bnb_4bit_use_double_quant"] = out["use_bnb_nested_quant"]
    kwargs = {name: value for name, value in kwargs.items() if value not in (None, False, "nf4")}
    if kwargs and out["load_in_4bit"]:
        out.set(names, quantize_kwargs=kwargs)


def adapters(out: "Translation", names: Sequence[str]) -> None:
    if not out["use_peft"]:
        out.ignored["without use_peft all weights are trained, as in TRL"] = out.names(names)
        return
    modules = _list(out["lora_target_modules"])
    rank, alpha = int(out["lora_r"] or 16), float(out["lora_alpha"] or 32)
    dropout = 0.05 if out["lora_dropout"] is None else float(out["lora_dropout"])
    out.set(names, lora__r=rank, lora__alpha=alpha, lora__dropout=dropout)
    for name in ("use_rslora", "use_dora"):
        if out[name]:
            out.set(names, **{f"lora__{name}": True})
    for name in ("modules_to_save", "target_parameters"):
        if out[f"lora_{name}"]:
            out.set(names, **{f"lora__{name}": _list(out[f"lora_{name}"])})
    if modules:
        out.set(names, lora__target_modules=modules[0] if len(modules) == 1 else modules)
    else:
        out.notes.append("lora.target_modules: all linear layers; TRL leaves it to peft, often q_proj and v_proj alone")


def optimizer(out: "Translation", names: Sequence[str]) -> None:
    from .trl_rules import table

    optimizers, name = table()["optimizers"], str(out["optim"] or "adamw_torch")
    if name not in optimizers:
        out.refuse("optim", nearest("there is no", name, optimizers), instead="optimizer")
        return
    pairs = [pair.partition("=") for pair in str(out["optim_args"] or "").replace(" ", "").split(",") if pair]
    kwargs: dict[str, Any] = {key: yaml.safe_load(value) for key, _, value in pairs}
    betas = [float(0.9 if out["adam_beta1"] is None else out["adam_beta1"])]
    betas += [float(0.999 if out["adam_beta2"] is None else out["adam_beta2"])]
    eps = float(1e-8 if out["adam_epsilon"] is None else out["adam_epsilon"])
    if "adam" in name and eps != 1e-8:
        kwargs["eps"] = eps
    if "lion" in name or ("adam" in name and betas != [0.9, 0.999]):
        kwargs["betas"] = betas
    if "optim" in out.given:
        out.set(names, optimizer=optimizers[name])
    if kwargs:
        out.set(names, optimizer_kwargs=kwargs)


def schedule(out: "Translation", names: Sequence[str]) -> None:
    if out["lr_scheduler_kwargs"]:
        out.set(names, schedule_kwargs=dict(out["lr_scheduler_kwargs"]))


def noise(out: "Translation", names: Sequence[str]) -> None:
    if out["neftune_noise_alpha"]:
        out.set(names, neftune_noise_alpha=float(out["neftune_noise_alpha"]))


def synchronization(out: "Translation", names: Sequence[str]) -> None:
    if out["sync_ref_model"]:
        steps, alpha = out["ref_model_sync_steps"] or 512, out["ref_model_mixup_alpha"] or 0.6
        out.set(names, ref_model_sync_steps=int(steps), ref_model_mixup_alpha=float(alpha))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]
