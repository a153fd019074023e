"""resnet18, resnet34, resnet50, resnet101 and vit: networks on image folders, as on ImageNet.

Training uses random crops and flips; evaluation uses the center crop. Without a folder they train
on generated images, which show the speed, not the accuracy. Labels are smoothed (Szegedy et al.,
2016), and the learning rate is proportional to the batch size, with warmup and cosine decay.

           optimizer   lr                per samples   weight decay   epochs   in addition
    resnet SGD         0.1               256           1e-4           90
    vit    AdamW       0.003             4,096         0.3            300      mixup, clipping
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from lockstep.data.image_folder import read_image_folder
from lockstep.data.images import ImageDataset, ImageSource, SyntheticImages
from lockstep.model.forward import Metric, accuracy
from lockstep.tools.recipes.classification import Data, Options, Recipe
from lockstep.tools.recipes.resnet import (
    ResNet,
    resnet18,
    resnet34,
    resnet50,
    resnet101,
    start_as_shortcuts,
)
from lockstep.tools.recipes.vision_transformer import vit_b_16

__all__ = ["METRICS", "RECIPES", "describe_generated_images", "load"]

HELD_OUT = 0.2
SPLIT_SEED = 0
"""Fixed, so that the held-out images do not depend on the seed of the training."""

CLASSES, TRAINING, TESTING = 10, 320, 80  # generated images

RESNET_WARMUP = 5 / 90  # fraction of the epochs
VIT_WARMUP = 30 / 300

METRICS: dict[str, Metric] = {"accuracy": accuracy, "top5_accuracy": partial(accuracy, k=5)}


def describe_generated_images() -> str:
    """Return a sentence about a training without a folder of images."""
    return (
        f"Without --data, this trains on {TRAINING} generated images of {CLASSES} classes, which "
        "show the speed and whether the loss decreases, but not the accuracy on real images."
    )


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


def _resnet_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the default options of a ResNet; those for generated images are smaller."""
    common = _common_defaults(given, epochs=90, batch_size=256, warmup=RESNET_WARMUP)
    return common | {
        "lr": 0.1 * common["batch_size"] / 256,
        "momentum": 0.9,
        "weight_decay": 1e-4,
        "label_smoothing": 0.1,
    }


def _vit_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the default options of ViT-B/16; those for generated images are smaller."""
    common = _common_defaults(given, epochs=300, batch_size=1024, warmup=VIT_WARMUP)
    return common | {
        "optimizer": "adamw",
        "lr": 0.003 * common["batch_size"] / 4096,
        "weight_decay": 0.3,
        "label_smoothing": 0.11,
        "mixup": 0.2,
        "max_grad_norm": 1.0,
    }


def _common_defaults(
    given: Mapping[str, Any], epochs: int, batch_size: int, warmup: float
) -> dict[str, Any]:
    generated = given.get("data") is None
    epochs = given.get("epochs", 2 if generated else epochs)
    return {
        "epochs": epochs,
        "batch_size": given.get("batch_size", 32 if generated else batch_size),
        "warmup": epochs * warmup,
        "lr_decay": "cosine",
        "size": 128 if generated else 224,
    }


def _make_resnet(make: Callable[[int], ResNet], options: Options, classes: int) -> nn.Module:
    model = make(classes)
    start_as_shortcuts(model)
    return model


def _make_vit(options: Options, classes: int) -> nn.Module:
    assert options.size is not None
    return vit_b_16(options.size, classes)


def _select_vit_options(name: str, parameter: nn.Parameter) -> dict[str, Any]:
    """Exclude biases, norms, the class token and the positions from the weight decay."""
    is_vector = parameter.ndim < 2 or name in ("class_token", "encoder.pos_embedding")
    return {"weight_decay": 0.0} if is_vector else {}


RESNETS = {
    "resnet18": resnet18,
    "resnet34": resnet34,
    "resnet50": resnet50,
    "resnet101": resnet101,
}

RECIPES = (
    *(
        Recipe(name, _resnet_defaults, load, partial(_make_resnet, make), "fc", metrics=METRICS)
        for name, make in RESNETS.items()
    ),
    Recipe("vit", _vit_defaults, load, _make_vit, "heads.head", _select_vit_options, METRICS),
)
