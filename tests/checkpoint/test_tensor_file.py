"""Tensor files are safetensors, aligned, with a checksum of all that was written."""

import io
import json

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, load_file

from lockstep.checkpoint import tensor_file
from lockstep.checkpoint.tensor_file import DTYPES, checksum_file, write_tensors

READABLE = [each for each in DTYPES if each is not torch.complex64]


def write(tensors, **options):
    file = io.BytesIO()
    size, checksum = write_tensors(file, tensors, **options)
    text = file.getvalue()
    assert size == len(text)
    assert checksum == xxhash.xxh3_128_hexdigest(text)
    return text


def make(dtype, *shape):
    values = torch.randint(0, 2, shape, dtype=torch.uint8)
    return (
        values.to(dtype) if dtype is not torch.complex64 else torch.complex(*[values.float()] * 2)
    )


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(READABLE), st.lists(st.integers(0, 4), max_size=3)),
        max_size=8,
    )
)
def test_files_are_read_by_safetensors_and_every_tensor_is_aligned(shapes):
    tensors = {name: make(dtype, *shape) for name, (dtype, shape) in shapes.items()}
    text = write(tensors)
    length = int.from_bytes(text[:8], "little")
    assert length % 8 == 0
    header = json.loads(text[8 : 8 + length])
    for name, tensor in tensors.items():
        assert header[name]["data_offsets"][0] % tensor.element_size() == 0
    found = load(text)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert found[name].tolist() == tensor.tolist()


def test_a_file_on_disk_has_the_checksum_that_was_returned(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_file, "PIECE", 100)  # smaller than a tensor, no multiple of one
    tensors = {
        "weight": torch.randn(7, 11),
        "mean": torch.randn(3).bfloat16(),
        "n": torch.tensor(4),
    }
    with (tmp_path / "model.safetensors").open("wb") as file:
        _, checksum = write_tensors(file, tensors)
    with (tmp_path / "model.safetensors").open("rb") as file:
        assert checksum_file(file) == checksum
    found = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_the_check_is_called_before_every_piece(monkeypatch):
    monkeypatch.setattr(tensor_file, "PIECE", 100)
    calls = []

    def check():
        calls.append(None)
        if len(calls) == 3:
            raise InterruptedError

    file = io.BytesIO()
    with pytest.raises(InterruptedError):
        write_tensors(file, {"weight": torch.ones(100)}, check)
    assert file.getvalue().endswith(torch.ones(25).numpy().tobytes())
    assert len(file.getvalue()) < 400
