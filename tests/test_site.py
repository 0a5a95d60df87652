"""The site: docs/ builds strictly, by Zensical and by mkdocs, and its API pages have all public
names.
"""

import os
import re
import shutil
import subprocess
import sys
import zlib
from importlib.util import find_spec
from pathlib import Path

import burnish
import pytest
import yaml
from burnish import data, kernels, loops, objectives
from burnish.loops import agents, environments, rewards

ROOT = Path(__file__).parents[1]
BUILDERS = ["zensical", "mkdocs"]
PUBLIC = {
    "burnish.objectives": objectives,
    "burnish.kernels": kernels,
    "burnish.data": data,
    "burnish.loops": loops,
    "burnish.loops.rewards": rewards,
    "burnish.loops.environments": environments,
    "burnish.loops.agents": agents,
}
needs_builders = pytest.mark.skipif(
    any(find_spec(name) is None for name in [*BUILDERS, "mkdocstrings"]),
    reason='the site is built with the extra docs: pip install -e ".[docs]"',
)


def pages_of(navigation):
    """The files that the navigation of the site names."""
    for entry in navigation:
        for target in entry.values():
            if isinstance(target, list):
                yield from pages_of(target)
            else:
                yield target


def copy_of_docs(directory):
    """The sources of the site, where a test may change them."""
    shutil.copytree(ROOT / "docs", directory / "docs")
    shutil.copy(ROOT / "mkdocs.yml", directory)
    (directory / "build/editable").mkdir(parents=True)
    (directory / "build/editable/burnish").symlink_to(ROOT, target_is_directory=True)
    return directory


def build(builder, directory):
    command = [sys.executable, "-m", builder, "build", "--strict"]
    environment = {**os.environ, "NO_COLOR": "1", "PYTHONWARNINGS": "ignore"}
    return subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=600
    )


def test_the_navigation_names_every_page_once():
    navigation = list(pages_of(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(navigation) == sorted(pages)


@pytest.mark.slow
@needs_builders
@pytest.mark.parametrize("builder", BUILDERS)
def test_the_site_builds_strictly(builder, tmp_path):
    done = build(builder, copy_of_docs(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    site = tmp_path / "build/site"
    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(ROOT / "docs").with_suffix("")
        place = site if name.name == "README" else site / name
        assert (place / "index.html").exists(), name

    inventory = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    documented = re.findall(r"^burnish\.(\S+) py:", zlib.decompress(inventory).decode(), flags=re.M)
    documented_names = {name.rpartition(".")[2] for name in documented}
    for package, module in PUBLIC.items():
        for name in module.__all__ if hasattr(module, "__all__") else exported(module):
            assert name in documented_names, f"{package}.{name} is on no API page"


def exported(module):
    """The public names of a module, without its submodules."""
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", "").startswith("burnish")
    ]


@pytest.mark.slow
@needs_builders
@pytest.mark.parametrize(
    "mistake",
    [
        "[a page](no-such-page.md)",
        "[an anchor](data.md#no-such-anchor)",
        "::: burnish.objectives.no_such_objective",
    ],
    ids=["page", "anchor", "object"],
)
def test_a_dead_end_stops_the_build(mistake, tmp_path):
    start = copy_of_docs(tmp_path) / "docs/embedding.md"
    start.write_text(f"{start.read_text()}\n{mistake}\n")
    done = build("zensical", tmp_path)
    assert done.returncode != 0, done.stdout + done.stderr


def test_the_version_is_that_of_the_package():
    project = (ROOT / "pyproject.toml").read_text()
    assert re.search(rf'^version = "{re.escape(burnish.__version__)}"$', project, flags=re.M)
