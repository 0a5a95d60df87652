"""The settings of every recipe: its fields are the YAML keys and the flags of its command.

They are apart from the recipes so that the command line can be read and checked without torch.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from ..config import Common, ReferenceKind, Teacher
from ..rl.settings import OnlineConfig, PolicyGradientConfig, SamplingConfig, Weighting

Scale = Literal["group", "batch", "none"]
Name = Literal["grpo", "dr_grpo", "dapo", "cispo", "gspo", "gspo_token", "gmpo", "sapo", "vespo", "dppo", "rloo"]


@dataclass(frozen=True)
class SFT(Common):
    """Supervised fine-tuning on messages, text, or prompts with completions."""

    learning_rate: float = 2e-5
    """Peak learning rate of AdamW."""
    loss: str | dict[str, float | dict[str, Any]] = "nll"
    """A token objective of burnish.objectives.supervised, or a mix: {nll: 1.0, z_loss: 1.0e-4}; label smoothing is
    {label_smoothed_nll: {label_smoothing: 0.1}}."""
    weighting: Literal["token_mean", "sequence_mean"] = "token_mean"
    """Whether every token or every answer counts the same, in every loss that has no weighting of its own."""
    train_on: Literal["auto", "assistant", "completion", "all"] = "auto"
    """Tokens that carry loss: auto is assistant for messages, completion after a prompt, and all of a plain text."""


@dataclass(frozen=True)
class DPO(Common):
    """Preference training on pairs of a chosen and a rejected answer to one prompt."""

    learning_rate: float = 1e-6
    """Peak learning rate of AdamW."""
    loss: str | dict[str, float | dict[str, Any]] = "dpo"
    """A preference objective of burnish.objectives, or a mix: {dpo: 0.8, bco_pair: 0.2, nll: 1.0}; instead of its
    coefficient, a loss may have {coefficient: 0.8, beta: 0.2, ...}. nll is that of the chosen answers."""
    beta: float = 0.1
    """Strength of the pull towards the reference, for every loss that has a beta."""
    label_smoothing: float = 0.0
    """Assumed share of pairs labelled the wrong way round, for every loss that knows it."""
    answer: Literal["sum", "mean"] = "sum"
    """Whether the log-prob of an answer is the sum over its tokens, as in the papers, or their mean."""
    ld_alpha: float = 1.0
    """How much of an answer's log-prob beyond the length of the pair's shorter answer counts (LD-DPO); 1 is all."""
    weight: Literal["one", "wpo"] = "one"
    """Whether a pair counts by how likely the policy is to say both of its answers (WPO)."""
    divergence: Literal["reverse_kl", "forward_kl", "js", "alpha"] = "reverse_kl"
    """The f-divergence from the reference (f-DPO); alpha needs `divergence_alpha`."""
    divergence_alpha: float = 0.5
    """Order of the alpha-divergence."""
    reference: ReferenceKind = "auto"
    """Where reference log-probs come from: a frozen copy, the model without its adapters (auto, if it has some), or
    one pass over the data before training, cached in the run directory."""
    teacher: Teacher = field(default_factory=Teacher)
    """A teacher, for the loss `distillation` in a mix."""
    loss_kwargs: dict[str, float] = field(default_factory=dict)
    """Further hyper-parameters by name, such as {gamma: 0.5, tau: 0.05}, for every loss that has one of that name."""


@dataclass(frozen=True)
class KTO(Common):
    """Training on answers marked desirable or undesirable; preference pairs count as one of each."""

    learning_rate: float = 1e-6
    """Peak learning rate of AdamW."""
    loss: str | dict[str, float | dict[str, Any]] = "kto"
    """kto, bco or apo_zero_unpaired, or a mix: {kto: 1.0, nll: 0.1}. nll is that of the desirable answers."""
    beta: float = 0.1
    """Strength of the pull towards the reference, for every loss that has a beta."""
    desirable_weight: float = 1.0
    """What a desirable answer counts (kto); the paper balances the two classes to within a factor of 4/3."""
    undesirable_weight: float = 1.0
    """What an undesirable answer counts (kto)."""
    reference: ReferenceKind = "auto"
    """Where reference log-probs come from, as for dpo; kto can't precompute them, its mismatched answers change."""
    teacher: Teacher = field(default_factory=Teacher)
    """A teacher, for the loss `distillation` in a mix."""
    loss_kwargs: dict[str, float] = field(default_factory=dict)
    """Further hyper-parameters by name, for every loss that has one of that name."""


@dataclass(frozen=True)
class CPO(Common):
    """Preference training on pairs without a reference model: contrast of the answers, plus NLL of the chosen one."""

    learning_rate: float = 1e-6
    """Peak learning rate of AdamW."""
    loss: Literal["cpo", "simpo", "alpha_po"] = "cpo"
    """What contrasts the two answers: their log-probs (cpo) or those per token (simpo, alpha_po)."""
    beta: float = 0.1
    """Scale of the contrast; SimPO's authors use 2 to 2.5."""
    gamma: float = 0.5
    """Target margin of simpo and alpha_po."""
    alpha: float = 0.25
    """Shape of alpha_po's reward; at 0 it is simpo's."""
    label_smoothing: float = 0.0
    """Assumed share of pairs labelled the wrong way round (cpo and simpo)."""
    nll: float = 1.0
    """Coefficient of the NLL per token of the chosen answers; SimPO and AlphaPO have none (0)."""


@dataclass(frozen=True)
class ORPO(Common):
    """Preference training on pairs in one stage: NLL of the chosen answers plus the odds ratio of the two."""

    learning_rate: float = 8e-6
    """Peak learning rate of AdamW."""
    odds_ratio: float = 0.1
    """Coefficient of the odds-ratio loss, the paper's lambda; the NLL has 1."""


@dataclass(frozen=True)
class Reward(Common):
    """A reward model: a new head on the model, trained on pairs, on rated answers or on rankings."""

    learning_rate: float = 1e-5
    """Peak learning rate of AdamW."""
    loss: Literal["bradley_terry", "score_regression", "plackett_luce"] = "bradley_terry"
    """What is learned from: pairs (prompt, chosen, rejected), ratings (prompt, completion, score), or rankings (prompt,
    completions, ranks)."""
    centering: float = 0.0
    """Coefficient of (r_chosen + r_rejected)^2, which keeps the scores of pairs near zero; its paper has 0.01."""
    margin: str | None = None
    """Numeric column that says by how much the chosen answer of a pair is better."""


@dataclass(frozen=True)
class PRM(Common):
    """A process reward model: a head that judges each step where it ends, trained on solutions with labeled steps."""

    learning_rate: float = 1e-5
    """Peak learning rate of AdamW."""
    separator: str = "\n"
    """What ends a step; the model reads it after each step, and judges the step there."""
    train_on_last_step_only: bool = False
    """Judge a solution by its last step alone, which makes an outcome reward model."""


@dataclass(frozen=True)
class Distill(SamplingConfig):
    """Training on a teacher's distribution of the next token, on messages, text, or prompts with completions."""

    learning_rate: float = 2e-5
    """Peak learning rate of AdamW."""
    teacher: Teacher = field(default_factory=Teacher)
    """The teacher and the divergence from it."""
    loss: str | dict[str, float | dict[str, Any]] = "distillation"
    """distillation, or a mix of it with token objectives: {distillation: 1.0, nll: 0.5}. Those learn from the data's
    answers alone; sampled_reverse_kl, a policy gradient with the reverse KL of each token for its cost, from the
    student's alone."""
    weighting: Literal["token_mean", "sequence_mean"] = "token_mean"
    """Whether every token or every answer counts the same, in every loss that has no weighting of its own."""
    train_on: Literal["auto", "assistant", "completion", "all"] = "auto"
    """Tokens that carry loss: auto is assistant for messages, completion after a prompt, and all of a plain text."""
    on_policy: float = 0.0
    """Share of the steps that learn from answers which the student samples itself, λ of GKD; 1 is all of them."""
    group_size: int = 1
    """Answers that the student samples to each prompt."""


@dataclass(frozen=True)
class GRPO(PolicyGradientConfig):
    """Reinforcement learning from rewards, each answer compared with the others to its prompt."""

    variant: Name = "grpo"
    """Named settings of the loss, its weighting and the advantage; what is given below takes their place."""
    weighting: Weighting | None = None
    """Whether tokens or answers count the same, or a token 1 over max_tokens."""
    scale: Scale | None = None
    """What differences in reward are divided by: the standard deviation in the group, in the batch, or nothing."""
    reward_aggregation: Literal["sum", "normalize"] = "sum"
    """Whether rewards are summed before they are compared, or compared one by one (GDPO)."""
    dynamic_sampling: bool | None = None
    """Pass over groups whose rewards are all the same and sample others (dynamic sampling)."""
    kl_as: Literal["loss", "reward"] = "loss"
    """Whether the divergence from the reference is a loss of its own, or is taken off the reward."""


@dataclass(frozen=True)
class RLOO(GRPO):
    """Reinforcement learning from rewards, each answer compared with the mean of the others to its prompt."""

    variant: Name = "rloo"
    """Named settings of the loss, its weighting and the advantage, as for grpo."""
    group_size: int = 4
    """Answers to each prompt."""
    beta: float = 0.05
    """Strength of the pull towards the reference policy; 0 needs no reference."""
    kl_as: Literal["loss", "reward"] = "reward"
    """Whether the divergence from the reference is a loss of its own, or is taken off the reward."""


@dataclass(frozen=True)
class PPO(PolicyGradientConfig):
    """Reinforcement learning from rewards with a value function, on one answer or several to each prompt."""

    group_size: int = 1
    """Answers to each prompt."""
    batch_size: int = 64
    """Prompts per rollout, over all ranks."""
    epochs_per_rollout: int = 4
    """How often a rollout is trained on."""
    beta: float = 0.05
    """Strength of the pull towards the reference policy, taken off the reward of each token; 0 needs no reference."""
    gamma: float = 1.0
    """Discount of later rewards, per token."""
    lam: float = 0.95
    """λ of generalized advantage estimation: 0 trusts the values, 1 the rewards."""
    value_coefficient: float = 0.1
    """Weight of the loss of the values."""
    value_clip: float = 0.2
    """How far a value may move from that at the start of the rollout before its loss stops falling."""
    value_model: str | None = None
    """Name or directory of a model of its own for the values, such as a reward model or the critic that an earlier run
    left, critic/model in its directory; null puts a value head on the policy."""
    value_head: str | None = None
    """The value head that an earlier run left, value_head.safetensors in its directory; null begins at 0."""
    missing_eos_penalty: float = 0.0
    """What an answer that was cut at max_tokens loses of its reward."""


@dataclass(frozen=True)
class OnlineDPO(OnlineConfig):
    """Preference training on pairs of the policy's own answers, the best and the worst of each group by reward."""

    group_size: int = 2
    """Answers to each prompt, of which two make a pair."""
    loss: str | dict[str, float | dict[str, Any]] = "dpo"
    """A preference objective of burnish.objectives, or a mix, as for dpo: {dpo: 0.8, bco_pair: 0.2, nll: 1.0}."""
    beta: float = 0.1
    """Strength of the pull towards the reference, for every loss that has a beta."""
    label_smoothing: float = 0.0
    """Assumed share of pairs that are the wrong way round, for every loss that knows it."""
    reference: ReferenceKind = "auto"
    """Where reference log-probs come from, as for dpo; precompute does not apply."""
    missing_eos_penalty: float = 0.0
    """What an answer that was cut at max_tokens loses of its reward."""
    loss_kwargs: dict[str, float] = field(default_factory=dict)
    """Further hyper-parameters by name, such as {gamma: 0.5}, for every loss that has one of that name."""


@dataclass(frozen=True)
class Demo:
    """Train a small model from scratch, offline: SFT, then DPO on its own answers, then GRPO."""

    output: str = "burnish-demo"
    """Directory of the demonstration; a number is appended if it is taken."""
    seed: int = 0
    """Seed of questions, weights and samples."""
    sft_steps: int = 300
    """Optimizer steps of SFT, 128 sums each."""
    dpo_steps: int = 150
    """Optimizer steps of DPO, 128 pairs each."""
    questions: int = 4000
    """Questions that the model answers to make pairs, four times each."""
    grpo_steps: int = 120
    """Optimizer steps of GRPO, three on 8 answers to each of 128 questions."""
