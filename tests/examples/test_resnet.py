"""Residual networks without torchvision: their sizes, names, arithmetic and blocks."""

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


def published_shapes():
    """The names and shapes of the published weights, derived here from the paper's table 1."""
    shapes = {"conv1.weight": (64, 3, 7, 7), **norm("bn1", 64)}
    channels = 64
    for layer, count in enumerate(COUNTS, 1):
        width = 32 * 2**layer
        for index in range(count):
            name = f"layer{layer}.{index}"
            shapes |= {
                f"{name}.conv1.weight": (width, channels, 1, 1),
                **norm(f"{name}.bn1", width),
            }
            shapes |= {f"{name}.conv2.weight": (width, width, 3, 3), **norm(f"{name}.bn2", width)}
            shapes |= {f"{name}.conv3.weight": (4 * width, width, 1, 1)}
            shapes |= norm(f"{name}.bn3", 4 * width)
            if index == 0:
                shapes |= {f"{name}.downsample.0.weight": (4 * width, channels, 1, 1)}
                shapes |= norm(f"{name}.downsample.1", 4 * width)
            channels = 4 * width
    return shapes | {"fc.weight": (1000, 2048), "fc.bias": (1000,)}


def norm(name, channels):
    vectors = ("weight", "bias", "running_mean", "running_var")
    return {f"{name}.{each}": (channels,) for each in vectors} | {f"{name}.num_batches_tracked": ()}


def test_resnet50_has_25_557_032_parameters(network):
    assert sum(parameter.numel() for parameter in network.parameters()) == 25_557_032


@pytest.mark.parametrize(
    ("make", "parameters", "entries", "last"),
    [
        (resnet18, 11_689_512, 122, "layer4.1.bn2.weight"),
        (resnet34, 21_797_672, 218, "layer3.5.bn2.weight"),
        (resnet101, 44_549_160, 626, "layer3.22.conv3.weight"),
    ],
)
def test_the_other_sizes_are_the_published_ones(make, parameters, entries, last):
    with torch.device("meta"):
        model = make()
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    state = model.state_dict()
    assert len(state) == entries
    assert last in state
    assert "layer2.0.downsample.0.weight" in state


def test_names_and_shapes_are_the_published_ones(network):
    shapes = published_shapes()
    assert len(shapes) == 320
    assert {name: tuple(t.shape) for name, t in network.state_dict().items()} == shapes


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
