"""The context of a step: where a backward pass begins."""

import pytest
import torch

from lockstep.model.step_context import Attempt, StepContext


class Plain:
    loss_scale = None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_share_as_gradient_has_the_bits_of_a_scaled_loss(dtype):
    step = StepContext(Attempt(0, 0, 0), Plain())  # type: ignore[arg-type]
    for number in range(200):
        share = (number * 37 % 19 + 1) / (number % 23 + 31)
        found = []
        for is_root in (True, False):
            weight = torch.linspace(-3, 3, 41).to(dtype).requires_grad_()
            loss = weight.square().mean().reshape(() if number % 2 else 1)
            root, gradient = (
                step.find_root(loss, share) if is_root else (step.scale_loss(loss, share), None)
            )
            root.backward(gradient)
            found.append(weight.grad)
        assert torch.equal(*found)
