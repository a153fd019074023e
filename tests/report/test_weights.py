"""Comparison of weights: the first tensor that differs, and by how much."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from lockstep.errors import FileError
from lockstep.report.weights import common_weights_file, first_difference


@pytest.fixture
def weights(tmp_path):
    """Write tensors into a file of its own, and return its path."""

    def write(name, tensors):
        path = tmp_path / name / "weights.safetensors"
        path.parent.mkdir(exist_ok=True)
        save_file(tensors, path)
        return path

    return write


def tensors(**changed):
    return {
        "layer.10.weight": torch.arange(6.0).reshape(2, 3),
        "layer.2.weight": torch.ones(4, dtype=torch.bfloat16),
        "counter": torch.tensor(7),
    } | changed


def test_identical_files_have_no_difference(weights):
    assert first_difference(weights("a", tensors()), weights("b", tensors())) is None


def test_the_first_differing_tensor_and_its_distance(weights):
    other = torch.arange(6.0).reshape(2, 3)
    other[1, 2] += 0.5
    changed = {"layer.10.weight": other, "layer.2.weight": torch.zeros(4, dtype=torch.bfloat16)}
    found = first_difference(weights("a", tensors()), weights("b", tensors(**changed)))
    assert (found.tensor, found.how) == (
        "layer.2.weight",
        "differs in 4 of 4 elements, by at most 1",
    )
    assert (found.count, found.total) == (2, 3)
    found = first_difference(
        weights("c", tensors()), weights("d", tensors(**{"layer.10.weight": other}))
    )
    assert found.tensor == "layer.10.weight"
    assert found.how == "differs in 1 of 6 elements, by at most 0.5"


def test_negative_zero_differs(weights):
    zero = {"counter": torch.zeros(2)}
    minus = {"counter": -torch.zeros(2)}
    found = first_difference(weights("a", tensors(**zero)), weights("b", tensors(**minus)))
    assert found.how == "differs in the sign of a zero or the bits of a NaN"


def test_shapes_types_and_missing_tensors(weights):
    a = weights("a", tensors())
    assert "has shape [] in the first run and [1]" in (
        first_difference(a, weights("b", tensors(counter=torch.tensor([7])))).how
    )
    assert "has dtype I64" in (
        first_difference(a, weights("c", tensors(counter=torch.tensor(7.0)))).how
    )
    fewer = tensors()
    del fewer["counter"]
    assert first_difference(a, weights("d", fewer)).how == "is not in the second run"
    assert first_difference(weights("d", fewer), a).how == "is not in the first run"


@pytest.mark.parametrize(
    "content", [b"", b"\x05", b"\xff" * 8, b"\x02\0\0\0\0\0\0\0[]", b"{}" * 30]
)
def test_a_damaged_file_raises_an_error(weights, tmp_path, content):
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(FileError, match="damaged, or not a safetensors file"):
        first_difference(weights("a", tensors()), tmp_path / "x.safetensors")


def test_a_truncated_file_raises_an_error(weights):
    a, b = weights("a", tensors()), weights("b", tensors())
    b.write_bytes(b.read_bytes()[:-3])
    with pytest.raises(FileError, match="damaged, or not a safetensors file"):
        first_difference(a, b)


def test_the_last_common_file_is_compared(tmp_path):
    for name, files in {"a": ["step-9", "step-10", "step-11"], "b": ["step-9", "step-10"]}.items():
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / f"{file}.safetensors").write_bytes(b"")
    (tmp_path / "c").mkdir()
    assert common_weights_file(tmp_path / "a", tmp_path / "b") == "step-10.safetensors"
    assert common_weights_file(tmp_path / "a", tmp_path / "c") is None


def test_a_large_difference_does_not_overflow(weights):
    huge = torch.tensor([3e38, -3e38])
    found = first_difference(
        weights("a", {"w": huge}), weights("b", {"w": -huge * np.float32(1.0)})
    )
    assert "by at most 6e+38" in found.how
