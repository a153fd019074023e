"""Crops, resizing, flips and normalization of images, for training and evaluation.

    training     a random crop of 8 to 100% of the area, aspect 3:4 to 4:3, flipped half the time
    evaluation   the center crop: a square of 7/8 of the shorter side

Each crop is resized to a square, and each channel is normalized by the mean and standard
deviation of ImageNet, as published weights of image networks expect. Random numbers come from
torch's global generator, which the loader seeds for each sample.
"""

from __future__ import annotations

import math

import numpy
import torch
from PIL import Image

__all__ = [
    "MEAN",
    "STD",
    "Box",
    "center_crop_box",
    "crop_and_resize",
    "normalize",
    "random_crop_box",
    "random_flip",
    "upright_size",
]

Box = tuple[float, float, float, float]  # left, top, right, bottom, in pixels

AREA = (0.08, 1.0)
RATIO = (3 / 4, 4 / 3)
ATTEMPTS = 10
CENTER = 0.875
MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)  # of ImageNet, per channel
STD = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)

ORIENTATION = 0x0112  # the EXIF tag: 1 for upright, to 8
# Upright pixels are those of the file with columns or rows in reverse, and then transposed.
REVERSED_COLUMNS, REVERSED_ROWS, TRANSPOSED = (2, 3, 7, 8), (3, 4, 6, 7), (5, 6, 7, 8)


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


def upright_size(image: Image.Image) -> tuple[int, int]:
    """Return the width and height of an image as its EXIF orientation shows it."""
    width, height = image.size
    return (height, width) if _orientation(image) in TRANSPOSED else (width, height)


def crop_and_resize(image: Image.Image, box: Box, size: int) -> torch.Tensor:
    """Crop an image and resize the crop; return RGB pixels as uint8 [3, size, size].

    A JPEG is decoded at half, a quarter or an eighth of its size if that has enough pixels.

    Args:
        image: The image, of which nothing has been decoded yet.
        box: The crop, of the upright image; its edges are rounded to decoded pixels.
        size: The width and height of the result, in pixels.

    Raises:
        ValueError: Pixels of this mode have no RGB values.
    """
    orientation = _orientation(image)
    left, top, right, bottom = _stored_box(box, orientation, *image.size)
    scale = 1.0
    if image.format == "JPEG":
        width, height = image.size
        reduction = max(1, math.floor(min(right - left, bottom - top) / size))
        drafted = image.draft("RGB", (max(1, width // reduction), max(1, height // reduction)))
        scale = drafted[1][2] / width if drafted else 1.0
    left, top = round(left * scale), round(top * scale)
    right, bottom = max(left + 1, round(right * scale)), max(top + 1, round(bottom * scale))
    pixels = _rgb_pixels(image.crop((left, top, right, bottom)))
    # torch's kernel for bytes is several times faster than Pillow's. The result is contiguous.
    resized = torch.nn.functional.interpolate(
        pixels.permute(2, 0, 1).unsqueeze(0), (size, size), mode="bilinear", antialias=True
    ).squeeze(0)
    return _upright_pixels(resized, orientation)


def random_flip(pixels: torch.Tensor) -> torch.Tensor:
    """Flip pixels [3, height, width] left to right with probability 0.5."""
    return pixels.flip(2) if _uniform(0, 1) < 0.5 else pixels


def normalize(pixels: torch.Tensor) -> torch.Tensor:
    """Return the pixels [3, height, width] as float32, normalized."""
    # Contiguous, because batches with other strides would get another memory layout in workers.
    values = pixels.to(torch.float32, memory_format=torch.contiguous_format)
    return values.div_(255).sub_(MEAN).div_(STD)


def _rgb_pixels(image: Image.Image) -> torch.Tensor:
    """Return the pixels as uint8 [height, width, 3]."""
    mode = image.mode
    if mode.startswith("I;16"):  # gray, which Pillow would clip at 255
        gray = (numpy.asarray(image) >> 8).astype(numpy.uint8)
        return torch.from_numpy(gray).unsqueeze(2).expand(-1, -1, 3)
    if mode in ("I", "F"):
        kind = "float" if mode == "F" else "32-bit"
        raise ValueError(f"it has {kind} pixels; save it with 8 or 16 bits per channel")
    if mode != "RGB":
        if "transparency" in image.info:  # a palette with it converts to RGB with a warning
            image = image.convert("RGBA")
        image = image.convert("RGB")
    return torch.from_numpy(numpy.array(image))


def _orientation(image: Image.Image) -> int:
    """Return the EXIF orientation of an image that is not turned upright when it is decoded."""
    if image.format == "TIFF" or "exif" not in image.info:
        return 1
    return int(image.getexif().get(ORIENTATION, 1))


def _stored_box(box: Box, orientation: int, width: int, height: int) -> Box:
    """Return the box in the file, of `width` x `height` pixels, for a box of the upright image."""
    left, top, right, bottom = box
    if orientation in TRANSPOSED:
        left, top, right, bottom = top, left, bottom, right
    if orientation in REVERSED_COLUMNS:
        left, right = width - right, width - left
    if orientation in REVERSED_ROWS:
        top, bottom = height - bottom, height - top
    return left, top, right, bottom


def _upright_pixels(pixels: torch.Tensor, orientation: int) -> torch.Tensor:
    axes = [
        axis
        for axis, values in ((2, REVERSED_COLUMNS), (1, REVERSED_ROWS))
        if orientation in values
    ]
    pixels = pixels.flip(axes) if axes else pixels
    return pixels.transpose(1, 2) if orientation in TRANSPOSED else pixels


def _center_box(width: int, height: int, w: float, h: float) -> Box:
    left, top = (width - w) / 2, (height - h) / 2
    return left, top, left + w, top + h


def _uniform(low: float, high: float) -> float:
    return low + (high - low) * torch.rand(()).item()


def _randint(most: int) -> int:
    return int(torch.randint(most + 1, ()).item())
