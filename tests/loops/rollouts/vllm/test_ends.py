"""vLLM ends the answers of a base model that was trained under a chat template, where the template
ends them.
"""

import json
import os
import subprocess

import pytest
from burnish.loops.cli import main
from tiny import save_model, write_rows
from vllm_servers import CONTEXT, ENVIRONMENT, vllm_python

# the end of a document, which the base model was made with, and of a message under its template
EOS, END = 2, 1
# vLLM has kernels for
SIZES = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
QUESTION = [{"role": "user", "content": "2 + 2?"}]
ANSWER = [{"role": "assistant", "content": "4"}]
ASK = f"""
import json, sys
from vllm import LLM, SamplingParams
llm = LLM(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len={CONTEXT}, max_num_seqs=4)
sampling = SamplingParams(temperature=0, max_tokens=20, skip_special_tokens=False)
(output,) = llm.chat(json.loads(sys.argv[2]), sampling)
print("ANSWER", json.dumps([output.outputs[0].token_ids, output.outputs[0].finish_reason]))
"""


@pytest.mark.slow
def test_vllm_ends_the_answers_of_a_trained_base_model(tmp_path):
    python = vllm_python()
    base = save_model(tmp_path / "base", eos="<|endoftext|>", eos_token_id=EOS, **SIZES)
    data = write_rows(tmp_path / "rows.jsonl", [{"messages": QUESTION + ANSWER}])
    paths = ["--model", str(base), "--data", str(data), "--output", str(tmp_path / "run")]
    assert (
        main(["sft", *paths, "--steps", "40", "--batch_size", "1", "--learning_rate", "1e-2"]) == 0
    )
    environment = {**os.environ, **ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    environment.pop("PYTHONPATH", None)
    command = [python, "-c", ASK, str(tmp_path / "run/model"), json.dumps(QUESTION)]
    told = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert told.returncode == 0, told.stderr[-3000:]
    (line,) = [line for line in told.stdout.splitlines() if line.startswith("ANSWER")]
    tokens, reason = json.loads(line.removeprefix("ANSWER"))
    assert tokens[-1] == END
    assert len(tokens) == 2  # "4" and the end
    assert reason == "stop"
