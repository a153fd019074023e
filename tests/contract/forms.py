"""Other forms of the same operations: asynchronous, objects, coalesced, and mixed programs."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from contract import movement, reduction
from contract.check import Ledger, same
from contract.plain import joined, reduced, written

NOWHERE = 9

# torch 2.13 renamed them
all_gather_coalesced = getattr(
    functional, "all_gather_single_coalesced", functional.all_gather_into_tensor_coalesced
)
reduce_scatter_coalesced = getattr(
    functional, "reduce_scatter_single_coalesced", functional.reduce_scatter_tensor_coalesced
)


def everybody(count: int, part: int = 0) -> list[torch.Tensor]:
    return [written(r, count, part=part) for r in range(dist.get_world_size())]


def asynchronous(run: Ledger, sizes: Sequence[int]) -> None:
    for count in (3, 3001):
        for name, start in STARTS.items():
            run(f"{name} {count}", partial(waited, start, count))
            run(f"{name} {count} by future", partial(by_future, start, count))
    run("ten in flight, waited for in the other order", in_flight)
    run("completed after wait", completed)
    run("a future with a callback", chained)


Started = tuple[dist.Work, torch.Tensor, torch.Tensor]


def start_all_reduce(count: int) -> Started:
    tensor = written(dist.get_rank(), count)
    work = dist.all_reduce(tensor, async_op=True)
    return work, tensor, reduced("SUM", everybody(count))


def start_broadcast(count: int) -> Started:
    tensor = written(dist.get_rank(), count)
    return dist.broadcast(tensor, 0, async_op=True), tensor, written(0, count)


def start_all_gather(count: int) -> Started:
    output = written(NOWHERE, count * dist.get_world_size())
    work = movement.all_gather_single(output, written(dist.get_rank(), count), async_op=True)
    return work, output, torch.cat(everybody(count))


def start_reduce_scatter(count: int) -> Started:
    n = dist.get_world_size()
    rank = dist.get_rank()
    output = written(NOWHERE, count)
    send = joined([written(rank, count, part=part) for part in range(n)])
    work = reduction.reduce_scatter_single(output, send, async_op=True)
    return work, output, reduced("SUM", everybody(count, rank))


def start_all_to_all(count: int) -> Started:
    n = dist.get_world_size()
    rank = dist.get_rank()
    output = written(NOWHERE, count * n)
    send = joined([written(rank, count, part=part) for part in range(n)])
    work = dist.all_to_all_single(output, send, async_op=True)
    return work, output, torch.cat(everybody(count, rank))


STARTS: dict[str, Callable[[int], Started]] = {
    "all_reduce": start_all_reduce,
    "broadcast": start_broadcast,
    "all_gather": start_all_gather,
    "reduce_scatter": start_reduce_scatter,
    "all_to_all": start_all_to_all,
}


def waited(start: Callable[[int], Started], count: int) -> None:
    work, tensor, wanted = start(count)
    work.wait()
    same(tensor, wanted, "result")


def by_future(start: Callable[[int], Started], count: int) -> None:
    work, tensor, wanted = start(count)
    work.get_future().wait()
    same(tensor, wanted, "result")


def in_flight() -> None:
    started = [start_all_reduce(100 + 300 * number) for number in range(10)]
    for work, tensor, wanted in reversed(started):
        work.wait()
        same(tensor, wanted, "result")


def completed() -> None:
    work, _, _ = start_all_reduce(1000)
    work.wait()
    same(work.is_completed(), True, "is_completed")


def chained() -> None:
    """Divide in a callback, as DistributedDataParallel's hooks do."""
    work, tensor, wanted = start_all_reduce(1000)
    future = work.get_future().then(lambda done: value(done).clone() * 2)
    same(future.wait(), wanted * 2, "what the callback made")
    same(tensor, wanted, "result")


def value(done: torch.futures.Future) -> torch.Tensor:
    found = done.value()
    return found[0] if isinstance(found, (list, tuple)) else found


def objects(run: Ledger, sizes: Sequence[int]) -> None:
    for length in (0, 3, 5000):
        run(f"all_gather {length}", partial(all_gather_objects, length))
        run(f"gather {length}", partial(gather_objects, length))
        run(f"broadcast {length}", partial(broadcast_objects, length))
        run(f"scatter {length}", partial(scatter_objects, length))
    if dist.get_world_size() > 1:
        run("send and receive", send_objects)


def thing(rank: int, length: int) -> dict[str, object]:
    return {"rank": rank, "text": chr(65 + rank) * length, "nested": [rank] * 3}


def all_gather_objects(length: int) -> None:
    n = dist.get_world_size()
    rank = dist.get_rank()
    outputs: list[object] = [None] * n
    dist.all_gather_object(outputs, thing(rank, length * rank))
    same(outputs, [thing(r, length * r) for r in range(n)], "objects")


def gather_objects(length: int) -> None:
    n = dist.get_world_size()
    rank = dist.get_rank()
    outputs: list[object] | None = [None] * n if rank == n - 1 else None
    dist.gather_object(thing(rank, length * rank), outputs, n - 1)
    if outputs is not None:
        same(outputs, [thing(r, length * r) for r in range(n)], "objects")


def broadcast_objects(length: int) -> None:
    n = dist.get_world_size()
    rank = dist.get_rank()
    held: list[object] = [thing(rank, length), rank]
    dist.broadcast_object_list(held, n - 1)
    same(held, [thing(n - 1, length), n - 1], "objects")


def scatter_objects(length: int) -> None:
    n = dist.get_world_size()
    rank = dist.get_rank()
    output: list[object] = [None]
    dist.scatter_object_list(output, [thing(r, length) for r in range(n)] if rank == 0 else None)
    same(output, [thing(rank, length)], "objects")


def send_objects() -> None:
    n = dist.get_world_size()
    rank = dist.get_rank()
    if rank == 0:
        dist.send_object_list([thing(0, 10), 3], n - 1)
    elif rank == n - 1:
        held: list[object] = [None, None]
        dist.recv_object_list(held, 0)
        same(held, [thing(0, 10), 3], "objects")


def coalesced(run: Ledger, sizes: Sequence[int]) -> None:
    """Run what functional collectives, FSDP2 and DTensor call.

    The first functional call imports for a second, so they run on few widths.
    """
    is_functional = dist.get_world_size() in (2, 3)
    for counts in ((5,), (3, 0, 1000), (4097, 17, 4097)):
        spoken = ",".join(map(str, counts))
        if is_functional:
            run(f"functional all_reduce {spoken}", partial(functional_all_reduce, counts))
            run(f"functional all_gather {spoken}", partial(functional_all_gather, counts))
            run(f"functional reduce_scatter {spoken}", partial(functional_reduce_scatter, counts))
        run(f"all_reduce_coalesced {spoken}", partial(old_all_reduce, counts))
        run(f"all_gather_coalesced {spoken}", partial(old_all_gather, counts))
    if is_functional:
        run("functional all_reduce of one", functional_one)
        run("functional all_to_all", functional_all_to_all)
        run("functional broadcast", functional_broadcast)
    run("manager all_reduce", partial(managed, "all_reduce"))
    run("manager all_gather", partial(managed, "all_gather"))
    run("manager reduce_scatter", partial(managed, "reduce_scatter"))
    run("manager asynchronous", managed_pending)


def mine(counts: Sequence[int]) -> list[torch.Tensor]:
    return [written(dist.get_rank(), count, part=i) for i, count in enumerate(counts)]


def sums(counts: Sequence[int]) -> list[torch.Tensor]:
    return [reduced("SUM", everybody(count, i)) for i, count in enumerate(counts)]


def ready(tensor: torch.Tensor) -> torch.Tensor:
    return functional.wait_tensor(tensor)


def functional_all_reduce(counts: Sequence[int]) -> None:
    found = functional.all_reduce_coalesced(mine(counts), "sum", dist.group.WORLD)
    same([ready(one) for one in found], sums(counts), "results")


def functional_all_gather(counts: Sequence[int]) -> None:
    found = all_gather_coalesced(mine(counts), dist.group.WORLD)
    wanted = [torch.cat(everybody(count, i)) for i, count in enumerate(counts)]
    same([ready(one) for one in found], wanted, "results")


def functional_reduce_scatter(counts: Sequence[int]) -> None:
    n = dist.get_world_size()
    rank = dist.get_rank()
    send = [joined([written(rank, count, part=i + p) for p in range(n)])
            for i, count in enumerate(counts)]  # fmt: skip
    dims = [0] * len(counts)
    found = reduce_scatter_coalesced(send, "sum", dims, dist.group.WORLD)
    wanted = [reduced("SUM", everybody(count, i + rank)) for i, count in enumerate(counts)]
    same([ready(one) for one in found], wanted, "results")


def old_all_reduce(counts: Sequence[int]) -> None:
    tensors = mine(counts)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        dist.all_reduce_coalesced(tensors)
    same(tensors, sums(counts), "results")


def old_all_gather(counts: Sequence[int]) -> None:
    n = dist.get_world_size()
    outputs = [[written(NOWHERE, count) for count in counts] for _ in range(n)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        dist.all_gather_coalesced(outputs, mine(counts))
    wanted = [[written(r, count, part=i) for i, count in enumerate(counts)] for r in range(n)]
    same(outputs, wanted, "results")


def functional_one() -> None:
    found = functional.all_reduce(written(dist.get_rank(), 77), "avg", dist.group.WORLD)
    same(ready(found), reduced("AVG", everybody(77)), "result", 1e-6)


def functional_all_to_all() -> None:
    n = dist.get_world_size()
    rank = dist.get_rank()
    send = joined([written(rank, 6, part=part) for part in range(n)])
    found = functional.all_to_all_single(send, None, None, dist.group.WORLD)
    same(ready(found), torch.cat(everybody(6, rank)), "result")


def functional_broadcast() -> None:
    last = dist.get_world_size() - 1
    found = functional.broadcast(written(dist.get_rank(), 8), last, dist.group.WORLD)
    same(ready(found), written(last, 8), "result")


def managed(kind: str) -> None:
    n = dist.get_world_size()
    rank = dist.get_rank()
    counts = (5, 1000)
    tensors = mine(counts)
    gathered = [written(NOWHERE, n * count) for count in counts]
    scattered = [written(NOWHERE, count) for count in counts]
    with dist._coalescing_manager():
        for i, count in enumerate(counts):
            if kind == "all_reduce":
                dist.all_reduce(tensors[i])
            elif kind == "all_gather":
                movement.all_gather_single(gathered[i], tensors[i])
            else:
                send = joined([written(rank, count, part=i + p) for p in range(n)])
                reduction.reduce_scatter_single(scattered[i], send)
    if kind == "all_reduce":
        same(tensors, sums(counts), "results")
    elif kind == "all_gather":
        same(gathered, [torch.cat(everybody(c, i)) for i, c in enumerate(counts)], "results")
    else:
        wanted = [reduced("SUM", everybody(c, i + rank)) for i, c in enumerate(counts)]
        same(scattered, wanted, "results")


def managed_pending() -> None:
    tensors = mine((5, 1000))
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    same(tensors, sums((5, 1000)), "results")


def programs(run: Ledger, sizes: Sequence[int]) -> None:
    """Run random programs, the same on every rank, with nothing that aligns them between."""
    for seed in range(4):
        run(f"seed {seed}", partial(program, seed, sizes))


def program(seed: int, sizes: Sequence[int]) -> None:
    dice = random.Random(seed)
    roots = range(dist.get_world_size())
    for _ in range(25):
        size = dice.choice(sizes)
        dtype = dice.choice([torch.float32, torch.float64, torch.bfloat16, torch.int32])
        op = dice.choice(["SUM", "MIN", "MAX"])
        root = dice.choice(roots)
        kind = dice.randrange(6)
        match kind:
            case 0:
                reduction.one_all_reduce(op, dtype, size)
            case 1:
                movement.one_broadcast(dtype, size, root)
            case 2:
                movement.into_single(dtype, size)
            case 3:
                reduction.into_single(op, dtype, size)
            case 4:
                movement.exchange_single(dtype, size)
            case 5:
                reduction.one_reduce(op, dtype, size, root)
