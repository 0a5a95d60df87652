"""A merged adapter is a plain model that computes what base and adapter compute together."""

import json

import pytest
import torch
from burnish.loops.cli import main
from burnish.loops.cli.merge import merge
from burnish.loops.config import Lora
from burnish.loops.recipes.reward import open_reward
from burnish.loops.recipes.settings import SFT, Reward
from burnish.loops.recipes.sft import open_sft
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tiny import save_model, sums, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer

TOKENS = torch.arange(3, 40)[None]


def save_adapter(directory, base, *, dtype=torch.float32, **fields):
    """An adapter all of whose weights are random, made by peft alone."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    fields = {
        "r": 4,
        "lora_alpha": 16,
        "target_modules": "all-linear",
        "task_type": "CAUSAL_LM",
        **fields,
    }
    adapted = get_peft_model(model, LoraConfig(**fields))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.normal_(std=0.1)
    adapted.save_pretrained(directory)
    return directory


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"use_dora": True},
        {"use_rslora": True},
        {"modules_to_save": ["lm_head"], "target_modules": ["q_proj"]},
    ],
    ids=["plain", "dora", "rslora", "whole_module"],
)
def test_the_merged_model_computes_what_peft_computes(tmp_path, capsys, fields):
    base = save_model(tmp_path / "base")
    adapter = save_adapter(tmp_path / "adapter", base, **fields)
    assert main(["merge", str(adapter), str(tmp_path / "out")]) == 0
    assert f"the merged model is in {tmp_path / 'out'}" in capsys.readouterr().out
    plain = AutoModelForCausalLM.from_pretrained(base)
    adapted = PeftModel.from_pretrained(plain, adapter).eval()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        expected = adapted(TOKENS).logits
        with adapted.disable_adapter():
            assert (adapted(TOKENS).logits - expected).abs().max() > 1e-2
        torch.testing.assert_close(merged(TOKENS).logits, expected, rtol=0, atol=1e-5)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template


def test_bfloat16_weights_are_merged_in_float32_and_rounded_once(tmp_path):
    base = save_model(tmp_path / "base", dtype=torch.bfloat16)
    adapter = save_adapter(tmp_path / "adapter", base, dtype=torch.bfloat16)
    merge(adapter, tmp_path / "out")
    merged, before = (
        load_file(tmp_path / "out/model.safetensors"),
        load_file(base / "model.safetensors"),
    )
    factors = load_file(adapter / "adapter_model.safetensors")
    name = "model.layers.0.self_attn.q_proj"
    a, b = (factors[f"base_model.model.{name}.lora_{kind}.weight"].float() for kind in "AB")
    assert merged[f"{name}.weight"].equal(
        (before[f"{name}.weight"].float() + 4 * (b @ a)).bfloat16()
    )
    assert all(weight.dtype == torch.bfloat16 for weight in merged.values())
    assert merged["model.norm.weight"].equal(before["model.norm.weight"])


def test_the_adapter_of_a_run_merges_into_the_model_of_the_run(tmp_path):
    data = write_rows(
        tmp_path / "messages.jsonl",
        [{"messages": pair["prompt"] + pair["chosen"]} for pair in sums(8)],
    )
    base = save_model(tmp_path / "base", eos="<|start|>")
    fields = {
        "model": str(base),
        "data": str(data),
        "output": str(tmp_path / "run"),
        "steps": 2,
        "batch_size": 4,
    }
    open_sft(SFT(**fields, learning_rate=1e-2, lora=Lora(r=4))).train()
    merge(tmp_path / "run/adapter", tmp_path / "out")
    ours, theirs = (
        load_file(where / "model.safetensors")
        for where in (tmp_path / "out", tmp_path / "run/model")
    )
    assert ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in theirs)
    ends = [
        json.loads((tmp_path / each / "generation_config.json").read_text())["eos_token_id"]
        for each in ("out", "run/model")
    ]
    assert ends[0] == ends[1] != 2


HISTOGRAM = {"loss": "hl_gauss", "lowest_score": 0.0, "highest_score": 1.0, "bins": 5}


@pytest.mark.parametrize(
    ("loss", "rows"),
    [
        ({}, sums(8)),
        (HISTOGRAM, [{"prompt": "1+1=", "completion": "2", "score": i / 8} for i in range(8)]),
    ],
    ids=["score", "histogram"],
)
def test_the_adapter_of_a_reward_model_brings_its_head(tmp_path, loss, rows):
    data = write_rows(tmp_path / "rows.jsonl", rows)
    base = save_model(tmp_path / "base", pad_token_id=None)
    fields = {
        "model": str(base),
        "data": str(data),
        "output": str(tmp_path / "run"),
        "steps": 2,
        "batch_size": 4,
    }
    open_reward(Reward(**fields, **loss, learning_rate=1e-2, lora=Lora(r=4))).train()
    merge(tmp_path / "run/adapter", tmp_path / "out")
    ours, theirs = (
        load_file(where / "model.safetensors")
        for where in (tmp_path / "out", tmp_path / "run/model")
    )
    assert ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in theirs)
    merged, trained = (
        json.loads((where / "config.json").read_text())
        for where in (tmp_path / "out", tmp_path / "run/model")
    )
    assert merged["id2label"] == trained["id2label"]
    assert merged["pad_token_id"] is not None


def test_what_cannot_be_merged_is_refused(tmp_path, capsys):
    def refusal(adapter, *flags):
        assert main(["merge", str(adapter), str(tmp_path / "out"), *map(str, flags)]) == 1
        return capsys.readouterr().err

    base = save_model(tmp_path / "base")
    assert "no adapter, as it has no adapter_config.json" in refusal(base)
    adapter = save_adapter(tmp_path / "adapter", base, target_modules=["up_proj"])
    deeper = save_model(tmp_path / "deeper", num_hidden_layers=3)
    assert f"not an adapter of {deeper}: base_model" in refusal(adapter, "--model", deeper)
    shallow = save_model(tmp_path / "shallow", num_hidden_layers=1)
    assert f"not an adapter of {shallow}: base_model" in refusal(adapter, "--model", shallow)
    wider = save_model(tmp_path / "wider", intermediate_size=64)
    assert f"not an adapter of {wider}: " in refusal(adapter, "--model", wider)
    weights = load_file(adapter / "adapter_model.safetensors")
    weights.popitem()
    save_file(weights, adapter / "adapter_model.safetensors")
    assert "is in the model with its adapter alone" in refusal(adapter)
    with_ia3 = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base), IA3Config(task_type="CAUSAL_LM")
    )
    with_ia3.save_pretrained(tmp_path / "ia3")
    assert "wanted an adapter of LoRA, got one of IA3" in refusal(tmp_path / "ia3")
    (tmp_path / "out").mkdir(exist_ok=True)
    (tmp_path / "out/notes.txt").write_text("mine")
    assert "holds something already" in refusal(save_adapter(tmp_path / "again", base))
