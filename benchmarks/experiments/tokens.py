"""Processor seconds, wall seconds and memory to encode preference pairs: ``burnish bench tokens --tokenizer DIR``.

Short conversational pairs of random words are written to a JSON Lines file, and encoded from it by `encode_preference`
in a process of its own, once for each number of ``--processes``; what it writes to the disk is not there yet. The rows
must come out the same each time. Processor seconds are of all processes together. Memory is that of the process that
has most: its resident set, which counts pages of the files that are mapped, and what it has without these, which is
looked at four times a second.
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
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import torch

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


def pairs(count: int, seed: int = 0) -> Iterator[dict[str, Any]]:
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


def encode(data: str, tokenizer: str, processes: int) -> dict[str, Any]:
    """Encode a file and say what it took; called in a process of its own."""
    from transformers import AutoTokenizer

    from ...data import Tokenization, encode_preference

    loaded: Any = AutoTokenizer.from_pretrained(tokenizer)
    before, began = _processor_seconds(), time.perf_counter()
    encoded, accounting = encode_preference(data, loaded, Tokenization(max_length=1024, processes=processes))
    seconds, cpu_seconds = time.perf_counter() - began, _processor_seconds() - before
    rows = hashlib.sha256()
    for table in encoded.with_format("arrow").iter(1000):
        for column in table.columns:
            while pa.types.is_list(column.type):
                rows.update(pc.list_value_length(column).to_numpy().tobytes())
                column = pc.list_flatten(column)
            rows.update(column.to_numpy().tobytes())
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return {
        "processes": processes,
        "rows": len(encoded),
        "tokens": accounting.total_tokens,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "max_rss_mb": max(resource.getrusage(kind).ru_maxrss for kind in kinds) / 1024,
        "sha256": rows.hexdigest(),
    }


def _processor_seconds() -> float:
    usages = [resource.getrusage(kind) for kind in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _words(file: Path) -> list[str]:
    return file.read_text().split()


def _watched(command: Sequence[str], env: Mapping[str, str]) -> tuple[str, int]:
    """Standard output, and the most bytes without mapped files that the process or one of its children has had."""
    most = 0
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as running:
        process = Path("/proc", str(running.pid))
        while running.poll() is None:
            with contextlib.suppress(OSError):
                children = [Path("/proc", pid) for task in process.glob("task/*/children") for pid in _words(task)]
                status = [_words(each / "status") for each in (process, *children)]
                kilobytes = [words[words.index("RssAnon:") + 1] for words in status if "RssAnon:" in words]
                most = max([most, *(int(each) * 1024 for each in kilobytes)])
            time.sleep(0.25)
        output = running.stdout.read() if running.stdout else ""
    if running.returncode:
        raise subprocess.CalledProcessError(running.returncode, command)
    return output, most


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="burnish bench tokens", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokenizer", required=True, help="directory of a tokenizer with a chat template")
    parser.add_argument("--rows", type=int, default=100_000, help="pairs")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--output", type=Path, help="JSON file for the figures")
    parser.add_argument("--data", help=argparse.SUPPRESS)  # the file to encode, in a process of its own
    flags = parser.parse_args(arguments)
    if flags.data:
        print(json.dumps(encode(flags.data, flags.tokenizer, flags.processes[0])))
        return 0
    runs = []
    with tempfile.TemporaryDirectory(prefix="burnish-bench-") as directory:
        data = str(write_jsonl(Path(directory) / "pairs.jsonl", pairs(flags.rows)))
        for processes in flags.processes:
            cache = {"HF_DATASETS_CACHE": f"{directory}/cache-{processes}", "TOKENIZERS_PARALLELISM": "false"}
            command = [sys.executable, "-m", f"{__package__}.tokens", "--tokenizer", flags.tokenizer, "--data", data]
            output, anonymous = _watched([*command, "--processes", str(processes)], os.environ | cache)
            run = json.loads(output.splitlines()[-1]) | {"max_anonymous_mb": anonymous / 2**20}
            run["cpu_seconds_per_10k"] = run["cpu_seconds"] / run["rows"] * 10_000
            run["minutes_per_million"] = run["seconds"] / run["rows"] * 1e6 / 60
            runs.append(run)
            say(
                f"{processes} processes: {run['cpu_seconds_per_10k']:.1f} processor seconds per 10,000 pairs, "
                f"{run['minutes_per_million']:.1f} minutes per million, "
                f"{runs[0]['seconds'] / run['seconds']:.2f}x as fast as {runs[0]['processes']}, "
                f"{run['max_rss_mb']:.0f} MB, {run['max_anonymous_mb']:.0f} MB of them without files"
            )
    if len({run["sha256"] for run in runs}) > 1:
        raise RuntimeError("the rows depend on the number of processes")
    if flags.output:
        flags.output.write_text(json.dumps({"machine": machine(torch.device("cpu")), "runs": runs}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
