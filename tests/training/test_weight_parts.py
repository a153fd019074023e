"""Weights in several files: loaded and saved by ranks of which none holds the whole model."""

from __future__ import annotations

import errno
import json
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

import lockstep as ls
from lockstep.kernel.errors import FileError, UsageError
from lockstep.sharded_tensors import local_part
from lockstep.tools.plan.live_tensors import LiveTensors
from lockstep.training import weights_file
from lockstep.training.weights_file import plan_parts, save_from_rank0

WIDTH = 64


class Model(nn.Module):
    """Layers, a tied weight, a saved buffer and one that is not saved."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.words = nn.Embedding(5, WIDTH)
        self.head = nn.Linear(WIDTH, 5, bias=False)
        self.head.weight = self.words.weight
        scale = torch.arange(4.0, device="cpu")
        self.register_buffer("scale", scale, persistent=False)


def build():
    torch.manual_seed(3)
    model = Model()
    model.norm.running_mean.fill_(2.5)
    return model


def save_like_hugging_face(folder, model):
    """Write three files with an index, without the second name of the tied weight."""
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "head.weight"}
    names = sorted(state)
    index = {}
    for number in range(3):
        file = f"model-{number + 1:05d}-of-00003.safetensors"
        own = {name: state[name] for name in names[number::3]}
        save_file(own, folder / file)
        index |= dict.fromkeys(own, file)
    content = {"metadata": {"total_size": 1}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))


def equal(model, other):
    ours = model.state_dict()
    theirs = other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)


@given(st.dictionaries(st.text(max_size=3), st.integers(0, 30), max_size=9), st.integers(1, 40))
def test_parts_are_full_and_in_order(sizes, limit):
    parts = plan_parts(sizes, limit)
    assert [name for part in parts for name in part] == [*sizes]
    totals = [sum(sizes[name] for name in part) for part in parts]
    assert all(total <= limit or len(part) == 1 for total, part in zip(totals, parts, strict=True))
    for total, part in zip(totals, parts[1:], strict=False):
        assert total + sizes[part[0]] > limit  # the next tensor did not fit


@pytest.mark.parametrize("on_meta", [False, True])
@pytest.mark.parametrize("name", ["", "model.safetensors.index.json"])
def test_a_whole_model(tmp_path, on_meta, name):
    saved = build()
    save_like_hugging_face(tmp_path, saved)
    with torch.device("meta" if on_meta else "cpu"):
        model = Model()
    ls.load_weights(model, tmp_path / name)
    assert equal(model, saved)
    assert model.head.weight is model.words.weight
    assert model.scale.tolist() == [0, 1, 2, 3]


def test_a_single_file(tmp_path):
    saved = nn.Linear(3, 4)
    model = nn.Linear(3, 4)
    save_file(saved.state_dict(), tmp_path / "model.safetensors")
    for path in (tmp_path, tmp_path / "model.safetensors"):
        nn.init.zeros_(model.weight)
        ls.load_weights(model, path)
        assert equal(model, saved)


def fill_disk(file, tensors, values):
    next(values)  # the other ranks gather the rest, too
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def sharded_model(*sizes):
    """Return a model without memory, sharded over a mesh."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])
    with torch.device("meta"):
        model = Model()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def load_shards(folder):
    """Load into a sharded model without memory; return its state and the most bytes held."""
    model = sharded_model(ls.world_size())
    copied = sharded_model(ls.world_size(), 1)
    loading = LiveTensors()
    saving = LiveTensors()
    with loading:
        ls.load_weights(model, folder)
    index = folder / "again.safetensors.index.json"
    weights_file.PART_BYTES = 6 * 4 * WIDTH * WIDTH
    state = model.state_dict()
    saving.ignore(state.values())
    with saving:
        save_from_rank0(index, state, None)
    broken = folder / "broken.safetensors.index.json"
    broken.write_text("of older weights")
    weights_file.write_tensors = fill_disk
    with pytest.raises(FileError, match=r"broken-00001-of-.*No space left"):
        save_from_rank0(broken, state, None)
    assert not broken.exists()
    whole = {name: weights_file.gather(tensor).detach() for name, tensor in state.items()}
    ls.load_weights(copied, folder)  # two copies, each of one shard
    for name, tensor in copied.state_dict().items():
        assert torch.equal(local_part(tensor), whole[name])
    return whole, model.scale.tolist(), loading.peak, saving.peak


def test_no_rank_holds_the_whole_model(tmp_path, ranks):
    saved = build()
    save_like_hugging_face(tmp_path, saved)
    size = sum(tensor.nbytes for tensor in saved.state_dict().values())
    for state, scale, loading, saving in ranks(load_shards, 2, tmp_path):
        assert all(torch.equal(state[name], value) for name, value in saved.state_dict().items())
        assert scale == [0, 1, 2, 3]
        # The shards of this rank and rows of a few tensors; the last tensor and the next one.
        assert loading < 0.7 * size
        assert saving < 0.55 * size
    index = json.loads((tmp_path / "again.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == size
    files = sorted({*index["weight_map"].values()})
    assert files == [
        f"again-{n + 1:05d}-of-{len(files):05d}.safetensors" for n in range(len(files))
    ]
    assert len(files) == 2
    written = {}
    for file in files:
        written |= load_file(tmp_path / file)
    assert {name: index["weight_map"][name] for name in written} == index["weight_map"]
    assert all(torch.equal(written[name], value) for name, value in saved.state_dict().items())


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (lambda f: f.unlink(), FileError, r"model.safetensors.index.json cannot be read|no file"),
        (lambda f: f.write_text("{}"), FileError, "is damaged, or not an index"),
        (
            lambda f: f.write_text('{"weight_map": {"weight": "../weights.safetensors"}}'),
            FileError,
            "is damaged, or not an index",
        ),
        (
            lambda f: f.write_text('{"weight_map": {"weight": "a.safetensors"}}'),
            UsageError,
            r"has no bias, unlike the Linear \(1 names are missing, 0 are unknown\)",
        ),
        (
            lambda f: f.write_text(
                '{"weight_map": {"weight": "a.safetensors", "bias": "a.safetensors"}}'
            ),
            FileError,
            "there is no file .*a.safetensors",
        ),
    ],
)
def test_damaged_files(tmp_path, change, error, said):
    file = tmp_path / "model.safetensors.index.json"
    file.touch()
    change(file)
    with pytest.raises(error, match=said):
        ls.load_weights(nn.Linear(2, 2), file)


def test_other_models(tmp_path):
    save_file(nn.Linear(3, 4).state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(
        UsageError, match=r"weight has the shape \[4, 3\], and the model has \[4, 2"
    ):
        ls.load_weights(nn.Linear(2, 4), tmp_path)
    with pytest.raises(UsageError, match=r"has a tensor bias, unlike the Linear"):
        ls.load_weights(nn.Linear(3, 4, bias=False), tmp_path)
    with torch.device("meta"):
        model = nn.Linear(3, 4)
        model.register_buffer("mask", torch.ones(2), persistent=False)
    with pytest.raises(UsageError, match=r"the buffer mask is on the meta device"):
        ls.load_weights(model, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no safetensors")
    with pytest.raises(FileError, match=r"cannot be read as safetensors"):
        ls.load_weights(nn.Linear(3, 4), tmp_path)
