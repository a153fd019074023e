"""The root of a backward pass: the bits of its gradient."""

import pytest
import torch

from lockstep.model.loss_root import LossRoot, scale_loss


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
