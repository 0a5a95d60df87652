"""Settings that recipes share whose completions are sampled while they train."""

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from ..config import Common, Limits, ReferenceKind
from ..rollouts.sample import SamplingParams

Old = Literal["sampled", "recomputed"]
Weighting = Literal["token_mean", "sequence_mean", "fixed_length"]
Correction = Literal["none", "tis", "icepop", "sequence_tis", "sequence_mask", "geometric_mask"]


class Bounds(NamedTuple):
    """Of the ratio π_old/μ."""

    low: float
    high: float


CORRECTIONS = {
    "tis": Bounds(0.0, 2.0),
    "icepop": Bounds(0.5, 5.0),
    "sequence_tis": Bounds(0.0, 2.0),
    "sequence_mask": Bounds(0.5, 2.0),
    "geometric_mask": Bounds(0.99, 1.01),
}


@dataclass(frozen=True)
class VLLM:
    """vLLM, where it samples instead of the policy itself."""

    url: str | None = None
    """Address of a server that runs, such as http://127.0.0.1:8000; null starts one, which ends with the run."""
    python: str | None = None
    """Interpreter of the environment that vLLM is installed in, for a server that is started; null is this one."""
    updates: Literal["files", "nccl", "adapters"] = "files"
    """How weights get to a server: through files, from GPU to GPU, or as one more LoRA adapter for every version."""
    directory: str | None = None
    """For files of weights, where the server sees them too; null is in the run directory."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further settings by vLLM's names, such as {max_model_len: 2048, gpu_memory_utilization: 0.4}; of a server that
    runs, none."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables of a server that is started, such as {CUDA_VISIBLE_DEVICES: "1"}."""
    trainer_address: str | None = None
    """Of this machine, where a server joins it for updates by nccl; null is that on the route to the server."""
    timeout: float = 600.0
    """Seconds that one completion may take, before it is asked for again."""
    attempts: int = 8
    """How often completions, or new weights, are tried; each failure is logged, and the last one ends the run."""
    concurrency: int = 64
    """Completions that a server is asked for at once."""
    patience: float = 1200.0
    """Seconds in which a server must start, or give something of what it is asked for; then the run ends."""


@dataclass(frozen=True)
class SamplingConfig(Common):
    """How answers are sampled."""

    group_size: int = 8
    """Answers to each prompt."""
    max_tokens: int = 256
    """Tokens of an answer."""
    temperature: float = 1.0
    """Of the softmax that answers are drawn from; the log-probs that train are at this temperature too."""
    top_p: float = 1.0
    """Share of the probability that answers are drawn from."""
    top_k: int = 0
    """Number of tokens that answers are drawn from; 0 is all."""
    source: Literal["policy", "vllm", "vllm_engine"] = "policy"
    """What draws answers: the policy itself, a vLLM server, or vLLM within this process."""
    vllm: VLLM = field(default_factory=VLLM)
    """The server."""
    cache_bytes: int | None = None
    """Keys and values that the policy holds at once while it samples; null is a quarter of a GPU's memory that is free
    before training, or 2 GiB on a CPU. Answers that are read together may be rounded otherwise than apart: give a
    number where a run may be resumed on another GPU, or on one that others use too."""
    show_every: int = 10
    """Rollouts between two of which a few answers are shown; 0 shows none."""

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(self.max_tokens, self.temperature, self.top_p, self.top_k)


@dataclass(frozen=True)
class OnlineConfig(SamplingConfig):
    """Training on answers that the policy samples and that rewards judge."""

    batch_size: int = 8
    """Prompts per rollout, over all ranks."""
    learning_rate: float = 1e-6
    """Peak learning rate of AdamW."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls after the warmup."""
    max_length: int | None = 512
    """Tokens of a prompt; null for no limit."""
    truncation: Literal["keep_start", "keep_end", "error"] = "error"
    """What becomes of a longer prompt: its start or its end is kept, or it is an error."""
    rewards: dict[str, float | dict[str, Any]] = field(default_factory=dict)
    """Reward functions and their weights: {math: 1.0, format: 0.2}, or your own as module:function; none is
    {environment: 1.0} where there is an environment. One that returns None is left out of the sum; one that fails
    (raises, takes too long, returns NaN) masks the answer."""
    environment: str | dict[str, dict[str, Any]] | None = None
    """What the policy converses with: guess_number, reasoning_gym, {tools: {tools: [calculator]}}, or your own as
    module:Environment; null for single answers."""
    limits: Limits = field(default_factory=Limits)
    """Of a conversation; max_tokens is that of one turn."""
    max_staleness: int = 0
    """How many rollouts behind the weights of its step an answer may be; above 0, answers are drawn while training."""
    epochs_per_rollout: int = 1
    """How often a rollout is trained on."""
    minibatches: int = 1
    """Optimizer steps in which a rollout is trained on, each epoch."""
    mask_truncated: bool = False
    """Leave out answers that were cut at max_tokens."""
    eval_temperature: float = 0.0
    """Temperature of the answers to `eval_data`, which the policy itself draws; 0 takes the likeliest token."""


@dataclass(frozen=True)
class PolicyGradientConfig(OnlineConfig):
    """Reinforcement learning from rewards by policy gradient."""

    loss: str | dict[str, float | dict[str, Any]] | None = None
    """A policy objective of burnish.objectives, or a mix of it with others: {clipped_surrogate: 1, entropy_bonus: .01};
    null for the recipe's own."""
    beta: float = 0.0
    """Strength of the pull towards the reference policy; 0 needs no reference."""
    kl: Literal["k1", "k2", "k3"] | None = None
    """The estimator of the divergence from it; null is k3 for a loss, and k1 for what is taken off the reward."""
    reference: ReferenceKind = "auto"
    """Where reference log-probs come from, as for dpo; precompute does not apply."""
    old: Old | None = None
    """The policy that ratios are to: the sampler's own log-probs, or the trainer's at the start of the rollout; null is
    recomputed for a ratio of whole completions (rloo, gspo, gspo_token, gmpo, vespo), for ppo, and with a correction,
    and sampled otherwise."""
    correction: Correction = "none"
    """What weighs a token, or masks it, by how far trainer and sampler are apart; not with old sampled."""
    correction_low: float | None = None
    """Lower bound of that ratio, for masks and icepop; null for the usual one of the correction."""
    correction_high: float | None = None
    """Upper bound of that ratio."""
    loss_kwargs: dict[str, float] = field(default_factory=dict)
    """Hyper-parameters by name, such as {clip_low: 0.2, clip_high: 0.28}, for every loss that has one of that name."""

    @property
    def bounds(self) -> Bounds:
        low, high = CORRECTIONS[self.correction]
        return Bounds(
            low if self.correction_low is None else self.correction_low,
            high if self.correction_high is None else self.correction_high,
        )
