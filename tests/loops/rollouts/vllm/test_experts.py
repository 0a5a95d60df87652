"""A mixture of experts on a real vLLM on the CPU, which packs the weights of experts as it loads
them.
"""

import asyncio

import pytest
import tiny
import vllm_model
from burnish.loops.rollouts.sample import Request, SamplingParams
from burnish.loops.rollouts.vllm.launch import ServerProcess
from burnish.loops.rollouts.vllm.weights import Files
from vllm_servers import (
    ENVIRONMENT,
    FLAGS,
    FORKING,
    TOLERANCE,
    VOCABULARY,
    connect,
    furthest,
    vllm_python,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=[32, 48], ids=["packed", "padded and packed"])
def experts(request, tmp_path_factory):
    """``(server, directory, make)``: ``make(seed)`` is a model of the server's architecture."""
    directory = tmp_path_factory.mktemp("experts")

    def make(seed):
        return vllm_model.make_experts(VOCABULARY, seed=seed, intermediate=request.param)

    tiny.save_model(directory / "model")
    make(0).save_pretrained(directory / "model")
    with ServerProcess(
        directory / "model",
        log=directory / "log.txt",
        dtype="float32",
        python=vllm_python(),
        flags=FLAGS,
        environment=ENVIRONMENT | FORKING,
    ) as server:
        yield server, directory, make


async def difference(source, model):
    request = Request(0, [5, 6, 7], range(4), SamplingParams(40), key=1)
    return furthest(await source.sample(request), model)


def test_log_probs_are_those_of_the_published_experts(experts):
    server, directory, make = experts

    async def run():
        source = connect(server, Files(directory / "files"), directory / "model")
        for version, seed in enumerate((0, 1, 2)):
            await source.publish(make(seed).state_dict().items(), version)
            assert await difference(source, make(seed)) < TOLERANCE
        assert await difference(source, make(1)) > 0.01  # weights show
        await source.close()

    asyncio.run(run())


def test_an_update_that_ends_before_any_weights_leaves_the_experts_as_they_were(experts):
    server, directory, make = experts

    async def run():
        dead = connect(server, Files(directory / "files"), directory / "model")
        await dead.publish(make(3).state_dict().items(), 3)
        label = await dead._client.weight_version()
        await dead._client.pause()
        await dead._client.control("start_weight_update")
        heir = connect(server, Files(directory / "files"), directory / "model")  # draws a token
        await dead._client.control("update_weight_version", new_version=label)
        assert await difference(dead, make(3)) < TOLERANCE
        await heir.publish(make(4).state_dict().items(), 4)
        assert await difference(heir, make(4)) < TOLERANCE
        await dead.close()
        await heir.close()

    asyncio.run(run())
