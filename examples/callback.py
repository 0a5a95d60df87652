"""Call a callback written for transformers' Trainer from your own loop.

python callback.py MODEL DATA
"""

import sys

import burnish
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class StopAtLoss(TrainerCallback):
    """Stops training at a loss of 1."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        control.should_training_stop = logs["loss"] < 1.0


model, data = sys.argv[1:]
callback, state, control = StopAtLoss(), TrainerState(), TrainerControl()
arguments = TrainingArguments()  # before the run: making it resets the state of Accelerate
run = burnish.sft(model, data, steps=200, batch_size=32, learning_rate=2e-3)
objects = {"model": run.model, "processing_class": run.tokenizer}
callback.on_train_begin(arguments, state, control, **objects)
for step in run:
    state.global_step, state.max_steps = step.number, 200
    callback.on_step_end(arguments, state, control, **objects)
    callback.on_log(arguments, state, control, logs=step.metrics, **objects)
    if control.should_training_stop:
        break
callback.on_train_end(arguments, state, control, **objects)
print(f"stopped at step {step.number}, loss {step.metrics['loss']:.2f}")
