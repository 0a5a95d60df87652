# %% [markdown]
# # Compose a loss, and look at its gradient
#
# A loss is a function of tensors that returns one entry per unit; a mix of losses is arithmetic.
# Here two are put together, and the gradient that reaches each log-prob is looked at, without any
# model; then the same mix takes a step.

# %%
import tempfile
from functools import partial
from pathlib import Path

import burnish
import torch
from burnish.loops.recipes.demo import save_start
from burnish.objectives import PerPair, Stats, dpo, nll

# %% [markdown]
# ## The gradient of DPO
#
# Four pairs, from one that the policy has wrong to one that it has right by far.

# %%
margin = torch.tensor([-20.0, 0.0, 20.0, 60.0])
chosen = (-30.0 + margin / 2).requires_grad_()  # log-probs, in nats
rejected = (-30.0 - margin / 2).requires_grad_()
reference = torch.full((4,), -30.0)

loss, stats = dpo(chosen, rejected, reference, reference, beta=0.1)
gradient_chosen, gradient_rejected = torch.autograd.grad(loss.sum(), (chosen, rejected))
for pair in range(4):
    print(
        f"margin {margin[pair]:+5.0f}   loss {loss[pair]:.3f}   push {-gradient_chosen[pair]:+.3f}"
    )

# %% [markdown]
# A pair that is wrong is pushed most. Chosen and rejected are pushed by the same amount: DPO asks for
# the difference alone, and does not mind if both fall.

# %%
assert torch.equal(gradient_chosen, -gradient_rejected)

# %% [markdown]
# ## With the likelihood
#
# 0.2 times the negative log-likelihood of the chosen answers adds a pull that the pair's margin does
# not weaken.

# %%
likelihood, _ = nll(chosen)
total = dpo(chosen, rejected, reference, reference, beta=0.1)[0] + 0.2 * likelihood
(with_likelihood,) = torch.autograd.grad(total.sum(), chosen)
print("push on the chosen answer:", [f"{-push:+.3f}" for push in with_likelihood])

# %% [markdown]
# ## One of your own
#
# A hinge that stops pushing where the margin is large enough. Its parameters' names say what it
# reads, its annotations of what there is one.


# %%
def stops(
    chosen: PerPair, rejected: PerPair, ref_chosen: PerPair, ref_rejected: PerPair, *, beta: float
) -> tuple[PerPair, Stats]:
    margin = beta * ((chosen - ref_chosen) - (rejected - ref_rejected))
    return (1 - margin).clamp(min=0), {"margin": margin.detach()}


loss, _ = stops(chosen, rejected, reference, reference, beta=0.1)
(push,) = torch.autograd.grad(loss.sum(), chosen)
print("push of the hinge:", [f"{-each:+.2f}" for each in push])

# %% [markdown]
# The mix in a recipe: each loss has its coefficient, and `nll` is that of the chosen answers.

# %%
directory = Path(tempfile.mkdtemp())
save_start(directory, seed=0)
rows = [
    {"prompt": f"{n:02d}+01=", "chosen": f"{n + 1:03d}", "rejected": f"{n:03d}"} for n in range(64)
]
mix = {partial(stops, beta=0.1): 1.0, "nll": 0.2}
for step in burnish.dpo(str(directory), rows, loss=mix, batch_size=16, learning_rate=1e-3):
    metrics = step.metrics
assert abs(metrics["loss"] - (metrics["stops"] + 0.2 * metrics["nll"])) < 1e-5
print({name: round(metrics[name], 3) for name in ("loss", "stops", "nll", "margin")})
