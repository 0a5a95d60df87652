"""Models in and out: what was trained is what transformers loads."""

import logging
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from burnish.loops import quiet
from burnish.loops.batch import collate
from burnish.loops.config import Common, Lora
from burnish.loops.models.activations import sequence_lengths
from burnish.loops.models.io import (
    load_classifier,
    load_model,
    load_tokenizer,
    named_weights,
    save_model,
)
from burnish.loops.models.policy import Policy
from burnish.loops.models.scorer import Scorer
from burnish.loops.train.optimizers import make_optimizer
from peft import PeftConfig, PeftModel
from safetensors.torch import load_file
from tiny import FAMILIES, make_examples, make_model
from tiny import save_model as save_tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    DeepseekV3Config,
    Gemma3Config,
    modeling_utils,
)


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("start"))


def config(start, **fields):
    return Common(model=str(start), data="", output="", **fields)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"lora": Lora(r=3)},
        {"lora": Lora(r=3, target_modules=["q_proj", "lm_head"])},
        {"dtype": "float64", "lora": Lora(r=3)},
    ],
    ids=["whole", "adapters", "adapters on the head", "float64"],
)
def test_a_saved_model_gives_the_log_probs_of_the_trained_one(start, tmp_path, fields):
    policy = Policy(load_model(config(start, **fields)))
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    batch = collate(make_examples(4))
    trained = policy(batch).logprob.detach()
    start_model = Policy(AutoModelForCausalLM.from_pretrained(start))
    assert not torch.allclose(trained.float(), start_model(batch).logprob, atol=1e-3)
    save_model(policy, load_tokenizer(config(start)), tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=trained.dtype)
    torch.testing.assert_close(Policy(loaded)(batch).logprob, trained, rtol=0, atol=1e-5)
    torch.testing.assert_close(policy(batch).logprob, trained, rtol=0, atol=0)
    assert AutoTokenizer.from_pretrained(tmp_path / "model").chat_template
    assert (tmp_path / "adapter").exists() == ("lora" in fields)


def test_a_saved_tokenizer_says_nothing_of_how_it_was_found(start, tmp_path, monkeypatch):
    # a command of another test, whose model was missing, may have turned it on for this process
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    policy = Policy(load_model(config(start)))
    written = []
    for offline in (False, True):
        tokenizer = AutoTokenizer.from_pretrained(start, local_files_only=offline)
        target = tmp_path / str(offline)
        save_model(policy, tokenizer, target)
        written.append((target / "model/tokenizer_config.json").read_bytes())
        assert tokenizer.init_kwargs["local_files_only"] is offline
    assert written[0] == written[1]


VARIANTS = {
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "dora on the head": {"use_dora": True, "target_modules": ["q_proj", "lm_head"]},
    "modules to save": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "pissa": {"init_lora_weights": "pissa"},
    "olora": {"init_lora_weights": "olora"},
    "gaussian with ranks": {
        "init_lora_weights": "gaussian",
        "kwargs": {"rank_pattern": {"q_proj": 5}, "bias": "all"},
    },
    "a parameter": {"target_parameters": ["mlp.up_proj.weight"], "target_modules": ["q_proj"]},
    "new tokens": {"kwargs": {"trainable_token_indices": [3, 7]}},
}


@pytest.mark.filterwarnings("ignore")  # peft, of variants
@pytest.mark.parametrize("variant", VARIANTS)
def test_merged_adapters_of_each_kind_are_the_trained_model_and_alone_load_again(
    variant, start, tmp_path, caplog
):
    fields = {"r": 3, **VARIANTS[variant]}
    policy = Policy(load_model(config(start, lora=Lora(**fields))))
    trainable = [name for name, parameter in policy.named_parameters() if parameter.requires_grad]
    batch = collate(make_examples(4))
    untrained = Policy(AutoModelForCausalLM.from_pretrained(start))(batch).logprob.detach()
    torch.testing.assert_close(policy(batch).logprob.detach(), untrained, rtol=0, atol=1e-5)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    trained = policy(batch).logprob.detach()
    assert not torch.allclose(trained, untrained, atol=1e-2)
    save_model(policy, load_tokenizer(config(start)), tmp_path)
    loaded = Policy(AutoModelForCausalLM.from_pretrained(tmp_path / "model"))
    torch.testing.assert_close(loaded(batch).logprob, trained, rtol=0, atol=1e-5)
    torch.testing.assert_close(policy(batch).logprob, trained, rtol=0, atol=0)
    if variant == "dora on the head":
        assert (
            not policy.fused
            and "full logits: output head carries an adapter other than plain LoRA" in caplog.text
        )
    else:
        assert policy.fused
    again = Policy(load_model(config(start, lora=Lora(path=str(tmp_path / "adapter")))))
    torch.testing.assert_close(again(batch).logprob, trained, rtol=0, atol=1e-5)
    trains = [
        sorted(n for n, p in each.named_parameters() if p.requires_grad) for each in (policy, again)
    ]
    assert trains[0] == trains[1] == sorted(trainable)


def test_rslora_scales_by_the_root_of_the_rank(start):
    model = load_model(config(start, lora=Lora(r=4, alpha=8, use_rslora=True)))
    assert model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj").scaling == {
        "default": 4.0
    }


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"r": 2, "kwargs": {"rank_patern": {}}},
            "lora.kwargs: no setting 'rank_patern', did you mean 'rank_pattern'",
        ),
        ({"r": 2, "kwargs": {"r": 4}}, "lora.kwargs: r is a field of lora"),
        (
            {"r": 2, "kwargs": {"lora_bias": True}},
            "lora.kwargs: lora_bias can't be merged into a plain model",
        ),
        ({"r": 2, "path": "x"}, "lora.r: the adapter in x has its own rank"),
        ({"path": "x"}, "lora.path: x holds no adapter_config.json"),
        (
            {"r": 2, "init_lora_weights": "pizza"},
            "lora: Unknown initialization init_lora_weights='pizza'",
        ),
    ],
)
def test_mistakes_about_adapters_are_one_line(start, fields, message):
    with pytest.raises(ValueError) as raised:
        load_model(config(start, lora=Lora(**fields)))
    assert message in str(raised.value)


def test_an_adapter_names_its_base_model_by_a_path_that_other_directories_know(
    start, tmp_path, monkeypatch
):
    monkeypatch.chdir(start.parent)
    policy = Policy(load_model(config(start.name, lora=Lora(r=2))))
    save_model(policy, load_tokenizer(config(start.name)), tmp_path)
    monkeypatch.chdir(tmp_path)
    base = AutoModelForCausalLM.from_pretrained(
        PeftConfig.from_pretrained("adapter").base_model_name_or_path
    )
    assert PeftModel.from_pretrained(base, "adapter").peft_config["default"].r == 2


def test_a_policy_with_a_head_of_random_weights_is_refused(start, tmp_path):
    load_classifier(config(start), "SEQ_CLS", {0: "reward"}).save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"model: .*: lm_head.weight is in none of its files, and would be random"
    ):
        load_model(config(tmp_path))
    with pytest.raises(
        ValueError,
        match="policy: wanted a causal language model, got LlamaForSequenceClassification",
    ):
        Policy(load_classifier(config(tmp_path), "SEQ_CLS", {0: "reward"}))


@pytest.mark.parametrize("kind", ["load_in_4bit", "load_in_8bit"])
def test_files_that_are_quantized_are_loaded_so_and_want_adapters(kind, start, tmp_path):
    quantization = BitsAndBytesConfig(**{kind: True})
    quantized = AutoModelForCausalLM.from_pretrained(
        start, dtype=torch.float32, quantization_config=quantization
    )
    quantized.save_pretrained(tmp_path)
    batch = collate(make_examples(4))
    loaded = Policy(load_model(config(tmp_path, lora=Lora(r=2)))).eval()
    torch.testing.assert_close(loaded(batch).logprob, Policy(quantized)(batch).logprob)
    with pytest.raises(
        ValueError, match="quantize: quantized weights can't be trained; add adapters"
    ):
        load_model(config(tmp_path))


def test_a_directory_of_an_adapter_says_how_to_go_on_from_it(start, tmp_path):
    load_model(config(start, lora=Lora(r=2))).save_pretrained(tmp_path)
    with pytest.raises(
        ValueError,
        match=f"holds an adapter of {start}; pass --model {start} --lora.path {tmp_path}",
    ):
        load_tokenizer(config(tmp_path))


def test_adapters_alone_are_trained(start):
    model = load_model(config(start, lora=Lora(r=2)))
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {
        name for name, _ in model.named_parameters() if "lora_" in name
    }


@pytest.mark.parametrize("lora", [Lora(), Lora(r=2)], ids=["whole", "adapters"])
def test_text_trains_no_encoder_of_images(lora):
    """Each weight that trains gets a gradient: DDP waits for all of them."""
    seen = dict(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=28,
    )
    text = {**FAMILIES["gemma3"].to_dict(), "model_type": "gemma3_text"}
    both = Gemma3Config(
        text_config=text, vision_config={**seen, "patch_size": 14}, mm_tokens_per_image=4
    )
    model = load_model(replace(config(""), model=AutoModelForCausalLM.from_config(both), lora=lora))
    policy = Policy(model)
    assert sum("vision" in name for name, _ in policy.named_parameters()) > 9
    policy(collate(make_examples(3))).logprob.sum().backward()
    trained = {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    assert (
        trained
        == {name for name, parameter in policy.named_parameters() if parameter.grad is not None}
        != set()
    )


def test_bfloat16_keeps_what_is_trained_in_float32(start):
    whole = load_model(config(start, dtype="bfloat16"))
    assert {parameter.dtype for parameter in whole.parameters()} == {torch.float32}
    half = load_model(config(start, dtype="bfloat16", weights_dtype="bfloat16", lora=Lora(r=2)))
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("load", "wrap", "lora"),
    [
        (load_model, Policy, Lora(r=2)),
        (load_model, Policy, Lora(r=2, modules_to_save=["embed_tokens", "lm_head"])),
        (partial(load_classifier, task="SEQ_CLS", labels={0: "score"}), Scorer, Lora(r=2)),
    ],
    ids=["adapters", "whole modules", "new head"],
)
def test_bfloat16_keeps_what_is_trained_beside_adapters_in_float32(load, wrap, lora, start):
    model = load(config(start, dtype="bfloat16", lora=lora))
    assert {parameter.dtype for parameter in model.parameters() if parameter.requires_grad} == {
        torch.float32
    }
    assert torch.bfloat16 in {
        parameter.dtype for parameter in model.parameters() if not parameter.requires_grad
    }
    assert wrap(model).layout == wrap(load(config(start))).layout  # its probes understand both


def test_settings_of_adapters_are_not_changed_by_peft(start):
    lora = Lora(r=2, modules_to_save=["embed_tokens"])
    load_classifier(config(start, lora=lora), "SEQ_CLS", {0: "score"})
    assert lora.modules_to_save == ["embed_tokens"]


class Products(TorchDispatchMode):
    """Counts products of matrices."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("lora", [Lora(), Lora(r=2)], ids=["whole", "adapters"])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_gradient_checkpointing_changes_no_gradient(start, dtype, lora, monkeypatch):
    with pytest.raises(ValueError, match="offload needs an accelerator"):
        load_model(config(start, gradient_checkpointing="offload"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    unpinned = torch.autograd.graph.save_on_cpu  # there is nothing to pin for on a CPU
    monkeypatch.setattr("transformers.modeling_utils.save_on_cpu", lambda **options: unpinned())
    batch = collate(make_examples(3))
    gradients, products = [], []
    for kept in (False, True, "selective", "offload"):
        torch.manual_seed(0)  # of new adapters
        policy = Policy(
            load_model(config(start, dtype=dtype, gradient_checkpointing=kept, lora=lora))
        )
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            total = policy(batch).logprob.sum()
        with Products() as counted:
            total.backward()
        products.append(counted.count)
        gradients.append(
            [parameter.grad for parameter in policy.parameters() if parameter.requires_grad]
        )
    for recomputed in gradients[1:]:
        for plain, again in zip(gradients[0], recomputed, strict=True):
            assert torch.equal(plain, again)
    assert products[0] <= products[2] < products[1] == products[3]
    if lora.r == 0:
        assert products[0] == products[2]  # selective recomputes none of them


def test_noise_on_embeddings_is_that_of_the_paper_and_only_in_training(start):
    policy = Policy(load_model(config(start, neftune_noise_alpha=5.0)), layout="packed")
    plain = Policy(load_model(config(start)))
    embedded = []
    policy.plain.get_input_embeddings().register_forward_hook(
        lambda module, args, output: embedded.append(output)
    )
    examples = make_examples(4, completions=1)
    batch = collate(examples)
    lengths = sequence_lengths(policy.arranged(examples, "packed").position_ids).flatten()
    assert sorted(set(lengths.tolist())) == sorted(
        {len(e.prompt) + len(e.completions[0]) - 1 for e in examples} | {1}
    )
    torch.manual_seed(0)
    noisy = policy(batch).logprob
    torch.manual_seed(0)
    assert torch.equal(policy(batch).logprob, noisy) and not torch.equal(
        policy(batch).logprob, noisy
    )
    exact = plain(batch).logprob
    assert not torch.allclose(noisy, exact, atol=1e-3)
    ids = policy.arranged(examples, "packed").input_ids
    noise = torch.stack(
        [each.detach() - plain.plain.get_input_embeddings()(ids) for each in embedded[-3:]]
    )
    scaled = noise.flatten(1, 2) * ((lengths * noise.shape[-1]).sqrt() / 5.0)[:, None]
    assert scaled.detach().abs().max() <= 1 + 1e-4 and float(
        scaled.detach().var()
    ) == pytest.approx(1 / 3, abs=0.03)
    with torch.no_grad():  # as references and samples are computed
        assert torch.equal(policy(batch).logprob, exact)
    policy.eval()
    assert torch.equal(policy(batch).logprob, exact)


def test_bitsandbytes_tells_of_slow_4_bit_products_where_one_quantizes(start, caplog):
    pytest.importorskip("bitsandbytes", reason="the extra 'quant' is not installed")
    quiet.hold_back()
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    logger.warning("Failed to load CPU gemm_4bit_forward from kernels-community: %s", "why")
    logger.warning("another line")
    load_model(config(start, quantize="8bit", lora=Lora(r=2)))
    assert caplog.messages == ["another line"]
    load_model(config(start, quantize="4bit", lora=Lora(r=2)))
    assert "Failed to load CPU gemm_4bit_forward from kernels-community: why" in caplog.messages


def test_a_program_that_imports_burnish_does_not_read_of_4_bit_products():
    program = """
import logging
import burnish.loops
logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
logger.warning("Failed to load CPU gemm_4bit_forward from kernels-community")
logger.warning("another line")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stderr == "another line\n"


@pytest.mark.filterwarnings("ignore")  # of bitsandbytes, about the CPU
@pytest.mark.parametrize(
    ("nested", "targets"),
    [(False, "all-linear"), (True, "all-linear"), (False, ["q_proj", "up_proj"])],
)
def test_a_four_bit_model_trains_its_adapters_and_is_saved(nested, targets, start, tmp_path):
    pytest.importorskip("bitsandbytes", reason="the extra 'quant' is not installed")
    kwargs = {"bnb_4bit_use_double_quant": nested}
    lora = Lora(r=2, use_dora=nested, target_modules=targets)
    policy = Policy(load_model(config(start, quantize="4bit", quantize_kwargs=kwargs, lora=lora)))
    batch = collate(make_examples(2))
    policy(batch).logprob.sum().backward()
    trained = [p for p in policy.parameters() if p.requires_grad]
    assert trained and all(p.grad is not None for p in trained)
    layer = policy.plain.model.layers[0].mlp.up_proj.base_layer
    assert layer.weight.quant_state.nested == nested and layer.weight.quant_type == "nf4"
    with torch.no_grad():
        for parameter in trained:
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    expected = policy(batch).logprob.detach()
    save_model(policy, load_tokenizer(config(start)), tmp_path)
    loaded = Policy(AutoModelForCausalLM.from_pretrained(tmp_path / "model"))
    torch.testing.assert_close(loaded(batch).logprob, expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("lora", [Lora(), Lora(r=2)])
def test_a_tied_weight_is_converted_once_to_be_saved(lora, tmp_path):
    start = save_tiny_model(tmp_path / "start", dtype=torch.bfloat16, tie_word_embeddings=True)
    policy = Policy(load_model(config(start, lora=lora)))
    assert policy.plain.dtype == torch.float32
    tied, once = (dict(named_weights(policy, torch.bfloat16, tied=tied)) for tied in (True, False))
    assert tied.keys() - once.keys() == {"lm_head.weight"} and once.keys() < tied.keys()
    save_model(policy, load_tokenizer(config(start)), tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert loaded.state_dict().keys() == tied.keys()
    assert all(torch.equal(value, tied[name]) for name, value in loaded.state_dict().items())


@pytest.mark.filterwarnings("ignore")
def test_qlora_takes_less_than_a_byte_per_parameter(tmp_path):
    """Weights, gradients and the optimizer's state, counted from the tensors."""
    pytest.importorskip("bitsandbytes", reason="the extra 'quant' is not installed")
    make_model(
        dtype=torch.float32, hidden_size=512, head_dim=128, intermediate_size=1408
    ).save_pretrained(tmp_path)
    settings = config(
        tmp_path,
        quantize="4bit",
        quantize_kwargs={"bnb_4bit_use_double_quant": True},
        lora=Lora(r=8),
        dtype="bfloat16",
        weights_dtype="bfloat16",
        optimizer="adamw_8bit",
    )
    policy = Policy(load_model(settings))
    policy(collate(make_examples(2))).logprob.sum().backward()
    optimizer = make_optimizer(settings, policy)
    optimizer.step()
    tensors = [
        *policy.parameters(),
        *policy.buffers(),
        *(p.grad for p in policy.parameters() if p.grad is not None),
    ]
    tensors += [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    for parameter in policy.parameters():
        if state := getattr(parameter, "quant_state", None):
            tensors += [
                state.absmax,
                state.code,
                state.state2.absmax,
                state.state2.code,
                state.offset,
            ]
    stored = {each.data_ptr(): each.numel() * each.element_size() for each in tensors}
    whole = AutoModelForCausalLM.from_pretrained(tmp_path).num_parameters()
    assert 0.5 < sum(stored.values()) / whole < 1.0


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has it")
def test_flex_attention_is_refused_on_a_cpu_before_anything_is_loaded():
    with pytest.raises(ValueError, match="attention: FlexAttention has no backward pass on a CPU"):
        load_model(config("nowhere", attention="flex_attention"))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"dtype": "bfloat16"}, torch.bfloat16),
        ({"dtype": "bfloat16", "lora": Lora(r=2)}, torch.bfloat16),
        ({"dtype": "float32"}, torch.bfloat16),
        ({"dtype": "float64"}, torch.float64),
    ],
)
def test_a_model_is_saved_in_the_dtype_that_it_was_loaded_from(fields, expected, tmp_path):
    start = save_tiny_model(tmp_path / "start", dtype=torch.bfloat16)
    policy = Policy(load_model(config(start, **fields)))
    trained = next(parameter for parameter in policy.parameters() if parameter.requires_grad).dtype
    assert trained == (torch.float64 if expected is torch.float64 else torch.float32)
    save_model(policy, load_tokenizer(config(start)), tmp_path)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    assert {weight.dtype for weight in saved.parameters()} == {saved.dtype} == {expected}
    before = AutoModelForCausalLM.from_pretrained(start, dtype="auto").state_dict()
    for name, weight in saved.state_dict().items():
        # an untrained adapter adds nothing
        assert torch.equal(weight, before[name].to(expected)), name


def test_a_model_that_is_half_replaced_can_not_be_loaded(tmp_path, monkeypatch):
    policy = Policy(load_model(config(save_tiny_model(tmp_path / "start"))))
    tokenizer, usual, files = (
        load_tokenizer(config(tmp_path / "start")),
        modeling_utils.safe_save_file,
        [],
    )
    monkeypatch.setattr("burnish.loops.models.io._FILE", "100KB")
    save_model(policy, tokenizer, tmp_path / "run")

    def save_one(*arguments, **options):
        if files:
            raise OSError("No space left on device")
        files.append(usual(*arguments, **options))

    monkeypatch.setattr(modeling_utils, "safe_save_file", save_one)
    policy.plain.model.embed_tokens.weight.data.mul_(2)
    with pytest.raises(OSError, match="No space left"):
        save_model(policy, tokenizer, tmp_path / "run")
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "run/model")


def test_a_large_model_is_saved_in_several_files_with_its_generation_settings(
    tmp_path, monkeypatch
):
    start = save_tiny_model(tmp_path / "start")
    for fields in ({}, {"lora": Lora(r=2)}):
        policy = Policy(load_model(config(start, **fields)))
        policy.plain.generation_config.eos_token_id = [1, 7]
        monkeypatch.setattr("burnish.loops.models.io._FILE", "100KB")
        save_model(policy, load_tokenizer(config(start)), tmp_path / "run")
        assert len(list((tmp_path / "run/model").glob("*.safetensors"))) > 1
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / "run/model")
        assert saved.generation_config.eos_token_id == [1, 7]
        for name, weight in AutoModelForCausalLM.from_pretrained(start).state_dict().items():
            assert torch.equal(saved.state_dict()[name], weight), name


def routed(dtype):
    """A mixture of experts whose routers have a bias that no gradient reaches, in float32."""
    sizes = dict(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=2,
    )
    heads = dict(
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=8,
    )
    heads |= dict(qk_nope_head_dim=8, v_head_dim=8)
    experts = dict(
        n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=1
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        DeepseekV3Config(**sizes, **heads, **experts), dtype=dtype
    )
    for name, buffer in model.named_buffers():
        if "correction" in name:
            buffer.data = torch.rand(buffer.shape)
    return model


ADAPTERS, WHOLE = {"lora": Lora(r=2)}, {"weights_dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("make", "fields", "dtype"),
    [
        (make_model, ADAPTERS, "bfloat16"),
        (make_model, WHOLE, "bfloat16"),
        (routed, WHOLE, "bfloat16"),
        (make_model, ADAPTERS, "float16"),
    ],
    ids=["adapters", "whole", "routed", "adapters, float16"],
)
def test_a_model_in_memory_has_the_precision_of_one_that_is_loaded(make, fields, dtype, tmp_path):
    make(dtype=torch.float32).save_pretrained(tmp_path)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=getattr(torch, dtype))
    settings = Common(model=make(dtype=torch.float32), data="", output="", dtype=dtype, **fields)
    model = load_model(settings)
    model = model.get_base_model() if "lora" in fields else model
    tensors = {name.replace("base_layer.", ""): tensor for name, tensor in model.named_parameters()}
    tensors |= dict(model.named_buffers())
    for name, tensor in [*expected.named_parameters(), *expected.named_buffers()]:
        assert tensors[name].dtype == tensor.dtype, name
        assert torch.equal(tensors[name], tensor), name


def test_a_frozen_weight_that_float16_can_not_hold_is_named():
    model = make_model(dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight[3, 2] = 1e5
    settings = Common(model=model, data="", output="", dtype="float16", **ADAPTERS)
    with pytest.raises(
        ValueError, match=r"^dtype: lm_head\.weight of the model has numbers beyond 65504"
    ):
        load_model(settings)


def test_a_saved_model_keeps_in_float32_what_transformers_does(start, tmp_path):
    routed(torch.bfloat16).save_pretrained(tmp_path / "start")
    settings = Common(model=str(tmp_path / "start"), data="", output="")
    save_model(Policy(load_model(settings)), load_tokenizer(config(start)), tmp_path)
    before, after = (
        load_file(tmp_path / each / "model.safetensors") for each in ("start", "model")
    )
    assert {tensor.dtype for tensor in before.values()} == {torch.bfloat16, torch.float32}
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype and torch.equal(after[name], tensor), name


@pytest.mark.parametrize(
    "named",
    [
        {"modules_to_save": ["embed_tokens"]},
        {"target_modules": ["embed_tokens"]},
        {"target_modules": ["embed_tokens"], "kwargs": {"ensure_weight_tying": True}},
        {"target_modules": ["lm_head", "q_proj"]},
    ],
    ids=str,
)
def test_adapters_of_a_tied_embedding_are_those_of_the_head(tmp_path, named):
    settings = config(
        save_tiny_model(tmp_path / "start", tie_word_embeddings=True),
        dtype="float64",
        lora=Lora(r=3, **named),
    )
    policy, batch = Policy(load_model(settings)), collate(make_examples(5))
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    save_model(policy, load_tokenizer(settings), tmp_path / "run")
    saved = Policy(load_model(config(tmp_path / "run/model", dtype="float64")))
    torch.testing.assert_close(saved(batch).logprob, policy(batch).logprob, rtol=0, atol=1e-9)
