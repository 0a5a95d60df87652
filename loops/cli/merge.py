"""``burnish merge ADAPTER OUT [--model BASE]``: a LoRA adapter of peft, merged into its base model.

OUT has the base's dtype: each weight is merged in float32 and rounded once. A quantized base is
dequantized.
"""

import argparse
import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from peft import get_peft_model_state_dict
from peft.utils.save_and_load import load_peft_weights
from torch import Tensor, nn

from ..config import Lora
from ..models.adapters import UNMERGED
from ..models.backbone import Backbone
from ..models.io import (
    LABELS_FILE,
    find_images,
    load_classifier,
    load_model,
    load_tokenizer,
    write_model,
)
from ..recipes.reward import set_pad_token
from ..recipes.settings import SFT
from ..registry import as_setting_error
from .export import refuse_used
from .offline import go_offline

_CLASSIFIERS = ("SEQ_CLS", "TOKEN_CLS")


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "burnish merge",
        description="Merge a LoRA adapter of peft into its base model.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "adapter", metavar="ADAPTER", type=Path, help="directory of an adapter, such as RUN/adapter"
    )
    parser.add_argument(
        "out", metavar="OUT", type=Path, help="directory of the merged model, new or empty"
    )
    parser.add_argument("--model", help="its base model, if that is not where the adapter says")
    return parser


def run(words: Sequence[str]) -> None:
    options = parser().parse_args(words)
    merge(options.adapter, options.out, base=options.model)
    print(f"the merged model is in {options.out}")


def merge(adapter: Path, target: Path, *, base: str | None = None) -> None:
    """Write the base model of an adapter, with the adapter merged, as transformers loads it.

    Args:
        adapter: directory with adapter_config.json, and a tokenizer if it has its own.
        target: directory of the model, new or empty.
        base: name or directory of the base model; unless given, what the adapter was made for.

    Raises:
        ValueError: if it is no adapter that can be merged, if it is one of another model, or if the
            target holds something.
    """
    described = _described(adapter)
    refuse_used(target)
    if base is None:
        base = described.get("base_model_name_or_path")
    if not base:
        raise ValueError(f"{adapter}: names no base model; give --model")
    go_offline([base])
    own_tokenizer = (adapter / "tokenizer_config.json").exists()
    config = SFT(
        model=base,
        model_revision=described.get("revision"),
        tokenizer=str(adapter) if own_tokenizer else None,
        data="none",
        dtype="float32",  # in which it is merged
        lora=Lora(path=str(adapter)),
    )
    tokenizer = load_tokenizer(config)
    weights: dict[str, Tensor] = load_peft_weights(str(adapter), device="cpu")
    task = described.get("task_type") or "CAUSAL_LM"
    refused = as_setting_error(
        f"{adapter}: not an adapter of {base}", RuntimeError, ValueError, KeyError
    )
    with refused, warnings.catch_warnings():
        # `_check_whole` refuses them
        warnings.filterwarnings("ignore", "Found missing adapter keys")
        policy = Backbone(_with_adapter(config, task, weights))
    _check_whole(adapter, base, weights, policy)
    if task in _CLASSIFIERS:
        set_pad_token(policy.plain, tokenizer)
    policy.reader = find_images(config, tokenizer)
    write_model(policy, tokenizer, target)


def _described(adapter: Path) -> dict[str, Any]:
    """The configuration of an adapter; ValueError unless it is LoRA that merges into weights."""
    path = adapter / "adapter_config.json"
    if not path.exists():
        raise ValueError(
            f"{adapter}: no adapter, as it has no adapter_config.json; a run leaves one in RUN/adapter"
        )
    described: dict[str, Any] = json.loads(path.read_text())
    kind = described.get("peft_type")
    if kind != "LORA":
        raise ValueError(
            f"{adapter}: wanted an adapter of LoRA, got one of {kind}, which burnish doesn't merge"
        )
    if odd := sorted(name for name in UNMERGED if described.get(name)):
        raise ValueError(
            f"{adapter}: its {odd[0]} can't be merged into a plain model; use it with peft"
        )
    task = described.get("task_type")
    if task not in (None, "CAUSAL_LM", *_CLASSIFIERS):
        raise ValueError(
            f"{adapter}: wanted an adapter of a causal LM or a classifier, got one for {task}"
        )
    return described


def _with_adapter(config: SFT, task: str, weights: Mapping[str, Tensor]) -> nn.Module:
    """The base model with the adapter; of a classifier, with the outputs of the adapter's head."""
    if task not in _CLASSIFIERS:
        return load_model(config)
    labels = _labels(config.lora.path, _outputs(weights))
    kind: Literal["SEQ_CLS", "TOKEN_CLS"] = "SEQ_CLS" if task == "SEQ_CLS" else "TOKEN_CLS"
    return load_classifier(config, kind, labels)


def _labels(adapter: str | None, count: int) -> dict[int, str]:
    """Names of the classifier's outputs: those that burnish left beside the adapter, if it did."""
    path = Path(adapter or "", LABELS_FILE)
    if not path.exists():
        return {label: f"LABEL_{label}" for label in range(count)}
    return {int(label): name for label, name in json.loads(path.read_text()).items()}


def _outputs(weights: Mapping[str, Tensor]) -> int:
    """The number of outputs of the classifier's head that an adapter has trained."""
    heads = [
        weight
        for name, weight in weights.items()
        if name.endswith(("score.weight", "classifier.weight"))
    ]
    if not heads:
        raise ValueError("it has no head, and that of the base model would be random")
    return len(heads[0])


def _check_whole(adapter: Path, base: str, weights: Mapping[str, Tensor], policy: Backbone) -> None:
    """Raise ValueError if weights of the adapter have no place in the model, or the reverse.

    peft warns of the former at most, and leaves the latter as they begin, adding nothing.
    """
    placed = get_peft_model_state_dict(policy.model, save_embedding_layers=False)
    odd = sorted(weights.keys() ^ placed.keys())
    if odd:
        where = "the adapter" if odd[0] in weights else "the model with its adapter"
        raise ValueError(
            f"{adapter}: not an adapter of {base}: {odd[0]} is in {where} alone; give --model"
        )
