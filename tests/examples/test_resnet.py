"""Residual networks without torchvision: their sizes, names and blocks."""

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from examples.resnet import (
    Bottleneck,
    ResNet,
    resnet18,
    resnet34,
    resnet50,
    resnet101,
)

COUNTS = (3, 4, 6, 3)


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    return resnet50()


@pytest.mark.parametrize(
    ("make", "parameters", "entries", "last"),
    [
        (resnet18, 11_689_512, 122, "layer4.1.bn2.weight"),
        (resnet34, 21_797_672, 218, "layer3.5.bn2.weight"),
        (resnet50, 25_557_032, 320, "layer3.5.conv3.weight"),
        (resnet101, 44_549_160, 626, "layer3.22.conv3.weight"),
    ],
)
def test_sizes_and_names_are_the_published_ones(make, parameters, entries, last):
    with torch.device("meta"):
        model = make()
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    state = model.state_dict()
    assert len(state) == entries
    assert last in state
    assert "layer2.0.downsample.0.weight" in state


def test_blocks_hold_every_parameter_once_and_in_order(network):
    held = [parameter for block in network.blocks() for parameter in block.parameters()]
    assert [id(each) for each in held] == [id(each) for each in network.parameters()]


def test_blocks_end_at_every_bottleneck(network):
    assert sum(type(block) is Bottleneck for block in network.blocks()) == sum(COUNTS)


def test_any_cut_gives_the_same_bits():
    torch.manual_seed(0)
    network = ResNet((1, 2), classes=5, width=4)
    images = torch.randn(3, 3, 32, 32)
    whole = gradients(network, network, images)
    blocks = network.blocks()
    for cut in range(1, len(blocks)):
        ends = [0, cut, len(blocks)]
        stages = nn.Sequential(*(nn.Sequential(*blocks[lo:hi]) for lo, hi in pairwise(ends)))
        for name, gradient in gradients(network, stages, images).items():
            assert torch.equal(gradient, whole[name]), f"{name}, cut at {cut}"


def gradients(network, model, images):
    network.zero_grad()
    F.cross_entropy(model(images), torch.tensor([0, 1, 2])).backward()
    return {name: parameter.grad.clone() for name, parameter in network.named_parameters()}
