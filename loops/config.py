"""Settings that recipes share: frozen dataclasses, whose fields are YAML keys and flags.

The type of a field says its range. The command line checks it while it parses, `Settings` where
Python builds one. From Python, a field that names something may hold the object itself.
"""

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from functools import cache
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Literal,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

# For a type checker, ranges are plain numbers, and a name may be the object itself.
if TYPE_CHECKING:
    Named = Any
    Source = Any
    LossMix = str | Callable[..., object] | Mapping[Any, Any]
    RewardMix = LossMix | Sequence[str | Callable[..., object]]
    PositiveInt = int
    NonNegativeInt = int
    PositiveFloat = float
    NonNegativeFloat = float
    ClosedUnitInterval = float
    OpenUnitInterval = float
    PositiveShare = float
    NoiseShare = float
    Interval = int | float | Literal["epoch"]
else:
    from jsonargparse.typing import (
        ClosedUnitInterval,
        NonNegativeFloat,
        NonNegativeInt,
        OpenUnitInterval,
        PositiveFloat,
        PositiveInt,
        register_type,
        restricted_number_type,
        restricted_string_type,
    )

    Named = str
    Source = dict[str, Any] | list[Any] | str
    LossMix = str | dict[str, float | dict[str, Any]]
    Name = restricted_string_type("Name", r"^[\w.:]+$")  # not a mapping that has a mistake
    RewardMix = dict[str, float | dict[str, Any]] | list[str] | Name
    PositiveShare = restricted_number_type("PositiveShare", float, [(">", 0), ("<=", 1)])
    NoiseShare = restricted_number_type("NoiseShare", float, [(">=", 0), ("<", 0.5)])
    # jsonargparse prints a value by the first type of a union that takes it, and `int` makes 0 of a
    # share.
    register_type(PositiveInt, lambda value: int(PositiveInt(value)))
    Interval = PositiveInt | OpenUnitInterval | Literal["epoch"]


Schedule = Literal["constant", "linear", "cosine", "constant_with_warmup", "cosine_with_restarts", "cosine_with_min_lr",
    "cosine_warmup_with_min_lr", "polynomial", "inverse_sqrt", "warmup_stable_decay", "reduce_lr_on_plateau",
    "greedy"]  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """A dataclass whose values are checked against the ranges and choices of their types.

    Raises:
        ValueError: names the field, what it wants, and what it got.
    """

    prefix: ClassVar[str] = ""  # of its fields in messages, if it is part of other settings

    def __post_init__(self) -> None:
        settings: Any = type(self)  # which mypy takes for unhashable
        for name, hint in _hints(settings).items():
            value = getattr(self, name)
            if isinstance(value, os.PathLike):
                value = os.fspath(value)
                object.__setattr__(self, name, value)  # the class is frozen
            complaint = range_complaint(value, hint)
            if complaint:
                raise ValueError(f"{self.prefix}{name}: {complaint}")
            # The command line's numbers know their range; YAML and checkpoints hold plain ones.
            if hasattr(value, "_expression"):
                object.__setattr__(self, name, value._type(value))

    def refuse_contradictions(self) -> None:
        """Check all rules together.

        The command does so before it imports torch, and a run before it opens.

        Raises:
            ValueError: lists each setting that contradicts another.
        """
        complaints = list(self.contradictions())
        if complaints:
            raise ValueError(several(complaints))

    def contradictions(self) -> Iterator[str]:
        """Yield a sentence, with its remedy, for each setting that contradicts another one.

        These rules need no file, rank, device or model. Rules that do are checked where a run meets
        these.
        """
        for each in fields(self):
            group = getattr(self, each.name)
            if isinstance(group, Settings):
                yield from group.contradictions()


def several(complaints: Sequence[str]) -> str:
    """One message of some complaints: the only one, or their number and a line for each."""
    if len(complaints) == 1:
        return complaints[0]
    return "\n  ".join([f"{len(complaints)} mistakes", *complaints])


def losses_named(mix: "LossMix | None") -> set[str]:
    """The names of the losses of a mix; a function has none, as rules know it by no name."""
    losses = mix if isinstance(mix, Mapping) else [mix]
    return {loss for loss in losses if isinstance(loss, str)}


_hints = cache(get_type_hints)  # they evaluate the text of annotations each time


def _default(each: "Field[object]") -> object:
    return each.default_factory() if each.default_factory is not MISSING else each.default


def range_complaint(value: object, hint: object) -> str | None:
    """Describe the range or the choices that a value violates; None if its type accepts it."""
    alternatives = kinds(hint)
    if any(_takes(kind, value) for kind in alternatives):
        return None
    for kind in alternatives:
        with suppress(AttributeError, ValueError):
            kind._type(str(value))  # it is a number, though out of range
            return f"must be {_readable_range(kind)}, got {value}"
    has_choices = any(get_origin(kind) is Literal for kind in alternatives)
    verb = "must be" if has_choices else "wanted"
    return f"{verb} {wording(hint)}, got {value!r}"


def _takes(kind: Any, value: object) -> bool:
    """False if a value is out of range or not among the choices.

    Other types are checked where they are used: the object itself may stand for its name.
    """
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if hasattr(kind, "_expression"):
        with suppress(TypeError, ValueError):
            kind(value)
            return True
        return False
    if kind in (bool, type(None)) or is_dataclass(kind):
        return isinstance(value, kind)
    return True


_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    type(None): "null",
}


def wording(hint: object) -> str:
    """A type in words: ``a whole number > 0 or null``."""
    return " or ".join(map(_wording, kinds(hint)))


def _wording(kind: Any) -> str:
    """One alternative of a type in words."""
    if get_origin(kind) is Literal:
        choices = []
        for choice in get_args(kind):
            written = str(choice)
            choices.append(written.lower() if isinstance(choice, bool) else written)
        return f"one of {', '.join(choices)}" if len(choices) > 1 else choices[0]
    if getattr(kind, "_type", None) is str:
        return "a name"
    if hasattr(kind, "_expression"):
        return f"{_WORDS[kind._type]} {_readable_range(kind)}"
    if get_origin(kind) is dict:
        _, values = get_args(kind)
        return f"a mapping {{name: {wording(values)}}}"
    if is_dataclass(kind):
        first = [each.name for each in fields(kind)[:3]]
        return f"a mapping of {', '.join(first)}, ..."
    if get_origin(kind) is list:
        (items,) = get_args(kind)
        return f"a list [{wording(items)}, ...]"
    return _WORDS.get(kind, "a value")


def kinds(hint: object) -> tuple[Any, ...]:
    """The alternatives of a type: both of ``int | None``, or the type alone.

    They are classes, Literal, and jsonargparse's numbers with a range: `PositiveInt` has a `_type`,
    int, and an `_expression`, "v>0".
    """
    # `int | None` and `Optional[int]` have different origins
    if get_origin(hint) in (Union, type(int | None)):
        return get_args(hint)
    return (hint,)


def _readable_range(kind: Any) -> str:
    """``v>=0 and v<1`` as ``>= 0 and < 1``."""
    return re.sub(r"v([<>]=?)", r"\1 ", kind._expression)


@dataclass(frozen=True)
class Lora(Settings):
    """Train low-rank adapters of peft instead of the model (Hu et al. 2021, arXiv:2106.09685)."""

    prefix = "lora."

    r: NonNegativeInt = 0
    """Rank of the adapters; 0 trains the model itself."""
    alpha: PositiveFloat = 32.0
    """The adapters' output is multiplied by alpha / r."""
    dropout: ClosedUnitInterval = 0.0
    """Dropout on the adapters' input. Above 0, a gradient depends on how its step was split."""
    target_modules: str | list[str] | None = "all-linear"
    """Names of the layers that get adapters, a regular expression, or "all-linear"; null is peft's
    own choice for the architecture, often q_proj and v_proj alone."""
    target_parameters: list[str] | None = None
    """Names of parameters outside linear layers that get adapters, such as
    mlp.experts.gate_up_proj.
    """
    modules_to_save: list[str] | None = None
    """Modules that are trained fully besides the adapters, such as embed_tokens."""
    use_rslora: bool = False
    """Multiply by alpha / sqrt(r) instead (rsLoRA: Kalajdzievski 2023, arXiv:2312.03732)."""
    use_dora: bool = False
    """Train the norm of each weight's columns apart from its direction (DoRA: Liu et al. 2024,
    arXiv:2402.09353).
    """
    init_lora_weights: bool | str = True
    """Start of the adapters: true adds nothing to the model; others of peft are gaussian, pissa,
    olora, ...
    """
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Further fields of peft's LoraConfig, such as {rank_pattern: {q_proj: 32}}."""
    path: str | None = None
    """Directory of an adapter to continue training, instead of a new one; it has its own rank and
    settings.
    """

    def contradictions(self) -> Iterator[str]:
        """Yield the settings of new adapters where no new ones are made."""
        changed = [each.name for each in fields(self) if getattr(self, each.name) != _default(each)]
        complaint = self.complaint(changed)
        if complaint and not self.enabled:
            yield complaint
        own = [name for name in changed if name not in ("r", "path")]
        if self.path is not None and own:
            yield f"lora.{own[0]}: the adapter in {self.path} has its own; leave it out, or lora.path for a new one"

    @classmethod
    def complaint(cls, given: Collection[str]) -> str:
        """Say what is wrong with giving these fields and no others, or nothing."""
        names = [str(name) for name in given]
        unknown = {*names} - {each.name for each in fields(cls)}
        # an unknown name is told of elsewhere, and may mean the rank
        if not names or unknown or {"r", "path"} & {*names}:
            return ""
        return (
            f"lora.{names[0]}: without lora.r there are no adapters, and the whole model is trained; set "
            "lora.r, such as 16, or leave lora out"
        )

    @property
    def enabled(self) -> bool:
        return self.r > 0 or self.path is not None

    @property
    def adds_nothing(self) -> bool:
        """True if the policy starts as the model without adapters."""
        return self.path is None and self.init_lora_weights in (True, "gaussian")


@dataclass(frozen=True)
class Parallel(Settings):
    """How the ranks that torchrun or accelerate launch started share the model.

    Each trains on data of its own.
    """

    prefix = "parallel."

    dp_shard_size: PositiveInt = 1
    """Ranks that hold one copy of the model, its gradient and its optimizer state in shards (FSDP).
    1 gives each rank a copy (DDP), all of them hold one together, and a divisor of their number
    makes several copies (HSDP).
    """
    tp_size: PositiveInt = 1
    """Ranks that train on the same data together, each with a slice of the matrices of every layer
    (tensor parallelism, by the plan of transformers). With dp_shard_size, that many such groups
    hold one copy.
    """
    cp_size: PositiveInt = 1
    """Ranks that train on the same data together, each on a part of the columns of its rows
    (context parallelism, by all-to-all before and after attention): for long rows. With
    dp_shard_size, that many such groups hold one copy in shards, each rank one."""

    def contradictions(self) -> Iterator[str]:
        if self.tp_size > 1 and self.cp_size > 1:
            yield (
                f"parallel.cp_size: rows are split or layers are, got {self.cp_size} and tp_size={self.tp_size}; "
                "leave out one"
            )

    @property
    def field(self) -> str:
        """The setting that splits the model, for messages."""
        if self.cp_size > 1:
            return "parallel.cp_size"
        return "parallel.tp_size" if self.tp_size > 1 else "parallel.dp_shard_size"

    @property
    def ranks_per_batch(self) -> int:
        """Ranks that train on the same data."""
        return self.tp_size * self.cp_size

    @property
    def copy_size(self) -> int:
        """Ranks that hold one copy of the model."""
        return self.dp_shard_size * self.ranks_per_batch


@dataclass(frozen=True)
class Hub(Settings):
    """Upload the model to the Hugging Face Hub, by the token in HF_TOKEN or of ``hf auth login``."""

    prefix = "hub."

    id: str | None = None
    """Repository, such as me/my-model; it is made if it is not there. null uploads nothing."""
    private: bool | None = None
    """Whether only you, or your organization, see a repository that is made; null is what your
    account does, which is public unless an organization says otherwise.
    """
    revision: str | None = None
    """Branch, which is made if it is not there; null is main."""
    every: Literal["end", "checkpoint", "best"] = "end"
    """When the model is uploaded: at the end of the run; also with each checkpoint; or with each
    step that is the best by `keep_best`, and not at the end."""

    def contradictions(self) -> Iterator[str]:
        changed = [each.name for each in fields(self) if getattr(self, each.name) != _default(each)]
        if self.id is None and changed:
            yield f"hub.{changed[0]}: nothing is uploaded without hub.id, such as me/my-model; give it"
        if self.id == "":
            yield "hub.id: wanted a repository, such as me/my-model, got ''"


@dataclass(frozen=True)
class Common(Settings):
    """The fields that all recipes share."""

    model: Named
    """Name or directory of a transformers causal language model; from Python, also the model,
    trained in place.
    """
    data: Source
    """Training data: a .json, .jsonl, .csv, .tsv or .parquet file, a directory, or the name of a
    dataset on the Hub, as path:config@revision#split; or {path, name, split, revision, data_files,
    data_dir, columns, system_prompt, weight}; or a mixture: a list of these, or {path: weight},
    where weight is how many times an epoch takes the rows. From Python, also a Dataset or a list of
    rows.
    """
    output: str | None = None
    """Directory of this run; from Python, None writes no files."""
    eval_data: int | float | Source | None = None
    """Held-out data, as `data`; {split: test} of the same; or a number of rows held out of `data`,
    below 1 a share.
    """
    model_revision: str | None = None
    """Branch, tag or commit of a model on the Hub, and of its tokenizer; null is its main
    branch.
    """
    tokenizer: Named | None = None
    """Name or directory of a tokenizer other than the model's; from Python, also the tokenizer."""
    steps: PositiveInt | None = None
    """Optimizer steps; without it, as many as `epochs` takes."""
    epochs: PositiveInt = 1
    """Passes over the data."""
    micro_tokens: PositiveInt | None = 8192
    """Maximum tokens of one forward pass, unless a single example has more. Fewer need less
    memory.
    """
    learning_rate: NonNegativeFloat = 1e-5
    """Peak learning rate."""
    optimizer: Named = "adamw"
    """One of torch by its class in lower case (adamw, sgd, muon, ...), adafactor, lion, or
    adamw_8bit, lion_8bit, paged_adamw_8bit (bitsandbytes), adamw_torch_8bit, adamw_torch_4bit
    (torchao), schedule_free_adamw (schedulefree), or your own module:Class; from Python, also a
    function ``f(params, lr, ...)``, or the optimizer.
    """
    optimizer_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the optimizer, such as {betas: [0.9, 0.95], eps: 1e-6}."""
    offload_optimizer: bool = False
    """Keep the optimizer's state in the memory of the host and compute its steps on the CPU: with
    adamw 8 bytes a parameter less on a GPU, and longer steps."""
    schedule: Schedule = "linear"
    """transformers' schedule of the learning rate after warmup; reduce_lr_on_plateau and greedy
    follow eval/loss.
    """
    schedule_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the schedule, such as {min_lr_rate: 0.1} for cosine_with_min_lr."""
    warmup: NonNegativeFloat = 0.0
    """Steps of linear warmup; below 1, a share of all steps, rounded up."""
    weight_decay: NonNegativeFloat = 0.0
    """The optimizer's weight decay; not applied to norms and biases."""
    max_grad_norm: NonNegativeFloat = 1.0
    """L2 norm that the gradient is clipped to; 0 measures it and clips nothing."""
    truncation: Literal["keep_start", "keep_end", "error"] = "keep_start"
    """Part to keep of a row that is too long: its start, its end, or nothing (an error)."""
    on_bad_row: Literal["error", "skip"] = "error"
    """Stop the run at a row that can't be trained on, or count it and leave it out."""
    eos_token: str | None = None
    """A token of the vocabulary, such as <|im_end|>, that ends plain completions instead of the
    tokenizer's own end token; it is saved as the tokenizer's, and among the end tokens of the
    model. Those that the chat template writes need no setting."""
    chat_template: str | None = None
    """A Jinja file, or the text of a template, to use instead of the tokenizer's own chat
    template.
    """
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the chat template, such as {enable_thinking: false}; those of a row come
    first.
    """
    dataset_num_proc: PositiveInt | None = None
    """Processes that tokenize; null is this one alone."""
    streaming: bool = False
    """Read and encode rows when their step comes, for data that don't fit on the disk; needs
    `steps`. Parts of a mixture are then drawn in proportion to their weights, and rows permuted
    within blocks of some thousands.
    """
    shuffle: bool = True
    """Permute each epoch."""
    seed: NonNegativeInt = 0
    """Seed of the order of the data, of adapter weights and of dropout."""
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    """Precision of the computation. In bfloat16, weights that are trained stay float32 (autocast)
    unless `weights_dtype` says otherwise; products take bfloat16 factors, and logits are float32
    (docs/kernels.md). float16 is for GPUs without bfloat16: its loss is scaled, and a step whose
    gradient overflows is skipped (docs/size-and-memory.md).
    """
    weights_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the weights that are trained, and of their gradients. bfloat16 takes half of the
    memory; each step is computed in float32 and rounded as `rounding` says, so that small ones are
    not lost. Needs dtype bfloat16.
    """
    rounding: Literal["stochastic", "compensated"] = "stochastic"
    """Rounding of bfloat16 weights after a step: up or down by chance, right on average; or to the
    nearest, with the 16 bits that are missing to float32 kept for the next step, two more bytes per
    weight.
    """
    tf32: bool | None = None
    """Compute products of float32 factors in TF32, on GPUs that have it: faster, with 10 bits of a
    factor instead of 23. null leaves torch.set_float32_matmul_precision as it is; in bfloat16 few
    products are of float32 factors.
    """
    train_vision: bool = True
    """Train the parts of a vision-language model that see images, where the data have some; false
    freezes them. Adapters are on the text parts, unless lora.target_modules names others.
    """
    processor_kwargs: dict[str, Any] = field(default_factory=dict)
    """Settings of the model's image processor to change, such as size or max_pixels: fewer pixels
    are fewer tokens. They are saved with the model."""
    layout: Literal["auto", "shared", "packed", "padded"] = "auto"
    """Rows of the model's input: prompts shared, sequences packed, or padded."""
    backend: Literal["auto", "triton", "fused", "torch", "reference"] = "auto"
    """Backend of the log-prob kernel."""
    keep_bytes: NonNegativeInt | None = None
    """Logits that the log-prob kernel keeps from forward to backward, in bytes; 0 computes all of
    them again, and null is 96 MB on a CPU and a thirty-second of the memory, at most 4 GiB, on a
    GPU.
    """
    gradient_checkpointing: Literal[False, True, "selective", "offload"] = False
    """Recompute activations in backward: less memory, a third more time. selective keeps the
    products of matrices and recomputes the rest, in little time; offload holds the inputs of layers
    in the memory of the host.
    """
    neftune_noise_alpha: NonNegativeFloat = 0.0
    """Noise on embeddings in training (NEFTune): uniform in +-alpha / sqrt(tokens x size). A
    gradient then depends on how its step was split."""
    attention: str | None = None
    """Attention implementation of transformers, such as sdpa, eager or flash_attention_2; with
    flex_attention, on GPUs, long rows with shared prompts need no mask of their width squared."""
    eval_every: Interval | None = None
    """Steps between evaluations on `eval_data`; below 1, a share of all steps, rounded up; epoch is
    one at the end of each epoch. There is one before the first step and after the last in any
    case.
    """
    save_every: Interval | None = None
    """Steps between checkpoints; below 1, a share of all steps, rounded up; epoch is one at the end
    of each epoch. There is one after the last step, and when a signal stops the run, in any
    case.
    """
    save_minutes: NonNegativeFloat | None = 15.0
    """Minutes between checkpoints, in addition to those of `save_every`; 0 or null for none."""
    keep: PositiveInt = 2
    """Number of newest checkpoints to keep; the one before serves if the newest is damaged."""
    keep_best: str | None = None
    """Also keep the checkpoint with the lowest value of a metric of `eval_data`, such as eval/loss;
    max: before it asks for the highest, as in max:eval/reward. Every new best is saved."""
    load_best_model_at_end: bool = False
    """Write the weights of the best step by `keep_best` to model/, in place of the last step's."""
    resume: bool = False
    """Continue from the newest whole checkpoint in `output`, with the same final weights as an
    uninterrupted run.
    """
    hang_seconds: NonNegativeFloat | None = 600.0
    """Seconds after which a run of several ranks is ended with status 75, because one of them is
    silent or none of them moves; also the longest wait for ranks to start. 0 or null waits on."""
    report_to: str | list[str] | None = None
    """Accelerate's trackers, such as tensorboard or wandb; none for no tracker."""
    project: str | None = None
    """Project that trackers file the run under; null is burnish."""
    run_name: str | None = None
    """Name of the run in trackers; null is that of its directory."""
    lora: Lora = field(default_factory=Lora)
    """Low-rank adapters."""
    quantize: Literal["4bit", "8bit"] | None = None
    """Load the frozen base model quantized by bitsandbytes; needs adapters. 4bit is nf4."""
    quantize_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further fields of BitsAndBytesConfig, such as {bnb_4bit_use_double_quant: true}."""
    hub: Hub = field(default_factory=Hub)
    """Upload of the model to the Hugging Face Hub."""
    parallel: Parallel = field(default_factory=Parallel)
    """How several ranks share the model."""

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        yield from self._without_directory()
        yield from self._without_evaluation()
        by_name = isinstance(self.model, str)
        if self.streaming and self.steps is None:
            yield "streaming: wanted steps, as an epoch has no known length"
        for name in ("eval_every", "save_every"):
            if self.streaming and getattr(self, name) == "epoch":
                yield f"{name}: an epoch of streamed data has no known length; give a number of steps"
        if self.weights_dtype == "bfloat16" and self.dtype != "bfloat16":
            yield f"weights_dtype: bfloat16 weights compute in bfloat16, and dtype is {self.dtype}; set both"
        if self.quantize is not None and not by_name:
            yield "quantize: the model is loaded already; load it quantized, or give its name"
        if self.quantize is not None and by_name and not self.lora.enabled:
            yield "quantize: quantized weights can't be trained; add adapters, such as --lora.r 16"
        if self.quantize is not None and self.parallel.copy_size > 1:
            yield (
                f"{self.parallel.field}: quantized weights can't be sharded, got {self.parallel.copy_size} and "
                f"quantize={self.quantize}; leave one of them out"
            )
        if self.parallel.tp_size > 1 and self.lora.enabled:
            yield (
                f"{self.parallel.field}: the layers under adapters are not split; leave lora out, or shard by "
                f"--parallel.dp_shard_size {self.parallel.copy_size} instead"
            )

    def _without_directory(self) -> Iterator[str]:
        """Yield the settings that need a run directory where there is none."""
        if self.output == "":
            yield "output: wanted a directory, got ''; name one (a shell's variable may be empty)"
        for name in ("resume", "keep_best", "save_every"):
            if self.output is None and getattr(self, name):
                yield f"{name}: checkpoints are kept in the run's directory, and it has none; set output"
        if self.output is None and self.hub.id is not None:
            yield "hub.id: a model is uploaded from the run's directory, and it has none; set output"

    def _without_evaluation(self) -> Iterator[str]:
        """Yield the settings that follow held-out data where there are none."""
        held_out = self.eval_data is not None
        follows = self.schedule in ("reduce_lr_on_plateau", "greedy")
        if follows and not (held_out and self.eval_every):
            yield f"schedule {self.schedule}: follows the loss of evaluations; give --eval_data and --eval_every"
        if self.load_best_model_at_end and self.keep_best is None:
            yield "load_best_model_at_end: wanted a metric to be the best by; give keep_best, such as eval/loss"
        if self.hub.every == "best" and self.keep_best is None:
            yield "hub.every: wanted a metric to be the best by; give keep_best, such as eval/loss"
        metric = (self.keep_best or "eval/").removeprefix("max:")
        if not metric.startswith("eval/") or (self.keep_best and not held_out):
            wanted = "wanted a metric of eval_data, such as eval/loss or max:eval/reward"
            and_none = "" if held_out else " and no eval_data"
            yield f"keep_best: {wanted}, got {self.keep_best!r}{and_none}"

    @property
    def longest(self) -> int | None:
        """Maximum tokens of a row; of a prompt, in recipes that sample completions."""
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
    """Maximum tokens of prompt and completion together; null for no limit."""

    @property
    def longest(self) -> int | None:
        return self.max_length


@dataclass(frozen=True)
class Bema(Settings):
    """A reference that is the bias-corrected moving average of the policy (BEMA: Block and Zhang
    2025, arXiv:2508.00180)."""

    prefix = "bema."

    update_freq: PositiveInt | None = None
    """Steps between updates of the average, which the reference is set to every
    ref_model_sync_steps, a multiple of it; null mixes by ref_model_mixup_alpha instead. It takes two
    more copies of the weights that are trained, in float32 at least."""
    ema_power: NonNegativeFloat = 0.5
    """How fast the average slows down, κ: at step t the policy enters it with weight
    (lag + multiplier t)^-ema_power; 0 takes the policy itself."""
    bias_power: NonNegativeFloat = 0.2
    """How fast the correction of its lag fades, η: (lag + multiplier t)^-bias_power times the way
    that the policy went is added; 8 and more add almost nothing, 0 all of it."""
    lag: PositiveInt = 10
    """Age that the average begins with, ρ, at least 1: the larger, the less the first steps count."""
    multiplier: PositiveFloat = 1.0
    """How much a step adds to that age, γ."""
    min_ema_multiplier: ClosedUnitInterval = 0.0
    """The least weight that the policy enters the average with."""
    update_after: NonNegativeInt = 0
    """Step that the average begins at, τ; the reference stays the initial policy until then."""

    def contradictions(self) -> Iterator[str]:
        changed = [each.name for each in fields(self) if getattr(self, each.name) != _default(each)]
        if self.update_freq is None and changed:
            yield (
                f"bema.{changed[0]}: without bema.update_freq there is no such average; give it, such as 400, "
                f"or leave out {changed[0]}"
            )

    def weight(self, step: int) -> float:
        """Weight of the policy in the average, β of this step, in [0, 1]."""
        decayed: float = self._age(step) ** -self.ema_power
        return max(decayed, self.min_ema_multiplier)

    def correction(self, step: int) -> float:
        """Share of the way from the start that is added to the average, α of this step."""
        share: float = self._age(step) ** -self.bias_power
        return share

    def _age(self, step: int) -> float:
        return self.lag + self.multiplier * step


@dataclass(frozen=True)
class Routed(Settings):
    """The field of recipes that can balance the experts of a mixture."""

    router_aux_loss_coef: NonNegativeFloat | None = None
    """Coefficient of `aux_loss`, which a mixture of experts lowers by using its experts evenly;
    null: the model's own, if its configuration asks for the loss (output_router_logits), else 0.
    """


@dataclass(frozen=True)
class Referenced(Settings):
    """The fields of recipes with a reference policy."""

    reference: Literal["auto", "copy", "adapters_off", "precompute"] = "auto"
    """Where reference log-probs come from: a frozen copy, the model without its adapters (auto, if
    it has some), or one pass over the data before training, cached in the run directory; the loss
    kto can't precompute them, its mismatched completions change."""
    ref_model: str | None = None
    """Name or directory of another model as the reference, with the same tokenizer; null: the
    initial policy.
    """
    ref_model_sync_steps: PositiveInt | None = None
    """Steps between updates of a copied reference from the policy (TR-DPO: Gorbatovski et al. 2024,
    arXiv:2404.09656); null never updates it."""
    ref_model_mixup_alpha: PositiveShare = 0.6
    """Weight of the policy in such an update, alpha policy + (1 - alpha) reference; 1 replaces
    it.
    """
    bema: Bema = field(default_factory=Bema)
    """A bias-corrected average of the policy, which such updates set the reference to."""

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        assert isinstance(self, Common)  # whose fields are beside these in every recipe
        config: Common = self
        is_plain = isinstance(config.model, str) and not config.lora.enabled
        if self.reference == "adapters_off" and is_plain:
            yield "reference: adapters_off wanted a model wrapped by peft; set lora.r, or reference to copy"
        copied = not (self.ref_model or config.lora.enabled) and self.reference in ("auto", "copy")
        if self.ref_model_sync_steps and not copied:
            yield (
                "ref_model_sync_steps: only a copy of a whole policy follows it; leave it out, or train without "
                "adapters, with no ref_model, and with reference auto or copy"
            )
        yield from self._bad_average()

    def _bad_average(self) -> Iterator[str]:
        """Yield the settings that keep an average of the policy from being the reference."""
        every = self.bema.update_freq
        if every is None:
            return
        if not self.ref_model_sync_steps or self.ref_model_sync_steps % every:
            yield (
                "bema.update_freq: the reference is set to the average every ref_model_sync_steps, wanted a multiple "
                f"of {every}, got {self.ref_model_sync_steps}"
            )
        if self.ref_model_mixup_alpha != Referenced.ref_model_mixup_alpha:
            yield "ref_model_mixup_alpha: mixes no average into the reference; leave it out, or bema.update_freq"


@dataclass(frozen=True)
class Teacher(Settings):
    """The model whose distribution of the next token a student learns, and the divergence."""

    prefix = "teacher."

    model: Named | None = None
    """Name or directory of the teacher, a causal LM with the same tokenizer, or with any if the
    divergence is uld or gold; from Python, also the model.
    """
    tokenizer: Named | None = None
    """Name or directory of the teacher's tokenizer, for uld and gold, if it is not beside the model;
    from Python, also the tokenizer."""
    server: str | None = None
    """Address of a vLLM server with the teacher, such as http://127.0.0.1:8000, instead of the
    model: every step asks it for the top_k likeliest tokens in place of each token that trains."""
    api_key: str | None = None
    """Key of that server, sent with every request."""
    timeout: PositiveFloat = 600.0
    """Seconds that the server may take for one completion, before it is asked again."""
    attempts: PositiveInt = 8
    """How often the server is asked for one completion before the run ends."""
    prompt: str | None = None
    """Column of the data with the prompt that the teacher reads in place of the student's: with a
    demonstration, an answer or feedback in it. A teacher of the student's own name then is the
    student before training, which learns to do without (SDFT)."""
    reprompt: Named | None = None
    """Your own module:function of (row, samples) that writes such a prompt for each of the student's
    completions of a row, when they are known: with the verdict on it, or with another one that
    succeeded (SDPO: Huebotter et al. 2026, arXiv:2601.20802). None leaves a completion out. From
    Python, also the function."""
    sync_steps: PositiveInt | None = None
    """Steps between updates of the teacher from the student, which it begins as; null never updates
    it."""
    mixup_alpha: PositiveShare = 0.05
    """Weight of the student in such an update, alpha student + (1 - alpha) teacher; 1 makes the
    teacher the student itself, as it is before each step."""
    logprobs: str | None = None
    """File of the teacher's stored top-k log-probs, instead of the model: one that an earlier run
    with top_k left.
    """
    top_k: PositiveInt | None = None
    """Keep the teacher's k likeliest tokens and the mass of the rest, from one pass before
    training, or from its server; null keeps the teacher in memory and compares whole
    distributions."""
    divergence: Literal[
        "forward_kl",
        "reverse_kl",
        "jsd",
        "skew_forward_kl",
        "skew_reverse_kl",
        "alpha_beta_divergence",
        "taid",
        "uld",
        "gold",
    ] = "forward_kl"
    """KL(teacher||student), which covers; KL(student||teacher), which seeks; what lies between, with
    its beta (jsd); either with some of the other distribution mixed in (skew, alpha); two knobs for
    tokens and errors (alpha_beta_divergence, alpha and beta); or forward KL to a teacher that
    begins as the student itself (taid). For a teacher of another tokenizer, over the spans of text
    that both share: sorted probabilities (uld), or jsd of the tokens that both have and uld of the
    others (gold, as in TRL).
    """
    alpha: OpenUnitInterval = 0.1
    """Share that is mixed in (skew), or α of alpha_beta_divergence."""
    beta: OpenUnitInterval = 0.5
    """Weight of the teacher in the mixture of the generalized Jensen-Shannon divergence (jsd, gold),
    in (0, 1); or β of alpha_beta_divergence.
    """
    matched_weight: ClosedUnitInterval | None = None
    """Weight in gold of the tokens that both vocabularies have; that of the others is 1 minus it. null
    takes their share of the teacher's vocabulary."""
    taid_start: ClosedUnitInterval = 0.4
    """Share of the way from the student to the teacher that taid begins at; it ends at 1."""
    temperature: PositiveFloat = 1.0
    """Softmax temperature of both sides."""

    @property
    def reads_text(self) -> bool:
        """Whether the teacher may have another tokenizer, for the divergence is over spans of text."""
        return self.divergence in ("uld", "gold")

    def contradictions(self) -> Iterator[str]:
        yield from self._impossible_of_its_kind()
        yield from self._impossible_over_spans()
        if self.prompt is not None and self.reprompt is not None:
            yield "teacher.prompt: teacher.reprompt writes the teacher's prompts; give one of the two"
        if self.mixup_alpha != Teacher.mixup_alpha and not self.sync_steps:
            yield "teacher.mixup_alpha: without teacher.sync_steps the teacher stays as it is; give it, such as 1"
        read = {
            "alpha": ("skew_forward_kl", "skew_reverse_kl", "alpha_beta_divergence"),
            "beta": ("jsd", "alpha_beta_divergence", "gold"),
            "taid_start": ("taid",),
            "matched_weight": ("gold",),
            "tokenizer": ("uld", "gold"),
        }
        for name, divergences in read.items():
            given = getattr(self, name) != getattr(Teacher, name)
            if given and self.divergence not in divergences:
                yield (
                    f"teacher.{name}: is for {', '.join(divergences)}, and the divergence is {self.divergence}; "
                    "leave it out"
                )

    def _impossible_of_its_kind(self) -> Iterator[str]:
        """Yield what a stored teacher can't do, or one on a server, or one that is on none."""
        is_stored = self.server is None and (self.model is None or self.top_k is not None)
        if self.prompt is not None and is_stored:
            yield (
                "teacher.prompt: what is stored of a teacher is under the student's prompts; give --teacher.model or "
                "--teacher.server, and no teacher.logprobs; a model without teacher.top_k"
            )
        if self.sync_steps and (self.model is None or self.top_k is not None):
            yield (
                "teacher.sync_steps: what is stored of a teacher, or served, stays as it is; give --teacher.model, and "
                "neither teacher.top_k nor teacher.logprobs"
            )
        if self.server is None and self.api_key is not None:
            yield "teacher.api_key: it is for a server, whose teacher.server is missing"
        if self.server is not None and self.temperature != 1:
            yield (
                "teacher.temperature: a vLLM server gives log-probs at temperature 1, and those of k tokens can't be "
                "turned into others; leave it out, or give --teacher.model"
            )

    def _impossible_over_spans(self) -> Iterator[str]:
        """Yield what a teacher can't do whose distributions are compared over spans of text."""
        if not self.reads_text:
            return
        for name in ("server", "logprobs", "top_k"):
            if getattr(self, name) is not None:
                yield (
                    f"teacher.{name}: {self.divergence} compares whole distributions, of spans that no server or file "
                    f"knows; give --teacher.model, and no teacher.{name}"
                )
        if self.sync_steps:
            yield (
                f"teacher.sync_steps: a teacher that follows has the student's own tokens, and {self.divergence} is "
                "for another's; take another divergence, or leave it out"
            )
        if self.reprompt is not None:
            yield (
                "teacher.reprompt: what it writes is read in the student's tokens so far; give teacher.prompt, or "
                "leave it out"
            )

    def check(self, *, needed: bool) -> None:
        """Check before anything is loaded that there is one teacher where losses need it.

        Raises:
            ValueError: if a loss needs a teacher and has none, or if no loss needs the one there
                is.
        """
        named = sum(each is not None for each in (self.model, self.server, self.logprobs))
        if named and not needed:
            raise ValueError(
                "teacher: no loss of this mix learns from it; add distillation, or leave the teacher out"
            )
        if needed and (named != 1 or None not in (self.logprobs, self.top_k)):
            raise ValueError(
                "teacher: distillation needs one; give --teacher.model, --teacher.server, or --teacher.logprobs "
                "and no top_k"
            )


@dataclass(frozen=True)
class Limits(Settings):
    """Limits of a conversation.

    ``max_tokens`` of the sampling limits one turn; a turn cut by it is the last."""

    prefix = "limits."

    turns: PositiveInt = 8
    """Completions of the policy."""
    tokens: PositiveInt = 4096
    """Tokens after the prompt, those of the environment included."""
    seconds: PositiveFloat = 60.0
    """Seconds that one call of the environment may take."""
    attempts: PositiveInt = 3
    """How often an environment is made and reset before its conversation is given up, aborted and
    masked.
    """
    concurrency: PositiveInt | None = None
    """Environments open at once; further conversations wait. null opens those of all prompts that
    are sampled.
    """
