"""digits: the 1,797 handwritten digits of the UCI set, packaged; 359 are held out."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset

from lockstep.data.datasets import digits
from lockstep.data.partition import partition
from lockstep.recipes.classification import Options
from lockstep.recipes.network import digit_network as network

__all__ = ["DEFAULTS", "load", "network"]

DEFAULTS = {"epochs": 30, "batch_size": 32, "lr": 0.05, "momentum": 0.5}

HELD_OUT = 0.2
SPLIT_SEED = 0
"""Fixed, so that the held-out digits are the same ones whatever the training's seed."""


def load(options: Options) -> tuple[Dataset[Any], Dataset[Any]]:
    """Return the digits to train on and those held out."""
    training, held_out = partition(digits(), [1 - HELD_OUT, HELD_OUT], seed=SPLIT_SEED)
    return training, held_out
