"""Blocks come to life: the same weights wherever, and whichever others are built."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lockstep.errors import UsageError
from lockstep.step.digest import digest
from lockstep.train.awakening import awaken, build


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 5))


def meta() -> nn.Module:
    with torch.device("meta"):
        return block()


def test_a_block_is_the_same_whichever_others_are_built():
    model = build([block, block, block], seed=3)
    assert digest(awaken(block, 3, 1).state_dict()) == digest(model[1].state_dict())
    assert digest(model[0].state_dict()) != digest(model[1].state_dict())
    assert digest(build([block, block], seed=4)[0].state_dict()) != digest(model[0].state_dict())


def test_a_block_of_the_meta_device_comes_to_the_same_life():
    assert digest(build([meta()], seed=3).state_dict()) == digest(build([block], 3).state_dict())
    assert digest(build([meta], seed=3).state_dict()) == digest(build([block], 3).state_dict())


def test_what_has_weights_keeps_them():
    given = block()
    before = digest(given.state_dict())
    assert build(given) is given
    assert digest(build([given])[0].state_dict()) == before


def test_the_generators_are_left_as_they_were():
    torch.manual_seed(0)
    wanted = torch.rand(3)
    torch.manual_seed(0)
    build([block])
    assert torch.equal(torch.rand(3), wanted)


class Stubborn(nn.Module):
    """Has a parameter and no way to reset it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


def test_what_cannot_come_to_life_is_named():
    with torch.device("meta"):
        stubborn = nn.Sequential(nn.Linear(3, 3), Stubborn())
    with pytest.raises(UsageError, match=r"^1 of block 1, a Stubborn, is on the meta device"):
        build([block, stubborn])
    with pytest.raises(UsageError, match="block 1 is a Tensor: give modules"):
        build([block, lambda: torch.ones(1)])
