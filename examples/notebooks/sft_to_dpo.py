# %% [markdown]
# # From SFT to DPO
#
# Teach a small model, let it answer, and train it on its own right and wrong answers. The task: say
# the last two of four digits, each plus one. The model is made here: no network, no GPU, half a
# minute on one core.

# %%
import random
import tempfile
from pathlib import Path

import burnish
from burnish.loops.recipes.demo import sample, save_start

directory = Path(tempfile.mkdtemp())
questions = [f"{n:04d}=" for n in random.Random(0).sample(range(10_000), 5000)]
held_out, taught, asked = questions[:300], questions[300:3300], questions[3300:]
save_start(directory / "start", seed=0)


def solve(question):
    return "".join(str((int(digit) + 1) % 10) for digit in question[2:4])


def accuracy(model):
    """The share of right answers, one sampled to each held-out question."""
    answers = sample(model, held_out, count=1, temperature=1.0)
    right = [given == solve(question) for question, (given,) in zip(held_out, answers, strict=True)]
    return sum(right) / len(right)


print(taught[0], solve(taught[0]))

# %% [markdown]
# ## SFT
#
# A row is a prompt and its completion. The loop is yours: `step.metrics` is what is logged.

# %%
rows = [{"prompt": question, "completion": solve(question)} for question in taught]
run = burnish.sft(
    str(directory / "start"),
    rows,
    output=str(directory / "sft"),
    batch_size=96,
    steps=45,
    learning_rate=2e-3,
    warmup=0.1,
)
losses = [step.metrics["nll"] for step in run]
print(f"nll {losses[0]:.2f} -> {losses[-1]:.2f}")
after_sft = accuracy(directory / "sft/model")
print(f"accuracy after SFT: {after_sft:.1%}")

# %% [markdown]
# ## Its own answers
#
# Four answers to each question that it has not seen; a right and a wrong one make a pair.

# %%
answers = sample(directory / "sft/model", asked, count=4, temperature=1.0)
preferences = []
for question, given in zip(asked, answers, strict=True):
    wrong = [answer for answer in given if answer not in ("", solve(question))]
    if solve(question) in given and wrong:
        pair = {"prompt": question, "chosen": solve(question), "rejected": wrong[0]}
        preferences.append(pair)
print(f"{len(preferences)} pairs, such as {preferences[0]}")

# %% [markdown]
# ## DPO
#
# The reference is the model that the run begins with. The likelihood of the chosen answers is added
# to the loss, so that they don't get less likely while the others do.

# %%
run = burnish.dpo(
    str(directory / "sft/model"),
    preferences,
    output=str(directory / "dpo"),
    loss={"dpo": 1.0, "nll": 1.0},
    batch_size=64,
    steps=40,
    learning_rate=5e-4,
    warmup=0.1,
)
margins = [step.metrics["rewards/margins"] for step in run]
print(f"margin {margins[0]:.2f} -> {margins[-1]:.2f}")
after_dpo = accuracy(directory / "dpo/model")
print(f"accuracy after DPO: {after_dpo:.1%}")
