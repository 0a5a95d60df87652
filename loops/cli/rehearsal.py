"""A dry run: everything up to the first step is done, on models without values, and one step of one rank is simulated.

The library's own code does it, but for a few functions (`_STAND_INS`) that need values, a server or other ranks.

    DDP        `prepare` leaves it out; its buckets are as large as the gradient, which is copied into them to be summed
    sharding   is what it is in a run, in a process group whose other ranks are not there
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.state import AcceleratorState
from torch.testing._internal.distributed.fake_pg import FakeStore

from ..batch import Batch
from ..models.io import named_weights
from ..models.simulation import Simulation
from ..rl import sources
from ..rl.feed import RolloutFeed
from ..rollouts.local.decode import DecodeSequence, draw
from ..rollouts.sample import Request, Sample, VersionSpan
from ..runs.feed import Feed
from ..runs.training import Training
from ..train.step import train_step

_STEPS = 64  # of which the largest micro-batch is simulated
_READ = 1 << 15  # tokens of all sequences that are read together; more of them are counted, not read


@dataclass(frozen=True)
class Rehearsal:
    """One rank of a run.

    Attributes:
        memory: bytes at the peak of training, by what they are for.
        flops: of one step, on one rank.
        tokens: that a step computes over all ranks, prompts that are read once counted once.
        micro_batches: of one rank in a step, the most of those that were looked at.
        largest: tokens of the micro-batch that was simulated.
    """

    memory: Counter[str]
    flops: float
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


def rehearse(recipe: Callable[[Any], Any], config: Any, *, ranks: int = 1, capacity: int | None = None) -> Rehearsal:
    """Open a run without reading weights, and simulate its largest step among the first ones.

    Args:
        recipe: such as `run_dpo`, with its configuration.
        ranks: that there would be.
        capacity: bytes of the device of each, for what takes a share of it.

    Raises:
        ValueError: what the recipe raises before its first step.
    """
    fewer = _fewer_prompts(config, ranks)
    with _ranks(ranks), Simulation() as simulation, _stand_ins(simulation, capacity) as opened:
        training: Training = recipe.__wrapped__(fewer)  # type: ignore[attr-defined]
        rehearsal = _simulate(simulation, training, opened, config)
    scale = getattr(config, "prompts_per_rollout", 1) / getattr(fewer, "prompts_per_rollout", 1)
    return replace(rehearsal, tokens=rehearsal.tokens * scale, flops=rehearsal.flops * scale)


def _simulate(simulation: Simulation, training: Training, opened: "list[LongestCompletions]", config: Any) -> Rehearsal:
    context, feed = training.context, training.feed
    accelerator, model, ranks = context.accelerator, context.model, context.accelerator.num_processes
    policy, optimizer = training.state["policy"], training.state["parts"]["optimizer"]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for tensor in [*model.parameters(), *model.buffers()]:
        simulation.relabel(tensor, "weights, trained" if tensor.requires_grad else "weights, frozen")
    for label in ("others", f"weights of {context.config.model}"):  # a copy; where it is sharded, read once more
        simulation.rename(label, "reference")
    simulation.forget_peak()
    for parameter in trained:
        parameter.register_post_accumulate_grad_hook(lambda leaf: simulation.relabel(leaf.grad, "gradients"))
    with simulation.labeled("optimizer"):  # its state is there from the second step on
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    simulation.forget_peak()
    rollouts = getattr(feed, "rollouts", feed)
    if isinstance(rollouts, RolloutFeed):
        prompts = sorted(context.data["prompt"], key=len, reverse=True)
        scheduler: Any = rollouts.scheduler
        scheduler.prompts = lambda task: prompts[task % len(prompts)]
        for source in opened:
            source.sample_last_tokens(simulation, prompts[0], -(-config.prompts_per_rollout // ranks))
    before = simulation.flops
    with simulation.labeled("activations"):
        tokens, micro_batches, batch = _largest(feed, model)
        largest, simulated = _tokens(batch, model.layout), min(micro_batches, 2)
        train_step(
            accelerator,
            policy,
            optimizer,
            [batch] * simulated,  # the second one meets the gradient of the first
            training.objective,
            training.weightings,
            max_grad_norm=context.config.max_grad_norm or torch.inf,
        )
    if hasattr(model.model, "disable_adapter"):
        with simulation.labeled("merged weights, to be saved"):
            merged = dict(named_weights(model))
        del merged
    memory = Counter({label: size for label, size in simulation.peak.items() if size > 0})
    if ranks > 1 and model.mesh is None:
        memory["DDP buckets"] = sum(parameter.numel() * parameter.element_size() for parameter in trained)
    return Rehearsal(
        memory=memory,
        flops=(simulation.flops - before) / (simulated * max(largest, 1)) * tokens / ranks,
        tokens=tokens,
        micro_batches=micro_batches,
        largest=largest,
        steps=feed.steps,
        ranks=ranks,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        trained=sum(parameter.numel() for parameter in trained),
        layout=model.layout,
    )


def _largest(feed: Any, model: Any) -> tuple[float, int, Batch]:
    """Tokens of a step over all ranks, micro-batches of a rank, and the micro-batch that needs most memory."""
    if not isinstance(feed, Feed) or not hasattr(feed.batches, "lengths"):
        # Of distillation some steps train on completions of the student, the others on the data.
        steps = sorted({0, *list(getattr(feed, "rollout_of", ()))[:1]})
        of_steps = [feed(step) for step in steps]
        batch = max((batch for batches in of_steps for batch in batches), key=lambda b: _tokens(b, model.layout))
        tokens = sum(_tokens(batch, model.layout) for batch in of_steps[-1])
        return float(tokens * PartialState().num_processes), max(map(len, of_steps)), batch
    lengths, width = feed.batches.lengths, model.plain.config.get_text_config().hidden_size

    def memory(indices: Sequence[int]) -> int:  # some 20 values of hidden size per token and layer, and a mask
        tokens, longest = int(lengths[indices].sum()), int(lengths[indices].max(initial=0))
        return tokens * (20 * int(width) + longest)

    some = range(0, feed.steps, -(-feed.steps // _STEPS))
    plans = {step: feed.batches.plan(step) for step in some}
    of_all = ((memory(micro), step, rank) for step in some for rank, part in enumerate(plans[step]) for micro in part)
    _, step, feed.rank = max(of_all)
    batch = max(feed(step), key=lambda batch: _tokens(batch, model.layout))
    mean = sum(int(lengths[feed.batches.indices(step)].sum()) for step in some) / len(some)
    return mean, max(len(plan[0]) for plan in plans.values()), batch


def _tokens(batch: Batch, layout: str) -> int:
    return sum(
        len(example.prompt) * (1 if layout == "shared" else len(example.completions))
        + sum(map(len, example.completions))
        for example in batch.examples
    )


def _fewer_prompts(config: Any, ranks: int) -> Any:
    """With as many prompts as fill two micro-batches of every rank: of a rollout, more of the same follow."""
    if not hasattr(config, "prompts_per_rollout") or config.micro_tokens is None:
        return config
    of_rank = 2 * -(-config.micro_tokens // (config.group_size * config.max_tokens)) + 1
    return replace(config, prompts_per_rollout=min(config.prompts_per_rollout, ranks * of_rank * config.minibatches))


class LongestCompletions:
    """A `RolloutSource` of completions that never end by themselves.

    Args:
        source: that would sample, if it is in this process.
    """

    overlaps, stored = True, False

    def __init__(self, config: Any, run: Any, source: Any = None) -> None:
        self.config, self.source = config, source
        self.context = getattr(run.model.plain.config.get_text_config(), "max_position_embeddings", None)
        self._version: int | None = None

    async def sample(self, request: Request) -> list[Sample]:
        assert self._version is not None
        length = request.sampling.max_tokens if self.config.environment is None else self.config.limits.tokens
        spans, prompt = [VersionSpan(self._version, 0, length)], list(request.prompt)
        tokens, trained, logprobs = [0] * length, [True] * length, [0.0] * length
        return [
            Sample(request.task, i, prompt, tokens, trained, logprobs, spans, "stop", text=" ") for i in request.indices
        ]

    async def publish(self, weights: Any, version: int) -> None:
        self._version = version

    async def version(self) -> int | None:
        return self._version

    async def close(self) -> None: ...

    def sample_last_tokens(self, simulation: Simulation, prompt: Sequence[int], prompts: int) -> None:
        """Draw the last token of as many completions as are read together, those to so many prompts at most."""
        if self.source is None:
            return
        sampling, runner = self.config.sampling, self.source.runner
        if self.config.environment is not None:
            sampling = replace(sampling, max_tokens=self.config.limits.tokens)
        longest = len(prompt) + sampling.max_tokens
        with simulation.labeled("keys and values"):
            batch = self.source._make_batch(longest)
            together = max(1, min(batch.fit(longest), prompts * self.config.group_size))
            sequences = [
                DecodeSequence(Request(task, tuple(prompt), [0], sampling, key=0), 0)
                for task in range(max(1, min(together, _READ // longest)))
            ]
            for sequence in sequences:
                sequence.tokens = [0] * (sampling.max_tokens - 1)
            before = simulation.live["keys and values"]
            with runner.inference():
                batch.join(sequences[: batch.admit(sequences)])
                one = (simulation.live["keys and values"] - before) // len(batch.sequences)
                others = torch.empty((together - len(batch.sequences)) * one, dtype=torch.uint8)
                with simulation.labeled("sampling"):
                    uniform = [0.5] * len(batch.sequences)
                    draw(runner.logits(batch.step()), uniform, [sampling] * len(batch.sequences))
            del others


@contextmanager
def _stand_ins(simulation: Simulation, capacity: int | None) -> Iterator[list[LongestCompletions]]:
    """Within, a few functions of the library are others; yields the sources that are opened."""
    opened: list[LongestCompletions] = []
    open_local = sources.open_local

    def open_longest(config: Any, run: Any, **options: Any) -> LongestCompletions:
        with simulation.labeled("copy that samples"):
            source = open_local(config, run, **options) if config.source == "policy" else None
        opened.append(LongestCompletions(config, run, source))
        return opened[-1]

    def share(device: torch.device) -> int:
        return (capacity - simulation.live.total()) // 4 if capacity else 2 << 30

    async def score(rewards: Sequence[Any], rows: Sequence[Any], group: list[Sample]) -> None:
        for sample in group:  # differ within each group, so that every group is trained on
            sample.rewards = {reward.name: float(sample.index % 2) for reward in rewards}

    stand_ins = {
        "runs.ranks._new_group": lambda world, purpose: world,
        "runs.checkpoint.load_newest": lambda *_, **__: 0,
        "runs.context.stored_tokens": _tokens_to_store,
        "runs.teacher.stored_tokens": _tokens_to_store,
        "rollouts.local.source.free_share": share,
        "rl.sources.open_local": open_longest,
        "rl.sources.open_source": open_longest,
        "rl.sources.distributed": lambda accelerator, source, *_, **__: (source, None),
        "rl.context.score_samples": score,
        "rl.context.MultiTurnSource": lambda source, **_: source,
        "rl.context.open_sample_log": lambda *_: None,
        "recipes.distill.open_sample_log": lambda *_: None,
        "rl.feed.RolloutFeed._measure": _measure_largest,
    }
    with ExitStack() as stack:
        for name, function in stand_ins.items():
            stack.enter_context(patch(f"{__package__.removesuffix('.cli')}.{name}", function))
        yield opened


def _tokens_to_store(path: Any, feed: Feed, compute: Any, accelerator: Any, metadata: Any = None) -> Any:
    """In place of `stored_tokens`: one micro-batch is computed."""
    computed = compute(max((feed.batch(indices) for indices in feed.plan(0)[:1]), key=lambda b: len(b.target)))
    lengths = [sum(map(sum, trained)) for trained in feed.dataset["trained"]]
    zeros = {name: [x.new_zeros(n, *x.shape[1:]) for n in lengths] for name, x in computed.items()}
    return zeros, metadata or {}


def _measure_largest(feed: RolloutFeed, rollout: Any, measure: Callable[[Batch], Any]) -> None:
    """In place of `RolloutFeed._measure`: the largest micro-batch is computed."""
    model, accelerator = feed.context.model, feed.context.accelerator
    batches = rollout.micro_batches(feed.config.micro_tokens, **feed.batching)
    with torch.no_grad(), accelerator.autocast():
        columns = measure(max(batches, key=lambda batch: _tokens(batch, model.layout)))
    for name, column in columns.items():
        rollout[name] = column.new_zeros(len(rollout.sequence), *column.shape[1:])


@contextmanager
def _ranks(count: int) -> Iterator[None]:
    """On the CPU, and as if a launcher had started so many ranks."""
    with patch.dict(os.environ):
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            os.environ.pop(name, None)
        AcceleratorState._reset_state(reset_partial_state=True)
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
