"""What every recipe can be told: one frozen dataclass, whose fields are the YAML keys and the command-line flags."""

from dataclasses import dataclass, field
from typing import Any, Literal

ReferenceKind = Literal["auto", "copy", "adapters_off", "precompute"]


@dataclass(frozen=True)
class Lora:
    """Train low-rank adapters instead of the model (Hu et al. 2021, arXiv:2106.09685), through peft."""

    r: int = 0
    """Rank of the adapters; 0 trains the model itself."""
    alpha: float = 32.0
    """The adapters' output is multiplied by alpha / r."""
    dropout: float = 0.0
    """Dropout on the adapters' input. Above 0, a gradient depends on how its step was split."""
    target_modules: str | list[str] = "all-linear"
    """Names of the layers that get adapters, a regular expression, or "all-linear"."""


@dataclass(frozen=True)
class Common:
    """The fields that all recipes share."""

    model: str
    """Name or directory of a transformers causal language model."""
    data: str
    """Training data: a .json, .jsonl, .csv or .parquet file, a saved dataset, or the name of one on the Hub."""
    output: str
    """Directory of this run."""
    eval_data: str | None = None
    """Held-out data, in the same layouts."""
    steps: int | None = None
    """Optimizer steps; without it, as many as `epochs` takes."""
    epochs: int = 1
    """Passes over the data."""
    batch_size: int = 8
    """Examples per optimizer step, over all ranks and micro-batches."""
    micro_tokens: int | None = 8192
    """Tokens that one forward pass computes at most, unless one example alone has more. Less needs less memory."""
    learning_rate: float = 1e-5
    """Peak learning rate of AdamW."""
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    """How the learning rate falls after the warmup."""
    warmup: float = 0.0
    """Steps of linear warmup; below 1, a share of all steps."""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay."""
    max_grad_norm: float = 1.0
    """L2 norm that the gradient is clipped to."""
    max_length: int | None = 1024
    """Tokens of prompt and completion together; null for no limit."""
    truncation: Literal["keep_start", "keep_end", "error"] = "keep_start"
    """What is kept of a longer one: its start, its end, or nothing (an error)."""
    on_bad_row: Literal["error", "skip"] = "error"
    """Whether a row that can't be trained on stops the run or is counted and left out."""
    chat_template: str | None = None
    """A Jinja file to use instead of the tokenizer's own chat template."""
    shuffle: bool = True
    """Whether each epoch is permuted."""
    seed: int = 0
    """Seed of the order of the data, of adapter weights and of dropout."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Precision of the computation. In bfloat16, weights that are trained stay float32 (autocast); products take
    bfloat16 factors, and logits are float32 (kernels/README.md)."""
    layout: Literal["auto", "shared", "packed", "padded"] = "auto"
    """Rows of the model's input: prompts shared, sequences packed, or padded."""
    backend: Literal["auto", "triton", "fused", "torch", "reference"] = "auto"
    """Backend of the log-prob kernel."""
    keep_bytes: int | None = None
    """Logits that the log-prob kernel keeps from forward to backward, in bytes; 0 computes all of them again, and null
    is 96 MB on a CPU and a thirty-second of the memory, at most 4 GiB, on a GPU."""

    gradient_checkpointing: bool = False
    """Recompute activations in backward: less memory, a third more time."""
    attention: str | None = None
    """Attention implementation of transformers, such as sdpa, eager or flash_attention_2."""
    eval_every: int | None = None
    """Steps between evaluations on `eval_data`; there is one before the first step and after the last in any case."""
    save_every: int | None = None
    """Steps between checkpoints."""
    resume: bool = False
    """Go on from the newest whole checkpoint in `output`, with the same final weights as an unbroken run."""
    report_to: str | list[str] | None = None
    """Trackers of Accelerate, such as tensorboard."""
    lora: Lora = field(default_factory=Lora)
    """Low-rank adapters."""
    quantize: Literal["4bit", "8bit"] | None = None
    """Load the frozen base model quantized by bitsandbytes; needs adapters."""

    @property
    def kernel(self) -> dict[str, Any]:
        """What a policy is to do with its head."""
        return {"layout": self.layout, "backend": self.backend, "keep_bytes": self.keep_bytes}


@dataclass(frozen=True)
class Teacher:
    """Whom to learn the next token's distribution from, and how the distance to it is measured."""

    model: str | None = None
    """Name or directory of the teacher, a causal language model with the same tokenizer."""
    logprobs: str | None = None
    """File of the teacher's stored top-k log-probs, instead of the model: one that an earlier run with top_k left."""
    top_k: int | None = None
    """Keep the teacher's k likeliest tokens and the mass of the rest, from one pass before training; null keeps the
    teacher in memory and compares whole distributions."""
    divergence: Literal["forward_kl", "reverse_kl", "jsd"] = "forward_kl"
    """KL(teacher||student), which covers; KL(student||teacher), which seeks; or what lies between, with its beta."""
    beta: float = 0.5
    """Weight of the teacher in the mixture of the generalized Jensen-Shannon divergence (jsd), in (0, 1)."""
    temperature: float = 1.0
    """Softmax temperature of both sides."""

    def check(self, *, needed: bool) -> None:
        """Before anything is loaded.

        Raises:
            ValueError: if a loss needs a teacher and has none, if no loss needs the one given, or if beta is no share.
        """
        given = (self.model is not None) + (self.logprobs is not None)
        if given and not needed:
            raise ValueError("teacher: no loss of this mix learns from it; add distillation, or leave the teacher out")
        if needed and given != 1:
            raise ValueError(
                "teacher: distillation needs one; give --teacher.model or --teacher.logprobs, one of the two"
            )
        if self.divergence == "jsd" and not 0 < self.beta < 1:
            raise ValueError(f"teacher.beta: must be in (0, 1) for jsd, got {self.beta}")


@dataclass(frozen=True)
class Limits:
    """Limits of a conversation. ``max_tokens`` of the sampling limits one turn; a turn cut by it is the last."""

    turns: int = 8
    """Completions of the policy."""
    tokens: int = 4096
    """Tokens after the prompt, those of the environment included."""
    seconds: float = 60.0
    """The longest that one call of the environment may take, in seconds."""

    def __post_init__(self) -> None:
        if self.turns < 1 or self.tokens < 1 or not self.seconds > 0:
            raise ValueError(f"limits: all must be > 0, got {self.turns}, {self.tokens} and {self.seconds}")
