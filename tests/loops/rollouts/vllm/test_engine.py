"""vLLM in this process: where the tests' own environment does not have it, in another one that
does.
"""

import functools
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import burnish
import pytest
import vllm_model
from burnish.loops.rollouts.source import SourceError
from burnish.loops.rollouts.vllm.engine import VLLMEngine, start_engine
from conformance import Conformance, Subject
from transformers import AutoConfig, AutoTokenizer
from vllm_servers import vllm_python

CONTEXT = 500
VOCABULARY = 258
TOLERANCE = 1e-4


def test_without_vllm_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(
        SourceError, match=r"not installed in this environment; pip install 'burnish\[vllm\]'"
    ):
        start_engine(tmp_path, dtype="float32")


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("vllm") is not None, reason="this environment has vLLM"
)
def test_the_contract_holds_in_the_environment_that_has_it(tmp_path):
    (tmp_path / "burnish").symlink_to(Path(burnish.__file__).parent)
    support = Path(vllm_model.__file__).parents[1].iterdir()
    settings = tmp_path / "pytest.ini"  # ours makes errors of warnings, which are vLLM's there
    settings.write_text(
        "[pytest]\naddopts = -qx --import-mode=importlib --noconftest -p no:cacheprovider"
    )
    done = subprocess.run(
        [vllm_python(), "-m", "pytest", "-c", settings, __file__, "-k", "TestEngine"],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *map(str, support)])},
    )
    assert done.returncode == 0 and " passed" in done.stdout, (
        done.stdout[-4000:] + done.stderr[-1000:]
    )


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    """One for all tests: vLLM does not leave a process that it has been in."""
    pytest.importorskip("vllm", reason="vLLM is not in this environment")
    os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind")
    path = vllm_model.save_model(tmp_path_factory.mktemp("model"))
    return start_engine(
        path, dtype="float32", max_model_len=CONTEXT, max_num_seqs=32, enforce_eager=True
    ), path


@functools.cache
def weights(version):
    """The same tensors whenever asked: the engine's thread draws from the global generator that
    would make them.
    """
    return vllm_model.make_model(VOCABULARY, seed=version).state_dict()


class TestEngine(Conformance):
    @pytest.fixture(autouse=True)
    def _keep(self, llm, tmp_path):
        (self.llm, self.model), self.directory = llm, tmp_path

    async def open(self):
        config, tokenizer = (
            AutoConfig.from_pretrained(self.model),
            AutoTokenizer.from_pretrained(self.model),
        )
        subject = Subject(
            source=VLLMEngine(
                self.llm, config=config, tokenizer=tokenizer, directory=self.directory
            ),
            model=vllm_model.make_model(VOCABULARY),
            weights=weights,
            tolerance=TOLERANCE,
            vocab=VOCABULARY,
            context=CONTEXT,
            long=400,
            draws=300,
        )
        await subject.publish(1)
        return subject
