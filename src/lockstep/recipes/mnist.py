"""mnist: 60,000 handwritten digits from the four IDX files; the 10,000 test digits are held out."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset

from lockstep.data.datasets import mnist
from lockstep.recipes.classification import Options
from lockstep.recipes.network import digit_network as network

__all__ = ["DEFAULTS", "load", "network"]

DEFAULTS = {"epochs": 10, "batch_size": 128, "lr": 0.05, "momentum": 0.5}

FOLDER = "data/mnist"


def load(options: Options) -> tuple[Dataset[Any], Dataset[Any]]:
    """Return the training and the test digits, read on each rank; rank 0 downloads."""
    folder = options.data or FOLDER
    return mnist(folder, train=True), mnist(folder, train=False)
