"""Models in and out: what was trained is what transformers loads."""

import pytest
import torch
from burnish.loops.batch import collate
from burnish.loops.config import Common, Lora
from burnish.loops.models.io import load_model, load_tokenizer, save_model
from burnish.loops.models.policy import Policy
from tiny import make_examples
from tiny import save_model as save_tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer


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


def test_adapters_alone_are_trained(start):
    model = load_model(config(start, lora=Lora(r=2)))
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {
        name for name, _ in model.named_parameters() if "lora_" in name
    }


def test_bfloat16_keeps_what_is_trained_in_float32(start):
    whole = load_model(config(start, dtype="bfloat16"))
    assert {parameter.dtype for parameter in whole.parameters()} == {torch.float32}
    adapters = load_model(config(start, dtype="bfloat16", lora=Lora(r=2)))
    assert {p.dtype for p in adapters.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in adapters.parameters() if not p.requires_grad} == {torch.bfloat16}


def test_gradient_checkpointing_changes_no_gradient(start):
    batch = collate(make_examples(3))
    gradients = []
    for checkpointing in (False, True):
        policy = Policy(load_model(config(start, dtype="float64", gradient_checkpointing=checkpointing)))
        policy(batch).logprob.sum().backward()
        gradients.append([parameter.grad for parameter in policy.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, recomputed)


def test_a_four_bit_model_trains_its_adapters(start):
    pytest.importorskip("bitsandbytes", reason="the extra 'quant' is not installed")
    policy = Policy(load_model(config(start, quantize="4bit", lora=Lora(r=2))))
    policy(collate(make_examples(2))).logprob.sum().backward()
    trained = [p for p in policy.parameters() if p.requires_grad]
    assert trained and all(p.grad is not None for p in trained)


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
        assert torch.equal(weight, before[name].to(expected)), name  # an untrained adapter adds nothing


def test_a_large_model_is_saved_in_several_files_with_its_generation_settings(tmp_path, monkeypatch):
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
