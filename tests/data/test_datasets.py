import gzip
import hashlib
import struct
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from torch.nn.functional import interpolate
from torch.utils.data import TensorDataset

from lockstep.data import datasets
from lockstep.data.datasets import (
    DIGITS_FOLDER,
    DIGITS_MEAN,
    DIGITS_STD,
    IMAGES,
    LABELS,
    digits,
    mnist,
    read_images_and_labels,
)
from lockstep.kernel.errors import FileError


def write_mnist(folder: Path, part: str, count: int, suffix: str = "") -> dict[str, str]:
    """Write made-up images; return the SHA-256 of each file."""
    pixels = bytes((17 * i) % 256 for i in range(count * 28 * 28))
    labels = bytes(i % 10 for i in range(count))
    contents = {
        f"{part}-{IMAGES}": struct.pack(">4I", 0x803, count, 28, 28) + pixels,
        f"{part}-{LABELS}": struct.pack(">2I", 0x801, count) + labels,
    }
    hashes = {}
    for name, data in contents.items():
        data = gzip.compress(data) if suffix else data
        (folder / f"{name}{suffix}").write_bytes(data)
        hashes[name] = hashlib.sha256(data).hexdigest()
    return hashes


def test_the_digits_are_the_published_ones() -> None:
    dataset = digits()
    images, labels = dataset.tensors
    assert type(dataset) is TensorDataset
    assert (images.shape, images.dtype) == ((1797, 1, 28, 28), torch.float32)
    assert (labels.shape, labels.dtype) == ((1797,), torch.int64)
    counts = [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert labels.bincount().tolist() == counts


def test_the_digits_are_scaled_bilinearly_and_normalised() -> None:
    small, _ = read_images_and_labels(
        DIGITS_FOLDER / f"{IMAGES}.gz", DIGITS_FOLDER / f"{LABELS}.gz"
    )
    assert (small.shape, int(small.max())) == ((1797, 8, 8), 16)
    expected = interpolate(small.unsqueeze(1) / 16, (28, 28), mode="bilinear", align_corners=False)
    images = digits().tensors[0]
    torch.testing.assert_close(images * DIGITS_STD + DIGITS_MEAN, expected, atol=2e-6, rtol=0)
    assert abs(float(images.mean())) < 1e-3
    assert abs(float(images.std()) - 1) < 1e-3


def test_the_digits_have_the_same_bits_with_any_number_of_threads() -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = digits().tensors[0]
        torch.set_num_threads(3)
        assert torch.equal(one, digits().tensors[0])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize(("train", "part"), [(True, "train"), (False, "t10k")])
def test_mnist_is_read_and_normalised(tmp_path: Path, suffix: str, train: bool, part: str) -> None:
    write_mnist(tmp_path, part, 12, suffix)
    images, labels = mnist(tmp_path, train=train).tensors
    assert images.shape == (12, 1, 28, 28)
    assert labels.tolist() == [*range(10), 0, 1]
    expected = (torch.tensor(17.0) / 255 - 0.1307) / 0.3081
    torch.testing.assert_close(images[0, 0, 0, 1], expected)


def test_missing_files_are_named_with_the_way_to_get_them(tmp_path: Path) -> None:
    with pytest.raises(FileError) as caught:
        mnist(tmp_path, train=False)
    message = str(caught.value)
    for words in (str(tmp_path), "t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte or"):
        assert words in message
    assert "--download" in message


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


def test_mnist_is_downloaded_where_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first mirror that has it; another file is not kept."""
    source = tmp_path / "mirror/good"
    folder = tmp_path / "data"
    other = tmp_path / "mirror/other"
    source.mkdir(parents=True)
    other.mkdir()
    hashes = write_mnist(source, "train", 5, ".gz")
    write_mnist(other, "train", 6, ".gz")
    monkeypatch.setattr(datasets, "SHA256", hashes)
    monkeypatch.setattr(torch.hub.tqdm, "monitor_interval", 0, raising=False)  # starts no thread
    handler = partial(Quiet, directory=str(tmp_path / "mirror"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            host = f"http://127.0.0.1:{server.server_address[1]}"
            bad = (f"{host}/missing/", f"{host}/other/")
            monkeypatch.setattr(datasets, "MIRRORS", bad)
            with pytest.raises(FileError, match=r"cannot .*missing/ .*404.*other/ .*invalid hash"):
                mnist(folder, download=True)
            assert list(folder.iterdir()) == []
            monkeypatch.setattr(datasets, "MIRRORS", (*bad, f"{host}/good/"))
            assert len(mnist(folder, download=True)) == 5
        finally:
            server.shutdown()
            thread.join()
    assert len(mnist(folder, download=True)) == 5  # nothing is fetched again


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileError, match=r"cannot write .*file/data: Not a directory"):
        mnist(tmp_path / "file/data", download=True)
