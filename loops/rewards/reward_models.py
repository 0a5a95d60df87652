"""Trained models as judges: a reward model scores the answer, a process reward model its steps.

They read the policy's tokens as they were sampled: text that is tokenized again is not always the same tokens, and so a
model of another vocabulary is refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoTokenizer

from ...data import Example
from ...objectives import step_aggregate
from ..batch import collate
from ..models.scorer import Scorer, ends_marked, scores
from ..rollouts.sample import Sample
from .scoring import Over, Row

Tokenizer = Any  # of transformers
How = Literal["min", "prod", "last", "mean"]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class RewardModel:
    """The score that a reward model gives to prompt and answer, where the answer ends; see `loops.reward`.

    An answer without a token can't be scored. Answers to one prompt are scored together, and the prompt is read once.

    Args:
        tokenizer: the policy's.
        theirs: the reward model's.
        micro_tokens: tokens that one forward pass computes at most, unless one answer alone has more.
    """

    scorer: Scorer
    tokenizer: Tokenizer
    theirs: Tokenizer
    micro_tokens: int = 8192
    over: ClassVar[Over] = "group"
    concurrency: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_same_tokens("reward_model", self.tokenizer, self.theirs)

    def __call__(self, rows: Sequence[Row], samples: Sequence[Sample]) -> list[float | None]:
        there = [i for i, sample in enumerate(samples) if sample.tokens]
        found: list[float | None] = [None] * len(samples)
        pad = self.scorer.plain.config.pad_token_id
        for chosen in _within(self.micro_tokens, there, samples):
            answers = [samples[i].tokens for i in chosen]
            example = Example(samples[chosen[0]].prompt, answers, [[True] * len(answer) for answer in answers])
            batch = collate([ends_marked(example, pad)], device=self.scorer.device)
            for i, value in zip(chosen, scores(self.scorer, [batch]).tolist(), strict=True):
                found[i] = value
        return found


@dataclass(frozen=True)
class ProcessRewardModel:
    """What a process reward model says of the answer's steps, as one number; see `loops.prm`.

    A step ends with the token that completes the separator, or with the answer, which is given a separator if it has
    none, because that is where the model was trained to judge. Runs of separators end one step.

    Args:
        tokenizer: the policy's.
        theirs: the model's.
        how: the weakest step, the product, the last one or the mean, see `objectives.step_aggregate`.
    """

    scorer: Scorer
    tokenizer: Tokenizer
    theirs: Tokenizer
    how: How = "min"
    separator: str = field(init=False, default="\n")
    concurrency: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_same_tokens("prm", self.tokenizer, self.theirs)
        trained_with = getattr(self.scorer.plain.config, "step_separator", self.separator)
        object.__setattr__(self, "separator", trained_with)

    def __call__(self, row: Row, sample: Sample) -> float | None:
        answer, ends = self._steps(sample)
        if not any(ends):
            return None
        batch = collate([Example(sample.prompt, [answer], [ends])], device=self.scorer.device)
        probability = scores(self.scorer, [batch]).sigmoid().double().cpu()
        return step_aggregate(probability, torch.zeros(len(probability), dtype=torch.int64), 1, how=self.how).item()

    def _steps(self, sample: Sample) -> tuple[list[int], list[bool]]:
        """The answer's tokens, and which of them end a step that the policy wrote."""
        special = set(self.tokenizer.all_special_ids)
        answer = list(sample.tokens)
        while answer and answer[-1] in special:
            answer.pop()
        sampled = sample.trained[: len(answer)]
        separator = list(self.theirs(self.separator, add_special_tokens=False)["input_ids"])
        ends, step = [False] * len(answer), ""
        for t, token in enumerate(answer):
            step += self.tokenizer.decode([token]) if sampled[t] else ""
            if self.separator in step:
                ends[t], step = bool(step.replace(self.separator, "").strip()), ""
        if step.strip():
            ends += [False] * (len(separator) - 1) + [True]
            answer += separator
        return answer, ends


def load_reward_model(
    model: str, tokenizer: Tokenizer, *, device: str = DEVICE, micro_tokens: int = 8192
) -> RewardModel:
    """A reward model from a directory or the Hub, to score the answers of the policy with this tokenizer.

    Raises:
        ValueError: if its tokens are not the policy's, or it has no head of one output.
    """
    theirs = AutoTokenizer.from_pretrained(model)
    return RewardModel(_scorer(AutoModelForSequenceClassification, model, device), tokenizer, theirs, micro_tokens)


def load_prm(model: str, tokenizer: Tokenizer, *, device: str = DEVICE, how: How = "min") -> ProcessRewardModel:
    """A process reward model from a directory or the Hub; see `load_reward_model`."""
    theirs = AutoTokenizer.from_pretrained(model)
    return ProcessRewardModel(_scorer(AutoModelForTokenClassification, model, device), tokenizer, theirs, how)


def check_same_tokens(who: str, policy: Tokenizer, model: Tokenizer) -> None:
    """Refuse a model that would read something else than the policy wrote.

    Raises:
        ValueError: naming the first token that differs, or that only the policy has.
    """
    ours, theirs = ({index: token for token, index in one.get_vocab().items()} for one in (policy, model))
    for index in sorted(ours):
        if ours[index] != theirs.get(index):
            other = f"is {theirs[index]!r}" if index in theirs else "does not exist"
            raise ValueError(
                f"{who}: token {index} is {ours[index]!r} for the policy, and {other} for the model that judges, so it "
                "would read another text; choose one that was trained with the policy's tokenizer"
            )


def _scorer(kind: Any, model: str, device: str) -> Scorer:
    loaded = kind.from_pretrained(model).requires_grad_(False).eval()
    return Scorer(loaded.to(device))


def _within(budget: int, chosen: Sequence[int], samples: Sequence[Sample]) -> list[list[int]]:
    """The answers to one prompt in parts, each of which the model can take at once."""
    parts: list[list[int]] = []
    used = 0
    for i in chosen:
        cost = len(samples[i].tokens)
        prompt = len(samples[i].prompt)
        if not parts or used + cost > budget or samples[i].prompt != samples[parts[-1][0]].prompt:
            parts.append([])
            used = prompt
        parts[-1].append(i)
        used += cost
    return parts
