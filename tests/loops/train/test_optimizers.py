"""Optimizers and schedules by name, their state, and steps of bfloat16 weights."""

import math
from dataclasses import replace

import pytest
import torch
from burnish.loops.cli.trl_rules import table
from burnish.loops.config import Common
from burnish.loops.models.policy import Policy
from burnish.loops.train import optimizers
from grids import slow
from tiny import make_model
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

NAMES = [
    "adamw", "adafactor", "sgd", "adagrad", "muon", "lion", "ademamix", "adamw_8bit", "lion_8bit", "paged_adamw_8bit",
    "rmsprop_8bit", "schedule_free_adamw", slow("adamw_torch_8bit"), slow("adamw_torch_4bit"),
]  # fmt: skip
LOW_BIT = pytest.mark.filterwarnings("ignore")  # of their packages, about what they find installed


def config(**fields):
    return Common(model="", data="", output="", **fields)


def model(dtype=torch.float32, size=72):
    """Its matrix has more than the 4096 entries from which bitsandbytes keeps a state in 8 bits."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(size, size), nn.LayerNorm(size), nn.Linear(size, 1)).to(dtype)


def steps(module, optimizer, first, last, schedule=None):
    """Take the steps with gradients that are a function of the step."""
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        for parameter in module.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        optimizer.step()
        if schedule is not None:
            schedule.step()


def weights(module):
    return torch.cat([parameter.detach().flatten().clone() for parameter in module.parameters()])


@LOW_BIT
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_an_optimizer_goes_on_from_its_state_bit_for_bit(name, dtype, tmp_path):
    free = name.startswith("schedule_free")
    if free and dtype == "bfloat16":
        pytest.skip("refused")
    settings = config(optimizer=name, learning_rate=1e-3, weight_decay=0.1, schedule="constant" if free else "cosine",
                      warmup=2, dtype=dtype, weights_dtype=dtype)  # fmt: skip

    def make():
        module = model(getattr(torch, dtype))
        optimizer = optimizers.make_optimizer(settings, module)
        return module, optimizer, optimizers.make_schedule(settings, optimizer, 8)

    module, optimizer, schedule = make()
    steps(module, optimizer, 0, 8, schedule)
    expected = weights(module)
    for load in ("state_dict", "by name"):
        module, optimizer, schedule = make()
        steps(module, optimizer, 0, 4, schedule)
        by_name = load == "by name"
        state = {
            "optimizer": get_optimizer_state_dict(module, optimizer)
            if by_name
            else optimizer.state_dict()
        }
        state |= {"model": module.state_dict(), "schedule": schedule.state_dict()}
        torch.save(state, tmp_path / "state.pt")
        state = torch.load(tmp_path / "state.pt", weights_only=True)
        module, optimizer, schedule = make()
        if by_name:
            set_optimizer_state_dict(module, optimizer, state["optimizer"])
        else:
            optimizer.load_state_dict(state["optimizer"])
        module.load_state_dict(state["model"])
        schedule.load_state_dict(state["schedule"])
        steps(module, optimizer, 4, 8, schedule)
        assert torch.equal(weights(module), expected), load
    assert not torch.equal(expected, weights(model(getattr(torch, dtype))))


def test_the_default_is_fused_adamw_bit_for_bit():
    module, other = model(), model()
    steps(module, optimizers.make_optimizer(config(), module), 0, 5)
    steps(other, torch.optim.AdamW(other.parameters(), lr=1e-5, weight_decay=0.0, fused=True), 0, 5)
    assert torch.equal(weights(module), weights(other))


def test_norms_and_biases_do_not_decay():
    policy = Policy(make_model("qwen2", dtype=torch.float32))
    optimizer = optimizers.make_optimizer(config(weight_decay=0.1), policy)
    decayed, spared = ({id(p) for p in group["params"]} for group in optimizer.param_groups)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    for name, parameter in policy.named_parameters():
        assert (id(parameter) in spared) == ("norm" in name or name.endswith("bias")), name
    assert len(decayed | spared) == len(list(policy.parameters()))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"optimizer": "adamx"}, "optimizer: no 'adamx', did you mean 'adamax'?"),
        (
            {"optimizer": "grokadamw:GrokAdamW"},
            "optimizer grokadamw:GrokAdamW: no module 'grokadamw'",
        ),
        (
            {"optimizer_kwargs": {"beta": 1}},
            "optimizer adamw: optimizer_kwargs: no setting 'beta', did you mean 'betas'",
        ),
        (
            {"optimizer_kwargs": {"betas": [0.9, 2.0]}},
            "optimizer adamw: optimizer_kwargs: Invalid beta parameter at index 1: 2.0",
        ),
        ({"optimizer_kwargs": {"lr": 1.0}}, "optimizer_kwargs: lr is --learning_rate"),
        (
            {"optimizer": "schedule_free_adamw"},
            "takes the place of a schedule; add --schedule constant",
        ),
        ({"schedule": "warmup_stable_decay"}, "schedule_kwargs: needs num_decay_steps"),
        ({"schedule_kwargs": {"cycles": 1}}, "no setting 'cycles', did you mean 'num_cycles'"),
        (
            {"schedule": "cosine_with_min_lr"},
            "schedule cosine_with_min_lr: schedule_kwargs: One of min_lr or min_lr_rate should be set",
        ),
        (
            {
                "weights_dtype": "bfloat16",
                "dtype": "bfloat16",
                "optimizer": "schedule_free_sgd",
                "schedule": "constant",
            },
            "leave weights_dtype float32",
        ),
    ],
)
def test_a_mistake_is_named_before_the_model_is_loaded(fields, message):
    fields = {"schedule": "cosine", **fields} if "schedule_kwargs" in fields else fields
    with pytest.raises(ValueError) as raised:
        optimizers.check(config(**fields))
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(optimizers, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r"optimizer lion_8bit: needs bitsandbytes, .* pip install bitsandbytes"
    ):
        optimizers.check(config(optimizer="lion_8bit"))


class Signs(torch.optim.SGD):
    """An optimizer of one's own: SGD on signs."""

    def __init__(self, params, lr, weight_decay=0.0, scale=1.0):
        super().__init__(params, lr=lr * scale)

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.sign_()
        super().step()


def test_an_optimizer_of_ones_own(monkeypatch, tmp_path):
    settings = config(
        optimizer=f"{__name__}:Signs", learning_rate=0.5, optimizer_kwargs={"scale": 0.5}
    )
    monkeypatch.setitem(
        __import__("sys").modules, __name__, __import__("types").SimpleNamespace(Signs=Signs)
    )
    module = nn.Linear(3, 3)
    before = weights(module)
    steps(module, optimizers.make_optimizer(settings, module), 0, 1)
    torch.testing.assert_close((weights(module) - before).abs(), torch.full((12,), 0.25))


def test_muon_takes_the_matrices_between_embedding_and_head():
    policy = Policy(make_model(dtype=torch.float32))
    settings = config(optimizer="muon", learning_rate=1e-3, weight_decay=0.1)
    optimizer = optimizers.make_optimizer(settings, policy)
    by_muon = {
        id(p) for group in optimizer.param_groups if "momentum" in group for p in group["params"]
    }
    names = {name: parameter for name, parameter in policy.named_parameters()}
    for name, parameter in names.items():
        assert (id(parameter) in by_muon) == name.endswith("_proj.weight"), name
    before = {name: parameter.detach().clone() for name, parameter in names.items()}
    steps(policy, optimizer, 0, 1)
    update = (before["model.model.layers.0.mlp.up_proj.weight"] * (1 - 1e-4)) - names[
        "model.model.layers.0.mlp.up_proj.weight"
    ]
    # Orthogonalized, and scaled to the root mean square of AdamW's update, 0.2 (arXiv:2502.16982,
    # equation 4).
    singular = torch.linalg.svdvals(update / (1e-3 * 0.2 * 48**0.5))
    assert ((singular > 0.6) & (singular < 1.3)).all()
    embedding = (
        before["model.model.embed_tokens.weight"] * (1 - 1e-4)
        - names["model.model.embed_tokens.weight"]
    )
    torch.testing.assert_close(
        embedding.abs(), torch.full_like(embedding, 1e-3), rtol=1e-2, atol=1e-6
    )


def learning_rates(steps=20, **fields):
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    schedule = optimizers.make_schedule(config(**fields), optimizer, steps)
    rates = []
    for _ in range(steps):
        rates.append(float(schedule.get_last_lr()[0]))
        optimizer.step()
        schedule.step()
    return rates


@pytest.mark.parametrize(
    ("schedule", "kwargs", "last"),
    [
        ("constant", {}, 1.0),
        ("constant_with_warmup", {}, 1.0),
        ("linear", {}, 1 / 16),
        ("cosine", {}, (1 + math.cos(math.pi * 15 / 16)) / 2),
        ("cosine_with_restarts", {"num_cycles": 2}, (1 + math.cos(math.pi * 14 / 16)) / 2),
        (
            "cosine_with_min_lr",
            {"min_lr_rate": 0.1},
            0.1 + 0.9 * (1 + math.cos(math.pi * 15 / 16)) / 2,
        ),
        ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.1}, 0.1),
        ("polynomial", {"power": 2.0, "lr_end": 0.0}, 1 / 16**2),
        ("inverse_sqrt", {"timescale": 4}, (4 / 19) ** 0.5),
        ("warmup_stable_decay", {"num_decay_steps": 4, "decay_type": "linear"}, 1 / 4),
    ],
)
def test_a_schedule_warms_up_and_falls_as_transformers_has_it(schedule, kwargs, last):
    rates = learning_rates(schedule=schedule, schedule_kwargs=kwargs, warmup=4)
    # this one begins and ends a step earlier
    first = 1 if schedule == "cosine_warmup_with_min_lr" else 0
    assert rates[:4] == pytest.approx([step / 4 for step in range(first, first + 4)])
    assert rates[-1] == pytest.approx(last)


def test_a_share_of_the_steps_is_rounded_up_as_transformers_does():
    assert learning_rates(warmup=0.11)[:4] == pytest.approx([0.0, 1 / 3, 2 / 3, 1.0])


def test_a_schedule_that_follows_evaluations_falls_when_the_loss_does_not():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    settings = config(schedule="reduce_lr_on_plateau", schedule_kwargs={"patience": 1, "factor": 0.5}, eval_data="",
                      eval_every=1)  # fmt: skip
    settings = replace(settings, eval_data="held-out.jsonl")
    schedule = optimizers.make_schedule(settings, optimizer, 10)
    rates = []
    for loss in (3.0, 2.0, 2.0, 2.0, 2.0, 2.0):
        schedule.step(loss)
        rates.append(schedule.get_last_lr()[0])
    assert rates == [1.0, 1.0, 1.0, 0.5, 0.5, 0.25]


def test_weights_of_a_schedule_free_optimizer_are_averages_and_come_back_bit_for_bit():
    settings = config(optimizer="schedule_free_adamw", learning_rate=1e-2, schedule="constant")
    module = model()
    optimizer = optimizers.make_optimizer(settings, module)
    with optimizers.evaluated_weights(optimizer, module):
        assert torch.equal(weights(module), weights(model()))
    steps(module, optimizer, 0, 5)
    trained = weights(module)
    with optimizers.evaluated_weights(optimizer, module):
        evaluated = weights(module)
    z = torch.cat([optimizer.state[parameter]["z"].flatten() for parameter in module.parameters()])
    # y = (1 - beta1) z + beta1 x, with beta1 = 0.9
    torch.testing.assert_close(trained, 0.1 * z + 0.9 * evaluated)
    assert not torch.equal(trained, evaluated) and torch.equal(weights(module), trained)
    steps(module, optimizer, 5, 6)


def test_stochastic_rounding_is_right_on_average_and_never_leaves_the_neighbors():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, generator=generator) * torch.logspace(-30, 30, 50)
    count = 40000
    rounded = optimizers.round_stochastically(x.repeat(count, 1), generator).float()
    low, high = (x.view(torch.int32) & -0x10000).view(torch.float32), None
    high = ((x.view(torch.int32) & -0x10000) + 0x10000).view(torch.float32)
    assert ((rounded == low) | (rounded == high)).all()
    share = ((x - low) / (high - low)).double()
    deviation = (share * (1 - share) / count).sqrt()
    upper = (rounded == high).double().mean(0)
    assert ((upper - share).abs() <= 4.5 * deviation + 1e-9).all()
    exact = torch.tensor([0.0, 1.0, -2.5, math.inf, -math.inf, math.nan])
    torch.testing.assert_close(
        optimizers.round_stochastically(exact, generator).float(), exact, equal_nan=True
    )


def test_sixteen_bits_beside_a_bfloat16_are_a_float32():
    bits = torch.randint(
        -(2**31),
        2**31 - 1,
        (100000,),
        dtype=torch.int64,
        generator=torch.Generator().manual_seed(0),
    )
    x = bits.to(torch.int32).view(torch.float32)
    x = torch.cat([x[x.isfinite()], torch.tensor([0.0, -0.0, 1 + 2**-8, 1 + 3 * 2**-8, math.inf])])
    high, low = optimizers.split(x)
    assert high.dtype == torch.bfloat16 and low.dtype == torch.int16
    assert torch.equal(optimizers.join(high, low).view(torch.int32), x.view(torch.int32))
    nearest = x.to(torch.bfloat16)
    assert ((high == nearest) | (low == -(2**15))).all()  # halves go away from zero


def in_bfloat16(rounding, optimizer="adamw", **fields):
    return config(
        optimizer=optimizer, rounding=rounding, dtype="bfloat16", weights_dtype="bfloat16", **fields
    )


@LOW_BIT
@pytest.mark.parametrize(
    ("optimizer", "size", "count"),
    [
        ("adamw", 16, 1000),
        ("adamw_8bit", 72, 50),
        ("sgd", 16, 50),
        ("muon", 16, 50),
        slow("adamw_torch_8bit", 72, 50),
    ],
)
def test_a_thousand_compensated_steps_are_those_of_float32_bit_for_bit(optimizer, size, count):
    module, exact = model(torch.bfloat16, size), model(torch.bfloat16, size).float()
    settings = in_bfloat16("compensated", optimizer, learning_rate=1e-6)
    steps_of = (
        optimizers.make_optimizer(settings, module),
        optimizers.make_optimizer(config(optimizer=optimizer), exact),
    )
    for group in steps_of[1].param_groups:
        group["lr"] = group["lr"] * 0 + 1e-6
    for step in range(count):
        generator = torch.Generator().manual_seed(step)
        for half, full in zip(module.parameters(), exact.parameters(), strict=True):
            half.grad = torch.randn(half.shape, generator=generator).to(torch.bfloat16)
            full.grad = half.grad.float()
        for each in steps_of:
            each.step()
    for half, full in zip(module.parameters(), exact.parameters(), strict=True):
        assert torch.equal(
            optimizers.join(half.detach(), steps_of[0].state[half]["remainder"]), full.detach()
        )
        assert half.dtype == torch.bfloat16


def test_a_step_of_a_millionth_does_not_vanish():
    """A thousand steps of 1e-6 down from 1, whose neighbor below in bfloat16 is 1 - 2^-8 =
    0.996.
    """
    ends = {}
    for rounding in ("stochastic", "compensated", "nearest"):
        module = nn.Linear(200, 200, bias=False, dtype=torch.bfloat16)
        nn.init.ones_(module.weight)
        make = torch.optim.SGD(module.parameters(), lr=1e-6)
        if rounding != "nearest":
            make = optimizers.make_optimizer(
                in_bfloat16(rounding, "sgd", learning_rate=1e-6), module
            )
        for _ in range(1000):
            module.weight.grad = torch.ones_like(module.weight)
            make.step()
        ends[rounding] = module.weight.detach().float()
        if rounding == "compensated":
            low = make.state[module.weight]["remainder"]
            ends[rounding] = optimizers.join(module.weight.detach(), low)
    assert (ends["nearest"] == 1).all()
    torch.testing.assert_close(
        ends["compensated"], torch.full((200, 200), 1 - 1e-3), rtol=0, atol=5e-5
    )
    # Each weight has moved by 2^-8 or not, with a chance of 0.001 · 2^8: the mean of 40000 is near
    # 0.999.
    assert float(ends["stochastic"].double().mean()) == pytest.approx(
        1 - 1e-3, abs=5 * 2**-8 * (0.25 / 40000) ** 0.5
    )
    assert set((2**8 * (1 - ends["stochastic"])).unique().tolist()) <= {
        0.0,
        1.0,
        2.0,
        3.0,
        4.0,
        5.0,
    }


def test_chance_is_a_function_of_seed_and_step_and_not_of_the_global_generator():
    def ends(seed, disturb):
        module = model(torch.bfloat16)
        optimizer = optimizers.make_optimizer(
            in_bfloat16("stochastic", learning_rate=1e-3, seed=seed), module
        )
        torch.manual_seed(disturb)
        steps(module, optimizer, 0, 3)
        return weights(module)

    assert torch.equal(ends(1, 0), ends(1, 5)) and not torch.equal(ends(1, 0), ends(2, 0))


@pytest.mark.parametrize("weights_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon", "sgd"])
def test_an_offloaded_optimizer_keeps_its_state_and_computes_on_the_cpu(
    optimizer, weights_dtype, monkeypatch
):
    """On a GPU without values, where an operation of both devices' tensors is an error."""
    # Without CUDA only this copy knows that there is nothing to be done.
    monkeypatch.setattr(
        torch.Tensor, "copy_", lambda to, tensor: torch._foreach_copy_([to], [tensor])
    )
    fields = {"optimizer_kwargs": {"momentum": 0.9}} if optimizer == "sgd" else {}
    settings = in_bfloat16("compensated", optimizer, offload_optimizer=True, **fields)
    with FakeTensorMode():
        shapes, dtype = ((8, 8), (8,)), getattr(torch, weights_dtype)
        module = nn.ParameterList(
            torch.zeros(shape, dtype=dtype, device="cuda") for shape in shapes
        )
        made = optimizers.make_optimizer(settings, module)
        for _ in range(2):
            for parameter in module.parameters():
                parameter.grad = torch.ones_like(parameter)
            made.step()
    kept = [
        each
        for state in made.state.values()
        for each in state.values()
        if isinstance(each, torch.Tensor)
    ]
    assert {each.device.type for each in kept} == {"cpu"} and len(made.state) == len(
        list(module.parameters())
    )
    for parameter in module.parameters():
        assert parameter.device.type == parameter.grad.device.type == "cuda"


@pytest.mark.parametrize("weights_dtype", ["float32", "bfloat16"])
def test_an_offloaded_optimizer_takes_the_same_steps(weights_dtype, monkeypatch):
    ends = []
    for offload in (False, True):
        # as on a GPU
        monkeypatch.setattr(optimizers.Float32Steps, "_is_copied", lambda self, parameter: True)
        module = model(getattr(torch, weights_dtype))
        settings = config(
            learning_rate=1e-3, weight_decay=0.1, rounding="compensated", offload_optimizer=offload
        )
        optimizer = optimizers.make_optimizer(settings, module)
        if not offload:
            assert isinstance(optimizer, optimizers.Float32Steps) == (weights_dtype == "bfloat16")
        steps(module, optimizer, 0, 5)
        ends.append(weights(module))
    assert torch.equal(*ends)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("weights_dtype", ["float32", "bfloat16"])
def test_a_model_on_a_gpu_takes_the_steps_of_an_offloaded_optimizer(weights_dtype):
    ends = []
    for device in ("cpu", "cuda"):
        module = model(getattr(torch, weights_dtype)).to(device)
        optimizer = optimizers.make_optimizer(
            config(learning_rate=1e-3, rounding="compensated", offload_optimizer=True), module
        )
        for step in range(5):
            generator = torch.Generator().manual_seed(step)
            for parameter in module.parameters():
                gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
                parameter.grad = gradient.to(device)
            optimizer.step()
        ends.append(weights(module).cpu())
    assert torch.equal(*ends)


@pytest.mark.parametrize("optimizer", ["adamw_8bit", "schedule_free_adamw"])
def test_an_optimizer_that_can_not_be_offloaded_is_named(optimizer):
    with pytest.raises(
        ValueError, match=f"^optimizer {optimizer}: can't be offloaded; leave offload_optimizer out"
    ):
        optimizers.check(config(optimizer=optimizer, schedule="constant", offload_optimizer=True))


@pytest.mark.parametrize(
    ("fields", "most"),
    [
        ({}, 16.01),
        ({"optimizer": "adamw_8bit"}, 10.2),
        ({"optimizer": "sgd"}, 8.0),
        ({"weights_dtype": "bfloat16"}, 12.01),
        ({"weights_dtype": "bfloat16", "rounding": "compensated"}, 14.01),
        ({"weights_dtype": "bfloat16", "optimizer": "adamw_8bit"}, 6.3),
        ({"weights_dtype": "bfloat16", "optimizer": "lion_8bit"}, 5.2),
        ({"weights_dtype": "bfloat16", "optimizer": "adafactor"}, 4.2),
    ],
    ids=str,
)
def test_bytes_per_parameter_of_weights_gradients_and_state(fields, most):
    """Counted from the tensors, one by one."""
    settings = config(dtype="bfloat16", **fields)
    module = model(getattr(torch, settings.weights_dtype), size=512)
    optimizer = optimizers.make_optimizer(settings, module)
    steps(module, optimizer, 0, 2)
    assert most - 0.3 < bytes_per_parameter(module, optimizer) <= most


def bytes_per_parameter(module, optimizer):
    tensors = [*module.parameters(), *(p.grad for p in module.parameters() if p.grad is not None)]
    tensors += [
        each
        for state in optimizer.state.values()
        for each in state.values()
        if isinstance(each, torch.Tensor)
    ]
    stored = {each.data_ptr(): each.numel() * each.element_size() for each in tensors}
    return sum(stored.values()) / sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("AdamW", "adamw"),
        ("SGD", "sgd"),
        ("Muon", "muon"),
        ("adamw_torch_fused", "adamw"),
        ("AdamW_Torch", "adamw"),
        ("paged_adamw", "paged_adamw_32bit"),
        ("adamw_bnb_8bit", "adamw_8bit"),
    ],
)
def test_a_name_may_have_capitals_or_be_that_of_transformers(name, ours):
    built, plain = (
        optimizers.make_optimizer(config(optimizer=each), model()) for each in (name, ours)
    )
    assert type(built) is type(plain)
    assert built.defaults == plain.defaults


def test_names_of_transformers_mean_what_they_mean_in_a_file_of_trl():
    for theirs, ours in table()["optimizers"].items():
        assert (
            optimizers._OPTIMIZERS[optimizers.plain_name(theirs)] == optimizers._OPTIMIZERS[ours]
        ), theirs


def test_a_class_keeps_its_own_arguments_whatever_its_name():
    assert (
        optimizers.make_optimizer(config(optimizer=torch.optim.AdamW), model()).defaults["fused"]
        is None
    )


def test_a_name_that_is_nearly_one_is_answered_with_it():
    with pytest.raises(ValueError, match="no 'adafactr', did you mean 'adafactor'"):
        optimizers.make_optimizer(config(optimizer="adafactr"), model())
