"""The network of the handwritten-digit tutorials."""

from __future__ import annotations

from torch import nn

__all__ = ["digit_network"]


def digit_network() -> nn.Sequential:
    """Return the two-convolution network: images [n, 1, 28, 28] to ten scores [n, 10].

    21,840 parameters. Its layers are its units, each with random numbers of its own.
    """
    return nn.Sequential(
        nn.Conv2d(1, 10, kernel_size=5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(10, 20, kernel_size=5),
        nn.Dropout2d(),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(320, 50),
        nn.ReLU(),
        nn.Dropout(),
        nn.Linear(50, 10),
    )
