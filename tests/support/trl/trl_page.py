"""The page that lists what becomes of TRL's names, made from their table: run it to write the page
again.
"""

import dataclasses
from pathlib import Path

import yaml
from burnish.benchmarks.docs.markdown import wrapped
from burnish.loops.cli import launch
from burnish.loops.cli.trl import table, translate
from burnish.loops.recipes import settings_of

PAGE = Path(__file__).parents[3] / "docs/trl-names.md"
RECIPES = yaml.safe_load(Path(__file__).with_name("trl_recipes.yaml").read_text())
COMMANDS = yaml.safe_load(Path(__file__).with_name("trl_commands.yaml").read_text())

HEAD = """# TRL's names, one by one

`burnish dpo --config trl.yaml` reads a file of TRL as it is, and its flags: `--model_name_or_path`,
`--per_device_train_batch_size`, `--bf16`. Names of both may be mixed in one file; a field that is given by both is
refused, and a flag wins over a file. `burnish translate dpo trl.yaml` prints the file in burnish's names, with what has
no effect and what is refused as comments. What can't be translated is refused by name, all in one message.

A command line moves over by its first words, and may be pasted as it is after `burnish translate`:

| TRL | burnish |
| -- | -- |
| `trl dpo --beta 0.2` | `burnish dpo --beta 0.2` |
| `trl dpo --config trl.yaml --beta 0.2` | `burnish dpo --config trl.yaml --beta 0.2` |
| `accelerate launch --num_processes 8 dpo.py --beta 0.2` | `torchrun --nproc_per_node 8 -m burnish dpo --beta 0.2` |
| `accelerate launch --config_file zero3.yaml --num_processes 8 dpo.py` | the same, and `--parallel.dp_shard_size 8` |
| to read it first | `burnish translate accelerate launch --num_processes 8 dpo.py --beta 0.2` |

The ranks of a launch line share the model here as they do there ([below](#launch-lines)).

Only what a file says is translated: where it says nothing, burnish's defaults hold. A run begins with three lines at
most on what differs; `burnish translate` prints all of it. `--defaults trl` (or `defaults: trl` in the file) takes
TRL's defaults.

Means, ranks and the KL of KTO are over the whole step, on all ranks, however it is split. TRL takes some of them over
each micro-batch: `aot`, `sft`, `bnpo` and the nll of CPO and ORPO, where a run with `gradient_accumulation_steps` or
ranks says so.

Of the checkpoints the 2 newest stay, or as many as `save_total_limit` says (`keep`); TRL keeps all without it.

This page is made from the table that the command reads, `loops/cli/trl_names.yaml`.
"""


def lines(title, rows, header):
    columns = len(header)
    table = ["", f"## {title}", "", f"| {' | '.join(header)} |", "|" + " -- |" * columns]
    return [*table, *(f"| {' | '.join(map(str, row))} |" for row in rows)]


def code(names):
    return ", ".join(f"`{name}`" for name in names)


def defaults():
    """The fields whose defaults differ: recipe, field, ours, TRL's."""
    for recipe in ("sft", "dpo", "kto", "cpo", "orpo", "reward", "grpo", "rloo", "online_dpo"):
        config = {field.name: field for field in dataclasses.fields(settings_of(recipe))}
        given = {**table()["defaults"]["all"], **table()["defaults"].get(recipe, {})}
        for field, value in translate(recipe, config, given).ours.items():
            default = config[field].default
            if default != value:
                yield recipe, field, default, value


LAUNCH = """
A file of accelerate's, of DeepSpeed's or of FSDP's settings is read where it is; one that is not here, by its name,
such as `deepspeed_zero3.yaml`. `burnish translate` prints the line of torchrun, and the file that shards as the launch
line does. ZeRO and FSDP become FSDP2 (`parallel.dp_shard_size`) over all ranks, or over those of a machine
(`HYBRID_SHARD`): the stages 1 and 2 of ZeRO, too, whose ranks keep all parameters there. A setting of burnish's own,
such as `--parallel.dp_shard_size 4`, wins over the launch line.
"""


def launch_lines():
    """The section on launchers, made from their table."""
    names = launch.names()
    rows = []
    for name, keys in names["presets"].items():
        shards = names["types"][keys["distributed_type"]] in ("fsdp", "deepspeed")
        copies = "one rank" if keys["distributed_type"] == "NO" else "a copy on each rank"
        rows.append((f"`{name}`", "`parallel.dp_shard_size`: all ranks" if shards else copies))
    text = ["", "## Launch lines", *LAUNCH.rstrip().splitlines(), ""]
    text += lines("", rows, ("file", "how the model is shared"))[3:]
    text += ["", f"Read together: {code(names['rules']['sharding'])}.", ""]
    rows = [
        ("taken by torchrun, or without effect", why, code(each))
        for why, each in names["ignored"].items()
    ]
    rows += [("refused, unless off", why, code(each)) for why, each in names["refused"].items()]
    return [*text, *lines("", rows, ("", "because", "flags and keys"))[3:]]


def page():
    names = table()
    overlays = names["recipes"].items()
    differing = {}
    for recipe, *row in defaults():
        differing.setdefault(tuple(map(str, row)), []).append(recipe)
    rows = [
        (code(recipes), f"`{field}`", ours, theirs)
        for (field, ours, theirs), recipes in differing.items()
    ]
    text = [
        HEAD.rstrip(),
        *lines("Defaults that differ", rows, ("recipes", "field", "burnish", "TRL")),
    ]
    text += ["", "What differs besides, where a name is the same or none is there to be given:", ""]
    notes = [
        ("all recipes", names["notes"]),
        *((recipe, part.get("notes", {})) for recipe, part in overlays),
    ]
    text += [
        f"- `{name}` ({recipe}): {note}" for recipe, part in notes for name, note in part.items()
    ]
    text += [
        f"- `{name}` ({recipe}): {note}"
        for recipe, part in names["silent"].items()
        for name, note in part.items()
    ]
    text += [f"- `{name}` (all recipes): {note}" for name, note in names["open"].items()]
    renamed = [("", part) for part in (names["renamed"],)] + [
        (r, part.get("renamed", {})) for r, part in overlays
    ]
    rows = [
        (f"`{name}`" + f" ({r})" * bool(r), f"`{field}`")
        for r, part in renamed
        for name, field in part.items()
    ]
    text += lines("Other names", rows, ("TRL", "burnish"))
    text += ["", f"The same in both: {code(names['same'])}."]
    values = [("", names["values"])] + [
        (recipe, part.get("values", {})) for recipe, part in overlays
    ]
    rows = [
        (
            f"`{name}`" + f" ({r})" * bool(r),
            f"`{entry['field']}`",
            ", ".join(str(a) if a == b else f"{a} → {b}" for a, b in entry.items() if a != "field"),
        )
        for r, part in values
        for name, entry in part.items()
    ]
    text += lines("Other values", rows, ("TRL", "burnish", "values"))
    losses = ", ".join(f"{a} → {b}" for a, b in names["losses"].items())
    text += [
        "",
        f"`loss_type` (dpo): {losses}; {code(names['means'])} with `logprob_reduction: mean`.",
    ]
    together = {}
    for recipe, part in [("all recipes", names), *overlays]:
        for rule, each in part.get("rules", {}).items():
            together.setdefault((rule.replace("_", " "), code(each)), []).append(recipe)
    rows = [(f"{rule} ({', '.join(recipes)})", each) for (rule, each), recipes in together.items()]
    text += lines("Names that are read together", rows, ("for", "TRL"))
    ignored = [
        *names["ignored"].items(),
        *(item for _, part in overlays for item in part.get("ignored", {}).items()),
    ]
    rows = dict((why, code(each)) for why, each in ignored).items()
    text += lines("No effect here", rows, ("because", "TRL"))
    rows = [(f"`{script}.py`", f"`burnish {words}`") for script, words in names["scripts"].items()]
    text += lines("Scripts", rows, ("TRL", "burnish, in TRL's names"))
    rows = [(why, code(each)) for why, each in names["refused"].items()]
    text += lines("Refused, unless they are off", rows, ("because", "TRL"))
    text += launch_lines()
    rows = [(f"`{name}`", ours.replace("|", "or")) for name, ours in names["python"].items()]
    text += lines("Arguments of TRL's trainers in Python", rows, ("TRL", "burnish"))
    return wrapped("\n".join(text) + "\n")


if __name__ == "__main__":
    PAGE.write_text(page())
