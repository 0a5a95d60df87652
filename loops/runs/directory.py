"""The run directory: one run, one writer, and a configuration that must not change when the run is
resumed.
"""

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedTokenizerBase

from ..config import Common
from ..lines import lines_of
from ..redaction import redacted
from .checkpoint import replace
from .lock import locked
from .ranks import barrier, from_main

log = logging.getLogger(__name__)

# What may differ when a run is resumed: none of it changes the steps that were already taken.
_FREE = {
    # A checkpoint identifies its data by content, not by path.
    *("resume", "output", "data", "eval_data", "dataset_num_proc"),
    # How long the run is, and what it leaves behind.
    *("steps", "epochs", "eval_every", "report_to", "project", "run_name", "hub"),
    *("save_every", "save_minutes", "keep", "keep_best", "load_best_model_at_end"),
    # A step is the same, but for rounding, however its memory and ranks are used.
    *("vllm", "parallel", "micro_tokens", "gradient_checkpointing", "keep_bytes"),
    *("backend", "layout", "attention", "hang_seconds", "cuda_graphs"),
}
_PLACES = {"model", "ref_model", "tokenizer"}  # which may have been moved since
_SPARE = ".config.yaml"  # beside config.yaml, in case that is damaged
_CHECKSUM = (
    b"# sha256 of the lines above: "  # the last line: a comment of YAML, and a digest in hex
)


@contextmanager
def lock_directory(config: Common, description: str, accelerator: Accelerator) -> Iterator[None]:
    """Write the described configuration, and hold the lock of the directory, if the run has one.
    The lock is released with the process at the latest. Every rank calls it.

    Raises:
        ValueError: if another process trains in the directory, or has begun to since it was looked
            at.
        MainProcessError: on the other ranks, with its message.
    """

    def claim() -> None:
        directory = Path(config.output or "")
        directory.mkdir(parents=True, exist_ok=True)
        held.enter_context(locked(directory))
        if not config.resume:
            check_directory(config)  # once more: another run may have come first to the lock
        # For the owner alone: a secret may hide where none is looked for.
        replace(directory / "config.yaml", signed(description), mode=0o600)
        replace(directory / _SPARE, signed(description), mode=0o600)

    with ExitStack() as held:
        barrier()  # every rank has looked at the directory before the main process writes to it
        if config.output is not None:
            from_main(accelerator, claim)
        yield


def check_directory(config: Common) -> None:
    """Check that the directory is free, or holds the same run to resume.

    Raises:
        ValueError: if it holds another run, or holds a run and ``config.resume`` is false.
    """
    path = Path(config.output or "") / "config.yaml"
    saved = list(path.parent.glob("checkpoints/step-*"))
    if config.output is None or not (path.exists() or saved):
        return
    if not config.resume:
        if not saved and _ended_before_first_step(path.with_name("metrics.jsonl")):
            return
        raise ValueError(
            f"output: {config.output} already holds a run; continue it (--resume true) or name another directory"
        )
    if not path.exists():  # its checkpoints were moved here
        return
    now = yaml.safe_load(to_yaml(config))
    before = _settings_before(path, config, now)
    if difference := _difference(before, now):
        key, value = difference
        elsewhere = ""
        if key in _PLACES:
            elsewhere = "if it is the same one elsewhere, say so in config.yaml; "
        raise ValueError(
            f"resume: {config.output} was run with {key}={value!r}, now it is {now[key]!r}; {elsewhere}"
            "set it back, or name another output directory"
        )
    if config.schedule != "constant":
        _warn_of_length(before, now)


def _warn_of_length(before: Mapping[str, object], now: Mapping[str, object]) -> None:
    """Log a warning where a run has another length than before, and so another schedule."""
    for key in ("steps", "epochs"):
        if before.get(key) != now[key]:
            log.warning(
                "resume: %s was %s, now it is %s: the learning rate continues as if it had always been so",
                *(key, before.get(key), now[key]),
            )


def _ended_before_first_step(metrics: Path) -> bool:
    """True if a journal has nothing but what is measured before the first step."""
    if not metrics.exists():
        return False
    with suppress(OSError):
        return all(line.startswith(b'{"step": 0,') for line in lines_of(metrics))
    return False


def _settings_before(path: Path, config: Common, now: Mapping[str, object]) -> dict[str, object]:
    """The settings that a run was begun with, from its file or the spare copy of it.

    A file without the checksum that it was written with was edited or damaged. If its spare copy
    agrees with the settings now, it does not matter which; if the file itself agrees, as one that
    was edited to agree does, it is believed.

    Raises:
        ValueError: if neither of the files can be read.
    """
    written, intact = _read_settings(path, config)
    spare, spare_intact = _read_settings(path.with_name(_SPARE), config)
    if written is not None and (intact or not spare_intact):
        if not intact and _has_checksum(path):
            log.warning(
                "resume: %s was edited or damaged since it was written; it is taken as it is", path
            )
        return written
    if spare is None or not spare_intact:
        raise ValueError(
            f"resume: {path} is damaged; write the run's settings into it, or remove it to trust these"
        )
    if written is not None and _difference(spare, now) and not _difference(written, now):
        log.warning(
            "resume: %s was edited since it was written, and the settings now are those in it", path
        )
        return written
    log.warning(
        "resume: %s was damaged or edited; the settings that the run began with are in %s",
        path,
        _SPARE,
    )
    return spare


def settings_in(directory: Path) -> dict[str, Any]:
    """The settings of a run, from its configuration or the spare copy of it.

    Raises:
        ValueError: if the directory holds no run.
    """
    for path in (directory / "config.yaml", directory / _SPARE):
        try:
            settings = yaml.safe_load(path.read_bytes())
        except (OSError, ValueError, yaml.YAMLError, RecursionError):
            continue
        if isinstance(settings, dict) and "model" in settings:
            return settings
    raise ValueError(
        f"{directory}: no run, as it has no readable config.yaml; give the directory that was a run's output"
    )


def _read_settings(path: Path, config: Common) -> tuple[dict[str, object] | None, bool]:
    """The settings in a file, None if there are none, and whether the file is as it was written."""
    try:
        content = path.read_bytes()
        settings = yaml.safe_load(content)
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return None, False
    if not isinstance(settings, dict):
        return None, False
    for each in fields(config):  # an earlier version may have had fewer settings
        default = _described(_default(each))
        value = settings.setdefault(each.name, default)
        if isinstance(value, dict) and isinstance(default, dict):
            settings[each.name] = {**default, **value}
    body, _, checksum = content.rpartition(_CHECKSUM)
    intact = checksum.strip() == hashlib.sha256(body).hexdigest().encode()
    return redacted(settings), intact


def _default(field: Field[Any]) -> object:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _has_checksum(path: Path) -> bool:
    return _CHECKSUM in path.read_bytes()


def signed(description: str) -> str:
    """Settings with a checksum, which tells a damaged or edited file from other settings."""
    digest = hashlib.sha256(description.encode()).hexdigest()
    return f"{description}{_CHECKSUM.decode()}{digest}\n"


def _difference(
    before: Mapping[str, object], now: Mapping[str, object]
) -> tuple[str, object] | None:
    """The first setting that must not change and did, with its value before."""
    for key in now:
        if key not in _FREE and before.get(key) != now[key]:
            return key, before.get(key)
    return None


def to_yaml(config: Common) -> str:
    """The configuration as YAML, without secrets; objects by name or type, a model also by a digest
    of its weights, and a tokenizer by one of its tokens. The digest of the data is in the
    checkpoints.
    """
    return str(yaml.safe_dump(redacted(_described(config)), sort_keys=False, allow_unicode=True))


def _described(value: object, name: str = "") -> Any:
    """A value of the settings in texts, numbers, lists and mappings.

    Args:
        name: of the setting.
    """
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value)]
        return {name: _described(getattr(value, name), name) for name in names}
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if value is None or isinstance(value, str | int | float):
        return value
    if name in ("data", "eval_data") and not _names_data(value):
        return type(value).__name__  # rows: the checkpoints have their digest
    if isinstance(value, Mapping):
        return {_described(key): _described(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_described(each) for each in value]
    return _name_of(value)


def _names_data(value: object) -> bool:
    """True for a mapping or a list that names data; false for rows, or an object that has them."""
    if not isinstance(value, list):
        return isinstance(value, Mapping)
    return all(isinstance(part, str) or "path" in part for part in value)


def _name_of(value: object) -> str:
    """my_rewards:brief, my_games:Doubling or Qwen3ForCausalLM 3f1c77a90b2e4d58"""
    if isinstance(value, nn.Module):
        return f"{type(value).__name__} {weights_digest(value)[:16]}"
    if isinstance(value, PreTrainedTokenizerBase):
        return f"{type(value).__name__} {tokens_digest(value)[:16]}"
    named: Any = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}:{named.__qualname__}"


def weights_digest(model: nn.Module) -> str:
    """SHA-256 of all parameters and buffers, with their names and types."""
    sha256 = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        sha256.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        sha256.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return sha256.hexdigest()


def tokens_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of all that a text's tokens depend on: vocabulary, rules, special tokens, template."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    rules: dict[str, object] = {}
    if backend is not None:
        rules = json.loads(backend.to_str())
        for state in ("truncation", "padding"):  # of the latest call
            rules.pop(state, None)
    parts = (
        sorted(tokenizer.get_vocab().items()),
        rules,
        sorted(tokenizer.special_tokens_map.items()),
        tokenizer.chat_template,
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()
