"""The writer: a checkpoint is complete or absent, and training does not depend on it."""

import errno
import json
import os
import resource
import signal
import threading

import pytest
import torch
from safetensors.torch import load_file

from checkpoints import complete
from lockstep.checkpoint import folder as folder_module
from lockstep.checkpoint import writer as writer_module
from lockstep.checkpoint.folder import (
    find_checkpoints,
    find_newest_valid,
    read_checkpoint,
    remove_incomplete,
    verify,
)
from lockstep.checkpoint.writer import CheckpointWriter
from lockstep.kernel.errors import UsageError

DEADLINE = 30.0


def state(value, size=600):
    return complete(
        value,
        model={"w": torch.full((size,), float(value))},
        optimizer={"w": {"exp_avg": torch.full((size,), float(value))}},
        counts=torch.tensor([value]),
    )


def write(writer, step, attempt=0):
    writer.save(state(step), step, attempt)
    writer.wait()
    return writer.latest


class Gate:
    """Stops the writer's thread at a call until it is opened."""

    def __init__(self, monkeypatch, name):
        self.reached = threading.Event()
        self.opened = threading.Event()
        original = getattr(writer_module, name)

        def wait(*arguments, **options):
            self.reached.set()
            assert self.opened.wait(DEADLINE)
            return original(*arguments, **options)

        monkeypatch.setattr(writer_module, name, wait)


def test_only_the_latest_are_kept(tmp_path):
    writer = CheckpointWriter(tmp_path / "checkpoints", 2)
    for step in (2, 4, 6, 8):
        assert write(writer, step, step).failure == ""
    assert [path.name for path in find_checkpoints(writer.folder)] == ["step-8", "step-6"]
    assert len(list(writer.folder.iterdir())) == 2
    assert [each.step for each in writer.take_saved()] == [2, 4, 6, 8]
    assert writer.take_saved() == []
    latest = writer.latest
    assert latest.path == writer.folder / "step-8"
    assert 0 < latest.stall <= latest.seconds
    assert latest.size == sum(
        each.stat().st_size for each in latest.path.iterdir() if each.name != "manifest.json"
    )


@pytest.mark.parametrize("times", [1, 2])
def test_a_file_with_other_bytes_is_written_again(tmp_path, monkeypatch, times):
    original = writer_module.write_tensors
    writer = CheckpointWriter(tmp_path / "checkpoints", 9)
    flips = iter(range(times))

    def flip(file, tensors, check):
        size, checksum = original(file, tensors, check)
        if "w" in tensors and next(flips, None) is not None:
            os.pwrite(file.fileno(), b"\xff", size - 1)
        return size, checksum

    monkeypatch.setattr(writer_module, "write_tensors", flip)
    first, *others = [write(writer, step) for step in range(4)]
    assert first.rewritten == "model.safetensors"
    assert bool(first.failure) == (times == 2)
    assert not any(saved.rewritten or saved.failure for saved in others)
    assert all(verify(saved.path) == "" for saved in writer.take_saved() if not saved.failure)


def test_the_same_step_twice(tmp_path):
    writer = CheckpointWriter(tmp_path / "checkpoints", 5)
    assert [write(writer, 3, attempt).path.name for attempt in range(3)] == [
        "step-3", "step-3-2", "step-3-3",
    ]  # fmt: skip


def test_tensors_may_change_once_save_has_returned(tmp_path, monkeypatch):
    gate = Gate(monkeypatch, "_write_files")
    writer = CheckpointWriter(tmp_path, 3)
    value = state(1)
    writer.save(value, 1, 1)
    assert gate.reached.wait(DEADLINE)
    assert writer.is_busy
    for each in (value["model"]["w"], value["optimizer"]["w"]["exp_avg"], value["counts"]):
        each.fill_(99)
    gate.opened.set()
    writer.wait()
    assert not writer.is_busy
    found = read_checkpoint(tmp_path / "step-1")
    assert found["model"]["w"].unique().tolist() == [1]
    assert found["optimizer"]["w"]["exp_avg"].unique().tolist() == [1]
    assert found["counts"].tolist() == [1]


def test_memory_is_used_again(tmp_path):
    writer = CheckpointWriter(tmp_path, 3)
    places = []
    for step in (1, 2):
        write(writer, step)
        places.append({name: each.data_ptr() for name, each in writer._buffers.items()})
    assert places[0] == places[1]
    writer.save(state(3, size=700), 3, 3)  # other shapes get other memory
    writer.wait()
    assert read_checkpoint(tmp_path / "step-3")["model"]["w"].tolist() == [3.0] * 700
    assert read_checkpoint(tmp_path / "step-2")["model"]["w"].tolist() == [2.0] * 600


def test_a_state_that_cannot_be_encoded_raises_at_once(tmp_path):
    writer = CheckpointWriter(tmp_path, 3)
    with pytest.raises(UsageError, match=r"stateful\.meter is a .*object"):
        writer.save({"stateful": {"meter": object()}}, 1, 1)
    assert list(tmp_path.iterdir()) == []


# --- killed while it writes -------------------------------------------------------------------


def die_at(number, folder):
    """Replace what changes the disk; the call with this number kills the process."""
    calls = 0

    def counting(function):
        def call(*arguments, **options):
            nonlocal calls
            calls += 1
            if calls == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return call

    for name in ("create_file", "make_folder", "sync_folder"):
        setattr(writer_module, name, counting(getattr(writer_module, name)))
    for name in ("rename", "fsync", "unlink", "rmdir"):
        setattr(os, name, counting(getattr(os, name)))
    folder_module.Path.unlink = counting(folder_module.Path.unlink)


def child_writes(number, writer, step):
    """Write in a child that is killed at a call; return whether it came to the end."""
    if (pid := os.fork()) == 0:
        try:
            signal.alarm(60)
            die_at(number, writer.folder)
            saved = write(writer, step, step)
            os._exit(0 if not saved.failure else 3)
        finally:
            os._exit(9)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, -signal.SIGKILL)
    return status == 0


def test_wherever_the_process_is_killed_there_is_a_whole_checkpoint(tmp_path):
    """With keep=1 the older one is removed only when the newer is complete."""
    newest = []
    for number in range(1, 99):
        folder = tmp_path / str(number)
        writer = CheckpointWriter(folder, 1)
        write(writer, 1)
        is_done = child_writes(number, writer, 2)
        path, problems = find_newest_valid(folder)
        assert (path is not None, problems) == (True, []), number
        assert read_checkpoint(path)["steps"] == int(path.name[-1])
        newest.append(path.name)
        remove_incomplete(folder)
        assert [each.name for each in folder.iterdir()] == [path.name] or path.name == "step-2"
        assert not [each for each in folder.iterdir() if each.name.startswith(".")]
        if is_done:
            break
    assert is_done
    assert newest == sorted(newest)  # the older one first, then the newer
    assert newest.count("step-1") > 10  # calls that were interrupted before the renaming
    assert newest.count("step-2") > 3


# --- a disk that is full, failures, parts -------------------------------------------------------


@pytest.mark.parametrize("limit", [0, 100, 2500])
def test_a_full_disk_leaves_nothing_and_the_next_one_is_written(tmp_path, limit):
    """Also where only a part of the last piece fits, which a single write does not report."""
    writer = CheckpointWriter(tmp_path, 3)
    assert write(writer, 1, 1).failure == ""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        saved = write(writer, 2, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert saved.failure == os.strerror(errno.EFBIG)
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    assert write(writer, 3, 3).failure == ""
    assert [each.failure != "" for each in writer.take_saved()] == [False, True, False]
    assert verify(tmp_path / "step-3") == ""


def test_a_folder_that_cannot_be_created(tmp_path):
    (tmp_path / "file").touch()
    writer = CheckpointWriter(tmp_path / "file" / "checkpoints", 3)
    assert write(writer, 1).failure == os.strerror(errno.EEXIST)


def test_an_abandoned_checkpoint_is_removed(tmp_path, monkeypatch):
    writer = CheckpointWriter(tmp_path, 3)
    write(writer, 1, 1)
    gate = Gate(monkeypatch, "sync_folder")  # all files are there, with the manifest
    writer.save(state(2), 2, 2)
    assert gate.reached.wait(DEADLINE)
    assert (tmp_path / ".step-2.2" / "manifest.json").exists()
    writer._abandoned.set()
    gate.opened.set()
    writer.abandon()
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    assert [each.step for each in writer.take_saved()] == [1]
    writer.abandon()  # nothing to abandon
    assert write(writer, 3, 3).failure == ""


def part(number, value):
    common = complete(7) if number == 0 else {}
    model = {f"layer{number}": torch.full((3,), value)}
    return {**common, "model": model, f"only{number}": value}


def test_parts_of_several_ranks_make_one_checkpoint(tmp_path):
    writers = [CheckpointWriter(tmp_path, 3) for _ in range(3)]
    writers[0].save(part(0, 0.5), 7, 1, (0, 3))
    writers[2].save(part(2, 2.5), 7, 1, (2, 3))
    writers[2].wait()
    assert find_checkpoints(tmp_path) == []  # a part is missing
    assert writers[0].is_busy
    writers[1].save(part(1, 1.5), 7, 1, (1, 3))
    for writer in writers:
        writer.wait()
        assert writer.latest.failure == ""
    (path,) = find_checkpoints(tmp_path)
    assert verify(path) == ""
    found = read_checkpoint(path)
    assert {name: each[0].item() for name, each in found["model"].items()} == {
        "layer0": 0.5, "layer1": 1.5, "layer2": 2.5,
    }  # fmt: skip
    assert [found[f"only{number}"] for number in range(3)] == [0.5, 1.5, 2.5]
    index = json.loads((path / "model.safetensors.index.json").read_text())
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(path / file)[name], found["model"][name])
    assert not list(path.glob("part*"))
    assert [each.name for each in tmp_path.iterdir()] == ["step-7"]


def test_a_part_that_never_comes_is_a_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(writer_module, "PART_TIMEOUT", 0.05)
    writer = CheckpointWriter(tmp_path, 3)
    writer.save(part(0, 0.5), 7, 1, (0, 2))
    writer.wait()
    assert writer.latest.failure == "stage 1 could not write its part"
    assert list(tmp_path.iterdir()) == []


def test_a_part_that_failed_is_a_failure_at_once(tmp_path, monkeypatch):
    """Its folder is gone, so rank 0 does not wait for the timeout."""
    first = CheckpointWriter(tmp_path, 3)
    second = CheckpointWriter(tmp_path, 3)
    gate = Gate(monkeypatch, "_await_parts")
    first.save(part(0, 0.5), 7, 1, (0, 2))
    assert gate.reached.wait(DEADLINE)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        second.save(part(1, 1.5), 7, 1, (1, 2))
        second.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    gate.opened.set()
    first.wait()
    assert second.latest.failure == os.strerror(errno.EFBIG)
    assert first.latest.failure == "stage 1 could not write its part"
    assert list(tmp_path.iterdir()) == []


def test_waiting_for_a_slow_disk_is_said(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(writer_module, "REMARK_AFTER", 0.05)
    gate = Gate(monkeypatch, "_write_files")
    writer = CheckpointWriter(tmp_path, 3)
    writer.save(state(1), 1, 1)
    said = threading.Event()

    def log(sentence):
        assert sentence == (
            f"still writing a checkpoint to {tmp_path}; check that the disk is reachable and not "
            "too slow"
        )
        said.set()
        gate.opened.set()

    monkeypatch.setattr(writer_module, "log", log)
    writer.wait()
    assert said.is_set()
    assert verify(tmp_path / "step-1") == ""


@pytest.mark.parametrize("kind", ["pruned", "temporary", "left by a killed run"])
def test_a_link_is_removed_and_never_what_it_leads_to(tmp_path, kind):
    archive = tmp_path / "archive"
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    write(CheckpointWriter(archive, 9), 1)
    kept = {path: path.read_bytes() for path in archive.glob("step-1/*")}
    name = {"pruned": "step-1", "temporary": ".step-2.0"}.get(kind, ".step-3.7")
    link = folder / name
    link.symlink_to(archive / "step-1")
    writer = CheckpointWriter(folder, 1)
    if kind == "left by a killed run":
        remove_incomplete(folder)
    write(writer, 2)
    assert writer.latest.failure == ""
    assert not link.is_symlink()
    assert verify(writer.latest.path) == ""
    assert kept
    assert {path: path.read_bytes() for path in archive.glob("step-1/*")} == kept
    assert sorted(path.name for path in folder.iterdir()) == [writer.latest.path.name]


def test_a_link_to_a_folder_that_is_gone_is_in_nobodys_way(tmp_path):
    (tmp_path / "step-2").symlink_to(tmp_path / "not mounted")
    writer = CheckpointWriter(tmp_path, 1)
    remove_incomplete(tmp_path)
    write(writer, 2)
    assert (writer.latest.failure, writer.latest.path.name) == ("", "step-2-2")
    assert (tmp_path / "step-2").is_symlink()
