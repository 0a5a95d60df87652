"""Keep the model with the lowest loss on held-out data, however training continues.

    python best_model.py MODEL DATA HELD_OUT OUTPUT

``keep_best="eval/loss"`` keeps its checkpoint as well, optimizer included. Here it is the model
alone.
"""

import math
import sys

import burnish

model, data, held_out, output = sys.argv[1:]
run = burnish.sft(model, data, eval_data=held_out, eval_every=5, steps=40, learning_rate=2e-3)
best = math.inf
for step in run:
    if step.metrics.get("eval/loss", math.inf) < best:
        best = step.metrics["eval/loss"]
        if run.context.accelerator.is_main_process:
            run.model.save_pretrained(output)
            run.tokenizer.save_pretrained(output)
print(f"best held-out loss {best:.4f}, in {output}")
