"""A program that starts processes in every way, checked by mypy and pyright."""

import torch
import torch.distributed as dist

import lockstep as ls
from lockstep.data.datasets import digits


def add(number: int) -> float:
    """Add over all ranks."""
    tensor = torch.full((1,), float(number + ls.rank()))
    dist.all_reduce(tensor)
    return tensor.item()


def launch() -> float:
    """Call a function on two ranks."""
    return sum(ls.launch(add, (1,), nprocs=2))


def drive() -> list[float]:
    """Command two workers."""
    with ls.Driver(nprocs=2) as driver:
        number: float = driver.on(1).run(add, 5)
        print(number)
        return driver.run(add, 1)


def join() -> str:
    """Join the world of a launcher."""
    world = ls.init(backend="gloo", timeout=60.0, portable=False)
    part = ls.partition(digits(), [0.5, 0.5])
    digest = ls.digest({"numbers": torch.ones(3)})
    print(world.rank, world.local_world_size, ls.world_size(), world.local_rank, part)
    ls.shutdown()
    return digest
