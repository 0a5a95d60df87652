"""The first error in what a vLLM server prints before it dies, and what a user of the command line
can do about it.
"""

from pathlib import Path

import pytest
import vllm_servers
from burnish.loops.rollouts.vllm.launch import first_error

# of vLLM 0.32 on a CPU, less its warnings
MEMORY = Path(vllm_servers.__file__).parent / "vllm_memory.txt"

# Lines that vLLM 0.32 and Python 3.11 have printed.
PORT = """\
  File "vllm/entrypoints/launchers/launcher.py", line 348, in create_server_socket
    sock.bind(addr)
OSError: [Errno 98] Address already in use
"""
MODULE = (
    "/env/bin/python: Error while finding module specification for 'vllm.entrypoints.openai.api_server' "
    "(ModuleNotFoundError: No module named 'vllm')\n"
)
LENGTH = """\
(APIServer pid=1) INFO 11-22 06:19:48 [model.py:733] Resolved architecture: LlamaForCausalLM
Traceback (most recent call last):
  File "pydantic/_internal/_dataclasses.py", line 121, in __init__
    s.__pydantic_validator__.validate_python(ArgsKwargs(args, kwargs), self_instance=s)
pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
  Value error, User-specified max_model_len (4096) is greater than the derived max_model_len (512.0).
    For further information visit a page
"""
DTYPE = (
    "(EngineCore pid=8) ERROR 11-22 06:18:23 [core.py:1510] ValueError: Bfloat16 is only supported on GPUs with "
    "compute capability of at least 8.0. Your Tesla T4 GPU has compute capability 7.5.\n"
)


def test_the_first_of_the_errors_is_the_one_that_says_why():
    log = MEMORY.read_text()
    error, fix = first_error(log)
    assert error.startswith(
        "ValueError: Available memory on node 0 (9.56/11.34 GiB) on startup is less than desired"
    )
    assert "\n" not in error and log.splitlines()[-1].startswith(
        "RuntimeError: Engine core initialization failed"
    )
    assert "--vllm.options '{gpu_memory_utilization: 0.3}'" in fix


@pytest.mark.parametrize(
    ("log", "error", "fix"),
    [
        (PORT, "OSError: [Errno 98] Address already in use", "start again, which takes a free one"),
        (MODULE, MODULE.strip(), "--vllm.python"),
        (
            "ModuleNotFoundError: No module named 'triton'",
            None,
            "install what is missing beside vLLM",
        ),
        (LENGTH, "\n".join(LENGTH.splitlines()[-3:]), "lower max_model_len"),
        (DTYPE, DTYPE.partition("] ")[2].strip(), "--dtype float32"),
        (
            "api_server.py: error: unrecognized arguments: --no-such-flag",
            None,
            "leave it out of --vllm.options",
        ),
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
            None,
            "give the server less memory",
        ),
        (
            "ValueError: No available memory for the cache blocks. Try",
            None,
            "give the server more memory",
        ),
    ],
)
def test_an_error_is_shown_whole_with_its_fix(log, error, fix):
    found, advice = first_error(log)
    assert found == (error or log) and fix in advice


def test_what_is_no_error_is_passed_over():
    survived = "(APIServer pid=3) WARNING 11-22 06:18:23 [x.py:1] ImportError: no such kernel, another one is used\n"
    assert first_error(survived + "FutureWarning: Error handling changes\nloading\n") is None
    assert first_error(survived + DTYPE)[0].startswith("ValueError: Bfloat16")
    assert first_error("ZeroDivisionError: division by zero") == (
        "ZeroDivisionError: division by zero",
        None,
    )
