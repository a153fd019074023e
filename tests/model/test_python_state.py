"""Objects that blocks of several stages refer to are found, wherever they are kept."""

import pytest
import torch
from torch import nn

from lockstep.kernel.errors import UsageError
from lockstep.model.python_state import find_python_state, find_python_states
from lockstep.pipeline.inspection import FIRST, BlockInspector

TABLE = {}
LATEST = None


class Block(nn.Module):
    """Does something with the number of its call."""

    latest = None

    def __init__(self, action, held=None):
        super().__init__()
        self.action = action
        self.held = held

    def forward(self, x):
        self.action(self, x)
        return x


def into_a_global_dictionary(block, x):
    TABLE["x"] = x


def into_a_global_name(block, x):
    global LATEST
    LATEST = x


def into_the_class(block, x):
    Block.latest = x


def into_what_it_holds(block, x):
    block.held["x"] = x


def nowhere(block, x):
    pass


def by_hook():
    """Return two blocks, of which a hook of the first writes what the second one holds."""
    features = {}
    first = Block(nowhere)
    second = Block(nowhere, features)
    first.register_forward_hook(lambda module, inputs, output: features.update(x=output))
    return first, second


def both(action):
    return Block(action), Block(action)


def one_object():
    held = {}
    return Block(into_what_it_holds, held), Block(nowhere, [held])


def one_module():
    inner = Block(into_what_it_holds, {})
    return nn.Sequential(inner), Block(nowhere, [inner])


def states_of(first, second, loss=None):
    return find_python_states([{"0": first}, {"1": second}], loss)


def called(state, block, number):
    before = state.snapshot()
    block(torch.full((2,), float(number)))
    state.record_changes(before, "here")


@pytest.mark.parametrize(
    ("blocks", "path"),
    [
        (lambda: both(into_a_global_dictionary), r"TABLE\['x'\]"),
        (lambda: both(into_a_global_name), "LATEST"),
        (lambda: both(into_the_class), "Block.latest"),
        (by_hook, r"features\['x'\]"),
        (one_object, r"0.held\['x'\]"),
        (one_module, r"0.0.held\['x'\]"),
    ],
)
def test_a_shared_object_that_changes_twice_is_named(blocks, path):
    first, second = blocks()
    state, _ = states_of(first, second)
    called(state, first, 0)
    called(state, first, 0)  # the same value once more
    with pytest.raises(UsageError, match=rf"here: block 0 \(\w+\) changes {path}, which block 1"):
        called(state, first, 1)
    TABLE.clear()


def test_a_shared_object_is_compared_in_calls_that_are_not_inspected():
    """A change after the first 16 calls was found in every 64th call."""
    first, second = one_object()
    state, _ = states_of(first, second)
    inspector = BlockInspector(True, state, ["0"])
    for number in range(FIRST + 1):
        state.hold()
        if number == FIRST // 2:
            first.held["y"] = object()  # by the script, between two steps
        inspector.call_blocks([nn.Identity()], torch.ones(1), "here")
    inspector.call_blocks([first], torch.ones(1), "here")
    with pytest.raises(UsageError, match=r"here: block 0 \(Block\) changes 0.held\['x'\], which"):
        inspector.call_blocks([first], torch.zeros(1), "here")


def test_what_one_stage_alone_refers_to_may_change():
    first = Block(into_what_it_holds, {})
    second = Block(into_what_it_holds, {})
    state, _ = states_of(first, second)
    for number in range(3):
        called(state, first, number)


def test_the_loss_refers_to_what_its_closure_does():
    held = {}
    first = Block(into_what_it_holds, held)
    second = Block(nowhere)
    state = states_of(first, second, lambda outputs, targets: outputs.sum() + held["x"])[0]
    called(state, first, 0)
    with pytest.raises(UsageError, match="which the loss in another stage refers to"):
        called(state, first, 1)


def test_backward_finds_what_forward_assigned_and_leaves_what_it_assigns():
    block = Block(into_what_it_holds, {})
    state, _ = states_of(block, Block(nowhere))
    kept = []
    for number in range(3):
        called(state, block, number)
        kept.append(state.get_assigned())
    with state.restore_assigned(kept[0]):
        assert block.held["x"].tolist() == [0.0, 0.0]
    assert block.held["x"].tolist() == [2.0, 2.0]
    with state.restore_assigned(kept[1]):
        del block.held["x"]
    assert block.held == {}


class LazyMapping(dict):
    """Imports a module for each value, as the mappings of transformers do."""

    def __len__(self):
        raise ImportError

    def items(self):
        raise ImportError

    keys = values = __iter__ = items


def test_the_methods_of_a_mapping_are_not_called():
    block = Block(lambda *_: None, LazyMapping(a=1))
    state = find_python_state(block, "block")
    before = state.snapshot()
    dict.__setitem__(block.held, "b", 2)
    assert state.find_change(before) == "block.held['b']"
