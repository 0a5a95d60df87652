"""What has to be settled before anything imports torch or Triton, and how the suite is spread over
processes.
"""

import atexit
import gc
import getpass
import importlib.util
import os
import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version

# One thread per process: pytest runs one process per core, and tests start processes of their own,
# which inherit this.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Deterministic algorithms, with which tests fill torch.empty with NaN, ask this of cuBLAS. Never
# set it for timings.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# Inductor's trial of each set of vector instructions starts a process that imports torch, and gives
# it a minute.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
import torch

gc.disable()  # until all is collected: a fifth of the time of imports goes into looking for garbage

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # without a GPU kernels run in the interpreter, on the CPU

WITHOUT_WORKERS = 3  # files that are run in one process, because workers take some seconds to start


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Add --cpu-times, and options of plugins that a machine which only runs tests/kernels need not
    have.
    """
    parser.addoption(
        "--cpu-times",
        metavar="FILE",
        help="write a table of the tests that take most processor time",
    )
    if importlib.util.find_spec("jaxtyping") is None:
        parser.addoption("--jaxtyping-packages")
    if not pluginmanager.hasplugin("xdist"):
        parser.addoption("--numprocesses")
        parser.addoption("--dist")


def pytest_configure(config: pytest.Config) -> None:
    """Fail once, instead of in 300 tests, where Triton's interpreter is too old for numpy; prepare
    the options.
    """
    interpreted = not torch.cuda.is_available() and importlib.util.find_spec("triton") is not None
    if (
        interpreted
        and Version(version("triton")) < Version("3.7")
        and Version(version("numpy")) >= Version("2.4")
    ):
        raise pytest.UsageError(
            f"tests: the interpreter of triton {version('triton')} makes an integer of an array of one, "
            f"for which numpy must be < 2.4, got {version('numpy')}; pip install 'numpy<2.4'"
        )
    config.pluginmanager.register(PlainFolders())
    if not hasattr(config, "workerinput"):
        hold_temporary_files(config)
    if config.option.markexpr == "not slow" and all("::" in argument for argument in config.args):
        config.option.markexpr = ""  # a test that is asked for by its name runs
    if config.option.markexpr and "exhaustive" not in config.option.markexpr:
        config.option.markexpr = f"({config.option.markexpr}) and not exhaustive"
    if config.getoption("cpu_times"):
        import cpu_times

        config.pluginmanager.register(cpu_times.Recorder(config.getoption("cpu_times")))


class PlainFolders:
    """Collect every folder as a folder, never as a package.

    The root of the checkout is the package ``burnish``. pytest would import its ``__init__.py`` by
    the folder's name: that fails where the name is no identifier, and makes a second copy of the
    package elsewhere. A conftest's own hooks are not asked for the folders above it, so this one is
    registered.
    """

    @pytest.hookimpl(tryfirst=True)
    def pytest_collect_directory(self, path: Path, parent: pytest.Collector) -> pytest.Collector:
        return pytest.Dir.from_parent(parent, path=path)


def hold_temporary_files(config: pytest.Config) -> None:
    """Give tests and their processes, many of which are killed, one folder for what they leave: it
    goes at the end.

    Folders of failed tests stay where pytest keeps them, and what inductor has compiled serves the
    next time.
    """
    place = tempfile.gettempdir()
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", place)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{place}/torchinductor_{getpass.getuser()}")
    tempfile.tempdir = os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="burnish-tests-")
    config.add_cleanup(lambda: shutil.rmtree(tempfile.tempdir, ignore_errors=True))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files of this folder, which are of the longest: no process should end with one
    of them.
    """
    items.sort(key=lambda item: item.path.parent != Path(__file__).parent)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Let the garbage collector pass over what imports and collection have left: millions of
    objects, each time.
    """
    gc.collect()
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # not sooner: pytest looks for garbage before it ends


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One process per core for the suite or a folder of it; this process alone for a few files, and
    on a GPU.
    """
    few = len(config.args) <= WITHOUT_WORKERS and all(".py" in argument for argument in config.args)
    return 0 if few or torch.cuda.is_available() else len(os.sched_getaffinity(0))
