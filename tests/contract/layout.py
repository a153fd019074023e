"""Tensors that are not contiguous: right, or refused by name; never silently wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from contract import movement, reduction
from contract.check import Ledger, or_refused, same
from contract.plain import reduced, written

NOWHERE = 9
SHAPE = (2, 4, 3, 6)

# name -> a tensor of SHAPE that lies otherwise, with room for any values
LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "transposed": lambda: torch.zeros(6, 4, 3, 2).transpose(0, 3),
    "gaps": lambda: torch.zeros(2, 4, 3, 12)[..., ::2],
    "rows": lambda: torch.zeros(2, 9, 3, 6)[:, 3:7],
    "channels-last": lambda: torch.zeros(SHAPE).contiguous(memory_format=torch.channels_last),
    "differently by rank": lambda: LAYOUTS[list(LAYOUTS)[dist.get_rank() % 4]](),
}


def lying(layout: str, values: torch.Tensor) -> torch.Tensor:
    return LAYOUTS[layout]().copy_(values)


def layouts(run: Ledger, sizes: Sequence[int]) -> None:
    for layout in LAYOUTS:
        for name, call in CALLS.items():
            run(f"{name} {layout}", partial(right_or_refused, call, partial(lying, layout)))
    run("all_reduce expanded", partial(right_or_refused, all_reduce_expanded, None))


def right_or_refused(call: Callable[..., None], lay: object) -> None:
    with or_refused("contiguous", "dense", "overlap", "single memory location"):
        call(lay) if lay is not None else call()


Lay = Callable[[torch.Tensor], torch.Tensor]


def everybody(part: int = 0) -> list[torch.Tensor]:
    return [written(r, SHAPE, part=part) for r in range(dist.get_world_size())]


def all_reduce(lay: Lay) -> None:
    tensor = lay(written(dist.get_rank(), SHAPE))
    dist.all_reduce(tensor)
    same(tensor, reduced("SUM", everybody()), "result")


def reduce(lay: Lay) -> None:
    tensor = lay(written(dist.get_rank(), SHAPE))
    dist.reduce(tensor, 0)
    if dist.get_rank() == 0:
        same(tensor, reduced("SUM", everybody()), "result")


def broadcast(lay: Lay) -> None:
    tensor = lay(written(dist.get_rank(), SHAPE))
    dist.broadcast(tensor, 0)
    same(tensor, written(0, SHAPE), "result")


def all_gather_input(lay: Lay) -> None:
    outputs = [written(NOWHERE, SHAPE) for _ in everybody()]
    dist.all_gather(outputs, lay(written(dist.get_rank(), SHAPE)))
    same(outputs, everybody(), "outputs")


def all_gather_output(lay: Lay) -> None:
    outputs = [lay(written(NOWHERE, SHAPE)) for _ in everybody()]
    dist.all_gather(outputs, written(dist.get_rank(), SHAPE))
    same(outputs, everybody(), "outputs")


def all_gather_single_input(lay: Lay) -> None:
    output = torch.stack([written(NOWHERE, SHAPE) for _ in everybody()])
    movement.all_gather_single(output, lay(written(dist.get_rank(), SHAPE)))
    same(output, torch.stack(everybody()), "output")


def gather_input(lay: Lay) -> None:
    outputs = [written(NOWHERE, SHAPE) for _ in everybody()] if dist.get_rank() == 0 else None
    dist.gather(lay(written(dist.get_rank(), SHAPE)), outputs)
    if outputs is not None:
        same(outputs, everybody(), "outputs")


def gather_output(lay: Lay) -> None:
    outputs = [lay(written(NOWHERE, SHAPE)) for _ in everybody()] if dist.get_rank() == 0 else None
    dist.gather(written(dist.get_rank(), SHAPE), outputs)
    if outputs is not None:
        same(outputs, everybody(), "outputs")


def scatter_input(lay: Lay) -> None:
    rank = dist.get_rank()
    output = written(NOWHERE, SHAPE)
    send = [lay(written(0, SHAPE, part=p)) for p in range(dist.get_world_size())]
    dist.scatter(output, send if rank == 0 else None)
    same(output, written(0, SHAPE, part=rank), "output")


def scatter_output(lay: Lay) -> None:
    rank = dist.get_rank()
    output = lay(written(NOWHERE, SHAPE))
    send = [written(0, SHAPE, part=p) for p in range(dist.get_world_size())]
    dist.scatter(output, send if rank == 0 else None)
    same(output, written(0, SHAPE, part=rank), "output")


def reduce_scatter_input(lay: Lay) -> None:
    rank = dist.get_rank()
    output = written(NOWHERE, SHAPE)
    dist.reduce_scatter(
        output, [lay(written(rank, SHAPE, part=p)) for p in range(len(everybody()))]
    )
    same(output, reduced("SUM", everybody(rank)), "output")


def reduce_scatter_output(lay: Lay) -> None:
    rank = dist.get_rank()
    output = lay(written(NOWHERE, SHAPE))
    dist.reduce_scatter(output, [written(rank, SHAPE, part=p) for p in range(len(everybody()))])
    same(output, reduced("SUM", everybody(rank)), "output")


def reduce_scatter_single_output(lay: Lay) -> None:
    rank = dist.get_rank()
    output = lay(written(NOWHERE, SHAPE))
    send = torch.cat([written(rank, SHAPE, part=p) for p in range(len(everybody()))])
    reduction.reduce_scatter_single(output, send)
    same(output, reduced("SUM", everybody(rank)), "output")


def all_to_all_input(lay: Lay) -> None:
    rank = dist.get_rank()
    outputs = [written(NOWHERE, SHAPE) for _ in everybody()]
    dist.all_to_all(outputs, [lay(written(rank, SHAPE, part=p)) for p in range(len(outputs))])
    same(outputs, everybody(rank), "outputs")


def all_to_all_output(lay: Lay) -> None:
    rank = dist.get_rank()
    outputs = [lay(written(NOWHERE, SHAPE)) for _ in everybody()]
    dist.all_to_all(outputs, [written(rank, SHAPE, part=p) for p in range(len(outputs))])
    same(outputs, everybody(rank), "outputs")


def message_sent(lay: Lay) -> None:
    rank = dist.get_rank()
    output = written(NOWHERE, SHAPE)
    if dist.get_world_size() > 1 and rank == 0:
        dist.send(lay(written(0, SHAPE)), 1)
    elif rank == 1:
        dist.recv(output, 0)
        same(output, written(0, SHAPE), "received")


def message_received(lay: Lay) -> None:
    rank = dist.get_rank()
    output = lay(written(NOWHERE, SHAPE))
    if dist.get_world_size() > 1 and rank == 0:
        dist.send(written(0, SHAPE), 1)
    elif rank == 1:
        dist.recv(output, 0)
        same(output, written(0, SHAPE), "received")


def all_reduce_expanded() -> None:
    """Reduce a tensor whose elements share memory: a sum in place would be added twice."""
    rank = dist.get_rank()
    n = dist.get_world_size()
    tensor = written(rank, (1, 5)).expand(4, 5)
    dist.all_reduce(tensor)
    same(tensor, reduced("SUM", [written(r, (1, 5)) for r in range(n)]).expand(4, 5), "result")


CALLS: dict[str, Callable[[Lay], None]] = {
    call.__name__: call
    for call in (
        all_reduce, reduce, broadcast, all_gather_input, all_gather_output,
        all_gather_single_input, gather_input, gather_output, scatter_input, scatter_output,
        reduce_scatter_input, reduce_scatter_output, reduce_scatter_single_output,
        all_to_all_input, all_to_all_output, message_sent, message_received,
    )
}  # fmt: skip
