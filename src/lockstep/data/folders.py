"""Folders of pictures, one folder a class:

    pictures/cat/1.jpg              pictures/train/cat/1.jpg
    pictures/cat/2.jpg       or     pictures/val/cat/2.jpg
    pictures/dog/1.jpg              pictures/train/dog/1.jpg

Classes are numbered by the order of their names, pictures are ordered by class
and then by name, so that all ranks mean the same picture by the same index.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy
from numpy.typing import NDArray
from PIL import Image

from lockstep.data.order import order, partition_sizes
from lockstep.errors import DatasetError

__all__ = ["Files", "read_folder"]

TRAIN, VAL = "train", "val"
SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".pgm", ".bmp", ".tif", ".tiff", ".webp")


@dataclass(frozen=True)
class Files:
    """Pictures in files: `names` relative to `folder`, `labels` as numbers of `classes`.

    The names are bytes of one array, not a million objects whose reference counts
    would copy the pages of every loader process.
    """

    folder: Path
    classes: tuple[str, ...]
    names: NDArray[numpy.bytes_]
    labels: NDArray[numpy.int64]

    def __len__(self) -> int:
        """Return the number of pictures."""
        return len(self.names)

    def name(self, index: int) -> str:
        """Return the path of a picture."""
        return str(self.folder / os.fsdecode(self.names[index]))

    def open(self, index: int) -> Image.Image:
        """Open a picture; its pixels are read later."""
        return Image.open(self.name(index))

    def split(self, share: float, seed: int) -> tuple[Files, Files]:
        """Hold out `share` of each class, in an order shuffled by `seed`: (the rest, held out).

        Raises DatasetError where the classes are so small that nothing is held out.
        """
        out = numpy.zeros(len(self), dtype=bool)
        for number in range(len(self.classes)):
            own = numpy.flatnonzero(self.labels == number)
            count = partition_sizes(len(own), [share, 1 - share])[0]
            out[own[order(len(own), seed, number).numpy()[:count]]] = True
        if not out.any():
            raise DatasetError(
                f"{self.folder} has too few pictures in each class to hold {share:.0%} of them "
                f"out; add pictures, or give folders {TRAIN} and {VAL}"
            )
        return self._those(~out), self._those(out)

    def _those(self, chosen: NDArray[numpy.bool_]) -> Files:
        return Files(self.folder, self.classes, self.names[chosen], self.labels[chosen])


def read_folder(folder: Path, share: float, seed: int) -> tuple[Files, Files]:
    """Return the pictures to train on and those held out.

    Those of `folder`/train and `folder`/val where it has both, and otherwise those
    of `folder` with `share` of each class held out. Raises DatasetError where there
    is no such folder, no class, or a class without a picture.
    """
    if not folder.is_dir():
        raise DatasetError(f"{folder} is no folder; give one that has a folder of pictures a class")
    if not ((folder / TRAIN).is_dir() and (folder / VAL).is_dir()):
        return _files(folder, _classes(folder)).split(share, seed)
    classes = _classes(folder / TRAIN)
    strange = sorted(set(_classes(folder / VAL)) - set(classes))
    if strange:
        raise DatasetError(
            f"{folder / VAL / strange[0]} is a class that {folder / TRAIN} does not have; "
            "nothing could learn it"
        )
    held_out = [name for name in classes if (folder / VAL / name).is_dir()]
    return _files(folder / TRAIN, classes), _files(folder / VAL, classes, held_out)


def _classes(folder: Path) -> tuple[str, ...]:
    names = sorted(each.name for each in folder.iterdir() if each.is_dir() and each.name[0] != ".")
    if not names:
        raise DatasetError(
            f"{folder} has no folders in it; put the pictures of each class into a folder that has "
            "the name of the class"
        )
    return tuple(names)


def _files(folder: Path, classes: tuple[str, ...], there: Sequence[str] | None = None) -> Files:
    """Find the pictures of those classes that are `there`, all of them by default."""
    names: list[bytes] = []
    labels: list[int] = []
    for name in classes if there is None else there:
        found = sorted(_pictures(folder / name, folder))
        if not found:
            raise DatasetError(
                f"{folder / name} has no picture in it ({', '.join(SUFFIXES)}); add some, or take "
                "the folder away"
            )
        names += found
        labels += [classes.index(name)] * len(found)
    return Files(folder, classes, numpy.array(names, dtype=numpy.bytes_), numpy.array(labels))


def _pictures(folder: Path, base: Path) -> Iterator[bytes]:
    """Find the pictures in and below `folder`, by their names relative to `base`."""
    for place, _, files in os.walk(folder, followlinks=True):
        for name in files:
            if name.lower().endswith(SUFFIXES) and name[0] != ".":
                yield os.fsencode(os.path.relpath(os.path.join(place, name), base))
