"""Datasets of images from files, for training or for evaluation."""

from __future__ import annotations

import torch
from PIL import UnidentifiedImageError
from torch.utils.data import Dataset

from lockstep.data.image_folder import ImageFiles
from lockstep.data.image_transforms import (
    center_crop_box,
    crop_and_resize,
    normalize,
    random_crop_box,
    random_flip,
    upright_size,
)
from lockstep.kernel.errors import FileError

__all__ = ["ImageDataset"]


class ImageDataset(Dataset[tuple[torch.Tensor, int]]):
    """Image files as (float32 [3, size, size], label), normalized.

    An image that cannot be read raises FileError with its name.

    Args:
        source: The files, such as `read_image_folder` returns them.
        size: The width and height of the result, in pixels.
        augment: Whether to use a random crop and flip; otherwise the center crop.
    """

    def __init__(self, source: ImageFiles, size: int, *, augment: bool) -> None:
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


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "the file does not exist"
    if isinstance(error, UnidentifiedImageError):
        return "unknown format, or damaged"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    words = str(error).strip().splitlines()
    return words[0].rstrip(".") if words else type(error).__name__
