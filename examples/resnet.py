"""Residual networks (He et al., 2015), as a sequence of blocks.

    images ─ conv1 ─ bn1 ─ relu ─ maxpool ─ layer1 ─ layer2 ─ layer3 ─ layer4 ─ avgpool ─ fc
                                 resnet18   2        2        2        2  basic blocks
                                 resnet34   3        4        6        3  basic blocks
                                 resnet50   3        4        6        3  bottlenecks
                                 resnet101  3        4        23       3  bottlenecks

    basic block  x ─┬─── 3x3 ─ 3x3 ──── (+) ─ relu
    bottleneck   x ─┬─ 1x1 ─ 3x3 ─ 1x1 ─ (+) ─ relu
                    └──── shortcut ───────┘

This is variant v1.5: the 3x3 convolution has the stride, while it is the first 1x1 convolution in
the paper. Parameters and buffers have the names of published weights ("layer1.0.conv1.weight").
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

__all__ = [
    "BasicBlock",
    "Bottleneck",
    "ResNet",
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "start_as_shortcuts",
]


class BasicBlock(nn.Module):
    """Two 3x3 convolutions, added to the input.

    The shape changes from [n, channels, h, w] to [n, width, h / stride, w / stride]. The shortcut
    is a 1x1 convolution if the shapes differ, else the identity.
    """

    expansion = 1
    """The ratio of the output channels to `width`."""

    def __init__(self, channels: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _make_shortcut(channels, width, stride)

    @property
    def last_norm(self) -> nn.BatchNorm2d:
        """The batch norm before the addition."""
        return self.bn2

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the output; `inputs` is not modified."""
        outputs: torch.Tensor = self.relu(self.bn1(self.conv1(inputs)))
        outputs = self.bn2(self.conv2(outputs))
        outputs += inputs if self.downsample is None else self.downsample(inputs)
        outputs = self.relu(outputs)
        return outputs


class Bottleneck(nn.Module):
    """Three convolutions with fewer channels in the middle, added to the input.

    The shape changes from [n, channels, h, w] to [n, 4 width, h / stride, w / stride]. The
    shortcut is a 1x1 convolution if the shapes differ, else the identity.
    """

    expansion = 4
    """The ratio of the output channels to `width`."""

    def __init__(self, channels: int, width: int, stride: int = 1) -> None:
        super().__init__()
        outside = self.expansion * width
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outside, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _make_shortcut(channels, outside, stride)

    @property
    def last_norm(self) -> nn.BatchNorm2d:
        """The batch norm before the addition."""
        return self.bn3

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the output; `inputs` is not modified."""
        outputs: torch.Tensor = self.relu(self.bn1(self.conv1(inputs)))
        outputs = self.relu(self.bn2(self.conv2(outputs)))
        outputs = self.bn3(self.conv3(outputs))
        outputs += inputs if self.downsample is None else self.downsample(inputs)
        outputs = self.relu(outputs)
        return outputs


def _make_shortcut(channels: int, outside: int, stride: int) -> nn.Sequential | None:
    """Return a 1x1 convolution that adapts the shape of the input; None if it fits."""
    if stride == 1 and channels == outside:
        return None
    shortcut = nn.Conv2d(channels, outside, 1, stride, bias=False)
    return nn.Sequential(shortcut, nn.BatchNorm2d(outside))


class ResNet(nn.Module):
    """A residual network that maps images [n, 3, h, w] to scores [n, classes].

    Each layer has twice as many channels as the previous one, and all layers except the first halve
    height and width. Convolutions are initialized from a normal distribution with variance
    2 / fan_out. With four layers and images of at most 32 pixels, batch norm needs micro-batches
    of at least two samples.

    Args:
        counts: The number of blocks of each layer.
        classes: The number of classes.
        width: The number of inner channels of the first layer.
        block: The type of the blocks.
    """

    def __init__(
        self,
        counts: Sequence[int],
        classes: int = 1000,
        width: int = 64,
        block: type[BasicBlock] | type[Bottleneck] = Bottleneck,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        channels = width
        inside = width
        self._layers: list[str] = []
        for number, count in enumerate(counts, 1):
            layer = nn.Sequential()
            for index in range(count):
                stride = 2 if number > 1 and index == 0 else 1
                layer.append(block(channels, inside, stride))
                channels = block.expansion * inside
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
        residual = [block for name in self._layers for block in self.get_submodule(name).children()]
        stem = [self.conv1, self.bn1, self.relu, self.maxpool]
        return [*stem, *residual, self.avgpool, self.flatten, self.fc]

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the scores of the classes."""
        outputs = images
        for block in self.blocks():
            outputs = block(outputs)
        return outputs


def start_as_shortcuts(model: ResNet) -> None:
    """Give the last batch norm of each residual block the weight 0 (Goyal et al., 2017).

    At the beginning of the training, each block then computes its shortcut.
    """
    for block in model.modules():
        if isinstance(block, (BasicBlock, Bottleneck)):
            nn.init.zeros_(block.last_norm.weight)


def resnet18(classes: int = 1000) -> ResNet:
    """Return ResNet-18: 11,689,512 parameters with 1,000 classes."""
    return ResNet((2, 2, 2, 2), classes, block=BasicBlock)


def resnet34(classes: int = 1000) -> ResNet:
    """Return ResNet-34: 21,797,672 parameters with 1,000 classes."""
    return ResNet((3, 4, 6, 3), classes, block=BasicBlock)


def resnet50(classes: int = 1000) -> ResNet:
    """Return ResNet-50: 25,557,032 parameters with 1,000 classes."""
    return ResNet((3, 4, 6, 3), classes)


def resnet101(classes: int = 1000) -> ResNet:
    """Return ResNet-101: 44,549,160 parameters with 1,000 classes."""
    return ResNet((3, 4, 23, 3), classes)
