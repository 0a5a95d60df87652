"""Weights on their way from several ranks to one server: rank 0 sends them, and all gather what is
sharded.
"""

import functools
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from forked import run_forked
from grids import slow
from online import prepare, stored
from safetensors.torch import load_file
from transformers import AutoTokenizer
from vllm_fake import Fake, choice

RUNS = {
    "bfloat16": {"dtype": "bfloat16"},
    "adapters merged": {"lora": {"r": 2}, "vllm": {}},
    "adapters": {"lora": {"r": 2}, "vllm": {"updates": "adapters"}},
    "restart": {},
    "refused": {},
}


class Watched(Fake):
    """A server that remembers what it was sent, and has a bad day of the kind that the run is named
    after.
    """

    def __init__(self, model, kind):
        super().__init__(AutoTokenizer.from_pretrained(model))
        self.root, self.kind, self.sent = model, kind, defaultdict(dict)
        self.config["model_config"] |= {
            "max_model_len": 256,
            "dtype": f"torch.{RUNS[kind].get('dtype', 'float32')}",
        }
        if kind == "adapters":
            self.config |= {"weight_transfer_config": None, "lora_config": {}}
        self.completions = 0

    def do_update_weights(self, body):
        self.sent[len(self.sent) - 1] |= load_file(body["update_info"]["path"])
        if self.kind == "refused" and len(self.sent) == 2:
            return 500, {"error": {"message": "a bad moment"}}
        return 200, {}

    def do_start_weight_update(self, body):
        self.sent[len(self.sent)] = {}
        return super().do_start_weight_update(body)

    def do_v1_load_lora_adapter(self, body):
        self.sent[len(self.sent)] = load_file(Path(body["lora_path"]) / "adapter_model.safetensors")
        return super().do_v1_load_lora_adapter(body)

    def do_inference_v1_generate(self, body):
        seed = body["sampling_params"].get("seed")
        if seed is None:
            return super().do_inference_v1_generate(body)
        self.completions += 1
        if self.kind == "restart" and self.completions == 20:  # in the middle of the second rollout
            self.label = "default"
        label = body["model"] if self.kind == "adapters" else self.label
        return 200, {"choices": [choice([10 + (seed >> shift) % 200 for shift in range(6)], label)]}


@pytest.fixture(scope="module")
def publish(tmp_path_factory):
    """``publish(ranks, sharded, kinds)`` is, by kind, what servers were sent, and the run's
    directory.
    """
    directory = tmp_path_factory.mktemp("ranks")
    common = {**prepare(directory), "source": "vllm", "steps": 2}
    common["max_logp_difference"] = 1e9  # the stand-in's log-probs are made up

    @functools.cache
    def publish(ranks, sharded, kinds):
        runs, servers = [], {kind: Watched(common["model"], kind) for kind in kinds}
        for kind, fields in ((kind, RUNS[kind]) for kind in kinds):
            place = directory / f"{ranks}-{sharded}-{len(kinds)}" / kind
            vllm = {**fields.get("vllm", {}), "url": servers[kind].url}
            runs.append(
                {**common, **fields, "output": str(place), "sharded": sharded, "vllm": vllm}
            )
        for status, printed in run_forked(ranks, "rank_spread", runs):
            assert status == 0, printed[-3000:]
        for server in servers.values():
            server.close()
        outputs = [Path(run["output"]) for run in runs]
        sent = [list(filter(None, server.sent.values())) for server in servers.values()]
        return dict(zip(kinds, zip(sent, outputs, strict=True), strict=True))

    return publish


WHOLE = ("restart",)  # where there is nothing to gather, rank 0 sends as one process does


@pytest.mark.parametrize(
    ("kind", "sharded"),
    [
        *((kind, True) for kind in sorted(RUNS.keys() - {"bfloat16"})),
        *(slow(kind, False) for kind in WHOLE),
    ],
)
def test_a_server_gets_the_weights_that_one_process_sends(publish, sharded, kind):
    kinds = tuple(RUNS) if sharded else WHOLE
    (one, _), (many, _) = publish(1, False, kinds)[kind], publish(2, sharded, kinds)[kind]
    assert len(one) == len(many) == 2 + (kind in ("restart", "refused"))
    for expected, sent in zip(one, many, strict=True):
        assert sent.keys() == expected.keys() and len(sent) > 5
        for name, tensor in expected.items():
            torch.testing.assert_close(sent[name], tensor, rtol=1e-3, atol=1e-6)
    assert any(not torch.equal(many[0][name], many[-1][name]) for name in many[0])


def test_a_server_gets_two_bytes_of_a_weight_where_it_computes_in_bfloat16(publish):
    (sent, _), output = publish(2, True, tuple(RUNS))["bfloat16"]
    assert {tensor.dtype for tensor in sent.values()} == {torch.bfloat16}
    for name, tensor in load_file(output.parents[1] / "start/model.safetensors").items():
        assert torch.equal(sent[name], tensor.bfloat16())


@pytest.mark.parametrize("kind", RUNS)
def test_no_rank_but_the_main_one_holds_two_gathered_weights(publish, kind):
    assert (publish(2, True, tuple(RUNS))[kind][1] / "held-1.txt").read_text() == "1"


@pytest.mark.parametrize("sharded", [True, slow(False)])
def test_a_server_that_restarts_during_a_rollout_is_given_the_weights_again(publish, sharded):
    sent, directory = publish(2, sharded, tuple(RUNS) if sharded else WHOLE)["restart"]
    assert all(torch.equal(sent[1][name], sent[2][name]) for name in sent[1])
    assert len(stored(directory)) == 2 * 4 * 4
