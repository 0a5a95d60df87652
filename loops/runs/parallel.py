"""The ranks that were started, and how they share the model."""

import os

from accelerate import Accelerator
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..config import Common

# Wrappers of Accelerate, by the variable of its launcher. On a CPU it silently ignores them.
_WRAPPERS = {
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "ParallelismConfig",
}
_LOCAL_RANKS = ("LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK")
_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
_START = "start ranks by torchrun --nproc_per_node N (CPUs: ACCELERATE_USE_CPU=true), or accelerate launch --multi_gpu"


def check_launcher() -> None:
    """Check the launcher's settings before Accelerate forms a process group.

    Raises:
        ValueError: if it asks Accelerate to wrap the model, or started several processes without a rank for each.
    """
    for variable, wrapper in _WRAPPERS.items():
        if os.environ.get(variable, "").lower() in ("1", "true", "t", "yes", "y", "on"):
            raise ValueError(
                f"{variable}: Accelerate's {wrapper} is not supported; launch without it (torchrun, or accelerate "
                "launch --multi_gpu), and shard the model by --parallel.dp_shard_size, the ranks that hold one copy"
            )
    if _started() > 1 and not any(variable in os.environ for variable in _LOCAL_RANKS):
        raise ValueError(f"{_started()} processes were announced, and this one has no LOCAL_RANK; {_START}")


def check_ranks(config: Common, accelerator: Accelerator) -> None:
    """Check that the processes that were started are ranks of one run which can share the model, and say how they do.

    Raises:
        ValueError: if there are fewer ranks than processes, or ``dp_shard_size`` does not divide them, or there would
            be quantized weights in shards.
    """
    ranks, size = accelerator.num_processes, config.parallel.dp_shard_size
    if _started() != ranks:
        raise ValueError(f"{_started()} processes were started, and the process group has {ranks}; {_START}")
    if ranks % size:
        raise ValueError(
            f"parallel.dp_shard_size: must divide the number of ranks, which is {ranks}, got {size}; lower it, or "
            f"start a multiple of {size} (torchrun --nproc_per_node {size})"
        )
    if size > 1 and config.quantize is not None:
        raise ValueError(
            f"parallel.dp_shard_size: quantized weights can't be sharded, got {size} and quantize={config.quantize}; "
            "leave one of them out"
        )
    if ranks > 1:
        copies = "one copy" if size == ranks else f"{ranks // size} copies"
        sharding = "" if size == 1 else f", {'each ' if size < ranks else ''}sharded over {size}"
        accelerator.print(f"{ranks} ranks: {copies} of the model{sharding}")


def open_mesh(config: Common, accelerator: Accelerator) -> DeviceMesh | None:
    """The mesh of ranks, copies of the model times shards of each; None if every rank has a whole copy."""
    ranks, size = accelerator.num_processes, config.parallel.dp_shard_size
    if size == 1:
        return None
    shape, names = ((size,), ("dp_shard",)) if size == ranks else ((ranks // size, size), ("dp_replicate", "dp_shard"))
    return init_device_mesh(accelerator.device.type, shape, mesh_dim_names=names)


def _started() -> int:
    """Number of processes of this job, according to its launcher."""
    return int(next((os.environ[variable] for variable in _SIZES if os.environ.get(variable)), 1))
