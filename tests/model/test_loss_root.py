"""The root of a backward pass: the bits of its gradient, and the effects of the pass."""

import logging

import pytest
import torch
from torch.overrides import TorchFunctionMode

from lockstep.model.loss_root import LossRoot, run_backward, scale_loss


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_share_as_gradient_has_the_bits_of_a_scaled_loss(dtype):
    roots = LossRoot(None)
    for number in range(200):
        share = (number * 37 % 19 + 1) / (number % 23 + 31)
        found = []
        for is_root in (True, False):
            weight = torch.linspace(-3, 3, 41).to(dtype).requires_grad_()
            loss = weight.square().mean().reshape(() if number % 2 else 1)
            root, gradient = (
                roots.find(loss, share) if is_root else (scale_loss(loss, share, None), None)
            )
            root.backward(gradient)
            found.append(weight.grad)
        assert torch.equal(*found)


def test_a_hook_that_writes_to_the_gradient_of_a_loss_does_not_change_the_next_one():
    roots = LossRoot(None)
    for share in (0.25, 0.25, 0.5, 0.25):
        weight = torch.ones(2, requires_grad=True)
        loss = weight.sum()
        loss.register_hook(lambda gradient: gradient.mul_(3))
        root, gradient = roots.find(loss, share)
        assert gradient is not None
        assert gradient.item() == share
        root.backward(gradient)
        assert weight.grad is not None
        assert weight.grad.tolist() == [3 * share] * 2


def test_losses_of_another_shape_or_dtype_have_their_own_gradients():
    roots = LossRoot(None)
    for shape in ((), (1,), (1, 1), ()):
        for dtype in (torch.float32, torch.float64):
            loss = torch.ones(shape, dtype=dtype, requires_grad=True)
            _, gradient = roots.find(loss, 0.5)
            assert gradient is not None
            assert (gradient.shape, gradient.dtype) == (loss.shape, loss.dtype)
            gradient_again = roots.find(loss, 0.5)[1]
            assert gradient_again is gradient


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
    expected = weight.grad
    weight.grad = None
    loss = compute(weight)
    seen = []
    loss.register_hook(seen.append)
    run_backward(loss, gradient, retain_graph=True)
    assert torch.equal(weight.grad, expected)
    assert seen == [torch.tensor(1.0 if share is None else share)]
    run_backward(loss, gradient, retain_graph=None)  # torch's default
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
