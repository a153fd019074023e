"""Devices of any kind, and the simulated accelerator that other tests use."""

from __future__ import annotations

import pytest
import torch

from lockstep import devices
from lockstep.audit import operator_tracer
from lockstep.kernel.seeds import default_generator, isolated, seed_torch, torch_generators
from lockstep.model.generator_states import state_of_torch
from simulated import ranks as simulated

CPU = torch.device("cpu")


def test_without_an_accelerator_everything_is_the_cpu():
    assert devices.find_accelerator() is None
    assert devices.device_names() == []
    assert devices.count_devices("cuda") == devices.count_devices("no such kind") == 0
    assert not devices.is_accelerator(CPU)
    assert not devices.is_accelerator(torch.device("meta"))
    assert default_generator(CPU) is torch.default_generator
    devices.synchronize(CPU)


def test_a_device_without_float64_is_used_only_if_it_is_named(monkeypatch):
    mps = torch.device("mps")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: mps)
    assert devices.find_accelerator() is None


def look_at_the_device():
    """Return what must be true of the simulated accelerator, by name."""
    first = torch.device("simulated", 0)
    second = torch.device("simulated", 1)
    ones = torch.ones(3, device=first)
    pinned = torch.zeros(3, pin_memory=True)
    found = {
        "found": devices.find_accelerator() == "simulated",
        "counted": devices.count_devices("simulated") == simulated.DEVICES,
        "named": devices.device_names() == ["simulated accelerator"] * simulated.DEVICES,
        "pinned": pinned.is_pinned() and not torch.zeros(3).is_pinned(),
    }
    pinned.copy_(ones, non_blocking=True)
    found["a copy comes late"] = pinned.tolist() == [0, 0, 0]
    devices.record_event(first).synchronize()
    found["and is there after an event"] = pinned.tolist() == [1, 1, 1]
    stream = torch.Stream(first)
    with stream:
        later = ones + 1
    found["another stream sees nothing"] = bool((later + 0).isnan().all())
    torch.accelerator.current_stream(first).wait_stream(stream)
    found["unless it waits"] = (later + 0).tolist() == [2, 2, 2]
    found["a tracer copies to the CPU"] = operator_tracer._copy([ones])[0].device == CPU
    for name, other in {"the CPU": torch.ones(3), "another device": ones.to(second)}.items():
        with pytest.raises(RuntimeError, match=r"on the same device|on one device"):
            ones + other
        found[f"{name} cannot be mixed in"] = True
    return found | look_at_generators(first)


def look_at_generators(device):
    def draw():
        return torch.rand(2, device=device).tolist()

    seed_torch(5, device)
    before = draw()
    state = state_of_torch(device)
    with isolated(device):
        inside = draw()
    seed_torch(5, device)
    return {
        "seeded": draw() == before,
        "restored": state_of_torch(device) == state and draw() == inside,
        "two states": list(torch_generators(device)) == ["torch", "simulated"],
        "its own": state_of_torch(device) != state_of_torch(torch.device(device.type, 1)),
    }


def test_the_simulated_accelerator_behaves_as_one():
    (found,) = simulated.run(look_at_the_device, 1, device="")
    assert [name for name, holds in found.items() if not holds] == []
