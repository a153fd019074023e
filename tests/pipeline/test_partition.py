"""Partitions: the names of blocks, and which stage holds what."""

import pytest
from torch import nn

from lockstep.errors import LayoutError
from lockstep.pipeline.partition import Partition, find_block_names


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


def test_a_tied_parameter_has_several_holders_and_the_rest_one():
    partition = Partition(tuple(NAMES), (range(0, 2), range(2, 3), range(3, 4)))
    assert partition.find_holders(Model()) == {
        "embed.weight": [0, 2],
        "layers.0.weight": [0],
        "layers.0.bias": [0],
        "layers.1.weight": [1],
        "layers.1.bias": [1],
    }


def test_what_would_be_written_on_two_stages_is_refused():
    norm = nn.BatchNorm1d(4)
    model = nn.Sequential(norm, nn.ReLU(), norm)
    partition = Partition(("0", "1", "2"), (range(0, 2), range(2, 3)))
    with pytest.raises(LayoutError, match=r"buffer 0.running_mean belongs to .* stages \[0, 1\]"):
        partition.find_holders(model)
    inner = nn.Linear(4, 4)
    model = nn.Sequential(inner, nn.Sequential(nn.ReLU(), inner))
    with pytest.raises(LayoutError, match="block 0 of stage 0 is also called inside a block of"):
        Partition(("0", "1"), (range(0, 1), range(1, 2))).find_holders(model)
