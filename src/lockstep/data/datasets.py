"""Datasets: the digits that come with Lockstep, and MNIST from its four IDX files.

    digits()        1,797 images of the UCI set, 8x8 with values 0..16, scaled to 28x28
    mnist(folder)   60,000 images for training, 10,000 for testing, 28x28 with values 0..255

Both are TensorDatasets of (image float32 [1, 28, 28], label int64), normalized. The loader
selects rows of their tensors, without a call per sample.

An IDX file is a magic number, sizes and bytes:

    00 00 08 DD | size 1 | ... | size DD | values        sizes: 32 bits, big-endian

08 means unsigned bytes, the only supported type; DD is the number of dimensions: 1 for labels,
3 for images.
"""

from __future__ import annotations

import gzip
import math
import socket
import struct
import sys
import zlib
from http.client import HTTPException
from pathlib import Path
from urllib.error import URLError

import torch
from torch.utils.data import TensorDataset

from lockstep.call_checks import check_call
from lockstep.kernel.errors import FileError

__all__ = ["digits", "find_idx", "mnist", "read_idx", "read_images_and_labels"]

IMAGES = "images-idx3-ubyte"
LABELS = "labels-idx1-ubyte"
DIGITS_FOLDER = Path(__file__).parent / "digits"
# of the scaled pixels, in 0..1
DIGITS_MEAN = 0.3053
DIGITS_STD = 0.3247
MNIST_MEAN = 0.1307
MNIST_STD = 0.3081

STALL = 30.0  # seconds of the longest wait for data from the network
MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
SHA256 = {
    "train-images-idx3-ubyte": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "train-labels-idx1-ubyte": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "t10k-images-idx3-ubyte": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "t10k-labels-idx1-ubyte": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
}


def digits() -> TensorDataset:
    """Return the 1,797 handwritten digits of the UCI set, images [1797, 1, 28, 28].

    They are scaled bilinearly from 8x8 and normalized, with the same bits on every machine.
    Use `lockstep.partition` to hold out a part.
    """
    folder = DIGITS_FOLDER
    images, labels = read_images_and_labels(folder / f"{IMAGES}.gz", folder / f"{LABELS}.gz")
    weights = _bilinear()
    # All sums are integers of at most 14 x 14 x 16 < 2^24: exact in float32, in any order.
    pixels = weights @ images.float() @ weights.T / (14 * 14 * 16)
    return _normalize(pixels, labels, DIGITS_MEAN, DIGITS_STD)


@check_call("mnist")
def mnist(folder: str | Path, train: bool = True, download: bool = False) -> TensorDataset:
    """Return MNIST from its IDX files, images [n, 1, 28, 28].

    Args:
        folder: The folder of the files, plain or gzipped.
        train: Whether to return the training set; otherwise the test set.
        download: Whether to download missing files, with a progress bar on a terminal.

    Raises:
        FileError: A file is missing, damaged, inconsistent, or cannot be downloaded.
    """
    folder = Path(folder)
    part = "train" if train else "t10k"
    names = (f"{part}-{IMAGES}", f"{part}-{LABELS}")
    for name in names if download else ():
        if find_idx(folder, name) is None:
            _download(folder, name)
    images, labels = read_images_and_labels(*_find_files(folder, names))
    return _normalize(images.float() / 255, labels, MNIST_MEAN, MNIST_STD)


def _download(folder: Path, name: str) -> None:
    """Download a file from the first mirror that has it; its SHA-256 is checked.

    Raises:
        FileError: No mirror delivered the file (the message has the answer of each), or the folder
            cannot be written.
    """
    answers = []
    timeout = socket.getdefaulttimeout()
    socket.setdefaulttimeout(STALL)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = str(folder / f"{name}.gz")
        for mirror in MIRRORS:
            try:
                url = f"{mirror}{name}.gz"
                is_shown = sys.stderr.isatty()
                torch.hub.download_url_to_file(url, path, SHA256[name], is_shown)
                return
            except (URLError, HTTPException, RuntimeError, TimeoutError) as error:
                answers.append(f"{mirror} failed ({error})")
    except OSError as error:
        raise FileError(f"cannot write {folder}: {error.strerror or error}") from None
    finally:
        socket.setdefaulttimeout(timeout)
    raise FileError(
        f"cannot download {name}.gz: {'; '.join(answers)}; "
        f"check the network, or put the file into {folder} yourself"
    )


def _find_files(folder: Path, names: tuple[str, str]) -> tuple[Path, Path]:
    images, labels = (find_idx(folder, name) for name in names)
    if images is None or labels is None:
        missing = [name for name, path in zip(names, (images, labels), strict=True) if not path]
        raise FileError(
            f"{folder} has no {' and no '.join(f'{name} or {name}.gz' for name in missing)}; "
            "pass the folder of the MNIST files, or download them with --download"
        )
    return images, labels


def _bilinear() -> torch.Tensor:
    """Return 14 times the weights [28, 8] that scale a column of 8 pixels to 28, bilinearly.

    Pixel i of the scaled image is at position (2 i + 1) / 7 - 1/2 = (4 i - 5) / 14 of the small
    image, so 14 times a weight is an integer. Pixels beyond the border have its value.
    """
    weights = torch.zeros(28, 8)
    for i in range(28):
        low, part = divmod(4 * i - 5, 14)
        weights[i, max(low, 0)] += 14 - part
        weights[i, min(low + 1, 7)] += part
    return weights


def _normalize(
    pixels: torch.Tensor, labels: torch.Tensor, mean: float, std: float
) -> TensorDataset:
    return TensorDataset(((pixels - mean) / std).unsqueeze(1), labels.long())


def find_idx(folder: Path, name: str) -> Path | None:
    """Return the path of an IDX file, plain or gzipped; None if it does not exist."""
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    return None


def read_idx(path: Path, dimensions: int) -> torch.Tensor:
    """Read an IDX file as a uint8 tensor; it is gzipped if its name ends in .gz.

    Args:
        path: The file.
        dimensions: The expected number of dimensions.

    Raises:
        FileError: The file cannot be read, is damaged, truncated or of another type, or its
            length does not match its sizes.
    """
    data = _read_bytes(path)
    header = 4 + 4 * dimensions
    magic = bytes([0, 0, 8, dimensions])
    if data[:4] != magic:
        raise FileError(
            f"{path} is not an IDX file of {dimensions}-dimensional bytes: "
            f"it starts with {data[:4].hex() or 'nothing'}, not {magic.hex()}"
        )
    if len(data) < header:
        raise FileError(f"{path} is truncated in its header, after {len(data)} of {header} bytes")
    sizes = struct.unpack(f">{dimensions}I", data[4:header])
    values = len(data) - header
    if values != math.prod(sizes):
        shape = " x ".join(str(size) for size in sizes)
        raise FileError(f"{path} declares {shape} bytes, but contains {values}")
    if values == 0:
        raise FileError(f"{path} is empty: its sizes are {sizes}")
    return torch.frombuffer(bytearray(data[header:]), dtype=torch.uint8).view(sizes)


def read_images_and_labels(
    images: Path, labels: Path, classes: int = 10
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read images (uint8, [n, height, width]) and their labels (uint8, [n]).

    Raises:
        FileError: Their numbers differ, or a label is not below `classes`.
    """
    pixels = read_idx(images, 3)
    digits = read_idx(labels, 1)
    if len(pixels) != len(digits):
        raise FileError(f"{images} has {len(pixels)} images, but {labels} has {len(digits)} labels")
    worst = int(digits.max())
    if worst >= classes:
        where = int((digits == worst).nonzero()[0])
        raise FileError(
            f"{labels} has label {worst} for image {where}; labels must be from 0 to {classes - 1}"
        )
    return pixels, digits


def _read_bytes(path: Path) -> bytes:
    try:
        if path.suffix != ".gz":
            return path.read_bytes()
        with gzip.open(path) as file:
            return file.read()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise FileError(
            f"{path} is a damaged or truncated gzip file ({error}); download it again"
        ) from None
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror or error}") from None
