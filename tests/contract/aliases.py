"""One call whose tensors share memory: every input is read before any output is written.

Outputs are written in the order of their list, so the last one wins.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from contract import movement, reduction
from contract.check import Ledger, same
from contract.plain import reduced, written

NOWHERE = 9  # the rank of nobody: what lies in an output before
COUNTS = (5, 3001)  # elements of a tensor: copied into a slot, and sent in pieces or directly


def aliases(run: Ledger, sizes: Sequence[int]) -> None:
    for count in COUNTS:
        for name, views in OVERLAPS.items():
            run(f"all_reduce_coalesced {name} {count}", partial(all_reduce_coalesced, views, count))
            run(f"manager all_reduce {name} {count}", partial(manager_all_reduce, views, count))
        for call in CALLS:
            run(f"{call.__name__} {count}", partial(call, count))


def ranks() -> range:
    return range(dist.get_world_size())


def row(rank: int, count: int) -> torch.Tensor:
    """Return what `rank` has for all ranks, one part after the other."""
    return written(rank, count * len(ranks()))


# ---- sums ----

OVERLAPS: dict[str, Callable[[torch.Tensor], list[torch.Tensor]]] = {
    "twice": lambda x: [x, x],
    "three times": lambda x: [x, x, x],
    "by a view": lambda x: [x, x.view(-1, 1)],
    "in part": lambda x: [x[: len(x) // 2 + 1], x[1:]],
    "a part first": lambda x: [x[2:4], x],
    "between": lambda x: [x[::2], x[1::2]],
    "with gaps and whole": lambda x: [x, x[::2]],
}


def all_reduce_coalesced(views: Callable[[torch.Tensor], list[torch.Tensor]], count: int) -> None:
    tensor = written(dist.get_rank(), count)
    other = written(dist.get_rank(), 3, part=1)
    first, *rest = views(tensor)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        dist.all_reduce_coalesced([first, other, *rest])
    same(other, reduced("SUM", [written(r, 3, part=1) for r in ranks()]), "the other tensor")
    same_sum(tensor, views, count)


def manager_all_reduce(views: Callable[[torch.Tensor], list[torch.Tensor]], count: int) -> None:
    tensor = written(dist.get_rank(), count)
    with dist._coalescing_manager():
        for view in views(tensor):
            dist.all_reduce(view)
    same_sum(tensor, views, count)


def same_sum(
    tensor: torch.Tensor, views: Callable[[torch.Tensor], list[torch.Tensor]], count: int
) -> None:
    """Compare with a tensor of which every element in some view is added once."""
    wanted = written(dist.get_rank(), count)
    total = reduced("SUM", [written(r, count) for r in ranks()])
    for view, values in zip(views(wanted), views(total), strict=True):
        view.copy_(values)
    same(tensor, wanted, "tensor")


# ---- lists ----


def all_gather_one_output(count: int) -> None:
    output = written(NOWHERE, count)
    dist.all_gather([output] * len(ranks()), written(dist.get_rank(), count))
    same(output, written(len(ranks()) - 1, count), "output")


def all_gather_from_the_place_of_another(count: int) -> None:
    outputs = [written(NOWHERE, count) for _ in ranks()]
    given = outputs[(dist.get_rank() + 1) % len(ranks())]
    given.copy_(written(dist.get_rank(), count))
    dist.all_gather(outputs, given)
    same(outputs, [written(r, count) for r in ranks()], "outputs")


def gather_one_output(count: int) -> None:
    output = written(NOWHERE, count)
    here = dist.get_rank() == 0
    dist.gather(written(dist.get_rank(), count), [output] * len(ranks()) if here else None)
    if here:
        same(output, written(len(ranks()) - 1, count), "output")


def gather_from_the_place_of_another(count: int) -> None:
    outputs = [written(NOWHERE, count) for _ in ranks()]
    here = dist.get_rank() == 0
    given = outputs[-1]
    given.copy_(written(dist.get_rank(), count))
    dist.gather(given, outputs if here else None)
    if here:
        same(outputs, [written(r, count) for r in ranks()], "outputs")


def scatter_to_the_place_of_another(count: int) -> None:
    parts = [written(0, count, part=p) for p in ranks()]
    output = parts[(dist.get_rank() + 1) % len(ranks())]
    dist.scatter(output, parts if dist.get_rank() == 0 else None)
    same(output, written(0, count, part=dist.get_rank()), "output")


def all_to_all_one_output(count: int) -> None:
    output = written(NOWHERE, count)
    send = [written(dist.get_rank(), count, part=p) for p in ranks()]
    dist.all_to_all([output] * len(ranks()), send)
    same(output, written(len(ranks()) - 1, count, part=dist.get_rank()), "output")


def all_to_all_in_place(count: int) -> None:
    tensors = [written(dist.get_rank(), count, part=p) for p in ranks()]
    dist.all_to_all(tensors, tensors[:])
    same(tensors, [written(r, count, part=dist.get_rank()) for r in ranks()], "tensors")


def reduce_scatter_to_the_place_of_another(count: int) -> None:
    rank = dist.get_rank()
    parts = [written(rank, count, part=p) for p in ranks()]
    output = parts[(rank + 1) % len(ranks())]
    dist.reduce_scatter(output, parts)
    same(output, reduced("SUM", [written(r, count, part=rank) for r in ranks()]), "output")


# ---- one tensor for all ranks ----


def all_gather_single_from_the_place_of_another(count: int) -> None:
    output = row(NOWHERE, count)
    place = (dist.get_rank() + 1) % len(ranks())
    given = output[place * count : (place + 1) * count].copy_(written(dist.get_rank(), count))
    movement.all_gather_single(output, given)
    same(output, torch.cat([written(r, count) for r in ranks()]), "output")


def all_gather_single_from_between(count: int) -> None:
    output = row(NOWHERE, count)
    given = output[len(output) - count :].copy_(written(dist.get_rank(), count))
    movement.all_gather_single(output, given)
    same(output, torch.cat([written(r, count) for r in ranks()]), "output")


def reduce_scatter_single_in_place(count: int) -> None:
    rank = dist.get_rank()
    given = row(rank, count)
    output = given[rank * count : (rank + 1) * count]
    reduction.reduce_scatter_single(output, given)
    parts = [row(r, count)[rank * count : (rank + 1) * count] for r in ranks()]
    same(output, reduced("SUM", parts), "output")


# ---- coalesced ----


def all_gather_coalesced_one_input(count: int) -> None:
    given = written(dist.get_rank(), count)
    outputs = [[written(NOWHERE, count) for _ in range(2)] for _ in ranks()]
    old_all_gather_coalesced(outputs, [given, given])
    same(outputs, [[written(r, count)] * 2 for r in ranks()], "outputs")


def all_gather_coalesced_one_output(count: int) -> None:
    output = [written(NOWHERE, count) for _ in ranks()]
    given = [written(dist.get_rank(), count, part=p) for p in range(2)]
    old_all_gather_coalesced([[output[r]] * 2 for r in ranks()], given)
    same(output, [written(r, count, part=1) for r in ranks()], "outputs")


def all_gather_coalesced_into_an_input(count: int) -> None:
    given = [written(dist.get_rank(), count, part=p) for p in range(2)]
    outputs = [[written(NOWHERE, count) for _ in range(2)] for _ in ranks()]
    outputs[-1][0] = given[1]
    old_all_gather_coalesced(outputs, given)
    same(outputs, [[written(r, count, part=p) for p in range(2)] for r in ranks()], "outputs")


def old_all_gather_coalesced(outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        dist.all_gather_coalesced(outputs, inputs)


def manager_all_gather_one_output(count: int) -> None:
    output = row(NOWHERE, count)
    given = [written(dist.get_rank(), count, part=p) for p in range(2)]
    with dist._coalescing_manager():
        for tensor in given:
            movement.all_gather_single(output, tensor)
    same(output, torch.cat([written(r, count, part=1) for r in ranks()]), "output")


def manager_all_gather_into_an_input(count: int) -> None:
    first = row(NOWHERE, count)
    second = row(NOWHERE, count)
    given = first[len(first) - count :].copy_(written(dist.get_rank(), count, part=1))
    with dist._coalescing_manager():
        movement.all_gather_single(first, written(dist.get_rank(), count))
        movement.all_gather_single(second, given)
    same(first, torch.cat([written(r, count) for r in ranks()]), "first output")
    same(second, torch.cat([written(r, count, part=1) for r in ranks()]), "second output")


def manager_reduce_scatter_one_output(count: int) -> None:
    rank = dist.get_rank()
    output = written(NOWHERE, count)
    given = [written(rank, count * len(ranks()), part=p) for p in range(2)]
    with dist._coalescing_manager():
        for tensor in given:
            reduction.reduce_scatter_single(output, tensor)
    same(output, my_part(count, 1), "output")


def manager_reduce_scatter_into_an_input(count: int) -> None:
    rank = dist.get_rank()
    output = written(NOWHERE, count)
    given = [written(rank, count * len(ranks()), part=p) for p in range(2)]
    early = given[1][:count]
    with dist._coalescing_manager():
        reduction.reduce_scatter_single(early, given[0])
        reduction.reduce_scatter_single(output, given[1])
    same(early, my_part(count, 0), "first output")
    same(output, my_part(count, 1), "second output")


def my_part(count: int, part: int) -> torch.Tensor:
    begin = dist.get_rank() * count
    whole = reduced("SUM", [written(r, count * len(ranks()), part=part) for r in ranks()])
    return whole[begin : begin + count]


CALLS: tuple[Callable[[int], None], ...] = (
    all_gather_one_output, all_gather_from_the_place_of_another, gather_one_output,
    gather_from_the_place_of_another, scatter_to_the_place_of_another, all_to_all_one_output,
    all_to_all_in_place, reduce_scatter_to_the_place_of_another,
    all_gather_single_from_the_place_of_another, all_gather_single_from_between,
    reduce_scatter_single_in_place, all_gather_coalesced_one_input,
    all_gather_coalesced_one_output, all_gather_coalesced_into_an_input,
    manager_all_gather_one_output, manager_all_gather_into_an_input,
    manager_reduce_scatter_one_output, manager_reduce_scatter_into_an_input,
)  # fmt: skip
