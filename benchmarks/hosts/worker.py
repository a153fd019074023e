"""A rank on a simulated host: times calls in turns, or trains; rank 0 writes what all found.

python -m benchmarks.hosts.worker calls '{"hosts": [[0, 1], [2, 3]], ...}' FILE
"""

from __future__ import annotations

import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import lockstep as ls
from lockstep.comm.bucket import plan
from lockstep.comm.make_all_reduce import make_all_reduce
from lockstep.data.assignment import Hosts, assign_microbatches, on_one_host
from lockstep.kernel.tree import nodes_of, total

__all__ = ["main"]

LEAVES = 8  # micro-batches of a step
SCALES = (1.0, 2.0, 4.0, 0.5)  # of the inputs of a call, by turns: sums scale without rounding
SENT = "/sys/class/net/eth0/statistics/tx_bytes"


def main(mode: str, options: dict[str, Any], file: str) -> None:
    """Measure as this rank, and write the results as rank 0."""
    torch.set_num_threads(1)
    found = Calls(options).measure() if mode == "calls" else train(options)
    if int(os.environ["RANK"]) == 0:
        Path(file).write_text(json.dumps(found))


def sent_bytes() -> int:
    """Return the bytes that this host has sent."""
    return int(Path(SENT).read_text())


class Calls:
    """The contenders, which take turns on inputs of each size."""

    def __init__(self, options: dict[str, Any]) -> None:
        dist.init_process_group("gloo")
        self._lockstep = dist.new_group(backend="lockstep")
        self._rank = dist.get_rank()
        self._ranks = dist.get_world_size()
        self._hosts: Hosts = tuple(tuple(each) for each in options["hosts"])
        self._sizes = options["sizes"]
        self._repeats = options["repeats"]

    def measure(self) -> list[dict[str, Any]]:
        """Return the times and the bytes sent by each host, by size and contender."""
        found = []
        for size in self._sizes:
            found += self._measure_size(size)
        dist.destroy_process_group()
        return found

    def _measure_size(self, size: int) -> list[dict[str, Any]]:
        length = size // 4
        contenders: dict[str, AllReduce | BucketSum] = {
            "gloo": AllReduce(length, None),
            "lockstep": AllReduce(length, self._lockstep),
            "gloo, reproducible all-reduce": BucketSum(length, on_one_host(self._ranks), None),
            "lockstep, reproducible all-reduce": BucketSum(length, self._hosts, self._lockstep),
        }
        rows: dict[str, dict[str, Any]] = {
            name: {"size": size, "contender": name, "times": [], "sent": []} for name in contenders
        }
        names = list(contenders)
        for turn in range(self._repeats + 1):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                seconds, sent = self._time(contenders[name], SCALES[turn % len(SCALES)])
                if turn:  # the first turn warms up
                    rows[name]["times"].append(seconds)
                    rows[name]["sent"].append(sent)
        return list(rows.values())

    def _time(self, contender: AllReduce | BucketSum, scale: float) -> tuple[float, int]:
        """Return the time of the slowest rank, and the bytes of the host that sent most."""
        contender.write(scale)
        dist.barrier()
        before = sent_bytes()
        begun = time.perf_counter()
        contender.call()
        seconds = time.perf_counter() - begun
        dist.barrier()
        slowest = torch.tensor([seconds, sent_bytes() - before], dtype=torch.float64)
        contender.check(scale)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return float(slowest[0]), int(slowest[1])


def leaf_values(length: int, leaf: int) -> torch.Tensor:
    """Return the values of a rank, or of a micro-batch."""
    return torch.randn(length, generator=torch.Generator().manual_seed(leaf))


class AllReduce:
    """A sum by `dist.all_reduce`."""

    def __init__(self, length: int, group: dist.ProcessGroup | None) -> None:
        self._group = group
        ranks = dist.get_world_size()
        self._values = leaf_values(length, dist.get_rank())
        self._tensor = torch.empty(length)
        leaves = {(rank, rank + 1): leaf_values(length, rank) for rank in range(ranks)}
        self._expected = total(leaves, ranks, torch.add)

    def write(self, scale: float) -> None:
        """Write the inputs of a call."""
        torch.mul(self._values, scale, out=self._tensor)

    def call(self) -> None:
        """Make the call."""
        dist.all_reduce(self._tensor, group=self._group)

    def check(self, scale: float) -> None:
        """Check the answer: bit by bit, where the order of additions is defined."""
        if self._group is not None:
            assert torch.equal(self._tensor, self._expected * scale)
        else:
            torch.testing.assert_close(self._tensor, self._expected * scale, rtol=1e-4, atol=1e-4)


class BucketSum:
    """The sum of the gradients of all micro-batches, as the trainer makes it."""

    def __init__(self, length: int, hosts: Hosts, group: dist.ProcessGroup | None) -> None:
        (bucket,) = plan([length], [torch.float32], 4 * length + 64)
        spans = assign_microbatches(LEAVES, hosts)
        holders = [nodes_of(span, LEAVES) for span in spans]
        self._sum = make_all_reduce(bucket, holders, LEAVES, torch.device("cpu"), group)
        values = {(leaf, leaf + 1): leaf_values(length, leaf) for leaf in range(LEAVES)}
        self._expected = total(values, LEAVES, torch.add)
        self._nodes = {}
        for lo, hi in holders[dist.get_rank()]:
            inside = {(a - lo, b - lo): each for (a, b), each in values.items() if lo <= a < hi}
            self._nodes[lo, hi] = total(inside, hi - lo, torch.add)
        self._held: dict[Any, list[torch.Tensor | None]] = {
            node: [torch.empty(length)] for node in self._nodes
        }
        self._found = torch.empty(0)

    def write(self, scale: float) -> None:
        """Write the inputs of a call."""
        for node, (tensor,) in self._held.items():
            torch.mul(self._nodes[node], scale, out=tensor)

    def call(self) -> None:
        """Make the call."""
        self._sum.launch(self._held)
        self._sum.combine()
        ((_, found),) = self._sum.gather()
        assert found is not None
        self._found = found

    def check(self, scale: float) -> None:
        """Check the answer, bit by bit."""
        assert torch.equal(self._found, self._expected * scale)


def train(options: dict[str, Any]) -> dict[str, Any]:
    """Return the times of steps of a small model, and its digest."""
    ls.init(backend=options["backend"], threads=1)
    torch.manual_seed(0)
    width = options["width"]
    model = torch.nn.Sequential(
        torch.nn.Linear(784, width), torch.nn.ReLU(),
        torch.nn.Linear(width, width), torch.nn.ReLU(),
        torch.nn.Linear(width, 10),
    )  # fmt: skip
    optimizer = partial(torch.optim.SGD, lr=0.01)
    trainer = ls.Trainer(model, torch.nn.CrossEntropyLoss(), optimizer, loggers=())
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(64, 784, generator=generator)
    targets = torch.randint(10, (64,), generator=generator)
    times = []
    sent = []
    for _ in range(options["steps"]):
        before = sent_bytes()
        begun = time.perf_counter()
        trainer.step((inputs, targets))
        times.append(time.perf_counter() - begun)
        sent.append(sent_bytes() - before)
    parameters = sum(each.numel() for each in model.parameters())
    found = {"digest": trainer.digest(), "times": times[2:], "sent": sent[2:]}
    ls.shutdown()
    return found | {"size": 4 * parameters}


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), sys.argv[3])
