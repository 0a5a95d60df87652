"""vLLM and prompts with images: a real server on the CPU, and what is refused without one."""

import asyncio
import importlib.util
import os
import subprocess
from contextlib import closing
from pathlib import Path

import burnish
import pytest
import torch
import vision
import vllm_vision
from burnish.data import encode_prompts, example
from burnish.data.images import ImageError, ImageReader
from burnish.loops.rollouts.sample import Request, SamplingParams
from burnish.loops.rollouts.source import SourceError
from burnish.loops.rollouts.vllm.engine import VLLMEngine, start_engine
from burnish.loops.rollouts.vllm.launch import ServerProcess
from burnish.loops.rollouts.vllm.server import VLLMServer
from burnish.loops.rollouts.vllm.weights import Files
from vllm_fake import Fake, choice
from vllm_servers import CONTEXT, ENVIRONMENT, FLAGS, FORKING, TOLERANCE, vllm_python

WIDE, TALL = (60, 30), (30, 60)


@pytest.fixture(scope="module")
def made():
    model, processor = vllm_vision.make()
    return model, ImageReader(processor)


def prompts(reader, shown=([WIDE], [TALL, WIDE], []), color="red"):
    rows = []
    for sizes in shown:
        pictures = [vision.picture(*size, color) for size in sizes]
        rows.append({"images": pictures, "prompt": [{"role": "user", "content": "what?"}]})
    data, _ = encode_prompts(rows, reader)
    return [example(data, number) for number in range(len(rows))]


def request(example, task=0, **options):
    sampling = SamplingParams(**{"max_tokens": 12, **options})
    return Request(task, example.prompt, range(2), sampling, key=3, images=example.images)


def own_logprobs(model, reader, sample, images):
    """By the model's own forward pass, which never reads the last token: it may be an image's."""
    tokens = torch.tensor([sample.prompt + sample.tokens[:-1]])
    tensors = reader.read(images).tensors if images else {}
    with torch.no_grad():
        logits = model(input_ids=tokens, use_cache=False, **tensors).logits[0]
    drawn = torch.tensor(sample.tokens)[:, None]
    return logits[len(sample.prompt) - 1 :].log_softmax(-1).gather(1, drawn)[:, 0]


def test_a_prompt_is_given_with_a_placeholder_for_each_image(made):
    _, reader = made
    for one in prompts(reader):
        short = reader.with_placeholders(one.prompt, one.images)
        text = reader.tokenizer.decode(short)
        shown = "<image>" * len(one.images)
        assert text == f"<|start|>user\n{shown}what?<|end|>\n<|start|>assistant\n"
    one, *_ = prompts(reader)
    with pytest.raises(ImageError, match="is not at token 7 of its prompt; encode its row again"):
        moved = one.images[0]._replace(start=one.images[0].start + 1)
        reader.with_placeholders(one.prompt, [moved])


def on_fake(reader, answer, **options):
    """What becomes of a request to a made-up server that answers so."""
    model, _ = vllm_vision.make()
    with closing(Fake(reader.tokenizer)) as fake:
        source = VLLMServer(
            fake.url,
            config=model.config,
            tokenizer=reader.tokenizer,
            updates=Files(),
            **options,
        )
        fake.odd["/inference/v1/generate"] = answer
        (one,) = prompts(reader, [[WIDE]])
        return asyncio.run(source.sample(request(one)))


def test_a_server_that_makes_another_prompt_of_an_image_is_refused(made):
    _, reader = made

    def answer(body):
        drawn = [30] * body["sampling_params"]["max_tokens"]
        return 200, {"choices": [choice(drawn, "default")], "prompt_token_ids": [1, 2]}

    with pytest.raises(SourceError, match="it makes other tokens of the prompt's images than"):
        on_fake(reader, answer, images=reader)


def test_a_source_without_a_processor_refuses_prompts_with_images(made):
    _, reader = made
    with pytest.raises(ValueError, match="its prompt shows images, and the source has no proc"):
        on_fake(reader, None)


@pytest.mark.slow
def test_a_real_server_completes_prompts_with_images_by_published_weights(made, tmp_path):
    _, reader = made
    vllm_vision.save(tmp_path / "model")
    with ServerProcess(
        tmp_path / "model",
        log=tmp_path / "log.txt",
        dtype="float32",
        python=vllm_python(),
        flags=FLAGS,
        environment=ENVIRONMENT | FORKING,
    ) as server:
        source = VLLMServer(
            server.url,
            config=vllm_vision.make()[0].config,
            tokenizer=reader.tokenizer,
            images=reader,
            updates=Files(tmp_path / "files"),
            dtype="float32",
            key=server.key,
        )
        check_completions(source, reader)


def check_completions(source, reader):
    """By two versions of the weights, the same images: nothing of what the first saw is left."""

    async def completed(version):
        model, _ = vllm_vision.make(seed=version)
        await source.publish(model.state_dict().items(), version)
        given = [*prompts(reader), *prompts(reader, [[WIDE]], "blue")]
        requests = [request(each, task) for task, each in enumerate(given)]
        groups = await asyncio.gather(*map(source.sample, requests))
        for one, group in zip(given, groups, strict=True):
            for sample in group:
                assert sample.versions == {version}
                own = own_logprobs(model, reader, sample, one.images)
                torch.testing.assert_close(
                    torch.tensor(sample.logprobs), own, rtol=0, atol=TOLERANCE
                )
        return [[sample.tokens for sample in group] for group in groups]

    async def both():
        return [await completed(version) for version in (1, 2)]

    first, second = asyncio.run(both())
    assert first != second
    assert first[0] != first[3]  # a blue image is not a red one


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("vllm") is not None, reason="this environment has vLLM"
)
def test_the_engine_completes_prompts_with_images_where_it_is(tmp_path):
    (tmp_path / "burnish").symlink_to(Path(burnish.__file__).parent)
    support = Path(vllm_vision.__file__).parents[1].iterdir()
    settings = tmp_path / "pytest.ini"  # ours makes errors of warnings, which are vLLM's there
    settings.write_text(
        "[pytest]\naddopts = -qx --import-mode=importlib --noconftest -p no:cacheprovider"
    )
    done = subprocess.run(
        [vllm_python(), "-m", "pytest", "-c", settings, __file__, "-k", "in_this_process"],
        capture_output=True,
        text=True,
        timeout=600,
        env={
            **os.environ,
            **ENVIRONMENT,
            "PYTHONPATH": os.pathsep.join([str(tmp_path), *map(str, support)]),
        },
    )
    assert done.returncode == 0 and "1 passed" in done.stdout, (
        done.stdout[-4000:] + done.stderr[-1000:]
    )


def test_completions_of_an_engine_in_this_process(tmp_path):
    pytest.importorskip("vllm", reason="vLLM is not in this environment")
    _, processor = vllm_vision.make()
    reader = ImageReader(processor)
    model = vllm_vision.save(tmp_path / "model")
    engine = start_engine(
        model, dtype="float32", max_model_len=CONTEXT, max_num_seqs=32, enforce_eager=True
    )
    config = vllm_vision.make()[0].config
    source = VLLMEngine(
        engine, config=config, tokenizer=reader.tokenizer, images=reader, directory=tmp_path
    )
    check_completions(source, reader)
