"""digits: the 1,797 handwritten digits of the UCI set, packaged; 359 are held out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from lockstep.data.datasets import digits
from lockstep.data.partition import partition
from lockstep.recipes.classification import Data, Options
from lockstep.recipes.network import digit_network

__all__ = ["defaults", "load", "network"]

HELD_OUT = 0.2
SPLIT_SEED = 0
"""Fixed, so that the held-out digits are the same ones whatever the training's seed."""


def defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that were not given."""
    return {"epochs": 30, "batch_size": 32, "lr": 0.05, "momentum": 0.5}


def load(options: Options) -> Data:
    """Return the digits to train on and those held out."""
    training, held_out = partition(digits(), [1 - HELD_OUT, HELD_OUT], seed=SPLIT_SEED)
    return Data(training, held_out, classes=10)


def network(classes: int) -> nn.Module:
    """Return the model."""
    return digit_network()
