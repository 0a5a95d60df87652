"""One of 64 ranks in a process of its own: the others don't exist, and collectives only take
note.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from burnish.loops.batch import collate
from burnish.loops.config import Parallel
from burnish.loops.models.policy import Policy
from burnish.loops.models.sharding import shard
from burnish.loops.runs.parallel import open_mesh
from tiny import make_examples, make_model
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

RANKS, LAYERS = 64, 3
KINDS = ("allgather", "reduce_scatter", "allreduce")


class Collectives(TorchDispatchMode):
    """Count the collectives of each kind, and note the dtypes of what they send."""

    def __init__(self):
        super().__init__()
        self.counts = dict.fromkeys(KINDS, 0)
        self.dtypes = {}

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if function.namespace == "c10d":
            sent = [each for each in tree_leaves(arguments) if isinstance(each, torch.Tensor)]
            kind = next(kind for kind in KINDS if kind in function.__name__)
            self.counts[kind] += 1
            self.dtypes[kind] = sorted(
                {*self.dtypes.get(kind, ()), *(str(tensor.dtype) for tensor in sent)}
            )
        return function(*arguments, **(options or {}))


def be_rank(output):
    """Two micro-batches, where 64 ranks hold one copy of the model, or 8 in two dimensions."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    results = {"layers": LAYERS}
    accelerator = SimpleNamespace(num_processes=RANKS, device=torch.device("cpu"))
    for name, size in (("one copy", RANKS), ("8 copies", RANKS // 8)):
        # Every size is a multiple of 64, so that no shard is padded.
        sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "head_dim": 64}
        policy = Policy(make_model(num_hidden_layers=LAYERS, **sizes), layout="padded")
        parameters = sum(parameter.nbytes for parameter in policy.parameters())
        mesh = open_mesh(SimpleNamespace(parallel=Parallel(size)), accelerator)
        shard(policy, mesh)
        with Collectives() as sent:
            for _ in range(2):
                policy(collate(make_examples(2))).logprob.sum().backward()
        results[name] = sent.counts
        if name == "one copy":
            results["parameters"] = parameters
            results["held"] = sum(parameter.to_local().nbytes for parameter in policy.parameters())
            results["gradient"] = sum(
                parameter.grad.to_local().nbytes for parameter in policy.parameters()
            )
    for param_dtype in (None, torch.bfloat16):
        policy = Policy(make_model(dtype=torch.float32), layout="padded")
        shard(policy, mesh["dp_shard"], param_dtype=param_dtype)
        with Collectives() as sent, torch.autocast("cpu", torch.bfloat16):
            policy(collate(make_examples(2))).logprob.sum().backward()
        results[f"autocast {param_dtype}"] = sent.dtypes
    dist.destroy_process_group()
    Path(output).write_text(json.dumps(results))
