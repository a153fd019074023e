"""Errors of an accelerator say where, and what to do."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import lockstep as ls
from lockstep.kernel.errors import UsageError

TEXT = "{} does not have a deterministic implementation, but you set ..."


class AdaptiveAvgPool2D(torch.autograd.Function):
    """What CUDA's pooling is in the graph of a backward pass."""

    @staticmethod
    def forward(context, images):
        return images * 1.0

    @staticmethod
    def backward(context, gradient):
        raise RuntimeError(TEXT.format("adaptive_avg_pool2d_backward_cuda"))


class Pool(nn.Module):
    def forward(self, inputs):
        return AdaptiveAvgPool2D.apply(inputs)


class Histogram(nn.Module):
    def forward(self, inputs):
        raise RuntimeError(TEXT.format("_histc_cuda with floating point input"))


CASES = [
    ([nn.Linear(6, 8), Pool(), nn.Linear(8, 3)], "set_detect_anomaly(True) shows where"),
    ([nn.Linear(6, 8), Histogram(), nn.Linear(8, 3)], "1 (Histogram) calls it"),
]


@pytest.mark.parametrize(("layers", "place"), CASES)
def test_the_operator_and_its_module_are_named(world_of_one, layers, place):
    trainer = ls.Trainer(
        nn.Sequential(*layers), nn.CrossEntropyLoss(), partial(torch.optim.SGD, lr=0.1)
    )
    with pytest.raises(UsageError, match="micro-batch 0: the operator") as caught:
        trainer.step((torch.zeros(8, 6), torch.zeros(8, dtype=torch.long)))
    assert place in str(caught.value)


class Assert(nn.Module):
    def forward(self, inputs):
        raise RuntimeError("CUDA error: device-side assert triggered\nCUDA kernel errors might be")


def test_a_failed_assertion_says_how_to_find_the_call(world_of_one):
    model = nn.Sequential(nn.Linear(6, 3), Assert())
    trainer = ls.Trainer(model, nn.CrossEntropyLoss(), partial(torch.optim.SGD, lr=0.1))
    with pytest.raises(UsageError, match="micro-batch 0, or earlier: an index is out of range"):
        trainer.step((torch.zeros(8, 6), torch.zeros(8, dtype=torch.long)))


def test_other_errors_stay(world_of_one):
    trainer = ls.Trainer(nn.Linear(6, 3), nn.CrossEntropyLoss(), partial(torch.optim.SGD, lr=0.1))
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        trainer.step((torch.zeros(8, 5), torch.zeros(8, dtype=torch.long)))
