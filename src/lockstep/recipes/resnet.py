"""Residual networks of bottlenecks (He et al., 2015), as a sequence of blocks.

    images ─ conv1 ─ bn1 ─ relu ─ maxpool ─ layer1 ─ layer2 ─ layer3 ─ layer4 ─ avgpool ─ fc
                                            3        4        6        3  bottlenecks

    bottleneck   x ─┬─ 1x1 ─ 3x3 ─ 1x1 ─ (+) ─ relu
                    └──── shortcut ───────┘

This is variant v1.5: the 3x3 convolution has the stride, while it is the first 1x1 convolution in
the paper. Parameters and buffers have the names of published weights ("layer1.0.conv1.weight").
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

__all__ = ["Bottleneck", "ResNet", "resnet50"]

EXPANSION = 4
"""The ratio of the output channels of a bottleneck to its inner channels."""


class Bottleneck(nn.Module):
    """Three convolutions with fewer channels in the middle, added to the input.

    The shape changes from [n, channels, h, w] to [n, 4 width, h / stride, w / stride]. The
    shortcut is a 1x1 convolution if the shapes differ, else the identity.
    """

    def __init__(self, channels: int, width: int, stride: int = 1) -> None:
        super().__init__()
        outside = EXPANSION * width
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outside, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or channels != outside:
            shortcut = nn.Conv2d(channels, outside, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(outside))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the output; `inputs` is not modified."""
        outputs = self.relu(self.bn1(self.conv1(inputs)))
        outputs = self.relu(self.bn2(self.conv2(outputs)))
        outputs = self.bn3(self.conv3(outputs))
        outputs += inputs if self.downsample is None else self.downsample(inputs)
        return self.relu(outputs)  # type: ignore[no-any-return]


class ResNet(nn.Module):
    """A residual network that maps images [n, 3, h, w] to scores [n, classes].

    Each layer has twice as many channels as the previous one, and all layers except the first halve
    height and width. Convolutions are initialized from a normal distribution with variance
    2 / fan_out. With four layers and images of at most 32 pixels, batch norm needs micro-batches
    of at least two samples.

    Args:
        counts: The number of bottlenecks of each layer.
        classes: The number of classes.
        width: The number of inner channels of the first layer.
    """

    def __init__(self, counts: Sequence[int], classes: int = 1000, width: int = 64) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        channels, inside = width, width
        self._layers: list[str] = []
        for number, count in enumerate(counts, 1):
            layer = nn.Sequential()
            for index in range(count):
                stride = 2 if number > 1 and index == 0 else 1
                layer.append(Bottleneck(channels, inside, stride))
                channels = EXPANSION * inside
            self._layers.append(f"layer{number}")
            self.add_module(f"layer{number}", layer)
            inside *= 2
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(channels, classes)
        self._initialize()

    def _initialize(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def blocks(self) -> list[nn.Module]:
        """Return the modules that `forward` calls in sequence, for pipeline stages."""
        bottlenecks = [
            block for name in self._layers for block in self.get_submodule(name).children()
        ]
        stem = [self.conv1, self.bn1, self.relu, self.maxpool]
        return [*stem, *bottlenecks, self.avgpool, self.flatten, self.fc]

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the scores of the classes."""
        outputs = images
        for block in self.blocks():
            outputs = block(outputs)
        return outputs


def resnet50(classes: int = 1000) -> ResNet:
    """Return ResNet-50: 25,557,032 parameters with 1,000 classes."""
    return ResNet((3, 4, 6, 3), classes)
