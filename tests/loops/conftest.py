import pytest


@pytest.fixture
def undrawn(monkeypatch):
    """Runs of a few small steps end without their picture, which takes longer than they do."""
    monkeypatch.setattr("burnish.loops.runs.run.draw_curves", lambda metrics, picture: None)
