"""mnist: 60,000 handwritten digits from the four IDX files; the 10,000 test digits are held out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.data.datasets import mnist
from lockstep.tools.recipes.classification import Data, Options, Recipe
from lockstep.tools.recipes.digits import HEAD, make_network

__all__ = ["FOLDER", "MNIST"]

FOLDER = "data/mnist"


def _defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the default options."""
    return {"epochs": 10, "batch_size": 128, "lr": 0.05, "momentum": 0.5, "portable": None}


def _load(options: Options) -> Data:
    """Return the training and the test digits."""
    folder = options.data or FOLDER
    return Data(mnist(folder, train=True), mnist(folder, train=False), classes=10)


MNIST = Recipe("mnist", _defaults, _load, make_network, HEAD)
