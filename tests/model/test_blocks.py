"""Blocks: their names, by the model or by the user."""

import pytest
from torch import nn

from lockstep.kernel.errors import LayoutError
from lockstep.model.blocks import find_block_names


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Says(Model):
    def blocks(self):
        return [self.embed, self.layers, self.head]


class Named(nn.Sequential):
    """A sequence that makes its own layers, and has an attribute."""

    def __init__(self):
        super().__init__(nn.ReLU(), nn.Tanh())
        self.scale = 2.0


class Doubled(Named):
    """Computes something in addition to its children."""

    def forward(self, inputs):
        return super().forward(inputs) * self.scale


class Patched(Named):
    """Has a forward that only the object has."""

    def __init__(self):
        super().__init__()
        self.forward = lambda inputs: self[0](inputs)


NAMES = ["embed", "layers.0", "layers.1", "head"]


def test_blocks_are_named_by_the_model_or_by_the_user():
    assert find_block_names(nn.Sequential(nn.ReLU(), nn.Tanh()), None) == ["0", "1"]
    assert find_block_names(Model(), None) == []
    assert find_block_names(Says(), None) == NAMES
    assert find_block_names(Model(), ["embed", "layers", "head"]) == NAMES
    assert find_block_names(Named(), None) == ["0", "1"]
    assert find_block_names(Doubled(), None) == []
    assert find_block_names(Patched(), None) == []
    model = Model()
    assert find_block_names(model, [model.embed, *model.layers, model.head]) == NAMES


def test_a_block_that_is_not_in_the_model_is_named():
    with pytest.raises(LayoutError, match="Model has no module 'tail'"):
        find_block_names(Model(), ["embed", "tail"])
    with pytest.raises(LayoutError, match="the ReLU is not part of the model Model"):
        find_block_names(Model(), [nn.ReLU()])
