"""examples/embedding: each in the real framework, beside the framework's own loss.

They run in an environment that ``tests/support/tools/install_peers`` makes.
"""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from peers import part, peer
from tiny import make_examples, make_model
from torch import Tensor
from transformers import Trainer, TrainingArguments

EXAMPLES = Path(__file__).parents[2] / "examples" / "embedding"
# of packages that we don't keep
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

MASK = torch.arange(6) < torch.tensor([5, 1, 3, 6])[:, None]


def draw(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


OLD = -0.2 - draw(0, 4, 6).abs()
LOGP = OLD + 0.5 * draw(1, 4, 6)
ADVANTAGE = draw(2, 4, 6)


def example(name: str) -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / name))


def assert_same(ours: Tensor, theirs: Tensor, leaves: list[Tensor], rtol: float = 1e-6) -> None:
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=1e-7)
    gradients = [torch.autograd.grad(loss, leaves, retain_graph=True) for loss in (ours, theirs)]
    for mine, other in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, other, rtol=rtol, atol=1e-7)
        assert mine.any()


class Actor:
    """What verl's vanilla loss reads of an actor's configuration."""

    clip_ratio = clip_ratio_low = 0.2
    clip_ratio_high = 0.28
    clip_ratio_c = 3.0
    global_batch_info: dict[str, Any] = {}  # noqa: RUF012 - nothing changes it

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
@pytest.mark.parametrize("corrected", [False, True])
def test_an_objective_is_a_policy_loss_of_verl(mode: str, corrected: bool) -> None:
    core = peer("verl")
    example("verl_loss.py")
    logp = LOGP.clone().requires_grad_()
    weights = draw(3, 4, 6).exp() if corrected else None
    losses = [
        core.get_policy_loss_fn(name)(OLD, logp, ADVANTAGE, MASK.double(), mode, Actor(), weights)
        for name in ("burnish_surrogate", "vanilla")
    ]
    assert_same(losses[0][0], losses[1][0], [logp])
    clipped = [losses[0][1]["actor/clip_ratio/region"], losses[1][1]["actor/pg_clipfrac"]]
    assert clipped[0] == pytest.approx(clipped[1]) and clipped[0] > 0
    topr, _ = core.get_policy_loss_fn("burnish_topr")(
        OLD, logp, ADVANTAGE, MASK.double(), mode, Actor()
    )
    assert torch.autograd.grad(topr, logp)[0][MASK].all()


def test_an_objective_is_a_policy_loss_of_skyrl() -> None:
    utils = peer("SkyRL")
    example("skyrl_loss.py")
    config = part("skyrl.train.config").AlgorithmConfig(eps_clip_low=0.2, eps_clip_high=0.28)
    logp = LOGP.clone().requires_grad_()
    losses = [
        utils.PolicyLossRegistry.get(name)(logp, OLD, ADVANTAGE, config, loss_mask=MASK.double())
        for name in ("burnish_surrogate", "regular")
    ]
    assert_same(losses[0][0], losses[1][0], [logp])
    assert losses[0][1]["clip_ratio"] == pytest.approx(losses[1][1]["clip_ratio"])
    topr, _ = utils.PolicyLossRegistry.get("burnish_topr")(
        logp, OLD, ADVANTAGE, config, loss_mask=MASK.double()
    )
    assert torch.autograd.grad(topr, logp)[0][MASK].all()


def test_cross_entropy_without_logits_is_in_torchtitans_loss_slot() -> None:
    losses = pytest.importorskip("torchtitan.components.loss", reason="torchtitan is not installed")
    head = torch.nn.Linear(16, 50, bias=False)
    hidden = draw(4, 2, 8, 16).float().requires_grad_()
    labels = torch.randint(0, 50, (2, 8), generator=torch.Generator().manual_seed(0))
    labels[0, :3] = losses.IGNORE_INDEX
    tokens = (labels != losses.IGNORE_INDEX).sum()
    ours = example("torchtitan_loss.py")["LinearCrossEntropy"].Config().build()
    ours.set_lm_head(head)
    loss, metrics = ours(hidden, labels, tokens)
    theirs, _ = losses.CrossEntropyLoss.Config().build()(head(hidden), labels, tokens)
    assert_same(loss, theirs, [hidden, head.weight], rtol=1e-5)
    assert metrics == {}

    chunked = losses.ChunkedLossWrapper.Config(num_chunks=2).build()
    chunked.set_lm_head(head)
    head.weight.grad = None
    total, _ = chunked(hidden, labels, tokens)
    total.backward()
    ours(hidden.detach(), labels, tokens)
    expected = torch.autograd.grad(loss, [head.weight])[0]
    torch.testing.assert_close(head.weight.grad, expected, rtol=1e-5, atol=1e-7)


def test_cross_entropy_without_logits_is_in_torchtunes_loss_slot() -> None:
    peer("torchtune")
    make = part("torchtune.models.llama3").llama3
    torch.manual_seed(0)
    model = make(
        vocab_size=50, num_layers=2, num_heads=2, num_kv_heads=1, embed_dim=16, max_seq_len=16
    )
    tokens = torch.randint(0, 50, (2, 8), generator=torch.Generator().manual_seed(0))
    labels = tokens.roll(-1, 1).masked_fill(torch.arange(8) < 3, -100)
    parameters = [p for p in model.parameters() if p.requires_grad]

    model.set_num_output_chunks(2)
    chunked = part("torchtune.modules.loss").CEWithChunkedOutputLoss(num_output_chunks=2)
    theirs = chunked(model(tokens), labels)
    model.set_num_output_chunks(0)
    names = list(model.state_dict())
    loss = example("torchtune_loss.py")["LinearCrossEntropy"](model)
    hidden = model(tokens)
    ours = loss(hidden.reshape(-1, hidden.size(-1)), labels.reshape(-1))
    assert_same(ours, theirs, parameters, rtol=1e-4)
    assert list(model.state_dict()) == names


def test_cross_entropy_without_logits_is_a_plugin_of_axolotl(tmp_path: Path) -> None:
    base = pytest.importorskip("axolotl.integrations.base", reason="axolotl is not installed")
    plugin = example("axolotl_plugin.py")["LinearCrossEntropy"]
    assert issubclass(plugin, base.BasePlugin)
    manager = base.PluginManager.get_instance()
    manager.plugins["burnish"] = plugin()
    rows = [
        {
            "input_ids": e.prompt + e.completions[0],
            "labels": [-100] * 2 + (e.prompt + e.completions[0])[2:],
        }
        for e in make_examples(8, completions=1)
    ]

    def padded(some: list[dict[str, list[int]]]) -> dict[str, Tensor]:
        length = max(len(row["input_ids"]) for row in some)
        pads = {"input_ids": 0, "labels": -100}
        return {
            name: torch.tensor([row[name] + [pad] * (length - len(row[name])) for row in some])
            for name, pad in pads.items()
        }

    logged = []
    for with_plugin in (True, False):
        arguments = TrainingArguments(
            tmp_path,
            max_steps=4,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = Trainer(
            make_model("llama").float(), arguments, data_collator=padded, train_dataset=rows
        )
        if with_plugin:
            manager.post_trainer_create({}, trainer)
        trainer.train()
        logged.append([line["loss"] for line in trainer.state.log_history if "loss" in line])
    assert logged[0] == pytest.approx(logged[1], rel=1e-5)
    assert logged[0][0] - logged[0][-1] > 0.01
    del manager.plugins["burnish"]


def test_an_example_has_at_most_40_lines() -> None:
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text().splitlines()) <= 40
