import json

import pytest
import torch
from ranks import run_ranks
from shared import made_once

# What two ranks do, ``MODULE.be_rank(file, *arguments)``, for the tests that ask for the fixture of this name.
JOBS = {
    "law_on_ranks": ("law", "offline"),
    "law_online_on_ranks": ("law", "online"),
    "law_bfloat16_on_ranks": ("law", "bfloat16"),
    "heads_on_ranks": ("wrapped",),
}


@pytest.fixture(autouse=True)
def undrawn(request, monkeypatch):
    """Runs of a few small steps end without their picture, which takes longer than they do, unless marked `drawn`."""
    if "drawn" not in request.keywords:
        monkeypatch.setattr("burnish.loops.runs.run.draw_curves", lambda metrics, picture: None)


@pytest.fixture(scope="session")
def folder_of_ranks(request, tmp_path_factory):
    """The files of all jobs that tests of this session ask for, whichever process they run in: one start for all."""

    def make(folder):
        names = [name for name in JOBS if any(name in item.fixturenames for item in request.session.items)]
        jobs = [(2, JOBS[name][0], str(folder / name), *JOBS[name][1:]) for name in names]
        (folder / "outcomes.json").write_text(json.dumps(dict(zip(names, run_ranks(*jobs), strict=True))))

    return made_once(tmp_path_factory, "ranks", make)


def fixture_of(job):
    @pytest.fixture(scope="session", name=job)
    def results(folder_of_ranks):
        """What rank 0 saved, and what each rank printed."""
        outcomes = json.loads((folder_of_ranks / "outcomes.json").read_text())[job]
        for status, printed in outcomes:
            assert status == 0, printed[-3000:]
        return torch.load(folder_of_ranks / job, weights_only=False), [printed for _, printed in outcomes]

    return results


law_on_ranks, law_online_on_ranks, law_bfloat16_on_ranks, heads_on_ranks = map(fixture_of, JOBS)
