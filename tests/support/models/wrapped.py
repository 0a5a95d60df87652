"""A policy on several ranks, under each of the wrappers that people put around it.

Rank 0 saves its results: log-probs and entropies in order of the examples, gradients by name, what
was seen on the way.
"""

import tempfile

import torch
import torch.distributed as dist
from accelerate import Accelerator
from burnish.kernels import Head, LogitTransform, passes
from burnish.loops.batch import collate
from burnish.loops.models.lm_head import TeacherOutputs, fuse
from burnish.loops.models.policy import Policy
from heads import allocations
from peft import LoraConfig, get_peft_model
from tiny import _SMALL, in_full_precision, make_examples
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig

VOCABULARY = 1009  # more than all other sizes, and odd
TARGET = [5, 1008, 504, 505, 0, 7, 7]


# of burnish.kernels.passes: a tile is a small part of [N, V]
TILES = {"ROWS": 32, "COLUMNS": 128, "KEEP": 0}


def make_model(*, tied=False, dtype=torch.float64, **changes):
    torch.manual_seed(0)
    config = LlamaConfig(
        **{
            **_SMALL,
            "vocab_size": VOCABULARY,
            "num_hidden_layers": 1,
            "tie_word_embeddings": tied,
            **changes,
        }
    )
    model = in_full_precision(AutoModelForCausalLM.from_config(config, dtype=dtype))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0) if parameter.ndim > 1 else None
    return model


def with_lora(model, **options):
    config = LoraConfig(task_type="CAUSAL_LM", r=3, target_modules=["q_proj", "lm_head"], **options)
    return randomized(get_peft_model(model, config, autocast_adapter_dtype=False))


def randomized(model):
    """Adapters that change something."""
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3)
    return model


EXAMPLES = make_examples(6, longest=40)


def upstream(examples):
    """Gradients that arrive at log-prob and entropy of the tokens of each example: its own, whoever
    has it.
    """
    given = []
    for example in examples:
        random = torch.Generator().manual_seed(EXAMPLES.index(example))
        given.append(
            torch.randn(2, sum(map(sum, example.trained)), generator=random, dtype=torch.float64)
        )
    return torch.cat(given, 1)


def run(policy, examples):
    """Forward and backward; log-probs and entropies [2, tokens]."""
    answer = policy(collate(examples))
    outputs = torch.stack((answer.logprob, answer.entropy))
    (outputs * upstream(examples)).sum().backward()
    return outputs.detach()


def plain_run(model, examples):
    """The same from the model's own logits, one sequence at a time."""
    outputs = []
    for example in examples:
        for completion, trained in zip(example.completions, example.trained, strict=True):
            ids = torch.tensor([example.prompt + completion])
            logp = (
                model(input_ids=ids, use_cache=False)
                .logits[0]
                .log_softmax(-1)[len(example.prompt) - 1 : -1]
            )
            logp, tokens = logp[trained], torch.tensor(completion)[trained]
            outputs.append(
                torch.stack((logp.gather(1, tokens[:, None])[:, 0], -(logp.exp() * logp).sum(-1)))
            )
    outputs = torch.cat(outputs, 1)
    (outputs * upstream(examples)).sum().backward()
    return outputs.detach()


def gradients(model):
    return {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


class Weights(TorchDispatchMode):
    """The weights that our operators are given, forward and backward."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "burnish":
            names = [argument.name for argument in func._schema.arguments]
            weight = args[names.index("weight")]
            self.seen.append((func._schema.name, tuple(weight.shape), weight.dtype))
        return func(*args, **(kwargs or {}))


def largest_tensor(function, *arguments):
    """What it returns, and the bytes of the largest tensor that was made on the way."""
    result, sizes = allocations(function, *arguments)
    return result, max(sizes)


def mine(examples):
    return examples[dist.get_rank() :: dist.get_world_size()]


def gathered(outputs):
    """[2, tokens] of all examples in order, from the halves of two ranks."""
    counts = [sum(map(sum, example.trained)) for example in EXAMPLES]
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(
        ranks, torch.split(outputs, [counts[EXAMPLES.index(e)] for e in mine(EXAMPLES)], 1)
    )
    return torch.cat([ranks[i % len(ranks)][i // len(ranks)] for i in range(len(EXAMPLES))], 1)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def trained(policy, model, *, seen=()):
    """Each rank its examples; gradients are averages over ranks, and the loss a sum."""
    with Weights() as weights:
        outputs, largest = largest_tensor(run, policy, mine(EXAMPLES))
    grads = {name: whole(grad) * dist.get_world_size() for name, grad in gradients(model).items()}
    return {
        "outputs": gathered(outputs),
        "gradients": grads,
        "largest": largest,
        "weights": weights.seen,
    }


def ddp(model):
    return trained(Accelerator(cpu=True).prepare(Policy(model, layout="padded")), model)


def sharded(model, *, head, **options):
    """Layers are units of their own, so is the head if told, and the rest is the root unit."""
    policy = Policy(model, layout="padded")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in policy.plain.model.layers:
        fully_shard(layer, mesh=mesh, **options)
    if head:
        fully_shard(policy.head, mesh=mesh, **options)
    fully_shard(policy, mesh=mesh, **options)
    return policy


def fsdp(model, **options):
    policy = sharded(model, **options)
    before = type(policy.head.weight)
    found = trained(policy, model)
    return {
        **found,
        "at rest": {before, type(policy.head.weight), *map(type, gradients(model).values())},
    }


def sharded_head_without_its_hooks():
    policy = sharded(make_model(), head=True)
    hidden = torch.randn(len(TARGET), 32, dtype=torch.float64)
    try:
        policy.head.forward(hidden, target=torch.tensor(TARGET))
    except ValueError as error:
        return {"error": str(error)}


def parallel(model):
    """Every rank sees all examples, and has a part of the vocabulary."""
    policy = Policy(model, layout="padded")
    with Weights() as weights:
        outputs, largest = largest_tensor(run, policy, EXAMPLES)
    grads = {name: whole(grad) for name, grad in gradients(model).items()}
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(
        ranks, (outputs, grads["lm_head.weight"], grads["model.embed_tokens.weight"])
    )
    alike = all(torch.equal(x, y) for x, y in zip(*ranks, strict=True))
    with torch.no_grad():
        logits = whole(model(torch.tensor([[3, 4, 5]]), use_cache=False).logits)
    found = {"outputs": outputs, "gradients": grads, "largest": largest, "weights": weights.seen}
    return {**found, "alike": alike, "logits": logits, "fused": policy.fused}


def colwise():
    model = make_model()
    layouts = {"lm_head": ColwiseParallel(output_layouts=Replicate())}
    return parallel(
        parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), layouts)
    )


def tensor_parallel_by_transformers():
    with tempfile.TemporaryDirectory() as directory:
        if dist.get_rank() == 0:
            make_model().save_pretrained(directory)
        names = [directory]
        dist.broadcast_object_list(names)
        try:
            model = AutoModelForCausalLM.from_pretrained(
                names[0], tp_plan="auto", dtype=torch.float64
            )
        except (
            ValueError
        ) as error:  # of transformers 5.17, which splits a vocabulary evenly or not at all
            if "must be divisible by the tensor parallel size" not in str(error):
                raise
            return {"refused": str(error)}
        finally:
            dist.barrier()
    return parallel(in_full_precision(model))


def plain_head(placements=None):
    """A linear layer with a bias, its weights on a mesh if told how."""
    torch.manual_seed(0)
    head = nn.Linear(32, VOCABULARY, dtype=torch.float64)
    if placements is not None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for name, parameter in list(head.named_parameters()):
            where = (
                [Replicate()] if parameter.ndim == 1 and placements == [Shard(1)] else placements
            )
            setattr(
                head, name, nn.Parameter(distribute_tensor(parameter.detach() * 4, mesh, where))
            )
    else:
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.mul_(4)
    fuse(head, TRANSFORM, "auto")
    return head


TRANSFORM = LogitTransform(0.7, 5.0)
TEMPERATURE = torch.linspace(0.5, 1.5, len(TARGET), dtype=torch.float64)


def hidden_states():
    random = torch.Generator().manual_seed(3)
    return torch.randn(len(TARGET), 32, dtype=torch.float64, generator=random)


def teachers():
    random = torch.Generator().manual_seed(4)
    weight = torch.randn(VOCABULARY + 3, 16, dtype=torch.float64, generator=random)
    teacher = torch.randn(len(TARGET), 16, dtype=torch.float64, generator=random)
    best = (teacher @ weight[:VOCABULARY].t()).log_softmax(-1).topk(5)
    whole_distribution = TeacherOutputs(0.3, 0.8, hidden=teacher, head=Head(weight))
    return whole_distribution, TeacherOutputs(0.3, 0.8, top_k=(best.indices, best.values))


def ask(head, hidden):
    """Everything that a fused head answers, one after the other, and the gradients of all of it."""
    hidden.requires_grad_()
    answer = head(
        hidden, target=torch.tensor(TARGET), temperature=TEMPERATURE, outputs=("mean_logprob",)
    )
    values = [answer.logprob, answer.entropy, answer.logsumexp, answer.mean_logprob]
    target = torch.tensor(TARGET)
    values += [
        head(hidden, target=target, teacher=teacher_outputs).divergence
        for teacher_outputs in teachers()
    ]
    torch.stack(values).mul(torch.arange(1.0, 7.0)[:, None]).sum().backward()
    grads = {"hidden": hidden.grad, **gradients(head)}
    layouts = {name: getattr(grad, "placements", None) for name, grad in grads.items()}
    return {
        "values": torch.stack(values).detach(),
        "gradients": {name: whole(grad) for name, grad in grads.items()},
        "layouts": layouts,
    }


def head_on_a_mesh(placements, *, states):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    hidden = hidden_states() if states is None else distribute_tensor(hidden_states(), mesh, states)
    try:
        return ask(plain_head(placements), hidden)
    except ValueError as error:
        return {"error": str(error)}


SCENARIOS = {
    "ddp": lambda: ddp(make_model()),
    "ddp, adapters": lambda: ddp(with_lora(make_model())),
    "fsdp, head in the root unit": lambda: fsdp(make_model(), head=False),
    "fsdp, head as its own unit": lambda: fsdp(make_model(), head=True),
    "fsdp, tied": lambda: fsdp(make_model(tied=True), head=False),
    "fsdp, adapters": lambda: fsdp(with_lora(make_model()), head=True),
    "fsdp, bfloat16": lambda: fsdp(
        make_model(dtype=torch.float32),
        head=True,
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    ),
    "fsdp, no hooks": sharded_head_without_its_hooks,
    "colwise": colwise,
    "transformers": tensor_parallel_by_transformers,
    "replicated weight": lambda: head_on_a_mesh([Replicate()], states=None),
    "replicated weight and states": lambda: head_on_a_mesh([Replicate()], states=[Replicate()]),
    "split weight": lambda: head_on_a_mesh([Shard(0)], states=[Replicate()]),
    "split weight, plain states": lambda: head_on_a_mesh([Shard(0)], states=None),
    "split weight and states": lambda: head_on_a_mesh([Shard(0)], states=[Shard(0)]),
    "weight split by width": lambda: head_on_a_mesh([Shard(1)], states=[Replicate()]),
    "plain weight, split states": lambda: head_on_a_mesh(None, states=[Shard(0)]),
}


def be_rank(output):
    for name, size in TILES.items():
        setattr(passes, name, size)
    dist.init_process_group("gloo")
    found = {name: scenario() for name, scenario in SCENARIOS.items()}
    if dist.get_rank() == 0:
        torch.save(found, output)
    dist.destroy_process_group()
