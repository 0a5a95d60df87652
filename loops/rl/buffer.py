"""A rollout: sampled completions, their scores, and columns over their trained tokens.

    samples -> scores -> advantages -> examples, several completions of one prompt each ->
    micro-batches

Whatever mixes completions (group means, whitening, generalized advantages) is computed once per
rollout, over all of it and on every rank alike, so that the split into micro-batches and ranks does
not matter.

A completion is one sequence of a batch, or several: the contexts of a conversation. Rewards,
advantages and masks are those of completions, which count once whatever their contexts.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from zlib import crc32

import numpy as np
import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import gather_object
from torch import Tensor

from ...data import Example, balanced
from ...objectives import sequence_sum
from ..batch import Batch, NamedColumns, collate
from ..models.rows import Layout
from ..rewards.scoring import RewardFunction
from ..rewards.table import RewardTable, score
from ..rollouts.packed import PackedMask, logprobs_array, mask_array, tokens_array
from ..rollouts.sample import Context, Row, Sample

Rewards = Sequence[RewardFunction | Callable[..., object]]


class RolloutBuffer:
    """Completions in the order of (task, index), and columns [tokens] over all of their trained
    tokens.

    Completions that must not be trained on have no trained token: those that are unscored, aborted,
    or (with ``mask_truncated``) cut off. Columns are set and read as ``buffer[name]``; every batch
    has its part of them. From the start there are ``sampled_logp``, the sampler's log-probs, and
    ``age``, versions behind the step.

    Args:
        samples: or groups of them.
        version: of the weights of the step that trains on them first; the newest that sampled,
            unless given.
        dtype: of the columns.

    Attributes:
        contexts: of all completions, in their order.
        completion_of: int64 [contexts], the completion that each context belongs to.
        context: int64 [tokens], the context that each trained token belongs to.
        scores: the table of `score`; without it nothing is unscored.
        unfinished: float64 [completions], 1 for those that did not end by themselves.
        version: as given, or found.
    """

    def __init__(
        self,
        samples: Sequence[Sample] | Sequence[Sequence[Sample]],
        *,
        mask_truncated: bool = False,
        version: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        groups = [[group] if isinstance(group, Sample) else group for group in samples]
        # In one order everywhere: sources complete in any order, and columns follow this one.
        self.samples = sorted(
            chain.from_iterable(groups), key=lambda sample: (sample.task, sample.index)
        )
        self.dtype = dtype
        self.unfinished = torch.tensor(
            [sample.finish != "stop" for sample in self.samples], dtype=torch.float64
        )
        self.contexts: list[Context] = []
        owners: list[int] = []
        for number, sample in enumerate(self.samples):
            self.contexts += sample.contexts
            owners += [number] * len(sample.contexts)
        self.completion_of = torch.tensor(owners, dtype=torch.int64)
        masks = [torch.from_numpy(mask_array(context.trained)) for context in self.contexts]
        self.trained = [PackedMask(mask.numpy()) for mask in masks]
        counts = torch.tensor([int(mask.sum()) for mask in masks], dtype=torch.int64)
        self.context = torch.arange(len(counts)).repeat_interleave(counts)
        self.scores: RewardTable = score([], self.samples)
        # a plain dict: checkpoints are read without running code
        self.columns: dict[str, Tensor] = {}
        self.version = _newest(self.samples) if version is None else version
        logprobs = [torch.empty(0, dtype=dtype)]
        ages = [torch.empty(0, dtype=dtype)]
        for context, mask in zip(self.contexts, masks, strict=True):
            drawn = torch.from_numpy(logprobs_array(context.logprobs))[mask]
            logprobs.append(drawn.to(dtype))
            ages.append(_ages(context, self.version)[mask].to(dtype))
        self["sampled_logp"] = torch.cat(logprobs)
        self["age"] = torch.cat(ages)
        untrained = ("aborted", "length") if mask_truncated else ("aborted",)
        self.mask([sample.finish in untrained for sample in self.samples])

    def __getitem__(self, name: str) -> Tensor:
        return NamedColumns(self.columns)[name]

    def __setitem__(self, name: str, column: Tensor) -> None:
        if not isinstance(column, Tensor):
            raise ValueError(
                f"rollout: {name} must be a tensor, got {type(column).__name__}; make it one, torch.tensor"
            )
        if len(column) != len(self.context):
            raise ValueError(
                f"rollout: {name} must have one entry per trained token, {len(self.context)}, got {len(column)}; "
                "a value per completion becomes one per token by [rollout.sequence]"
            )
        self.columns[name] = column.to(self.dtype) if column.is_floating_point() else column

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def sequence(self) -> Tensor:
        """int64 [tokens], the completion that each trained token belongs to."""
        return self.completion_of[self.context]

    @property
    def lengths(self) -> Tensor:
        """int64 [completions], the number of their trained tokens."""
        return torch.bincount(self.sequence, minlength=len(self.samples))

    @property
    def reward(self) -> Tensor:
        """float64 [completions], the weighted sum of the scores; NaN where there is none."""
        return self.scores.total

    def score(self, rewards: Rewards, rows: Sequence[Row] | None = None) -> RewardTable:
        """Score the completions, and mask those without a score.

        See `burnish.loops.rewards.score`.
        """
        self.scores = score(rewards, self.samples, rows)
        if rewards:
            self.mask(self.scores.total.isnan().tolist())
        return self.scores

    def mask(self, masked: Sequence[bool]) -> None:
        """Train on no token of these completions."""
        # Tokens that train no more leave all columns: a batch has an entry per trained token.
        kept = ~torch.tensor(masked, dtype=torch.bool)[self.sequence]
        self.columns = {name: column[kept] for name, column in self.columns.items()}
        self.context = self.context[kept]
        for i, completion in enumerate(self.completion_of.tolist()):
            if masked[completion]:
                self.trained[i] = PackedMask(np.zeros(len(self.trained[i]), np.bool_))

    def sum(self, column: Tensor) -> Tensor:
        """[completions], the sum of a column [tokens] over each of them."""
        return sequence_sum(column, self.sequence, len(self.samples))

    def split_groups(
        self, max_tokens: int | None = None, layout: Layout = "shared"
    ) -> list[list[list[int]]]:
        """The examples of each task, as indices of its contexts that have a token to train on.

        Contexts of the same prompt share an example, so that it is computed once, unless that
        exceeds ``max_tokens``.
        """
        groups: dict[int, list[list[int]]] = {}
        latest: dict[tuple[int, tuple[int, ...]], list[int]] = {}  # example, by task and prompt
        for i, context in enumerate(self.contexts):
            if not any(self.trained[i]):
                continue
            task = self.task_of(i)
            prompt = (task, tuple(context.prompt))
            last = latest.get(prompt, [])
            full = max_tokens is not None and self._cost([*last, i], layout) > max_tokens
            if not last or full:
                last = latest[prompt] = []
                groups.setdefault(task, []).append(last)
            last.append(i)
        return list(groups.values())

    def task_of(self, context: int) -> int:
        """The task of a context, by its index."""
        return self.samples[int(self.completion_of[context])].task

    def micro_batches(
        self,
        max_tokens: int | None = None,
        *,
        examples: Sequence[list[int]] | None = None,
        layout: Layout = "shared",
        accelerator: Accelerator | None = None,
    ) -> list[Batch]:
        """This rank's micro-batches of one step, on its device.

        An empty one where there is nothing to train on. Its arguments are those of `plan`.
        """
        plan = self.plan(max_tokens, examples=examples, layout=layout, accelerator=accelerator)
        device = (accelerator or PartialState()).device
        counts = torch.bincount(self.context, minlength=len(self.contexts))
        tokens = torch.split(torch.arange(len(self.context)), counts.tolist())  # of each context
        batches = []
        for parts in plan:
            index = torch.cat([torch.arange(0), *(tokens[i] for part in parts for i in part)])
            columns = {name: column[index] for name, column in self.columns.items()}
            batches.append(collate([self._example(part) for part in parts], columns, device))
        return batches

    def plan(
        self,
        max_tokens: int | None = None,
        *,
        examples: Sequence[list[int]] | None = None,
        layout: Layout = "shared",
        accelerator: Accelerator | None = None,
    ) -> list[list[list[int]]]:
        """The examples of each of this rank's micro-batches, as indices of contexts.

        Args:
            max_tokens: that a micro-batch computes at most, unless one context alone has more.
            examples: the indices of the contexts that share an example; those of `split_groups`
                unless given.
            layout: of the policy, whose rows decide whether a shared prompt is computed once.
            accelerator: this process, unless given.

        Raises:
            ValueError: if ranks hold other rollouts than each other.
        """
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"rollout: max_tokens must be >= 1, got {max_tokens}")
        if examples is None:
            examples = list(chain.from_iterable(self.split_groups(max_tokens, layout)))
        process = accelerator or PartialState()  # which knows the ranks without an accelerator
        plan = balanced(
            [self._cost(example, layout) for example in examples], process.num_processes, max_tokens
        )
        self._refuse_other_rollouts(plan)
        of_rank = plan[process.process_index]
        return [[examples[position] for position in positions] for positions in of_rank]

    def _example(self, contexts: Sequence[int]) -> Example:
        """One prompt with some of its contexts, by their indices."""
        first = contexts[0]
        return Example(
            self.contexts[first].prompt,
            [self.contexts[i].tokens for i in contexts],
            [self.trained[i] for i in contexts],
            self.samples[int(self.completion_of[first])].images,
        )

    def _refuse_other_rollouts(self, plan: object) -> None:
        """Raise ValueError if ranks plan other micro-batches, or hold other completions or scores,
        than each other.
        """
        # A checksum: the whole would be megabytes from every rank in every step.
        tokens = [int(tokens_array(context.tokens).sum()) for context in self.contexts]
        content = repr((plan, self.lengths.tolist(), tokens))
        of_ranks = gather_object([(crc32(content.encode()), self.reward.tolist())])
        alike = len({checksum for checksum, _ in of_ranks}) == 1
        if alike and len(self):
            # Reward models may round otherwise on each rank: a hundredth of the largest score is
            # let through.
            scores = torch.tensor([rewards for _, rewards in of_ranks]).nan_to_num()
            alike = bool((scores - scores[0]).abs().max() <= 0.01 * scores.abs().max())
        if not alike:
            raise ValueError(
                "rollout: its completions or their scores differ between ranks, so that some would be trained twice "
                "and others never, or on the advantages of other scores; where a judge or chance scores, make and "
                "score the rollout in one process: rollout = from_main(accelerator, function)"
            )

    def _cost(self, contexts: Sequence[int], layout: Layout) -> int:
        """Tokens of an example, as `data.token_cost` counts them."""
        prompt = len(self.contexts[contexts[0]].prompt)
        tokens = sum(len(self.contexts[i].tokens) for i in contexts)
        return prompt * (1 if layout == "shared" else len(contexts)) + tokens


def _newest(samples: Sequence[Sample]) -> int:
    """The newest version of the weights that any of the samples was drawn from."""
    return max(chain.from_iterable(sample.versions for sample in samples), default=0)


def _ages(context: Context, version: int) -> Tensor:
    """int64 [tokens], how many versions each token is behind this one; 0 where none is known, of a
    given token.
    """
    ages = torch.zeros(len(context.tokens), dtype=torch.int64)
    for span in context.spans:
        ages[span.start : span.end] = version - span.version
    return ages
