"""torch's data parallelism on the backend "lockstep", with buckets in shared memory."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lockstep.comm import backend
from lockstep.comm.shared_memory import is_shared

pytestmark = pytest.mark.skipif(not backend.available(), reason="the extension is not built here")

on_lockstep = {"backend": "lockstep"}


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8))


def ddp_gradients(how: str) -> list[torch.Tensor]:
    rank = dist.get_rank()
    wrapped = nn.parallel.DistributedDataParallel(
        model(), bucket_cap_mb=0.02, gradient_as_bucket_view=True
    )
    data = torch.randn(16, 64, generator=torch.Generator().manual_seed(rank))
    for _ in range(3):
        wrapped.zero_grad()
        wrapped(data).square().mean().backward()
    if how == "lockstep":
        assert any(is_shared(p.grad) for p in wrapped.parameters())
    return [p.grad.clone() for p in wrapped.parameters()]


def test_ddp_reduces_in_shared_memory_and_agrees_with_gloo(ranks):
    """`lockstep.init` turns torch's switch, DDP_DISABLE_COMM_MEM, whose default is 1."""
    by_name = {name: ranks(ddp_gradients, 2, name, backend=name) for name in ("gloo", "lockstep")}
    for mine, theirs in zip(*by_name["lockstep"], strict=True):
        assert torch.equal(mine, theirs)
    for ours, gloos in zip(by_name["lockstep"][0], by_name["gloo"][0], strict=True):
        torch.testing.assert_close(ours, gloos)


def sharded() -> list[torch.Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    net = model()
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(2):
        data = torch.randn(16, 64, generator=torch.Generator().manual_seed(step))
        net(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.full_tensor().detach() for p in net.parameters()]


def test_fsdp2_trains(ranks):
    ours, gloos = (ranks(sharded, 2, backend=name) for name in ("lockstep", "gloo"))
    for rank in ours:
        for mine, theirs in zip(rank, gloos[0], strict=True):
            torch.testing.assert_close(mine, theirs)


def functional() -> list[float]:
    import torch.distributed._functional_collectives as funcol

    tensor = torch.full((6,), float(dist.get_rank() + 1))
    total = funcol.all_reduce(tensor, "sum", dist.group.WORLD)
    whole = funcol.all_gather_tensor(tensor[:1], 0, dist.group.WORLD)
    part = funcol.reduce_scatter_tensor(tensor, "avg", 0, dist.group.WORLD)
    return [total[0].item(), whole.sum().item(), part[0].item()]


def test_functional_collectives(ranks):
    assert ranks(functional, 3, **on_lockstep) == [[6.0, 6.0, 2.0]] * 3


def detail() -> float:
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    return tensor[0].item()


def test_torchs_debug_mode_works(ranks, monkeypatch):
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    assert ranks(detail, 2, **on_lockstep) == [2.0, 2.0]
