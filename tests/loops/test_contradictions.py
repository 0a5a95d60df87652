"""Rules beside the settings: each setting that contradicts another is told, all in one message,
before torch.
"""

import re
import subprocess
import sys

import burnish
import pytest
from burnish.loops.config import Bema, Lora, Parallel, Teacher
from burnish.loops.recipes.settings import (
    CPO,
    DPO,
    GRPO,
    KTO,
    PPO,
    RLOO,
    SFT,
    Distill,
    OnlineDPO,
    Reward,
)
from burnish.loops.rl.settings import VLLM

OBJECT = object()  # stands for a model in memory
OFFLINE = {"model": "m", "data": "d", "output": "o"}
ONLINE = {**OFFLINE, "rewards": {"math": 1.0}}
SERVED = {**ONLINE, "source": "vllm"}
ADAPTERS = Lora(r=8)

RULES = [
    (SFT, OFFLINE, {"output": ""}, "output: wanted a directory"),
    (SFT, OFFLINE, {"output": None, "resume": True}, "resume: checkpoints are kept"),
    (SFT, OFFLINE, {"output": None, "save_every": 2}, "save_every: checkpoints are kept"),
    (SFT, OFFLINE, {"streaming": True}, "streaming: wanted steps"),
    (
        SFT,
        OFFLINE,
        {"streaming": True, "steps": 3, "save_every": "epoch"},
        "save_every: an epoch of streamed data",
    ),
    (
        SFT,
        OFFLINE,
        {"weights_dtype": "bfloat16"},
        "weights_dtype: bfloat16 weights compute in bfloat16",
    ),
    (SFT, OFFLINE, {"quantize": "4bit"}, "quantize: quantized weights can't be trained"),
    (SFT, OFFLINE, {"quantize": "4bit", "model": OBJECT}, "quantize: the model is loaded already"),
    (
        SFT,
        OFFLINE,
        {"quantize": "8bit", "lora": ADAPTERS, "parallel": Parallel(dp_shard_size=2)},
        "parallel.dp_shard_size: quantized weights can't be sharded",
    ),
    (
        SFT,
        OFFLINE,
        {"lora": ADAPTERS, "parallel": Parallel(tp_size=2)},
        "parallel.tp_size: the layers under adapters",
    ),
    (
        SFT,
        OFFLINE,
        {"parallel": Parallel(tp_size=2, cp_size=2)},
        "parallel.cp_size: rows are split or layers are",
    ),
    (SFT, OFFLINE, {"keep_best": "eval/loss"}, "keep_best: wanted a metric of eval_data"),
    (
        SFT,
        OFFLINE,
        {"keep_best": "loss", "eval_data": 0.1},
        "keep_best: wanted a metric of eval_data",
    ),
    (
        SFT,
        OFFLINE,
        {"schedule": "greedy", "eval_data": 0.1},
        "schedule greedy: follows the loss of evaluations",
    ),
    (SFT, OFFLINE, {"lora": Lora(alpha=8.0)}, "lora.alpha: without lora.r"),
    (SFT, OFFLINE, {"lora": Lora(path="a", alpha=8.0)}, "lora.alpha: the adapter in a has its own"),
    (
        DPO,
        OFFLINE,
        {"reference": "adapters_off"},
        "reference: adapters_off wanted a model wrapped by peft",
    ),
    (
        DPO,
        OFFLINE,
        {"ref_model_sync_steps": 4, "ref_model": "r"},
        "ref_model_sync_steps: only a copy",
    ),
    (
        DPO,
        OFFLINE,
        {"ref_model_sync_steps": 4, "lora": ADAPTERS},
        "ref_model_sync_steps: only a copy",
    ),
    (DPO, OFFLINE, {"bema": Bema(lag=2)}, "bema.lag: without bema.update_freq there is no such"),
    (
        DPO,
        OFFLINE,
        {"bema": Bema(update_freq=4), "ref_model_sync_steps": 6},
        "bema.update_freq: the reference is set to the average every ref_model_sync_steps, wanted a multiple of 4, "
        "got 6",
    ),
    (DPO, OFFLINE, {"bema": Bema(update_freq=4)}, "bema.update_freq: the reference is set to"),
    (
        DPO,
        OFFLINE,
        {
            "bema": Bema(update_freq=4),
            "ref_model_sync_steps": 4,
            "ref_model_mixup_alpha": 0.5,
        },
        "ref_model_mixup_alpha: mixes no average into the reference",
    ),
    (
        DPO,
        OFFLINE,
        {"ref_model_sync_steps": 4, "reference": "precompute"},
        "ref_model_sync_steps: only a copy",
    ),
    (
        Distill,
        OFFLINE,
        {"teacher": Teacher(model="t", reprompt="my:hint")},
        "teacher.reprompt: is asked about completions of the student's; set on_policy to 1",
    ),
    (
        Distill,
        OFFLINE,
        {"on_policy": 1.0, "teacher": Teacher(model="t", reprompt="my:hint", prompt="hint")},
        "teacher.prompt: teacher.reprompt writes",
    ),
    (
        Distill,
        OFFLINE,
        {"teacher": Teacher(model="t", sync_steps=1)},
        "teacher.sync_steps: the teacher begins as the student, wanted teacher.model",
    ),
    (
        Distill,
        OFFLINE,
        {"teacher": Teacher(model="m", mixup_alpha=1.0)},
        "teacher.mixup_alpha: without teacher.sync_steps",
    ),
    (
        Distill,
        OFFLINE,
        {"teacher": Teacher(model="m", top_k=4, sync_steps=1)},
        "teacher.sync_steps: what is stored",
    ),
    (DPO, OFFLINE, {"teacher": Teacher(sync_steps=1, model="t")}, "teacher.sync_steps: is for"),
    (CPO, OFFLINE, {"nll_of": "reference", "nll": 0.0}, "nll_of: the coefficient nll is 0"),
    (DPO, OFFLINE, {"logprob_reduction": "mean", "ld_alpha": 0.5}, "ld_alpha: is for sums"),
    (KTO, OFFLINE, {"batch_size": 1}, "kto: its z0 comes from"),
    (KTO, OFFLINE, {"loss": {"nll": 0.1, "kto": 1.0}, "batch_size": 1}, "kto: its z0 comes from"),
    (KTO, OFFLINE, {"reference": "precompute"}, "reference: the mismatched completions"),
    (
        Reward,
        OFFLINE,
        {"loss": "score_regression", "centering": 0.01},
        "centering: is for pairs",
    ),
    (Reward, OFFLINE, {"loss": "ordinal_preference", "margin": "m"}, "margin: is for the loss"),
    (Reward, OFFLINE, {"preference": "degree"}, "preference: is for the losses"),
    (Reward, OFFLINE, {"loss": "bradley_terry_ties"}, "tie_threshold: is what bradley_terry_ties"),
    (Reward, OFFLINE, {"tie_threshold": 0.5}, "tie_threshold: is what bradley"),
    (
        Distill,
        OFFLINE,
        {"teacher": Teacher(model="t", taid_start=0.5)},
        "teacher.taid_start: is for taid, and the divergence is forward_kl",
    ),
    (DPO, OFFLINE, {"teacher": Teacher(model="t", divergence="taid")}, "teacher.divergence: taid"),
    (
        KTO,
        OFFLINE,
        {"teacher": Teacher(model="t", divergence="gold")},
        "teacher.divergence: gold is for distill, whose",
    ),
    *(
        (Distill, OFFLINE, {"teacher": Teacher(divergence="gold", **told)}, message)
        for told, message in (
            ({"server": "s"}, "teacher.server: gold compares whole distributions"),
            ({"model": "t", "top_k": 4}, "teacher.top_k: gold compares whole distributions"),
            ({"logprobs": "t"}, "teacher.logprobs: gold compares whole distributions"),
            (
                {"model": OFFLINE["model"], "sync_steps": 1},
                "teacher.sync_steps: a teacher that follows has",
            ),
        )
    ),
    (
        Distill,
        OFFLINE,
        {
            "teacher": Teacher(model="t", divergence="gold", reprompt="m:f"),
            "on_policy": 1.0,
            "max_tokens": 8,
        },
        "teacher.reprompt: what it writes is read in the student's tokens so far",
    ),
    (
        Distill,
        OFFLINE,
        {
            "teacher": Teacher(model="t", divergence="uld"),
            "loss": "iw_opd",
            "on_policy": 1.0,
            "max_tokens": 8,
        },
        "teacher.divergence: uld is over spans of text, and iw_opd needs the teacher's log-prob",
    ),
    (
        Distill,
        OFFLINE,
        {"teacher": Teacher(model="t", divergence="uld"), "parallel": Parallel(cp_size=2)},
        "parallel.cp_size: splits the rows, and with them the spans of uld",
    ),
    (
        Distill,
        OFFLINE,
        {"teacher": Teacher(model="t", divergence="uld", matched_weight=0.5)},
        "teacher.matched_weight: is for gold, and the divergence is uld",
    ),
    (
        Distill,
        OFFLINE,
        {"teacher": Teacher(model="t", tokenizer="x")},
        "teacher.tokenizer: is for uld, gold, and the divergence is forward_kl",
    ),
    (
        DPO,
        OFFLINE,
        {"teacher": Teacher(model="t", prompt="hint")},
        "teacher.prompt: is for distill",
    ),
    (
        Distill,
        OFFLINE,
        {"teacher": Teacher(model="t", prompt="hint", top_k=4)},
        "teacher.prompt: what is stored of a teacher is under the student's prompts",
    ),
    (
        Distill,
        OFFLINE,
        {"teacher": Teacher(logprobs="t", prompt="hint")},
        "teacher.prompt: what is stored of a teacher",
    ),
    (KTO, OFFLINE, {"teacher": Teacher(model="t", divergence="taid")}, "teacher.divergence: taid"),
    (
        Distill,
        OFFLINE,
        {"loss": "sampled_reverse_kl"},
        "loss: sampled_reverse_kl is for the student's own",
    ),
    (Distill, OFFLINE, {"on_policy": 0.5}, "on_policy: the student's completions are not known"),
    (
        Distill,
        OFFLINE,
        {"on_policy": 0.5, "teacher": Teacher(model="t"), "temperature": 0.0},
        "temperature: at 0 every completion",
    ),
    (
        Distill,
        OFFLINE,
        {"on_policy": 1.0, "teacher": Teacher(model="t"), "loss": "sampled_reverse_kl", "top_k": 5},
        "top_p, top_k, min_p: sampled_reverse_kl is a policy gradient",
    ),
    (GRPO, OFFLINE, {}, "rewards: none is named"),
    (GRPO, ONLINE, {"group_size": 1}, "group_size: a completion is compared"),
    (GRPO, ONLINE, {"temperature": 0.0}, "temperature: at 0 every completion"),
    (GRPO, ONLINE, {"top_k": 5}, "top_p, top_k, min_p: tokens sampled from a part"),
    (GRPO, ONLINE, {"repetition_penalty": 1.2}, "repetition_penalty: tokens are sampled from"),
    (GRPO, ONLINE, {"stop": [""]}, "stop: an empty word"),
    (GRPO, ONLINE, {"correction": "tis", "old_logprobs": "sampled"}, "correction: tis compares"),
    (
        GRPO,
        ONLINE,
        {"correction": "tis", "correction_low": 3.0},
        "correction_low, correction_high: wanted low <=",
    ),
    (GRPO, ONLINE, {"streaming": True, "steps": 3}, "streaming: this recipe samples completions"),
    (GRPO, ONLINE, {"minibatches": 9}, "minibatches: the 8 prompts of a rollout"),
    (GRPO, ONLINE, {"schedule": "greedy"}, "schedule: greedy follows eval/loss"),
    (
        GRPO,
        ONLINE,
        {"parallel": Parallel(tp_size=2)},
        "parallel.tp_size: a run that samples completions",
    ),
    (GRPO, ONLINE, {"vllm": VLLM(url="http://a:1")}, "vllm: it is set up, but source is policy"),
    (
        GRPO,
        ONLINE,
        {"use_bias_correction_kl": True, "kl_as": "reward"},
        "use_bias_correction_kl: is for",
    ),
    (
        GRPO,
        ONLINE,
        {"reward_aggregation": "normalize", "kl_as": "reward", "beta": 0.1},
        "reward_aggregation: normalize",
    ),
    (
        RLOO,
        ONLINE,
        {"reward_aggregation": "normalize", "beta": 0.0},
        "reward_aggregation: normalize",
    ),
    (RLOO, ONLINE, {"scale": "group"}, "scale: a group's standard deviation"),
    (GRPO, SERVED, {"cuda_graphs": True}, "cuda_graphs: it is for source policy"),
    (GRPO, SERVED, {"temperature": 0.001}, "temperature: vLLM samples at 0.01 or above"),
    (GRPO, SERVED, {"model": OBJECT}, "source: vLLM loads a model by its name"),
    (GRPO, SERVED, {"dtype": "float64"}, "source: vLLM does not compute in float64"),
    (
        GRPO,
        SERVED,
        {"quantize": "4bit", "lora": ADAPTERS},
        "source: a quantized policy has other log-probs",
    ),
    (GRPO, SERVED, {"vllm": VLLM(updates="adapters")}, "vllm.updates: there are no adapters"),
    (
        GRPO,
        SERVED,
        {"vllm": VLLM(trainer_address="a")},
        "vllm.trainer_address: it is for updates by nccl",
    ),
    (
        GRPO,
        SERVED,
        {"vllm": VLLM(url="http://a:1", python="p")},
        "vllm.url: that server runs already",
    ),
    (
        GRPO,
        SERVED,
        {"vllm": VLLM(url="http://a:1", host="0.0.0.0")},
        "vllm.url: that server runs already",
    ),
    (GRPO, SERVED, {"vllm": VLLM(api_key="k")}, "vllm.api_key: it is for a server that runs"),
    (
        GRPO,
        {**SERVED, "source": "vllm_engine"},
        {"vllm": VLLM(url="http://a:1")},
        "vllm: an engine in this process",
    ),
    (
        PPO,
        ONLINE,
        {"value_head": "h", "value_model": "v"},
        "value_head: value_model has a head of its own",
    ),
    (OnlineDPO, ONLINE, {"group_size": 1}, "group_size: a pair needs two completions"),
]


@pytest.mark.parametrize(
    ("recipe", "fine", "changes", "start"), RULES, ids=[rule[3][:40] for rule in RULES]
)
def test_a_rule_tells_its_contradiction_and_nothing_else(recipe, fine, changes, start):
    (complaint,) = recipe(**{**fine, **changes}).contradictions()
    assert complaint.startswith(start)


@pytest.mark.parametrize("recipe", [SFT, DPO, KTO, Reward, Distill])
def test_an_offline_recipe_begins_without_a_contradiction(recipe):
    recipe(**OFFLINE).refuse_contradictions()


@pytest.mark.parametrize("settings", [ONLINE, SERVED, {**SERVED, "source": "vllm_engine"}])
@pytest.mark.parametrize("recipe", [GRPO, RLOO, PPO, OnlineDPO])
def test_an_online_recipe_begins_without_a_contradiction(recipe, settings):
    recipe(**settings).refuse_contradictions()


FOUR = "--group_size 1 --temperature 0 --correction tis --old_logprobs sampled --keep_best loss"
COMMAND = f"""
import sys
from burnish.loops.cli import main
try:
    main("grpo --model m --data d --output o --rewards math {FOUR}".split())
except SystemExit as end:
    print(end.code, "torch" in sys.modules, "transformers" in sys.modules)
"""


def test_a_command_with_four_contradictions_names_all_four_without_torch():
    done = subprocess.run(
        [sys.executable, "-c", COMMAND], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "2 False False\n"
    first, *complaints = done.stderr.splitlines()[:5]
    assert first == "burnish grpo: 4 mistakes"
    named = [re.match(r"  (\w+): ", complaint)[1] for complaint in complaints]
    assert named == ["keep_best", "temperature", "correction", "group_size"]


def test_python_is_told_the_same_before_anything_is_loaded(tmp_path):
    with pytest.raises(ValueError, match=r"2 mistakes\n  temperature: .*\n  group_size: "):
        burnish.grpo(
            "no-such-model",
            "no-such-data",
            str(tmp_path),
            rewards="math",
            group_size=1,
            temperature=0.0,
        )
