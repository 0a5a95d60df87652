"""The configured source of completions and its `RolloutScheduler`.

policy         the policy that is trained samples; at max_staleness > 0 a copy of it does
vllm           a server, already running or started for this run
vllm_engine    vLLM in this process, on the trainer's device
"""

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...data import where
from ..models.end_tokens import end_tokens
from ..models.io import adapter_weights, is_sharded, named_weights
from ..models.policy import Policy
from ..redaction import redacted, resolved
from ..rollouts.event_loops import off_loop
from ..rollouts.event_loops import run as run_coroutine
from ..rollouts.local.source import DetachedSource, LocalSource
from ..rollouts.sample import Sample
from ..rollouts.scheduler import Prompt, RolloutScheduler
from ..rollouts.source import RolloutSource
from ..rollouts.vllm.engine import VLLMEngine, start_engine
from ..rollouts.vllm.launch import SHARE, ServerProcess, refuse_unsafe
from ..rollouts.vllm.server import VLLMServer, VLLMServers
from ..rollouts.vllm.weights import Adapters, Files, Nccl, max_lora_rank, transit_directory
from ..runs.context import RunContext
from ..runs.liveness import at, may_stand
from ..runs.ranks import on_main
from .distributed import Follower, distributed
from .settings import VLLM, OnlineConfig, SamplingConfig


def check_sampling(config: SamplingConfig) -> None:
    """Raise ValueError if a stored adapter or the number of ranks stands against sampling as
    configured.

    What needs neither is a rule of the settings, `SamplingConfig.sampling_contradictions`.
    """
    if config.source == "policy":
        return
    if config.vllm.updates == "adapters" and config.lora.enabled:
        adapter = vars(config.lora) | config.lora.kwargs
        if config.lora.path is not None:
            stored = Path(config.lora.path, "adapter_config.json")
            if stored.exists():  # what is missing is told where the adapter is loaded
                adapter = json.loads(stored.read_text())
        needed = max_lora_rank(adapter)
        largest = config.vllm.options.get("max_lora_rank", needed)
        if largest < adapter["r"]:
            raise ValueError(
                f"vllm.options: max_lora_rank={largest} has no room for lora.r={adapter['r']}; leave it out, or set "
                f"it to {needed}"
            )
    if config.source == "vllm_engine" and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ValueError(
            "source: an engine in this process takes its device alone; with several ranks set it to vllm"
        )
    if config.vllm.url is None:
        refuse_unsafe(config.vllm.options)


def open_scheduler(
    run: RunContext[Policy],
    prompts: Callable[[int], Prompt],
    *,
    converse: Callable[[RolloutSource], RolloutSource] = lambda source: source,
    score: Callable[[list[Sample]], Awaitable[None]] | None = None,
) -> tuple[RolloutScheduler | None, Follower | None]:
    """On the main process, the scheduler of the configured source; on the others, the follower of
    its publications.

    Where the policy samples, that of every rank samples its share.

    Args:
        run: its settings are an `OnlineConfig`.
        converse: wraps a source of completions as a source of conversations.
        score: see `RolloutScheduler`.

    Raises:
        ValueError: if nothing ends a completion, or names the row whose prompt and ``max_tokens``
            exceed the context.
    """
    config: OnlineConfig = run.config
    stop = end_tokens(run.model.plain.generation_config, run.tokenizer)
    if not stop:
        raise ValueError(
            "stop: no end token; name one that the tokenizer has, such as --eos_token '<|im_end|>'"
        )
    run.end_with(stop)
    accelerator = run.accelerator
    by_policy = config.source == "policy"
    sharded = is_sharded(run.model)
    read = adapter_weights if config.vllm.updates == "adapters" else named_weights
    weights = partial(read, run.model, None if by_policy else getattr(torch, config.dtype))
    local = open_local(run, detached=config.max_staleness > 0) if by_policy else None

    def opened() -> RolloutSource:
        # servers start at once, and are met one after the other
        with at("opening vLLM"), may_stand(config.vllm.patience):
            return open_source(run)

    source: RolloutSource | None = local or on_main(accelerator, opened)
    on_main(accelerator, lambda: check_context_length(run, source))
    follow = None
    if by_policy or sharded:
        source, follow = distributed(
            accelerator,
            source,
            weights,
            ranks=None if by_policy else 1,
            gathered=sharded,
            groups=config.prompts_per_rollout,
            group_size=config.group_size,
        )

    def make_there() -> RolloutScheduler:
        assert source is not None
        return RolloutScheduler(
            converse(source),
            prompts,
            weights=weights,
            groups_per_step=config.prompts_per_rollout,
            group_size=config.group_size,
            sampling=replace(config.sampling, stop=stop),
            seed=config.seed,
            max_staleness=config.max_staleness,
            in_flight=config.in_flight,
            attempts=config.vllm.attempts,
            score=score,
            greedy=config.samples_greedily,
        )

    return on_main(accelerator, make_there), follow


def check_context_length(run: RunContext[Policy], source: RolloutSource | None) -> None:
    """Raise ValueError, naming the row, if a prompt and ``max_tokens`` exceed the source's context."""
    max_tokens = run.config.max_tokens
    context = getattr(source, "context", None)
    if context is None:
        return  # no limit is known
    for parts, data in ((run.records, run.data), (run.eval_records, run.eval_data)):
        if data is None:
            continue
        of_prompts = "row" in data.column_names  # or of demonstrations, which `distill` completes
        if data is not run.data and not of_prompts:
            continue  # no completions are sampled for held-out demonstrations
        for i, prompt in enumerate(data["prompt"]):
            if len(prompt) + max_tokens > context:
                if of_prompts:
                    place = where(parts, data[i]["row"])
                    limit = "max_prompt_length"
                else:
                    place = f"{parts[0].source}, example {i + 1}"
                    limit = "max_length"
                raise ValueError(
                    f"{place}: a prompt of {len(prompt)} tokens and max_tokens={max_tokens} do not fit the "
                    f"model's context of {context}; lower max_tokens, cut prompts ({limit}, truncation), or remove the "
                    "row"
                )


def open_local(run: RunContext[Policy], *, detached: bool = False, **options: Any) -> LocalSource:
    """The policy as a source, or a whole copy of it if it is sharded or should be ``detached`` from
    training.
    """
    kind = DetachedSource if detached or is_sharded(run.model) else LocalSource
    autocast = run.accelerator.autocast
    return kind(
        run.model,
        run.tokenizer,
        cache_bytes=run.config.cache_bytes,
        cuda_graphs=run.config.cuda_graphs,
        context=autocast,
        **options,
    )


def open_source(run: RunContext[Policy]) -> RolloutSource:
    """The configured vLLM."""
    of_server = {name: resolved(value) for name, value in vars(run.config.vllm).items()}
    config: OnlineConfig = replace(run.config, vllm=VLLM(**of_server))
    options = {**_of_revision(config), **config.vllm.options}
    known: dict[str, Any] = {"config": run.model.plain.config, "tokenizer": run.tokenizer}
    known["images"] = None if run.model.images is None else run.model.images.reader
    dtype: Any = config.dtype  # float64 was refused
    if config.source == "vllm_engine":
        sleep = torch.cuda.is_available()  # the trainer needs the memory
        _check_room(run, Path(config.vllm.directory or transit_directory()))
        engine = start_engine(config.model, dtype=dtype, enable_sleep_mode=sleep, **options)
        return VLLMEngine(engine, directory=config.vllm.directory, **known)
    known["dtype"] = dtype
    known["patience"] = config.vllm.patience
    known["timeout"] = config.vllm.timeout
    known["concurrency"] = config.vllm.concurrency
    updates = open_updates(run)
    if isinstance(updates, Files):
        _check_room(run, updates.directory)
    servers: list[VLLMServer] = []
    if config.vllm.urls:
        for url in config.vllm.urls:
            own = updates if not servers else _further_updates(run, updates)
            servers.append(VLLMServer(url, updates=own, key=config.vllm.api_key, **known))
        return VLLMServers(servers) if len(servers) > 1 else servers[0]
    processes = _start_servers(run, config, updates.flags, flags_of(options))
    try:
        for process in processes:
            own = updates if not servers else _further_updates(run, updates)
            server = VLLMServer(
                process.url,
                updates=own,
                key=process.key,
                revive=process.revive,
                end=process.close,
                **known,
            )
            servers.append(server)
    except BaseException:
        for process in processes:
            process.close()
        raise
    return VLLMServers(servers) if len(servers) > 1 else servers[0]


def _check_room(run: RunContext[Policy], directory: Path) -> None:
    """Raise ValueError if the disk of a directory has no room for the weights of one version, which
    all lie there until the servers have read them.
    """
    count = 0
    for name, weight in run.model.plain.named_parameters(remove_duplicate=False):
        # adapters are merged, and what is trained whole is there a second time
        if "lora_" not in name and ".original_module." not in name:
            count += weight.numel()
    needed = count * getattr(torch, run.config.dtype).itemsize
    directory = directory.absolute()
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise ValueError(
            f"vllm.directory: {directory} has {free / 2**30:.3f} GiB free, and the weights for vLLM take "
            f"{needed / 2**30:.3f} GiB; name a directory with room for them, or free some"
        )


def _further_updates(
    run: RunContext[Policy], first: Files | Nccl | Adapters
) -> Files | Nccl | Adapters:
    """The updates of a further server: files are written once for all, anything else anew."""
    return first if isinstance(first, Files) else open_updates(run)


def _start_servers(
    run: RunContext[Policy], config: OnlineConfig, update_flags: Sequence[str], flags: Sequence[str]
) -> list[ServerProcess]:
    """The servers that the run starts, all at the same time."""
    vllm = config.vllm

    def start(number: int) -> ServerProcess:
        environment = dict(vllm.environment)
        if vllm.devices:
            each = len(vllm.devices) // vllm.servers
            own = vllm.devices[number * each : (number + 1) * each]
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(own)
        name = "vllm.log" if number == 0 else f"vllm-{number + 1}.log"
        return ServerProcess(
            config.model,
            log=run.directory / name,
            dtype=config.dtype,
            python=vllm.python or sys.executable,
            update_flags=update_flags,
            flags=flags,
            environment=environment,
            host=vllm.host,
            patience=vllm.patience,
            share=SHARE / vllm.servers,
        )

    async def start_all() -> list[ServerProcess | BaseException]:
        starting = (off_loop(partial(start, number)) for number in range(vllm.servers))
        return await asyncio.gather(*starting, return_exceptions=True)

    outcomes = run_coroutine(start_all())
    started = [each for each in outcomes if isinstance(each, ServerProcess)]
    for each in outcomes:
        if isinstance(each, BaseException):
            for process in started:
                process.close()
            raise each
    return started


def _of_revision(config: OnlineConfig) -> dict[str, str]:
    """vLLM's options for the revision of the model that is trained, and of its tokenizer."""
    if config.model_revision is None:
        return {}
    return {"revision": config.model_revision, "tokenizer_revision": config.model_revision}


def open_updates(run: RunContext[Policy]) -> Files | Nccl | Adapters:
    """The configured way of sending weights to a server."""
    config: OnlineConfig = run.config
    own = run.directory / "weights"
    directory = Path(config.vllm.directory or own)
    match config.vllm.updates:
        case "files":
            # of a process of this run that was killed in the middle of an update
            for file in own.glob("*.safetensors"):
                file.unlink()
            return Files(directory)
        case "nccl":
            return Nccl(config.vllm.trainer_address)
        case "adapters":
            peft: Any = run.model.model
            # One version per step that a completion may lag behind, the newest, and the next.
            return Adapters(directory, peft.peft_config["default"], loaded=config.max_staleness + 2)


def flags_of(options: Mapping[str, object]) -> list[str]:
    """vLLM's command line: {max_model_len: 512, enforce_eager: true} is --max-model-len 512
    --enforce-eager.
    """
    flags: list[str] = []
    for name, value in options.items():
        if isinstance(value, str) and redacted(value, name) != value:
            raise ValueError(
                f"vllm.options: {name} holds a secret, and every user of the machine can read the arguments of a "
                'server; give it as a variable, such as vllm.environment: {HF_TOKEN: "${ENV:HF_TOKEN}"}'
            )
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", value if isinstance(value, str) else json.dumps(value)]
    return flags
