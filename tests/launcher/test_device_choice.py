"""Which device a rank uses, its backend and its settings."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import HashStore

from lockstep.kernel.errors import UsageError
from lockstep.launcher import device_choice
from lockstep.launcher.device_choice import (
    choose_device,
    find_bound_device,
    find_device_backend,
    is_shared_by_ranks,
    may_be_shared,
    require_deterministic,
    select_device,
)
from lockstep.launcher.environment import RankInfo


def rank(local_rank, of=4):
    return RankInfo(rank=local_rank, world_size=of, local_rank=local_rank, local_world_size=of)


@pytest.fixture
def two_gpus(monkeypatch):
    """Let this process see two devices of type cuda, which it must not use."""
    monkeypatch.setattr(device_choice, "find_accelerator", lambda: "cuda")
    monkeypatch.setattr(device_choice, "count_devices", lambda kind: 2 if kind == "cuda" else 0)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(("asked", "local_rank", "device"), [
    (None, 1, "cuda:1"),
    ("cuda", 1, "cuda:1"),
    ("cuda:0", 3, "cuda:0"),
    ("cpu", 3, "cpu"),
])  # fmt: skip
def test_a_rank_uses_the_device_with_its_local_rank(asked, local_rank, device):
    assert choose_device(asked, rank(local_rank)) == torch.device(device)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(("asked", "local_rank", "message"), [
    (None, 2, r"rank 2 has local rank 2, but this process sees 2 cuda devices: start at most 2 "
              r"ranks on this host; if the launcher .*init\(device='cuda:0'\)"),
    ("cuda:2", 0, r"init\(device='cuda:2'\): this process sees 2 cuda devices, numbered from 0"),
    ("xpu", 0, r"init\(device='xpu'\): torch .* finds no such device on this host"),
])  # fmt: skip
def test_a_device_that_is_not_here_is_an_error(asked, local_rank, message):
    with pytest.raises(UsageError, match=message):
        choose_device(asked, rank(local_rank))


def test_without_an_accelerator_ranks_use_the_cpu(monkeypatch):
    monkeypatch.setattr(device_choice, "find_accelerator", lambda: None)
    assert choose_device(None, rank(3)) == torch.device("cpu")


def test_cuda_without_nccl_uses_gloo(monkeypatch):
    available = ["gloo"]
    monkeypatch.setattr(torch.distributed, "is_backend_available", available.__contains__)
    assert find_device_backend(torch.device("cuda")) == "gloo"
    with pytest.raises(UsageError, match="no backend for tensors on hpu: install the package"):
        find_device_backend(torch.device("hpu"))
    available.append("nccl")
    assert find_device_backend(torch.device("cuda")) == "nccl"


def test_cuda_is_selected_with_deterministic_settings(monkeypatch):
    selected = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", selected.append)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # so that it is restored if it is not set
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    select_device(torch.device("cuda", 1))
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert not torch.backends.cudnn.benchmark
    assert selected == [torch.device("cuda", 1)]
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    with pytest.raises(UsageError, match="CUBLAS_WORKSPACE_CONFIG=:0:0: cuBLAS is deterministic"):
        select_device(torch.device("cuda", 1))


def test_kernels_must_not_be_chosen_by_their_speed(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    require_deterministic(torch.device("cpu"))
    with pytest.raises(UsageError, match=r"cudnn.benchmark is on: .* remove the line that sets it"):
        require_deterministic(torch.device("cuda", 0))


@pytest.mark.parametrize(("device", "backend", "is_bound"), [
    ("cuda:1", "cpu:gloo,cuda:nccl", True),
    ("cuda:1", "nccl", True),
    ("cuda:1", "cpu:gloo,cuda:gloo", False),
    ("cuda:1", "gloo", False),
    ("cpu", "lockstep", False),
])  # fmt: skip
def test_the_group_of_gloo_is_not_bound_to_a_device(device, backend, is_bound):
    found = find_bound_device(torch.device(device), backend)
    assert found == (torch.device(device) if is_bound else None)


class Identities:
    """What identifies the devices of each number."""

    def __init__(self, names):
        self.names = names

    def identify(self, device):
        return self.names[device.index]


@pytest.mark.parametrize(("names", "is_shared"), [("abc", False), ("aba", True)])
def test_ranks_find_out_that_they_share_a_device(monkeypatch, names, is_shared):
    monkeypatch.setitem(device_choice.BY_DEVICE_TYPE, "cuda", Identities(names))
    store = HashStore()

    def ask(number):
        device = torch.device("cuda", number)
        place = rank(number, len(names))
        return may_be_shared(device, place), is_shared_by_ranks(device, store, place)

    with ThreadPoolExecutor(len(names)) as ranks:
        assert list(ranks.map(ask, range(len(names)))) == [(True, is_shared)] * len(names)


@pytest.mark.parametrize(("kind", "ranks"), [("cpu", 2), ("cuda", 1), ("xpu", 2)])
def test_other_devices_are_not_compared(kind, ranks):
    assert not may_be_shared(torch.device(kind, 0), rank(0, ranks))
