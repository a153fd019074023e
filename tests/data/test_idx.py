import gzip
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.datasets import find_idx, read_idx, read_images_and_labels
from lockstep.kernel.errors import FileError

PIXELS = bytes(range(24))


def idx(values: bytes, *sizes: int) -> bytes:
    return bytes([0, 0, 8, len(sizes)]) + struct.pack(f">{len(sizes)}I", *sizes) + values


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_plain_and_gzipped_files_read_alike(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"images{suffix}"
    data = idx(PIXELS, 4, 3, 2)
    path.write_bytes(gzip.compress(data) if suffix else data)
    tensor = read_idx(path, 3)
    assert tensor.dtype == torch.uint8
    assert torch.equal(tensor, torch.arange(24, dtype=torch.uint8).view(4, 3, 2))
    assert find_idx(tmp_path, "images") == path
    assert find_idx(tmp_path, "labels") is None


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "starts with nothing, not 00000803"),
        (b"GIF89a", "starts with 47494638, not 00000803"),
        (idx(PIXELS, 24), "starts with 00000801, not 00000803"),
        (idx(PIXELS, 4, 3, 2)[:9], "is truncated in its header, after 9 of 16 bytes"),
        (idx(PIXELS[:-1], 4, 3, 2), "declares 4 x 3 x 2 bytes, but contains 23"),
        (idx(PIXELS + b"!", 4, 3, 2), "declares 4 x 3 x 2 bytes, but contains 25"),
        (idx(b"", 0, 28, 28), "is empty"),
    ],
)
def test_a_file_that_is_wrong_is_named(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "images"
    path.write_bytes(data)
    with pytest.raises(FileError, match=words) as caught:
        read_idx(path, 3)
    assert str(path) in str(caught.value)


@given(st.integers(0, len(gzip.compress(idx(PIXELS, 4, 3, 2))) - 1))
def test_a_gzip_file_truncated_anywhere_is_named(
    tmp_path_factory: pytest.TempPathFactory, length: int
) -> None:
    path = tmp_path_factory.mktemp("idx") / "images.gz"
    path.write_bytes(gzip.compress(idx(PIXELS, 4, 3, 2))[:length])
    with pytest.raises(FileError, match=r"images\.gz"):
        read_idx(path, 3)


@pytest.mark.parametrize("position", [0, 12, -6])
def test_a_damaged_gzip_file_is_named(tmp_path: Path, position: int) -> None:
    path = tmp_path / "images.gz"
    data = bytearray(gzip.compress(idx(PIXELS, 4, 3, 2)))
    data[position] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(FileError, match=r"images\.gz is a damaged or truncated gzip file"):
        read_idx(path, 3)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"cannot read .*nowhere: No such file or directory"):
        read_idx(tmp_path / "nowhere", 1)
    with pytest.raises(FileError, match="Is a directory"):
        read_idx(tmp_path, 1)


def write_pair(folder: Path, labels: bytes) -> tuple[Path, Path]:
    images = folder / "images"
    images.write_bytes(idx(PIXELS, 4, 3, 2))
    (folder / "labels").write_bytes(idx(labels, len(labels)))
    return images, folder / "labels"


def test_a_pair_is_read_together(tmp_path: Path) -> None:
    images, labels = read_images_and_labels(*write_pair(tmp_path, bytes([9, 0, 3, 1])))
    assert images.shape == (4, 3, 2)
    assert labels.tolist() == [9, 0, 3, 1]


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (bytes([1, 2, 3]), "images has 4 images, but .*labels has 3 labels"),
        (bytes([1, 2, 10, 3]), "labels has label 10 for image 2; labels must be from 0 to 9"),
    ],
)
def test_a_pair_that_does_not_fit_is_named(tmp_path: Path, labels: bytes, words: str) -> None:
    with pytest.raises(FileError, match=words):
        read_images_and_labels(*write_pair(tmp_path, labels))
