"""Functions around the calls of modules, compiled or not."""

import copy

import torch
from torch import nn

from lockstep.model.compilation import is_compiled_in_place
from lockstep.model.native_seeder import make_rng_scopes


def test_a_seeded_module_is_no_compiled_one_and_can_be_copied():
    model = nn.Linear(2, 2)
    compiled = nn.Linear(2, 2)
    compiled.compile(backend="eager")
    own = compiled._compiled_call_impl
    for module, is_compiled in ((model, False), (compiled, True)):
        with make_rng_scopes([module], module, seed=0, device=torch.device("cpu")).seed_calls():
            assert is_compiled_in_place(module) is is_compiled
            assert not module._forward_pre_hooks
            copied = copy.deepcopy(module)
        assert copied._compiled_call_impl is None
    assert model._compiled_call_impl is None
    assert compiled._compiled_call_impl is own


def test_a_module_that_is_compiled_between_steps_stays_compiled():
    """The calls are made once, and made again if what they replace has changed."""
    module = nn.Linear(2, 2)
    scopes = make_rng_scopes([module], module, seed=0, device=torch.device("cpu"))
    with scopes.seed_calls():
        assert not is_compiled_in_place(module)
    module.compile(backend="eager")
    own = module._compiled_call_impl
    for _ in range(2):
        with scopes.seed_calls():
            assert is_compiled_in_place(module)
        assert module._compiled_call_impl is own
