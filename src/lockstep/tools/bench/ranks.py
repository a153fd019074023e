"""The ranks of a benchmark, which have a group of every backend and measure them in turns.

    round 1   gloo  mpi  lockstep        one block of calls each, on all ranks
    round 2   mpi  lockstep  gloo        starts with the next contender
    ...       until each has used its share of time

So drift affects all contenders equally. The time of a call is that of its slowest rank.

    launch(measure, (plan,), ranks)
    mpiexec -n RANKS python -m lockstep.tools.bench.ranks PLAN RESULTS      with MPI
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lockstep.launcher.world import init, shutdown
from lockstep.tools.bench.measured_calls import TimedCall, make_mpi_call, make_torch_call
from lockstep.tools.bench.measured_collectives import COLLECTIVES, Collective
from lockstep.tools.bench.results import ITEM_BYTES, Measurement
from lockstep.tools.bench.start_barrier import StartBarrier
from lockstep.tools.bench.workload import WorkloadBuffers, make_pattern

__all__ = ["BenchPlan", "measure", "rotate"]

BLOCK_SECONDS = 6e-3  # target duration of a block
MAX_BLOCK_CALLS = 100  # per block
MIN_CALLS = 15  # per contender
MAX_CALLS = 4000  # per contender
MIN_ROUNDS = 3


@dataclass(frozen=True)
class BenchPlan:
    """The measurements of the ranks.

    Attributes:
        collective: The name of the collective.
        ranks: The number of ranks.
        backends: The names of the backends, the first of which is one of torch.
        sizes: The sizes of the message in bytes.
        seconds: The seconds of measurement per contender and size.
        is_bound: Whether to bind each rank to one core, round-robin.
        barrier: The file of the start barrier.
        timeout: The longest wait for another rank, in seconds.
    """

    collective: str
    ranks: int
    backends: list[str]
    sizes: list[int]
    seconds: float
    is_bound: bool
    barrier: str
    timeout: float


@dataclass
class Contender:
    """A backend, or its tensors in shared memory; its calls, and its measurements at one size."""

    name: str
    library: str
    make_call: Callable[[str, torch.Tensor, torch.Tensor], TimedCall]
    is_shared: bool = False
    times: list[float] = field(default_factory=list)
    rounds: int = 0
    wrong: int = 0
    error: str = ""

    def is_done(self, seconds: float) -> bool:
        """Return whether the contender has used its time, or has failed."""
        made = len(self.times)
        enough = made >= MIN_CALLS and self.rounds >= MIN_ROUNDS
        return bool(self.error) or (enough and (sum(self.times) >= seconds or made >= MAX_CALLS))


def measure(plan: BenchPlan) -> list[Measurement]:
    """Join the other ranks, and return the measurement of each contender at each size."""
    world = init(backend=plan.backends[0], timeout=plan.timeout, device="cpu", portable=False)
    start_barrier = StartBarrier(plan.barrier, world.rank, world.world_size, plan.timeout)
    try:
        contenders = list(_make_contenders(plan))
        if plan.is_bound:
            allowed = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {allowed[world.rank % len(allowed)]})
        collective = COLLECTIVES[plan.collective]
        results = []
        counts = (collective.elements(size, ITEM_BYTES, world.world_size) for size in plan.sizes)
        for count in dict.fromkeys(counts):
            size = collective.bytes(count, ITEM_BYTES, world.world_size)
            _measure_size(collective, count, contenders, plan.seconds, start_barrier)
            for one in contenders:
                times = [1e6 * time for time in sorted(one.times)] if not one.error else []
                names = one.name, one.library, collective.name
                results.append(
                    Measurement(*names, world.world_size, size, count, times, one.wrong, one.error)
                )
        return results
    finally:
        start_barrier.close()
        shutdown()


def _make_contenders(plan: BenchPlan) -> Iterator[Contender]:
    """Yield the contenders; the first backend has the default group."""
    library = f"torch {torch.__version__}"
    for name in plan.backends:
        if name == "mpi":
            from mpi4py import MPI  # type: ignore[import-not-found, unused-ignore]

            yield Contender(name, _name_library(MPI), partial(make_mpi_call, MPI))
            continue
        group = None if name == plan.backends[0] else dist.new_group(backend=name)
        call = partial(make_torch_call, group)
        yield Contender(name, library, call)
        if name == "lockstep" and plan.collective != "barrier":
            yield Contender("lockstep (segment)", library, call, is_shared=True)


def _measure_size(
    collective: Collective,
    count: int,
    contenders: list[Contender],
    seconds: float,
    start_barrier: StartBarrier,
) -> None:
    """Measure the contenders at one size, for about `seconds` each."""
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    pattern = make_pattern(count)
    blocks: dict[str, Callable[[int], list[float]]] = {}
    calls = dict.fromkeys((one.name for one in contenders), 2)
    for one in contenders:
        one.times = []
        one.rounds = 0
        one.wrong = 0
        one.error = ""
        try:
            buffers = WorkloadBuffers(collective, pattern, rank, ranks, one.is_shared)
            call = one.make_call(collective.name, buffers.send, buffers.receive)
            blocks[one.name] = partial(_run_block, one, buffers, call, start_barrier)
            for _ in range(2):  # warm up, and choose the number of calls per block
                typical = statistics.median(blocks[one.name](2))
                fitting = round(BLOCK_SECONDS / max(typical, 1e-9))
                calls[one.name] = max(1, min(MAX_BLOCK_CALLS, fitting))
        except (RuntimeError, ValueError) as error:  # a backend that cannot do it, on every rank
            one.error = (str(error).splitlines() or [""])[0].strip()
        one.wrong = 0
    for number in rotate(len(contenders)):
        if all(one.is_done(seconds) for one in contenders):
            return
        one = contenders[number]
        if not one.is_done(seconds):
            one.times += blocks[one.name](calls[one.name])
            one.rounds += 1


def _run_block(
    one: Contender,
    buffers: WorkloadBuffers,
    call: TimedCall,
    start_barrier: StartBarrier,
    calls: int,
) -> list[float]:
    """Run a block of calls; return the seconds of each, on its slowest rank."""
    times, wrong = buffers.time_block(call, calls, start_barrier.wait)
    slowest = torch.tensor(times)
    all_wrong = torch.tensor([wrong])
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    dist.all_reduce(all_wrong)
    one.wrong += int(all_wrong)
    scale = 2e9 if buffers.is_round_trip else 1e9
    return [time / scale for time in slowest.tolist()]


def rotate(count: int) -> Iterator[int]:
    """Yield indices forever; each round starts with the next contender."""
    first = 0
    while True:
        yield from ((first + step) % count for step in range(count))
        first += 1


def _name_library(mpi: Any) -> str:
    """Return name and version of the MPI of mpi4py's module, such as "MPICH 5.0.2"."""
    words = str(mpi.Get_library_version()).replace("Version:", " ").replace(",", " ").split()
    return " ".join(words[: 3 if words[:1] in (["Open"], ["Intel(R)"]) else 2])


def main() -> None:
    """Measure as a rank of `mpiexec`; rank 0 writes the results to a file."""
    from mpi4py import MPI

    text, path = sys.argv[1:]
    plan = BenchPlan(**json.loads(text))
    comm = MPI.COMM_WORLD
    if comm.Get_size() != plan.ranks:
        sys.exit(
            f"each of the {plan.ranks} ranks is alone in {_name_library(MPI)}, the MPI of mpi4py: "
            "put the mpiexec of that MPI first on PATH"
        )
    results = measure(plan)
    if comm.Get_rank() == 0:
        Path(path).write_text(json.dumps([asdict(one) for one in results]))


if __name__ == "__main__":
    main()
