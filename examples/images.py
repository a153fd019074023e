"""Folders of images as datasets, for `examples/imagenet.py`: copy it and change what you need.

    images/train/cat/1.jpg       read_image_folder("images") returns the files for training and
    images/train/dog/1.jpg       the held-out files; classes and files are sorted by name, so an
    images/val/cat/1.jpg         index means the same image on all ranks
    images/val/dog/1.jpg

Random crops and flips draw from torch's default generator, which Lockstep seeds for each sample.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch.utils.data import Dataset

Box = tuple[float, float, float, float]  # left, top, right, bottom, in pixels

TRAIN = "train"
VAL = "val"
SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".pgm", ".bmp", ".tif", ".tiff", ".webp")
AREA = (0.08, 1.0)  # of random crops
RATIO = (3 / 4, 4 / 3)
ATTEMPTS = 10
CENTER = 0.875  # side of the crop for evaluation, relative to the shorter side of the image
MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)  # of ImageNet, per channel
STD = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)


@dataclass(frozen=True)
class ImageFiles:
    """Images in files.

    The names are bytes in one array. With one Python object per name, changes of the reference
    counts would make every loader process copy the memory pages of the names.
    """

    folder: Path
    classes: tuple[str, ...]
    names: NDArray[numpy.bytes_]  # relative to `folder`
    labels: NDArray[numpy.int64]  # indices of `classes`

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.names)

    def path(self, index: int) -> Path:
        """Return the path of an image."""
        return self.folder / os.fsdecode(self.names[index])


def read_image_folder(folder: str | Path) -> tuple[ImageFiles, ImageFiles]:
    """Return the images for training and the held-out images; a class may have none of these."""
    training = Path(folder, TRAIN)
    held_out = Path(folder, VAL)
    for part in (training, held_out):
        if not part.is_dir():
            raise SystemExit(f"{part} is not a folder with one folder of images per class")
    classes = _list_folders(training)
    if unknown := set(_list_folders(held_out)) - set(classes):
        raise SystemExit(f"{held_out / min(unknown)} is a class without training images")
    return _list_images(training, classes), _list_images(held_out, classes)


def _list_folders(folder: Path) -> tuple[str, ...]:
    folders = [path.name for path in folder.iterdir() if path.is_dir() and path.name[0] != "."]
    return tuple(sorted(folders))


def _list_images(folder: Path, classes: Sequence[str]) -> ImageFiles:
    names: list[bytes] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        found = [
            os.fsencode(os.path.relpath(os.path.join(parent, file), folder))
            for parent, _, files in os.walk(folder / name, followlinks=True)
            for file in files
            if file.lower().endswith(SUFFIXES) and file[0] != "."
        ]
        if not found and folder.name == TRAIN:
            raise SystemExit(f"{folder / name} has no image ({', '.join(SUFFIXES)})")
        names += sorted(found)
        labels += [label] * len(found)
    return ImageFiles(
        folder, tuple(classes), numpy.array(names, numpy.bytes_), numpy.array(labels, numpy.int64)
    )


class ImageDataset(Dataset[tuple[torch.Tensor, int]]):
    """Image files as (float32 [3, size, size], label), normalized.

    Args:
        files: The files.
        size: The width and height of the result, in pixels.
        augment: Whether to use a random crop and flip; otherwise the center crop.
    """

    def __init__(self, files: ImageFiles, size: int, *, augment: bool) -> None:
        self.files = files
        self.size = size
        self.augment = augment

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        """Read, crop and resize an image."""
        path = self.files.path(index)
        choose = choose_random_box if self.augment else choose_center_box
        try:
            with Image.open(path) as image:
                pixels = crop_and_resize(image, choose(*image.size), self.size)
        except Exception as error:  # Pillow's plugins raise arbitrary exceptions
            raise ValueError(f"{path} cannot be read as an image ({error})") from error
        if self.augment and torch.rand(()) < 0.5:
            pixels = pixels.flip(2)
        # Contiguous, because batches with other strides would get another layout in workers.
        values = pixels.to(torch.float32, memory_format=torch.contiguous_format)
        return values.div_(255).sub_(MEAN).div_(STD), int(self.files.labels[index])


def choose_random_box(width: int, height: int) -> Box:
    """Draw a random crop; if none fits, return the largest center crop with a valid ratio."""
    for _ in range(ATTEMPTS):
        area = width * height * _draw(*AREA)
        ratio = math.exp(_draw(math.log(RATIO[0]), math.log(RATIO[1])))
        w = round(math.sqrt(area * ratio))
        h = round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left = int(torch.randint(width - w + 1, ()))
            top = int(torch.randint(height - h + 1, ()))
            return left, top, left + w, top + h
    w = min(width, round(height * RATIO[1]))
    return _center(width, height, w, min(height, round(w / RATIO[0])))


def choose_center_box(width: int, height: int) -> Box:
    """Return the center crop for evaluation."""
    side = min(width, height) * CENTER
    return _center(width, height, side, side)


def _draw(low: float, high: float) -> float:
    return low + (high - low) * torch.rand(()).item()


def _center(width: int, height: int, w: float, h: float) -> Box:
    left = (width - w) / 2
    top = (height - h) / 2
    return left, top, left + w, top + h


def crop_and_resize(image: Image.Image, box: Box, size: int) -> torch.Tensor:
    """Return a crop of an image, resized and upright, as RGB in uint8 [3, size, size].

    A JPEG is decoded at the smallest sufficient size: a half, a quarter or an eighth.
    """
    left, top, right, bottom = box
    scale = 1.0
    if image.format == "JPEG":
        width, height = image.size
        reduction = max(1, math.floor(min(right - left, bottom - top) / size))
        drafted = image.draft("RGB", (max(1, width // reduction), max(1, height // reduction)))
        scale = drafted[1][2] / width if drafted else 1.0
    left = round(left * scale)
    top = round(top * scale)
    right = max(left + 1, round(right * scale))
    bottom = max(top + 1, round(bottom * scale))
    crop = image.crop((left, top, right, bottom))
    ImageOps.exif_transpose(crop, in_place=True)
    if crop.mode.startswith("I;16"):  # gray, which Pillow would clip at 255
        crop = Image.fromarray((numpy.asarray(crop) >> 8).astype(numpy.uint8))
    pixels = torch.from_numpy(numpy.array(crop.convert("RGB")))
    # torch's kernel for bytes is several times faster than Pillow's. The result is contiguous.
    return torch.nn.functional.interpolate(
        pixels.permute(2, 0, 1).unsqueeze(0), (size, size), mode="bilinear", antialias=True
    ).squeeze(0)
