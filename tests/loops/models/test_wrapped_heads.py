"""The fused head under peft's wrappers, tied, quantized, checkpointed: numbers and gradients of the
plain model.
"""

import copy
import logging
import pickle

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from burnish.kernels import LogitTransform, linear_logprob, passes
from burnish.loops.batch import collate
from burnish.loops.models import lm_head as heads
from burnish.loops.models.lm_head import operands
from burnish.loops.models.policy import Policy
from burnish.loops.runs.reference import adapters_off
from peft import AdaLoraConfig, IA3Config, LoraConfig, get_peft_model
from tiny import in_full_precision
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast
from wrapped import (
    EXAMPLES,
    TILES,
    VOCABULARY,
    gradients,
    largest_tensor,
    make_model,
    plain_run,
    randomized,
    run,
    upstream,
)

EXACT = 1e-10
TOKENS = sum(sum(map(sum, example.trained)) for example in EXAMPLES)
KERNEL = "linear_logprob"


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    for name, size in TILES.items():
        monkeypatch.setattr(passes, name, size)


@pytest.fixture(autouse=True)
def warn_again():
    heads._warn.cache_clear()


def lora(target_modules=("q_proj", "lm_head"), **options):
    return LoraConfig(task_type="CAUSAL_LM", r=3, target_modules=list(target_modules), **options)


def wrapped(config, model=None, **changes):
    return randomized(
        get_peft_model(model or make_model(**changes), config, autocast_adapter_dtype=False)
    )


def policy_of(model):
    return Policy(model, layout="padded")


def hidden(policy):
    return policy.hidden(policy.arranged(EXAMPLES, "padded"))


def assert_like_plain(model, policy=None, *, tolerance=EXACT, fused=True):
    """Log-prob, entropy and every gradient; without anything as large as the logits if it is
    fused.
    """
    model.zero_grad()
    expected = (
        plain_run(model, EXAMPLES),
        {name: gradient.clone() for name, gradient in gradients(model).items()},
    )
    policy = policy or policy_of(model)
    assert policy.fused == fused
    model.zero_grad()
    outputs, largest = largest_tensor(run, policy, EXAMPLES)
    torch.testing.assert_close(outputs, expected[0], rtol=0, atol=tolerance)
    for name, gradient in gradients(model).items():
        assert expected[1][name].any(), name
        torch.testing.assert_close(
            gradient, expected[1][name], rtol=tolerance, atol=tolerance, msg=name
        )
    full = TOKENS * VOCABULARY * outputs.element_size()
    assert largest < 0.8 * full if fused else largest >= full
    return policy


@pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed but the targeted layer")
@pytest.mark.parametrize(
    "config",
    [
        lora(),
        lora(use_rslora=True, lora_alpha=5),
        lora(lora_bias=True),
        lora(["q_proj"], modules_to_save=["lm_head"]),
        lora(["q_proj"]),
    ],
    ids=[
        "on the head",
        "scaled by the root of its rank",
        "with a bias",
        "a whole head to save",
        "not on the head",
    ],
)
def test_adapters_train_as_without_us(config):
    model = wrapped(config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name and name.endswith("bias"):
            torch.nn.init.normal_(parameter)
        parameter.requires_grad_(parameter.requires_grad and "original_module" not in name)
    assert_like_plain(model)


@pytest.mark.filterwarnings(
    "ignore:Model has `tie_word_embeddings=True` and a tied layer is part of the adapter"
)
def test_tied_embeddings_under_an_adapter_on_the_head():
    model = make_model(tied=True)
    embedding = model.model.embed_tokens.weight
    policy = assert_like_plain(wrapped(lora(), model))
    assert policy.head.base_layer.weight is embedding


def test_the_gradient_of_a_tied_weight_is_the_sum_of_both_ways():
    model = make_model(tied=True)
    policy = assert_like_plain(model)
    assert policy.head.weight is model.model.embed_tokens.weight
    both = model.model.embed_tokens.weight.grad.clone()
    model.zero_grad()
    hidden = policy.hidden(policy.arranged(EXAMPLES, "padded")).detach().requires_grad_()
    answer = policy.head(hidden, target=collate(EXAMPLES).target)
    (torch.stack((answer.logprob, answer.entropy)) * upstream(EXAMPLES)).sum().backward()
    alone = model.model.embed_tokens.weight.grad
    assert (both - alone).norm() > 1e-3 * both.norm()


def test_the_reference_is_the_model_with_its_adapters_disabled():
    plain = plain_run(make_model(), EXAMPLES)[0]
    batch = collate(EXAMPLES)
    for config in (lora(), lora(["q_proj"], modules_to_save=["lm_head"])):
        model = wrapped(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "modules_to_save" in name:
                    parameter.mul_(1.5)
        policy = policy_of(model)
        torch.testing.assert_close(adapters_off(policy)(batch), plain, rtol=0, atol=EXACT)
        assert not torch.allclose(policy(batch).logprob, plain, atol=1e-3)


def test_disabling_adapters_that_were_merged_takes_them_out_again():
    model = wrapped(lora())
    policy = policy_of(model)
    batch, plain = collate(EXAMPLES), plain_run(make_model(), EXAMPLES)[0]
    policy.requires_grad_(False)
    before = policy(batch).logprob
    model.merge_adapter()
    torch.testing.assert_close(policy(batch).logprob, before, rtol=0, atol=EXACT)
    torch.testing.assert_close(adapters_off(policy)(batch), plain, rtol=0, atol=EXACT)


def test_another_adapter_that_is_made_active_is_followed():
    model = wrapped(lora())
    policy = assert_like_plain(model)
    model.add_adapter("other", lora(lora_alpha=20))
    model.add_adapter("elsewhere", lora(["q_proj"]))
    randomized(model)
    for names in (["default", "other"], ["other", "elsewhere"], "elsewhere"):
        model.base_model.set_adapter(names)
        assert_like_plain(model, policy)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            lora(use_dora=True),
            "output head carries an adapter other than plain LoRA without dropout",
        ),
        (
            lora(lora_dropout=0.1),
            "output head carries an adapter other than plain LoRA without dropout",
        ),
        (
            AdaLoraConfig(task_type="CAUSAL_LM", target_modules=["lm_head"], total_step=10),
            "output head is SVDLinear",
        ),
        (
            IA3Config(task_type="CAUSAL_LM", target_modules=["lm_head"], feedforward_modules=[]),
            "output head is Linear",
        ),
        (
            lora(["q_proj"], trainable_token_indices={"lm_head": [3, 5]}),
            "output head is TrainableTokens",
        ),
    ],
    ids=["dora", "dropout", "adalora", "ia3", "trainable tokens"],
)
def test_adapters_that_are_no_low_rank_sum_fall_back_loudly_and_are_right(config, reason, caplog):
    model = wrapped(config).eval()
    for name, parameter in model.named_parameters():
        if "lora_E" in name:
            torch.nn.init.normal_(parameter)
    with caplog.at_level(logging.WARNING):
        assert_like_plain(model, fused=False)
    assert caplog.text.count(f"log-probs are taken from full logits: {reason}") == 1


def test_an_adapter_that_cannot_be_fused_may_come_later(caplog):
    model = wrapped(lora())
    policy = assert_like_plain(model)
    model.add_adapter("other", lora(use_dora=True))
    model.set_adapter("other")
    randomized(model)
    with caplog.at_level(logging.WARNING):
        model.zero_grad()
        expected = (
            plain_run(model, EXAMPLES),
            {name: gradient.clone() for name, gradient in gradients(model).items()},
        )
        for _ in range(2):
            model.zero_grad()
            torch.testing.assert_close(run(policy, EXAMPLES), expected[0], rtol=0, atol=EXACT)
            torch.testing.assert_close(gradients(model), expected[1], rtol=EXACT, atol=EXACT)
    assert caplog.text.count("log-probs are taken from full logits") == 1
    teacher_outputs = policy_of(make_model(hidden_size=16, head_dim=4)).teacher_outputs(
        collate(EXAMPLES), beta=0.3, temperature=0.8
    )
    later = policy(collate(EXAMPLES), teacher=teacher_outputs).divergence
    assert torch.isfinite(later).all() and (later > 0).all()
    model.set_adapter("default")
    assert_like_plain(model, policy)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_changes_no_gradient(reentrant, monkeypatch):
    calls = []
    compute = heads.linear_logprob
    monkeypatch.setattr(
        heads, KERNEL, lambda *args, **how: calls.append(1) or compute(*args, **how)
    )
    model = make_model().train()
    policy = assert_like_plain(model)
    calls.clear()
    # transformers renames it in 5.2x and warns about the old name.
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)(
        {"use_reentrant": reentrant}
    )
    model.enable_input_require_grads()
    assert_like_plain(model, policy)
    assert len(calls) == 1  # layers are checkpointed, the head is not
    head, states, target = (
        policy.head,
        hidden(policy).detach().requires_grad_(),
        collate(EXAMPLES).target,
    )
    found = []
    for checkpointed in (False, True):
        model.zero_grad()
        states.grad = None
        calls.clear()
        logprob = (
            torch.utils.checkpoint.checkpoint(
                lambda states: head(states, target=target).logprob, states, use_reentrant=reentrant
            )
            if checkpointed
            else head(states, target=target).logprob
        )
        logprob.sum().backward()
        assert len(calls) == 1 + checkpointed
        found.append([logprob.detach(), states.grad, head.weight.grad])
    for plain, recomputed in zip(*found, strict=True):
        assert torch.equal(plain, recomputed)


@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_a_four_bit_head_is_dequantized_and_fused(adapter, nested, tmp_path):
    pytest.importorskip("bitsandbytes", reason="the extra 'quant' is not installed")
    make_model(dtype=torch.float32, hidden_size=64, head_dim=16).save_pretrained(tmp_path)
    four_bit = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.float32,
        bnb_4bit_use_double_quant=nested,
        llm_int8_skip_modules=["embed_tokens"],
    )
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=four_bit, dtype=torch.float32
    )
    assert type(model.lm_head).__name__ == "Linear4bit"
    model = wrapped(lora() if adapter else lora(["q_proj"]), model)
    assert_like_plain(model, tolerance=2e-4)


def test_an_eight_bit_head_falls_back_loudly_and_is_right(tmp_path, caplog):
    pytest.importorskip("bitsandbytes", reason="the extra 'quant' is not installed")
    make_model(dtype=torch.float32, hidden_size=64, head_dim=16).save_pretrained(tmp_path)
    eight_bit = BitsAndBytesConfig(
        load_in_8bit=True, llm_int8_skip_modules=["embed_tokens", "model"]
    )
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=eight_bit, dtype=torch.float32
    )
    assert type(model.lm_head).__name__ == "Linear8bitLt"
    with caplog.at_level(logging.WARNING):
        policy = policy_of(model)
    assert not policy.fused
    assert "full logits: output head is Linear8bitLt" in caplog.text
    torch.testing.assert_close(run(policy, EXAMPLES), plain_run(model, EXAMPLES), rtol=0, atol=0.2)


@pytest.mark.parametrize("adapter", [False, True])
def test_a_fused_head_compiles_in_one_graph_for_any_number_of_tokens(adapter):
    torch.compiler.reset()
    policy = policy_of(wrapped(lora()) if adapter else make_model())
    compiled = torch.compile(policy.head, fullgraph=True, dynamic=True, backend="aot_eager")
    trained = [parameter for parameter in policy.head.parameters() if parameter.requires_grad]
    for tokens, stance in ((7, "default"), (64, "fail_on_recompile"), (100, "fail_on_recompile")):
        states = torch.randn(tokens, 32, dtype=torch.float64, requires_grad=True)
        target = torch.randint(VOCABULARY, (tokens,))
        found = []
        for head in (compiled, policy.head):
            with torch.compiler.set_stance(stance):
                answer = head(states, target=target)
            total = (answer.logprob + 0.3 * answer.entropy).sum()
            found.append(
                [answer.logprob, answer.entropy, *torch.autograd.grad(total, [states, *trained])]
            )
        for ours, eager in zip(*found, strict=True):
            assert torch.equal(ours, eager)


@pytest.mark.parametrize("adapter", [False, True])
def test_autocast_rounds_factors_and_not_the_log_probs(adapter):
    model = make_model(dtype=torch.float32)
    policy = policy_of(wrapped(lora(), model) if adapter else model)
    states, target = hidden(policy).detach(), collate(EXAMPLES).target
    with torch.autocast("cpu", torch.bfloat16):
        cast = policy.head(states, target=target)
    head = operands(policy.head, policy.transform)
    plain = head._replace(scale=1.0, softcap=None)
    expected = linear_logprob(states, plain, target, compute_dtype=torch.bfloat16)
    for ours, theirs in zip(cast[:3], expected[:3], strict=True):
        assert ours.dtype == torch.float32 and torch.equal(ours, theirs)
    assert not torch.equal(cast.logprob, policy.head(states, target=target).logprob)


@pytest.mark.parametrize("adapter", [False, True])
def test_a_fused_model_generates_is_saved_and_loaded_as_before(adapter, tmp_path):
    model = wrapped(lora()) if adapter else make_model(tied=True)
    prompt = torch.tensor([[3, 4, 5]])
    expected = model.generate(input_ids=prompt, max_new_tokens=8, do_sample=False)
    names = list(model.state_dict())
    policy = policy_of(model)
    assert torch.equal(
        model.generate(input_ids=prompt, max_new_tokens=8, do_sample=False), expected
    )
    assert list(model.state_dict()) == names
    copies = [pickle.loads(pickle.dumps(policy)), copy.deepcopy(policy)]
    if not adapter:
        model.save_pretrained(tmp_path)
        loaded = in_full_precision(
            AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
        )
        copies.append(policy_of(loaded))
    batch, before = collate(EXAMPLES), policy(collate(EXAMPLES)).logprob
    with torch.no_grad():  # what a copy shares with the original shows now
        for parameter in model.parameters():
            parameter.add_(0.1)
    for each in copies:
        torch.testing.assert_close(each(batch).logprob, before, rtol=0, atol=EXACT)
        if not adapter:
            assert each.head.weight is each.plain.get_input_embeddings().weight


def test_hooks_that_replaced_the_forward_of_a_head_still_run(caplog):
    class Doubled(ModelHook):
        def post_forward(self, module, output):
            return 2 * output

    model = make_model()
    add_hook_to_module(model.lm_head, ModelHook())
    policy = assert_like_plain(model)
    # fused twice, wrapped once
    assert policy_of(model).head.forward.args[3] is policy.head.forward.args[3]
    ids = torch.tensor([[3, 4, 5]])
    once = model(ids).logits
    remove_hook_from_module(model.lm_head)
    del model.lm_head.forward
    add_hook_to_module(model.lm_head, Doubled())
    policy = policy_of(model)
    torch.testing.assert_close(model(ids).logits, 2 * once)
    assert not policy.fused
    assert "its logits are not a known function of its last hidden state" in caplog.text
    assert_like_plain(model, policy, fused=False)


def test_a_head_that_reads_another_width_than_the_hidden_states_is_not_fused(caplog):
    class Narrow(LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            self.transform = torch.nn.Linear(config.hidden_size, 8)
            self.lm_head = torch.nn.Linear(8, config.vocab_size)

        def forward(self, *arguments, logits_to_keep=0, **named):
            hidden = self.model(*arguments, **named).last_hidden_state
            return CausalLMOutputWithPast(logits=self.lm_head(self.transform(hidden)))

    assert_like_plain(Narrow(make_model().config).double(), fused=False)
    assert "its head reads something else than its last hidden state" in caplog.text


def test_a_head_of_another_forward_is_not_believed():
    class Noisy(torch.nn.Linear):
        def forward(self, hidden):
            logits = super().forward(hidden)
            return logits + torch.randn_like(logits) if self.training else logits

    with pytest.raises(heads.CannotFuse, match="output head is Noisy"):
        heads.fuse(Noisy(3, 5), LogitTransform(), "auto")
