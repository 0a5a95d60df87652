"""docs/your-own-loss.md: its Python runs as printed, and its table names the tensors that there
are.
"""

import re
from pathlib import Path

import pytest
import torch
import yaml
from accelerate import Accelerator
from burnish.loops import Policy, Scorer, collate, frozen_copy
from burnish.loops.config import Teacher
from burnish.loops.models.lm_head import TeacherOutputs
from burnish.loops.models.scorer import ends_marked
from burnish.loops.recipes.settings import GRPO
from burnish.loops.rl.policy_gradient import rollout_tensors
from burnish.loops.train.losses import columns_of, policy_tensors, score_tensors, tensors_needed
from burnish.loops.train.mix import PAIR_LOSSES, parse_losses
from tiny import make_classifier, make_examples, make_model

PAGE = (Path(__file__).parents[3] / "docs" / "your-own-loss.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.S)


def test_its_loss_trains_by_its_signature_alone():
    policy = Policy(make_model("llama"))
    names = {
        "policy": policy,
        "accelerator": Accelerator(),
        "micro_batches": [collate(make_examples(4))],
    }
    names |= {
        "reference": frozen_copy(policy),
        "optimizer": torch.optim.SGD(policy.parameters(), lr=0.1),
    }
    for block in BLOCKS[:3]:
        exec(block, names)
    assert names["metrics"]["margin"] == 1.0  # the policy is the reference
    assert names["metrics"]["loss"] == pytest.approx(1.0 + 0.2 * names["metrics"]["nll"])


def test_its_policy_gradient_is_advantage_at_the_sampler_and_bounded_away_from_it():
    names = {}
    for block in BLOCKS[:2]:
        exec(block, names)
    old = torch.zeros(3, dtype=torch.float64)
    logp = torch.tensor([0.0, 5.0, -5.0], dtype=torch.float64, requires_grad=True)
    advantage = torch.tensor([2.0, 1.0, 1.0], dtype=torch.float64)
    loss, stats = names["soft_clip"](logp, old, advantage)
    (gradient,) = torch.autograd.grad(loss.sum(), logp)
    assert gradient.tolist() == pytest.approx([-2.0, 0.0, 0.0], abs=1e-9)
    assert loss.tolist() == pytest.approx([0.0, -0.2, 0.2])
    assert not stats["ratio"].requires_grad


def test_its_mix_has_the_loss_under_its_own_hyper_parameter_and_weight():
    names = {}
    exec(BLOCKS[0], names)
    exec("from burnish.objectives import nll", names)
    exec(BLOCKS[3], names)
    losses = names["losses"]
    assert losses["length_free_margin"].function.keywords == {"beta": 0.5}
    assert columns_of(losses) == ["importance"]
    broken = BLOCKS[3].replace('"beta": 0.5', '"beta": 0')
    with pytest.raises(ValueError, match="length_free_margin: beta must be > 0, got 0"):
        exec(broken, names)


def test_its_configuration_is_one_that_the_recipe_knows():
    (mix,) = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.S)
    config = yaml.safe_load(mix)
    losses = parse_losses(config["loss"], {"beta": 0.1, "label_smoothing": 0.0}, PAIR_LOSSES)
    assert columns_of(losses) == ["importance"]
    assert tensors_needed(losses) == {
        "chosen",
        "rejected",
        "ref_chosen",
        "ref_rejected",
        "logp",
        "divergence",
    }
    Teacher(**config["teacher"])


def test_its_table_names_every_tensor_and_no_other():
    listed = set()
    for units, names in re.findall(r"^\| ([a-z, ]+) \| (`.*?`) \|", PAGE, flags=re.M):
        listed |= {
            (unit, name) for unit in units.split(", ") for name in re.findall(r"`(\w+)`", names)
        }
    policy = Policy(make_model("llama"), value_head=torch.nn.Linear(32, 1).double())
    batch = collate(make_examples(2))
    ids = torch.arange(2).expand(len(batch.target), 2)
    top_k = (ids, torch.full(ids.shape, -2.0, dtype=torch.float64))
    zero = torch.zeros(len(batch.target), dtype=torch.float64)
    batch = collate(batch.examples, {"sampled_logp": zero, "advantage": zero})
    read = policy_tensors(
        reference=lambda batch: zero,
        teacher=lambda batch: TeacherOutputs(0.0, 1.0, top_k=top_k),
        outputs=("mean_logprob", "log_sum_squares"),
        pairs=True,
    )
    config = GRPO(
        model="m", data="d", output="o", correction="tis", masks={"veto": {"threshold": 1e-4}}
    )
    tensors = dict(rollout_tensors(read, config, policy, batch))
    marked = collate([ends_marked(example, None) for example in batch.examples])
    tensors |= score_tensors(Scorer(make_classifier("SEQ_CLS")), marked)
    assert set(tensors) == listed
