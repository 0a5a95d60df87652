"""Losses on rows with images equal TRL's, with the vision tower trained."""

import importlib.util
import pkgutil
import warnings

import burnish
import pytest
import torch
import vision
from datasets import Dataset
from transformers import AutoModelForImageTextToText, AutoProcessor

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed"),
]
USER = {"role": "user", "content": "what color?"}
STEPS = 3
THEIRS = {
    "max_steps": STEPS,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    "gradient_checkpointing": False,
    "bf16": False,
    "save_strategy": "no",
    "report_to": "none",
    "per_device_train_batch_size": 4,
    "use_cpu": True,
    "logging_steps": 1,
    "disable_tqdm": True,
    "train_sampling_strategy": "sequential",
    "max_length": None,
}
OURS = {
    "steps": STEPS,
    "learning_rate": 1e-3,
    "schedule": "constant",
    "batch_size": 4,
    "max_length": None,
    "shuffle": False,
}


def rows(kind):
    sizes = [[(60, 30)], [(30, 60), (60, 30)], [(32, 32)], [(20, 40)]]
    made = []
    for number, shown in enumerate(sizes):
        row = {
            "images": [vision.picture(*size, ["red", "blue"][number % 2]) for size in shown],
            "prompt": [USER],
        }
        good = [{"role": "assistant", "content": f"it is {number}"}]
        bad = [{"role": "assistant", "content": "no"}]
        if kind == "dpo":
            row |= {"chosen": good, "rejected": bad}
        else:
            row["completion"] = good
        if kind == "kto":
            row["label"] = number % 2 == 0
        made.append(row)
    return made


@pytest.mark.parametrize("family", ["idefics3", "llava_next", "qwen2_5_vl"])
@pytest.mark.parametrize("kind", ["sft", "dpo", "kto"])
def test_losses_and_gradients_are_trls(kind, family, tmp_path):
    vision.skip_unless_available(family)
    saved = str(vision.save(tmp_path / "model", family))
    run = getattr(burnish, kind)(
        AutoModelForImageTextToText.from_pretrained(saved),
        rows(kind),
        str(tmp_path / "ours"),
        tokenizer=AutoProcessor.from_pretrained(saved),
        **OURS,
    )
    ours = [step.metrics for step in run]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pkgutil.resolve_name(f"trl:{kind.upper()}Trainer")(
            model=AutoModelForImageTextToText.from_pretrained(saved),
            processing_class=AutoProcessor.from_pretrained(saved),
            train_dataset=Dataset.from_list(rows(kind)),
            args=pkgutil.resolve_name(f"trl:{kind.upper()}Config")(
                output_dir=str(tmp_path / "trl"), **THEIRS
            ),
        )
        trainer.train()
    log = [line for line in trainer.state.log_history if "loss" in line]
    found = torch.tensor([[step["loss"], step["grad_norm"]] for step in ours])
    peers = torch.tensor([[line["loss"], line["grad_norm"]] for line in log])
    torch.testing.assert_close(found[0, 0], peers[0, 0], rtol=0, atol=1e-5)
    torch.testing.assert_close(found[0, 1], peers[0, 1], rtol=1e-4, atol=0)
    torch.testing.assert_close(found[:, 0], peers[:, 0], rtol=5e-4, atol=1e-5)
    assert found[2, 0] < found[0, 0]
