"""Several tensors per rank in one call of a group, as Gloo takes them; and what it refuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from contract.check import Ledger, Wrong, same
from contract.plain import reduced, written

NOWHERE = 9  # the rank of nobody: what an output holds before


def lists(run: Ledger, sizes: Sequence[int]) -> None:
    for count in (3, 3001):
        for op in ("SUM", "PRODUCT", "MIN", "MAX"):
            run(f"all_reduce {op} {count}", partial(all_reduce, op, count))
        for root in range(dist.get_world_size()):
            for tensor in range(2):
                run(
                    f"broadcast {count} of tensor {tensor} from {root}",
                    partial(broadcast, count, root, tensor),
                )
        run(f"all_gather {count}", partial(all_gather, count))
    run("all_reduce of one tensor twice", one_tensor_twice)
    for name, mistake in MISTAKES.items():
        run(f"mistake {name}", partial(raises_runtime_error, mistake))


def world() -> Any:
    return dist.group.WORLD


def own(count: int, parts: int = 2) -> list[torch.Tensor]:
    return [written(dist.get_rank(), count, part=part) for part in range(parts)]


def options(kind: Callable[[], Any], **values: object) -> Any:
    found = kind()
    for name, value in values.items():
        setattr(found, name, value)
    return found


def all_reduce(op: str, count: int) -> None:
    tensors = own(count)
    chosen = options(dist.AllreduceOptions, reduceOp=getattr(dist.ReduceOp, op))
    world().allreduce(tensors, chosen).wait()
    ranks = range(dist.get_world_size())
    parts = range(2)
    wanted = reduced(op, [written(r, count, part=part) for r in ranks for part in parts])
    same(tensors, [wanted] * 2, "results")


def one_tensor_twice() -> None:
    tensor = own(5)[0]
    world().allreduce([tensor, tensor]).wait()
    ranks = range(dist.get_world_size())
    same(tensor, reduced("SUM", [written(r, 5) for r in ranks for _ in range(2)]), "result")


def broadcast(count: int, root: int, tensor: int) -> None:
    tensors = own(count)
    world().broadcast(
        tensors, options(dist.BroadcastOptions, rootRank=root, rootTensor=tensor)
    ).wait()
    same(tensors, [written(root, count, part=tensor)] * 2, "tensors")


def all_gather(count: int) -> None:
    ranks = range(dist.get_world_size())
    outputs = [[written(NOWHERE, count) for _ in range(2 * len(ranks))] for _ in range(2)]
    world().allgather(outputs, own(count)).wait()
    wanted = [written(r, count, part=part) for r in ranks for part in range(2)]
    same(outputs, [wanted] * 2, "outputs")


# ---- mistakes, which a program for Gloo expects as RuntimeError ----

SHORT = torch.zeros(1)
LONG = torch.zeros(2)
WIDE = torch.zeros(1, dtype=torch.float64)


def no_rank(kind: Callable[[], Any], rank: int) -> Any:
    return options(kind, rootRank=rank)


MISTAKES: dict[str, Callable[[], object]] = {
    "all_reduce of nothing": lambda: world().allreduce([]),
    "all_reduce of two dtypes": lambda: world().allreduce([SHORT, WIDE]),
    "all_reduce of two sizes": lambda: world().allreduce([SHORT, LONG]),
    "all_reduce of two layouts": lambda: world().allreduce([SHORT, SHORT.to_sparse()]),
    "broadcast from no rank": lambda: world().broadcast(
        [SHORT], no_rank(dist.BroadcastOptions, dist.get_world_size())
    ),
    "broadcast of no tensor": lambda: world().broadcast(
        [SHORT], options(dist.BroadcastOptions, rootTensor=1)
    ),
    "reduce to no rank": lambda: world().reduce([SHORT], no_rank(dist.ReduceOptions, -1)),
    "reduce of a list": lambda: world().reduce([SHORT, SHORT], dist.ReduceOptions()),
    "all_gather of nothing": lambda: world().allgather([], []),
    "all_gather into too few": lambda: world().allgather([[]], [SHORT]),
    "all_gather into another dtype": lambda: world().allgather(
        [[WIDE] * dist.get_world_size()], [SHORT]
    ),
    "gather to no rank": lambda: world().gather([], [SHORT], no_rank(dist.GatherOptions, -1)),
    "scatter from no rank": lambda: world().scatter([SHORT], [], no_rank(dist.ScatterOptions, -1)),
    "all_to_all_single of sizes that do not add up": lambda: dist.all_to_all_single(
        torch.zeros(4), torch.zeros(4), [9] * dist.get_world_size(), [9] * dist.get_world_size()
    ),
}


def raises_runtime_error(mistake: Callable[[], object]) -> None:
    try:
        mistake()
    except RuntimeError:
        return
    raise Wrong("it was not refused")
