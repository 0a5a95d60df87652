"""vLLM in this process: runs where the tests' own environment has vLLM, as the one of its server tests may."""

import functools
import os
import sys

import pytest
import vllm_model
from burnish.loops.rollouts.source import SourceError
from burnish.loops.rollouts.vllm_engine import VLLMEngine, start_engine
from conformance import Conformance, Subject
from transformers import AutoConfig, AutoTokenizer

CONTEXT = 256
VOCABULARY = 258
TOLERANCE = 1e-4


def test_without_vllm_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(SourceError, match=r"not installed in this environment; pip install 'burnish\[vllm\]'"):
        start_engine(tmp_path, dtype="float32")


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    """One for all tests: vLLM does not leave a process that it has been in."""
    pytest.importorskip("vllm", reason="vLLM is not in this environment")
    os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind")
    path = vllm_model.save_model(tmp_path_factory.mktemp("model"))
    return start_engine(path, dtype="float32", max_model_len=CONTEXT, max_num_seqs=32, enforce_eager=True), path


@functools.cache
def weights(version):
    """The same tensors whenever asked: the engine's thread draws from the global generator that would make them."""
    return vllm_model.make_model(VOCABULARY, seed=version).state_dict()


class TestEngine(Conformance):
    @pytest.fixture(autouse=True)
    def _keep(self, llm, tmp_path):
        (self.llm, self.model), self.directory = llm, tmp_path

    async def open(self):
        config, tokenizer = AutoConfig.from_pretrained(self.model), AutoTokenizer.from_pretrained(self.model)
        subject = Subject(
            source=VLLMEngine(self.llm, config=config, tokenizer=tokenizer, directory=self.directory),
            model=vllm_model.make_model(VOCABULARY),
            weights=weights,
            tolerance=TOLERANCE,
            vocab=VOCABULARY,
            context=CONTEXT,
            long=200,
            draws=300,
        )
        await subject.publish(1)
        return subject
