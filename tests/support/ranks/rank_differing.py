"""Ranks of which the last one has other settings, packages or files than the others."""

import os
import time
from pathlib import Path
from unittest.mock import patch

from burnish.loops.cli import main
from burnish.loops.recipes import sft  # noqa: F401  imports take seconds, and are not timed
from burnish.loops.runs import agreement


def be_rank(cases, flags):
    """Run the command once for each case, which says in what the last rank differs; prints status,
    seconds and case.

    Args:
        cases: names, and what the last rank has: flags, a version of a package, or another digest
            of burnish's files.
        flags: of all ranks.
    """
    last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    for name, (kind, value) in cases.items():
        own, patched = {**flags, "output": f"{flags['output']}-{name}"}, None
        if last and kind == "flag":
            own[name] = value
        elif last:
            versions = {**agreement.packages(), name: value}
            patched = patch.object(agreement, "packages", lambda versions=versions: versions)
        began = time.monotonic()
        words = [f"--{flag}={text}" for flag, text in own.items()]
        if patched is None:
            status = main(["sft", *words])
        else:
            with patched:
                status = main(["sft", *words])
        left = [path.name for path in Path(own["output"]).rglob("*.safetensors")]
        print(f"CASE {name}: status {status} in {time.monotonic() - began:.1f} s, weights {left}")
