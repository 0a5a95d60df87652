"""Settings that recipes share: frozen dataclasses whose fields are the YAML keys and the command-line flags.

The type of a field says its range. The command line checks it while it parses, `Settings` where Python builds one.
"""

import re
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

if TYPE_CHECKING:  # a number in a range is a number to a type checker
    PositiveInt = int
    NonNegativeInt = int
    PositiveFloat = float
    NonNegativeFloat = float
    ClosedUnitInterval = float
    OpenUnitInterval = float
    PositiveShare = float
    NoiseShare = float
else:
    from jsonargparse.typing import (
        ClosedUnitInterval,
        NonNegativeFloat,
        NonNegativeInt,
        OpenUnitInterval,
        PositiveFloat,
        PositiveInt,
        restricted_number_type,
    )

    PositiveShare = restricted_number_type("PositiveShare", float, [(">", 0), ("<=", 1)])
    NoiseShare = restricted_number_type("NoiseShare", float, [(">=", 0), ("<", 0.5)])


@dataclass(frozen=True)
class Settings:
    """A dataclass whose values are checked against the ranges and choices of their types.

    Raises:
        ValueError: names the field, what it wants, and what it got.
    """

    prefix: ClassVar[str] = ""  # of its fields in messages, where it is part of other settings

    def __post_init__(self) -> None:
        settings: Any = type(self)
        for name, hint in _hints(settings).items():
            value = getattr(self, name)
            if complaint := range_complaint(value, hint):
                raise ValueError(f"{self.prefix}{name}: {complaint}")
            if hasattr(value, "_expression"):  # of the command line: YAML and checkpoints hold plain numbers
                object.__setattr__(self, name, value._type(value))


@cache
def _hints(settings: Any) -> dict[str, Any]:
    return {name: hint for name, hint in get_type_hints(settings).items() if get_origin(hint) is not ClassVar}


def range_complaint(value: Any, hint: Any) -> str | None:
    """Describe the range that a value misses; None if one of the alternatives of its type takes it."""
    complaints = []
    for kind in get_args(hint) if get_origin(hint) in (Union, type(int | None)) else (hint,):
        if value is None and kind is type(None):
            return None
        if get_origin(kind) is Literal:
            if value in get_args(kind):
                return None
            complaints.append(f"must be one of {', '.join(map(str, get_args(kind)))}, got {value!r}")
        elif hasattr(kind, "_expression"):
            try:
                kind(value)
                return None
            except (TypeError, ValueError):
                complaints.append(f"must be {readable_range(kind._expression)}, got {value}")
        elif kind is not type(None):
            return None
    return complaints[0] if complaints else None


def readable_range(expression: str) -> str:
    """``v>=0 and v<1`` as ``>= 0 and < 1``."""
    return re.sub(r"v([<>]=?)", r"\1 ", expression)


@dataclass(frozen=True)
class Lora(Settings):
    """Train low-rank adapters instead of the model (Hu et al. 2021, arXiv:2106.09685), through peft."""

    prefix = "lora."

    r: NonNegativeInt = 0
    """Rank of the adapters; 0 trains the model itself."""
    alpha: float = 32.0
    """The adapters' output is multiplied by alpha / r."""
    dropout: ClosedUnitInterval = 0.0
    """Dropout on the adapters' input. Above 0, a gradient depends on how its step was split."""
    target_modules: str | list[str] = "all-linear"
    """Names of the layers that get adapters, a regular expression, or "all-linear"."""


@dataclass(frozen=True)
class Parallel(Settings):
    """How the ranks that torchrun or accelerate launch started share the model; each trains on data of its own."""

    prefix = "parallel."

    dp_shard_size: PositiveInt = 1
    """Ranks that hold one copy of the model, its gradient and its optimizer state in shards (FSDP). 1 gives each rank a
    copy (DDP), all of them hold one together, and a divisor of their number makes several copies (HSDP)."""


@dataclass(frozen=True)
class Common(Settings):
    """The fields that all recipes share."""

    model: str
    """Name or directory of a transformers causal language model."""
    data: str
    """Training data: a .json, .jsonl, .csv or .parquet file, a saved dataset, or the name of one on the Hub."""
    output: str
    """Directory of this run."""
    eval_data: str | None = None
    """Held-out data, in the same layouts."""
    steps: PositiveInt | None = None
    """Optimizer steps; without it, as many as `epochs` takes."""
    epochs: PositiveInt = 1
    """Passes over the data."""
    micro_tokens: PositiveInt | None = 8192
    """Tokens that one forward pass computes at most, unless one example alone has more. Less needs less memory."""
    learning_rate: NonNegativeFloat = 1e-5
    """Peak learning rate of AdamW."""
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    """How the learning rate falls after the warmup."""
    warmup: NonNegativeFloat = 0.0
    """Steps of linear warmup; below 1, a share of all steps."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's decoupled weight decay."""
    max_grad_norm: NonNegativeFloat = 1.0
    """L2 norm that the gradient is clipped to; 0 measures it and clips nothing."""
    truncation: Literal["keep_start", "keep_end", "error"] = "keep_start"
    """The part of a row that is too long which is kept: its start, its end, or nothing (an error)."""
    on_bad_row: Literal["error", "skip"] = "error"
    """Stop the run at a row that can't be trained on, or count it and leave it out."""
    chat_template: str | None = None
    """A Jinja file, or the text of a template, to use instead of the tokenizer's own chat template."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the chat template, such as {enable_thinking: false}; those of a row come first."""
    dataset_num_proc: PositiveInt | None = None
    """Processes that tokenize; null is this one alone."""
    shuffle: bool = True
    """Permute each epoch."""
    seed: int = 0
    """Seed of the order of the data, of adapter weights and of dropout."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Precision of the computation. In bfloat16, weights that are trained stay float32 (autocast); products take
    bfloat16 factors, and logits are float32 (kernels/README.md)."""
    layout: Literal["auto", "shared", "packed", "padded"] = "auto"
    """Rows of the model's input: prompts shared, sequences packed, or padded."""
    backend: Literal["auto", "triton", "fused", "torch", "reference"] = "auto"
    """Backend of the log-prob kernel."""
    keep_bytes: NonNegativeInt | None = None
    """Logits that the log-prob kernel keeps from forward to backward, in bytes; 0 computes all of them again, and null
    is 96 MB on a CPU and a thirty-second of the memory, at most 4 GiB, on a GPU."""
    gradient_checkpointing: bool = False
    """Recompute activations in backward: less memory, a third more time."""
    attention: str | None = None
    """Attention implementation of transformers, such as sdpa, eager or flash_attention_2."""
    eval_every: PositiveInt | None = None
    """Steps between evaluations on `eval_data`; there is one before the first step and after the last in any case."""
    save_every: PositiveInt | None = None
    """Steps between checkpoints; there is one after the last step, and when a signal stops the run, in any case."""
    save_minutes: NonNegativeFloat | None = 15.0
    """Minutes between checkpoints, beside those of `save_every`; 0 or null for none."""
    keep: PositiveInt = 2
    """Newest checkpoints that are kept; the one before stands by in case the newest turns out to be damaged."""
    keep_best: str | None = None
    """Keep the checkpoint with the lowest value of a metric of `eval_data` as well, such as eval/loss; with max:
    before it, as in max:eval/reward, the highest. Each evaluation that is the best so far saves one."""
    resume: bool = False
    """Go on from the newest whole checkpoint in `output`, with the same final weights as an unbroken run."""
    report_to: str | list[str] | None = None
    """Trackers of Accelerate, such as tensorboard or wandb; none is none."""
    lora: Lora = field(default_factory=Lora)
    """Low-rank adapters."""
    quantize: Literal["4bit", "8bit"] | None = None
    """Load the frozen base model quantized by bitsandbytes; needs adapters."""
    parallel: Parallel = field(default_factory=Parallel)
    """How several ranks share the model."""

    @property
    def longest(self) -> int | None:
        """Tokens of a row; those of a prompt, where completions are sampled."""
        return None

    @property
    def kernel(self) -> dict[str, Any]:
        """The options of a `Policy`."""
        return {"layout": self.layout, "backend": self.backend, "keep_bytes": self.keep_bytes}


@dataclass(frozen=True)
class OfflineConfig(Common):
    """The fields of recipes that train on the completions of the data."""

    batch_size: PositiveInt = 8
    """Examples per optimizer step, over all ranks and micro-batches."""
    max_length: PositiveInt | None = 1024
    """Tokens of prompt and completion together; null for no limit."""

    @property
    def longest(self) -> int | None:
        return self.max_length


@dataclass(frozen=True)
class Teacher(Settings):
    """The model that a student learns the next token's distribution from, and the divergence from it."""

    prefix = "teacher."

    model: str | None = None
    """Name or directory of the teacher, a causal language model with the same tokenizer."""
    logprobs: str | None = None
    """File of the teacher's stored top-k log-probs, instead of the model: one that an earlier run with top_k left."""
    top_k: PositiveInt | None = None
    """Keep the teacher's k likeliest tokens and the mass of the rest, from one pass before training; null keeps the
    teacher in memory and compares whole distributions."""
    divergence: Literal["forward_kl", "reverse_kl", "jsd"] = "forward_kl"
    """KL(teacher||student), which covers; KL(student||teacher), which seeks; or what lies between, with its beta."""
    beta: OpenUnitInterval = 0.5
    """Weight of the teacher in the mixture of the generalized Jensen-Shannon divergence (jsd), in (0, 1)."""
    temperature: PositiveFloat = 1.0
    """Softmax temperature of both sides."""

    def check(self, *, needed: bool) -> None:
        """Check before anything is loaded that there is one teacher where losses need it.

        Raises:
            ValueError: if a loss needs a teacher and has none, or if no loss needs the one there is.
        """
        named = (self.model is not None) + (self.logprobs is not None)
        if named and not needed:
            raise ValueError("teacher: no loss of this mix learns from it; add distillation, or leave the teacher out")
        if needed and named != 1:
            raise ValueError(
                "teacher: distillation needs one; give --teacher.model or --teacher.logprobs, one of the two"
            )


@dataclass(frozen=True)
class Limits(Settings):
    """Limits of a conversation. ``max_tokens`` of the sampling limits one turn; a turn cut by it is the last."""

    prefix = "limits."

    turns: PositiveInt = 8
    """Completions of the policy."""
    tokens: PositiveInt = 4096
    """Tokens after the prompt, those of the environment included."""
    seconds: PositiveFloat = 60.0
    """The longest that one call of the environment may take, in seconds."""
