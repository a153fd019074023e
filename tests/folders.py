"""Small folders of pictures."""

import torch
from PIL import Image


def write_pictures(folder, classes, count, side=48, suffix=".jpg"):
    """Write `count` random pictures for each of `classes`."""
    generator = torch.Generator().manual_seed(count)
    for name in classes:
        (folder / name).mkdir(parents=True)
        for number in range(count):
            pixels = torch.randint(
                0, 256, (side, side + number, 3), generator=generator, dtype=torch.uint8
            )
            Image.fromarray(pixels.numpy()).save(folder / name / f"{number}{suffix}")
    return folder
