"""Backward without torch's checks has the effects of `loss.backward`."""

import logging

import pytest
import torch
from torch.overrides import TorchFunctionMode

from lockstep.model.autograd_engine import run_backward


class Recorder(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.called = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.called.append(function)
        return function(*args, **(kwargs or {}))


def compute(weight):
    return (weight * torch.tensor([1.0, 2.0])).exp().sum()


@pytest.mark.parametrize("share", [None, 0.25])
def test_the_gradients_are_those_of_loss_backward(share):
    weight = torch.tensor([0.5, -1.0], requires_grad=True)
    gradient = None if share is None else torch.tensor(share)
    compute(weight).backward(gradient)
    expected, weight.grad = weight.grad, None
    loss = compute(weight)
    seen = []
    loss.register_hook(seen.append)
    run_backward(loss, gradient, retain_graph=True)
    assert torch.equal(weight.grad, expected)
    assert seen == [torch.tensor(1.0 if share is None else share)]
    run_backward(loss, gradient, retain_graph=False)
    assert torch.equal(weight.grad, 2 * expected)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        run_backward(loss, gradient, retain_graph=False)


def test_a_function_mode_sees_backward():
    weight = torch.ones(2, requires_grad=True)
    loss = compute(weight)
    with Recorder() as recorder:
        run_backward(loss, torch.tensor(1.0), retain_graph=False)
    assert torch.Tensor.backward in recorder.called


def test_torch_logs_the_graph_if_it_is_asked_to(caplog):
    loss = compute(torch.ones(2, requires_grad=True))
    with caplog.at_level(logging.DEBUG, logger="torch.autograd.graph"):
        run_backward(loss, torch.tensor(1.0), retain_graph=False)
    assert "Executing" in caplog.text
