"""Optimizers and learning-rate schedules by name, and steps of bfloat16 weights that don't lose
small updates.

The names are those of torch's classes in lower case, and those that transformers has for classes of
other packages.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau
from transformers import optimization
from transformers.trainer_pt_utils import get_parameter_names

from ..config import Common
from ..models.backbone import Backbone
from ..models.sharding import local
from ..registry import build, find, nearest

# Name -> module:class.
_OPTIMIZERS: dict[str, str] = {}
for _kind in vars(torch.optim).values():
    # The base class, and two that need more than gradients: a closure, sparse ones.
    if isinstance(_kind, type) and _kind.__name__ not in ("Optimizer", "LBFGS", "SparseAdam"):
        _OPTIMIZERS[_kind.__name__.lower()] = f"torch.optim:{_kind.__name__}"
for _name in ("AdamW", "AdEMAMix", "Lion"):
    # paged: their state moves to host memory where the GPU's runs out
    _lower = _name.lower()
    _OPTIMIZERS[f"{_lower}_8bit"] = f"bitsandbytes.optim:{_name}8bit"
    _OPTIMIZERS[f"{_lower}_32bit"] = f"bitsandbytes.optim:{_name}"
    _OPTIMIZERS[f"paged_{_lower}_8bit"] = f"bitsandbytes.optim:Paged{_name}8bit"
    _OPTIMIZERS[f"paged_{_lower}_32bit"] = f"bitsandbytes.optim:Paged{_name}"
_OPTIMIZERS |= {
    "muon": ".optimizers:MuonWithAdamW",
    "adafactor": "transformers.optimization:Adafactor",
    "lion": "bitsandbytes.optim:Lion",
    "ademamix": "bitsandbytes.optim:AdEMAMix",
    "rmsprop_8bit": "bitsandbytes.optim:RMSprop8bit",
    "adamw_torch_8bit": "torchao.optim:AdamW8bit",
    "adamw_torch_4bit": "torchao.optim:AdamW4bit",
    "adamw_torch_fp8": "torchao.optim:AdamWFp8",
    "schedule_free_adamw": "schedulefree:AdamWScheduleFree",
    "schedule_free_radam": "schedulefree:RAdamScheduleFree",
    "schedule_free_sgd": "schedulefree:SGDScheduleFree",
}
# A parameter group as torch has it: "params", and the learning rate and other options of them.
ParameterGroup = dict[str, Any]

# transformers' names of some of them.
_OF_TRANSFORMERS = {
    **dict.fromkeys(
        ("adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_torch_npu_fused"), "adamw"
    ),
    **dict.fromkeys(("adamw_hf", "adamw_apex_fused"), "adamw"),
    "adamw_bnb_8bit": "adamw_8bit",
    "paged_adamw": "paged_adamw_32bit",
    "paged_lion": "paged_lion_32bit",
    "paged_ademamix": "paged_ademamix_32bit",
    "rmsprop_bnb_8bit": "rmsprop_8bit",
}
_PRESETS: Mapping[str, Mapping[str, Any]] = {
    "adamw": {"fused": True},
    # the learning rate comes from the schedule
    "adafactor": {"scale_parameter": False, "relative_step": False},
}

# The parameters that transformers' Trainer decays: not those of norms, and no biases.
_NO_DECAY = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]


def check(config: Common) -> None:
    """Make the optimizer and the schedule of a configuration once, for a model of one weight, to
    raise their errors.
    """
    weight = nn.Linear(1, 1, dtype=getattr(torch, config.weights_dtype))
    # an optimizer passed as an object holds the model's parameters
    named = isinstance(config.optimizer, str)
    optimizer = make_optimizer(config, weight) if named else AdamW(weight.parameters())
    make_schedule(config, optimizer, config.steps or 10**6)


def make_optimizer(config: Common, model: nn.Module) -> Optimizer:
    """The configured optimizer of the trained parameters; norms and biases don't decay.

    Its steps of bfloat16 parameters, and those on the CPU (``offload_optimizer``), are those of
    `Float32Steps`.

    Raises:
        ValueError: if there is no such optimizer, its package is missing, or an argument is wrong.
    """
    if isinstance(config.optimizer, Optimizer):
        return config.optimizer
    given = config.optimizer
    name = plain_name(given) if isinstance(given, str) else str(getattr(given, "__name__", given))
    kind = _find_optimizer(name) if isinstance(config.optimizer, str) else config.optimizer
    kwargs = _checked_kwargs(config)
    trained: dict[str, Tensor] = {}
    for path, parameter in model.named_parameters():
        if parameter.requires_grad:
            trained[path] = parameter
    parameters = list(trained.values())
    _check_support(config, name, kind, parameters)

    groups: list[ParameterGroup] | list[Tensor]
    if config.weight_decay:
        groups = _decay_groups(model, trained, config.weight_decay)
    elif isinstance(kind, type):
        groups = [{"params": parameters}]
    else:
        groups = parameters  # a function may look for some of them
    try:
        if _has_bfloat16(parameters) or config.offload_optimizer:
            # A class of its own, so that the copies come in front of any optimizer's step.
            members = {
                "rounding": config.rounding,
                "seed": config.seed,
                "offload": config.offload_optimizer,
            }
            kind = type(f"{name}OfCopies", (Float32Steps, kind), members)
        optimizer: Any = build(
            "optimizer_kwargs",
            kind,
            kwargs,
            factory=True,
            matrices=_matrices(model),
            params=groups,
            lr=config.learning_rate,
            weight_decay=config.weight_decay,
            **_PRESETS.get(name, {}),
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"optimizer {name}: {error}") from error
    if hasattr(optimizer, "train"):  # schedule-free: from its evaluated weights to the trained ones
        optimizer.train()
    return optimizer  # type: ignore[no-any-return]


def _package_of(name: str) -> str:
    """The package that an optimizer comes from; empty for our own."""
    module = _OPTIMIZERS.get(name, name).partition(":")[0]
    return module.partition(".")[0]


def plain_name(name: str) -> str:
    """The name in `_OPTIMIZERS` of one that is written in other letters, such as AdamW, or as
    transformers has it.
    """
    lower = name.lower()
    lower = _OF_TRANSFORMERS.get(lower, lower)
    return lower if lower in _OPTIMIZERS else name


def _find_optimizer(name: str) -> type[Optimizer]:
    """The class of a name in `_OPTIMIZERS`, or of ``module:object``."""
    package = _package_of(name)
    if name in _OPTIMIZERS and package and find_spec(package) is None:
        raise ValueError(
            f"optimizer {name}: needs {package}, which is not installed; pip install {package}"
        )
    kind = find("optimizer", name, _OPTIMIZERS, __package__)
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise ValueError(
            f"optimizer {name}: wanted a subclass of torch.optim.Optimizer, got {kind!r}"
        )
    return kind


def _checked_kwargs(config: Common) -> dict[str, Any]:
    """The configured arguments, with tuples in place of lists, of which YAML has no other."""
    kwargs = {}
    for key, value in config.optimizer_kwargs.items():
        kwargs[key] = tuple(value) if isinstance(value, list) else value
    for key, flag in (("lr", "learning_rate"), ("weight_decay", "weight_decay")):
        if key in kwargs:
            raise ValueError(f"optimizer_kwargs: {key} is --{flag}")
    return kwargs


def _has_bfloat16(parameters: Sequence[Tensor]) -> bool:
    return any(parameter.dtype == torch.bfloat16 for parameter in parameters)


def _check_support(config: Common, name: str, kind: object, parameters: Sequence[Tensor]) -> None:
    """Raise ValueError if this optimizer can't update weights that are sharded, in bfloat16, or on
    another device.
    """
    who, package = f"optimizer {name}", _package_of(name)
    sharded = any(isinstance(parameter, DTensor) for parameter in parameters)
    averages = hasattr(kind, "eval")  # a schedule-free optimizer
    if sharded and (package in ("bitsandbytes", "transformers") or name == "rprop"):
        raise ValueError(
            f"{who}: {package} can't update sharded weights; adamw_torch_8bit, of torchao, can"
        )
    if averages and _has_bfloat16(parameters):
        raise ValueError(
            f"{who}: averages weights, which bfloat16 is too coarse for; leave weights_dtype float32"
        )
    stays_on_device = averages or package == "bitsandbytes" or (sharded and name == "muon")
    if config.offload_optimizer and stays_on_device:
        raise ValueError(
            f"{who}: can't be offloaded; leave offload_optimizer out, or use adamw or paged_adamw_8bit"
        )


def _decay_groups(
    model: nn.Module, trained: Mapping[str, Tensor], decay: float
) -> list[ParameterGroup]:
    """Parameters that decay, and those that don't; a group without any is left out."""
    decays = set(get_parameter_names(model, [nn.LayerNorm], _NO_DECAY))  # type: ignore[no-untyped-call]
    decayed = [parameter for name, parameter in trained.items() if name in decays]
    spared = [parameter for name, parameter in trained.items() if name not in decays]
    groups: list[ParameterGroup] = [
        {"params": decayed, "weight_decay": decay},
        {"params": spared, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _matrices(model: nn.Module) -> set[Tensor]:
    """The matrices between the embedding and the output head."""
    backbones: list[nn.Module] = [
        each.plain.base_model for each in model.modules() if isinstance(each, Backbone)
    ]
    embeddings = {each.weight for each in model.modules() if isinstance(each, nn.Embedding)}
    parameters = (parameter for each in backbones or [model] for parameter in each.parameters())
    matrices: set[Tensor] = {parameter for parameter in parameters if parameter.ndim == 2}
    return matrices - embeddings


class MuonWithAdamW(Optimizer):
    """Muon for the matrices between embedding and output head, AdamW for all other parameters.

    Muon's update is scaled to the size of AdamW's, so that both take the same learning rate and
    weight decay (``match_rms_adamw``: Liu et al. 2025, arXiv:2502.16982, section 2.2).

    Args:
        matrices: the parameters that Muon updates.
        momentum, nesterov, ns_steps: of `torch.optim.Muon`.
        betas, eps: of `torch.optim.AdamW`.
    """

    def __init__(
        self,
        params: Sequence[ParameterGroup],
        lr: float,
        weight_decay: float = 0.0,
        *,
        matrices: Collection[Tensor],
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        by_muon = set(matrices)
        self.parts: list[Optimizer] = []
        matrix_groups = _groups_of(params, lambda parameter: parameter in by_muon)
        if matrix_groups:
            self.parts.append(
                Muon(
                    matrix_groups,
                    lr=lr,
                    weight_decay=weight_decay,
                    momentum=momentum,
                    nesterov=nesterov,
                    ns_steps=ns_steps,
                    adjust_lr_fn="match_rms_adamw",
                )
            )
        other_groups = _groups_of(params, lambda parameter: parameter not in by_muon)
        if other_groups:
            self.parts.append(
                AdamW(
                    other_groups, lr=lr, weight_decay=weight_decay, betas=betas, eps=eps, fused=True
                )
            )
        groups = list(chain.from_iterable(part.param_groups for part in self.parts))
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for part in self.parts:
            by_muon = isinstance(part, Muon)
            groups = [group for group in self.param_groups if ("momentum" in group) == by_muon]
            gathered: dict[Tensor, DTensor] = {}
            if by_muon:
                for p in chain.from_iterable(group["params"] for group in groups):
                    if _is_narrow(p):
                        gathered[p] = self._gather(p)
            # A resumed run and the loop's schedule replace the outer optimizer's state and groups:
            # take its own anew.
            part.state = self.state
            part.param_groups = []
            for group in groups:
                parameters = [gathered.get(p, p) for p in group["params"]]
                part.param_groups.append({**group, "params": parameters})
            part.step()
            for p, whole in gathered.items():
                assert isinstance(p, DTensor)
                local(p).copy_(local(whole.redistribute(placements=p.placements)))
                self._move_state(whole, p, p.placements)

    def _gather(self, shards: DTensor) -> DTensor:
        """The whole parameter, with its gradient and its state."""
        everywhere = [Replicate()] * shards.device_mesh.ndim
        whole = shards.redistribute(placements=everywhere)
        assert isinstance(shards.grad, DTensor)
        whole.grad = shards.grad.redistribute(placements=everywhere)
        self._move_state(shards, whole, everywhere)
        return whole

    def _move_state(self, before: Tensor, after: Tensor, placements: Sequence[Placement]) -> None:
        state = self.state.pop(before, {})
        self.state[after] = {
            name: tensor.redistribute(placements=placements) for name, tensor in state.items()
        }


def _groups_of(
    groups: Sequence[ParameterGroup], wanted: Callable[[Tensor], bool]
) -> list[ParameterGroup]:
    """The groups with the wanted parameters alone; a group without any is left out."""
    chosen = []
    for group in groups:
        parameters = [each for each in group["params"] if wanted(each)]
        if parameters:
            chosen.append({**group, "params": parameters})
    return chosen


def _is_narrow(matrix: Tensor) -> bool:
    """True if it has fewer rows or columns than ranks hold it: torch's Muon can't add its update to
    such shards.
    """
    return isinstance(matrix.grad, DTensor) and min(matrix.shape) < matrix.grad.device_mesh.size()


class Float32Steps(Optimizer):
    """Mixed into an optimizer's class, which then sees each bfloat16 parameter, one at a time, as a
    float32 tensor w.

    stochastic     w is the parameter, and becomes the bfloat16 number below or above by chance: `round_stochastically`
    compensated    w is the parameter plus 16 bits that are kept beside it: w is never rounded, and the parameter is w
                   to bfloat16. The same steps as those of a float32 w, bit for bit, for the same
                   gradients.

    The optimizer's own state is what it is for float32 parameters. Chance depends on the seed and
    the number of the step alone, and on the shard of a sharded parameter, so that replicas stay
    equal and a resumed run repeats it. With ``offload`` every parameter has a w, which is made on
    the CPU for the step, and the state stays there.

    Both kinds: Zamirai et al. 2020, arXiv:2010.06192, who compensate in bfloat16.
    """

    rounding: str
    seed: int
    offload: bool

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        groups = self.param_groups
        generators: _Generators = {}
        for index, group in enumerate(groups):
            group["updates"] = group.get("updates", 0) + 1
            last = group
            for parameters in self._parts(group["params"]):
                copies = [self._copy(parameter) for parameter in parameters]
                # A fresh dict, because some optimizers count their steps in the group.
                last = {**group, "params": copies}
                self.param_groups = [last]
                super().step()
                for parameter, copy in zip(parameters, copies, strict=True):
                    if copy is not parameter:
                        key = (self.seed, group["updates"], index, _shard(parameter))
                        self._store(parameter, copy, _generator(generators, key, copy.device))
            # What the optimizer counted in the group, once for all parameters.
            group.update({name: value for name, value in last.items() if name != "params"})
        self.param_groups = groups

    def _parts(self, parameters: Sequence[Tensor]) -> list[list[Tensor]]:
        """The parameters that one step updates together: those that need no copy, and each of the
        others by itself.
        """
        parts = []
        others = [each for each in parameters if not self._is_copied(each)]
        if others:
            parts.append(others)
        parts += [[each] for each in parameters if self._is_copied(each) and each.grad is not None]
        return parts

    def _is_copied(self, parameter: Tensor) -> bool:
        return parameter.dtype == torch.bfloat16 or self._device(parameter) != parameter.device

    def _device(self, parameter: Tensor) -> torch.device:
        return torch.device("cpu") if self.offload else parameter.device

    def _copy(self, parameter: Tensor) -> Tensor:
        """The parameter in at least float32, with its gradient and its state."""
        if not self._is_copied(parameter):
            return parameter
        state = self.state.pop(parameter, {})
        device = self._device(parameter)
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        rounded = parameter.detach().to(device)
        copy = rounded.to(dtype)
        if "remainder" in state:
            local(copy).copy_(join(local(rounded), local(state.pop("remainder"))))
        assert parameter.grad is not None
        copy.grad = parameter.grad.to(device).to(dtype)
        if state:
            self.state[copy] = state
        return copy

    def _store(self, parameter: Tensor, copy: Tensor, generator: torch.Generator) -> None:
        state = self.state.pop(copy, {})
        w = local(copy)
        if parameter.dtype == torch.bfloat16 and self.rounding == "stochastic":
            w = round_stochastically(w, generator)
        elif parameter.dtype == torch.bfloat16:
            w, low = split(w)
            state["remainder"] = torch.empty_like(copy, dtype=torch.int16)
            local(state["remainder"]).copy_(low)
        local(parameter).copy_(w)
        self.state[parameter] = state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state as it was saved: torch alone would round the state to the parameters'
        bfloat16.
        """
        super().load_state_dict(state_dict)
        # A saved state has the numbers of parameters in place of them, in the same order.
        indices = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in self.param_groups)
        for index, parameter in zip(indices, parameters, strict=True):
            for name, value in state_dict["state"].get(index, {}).items():
                if isinstance(value, Tensor) and name != "step":
                    self.state[parameter][name] = value.to(self._device(parameter), copy=True)


_Generators = dict[tuple[tuple[int, ...], torch.device], torch.Generator]


def _generator(made: _Generators, key: tuple[int, ...], device: torch.device) -> torch.Generator:
    """The generator of these numbers, which all parameters of a group draw from in turn."""
    if (key, device) not in made:
        made[key, device] = torch.Generator(device).manual_seed(_mixed(key))
    return made[key, device]


def _shard(parameter: Tensor) -> int:
    """The number of this rank's part of a parameter: the same on replicas of it."""
    if not isinstance(parameter, DTensor):
        return 0
    number = 0
    mesh = parameter.device_mesh
    for size, placement, place in zip(
        mesh.shape, parameter.placements, mesh.get_coordinate() or (), strict=True
    ):
        if not placement.is_replicate():
            number = number * size + place
    return number


def _mixed(numbers: Sequence[int]) -> int:
    """One seed made from several numbers."""
    mixed = 0
    for number in numbers:
        mixed = (mixed * 6364136223846793005 + number + 1442695040888963407) % 2**63
    return mixed


def round_stochastically(x: Tensor, generator: torch.Generator) -> Tensor:
    """x in bfloat16: of the neighbors a ≤ x < b, b with probability (x − a)/(b − a), so that x is
    the mean.

    Args:
        x: float32, finite or not; a bfloat16 number stays itself.
    """
    noise = torch.randint(
        0, 1 << 16, x.shape, dtype=torch.int32, device=x.device, generator=generator
    )
    # The upper 16 bits of a float32 are a bfloat16: what noise carries into them rounds up.
    bits = (x.view(torch.int32) + noise) & -0x10000
    return bits.view(torch.float32).to(torch.bfloat16)


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    """float32 as the nearest bfloat16, halves away from zero, and the int16 that is missing in its
    lower 16 bits.
    """
    bits = x.view(torch.int32)
    high = (bits + 0x8000) >> 16
    return high.to(torch.int16).view(torch.bfloat16), (bits - (high << 16)).to(torch.int16)


def join(high: Tensor, low: Tensor) -> Tensor:
    """The float32 that was `split`, bit for bit."""
    return ((high.view(torch.int16).to(torch.int32) << 16) + low).view(torch.float32)


def averaged_by(config: Common) -> bool:
    """True if the configured optimizer is one that `averages`."""
    return hasattr(_find_optimizer(plain_name(str(config.optimizer))), "eval")


def averages(optimizer: object) -> bool:
    """True for a schedule-free optimizer: the weights to evaluate and save are an average of those
    that it trains.
    """
    return hasattr(getattr(optimizer, "optimizer", optimizer), "eval")  # in Accelerate's wrapper


@contextmanager
def evaluated_weights(optimizer: Any, model: nn.Module) -> Iterator[None]:
    """Context with the weights to evaluate and save: a schedule-free optimizer trains others
    (Defazio et al. 2024, arXiv:2405.15682), which come back as they were, bit for bit."""
    inner = getattr(optimizer, "optimizer", optimizer)  # in Accelerate's wrapper
    if not hasattr(inner, "eval"):
        yield
        return
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    trained = [parameter.detach().clone() for parameter in parameters]
    inner.eval()
    try:
        yield
    finally:
        inner.train()
        with torch.no_grad():
            for parameter, weight in zip(parameters, trained, strict=True):
                parameter.copy_(weight)


# Schedules that follow the loss of evaluations instead of steps: classes, which name their
# parameters, in place of functions of transformers that take any keywords.
_BY_EVALUATION = {
    "reduce_lr_on_plateau": ReduceLROnPlateau,
    "greedy": getattr(optimization, "GreedyLR", None),
}
AT_EVALUATION = tuple(filter(None, _BY_EVALUATION.values()))


def make_schedule(config: Common, optimizer: Optimizer, steps: int) -> LRScheduler:
    """The configured schedule of the learning rate over this many steps.

    Raises:
        ValueError: if it has no such argument, one is missing or wrong, or it needs evaluations and
            there are none.
    """
    name: str = config.schedule  # as a text: constant may become constant_with_warmup
    who = f"schedule {name}"
    if hasattr(optimizer, "eval") and not name.startswith("constant"):
        raise ValueError(
            f"optimizer {config.optimizer}: takes the place of a schedule; add --schedule constant"
        )
    warmup = math.ceil(steps * config.warmup) if config.warmup < 1 else int(config.warmup)
    functions: dict[str, Any] = {
        kind.value: _BY_EVALUATION.get(kind.value, function)
        for kind, function in optimization.TYPE_TO_SCHEDULER_FUNCTION.items()
    }
    if name not in functions:
        raise ValueError(nearest("schedule: this version of transformers has no", name, functions))
    if name == "constant" and warmup:
        name = "constant_with_warmup"
    try:
        schedule: Any = build(
            "schedule_kwargs",
            functions[name],
            config.schedule_kwargs,
            factory=True,
            optimizer=optimizer,
            num_warmup_steps=warmup,
            num_training_steps=steps,
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"{who}: {error}") from error
    return schedule  # type: ignore[no-any-return]


def follow(schedule: LRScheduler) -> None:
    """Give each parameter group the rate of its schedule at the step that comes next.

    A checkpoint holds the rates of the schedule that saved it. A run that was extended has another
    number of steps, and so another rate at the same step; for an unchanged one these are the same
    numbers, bit for bit.
    """
    if not isinstance(schedule, LambdaLR):  # those of `AT_EVALUATION` know no number of steps
        return
    rates = []
    for group, base, factor in zip(
        schedule.optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True
    ):
        rate = base * factor(schedule.last_epoch)
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
        rates.append(rate)
    schedule._last_lr = rates
