"""The folder of checkpoints: damage of any file is found, and the one before it is used."""

import json
import shutil

import numpy
import pytest
import torch
from safetensors.torch import load_file

from checkpoints import complete, mutations, rewrite, tensors
from lockstep.checkpoint.folder import (
    find_checkpoints,
    find_newest_valid,
    locate_checkpoint,
    prune,
    read_checkpoint,
    remove_incomplete,
    set_aside_newer,
    verify,
)
from lockstep.checkpoint.tensor_file import DTYPES
from lockstep.checkpoint.writer import CheckpointWriter
from lockstep.kernel.errors import FileError, UsageError

STATE = tensors(4)


def save(folder, *steps, state=STATE, keep=99):
    writer = CheckpointWriter(folder, keep)
    for attempt, step in enumerate(steps):
        writer.save(state, step, attempt)
        writer.wait()
        assert writer.latest.failure == ""
    return writer.latest.path


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    return save(tmp_path_factory.mktemp("run") / "checkpoints", 4)


@pytest.fixture
def folder(tmp_path, template):
    """A folder of checkpoints after 2, 4 and 10 steps."""
    for step in (2, 4, 10):
        shutil.copytree(template, tmp_path / "checkpoints" / f"step-{step}")
    return tmp_path / "checkpoints"


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_rank_reads_its_rows(tmp_path, ranks):
    """As rank 1 of 3, a checkpoint of one rank, or of shards of 4 ranks, of which one is empty."""
    whole = {"weight": torch.randn(7, 300), "bias": torch.randn(7), "other": torch.randn(9)}
    moment = torch.randn(7, 300)
    rows = slice(3, 6)

    def split(value, rank):
        return (
            value
            if ranks == 1
            else {f"shard-{rank}-of-{ranks}": [*value.split(2), value[:0]][rank]}
        )

    writers = [CheckpointWriter(tmp_path, 9) for _ in range(ranks)]
    for rank, writer in reversed([*enumerate(writers)]):
        model = {name: split(value, rank) for name, value in whole.items() if name != "other"}
        optimizer = {"weight": {"exp_avg": split(moment, rank), "step": torch.ones(())}}
        state = STATE | {"model": model | {"other": whole["other"]}, "optimizer": optimizer}
        writer.save(
            state if rank == 0 else {"model": model, "optimizer": optimizer}, 4, 0, (rank, ranks)
        )
    for writer in writers:
        writer.wait()
        assert writer.latest.failure == ""
    wanted = {"weight": ((7, 300), rows), "bias": ((7,), rows), "other": ((3,), slice(0, 1))}
    state = read_checkpoint(writers[0].latest.path, wanted)
    expected = {
        "weight": whole["weight"][rows],
        "bias": whole["bias"][rows],
        "other": whole["other"],
    }
    assert state["model"].keys() == expected.keys()
    assert all(torch.equal(state["model"][name], value) for name, value in expected.items())
    assert torch.equal(state["optimizer"]["weight"]["exp_avg"], moment[rows])
    assert state["optimizer"]["weight"]["step"] == 1
    for tensor in (state["model"]["weight"], state["optimizer"]["weight"]["exp_avg"]):
        assert tensor.untyped_storage().nbytes() == moment[rows].nbytes  # no whole tensor is kept


def test_tensors_of_every_form_are_verified(tmp_path):
    """Verifying reads no values of tensors, which arrays and sparse tensors are made of."""
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[3, 1]]), torch.ones(2), (5,), check_invariants=True
    )
    forms = {
        "array": numpy.arange(3.0),
        "number": numpy.float32(2),
        "sparse": sparse,
        "sum": torch.tensor(1 + 2j, dtype=torch.complex128),
        "empty": torch.empty(0, 3),
        "last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        **{str(dtype): torch.zeros(2, dtype=dtype) for dtype in DTYPES},
    }
    path = save(tmp_path, 3, state=complete(3, optimizer={"w": forms}, scheduler=forms))
    assert verify(path) == ""
    saved = read_checkpoint(path)["optimizer"]["w"]
    assert saved.keys() == forms.keys()
    assert saved["array"].tolist() == [0, 1, 2]
    assert saved["last"].is_contiguous(memory_format=torch.channels_last)


def names(paths):
    return [path.name for path in paths]


def test_a_checkpoint_is_read_as_it_was_saved(folder):
    path = folder / "step-4"
    assert verify(path) == ""
    found = read_checkpoint(path)
    assert found["steps"] == 4
    assert found["stateful"]["meter"]["parts"] == (1, [2])
    assert torch.equal(found["optimizer"]["w"]["exp_avg"], torch.ones(2, 3))
    assert found["optimizer"]["w"]["step"].item() == 4
    assert torch.equal(found["ema"]["w"], STATE["ema"]["w"])
    weights = load_file(path / "model.safetensors")
    assert torch.equal(weights["w"], STATE["model"]["w"])
    assert {each.name for each in path.iterdir()} == {
        "manifest.json", "state.json", "model.safetensors", "optimizer.safetensors",
        "ema.safetensors", "state.safetensors",
    }  # fmt: skip
    assert all(each.stat().st_mode & 0o077 == 0 for each in (path, *path.iterdir()))


FILES = [
    "state.json", "model.safetensors", "optimizer.safetensors", "ema.safetensors",
    "state.safetensors", "manifest.json",
]  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_byte_is_found_wherever_it_is(folder, name):
    file = folder / "step-10" / name
    good = file.read_bytes()
    if name == "manifest.json":  # a name or a checksum; its other content decides nothing
        places = [good.index(b"xxh3") + 9, good.index(b"state.json"), good.index(b"files")]
    else:
        places = [0, 9, len(good) // 3, len(good) // 2, len(good) - 1]
    for place in places:
        file.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        problem = verify(folder / "step-10")
        assert name in problem or (name == "manifest.json" and problem), place
        path, problems = find_newest_valid(folder)
        assert path == folder / "step-4"
        assert problems == [f"the checkpoint {folder / 'step-10'} is damaged: {problem}"]
    file.write_bytes(good)
    assert verify(folder / "step-10") == ""


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kept", [0, 100, None])
def test_truncated_and_missing_files_are_found(folder, name, kept):
    file = folder / "step-10" / name
    if kept is None:
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:kept])
    problem = verify(folder / "step-10")
    assert name in problem
    assert find_newest_valid(folder)[0] == folder / "step-4"
    # without its manifest it does not count as a checkpoint
    assert ("step-10" in names(find_checkpoints(folder))) == (
        name != "manifest.json" or kept is not None
    )


def test_a_format_of_a_later_version(folder):
    manifest = folder / "step-10" / "manifest.json"
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(content | {"format": 2}))
    assert verify(folder / "step-10") == "it has format 2, and this version of lockstep reads 1"


def test_when_all_are_damaged(folder):
    for path in find_checkpoints(folder):
        (path / "model.safetensors").write_bytes(b"")
    path, problems = find_newest_valid(folder)
    assert path is None
    assert [problem.split("step-")[1].split()[0] for problem in problems] == ["10", "4", "2"]
    assert find_newest_valid(folder / "missing") == (None, [])


@pytest.mark.parametrize(
    "state",
    [
        b"", b"[", b"3", b"null", b"[]", b"{}", b'{"a": {"$torch": "ops"}}', b'{"a": NaN}',
        b'{"a": {"$device": "x"}}', b'{"a": {"$tensor": "missing"}}', b'{"a": {"$array": 1}}',
        b'{"a": {"$fraction": "1/0"}}', b'{"a": {"$fraction": "1e999999999"}}', b"[" * 100_000,
        b'{"a": ' * 100_000, b'{"a": ' * 700 + b"1" + b"}" * 700, b'{"a": 1, "a": 1}', b"\xff",
        b'{"a": 1' + b"0" * 9999 + b"}",
    ],
    ids=lambda state: str(state[:25]),
)  # fmt: skip
def test_a_state_that_makes_no_sense_is_one_error(folder, state):
    rewrite(folder / "step-10", "state.json", state)
    assert verify(folder / "step-10") != ""
    with pytest.raises(FileError, match=r"the checkpoint .*step-10 is damaged"):
        read_checkpoint(folder / "step-10")
    path, problems = find_newest_valid(folder)
    assert (path, len(problems)) == (folder / "step-4", 1)


def test_every_damaged_entry_of_a_manifest_is_found(folder):
    """Whatever is not found leaves the same state."""
    path = folder / "step-10"
    manifest = json.loads((path / "manifest.json").read_text())
    for place, text in mutations(manifest):
        (path / "manifest.json").write_text(text)
        assert verify(path) != "", (place, text[:300])
    twice = json.dumps(manifest).replace('"step": 4', '"step": 4, "step": 4')
    assert twice.count('"step"') == 2
    (path / "manifest.json").write_text(twice)
    assert verify(path) != ""


@pytest.mark.parametrize("step", [0, 3, 5, 10])
def test_a_manifest_that_says_another_step(folder, step):
    path = folder / "step-10" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"step": step}))
    assert "step 4" in verify(folder / "step-10")
    assert find_newest_valid(folder)[0] == folder / "step-4"


@pytest.mark.parametrize("name", ["../step-4/state.json", "/dev/zero", "sub/state.json", "", "."])
def test_a_manifest_names_files_of_its_own_folder(folder, name):
    path = folder / "step-10" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"][name] = manifest["files"]["state.json"]
    path.write_text(json.dumps(manifest))
    assert "manifest.json is damaged" in verify(folder / "step-10")


def test_a_damaged_entry_of_a_state_is_found_if_reading_relies_on_it(folder):
    path = folder / "step-10"
    state = json.loads((path / "state.json").read_text())
    for name in state.keys() - {"ema", "ema_updates", "scheduler"}:  # None is one of their values
        for entries in ({**state, name: None}, {**state, name: "x"}):
            rewrite(path, "state.json", json.dumps(entries).encode())
            assert f"its content is invalid: {name} is" in verify(path)
        without = {key: value for key, value in state.items() if key != name}
        rewrite(path, "state.json", json.dumps(without).encode())
        assert f"its content is invalid: {name} is missing" in verify(path)
    for _, text in mutations(state):
        rewrite(path, "state.json", text.encode())
        verify(path)  # raises nothing


def test_files_that_are_exchanged_added_or_taken_away(folder):
    path = folder / "step-10"
    content = {name: (path / name).read_bytes() for name in FILES}
    for name in FILES[:-1]:
        for other in FILES[:-1]:
            if name != other:
                rewrite(path, name, content[other])
                assert verify(path) != "", (name, other)
        for damaged in (b"", content[name] + b" ", content[name][:-1], b"\0" * 64):
            (path / name).write_bytes(damaged)
            assert verify(path) != ""
            if name != "state.json" or damaged != content[name] + b" ":  # spaces end JSON
                rewrite(path, name, damaged)
                assert verify(path) != "", (name, damaged[:20])
        rewrite(path, name, content[name])
        assert verify(path) == ""
        manifest = json.loads((path / "manifest.json").read_text())
        del manifest["files"][name]
        (path / "manifest.json").write_text(json.dumps(manifest))
        assert verify(path) != "", name
        rewrite(path, name, content[name])


def test_newer_versions_may_add_entries(folder):
    path = folder / "step-10"
    state = json.loads((path / "state.json").read_text())
    rewrite(path, "state.json", json.dumps(state | {"new": {"entry": [1]}}).encode())
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"new": None}))
    assert verify(path) == ""


def test_the_newest_is_that_of_the_latest_attempt(folder):
    for name in ("step-10-2", "step-9", "step-10-10", "step-x", "step-11.superseded"):
        shutil.copytree(folder / "step-2", folder / name)
    (folder / "step-12").mkdir()  # without a manifest
    found = names(find_checkpoints(folder))
    assert found == ["step-10-10", "step-10-2", "step-10", "step-9", "step-4", "step-2"]
    prune(folder, 2)
    assert names(find_checkpoints(folder)) == ["step-10-10", "step-10-2"]


def test_what_was_not_completed_is_removed_and_nothing_else(folder):
    for name in (".step-11.3", "step-12", ".step-x", "mine"):
        (folder / name).mkdir()
    (folder / ".step-11.3" / "model.safetensors").touch()
    remove_incomplete(folder)
    left = {path.name for path in folder.iterdir()}
    assert left == {"step-2", "step-4", "step-10", ".step-x", "mine"}
    remove_incomplete(folder / "missing")


def test_checkpoints_of_what_is_not_continued_are_set_aside(folder, tmp_path):
    renamed = set_aside_newer(folder, folder / "step-2", 2)
    assert names(renamed) == ["step-10.superseded", "step-4.superseded"]
    assert names(find_checkpoints(folder)) == ["step-2"]
    assert locate_checkpoint(renamed[0]) == (renamed[0], folder)
    shutil.copytree(folder / "step-2", folder / "step-4")
    assert names(set_aside_newer(folder, tmp_path / "other" / "step-3", 3)) == [
        "step-4.superseded-2"
    ]
    assert set_aside_newer(folder, folder / "step-2", 2) == []


def test_a_checkpoint_is_found_by_path_run_or_name(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "night"
    run.mkdir(parents=True)
    shutil.move(folder, run / "checkpoints")
    folder = run / "checkpoints"
    assert locate_checkpoint(folder / "step-4") == (folder / "step-4", folder)
    assert locate_checkpoint(run) == (None, folder)
    assert locate_checkpoint(folder) == (None, folder)
    assert [each.resolve() for each in locate_checkpoint("night")[1:]] == [folder]
    (tmp_path / "night").mkdir()  # such as the data of that name
    assert locate_checkpoint("night")[1].resolve() == folder
    (tmp_path / "runs" / "checkpoints-old").mkdir()
    assert locate_checkpoint("checkpoints-old")[1].name == "checkpoints"
    with pytest.raises(UsageError, match="there is no run and no checkpoint at nowhere"):
        locate_checkpoint("nowhere")
