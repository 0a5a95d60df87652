"""Micro-batches of a step from encoded data, on this rank's device; and values computed in one pass
over the data.
"""

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from accelerate import Accelerator
from datasets import Dataset
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ...data import Batches, Example, Stream, StreamBatches, example
from ...data.encode import images_of_row
from ...data.images import ImageReader
from ..batch import Batch, collate
from .ranks import from_main, gather_to_main, on_main, tensors_from_main
from .storage import sync

log = logging.getLogger(__name__)

_DIGEST = "sha256"  # of stored tokens, in the metadata of their file


Measure = Callable[[list[Batch]], Mapping[str, float]]


class StepFeed:
    """The micro-batches of every step of a run, and what the run keeps, measures and closes with
    them.

    A feed says how many ``steps`` there are, and ``feed(step)`` returns this rank's micro-batches
    of a step. All else may stay as it is here: nothing is kept, measured or closed.

    Attributes:
        stateful: whether its state, which is the same on every rank, is part of checkpoints.
        evaluates: whether there is held-out data.
    """

    stateful: bool = False
    evaluates: bool = False

    @property
    def steps(self) -> int:
        raise NotImplementedError

    def __call__(self, step: int) -> list[Batch]:
        raise NotImplementedError

    def plan(self, step: int) -> list[list[int]]:
        """The indices into the data of the examples of each micro-batch, for messages.

        Empty where there are none.
        """
        return []

    def observe(self, metrics: Mapping[str, float]) -> None:
        """Receive the metrics of the step that was taken, over all ranks."""

    def step_metrics(self) -> Mapping[str, float]:
        """Further metrics of the step that was taken."""
        return {}

    def evaluate(self, measure: Measure, rows: object = None) -> Mapping[str, float]:
        """Metrics of held-out data, or of these rows. Every rank calls it.

        Args:
            measure: ``measure(micro_batches)`` gives the metrics of the run's losses.
        """
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

    def close(self) -> None:
        """End what the feed has started. It is called once, however the run ends."""


@dataclass
class Feed(StepFeed):
    """``feed(step)`` returns this rank's micro-batches of that step, which depend only on its
    number.

    Attributes:
        dataset: encoded examples of all steps, or, if streamed, of the step planned last.
        batches: the plan: which examples make up which micro-batch of which rank.
        columns: names of columns of the dataset that travel with the batch: one number per example,
            or a list of them, one per completion or per trained token.
        per_token: further columns by name, each a list with one tensor [tokens, ...] per example of
            the dataset.
        mark: changes which tokens of an example are trained.
        prepare: ``prepare(feed, step, micro_batches)`` returns the micro-batches to train on; it
            can measure something over the whole step before its first forward pass.
        memory: a state beside the parameters, the same on every rank, which is part of checkpoints:
            its ``observe(metrics)`` is called after each step, see also
            `torch.distributed.checkpoint.stateful`.
        evaluation: held-out data, the whole of them as one step.
        of_rows: makes such a feed of further rows.
        images: reads the images of the next step while this one is computed.
    """

    dataset: Dataset | Stream
    batches: Batches | StreamBatches
    rank: int = 0
    device: torch.device | str = "cpu"
    columns: Sequence[str] = ()
    per_token: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)
    mark: Callable[[Example], Example] = lambda example: example
    prepare: Callable[["Feed", int, list[Batch]], list[Batch]] = lambda feed, step, micro_batches: (
        micro_batches
    )
    memory: Any = None
    evaluation: "Feed | None" = None
    of_rows: Callable[[Any], "Feed"] | None = None
    images: ImageReader | None = None

    def __post_init__(self) -> None:
        self.stateful = self.memory is not None

    @property
    def steps(self) -> int:
        return len(self.batches)

    @property
    def evaluates(self) -> bool:  # type: ignore[override]
        return self.evaluation is not None

    def __call__(self, step: int) -> list[Batch]:
        micro_batches = [self.batch(indices) for indices in self.plan(step)]
        self._expect_images(step + 1)
        return self.prepare(self, step, micro_batches)

    def _expect_images(self, step: int) -> None:
        """Have the images of a step read, in the order in which its micro-batches show them."""
        if self.images is None or step >= self.steps or isinstance(self.dataset, Stream):
            return
        rows = self.dataset[list(chain.from_iterable(self.plan(step)))]
        self.images.expect(map(images_of_row, rows.get("images") or ()))

    def plan(self, step: int) -> list[list[int]]:
        """The indices of the examples of each micro-batch."""
        return self.batches.plan(step)[self.rank]

    def batch(self, indices: Sequence[int]) -> Batch:
        if not indices:  # an empty batch has columns of the same dtypes
            full = self.batch([0])
            columns = {name: column[:0] for name, column in full.columns.items()}
            return collate([], columns, self.device)
        # at once: one by one takes as long as a small model's step
        rows = self.dataset[list(indices)]
        columns = {}
        for name in self.columns:
            columns[name] = torch.tensor(list(_numbers(rows[name])))
        for name, tensors in self.per_token.items():
            columns[name] = torch.cat([tensors[i] for i in indices])
        images = map(images_of_row, rows.get("images") or [()] * len(indices))
        examples = map(Example, rows["prompt"], rows["completions"], rows["trained"], images)
        return collate([self.mark(example) for example in examples], columns, self.device)

    def example(self, index: int) -> Example:
        return self.mark(example(self.dataset, index))

    def observe(self, metrics: Mapping[str, float]) -> None:
        if self.memory is not None:
            self.memory.observe(metrics)

    def evaluate(self, measure: Measure, rows: object = None) -> Mapping[str, float]:
        if rows is not None:
            assert self.of_rows is not None  # given by `RunContext.train`
            return measure(self.of_rows(rows)(0))
        assert self.evaluation is not None
        return measure(self.evaluation(0))

    def close(self) -> None:
        if self.images is not None:
            self.images.forget()

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.memory.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.memory.load_state_dict(state)


def _numbers(column: Sequence[float | list[float]]) -> Iterator[float]:
    """The numbers of a column with one per example, or with a list of them."""
    for entry in column:
        if isinstance(entry, list):
            yield from entry
        else:
            yield entry


def _without_places(table: pa.Table) -> pa.Table:
    """A table of examples without where the files of their images are: on another machine they may
    be elsewhere.
    """
    kept = ["digest", "start", "length"]
    # Records may have a column of this name, too, as the user made it.
    if "images" not in table.column_names or "trained" not in table.column_names:
        return table
    images = table["images"].combine_chunks()
    fields = [images.flatten().field(name) for name in kept]
    # offsets from 0: a slice of a longer column keeps its own
    lengths = pc.list_value_length(images).to_numpy()
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
    lists = pa.ListArray.from_arrays(offsets, pa.StructArray.from_arrays(fields, kept))
    return table.set_column(table.column_names.index("images"), "images", lists)


def digest(data: Dataset) -> str:
    """SHA-256 of encoded examples and their columns, in their order."""
    sha256 = hashlib.sha256()
    # which row of a file an example came from may change, and its content not
    columns = [name for name in data.column_names if name != "_row"]
    for rows in data.select_columns(columns).with_format("arrow").iter(1000):
        for batch in _without_places(rows).combine_chunks().to_batches():
            sha256.update(batch.serialize())
    return sha256.hexdigest()


def stored_tokens(
    path: Path,
    feed: Feed,
    compute: Callable[[Batch], Mapping[str, Tensor]],
    accelerator: Accelerator,
    reuse: bool,
    metadata: dict[str, str] | None = None,
) -> tuple[dict[str, list[Tensor]], dict[str, str]]:
    """Tensors of every trained token, by name a list with one per example, and metadata, read from
    ``path``; computed and written there first unless it exists, is as it was written, and may be
    reused. Every rank calls it.

    The main process alone looks at the file, and sends what is in it: the others may see the disk
    as it was before.

    Args:
        path: a safetensors file, written atomically: each tensor, over the tokens of all examples
            in their order, and ``length``, the number of tokens of each example.
        feed: a feed whose first step is all of the data.
        compute: ``compute(batch)`` gives tensors [tokens, ...] by name.
    """
    if not from_main(accelerator, lambda: reuse and path.exists() and _is_whole(path)):
        computed = gather_to_main(accelerator, _computed(feed, compute))
        on_main(accelerator, lambda: _store(path, computed, metadata))
    tensors: dict[str, Tensor] = {}

    def read() -> dict[str, str]:
        with safe_open(path, framework="pt") as file:
            tensors.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
            return dict(file.metadata() or {})

    stored = from_main(accelerator, read)
    tensors = tensors_from_main(accelerator, tensors)
    stored.pop(_DIGEST, None)
    counts = tensors.pop("length").tolist()
    return {name: list(torch.split(tensor, counts)) for name, tensor in tensors.items()}, stored


def _computed(
    feed: Feed, compute: Callable[[Batch], Mapping[str, Tensor]]
) -> list[tuple[int, dict[str, Tensor]]]:
    """The tensors of each example of this rank's part of the first step, and its index."""
    computed: list[tuple[int, dict[str, Tensor]]] = []
    for indices in feed.plan(0):
        batch = feed.batch(indices)
        lengths = [sum(map(sum, example.trained)) for example in batch.examples]
        parts: dict[str, Sequence[Tensor]] = {}
        for name, tensor in compute(batch).items():
            parts[name] = torch.split(tensor.cpu(), lengths)
        for i, index in enumerate(indices):
            computed.append((index, {name: part[i] for name, part in parts.items()}))
    return computed


def _store(
    path: Path,
    computed: Sequence[list[tuple[int, dict[str, Tensor]]]],
    metadata: dict[str, str] | None,
) -> None:
    """Write what all ranks have computed; some of them may have computed the same."""
    by_index = dict(chain.from_iterable(computed))
    examples = [by_index[index] for index in sorted(by_index)]
    tensors = {name: torch.cat([example[name] for example in examples]) for name in examples[0]}
    tensors["length"] = torch.tensor([len(next(iter(example.values()))) for example in examples])
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    save_file(tensors, partial, metadata={**(metadata or {}), _DIGEST: tensors_digest(tensors)})
    # On the disk before it is renamed: a power cut must not leave a whole name on half a file.
    sync(partial)
    partial.replace(path)
    sync(path.parent)


def _is_whole(path: Path) -> bool:
    """False for a damaged file of stored tokens, which a warning says.

    A file without a digest, of an earlier version, is taken as it is.
    """
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            written = (file.metadata() or {}).get(_DIGEST)
        if written in (None, tensors_digest(tensors)) and "length" in tensors:
            return True
        reason = "its content has another sha256 than when it was written"
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        reason = str(error)
    log.warning("%s is damaged: %s", path.name, reason)
    return False


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of tensors, with their names and types, in any order."""
    sha256 = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        sha256.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        sha256.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return sha256.hexdigest()
