"""What exactness costs: gradients added along the tree, beside the same bytes in any order.

Both take the gradients of one backward from where autograd left them, in the
same buckets, and leave sums that every rank can read:

    exact       `ReproducibleAllReduce`, as the trainer calls it
    any order   copied into shared memory, then the backend's own all_reduce
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

import lockstep
from benchmarks.step.contenders import Case
from lockstep.comm.bucket import Bucket, plan
from lockstep.comm.make_all_reduce import make_all_reduce
from lockstep.comm.reproducible_all_reduce import reproducible_all_reduce
from lockstep.comm.shared_memory import empty_shared
from lockstep.data_parallel.planned_buckets import BUCKET_BYTES
from lockstep.kernel.norm import in_memory_order
from lockstep.kernel.splitting import split_evenly
from lockstep.kernel.tree import Node, nodes_of

__all__ = ["Exactness", "exactness"]

BLOCK = 3  # calls of each in turn
MIN_CALLS = 15  # calls of each at least

Values = list[torch.Tensor | None]


@dataclass(frozen=True)
class Exactness:
    """The seconds of each call, exact and in any order, and the backend that made them."""

    case: Case
    ranks: int
    backend: str
    exact: list[float]
    any_order: list[float]

    @property
    def cost(self) -> float:
        """How much longer the reproducible all-reduce takes, as a share."""
        return statistics.median(self.exact) / statistics.median(self.any_order) - 1


def exactness(case: Case, ranks: int, seconds: float, timeout: float) -> Exactness:
    """Measure both on the gradients of a case, in turn; the slowest rank counts."""
    told = lockstep.launch(alternate, (case, seconds), ranks, timeout=timeout)
    backend = told[0][0]
    exact, any_order = (
        [max(times) for times in zip(*(each[1][name] for each in told), strict=True)]
        for name in ("exact", "any order")
    )
    return Exactness(case, ranks, backend, exact, any_order)


def alternate(case: Case, seconds: float) -> tuple[str, dict[str, list[float]]]:
    """Time both on this rank, blocks in turn; return the backend and the times."""
    world = lockstep.init(device="cpu")
    calls = {"exact": along_tree(case), "any order": in_any_order(case)}
    times: dict[str, list[float]] = {name: [] for name in calls}
    going = torch.ones(1)
    begun = time.perf_counter()
    while going.item():
        for name, call in calls.items():
            call()
            for _ in range(BLOCK):
                dist.barrier()
                start = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - start)
        over = time.perf_counter() - begun > 2 * seconds and len(times["exact"]) >= MIN_CALLS
        going.fill_(0 if over else 1)
        dist.broadcast(going, 0)
    lockstep.shutdown()
    return world.backend, times


def gradients(case: Case) -> tuple[list[Bucket], Values]:
    """Return buckets and numbers of the size of the case's gradients."""
    values: Values = [torch.randn(each.numel()) for each in case.net.model().parameters()]
    numels = [each.numel() for each in values if each is not None]
    return plan(numels, [torch.float32] * len(numels), BUCKET_BYTES), values


def along_tree(case: Case) -> Callable[[], object]:
    """Return the reproducible sum of this rank's nodes."""
    ranks = dist.get_world_size()
    leaves = case.leaves(ranks)
    holders = [nodes_of(owned, leaves) for owned in split_evenly(leaves, ranks)]
    buckets, values = gradients(case)
    held: dict[Node, Values] = dict.fromkeys(holders[dist.get_rank()], values)
    device = torch.device("cpu")
    sums = [make_all_reduce(bucket, holders, leaves, device) for bucket in buckets]
    return lambda: reproducible_all_reduce(sums, held)


def in_any_order(case: Case) -> Callable[[], object]:
    """Return the sum of one tensor a rank in the same buckets, in the backend's own order."""
    buckets, values = gradients(case)
    memory = [empty_shared(bucket.length, dtype=bucket.dtype).zero_() for bucket in buckets]

    def call() -> None:
        works = []
        for bucket, vector in zip(buckets, memory, strict=True):
            for member in bucket.members:
                value = values[member.index]
                assert value is not None
                part = vector[member.offset : member.offset + member.numel]
                part.copy_(in_memory_order(value))
            works.append(dist.all_reduce(vector, async_op=True))
        for work in works:
            assert work is not None
            work.wait()

    return call
