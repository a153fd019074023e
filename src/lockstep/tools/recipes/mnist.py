"""mnist: 60,000 handwritten digits from the four IDX files; the 10,000 test digits are held out."""

from __future__ import annotations

from lockstep.data.datasets import mnist
from lockstep.tools.recipes.classification import Data, Options, Recipe
from lockstep.tools.recipes.digits import digit_network

__all__ = ["FOLDER", "MNIST"]

FOLDER = "data/mnist"


def _load(options: Options) -> Data:
    """Return the training and the test digits."""
    folder = options.data or FOLDER
    return Data(mnist(folder, train=True), mnist(folder, train=False))


MNIST = Recipe(
    "mnist",
    {"epochs": 10, "batch_size": 128, "lr": 0.05},
    _load,
    digit_network,
    momentum=0.5,
    has_decay=False,
)
