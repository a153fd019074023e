"""Augmentation: which part of a picture is looked at, and its pixels as a tensor.

    training     a random part: 8 to 100% of the area, 3:4 to 4:3 wide; mirrored half the time
    evaluation   the middle: a square of 7/8 of the shorter side

Either is scaled to a square of the wanted size, and each colour is normalised by
the mean and spread that it has in ImageNet: what published weights of image
networks were trained with. Random numbers come from torch's generator, which the
loader seeds for each sample.
"""

from __future__ import annotations

import math

import numpy
import torch
from PIL import Image

__all__ = ["Box", "centre_box", "cut", "mirrored", "normalised", "random_box"]

Box = tuple[float, float, float, float]  # left, top, right, bottom, in pixels

AREA = (0.08, 1.0)
RATIO = (3 / 4, 4 / 3)
ATTEMPTS = 10
CENTRE = 0.875
MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)  # ImageNet's, of red, green, blue
SPREAD = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)


def random_box(width: int, height: int) -> Box:
    """Draw the part of a picture that is trained on; the whole middle where none fits."""
    for _ in range(ATTEMPTS):
        area = width * height * _uniform(*AREA)
        ratio = math.exp(_uniform(math.log(RATIO[0]), math.log(RATIO[1])))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = _whole(width - w), _whole(height - h)
            return left, top, left + w, top + h
    w = min(width, round(height * RATIO[1]))
    return _middle(width, height, w, min(height, round(w / RATIO[0])))


def centre_box(width: int, height: int) -> Box:
    """Return the square in the middle that is evaluated."""
    side = min(width, height) * CENTRE
    return _middle(width, height, side, side)


def cut(image: Image.Image, box: Box, size: int) -> Image.Image:
    """Scale the part in `box` to `size` x `size` pixels of three colours.

    A JPEG is decoded at the half, quarter or eighth of its size where that still
    holds as many pixels as are wanted: up to several times faster.
    """
    left, top, right, bottom = box
    width, height = image.size
    wanted = (math.ceil(width * size / (right - left)), math.ceil(height * size / (bottom - top)))
    drafted = image.draft("RGB", wanted) if image.format == "JPEG" else None
    scale = drafted[1][2] / width if drafted else 1.0
    part = (left * scale, top * scale, right * scale, bottom * scale)
    resized = _coloured(image).resize((size, size), Image.Resampling.BILINEAR, part)
    return resized


def mirrored(image: Image.Image) -> Image.Image:
    """Mirror the picture left to right, or leave it: one or the other by chance."""
    chance = _uniform(0, 1) < 0.5
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if chance else image


def normalised(image: Image.Image) -> torch.Tensor:
    """Return the pixels as float32 [3, height, width], normalised."""
    pixels = torch.from_numpy(numpy.array(image)).permute(2, 0, 1)
    # Row by row: batches made of other strides would have another layout in worker processes.
    values = pixels.to(torch.float32, memory_format=torch.contiguous_format)
    return values.div_(255).sub_(MEAN).div_(SPREAD)


def _coloured(image: Image.Image) -> Image.Image:
    if image.mode == "RGB":
        return image
    if "transparency" in image.info:  # a palette that has it converts to RGB with a warning
        image = image.convert("RGBA")
    return image.convert("RGB")


def _middle(width: int, height: int, w: float, h: float) -> Box:
    left, top = (width - w) / 2, (height - h) / 2
    return left, top, left + w, top + h


def _uniform(low: float, high: float) -> float:
    return low + (high - low) * torch.rand(()).item()


def _whole(most: int) -> int:
    return int(torch.randint(most + 1, ()).item())
