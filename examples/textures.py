"""Write a small set of real images: pieces of nine photographs that scikit-image ships.

    pip install scikit-image
    python textures.py textures
    lockstep run -n 2 -m examples.imagenet textures --arch resnet18 --size 64 --epochs 20 \
        --batch-size 32 --microbatches 4 --optimizer adamw --lr 0.001

Each photograph is a class. The pieces are gray, so that only the texture tells the classes apart.
Pieces for training and held-out pieces come from different parts of a photograph:

    ┌─────────────────────┬─────────┐
    │ train: 70%          │ val     │   along the longer side
    └─────────────────────┴─────────┘

The files are the same whenever the script runs with the same versions of Pillow and scikit-image.
"""

import argparse
import random
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from PIL import Image

PHOTOGRAPHS = {
    "brick": "brick.png",
    "coins": "coins.png",
    "galaxies": "hubble_deep_field.jpg",
    "grass": "grass.png",
    "gravel": "gravel.png",
    "moon": "moon.png",
    "page": "page.png",
    "retina": "retina.jpg",
    "tissue": "ihc.png",
}
RETINA = (300, 300, 1100, 1100)  # the part without the black corners
SIDE = 72  # pixels
COUNTS = {"train": 80, "val": 25}  # pieces per class
TRAINING_SHARE = 0.7
SEED = 0

Box = tuple[int, int, int, int]  # left, top, right, bottom, in pixels


def find_photographs() -> Path:
    """Return the folder of scikit-image's photographs, without importing the package."""
    found = find_spec("skimage")
    if found is None or found.origin is None:
        sys.exit("textures.py: scikit-image is missing; install it with: pip install scikit-image")
    return Path(found.origin).parent / "data"


def split(width: int, height: int) -> dict[str, Box]:
    """Return the part for training and the held-out part, which do not overlap."""
    if width >= height:
        cut = round(width * TRAINING_SHARE)
        return {"train": (0, 0, cut, height), "val": (cut, 0, width, height)}
    cut = round(height * TRAINING_SHARE)
    return {"train": (0, 0, width, cut), "val": (0, cut, width, height)}


def draw_pieces(part: Box, count: int, draw: random.Random) -> Iterator[Box]:
    """Yield squares at random positions within a part."""
    left, top, right, bottom = part
    for _ in range(count):
        x = draw.randint(left, right - SIDE)
        y = draw.randint(top, bottom - SIDE)
        yield x, y, x + SIDE, y + SIDE


def write_pieces(photographs: Path, folder: Path) -> int:
    """Write `folder/train/CLASS/N.jpg` and `folder/val/CLASS/N.jpg`; return their number."""
    written = 0
    for name, file in PHOTOGRAPHS.items():
        draw = random.Random(f"{SEED} {name}")
        with Image.open(photographs / file) as image:
            gray = image.convert("L").crop(RETINA if name == "retina" else None)
        for kind, part in split(*gray.size).items():
            (folder / kind / name).mkdir(parents=True, exist_ok=True)
            for number, box in enumerate(draw_pieces(part, COUNTS[kind], draw)):
                gray.crop(box).save(folder / kind / name / f"{number:02}.jpg", quality=90)
                written += 1
    return written


def main() -> None:
    """Write the images into the folder that the command line names."""
    parser = argparse.ArgumentParser(description="Write classes of textures as image folders.")
    parser.add_argument("folder", type=Path, help="folder to create")
    parser.add_argument("--photographs", type=Path, help="folder of scikit-image's photographs")
    options = parser.parse_args()
    written = write_pieces(options.photographs or find_photographs(), options.folder)
    print(f"wrote {written:,} images of {len(PHOTOGRAPHS)} classes to {options.folder}")


if __name__ == "__main__":
    main()
