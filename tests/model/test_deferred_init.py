"""Deferred initialization: the same weights on every rank, and tensors with their identity."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lockstep.checksum import digest
from lockstep.kernel.errors import UsageError
from lockstep.model.deferred_init import (
    build,
    build_sequence,
    make_released,
    materialize,
    materialize_block,
    move_to_device,
    named_tensors,
    release,
)


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 5))


def meta() -> nn.Module:
    with torch.device("meta"):
        return block()


def test_a_block_is_the_same_whichever_others_are_built():
    model = build([block, block, block], seed=3)
    assert digest(materialize_block(block, 3, 1).state_dict()) == digest(model[1].state_dict())
    assert digest(model[0].state_dict()) != digest(model[1].state_dict())
    assert digest(build([block, block], seed=4)[0].state_dict()) != digest(model[0].state_dict())


def test_a_block_on_the_meta_device_gets_the_same_weights():
    assert digest(build([meta()], seed=3).state_dict()) == digest(build([block], 3).state_dict())
    assert digest(build([meta], seed=3).state_dict()) == digest(build([block], 3).state_dict())


def test_what_has_weights_keeps_them():
    given = block()
    before = digest(given.state_dict())
    assert build(given) is given
    assert digest(build([given])[0].state_dict()) == before


def test_the_generators_are_left_as_they_were():
    torch.manual_seed(0)
    wanted = torch.rand(3)
    torch.manual_seed(0)
    build([block])
    assert torch.equal(torch.rand(3), wanted)


class Stubborn(nn.Module):
    """Has a parameter and no way to reset it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


def test_blocks_that_cannot_be_built_are_named():
    with torch.device("meta"):
        stubborn = nn.Sequential(nn.Linear(3, 3), Stubborn())
    with pytest.raises(UsageError, match=r"^1 of block 1, a Stubborn, is on the meta device"):
        build([block, stubborn])
    with pytest.raises(UsageError, match="block 1 is a Tensor: pass modules"):
        build([block, lambda: torch.ones(1)])


class Calibrated(nn.Linear):
    """Looks at its weights when it is made, and has a parameter in memory on any device."""

    def __init__(self) -> None:
        super().__init__(5, 5)
        self.scale = nn.Parameter(torch.ones(3, device="cpu"))
        self.largest = self.weight.max().item()


def test_blocks_that_are_not_held_have_no_memory():
    shared = nn.Linear(5, 5)
    blocks = [block, Calibrated, meta, lambda: nn.Sequential(shared), lambda: shared]
    whole = build(blocks, seed=3)
    part = build_sequence([*blocks, meta()], [1, 4], seed=3)
    built = {name for name, each in part.state_dict().items() if not each.is_meta}
    own = {"1.scale", "1.weight", "1.bias", "4.weight", "4.bias"}
    assert built == own | {"3.0.weight", "3.0.bias"}  # the same tensors as those of block 4
    assert all(torch.equal(part.state_dict()[name], whole.state_dict()[name]) for name in own)
    assert part[:5].state_dict().keys() == whole.state_dict().keys()
    nothing = build_sequence([Calibrated, Calibrated], [], seed=3)
    assert all(each.is_meta for each in nothing.parameters())


def test_a_factory_that_loads_weights_is_quiet_without_memory():
    weights = block().state_dict()
    calls = []

    def loaded() -> nn.Module:
        made = block()
        calls.append(made[0].weight.device.type)
        made.load_state_dict(weights)
        return made

    nothing = build_sequence([loaded], [])
    assert all(each.is_meta for each in nothing.state_dict().values())
    assert calls == ["meta"]
    assert digest(build([loaded])[0].state_dict()) == digest(weights)


def test_released_parameters_keep_their_identity():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.LSTM(3, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = list(model.parameters())
    release(model, lambda name: name.startswith("0."))
    assert all(old is new for old, new in zip(before, model.parameters(), strict=True))
    assert [p.is_meta for p in optimizer.param_groups[0]["params"]] == [False] * 2 + [True] * 6
    assert all(buffer.is_meta for buffer in model.buffers())
    assert [p.requires_grad for p in before] == [True] * 8


def test_materialized_parameters_keep_their_identity_and_ties():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.BatchNorm1d(3), nn.Linear(3, 3))
        model[2].weight = model[0].weight
    before = list(model.parameters())
    materialize(model, "cpu", lambda name: not name.startswith("2."))
    assert all(old is new for old, new in zip(before, model.parameters(), strict=True))
    assert model[2].weight is model[0].weight
    assert [name for name, each in named_tensors(model).items() if each.is_meta] == ["2.bias"]


def test_only_tensors_with_memory_are_moved():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    release(model, lambda name: name.startswith("1."))
    kept = model[1].weight.detach().clone()
    assert move_to_device(model, "cpu") is model
    assert [each.is_meta for each in model.parameters()] == [True, True, False, False]
    assert torch.equal(model[1].weight, kept)


def test_a_released_parameter_is_released_again():
    """A copy of a model in stages, and a second trainer of the same blocks, do this."""
    once = make_released(nn.Parameter(torch.ones(3, 2)), "weight")
    again = make_released(once, "0.weight")
    assert type(again) is type(once)
    assert (again.path, again.origin, again.shape) == ("0.weight", once.origin, once.shape)
