"""The teacher of distillation on a vLLM server: its likeliest tokens at the tokens of each step.

The distribution of the teacher is known at k tokens. What is left of it is one further token, for
the student too (`burnish.objectives.with_tail`), as in TRL (``loss_add_tail``): such a divergence is
never above that of the whole vocabulary, and it equals it where k is the vocabulary. Renormalized
instead, the k tokens would say nothing of the student's mass outside of them.

    D(T_k ‖ S_k),  T_k = (T_1, …, T_k, 1 − Σ T_i),  S_k = (S_1, …, S_k, 1 − Σ S_i)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..batch import Batch
from ..config import Teacher
from ..models.policy import Policy
from ..redaction import resolved
from ..rollouts.event_loops import run
from ..rollouts.retries import longest_wait
from ..rollouts.vllm.rating import Passage, Rating, RatingServer, open_client
from ..runs.context import RunContext
from ..runs.liveness import at, may_stand
from ..runs.ranks import from_main
from ..runs.teacher import LOGP_COLUMN, as_the_teacher_reads, top_k_columns


@dataclass
class ServedTeacher:
    """A teacher that is asked for all tokens of a step at once.

    Args:
        rate: ``rate(passages)`` gives their ratings, in order.
        k: how many of the likeliest tokens they have.
        context: tokens that the teacher reads at most, if it is known.
    """

    rate: Callable[[Sequence[Passage]], Sequence[Rating]]
    k: int
    context: int | None = None

    def prepare(self, micro_batches: Sequence[Batch]) -> list[Batch]:
        """The micro-batches with columns per token: the teacher's log-prob of each, and the ids and
        log-probs [tokens, k] of its likeliest.
        """
        passages = [passages_of(batch) for batch in micro_batches]
        ratings = iter(self.rate([each for of_batch in passages for each in of_batch]))
        prepared = []
        for batch, of_batch in zip(micro_batches, passages, strict=True):
            columns = self._columns([next(ratings) for _ in of_batch])
            columns = {name: column.to(batch.target.device) for name, column in columns.items()}
            prepared.append(replace(batch, columns={**batch.columns, **columns}))
        return prepared

    def _columns(self, ratings: Sequence[Rating]) -> dict[str, Tensor]:
        logp = [each for rating in ratings for each in rating.logp]
        ids = [each for rating in ratings for each in rating.ids]
        logprobs = [each for rating in ratings for each in rating.logprobs]
        return {
            LOGP_COLUMN: torch.tensor(logp, dtype=torch.float32),
            **top_k_columns(
                torch.tensor(ids, dtype=torch.int32).view(len(logp), self.k),
                torch.tensor(logprobs, dtype=torch.float32).view(len(logp), self.k),
            ),
        }


def passages_of(batch: Batch) -> list[Passage]:
    """One passage per completion, in the order of the batch's tokens."""
    passages = []
    for example in as_the_teacher_reads(batch).examples:
        for completion, trained in zip(example.completions, example.trained, strict=True):
            start = len(example.prompt)
            places = [start + i for i, train in enumerate(trained) if train]
            passages.append(Passage([*example.prompt, *completion], places))
    return passages


def open_served_teacher(context: RunContext[Policy], config: Teacher, *, k: int) -> ServedTeacher:
    """The configured server, which was met by the main process. Every rank calls it.

    Raises:
        SourceError: if it is no teacher of this student.
    """
    assert config.server is not None
    vocab = context.model.plain.config.get_text_config().vocab_size
    if k > vocab:
        raise ValueError(
            f"teacher.top_k: must be in [1, {vocab}], the size of the vocabulary, got {k}"
        )
    client = open_client(
        resolved(config.server), timeout=config.timeout, key=resolved(config.api_key)
    )
    server = RatingServer(client, config.attempts)
    longest = longest_wait(config.attempts, config.timeout)

    def meet() -> tuple[str, int | None]:
        with at("meeting the teacher"), may_stand(longest):
            run(server.meet(context.tokenizer, k, vocab))
        return server.model, server.context

    def rate(passages: Sequence[Passage]) -> list[Rating]:
        with at("waiting for the teacher"), may_stand(longest):
            return run(server.rate(passages, k, vocab))

    server.model, server.context = from_main(context.accelerator, meet)
    return ServedTeacher(rate, k, server.context)
