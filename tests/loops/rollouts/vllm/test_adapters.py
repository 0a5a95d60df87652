"""LoRA adapters on a real vLLM server, which is started for them alone: whole weights need one
without.
"""

import asyncio

import pytest
import torch
import vllm_model
from burnish.loops.rollouts.sample import Request, SamplingParams
from burnish.loops.rollouts.vllm.weights import Adapters
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from vllm_servers import TOLERANCE, VOCABULARY, connect, furthest, start


@pytest.mark.slow
def test_adapters_come_under_names_of_their_own_and_answers_under_way_keep_theirs(tmp_path):
    base = vllm_model.make_model(VOCABULARY)
    model = get_peft_model(
        base, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"])
    )
    torch.manual_seed(1)

    def change():
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.normal_(0, 0.3)

    updates = Adapters(tmp_path / "adapters", model.peft_config["default"])

    async def run(server):
        source = connect(server, updates, tmp_path / "model")
        assert await source.version() is None
        request = Request(0, [5, 6], range(4), SamplingParams(40, temperature=1.0), key=1)
        for version in (1, 2):
            change()
            await source.publish(get_peft_model_state_dict(model).items(), version)
            assert await source.version() == version
            samples = await source.sample(request)
            assert {span.version for sample in samples for span in sample.spans} == {version}
            assert furthest(samples, model) < TOLERANCE
            with model.disable_adapter():
                assert furthest(samples, model) > 0.1, "the adapter makes no difference"
        under_way = asyncio.create_task(
            source.sample(Request(1, [5], range(2), SamplingParams(200), key=1))
        )
        await asyncio.sleep(0.2)
        old = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        change()
        await source.publish(get_peft_model_state_dict(model).items(), 3)
        assert furthest(await source.sample(request), model) < TOLERANCE
        model.load_state_dict(old)
        samples = await under_way
        assert furthest(samples, model) < TOLERANCE and {sample.oldest for sample in samples} == {2}
        await source.close()

    with start(tmp_path, update_flags=updates.flags) as server:
        asyncio.run(run(server))
