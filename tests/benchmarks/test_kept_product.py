"""`burnish.benchmarks.experiments.kept_product`, which no GPU has run yet: its arithmetic by torch
against what the library keeps, and what it costs on sm_90 where it is compiled ahead of time.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from burnish.kernels.softmax import LogitTransform, SoftmaxState

pytest.importorskip("triton", reason="needs triton")
TOOL = Path(__file__).parents[1] / "support" / "tools" / "aot.py"
COMPILED = """
import json, sys
sys.path.insert(0, sys.argv[1])
import aot, torch
from aot import absent
from burnish.benchmarks.experiments.kept_product import keep
bf16 = torch.bfloat16
with aot.compiling_only(aot.ARCHITECTURES["sm_90"]) as compiled:
    keep(absent(8192, 4096, dtype=bf16), absent(151808, 4096, dtype=bf16), absent(8192, dtype=torch.int64), 0.5, 132)
(kernel,) = compiled
ptx = kernel.asm["ptx"]
used = {name: ptx.count(name) for name in ("wgmma.mma_async", "cp.async.bulk.tensor")}
print(json.dumps(aot.figures(kernel) | used))
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has no interpreter to fold on a CPU")
def test_it_keeps_what_the_library_keeps_and_its_sums_are_the_same() -> None:
    from burnish.benchmarks.experiments.kept_product import COLUMNS, emulated
    from burnish.kernels import triton_softmax

    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(5, 64, generator=random).bfloat16()
    weight = torch.randn(3 * COLUMNS, 64, generator=random).bfloat16()
    target = torch.tensor([0, 255, 256, 600, 767])
    found = emulated(hidden, weight, target, 0.5)

    logits = hidden.float() @ weight.float().T
    state = SoftmaxState.start(target[:, None], torch.empty(0), False, False)
    for i, tile in enumerate(logits.split(COLUMNS, 1)):
        kept, top = torch.empty(5, COLUMNS, dtype=torch.float16), torch.empty(5)
        column = target[:, None] - i * COLUMNS
        triton_softmax.fold_(tile, column, state, LogitTransform(0.5, None, None), (kept, top))
        assert torch.equal(found.x[:, i * COLUMNS : (i + 1) * COLUMNS], kept)
        assert torch.equal(found.sums[i, 0], top)
    for ours, theirs in zip(found.state(target)[:4], state[:4], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)

    exact = torch.log_softmax(hidden.double() @ weight.double().T * 0.5, 1)
    state = found.state(target)
    logsumexp = state.shift + state.total.log()
    logprob = state.chosen[:, 0] - logsumexp
    torch.testing.assert_close(logprob.double(), exact.gather(1, target[:, None])[:, 0])
    # what backward makes of it: x is rounded by 2⁻¹¹ of itself, and x·eˣ is at most 1/e
    shifted = found.x.float().unflatten(1, (-1, COLUMNS)) + found.sums[:, 0].T[:, :, None]
    probability = (shifted.flatten(1) - logsumexp[:, None]).exp()
    assert (probability - exact.exp()).abs().max() < 2**-11 / math.e + 1e-6


@pytest.mark.slow
def test_on_sm_90_it_spills_no_register_and_fits_into_shared_memory(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-c", COMPILED, str(TOOL.parent)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["spills"] == 0 and found["shared"] <= 232_448
    assert found["wgmma.mma_async"] >= 4 and found["cp.async.bulk.tensor"] == 3  # h, W and x
