import pytest
import torch
from forked import run_forked
from shared import made_once


@pytest.fixture(autouse=True)
def undrawn(request, monkeypatch):
    """Runs of a few small steps end without their picture, which takes longer than they do, unless
    marked `drawn`.
    """
    if "drawn" not in request.keywords:
        monkeypatch.setattr(
            "burnish.loops.runs.training.draw_curves", lambda metrics, picture: None
        )


@pytest.fixture(autouse=True)
def torchao(request):
    """Its optimizers are tested where it is installed."""
    if "torchao" in request.node.name or "adamw_torch_" in request.node.name:
        pytest.importorskip("torchao")


def on_two_ranks(module, *arguments):
    """A fixture: what rank 0 of two saved in ``module.be_rank(file, *arguments)``, and what both
    printed.
    """

    @pytest.fixture(scope="session")
    def results(tmp_path_factory):
        def make(folder):
            outcomes = run_forked(2, module, str(folder / "results.pt"), *arguments)
            for status, printed in outcomes:
                assert status == 0, printed[-3000:]
            (folder / "printed.txt").write_text("".join(printed for _, printed in outcomes))

        folder = made_once(tmp_path_factory, "-".join([module, *arguments]), make)
        return torch.load(folder / "results.pt", weights_only=False), (
            folder / "printed.txt"
        ).read_text()

    return results


law_on_ranks = on_two_ranks("law", "offline")
law_online_on_ranks = on_two_ranks("law", "online")
law_bfloat16_on_ranks = on_two_ranks("law", "bfloat16")
law_float16_on_ranks = on_two_ranks("law", "float16")
heads_on_ranks = on_two_ranks("wrapped")
