"""Record the numbers of every recipe and kernel, and compare them, bit by bit, with those of
another tree.

    python tests/identity.py record FILE                        numbers of this tree, as JSON; status 1 if one fails
    python tests/identity.py compare FILE [NEWER]               differences to this tree, or between two files; status 1
    python tests/identity.py compare FILE --only '^(grpo|ppo)'  of the cases whose name matches

Recipes take three optimizer steps on a tiny model through the command line, in float32 and under
bfloat16 autocast, on one process and on two (gloo): all metrics, and a SHA-256 of every final
weight. Kernels, which are listed in support/tools/identity_kernels.py, give a SHA-256 of every
output and gradient. All runs on the CPU in one thread. Numbers depend on the processor and on
packages: record both sides on one machine, and do not commit the file. After a flag is renamed,
edit the tables; after a metric or a file is renamed, add it to `RENAMED`.
"""

import argparse
import contextlib
import hashlib
import io
import json
import os
import pkgutil
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
import traceback
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# transformers looks for `kernels`
sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != HERE]
ROOT = Path(pkgutil.resolve_name("burnish").__file__).parent
for support in (ROOT / "tests" / "support", HERE / "support"):
    if any(support.glob("*.py")):  # of an earlier tree, whose modules lie in one folder
        sys.path.append(str(support))
    # Not the folder of folders: its torchvision would be taken for the package of this name.
    sys.path += map(str, support.glob("*/"))

PARTS = {  # what a command names by @
    "steps": "--model @model --steps 3 --learning_rate 1e-3 --micro_tokens 160",
    "offline": "@steps --batch_size 6",
    "sft": "sft @offline --data @demonstrations --eval_data @demonstrations",
    "dpo": "dpo @offline --data @pairs",
    "distill": "distill @offline --data @demonstrations --teacher.model @teacher",
    "sampled": "--group_size 4 --max_tokens 8 --show_every 0",
    "rewards": "--rewards '{identity_inputs:even: 1.0, identity_inputs:brief: 0.3}'",
    "online": "@steps @sampled @rewards --prompts_per_rollout 4 --data @prompts --learning_rate 1e-2",
    "split": "--epochs_per_rollout 2 --minibatches 2 --beta 0.05",
}
RECIPES = {  # in both precisions, on one rank and on two
    "sft": "@sft",
    "dpo": "@dpo --eval_data @pairs",
    "cpo": "cpo @offline --data @pairs",
    "orpo": "orpo @offline --data @pairs",
    "kto": "kto @offline --data @feedback",
    "reward": "reward @offline --data @pairs --eval_data @pairs --centering 0.01 --margin better",
    "prm": "prm @offline --data @solutions",
    "distill": "@distill",
    "distill_on_policy": "@distill @sampled --on_policy 0.5 --teacher.divergence jsd",
    "grpo": "grpo @online @split --eval_data @prompts",
    "rloo": "rloo @online --epochs_per_rollout 2",
    "ppo": "ppo @online @split --group_size 2 --missing_eos_penalty 0.5",
    "online_dpo": "online_dpo @online --loss '{dpo: 1.0, nll: 0.1}' --missing_eos_penalty 0.5",
}
VARIANTS = {  # in float32 on one rank, in bfloat16 on two
    "sft_mix": "@sft --weighting length_normalized --loss '{nll: 1, dft: 0.5, z_loss: 1.0e-2, entropy_bonus: 0.01, "
    "label_smoothed_nll: {coefficient: 0.3, label_smoothing: 0.1, weighting: token_mean}}'",
    "sft_padded": "@sft --layout padded --attention eager --schedule cosine --warmup 1 --weight_decay 0.1",
    "sft_packed": "@sft --layout packed --gradient_checkpointing true --keep_bytes 0 --train_on all",
    "sft_reference": "@sft --backend reference --shuffle false --max_length 24 --truncation keep_end --save_every 1",
    "sft_lora": "@sft --lora.r 4 --lora.dropout 0.1",
    "dpo_losses": "@dpo --loss_kwargs '{gamma: 0.5, tau: 0.05, alpha: 0.25}' --label_smoothing 0.1 --loss '{dpo: 1, "
    "ipo: 0.1, robust_dpo: 1, hinge: 1, exo: 1, nca: 1, bco_pair: 1, sppo_hard: 0.1, apo_zero: 1, apo_down: 1, "
    "discopop: 1, cpo: 1, simpo: 1, alpha_po: 1, orpo: 1, nll: 0.1}'",
    "dpo_wpo": "@dpo --pair_weight wpo --ld_alpha 0.5 --layout padded",
    "dpo_js": "@dpo --divergence js --logprob_reduction mean --layout packed",
    "dpo_alpha": "@dpo --divergence alpha --divergence_alpha 0.3 --reference copy --lora.r 4",
    "dpo_precomputed": "@dpo --reference precompute",
    "dpo_distilled": "@dpo --teacher.model @teacher --loss '{dpo: 1, distillation: {coefficient: 0.5, of: all}}'",
    "simpo": "cpo @offline --data @pairs --loss simpo --beta 2 --nll 0",
    "alpha_po": "cpo @offline --data @pairs --loss alpha_po",
    "bco": "kto @offline --data @feedback --loss '{bco: 1, nll: 0.1}'",
    "apo_zero_unpaired": "kto @offline --data @pairs --loss apo_zero_unpaired --reference precompute",
    "reward_scores": "reward @offline --data @scores --loss score_regression --lora.r 4",
    "reward_rankings": "reward @offline --data @rankings --loss plackett_luce",
    "prm_last_step": "prm @offline --data @solutions --train_on_last_step_only true",
    "distill_top_k": "@distill --teacher.top_k 3 --teacher.temperature 1.5",
    "distill_reverse_kl": "@distill --teacher.divergence reverse_kl --loss '{distillation: 1, nll: 0.5}'",
    "sampled_reverse_kl": "@distill @sampled --on_policy 1 --loss sampled_reverse_kl --temperature 0.9",
    **{variant: f"grpo @online @split --variant {variant}" for variant in (
        "dr_grpo", "dapo", "cispo", "gspo", "gspo_token", "gmpo", "sapo", "vespo", "dppo")},
    "grpo_once": "grpo @online --mask_truncated true --top_p 0.9 --correction tis --correction_high 0.902",
    "grpo_kl_in_reward": "grpo @online @split --kl_as reward --kl k2 --scale batch --weighting token_mean --lora.r 4",
    "grpo_gdpo": "grpo @online @split --reward_aggregation normalize --temperature 0.8 --top_k 240 "
    "--correction icepop",
    "grpo_mix": "grpo @online @split --loss '{clipped_surrogate: 1, entropy_bonus: 0.01, topr: 0.1, reinforce: 0.1}'",
    # one by one: same bits
    "grpo_turns": "grpo @online --environment guess_number --limits.turns 3 --cache_bytes 1",
    "gspo_truncated": "grpo @online --variant gspo --top_p 0.9 --correction sequence_tis --correction_high 0.6",
    "gspo_masked": "grpo @online --variant gspo --top_p 0.9 --correction sequence_mask",
    "gspo_mean_masked": "grpo @online --variant gspo --top_p 0.9 --correction geometric_mask --correction_low 0.901",
    "rloo_whitened": "rloo @online @split --scale batch --loss reinforce",
    "ppo_critic": "ppo @online @split --value_model @teacher --loss '{clipped_surrogate: 1, entropy_bonus: 0.01}'",
}  # fmt: skip
# Fields of a line of metrics that are no results.
SKIPPED = ("step", "seconds", "sampling/seconds", "ranks/slowest", "ranks/excess_seconds")
# Regular expression -> replacement, for names of cases and numbers in an older file.
RENAMED = {"answer_surrogate": "completion_surrogate"}
ENVIRONMENT = {
    "ACCELERATE_USE_CPU": "true",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONHASHSEED": "0",
} | dict.fromkeys(
    ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_HUB_OFFLINE", "OMP_NUM_THREADS", "TRITON_INTERPRET"), "1"
)


def commands(ranks: int) -> Iterator[tuple[str, str]]:
    """Name and command of every run on so many ranks."""
    for case, command in (RECIPES | VARIANTS).items():
        for dtype in ("float32", "bfloat16"):
            if case in RECIPES or (ranks == 1) == (dtype == "float32"):
                yield f"{case}.{dtype}.{ranks}", f"{command} --dtype {dtype}"


def expanded(command: str, inputs: Path) -> list[str]:
    """The arguments of a command: `PARTS` and paths of inputs in place of their names."""
    paths = {path.stem: str(path) for path in inputs.iterdir()}
    while "@" in command:
        command = re.sub(r"@(\w+)", lambda name: (PARTS | paths)[name[1]], command)
    return shlex.split(command)


def run_recipes(directory: Path, ranks: int, only: str) -> None:
    """Run every command in this process; keep the output of one that fails."""
    from matplotlib.figure import Figure

    Figure.savefig = lambda figure, path, **options: Path(path).touch()  # 2 s each
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    main = pkgutil.resolve_name(project["scripts"]["burnish"])
    for name, command in commands(ranks):
        if not re.search(only, name):
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            try:
                failed = main(
                    [
                        *expanded(command, directory / "inputs"),
                        "--output",
                        str(directory / "runs" / name),
                    ]
                )
            except (Exception, SystemExit):
                failed = 1
                traceback.print_exc()
        if failed:
            (directory / "failed" / name).write_text(printed.getvalue())


def work(directory: Path, only: str) -> None:
    """One process of a recording: alone, or one rank of two."""
    from identity_inputs import write_inputs
    from identity_kernels import run_kernels

    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), os.environ.get("RANK")
    if rank is None:
        write_inputs(directory / "inputs")
    run_recipes(directory, ranks, only)
    (directory / f"kernels.{rank}").write_text(json.dumps(run_kernels(only, rank and int(rank))))


def record(only: str) -> dict[str, Any]:
    """The numbers of every case, and what they depend on beside the code."""
    with tempfile.TemporaryDirectory() as scratch:
        directory, cases = Path(scratch), {}
        for name in ("inputs", "runs", "failed"):
            (directory / name).mkdir()
        environment = {**os.environ, **ENVIRONMENT, "HF_DATASETS_CACHE": f"{scratch}/cache"}
        for launcher in ([], ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]):
            command = [sys.executable, *launcher, __file__, "work", scratch, "--only", only]
            subprocess.run(command, env=environment, timeout=1800, check=True)
        failed = {
            path.name: {"failed": path.read_text()} for path in (directory / "failed").iterdir()
        }
        for run in (directory / "runs").iterdir():
            cases[run.name] = failed.get(run.name) or metrics_of(run) | weights_of(run)
        for path in directory.glob("kernels.*"):
            cases |= json.loads(path.read_text())
        inputs = [
            path.read_bytes()
            for path in sorted((directory / "inputs").rglob("*"))
            if path.is_file()
        ]
    processor = re.findall("model name.*: (.*)", Path("/proc/cpuinfo").read_text())[:1]
    packages = [
        f"{name} {version(name)}" for name in ("torch", "triton", "transformers", "peft", "numpy")
    ]
    about = {
        "machine": [*processor, *packages],
        "inputs": hashlib.sha256(b"".join(inputs)).hexdigest(),
    }
    return about | {"cases": cases | failed}


def metrics_of(run: Path) -> dict[str, str]:
    """step:metric -> hexadecimal number"""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    numbers = {
        f"{line['step']}:{name}": value
        for line in lines
        for name, value in line.items()
        if name not in SKIPPED
    }
    return {name: float(value).hex() for name, value in numbers.items()}


def weights_of(run: Path) -> dict[str, str]:
    """file:weight -> SHA-256, of all safetensors files; read as bytes, for numpy has no bfloat16"""
    weights = {}
    for path in run.rglob("*.safetensors"):
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        # without a fingerprint of the data
        file = re.sub(r"-[0-9a-f]{16}\.", ".", str(path.relative_to(run)))
        for name, about in json.loads(data[8:start]).items():
            if name != "__metadata__":
                first, last = (start + offset for offset in about["data_offsets"])
                content = f"{about['dtype']} {about['shape']} ".encode() + data[first:last]
                weights[f"{file}:{name}"] = hashlib.sha256(content).hexdigest()
    return weights


def differences(old: dict[str, Any], new: dict[str, Any], only: str) -> Iterator[str]:
    """A line for every case that two recordings do not agree on."""
    for key in ("machine", "inputs"):
        if old[key] != new[key]:
            yield f"another {key}, numbers may differ for that alone: {old[key]} -> {new[key]}"
    before = old["cases"]
    for pattern, name in RENAMED.items():
        before = json.loads(re.sub(pattern, name, json.dumps(before)))
    for case in sorted(before.keys() | new["cases"].keys()):
        first, second = before.get(case, {}), new["cases"].get(case, {})
        if re.search(only, case) and ("failed" in second or first != second):
            yield f"{case}: {second.get('failed') or difference(first, second)}"


def difference(before: dict[str, str], after: dict[str, str]) -> str:
    """Summary: how many numbers differ, the first of them, and names that only one side has."""
    other = sorted(name for name in before.keys() & after.keys() if before[name] != after[name])
    parts = [f"{len(other)} of {len(before)} differ"]
    for name in other[:1]:
        pair = (
            float.fromhex(x[name]) if "0x" in x[name] else x[name][:12] for x in (before, after)
        )
        parts.append(f"{name} {' -> '.join(map(repr, pair))}")
    for verb, names in (
        ("lost", before.keys() - after.keys()),
        ("gained", after.keys() - before.keys()),
    ):
        parts += [f"{verb} {', '.join(sorted(names))}"] if names else []
    return "; ".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "action", choices=("record", "compare", "work"), help="work is one process of a recording"
    )
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--only", default="", metavar="REGEX", help="cases whose name matches")
    options = parser.parse_args()
    file, *newer = options.files
    if options.action == "work":
        work(file, options.only)
        return 0
    new = json.loads(newer[0].read_text()) if newer else record(options.only)
    if options.action == "compare":
        lines = list(differences(json.loads(file.read_text()), new, options.only))
    else:
        file.write_text(json.dumps(new, indent=1, sort_keys=True))
        lines = [
            f"{case}: {numbers['failed']}"
            for case, numbers in new["cases"].items()
            if "failed" in numbers
        ]
    problem = "differ" if options.action == "compare" else "failed"
    print("\n".join([*lines, f"{len(new['cases'])} cases, {len(lines) or 'none'} {problem}"]))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
