"""Checkpoints: whole or not there. (That a resumed run is the unbroken run is shown in
test_resume.)
"""

import errno
import hashlib
import json
import os
import re
import shutil
import threading
import time
from contextlib import closing, nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from accelerate import Accelerator
from burnish.loops.runs import checkpoint, storage
from burnish.loops.runs.state import capture, random_state, set_random_state
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.testing._internal.two_tensor import TwoTensor


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


def test_the_generator_of_its_own_device_comes_back_on_a_machine_with_fewer(monkeypatch):
    set_states = []
    for name, function in {
        "is_available": lambda: True,
        "get_rng_state": lambda: torch.tensor([7]),
        "set_rng_state": set_states.append,
        "get_rng_state_all": lambda: [torch.tensor([index]) for index in range(8)],
        "set_rng_state_all": lambda states: [("cuda:0",)[index] for index, _ in enumerate(states)],
    }.items():
        monkeypatch.setattr(torch.cuda, name, function)
    set_random_state(random_state())
    assert set_states == [7]


def test_what_was_written_is_not_read_again_for_its_sha256(tmp_path, parts, monkeypatch):
    read = []
    monkeypatch.setattr(hashlib, "file_digest", lambda file, name: read.append(file))
    path = checkpoint.save(tmp_path, 1, **parts)
    assert read == []
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest.keys() == {"state.pt", "random-0.pt", "shard-0.safetensors"}
    for name, digest in manifest.items():
        assert digest == hashlib.sha256((path / name).read_bytes()).hexdigest()


def test_only_the_newest_are_kept(tmp_path, parts):
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, step, **parts)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


def test_a_link_is_removed_as_a_directory_is_and_what_someone_keeps_is_not(
    tmp_path, parts, monkeypatch, caplog
):
    """One that can't be removed is named, and costs no run the checkpoint that is there."""
    for step in (1, 2):
        checkpoint.save(tmp_path, step, **parts)
    kept = [
        (tmp_path / "step-00000002").rename(tmp_path.parent / "elsewhere"),
        tmp_path / "step-00000009.tar",
    ]
    (tmp_path / "step-00000002").symlink_to(kept[0])
    kept[1].write_bytes(b"")
    for step in (3, 4):
        checkpoint.save(tmp_path, step, **parts)
    assert all(path.exists() for path in kept)
    assert checkpoint.load_newest(tmp_path, **parts) == 4
    monkeypatch.setattr(
        shutil, "rmtree", Mock(side_effect=OSError(errno.EBUSY, "Device or resource busy"))
    )
    checkpoint.save(tmp_path, 5, **parts)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == [
        f"{tmp_path}/step-00000003 could not be removed: [Errno 16] Device or resource busy"
    ]
    names = ["step-00000003", "step-00000004", "step-00000005", "step-00000009.tar"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_a_damaged_one_does_not_take_the_place_of_one_that_is_kept(tmp_path, parts):
    for step in (1, 3):
        checkpoint.save(tmp_path, step, **parts)
    os.truncate(tmp_path / "step-00000003/state.pt", 10)
    assert checkpoint.load_newest(tmp_path, **parts) == 1
    checkpoint.save(tmp_path, 2, **parts, keep=1)
    assert checkpoint.load_newest(tmp_path, **parts) == 2
    checkpoint.save(tmp_path, 3, **parts, keep=1)
    assert checkpoint.load_newest(tmp_path, **parts) == 3 and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("file", "content"), [("manifest.json", b'["state.pt"]'), ("random-0.pt", b"half")]
)
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(
    tmp_path, parts, caplog, file, content
):
    """Each file is damaged in every way in test_faults."""
    checkpoint.save(tmp_path, 1, **parts)
    (checkpoint.save(tmp_path, 2, **parts) / file).write_bytes(content)
    assert checkpoint.load_newest(tmp_path, **parts) == 1
    assert "step-00000002 is damaged and passed over" in caplog.text


@pytest.mark.parametrize(("number", "fails"), [(errno.EINVAL, False), (errno.EIO, True)])
def test_a_file_system_that_can_not_sync_directories_is_used_as_it_is(
    number, fails, tmp_path, parts, monkeypatch
):
    usual = os.fsync

    def fsync(descriptor):
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(number, os.strerror(number))
        usual(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(checkpoint.CheckpointError) if fails else nullcontext():
        checkpoint.save(tmp_path, 1, **parts)
    assert checkpoint.load_newest(tmp_path, **parts) == (not fails)


def test_nothing_but_an_empty_manifest_is_no_checkpoint(tmp_path, parts, caplog):
    checkpoint.save(tmp_path, 1, **parts)
    (tmp_path / "step-00000002").mkdir()
    (tmp_path / "step-00000002/manifest.json").write_text("{}")
    assert checkpoint.load_newest(tmp_path, **parts) == 1
    assert (
        "step-00000002 is damaged and passed over: manifest.json names no state.pt" in caplog.text
    )


def rewritten(path, change):
    """A checkpoint whose state is changed, and whose manifest agrees with that."""
    state = torch.load(path / "state.pt", weights_only=True)
    content = checkpoint.dump(change(state))
    (path / "state.pt").write_bytes(content)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["state.pt"] = hashlib.sha256(content).hexdigest()
    (path / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda state: state | {"format": 99},
            r"it has format 99, of another version .* reads format 1; install that",
        ),
        (
            lambda state: {k: v for k, v in state.items() if k != "step"},
            "no state of this run, it has no step",
        ),
        (
            lambda state: {k: v for k, v in state.items() if k != "data"},
            "no state of this run, it has no data",
        ),
        (lambda state: {k: v for k, v in state.items() if k != "optimizer"}, "it has no optimizer"),
        (list, "state.pt is no state of a run but a list"),
    ],
)
def test_a_state_of_another_version_or_kind_is_told_in_a_line(tmp_path, parts, change, says):
    rewritten(checkpoint.save(tmp_path, 1, **parts), change)
    with pytest.raises(checkpoint.CheckpointError, match=f"^step-00000001: .*{says}"):
        checkpoint.load_newest(tmp_path, **parts)


def test_a_state_that_is_no_file_of_torch_is_told_in_a_line(tmp_path, parts, monkeypatch):
    monkeypatch.setattr(checkpoint, "dump", lambda state: memoryview(b"nothing of torch"))
    checkpoint.save(tmp_path, 1, **parts)
    monkeypatch.undo()
    with pytest.raises(checkpoint.CheckpointError, match=r"state\.pt is no state of a run"):
        checkpoint.load_newest(tmp_path, **parts)


def test_a_state_of_the_first_versions_had_no_format(tmp_path, parts):
    rewritten(
        checkpoint.save(tmp_path, 1, **parts),
        lambda state: {k: v for k, v in state.items() if k != "format"},
    )
    assert checkpoint.load_newest(tmp_path, **parts) == 1


def test_what_was_half_written_is_no_checkpoint(tmp_path, parts):
    checkpoint.save(tmp_path, 1, **parts).rename(tmp_path / ".partial-step-00000001")
    assert checkpoint.load_newest(tmp_path, **parts) == 0


@pytest.mark.parametrize(
    ("owner", "call", "number", "reason", "remedy"),
    [
        (os, "fsync", errno.ENOSPC, r": the disk is full \(\d+ MiB free\)", "make room and "),
        (os, "fsync", errno.EDQUOT, r": the disk is full \(\d+ MiB free\)", "make room and "),
        (os, "fsync", errno.EIO, "", ""),
        (
            os,
            "fsync",
            errno.EFBIG,
            ": the file would be larger than this process may write",
            "raise that limit.* and ",
        ),
        (
            Path,
            "open",
            errno.EROFS,
            ": the file system is read-only, .*",
            "have it mounted for writing and ",
        ),
        (Path, "open", errno.EPERM, ": this user may not write it", "give the right to .* and "),
        (Path, "open", errno.EACCES, ": this user may not write it", "give the right to .* and "),
    ],
)
def test_what_could_not_be_written_is_said_and_the_last_checkpoint_stays(
    tmp_path, parts, monkeypatch, owner, call, number, reason, remedy
):
    checkpoint.save(tmp_path, 1, **parts)

    def fail(*args):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(owner, call, fail)
    with pytest.raises(checkpoint.CheckpointError) as failed:
        checkpoint.save(tmp_path, 2, **parts)
    monkeypatch.undo()
    assert re.fullmatch(
        rf"checkpoint of step 2 could not be written to {tmp_path.parent}{reason}. step-00000001 is intact: {remedy}"
        rf"start again with --resume true \(\[Errno {number}\] {os.strerror(number)}\)",
        str(failed.value),
    )
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert checkpoint.load_newest(tmp_path, **parts) == 1


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (SafetensorError("I/O error: No space left on device (os error 28)"), "the disk is full"),
        (
            RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed"),
            "the disk is full",
        ),
        (
            SafetensorError("I/O error: File too large (os error 27)"),
            "the file would be larger than",
        ),
        (
            RuntimeError("[gloo/transport/tcp/pair.cc:534] writev [127.0.0.1]:38: Broken pipe"),
            "another rank ended",
        ),
        (
            FileNotFoundError(errno.ENOENT, "No such file"),
            "it was removed, or is on no file system that all ranks share",
        ),
    ],
)
def test_a_full_disk_a_lost_rank_and_a_disk_of_one_rank_are_told_apart(tmp_path, error, cause):
    with (
        pytest.raises(
            checkpoint.CheckpointError, match=f": {cause}.*There is no earlier checkpoint: "
        ) as failed,
        checkpoint.writing("the model", tmp_path / "checkpoints"),
    ):
        raise error
    assert ("make room" in str(failed.value)) == ("full" in cause)


def test_a_keyboard_interrupt_while_it_is_written_is_one(tmp_path, parts, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path, 1, **parts)
    assert list(tmp_path.iterdir()) == []


def test_parameters_of_another_model_are_refused(tmp_path, parts):
    checkpoint.save(tmp_path, 1, **parts)
    parts["policy"] = torch.nn.Linear(3, 2, bias=False)
    with pytest.raises(
        checkpoint.CheckpointError, match=r"holds 'bias' as \(2,\), this model trains it as nothing"
    ):
        checkpoint.load_newest(tmp_path, **parts)


def test_parameters_of_another_shape_are_refused(tmp_path, parts):
    checkpoint.save(tmp_path, 1, **parts)
    parts["policy"] = torch.nn.Linear(4, 2)
    with pytest.raises(
        checkpoint.CheckpointError,
        match=r"holds 'weight' as \(2, 3\), this model trains it as \(2, 4\)",
    ):
        checkpoint.load_newest(tmp_path, **parts)


def test_frozen_weights_are_not_saved_again(tmp_path, parts):
    parts["policy"].weight.requires_grad_(False)
    parts["parts"]["optimizer"] = torch.optim.AdamW([parts["policy"].bias])
    shard = load_file(checkpoint.save(tmp_path, 1, **parts) / "shard-0.safetensors")
    assert shard.keys() == {"model/bias"}


def test_tied_weights_are_saved_once(tmp_path, parts):
    policy = torch.nn.Sequential(
        torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False)
    )
    policy[1].weight = policy[0].weight
    parts["policy"], parts["parts"] = policy, {}
    shard = load_file(checkpoint.save(tmp_path, 1, **parts) / "shard-0.safetensors")
    assert shard.keys() == {"model/0.weight"}


def test_what_a_killed_run_left_is_removed_by_the_next_save(tmp_path, parts):
    (tmp_path / ".partial-step-00000001").mkdir(parents=True)
    (tmp_path / ".partial-step-00000001/shard-0.safetensors").write_bytes(b"half")
    checkpoint.save(tmp_path, 2, **parts)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


class Odd(torch.optim.Optimizer):
    """Remembers tensors of other dtypes and shapes than its parameters have, and numbers."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1, "k": 0})

    def step(self):
        for group in self.param_groups:
            group["k"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter] = {
                        "codes": torch.randint(256, parameter.shape, dtype=torch.uint8),
                        "scale": torch.rand(2, 1, dtype=torch.bfloat16),
                        "rest": torch.randint(99, parameter.shape, dtype=torch.int16),
                        "wide": torch.rand(parameter.shape, dtype=torch.float32),
                        "step": torch.tensor(3.0),
                        "count": 7,
                    }


def test_the_state_of_any_optimizer_comes_back_in_its_own_dtypes(tmp_path, parts):
    """torch's own load_state_dict would make bfloat16 of it all, as the parameters are."""
    policy = torch.nn.Linear(3, 2, dtype=torch.bfloat16)
    policy.weight.grad = torch.ones_like(policy.weight)  # the bias is not used, and so has no state
    first, second = Odd(policy.parameters()), Odd(policy.parameters())
    first.step()
    parts |= {"policy": policy, "parts": {"optimizer": first}}
    checkpoint.save(tmp_path, 1, **parts)
    checkpoint.load_newest(tmp_path, **{**parts, "parts": {"optimizer": second}})
    assert list(second.state) == [policy.weight] and second.param_groups[0]["k"] == 1
    before, after = first.state[policy.weight], second.state[policy.weight]
    assert before.keys() == after.keys() and after["count"] == 7
    for key in before.keys() - {"count"}:
        assert after[key].dtype == before[key].dtype and torch.equal(after[key], before[key])


class Composed(torch.optim.Optimizer):
    """Remembers the gradients in tensors of a class of its own, as 8-bit optimizers do."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    def step(self):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                state = self.state[parameter]
                if not state:
                    state |= {"steps": 0, "both": TwoTensor(torch.zeros(2, 3), torch.ones(2, 3))}
                state["steps"] += 1
                state["both"].a.add_(parameter.grad)
                parameter.data -= 0.1 * state["both"].a


def test_the_state_of_an_optimizer_with_tensors_of_its_own_class_comes_back(tmp_path, parts):
    policy = torch.nn.Linear(3, 2)
    policy.bias.requires_grad_(False)
    parts |= {"policy": policy, "parts": {"optimizer": Composed([policy.weight])}}
    policy(torch.ones(1, 3)).sum().backward()
    parts["parts"]["optimizer"].step()
    weight = policy.weight.detach().clone()
    path = checkpoint.save(tmp_path, 1, **parts)
    names = {"optimizer/weight/both.a", "optimizer/weight/both.b", "model/weight"}
    assert load_file(path / "shard-0.safetensors").keys() == names
    parts["parts"] = {"optimizer": (second := Composed([policy.weight]))}
    checkpoint.load_newest(tmp_path, **parts)
    state = second.state[policy.weight]
    assert torch.equal(policy.weight, weight) and state["steps"] == 1 and policy.weight.grad is None
    assert type(state["both"]) is TwoTensor and torch.equal(state["both"].a, torch.ones(2, 3))


def test_an_optimizer_that_has_taken_no_step_stays_so(tmp_path, parts):
    """All gradients may have been 0 so far."""
    parts["parts"]["optimizer"] = optimizer = torch.optim.AdamW(parts["policy"].parameters())
    checkpoint.save(tmp_path, 1, **parts)
    assert not optimizer.state
    checkpoint.load_newest(tmp_path, **parts)
    assert not optimizer.state


@pytest.fixture
def saver():
    with closing(checkpoint.Saver(background=True)) as saver:
        yield saver


@pytest.fixture
def gate(monkeypatch):
    """Files are written once this is set."""
    gate, write = threading.Event(), storage.write

    def then_write(*args):
        assert gate.wait(60)
        return write(*args)

    monkeypatch.setattr(storage, "write", then_write)
    yield gate
    gate.set()


def test_training_goes_on_while_the_state_as_it_was_is_written(tmp_path, parts, saver, gate):
    before = {
        name: tensor.clone() for name, tensor in capture(parts["policy"], parts["parts"])[0].items()
    }
    following = torch.get_rng_state()
    saver.save(tmp_path, 1, **parts)
    parts["policy"](torch.ones(1, 3)).sum().backward()
    parts["parts"]["optimizer"].step()
    torch.rand(3)
    assert not list(tmp_path.glob("step-*")) and not saver.failed
    gate.set()
    saver.wait()
    assert checkpoint.load_newest(tmp_path, **parts) == 1
    after, _ = capture(parts["policy"], parts["parts"])
    assert before.keys() == after.keys() and all(
        torch.equal(before[name], after[name]) for name in before
    )
    assert torch.equal(torch.get_rng_state(), following)


def test_no_two_checkpoints_are_written_at_once(tmp_path, parts, saver, gate):
    saver.save(tmp_path, 1, **parts)
    threading.Timer(0.5, gate.set).start()
    saver.save(tmp_path, 2, **parts)
    assert (tmp_path / "step-00000001").exists()
    saver.wait()
    assert (tmp_path / "step-00000002").exists()


def test_what_could_not_be_written_in_the_background_is_said_by_the_next_call(
    tmp_path, parts, saver, monkeypatch
):
    saver.save(tmp_path, 1, **parts)
    saver.wait()

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    saver.save(tmp_path, 2, **parts)
    while not saver.failed:
        time.sleep(0.01)
    with pytest.raises(
        checkpoint.CheckpointError,
        match=r"step 2 could.*disk is full .*step-00000001 is intact: make",
    ):
        saver.save(tmp_path, 3, **parts)
    assert not saver.failed and [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
