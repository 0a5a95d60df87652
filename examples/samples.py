"""Print completions of held-out prompts while DPO trains the model.

python samples.py MODEL PAIRS OUTPUT
"""

import sys

import burnish
import torch
from datasets import load_dataset

model, pairs, output = sys.argv[1:]
pairs = load_dataset("json", data_files=pairs, split="train").train_test_split(0.1, seed=0)
run = burnish.dpo(model, pairs["train"], output, pairs["test"], steps=20, learning_rate=1e-4)
for step in run:
    if step.number % 10 == 0:
        for prompt in pairs["test"]["prompt"][:3]:
            ids = run.tokenizer(prompt, return_tensors="pt").to(run.model.device)
            with torch.no_grad():
                tokens = run.model.generate(**ids, max_new_tokens=16, do_sample=False)[0]
            print(f"{step.number:4} {run.tokenizer.decode(tokens)}")
