"""Pictures as a dataset, from files or generated, for training or for evaluation."""

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

from lockstep.data.augmentation import centre_box, cut, mirrored, normalised, random_box
from lockstep.errors import FileError
from lockstep.randomness import key

__all__ = ["Generated", "Pictures", "Source"]

PERIODS = (4, 16)  # pixels of a generated stripe, of the first class and the last


class Source(Protocol):
    """Where pictures come from."""

    @property
    def labels(self) -> NDArray[numpy.int64]:
        """The number of each picture's class."""

    def __len__(self) -> int:
        """Return the number of pictures."""

    def name(self, index: int) -> str:
        """Return what a person knows the picture by."""

    def open(self, index: int) -> Image.Image:
        """Return the picture."""


class Pictures(Dataset[tuple[torch.Tensor, int]]):
    """The pictures of `source` as (float32 [3, size, size], label), normalised.

    With `augment` a random part, perhaps mirrored, drawn from torch's generator;
    the middle otherwise. Raises FileError that names a picture that cannot be read.
    """

    def __init__(self, source: Source, size: int, *, augment: bool) -> None:
        self.source, self.size, self.augment = source, size, augment

    def __len__(self) -> int:
        """Return the number of pictures."""
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        """Read a picture, cut and scale it."""
        try:
            with self.source.open(index) as image:
                box = random_box(*image.size) if self.augment else centre_box(*image.size)
                part = cut(image, box, self.size)
        except Exception as error:  # Pillow's plugins raise what they please
            raise FileError(
                f"{self.source.name(index)} cannot be read as a picture ({_reason(error)}); "
                "replace it or take it away"
            ) from None
        if self.augment:
            part = mirrored(part)
        return normalised(part), int(self.source.labels[index])


@dataclass(frozen=True)
class Generated:
    """Pictures that are computed: noise under stripes, whose colour and width tell the class.

    `count` pictures of `side` x `side` pixels in `classes` classes by turns. Other
    pictures for another `seed`.
    """

    count: int
    classes: int
    side: int
    seed: int

    @cached_property
    def labels(self) -> NDArray[numpy.int64]:
        """The number of each picture's class."""
        return numpy.arange(self.count) % self.classes

    def __len__(self) -> int:
        """Return the number of pictures."""
        return self.count

    def name(self, index: int) -> str:
        """Return what a person knows the picture by."""
        return f"generated picture {index}"

    def open(self, index: int) -> Image.Image:
        """Compute the picture."""
        generator = torch.Generator().manual_seed(key(self.seed, index))
        position = int(self.labels[index]) / self.classes
        period = PERIODS[0] + (PERIODS[1] - PERIODS[0]) * position
        phase = torch.rand((), generator=generator) * period
        stripes = (torch.arange(self.side) + phase).mul(2 / period).long() % 2
        colour = torch.tensor(colorsys.hsv_to_rgb(position, 1.0, 255.0))
        noise = torch.randint(0, 256, (self.side, self.side, 3), generator=generator)
        pixels = (noise + stripes.view(1, -1, 1) * colour) / 2
        return Image.fromarray(pixels.to(torch.uint8).numpy())


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "it is gone"
    if isinstance(error, UnidentifiedImageError):
        return "of no known format, or damaged"
    words = str(error).strip().splitlines()
    return words[0].rstrip(".") if words else type(error).__name__
