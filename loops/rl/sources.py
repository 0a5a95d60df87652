"""Where the answers of a recipe come from: from a configuration to a `RolloutScheduler`, and their file.

policy         the weights that are trained sample by themselves; at max_staleness > 0 a copy of them does
vllm           a server, one that runs or one that is started for this run
vllm_engine    vLLM in this process, on the trainer's device
"""

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from peft import PeftModel, get_peft_model_state_dict
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from ...data import load
from ..models.io import merged
from ..models.policy import Policy
from ..rollouts.local.source import DetachedSource, LocalSource
from ..rollouts.replay import SampleWriter, read_samples
from ..rollouts.sample import Sample
from ..rollouts.scheduler import RolloutScheduler, Tasks
from ..rollouts.source import RolloutSource
from ..rollouts.vllm.engine import VLLMEngine, start_engine
from ..rollouts.vllm.launch import launch, max_lora_rank
from ..rollouts.vllm.server import VLLMServer
from ..rollouts.vllm.weights import Adapters, Files, Nccl, Updates, address_towards
from ..runs.context import Recipe
from ..runs.ranks import from_main
from .buffer import Store
from .settings import VLLM, SamplingConfig

_SHOWN, _LONGEST = 3, 300  # samples of a rollout that are printed, and letters of one


def check_sampled(config: SamplingConfig) -> None:
    """Before anything is loaded.

    Raises:
        ValueError: if answers can't be sampled as configured.
    """
    _ = config.sampling
    if config.temperature == 0:
        raise ValueError("temperature: at 0 every answer to a prompt is the same, wanted > 0, such as 1.0")
    if config.group_size < 1:
        raise ValueError(f"group_size: must be >= 1, got {config.group_size}")
    if config.source == "policy":
        if config.vllm != VLLM():
            raise ValueError("vllm: it is set up, but source is policy; set source to vllm, or leave it out")
        return
    if config.dtype == "float64":
        raise ValueError("source: vLLM does not compute in float64; set dtype to float32, or source to policy")
    if config.quantize is not None:
        raise ValueError("source: a quantized policy says other things than vLLM's plain model; set source to policy")
    for name in ("timeout", "attempts", "concurrency", "patience"):
        if not getattr(config.vllm, name) > 0:
            raise ValueError(f"vllm.{name}: must be > 0, got {getattr(config.vllm, name)}")
    if config.vllm.updates == "adapters":
        check_adapters(config)
    if config.source == "vllm_engine" and replace(config.vllm, options={}, directory=None) != VLLM():
        raise ValueError("vllm: an engine in this process has no other settings than options and directory")
    if config.vllm.trainer_address is not None and config.vllm.updates != "nccl":
        raise ValueError("vllm.trainer_address: it is for updates by nccl; set vllm.updates to nccl, or leave it out")
    if config.vllm.url is not None and (config.vllm.python or config.vllm.options or config.vllm.environment):
        raise ValueError("vllm.url: that server runs already; leave out python, options and environment, or the url")


def check_adapters(config: SamplingConfig) -> None:
    """Before anything is loaded.

    Raises:
        ValueError: if a server could not be given the adapters of this rank.
    """
    if config.lora.r == 0:
        raise ValueError("vllm.updates: there are no adapters; set lora.r, or updates to files")
    needed = max_lora_rank(config.lora.r)
    given = config.vllm.options.get("max_lora_rank", needed)
    if given < config.lora.r:
        raise ValueError(
            f"vllm.options: max_lora_rank={given} has no room for lora.r={config.lora.r}; leave it out, or set it to "
            f"{needed}"
        )


def open_scheduler(
    config: SamplingConfig,
    recipe: Recipe[Policy],
    tasks: Tasks,
    *,
    converse: Callable[[RolloutSource], RolloutSource] = lambda source: source,
    max_staleness: int = 0,
    **options: Any,
) -> RolloutScheduler | None:
    """On the main process: what draws the answers to ``tasks``. The others wait until it is there.

    Args:
        converse: from a source of answers to one of conversations.
        options: further ones of `RolloutScheduler`.
    """
    adapters = config.vllm.updates == "adapters"
    opened: list[RolloutScheduler] = []

    def open_there() -> None:
        source = open_source(config, recipe, max_staleness=max_staleness)
        check_room(config, recipe, getattr(source, "context", None))
        sampler = RolloutScheduler(
            converse(source),
            tasks,
            lambda: adapter_weights(recipe.model) if adapters else named_weights(recipe.model),
            groups_per_step=config.batch_size,
            group_size=config.group_size,
            sampling=replace(config.sampling, stop=stop_tokens(recipe)),
            key=config.seed,
            max_staleness=max_staleness,
            attempts=config.vllm.attempts,
            **options,
        )
        opened.append(sampler)

    from_main(recipe.run.accelerator, open_there)
    return opened[0] if opened else None


def check_room(config: SamplingConfig, recipe: Recipe[Policy], context: int | None) -> None:
    """That the model has room for every prompt and its answer: nobody should learn that from step 57.

    Raises:
        ValueError: names the row whose prompt is too long.
    """
    for source, data in ((config.data, recipe.data), (config.eval_data, recipe.eval_data)):
        if source is None or data is None or context is None:
            continue
        known = "row" in data.column_names  # all of this data is prompts, to which answers are sampled
        for i, prompt in enumerate(data["prompt"] if known or data is recipe.data else []):
            if len(prompt) + config.max_tokens > context:
                where = load(source).where(data[i]["row"]) if known else f"{source}, example {i + 1}"
                raise ValueError(
                    f"{where}: a prompt of {len(prompt)} tokens and max_tokens={config.max_tokens} do not fit the "
                    f"model's context of {context}; lower max_tokens, cut prompts (max_length, truncation), or remove "
                    "the row"
                )


def open_source(config: SamplingConfig, recipe: Recipe[Policy], *, max_staleness: int) -> RolloutSource:
    """What draws answers; at ``max_staleness`` > 0 while the policy is being trained."""
    if config.source == "policy":
        kind = DetachedSource if max_staleness else LocalSource
        context = recipe.run.accelerator.autocast
        return kind(recipe.model, recipe.tokenizer, cache_bytes=config.cache_bytes, context=context)
    known: dict[str, Any] = {"config": recipe.model.plain.config, "tokenizer": recipe.tokenizer}
    dtype: Any = config.dtype  # float64 was refused
    if config.source == "vllm_engine":
        sleep = torch.cuda.is_available()  # the trainer needs the memory
        engine = start_engine(config.model, dtype=dtype, sleep=sleep, **config.vllm.options)
        return VLLMEngine(engine, directory=config.vllm.directory, sleep=sleep, **known)
    updates = open_updates(config, recipe)
    known |= {"updates": updates, "dtype": dtype, "patience": config.vllm.patience}
    known |= {"timeout": config.vllm.timeout, "concurrency": config.vllm.concurrency}
    if config.vllm.url is not None:
        return VLLMServer(config.vllm.url, **known)
    server = launch(
        config.model,
        log=recipe.run.directory / "vllm.log",
        dtype=dtype,
        python=config.vllm.python or sys.executable,
        backend=getattr(updates, "backend", Files.backend),
        lora_rank=config.lora.r if config.vllm.updates == "adapters" else 0,
        adapters=max_staleness + 2,
        flags=flags_of(config.vllm.options),
        environment=config.vllm.environment,
        patience=config.vllm.patience,
    )
    return VLLMServer(server.url, revive=server.revive, end=server.close, **known)


def open_updates(config: SamplingConfig, recipe: Recipe[Policy]) -> Updates:
    """How weights get to a server."""
    directory = Path(config.vllm.directory or recipe.run.directory / "weights")
    match config.vllm.updates:
        case "files":
            return Files(directory)
        case "nccl":
            host = urlsplit(config.vllm.url or "").hostname or "127.0.0.1"
            return Nccl(config.vllm.trainer_address or address_towards(host))
        case "adapters":
            peft: Any = recipe.model.model
            return Adapters(directory, peft.peft_config["default"])


def flags_of(options: Mapping[str, Any]) -> list[str]:
    """Of vLLM's command line: {max_model_len: 512, enforce_eager: true} is --max-model-len 512 --enforce-eager."""
    flags: list[str] = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", value if isinstance(value, str) else json.dumps(value)]
    return flags


def named_weights(policy: Policy) -> Iterable[tuple[str, Tensor]]:
    """Of the model as it is now, under the names of transformers, adapters added in."""
    model: Any = merged(policy.model) if isinstance(policy.model, PeftModel) else policy.model
    yield from model.state_dict().items()


def adapter_weights(policy: Policy) -> Iterable[tuple[str, Tensor]]:
    """Of the adapter alone, under peft's names."""
    yield from get_peft_model_state_dict(policy.model).items()


def stop_tokens(recipe: Recipe[Policy]) -> tuple[int, ...]:
    """Those that the model was made to end with, and the tokenizer's."""
    known = getattr(recipe.model.plain.generation_config, "eos_token_id", None)
    own: Any = recipe.tokenizer.eos_token_id
    ids = {own, *(known if isinstance(known, list) else [known])} - {None}
    if not ids:
        raise ValueError("stop: neither the tokenizer nor the model has an end token; set tokenizer.eos_token")
    return tuple(sorted(ids))


def open_store(config: SamplingConfig, recipe: Recipe[Policy]) -> Store | None:
    if not recipe.run.accelerator.is_main_process:
        return None
    return SampleLog(recipe.run.directory / "samples.jsonl", config.show_every, recipe.tokenizer.decode)


class SampleLog:
    """``samples.jsonl``, and a few of each so many rollouts on the screen, where ``decode`` makes prompts readable."""

    def __init__(self, path: Path, show_every: int, decode: Callable[[list[int]], Any] = str) -> None:
        self.path, self.show_every, self.decode, self.rollouts = path, show_every, decode, 0
        self.console = Console()

    def keep(self, tasks: int) -> None:
        partial = self.path.with_suffix(".partial.jsonl")
        partial.unlink(missing_ok=True)
        with SampleWriter(partial) as writer:
            for sample in read_samples(self.path) if self.path.exists() else ():
                if sample.task < tasks:
                    writer.write([sample])
        partial.replace(self.path)

    def write(self, samples: list[Sample]) -> None:
        with SampleWriter(self.path) as writer:
            writer.write(samples)
        if self.show_every and self.rollouts % self.show_every == 0:
            self._show(samples[:: max(1, len(samples) // _SHOWN)][:_SHOWN])
        self.rollouts += 1

    def _show(self, samples: Sequence[Sample]) -> None:
        columns = ("task", "end of the prompt", "answer", "rewards")
        table = Table(*columns, title=f"rollout {self.rollouts}", title_justify="left")
        for sample in samples:
            scores = ", ".join(
                f"{name} {f'{score:.3g}' if isinstance(score, float) else score or 'none'}"
                for name, score in sample.rewards.items()
            )
            asked = str(self.decode(sample.prompt))[-_LONGEST:]
            table.add_row(str(sample.task), Text(asked), Text(sample.text[:_LONGEST]), scores)
        self.console.print(table)
