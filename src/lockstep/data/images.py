"""Datasets of images, from files or generated, for training or for evaluation."""

from __future__ import annotations

import colorsys
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from torch.utils.data import Dataset

from lockstep.data.image_transforms import (
    center_crop_box,
    crop_and_resize,
    normalize,
    random_crop_box,
    random_flip,
    upright_size,
)
from lockstep.kernel.errors import FileError
from lockstep.kernel.seeds import key

__all__ = ["ImageDataset", "ImageSource", "SyntheticImages"]

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
                width, height = upright_size(image)
                choose = random_crop_box if self.augment else center_crop_box
                pixels = crop_and_resize(image, choose(width, height), self.size)
        except Exception as error:  # Pillow's plugins raise arbitrary exceptions
            raise FileError(
                f"{self.source.name(index)} cannot be read as an image ({_reason(error)}); "
                "replace or remove it"
            ) from None
        if self.augment:
            pixels = random_flip(pixels)
        return normalize(pixels), int(self.source.labels[index])


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
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    words = str(error).strip().splitlines()
    return words[0].rstrip(".") if words else type(error).__name__
