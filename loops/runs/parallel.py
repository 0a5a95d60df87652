"""The ranks that were started, and how they share the model."""

import os

from accelerate import Accelerator
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..config import Common, Parallel

# Wrappers of Accelerate, by the variable of its launcher. On a CPU it silently ignores them.
_WRAPPERS = {
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "ParallelismConfig",
}
_LOCAL_RANKS = (
    "LOCAL_RANK",
    "MPI_LOCALRANKID",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MV2_COMM_WORLD_LOCAL_RANK",
)
_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
# Precisions of `accelerate launch`, and the dtypes that compute in them.
_LAUNCHED = {"bf16": "bfloat16", "fp16": "float16"}
_START = "start ranks by torchrun --nproc_per_node N, or accelerate launch --multi_gpu"


def check_launcher() -> None:
    """Check the launcher's settings before Accelerate forms a process group.

    Raises:
        ValueError: if it asks Accelerate to wrap the model, or started several processes without a
            rank for each.
    """
    for variable, wrapper in _WRAPPERS.items():
        if os.environ.get(variable, "").lower() in ("1", "true", "t", "yes", "y", "on"):
            raise ValueError(
                f"{variable}: Accelerate's {wrapper} is not supported; launch without it (torchrun, or accelerate "
                f"launch --multi_gpu), and shard the model by {_same_in_flags()}"
            )
    if _started() > 1 and not any(variable in os.environ for variable in _LOCAL_RANKS):
        raise ValueError(
            f"{_started()} processes were announced, and this one has no LOCAL_RANK; {_START}"
        )


def _same_in_flags() -> str:
    """burnish's settings for what a configuration file of Accelerate asks for, and what has no such
    setting.
    """
    asked = {name: value.lower() for name, value in os.environ.items()}
    replicas, split, ring, ulysses = (
        int(asked.get(f"PARALLELISM_CONFIG_{kind}_SIZE", 1))
        for kind in ("DP_REPLICATE", "TP", "CP", "SP")
    )
    together = ring * ulysses  # two ways to say the same
    flags = {
        "parallel.dp_shard_size": max(_started() // (replicas * split * together), 1),
        "parallel.tp_size": split if split > 1 else None,
        "parallel.cp_size": together if together > 1 else None,
        "dtype": _LAUNCHED.get(asked.get("ACCELERATE_MIXED_PRECISION", "no")),
        "gradient_checkpointing": "true"
        if asked.get("FSDP_ACTIVATION_CHECKPOINTING") == "true"
        else None,
    }
    devices = [
        asked.get(f"ACCELERATE_DEEPSPEED_OFFLOAD_{kind}_DEVICE", "none")
        for kind in ("OPTIMIZER", "PARAM")
    ]
    offloaded = [
        device != "none" or asked.get("FSDP_OFFLOAD_PARAMS") == "true" for device in devices
    ]
    flags["offload_optimizer"] = "true" if offloaded[0] else None
    words = " ".join(f"--{name} {value}" for name, value in flags.items() if value)
    return f"{words}; parameters stay on the GPU" if offloaded[1] else words


def check_ranks(config: Common, accelerator: Accelerator) -> None:
    """Check that the processes that were started are ranks of one run which can share the model,
    and say how they do.

    Raises:
        ValueError: if there are fewer ranks than processes, or ``dp_shard_size`` does not divide
            them, or there would be quantized weights in shards.
    """
    ranks = accelerator.num_processes
    shards = config.parallel.dp_shard_size
    size = config.parallel.copy_size
    field = config.parallel.field
    if _started() != ranks:
        raise ValueError(
            f"{_started()} processes were started, and the process group has {ranks}; {_START}"
        )
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    computed = config.dtype
    if launched != "no" and _LAUNCHED.get(launched) != computed:
        wanted = _LAUNCHED.get(launched, "bfloat16")
        raise ValueError(
            f"dtype: accelerate launch asks for {launched}, got {computed}; pass --dtype {wanted}, or launch with "
            "--mixed_precision no"
        )
    if ranks % size:
        times = f"times dp_shard_size={shards}, " if size > shards > 1 else ""
        raise ValueError(
            f"{field}: {times}must divide the number of ranks, which is {ranks}, got {size}; lower it, or "
            f"start a multiple of {size} (torchrun --nproc_per_node {size})"
        )
    if ranks > 1:
        accelerator.print(f"{ranks} ranks: {_described(config.parallel, ranks)}")


def _described(parallel: Parallel, ranks: int) -> str:
    """How many copies of the model these ranks hold, and how each is divided among them."""
    size = parallel.copy_size
    copies = "one copy of the model" if size == ranks else f"{ranks // size} copies of the model"
    divided = []
    shards = parallel.dp_shard_size * parallel.cp_size
    if shards > 1:
        divided.append(f"sharded over {shards}")
    if parallel.tp_size > 1:
        divided.append(f"split over {parallel.tp_size}")
    parts = " and ".join(divided)
    if parallel.cp_size > 1:
        parts += f", rows split over {parallel.cp_size}"
    if not parts:
        return copies
    return f"{copies}, each {parts}" if size < ranks else f"{copies}, {parts}"


def open_mesh(config: Common, accelerator: Accelerator) -> DeviceMesh | None:
    """The ranks as copies of the model, shards of each, and ranks that compute together.

    None if every rank has a whole copy.
    """
    parallel = config.parallel
    if parallel.copy_size == 1:
        return None
    sizes = {
        "dp_replicate": accelerator.num_processes // parallel.copy_size,
        "dp_shard": parallel.dp_shard_size,
    }
    sizes |= {"tp": parallel.tp_size, "cp": parallel.cp_size}
    used = {name: size for name, size in sizes.items() if size > 1 or name == "dp_shard"}
    return init_device_mesh(
        accelerator.device.type, tuple(used.values()), mesh_dim_names=tuple(used)
    )


def _started() -> int:
    """Number of processes of this job, according to its launcher."""
    return int(next((os.environ[variable] for variable in _SIZES if os.environ.get(variable)), 1))
