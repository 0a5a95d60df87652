"""TRL's names of data, and the handbook's, as `data` and `eval_data`."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .trl_rules import Translation

# Fields of a part: TRL's are ours, these are the handbook's.
_RENAMED = {"id": "path", "config": "name"}
_FIELDS = ("path", "name", "split", "revision", "data_files", "data_dir", "columns", "weight", "fraction")


def data(out: "Translation", names: Sequence[str]) -> None:
    names = [name for name in names if out[name] is not None]
    held_out: Any = None
    mixture: Mapping[str, Any] = out["dataset_mixture"] or {name: out[name] for name in ("datasets", "test_split_size")}
    splits = out["dataset_splits"] or ["train"]
    if mixture.get("datasets"):
        parts = [_part(out, each) for each in mixture["datasets"]]
        if size := mixture.get("test_split_size"):
            held_out = size if size < 1 else int(size)
    elif out["dataset_mixer"]:
        configs = out["dataset_configs"] or [None] * len(out["dataset_mixer"])
        named = [
            {"path": path, "name": config, "split": split, "weight": weight}
            for (path, weight), config in zip(out["dataset_mixer"].items(), configs, strict=True)
            for split in splits
        ]
        parts = [part for part in named if "test" not in part["split"]]
        held_out = [_shortest({**part, "weight": 1}) for part in named if "test" in part["split"]]
    elif out["dataset_name"]:
        named_part = {"path": out["dataset_name"], "name": out["dataset_config"], "split": out["dataset_train_split"]}
        parts = [named_part]
    else:
        return
    read = [_shortest({**part, **_reading(out, part)}) for part in parts]
    out.set(names, data=read[0] if len(read) == 1 else read)
    if held_out and "data" not in out.elsewhere:
        out.set(names, eval_data=held_out)


def has_held_out(out: "Translation") -> bool:
    """Name the test split of the data, where one dataset is named; true if there is held-out data."""
    if out["dataset_name"] and not {"data", "eval_data"} & {*out.elsewhere} and "eval_data" not in out.ours:
        out.set(["dataset_name"], eval_data={"split": out["dataset_test_split"] or "test"})
    return bool({"eval_data"} & {*out.ours, *out.elsewhere})


def _part(out: "Translation", each: Mapping[str, Any]) -> dict[str, Any]:
    part = {_RENAMED.get(name, name): value for name, value in each.items()}
    if unknown := part.keys() - {*_FIELDS}:
        name = "dataset_mixture" if out["dataset_mixture"] else "datasets"
        out.refuse(name, f"a part has {', '.join(sorted(unknown))}; there are {', '.join(_FIELDS)}", instead="data")
    return part


def _reading(out: "Translation", part: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a part under our names, as conversations where open-r1 makes them of a column."""
    wanted = {"dataset_prompt_column": "prompt", "dataset_text_field": "text"}
    columns = {out[name]: column for name, column in wanted.items() if out[name] not in (None, column)}
    reading: dict[str, Any] = {"columns": columns} if columns else {}
    if out["system_prompt"] or out["dataset_prompt_column"]:
        reading["system_prompt"] = out["system_prompt"] or ""
    return reading


def _shortest(part: Mapping[str, Any]) -> Any:
    """A part without what is so by default; only text, if that says it all."""
    part = {name: value for name, value in part.items() if value is not None and (name, value) != ("split", "train")}
    if part.get("weight") == 1:
        part.pop("weight")
    if part.keys() <= {"path", "name", "split"}:
        name, split = part.get("name"), part.get("split")
        return part["path"] + f":{name}" * bool(name) + f"#{split}" * bool(split)
    return part
