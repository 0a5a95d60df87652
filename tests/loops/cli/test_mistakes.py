"""More than a hundred mistakes: each ends with status 1 or 2 and a few lines that name what to
change, most of them within two seconds and before a model is loaded."""

import json
import re
import resource
import shutil
import subprocess
import sys
import time
from typing import get_args

import pytest
import torch
import transformers
import yaml
from burnish.loops.cli import main
from burnish.loops.cli.arguments import without_switch
from burnish.loops.config import Schedule
from tiny import CHATML, make_model, save_model, sums, write_rows

PAIRS = sums(8)
MESSAGES = [{"messages": pair["prompt"] + pair["chosen"]} for pair in PAIRS]
PROMPTS = [{"prompt": pair["prompt"], "answer": pair["chosen"][0]["content"]} for pair in PAIRS]
ROWS = {
    "sft": MESSAGES,
    "distill": MESSAGES,
    "grpo": PROMPTS,
    "rloo": PROMPTS,
    "ppo": PROMPTS,
    "online_dpo": PROMPTS,
}
REWARD = ["--rewards", "{exact_match: 1.0}", "--max_tokens", "4", "--prompts_per_rollout", "2"]


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Directories and files that mistakes are made with; a flag's {name} stands for one of them."""
    root = tmp_path_factory.mktemp("places")
    model = save_model(root / "model")
    made = {name: shutil.copytree(model, root / name) for name in ("no_weights", "other_shape")}
    (made["no_weights"] / "model.safetensors").unlink()
    config = json.loads((model / "config.json").read_text())
    (made["other_shape"] / "config.json").write_text(
        json.dumps({**config, "intermediate_size": 40})
    )
    made["no_template"] = save_model(root / "no_template", chat=False)
    small = shutil.copytree(model, root / "few_embeddings")
    make_model().float().save_pretrained(small)
    file = root / "file"
    file.write_text("text")
    (root / "empty.jsonl").write_text("")
    (root / "bad.jinja").write_text(CHATML + "{% if %}")
    (root / "broken.yaml").write_text("steps: [1, 2\n")
    (root / "unwritable").mkdir()
    (root / "link").symlink_to(root / "nowhere")
    sys.path.insert(0, str(root))
    (root / "my_broken_reward.py").write_text("import math\nmath.nothing\n")
    (root / "my_reward.py").write_text("def right(completion, row):\n    return 1.0\n")
    made |= {
        "root": root,
        "model": model,
        "few_embeddings": small,
        "file": file,
        "missing": root / "missing",
        "link": root / "link",
    }
    yield {name: str(path) for name, path in made.items()}
    sys.path.remove(str(root))


def no_address(*arguments, **options):
    raise OSError("Name or service not known")


@pytest.fixture
def burnish(places, tmp_path, capsys, caplog, monkeypatch):
    """``burnish(words, rows, yaml)`` returns (status, what was printed, processor seconds, loaded
    models).
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("socket.getaddrinfo", no_address)
    loaded = []
    real = transformers.PreTrainedModel.from_pretrained.__func__

    def from_pretrained(cls, *arguments, **options):
        loaded.append(cls.__name__)
        return real(cls, *arguments, **options)

    monkeypatch.setattr(
        transformers.PreTrainedModel, "from_pretrained", classmethod(from_pretrained)
    )

    def burnish(recipe, flags, rows=None, yaml=None):
        data = tmp_path / "data.jsonl"
        rows = ROWS.get(recipe, PAIRS) if rows is None else rows
        write_rows(data, rows) if isinstance(rows, list) else data.write_text(rows)
        if yaml is not None:
            (tmp_path / "given.yaml").write_text(yaml)
            flags = ["--config", str(tmp_path / "given.yaml"), *flags]
        flags = [
            flag.format(**places) if re.fullmatch(r"\{\w+\}.*", flag) else flag for flag in flags
        ]
        usual = {
            "--model": places["model"],
            "--data": str(data),
            "--output": str(tmp_path / "run"),
            "--steps": "1",
        }
        given = {flag.partition("=")[0] for flag in flags}
        words = [
            word for name, value in usual.items() if name not in given for word in (name, value)
        ]
        start = time.process_time()
        try:
            status = main([recipe, *words, *flags])
        except SystemExit as stopped:
            status = stopped.code
        return status, "".join(capsys.readouterr()), time.process_time() - start, loaded

    return burnish


EARLY = [
    # Flags and values.
    ("dpo", ["--lerning_rate", "1"], "no field 'lerning_rate', did you mean 'learning_rate'"),
    ("dpo", ["--lora.rank", "1"], "no field 'lora.rank', did you mean 'lora.r'"),
    ("dpo", ["--bata", "1"], "no field 'bata', did you mean 'beta'"),
    ("orpo", ["--reference", "copy"], "no field 'reference'\n.*--help"),
    ("dpo", ["--xyzzy", "1"], "no field 'xyzzy'\n.*--help"),
    ("dpo", ["--batch-sise", "1"], "no field 'batch_sise', did you mean 'batch_size'"),
    ("dpo", ["--lerning-rate", "1"], "no field 'lerning_rate', did you mean 'learning_rate'"),
    ("dpo", ["--epochs", "3", "stray"], "epochs: wanted a whole number > 0, got '3 stray'"),
    ("dpo", ["--run_name", "my", "run"], "run_name: wanted text or null, got 'my run'"),
    ("dpo", ["--steps"], "steps: wanted a whole number > 0 or null, got 'nothing'"),
    ("dpo", ["--lora", "3"], "lora: wanted a mapping of r, alpha, dropout, ..., got '3'"),
    ("dpo", ["--lora", "{r: -1}"], "lora.r: must be >= 0, got -1"),
    ("dpo", ["--optimizer_kwargs", "fast"], "optimizer_kwargs: wanted a mapping .*, got 'fast'"),
    ("dpo", ["--defaults", "tlr"], "defaults: wanted trl, or nothing for burnish's own, got tlr"),
    (
        "dpo",
        ["--fp16", "--bf16"],
        "fp16: bf16 is true as well; give one of them.*give dtype instead",
    ),
    ("dpo", ["--gradient_accumulation_steps", "2", "--batch_size", "3"], "batch_size: given twice"),
    (
        "dpo",
        ["--optim", "adamw_8bits"],
        "optim: there is no 'adamw_8bits', did you mean 'adamw_8bit'",
    ),
    (
        "dpo",
        ["--per_device_train_batchsize", "2", "--bf16"],
        "did you mean 'per_device_train_batch_size'",
    ),
    ("grpo", ["--batch_size", "1"], "did you mean 'prompts_per_rollout'"),
    ("grpo", ["--clip_high", "0.28"], "did you mean 'loss_kwargs'"),
    ("dpo", ["--steps", "many"], "steps: wanted a whole number > 0 or null, got 'many'"),
    ("dpo", ["--steps", "0"], "steps: must be > 0, got 0"),
    ("dpo", ["--steps", "1.5"], "steps: wanted a whole number > 0 or null, got '1.5'"),
    ("dpo", ["--epochs", "-1"], "epochs: must be > 0, got -1"),
    ("dpo", ["--schedule", "cosin"], "schedule: .*did you mean 'cosine'"),
    ("dpo", ["--dtype", "fp16"], "dtype: must be one of float32, bfloat16"),
    (
        "sft",
        ["--gradient_checkpointing", "maybe"],
        "gradient_checkpointing: must be one of false, true, selective, offload, got 'maybe'",
    ),
    ("dpo", ["--dtype", "bf16"], "dtype: .*did you mean 'bfloat16'"),
    ("dpo", ["--shuffle", "maybe"], "shuffle: wanted true or false, got 'maybe'"),
    ("dpo", ["--learning_rate", "-1"], "learning_rate: must be >= 0, got -1"),
    ("dpo", ["--learning_rate", "nan"], "learning_rate: must be >= 0, got nan"),
    ("sft", ["--learning_rate", "-1"], "learning_rate: must be >= 0, got -1"),
    ("kto", ["--learning_rate", "-1"], "learning_rate: must be >= 0, got -1"),
    ("orpo", ["--learning_rate", "-1"], "learning_rate: must be >= 0, got -1"),
    ("dpo", ["--weight_decay", "-1"], "weight_decay: must be >= 0, got -1"),
    ("dpo", ["--seed", "-1"], "seed: must be >= 0, got -1"),
    ("dpo", ["--warmup", "-1"], "warmup: must be >= 0, got -1"),
    ("dpo", ["--max_grad_norm", "-1"], "max_grad_norm: must be >= 0, got -1"),
    ("dpo", ["--lora.dropout", "2"], "lora.dropout: must be >= 0 and <"),
    ("dpo", ["--lora.alpha", "-1"], "lora.alpha: must be > 0, got -1"),
    ("dpo", ["--save_every", "0"], "save_every: must be > 0, got 0"),
    ("dpo", ["--eval_every", "-1"], "eval_every: must be > 0, got -1"),
    ("dpo", ["--beta", "0"], "beta: must be > 0, got 0"),
    ("dpo", ["--label_smoothing", "0.5"], "label_smoothing: must be >= 0 and < 0.5"),
    ("cpo", ["--nll", "-1"], "nll: must be >= 0, got -1"),
    ("orpo", ["--odds_ratio", "-1"], "odds_ratio: must be >= 0, got -1"),
    ("grpo", [*REWARD, "--top_p", "0"], "top_p: must be > 0 and <= 1, got 0"),
    ("grpo", [*REWARD, "--eval_temperature", "-1"], "eval_temperature: must be >= 0"),
    ("grpo", [*REWARD, "--cache_bytes", "-1"], "cache_bytes: must be > 0"),
    ("grpo", [*REWARD, "--show_every", "-1"], "show_every: must be >= 0"),
    ("grpo", [*REWARD, "--group_size", "1"], "group_size: .*wanted >= 2"),
    ("grpo", [*REWARD, "--temperature", "0"], "temperature: .*wanted > 0"),
    ("grpo", [*REWARD, "--minibatches", "99"], "minibatches: .*lower minibatches"),
    # Losses.
    ("dpo", ["--loss", "nosuch"], "loss: 'nosuch' is not one of .*simpo"),
    ("dpo", ["--loss", "dop"], "loss: .*did you mean 'dpo'"),
    ("dpo", ["--loss", "{nll: nan}"], "loss: {nll: nan} is no mapping.*and then there is a number"),
    ("dpo", ["--loss", "{nll: much}"], "loss: .*is no mapping.*and then there is a number"),
    ("dpo", ["--loss", "{nll:1}"], "YAML wants a space after each colon"),
    ("dpo", ["--loss", "{}"], "loss: .*names no loss"),
    ("dpo", ["--loss", "simpo"], "simpo needs gamma"),
    ("dpo", ["--loss_kwargs", "{gama: 1.0}"], "no loss of this mix has 'gama'"),
    ("dpo", ["--quantize", "4bit"], "quantized weights can't be trained; add adapters"),
    ("dpo", ["--reference", "adapters_off"], "reference: .*set lora.r"),
    (
        "sft",
        ["--lora.alpha", "16"],
        "lora.alpha: without lora.r there are no adapters, .* set lora.r, such as 16",
    ),
    # though it is the default
    ("sft", ["--lora.alpha", "32"], "lora.alpha: without lora.r there are no adapters"),
    (
        "sft",
        ["--lora.use_dora", "true"],
        "lora.use_dora: without lora.r .* the whole model is trained",
    ),
    ("sft", ["--lora.target_modules", "[q_proj]"], "lora.target_modules: without lora.r"),
    ("sft", ["--lora", "{r: 0, dropout: 0.1}"], "lora.dropout: without lora.r"),
    ("sft", ["--lora.path", "x", "--lora.alpha", "16"], "lora.alpha: the adapter in x has its own"),
    ("kto", ["--batch_size", "1"], "batch_size of 2 or more"),
    (
        "kto",
        ["--loss", "bco", "--desirable_weight", "2"],
        "no loss of this mix has 'desirable_weight'",
    ),
    # Files.
    ("dpo", ["--data", "{root}/nosuch.jsonl"], "nosuch.jsonl: no such file"),
    ("dpo", ["--data", "{root}/nosuch"], "data: .*nosuch: no such file or directory"),
    ("dpo", ["--data", "{root}/file"], "wanted a file that ends in .json"),
    ("dpo", ["--data", "{root}/empty.jsonl"], "no rows"),
    ("dpo", ["--eval_data", "{root}/nosuch.jsonl"], "nosuch.jsonl: no such file"),
    (
        "dpo",
        ["--model", "{missing}"],
        "model: .*missing is neither a directory.*: there is no such directory",
    ),
    ("dpo", ["--model", "{root}/file"], "model: .*file is neither a directory.*: it is a file"),
    ("dpo", ["--model", "{root}"], "model: .*no config.json.*; a run left one in .*/model$"),
    ("dpo", ["--model", "{no_weights}"], "model: .*no_weights.*no weights"),
    ("dpo", ["--output", "{root}/file"], "output: .*is a file"),
    ("dpo", ["--output", "{root}/file/below"], "output: .*is a file"),
    ("dpo", ["--output", "{link}"], "output: .*link is a link to nothing"),
    ("dpo", ["--output", "/proc/burnish"], "output: .*can't be written"),
    (
        "dpo",
        ["--output", "{root}"],
        "output: this run would write over its model, .*/model; name another",
    ),
    (
        "dpo",
        ["--ref_model", "{missing}"],
        "ref_model: .*missing is neither a directory.*: there is no such directory",
    ),
    ("dpo", ["--chat_template", "nosuch.jinja"], "chat_template: there is no file 'nosuch.jinja'"),
    ("dpo", ["--chat_template", "{root}"], "chat_template: there is no file"),
    ("sft", ["--chat_template", "{root}/bad.jinja"], "chat template .*Expected an expression"),
    ("distill", [], "teacher: distillation needs one; give --teacher.model"),
    (
        "distill",
        ["--teacher.model", "{missing}"],
        "teacher.model: .*missing.*: there is no such directory",
    ),
    ("distill", ["--teacher.model", "no/such"], "teacher.model: no/such is neither a directory"),
    ("ppo", [*REWARD, "--value_model", "no/such"], "value_model: no/such is neither a directory"),
    ("sft", ["--model", "no/such"], "model: no/such is neither a directory"),
    ("distill", ["--teacher.logprobs", "{missing}"], "teacher.logprobs: .*no such file"),
    ("dpo", ["--teacher.model", "{model}"], "teacher: no loss of this mix learns from it"),
    (
        "ppo",
        [*REWARD, "--value_model", "{missing}"],
        "value_model: .*missing.*: there is no such directory",
    ),
    ("ppo", [*REWARD, "--value_head", "{missing}"], "value_head: .*no such file"),
    (
        "grpo",
        [*REWARD, "--source", "vllm", "--vllm.python", "{missing}"],
        "vllm.python: .*no such file",
    ),
    ("dpo", ["--config", "{root}/broken.yaml"], "broken.yaml.* line 2"),
    ("dpo", ["--config", "{missing}"], "missing: No such file"),
    ("dpo", ["--config", "{root}"], "config: .*: Is a directory"),
    ("dpo", ["--config", "{root}/file"], "file: wanted fields and their values, such as beta: 0.1"),
    # Trackers and packages.
    ("dpo", ["--report_to", "nosuch"], "report_to: no tracker 'nosuch'; there are .*tensorboard"),
    ("dpo", ["--report_to", "comet_ml"], "report_to: comet_ml is not installed"),
    ("dpo", ["--keep_best", "loss"], "keep_best: wanted a metric of eval_data"),
    # Rewards and environments.
    ("grpo", [], "rewards: none is named.*exact_match"),
    ("grpo", ["--rewards", "{mth: 1.0}"], "no 'mth', did you mean 'math'"),
    ("grpo", ["--rewards", "{exact_match: 0}"], "rewards: every weight is 0"),
    ("grpo", ["--rewards", "{exact_match: much}"], "rewards: wanted a mapping .*, got 'much'"),
    (
        "grpo",
        ["--rewards", "{exact_match: {colum: solution}}"],
        "no setting 'colum', did you mean 'column'",
    ),
    ("grpo", ["--rewards", "{nosuchmodule:f: 1.0}"], "no module 'nosuchmodule'"),
    ("grpo", ["--rewards", "nosuchmodule:f"], "no module 'nosuchmodule'"),
    ("grpo", ["--rewards", "[exact_match, mth]"], "no 'mth', did you mean 'math'"),
    (
        "grpo",
        ["--rewards", "{my_reward:right}"],
        "rewards: wanted a mapping .* or a list .* or a name, got",
    ),
    ("grpo", ["--rewards", "{my_reward:wrong: 1.0}"], "my_reward has no 'wrong'; there are right"),
    (
        "grpo",
        ["--rewards", "{my_broken_reward:f: 1.0}"],
        "my_broken_reward.py.*line 2.*AttributeError",
    ),
    ("grpo", ["--environment", "nosuch"], "environment: no 'nosuch'"),
    ("grpo", [*REWARD, "--environment", "{tools: {tools: [nosuch]}}"], "tool: no 'nosuch'"),
]
ROWS_WRONG = [
    ("dpo", [], [{"prompt": "a"}, *PAIRS], "data.jsonl"),
    ("dpo", [], [{**PAIRS[0], "rejected": PAIRS[0]["chosen"]}], "data.jsonl line 1"),
    (
        "sft",
        [],
        '{"text": "a b"}\n{"text": "a\n',
        "line 2: not JSON: Unterminated string starting at column",
    ),
    ("sft", [], [{"instruction": "a", "response": "b"}], "columns"),
    ("dpo", [], MESSAGES, "chosen"),
    ("grpo", REWARD, [{"prompt": "a", "solution": "1"}], "'answer'"),
    ("dpo", [], [{"prompt": "a", "chosen": "", "rejected": "b"}], "line 1"),
    ("dpo", ["--max_length", "20"], PAIRS, "data.jsonl line 1"),
    ("reward", ["--margin", "better"], PAIRS, "wanted a column 'better'"),
]
LATE = [  # the model, or a part of it, must be there to know
    ("dpo", ["--loss", "{nll: 0}"], "loss: every coefficient is 0"),
    ("dpo", ["--attention", "flash_attention_2"], "attention flash_attention_2: .*installed"),
    ("dpo", ["--attention", "nosuch"], "attention nosuch: .*only possible arguments"),
    ("dpo", ["--model", "{other_shape}"], "model: .*other_shape.*mismatched_sizes"),
    ("dpo", ["--model", "{few_embeddings}"], "model: .*61 embeddings.*258 tokens"),
    ("dpo", ["--lora.r", "2", "--lora.target_modules", "nosuch"], "lora.target_modules: .*nosuch"),
    (
        "dpo",
        ["--lora.r", "2", "--lora.target_modules", "q_proj,v_proj"],
        "lora.target_modules: .*\\[q_proj, v_proj\\]",
    ),
    ("dpo", ["--lora.r", "99999"], "lora.r: .*99999"),
    ("sft", ["--model", "{no_template}"], "no chat template; pass one"),
    ("dpo", ["--loss", "aot"], "couples all pairs of a step"),
    (
        "dpo",
        ["--loss", "{dpo: {weight: importance}}"],
        "data: no column 'importance', which a loss reads",
    ),
]


def check(status, printed, wanted):
    assert status in (1, 2), printed
    assert re.search(wanted, printed, re.S), printed
    assert "Traceback" not in printed
    assert len(printed.splitlines()) <= 4, printed


WITHOUT_MODEL = [*((recipe, flags, None, wanted) for recipe, flags, wanted in EARLY), *ROWS_WRONG]
MISTAKES = [(*case, True) for case in WITHOUT_MODEL] + [
    (*case[:2], None, case[2], False) for case in LATE
]


def sentence(mistake):
    recipe, flags, rows, wanted, _ = mistake
    what = " ".join(
        [*(word[:60] for word in flags if word not in REWARD), *(["such rows"] if rows else [])]
    )
    return f"{recipe} answers {what or 'no more'} with {wanted[:60]}".replace("/", ":")


def test_a_hundred_mistakes_are_different():
    assert len({(*flags, str(rows)) for _, flags, rows, *_ in MISTAKES}) >= 100
    assert len(set(map(sentence, MISTAKES))) == len(MISTAKES)


@pytest.mark.parametrize(
    ("recipe", "flags", "rows", "wanted", "without_model"), MISTAKES, ids=map(sentence, MISTAKES)
)
def test_a_mistake_is_named_with_what_to_do(burnish, recipe, flags, rows, wanted, without_model):
    status, printed, seconds, loaded = burnish(recipe, flags, rows)
    check(status, printed, wanted)
    assert not without_model or (not loaded and seconds < 2)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["dop"], "no recipe 'dop', did you mean 'dpo'"),
        (["dpo", "--learningrate=1"], "no field 'learningrate', did you mean 'learning_rate'"),
        (
            ["grpo", "--steps", "many", "--output=o"],
            "steps: wanted a whole number > 0 or null, got 'many'",
        ),
        (["sft", "--config", "broken.yaml"], "broken.yaml line 2: not YAML"),
        (["kto", "--model", "m"], "needed as well: --data, --output"),
        (["kto", "run.yaml"], "no field 'run.yaml', did you mean --config run.yaml?"),
        (["plan"], "no recipe ''; there are cpo, distill"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_in_the_command_costs_two_seconds_at_most(tmp_path, words, wanted):
    (tmp_path / "broken.yaml").write_text("steps: [1, 2\n")
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = subprocess.run(
        [sys.executable, "-m", "burnish", *words], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2 and wanted in done.stderr
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 2


def test_a_stopped_demo_is_told_what_goes_on(capsys, monkeypatch):
    def stopped(config):
        raise SystemExit(130)

    monkeypatch.setattr("burnish.loops.recipes.demo.demo", stopped)
    with pytest.raises(SystemExit):
        main(["demo"])
    assert (
        "burnish sft --config burnish-demo/sft/config.yaml --resume true" in capsys.readouterr().err
    )


@pytest.mark.parametrize("more", [[], ["--print_config"]])
def test_all_mistakes_of_file_and_flags_are_told_at_once(burnish, more):
    yaml = "lerning_rate: 1\nsteps: 0\nlora: {rank: 3, alpha: much}\nbeta: 0.2\n"
    status, printed, *_ = burnish(
        "dpo", ["--schedule", "cosin", "--no-such", "--lr=1", *more], yaml=yaml
    )
    assert status == 2
    assert printed.splitlines() == [
        "burnish dpo: 7 mistakes",
        "  no field 'lerning_rate', did you mean 'learning_rate'?",
        "  steps: must be > 0, got 0",
        "  no field 'lora.rank', did you mean 'lora.r'?",
        "  lora.alpha: wanted a number > 0, got 'much'",
        f"  schedule: must be one of {', '.join(get_args(Schedule))}, got 'cosin', did you mean 'cosine'?",
        "  no field 'no_such'",
        "  no field 'lr', did you mean 'learning_rate'?",
        "burnish dpo --help lists its fields",
    ]


def test_a_reward_that_is_none_is_told_with_other_mistakes(burnish):
    rewards = "rewards: {math: 1, brief: {function: lenght}, my_module:f: 2}\n"
    status, printed, *_ = burnish("grpo", ["--steps", "0"], yaml=rewards)
    assert status == 2
    assert (
        "  rewards: no 'lenght', did you mean 'length'?\n" in printed
        and "steps: must be > 0, got 0" in printed
    )
    assert (
        "rewards"
        not in burnish("grpo", ["--steps", "0"], yaml="rewards: {math: 1, my_module:f: 2}\n")[1]
    )
    for rewards in ("lenght", "[math, lenght]"):
        printed = burnish("grpo", ["--steps", "0", "--rewards", rewards])[1]
        assert (
            "  rewards: no 'lenght', did you mean 'length'?\n" in printed
            and "steps: must be > 0, got 0" in printed
        )


@pytest.mark.parametrize(
    "flags", [["--max_grad_norm", ".inf"], ["--max-grad-norm=.inf"], ["--max_grad_norm=inf"]]
)
def test_infinity_may_be_spelled_as_in_yaml(burnish, flags):
    status, printed, *_ = burnish("dpo", [*flags, "--print_config"])
    assert (status, yaml.safe_load(printed)["max_grad_norm"]) == (0, float("inf"))


def test_mistakes_in_a_file_of_trl_are_told_with_those_of_flags(burnish):
    yaml = "per_device_train_batch_size: 2\ntorch_compile: true\nmax_lenght: 3\n"
    status, printed, *_ = burnish(
        "dpo", ["--schedule", "cosin", "--learning_rate", "-1"], yaml=yaml
    )
    assert status == 2
    for wanted in (
        "4 mistakes",
        "torch_compile: ",
        "did you mean 'max_length'?",
        "schedule: ",
        "learning_rate: must be >= 0",
    ):
        assert wanted in printed


def test_required_fields_that_are_missing_are_told_together(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["dpo", "--steps", "0"])
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert (
        "2 mistakes" in said
        and "steps: must be > 0" in said
        and "needed as well: --model, --data, --output" in said
    )


def test_fields_that_a_broken_file_may_have_are_not_called_missing(burnish):
    status, printed, *_ = burnish("dpo", [], yaml="steps: [1, 2")
    assert status == 2 and "not YAML" in printed and "needed" not in printed


def test_flags_may_have_hyphens_and_switches_no_value(burnish):
    flags = [
        "--learning-rate",
        "3e-4",
        "--gradient-checkpointing",
        "--lora.target-modules=[q_proj]",
        "--shuffle",
    ]
    flags += ["--lora.r", "4"]
    status, printed, *_ = burnish("dpo", [*flags, "--print-config"])
    assert status == 0
    config = yaml.safe_load(printed)
    assert (config["learning_rate"], config["gradient_checkpointing"], config["shuffle"]) == (
        3e-4,
        True,
        True,
    )
    assert config["lora"]["target_modules"] == ["q_proj"]


@pytest.mark.parametrize("error", [TypeError, ValueError, KeyError, AttributeError, AssertionError])
def test_a_bug_shows_its_traceback(burnish, monkeypatch, error):
    """Raised by what burnish calls in the middle of a step, where no value of the user's is
    refused.
    """

    def broken(*arguments, **options):
        raise error("a bug")

    monkeypatch.setattr("torch.nn.utils.clip_grad_norm_", broken)
    monkeypatch.setattr("torch.optim.AdamW.step", broken)
    with pytest.raises(error, match="a bug"):
        burnish("sft", ["--max_grad_norm", "0"])


def test_the_traceback_of_a_mistake_is_shown_on_demand(burnish):
    with pytest.raises(ValueError, match="there is no such directory"):
        burnish("sft", ["--model", "{missing}", "--traceback"])


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (PermissionError(13, "Permission denied", "/x/y"), "Permission denied: '/x/y'"),
        (
            ModuleNotFoundError("No module named 'flash_attn'", name="flash_attn"),
            "flash_attn.*install what is missing",
        ),
        (
            ImportError("it needs sympy; pip install 'burnish[math]'"),
            r"pip install 'burnish\[math\]'; --traceback shows",
        ),
        (torch.OutOfMemoryError("CUDA out of memory"), "out of memory: lower micro_tokens"),
        (
            KeyboardInterrupt(),
            "interrupted; --resume true continues from the last checkpoint, if any",
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_the_machine_lacks_is_told_in_a_line(burnish, monkeypatch, error, wanted):
    def fails(*arguments, **options):
        raise error

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", fails)
    if not isinstance(error, OSError):
        monkeypatch.setattr("burnish.loops.models.io.load_tokenizer", fails)
    status, printed, *_ = burnish("sft", [])
    check(1 if status == 130 else status, printed, wanted)


def test_settings_without_effect_are_told(burnish, caplog):
    status, *_ = burnish(
        "sft", ["--eval_every", "2", "--warmup", "9", "--loss", "{nll: 1, z_loss: -1.0}"]
    )
    assert status == 0
    assert "eval_every: there is no eval_data" in caplog.text
    assert "warmup: 9 steps of 1" in caplog.text
    assert "loss: z_loss has the coefficient -1.0, so it is raised" in caplog.text


def test_help_begins_with_the_fields_of_the_recipe_and_has_sections(capsys):
    with pytest.raises(SystemExit):
        main(["dpo", "--help"])
    shown = capsys.readouterr().out
    places = [
        shown.index(title)
        for title in ("\ndpo:", "\ndata:", "\ntraining:", "\nmemory and precision:")
    ]
    assert places == sorted(places)
    assert (
        places[0] < shown.index("--ld_alpha") < places[1] < shown.index("--eval_data") < places[2]
    )


@pytest.mark.parametrize(
    ("recipe", "needed"), [("dpo", ["model", "data", "output"]), ("grpo", ["model", "output"])]
)
def test_help_marks_what_must_be_given_and_has_the_switches_of_every_recipe(recipe, needed, capsys):
    with pytest.raises(SystemExit):
        main([recipe, "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for name in needed:
        entry = re.search(rf" --{name} {name.upper()}.*?\((?:required|type)", shown)[0]
        assert entry.endswith("(required"), entry
    assert "(required, type: int" not in shown
    assert "--dry_run check settings, data and model, and predict memory, without training" in shown
    assert "--no_code refuse all code but burnish's own" in shown


@pytest.mark.parametrize(
    ("words", "left", "on"),
    [
        (["--dry_run", "--steps", "3"], ["--steps", "3"], True),
        (["--dry-run", "true", "--steps", "3"], ["--steps", "3"], True),
        (["--steps", "3", "--dry_run", "false"], ["--steps", "3"], False),
        (["--dry_run=true", "--gpus", "80GB"], ["--gpus", "80GB"], True),
        (["--output", "dry_run"], ["--output", "dry_run"], False),
        (["dry_run"], ["dry_run"], False),
    ],
)
def test_a_switch_may_be_followed_by_its_value(words, left, on):
    assert without_switch(words, "dry_run") == (left, on)
