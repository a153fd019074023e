"""Inputs of sharded modules: whether the node of `fully_shard` changes the order of additions."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data_parallel.block_inputs import find_reordered_sum


class RegisterPostBackwardFunction(torch.autograd.Function):
    """The node that torch puts before a module, which does nothing to the values."""

    @staticmethod
    def forward(ctx, *inputs):
        return inputs

    @staticmethod
    def backward(ctx, *gradients):
        return gradients


def compute(model, is_wrapped):
    """Return the gradients of a model's parameters, and what was found in its graph.

    `model` is called with a function to call before each module, and with the parameters.
    """
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.randn(64, generator=generator).requires_grad_() for _ in range(4)]
    enter = RegisterPostBackwardFunction.apply if is_wrapped else lambda *inputs: inputs
    outputs = model(enter, parameters)
    found = find_reordered_sum([(output.grad_fn, output.output_nr) for output in outputs])
    torch.autograd.backward(outputs, [torch.full((64,), 0.7)] * len(outputs))
    gradients = [parameter.grad for parameter in parameters]
    return [None if grad is None else grad.numpy().tobytes() for grad in gradients], found


def is_changed(model):
    """Return whether something was found, which must be so if gradients have other bits."""
    whole, _ = compute(model, is_wrapped=False)
    sharded, found = compute(model, is_wrapped=True)
    assert found is not None or whole == sharded
    return found is not None, whole != sharded


def used_once(enter, parameters):
    x = parameters[0] * 1.1
    (inside,) = enter(x)
    return (inside * inside.tanh() * inside.exp(),)


def used_after_it(enter, parameters):
    x = parameters[0] * 1.1
    (inside,) = enter(x)
    return (inside * inside.tanh() + x.sin(),)


def used_before_it(enter, parameters):
    x = parameters[0] * 1.1
    skipped = x.sin()
    (inside,) = enter(x)
    return (inside * inside.tanh() + skipped,)


def used_once_inside_and_after_it(enter, parameters):
    x = parameters[0] * 1.1
    (inside,) = enter(x)
    return (inside.tanh() + x.sin(),)


def passed_twice(enter, parameters):
    x = parameters[0] * 1.1
    one, two = enter(x, x)
    return (one.tanh() * two.sin() + one.exp(),)


def returned_too(enter, parameters):
    _, x = torch.stack([parameters[0], parameters[1] * 1.1]).unbind()
    (inside,) = enter(x)
    return inside * inside.tanh(), x


def not_used(enter, parameters):
    x = parameters[0] * 1.1
    y = parameters[1] * 1.1
    inside, _ = enter(x, y)
    return (inside.tanh(),)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (used_once, (False, False)),
        (used_after_it, (True, True)),
        (used_before_it, (False, False)),
        (used_once_inside_and_after_it, (False, False)),
        (passed_twice, (True, True)),
        (returned_too, (True, True)),
        (not_used, (True, True)),
    ],
)
def test_what_changes_the_bits_is_found(model, expected):
    assert is_changed(model) == expected


OPERATIONS = [torch.add, torch.mul, torch.sub]
CALLS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 99), st.integers(0, 99)), max_size=5)


@given(st.lists(st.tuples(st.lists(st.integers(0, 99), max_size=3), CALLS), max_size=5))
def test_what_is_not_found_has_the_same_bits(modules):
    def model(enter, parameters):
        values = [parameter * 1.1 for parameter in parameters]
        for inputs, calls in modules:
            given = [values[number % len(values)] for number in inputs]
            inside = [*(enter(*given) if given else ()), *parameters[:1]]
            for operation, left, right in calls:
                operands = inside[left % len(inside)], inside[right % len(inside)]
                inside.append(OPERATIONS[operation](*operands))
            values.append(inside[-1])
        return [value.tanh() for value in values[-2:]]

    is_changed(model)
