"""Average the weights over the steps, and save the averaged model in place of the last one.

python ema.py MODEL DATA OUTPUT
"""

import sys

import burnish
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

model, data, output = sys.argv[1:]
run = burnish.sft(model, data, steps=40, learning_rate=2e-3)
average = AveragedModel(run.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
for _ in run:
    average.update_parameters(run.model)
average.module.save_pretrained(output)
run.tokenizer.save_pretrained(output)
