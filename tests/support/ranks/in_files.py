"""Models whose ranks read their shards from files, in a process of its own: the other ranks don't
exist.
"""

import gc
import json
import logging
import os
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from burnish.loops.config import Common, Lora, Parallel
from burnish.loops.models import sharding
from burnish.loops.models.io import load_classifier, load_model
from tiny import make_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, MixtralConfig

RANKS = 3  # some dimensions are no multiple of it
LAYERS = 9
# Qwen 2 has biases, Gemma 3 two kinds of rotary frequencies, GPT-2 learned positions and its
# matrices transposed.
FAMILIES = ("llama", "llama_tied", "qwen2", "gemma3", "gpt2")
SETTINGS = {
    "plain": {},
    "bfloat16": {"dtype": "bfloat16", "weights_dtype": "bfloat16"},
    "adapters": {"lora": Lora(r=2), "dtype": "bfloat16"},
    "dora": {"lora": Lora(r=2, use_dora=True)},
    "classifier": {"classifier": True},
}


def prepare(directory):
    for name in FAMILIES:
        make_model(name, dtype=torch.float32, attention="eager").save_pretrained(directory / name)
    make_model(dtype=torch.float32).save_pretrained(directory / "two tables")
    config = directory / "two tables/config.json"  # it says that they are one
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": True}))
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
    }
    experts = MixtralConfig(vocab_size=61, num_key_value_heads=2, num_local_experts=4, **sizes)
    # stored one by one
    AutoModelForCausalLM.from_config(experts).save_pretrained(directory / "experts")
    make_model(dtype=torch.float32, num_hidden_layers=LAYERS).save_pretrained(directory / "deep")


def load(path, shards, *, classifier=False, **fields):
    torch.manual_seed(1)
    config = Common(model=str(path), data="", output="", parallel=Parallel(shards), **fields)
    return load_classifier(config, "SEQ_CLS", {0: "reward"}) if classifier else load_model(config)


def difference(model, expected, rank):
    """The first tensor that is not this rank's part of the one that is expected."""
    ours, theirs = (
        [*each.named_parameters(remove_duplicate=False), *each.named_buffers()]
        for each in (model, expected)
    )
    if [name for name, _ in ours] != [name for name, _ in theirs]:
        return "names"
    if len(list(model.parameters())) != len(list(expected.parameters())):
        return "ties"
    for (name, tensor), (_, whole) in zip(ours, theirs, strict=True):
        if isinstance(tensor, DTensor):
            parts = whole.chunk(RANKS)
            tensor, whole = tensor.to_local(), parts[rank] if rank < len(parts) else whole[:0]
        same = tensor.dtype == whole.dtype and tensor.requires_grad == whole.requires_grad
        if not (same and torch.equal(tensor, whole)):
            return name
    return None


def held():
    """Bytes of all tensors of floating-point numbers that are alive."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
    local = [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
    storages = [
        each.untyped_storage() for each in local if each.is_floating_point() and not each.is_meta
    ]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


class Made(TorchDispatchMode):
    """Bytes of everything that operations return, beside views."""

    bytes = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        if isinstance(result, torch.Tensor) and not result.is_meta:
            self.bytes += result.untyped_storage().nbytes()
        return result


def memory(path, mesh):
    """The most that loading and sharding hold at once, and the sizes of a whole model."""
    shard_unit, most = sharding.fully_shard, [0]
    gc.freeze()  # what there is already is not counted, nor looked at again and again

    def measured(unit, **options):
        most[0] = max(most[0], held())
        unit = shard_unit(unit, **options)
        most[0] = max(most[0], held())
        return unit

    with Made() as made:
        model = load(path, RANKS)
    loaded = held()
    with patch.object(sharding, "fully_shard", measured):
        sharding.shard(model, mesh)
    after = held()
    del model
    expected = load(path, 1)
    sizes = {name: parameter.nbytes for name, parameter in expected.named_parameters()}
    layer = sum(size for name, size in sizes.items() if ".layers.0." in name)
    rest = sum(size for name, size in sizes.items() if ".layers." not in name)
    vectors = sum(parameter.nbytes for parameter in expected.parameters() if parameter.ndim < 2)
    whole = {"model": sum(sizes.values()), "unit": max(layer, rest), "vectors": vectors}
    return whole | {"made": made.bytes, "loaded": loaded, "most": most[0], "after": after}


def be_rank(directory, output):
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # so that all of it is measured
    lines, results, expected = [], {}, {}
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("burnish").addHandler(handler)
    cases = [("llama", kind) for kind in SETTINGS] + [(name, "plain") for name in FAMILIES[1:]]
    cases += [("llama_tied", "adapters"), ("two tables", "plain"), ("experts", "plain")]
    for rank in (0, RANKS - 1):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
        mesh = init_device_mesh("cpu", (RANKS,))
        for name, kind in cases:
            path, settings = Path(directory, name), SETTINGS[kind]
            lines.clear()
            model = load(path, RANKS, **settings)
            result = {
                "left": sum(hasattr(each, "place") for each in model.parameters()),
                "lines": list(lines),
            }
            sharding.shard(model, mesh)
            if (name, kind) not in expected:
                expected[name, kind] = load(path, 1, **settings)
            wrong = difference(model, expected[name, kind], rank)
            results.setdefault(f"{name}, {kind}", []).append(result | {"wrong": wrong})
        if rank == 0:
            results["memory"] = memory(Path(directory, "deep"), mesh)
        dist.destroy_process_group()
    Path(output).write_text(json.dumps(results))
