"""Networks: as large as they say, cut into blocks that hold every parameter."""

from __future__ import annotations

import re

import pytest
import torch

from benchmarks.step.networks import NETWORKS, OPTIMIZERS, blocks, chosen, count
from lockstep.kernel.errors import UsageError


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_has_as_many_parameters_as_it_says(name):
    said = re.search(r"([\d.,]+)( M)? parameters", NETWORKS[name].sentence)
    number = float(said[1].replace(",", "")) * (1e6 if said[2] else 1)
    assert count(NETWORKS[name]) == pytest.approx(number, rel=0.01)


@pytest.mark.parametrize("name", NETWORKS)
def test_blocks_hold_every_parameter_once(name):
    with torch.device("meta"):
        model = NETWORKS[name].build()
    held = [id(parameter) for block in blocks(model) for parameter in block.parameters()]
    assert sorted(held) == sorted(map(id, model.parameters()))


@pytest.mark.parametrize("name", ["tiny", "1m", "transformer"])
def test_a_batch_fits_its_model_and_repeats_with_its_seed(name):
    net = NETWORKS[name]
    inputs, targets = net.batch(3, 5)
    assert net.model()(inputs).shape == (3, net.classes)
    assert targets.max() < net.classes
    for again, other in ((net.batch(3, 5), True), (net.batch(3, 6), False)):
        assert torch.equal(again[0], inputs) is other


def test_unknown_names_raise():
    assert chosen("--optimizers", "adamw,sgd,adamw", OPTIMIZERS) == ["adamw", "sgd"]
    with pytest.raises(UsageError, match="--optimizers lion: choose from sgd,adamw"):
        chosen("--optimizers", "sgd,lion", OPTIMIZERS)
    with pytest.raises(UsageError, match="--models: choose one or several of tiny"):
        chosen("--models", "", NETWORKS)
