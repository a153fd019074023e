"""The backend "lockstep" compared with Gloo: python benchmarks/backend.py [RANKS] [SECONDS].

All contenders take turns in one run; inputs are rewritten before each call and
answers checked after it. `lockstep bench` measures more carefully; this is for a
quick look while working on the backend.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.distributed as dist

import lockstep as ls
from lockstep.comm.shared_memory import empty_shared

SIZES = [4, 1 << 10, 16 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]


def all_reduce(seconds: float) -> list[tuple[int, dict[str, list[float]]]]:
    """Return (bytes, seconds of every call by contender) for each size."""
    ls.init(backend="gloo", timeout=60)
    n = dist.get_world_size()
    ours = dist.new_group(backend="lockstep")
    rows = []
    for size in SIZES:
        numel = size // 4
        source = torch.full((numel,), dist.get_rank() + 1.0)
        going = torch.ones(1)
        cases = {
            "gloo": (None, torch.empty(numel)),
            "private": (ours, torch.empty(numel)),
            "in the segment": (ours, empty_shared(numel)),
        }
        times: dict[str, list[float]] = {name: [] for name in [*cases, "memory copy"]}
        until = time.perf_counter() + seconds
        while going.item():
            for name, (group, tensor) in cases.items():
                tensor.copy_(source)
                dist.barrier(group=ours)
                begun = time.perf_counter()
                dist.all_reduce(tensor, group=group)
                times[name].append(time.perf_counter() - begun)
                assert (tensor == n * (n + 1) / 2).all()
            begun = time.perf_counter()
            cases["private"][1].copy_(source)
            times["memory copy"].append(time.perf_counter() - begun)
            going.fill_(time.perf_counter() < until or len(times["gloo"]) < 5)
            dist.broadcast(going, 0, group=ours)
        rows.append((size, times))
    ls.shutdown()
    return rows


def main() -> None:
    """Print the median and the least time of each contender."""
    parser = argparse.ArgumentParser(description="The backend lockstep compared with Gloo.")
    parser.add_argument("ranks", type=int, nargs="?", default=2)
    parser.add_argument("seconds", type=float, nargs="?", default=2.0, help="per size")
    given = parser.parse_args()
    for size, times in ls.launch(all_reduce, (given.seconds,), nprocs=given.ranks)[0]:
        gloo = statistics.median(times["gloo"])
        print(f"{size:>9} B", end="")
        for name, taken in times.items():
            median = statistics.median(taken)
            print(f"   {name} {median * 1e6:.0f} us (least {min(taken) * 1e6:.0f})", end="")
            print(f" {gloo / median:.1f}x" if name != "memory copy" else "", end="")
        print()


if __name__ == "__main__":
    main()
