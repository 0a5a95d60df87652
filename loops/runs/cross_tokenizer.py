"""A teacher of another tokenizer: what it says of the same text, over the spans that both share.

Each step's completions are written out as text and read by the teacher in its own tokens. Where both
have a boundary their distributions are compared, one pair per span (`burnish.loops.models.spans`):

    uld     Σ_i |S_(i) − T_(i)|, sorted: which token is which does not matter
    gold    w · JSD of the tokens that both vocabularies have + (1 − w) · uld of the others

A span's value stands at the last of the student's tokens in it. The loss is a mean over spans, so a
token that is not the last of its span, or is in none, has no weight.

Sources: Boizard et al. 2024, arXiv:2402.12030 (uld); Patiño et al. 2025, "Unlocking on-policy
distillation for any model family" (GOLD), and its code in TRL, whose merge strategy "bayesian" this
is.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ...data import DataError, Example
from ...data.alignment import reader_of, retokenized, shared_tokens
from ...kernels import linear_logprob
from ...objectives import PerToken, Stats, generalized_jsd, uld
from ..batch import Batch, Weighting, Weights, collate
from ..config import Teacher
from ..models.lm_head import TeacherOutputs
from ..models.policy import Policy
from ..models.spans import Spans
from ..registry import as_setting_error
from ..train.losses import Term, units_of
from .context import RunContext
from .teacher import PROMPT_COLUMN, as_the_teacher_reads

log = logging.getLogger(__name__)

SPAN_COLUMN = "ends_span"  # bool [tokens]
ALIGNED_COLUMN = "in_span"  # [tokens], 1 or 0
_ENOUGH = 0.9  # share of tokens in spans, below which a warning says so


def load_teacher_tokenizer(config: Teacher) -> PreTrainedTokenizerBase:
    """The configured tokenizer of the teacher, or its model's."""
    named: Any = config.tokenizer
    field = "teacher.tokenizer"
    if named is None:
        field = "teacher.model"
        named = config.model
    if isinstance(named, PreTrainedTokenizerBase):
        return named
    if not isinstance(named, str):
        named = getattr(named.config, "_name_or_path", "")
        if not named:
            raise ValueError(
                "teacher.tokenizer: a model made in memory has no name to find one by; give the tokenizer"
            )
    with as_setting_error(f"{field}: {named}"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(named)
    return tokenizer


@dataclass(frozen=True)
class AlignedBatch(Batch):
    """A batch, the same texts in the teacher's tokens, and the spans of both."""

    teacher: Batch = field(kw_only=True)
    spans: Spans = field(kw_only=True)
    teacher_spans: Spans = field(kw_only=True)


class MarkedText(NamedTuple):
    """A completion in the tokens of one tokenizer, the tokens of its spans marked."""

    tokens: Sequence[int]
    marked: Sequence[bool]
    bounds: Sequence[tuple[int, int]]  # of each span [start, stop)


def spans_of(texts: Sequence[MarkedText], device: torch.device | str) -> Spans:
    """Where the spans of completions are among all their marked tokens."""
    last: list[int] = []
    earlier: list[int] = []
    span: list[int] = []
    target: list[int] = []
    before = 0
    for text in texts:
        places = list(accumulate(map(int, text.marked), initial=before))
        for start, stop in text.bounds:
            for token in range(start, stop - 1):
                earlier.append(places[token])
                span.append(len(last))
                target.append(text.tokens[token])
            last.append(places[stop - 1])
        before = places[-1]
    columns = [torch.tensor(each, dtype=torch.int64) for each in (last, earlier, span, target)]
    return Spans(*(column.to(device) for column in columns))


class Aligner:
    """Writes the completions of each step in the teacher's tokens.

    Args:
        limit: tokens that the teacher reads at most; None for no limit.
    """

    def __init__(
        self,
        student: PreTrainedTokenizerBase,
        teacher: PreTrainedTokenizerBase,
        limit: int | None = None,
    ) -> None:
        self.student = reader_of(student)
        self.teacher = reader_of(teacher)
        self.limit = limit
        self.tokenizer = teacher
        unknown = set(student.all_special_tokens) - teacher.get_vocab().keys()
        self.unknown = {student.convert_tokens_to_ids(token): token for token in unknown}
        self.warned: set[str] = set()

    def prepare(self, micro_batches: Sequence[Batch]) -> list[Batch]:
        """The micro-batches with what the teacher reads, and two columns per token: where a span
        ends, and what is in one.
        """
        prepared = [self.aligned(batch) for batch in micro_batches]
        tokens = sum(len(batch.target) for batch in prepared)
        missed = tokens - int(sum(batch.columns[ALIGNED_COLUMN].sum() for batch in prepared))
        if missed > (1 - _ENOUGH) * tokens:
            self._warn(
                "aligned",
                f"{missed} of {tokens} trained tokens of this step are in no span of text that both tokenizers can "
                "write, and learn nothing: the teacher's changes the text, or tokens stand for no whole character",
            )
        return list(prepared)

    def aligned(self, batch: Batch) -> AlignedBatch:
        own = batch.columns.get(PROMPT_COLUMN) is not None
        prompts = [example.prompt for example in as_the_teacher_reads(batch).examples]
        if not own:
            prompts = [self.prompt(example.prompt) for example in batch.examples]
        texts: list[MarkedText] = []
        teacher_texts: list[MarkedText] = []
        examples = []
        for example, prompt in zip(batch.examples, prompts, strict=True):
            pairs = zip(example.completions, example.trained, strict=True)
            both = [self._both(example, *completion) for completion in pairs]
            texts += [text for text, _ in both]
            theirs = [text for _, text in both]
            teacher_texts += theirs
            self._check_length(len(prompt) + max((len(text.tokens) for text in theirs), default=0))
            marks = [text.marked for text in theirs]
            examples.append(Example(prompt, [text.tokens for text in theirs], marks))
        device = batch.target.device
        spans = spans_of(texts, device)
        ends = torch.zeros(len(batch.target), dtype=torch.bool, device=device)
        ends[spans.last] = True
        covered = ends.float()
        covered[spans.earlier] = 1.0
        columns = {**batch.columns, SPAN_COLUMN: ends, ALIGNED_COLUMN: covered}
        return AlignedBatch(
            **vars(replace(batch, columns=columns)),
            teacher=collate(examples, device=device),
            spans=spans,
            teacher_spans=spans_of(teacher_texts, device),
        )

    def _both(
        self, example: Example, tokens: Sequence[int], trained: Sequence[bool]
    ) -> tuple[MarkedText, MarkedText]:
        """A completion in the student's tokens and in the teacher's, with the spans that train."""
        others, spans = retokenized(tokens, self.student, self.teacher, example.prompt)
        kept = [span for span in spans if all(trained[span.start : span.stop])]
        marked = [False] * len(others)
        for span in kept:
            marked[span.other_start : span.other_stop] = [True] * (
                span.other_stop - span.other_start
            )
        return (
            MarkedText(tokens, trained, [(span.start, span.stop) for span in kept]),
            MarkedText(others, marked, [(span.other_start, span.other_stop) for span in kept]),
        )

    def prompt(self, tokens: Sequence[int]) -> list[int]:
        """The student's prompt, as text, in the teacher's tokens, after its own first token."""
        start = 0
        while start < len(tokens) and tokens[start] in (self.student.begin, self.student.end):
            start += 1
        for token in tokens[start:]:
            if token in self.unknown:
                self._warn(
                    "prompt",
                    f"the teacher's tokenizer has no {self.unknown[token]}, which it reads as plain text in prompts; "
                    "if the data have a column of prompts, name it as teacher.prompt, and the teacher's own chat "
                    "template is used",
                )
        text = self.student.decode(tokens[start:])
        ids: list[int] = list(self.tokenizer(text)["input_ids"])
        if ids and ids[-1] == self.teacher.end:
            ids.pop()
        if ids:
            return ids
        first = self.teacher.end if self.teacher.begin is None else self.teacher.begin
        if first is None:
            raise DataError(
                "teacher.tokenizer: a text begins with the completion, and the tokenizer has no token to begin with; "
                "set its bos_token"
            )
        return [first]

    def _check_length(self, length: int) -> None:
        if self.limit is not None and length > self.limit:
            raise DataError(
                f"teacher: a prompt and its completion make {length} of its tokens, and its context is {self.limit}; "
                "shorten rows (max_length) or completions (max_tokens)"
            )

    def _warn(self, about: str, message: str) -> None:
        """Log a warning, the first time that it is about this."""
        if about not in self.warned:
            log.warning("teacher: %s", message)
            self.warned.add(about)


@dataclass(frozen=True)
class Gold:
    """GOLD's hybrid loss, of log-probs of the student [spans, V] and of the teacher [spans, V'].

        ℓ = w JSD_β(S, T over tokens of both) + (1 − w) uld(S, T over the others)

    The two need not add up to 1, as the generalized Jensen-Shannon divergence allows: it is at least
    0 whatever they add up to, as a KL divergence is not.

    Attributes:
        shared: int64 [2, n], the ids of the tokens that both have, the student's and the teacher's.
        weight: w; None for n/V', as TRL has it.
    """

    shared: Tensor
    beta: float
    weight: float | None = None

    def __call__(self, logp: Tensor, teacher_logp: Tensor) -> tuple[Tensor, Stats]:
        ids, teacher_ids = self.shared.to(logp.device)
        weight = self.weight
        if weight is None:
            weight = len(ids) / teacher_logp.shape[1]
        both, _ = generalized_jsd(logp[:, ids], teacher_logp[:, teacher_ids], beta=self.beta)
        others, _ = uld(_without(logp, ids), _without(teacher_logp, teacher_ids))
        return weight * both + (1 - weight) * others, {}


def _without(logp: Tensor, ids: Tensor) -> Tensor:
    """The log-probs of all other tokens, and one token of probability 0, since there may be none."""
    others = torch.ones(logp.shape[1], dtype=torch.bool, device=logp.device)
    others[ids] = False
    return F.pad(logp[:, others], (0, 1), value=-torch.inf)


def compared(
    config: Teacher, student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase
) -> Callable[[Tensor, Tensor], tuple[Tensor, Stats]]:
    """The configured divergence of distributions over two vocabularies.

    Raises:
        DataError: if it is of tokens that both have, and there are none.
    """
    if config.divergence == "uld":
        return uld
    shared = shared_tokens(student, teacher)
    if not shared:
        raise DataError(
            "teacher.divergence: gold compares the tokens that both vocabularies spell alike, and there are none; "
            "take uld"
        )
    return Gold(torch.tensor(shared).T, config.beta, config.matched_weight)


def open_cross_tokenizer(
    context: RunContext[Policy],
    config: Teacher,
    model: Policy,
    tokenizer: PreTrainedTokenizerBase,
) -> Callable[[Batch], TeacherOutputs]:
    """A teacher in memory that reads what `Aligner` writes."""
    objective = compared(config, context.tokenizer, tokenizer)

    def live(batch: Batch) -> TeacherOutputs:
        assert isinstance(batch, AlignedBatch)
        with context.accelerator.autocast():
            outputs = model.teacher_outputs(
                batch.teacher,
                beta=config.beta,
                temperature=config.temperature,
                dense=not context.model.fused,
            )
            outputs = at_spans(outputs, batch)
        return replace(outputs, objective=objective)

    return live


@torch.no_grad()
def at_spans(outputs: TeacherOutputs, batch: AlignedBatch) -> TeacherOutputs:
    """The teacher's outputs at the last tokens of spans, and what precedes these."""
    spans = batch.teacher_spans
    if outputs.logits is not None:
        logits = outputs.logits[spans.earlier]
        logp = outputs.log_softmax(logits).gather(1, spans.target[:, None])[:, 0]
        part = replace(outputs, logits=outputs.logits[spans.last])
    else:
        assert outputs.hidden is not None and outputs.head is not None
        logp = outputs.hidden.new_zeros(0)
        if len(spans.earlier):
            logp = linear_logprob(
                outputs.hidden[spans.earlier],
                outputs.head,
                spans.target,
                temperature=outputs.temperature,
            ).logprob
        part = replace(outputs, hidden=outputs.hidden[spans.last])
    return replace(part, spans=batch.spans, log_prefix=(spans.log_prefix(logp),))


def losses_of_spans(losses: Mapping[str, Term]) -> dict[str, Term]:
    """The losses, those of the divergence weighted by spans, and the share of tokens in spans."""
    changed: dict[str, Term] = {}
    for name, term in losses.items():
        if "divergence" in units_of(term.function):
            weighting = partial(mean_of_spans, weighting=term.weigh, of=term.of)
            term = replace(term, weighting=weighting)
        changed[name] = term
    return {**changed, "aligned": Term(_aligned, 0.0)}


def _aligned(in_span: PerToken) -> tuple[PerToken, Stats]:
    return in_span, {}


def mean_of_spans(batch: Batch, *, weighting: Weighting, of: int | str | None = None) -> Weights:
    """A weighting of tokens, of the last tokens of spans alone: with `token_mean` every span counts
    the same, with `length_normalized` every completion, by the mean of its spans.
    """
    ends = batch.columns[SPAN_COLUMN]
    of_spans = weighting(
        Batch(
            batch.examples,
            batch.target[ends],
            batch.sequence[ends],
            batch.completion,
            batch.columns,
        )
    )
    chosen = ends[batch.tokens_of(of)]
    weight = of_spans.weight.new_zeros(len(chosen))
    weight[chosen] = of_spans.weight
    return Weights(weight, of_spans.share)
