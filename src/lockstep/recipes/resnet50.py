"""resnet50: ResNet-50 on image folders, trained as on ImageNet.

Training uses random crops and flips; evaluation uses the center crop. Without a folder it trains
on generated images, which show the speed, not the accuracy. The learning rate is 0.1 for a batch
of 256 and proportional to the batch size, with warmup and cosine decay. The last batch norm of
each bottleneck starts with weight 0 (Goyal et al., 2017). Labels are smoothed (Szegedy et al.,
2016).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from lockstep.data.image_folder import read_image_folder
from lockstep.data.images import ImageDataset, ImageSource, SyntheticImages
from lockstep.recipes.classification import Data, Options
from lockstep.recipes.resnet import Bottleneck, resnet50

__all__ = ["NOTICE", "defaults", "load", "network"]

HELD_OUT = 0.2
SPLIT_SEED = 0
"""Fixed, so that the held-out images do not depend on the seed of the training."""

CLASSES, TRAINING, TESTING = 10, 320, 80  # generated images
NOTICE = (
    f"Without --data, this trains on {TRAINING} generated images of {CLASSES} classes, which show "
    "the speed and whether the loss decreases, but not the accuracy on real images."
)

WARMUP = 5 / 90  # fraction of the epochs
BATCH_SIZE, RATE = 256, 0.1


def defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the default options; those for generated images are smaller."""
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
    """Return the images for training and the held-out images."""
    assert options.size is not None
    training: ImageSource
    held_out: ImageSource
    if options.data is None:
        side = options.size * 8 // 7
        training = SyntheticImages(TRAINING, CLASSES, side, seed=0)
        held_out = SyntheticImages(TESTING, CLASSES, side, seed=1)
        classes = CLASSES
    else:
        training, held_out = read_image_folder(options.data, HELD_OUT, SPLIT_SEED)
        classes = len(training.classes)
    return Data(
        ImageDataset(training, options.size, augment=True),
        ImageDataset(held_out, options.size, augment=False),
        classes,
    )


def network(classes: int) -> nn.Module:
    """Return the model, with weight 0 in the last batch norm of each bottleneck."""
    model = resnet50(classes)
    for block in model.blocks():
        if isinstance(block, Bottleneck):
            nn.init.zeros_(block.bn3.weight)
    return model
