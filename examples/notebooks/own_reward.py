# %% [markdown]
# # A reward of your own
#
# GRPO on a small model that knows the form of an answer, with a reward that gives partial credit.
# The task: say the last two of four digits, each plus one. The model is made here: no network, no
# GPU, less than a minute on one core.

# %%
import random
import tempfile
from pathlib import Path

import burnish
from burnish.loops.recipes.demo import sample, save_start

directory = Path(tempfile.mkdtemp())
questions = [f"{n:04d}=" for n in random.Random(0).sample(range(10_000), 4000)]
held_out, rest = questions[:300], questions[300:]
save_start(directory / "start", seed=0)


def solve(question):
    return "".join(str((int(digit) + 1) % 10) for digit in question[2:4])


def accuracy(model):
    """The share of right answers, one sampled to each held-out question."""
    answers = sample(model, held_out, count=1, temperature=1.0)
    right = [given == solve(question) for question, (given,) in zip(held_out, answers, strict=True)]
    return sum(right) / len(right)


rows = [{"prompt": question, "completion": solve(question)} for question in rest]
burnish.sft(  # not to its end
    str(directory / "start"),
    rows,
    output=str(directory / "sft"),
    batch_size=96,
    steps=45,
    learning_rate=2e-3,
).train()
before = accuracy(directory / "sft/model")
print(f"accuracy before: {before:.1%}")

# %% [markdown]
# ## The reward
#
# `completion` is the text, `answer` a column of the data. A share of right digits tells more
# completions of a group apart than right or wrong does, and a group teaches by its differences.
#
# What a reward does not look at will be used: divided by `len(answer)` alone, this one is earned by
# right digits with others behind them, and the reward rises while accuracy falls. Try it.


# %%
def digits(completion, answer):
    """The share of digits that are right, in their places."""
    right = sum(a == b for a, b in zip(completion, answer, strict=False))
    return right / max(len(completion), len(answer))


print(digits("45", "45"), digits("46", "45"), digits("", "45"))

# %% [markdown]
# ## GRPO
#
# `reward` should rise, and `frac_reward_zero_std` says how many groups have nothing to teach.

# %%
run = burnish.grpo(
    str(directory / "sft/model"),
    [{"prompt": question, "answer": solve(question)} for question in rest],
    rewards=digits,
    output=str(directory / "grpo"),
    prompts_per_rollout=64,
    group_size=4,
    max_tokens=4,
    steps=40,
    learning_rate=5e-4,
    show_every=20,
)
rewards = []
for step in run:
    rewards.append(step.metrics["reward"])
    if step.number % 10 == 0:
        flat = step.metrics["frac_reward_zero_std"]
        print(f"step {step.number}: reward {rewards[-1]:.3f}, {flat:.0%} of groups all alike")

# %%
after = accuracy(directory / "grpo/model")
print(f"accuracy after: {after:.1%}")
