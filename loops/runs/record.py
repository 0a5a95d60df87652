"""What a run was, in ``run.json`` of its directory: one entry for each start or resume.

    {"starts": [{"began": ..., "command": ..., "call": ..., "versions": ..., "ranks": ...,
                 "model": ..., "data": ..., "ended": {"time": ..., "step": ...}}, ...]}

An entry without ``ended`` is that of a run that goes on, or was killed. Secrets are left out, see
`redaction`.
"""

import json
import logging
import os
import re
import shlex
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, Field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate import Accelerator
from datasets import Dataset

from ...data import Accounting, Records
from ..config import Common
from ..lines import move_aside
from ..redaction import MARK, hide, is_secret, redacted
from ..versions import git_revision, launch_variables, versions
from .checkpoint import CheckpointError, replace
from .feed import digest
from .ranks import from_main, gather_to_main

log = logging.getLogger(__name__)

FILE = "run.json"
Entry = dict[str, Any]  # of the record, as JSON holds it; its keys are those of `describe`
# hf://datasets/openai/gsm8k@e53f048856ff4f594e959d75785d2c2d37b678ee/main/train.parquet
_HUB_FILE = re.compile(r"hf://datasets/[^@]+@([0-9a-f]{40})/")


@contextmanager
def recorded(training: Any) -> Iterator[Entry]:
    """Add an entry to the record of a run, and its end when the run ends. Every rank calls it.

    Args:
        training: the `Training`, whose directory is locked; without a directory nothing is
            recorded.

    Yields:
        The entry on the main process; an empty one on other ranks, and for a run without a
        directory.
    """
    accelerator = training.context.accelerator
    if training.directory is None:
        yield {}
        return
    ranks = gather_to_main(accelerator, _device(accelerator))
    entries: list[Entry] = []
    path = training.directory / FILE

    def begin() -> None:
        entries.extend(read_entries(path))
        entries.append({**describe(training), "ranks": ranks})
        _write(path, entries)

    from_main(accelerator, begin)
    if not entries:  # on the other ranks
        yield {}
        return
    ended: dict[str, str] = {}
    try:
        yield entries[-1]
    except BaseException as error:  # also a signal: then the error is Stopped
        ended["error"] = type(error).__name__
        raise
    finally:
        entries[-1]["ended"] = {"time": _now(), "step": training.step, **ended}
        try:
            _write(path, entries)
        except (OSError, CheckpointError) as error:  # the run itself has ended, and says how
            log.warning("%s: the end of the run is not in it: %s", path, error)


def read_entries(path: Path) -> list[Entry]:
    """The entries of a record, oldest first.

    A file that can't be read is moved aside, with a warning.
    """
    if not os.path.lexists(path):
        return []
    try:
        entries = json.loads(path.read_bytes())["starts"]
        if not all(isinstance(each, dict) for each in entries):
            raise TypeError("wanted objects")
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        place = move_aside(path)
        log.warning(
            "%s can't be read and is %s now; a new one begins with this start", path, place.name
        )
        return []
    return list(entries)


def _write(path: Path, entries: Sequence[Mapping[str, object]]) -> None:
    replace(path, json.dumps({"starts": entries}, indent=1) + "\n", mode=0o600)


def describe(training: Any) -> Entry:
    """The entry of a run that begins, without its ranks."""
    context = training.context
    settings = changed_settings(context.config, context.description)
    recipe = recipe_name(context.config)
    name = context.config.model
    if not isinstance(name, str):  # a model in memory, which may know where it was loaded from
        name = context.model.plain.name_or_path
    model = {
        "name": name,
        "revision": getattr(context.model.plain.config, "_commit_hash", None),
        "architecture": type(context.model.plain).__name__,
    }
    entry = {
        "began": _now(),
        "command": command_line(),
        "call": call_of(recipe, settings),
        "directory": os.getcwd(),
        "recipe": recipe,
        "resumed_from": training.start,
        "steps": training.feed.steps,
        "seed": context.config.seed,
        "versions": {**versions(), "burnish revision": git_revision()},
        "launch": launch_variables(),
        "model": model,
        "data": parts_of(context.accounting, context.records),
        "eval_data": parts_of(context.eval_accounting, context.eval_records),
        "encoded_data": training.state["data"],
    }
    without_secrets: Entry = redacted(entry)
    return without_secrets


def recipe_name(config: object) -> str:
    """The name of the recipe of these settings: online_dpo of `OnlineDPO`."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(config).__name__).lower()


def changed_settings(config: Common, description: str) -> dict[str, object]:
    """The settings that are not the default ones, by name.

    Args:
        description: has their values as texts, numbers, lists and mappings, see `to_yaml`.
    """
    described: dict[str, object] = yaml.safe_load(description)
    required = [each.name for each in fields(config) if _required(each)]
    defaults = type(config)(**{name: getattr(config, name) for name in required})
    changed = {}
    for name in described:
        if name in required or _differs(config, defaults, name):
            changed[name] = described[name]
    return changed


def _required(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _differs(config: object, defaults: object, name: str) -> bool:
    value = getattr(config, name)
    default = getattr(defaults, name)
    # Objects, such as tensors, need not compare to a bool.
    return type(value) is not type(default) or repr(value) != repr(default)


def call_of(recipe: str, settings: Mapping[str, object]) -> str:
    """The run as a call in Python, in which objects are named by their type."""
    arguments = ", ".join(f"{name}={value!r}" for name, value in settings.items())
    return f"burnish.{recipe}({arguments})"


def command_line(words: Sequence[str] = ()) -> str:
    """The command that started this process, without secrets, and without ``-c`` programs.

    Args:
        words: of the command; unless given, those of this process.
    """
    shown: list[str] = []
    before = ""
    for word in words or sys.orig_argv:  # with the interpreter's own flags, which sys.argv lacks
        flag, equals, value = word.partition("=")
        if before == "-c":  # a program of many lines
            shown.append("...")
        elif is_secret(before.lstrip("-"), word):
            shown.append(MARK)
        elif equals and is_secret(flag.lstrip("-"), value):
            shown.append(f"{flag}={MARK}")
        else:
            shown.append(word)
        before = word if word.startswith("-") else ""
    return hide(shlex.join(shown))


def parts_of(accounting: Accounting | None, records: Sequence[Records]) -> list[Entry]:
    """The account of each part of the data, with the SHA-256 of its rows unless it is streamed."""
    if accounting is None:
        return []
    parts = accounting.parts or (accounting,)
    described = [_counts(part) for part in parts]
    if len(records) == len(parts):
        for part, rows in zip(described, records, strict=True):
            part["sha256"] = digest(rows.dataset)
            part["revision"] = hub_revision(rows.dataset)
    return described


def _counts(part: Accounting) -> Entry:
    return {
        "source": part.source,
        "available": part.available,
        "read": part.read,
        "kept": part.kept,
        "examples": part.examples,
        "skipped": dict(part.skipped),
        "truncated": part.truncated,
        "tokens": part.total_tokens,
        "trained_tokens": part.trained_tokens,
        "unknown_tokens": part.unknown_tokens,
    }


def hub_revision(dataset: Dataset) -> str | None:
    """The commit of a dataset of the Hub, as its files were downloaded; None for other data."""
    for address in dataset.info.download_checksums or {}:
        if found := _HUB_FILE.match(address):
            return found[1]
    return None


def _device(accelerator: Accelerator) -> dict[str, str]:
    device = accelerator.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {"host": socket.gethostname(), "device": name}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
