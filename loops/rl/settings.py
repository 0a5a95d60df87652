"""Settings that recipes share whose completions are sampled while they train."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ..config import (
    ClosedUnitInterval,
    Common,
    Limits,
    LossMix,
    Named,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    Referenced,
    RewardMix,
    Schedule,
    Settings,
)
from ..registry import nearest
from ..rewards.resolve import SHIPPED
from ..rollouts.sample import SamplingParams

# Nats per token. Other kernels and precisions differ by 0.01 to 0.1 on average; a model that never
# got its weights by 4 and more.
MAX_LOGP_DIFFERENCE = 1.0

CORRECTIONS = {  # bounds of the ratio π_old/μ: low, high
    "tis": (0.0, 2.0),
    "icepop": (0.5, 5.0),
    "sequence_tis": (0.0, 2.0),
    "sequence_mis": (0.0, 2.0),
    "sequence_mask": (0.5, 2.0),
    "geometric_mask": (0.99, 1.01),
    "decoupled": (0.0, math.inf),
}

MASKS: dict[str, dict[str, float | None]] = {  # their hyper-parameters; None must be given
    "high_entropy": {"quantile": None},
    "clip_cov": {"share": 2e-4, "low": 1.0, "high": 5.0},
    "m2po": {"threshold": 0.04},
    "off_policy": {"threshold": None},
    "veto": {"threshold": None},
    "total_variation": {"low": None, "high": None},
}
ROLLOUT_MASKS = {"high_entropy", "clip_cov", "m2po"}  # they compare all tokens of a rollout
TOKEN_MASKS = {*ROLLOUT_MASKS, "total_variation"}  # the others leave out whole completions


@dataclass(frozen=True)
class VLLM(Settings):
    """vLLM, where it samples instead of the policy itself."""

    prefix = "vllm."

    url: str | list[str] | None = None
    """Address of a server that runs, such as http://127.0.0.1:8000, or of several that share the
    requests, in a list or with commas; null starts one, which ends with the run."""
    python: str | None = None
    """Interpreter of the environment that vLLM is installed in, for a server that is started; null
    is this one.
    """
    servers: PositiveInt = 1
    """How many servers are started, which share the requests. The devices of CUDA_VISIBLE_DEVICES
    in environment are divided among them."""
    updates: Literal["files", "nccl", "adapters"] = "files"
    """How weights get to a server: through files, from GPU to GPU, or as one more LoRA adapter for
    every version.
    """
    directory: str | None = None
    """For files of weights, with room for all of them, where the server sees them too; null is in
    the run directory, and for vllm_engine in memory, /dev/shm.
    """
    options: dict[str, Any] = field(default_factory=dict)
    """Further settings of one that is started, by vLLM's names: {max_model_len: 2048,
    gpu_memory_utilization: 0.4}.
    """
    environment: dict[str, str] = field(default_factory=dict)
    """Variables of a server that is started, such as {CUDA_VISIBLE_DEVICES: "1"}."""
    host: str = "127.0.0.1"
    """Address that a server which is started listens at; another one than this machine's own opens
    it to the network, where only its random key guards its weights."""
    api_key: str | None = None
    """Key of a server that runs already, sent with every request; one that is started has a random
    key.
    """
    trainer_address: str | None = None
    """Address of this machine for a server that joins it for updates by nccl; null is that on the
    route to it.
    """
    timeout: PositiveFloat = 600.0
    """Seconds that one completion may take, before it is requested again."""
    attempts: PositiveInt = 8
    """How often a completion, or new weights, are tried before the run ends. A refusal does not
    count if the server has completed others since the one before."""
    concurrency: PositiveInt | None = None
    """Completions that a server works on at once; null is as many as its keys and values have room
    for, where it says so, else 64.
    """
    patience: PositiveFloat = 1200.0
    """Seconds in which a server must start, or answer any of its requests; then the run ends."""

    def contradictions(self) -> Iterator[str]:
        if self.trainer_address is not None and self.updates != "nccl":
            yield "vllm.trainer_address: it is for updates by nccl; set vllm.updates to nccl, or leave it out"
        of_a_start = (
            self.python
            or self.options
            or self.environment
            or self.host != VLLM.host
            or self.servers != VLLM.servers
        )
        if self.url is not None and of_a_start:
            yield (
                "vllm.url: that server runs already; leave out python, options, environment, host and servers, or the "
                "url"
            )
        if self.servers > 1 and "port" in self.options:
            yield "vllm.options: port is that of one server; leave it out where vllm.servers are several"
        if len(self.devices) % self.servers:
            yield (
                f"vllm.environment: CUDA_VISIBLE_DEVICES names {len(self.devices)} devices, which vllm.servers="
                f"{self.servers} can't have equally many of; name as many for each"
            )
        if self.url is None and self.api_key is not None:
            yield (
                "vllm.api_key: it is for a server that runs, whose vllm.url is missing; one that is started has a "
                "random key"
            )

    @property
    def devices(self) -> list[str]:
        """Those of CUDA_VISIBLE_DEVICES for servers that are started."""
        named = self.environment.get("CUDA_VISIBLE_DEVICES", "")
        return [device.strip() for device in named.split(",") if device.strip()]

    @property
    def urls(self) -> list[str]:
        return (
            list(map(str.strip, self.url.split(",")))
            if isinstance(self.url, str)
            else self.url or []
        )


@dataclass(frozen=True)
class SamplingConfig(Common):
    """How completions are sampled."""

    group_size: PositiveInt = 8
    """Completions per prompt."""
    max_tokens: PositiveInt = 256
    """Tokens of a completion at most."""
    temperature: NonNegativeFloat = 1.0
    """Temperature of the softmax that tokens are sampled from, and of the log-probs that train."""
    top_p: PositiveShare = 1.0
    """Sample from the likeliest tokens whose probabilities add up to this share."""
    top_k: NonNegativeInt = 0
    """Sample from this many of the likeliest tokens; 0 is all."""
    min_p: ClosedUnitInterval = 0.0
    """Sample from tokens of at least this share of the likeliest token's probability; 0 is all. It
    comes before top_k and top_p."""
    repetition_penalty: PositiveFloat = 1.0
    """Make tokens that the prompt or the completion has already less likely: their logits are
    divided by it where positive, and multiplied where negative. 1 changes nothing."""
    stop: list[str] = field(default_factory=list)
    """Words that end a completion, beside the model's end tokens, such as </answer>. The tokens of
    the word stay in it, and are trained on."""
    source: Literal["policy", "vllm", "vllm_engine"] = "policy"
    """Source of completions: the policy itself, on each rank a share of them, where it is sharded
    from a whole copy; a vLLM server; or vLLM within this process, which must be the only one."""
    vllm: VLLM = field(default_factory=VLLM)
    """The server."""
    cache_bytes: PositiveInt | None = None
    """Keys and values that the policy holds at once while it samples; null is a quarter of a GPU's
    memory that is free before training, or 2 GiB on a CPU. How many completions are read together
    may change their rounding: give a number where a run may be resumed on another GPU, or on one
    that others use too.
    """
    cuda_graphs: bool = False
    """Replay each token step of the policy as one CUDA graph, and read its tokens while the next
    one runs. It has never run on a GPU; on a CPU it takes longer."""
    show_every: NonNegativeInt = 10
    """Show a few completions every so many rollouts; 0 shows none."""

    def sampling_contradictions(self) -> Iterator[str]:
        """Yield what stands against sampling completions as these settings say."""
        for field_name, parts in (("tp_size", "layers"), ("cp_size", "rows")):
            size = getattr(self.parallel, field_name)
            if size > 1:
                yield (
                    f"parallel.{field_name}: a run that samples completions splits no {parts}, got {size}; shard by "
                    f"--parallel.dp_shard_size {size} instead"
                )
        if "" in self.stop:
            yield "stop: an empty word would end every completion at its first token; leave it out"
        if self.temperature == 0:
            yield "temperature: at 0 every completion of a prompt is the same, wanted > 0, such as 1.0"
        if self.source == "policy":
            if self.vllm != VLLM():
                yield "vllm: it is set up, but source is policy; set source to vllm, or leave it out"
        else:
            if self.cuda_graphs:
                yield "cuda_graphs: it is for source policy, and vLLM has its own; leave it out"
            yield from self._vllm_contradictions()

    def _vllm_contradictions(self) -> Iterator[str]:
        if 0 < self.temperature < 0.01:
            yield f"temperature: vLLM samples at 0.01 or above, got {self.temperature:g}"
        if not isinstance(self.model, str):
            yield "source: vLLM loads a model by its name; give the name, or set source to policy"
        if self.dtype == "float64":
            yield "source: vLLM does not compute in float64; set dtype to float32, or source to policy"
        if self.quantize is not None:
            yield "source: a quantized policy has other log-probs than vLLM's plain model; set source to policy"
        if self.vllm.updates == "adapters" and not self.lora.enabled:
            yield "vllm.updates: there are no adapters; set lora.r, or updates to files"
        if (
            self.source == "vllm_engine"
            and replace(self.vllm, options={}, directory=None) != VLLM()
        ):
            yield "vllm: an engine in this process has no other settings than options and directory"

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(
            self.max_tokens,
            self.temperature,
            self.top_p,
            self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            stop_words=tuple(self.stop),
        )

    @property
    def truncated(self) -> bool:
        """True if some tokens are never drawn."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


@dataclass(frozen=True)
class OnlineConfig(Referenced, SamplingConfig):
    """Training on completions that the policy samples and that rewards score."""

    prompts_per_rollout: PositiveInt = 8
    """Prompts per rollout, over all ranks."""
    learning_rate: NonNegativeFloat = 1e-6
    schedule: Schedule = "constant"
    max_prompt_length: PositiveInt | None = 512
    """Tokens of a prompt; null for no limit."""
    truncation: Literal["keep_start", "keep_end", "error"] = "error"
    """The part of a longer prompt that is kept: its start, its end, or nothing (an error)."""
    rewards: RewardMix = field(default_factory=dict)
    """Reward functions and their weights: {math: 1.0, format: 0.2}, or your own as module:function,
    from Python also the function; none is {environment: 1.0} where there is an environment or an
    agent. One that returns None is left out of the sum; one that fails (raises, takes too long,
    returns NaN) masks the completion.
    """
    environment: Named | dict[str, dict[str, Any]] | None = None
    """Environment that the policy converses with: guess_number, reasoning_gym, {tools: {tools:
    [calculator]}}, or your own as module:Environment, from Python also the class; null for single
    completions."""
    agent: Named | dict[str, dict[str, Any]] | None = None
    """Agent that asks the policy over OpenAI's Chat Completions, and returns a reward: your own as
    module:function of (row, url, key), from Python also the function; or a program, {process:
    {command: [python, agent.py]}}; null for none."""
    agent_host: str = "127.0.0.1"
    """Address of this machine at which agents ask; another one than the machine's own opens it to
    the network, where the random key of each conversation alone guards it."""
    order: Named | dict[str, dict[str, Any]] | None = None
    """Your own module:function of (history), from Python also the function, that chooses the rows of
    the next rollout by the rewards of each so far: a curriculum, or a filter of what is too easy or
    too hard. Null goes through the data again and again."""
    limits: Limits = field(default_factory=Limits)
    """Limits of a conversation; max_tokens is that of one turn."""
    max_staleness: NonNegativeInt = 0
    """How many rollouts a completion may lag behind the weights of its step; above 0, sampling runs
    during training.
    """
    in_flight: PositiveInt | None = None
    """Groups that are sampled or wait at once: a rollout takes those that are ready, and waits for a
    slow one only when max_staleness makes it due. From prompts_per_rollout to (max_staleness + 1)
    times as many; null takes prompts in their order.
    """
    epochs_per_rollout: PositiveInt = 1
    """How often a rollout is trained on."""
    minibatches: PositiveInt = 1
    """Optimizer steps per epoch over a rollout."""
    mask_truncated: bool = False
    """Leave out completions that were cut at max_tokens."""
    reference: Literal["auto", "copy", "adapters_off"] = "auto"
    """Where reference log-probs come from: a frozen copy, or the model without its adapters (auto,
    if it has some).
    """
    loss_kwargs: dict[str, float] = field(default_factory=dict)
    """Hyper-parameters by name, such as {clip_low: 0.2, clip_high: 0.28}, for every loss that has
    one of that name.
    """
    eval_temperature: NonNegativeFloat = 0.0
    """Temperature of the completions for `eval_data`; 0 takes the likeliest token."""
    eval_samples: PositiveInt = 1
    """Completions for each prompt of `eval_data`, from the same source as those that train; above 1
    their mean reward (avg@n) and the probability that one of k is right (pass@k) are reported.
    """
    eval_right: float = 1.0
    """The smallest reward of a completion that counts as right, for pass@k."""

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        yield from self.sampling_contradictions()
        if self.streaming:
            yield "streaming: this recipe samples completions for prompts, all of which it reads beforehand"
        yield from self._evaluation_contradictions()
        yield from self._rollout_contradictions()
        yield from self._reward_contradictions()

    def _evaluation_contradictions(self) -> Iterator[str]:
        if self.eval_samples > 1 and self.eval_temperature == 0:
            yield (
                f"eval_samples: at eval_temperature 0 all {self.eval_samples} completions of a prompt are the same; "
                "set eval_temperature, such as to 1.0, or eval_samples to 1"
            )
        if self.eval_samples > 1 and self.eval_data is None:
            yield "eval_samples: there are no prompts to sample for; set eval_data, or leave it out"
        if self.source != "policy" and 0 < self.eval_temperature < 0.01:
            yield f"eval_temperature: vLLM samples at 0, or at 0.01 or above, got {self.eval_temperature:g}"

    def _rollout_contradictions(self) -> Iterator[str]:
        most = (self.max_staleness + 1) * self.prompts_per_rollout
        if self.in_flight is not None and not self.prompts_per_rollout <= self.in_flight <= most:
            yield (
                f"in_flight: wanted from prompts_per_rollout, {self.prompts_per_rollout}, to (max_staleness + 1) times "
                f"as many, {most}, got {self.in_flight}; raise max_staleness, which bounds the age, or leave it out"
            )
        if self.minibatches > self.prompts_per_rollout:
            yield (
                f"minibatches: the {self.prompts_per_rollout} prompts of a rollout can't be shared by "
                f"{self.minibatches} steps; raise prompts_per_rollout, or lower minibatches"
            )

    def _reward_contradictions(self) -> Iterator[str]:
        if self.environment is not None and self.agent is not None:
            yield "agent: a conversation is with an environment or with an agent; leave one of them out"
        if self.agent is None and self.agent_host != OnlineConfig.agent_host:
            yield "agent_host: there is no agent to ask; set agent, or leave it out"
        if not self.converses and not self.rewards:
            yield (
                "rewards: none is named, so nothing could be learned; give at least one, such as --rewards "
                f"'{{exact_match: 1.0}}'. There are {', '.join(SHIPPED)}, or your own as module:function"
            )

    def _without_evaluation(self) -> Iterator[str]:
        if self.schedule in ("reduce_lr_on_plateau", "greedy"):
            yield f"schedule: {self.schedule} follows eval/loss, and held-out prompts have rewards; use another"
        else:
            yield from super()._without_evaluation()

    @property
    def longest(self) -> int | None:
        return self.max_prompt_length

    @property
    def converses(self) -> bool:
        """True if completions are turns of a conversation, whose prompts are not the data's."""
        return self.environment is not None or self.agent is not None

    @property
    def steps_per_rollout(self) -> int:
        return self.epochs_per_rollout * self.minibatches

    @property
    def samples_greedily(self) -> bool:
        """Whether each prompt is also completed at temperature 0, to compare with."""
        return False


@dataclass(frozen=True)
class PolicyGradientConfig(OnlineConfig):
    """Reinforcement learning from rewards by policy gradient."""

    loss: LossMix | None = None
    """A policy objective of burnish.objectives, or a mix of it with others: {clipped_surrogate: 1,
    entropy_bonus: .01}; null for the recipe's own."""
    beta: NonNegativeFloat = 0.0
    """Strength of the pull towards the reference policy; 0 needs no reference."""
    kl: Literal["k1", "k2", "k3"] | None = None
    """The estimator of the divergence from it; null is k3 for a loss, and k1 in the reward."""
    old_logprobs: Literal["sampled", "recomputed"] | None = None
    """The denominator of ratios: the sampler's own log-probs, or the trainer's at the start of the
    rollout; null is recomputed for a ratio of whole completions (rloo, gspo, gspo_token, gmpo,
    vespo), for ppo, and with a correction, else sampled."""
    correction: Literal[
        "none",
        "tis",
        "icepop",
        "decoupled",
        "sequence_tis",
        "sequence_mis",
        "sequence_mask",
        "geometric_mask",
    ] = "none"
    """Importance correction for the mismatch of trainer and sampler: clamp their ratio to bounds
    (tis), set it to 0 outside the bounds (icepop, sequence_mis) or above one (decoupled: AReaL's,
    for stale samples), or use a mask that is 1 within them. The ratio is that of a token (tis,
    icepop, decoupled), of a completion (sequence), or the geometric mean over a completion. Needs
    old_logprobs: recomputed.
    """
    correction_low: NonNegativeFloat | None = None
    """Lower bound of that ratio; null for the usual one of the correction."""
    correction_high: NonNegativeFloat | None = None
    """Upper bound of that ratio; .inf for none."""
    masks: dict[str, dict[str, float]] = field(default_factory=dict)
    """Masks on the losses of the advantage, and their hyper-parameters: {veto: {threshold:
    1.0e-4}}. high_entropy (quantile) keeps the tokens of highest entropy, clip_cov (share, low,
    high) drops a few of large covariance, m2po (threshold) outliers of a stale rollout,
    total_variation (low, high) tokens that have moved far enough, off_policy (threshold) bad
    completions that have become unlikely, veto (threshold) completions with an all but impossible
    token.
    """
    kl_cov_share: PositiveShare = 2e-4
    """Share of the tokens of a rollout, those of largest covariance, that the loss kl_cov
    penalizes.
    """
    max_logp_difference: PositiveFloat | None = None
    """Mean difference of the trainer's and the sampler's log-probs, in nats per token, above which
    the run ends in the first step on a rollout: it was sampled from other weights. Completions of
    older weights are not judged. Null is 1, or no bound where top_p, top_k, min_p or
    repetition_penalty change the distribution, which a correction is then for; .inf is no bound.
    """

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        yield from self._mask_contradictions()
        if self.correction == "none":
            if self.truncated:
                yield (
                    "top_p, top_k, min_p: tokens sampled from a part of the distribution are more likely there than "
                    "under the policy, and its gradient is biased; sample from all of it, or set a correction, and "
                    "leave old_logprobs out"
                )
            if self.repetition_penalty != 1:
                yield (
                    "repetition_penalty: tokens are sampled from another distribution than the policy's, and its "
                    "gradient is biased; leave it out, or set a correction, and leave old_logprobs out"
                )
            return
        if self.old_logprobs == "sampled":
            yield (
                f"correction: {self.correction} compares the trainer's log-probs with the sampler's; with "
                "old_logprobs=sampled the ratio of the loss does that already; leave old_logprobs out, or set "
                "correction to none"
            )
        if self.correction == "decoupled" and self.correction_low is not None:
            yield "correction_low: decoupled has an upper bound alone; leave it out, or use icepop"
        low, high = self.bounds
        if low > high:
            yield f"correction_low, correction_high: wanted low <= high, got {low} and {high}"

    def _mask_contradictions(self) -> Iterator[str]:
        for name, settings in self.masks.items():
            if name not in MASKS:
                yield nearest("masks: no mask", name, MASKS)
                continue
            if not isinstance(settings, Mapping):
                yield f"masks: {name}: wanted its hyper-parameters, such as {{}}, got {settings!r}"
                continue
            known = MASKS[name]
            for setting in settings:
                if setting not in known:
                    yield nearest(f"masks: {name} has no", setting, known)
            for setting, default in known.items():
                if default is None and setting not in settings:
                    yield f"masks: {name} needs {setting}, such as {{{name}: {{{setting}: ...}}}}"

    @property
    def bounds(self) -> tuple[float, float]:
        low, high = CORRECTIONS[self.correction]
        low = low if self.correction_low is None else self.correction_low
        return low, high if self.correction_high is None else self.correction_high

    @property
    def logp_bound(self) -> float:
        """The value of ``max_logp_difference``, given or not."""
        if self.max_logp_difference is not None:
            return self.max_logp_difference
        # Where sampling is cut off or penalized, the sampler's log-probs are those of what is left,
        # and the trainer's are not.
        return math.inf if self.sampling.altered else MAX_LOGP_DIFFERENCE
