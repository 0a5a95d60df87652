"""The settings of every recipe: its fields are the YAML keys and the flags of its command.

They are apart from the recipes so that the command line can be read and checked without torch.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ..config import (
    ClosedUnitInterval,
    LossMix,
    Named,
    NoiseShare,
    NonNegativeFloat,
    OfflineConfig,
    OpenUnitInterval,
    PositiveFloat,
    PositiveInt,
    Referenced,
    Routed,
    Settings,
    Teacher,
    losses_named,
)
from ..rl.settings import OnlineConfig, PolicyGradientConfig, SamplingConfig

VariantName = Literal[
    "grpo",
    "dr_grpo",
    "dapo",
    "cispo",
    "gspo",
    "gspo_token",
    "gmpo",
    "sapo",
    "vespo",
    "dppo",
    "rloo",
]

AdvantageName = Literal[
    "group",
    "rloo",
    "opo",
    "gpg",
    "maxrl",
    "max_at_k",
    "remax",
    "optimal_token",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
]


@dataclass(frozen=True)
class SFT(Routed, OfflineConfig):
    """Supervised fine-tuning on messages, text, or prompts with completions."""

    learning_rate: NonNegativeFloat = 2e-5
    loss: LossMix = "nll"
    """A token objective of burnish.objectives.supervised, or a mix: {nll: 1.0, z_loss: 1.0e-4};
    label smoothing is {label_smoothed_nll: {label_smoothing: 0.1}}."""
    weighting: Literal["token_mean", "length_normalized"] = "token_mean"
    """Weight of a token in every loss without its own weighting: the same for each, or 1 over its
    completion's length."""
    train_on: Literal["auto", "assistant", "completion", "all"] = "auto"
    """Tokens that carry loss: auto is assistant for messages, completion after a prompt, and all of
    a plain text. A completion is all that the chat template adds to the prompt, as in TRL, often
    with a newline after the end token; assistant ends with the end token."""


@dataclass(frozen=True)
class Pairs(Settings):
    """Preference training on pairs of a chosen and a rejected completion of one prompt."""

    learning_rate: NonNegativeFloat = 1e-6
    beta: PositiveFloat = 0.1
    """Strength of the pull towards the reference, or scale of the contrast, for every loss that has
    a beta.
    """
    label_smoothing: NoiseShare = 0.0
    """Assumed share of pairs labeled the wrong way round, for every loss that has this."""


def _distill_alone(teacher: Teacher) -> Iterator[str]:
    if teacher.divergence == "taid":
        yield "teacher.divergence: taid follows the loss of distill; use another one here"
    if teacher.reads_text:
        yield (
            f"teacher.divergence: {teacher.divergence} is for distill, whose loss is per token; use another one here"
        )
    for name in ("prompt", "reprompt", "sync_steps"):
        if getattr(teacher, name) is not None:
            yield f"teacher.{name}: is for distill; leave it out here"
    if teacher.server is not None:
        yield "teacher.server: is for distill; give --teacher.model here"


@dataclass(frozen=True)
class DPO(Referenced, Routed, Pairs, OfflineConfig):
    """Preference training on pairs of a chosen and a rejected completion of one prompt."""

    loss: LossMix = "dpo"
    """A preference objective of burnish.objectives, or a mix: {dpo: 0.8, bco_pair: 0.2, nll: 1.0};
    instead of its coefficient, a loss may have {coefficient: 0.8, beta: 0.2, ...}. nll is that of
    the chosen completions. Your own is module:function, or from Python the function."""
    logprob_reduction: Literal["sum", "mean"] = "sum"
    """Log-prob of a completion: the sum over its tokens, as in the papers, or their mean."""
    ld_alpha: ClosedUnitInterval = 1.0
    """How much of a completion's log-prob beyond the length of the pair's shorter one counts
    (LD-DPO); 1 is all.
    """
    pair_weight: Literal["one", "wpo"] = "one"
    """Weight of a pair: 1, or the probability that the policy generates both of its completions
    (WPO).
    """
    divergence: Literal["reverse_kl", "forward_kl", "js", "alpha"] = "reverse_kl"
    """The f-divergence from the reference (f-DPO); alpha needs `divergence_alpha`."""
    divergence_alpha: OpenUnitInterval = 0.5
    """Order of the alpha-divergence."""
    teacher: Teacher = field(default_factory=Teacher)
    """A teacher, for the loss `distillation` in a mix; for tdpo1 and tdpo2 it is the reference."""
    loss_kwargs: dict[str, float] = field(default_factory=dict)
    """Further hyper-parameters by name, such as {gamma: 0.5, tau: 0.05}, for every loss that has
    one of that name.
    """

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.logprob_reduction == "mean" and self.ld_alpha != 1:
            yield "ld_alpha: is for sums of log-probs; leave it out, or set logprob_reduction to sum"
        yield from _distill_alone(self.teacher)


@dataclass(frozen=True)
class CPO(Routed, Pairs, OfflineConfig):
    """Preference training without a reference: contrast of a pair, plus NLL of the chosen one."""

    loss: Literal["cpo", "simpo", "alpha_po"] = "cpo"
    """Contrast of the two completions: of their log-probs (cpo) or of those per token (simpo,
    alpha_po); for SimPO, its authors set beta to 2 to 2.5."""
    gamma: NonNegativeFloat = 0.5
    """Target margin of simpo and alpha_po."""
    alpha: float = 0.25
    """Shape of alpha_po's reward; at 0 it is simpo's."""
    nll: NonNegativeFloat = 1.0
    """Coefficient of the NLL per token of the chosen completions; SimPO and AlphaPO have none
    (0).
    """
    nll_of: Literal["chosen", "reference"] = "chosen"
    """Whose NLL that is: the chosen completion's, or the one of a third completion, a gold one, in
    the column `reference` of the data (TPO: Saeidi et al. 2024, arXiv:2405.16681; with simpo, its
    TPO-L)."""

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.nll_of == "reference" and not self.nll:
            yield "nll_of: the coefficient nll is 0, so no gold completion is learned from; leave nll_of out"


@dataclass(frozen=True)
class ORPO(Routed, OfflineConfig):
    """Preference training in one stage: NLL of the chosen completions plus the pair's odds ratio."""

    learning_rate: NonNegativeFloat = 8e-6
    odds_ratio: NonNegativeFloat = 0.1
    """Coefficient of the odds-ratio loss, the paper's lambda; the NLL has 1."""


@dataclass(frozen=True)
class KTO(Referenced, Routed, OfflineConfig):
    """Training on desirable and undesirable completions; a preference pair is one of each."""

    learning_rate: NonNegativeFloat = 1e-6
    loss: LossMix = "kto"
    """kto, bco or apo_zero_unpaired, or a mix: {kto: 1.0, nll: 0.1}. nll is that of the desirable
    completions.
    """
    beta: PositiveFloat = 0.1
    """Strength of the pull towards the reference, for every loss that has a beta."""
    desirable_weight: PositiveFloat = 1.0
    """Weight of a desirable completion (kto, apo_zero_unpaired); KTO's paper balances the classes
    to within a factor of 4/3."""
    undesirable_weight: PositiveFloat = 1.0
    """Weight of an undesirable completion (kto, apo_zero_unpaired)."""
    teacher: Teacher = field(default_factory=Teacher)
    """A teacher, for the loss `distillation` in a mix."""
    loss_kwargs: dict[str, float] = field(default_factory=dict)
    """Further hyper-parameters by name, for every loss that has one of that name."""

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if "kto" in losses_named(self.loss) and self.batch_size < 2:
            yield "kto: its z0 comes from completions of other prompts; use a batch_size of 2 or more"
        if "kto" in losses_named(self.loss) and self.reference == "precompute":
            yield "reference: the mismatched completions of kto can't be precomputed; use copy or adapters_off"
        yield from _distill_alone(self.teacher)


@dataclass(frozen=True)
class Reward(OfflineConfig):
    """A reward model: a new head, trained on pairs, on rated completions or on rankings."""

    loss: Literal[
        "bradley_terry",
        "bradley_terry_ties",
        "ordinal_preference",
        "score_regression",
        "hl_gauss",
        "plackett_luce",
    ] = "bradley_terry"
    """Kind of data: pairs (prompt, chosen, rejected), of which some may be ties
    (bradley_terry_ties), or which say by what degree the chosen one is better (ordinal_preference);
    ratings (prompt, completion, score), learned as numbers (score_regression) or as a histogram
    (hl_gauss); or rankings (prompt, completions, ranks)."""
    centering: NonNegativeFloat = 0.0
    """Coefficient of (r_chosen + r_rejected)^2, which keeps the scores of pairs near zero; its
    paper has 0.01.
    """
    margin: str | None = None
    """Numeric column that says by how much the chosen completion of a pair is better."""
    preference: str = "preference"
    """Numeric column with the share of people who prefer the chosen completion: 1, or 0.5 in a tie
    (bradley_terry_ties), or any share (ordinal_preference)."""
    tie_threshold: PositiveFloat | None = None
    """Difference of two scores below which a tie is the likelier, for bradley_terry_ties."""
    lowest_score: float | None = None
    """Lower end of the histogram of hl_gauss, and the lowest rating that there may be."""
    highest_score: float | None = None
    """Upper end of the histogram of hl_gauss, and the highest rating that there may be."""
    bins: PositiveInt = 51
    """Bins of the histogram of hl_gauss, all of one width."""
    sigma: PositiveFloat | None = None
    """How far hl_gauss smooths a rating, in its units; null is 0.75 of the width of a bin, as in
    the paper.
    """

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        of_pairs = self.loss in ("bradley_terry", "bradley_terry_ties", "ordinal_preference")
        if self.centering and not of_pairs:
            yield f"centering: is for pairs, such as with the loss bradley_terry; the loss is {self.loss}"
        if self.margin and self.loss != "bradley_terry":
            yield f"margin: is for the loss bradley_terry; the loss is {self.loss}"
        degrees = self.loss in ("bradley_terry_ties", "ordinal_preference")
        if self.preference != "preference" and not degrees:
            yield (
                "preference: is for the losses bradley_terry_ties and ordinal_preference; the loss is "
                f"{self.loss}"
            )
        if (self.loss == "bradley_terry_ties") != (self.tie_threshold is not None):
            yield (
                "tie_threshold: is what bradley_terry_ties needs, and for no other loss; got "
                f"{self.tie_threshold} with the loss {self.loss}"
            )
        yield from self._histogram_contradictions()

    def _histogram_contradictions(self) -> Iterator[str]:
        low, high = self.lowest_score, self.highest_score
        if self.loss != "hl_gauss":
            for name in ("lowest_score", "highest_score", "bins", "sigma"):
                if getattr(self, name) != getattr(Reward, name):
                    yield f"{name}: is for the histogram of hl_gauss; the loss is {self.loss}"
            return
        if low is None or high is None or not -math.inf < low < high < math.inf:
            yield (
                "lowest_score, highest_score: hl_gauss needs both ends of its histogram, the lower one first; got "
                f"{low} and {high}"
            )
        if self.bins < 3:
            yield f"bins: a histogram has 3 or more, got {self.bins}; for a single output use score_regression"


@dataclass(frozen=True)
class PRM(OfflineConfig):
    """A process reward model: a head that judges each step of a solution, from labeled steps."""

    separator: str = "\n"
    """Text that ends a step; the model reads it after each step, and scores the step there."""
    train_on_last_step_only: bool = False
    """Judge a solution by its last step alone, which makes an outcome reward model."""


@dataclass(frozen=True)
class Distill(SFT, SamplingConfig):
    """Training on a teacher's distribution of the next token, on data as SFT takes it."""

    teacher: Teacher = field(default_factory=Teacher)
    """The teacher and the divergence from it."""
    loss: LossMix = "distillation"
    """distillation, or a mix of it with token objectives: {distillation: 1.0, nll: 0.5}. Those
    learn from the data's completions alone; sampled_reverse_kl, a policy gradient with the reverse
    KL of each token for its cost, and iw_opd, the same with more weight on early tokens, from the
    student's alone."""
    on_policy: ClosedUnitInterval = 0.0
    """Share of the steps on completions that the student samples itself, λ of GKD; 1 is all of
    them.
    """
    group_size: PositiveInt = 1

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        yield from self._self_taught_contradictions()
        on_samples = sorted({"sampled_reverse_kl", "iw_opd"} & losses_named(self.loss))
        yield from self._server_contradictions(on_samples)
        yield from self._span_contradictions(on_samples)
        if not self.on_policy:
            if on_samples:
                yield f"loss: {on_samples[0]} is for the student's own completions; set on_policy above 0"
            return
        yield from self.sampling_contradictions()
        if on_samples and self.truncated:
            yield (
                f"top_p, top_k, min_p: {on_samples[0]} is a policy gradient, biased where tokens are sampled from a "
                "part of the distribution; sample from all of it, or use the loss distillation"
            )
        if on_samples and self.repetition_penalty != 1:
            yield (
                f"repetition_penalty: {on_samples[0]} is a policy gradient, biased where tokens are sampled from "
                "another distribution than the policy's; leave it out, or use the loss distillation"
            )
        is_stored = self.teacher.model is None or self.teacher.top_k is not None
        if self.teacher.server is None and is_stored:
            yield (
                "on_policy: the student's completions are not known before training, so no teacher's outputs can have "
                "been stored for them; give --teacher.server, or --teacher.model without teacher.top_k"
            )

    def _span_contradictions(self, on_samples: Sequence[str]) -> Iterator[str]:
        """Yield what contradicts a divergence over the spans that two tokenizers share."""
        if not self.teacher.reads_text:
            return
        if on_samples:
            yield (
                f"teacher.divergence: {self.teacher.divergence} is over spans of text, and {on_samples[0]} needs the "
                "teacher's log-prob of each of the student's tokens; use the loss distillation"
            )
        if self.parallel.cp_size > 1:
            yield (
                f"parallel.cp_size: splits the rows, and with them the spans of {self.teacher.divergence}; leave it "
                "out, or take parallel.dp_shard_size"
            )

    def _server_contradictions(self, on_samples: Sequence[str]) -> Iterator[str]:
        if self.teacher.server is None:
            return
        if on_samples and self.temperature != 1:
            yield (
                f"temperature: {on_samples[0]} compares log-probs at the temperature of the sampler, and a vLLM server "
                "gives those at 1; leave it out, or give --teacher.model"
            )
        if self.parallel.ranks_per_batch > 1:
            yield (
                "teacher.server: ranks that compute one batch together would each ask it, and may be told otherwise; "
                "shard the student by --parallel.dp_shard_size instead"
            )

    def _self_taught_contradictions(self) -> Iterator[str]:
        """Yield what stands against a teacher that follows the student, or reads about it."""
        if self.teacher.reprompt is not None and self.on_policy != 1:
            yield "teacher.reprompt: is asked about completions of the student's; set on_policy to 1"
        if self.teacher.reprompt is not None and self.streaming:
            yield "teacher.reprompt: gets rows, of which a stream keeps none; leave streaming out"
        if not self.teacher.sync_steps:
            return
        if self.lora.enabled:
            yield "teacher.sync_steps: only a whole model follows the student; leave it out, or train without adapters"
        named = isinstance(self.model, str) and isinstance(self.teacher.model, str)
        if named and self.teacher.model != self.model:
            yield (
                f"teacher.sync_steps: the teacher begins as the student, wanted teacher.model {self.model}, got "
                f"{self.teacher.model}; give that name, or leave it out"
            )


@dataclass(frozen=True)
class GRPO(PolicyGradientConfig):
    """Reinforcement learning from rewards, relative to the other completions of a prompt."""

    variant: VariantName = "grpo"
    """Named settings of the loss, its weighting and the advantage; the settings below override
    them.
    """
    weighting: Literal["token_mean", "length_normalized", "fixed_length"] | None = None
    """Weight of a token: the same for each, 1 over its completion's length, or 1 over
    max_tokens.
    """
    advantage: AdvantageName | None = None
    """What a completion's reward is compared with; null is rloo for the variant rloo, else group.
    The mean of its group (group), of the others in it (rloo), a mean weighted by length (opo); that
    mean, counting informative groups alone (gpg), or relative to it (maxrl); the best of k others
    (max_at_k); the prompt's greedy completion, which is sampled beside the others (remax); at each
    position the best baseline for the gradient's variance (optimal_token); the
    whole batch (reinforce_plus_plus, for single completions; ..._baseline, for groups).
    """
    advantage_k: PositiveInt | None = None
    """The k of max_at_k, which trains the best of k completions; null is group_size."""
    scale: Literal["group", "batch", "none"] | None = None
    """Divisor of differences in reward: the standard deviation in the group, in the batch, or
    nothing; null is the variant's for the advantage group, and nothing for others.
    """
    reward_aggregation: Literal["sum", "normalize"] = "sum"
    """Sum rewards before they are compared, or compare them one by one (GDPO)."""
    dynamic_sampling: bool | None = None
    """Skip groups whose rewards are all equal, and sample others instead."""
    kl_as: Literal["loss", "reward"] = "loss"
    """Use the divergence from the reference as a loss of its own, or subtract it from the
    reward.
    """
    use_bias_correction_kl: bool = False
    """Weight that loss by the ratio of each token, so that its gradient is the divergence's
    (DeepSeek-V3.2).
    """

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        yield from self._group_contradictions()
        yield from self._scale_contradictions()
        kl_in_reward = self.beta > 0 and self.kl_as == "reward"
        another = self.baseline != "group"
        if self.reward_aggregation == "normalize" and (another or kl_in_reward):
            yield (
                "reward_aggregation: normalize compares each reward within the group by itself, which leaves no place "
                "for another baseline or for the divergence; use the advantage group, and kl_as loss"
            )
        if self.advantage_differs and "off_policy" in self.masks:
            yield (
                f"masks: off_policy wants one advantage per completion, and those of {self.baseline} differ from "
                "token to token; leave it out, or use another advantage"
            )
        if self.use_bias_correction_kl and self.kl_as == "reward":
            yield "use_bias_correction_kl: is for the divergence as a loss; leave it out, or set kl_as to loss"

    def _group_contradictions(self) -> Iterator[str]:
        if self.group_size < 2 and self.baseline not in ("reinforce_plus_plus", "remax"):
            yield (
                "group_size: a completion is compared with the others of its prompt, wanted >= 2, got "
                f"{self.group_size}; ppo, and the advantages reinforce_plus_plus and remax, learn from single "
                "completions"
            )
        dynamic = self.dynamic_sampling or (
            self.dynamic_sampling is None and self.variant == "dapo"
        )
        if self.group_size < 2 and dynamic:
            yield "dynamic_sampling: the reward of a single completion never varies; set it to false"
        elif dynamic and self.baseline == "remax":
            yield (
                "dynamic_sampling: completions of equal rewards teach remax, if the greedy one has another; set it to "
                "false"
            )
        if self.advantage_k is None:
            return
        if self.baseline != "max_at_k":
            yield f"advantage_k: is for the advantage max_at_k, and this is {self.baseline}; leave it out"
        elif not 2 <= self.advantage_k <= self.group_size:
            yield (
                f"advantage_k: wanted from 2 to group_size, {self.group_size}, got {self.advantage_k}; for the mean "
                "of single completions, use the advantage rloo"
            )

    def _scale_contradictions(self) -> Iterator[str]:
        if self.scale is None or self.baseline == "group":
            return
        if self.scale == "group":
            yield (
                f"scale: a group's standard deviation does not go with the baseline of {self.baseline}; use batch "
                "or none"
            )
        elif self.baseline.startswith("reinforce_plus_plus"):
            yield f"scale: {self.baseline} is scaled over the batch by itself; leave it out"

    @property
    def baseline(self) -> AdvantageName:
        """The value of ``advantage``, given or not."""
        if self.advantage is not None:
            return self.advantage
        return "rloo" if self.variant == "rloo" else "group"

    @property
    def samples_greedily(self) -> bool:
        return self.baseline == "remax"

    @property
    def advantage_differs(self) -> bool:
        """Whether the tokens of a completion have other advantages than each other."""
        kl_in_reward = self.beta > 0 and self.kl_as == "reward"
        if self.baseline == "reinforce_plus_plus":
            return kl_in_reward
        return self.baseline == "optimal_token"


@dataclass(frozen=True)
class RLOO(GRPO):
    """Reinforcement learning from rewards, relative to the mean of a prompt's other completions."""

    variant: VariantName = "rloo"
    group_size: PositiveInt = 4
    beta: NonNegativeFloat = 0.05
    kl_as: Literal["loss", "reward"] = "reward"


@dataclass(frozen=True)
class PPO(PolicyGradientConfig):
    """Reinforcement learning from rewards with a value function, which needs no group."""

    group_size: PositiveInt = 1
    prompts_per_rollout: PositiveInt = 64
    epochs_per_rollout: PositiveInt = 4
    beta: NonNegativeFloat = 0.05
    """Strength of the penalty, per token, for leaving the reference policy; 0 needs no
    reference.
    """
    gamma: ClosedUnitInterval = 1.0
    """Discount of later rewards, per token."""
    lam: ClosedUnitInterval = 0.95
    """λ of generalized advantage estimation: 0 trusts the values, 1 the rewards."""
    value_coefficient: NonNegativeFloat = 0.1
    """Weight of the loss of the values."""
    value_clip: NonNegativeFloat = 0.2
    """How far a value may move from that at the start of the rollout before its loss stops
    falling.
    """
    value_model: Named | None = None
    """Name or directory of a model of its own for the values, such as a reward model or the critic
    that an earlier run left, critic/model in its directory; null puts a value head on the
    policy.
    """
    value_head: str | None = None
    """The value head that an earlier run left, value_head.safetensors in its directory; null begins
    at 0.
    """
    missing_eos_penalty: float = 0.0
    """Penalty on the reward of a completion that was cut at max_tokens."""

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.value_head is not None and self.value_model is not None:
            yield "value_head: value_model has a head of its own; give one of the two"
        if "off_policy" in self.masks:
            yield (
                "masks: off_policy wants one advantage per completion, and those of ppo differ from token to token; "
                "leave it out"
            )


@dataclass(frozen=True)
class OnlineDPO(Pairs, OnlineConfig):
    """Preference training on the policy's own completions, a group's best and worst by reward."""

    group_size: PositiveInt = 2
    """Completions per prompt, of which two make a pair."""
    loss: LossMix = "dpo"
    """A preference objective of burnish.objectives, or a mix, as for dpo: {dpo: 0.8, bco_pair: 0.2,
    nll: 1.0}.
    """
    missing_eos_penalty: float = 0.0
    """Penalty on the reward of a completion that was cut at max_tokens."""

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.group_size < 2:
            yield f"group_size: a pair needs two completions of a prompt, wanted >= 2, got {self.group_size}"


@dataclass(frozen=True)
class Demo:
    """Train a small model from scratch, offline: SFT, DPO on its own completions, GRPO."""

    output: str = "burnish-demo"
    """Directory of the demonstration; a number is appended if it is taken."""
    seed: int = 0
    """Seed of questions, weights and samples."""
    sft_steps: int = 300
    """Optimizer steps of SFT, 96 sums each."""
    dpo_steps: int = 60
    """Optimizer steps of DPO, 64 pairs each."""
    questions: int = 2500
    """Questions that the model answers to make pairs, four times each."""
    grpo_steps: int = 51
    """Optimizer steps of GRPO, three on 4 completions of each of 256 questions."""
