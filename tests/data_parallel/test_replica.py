"""Replicas: the module's memory with other gradients and buffers."""

import pytest
import torch
from torch import nn

from lockstep.data_parallel.replica import replicate


def copy_of(module):
    leaves = {id(each): nn.Parameter(each.detach()) for each in module.parameters()}
    return replicate(module, leaves | {id(each): each for each in module.buffers()})


def test_a_replica_shares_parameters_and_has_its_own_gradients_and_structure():
    shared = nn.Linear(3, 3)
    module = nn.ModuleDict(
        {"one": shared, "two": nn.Sequential(shared, nn.BatchNorm1d(3)), "rnn": nn.GRU(3, 2)}
    )
    module["rnn"].register_parameter("missing", None)
    copy = copy_of(module)
    assert copy["one"] is copy["two"][0]
    assert copy.state_dict().keys() == module.state_dict().keys()
    for one, two in zip(copy.parameters(), module.parameters(), strict=True):
        assert one is not two
        assert one.data_ptr() == two.data_ptr()
    outputs = copy["rnn"](copy["two"](copy["one"](torch.randn(4, 3))))[0]
    outputs.sum().backward()
    assert all(each.grad is None for each in module.parameters())
    assert all(each.grad is not None for each in copy.parameters())
    assert copy["rnn"].weight_hh_l0 is copy["rnn"]._flat_weights[1]


def test_a_write_to_a_parameter_before_backward_is_an_error_of_autograd():
    module = nn.Linear(3, 3)
    outputs = copy_of(module)(torch.randn(4, 3, requires_grad=True))
    with torch.no_grad():
        module.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs.sum().backward()
