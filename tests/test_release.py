"""What a release consists of: whole archives, files that agree on the version, forms that ask for
what a report needs.
"""

import re
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import burnish
import pytest
import yaml

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def tracked():
    """The files of the repository; none where it is no checkout."""
    command = ["git", "ls-files", "-z"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return {name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()}


def test_all_files_name_one_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert burnish.__version__ == PROJECT["version"] == citation["version"]
    assert citation["license"] == PROJECT["license"]
    assert citation["authors"] == PROJECT["authors"]


def test_a_report_of_a_mistake_brings_its_environment():
    form = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE/bug.yml").read_text())
    (asked,) = (field for field in form["body"] if field.get("id") == "env")
    assert "burnish env" in asked["attributes"]["label"] and asked["validations"]["required"]


def test_every_extra_that_a_workflow_installs_is_there():
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    jobs = yaml.safe_load(workflow)["jobs"]
    assert {"lint", "tests", "floor", "newest", "package", "docs"} <= jobs.keys()
    named = {
        extra
        for extras in re.findall(r"(?:burnish|\.)\[([\w,]+)\]", workflow)
        for extra in extras.split(",")
    }
    assert named and named <= PROJECT["optional-dependencies"].keys()


def test_every_supported_python_is_tested_by_users():
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    tested = set(workflow["jobs"]["tests"]["strategy"]["matrix"]["python"])
    claimed = {
        version
        for classifier in PROJECT["classifiers"]
        for version in re.findall(r"^Programming Language :: Python :: (\d\.\d+)$", classifier)
    }
    assert claimed and claimed <= tested


@pytest.mark.slow
def test_the_sdist_is_the_whole_repository(tmp_path):
    files = tracked()
    if not files:
        pytest.skip("no git checkout, so there is no list of its files")
    build = f"import sys; sys.path.insert(0, 'tools'); import backend; backend.build_sdist({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=ROOT, check=True, capture_output=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        held = {name.partition("/")[2] for name in opened.getnames()}
    assert files <= held, files - held
    assert not [name for name in held if "__pycache__" in name]
