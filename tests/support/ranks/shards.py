"""Log-probs and gradients of heads whose vocabulary is split over three gloo ranks."""

from unittest import mock

import torch
import torch.distributed as dist
from burnish.kernels import Shard, passes, threads
from heads import CASES, EXTRAS, head, in_dtype, leaves, logprobs

BOUNDS = (0, 41, 42, 100)  # the second rank holds a single token
FORBIDDEN = torch.zeros(100, dtype=torch.float64)
FORBIDDEN[:60] = -torch.inf
SPLIT = {
    **{
        name: CASES[name]
        for name in (
            "plain",
            "all_logits_large",
            "rising_over_the_vocabulary",
            "softcap",
            "adapter",
        )
    },
    "everything": CASES["everything"] | {"outputs": (*EXTRAS, "top1", "rank"), "top_k": 3},
    "several": CASES["more_of_everything"],
    "a_shard_without_a_possible_token": head(
        63, 20, 100, bias=FORBIDDEN, target=torch.arange(63) % 40 + 60
    ),
    "shards_of_padding": head(
        63,
        20,
        100,
        vocab=41,
        target=torch.arange(63) % 41,
        outputs=(*EXTRAS, "top1", "rank"),
        top_k=3,
    ),
}


def upstream(name: str, shape: torch.Size) -> torch.Tensor:
    random = torch.Generator().manual_seed(len(name))
    return torch.randn(shape, generator=random, dtype=torch.float64)


def measured(case: dict, **options) -> dict[str, torch.Tensor]:
    result = logprobs(case, **options)
    found = {n: t for n, t in result._asdict().items() if isinstance(t, torch.Tensor)}
    if result.top_k is not None:
        found |= {"top_ids": result.top_k.ids, "top_logprob": result.top_k.logprob}
    used = {n: t for n, t in found.items() if t.requires_grad}
    torch.autograd.backward(list(used.values()), [upstream(n, t.shape) for n, t in used.items()])
    return {n: t.detach() for n, t in found.items()} | {
        f"d_{n}": t.grad for n, t in leaves(case).items()
    }


def shard_of(case: dict, rank: int) -> dict:
    # the padding is with the last
    rows = slice(BOUNDS[rank], BOUNDS[rank + 1] if rank < 2 else None)
    split = {
        name: case[name][rows].detach().requires_grad_()
        for name in ("weight", "bias")
        if name in case
    }
    if "adapter" in case:
        down, up, scaling = case["adapter"]
        split["adapter"] = (down, up[rows].detach().requires_grad_(), scaling)
    return case | split


def measured_of_all(shard: Shard, rank: int) -> dict[str, dict[str, torch.Tensor]]:
    found = {}
    for name, case in SPLIT.items():
        found[name] = measured(shard_of(in_dtype(case, torch.float64), rank), shard=shard)
    return found


def be_rank(directory: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    passes.ROWS, passes.COLUMNS, passes.KEEP = 24, 32, 20_000
    torch.set_num_threads(1)
    shard = Shard(dist.group.WORLD, BOUNDS[rank])
    results: dict = {"one thread": measured_of_all(shard, rank)}
    threads.FEWEST_ROWS, passes.THREADS_FROM, passes.KEEP = 4, 0, 0
    torch.set_num_threads(2)
    with mock.patch.object(passes, "for_each_tile", wraps=passes.for_each_tile) as counted:
        results["two threads"] = measured_of_all(shard, rank)
    results["passes on threads"] = counted.call_count
    try:
        outside = {"target": CASES["plain"]["target"].index_fill(0, torch.tensor(5), 100)}
        logprobs(shard_of(CASES["plain"], rank) | outside, shard=shard)
    except IndexError as error:
        results["error"] = str(error)
    torch.save(results, f"{directory}/{rank}.pt")
    dist.destroy_process_group()
