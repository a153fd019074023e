"""torch's own libraries on the backend "lockstep", against the same program on gloo.

All programs run in one launch of ranks for each backend; a test looks at one of them.
"""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lockstep.comm import backend
from lockstep.comm.shared_memory import is_shared

pytestmark = pytest.mark.skipif(not backend.available(), reason="the extension is not built here")

RANKS = 2
PROGRAMS: dict[str, Callable[[], Any]] = {}


def program(function: Callable[[], Any]) -> Callable[[], Any]:
    """Add a function that every rank runs; what it returns must be the same on both backends."""
    PROGRAMS[function.__name__] = function
    return function


def run_all(programs: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for title, function in programs.items():
        try:
            found[title] = function()
        except Exception:
            found[title] = traceback.format_exc()
    return found


@pytest.fixture(scope="module")
def results(ranks):
    """Run every program on each rank, once for each backend."""
    deadlines = {"timeout": 20.0, "deadline": 100.0}
    names = ("lockstep", "gloo")
    return {name: ranks(run_all, RANKS, PROGRAMS, backend=name, **deadlines) for name in names}


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8))


def inputs(step: int = 0, seed: int | None = None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + (seed or 0))
    return torch.randn(16, 64, generator=generator)


def trained(wrapped: nn.Module, optimizer: Any, steps: int = 3) -> list[torch.Tensor]:
    for step in range(steps):
        optimizer.zero_grad()
        wrapped(inputs(step, dist.get_rank())).square().mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in wrapped.parameters()]


# ---- DistributedDataParallel ----


def distributed(**options: Any) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model(), bucket_cap_mb=0.02, **options)


def sgd(wrapped: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)


@program
def communication_hooks() -> dict[str, list[torch.Tensor]]:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

    found = {}
    for hook in ("allreduce_hook", "fp16_compress_hook"):  # torch refuses bf16's without a GPU
        wrapped = distributed()
        wrapped.register_comm_hook(None, getattr(default_hooks, hook))
        found[hook] = trained(wrapped, sgd(wrapped))
    # One bucket: with several, its calls for one come between those for another as it happens.
    wrapped = nn.parallel.DistributedDataParallel(model())
    state = power.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    wrapped.register_comm_hook(state, power.powerSGD_hook)
    found["powerSGD"] = trained(wrapped, sgd(wrapped), steps=5)
    return found


@program
def sparse_embedding() -> list[list[torch.Tensor]]:
    """Train an embedding with sparse gradients; the ranks use one row in common."""
    found = []
    for factory in (torch.optim.SGD, torch.optim.SparseAdam):
        torch.manual_seed(3)
        wrapped = nn.parallel.DistributedDataParallel(nn.Embedding(10, 4, sparse=True))
        optimizer = factory(wrapped.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            wrapped(torch.tensor([dist.get_rank(), step, 9, 9])).square().sum().backward()
            optimizer.step()
        gradient = wrapped.module.weight.grad
        assert gradient.is_coalesced()
        found.append([wrapped.module.weight.detach(), gradient.indices(), gradient.values()])
    return found


class Rotation(nn.Module):
    """A layer with a complex parameter, beside a real one."""

    def __init__(self) -> None:
        super().__init__()
        self.real = nn.Linear(64, 6)
        self.factor = nn.Parameter(torch.randn(6, 5, dtype=torch.complex64))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return (self.real(given).to(torch.complex64) @ self.factor).abs()


@program
def complex_parameters() -> list[Any]:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    is_native = dist.get_backend() == "lockstep"
    found = []

    def hook(state, bucket):  # torch reads annotations, which are strings here
        state.append(is_shared(bucket.buffer()) == is_native)
        return allreduce_hook(None, bucket)

    for has_views in (False, True):
        torch.manual_seed(3)
        wrapped = nn.parallel.DistributedDataParallel(Rotation(), gradient_as_bucket_view=has_views)
        noted: list[bool] = []
        wrapped.register_comm_hook(noted, hook)
        values = trained(wrapped, sgd(wrapped))
        gradient = wrapped.module.factor.grad
        found.append([values, gradient.dtype == torch.complex64, gradient, all(noted)])
    return found


@program
def profile() -> list[str]:
    """Return what a profiler shows of the backend, by its operation."""
    with torch.profiler.profile(acc_events=True) as profiler:
        dist.all_reduce(torch.ones(3))
        dist.barrier()
    prefix = f"{dist.get_backend()}:"
    names = [event.name for event in profiler.events()]
    return [name.removeprefix(prefix) for name in names if name.startswith(prefix)]


@program
def uneven_inputs() -> list[torch.Tensor]:
    from torch.distributed.algorithms.join import Join
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = distributed()
    optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.SGD, lr=0.1)
    with Join([wrapped, optimizer]):
        for step in range(2 + dist.get_rank()):
            wrapped(inputs(step, dist.get_rank())).square().mean().backward()
            optimizer.step()
    return [parameter.detach().clone() for parameter in wrapped.parameters()]


@program
def averaged_models() -> list[torch.Tensor]:
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    alone = model()
    averager = PeriodicModelAverager(period=2, warmup_steps=1)
    optimizer = sgd(alone)
    for step in range(4):
        optimizer.zero_grad()
        alone(inputs(step, dist.get_rank())).square().mean().backward()
        optimizer.step()
        averager.average_parameters(alone.parameters())
    return [parameter.detach() for parameter in alone.parameters()]


@program
def sharded_optimizer() -> list[torch.Tensor]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = distributed(gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.AdamW, lr=0.01)
    values = trained(wrapped, optimizer)
    optimizer.consolidate_state_dict()
    whole = optimizer.state_dict()["state"] if dist.get_rank() == 0 else None
    return [values, None if whole is None else whole[0]["exp_avg"]]


# ---- FSDP2, DTensor, meshes ----


def fully_sharded(**options: Any) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    net = model()
    for layer in (net[0], net[2], net):
        fully_shard(layer, mesh=mesh, **options)
    return net


def full(values: list[Any]) -> list[torch.Tensor]:
    return [value.full_tensor().detach() for value in values]


@program
def fully_sharded_in_bfloat16() -> list[torch.Tensor]:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    net = fully_sharded(mp_policy=policy)
    optimizer = sgd(net)
    for step in range(2):
        net(inputs(step, dist.get_rank())).square().mean().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return full(list(net.parameters()))


@program
def fully_sharded_communicates_in_shared_memory() -> list[Any]:
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

    kept: list[torch.Tensor] = []
    allocate = collectives.ProcessGroupAllocMixin.allocate

    def noted(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        kept.append(allocate(self, *args, **kwargs))
        return kept[-1]

    net = fully_sharded()
    for layer in (net[0], net[2]):
        layer.set_allocate_memory_from_process_group_for_comm(True)
    collectives.ProcessGroupAllocMixin.allocate = noted
    try:
        net(inputs(0, dist.get_rank())).square().mean().backward()
    finally:
        collectives.ProcessGroupAllocMixin.allocate = allocate
    native = dist.get_backend() == "lockstep"
    found = [len(kept) > 0, all(is_shared(each) == native for each in kept)]
    return [found, full([parameter.grad for parameter in net.parameters()])]


@program
def sharded_tensors() -> list[torch.Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("outer", "inner"))["inner"]
    left = inputs(1)[:7]
    right = inputs(2)[:, :5].repeat(4, 1)
    rows = distribute_tensor(left, mesh, [Shard(0)])
    columns = distribute_tensor(right, mesh, [Shard(1)])
    moved = rows.redistribute(mesh, [Shard(1)])
    product = moved @ columns.redistribute(mesh, [Shard(0)])  # partial sums
    assert isinstance(product.placements[0], Partial)
    summed = product.redistribute(mesh, [Replicate()])
    scattered = product.redistribute(mesh, [Shard(0)])
    return [moved.full_tensor(), summed.to_local(), scattered.full_tensor(), left @ right]


@program
def tensor_parallel() -> list[torch.Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import parallel

    mesh = init_device_mesh("cpu", (RANKS,))
    styles = {"0": parallel.ColwiseParallel(), "2": parallel.RowwiseParallel()}
    net = parallel.parallelize_module(model(), mesh, styles)
    optimizer = sgd(net)
    for step in range(2):
        optimizer.zero_grad()
        net(inputs(step)).square().mean().backward()
        optimizer.step()
    return full(list(net.parameters()))


# ---- pipelining, checkpoints, functional collectives ----


@program
def pipelines() -> list[Any]:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    rank = dist.get_rank()
    found = []
    for kind in (ScheduleGPipe, Schedule1F1B):
        net = model()
        mine = nn.Sequential(*(net[:2] if rank == 0 else net[2:]))
        stage = PipelineStage(mine, rank, RANKS, torch.device("cpu"))
        schedule = kind(
            stage, 4, loss_fn=lambda outputs, targets: (outputs - targets).square().mean()
        )
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(inputs())
        else:
            schedule.step(target=torch.zeros(16, 8), losses=losses)
        found.append([[p.grad for p in mine.parameters()], [loss.detach() for loss in losses]])
    return found


@program
def checkpoints() -> list[Any]:
    import torch.distributed.checkpoint as checkpoint

    given: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(given)
    net = fully_sharded()
    optimizer = sgd(net)
    net(inputs()).square().mean().backward()
    optimizer.step()
    before = full(list(net.parameters()))
    checkpoint.save({"model": net.state_dict()}, checkpoint_id=given[0])
    other = fully_sharded()
    state = {"model": other.state_dict()}
    checkpoint.load(state, checkpoint_id=given[0])
    other.load_state_dict(state["model"])
    after = full(list(other.parameters()))
    dist.barrier()
    written = sorted(path.name for path in Path(given[0]).iterdir())
    return [before, [torch.equal(*pair) for pair in zip(before, after, strict=True)], written]


@program
def functional_collectives() -> list[torch.Tensor]:
    import torch.distributed._functional_collectives as funcol

    group = dist.group.WORLD
    rank = dist.get_rank()
    x = torch.arange(8.0).view(4, 2) + rank
    x.requires_grad_()
    splits = [3, 1] if rank == 0 else [1, 3]
    y = funcol.all_to_all_single_autograd(x, splits, splits, group)
    y.square().sum().backward()
    found = [y.detach(), x.grad]
    z = x.detach()
    found += [funcol.wait_tensor(funcol.broadcast(z, 0, group))]
    found += map(funcol.wait_tensor, funcol.all_reduce_coalesced([z, z * 2], "avg", group))
    gather = getattr(funcol, "all_gather_single_coalesced", None)  # new names in torch 2.13
    gather = gather or funcol.all_gather_into_tensor_coalesced
    scatter = getattr(funcol, "reduce_scatter_single_coalesced", None)
    scatter = scatter or funcol.reduce_scatter_tensor_coalesced
    found += map(funcol.wait_tensor, gather([z, z[:1]], group))
    found += map(funcol.wait_tensor, scatter([z, z * 2], "max", [0, 0], group))
    return [each + 0 for each in found]


def same(ours: Any, theirs: Any) -> None:
    """Compare what two backends returned: tensors closely, everything else exactly."""
    if isinstance(theirs, torch.Tensor):
        torch.testing.assert_close(ours, theirs)
    elif isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for key in theirs:
            same(ours[key], theirs[key])
    elif isinstance(theirs, list):
        assert len(ours) == len(theirs)
        for pair in zip(ours, theirs, strict=True):
            same(*pair)
    else:
        assert ours == theirs


@pytest.mark.parametrize("title", PROGRAMS)
def test_it_computes_on_lockstep_what_it_computes_on_gloo(results, title):
    for rank in range(RANKS):
        ours = results["lockstep"][rank][title]
        theirs = results["gloo"][rank][title]
        assert not isinstance(theirs, str), theirs
        assert not isinstance(ours, str), ours
        same(ours, theirs)
