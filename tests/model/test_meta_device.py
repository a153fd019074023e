"""Presence: parameters lose and get memory, and stay who they are."""

from __future__ import annotations

import torch
from torch import nn

from lockstep.model.meta_device import materialize, moved, release, tensors_of


def test_what_is_let_go_of_keeps_its_identity_and_has_no_memory():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.LSTM(3, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = list(model.parameters())
    release(model, lambda name: name.startswith("0."))
    assert all(old is new for old, new in zip(before, model.parameters(), strict=True))
    assert [p.is_meta for p in optimizer.param_groups[0]["params"]] == [False] * 2 + [True] * 6
    assert all(buffer.is_meta for buffer in model.buffers())
    assert [p.requires_grad for p in before] == [True] * 8


def test_what_gets_memory_keeps_its_identity_and_its_ties():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.BatchNorm1d(3), nn.Linear(3, 3))
        model[2].weight = model[0].weight
    before = list(model.parameters())
    materialize(model, "cpu", lambda name: not name.startswith("2."))
    assert all(old is new for old, new in zip(before, model.parameters(), strict=True))
    assert model[2].weight is model[0].weight
    assert [name for name, each in tensors_of(model).items() if each.is_meta] == ["2.bias"]


def test_only_what_has_memory_is_moved():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    release(model, lambda name: name.startswith("1."))
    kept = model[1].weight.detach().clone()
    assert moved(model, "cpu") is model
    assert [each.is_meta for each in model.parameters()] == [True, True, False, False]
    assert torch.equal(model[1].weight, kept)
