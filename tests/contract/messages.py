"""Messages from rank to rank: send, recv, tags, any source, batches, and to oneself."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist

from contract.check import Ledger, same
from contract.plain import MOVABLE, name, written

NOWHERE = 9


def messages(run: Ledger, sizes: Sequence[int]) -> None:
    n = dist.get_world_size()
    for dtype in MOVABLE:
        run(f"ring {name(dtype)} 5", partial(ring, dtype, 5))
    for size in sizes:
        run(f"ring float32 {size}", partial(ring, torch.float32, size))
        run(f"batch float32 {size}", partial(batch, size))
    run("tags in the other order", tags)
    run("asynchronous, waited for in the other order", pending)
    run("any source", any_source)
    dist.barrier()  # or rank 0 would hear a fast rank's next message
    run("any source, asynchronous", any_source_pending)
    dist.barrier()
    run("many in a row", many)
    if n > 1:
        run("batch with several to one", several)
        run("into the middle of a tensor", middle)
    run("to oneself", to_oneself)


def neighbours() -> tuple[int, int, int]:
    """Return this rank, the one that it sends to, and the one that it hears from."""
    n = dist.get_world_size()
    rank = dist.get_rank()
    return rank, (rank + 1) % n, (rank - 1) % n


def ring(dtype: torch.dtype, size: int) -> None:
    """Send blocking: everybody but the last receives first, so that it can't depend on luck."""
    rank, after, before = neighbours()
    if rank == after:
        return
    output = written(NOWHERE, size, dtype)
    if after == 0:
        dist.send(written(rank, size, dtype), after)
        dist.recv(output, before)
    else:
        dist.recv(output, before)
        dist.send(written(rank, size, dtype), after)
    same(output, written(before, size, dtype), "received")


def batch(size: int) -> None:
    rank, after, before = neighbours()
    if rank == after:
        return
    output = written(NOWHERE, size)
    sent = written(rank, size)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.irecv, output, before)]
    )
    for work in works:
        work.wait()
    same(output, written(before, size), "received")


def tags() -> None:
    rank, after, before = neighbours()
    if rank == after:
        return
    sent = [written(rank, 40, part=tag) for tag in range(3)]
    works = [dist.isend(sent[tag], after, tag=tag) for tag in range(3)]
    for tag in (2, 0, 1):
        output = written(NOWHERE, 40)
        dist.recv(output, before, tag=tag)
        same(output, written(before, 40, part=tag), f"received under tag {tag}")
    for work in works:
        work.wait()


def pending() -> None:
    rank, after, before = neighbours()
    if rank == after:
        return
    outputs = [written(NOWHERE, 1000) for _ in range(4)]
    receiving = [dist.irecv(output, before) for output in outputs]
    sending = [dist.isend(written(rank, 1000, part=part), after) for part in range(4)]
    for work in reversed(receiving + sending):
        assert work is not None
        work.wait()
    same(outputs, [written(before, 1000, part=part) for part in range(4)], "received")


def any_source() -> None:
    """Let rank 0 hear from all the others, whoever comes first."""
    n = dist.get_world_size()
    rank = dist.get_rank()
    if rank:
        dist.send(written(rank, 30), 0)
        return
    seen = []
    for _ in range(n - 1):
        output = written(NOWHERE, 30)
        source = dist.recv(output, None)
        same(output, written(source, 30), f"received from {source}")
        seen.append(source)
    same(sorted(seen), list(range(1, n)), "sources")


def any_source_pending() -> None:
    """Let rank 0 wait for any source several times at once."""
    n = dist.get_world_size()
    rank = dist.get_rank()
    if rank:
        dist.send(written(rank, 30), 0, tag=5)
        return
    outputs = [written(NOWHERE, 30) for _ in range(n - 1)]
    works = [dist.irecv(output, None, tag=5) for output in outputs]
    sources = []
    for output, work in zip(outputs, works, strict=True):
        work.wait()
        source = work._source_rank()
        same(output, written(source, 30), f"received from {source}")
        sources.append(source)
    same(sorted(sources), list(range(1, n)), "sources")


def many() -> None:
    rank, after, before = neighbours()
    if rank == after:
        return
    outputs = [written(NOWHERE, 1 + number) for number in range(60)]
    works = [dist.isend(written(rank, 1 + number), after) for number in range(60)]
    for number, output in enumerate(outputs):
        dist.recv(output, before)
        same(output, written(before, 1 + number), f"message {number}")
    for work in works:
        work.wait()


def several() -> None:
    rank, after, before = neighbours()
    outputs = [written(NOWHERE, 50 + part) for part in range(3)]
    calls = [
        dist.P2POp(dist.isend, written(rank, 50 + part, part=part), after) for part in range(3)
    ]
    calls += [dist.P2POp(dist.irecv, output, before) for output in outputs]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    same(outputs, [written(before, 50 + part, part=part) for part in range(3)], "received")


def middle() -> None:
    rank, after, before = neighbours()
    base = torch.zeros(30)
    work = dist.isend(written(rank, 10), after)
    dist.recv(base[10:20], before)
    work.wait()
    zeros = torch.zeros(10)
    same(base, torch.cat([zeros, written(before, 10), zeros]), "tensor around the message")


def to_oneself() -> None:
    rank = dist.get_rank()
    output = written(NOWHERE, 12)
    work = dist.isend(written(rank, 12), rank)
    dist.recv(output, rank)
    work.wait()
    same(output, written(rank, 12), "received")
