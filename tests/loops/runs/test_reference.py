"""References: frozen, adapters off, and computed once, are the same log-probs."""

import copy
import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from burnish.data import Example, encode_preference
from burnish.loops.batch import collate
from burnish.loops.config import Bema, Lora
from burnish.loops.models.policy import Policy
from burnish.loops.recipes.preference import open_dpo
from burnish.loops.recipes.settings import DPO
from burnish.loops.runs.context import RunContext, open_run
from burnish.loops.runs.feed import stored_tokens
from burnish.loops.runs.reference import (
    AveragedReference,
    SyncedReference,
    adapters_copy,
    adapters_off,
    frozen_copy,
)
from datasets import Dataset
from interrupted import resumed
from peft import LoraConfig, get_peft_model
from tiny import make_examples, make_model, save_model, sums, write_rows
from transformers import AutoModelForCausalLM


@pytest.fixture
def batch():
    return collate(make_examples(5))


def test_a_frozen_copy_does_not_follow_the_policy(batch):
    policy = Policy(make_model("llama"))
    reference = frozen_copy(policy)
    before = policy(batch).logprob.detach()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.1)
    assert torch.equal(reference(batch), before)
    assert not torch.allclose(policy(batch).logprob, before)
    assert not reference(batch).requires_grad


def test_adapters_off_is_the_base_model(batch):
    base = Policy(make_model("llama"))(batch).logprob.detach()
    lora = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules="all-linear")
    policy = Policy(get_peft_model(make_model("llama"), lora, autocast_adapter_dtype=False))
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    assert not torch.allclose(policy(batch).logprob, base)
    torch.testing.assert_close(adapters_off(policy)(batch), base, rtol=0, atol=1e-12)
    assert not torch.allclose(policy(batch).logprob, base)


def test_a_reference_without_adapters_has_no_dropout_while_the_policy_trains(batch):
    lora = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    policy = Policy(get_peft_model(make_model("gpt2"), lora)).train()
    assert torch.equal(adapters_off(policy)(batch), adapters_off(policy)(batch))
    assert not torch.equal(policy(batch).logprob, policy(batch).logprob)


def test_a_policy_in_a_wrapper_that_distributes_it_is_copied_as_itself(batch):
    policy = Policy(make_model("llama"))
    wrapper = torch.nn.Module()
    wrapper.module = policy
    assert torch.equal(frozen_copy(wrapper)(batch), policy(batch).logprob)


@pytest.mark.parametrize(
    "fields", [{}, {"init_lora_weights": "pissa"}, {"modules_to_save": ["lm_head"]}], ids=str
)
def test_a_copy_of_the_adapters_is_the_policy_as_it_was_and_trains_nothing_else(batch, fields):
    lora = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "up_proj"], **fields)
    policy = Policy(get_peft_model(make_model("llama", dtype=torch.float32), lora))
    trained = [name for name, parameter in policy.named_parameters() if parameter.requires_grad]

    def change():
        with torch.no_grad():
            for name, parameter in policy.named_parameters():
                if name in trained:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)

    change()
    before = policy(batch).logprob.detach()
    reference = adapters_copy(policy)
    assert torch.equal(policy(batch).logprob, before) and torch.equal(reference(batch), before)
    change()
    assert torch.equal(reference(batch), before) and not torch.allclose(
        policy(batch).logprob, before
    )
    assert [
        name for name, parameter in policy.named_parameters() if parameter.requires_grad
    ] == trained
    if "init_lora_weights" in fields:
        with pytest.raises(
            ValueError, match="init_lora_weights=pissa changed the base model; use auto"
        ):
            adapters_off(policy)


@pytest.mark.parametrize("kind", ["auto", "precompute"])
def test_dropout_of_adapters_that_go_on_is_none_of_the_reference(kind, tmp_path):
    lora = LoraConfig(
        task_type="CAUSAL_LM",
        r=2,
        lora_dropout=0.5,
        init_lora_weights=False,
        target_modules=["up_proj"],
    )
    start, data = save_model(tmp_path / "start"), write_rows(tmp_path / "x.jsonl", sums(8))
    get_peft_model(AutoModelForCausalLM.from_pretrained(start), lora).save_pretrained(
        tmp_path / "adapter"
    )
    lora = Lora(path=str(tmp_path / "adapter"))
    context = open_run(
        DPO(str(start), str(data), str(tmp_path / "run"), lora=lora), encode_preference
    )
    reference, columns = context.reference(kind)
    (batch,) = context.feed(context.data, whole=True, per_token=(columns,))(0)
    assert context.model.model.training
    logprob = reference(batch)
    context.model.eval()
    torch.testing.assert_close(logprob, context.model(batch).logprob.detach(), rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_an_adapter_goes_on_from_where_it_was_with_itself_as_the_reference(tmp_path):
    """DPO from an adapter begins at a margin of 0, and ends the same when it was killed in
    between.
    """
    fields = {
        "model": str(save_model(tmp_path / "start")),
        "data": str(write_rows(tmp_path / "x.jsonl", sums(24))),
    }
    first = tmp_path / "first"
    open_dpo(
        DPO(**fields, output=str(first), steps=3, batch_size=4, learning_rate=1e-2, lora=Lora(r=2))
    ).train()
    fields |= {"lora": {"path": str(first / "adapter")}, "eval_data": fields["data"]}
    (whole, again), (metrics, metrics_again) = resumed(fields, tmp_path / "second", "dpo")
    assert whole == again and metrics == metrics_again
    assert metrics[0]["eval/loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert metrics[-1]["eval/loss"] < math.log(2)
    assert (first / "model" / "model.safetensors").read_bytes() != whole


def dpo_loss(policy, reference, batch):
    margin = [
        torch.zeros(2, dtype=x.dtype).index_add(0, batch.completion[batch.sequence], x * sign)
        for x, sign in ((policy(batch).logprob, 1.0), (reference(batch), -1.0))
    ]
    chosen, rejected = margin[0] + margin[1]
    return -torch.nn.functional.logsigmoid(0.1 * (chosen - rejected))


@pytest.mark.parametrize("alpha", [0.6, 1.0])
def test_a_reference_that_follows_is_the_loop_written_by_hand(alpha):
    """TR-DPO (arXiv:2404.09656): every 2 steps ref <- alpha policy + (1 - alpha) ref."""
    policy, by_hand = (Policy(make_model("llama")) for _ in range(2))
    batches = [collate(make_examples(1, seed=seed)) for seed in range(5)]
    synced, frozen = (
        SyncedReference(policy, interval=2, alpha=alpha),
        copy.deepcopy(by_hand).requires_grad_(False),
    )
    ours, theirs = (torch.optim.SGD(each.parameters(), lr=0.05) for each in (policy, by_hand))
    for step, batch in enumerate(batches, 1):
        dpo_loss(policy, synced, batch).backward()
        dpo_loss(by_hand, lambda batch: frozen(batch).logprob.detach(), batch).backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        synced.observe({})
        if step in (2, 4):
            for reference, trained in zip(frozen.parameters(), by_hand.parameters(), strict=True):
                reference.data = (1 - alpha) * reference.data + alpha * trained.data
        torch.testing.assert_close(synced(batch), frozen(batch).logprob, rtol=0, atol=1e-10)
    start = Policy(make_model("llama"))
    assert not torch.allclose(synced(batches[0]), start(batches[0]).logprob, atol=1e-4)


def walked(policy, steps, observe):
    """The weights of the policy before the first step and after each, moved at random."""
    torch.manual_seed(0)
    path = [{name: each.detach().clone() for name, each in policy.named_parameters()}]
    for step in range(1, steps + 1):
        with torch.no_grad():
            for each in policy.parameters():
                each.add_(torch.randn_like(each), alpha=0.02)
        path.append({name: each.detach().clone() for name, each in policy.named_parameters()})
        observe(step)
    return path


@pytest.mark.parametrize(
    "bema",
    [
        Bema(update_freq=2),
        Bema(update_freq=1, ema_power=0.7, bias_power=0.4, lag=3, multiplier=0.5),
        Bema(update_freq=2, min_ema_multiplier=0.6, update_after=3),
    ],
    ids=["default", "every power", "burn-in"],
)
def test_an_averaged_reference_equals_algorithm_1(bema):
    """BEMA (arXiv:2508.00180): avg + (rho + gamma t)^-eta (policy - start), every 4 steps."""
    policy = Policy(make_model("llama"))
    averaged = AveragedReference(policy, interval=4, bema=bema)
    seen = []

    def observe(step):
        averaged.observe({})
        seen.append({name: each.clone() for name, (each, _) in averaged.pairs.items()})

    path = walked(policy, 12, observe)
    tau, phi = bema.update_after, bema.update_freq
    for name, start in path[0].items():
        average, expected = path[tau][name], start
        for t in range(1, 13):
            if t > tau and (t - tau) % phi == 0:
                age = bema.lag + bema.multiplier * t
                beta = max(age**-bema.ema_power, bema.min_ema_multiplier)
                average = (1 - beta) * average + beta * path[t][name]
                if (t - tau) % 4 == 0:
                    way = path[t][name] - path[tau][name]
                    expected = average + age**-bema.bias_power * way
            torch.testing.assert_close(seen[t - 1][name], expected, rtol=0, atol=1e-14)
    assert not torch.allclose(
        seen[-1]["model.model.norm.weight"], path[0]["model.model.norm.weight"]
    )


def test_an_averaged_reference_equals_the_callback_of_trl():
    trl = pytest.importorskip("trl.experimental.bema_for_ref_model")
    settings = {"ema_power": 0.6, "bias_power": 0.3, "lag": 5, "multiplier": 0.7}
    settings |= {"min_ema_multiplier": 0.4, "update_after": 2}
    policy = Policy(make_model("llama"))
    theirs = copy.deepcopy(policy.model)
    ours = AveragedReference(policy, interval=4, bema=Bema(update_freq=2, **settings))
    callback = trl.BEMACallback(
        update_freq=2,
        **settings,
        update_ref_model=True,
        ref_model_update_freq=4,
        ref_model_update_after=2,
    )
    state = SimpleNamespace(global_step=0, is_world_process_zero=False)
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # of the model that it makes
    try:
        callback.on_train_begin(None, state, None, policy.model)
    finally:
        torch.set_default_dtype(dtype)
    compared = []

    def observe(step):
        ours.observe({})
        state.global_step = step
        callback.on_step_end(None, state, None, policy.model, ref_model=theirs)
        for name, each in theirs.named_parameters():
            torch.testing.assert_close(ours.pairs[f"model.{name}"][0], each, rtol=0, atol=1e-14)
            compared.append(name)

    walked(policy, 11, observe)
    assert compared


def test_an_average_of_a_policy_that_stands_still_is_that_policy(batch):
    policy = Policy(make_model("llama"))
    averaged = AveragedReference(policy, interval=1, bema=Bema(update_freq=1, bias_power=0.0))
    for _ in range(5):
        averaged.observe({})
    torch.testing.assert_close(averaged(batch), policy(batch).logprob, rtol=0, atol=1e-12)


def test_the_correction_takes_the_lag_from_an_average_of_a_straight_path():
    """An average alone lags ever further behind; eta tells how much of the way is given back."""
    behind = {}
    for power in (8.0, 0.2):
        policy = Policy(make_model("llama"))
        bema = Bema(update_freq=1, bias_power=power)
        averaged = AveragedReference(policy, interval=1, bema=bema)
        reference, followed = averaged.pairs["model.model.norm.weight"]
        behind[power] = []
        for _ in range(50):
            with torch.no_grad():
                followed.add_(1.0)
            averaged.observe({})
            behind[power].append((followed - reference).mean().item())
    lags, corrected = behind[8.0], behind[0.2]
    assert all(earlier < later for earlier, later in itertools.pairwise(lags))
    steps = range(1, 51)
    for t, lag, left in zip(steps, lags, corrected, strict=True):
        assert left == pytest.approx(lag - t * ((10 + t) ** -0.2 - (10 + t) ** -8.0))


def test_an_average_of_bfloat16_weights_takes_steps_that_bfloat16_would_lose():
    policy = Policy(make_model("llama", dtype=torch.bfloat16))
    bema = Bema(update_freq=1, ema_power=1.0, multiplier=1e4, bias_power=8.0)
    averaged = AveragedReference(policy, interval=1, bema=bema)
    name = "model.model.norm.weight"
    reference, followed = averaged.pairs[name]
    with torch.no_grad():
        followed.fill_(2.0)
        for _ in range(1000):
            averaged.observe({})
    expected = 1.0
    for t in range(1, 1001):
        expected += (2.0 - expected) / (10 + 1e4 * t)
    assert expected - 1 < 2**-8  # half of a step between bfloat16 numbers at 1
    assert averaged.average[name].dtype == torch.float32
    assert averaged.average[name].mean().item() == pytest.approx(expected, abs=1e-5)
    assert torch.equal(reference, torch.ones_like(reference))


def test_an_averaged_reference_is_part_of_a_checkpoint(tmp_path):
    fields = {
        "model": str(save_model(tmp_path / "start")),
        "data": str(write_rows(tmp_path / "x.jsonl", sums(24))),
        "ref_model_sync_steps": 2,
        "bema": Bema(update_freq=1, lag=2),
        "dtype": "bfloat16",
    }
    (whole, again), (metrics, metrics_again) = resumed(fields, tmp_path, "dpo")
    assert whole == again and metrics == metrics_again
    (mixed, _), _ = resumed({**fields, "bema": Bema()}, tmp_path / "mixed", "dpo")
    assert mixed != whole


def test_weights_of_a_reference_in_a_checkpoint_of_an_older_version_are_refused():
    synced = SyncedReference(Policy(make_model("llama")), interval=1, alpha=1.0)
    with pytest.raises(ValueError, match=r"^resume: burnish 0\.2\.0 kept the weights"):
        synced.load_state_dict({"steps": 1, "weights": []})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_reference_that_follows_is_part_of_a_checkpoint(dtype, tmp_path):
    fields = {
        "model": str(save_model(tmp_path / "start")),
        "data": str(write_rows(tmp_path / "x.jsonl", sums(24))),
    }
    fields |= {
        "ref_model_sync_steps": 2,
        "eval_data": fields["data"],
        "eval_every": 2,
        "dtype": dtype,
    }
    (whole, again), (metrics, metrics_again) = resumed(
        {**fields, "ref_model_mixup_alpha": 1.0}, tmp_path, "dpo"
    )
    assert whole == again and metrics == metrics_again
    for line in metrics:
        if "eval/loss" in line and line["step"] % 2 == 0:  # it is the policy, after its step
            assert line["eval/loss"] == pytest.approx(math.log(2), abs=1e-5)
    (unsynced, _), (still, _) = resumed(
        {**fields, "ref_model_sync_steps": None}, tmp_path / "still", "dpo"
    )
    assert unsynced != whole and still[-1]["eval/loss"] < math.log(2) - 1e-3


@pytest.mark.parametrize("kind", ["auto", "precompute"])
def test_another_model_is_the_reference(kind, tmp_path):
    fields = {
        "model": str(save_model(tmp_path / "start")),
        "data": str(write_rows(tmp_path / "x.jsonl", sums(8))),
    }
    other = save_model(tmp_path / "other", seed=1)
    config = DPO(
        **fields, output=str(tmp_path / "run"), ref_model=str(other), reference=kind, lora=Lora(r=2)
    )
    context = open_run(config, encode_preference)
    reference, columns = context.reference(kind)
    expected = Policy(AutoModelForCausalLM.from_pretrained(other))
    (batch,) = context.feed(context.data, whole=True, per_token=(columns,))(0)
    torch.testing.assert_close(
        reference(batch), expected(batch).logprob.detach(), rtol=0, atol=1e-5
    )
    assert not reference(batch).requires_grad
    assert not torch.allclose(reference(batch), context.model(batch).logprob, atol=0.1)


def test_adapters_off_wants_adapters():
    with pytest.raises(
        ValueError, match="wanted a model wrapped by peft; without adapters use frozen_copy"
    ):
        adapters_off(Policy(make_model("llama")))


def test_precomputed_log_probs_belong_to_their_examples(tmp_path):
    reference, examples = frozen_copy(Policy(make_model("llama"))), make_examples(5)
    feed = SimpleNamespace(
        plan=lambda step: [[3, 0], [], [4, 1, 2]],
        batch=lambda indices: collate([examples[i] for i in indices]),
    )
    compute = lambda batch: {"logprob": reference(batch)}  # noqa: E731
    tensors, metadata = stored_tokens(tmp_path / "cache", feed, compute, Accelerator(), True)
    for example, logprob in zip(examples, tensors["logprob"], strict=True):
        torch.testing.assert_close(logprob, reference(collate([example])), rtol=0, atol=1e-12)
    assert metadata == {}


@pytest.mark.parametrize("resume", [True, False])
def test_a_precomputed_reference_is_computed_once_in_a_run_and_anew_in_another(tmp_path, resume):
    policy, examples = Policy(make_model("llama")), make_examples(5)
    data = Dataset.from_dict(
        {name: [getattr(example, name) for example in examples] for name in Example._fields}
    )
    (tmp_path / "config.yaml").touch()  # compared when the run was opened
    config = DPO(model="", data="", output=str(tmp_path), resume=resume)
    context = RunContext(config, Accelerator(), None, policy, data)
    _, columns = context.reference("precompute")
    computed = columns(data)["ref_logprob"]
    torch.testing.assert_close(
        torch.cat(list(computed)), policy(collate(examples)).logprob.detach()
    )
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.1)
    assert resume == all(
        torch.equal(a, b) for a, b in zip(computed, columns(data)["ref_logprob"], strict=True)
    )


def test_log_probs_of_a_run_that_was_never_begun_are_not_those_of_the_next(tmp_path):
    first, second = (str(save_model(tmp_path / f"{seed}", seed=seed)) for seed in (1, 2))
    settings = {"data": sums(4), "output": str(tmp_path / "run"), "batch_size": 4, "steps": 1}
    open_dpo(DPO(first, reference="precompute", **settings))
    resumed = {**settings, "resume": True}  # nothing says which settings left the file
    assert open_dpo(DPO(second, reference="precompute", **resumed)).train()[
        "loss"
    ] == pytest.approx(math.log(2))
