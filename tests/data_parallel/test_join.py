"""Uneven inputs: with Join, as DistributedDataParallel; without, one sentence and no hang."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import lockstep as ls
from averaging import inputs_of
from lockstep.comm import backend
from lockstep.kernel.errors import RankError


class Counting(nn.Module):
    """A sparse and a dense layer, and a buffer that counts calls."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.words = nn.Embedding(9, 7, sparse=sparse)
        self.head = nn.Linear(7, 3)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.head(self.words((inputs[:, 0] * 10).long().abs() % 9) + inputs)


def loop(model: Any, joined: Any, optimizer: Any, batches: int) -> list[torch.Tensor]:
    with joined:
        for step in range(batches):
            optimizer.zero_grad()
            model(inputs_of(dist.get_rank(), step)).square().mean().backward()
            optimizer.step()
    return [each.detach().clone() for each in model.module.state_dict().values()]


def uneven() -> list[list[list[torch.Tensor]]]:
    """Rank 0 has two batches, rank 1 three, rank 2 five."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    batches = (2, 3, 5)[dist.get_rank()]
    found = []
    for initial in (True, False):
        pair = []
        for wrap in (DistributedDataParallel, ls.DistributedDataParallel):
            model = wrap(Counting())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            joined = model.join(divide_by_initial_world_size=initial)
            pair.append(loop(model, joined, optimizer, batches))
            del joined, model
        found.append(pair)
    model = ls.DistributedDataParallel(Counting())
    sharded = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    with_sharded = loop(model, Join([model, sharded]), sharded, batches)
    model(inputs_of(0)).sum().backward()  # even again, and without further questions
    assert not model._join_config.enable
    del sharded, model
    model = ls.DistributedDataParallel(Counting(sparse=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparse = loop(model, model.join(), optimizer, batches)
    found.append([found[0][1], with_sharded])
    found.append([found[0][1], sparse])
    return found


def test_join_trains_as_with_distributed_data_parallel(ranks):
    everyone = ranks(uneven, 3)
    for pairs in everyone:
        for theirs, ours in pairs:
            for one, other in zip(theirs, ours, strict=True):
                torch.testing.assert_close(one, other)
    for (_, first), *others in zip(*everyone, strict=True):
        for _, other in others:  # the same bits on all ranks
            assert all(torch.equal(*pair) for pair in zip(first, other, strict=True))


def early_termination() -> str:
    model = ls.DistributedDataParallel(Counting())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    joined = model.join(throw_on_early_termination=True)
    try:
        loop(model, joined, optimizer, 1 + dist.get_rank())
    except RuntimeError as error:
        return str(error)
    return ""


def test_early_termination_is_raised_on_every_rank(ranks):
    first, second = ranks(early_termination, 2)
    assert "Rank 0 exhausted all inputs" in first
    assert "at least one rank that exhausted inputs" in second


@pytest.mark.skipif(not backend.available(), reason="the extension is not built here")
def test_without_join_a_rank_that_stops_early_is_named(ranks):
    def stop_early():
        model = ls.DistributedDataParallel(Counting())
        for step in range(2 + dist.get_rank()):
            model(inputs_of(dist.get_rank(), step)).square().mean().backward()
        dist.barrier()

    with pytest.raises(RankError, match=r"disagree.*rank 0 called barrier.*rank 1 called"):
        ranks(stop_early, 2, backend="lockstep")


def test_join_is_refused_where_several_models_wait_for_each_other(ranks):
    def join():
        models = [ls.DistributedDataParallel(Counting()) for _ in range(2)]
        models[0].join()

    with pytest.raises(
        RankError, match="Join supports one DistributedDataParallel per process group"
    ):
        ranks(join, 2)


def test_ranks_that_average_and_ranks_that_do_not_are_told_apart(ranks):
    def loop_of_both():
        model = ls.DistributedDataParallel(Counting())
        with model.join():
            if dist.get_rank():
                with model.no_sync():
                    model(inputs_of(1))
            else:
                model(inputs_of(0))

    with pytest.raises(RankError, match="rank 1 averages gradients differently from rank 0 in"):
        ranks(loop_of_both, 2)
