"""Datasets of images, from files or generated, for training or for evaluation.

    training     a random crop of 8 to 100% of the area, aspect 3:4 to 4:3, flipped half the time
    evaluation   the center crop: a square of 7/8 of the shorter side

Each crop is resized to a square, and each channel is normalized by the mean and standard
deviation of ImageNet, as published weights of image networks expect. Random numbers come from
torch's global generator, which the loader seeds for each sample.
"""

from __future__ import annotations

import colorsys
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from torch.utils.data import Dataset

from lockstep.errors import FileError
from lockstep.randomness import key

__all__ = [
    "Box",
    "ImageDataset",
    "ImageSource",
    "SyntheticImages",
    "center_crop_box",
    "crop_and_resize",
    "random_crop_box",
    "random_flip",
    "to_normalized_tensor",
]

Box = tuple[float, float, float, float]  # left, top, right, bottom, in pixels

AREA = (0.08, 1.0)
RATIO = (3 / 4, 4 / 3)
ATTEMPTS = 10
CENTER = 0.875
MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)  # of ImageNet, per channel
STD = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)

PERIODS = (4, 16)  # period of the stripes in pixels: of the first class, of the last class


class ImageSource(Protocol):
    """A source of images with labels."""

    @property
    def labels(self) -> NDArray[numpy.int64]:
        """The class index of each image."""

    def __len__(self) -> int:
        """Return the number of images."""

    def name(self, index: int) -> str:
        """Return a name for messages."""

    def open(self, index: int) -> Image.Image:
        """Return the image."""


class ImageDataset(Dataset[tuple[torch.Tensor, int]]):
    """The images of a source as (float32 [3, size, size], label), normalized.

    An image that cannot be read raises FileError with its name.

    Args:
        source: The images and labels.
        size: The width and height of the result, in pixels.
        augment: Whether to use a random crop and flip; otherwise the center crop.
    """

    def __init__(self, source: ImageSource, size: int, *, augment: bool) -> None:
        self.source, self.size, self.augment = source, size, augment

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        """Read, crop and resize an image."""
        try:
            with self.source.open(index) as image:
                box = random_crop_box(*image.size) if self.augment else center_crop_box(*image.size)
                part = crop_and_resize(image, box, self.size)
        except Exception as error:  # Pillow's plugins raise arbitrary exceptions
            raise FileError(
                f"{self.source.name(index)} cannot be read as an image ({_reason(error)}); "
                "replace or remove it"
            ) from None
        if self.augment:
            part = random_flip(part)
        return to_normalized_tensor(part), int(self.source.labels[index])


@dataclass(frozen=True)
class SyntheticImages:
    """Generated images: noise with stripes; the color and width of stripes depend on the class.

    Attributes:
        count: The number of images; classes alternate.
        classes: The number of classes.
        side: The width and height of an image, in pixels.
        seed: The random seed.
    """

    count: int
    classes: int
    side: int
    seed: int

    @cached_property
    def labels(self) -> NDArray[numpy.int64]:
        """The class index of each image."""
        return numpy.arange(self.count) % self.classes

    def __len__(self) -> int:
        """Return the number of images."""
        return self.count

    def name(self, index: int) -> str:
        """Return a name for messages."""
        return f"generated image {index}"

    def open(self, index: int) -> Image.Image:
        """Generate the image."""
        generator = torch.Generator().manual_seed(key(self.seed, index))
        position = int(self.labels[index]) / self.classes
        period = PERIODS[0] + (PERIODS[1] - PERIODS[0]) * position
        phase = torch.rand((), generator=generator) * period
        stripes = (torch.arange(self.side) + phase).mul(2 / period).long() % 2
        color = torch.tensor(colorsys.hsv_to_rgb(position, 1.0, 255.0))
        noise = torch.randint(0, 256, (self.side, self.side, 3), generator=generator)
        pixels = (noise + stripes.view(1, -1, 1) * color) / 2
        return Image.fromarray(pixels.to(torch.uint8).numpy())


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "the file does not exist"
    if isinstance(error, UnidentifiedImageError):
        return "unknown format, or damaged"
    words = str(error).strip().splitlines()
    return words[0].rstrip(".") if words else type(error).__name__


def random_crop_box(width: int, height: int) -> Box:
    """Draw a random crop; if none fits, return the largest center crop with a valid ratio."""
    for _ in range(ATTEMPTS):
        area = width * height * _uniform(*AREA)
        ratio = math.exp(_uniform(math.log(RATIO[0]), math.log(RATIO[1])))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = _randint(width - w), _randint(height - h)
            return left, top, left + w, top + h
    w = min(width, round(height * RATIO[1]))
    return _center_box(width, height, w, min(height, round(w / RATIO[0])))


def center_crop_box(width: int, height: int) -> Box:
    """Return the center crop for evaluation."""
    side = min(width, height) * CENTER
    return _center_box(width, height, side, side)


def crop_and_resize(image: Image.Image, box: Box, size: int) -> Image.Image:
    """Crop an image to `box` and resize it to `size` x `size` RGB pixels.

    A JPEG is decoded at half, a quarter or an eighth of its size if that has enough pixels, which
    can be several times faster.
    """
    left, top, right, bottom = box
    width, height = image.size
    wanted = (math.ceil(width * size / (right - left)), math.ceil(height * size / (bottom - top)))
    drafted = image.draft("RGB", wanted) if image.format == "JPEG" else None
    scale = drafted[1][2] / width if drafted else 1.0
    part = (left * scale, top * scale, right * scale, bottom * scale)
    resized = _to_rgb(image).resize((size, size), Image.Resampling.BILINEAR, part)
    return resized


def random_flip(image: Image.Image) -> Image.Image:
    """Flip the image left to right with probability 0.5."""
    chance = _uniform(0, 1) < 0.5
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if chance else image


def to_normalized_tensor(image: Image.Image) -> torch.Tensor:
    """Return the pixels as float32 [3, height, width], normalized."""
    pixels = torch.from_numpy(numpy.array(image)).permute(2, 0, 1)
    # Contiguous, because batches with other strides would get another memory layout in workers.
    values = pixels.to(torch.float32, memory_format=torch.contiguous_format)
    return values.div_(255).sub_(MEAN).div_(STD)


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB":
        return image
    if "transparency" in image.info:  # a palette with transparency converts to RGB with a warning
        image = image.convert("RGBA")
    return image.convert("RGB")


def _center_box(width: int, height: int, w: float, h: float) -> Box:
    left, top = (width - w) / 2, (height - h) / 2
    return left, top, left + w, top + h


def _uniform(low: float, high: float) -> float:
    return low + (high - low) * torch.rand(()).item()


def _randint(most: int) -> int:
    return int(torch.randint(most + 1, ()).item())
