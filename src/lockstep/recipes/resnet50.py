"""resnet50: ResNet-50 on folders of pictures, one folder a class, as ImageNet is trained.

Random parts of pictures, mirrored or not, in training; their middle in evaluation.
Without a folder it trains on generated pictures, which show how fast, not how well.
The learning rate is 0.1 for a batch of 256 and in proportion for others, with a
warm-up and a cosine, and each bottleneck begins as nothing but its shortcut (Goyal et
al., 2017); labels are smoothed (Szegedy et al., 2016).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from lockstep.data.image_folder import read_image_folder
from lockstep.data.images import ImageDataset, ImageSource, SyntheticImages
from lockstep.recipes.classification import Data, Options
from lockstep.recipes.resnet import Bottleneck, resnet50

__all__ = ["NOTICE", "defaults", "load", "network"]

HELD_OUT = 0.2
SPLIT_SEED = 0
"""Fixed, so that the held-out pictures are the same ones whatever the training's seed."""

CLASSES, TRAINING, TESTING = 10, 320, 80  # of generated pictures
NOTICE = (
    f"No folder was given with --data: this trains on {TRAINING} generated pictures of {CLASSES} "
    "classes, which show how fast it is and whether it learns, not how well it does on real ones."
)

WARMUP = 5 / 90  # of the epochs
BATCH_SIZE, RATE = 256, 0.1


def defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that were not given; those for generated pictures are smaller."""
    generated = given.get("data") is None
    epochs = given.get("epochs", 2 if generated else 90)
    batch_size = given.get("batch_size", 32 if generated else BATCH_SIZE)
    return {
        "epochs": epochs,
        "batch_size": batch_size,
        "lr": RATE * batch_size / BATCH_SIZE,
        "momentum": 0.9,
        "weight_decay": 1e-4,
        "label_smoothing": 0.1,
        "warmup": epochs * WARMUP,
        "lr_decay": "cosine",
        "size": 128 if generated else 224,
    }


def load(options: Options) -> Data:
    """Return the pictures to train on and those held out, read or computed when needed."""
    assert options.size is not None
    training: ImageSource
    held_out: ImageSource
    if options.data is None:
        side = options.size * 8 // 7
        training = SyntheticImages(TRAINING, CLASSES, side, seed=0)
        held_out = SyntheticImages(TESTING, CLASSES, side, seed=1)
        classes = CLASSES
    else:
        training, held_out = read_image_folder(Path(options.data), HELD_OUT, SPLIT_SEED)
        classes = len(training.classes)
    return Data(
        ImageDataset(training, options.size, augment=True),
        ImageDataset(held_out, options.size, augment=False),
        classes,
    )


def network(classes: int) -> nn.Module:
    """Return the model, with a last batch norm of weight 0 in each bottleneck."""
    model = resnet50(classes)
    for block in model.blocks():
        if isinstance(block, Bottleneck):
            nn.init.zeros_(block.bn3.weight)
    return model
