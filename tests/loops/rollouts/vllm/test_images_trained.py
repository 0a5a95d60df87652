"""GRPO on prompts with images, completed by a real vLLM server on the CPU."""

import json

import pytest
import vision
import vllm_vision
from burnish.loops.recipes.grpo import open_grpo
from burnish.loops.recipes.settings import GRPO
from burnish.loops.rl.settings import VLLM
from vllm_servers import CONTEXT, ENVIRONMENT, FORKING, vllm_python


@pytest.mark.slow
def test_grpo_trains_on_what_a_server_completes_for_images(tmp_path):
    rows = []
    for number, size in enumerate([(60, 30), (30, 60)]):
        vision.picture(*size).save(tmp_path / f"{number}.png")
        rows.append({"image": f"{number}.png", "prompt": [{"role": "user", "content": "what?"}]})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    environment = ENVIRONMENT | FORKING
    config = GRPO(
        model=str(vllm_vision.save(tmp_path / "model")),
        data=str(tmp_path / "rows.jsonl"),
        output=str(tmp_path / "run"),
        rewards={lambda completion, **columns: float(sum(map(ord, completion)) % 7): 1.0},
        steps=3,
        prompts_per_rollout=2,
        group_size=4,
        max_tokens=8,
        learning_rate=1e-3,
        dtype="float32",
        source="vllm",
        vllm=VLLM(
            python=vllm_python(),
            environment=environment,
            options={"enforce_eager": True, "max_num_seqs": 32, "max_model_len": CONTEXT},
        ),
        report_to="none",
    )
    for step in open_grpo(config):
        assert step.metrics["sampling/logp_difference/max"] < 1e-3  # as of the same weights
        assert step.metrics["grad_norm"] > 0
