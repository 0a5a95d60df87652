"""Models that are sharded before their weights are read: each rank reads its part, and gets what it
otherwise would.
"""

import json

import in_files
import pytest
from forked import run_forked
from shared import made_once


@pytest.fixture(scope="session")
def found(tmp_path_factory):
    def make(folder):
        in_files.prepare(folder)
        ((status, printed),) = run_forked(1, "in_files", str(folder), str(folder / "results.json"))
        assert status == 0, printed[-3000:]

    return json.loads((made_once(tmp_path_factory, "in-files", make) / "results.json").read_text())


@pytest.mark.parametrize(
    "case",
    [*(f"{name}, plain" for name in in_files.FAMILIES), "llama_tied, adapters"]
    + [f"llama, {kind}" for kind in ("bfloat16", "adapters", "classifier")],
)
def test_shards_read_from_files_are_those_of_a_whole_model_to_the_bit(found, case):
    """Names, ties, dtypes, new adapters and heads, and buffers that no file holds, too."""
    assert [result["wrong"] for result in found[case]] == [None, None]
    for result in found[case]:
        assert result["left"] > 8 and result["lines"] == []


@pytest.mark.parametrize(
    ("case", "line"),
    [
        (
            "experts, plain",
            "MixtralForCausalLM: its files hold weights in another form, so every rank reads all",
        ),
        (
            "two tables, plain",
            "LlamaForCausalLM: its files hold weights in another form, so every rank reads all",
        ),
        (
            "llama, dora",
            "lora: these adapters are made of the model's weights, so every rank reads all of them",
        ),
    ],
)
def test_what_can_not_be_read_in_parts_is_read_whole_and_says_so(found, case, line):
    for result in found[case]:
        assert result["wrong"] is None and result["left"] == 0
        assert len(result["lines"]) == 1 and line in result["lines"][0]


def test_no_rank_ever_holds_more_than_its_share_and_one_unit(found):
    sizes = found["memory"]
    share = sizes["model"] / in_files.RANKS
    assert share + sizes["unit"] < 0.6 * sizes["model"]  # else nothing is tested
    assert sizes["made"] <= 0.1 * sizes["model"]  # by operations while it is loaded
    assert sizes["loaded"] <= 0.1 * sizes["model"]
    assert sizes["most"] <= 1.05 * (share + sizes["unit"] + sizes["vectors"])
    assert sizes["after"] <= 1.1 * share
