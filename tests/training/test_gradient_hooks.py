"""Hooks that look at `.grad`: they find it there, on every backend and in every step."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd import Variable
from torch.nn import functional as F

import lockstep as ls
from lockstep.kernel.errors import RankError

SGD = partial(torch.optim.SGD, lr=0.1)
STEPS = 4
WAYS = [(2, "gloo", False), (2, None, False), (3, None, False), (2, None, True)]


def halve(parameters):
    for parameter in parameters:
        parameter.grad.mul_(0.5)


def on_module(model):
    model[2].register_full_backward_hook(lambda module, *_: halve(model[4].parameters()))


def on_every_module(model):
    def hook(module, *_):
        if isinstance(module, nn.Tanh):
            halve(model[4].parameters())

    return nn.modules.module.register_module_full_backward_hook(hook)


def on_parameters(model):
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: halve([parameter]))


def after_backward(model):
    def queue(gradient):
        Variable._execution_engine.queue_callback(lambda: halve(model.parameters()))

    model[4].register_forward_hook(lambda *_: _[2].register_hook(queue) and None)


def train(place, first, backend, shared):
    """Train on a fixed batch; put the hooks in place before step `first`."""
    torch.manual_seed(1)
    layers = [nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 4)]
    model = nn.Sequential(*layers)
    trainer = ls.Trainer(model, F.cross_entropy, SGD, storage="shared" if shared else "replicated")
    found = []
    handle = None
    for step in range(STEPS):
        if step == first:
            handle = place(model)
        trainer.step((torch.randn(16, 6), torch.randint(0, 4, (16,))))
        found.append(trainer.digest())
    if handle is not None:  # of a hook for all modules of the process
        handle.remove()
    return found


CASES = {
    "module": (on_module, 0),
    "module, from step 2": (on_module, 2),
    "every module": (on_every_module, 0),
    "every module, from step 2": (on_every_module, 2),
    "parameters": (on_parameters, 0),
    "parameters, from step 2": (on_parameters, 2),
    "end of backward": (after_backward, 0),
    "nothing": (None, None),
}


def every_case(shared):
    return {name: train(*case, None, shared) for name, case in CASES.items()}


def test_hooks_that_change_gradients_have_the_same_bits_in_every_layout(ranks):
    """The last micro-batch's gradients were taken out of .grad while backward ran."""
    (alone,) = ranks(every_case, 1, False)
    for n, backend, shared in WAYS:
        for found in ranks(every_case, n, shared, backend=backend):
            assert found == alone, (n, backend, shared)
    without = alone.pop("nothing")
    for name, found in alone.items():
        first = CASES[name][1]
        assert found[:first] == without[:first], name
        assert found[-1] != without[-1], name


def test_a_callback_that_comes_after_gradients_were_taken_is_named(ranks):
    with pytest.raises(RankError, match=r"rank [01], step 2: a callback was queued for the end"):
        ranks(train, 2, late_callback, 2, None, False, portable=False)


def late_callback(model):
    """Queue the callback from the first layer's backward, when the last one's is done."""

    def queue(gradient):
        Variable._execution_engine.queue_callback(lambda: None)

    model[0].register_forward_hook(lambda *_: _[2].register_hook(queue) and None)


def test_torchs_engine_is_its_own_after_a_step(ranks):
    def engine():
        before = Variable._execution_engine
        train(on_parameters, 0, None, False)
        return Variable._execution_engine is before

    assert ranks(engine, 2) == [True, True]
