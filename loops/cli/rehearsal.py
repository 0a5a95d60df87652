"""A dry run: everything up to the first step, on models without values, and one simulated step.

The library's own code does it, but for a few functions (`_stand_ins`) that need values, a server or
other ranks.

    DDP        its buckets are as large as the gradient, which is copied into them to be summed
    sharding   is what it is in a run, in a process group whose other ranks are not there
"""

import os
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, patch

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from datasets import Dataset
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from ...data import Example
from ...data.encode import example as example_of
from ...data.images import ImageReader, ImageRef, Processed
from ..batch import Batch
from ..config import Common
from ..models.images import ImageInputs
from ..models.io import named_weights
from ..models.policy import Policy
from ..models.sharding import ranks_together
from ..models.simulation import Simulation, simulate
from ..rl.buffer import RolloutBuffer
from ..rl.feed import RolloutFeed
from ..rl.reprompt import Reprompts
from ..rl.settings import OnlineConfig
from ..rollouts.local.decode import DecodeSequence, draw
from ..rollouts.sample import Request, Sample, VersionSpan
from ..rollouts.vllm.rating import Passage, Rating
from ..runs.context import RunContext
from ..runs.training import Training
from ..train.step import train_step

_STEPS = 64  # of which the largest micro-batch is simulated
_READ = 1 << 15  # tokens of all sequences that are read together; more are counted, not read


@dataclass(frozen=True)
class Rehearsal:
    """One rank of a run.

    Attributes:
        memory: bytes at the peak of training, by what they are for.
        tokens: number that a step computes over all ranks; a prompt that is read once counts once.
        micro_batches: the most that one rank has in any of the steps looked at.
        largest: tokens of the micro-batch that was simulated.
    """

    memory: Counter[str]
    tokens: float
    micro_batches: int
    largest: int
    steps: int
    ranks: int
    parameters: int
    trained: int
    layout: str

    @property
    def total(self) -> int:
        return self.memory.total()


def rehearse(
    open_recipe: Callable[[Common], Training],
    config: Common,
    ranks: int | None = None,
    capacity: int | None = None,
) -> Rehearsal:
    """Open a run without reading weights, and simulate the largest of its first steps.

    Args:
        open_recipe: such as `open_dpo`.
        ranks: number of them to plan for; without it, those that were started, or that hold one
            copy of the model.
        capacity: bytes of each rank's GPU; without it, ranks are on the CPU.

    Raises:
        ValueError: what the recipe raises before its first step.
    """
    ranks = ranks or int(os.environ.get("WORLD_SIZE") or config.parallel.copy_size)
    if capacity is not None and config.keep_bytes is None:
        # as the head does on such a GPU
        config = replace(config, keep_bytes=min(2**32, capacity // 32))
    fewer = _fewer_prompts(config, ranks)
    gpu = capacity is not None
    with _ranks(ranks), simulate(gpu=gpu) as simulation, _stand_ins(simulation, capacity):
        training = open_recipe(fewer)
        with closing(training.feed):
            _begin(simulation, training)
            rollouts = getattr(training.feed, "rollouts", training.feed)  # those of distillation
            if isinstance(rollouts, RolloutFeed):
                _sample_last_tokens(simulation, rollouts, -(-_prompts(config) // ranks))
            with simulation.labeled("activations"):
                tokens, micro_batches, batch = _largest(training.feed, training.context.model)
                # the second one meets the gradient of the first
                _train_once(training, [batch] * min(micro_batches, 2))
                seen = _most_images(training.feed, training.context.model)
                if seen is not None:
                    _train_once(training, [seen] * min(micro_batches, 2))
            if training.directory is not None:
                _save(simulation, training.context.model)
    model: Policy = training.context.model
    trained = _trained(model)
    return Rehearsal(
        memory=_memory(simulation, model, config, ranks),
        tokens=tokens / (_prompts(fewer) / _prompts(config)),
        micro_batches=micro_batches,
        largest=_tokens(batch, model),
        steps=training.feed.steps,
        ranks=ranks,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        trained=sum(parameter.numel() for parameter in trained),
        layout=model.layout,
    )


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _memory(simulation: Simulation, model: Policy, config: Common, ranks: int) -> Counter[str]:
    """Bytes at the peak by what they are for, what was not simulated as it is held included."""
    memory = Counter({label: size for label, size in simulation.peak.items() if size > 0})
    if config.quantize is not None:
        _count_quantized(memory, model.plain, config)
    if ranks > 1 and model.mesh is None:
        memory["DDP buckets"] = sum(parameter.nbytes for parameter in _trained(model))
    return memory


def _fewer_prompts(config: Common, ranks: int) -> Common:
    """The settings with as many prompts as fill two micro-batches of every rank.

    More of the same would follow, and take no more memory.
    """
    if not isinstance(config, OnlineConfig) or config.micro_tokens is None:
        return config
    tokens_of_prompt = config.group_size * config.max_tokens
    of_rank = 2 * -(-config.micro_tokens // tokens_of_prompt) + 1
    enough = ranks * of_rank * config.minibatches
    return replace(config, prompts_per_rollout=min(config.prompts_per_rollout, enough))


def _prompts(config: Common) -> int:
    """The prompts of a rollout; 1 in distillation, whose batch is the data's."""
    return config.prompts_per_rollout if isinstance(config, OnlineConfig) else 1


def _train_once(training: Training, micro_batches: Sequence[Batch]) -> None:
    train_step(
        training.context.accelerator,
        training.state["policy"],
        training.state["parts"]["optimizer"],
        micro_batches,
        training.objective,
        training.weightings,
        max_grad_norm=training.context.config.max_grad_norm or torch.inf,
    )


def _save(simulation: Simulation, model: Policy) -> None:
    """Make the weights that a run saves, one after the other."""
    with simulation.labeled("weights, to be saved"):
        saved = named_weights(model, getattr(model.plain, "stored_dtype", None), tied=False)
        deque(saved, maxlen=1 if simulation.gpu else None)  # each goes from the GPU to the host


def _begin(simulation: Simulation, training: Training) -> None:
    """Name what is there when training begins, and what the first step leaves to all others."""
    context = training.context
    for tensor in [*context.model.parameters(), *context.model.buffers()]:
        label = "weights, trained" if tensor.requires_grad else "weights, frozen"
        simulation.relabel(tensor, label)
    # What is left is a reference: a copy of the policy, or, where it is sharded, read once more.
    for label in ("others", f"weights of {context.config.model}"):
        simulation.rename(label, "reference")
    for parameter in context.model.parameters():
        if not parameter.requires_grad:
            continue
        parameter.register_post_accumulate_grad_hook(
            lambda leaf: simulation.relabel(leaf.grad, "gradients")
        )
        parameter.grad = torch.zeros_like(parameter)
    # The optimizer makes its state in its first step, before which no memory is at its peak.
    optimizer = training.state["parts"]["optimizer"]
    on_host = simulation.gpu and context.config.offload_optimizer
    with simulation.labeled(None if on_host else "optimizer"):
        optimizer.step()
        optimizer.zero_grad()
    optimizer.step = simulation.labeled(None if on_host else "optimizer's step")(optimizer.step)
    simulation.peak = simulation.live.copy()


def _sample_last_tokens(simulation: Simulation, feed: RolloutFeed, prompts: int) -> None:
    """Draw the last token of as many completions as are read together.

    Then their keys and values take most.

    Args:
        prompts: of a rollout that this rank completes; more completions are not read together.
    """
    config = feed.config
    source = vars(feed.scheduler)["source"]
    source = vars(source).get("source", source)  # of conversations
    if not hasattr(source, "runner"):
        return  # a server samples
    if source.policy is not feed.context.run.model:
        for tensor in source.policy.parameters():
            simulation.relabel(tensor, "copy that samples")
    (example,) = _largest_prompts(feed, 1, _prompt_tokens)
    sampling = replace(config.sampling, max_tokens=_completion(config))
    longest = len(example.prompt) + sampling.max_tokens
    packed_bytes = 0 if simulation.gpu else source.runner.packed.size()
    with simulation.labeled("weights packed to sample"):
        packed = torch.empty(packed_bytes, dtype=torch.uint8)
    with simulation.labeled("keys and values"):
        batch = source._make_batch(longest)
        together = max(1, min(batch.fit(longest), prompts * config.group_size))
        sequences = []
        for task in range(max(1, min(together, _READ // longest))):
            prompt = tuple(example.prompt)
            request = Request(task, prompt, [0], sampling, key=0, images=example.images)
            sequence = DecodeSequence(request, 0)
            sequence.tokens = [0] * (sampling.max_tokens - 1)
            sequences.append(sequence)
        before = simulation.live["keys and values"]
        with source.runner.inference():
            batch.join(sequences[: batch.admit(sequences)])
            count = len(batch.sequences)
            one = (simulation.live["keys and values"] - before) // count
            others = torch.empty((together - count) * one, dtype=torch.uint8)
            with simulation.labeled("sampling"):
                draw(source.runner.logits(batch.step()), [0.5] * count, [sampling] * count)
        del others, packed


def _count_quantized(memory: Counter[str], plain: Any, config: Common) -> None:
    """Count the weights of linear layers as bitsandbytes holds them; they were simulated whole."""
    head = plain.get_output_embeddings()  # which stays as it is
    largest = 0
    for layer in plain.modules():
        if isinstance(layer, nn.Linear) and layer is not head and not layer.weight.requires_grad:
            weight = layer.weight
            memory["weights, frozen"] += _quantized_bytes(weight, config) - weight.nbytes
            largest = max(largest, weight.nbytes)
    memory["dequantized weight"] = largest  # each is whole again while it computes


def _quantized_bytes(weight: torch.Tensor, config: Common) -> int:
    """Bytes that bitsandbytes holds a matrix in, with its scales."""
    size = weight.numel()
    if config.quantize == "8bit":
        return size + 4 * len(weight)  # a float32 scale for each row
    scale_bytes = 1 if config.quantize_kwargs.get("bnb_4bit_use_double_quant") else 4
    return size // 2 + scale_bytes * size // 64  # a scale for each 64 numbers


def _completion(config: OnlineConfig) -> int:
    """Tokens of the longest completion, or conversation."""
    return config.limits.tokens if config.converses else config.max_tokens


def _largest(feed: Any, model: Policy) -> tuple[float, int, Batch]:
    """Look for the micro-batch that takes most memory.

    Returns:
        The tokens of a step over all ranks, the micro-batches of a rank, and that one.
    """
    if hasattr(getattr(feed, "batches", None), "lengths"):
        return _largest_of_data(feed, model)
    # Of distillation some steps train on completions of the student, the others on the data.
    steps = sorted({0, *list(getattr(feed, "rollout_of", ()))[:1]})
    of_steps = [feed(step) for step in steps]
    everything = list(chain.from_iterable(of_steps))
    tokens = sum(_tokens(batch, model) for batch in of_steps[-1])
    ranks = PartialState().num_processes / ranks_together(model)
    return float(tokens * ranks), max(map(len, of_steps)), _most_tokens(everything, model)


def _largest_of_data(feed: Any, model: Policy) -> tuple[float, int, Batch]:
    """`_largest`, of data whose lengths are known: only the largest micro-batch is made."""
    lengths = feed.batches.lengths
    width = int(model.plain.config.get_text_config().hidden_size)

    def memory(indices: Sequence[int]) -> int:
        """Some 20 values of hidden size per token and layer, and a mask."""
        return int(lengths[indices].sum()) * (20 * width + int(lengths[indices].max(initial=0)))

    plans = _plans(feed)
    tokens = 0
    for step in plans:
        tokens += int(lengths[feed.batches.indices(step)].sum())
    micro_batches = max(len(plan[0]) for plan in plans.values())
    step = _choose_rank(feed, plans, memory)
    return tokens / len(plans), micro_batches, _most_tokens(feed(step), model)


def _plans(feed: Any) -> dict[int, list[list[list[int]]]]:
    """The micro-batches of each rank in some steps, by their number."""
    some = range(0, feed.steps, -(-feed.steps // _STEPS))
    return {step: feed.batches.plan(step) for step in some}


def _choose_rank(
    feed: Any,
    plans: Mapping[int, list[list[list[int]]]],
    size: Callable[[Sequence[int]], int],
) -> int:
    """Let the feed make the batches of the rank with the largest micro-batch; returns its step."""
    sizes = []
    for step, plan in plans.items():
        for rank, parts in enumerate(plan):
            sizes.append((max(map(size, parts)), step, rank))
    _, step, feed.rank = max(sizes)
    return step


def _most_images(feed: Any, model: Policy) -> Batch | None:
    """The micro-batch with most tokens of images, whose tower may take more memory than the text
    of a longer one; None if no images are seen.
    """
    if model.images is None:
        return None
    rollouts = getattr(feed, "rollouts", feed)  # those of distillation
    if isinstance(rollouts, RolloutFeed):
        return _most_images_sampled(feed, rollouts)
    if not hasattr(feed.batches, "lengths"):
        return None
    of_example = np.array(_image_tokens(feed.dataset))
    step = _choose_rank(feed, _plans(feed), lambda indices: int(of_example[indices].sum()))
    return _most_images_of(feed(step))


def _most_images_sampled(feed: Any, rollouts: RolloutFeed) -> Batch | None:
    """`_most_images`, of a rollout on the prompts that show most; None if no step samples."""
    sampling = list(getattr(feed, "rollout_of", [0]))
    if not sampling:
        return None
    rollouts.rollout = None  # another one is taken
    with patch.object(RolloutFeed, "_take", _take_most_images):
        return _most_images_of(feed(sampling[0]))


def _most_images_of(batches: Sequence[Batch]) -> Batch:
    def image_tokens(batch: Batch) -> int:
        return sum(image.length for example in batch.examples for image in example.images)

    return max(batches, key=image_tokens)


def _image_tokens(data: Dataset) -> list[int]:
    """Tokens of the images that each row shows."""
    if "images" not in data.column_names:
        return [0] * len(data)
    return [sum(image["length"] for image in row) for row in data["images"]]


def _prompt_tokens(data: Dataset) -> list[int]:
    return list(map(len, data["prompt"]))


def _largest_prompts(
    feed: RolloutFeed, count: int, sizes_of: Callable[[Dataset], list[int]]
) -> list[Example]:
    """The prompts of the largest rows, with the images that they show themselves.

    Args:
        count: of prompts; fewer are returned where the data has fewer.
        sizes_of: gives the size of each row.
    """
    data = feed.context.run.data
    sizes = sizes_of(data)
    largest = sorted(range(len(data)), key=lambda row: sizes[row], reverse=True)
    prompts = []
    for row in largest[:count]:
        whole = example_of(data, row)
        # of a demonstration, later turns may show others
        shown = tuple(image for image in whole.images if image.start < len(whole.prompt))
        prompts.append(Example(whole.prompt, [], [], shown))
    return prompts


def _most_tokens(batches: Sequence[Batch], model: Policy) -> Batch:
    return max(batches, key=lambda batch: _tokens(batch, model))


def _tokens(batch: Batch, model: Policy) -> int:
    """Tokens that the model computes; a prompt that its completions share counts once."""
    tokens = 0
    for example in batch.examples:
        prompts = 1 if model.layout == "shared" else len(example.completions)
        tokens += len(example.prompt) * prompts + sum(map(len, example.completions))
    return tokens


@contextmanager
def _stand_ins(simulation: Simulation, capacity: int | None) -> Iterator[None]:
    """Context in which a few functions of the library are replaced."""

    def free_share(device: torch.device) -> int:
        """What keys and values may take: a quarter of the rest of the GPU; 2 GiB on a CPU."""
        return (capacity - simulation.live.total()) // 4 if capacity else 2 << 30

    def without_server(run: RunContext[Policy]) -> SimpleNamespace:
        limit = getattr(run.model.plain.config.get_text_config(), "max_position_embeddings", None)
        return SimpleNamespace(overlaps=True, stored=False, context=limit, close=AsyncMock())

    stand_ins: dict[str, Callable[..., Any]] = {
        # no other ranks to meet
        "runs.ranks._new_group": lambda world, purpose: world,
        "rl.sources.distributed": lambda accelerator, source, *_, **__: (source, None),
        # no checkpoint is read, no server is started, and the Hub is not asked
        "runs.training.Training._resumed": lambda run: 0,
        "rl.sources.open_source": without_server,
        "runs.context.check_repository": lambda hub: None,
        "rl.served_teacher.RatingServer.meet": AsyncMock(),
        "rl.served_teacher.RatingServer.rate": _rate,
        # in float16 the scale of the loss takes no memory, and reads a gradient that is not there
        "runs.context.scale_loss": _without_scale,
        # what a run stores, samples or measures, in the same shapes
        "runs.context.stored_tokens": _store_tokens,
        "runs.teacher.stored_tokens": _store_tokens,
        "rl.feed.RolloutFeed._take": _take_longest,
        "rl.feed.RolloutFeed._measure": _measure_largest,
        "rl.reprompt.Reprompts._asked": _read_own_prompts,
        # the machine that is planned for, instead of this one
        "rollouts.local.source.free_share": free_share,
        # pixels have values: processors and towers look at them
        "models.images.ImageReader.read": _read_images(simulation),
        "models.images.ImageInputs.tensors": simulation.labeled("pixels")(ImageInputs.tensors),
    }
    loops = __package__.removesuffix(".cli")
    with ExitStack() as stack:
        for name, function in stand_ins.items():
            stack.enter_context(patch(f"{loops}.{name}", function))
        yield


def _read_own_prompts(reprompts: Reprompts, rollout: RolloutBuffer) -> list[list[int]]:
    """In place of `Reprompts._asked`: the function is not called, and teachers read the prompts."""
    return [list(sample.prompt) for sample in rollout.samples]


def _read_images(simulation: Simulation) -> Callable[[ImageReader, Sequence[ImageRef]], Processed]:
    """In place of `ImageReader.read`: it runs outside of the simulation.

    What it keeps is in the memory of the host.
    """
    original = ImageReader.read

    def read(reader: ImageReader, images: Sequence[ImageRef]) -> Processed:
        with _disable_current_modes():
            processed = original(reader, images)
        if not simulation.gpu:
            for tensor in processed.tensors.values():
                simulation.count(tensor, "processed images")
        return processed

    return read


def _without_scale(accelerator: Accelerator) -> None:
    """Replaces `scale_loss`: autocast alone."""
    accelerator.native_amp = True
    accelerator.scaler = torch.amp.GradScaler("cpu", enabled=False)


def _store_tokens(
    path: Any, feed: Any, compute: Any, accelerator: Any, reuse: bool, metadata: Any = None
) -> Any:
    """Replaces `stored_tokens`: the same shapes, computed from one micro-batch."""
    computed = compute(feed.batch(feed.plan(0)[0]))
    lengths = [sum(map(sum, trained)) for trained in feed.dataset["trained"]]
    columns = {}
    for name, values in computed.items():
        columns[name] = [values.new_zeros(length, *values.shape[1:]) for length in lengths]
    return columns, metadata or {}


async def _rate(server: object, passages: Sequence[Passage], k: int, vocab: int) -> list[Rating]:
    """In place of `RatingServer.rate`: as many numbers."""
    ratings = []
    for passage in passages:
        places = len(passage.places)
        ratings.append(Rating([0.0] * places, [[0] * k] * places, [[0.0] * k] * places))
    return ratings


def _take_longest(feed: RolloutFeed, number: int) -> tuple[list[list[Sample]], dict[str, float]]:
    """In place of `RolloutFeed._take`: the longest prompts, and completions of the longest length.

    Their rewards differ within each group, so that every group is trained on.
    """
    return _completed(feed, number, _prompt_tokens)


def _take_most_images(
    feed: RolloutFeed, number: int
) -> tuple[list[list[Sample]], dict[str, float]]:
    """`_take_longest`, of the prompts with most tokens of images."""
    return _completed(feed, number, _image_tokens)


def _completed(
    feed: RolloutFeed, number: int, sizes_of: Callable[[Dataset], list[int]]
) -> tuple[list[list[Sample]], dict[str, float]]:
    """What `RolloutFeed._take` returns, of the prompts that `_largest_prompts` finds."""
    config = feed.config
    length = _completion(config)
    prompts = _largest_prompts(feed, config.prompts_per_rollout, sizes_of)
    spans = [VersionSpan(number, 0, length)]
    tokens = [0] * length
    trained = [True] * length
    logprobs = [0.0] * length

    def sample(task: int, index: int) -> Sample:
        rewards: dict[str, float | str | None] = {}
        for reward in feed.context.rewards:
            rewards[reward.name] = float(index % 2)
        asked = prompts[task % len(prompts)]
        return Sample(
            task,
            index,
            list(asked.prompt),
            tokens,
            trained,
            logprobs,
            spans,
            "stop",
            " ",
            rewards,
            images=asked.images,
        )

    groups = []
    for task in range(config.prompts_per_rollout):
        groups.append([sample(task, index) for index in range(config.group_size)])
    return groups, {}


def _measure_largest(
    feed: RolloutFeed,
    rollout: RolloutBuffer,
    measure: Callable[[Batch], Mapping[str, torch.Tensor]],
) -> None:
    """In place of `RolloutFeed._measure`: the largest micro-batch is computed."""
    batches = rollout.micro_batches(feed.config.micro_tokens, **feed.batching)
    with torch.no_grad(), feed.context.run.accelerator.autocast():
        columns = measure(_most_tokens(list(batches), feed.context.run.model))
    for name, column in columns.items():
        rollout[name] = column.new_zeros(len(rollout.sequence), *column.shape[1:])


@contextmanager
def _ranks(count: int) -> Iterator[None]:
    """Context on the CPU, as if a launcher had started so many ranks."""
    with patch.dict(os.environ):  # which is as it was, afterward
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            os.environ.pop(name, None)
        AcceleratorState._reset_state(reset_partial_state=True)
        # Without these variables its distributed type is none, so it wraps and sends nothing.
        PartialState(cpu=True).num_processes = count
        os.environ |= {"RANK": "0", "WORLD_SIZE": str(count), "LOCAL_RANK": "0"}
        if count > 1:
            dist.init_process_group("fake", rank=0, world_size=count, store=FakeStore())
        try:
            yield
        finally:
            if count > 1:
                dist.destroy_process_group()
            AcceleratorState._reset_state(reset_partial_state=True)
