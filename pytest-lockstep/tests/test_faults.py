"""Faults at a call of the backend: the rank that dies, is late, or sends a wrong bit."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

import lockstep
import pytest_lockstep


@pytest.mark.ranks(3)
def test_kill(rank):
    with pytest_lockstep.kill(rank=1, call=2, op="all_reduce"):
        dist.all_reduce(torch.ones(1))
        dist.barrier()  # does not count
        with pytest.raises(RuntimeError, match="rank 1 died"):
            dist.all_reduce(torch.ones(1))
    assert rank != 1


@pytest.mark.ranks(2)
def test_delay(rank):
    began = time.monotonic()
    dist.barrier()  # begin the delay after both ranks have read the time
    with pytest_lockstep.delay(rank=1, seconds=0.3):
        dist.barrier()
    assert time.monotonic() - began >= 0.3  # on both: one waits for the other


@pytest.mark.parametrize("op", ["all_reduce", "broadcast", "all_gather", "send"])
@pytest.mark.ranks(2)
def test_corrupt(rank, op):
    value = torch.full((4,), 2.0 + 1 - rank)
    with pytest_lockstep.corrupt(rank=1, op=op, bit=20 if op == "send" else None):
        if op == "all_reduce":
            dist.all_reduce(value)
            wrong = value
            right = torch.full((4,), 5.0)
        elif op == "broadcast":
            dist.broadcast(value, src=1)
            wrong = value
            right = torch.full((4,), 2.0)
        elif op == "all_gather":
            parts = [torch.zeros(4), torch.zeros(4)]
            dist.all_gather(parts, value)
            wrong = parts[1]
            right = torch.full((4,), 2.0)
        elif rank == 1:
            dist.send(value, 0)
            return
        else:
            wrong = torch.zeros(4)
            right = torch.full((4,), 2.0)
            dist.recv(wrong, 1)
    assert wrong[0] == right[0] + (0.25 if op == "send" else 1)
    assert torch.equal(wrong[1:], right[1:])


@pytest.mark.ranks(2)
def test_calls_of_other_libraries_count(rank):
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    with pytest_lockstep.corrupt(rank=0, op="all_reduce"):
        model(torch.ones(2, 4)).sum().backward()
    # DDP reduces the bias first: the last parameter's gradient is the first that is ready.
    gradients = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
    # The first element of the bucket, 2 / 2 ranks, has become 1.5; the sum 2.5.
    assert sorted(gradients.tolist()) == [2, 2, 2, 2, 2.5]
    pytest_lockstep.assert_same_on_ranks(gradients)


@pytest.mark.ranks(2)
def test_calls_of_a_trainer_count(rank):
    lockstep.init()
    torch.manual_seed(0)
    trainer = lockstep.Trainer(
        torch.nn.Linear(4, 1),
        torch.nn.MSELoss(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        microbatches=2,
    )
    before = trainer.digest()
    with trainer, pytest_lockstep.corrupt(rank=1, op="reproducible_all_reduce"):
        trainer.step((torch.ones(4, 4), torch.ones(4, 1)))
    assert trainer.digest() != before


@pytest.mark.ranks(2)
def test_a_fault_that_does_not_happen_is_a_failure(rank):
    message = "rank 1 made 1 call of barrier in the block, and it was to happen in call 2"
    if rank == 1:
        with (
            pytest.raises(AssertionError, match=message),
            pytest_lockstep.kill(rank=1, call=2, op="barrier"),
        ):
            dist.barrier()
    else:
        dist.barrier()
    with pytest.raises(ValueError, match="op='sum': choose one of all_reduce, "):
        pytest_lockstep.kill(rank=1, op="sum").__enter__()
    with pytest.raises(ValueError, match="call=0: calls count from 1"):
        pytest_lockstep.kill(rank=1, call=0).__enter__()
    with pytest.raises(ValueError, match="rank=2: the ranks are 0 to 1"):
        pytest_lockstep.kill(rank=2).__enter__()
