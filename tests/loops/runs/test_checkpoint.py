"""Checkpoints: whole or not there. (That a resumed run is the unbroken run is shown in test_resume.)"""

import errno
import hashlib
import json
import os

import pytest
import torch
from accelerate import Accelerator
from burnish.loops.runs import checkpoint


@pytest.fixture
def parts():
    policy = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    policy(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    parts = {"optimizer": optimizer, "schedule": schedule}
    return {"accelerator": Accelerator(), "policy": policy, "parts": parts}


def test_what_is_saved_comes_back(tmp_path, parts):
    weight = parts["policy"].weight.detach().clone()
    checkpoint.save(tmp_path, 7, **parts)
    following = torch.rand(3)
    with torch.no_grad():
        parts["policy"].weight.zero_()
    assert checkpoint.load_newest(tmp_path, **parts) == 7
    assert torch.equal(parts["policy"].weight, weight)
    assert torch.equal(torch.rand(3), following)


def test_what_was_written_is_not_read_again_for_its_sha256(tmp_path, parts, monkeypatch):
    read = []
    monkeypatch.setattr(checkpoint, "_sha256", read.append)
    path = checkpoint.save(tmp_path, 1, **parts)
    assert read == []
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest.keys() == {"state.pt", "random-0.pt"}
    for name, digest in manifest.items():
        assert digest == hashlib.sha256((path / name).read_bytes()).hexdigest()


def test_only_the_newest_are_kept(tmp_path, parts):
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, step, **parts)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


@pytest.mark.parametrize("damage", ["truncated", "flipped bit", "missing file", "no manifest", "half a manifest"])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(tmp_path, parts, caplog, damage):
    checkpoint.save(tmp_path, 1, **parts)
    state = checkpoint.save(tmp_path, 2, **parts) / "state.pt"
    manifest = state.with_name("manifest.json")
    match damage:
        case "truncated":
            os.truncate(state, 100)
        case "flipped bit":
            content = bytearray(state.read_bytes())
            content[len(content) // 2] ^= 1
            state.write_bytes(content)
        case "missing file":
            state.unlink()
        case "no manifest":
            manifest.unlink()
        case "half a manifest":
            os.truncate(manifest, 20)
    assert checkpoint.load_newest(tmp_path, **parts) == 1
    assert "step-00000002 is damaged and passed over" in caplog.text


def test_what_was_half_written_is_no_checkpoint(tmp_path, parts):
    checkpoint.save(tmp_path, 1, **parts).rename(tmp_path / ".partial-step-00000001")
    assert checkpoint.load_newest(tmp_path, **parts) == 0


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("[enforce fail] PytorchStreamWriter failed writing file data/0: file write failed"),
    ],
)
def test_a_full_disk_is_said_and_the_last_checkpoint_stays(tmp_path, parts, monkeypatch, error):
    checkpoint.save(tmp_path, 1, **parts)

    def full(*args):
        raise error

    monkeypatch.setattr(checkpoint.torch, "save", full)
    with pytest.raises(
        checkpoint.CheckpointError, match=r"step 2 could not be written.*disk is full.*step-00000001 is intact"
    ):
        checkpoint.save(tmp_path, 2, **parts)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert checkpoint.load_newest(tmp_path, **parts) == 1


def test_parameters_of_another_model_are_refused(tmp_path, parts):
    checkpoint.save(tmp_path, 1, **parts)
    parts["policy"] = torch.nn.Linear(3, 2, bias=False)
    with pytest.raises(
        checkpoint.CheckpointError, match="holds other parameters than this model trains, such as 'bias'"
    ):
        checkpoint.load_newest(tmp_path, **parts)


def test_frozen_weights_are_not_saved_again(tmp_path, parts):
    parts["policy"].weight.requires_grad_(False)
    state = torch.load(checkpoint.save(tmp_path, 1, **parts) / "state.pt", weights_only=True)
    assert state["model"].keys() == {"bias"}
    assert json.loads((tmp_path / "step-00000001/manifest.json").read_text()).keys() == {"random-0.pt", "state.pt"}
