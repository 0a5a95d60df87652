"""``burnish demo``: a small model learns to add from scratch, offline, on a CPU.

    1  a transformer of a third of a million parameters is trained from scratch by SFT on sums of
       two numbers
    2  it answers further questions at temperature 1; its own right and wrong answers to a question
       make pairs
    3  it is improved by DPO on those pairs, together with the NLL of the right answers: DPO alone
       makes these wrong answers rare, but other wrong answers take their place
    4  it is improved further by GRPO, which samples while it learns, rewarded only for right
       answers

Every stage is the recipe that ``burnish sft``, ``burnish dpo`` and ``burnish grpo`` run, on files
that stay in the run directory. No stage sees any of the questions on which accuracy is measured.
"""

import itertools
import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from ..runs.report import read_curves
from .grpo import open_grpo
from .preference import open_dpo
from .settings import DPO, GRPO, SFT, Demo
from .sft import open_sft

ALPHABET = "0123456789+="
TERM = 2  # digits of each number
TAUGHT = 5000  # questions whose answers SFT copies
HELD_OUT = 1000  # questions that no stage trains on


def demo(config: Demo) -> dict[str, float]:
    """Run all stages, on one thread from then on; returns the held-out accuracy after each."""
    # products are so small that a second thread costs more than it computes
    torch.set_num_threads(1)
    console = Console()
    directory = _vacant(Path(config.output))
    drawn = questions(random.Random(config.seed), HELD_OUT + TAUGHT + config.questions)
    held_out = drawn[:HELD_OUT]
    taught = drawn[HELD_OUT : HELD_OUT + TAUGHT]
    asked = drawn[HELD_OUT + TAUGHT :]
    save_start(directory / "start", seed=config.seed)

    console.rule("SFT: answers to copy")
    teach(directory, taught, steps=config.sft_steps, seed=config.seed)
    accuracy = {"before training": score(directory / "start", held_out)}
    accuracy["after SFT"] = score(directory / "sft/model", held_out)

    # From here on by Muon, which learns from so few steps what AdamW learns from twice as many.
    console.rule("DPO + NLL: its own right and wrong answers")
    answers = sample(directory / "sft/model", asked, count=4, temperature=1.0)
    stage = _stage(
        directory,
        "dpo",
        "sft/model",
        pairs(asked, answers),
        seed=config.seed,
        steps=config.dpo_steps,
    )
    stage |= {"batch_size": 64, "optimizer": "muon", "learning_rate": 1.5e-3, "warmup": 0.1}
    open_dpo(DPO(**stage, loss={"dpo": 1.0, "nll": 1.0})).train()
    accuracy["after DPO"] = score(directory / "dpo/model", held_out)

    console.rule("GRPO: a reward for right answers")
    rows = ({"prompt": q, "answer": solve(q)} for q in [*taught, *asked])
    stage = _stage(directory, "grpo", "dpo/model", rows, seed=config.seed, steps=config.grpo_steps)
    stage |= {
        "rewards": {"exact_match": {"ignore": ["whitespace"]}},
        "max_tokens": TERM + 3,
        "show_every": 10,
    }
    stage |= {"prompts_per_rollout": 256, "group_size": 4, "epochs_per_rollout": 3}
    stage |= {"optimizer": "muon", "learning_rate": 8e-4, "schedule": "linear", "warmup": 0.15}
    # wrong answers are pushed down no further than necessary
    clip = {"clip_low": 0.02, "clip_high": 0.3}
    open_grpo(GRPO(**stage, loss_kwargs=clip)).train()
    accuracy["after GRPO"] = score(directory / "grpo/model", held_out)

    title = f"sums of two {TERM}-digit numbers, {HELD_OUT} never seen"
    table = Table("stage", "held-out accuracy", title=title, min_width=len(title) + 4)
    for name, value in accuracy.items():
        table.add_row(name, f"{value:.1%}")
    console.print(table)
    _draw(directory, accuracy)
    console.print(f"picture: {directory / 'accuracy.png'}   runs: {directory}/sft, dpo, grpo")
    return accuracy


def save_start(directory: Path, *, seed: int) -> None:
    """The untrained model, and its tokenizer of one token per character."""
    torch.manual_seed(seed)
    shape = {
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    }
    tokens = {
        "vocab_size": len(ALPHABET) + 2,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    config: Any = LlamaConfig
    LlamaForCausalLM(config(**shape, **tokens, max_position_embeddings=32)).save_pretrained(
        directory
    )
    vocabulary = {token: i for i, token in enumerate(["<eos>", "<unk>", *ALPHABET])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    characters.decoder = decoders.Fuse()
    build: Any = PreTrainedTokenizerFast
    build(tokenizer_object=characters, eos_token="<eos>", unk_token="<unk>").save_pretrained(
        directory
    )


def teach(
    directory: Path, questions: Iterable[str], *, steps: int, seed: int, batch_size: int = 96
) -> None:
    """Train ``directory/start`` by SFT on the answers to these questions, into ``directory/sft``."""
    rows = ({"prompt": q, "completion": solve(q)} for q in questions)
    stage = _stage(directory, "sft", "start", rows, seed=seed, steps=steps)
    open_sft(
        SFT(**stage, batch_size=batch_size, learning_rate=2e-3, schedule="cosine", warmup=0.05)
    ).train()


def _stage(
    directory: Path, name: str, start: str, rows: Iterable[dict[str, str]], **settings: Any
) -> dict[str, Any]:
    """The settings of a stage that begins with ``directory/start``; its rows are put into a file."""
    data = write(directory / f"{name}.jsonl", rows)
    return {
        "model": str(directory / start),
        "data": str(data),
        "output": str(directory / name),
        **settings,
    }


def solve(question: str) -> str:
    """The answer to "123+456=", with as many digits whatever the sum."""
    return f"{sum(map(int, question.rstrip('=').split('+'))):0{TERM + 1}d}"


@torch.no_grad()
def sample(
    model_directory: Path, questions: Sequence[str], *, count: int, temperature: float
) -> list[list[str]]:
    """Sample ``count`` answers of a saved model to each question; at 0 the likeliest digits."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model_directory)
    model: Any = AutoModelForCausalLM.from_pretrained(model_directory)
    how = (
        {"do_sample": True, "temperature": temperature, "top_k": 0}
        if temperature
        else {"do_sample": False}
    )
    answers: list[str] = []
    for start in range(0, len(questions), 512):
        ids = torch.tensor(tokenizer(list(questions[start : start + 512]))["input_ids"])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=TERM + 2,
            num_return_sequences=count,
            **how,
        )
        answers += tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)
    return [answers[i : i + count] for i in range(0, len(answers), count)]


def score(model_directory: Path, questions: Sequence[str]) -> float:
    """Share of questions whose likeliest answer is right."""
    answers = sample(model_directory, questions, count=1, temperature=0.0)
    return sum(
        answer == solve(question) for question, (answer,) in zip(questions, answers, strict=True)
    ) / len(answers)


def pairs(questions: Sequence[str], answers: Sequence[Sequence[str]]) -> Iterable[dict[str, str]]:
    """One pair per question that was answered both rightly and wrongly."""
    for question, given in zip(questions, answers, strict=True):
        right = solve(question)
        wrong = [answer for answer in given if answer and answer != right]
        if right in given and wrong:
            yield {"prompt": question, "chosen": right, "rejected": wrong[0]}


def questions(rng: random.Random, count: int) -> list[str]:
    """Distinct questions in random order."""
    numbers = rng.sample(range(10 ** (2 * TERM)), count)
    return [f"{n // 10**TERM:0{TERM}d}+{n % 10**TERM:0{TERM}d}=" for n in numbers]


def write(path: Path, rows: Iterable[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _vacant(wanted: Path) -> Path:
    """The directory, or the first of wanted-2, wanted-3, ... that does not exist."""
    numbered = (wanted.with_name(f"{wanted.name}-{number}") for number in itertools.count(2))
    vacant = next(path for path in itertools.chain([wanted], numbered) if not path.exists())
    vacant.mkdir(parents=True)
    return vacant


def _draw(directory: Path, accuracy: dict[str, float]) -> None:
    from matplotlib.figure import Figure  # slow to import

    figure = Figure(figsize=(12, 3.2), layout="constrained")
    bars, loss, margins, reward = figure.subplots(1, 4)
    drawn = bars.bar(
        list(accuracy), list(accuracy.values()), color=["#bbbbbb", "#4c78a8", "#f58518", "#54a24b"]
    )
    bars.bar_label(drawn, fmt="{:.1%}")
    bars.set_ylim(0, 1.1)
    bars.set_xticks(
        range(len(accuracy)), [stage.replace(" ", "\n") for stage in accuracy], fontsize=8
    )
    bars.set_title("held-out accuracy")
    for axis, stage, metric, title in (
        (loss, "sft", "loss", "SFT loss, nats per token"),
        (margins, "dpo", "rewards/accuracies", "DPO: pairs told apart"),
        (reward, "grpo", "reward", "GRPO: answers that are right"),
    ):
        axis.plot(
            *zip(*read_curves(directory / stage / "metrics.jsonl")[metric]["training"], strict=True)
        )
        axis.set_title(title)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
    figure.savefig(directory / "accuracy.png", dpi=120)
