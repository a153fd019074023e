"""Replicas: the module's memory with other gradients and buffers."""

import pytest
import torch
from torch import nn

from lockstep.data_parallel.replica import make_leaves, move_tensors, replicate

CPU = torch.device("cpu")


def test_a_replica_shares_parameters_and_has_its_own_gradients_and_structure():
    shared = nn.Linear(3, 3)
    module = nn.ModuleDict(
        {"one": shared, "two": nn.Sequential(shared, nn.BatchNorm1d(3)), "rnn": nn.GRU(3, 2)}
    )
    module["rnn"].register_parameter("missing", None)
    tensors = [*module.parameters(), *module.buffers()]
    leaves = make_leaves(module.parameters(), move_tensors(tensors, CPU), has_gradient=True)
    copy = replicate(module, move_tensors(tensors, CPU) | leaves)
    assert copy["one"] is copy["two"][0]
    assert copy.state_dict().keys() == module.state_dict().keys()
    for one, two in zip(copy.parameters(), module.parameters(), strict=True):
        assert one is not two
        assert one.data_ptr() == two.data_ptr()
    inputs = torch.randn(4, 3)
    outputs = copy["rnn"](copy["two"](copy["one"](inputs)))[0]
    outputs.sum().backward()
    assert all(each.grad is None for each in module.parameters())
    assert all(each.grad is not None for each in copy.parameters())
    assert copy["rnn"].weight_hh_l0 is copy["rnn"]._flat_weights[1]


def test_a_write_to_a_parameter_before_backward_is_an_error_of_autograd():
    module = nn.Linear(3, 3)
    values = move_tensors(module.parameters(), CPU)
    copy = replicate(module, make_leaves(module.parameters(), values, has_gradient=True))
    outputs = copy(torch.randn(4, 3, requires_grad=True))
    with torch.no_grad():
        module.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs.sum().backward()
