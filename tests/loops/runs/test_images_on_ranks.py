"""Two ranks, of which one has no images in a micro-batch, end with the weights of one rank."""

import json

import pytest
import torch
import vision
from forked import run_forked
from safetensors.torch import load_file

USER = {"role": "user", "content": "what color?"}


def write(folder):
    """Rows of which every second one has an image, so that one rank of two has none."""
    vision.save(folder / "model", "idefics3", dtype=torch.float64)
    lines = []
    for number in range(6):
        row = {
            "prompt": [USER],
            "completion": [{"role": "assistant", "content": f"it is {number}" + "x" * number}],
            "images": [],
        }
        if number in (1, 2):  # the third step has none on any rank
            vision.picture(20 + 10 * number, 40, "red").save(folder / f"{number}.png")
            row["images"] = [f"{number}.png"]
        lines.append(json.dumps(row) + "\n")
    (folder / "rows.jsonl").write_text("".join(lines))
    return str(folder / "model"), str(folder / "rows.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("kind", ["sft", "grpo"])
def test_ranks_without_images_end_with_the_weights_of_one_rank(kind, shards, tmp_path):
    model, data = write(tmp_path)
    ends = {}
    for ranks in (1, 2):
        output = str(tmp_path / f"run{ranks}")
        parts = str(shards if ranks == 2 else 1)
        each = run_forked(ranks, "rank_images", model, data, output, parts, kind, timeout=240)
        assert [status for status, _ in each] == [0] * ranks, each
        losses = json.loads(each[0][1].strip().splitlines()[-1])
        ends[ranks] = losses, load_file(f"{output}/model/model.safetensors")
    (one, weights), (two, others) = ends[1], ends[2]
    torch.testing.assert_close(one, two, rtol=1e-9, atol=0)
    assert weights.keys() == others.keys()
    start = load_file(f"{model}/model.safetensors")
    for name, weight in weights.items():
        torch.testing.assert_close(weight, others[name], rtol=0, atol=1e-12)
    tower = "model.vision_model.embeddings.patch_embedding.weight"
    assert not torch.equal(weights[tower], start[tower])
