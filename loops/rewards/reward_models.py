"""Reward models, which score a completion, and process reward models, which score its steps.

They read the policy's sampled tokens, because tokenizing text again may give others; another
vocabulary is refused.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PreTrainedTokenizerBase,
)

from ...data import Example, vocabulary_differences
from ...objectives import step_aggregate
from ..batch import collate
from ..models.io import read_model
from ..models.scorer import Scorer, ends_marked, scores
from ..registry import as_setting_error
from ..rollouts.sample import Row, Sample

Tokenizer = PreTrainedTokenizerBase

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class RewardModel:
    """The score that a reward model gives to prompt and completion, where the completion ends
    (`loops.recipes.reward`).

    A completion without a token can't be scored. Completions of one prompt are scored together; it
    is read once, and so are equal completions, whose scores would differ by rounding.

    Args:
        model: directory, or name on the Hub.
        tokenizer: the policy's.
        micro_tokens: tokens that one forward pass computes at most, unless one completion alone has
            more.

    Raises:
        ValueError: if its tokens are not the policy's, if it is no reward model, or if its head is
            in no file.
    """

    over, concurrency = "group", 1

    def __init__(
        self, model: str, tokenizer: Tokenizer, *, device: str = DEVICE, micro_tokens: int = 8192
    ) -> None:
        self.scorer, _ = load_scorer("reward_model", model, tokenizer, device)
        self.micro_tokens = micro_tokens

    def __call__(self, rows: Sequence[Row], samples: Sequence[Sample]) -> list[float | None]:
        for sample in samples:
            _refuse_unread(sample)
        texts = [(tuple(sample.prompt), tuple(sample.tokens)) for sample in samples]
        different = list(dict.fromkeys(text for text in texts if text[1]))
        if not different:
            return [None] * len(samples)
        passes: list[tuple[list[int], list[list[int]]]] = []  # a prompt and completions of it
        cost = 0
        for text in different:
            prompt, tokens = map(list, text)
            cost += len(tokens)
            # The next completion of the same prompt goes into the same pass, as long as it fits.
            if not passes or prompt != passes[-1][0] or cost > self.micro_tokens:
                passes.append((prompt, []))
                cost = len(prompt) + len(tokens)
            passes[-1][1].append(tokens)
        pad = self.scorer.plain.config.get_text_config().pad_token_id
        marked = [ends_marked(Example(*texts, trained=[]), pad) for texts in passes]
        batches = [collate([example], device=self.scorer.device) for example in marked]
        values = dict(zip(different, scores(self.scorer, batches).tolist(), strict=True))
        return [values.get(text) for text in texts]


class ProcessRewardModel:
    """A process reward model's scores of a completion's steps as one number.

    See `loops.recipes.prm`.

    A step ends with the token that completes the separator, or with the completion, to which a
    missing separator is added, because the model was trained to score there. Runs of separators end
    one step.

    Args:
        model, tokenizer: see `RewardModel`.
        how: the weakest step, the product, the last one or the mean, see
            `objectives.step_aggregate`.
    """

    concurrency = 1

    def __init__(
        self,
        model: str,
        tokenizer: Tokenizer,
        *,
        device: str = DEVICE,
        how: Literal["min", "prod", "last", "mean"] = "min",
    ) -> None:
        loaded = load_scorer("prm", model, tokenizer, device)
        self.scorer, self.model_tokenizer = loaded
        self.tokenizer, self.how = tokenizer, how

    def __call__(self, row: Row, sample: Sample) -> float | None:
        _refuse_unread(sample)
        completion, ends = self._steps(sample)
        if not any(ends):
            return None
        batch = collate([Example(sample.prompt, [completion], [ends])], device=self.scorer.device)
        probability = scores(self.scorer, [batch]).sigmoid().double().cpu()
        return step_aggregate(
            probability, torch.zeros(len(probability), dtype=torch.int64), 1, how=self.how
        ).item()

    def _steps(self, sample: Sample) -> tuple[list[int], list[bool]]:
        """Tokens of the completion, and which of them end a step that the policy wrote."""
        special = set(self.tokenizer.all_special_ids)
        completion = list(sample.tokens)
        while completion and completion[-1] in special:
            completion.pop()
        sampled = sample.trained[: len(completion)]
        separator = getattr(self.scorer.plain.config, "step_separator", "\n")
        # A token has a byte at least, so the separator is within as many tokens as it has bytes.
        longest = len(separator.encode())
        ends = [False] * len(completion)
        step: list[int] = []
        for t, token in enumerate(completion):
            if sampled[t]:
                step.append(token)
            if separator in self._text(step[-longest:]):
                ends[t] = bool(self._text(step).replace(separator, "").strip())
                step = []
        if self._text(step).strip():
            closing = list(self.model_tokenizer(separator, add_special_tokens=False)["input_ids"])
            ends += [False] * (len(closing) - 1) + [True]
            completion += closing
        return completion, ends

    def _text(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens))


def _refuse_unread(sample: Sample) -> None:
    """Raise ValueError for a conversation that is not one text, or that shows images."""
    if sample.images:
        raise ValueError(
            f"a reward model reads text alone so far, and the prompt of task {sample.task} shows images; score it by "
            "a function of your own, which gets the pictures"
        )
    if sample.further:
        raise ValueError(
            f"a reward model reads one prompt and its completion, and completion {sample.index} of task {sample.task} "
            f"has {len(sample.contexts)} contexts; score what it was for by a function of your own"
        )


class _Kind(NamedTuple):
    """What `transformers` calls a kind of reward model, and what it scores."""

    auto: Any
    architecture: str
    scores: str


_KINDS = {
    "reward_model": _Kind(
        AutoModelForSequenceClassification, "ForSequenceClassification", "whole completions"
    ),
    "prm": _Kind(AutoModelForTokenClassification, "ForTokenClassification", "their steps"),
}


def load_scorer(
    who: Literal["reward_model", "prm"], model: str, tokenizer: Tokenizer, device: str
) -> tuple[Scorer, Tokenizer]:
    """The model and its tokenizer.

    Raises:
        ValueError: if the model is of the other kind, if its head is in none of its files, or at
            the first token of the policy that it reads as another one, or does not know.
    """
    judge = _KINDS[who]
    with as_setting_error(f"{who}: {model}"):
        _refuse_other_kind(who, AutoConfig.from_pretrained(model))
        wanted = f"a model that scores {judge.scores}, a ...{judge.architecture} of transformers"
        loaded = read_model(judge.auto, model, wanted=wanted)
        model_tokenizer = AutoTokenizer.from_pretrained(model)
    for index, token, other in vocabulary_differences(tokenizer, model_tokenizer):
        there = "does not exist" if other is None else f"is {other!r}"
        raise ValueError(
            f"{who}: token {index} is {token!r} for the policy, and {there} for the reward model, so it would read "
            "another text; choose one that was trained with the policy's tokenizer"
        )
    scorer = Scorer(loaded.requires_grad_(False).eval().to(device))
    # In bfloat16 the scores of a group are often equal.
    scorer.head.to(torch.promote_types(next(scorer.head.parameters()).dtype, torch.float32))
    return scorer, model_tokenizer


def _refuse_other_kind(who: str, config: object) -> None:
    """Both kinds may have heads of one name and shape: then `transformers` loads either as the
    other.
    """
    for saved in getattr(config, "architectures", None) or ():
        for other, judge in _KINDS.items():
            if other != who and saved.endswith(judge.architecture):
                raise ValueError(
                    f"it is a {saved}, which scores {judge.scores}, and {who} needs one that scores "
                    f"{_KINDS[who].scores}; name it as {other}: {{model: ...}}"
                )
