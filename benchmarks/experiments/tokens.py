"""Processor seconds, wall seconds and memory to encode preference pairs:
``burnish bench tokens --tokenizer DIR``.

Short conversational pairs of random words are written to a JSON Lines file. A process of its own
reads it, encodes it by `encode_preference` and plans every step of an epoch, as `burnish dpo` does,
once for each number of ``--processes``; what it writes to the disk is not there yet. The rows must
come out the same each time. Processor seconds are of all processes together, and of the parent,
which is the part that more processes don't share; on a machine that does other work, too, they say
more than the seconds.

Memory is looked at twice a second, and listed for each tenth of the time: of the parent and of each
process that tokenizes the resident set, which counts pages of the files that are mapped, and
``private``, what is not of a file; of all together the latter, pages that they share counted once.
"""

import argparse
import contextlib
import hashlib
import json
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import torch
from datasets import Dataset

from ..operation import Json
from ..real_model import write_jsonl
from ..report import machine, say

WORDS = re.findall(
    r"\w+",
    "a about all an and answer apple are as at ball be because big book but by can day do each first fish for "
    "from garden get go good great has have house how I if in into is it just know language large letter like "
    "line little long make many model morning most mountain my new night no not number of often old on one open "
    "or other out over part paper people place question quick quiet river right run say school sea second see "
    "seven she small so some stone story sun table take than that the them then there these they think thing "
    "three time to tree two under up use very walk want was water way we were what when which white who why will "
    "wind window with word work world would write year yellow you your ",
)


def pairs(count: int, seed: int = 0) -> Iterator[Json]:
    """Conversational pairs: a question of 8 to 24 words, answers of 12 to 36."""
    draw = random.Random(seed)

    def says(role: str, shortest: int, longest: int) -> list[dict[str, str]]:
        text = " ".join(draw.choices(WORDS, k=draw.randint(shortest, longest))).capitalize() + "."
        return [{"role": role, "content": text}]

    for _ in range(count):
        yield {
            "prompt": says("user", 8, 24),
            "chosen": says("assistant", 12, 36),
            "rejected": says("assistant", 12, 36),
        }


def encode(data: str, tokenizer: str, processes: int) -> Json:
    """Read, encode and plan a file and say what it took; called in a process of its own."""
    from transformers import AutoTokenizer

    from ...data import Batches, Tokenization, encode_preference, load_data, token_cost

    loaded: Any = AutoTokenizer.from_pretrained(tokenizer)
    cpu_before = _processor_seconds()
    parent_before = time.process_time()
    times = [time.perf_counter()]
    records, _ = load_data(data)
    times.append(time.perf_counter())
    encoded, accounting = encode_preference(
        records, loaded, Tokenization(max_length=1024, processes=processes)
    )
    times.append(time.perf_counter())
    batches = Batches(
        token_cost(encoded, shared_prompt=True),
        batch_size=64,
        micro_tokens=16_384,
        seed=0,
        epochs=1,
        ranks=2,
    )
    steps = sum(1 for step in range(len(batches)) if batches.plan(step))
    times.append(time.perf_counter())
    cpu_seconds = _processor_seconds() - cpu_before
    parent_cpu_seconds = time.process_time() - parent_before
    began, read, tokenized, planned = times
    return {
        "processes": processes,
        "rows": len(encoded),
        "tokens": accounting.total_tokens,
        "steps": steps,
        "seconds": planned - began,
        "read_seconds": read - began,
        "encode_seconds": tokenized - read,
        "plan_seconds": planned - tokenized,
        "cpu_seconds": cpu_seconds,
        "parent_cpu_seconds": parent_cpu_seconds,
        "sha256": _digest(encoded),
    }


def _digest(encoded: Dataset) -> str:
    """SHA-256 of all numbers, whatever chunks Arrow holds them in."""
    rows = hashlib.sha256()
    for table in encoded.with_format("arrow").iter(1000):
        for column in table.columns:
            while pa.types.is_list(column.type):
                rows.update(pc.list_value_length(column).to_numpy().tobytes())
                column = pc.list_flatten(column)
            rows.update(column.to_numpy().tobytes())
    return rows.hexdigest()


def _processor_seconds() -> float:
    usages = [resource.getrusage(kind) for kind in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _memory(process: Path) -> dict[str, float]:
    """The resident set of a process, and its pages of no file, shared ones in full and by their
    share, in MB.
    """
    lines = (line.split() for line in (process / "smaps_rollup").read_text().splitlines()[1:])
    kilobytes = {words[0]: int(words[1]) / 1024 for words in lines}
    return {
        "resident": kilobytes["Rss:"],
        "private": kilobytes["Anonymous:"],
        "share": kilobytes["Pss_Anon:"],
    }


def _watched(command: Sequence[str], env: Mapping[str, str]) -> tuple[str, dict[str, list[float]]]:
    """Standard output, and the most MB in each tenth of the time, see above."""
    samples: list[dict[str, float]] = []
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as running:
        parent = Path("/proc", str(running.pid))
        while running.poll() is None:
            # A process may end between two of its files, which then are gone or empty.
            with contextlib.suppress(OSError, KeyError):
                samples.append(_memory_of_all(parent))
            time.sleep(0.5)
        output = running.stdout.read() if running.stdout else ""
    if running.returncode:
        raise subprocess.CalledProcessError(running.returncode, command)
    return output, _most_in_tenths(samples)


def _memory_of_all(parent: Path) -> dict[str, float]:
    """MB of a process and its children: "parent, resident", "process 1, private", "all, private".

    Pages that several of them share count once in "all": each has its share of them.
    """
    sizes = {"parent": _memory(parent)}
    for number, child in enumerate(_children(parent), 1):
        sizes[f"process {number}"] = _memory(child)
    sample: dict[str, float] = {}
    private = 0.0
    for name, size in sizes.items():
        sample[f"{name}, resident"] = size["resident"]
        sample[f"{name}, private"] = size["private"]
        private += size["share"]
    return {**sample, "all, private": private}


def _children(process: Path) -> list[Path]:
    """The directories in /proc of the processes that the threads of one have started."""
    found = []
    for task in process.glob("task/*/children"):
        found += [Path("/proc", number) for number in task.read_text().split()]
    return found


def _most_in_tenths(samples: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """The highest of each number in each tenth of the samples."""
    bounds = [len(samples) * tenth // 10 for tenth in range(11)]
    tenths = [samples[begin : max(end, begin + 1)] for begin, end in pairwise(bounds)]
    most: dict[str, list[float]] = {}
    for name in dict.fromkeys(chain.from_iterable(samples)):
        most[name] = [round(max(each.get(name, 0) for each in tenth)) for tenth in tenths]
    return most


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="burnish bench tokens",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--tokenizer", required=True, help="directory of a tokenizer with a chat template"
    )
    parser.add_argument("--rows", type=int, default=100_000, help="pairs")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--output", type=Path, help="JSON file for the figures")
    # the file to encode, in a process of its own
    parser.add_argument("--data", help=argparse.SUPPRESS)
    flags = parser.parse_args(arguments)
    if flags.data:
        print(json.dumps(encode(flags.data, flags.tokenizer, flags.processes[0])))
        return 0
    runs = []
    with tempfile.TemporaryDirectory(prefix="burnish-bench-") as directory:
        data = str(write_jsonl(Path(directory) / "pairs.jsonl", pairs(flags.rows)))
        for number, processes in enumerate(flags.processes):
            cache = {
                "HF_DATASETS_CACHE": f"{directory}/cache-{number}",
                "TOKENIZERS_PARALLELISM": "false",
            }
            command = [
                sys.executable,
                "-m",
                f"{__package__}.tokens",
                "--tokenizer",
                flags.tokenizer,
                "--data",
                data,
            ]
            output, memory = _watched([*command, "--processes", str(processes)], os.environ | cache)
            run = json.loads(output.splitlines()[-1]) | {"memory_mb": memory}
            run["cpu_seconds_per_10k"] = run["cpu_seconds"] / run["rows"] * 10_000
            run["minutes_per_million"] = run["seconds"] / run["rows"] * 1e6 / 60
            runs.append(run)
            say(
                f"{processes} processes: {run['cpu_seconds_per_10k']:.1f} processor seconds per 10,000 pairs, "
                f"{run['minutes_per_million']:.1f} minutes per million, "
                f"{runs[0]['seconds'] / run['seconds']:.2f}x as fast as {runs[0]['processes']}, "
                f"{max(memory['all, private'])} MB without files, "
                f"{run['plan_seconds']:.1f} s to plan {run['steps']:,} steps"
            )
    if len({run["sha256"] for run in runs}) > 1:
        raise RuntimeError("the rows depend on the number of processes")
    if flags.output:
        flags.output.write_text(
            json.dumps({"machine": machine(torch.device("cpu")), "runs": runs}, indent=2) + "\n"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
