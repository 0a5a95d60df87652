"""Check the files that a configuration names before anything is read, downloaded or loaded."""

import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
from datasets import Dataset
from torch import nn
from transformers import AutoConfig, PreTrainedTokenizerBase

from ...data import DataError
from ...data.records import READERS
from ..config import Common
from ..models.io import as_missing_model

_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "*.index.json")


def check_files(config: Common) -> None:
    """Check local files and directories, and that models beside the trained one exist, on the Hub
    too.

    Raises:
        ValueError: names the field, its value and what is wrong with it.
    """
    _check_models(config)
    _check_data(config)
    _check_results_of_earlier_runs(config)
    python = _value(config, "vllm.python")
    if python is not None and shutil.which(python) is None:
        raise ValueError(
            f"vllm.python: {python}: no such file, or it can't be executed; wanted an interpreter"
        )
    if config.output is not None and os.environ.get("RANK", "0") == "0":
        _check_writable(Path(config.output))


def _check_models(config: Common) -> None:
    """Check each model that is named, and that the run does not write over one of them."""
    results = []
    if config.output:
        results = [Path(config.output, name).resolve() for name in ("model", "adapter", "critic")]
    for field in ("model", "ref_model", "teacher.model", "value_model", "lora.path"):
        name = _value(config, field)
        if not isinstance(name, str) or not name:
            continue
        if Path(name).resolve() in results:
            raise ValueError(
                f"output: this run would write over its {field}, {name}; name another directory"
            )
        if field == "lora.path":
            continue  # looked at where it is loaded
        if is_directory(name):
            check_model(field, Path(name))
            if field == "model" and config.model_revision not in (None, "main"):
                raise ValueError(
                    f"model_revision: {name} is a directory, and holds one revision; leave it out, or name a model on "
                    f"the Hub, got {config.model_revision!r}"
                )
        elif field != "model":  # the tokenizer of the model is read next
            with as_missing_model(field, name):
                AutoConfig.from_pretrained(name)


def _check_data(config: object) -> None:
    """Check that data files and directories exist; names on the Hub are not looked up."""
    for field in ("data", "eval_data"):
        name = _value(config, field)
        if not isinstance(name, str):
            continue
        path = re.split(r"[:@#\[]", name)[0]  # train.jsonl of train.jsonl[:1000], and the like
        is_pattern = "*" in path
        is_local = Path(path).suffix in READERS or path.startswith(("/", "./", "../", "~"))
        if path and is_local and not is_pattern and not Path(path).exists():
            kind = "file" if Path(path).suffix else "file or directory"
            raise DataError(f"{field}: {path}: no such {kind}")


def _check_results_of_earlier_runs(config: object) -> None:
    left = {
        "teacher.logprobs": "a run with top_k leaves one, teacher-....safetensors, in its directory",
        "value_head": "a run leaves one, value_head.safetensors, in its directory",
    }
    for field, origin in left.items():
        name = _value(config, field)
        if name is not None and not Path(name).is_file():
            raise DataError(f"{field}: {name}: no such file; {origin}")


def _value(config: object, field: str) -> Any:
    for name in field.split("."):
        config = getattr(config, name, None)
    return config


def is_directory(name: str) -> bool:
    """True for a model's name that is no name on the Hub, which has one slash at most, such as
    Qwen/Qwen3-0.6B.
    """
    return name.startswith(("/", ".", "~")) or name.count("/") > 1 or Path(name).exists()


def check_model(field: str, path: Path) -> None:
    """Raise ValueError unless a directory holds a model, or an adapter."""
    if not path.is_dir():
        wrong = "it is a file" if path.exists() else "there is no such directory"
        raise ValueError(
            f"{field}: {path} is neither a directory that holds a model and its tokenizer, nor one on the Hub: {wrong}"
        )
    if not any((path / name).exists() for name in ("config.json", "adapter_config.json")):
        hint = ""
        if (path / "model/config.json").exists():  # the directory of a run
            hint = f"; a run left one in {path / 'model'}"
        raise ValueError(
            f"{field}: {path}: no config.json; wanted the directory that holds a model and its tokenizer{hint}"
        )
    if not any(file for pattern in _WEIGHTS for file in path.glob(pattern)):
        raise ValueError(
            f"{field}: {path}: no weights; wanted model.safetensors or the like beside its config.json"
        )


def _check_writable(path: Path) -> None:
    """Create and remove a directory at the run's path, because permissions alone don't guarantee
    that writing works.
    """
    above = next(each for each in (path, *path.absolute().parents) if os.path.lexists(each))
    if not above.is_dir():
        kind = "a link to nothing" if above.is_symlink() else "a file"
        raise ValueError(f"output: {above} is {kind}; name another directory")
    try:
        tempfile.TemporaryDirectory(dir=above, prefix=".burnish-").cleanup()
    except OSError as error:
        raise ValueError(
            f"output: {path} can't be written ({error.strerror}); name another directory"
        ) from error


def check_tokens(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, *data: Dataset | None
) -> None:
    """Raise ValueError if examples have tokens without an embedding in the model, which a GPU
    reports as an assertion.

    Tokenizers of some models have more tokens than the model has embeddings, which is fine unless
    the data uses them.
    """
    table: Any = model
    embeddings = table.get_input_embeddings().weight.shape[0]
    if embeddings >= len(tokenizer):
        return
    for part in filter(None, data):
        largest = 0
        for name in ("prompt", "completions"):
            if name in part.column_names:  # by Arrow: Python's lists would take minutes
                tokens = pc.list_flatten(part.data.column(name), recursive=True)
                largest = max(largest, pc.max(tokens).as_py() or 0)
        if largest >= embeddings:
            raise ValueError(
                f"model: it has {embeddings} embeddings, and its tokenizer {len(tokenizer)} tokens, of which the data "
                f"has number {largest}; take the tokenizer that the model was made with"
            )
