"""Image folders: one folder per class, as torchvision reads them.

    images/cat/1.jpg              images/train/cat/1.jpg
    images/cat/2.jpg       or     images/val/cat/2.jpg
    images/dog/1.jpg              images/train/dog/1.jpg

Classes are sorted by name, images by class and name, so that an index means the same image
on all ranks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from lockstep.data.dataset_partition import partition_sizes
from lockstep.data.epoch_order import epoch_permutation
from lockstep.kernel.errors import DatasetError

__all__ = ["ImageFiles", "read_image_folder"]

TRAIN, VAL = "train", "val"
SPLITS = {TRAIN, VAL, "training", "valid", "validation", "test", "dev", "eval"}
SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".pgm", ".bmp", ".tif", ".tiff", ".webp")


@dataclass(frozen=True)
class ImageFiles:
    """Images in files.

    The names are stored as bytes in one array. With one Python object per name, changes of the
    reference counts would make every loader process copy the memory pages of the names.

    Attributes:
        folder: The folder of all images.
        classes: The names of the classes.
        names: The path of each image, relative to `folder`.
        labels: The class index of each image.
    """

    folder: Path
    classes: tuple[str, ...]
    names: NDArray[numpy.bytes_]
    labels: NDArray[numpy.int64]

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.names)

    def name(self, index: int) -> str:
        """Return the path of an image."""
        return str(self.folder / os.fsdecode(self.names[index]))

    def open(self, index: int) -> Image.Image:
        """Open an image; its pixels are read on access."""
        path = self.name(index)
        try:
            return Image.open(path)
        except UnidentifiedImageError:
            if os.path.getsize(path) == 0:
                raise ValueError("the file is empty") from None
            raise

    def split(self, share: float, seed: int) -> tuple[ImageFiles, ImageFiles]:
        """Hold out a share of each class.

        Args:
            share: The share of images to hold out, from 0 to 1.
            seed: The random seed of the choice.

        Returns:
            The images for training and the held-out images.

        Raises:
            DatasetError: The classes are too small to hold out an image.
        """
        out = numpy.zeros(len(self), dtype=bool)
        for number in range(len(self.classes)):
            own = numpy.flatnonzero(self.labels == number)
            count = partition_sizes(len(own), [share, 1 - share])[0]
            out[own[epoch_permutation(len(own), seed, number).numpy()[:count]]] = True
        if not out.any():
            raise DatasetError(
                f"{self.folder} has too few images per class to hold out {share:.0%} of them; "
                f"add images, or use folders {TRAIN} and {VAL}"
            )
        return self._select(~out), self._select(out)

    def _select(self, chosen: NDArray[numpy.bool_]) -> ImageFiles:
        return ImageFiles(self.folder, self.classes, self.names[chosen], self.labels[chosen])


def read_image_folder(folder: str | Path, share: float, seed: int) -> tuple[ImageFiles, ImageFiles]:
    """Return the images for training and the held-out images of a folder.

    Args:
        folder: A folder that contains `train` and `val`, or one folder per class.
        share: The share of each class to hold out, from 0 to 1, if `train` and `val` do not exist.
        seed: The random seed of that choice.

    Raises:
        DatasetError: The folder or its classes do not exist, its folders are sets with other names,
            a class has no image, or the classes are too small to hold out an image.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise DatasetError(
            f"{folder} is not a folder; pass one that has one folder of images per class"
        )
    if not ((folder / TRAIN).is_dir() and (folder / VAL).is_dir()):
        return _files(folder, _require_no_split(folder, _classes(folder))).split(share, seed)
    classes = _classes(folder / TRAIN)
    unknown = sorted(set(_classes(folder / VAL)) - set(classes))
    if unknown:
        raise DatasetError(
            f"{folder / VAL / unknown[0]} is a class without training images: it does not exist "
            f"in {folder / TRAIN}"
        )
    held_out = [name for name in classes if (folder / VAL / name).is_dir()]
    return _files(folder / TRAIN, classes), _files(folder / VAL, classes, held_out)


def _classes(folder: Path) -> tuple[str, ...]:
    names = sorted(
        entry.name for entry in folder.iterdir() if entry.is_dir() and entry.name[0] != "."
    )
    if not names:
        raise DatasetError(
            f"{folder} has no folders; put the images of each class into a folder with the name of "
            "the class"
        )
    return tuple(names)


def _require_no_split(folder: Path, classes: tuple[str, ...]) -> tuple[str, ...]:
    """Raise DatasetError if the folders of the classes are those of a split into sets."""
    if {name.lower() for name in classes} <= SPLITS:
        raise DatasetError(
            f"{folder} has the folder{'s' * (len(classes) > 1)} {' and '.join(classes)}, which "
            f"{'are' if len(classes) > 1 else 'is'} no class: rename the sets to {TRAIN} and {VAL},"
            f" or pass {folder / classes[0]}"
        )
    return classes


def _files(
    folder: Path, classes: tuple[str, ...], there: Sequence[str] | None = None
) -> ImageFiles:
    """Find the images of the classes in `there`; None for all classes."""
    names: list[bytes] = []
    labels: list[int] = []
    for name in classes if there is None else there:
        images = sorted(_find_images(folder / name, folder))
        if not images:
            raise DatasetError(
                f"{folder / name} has no image ({', '.join(SUFFIXES)}); add images, or remove the "
                "folder"
            )
        names += images
        labels += [classes.index(name)] * len(images)
    return ImageFiles(folder, classes, numpy.array(names, dtype=numpy.bytes_), numpy.array(labels))


def _find_images(folder: Path, base: Path) -> Iterator[bytes]:
    """Yield the images in and below `folder`, as paths relative to `base`."""
    for parent, _, files in os.walk(folder, followlinks=True):
        for name in files:
            if name.lower().endswith(SUFFIXES) and name[0] != ".":
                yield os.fsencode(os.path.relpath(os.path.join(parent, name), base))
