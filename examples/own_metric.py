"""A metric of your own: the share of held-out questions whose likeliest answer is right, in
curves.png and trackers.

python own_metric.py MODEL DATA HELD_OUT OUTPUT        rows have a prompt and a completion
"""

import sys

import burnish
import torch
from datasets import load_dataset

model, data, held_out, output = sys.argv[1:]
questions = load_dataset("json", data_files=held_out, split="train")
run = burnish.sft(
    model, data, output, held_out, steps=60, eval_every=20, learning_rate=2e-3, batch_size=32
)


@torch.no_grad()
def answered(prompt: str) -> str:
    ids = run.tokenizer(prompt, return_tensors="pt").to(run.model.device)
    tokens = run.model.generate(**ids, max_new_tokens=8, do_sample=False)[
        0, ids.input_ids.shape[1] :
    ]
    return run.tokenizer.decode(tokens, skip_special_tokens=True)


for step in run:
    if step.number % 20 == 0:
        right = [answered(row["prompt"]) == row["completion"] for row in questions]
        step.metrics["eval/accuracy"] = sum(right) / len(right)
print(f"accuracy {step.metrics['eval/accuracy']:.2f}")
