"""Partitions: which stage holds what."""

import pytest
from torch import nn

from lockstep.kernel.errors import LayoutError
from lockstep.pipeline.partition import Partition


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


NAMES = ["embed", "layers.0", "layers.1", "head"]


def test_a_tied_parameter_has_several_holders_and_the_rest_one():
    partition = Partition(tuple(NAMES), (range(0, 2), range(2, 3), range(3, 4)))
    assert partition.find_holders(Model()) == {
        "embed.weight": [0, 2],
        "head.weight": [0, 2],
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
