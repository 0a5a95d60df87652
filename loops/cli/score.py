"""``burnish score RUN_OR_MODEL DATA [OUT]``: what a trained model says of completions, as JSON Lines.

Each row of the data is written with further fields:

    a reward model             score
    a process reward model     step_scores, the probability that each step is right, and score
    a causal language model    logprob, the sum over the tokens of the completion; logprob_mean; tokens

A row of a pair has each of them twice, as score_chosen and score_rejected. ``--best`` writes the
best completion of each prompt as data of sft, or the best and the worst as data of dpo.
"""

import argparse
import json
import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ...data import (
    DataError,
    Example,
    encode_preference,
    encode_supervised,
    example,
    load_data,
    step_example,
)
from ...data.batches import balanced
from ...data.columns import OPTION_COLUMNS
from ...objectives import step_aggregate
from ..batch import Batch, collate
from ..models.backbone import evaluating
from ..models.io import as_missing_model, read_model
from ..models.policy import Policy
from ..models.scorer import Scorer, ends_marked
from ..registry import as_setting_error
from ..rewards.reward_models import DEVICE, ProcessRewardModel, RewardModel, load_scorer
from ..rollouts.replay import read_samples
from ..rollouts.sample import Sample
from .chat import model_of
from .offline import go_offline

Kind = Literal["reward_model", "prm", "policy"]
How = Literal["min", "prod", "last", "mean"]
_KINDS: dict[str, Kind] = {
    "ForSequenceClassification": "reward_model",
    "ForTokenClassification": "prm",
}
log = logging.getLogger(__name__)

_FIELDS = {"task", "tokens", "finish"}  # by which the samples of a run are known
# The field that completions of one prompt are compared by.
_COMPARED = {"reward_model": "score", "prm": "score", "policy": "logprob_mean"}


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "burnish score",
        description="Write what a model says of completions, as JSON Lines.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "model", metavar="RUN_OR_MODEL", help="directory of a run or a model, or a model on the Hub"
    )
    parser.add_argument(
        "data", metavar="DATA", help="rows with completions, or the samples.jsonl of an online run"
    )
    parser.add_argument(
        "out", metavar="OUT", type=Path, nargs="?", help="a file; unless given, standard output"
    )
    parser.add_argument(
        "--best",
        choices=("sft", "dpo"),
        help="write the best completion of each prompt, or the best and the worst",
    )
    parser.add_argument(
        "--reward", help="compare samples by this reward of their run, instead of by the model"
    )
    parser.add_argument(
        "--how",
        choices=("min", "prod", "last", "mean"),
        default="min",
        help="one score of the steps' scores",
    )
    parser.add_argument(
        "--micro_tokens", type=int, default=8192, help="maximum tokens of one forward pass"
    )
    return parser


def run(words: Sequence[str]) -> None:
    options = parser().parse_args(words)
    if options.micro_tokens < 1:
        raise ValueError(f"micro_tokens: wanted at least 1, got {options.micro_tokens}")
    if options.out is not None and options.out.exists():
        raise ValueError(f"{options.out} is there already; remove it, or name another file")
    judge = open_scoring_model(model_of(options.model), options.how, options.micro_tokens)
    samples = _samples_in(options.data)
    if options.reward is not None and (samples is None or options.best is None):
        raise ValueError("reward: compares the samples of a run; give its samples.jsonl and --best")
    if samples is None:
        rows = list(score_rows(judge, options.data))
    else:
        rows = list(score_samples(judge, samples, options.reward))
    if options.best is not None:
        by = "score" if options.reward is not None else _COMPARED[judge.kind]
        rows = list(best_of(rows, options.best, by))
    _write(rows, options.out)


@dataclass(frozen=True)
class ScoringModel:
    """A model that scores, its tokenizer, and how.

    Attributes:
        kind: what the model is, by its architecture.
        name: its directory, or its name on the Hub.
        how: one score is made of the scores of steps.
        micro_tokens: maximum tokens of one forward pass, unless one example has more.
    """

    kind: Kind
    name: str
    tokenizer: Any
    model: Policy | Scorer
    how: How
    micro_tokens: int


def open_scoring_model(name: str, how: How, micro_tokens: int) -> ScoringModel:
    """Load a model that scores, by the kind that its configuration names."""
    go_offline([name])
    with as_missing_model("model", name):
        config = AutoConfig.from_pretrained(name)
        tokenizer = AutoTokenizer.from_pretrained(name)
    kind = _kind(config)
    model: Policy | Scorer
    if kind == "policy":
        with as_setting_error(f"model: {name}"):
            plain = read_model(AutoModelForCausalLM, name, dtype="auto")
        model = Policy(plain.requires_grad_(False).eval().to(DEVICE))
    else:
        model, _ = load_scorer(kind, name, tokenizer, DEVICE)
    return ScoringModel(kind, name, tokenizer, model, how, micro_tokens)


def _kind(config: Any) -> Kind:
    for architecture in getattr(config, "architectures", None) or ():
        for ending, kind in _KINDS.items():
            if architecture.endswith(ending):
                return kind
    return "policy"


def _samples_in(data: str) -> list[Sample] | None:
    """The samples of an online run; None if the data are rows."""
    path = Path(data)
    if path.suffix != ".jsonl" or not path.is_file():
        return None
    with path.open(encoding="utf-8") as file:
        first = file.readline()
    try:
        record = json.loads(first)
    except ValueError:
        return None  # the reader of rows says what is wrong
    if not isinstance(record, dict) or not record.keys() >= _FIELDS:
        return None
    return list(read_samples(path))


def score_rows(judge: ScoringModel, data: Any) -> Iterator[dict[str, Any]]:
    """The rows of the data, with what the model says of each.

    Raises:
        DataError: naming a row that has no completion, or can't be read.
    """
    (records,), _ = load_data(data)
    names = set(records.dataset.column_names)
    if judge.kind == "prm":
        yield from _score_steps(judge, records)
        return
    rows = records.dataset
    suffixes: tuple[str, ...] = ("",)
    if judge.kind == "reward_model" and "messages" in names:
        records = replace(records, dataset=_with_last_turn_apart(rows))
        names = set(records.dataset.column_names)
    if {"chosen", "rejected"} <= names:
        encoded, _ = encode_preference(records, judge.tokenizer)
        suffixes = ("_chosen", "_rejected")
    else:
        train_on: Literal["auto", "completion"] = "completion" if "prompt" in names else "auto"
        encoded, _ = encode_supervised(records, judge.tokenizer, train_on=train_on)
    examples = [example(encoded, index) for index in range(len(encoded))]
    fields = _scored(judge, examples)
    by_row: dict[int, list[dict[str, Any]]] = {}
    for row, said in zip(encoded["_row"], _by_example(fields, examples), strict=True):
        by_row.setdefault(row, []).append(_joined(judge.kind, said, suffixes))
    for row in sorted(by_row):
        yield {**rows[row], **_of_row(judge.kind, by_row[row])}


def _with_last_turn_apart(rows: Dataset) -> Dataset:
    """Conversations as a prompt and a completion, as a reward model has seen them in training."""
    columns: dict[str, list[Any]] = {"prompt": [], "completion": []}
    for messages in rows["messages"]:
        columns["prompt"].append(messages[:-1])
        columns["completion"].append(messages[-1:])
    options = [name for name in rows.column_names if name in OPTION_COLUMNS]
    return Dataset.from_dict({**columns, **{name: rows[name] for name in options}})


def _by_example(
    fields: Sequence[dict[str, Any]], examples: Sequence[Example]
) -> Iterator[list[dict[str, Any]]]:
    """The fields of the completions of each example."""
    start = 0
    for each in examples:
        end = start + len(each.completions)
        yield list(fields[start:end])
        start = end


def _joined(kind: Kind, said: Sequence[dict[str, Any]], suffixes: Sequence[str]) -> dict[str, Any]:
    """The fields of the completions of one example, by names with a suffix for each completion."""
    joined: dict[str, Any] = {}
    for suffix, fields in zip(suffixes, said, strict=True):
        joined |= {f"{name}{suffix}": value for name, value in fields.items()}
    return joined


def _of_row(kind: Kind, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The fields of a row that has become several examples, as a conversation does whose template
    drops what the assistant has thought: log-probs add up, and the last score is that of the whole.
    """
    if len(parts) == 1 or kind != "policy":
        return parts[-1]
    logprob = math.fsum(part["logprob"] for part in parts)
    tokens = sum(part["tokens"] for part in parts)
    return {"logprob": logprob, "logprob_mean": logprob / tokens, "tokens": tokens}


def _score_steps(judge: ScoringModel, records: Any) -> Iterator[dict[str, Any]]:
    names = set(records.dataset.column_names)
    if not {"prompt", "completions"} <= names:
        raise DataError(
            f"{records.source}: wanted the columns prompt and completions, the steps of a solution, found "
            f"{', '.join(sorted(names))}"
        )
    separator = getattr(judge.model.plain.config, "step_separator", "\n")
    examples = []
    for number, row in enumerate(records.dataset):
        try:
            solution = step_example(
                row["prompt"], row["completions"], judge.tokenizer, separator=separator
            )
        except DataError as error:
            problem = str(error).removeprefix("step_example: ")
            raise DataError(f"{records.where(number)}: {problem}") from None
        examples.append(solution)
    for row, fields in zip(records.dataset, _scored(judge, examples), strict=True):
        yield {**row, **fields}


def _scored(judge: ScoringModel, examples: Sequence[Example]) -> list[dict[str, Any]]:
    """The fields of each completion, in the order of the examples."""
    pad = judge.model.plain.config.get_text_config().pad_token_id
    if judge.kind == "reward_model":
        examples = [ends_marked(each, pad) for each in examples]
    cost = [len(each.prompt) + sum(map(len, each.completions)) for each in examples]
    said: dict[int, list[dict[str, Any]]] = {}
    for positions in balanced(cost, 1, judge.micro_tokens)[0]:
        batch = collate([examples[position] for position in positions], device=judge.model.device)
        values = _values(judge.model, batch)
        tokens = values.tensor_split(_ends(batch)[:-1])
        fields = [_FIELDS_OF[judge.kind](each, judge.how) for each in tokens]
        for position, of_example in zip(
            positions, _by_example(fields, batch.examples), strict=True
        ):
            said[position] = of_example
    return [fields for position in range(len(examples)) for fields in said[position]]


def _ends(batch: Batch) -> list[int]:
    """Where the marked tokens of each completion end."""
    counts = torch.bincount(batch.sequence, minlength=batch.sequences)
    ends: list[int] = counts.cumsum(0).tolist()
    return ends


@torch.no_grad()
def _values(model: Policy | Scorer, batch: Batch) -> Tensor:
    """float64 [tokens]: the log-prob, or the score, of each marked token."""
    with evaluating(model.model):
        said: Any = model(batch)
    values: Tensor = said if isinstance(model, Scorer) else said.logprob
    return values.double().cpu()


def _of_reward_model(score: Tensor, how: How) -> dict[str, Any]:
    return {"score": score.item()}


def _of_prm(logits: Tensor, how: How) -> dict[str, Any]:
    probability = logits.sigmoid()
    whole = step_aggregate(probability, torch.zeros(len(logits), dtype=torch.int64), 1, how=how)
    return {"step_scores": probability.tolist(), "score": whole.item()}


def _of_policy(logprobs: Tensor, how: How) -> dict[str, Any]:
    total = logprobs.sum().item()
    return {"logprob": total, "logprob_mean": total / len(logprobs), "tokens": len(logprobs)}


_FIELDS_OF: dict[Kind, Callable[[Tensor, How], dict[str, Any]]] = {
    "reward_model": _of_reward_model,
    "prm": _of_prm,
    "policy": _of_policy,
}


def score_samples(
    judge: ScoringModel, samples: Sequence[Sample], reward: str | None = None
) -> Iterator[dict[str, Any]]:
    """The samples of a run as prompts and completions in text, with what the model says of their
    tokens.

    Those without a token, and those that have no score, are left out; so are conversations of
    several contexts, which are no prompt and completion, with a warning.

    Args:
        reward: the name of a reward of the run, which is the score then.

    Raises:
        ValueError: if no sample has that reward.
    """
    whole = [sample for sample in samples if any(sample.trained) and sample.finish != "aborted"]
    single = [sample for sample in whole if not sample.further]
    if len(single) < len(whole):
        log.warning(
            "%d of %d conversations have several contexts, and are left out: no prompt and completion says what "
            "they are",
            *(len(whole) - len(single), len(whole)),
        )
    whole = single
    if reward is not None:
        said = [_stored(sample, reward) for sample in whole]
    elif judge.kind == "policy":
        examples = [Example(each.prompt, [each.tokens], [each.trained]) for each in whole]
        said = _scored(judge, examples)
    elif judge.kind == "reward_model":
        of_model = RewardModel(judge.name, judge.tokenizer, micro_tokens=judge.micro_tokens)
        said = [{"score": score} for score in of_model([{}] * len(whole), whole)]
    else:
        of_steps = ProcessRewardModel(judge.name, judge.tokenizer, how=judge.how)
        said = [{"score": of_steps({}, sample)} for sample in whole]
    for sample, fields in zip(whole, said, strict=True):
        if None in fields.values():
            continue
        yield {
            "prompt": _text_before(judge.tokenizer, sample.prompt),
            "completion": sample.text,
            "task": sample.task,
            "finish": sample.finish,
            **fields,
        }


def _stored(sample: Sample, reward: str) -> dict[str, Any]:
    if reward not in sample.rewards:
        there = ", ".join(sorted(sample.rewards)) or "none"
        raise ValueError(f"reward: the samples have no {reward!r}; there are {there}")
    score = sample.rewards[reward]
    is_number = isinstance(score, int | float) and math.isfinite(score)
    return {"score": float(score) if is_number and score is not None else None}


def _text_before(tokenizer: Any, prompt: Sequence[int]) -> str:
    """A prompt as the text that is tokenized to it: without the BOS token, which a tokenizer adds."""
    tokens = list(prompt)
    adds_bos = tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]
    if adds_bos and tokens[:1] == [tokenizer.bos_token_id]:
        tokens = tokens[1:]
    return str(tokenizer.decode(tokens))


def best_of(
    rows: Sequence[Mapping[str, Any]], kind: Literal["sft", "dpo"], by: str
) -> Iterator[dict[str, Any]]:
    """The best completion of each prompt as a row of sft, or the best and the worst as one of dpo.

    Prompts whose completions are all worth the same make no pair, and an empty completion, as of a
    sample that has ended at once, is none to train on.

    Args:
        rows: with a prompt, a completion and a score.
        by: the field of the score.

    Raises:
        ValueError: if a row has no prompt and completion.
    """
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if not {"prompt", "completion", by} <= row.keys():
            raise ValueError(
                "best: wanted rows with a prompt and a completion, several for each prompt, found the columns "
                f"{', '.join(row)}"
            )
        if row["completion"]:
            groups.setdefault(json.dumps([row["prompt"], row.get("task")]), []).append(row)
    for group in groups.values():
        best = max(group, key=lambda row: row[by])
        worst = min(group, key=lambda row: row[by])
        if kind == "sft":
            yield {"prompt": best["prompt"], "completion": best["completion"], by: best[by]}
        elif best["completion"] != worst["completion"]:
            yield {
                "prompt": best["prompt"],
                "chosen": best["completion"],
                "rejected": worst["completion"],
                f"{by}_chosen": best[by],
                f"{by}_rejected": worst[by],
            }


def _write(rows: Sequence[Mapping[str, Any]], out: Path | None) -> None:
    lines = "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
    if out is None:
        sys.stdout.write(lines)
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".partial-{out.name}")
    partial.write_text(lines, encoding="utf-8", errors="backslashreplace")
    partial.replace(out)
    print(f"{len(rows)} rows are in {out}")
