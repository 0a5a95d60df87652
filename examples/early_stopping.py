"""Stop when the loss on held-out data has not fallen for some evaluations in a row.

python early_stopping.py MODEL DATA HELD_OUT OUTPUT
"""

import math
import sys

import burnish

PATIENCE = 2

model, data, held_out, output = sys.argv[1:]
best, waited = math.inf, 0
for step in burnish.sft(
    model, data, output, held_out, eval_every=5, epochs=100, learning_rate=2e-3
):
    if "eval/loss" in step.metrics:
        waited = 0 if step.metrics["eval/loss"] < best else waited + 1
        best = min(best, step.metrics["eval/loss"])
        if waited == PATIENCE:
            break  # the model is saved as it is, with a checkpoint
print(f"stopped at step {step.number}, best held-out loss {best:.4f}")
