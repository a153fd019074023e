"""IDX files, the format of the MNIST family: a magic number, sizes, bytes.

    00 00 08 DD | size 1 | ... | size DD | values        sizes: 32 bits, big-endian

08 means unsigned bytes, the only kind read here; DD is the number of dimensions:
1 for labels, 3 for images.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import torch

from lockstep.errors import FileError

__all__ = ["find_idx", "read_idx", "read_pair"]


def find_idx(folder: Path, name: str) -> Path | None:
    """Return the path of IDX file `name` in `folder`, plain or gzipped; None where it is not."""
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    return None


def read_idx(path: Path, dimensions: int) -> torch.Tensor:
    """Read an IDX file, gzipped where its name ends in .gz, as uint8 of `dimensions` dimensions.

    Raises FileError with the path where it cannot be read, is damaged or truncated,
    is of another kind, or holds more or less than its sizes say.
    """
    data = _content(path)
    header = 4 + 4 * dimensions
    magic = bytes([0, 0, 8, dimensions])
    if data[:4] != magic:
        raise FileError(
            f"{path} is no IDX file of {dimensions}-dimensional bytes: "
            f"it begins with {data[:4].hex() or 'nothing'}, not {magic.hex()}"
        )
    if len(data) < header:
        raise FileError(f"{path} ends inside its header, after {len(data)} of {header} bytes")
    sizes = struct.unpack(f">{dimensions}I", data[4:header])
    values = len(data) - header
    if values != math.prod(sizes):
        said = " x ".join(str(size) for size in sizes)
        raise FileError(f"{path} says that it holds {said} bytes, but it holds {values}")
    if values == 0:
        raise FileError(f"{path} holds nothing: its sizes are {sizes}")
    return torch.frombuffer(bytearray(data[header:]), dtype=torch.uint8).view(sizes)


def read_pair(images: Path, labels: Path, classes: int = 10) -> tuple[torch.Tensor, torch.Tensor]:
    """Read images (uint8, [n, height, width]) and their labels (uint8, [n]).

    Raises FileError where their numbers differ or a label is not below `classes`.
    """
    pixels, digits = read_idx(images, 3), read_idx(labels, 1)
    if len(pixels) != len(digits):
        raise FileError(f"{images} holds {len(pixels)} images, but {labels} {len(digits)} labels")
    worst = int(digits.max())
    if worst >= classes:
        where = int((digits == worst).nonzero()[0])
        raise FileError(
            f"{labels} gives image {where} the label {worst}; labels go from 0 to {classes - 1}"
        )
    return pixels, digits


def _content(path: Path) -> bytes:
    try:
        if path.suffix != ".gz":
            return path.read_bytes()
        with gzip.open(path) as file:
            return file.read()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise FileError(
            f"{path} is a damaged or truncated gzip file ({error}); fetch it again"
        ) from None
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror or error}") from None
