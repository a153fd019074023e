"""mnist: 60,000 handwritten digits from the four IDX files; the 10,000 test digits are held out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from lockstep.data.datasets import mnist
from lockstep.recipes.classification import Data, Options
from lockstep.recipes.digits import digit_network

__all__ = ["defaults", "load", "network"]

FOLDER = "data/mnist"


def defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the default options."""
    return {"epochs": 10, "batch_size": 128, "lr": 0.05, "momentum": 0.5}


def load(options: Options) -> Data:
    """Return the training and the test digits."""
    folder = options.data or FOLDER
    return Data(mnist(folder, train=True), mnist(folder, train=False), classes=10)


def network(classes: int) -> nn.Module:
    """Return the model."""
    return digit_network()
