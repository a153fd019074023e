"""The datasets: the digits that come with Lockstep, and MNIST from its four files.

    digits()        1,797 images of the UCI set, 8x8 with values 0..16, scaled to 28x28
    mnist(folder)   60,000 to train on, 10,000 to test with, 28x28 with values 0..255

Both are TensorDatasets of (image float32 [1, 28, 28], label int64), normalised,
which the loader reads without a call a sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from lockstep.data.download import Progress, download
from lockstep.data.idx import find_idx, read_pair
from lockstep.errors import FileError

__all__ = ["digits", "mnist"]

IMAGES, LABELS = "images-idx3-ubyte", "labels-idx1-ubyte"
DIGITS_FOLDER = Path(__file__).parent / "digits"
DIGITS_MEAN, DIGITS_STD = 0.3053, 0.3247  # of the scaled pixels, from 0 to 1
MNIST_MEAN, MNIST_STD = 0.1307, 0.3081

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

    Scaled from 8x8 bilinearly and normalised; the same bits on every machine. For
    a held-out part use `lockstep.partition`.
    """
    folder = DIGITS_FOLDER
    images, labels = read_pair(folder / f"{IMAGES}.gz", folder / f"{LABELS}.gz")
    weights = _bilinear()
    # Whole numbers below 2^24 add up exactly in float32, in any order: 14 x 14 x 16.
    pixels = weights @ images.float() @ weights.T / (14 * 14 * 16)
    return _normalised(pixels, labels, DIGITS_MEAN, DIGITS_STD)


def mnist(
    folder: str | Path,
    train: bool = True,
    download: bool = False,
    *,
    progress: Progress | None = None,
    mirrors: Sequence[str] = MIRRORS,
    sha256: Mapping[str, str] = SHA256,
) -> TensorDataset:
    """Return MNIST from the IDX files in `folder`, plain or gzipped: images [n, 1, 28, 28].

    With `download`, files that are missing are fetched from `mirrors`, checked by
    SHA-256; `progress(name, bytes, total)` hears of it. Raises FileError where a
    file is missing, damaged, does not match its partner, or cannot be fetched.
    """
    folder, part = Path(folder), "train" if train else "t10k"
    names = (f"{part}-{IMAGES}", f"{part}-{LABELS}")
    if download:
        _fetch(folder, names, mirrors, sha256, progress)
    images, labels = read_pair(*_found(folder, names))
    return _normalised(images.float() / 255, labels, MNIST_MEAN, MNIST_STD)


def _fetch(
    folder: Path,
    names: tuple[str, str],
    mirrors: Sequence[str],
    sha256: Mapping[str, str],
    progress: Progress | None,
) -> None:
    for name in names:
        if find_idx(folder, name) is None:
            download(f"{name}.gz", folder, sha256[name], mirrors, progress)


def _found(folder: Path, names: tuple[str, str]) -> tuple[Path, Path]:
    images, labels = (find_idx(folder, name) for name in names)
    if images is None or labels is None:
        missing = [name for name, path in zip(names, (images, labels), strict=True) if not path]
        raise FileError(
            f"{folder} has no {' and no '.join(f'{name} or {name}.gz' for name in missing)}; "
            "give the folder that holds the MNIST files, or fetch them with --download"
        )
    return images, labels


def _bilinear() -> torch.Tensor:
    """Return 14 times the weights, [28, 8], that scale a column of 8 pixels to 28 bilinearly.

    Pixel i of the scaled image lies at (2 i + 1) / 7 - 1/2 = (4 i - 5) / 14 of the
    small one, so that 14 times a weight is a whole number. Beyond the border the
    border's value goes on.
    """
    weights = torch.zeros(28, 8)
    for i in range(28):
        low, part = divmod(4 * i - 5, 14)
        weights[i, max(low, 0)] += 14 - part
        weights[i, min(low + 1, 7)] += part
    return weights


def _normalised(
    pixels: torch.Tensor, labels: torch.Tensor, mean: float, std: float
) -> TensorDataset:
    return TensorDataset(((pixels - mean) / std).unsqueeze(1), labels.long())
