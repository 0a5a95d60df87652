"""One optimizer step, and a generator of many.

    for step in optimize(policy, batches, objective, weightings, ...):
        ...                                     # your own code, in place of callbacks

The gradient of a step is the same for every split into micro-batches and ranks, see
`burnish.loops.batch`.
"""

import logging
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from ...objectives import Stats
from ..batch import Batch, Weightings, Weights, collate
from ..models.backbone import Backbone, evaluating
from ..models.probe import probe_examples
from ..models.sharding import ranks_together, whole
from .optimizers import AT_EVALUATION

Objective = Callable[[nn.Module, Batch], Mapping[str, tuple[Tensor, Stats]]]

Name = TypeVar("Name")

log = logging.getLogger(__name__)

_REDUCING = (DistributedDataParallel, FSDPModule, FullyShardedDataParallel)  # gradients, over ranks
PATIENCE = 5  # steps in a row without a finite gradient before training stops


@dataclass(frozen=True)
class StepResult:
    """One optimizer step.

    Attributes:
        number: counted from 1.
        metrics: see `train_step`; the same on every rank.
        busy: seconds in which this rank computed until it first waited for the gradients of others.
            Forward passes of shards wait for each other before that.
    """

    number: int
    metrics: dict[str, float]
    busy: float = 0.0


class Stopwatch:
    """Measures how long the device computes between `start` and `stop`, without waiting for it in
    between.
    """

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.times: list[float] = []  # by the clock of the host
        self.events: list[torch.Event] = []  # when the GPU gets there

    def start(self) -> None:
        self.times.clear()
        self.events.clear()
        self._mark()

    def stop(self) -> None:
        self._mark()

    def seconds(self) -> float:
        """The time between the two, when the device has been waited for."""
        if len(self.events) > 1:
            milliseconds: float = self.events[0].elapsed_time(self.events[-1])
            return milliseconds / 1000
        if len(self.times) > 1:
            return self.times[-1] - self.times[0]
        return 0.0

    def _mark(self) -> None:
        if self.on_gpu:
            event = torch.Event("cuda", enable_timing=True)
            event.record()
            self.events.append(event)
        else:
            self.times.append(time.perf_counter())


def loss_and_stats(name: str, returned: object) -> tuple[Tensor, Stats]:
    """What a loss returned, a pair of a tensor and a dict.

    Raises:
        ValueError: if it returned something else, such as the tensor alone.
    """
    if isinstance(returned, tuple) and len(returned) == 2:
        loss, stats = returned
        if isinstance(loss, Tensor) and isinstance(stats, Mapping):
            return loss, dict(stats)
    raise ValueError(
        f"loss {name}: wanted (loss, stats), a tensor with one entry per unit and a dict of such tensors, "
        f"got {type(returned).__name__}; without stats return (loss, {{}})"
    )


def sign_of_extreme(metric: str) -> int:
    """-1 for a stat that is logged as the smallest of its entries, 1 for one that is the largest, 0
    for a mean: by its name, whose last part is ``min`` or ``max`` or begins with ``min_`` or
    ``max_``.
    """
    kind, _, _ = metric.rpartition("/")[2].partition("_")
    return {"min": -1, "max": 1}.get(kind, 0)


class Sums:
    """Weighted sums of losses and stats, in float64, divided once at the end, so that no mean is
    taken of means; and the smallest or largest entry of stats that are named so.

    Attributes:
        weights: of each micro-batch, by loss.
        denominators: Z of each loss over all micro-batches of all ranks; 0 for a loss without any
            unit, whose sum is 0.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        policy: nn.Module,
        micro_batches: Sequence[Batch],
        weightings: Weightings,
    ) -> None:
        _check_weightings(weightings)
        self.accelerator = accelerator
        self.weightings = weightings
        self.copies = ranks_together(policy)
        self.weights: list[dict[str, Weights]] = []
        for batch in micro_batches:
            weights = {name: weigh(batch) for name, (_, weigh) in weightings.items()}
            self.weights.append(weights)
        if not self.weights:  # the other ranks would wait for it
            raise ValueError(
                "step: wanted micro-batches, got none; a rank without examples takes [collate([])]"
            )
        shares = dict.fromkeys(weightings, 0.0)
        for weights in self.weights:
            for name in weightings:
                shares[name] += weights[name].share
        # Before the first forward pass: every Z depends on masks only, so that each loss can be
        # divided by it at once.
        self.denominators = sum_over_ranks(accelerator, shares, copies=self.copies)
        self.sums: dict[str, Tensor | float] = {}  # metric -> Σ w·x of this rank
        self.largest: dict[str, Tensor] = {}  # metric -> max x of this rank, of a minimum max −x
        self.term: dict[str, str] = {}  # metric -> the loss whose weights it shares

    def add(self, i: int, losses: Mapping[str, tuple[Tensor, Stats]]) -> Tensor | float:
        """Add the losses of micro-batch ``i``; returns its part of the total to train on."""
        if not isinstance(losses, Mapping):
            raise ValueError(
                f"objective: wanted {{name: (loss, stats)}} of named losses, got {type(losses).__name__}; "
                'return {"mine": (loss, {})}'
            )
        if losses.keys() != self.weightings.keys():
            raise ValueError(
                f"objective: wanted the losses that have a weighting ({', '.join(self.weightings)}), got "
                f"({', '.join(losses)}); a coefficient of 0 only measures one"
            )
        total: Tensor | float = 0.0
        for name, (coefficient, _) in self.weightings.items():
            weight = self.weights[i][name].weight
            loss, stats = loss_and_stats(name, losses[name])
            for metric, value in {name: loss.detach(), **stats}.items():
                if value.shape != weight.shape:
                    raise ValueError(
                        f"objective: wanted one entry of {metric} per unit that the weighting of {name} weighs, "
                        f"{list(weight.shape)}, got {list(value.shape)}; don't reduce it, or weigh {name} by another"
                    )
                # Two losses that report the same stat (such as rewards) report the same number:
                # keep the first.
                if self.term.setdefault(metric, name) != name:
                    continue
                if metric != name and sign_of_extreme(metric):
                    self._compare(metric, value, weight)
                else:
                    self.sums[metric] = self.sums.get(metric, 0.0) + (weight * value).sum()
            if coefficient:
                # Without any unit on any rank the sum is 0, whatever it is divided by.
                share = coefficient / (self.denominators[name] or 1.0)
                total = total + share * (weight.to(loss.dtype) * loss).sum()
        return total

    def _compare(self, metric: str, value: Tensor, weight: Tensor) -> None:
        """Keep the largest entry, or the smallest one, of those that have a weight."""
        signed = value.double() * sign_of_extreme(metric)
        nothing = signed.new_full((1,), -math.inf)  # of an empty micro-batch
        counted = torch.cat([signed.masked_fill(weight == 0, -math.inf), nothing])
        largest = counted.amax()
        if metric in self.largest:
            largest = torch.maximum(largest, self.largest[metric])
        self.largest[metric] = largest

    def _extremes(self) -> dict[str, float]:
        """Stats that are a minimum or a maximum, over all ranks."""
        if not self.largest:
            return {}
        of_rank = torch.stack([*self.largest.values()])
        of_ranks: Tensor = self.accelerator.gather(of_rank[None])
        found = dict(zip(self.largest, of_ranks.amax(0).tolist(), strict=True))
        counted = {metric: value for metric, value in found.items() if value != -math.inf}
        return {metric: value * sign_of_extreme(metric) for metric, value in counted.items()}

    def means(self, **counts: float) -> tuple[dict[str, float], dict[str, float]]:
        """The metrics over all ranks; ``loss``, the weighted total, comes first. A stat is its
        weighted mean, or an extreme, see `sign_of_extreme`. Also the sums of ``counts``; all of
        this takes one reduction, and one more if there are extremes."""
        values = {("metric", metric): float(value) for metric, value in self.sums.items()}
        # Σ w of each loss, which for `fixed_length` is not its denominator
        for name in self.weightings:
            total_weight = sum(weights[name].weight.sum() for weights in self.weights)
            values["weight", name] = float(total_weight)
        values |= {("count", name): count for name, count in counts.items()}
        total = sum_over_ranks(self.accelerator, values, copies=self.copies)
        means = {}
        for metric in self.sums:
            name = self.term[metric]
            coefficient, _ = self.weightings[name]
            if not coefficient and not self.denominators[name]:
                continue  # it is only measured, and has no unit
            weight = self.denominators[name] if metric in self.weightings else total["weight", name]
            means[metric] = total["metric", metric] / (weight or 1.0)
        loss = 0.0
        for name, (coefficient, _) in self.weightings.items():
            if coefficient:
                loss += coefficient * means[name]
        metrics = {"loss": loss, **means, **self._extremes()}
        return metrics, {name: total["count", name] for name in counts}


def _check_weightings(weightings: Weightings) -> None:
    """Raise ValueError unless each is a pair of a coefficient and a function."""
    for name, entry in weightings.items():
        if not (isinstance(entry, tuple) and len(entry) == 2 and callable(entry[1])):
            raise ValueError(
                f"step: wanted (coefficient, weighting) for the loss {name}, got {entry!r:.80}; "
                "weightings(losses) makes them of Terms"
            )


def prepare(
    accelerator: Accelerator, policy: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """`Accelerator.prepare`, without DDP around a sharded policy, whose own hooks reduce its
    gradients.

    DDP looks in every step for weights without a gradient, which takes time, only if a probe finds
    some.
    """
    if isinstance(policy, FSDPModule):
        # Evaluation mode keeps Accelerate from wrapping the policy; it trains all the same.
        sharded = accelerator.prepare_model(policy, device_placement=False, evaluation_mode=True)
        return sharded, accelerator.prepare_optimizer(optimizer)
    if accelerator.use_distributed and isinstance(policy, Backbone):
        unused = _unused(accelerator, policy)
        if unused:
            log.info("%d weights get no gradient, such as %s", len(unused), unused[0])
            accelerator.ddp_handler = accelerator.ddp_handler or DistributedDataParallelKwargs()
            accelerator.ddp_handler.find_unused_parameters = True
    prepared: tuple[nn.Module, torch.optim.Optimizer] = accelerator.prepare(policy, optimizer)
    return prepared


def _unused(accelerator: Accelerator, policy: Backbone) -> list[str]:
    """The names of trained parameters that the outputs for a probe do not depend on."""
    batch = collate(probe_examples(policy), device=accelerator.device)
    with evaluating(policy), torch.enable_grad(), accelerator.autocast():  # draws nothing at random
        outputs = tree_leaves(policy(batch))
    # One number that depends on all outputs; integers, such as ranks of tokens, have no gradient.
    sums = [each.sum() for each in outputs if isinstance(each, Tensor) and each.requires_grad]
    trained = {name: weight for name, weight in policy.named_parameters() if weight.requires_grad}
    gradients = torch.autograd.grad(sums, list(trained.values()), allow_unused=True)
    return [name for name, gradient in zip(trained, gradients, strict=True) if gradient is None]


def train_step(
    accelerator: Accelerator,
    policy: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: Sequence[Batch],
    objective: Objective,
    weightings: Weightings,
    *,
    max_grad_norm: float,
    not_finite: Callable[[list[int]], object] = len,
    stopwatch: Stopwatch | None = None,
) -> dict[str, float]:
    """Accumulate the gradient of one global batch and take one optimizer step.

    Args:
        micro_batches: this rank's part of the global batch; the same number on every rank, some may
            be empty.
        objective: ``objective(policy, batch) -> {name: (loss, stats)}``, unreduced.
        weightings: ``{name: (coefficient, weighting)}`` of the named losses to sum. Coefficient 0
            measures without training.
        max_grad_norm: the L2 norm that the gradient is clipped to; infinity only measures it.
        not_finite: called if the gradient is not finite (then on all ranks), with the indices of
            this rank's micro-batches whose loss is not finite.
        stopwatch: measures the step on this rank until its last backward pass, which waits for the
            other ranks.

    Returns:
        The metrics: ``loss``, each named loss, each stat (its mean, or an extreme, see
            `sign_of_extreme`), ``grad_norm`` before clipping, ``tokens`` trained on, and
        ``skipped``: 1 if no step was taken, because the gradient was not finite, or 0 as without
            any trained token; and of an accelerator that scales the loss, for float16,
            ``loss_scale``, the scale of this step. An overflow halves it for the next one.
    """
    given = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    _check_prepared(accelerator, policy, given)
    loss_scale = 1.0 if accelerator.scaler is None else accelerator.scaler.get_scale()
    policy.zero_grad()  # of weights that the optimizer lacks, and of a step that failed
    micro_batches = _listed(micro_batches)
    sums = Sums(accelerator, policy, micro_batches, weightings)
    _check_wrapped(accelerator, policy)
    totals = _accumulate(
        accelerator,
        policy,
        micro_batches,
        objective,
        sums,
        stopwatch or Stopwatch(accelerator.device),
    )

    # Weights that the optimizer lacks must not count in the norm. In float16 this also takes the
    # scale of the loss off the gradients.
    clipped = [each for each in policy.parameters() if each.grad is None or each in given]
    norm: Tensor = accelerator.clip_grad_norm_(clipped, max_grad_norm)
    grad_norm = float(whole(norm))
    # at 0, momentum alone would move the weights
    taken = math.isfinite(grad_norm) and grad_norm > 0
    if taken:
        optimizer.step()
    elif accelerator.scaler is not None:
        _update_scale(accelerator.scaler, overflowed=not math.isfinite(grad_norm))
    if not math.isfinite(grad_norm):
        not_finite([i for i, total in enumerate(totals) if not total.isfinite()])
    optimizer.zero_grad()
    trained_tokens = float(sum(len(batch.target) for batch in micro_batches))
    input_tokens = float(sum(_input_tokens(batch) for batch in micro_batches))
    metrics, counts = sums.means(tokens=trained_tokens, input_tokens=input_tokens)
    metrics |= {"grad_norm": grad_norm, **counts, "skipped": float(not taken)}
    if accelerator.scaler is not None:
        metrics["loss_scale"] = loss_scale
    return metrics


def _update_scale(scaler: torch.amp.GradScaler, *, overflowed: bool) -> None:
    """Set the scale of the loss for the next step, after one that was not taken.

    An overflow lowers it on every rank: the scaler knows of those in this rank's shards alone.
    """
    state = scaler.state_dict()
    scaler.update()
    if overflowed and scaler.is_enabled():
        lowered = state["scale"] * scaler.get_backoff_factor()
        scaler.load_state_dict({**state, "scale": lowered, "_growth_tracker": 0})


def _check_prepared(accelerator: Accelerator, policy: nn.Module, given: set[Tensor]) -> None:
    """Raise ValueError if Accelerate would divide the loss, or the optimizer has parameters of
    another model.
    """
    # it would divide the loss, and pass over steps
    if accelerator.gradient_accumulation_steps != 1:
        raise ValueError(
            "train_step: it accumulates over its micro-batches itself; wanted an Accelerator with "
            f"gradient_accumulation_steps 1, got {accelerator.gradient_accumulation_steps}"
        )
    if given.isdisjoint(policy.parameters()):
        raise ValueError(
            "train_step: the optimizer has no parameter of the policy; make it of policy.parameters()"
        )


def _check_wrapped(accelerator: Accelerator, policy: nn.Module) -> None:
    """Raise ValueError if there are several ranks and nothing reduces gradients over them."""
    if accelerator.use_distributed and not any(
        isinstance(module, _REDUCING) for module in policy.modules()
    ):
        raise ValueError(
            "train_step: several ranks need policy, optimizer = accelerator.prepare(policy, optimizer)"
        )


def _accumulate(
    accelerator: Accelerator,
    policy: nn.Module,
    micro_batches: Sequence[Batch],
    objective: Objective,
    sums: Sums,
    stopwatch: Stopwatch,
) -> list[Tensor]:
    """Add up the gradients of all micro-batches; returns each one's part of the total.

    The loss is a sum over ranks. DDP averages their gradients, once for the step. Those of shards
    are sums (`shard`), reduced for each micro-batch: until then each rank would keep the whole
    gradient.
    """
    # shards that the caller made average, as Accelerate's do
    sharded = getattr(policy, "mesh", None) is not None
    scale = 1 if sharded else accelerator.num_processes
    totals = []
    stopwatch.start()
    for i, batch in enumerate(micro_batches):
        last = i == len(micro_batches) - 1
        # `no_sync` keeps DDP from reducing: of the last backward pass it reduces the sum of all.
        with nullcontext() if last or sharded else accelerator.no_sync(policy):
            total = torch.as_tensor(sums.add(i, objective(policy, batch)))
            _check_differentiable(total, sums.weightings)
            if last:
                stopwatch.stop()
            accelerator.backward(total * scale)
        totals.append(total.detach())
    return totals


def _check_differentiable(total: Tensor, weightings: Weightings) -> None:
    """Raise ValueError if the loss has no gradient, of which torch names neither loss nor cause."""
    if total.requires_grad:
        return
    trained = [name for name, (coefficient, _) in weightings.items() if coefficient]
    if not trained:
        raise ValueError("train_step: every coefficient is 0, so nothing is trained; give one")
    raise ValueError(
        f"objective: {' + '.join(trained)} has no gradient; compute it from the policy's outputs, such as "
        "policy(batch).logprob or the parameter logp of a loss, without detach or no_grad"
    )


def _input_tokens(batch: Batch) -> int:
    """Tokens of all sequences of a batch, prompts included, however the rows share them."""
    tokens = 0
    for example in batch.examples:
        prompts = len(example.prompt) * len(example.completions)
        tokens += prompts + sum(map(len, example.completions))
    return tokens


def _listed(micro_batches: Iterable[Batch]) -> list[Batch]:
    if isinstance(micro_batches, Batch):
        raise ValueError(
            "step: wanted a list of micro-batches, got one that is in none; write it in brackets, [batch]"
        )
    return list(micro_batches)


def sum_over_ranks(
    accelerator: Accelerator, values: Mapping[Name, float], *, copies: int = 1
) -> dict[Name, float]:
    """Sums over ranks.

    ``copies`` is how many of them have the same values, of the same data: see `ranks_together`.
    """
    packed = torch.tensor(list(values.values()), dtype=torch.float64, device=accelerator.device)
    total: Tensor = accelerator.reduce(packed, reduction="sum")
    return dict(zip(values, (total / copies).tolist(), strict=True))


def optimize(
    policy: nn.Module,
    batches: Callable[[int], Sequence[Batch]],
    objective: Objective,
    weightings: Weightings,
    *,
    accelerator: Accelerator,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    steps: int,
    start: int = 0,
    max_grad_norm: float = 1.0,
    describe: Callable[[int, list[int]], str] = lambda step, micro_batches: (
        f"micro-batches {micro_batches}"
    ),
) -> Iterator[StepResult]:
    """Yield after each optimizer step.

    ``batches(k)`` gives this rank's micro-batches of step k, counted from 0.

    Args:
        describe: ``describe(k, indices)`` names, for a message, the data of a step whose gradient
            is not finite; ``indices`` are those of this rank's micro-batches whose loss is not
            finite. Every rank calls it.

    Raises:
        FloatingPointError: after `PATIENCE` steps in a row whose gradient was not finite, without
            those that overflow in float16 for the scale of a finite loss, as it is lowered then.
    """
    failures = 0
    stopwatch = Stopwatch(accelerator.device)
    # Out of Accelerate's wrapper, which takes a step for each rank: batches are global here.
    schedule = getattr(schedule, "scheduler", schedule)
    for number in range(start + 1, steps + 1):
        began = time.perf_counter()
        learning_rate = float(schedule.get_last_lr()[0])
        not_finite: list[int] = []
        metrics = train_step(
            accelerator,
            policy,
            optimizer,
            batches(number - 1),
            objective,
            weightings,
            max_grad_norm=max_grad_norm,
            not_finite=not_finite.extend,
            stopwatch=stopwatch,
        )
        with warnings.catch_warnings():
            # When the first step is skipped, torch complains about the order of the two calls.
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
            if not isinstance(schedule, AT_EVALUATION):
                schedule.step()
        if math.isfinite(metrics["grad_norm"]):
            failures = 0
        elif _is_scaled_too_far(metrics):
            if accelerator.is_main_process:
                log.warning(
                    "step %d is skipped, as its gradient overflows float16 at a loss scale of %g; "
                    "the next has half of it",
                    number,
                    metrics["loss_scale"],
                )
        else:
            failures += 1
            parts = describe(number - 1, not_finite)
            if failures == PATIENCE:
                raise FloatingPointError(_not_finite_message(number, metrics, parts))
            if accelerator.is_main_process:
                log.warning("step %d is skipped, as its gradient is not finite; %s", number, parts)
        seconds = time.perf_counter() - began
        metrics |= {"learning_rate": learning_rate, "seconds": seconds}
        yield StepResult(number, metrics, stopwatch.seconds())


def _is_scaled_too_far(metrics: Mapping[str, float]) -> bool:
    """True if a gradient that is not finite may be so for the scale of the loss, which a lower one
    mends. All ranks agree.
    """
    return metrics.get("loss_scale", 1.0) > 1 and math.isfinite(metrics["loss"])


def _not_finite_message(number: int, metrics: Mapping[str, float], parts: str) -> str:
    in_float16 = ""
    if "loss_scale" in metrics:
        in_float16 = "; numbers beyond 65504 overflow in float16: set dtype to bfloat16 or float32"
    return (
        f"optimize: the gradient was not finite in {PATIENCE} steps in a row, the last one step {number}: "
        f"lower the learning rate, or look for log-probs of -inf in the data{in_float16}; {parts}"
    )


@torch.no_grad()
def evaluate(
    accelerator: Accelerator,
    policy: nn.Module,
    micro_batches: Sequence[Batch],
    objective: Objective,
    weightings: Weightings,
) -> dict[str, float]:
    """The metrics of `train_step` over these batches, without training."""
    micro_batches = _listed(micro_batches)
    sums = Sums(accelerator, policy, micro_batches, weightings)
    with evaluating(policy):
        for i, batch in enumerate(micro_batches):
            sums.add(i, objective(policy, batch))
    return sums.means()[0]
