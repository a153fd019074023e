"""The program by remote procedure calls: the gradients of one process, and beside a world."""

import subprocess
import sys
import warnings
from functools import partial

import pytest
import torch
from torch.distributed import autograd, rpc
from torch.nn import functional as F

import lockstep as ls
from examples.resnet import ResNet
from examples.rpc_pipeline import MASTER, WORKERS, Master, joined

TIMEOUT = 60.0
LR = 0.1


small = partial(ResNet, (1, 1), 5, 4)


def batches():
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        inputs = torch.randn(8, 3, 32, 32, generator=generator)
        yield inputs, torch.randint(5, (8,), generator=generator)


def by_calls(rendezvous, splits):
    torch.set_num_threads(1)
    with joined(ls.rank(), rendezvous, TIMEOUT):
        if ls.rank() > 0:
            return None
        found = []
        for each in splits:
            master = Master(small, 5, LR)
            found.append([master.step(*batch, each) for batch in batches()])
        return found


def in_one_process(splits):
    torch.manual_seed(0)
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    losses = []
    for inputs, targets in batches():
        optimizer.zero_grad()
        loss = F.cross_entropy(torch.cat([model(x) for x in inputs.chunk(splits)]), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_its_losses_are_those_of_one_process(tmp_path):
    splits = (4,)
    found = ls.launch(by_calls, (str(tmp_path / "rendezvous"), splits), 3, timeout=TIMEOUT)[0]
    for each, losses in zip(splits, found, strict=True):
        assert losses == pytest.approx(in_one_process(each), rel=1e-4)
        assert abs(losses[0] - losses[1]) > 1e-2


def in_a_world(rendezvous):
    """Call and differentiate remotely between collectives of a world that init() joined."""
    world = ls.init()
    total = torch.full((4,), float(world.rank))
    torch.distributed.all_reduce(total)
    with joined(world.rank, rendezvous, TIMEOUT):
        found = None
        if world.rank == 0:
            value = torch.ones(3, requires_grad=True)
            with autograd.context() as context:
                there = rpc.rpc_sync(WORKERS[0], torch.mul, (value, 2))
                autograd.backward(context, [there.sum()])
                found = autograd.get_gradients(context)[value].tolist()
        torch.distributed.all_reduce(total)
    torch.distributed.all_reduce(total)
    return world.backend, found, total.tolist(), torch.get_num_threads()


def test_a_world_does_not_get_in_the_way_of_remote_calls(tmp_path):
    told = ls.launch(in_a_world, (str(tmp_path / "rendezvous"),), 3, timeout=TIMEOUT)
    assert [each[1] for each in told] == [[2.0] * 3, None, None]
    assert [each[2] for each in told] == [[27.0] * 4] * 3


def on_the_launchers_store():
    """Meet through the environment, as a program does that knows nothing of lockstep."""
    world = ls.init()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        name = (MASTER, *WORKERS)[world.rank]
        rpc.init_rpc(name, rank=world.rank, world_size=world.world_size)
    found = rpc.rpc_sync(WORKERS[1], torch.mul, (torch.tensor(21), 2))
    rpc.shutdown()
    return found.item()


def test_remote_calls_meet_through_the_environment_of_a_launch():
    assert ls.launch(on_the_launchers_store, nprocs=3, timeout=TIMEOUT) == [42] * 3


@pytest.mark.stress  # the published program, which its other tests call
def test_the_program_prints_a_time_for_each_number_of_splits():
    command = [sys.executable, "-m", "examples.rpc_pipeline"]
    small_work = ["--splits", "2", "--batches", "1", "--batch-size", "4", "--size", "40"]
    done = subprocess.run(
        command + small_work, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert line.startswith("2 splits  ")
    assert line.endswith(" s a batch")
    assert done.stderr == ""
