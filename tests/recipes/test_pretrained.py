"""Weights from a file: the formats and names of published weights, and one sentence otherwise."""

import argparse
import collections
import contextlib
import random

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import lockstep as ls
from lockstep.kernel.errors import FileError, LockstepError, UsageError
from lockstep.tools.recipes.pretrained import load_weights, read_weights
from lockstep.tools.recipes.resnet import BasicBlock, ResNet
from lockstep.tools.recipes.vision_transformer import VisionTransformer


def resnet(classes=3, seed=0):
    torch.manual_seed(seed)
    return ResNet((1,), classes, width=2, block=BasicBlock)


def load(model, path, *, has_new_head=False):
    load_weights(model, path, head="fc", network="resnet18", has_new_head=has_new_head)


def prefixed(state):
    return {f"module.{name}": each for name, each in state.items()}


def example(state):  # of the checkpoints that the example of ImageNet writes
    return {"epoch": 3, "arch": "resnet18", "state_dict": prefixed(state), "best_acc1": 1.0}


def reference(state):  # of torchvision's training script
    return {"model": collections.OrderedDict(state), "args": argparse.Namespace(lr=0.1)}


def without_counters(state):
    return {name: each for name, each in state.items() if "num_batches" not in name}


@pytest.mark.parametrize("form", [dict, prefixed, example, reference, without_counters])
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_every_form_of_a_state_dict_is_read(tmp_path, form, suffix):
    wanted, path = resnet(seed=1), tmp_path / f"weights{suffix}"
    content = form(wanted.state_dict())
    if suffix == ".pth":
        torch.save(content, path)
    elif form in (example, reference):
        return  # safetensors hold tensors only
    else:
        save_file(content, path)
    model = resnet()
    load(model, path)
    assert ls.digest(model) == ls.digest(wanted)


def test_a_new_head_keeps_its_own_initial_weights(tmp_path):
    trained = resnet(classes=5, seed=1)
    torch.save(trained.state_dict(), tmp_path / "five.pth")
    model, fresh = resnet(), resnet()
    with pytest.raises(UsageError, match="classifies 5 classes, the data has 3: add --new-head"):
        load(model, tmp_path / "five.pth")
    with pytest.raises(UsageError, match="3: evaluate it on data with the classes that"):
        load_weights(model, tmp_path / "five.pth", head="fc", network="a", is_trained=False)
    load(model, tmp_path / "five.pth", has_new_head=True)
    assert torch.equal(model.fc.weight, fresh.fc.weight)
    assert torch.equal(model.conv1.weight, trained.conv1.weight)


def transformer(size):
    return VisionTransformer(size, 16, 1, 2, width=8, inner=16, classes=3)


def test_old_names_of_transformers_and_another_size(tmp_path):
    state = {
        name.replace("mlp.0.", "mlp.linear_1.").replace("mlp.3.", "mlp.linear_2."): each
        for name, each in transformer(64).state_dict().items()
    }
    torch.save(state, tmp_path / "old.pth")
    options = {"head": "heads.head", "network": "vit"}
    load_weights(transformer(64), tmp_path / "old.pth", **options)
    with pytest.raises(UsageError, match="images of 4 x 4 patches, so give --size 64"):
        load_weights(transformer(32), tmp_path / "old.pth", **options)


class Anything:
    pass


@pytest.mark.parametrize(
    ("content", "error", "sentence"),
    [
        (None, FileError, "there is no file "),
        (b"no weights", FileError, "is damaged, or has objects other than tensors"),
        (b"", FileError, "cannot be read as a file of torch.save"),
        ({"model": Anything()}, FileError, "which are not loaded, because they can run code"),
        ({}, FileError, "has no state dict"),
        ({"epoch": 3}, FileError, "the entry 'epoch' is a int, not a tensor"),
        (nn.Linear(2, 2).state_dict(), UsageError, "has no conv1.weight, which resnet18 needs"),
        (resnet().state_dict() | {"a": torch.ones(1)}, UsageError, "has a, which resnet18 does"),
        (
            resnet().state_dict() | {"bn1.weight": torch.ones(7)},
            UsageError,
            r"bn1.weight has the shape \[7\], and resnet18 has \[2\] here",
        ),
    ],
    ids=["missing", "text", "empty", "object", "nothing", "no tensor", "other", "more", "shape"],
)
def test_a_file_without_these_weights_gets_one_sentence(tmp_path, content, error, sentence):
    path = tmp_path / "weights.pth"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    with pytest.raises(error, match=sentence) as raised:
        load(resnet(), path)
    assert "\n" not in str(raised.value)


def test_damaged_safetensors_and_checkpoints_are_named(tmp_path):
    (tmp_path / "weights.safetensors").write_text("no weights")
    (tmp_path / "step-1").mkdir()
    for name in ("weights.safetensors", "step-1"):
        with pytest.raises(LockstepError, match=name):
            read_weights(tmp_path / name)


@pytest.mark.parametrize("suffix", [".pth", ".old.pth", ".safetensors"])
def test_a_damaged_file_is_one_error(tmp_path, suffix):
    """Torch's readers raise AssertionError, IndexError, struct.error and others."""
    path, state = tmp_path / f"weights{suffix}", {"w": torch.ones(3), "b": torch.zeros(2, 2)}
    if suffix == ".safetensors":
        save_file(state, path)
    else:
        torch.save(state, path, _use_new_zipfile_serialization=suffix == ".pth")
    good, draw = path.read_bytes(), random.Random(1)
    for _ in range(150):
        content = bytearray(good)
        content[draw.randrange(len(good))] = draw.randrange(256)
        path.write_bytes(content[: draw.choice([None, None, draw.randrange(len(good))])])
        with contextlib.suppress(FileError):
            read_weights(path)
