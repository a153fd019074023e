"""One process with a thread per device against one process per device.

    python benchmarks/single_process.py          writes benchmarks/single_process.json and
                                                 tools/drawings/single_process.json, and prints
                                                 the tables of single_process.md

Contenders train the same batches on two CPU devices, one thread of arithmetic each, one contender
after the other, several times in turn; ratios are taken round by round. A step is forward, backward
and SGD. The two networks differ in how much of a step is Python.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import lockstep as ls
from lockstep.data_parallel.replica import replicate
from lockstep.data_parallel.replica_run import ReplicaRun
from lockstep.record.environment import describe_environment

ROUNDS, WARM_UP, STEPS = 7, 4, 12
DEVICES = 2
KINDS = ("forward", "backward")
HERE = Path(__file__).parent
TIMELINE = HERE.parent / "tools/drawings/single_process.json"

Batch = tuple[torch.Tensor, torch.Tensor]


def build_operators() -> nn.Module:
    """Return a network whose steps consist of few long operators."""
    layers: list[nn.Module] = []
    for inputs, outputs, stride in [(3, 32, 1), (32, 64, 2), (64, 128, 2), (128, 256, 2)]:
        layers += [nn.Conv2d(inputs, outputs, 3, stride, 1), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))


def build_python() -> nn.Module:
    """Return a network whose steps consist of many short operators, so mostly of Python."""
    layers = [layer for _ in range(150) for layer in (nn.Linear(16, 16), nn.Tanh())]
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 16), *layers, nn.Linear(16, 10))


NETWORKS = {"long operators": (build_operators, 64), "many short operators": (build_python, 16)}
CONTENDERS = {
    "processes": "`ls.DistributedDataParallel`, 2 processes",
    "threads": "`ls.DataParallel`, 2 threads",
    "torch": "the algorithm of torch's `DataParallel`, 2 threads",
    "alone": "one device, without a wrapper",
}


@dataclass
class Outcome:
    """What one rank measured.

    Attributes:
        seconds: The time of each step.
        cpu: The CPU time of each step, of all threads of the process.
        blocked: For forward and backward, the share of the time in which their threads wait for
            something other than a core, such as Python's lock.
        peak: The growth of the peak memory by the steps, in bytes.
        spans: The spans (lane, kind, begin, end) of each step, in seconds.
        bytes: The sizes of the parameters, the inputs and the outputs of a step, in bytes.
    """

    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    blocked: dict[str, float] = field(default_factory=dict)
    peak: int = 0
    spans: list[list[tuple[str, str, float, float]]] = field(default_factory=list)
    bytes: dict[str, int] = field(default_factory=dict)


class Clock:
    """Notes spans of one step, from any thread, and for how long threads were blocked."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, str, float, float]] = []
        self.parts: list[tuple[str, float, float]] = []  # kind, seconds blocked, seconds in all

    def time(self, lane: str, kind: str, work: Callable[[], Any]) -> Any:
        """Call a function and note its span."""
        ran, queued = read_schedule()
        begin = time.perf_counter()
        result = work()
        end = time.perf_counter()
        ran, queued = (
            now - before for now, before in zip(read_schedule(), (ran, queued), strict=True)
        )
        self.spans.append((lane, kind, begin, end))
        self.parts.append((kind, max(0.0, end - begin - ran - queued), end - begin - queued))
        return result

    def blocked(self) -> dict[str, float]:
        """Return the share of blocked time, without that in which a thread waits for a core."""
        return {
            kind: sum(blocked for each, blocked, _ in self.parts if each == kind)
            / sum(length for each, _, length in self.parts if each == kind)
            for kind in KINDS
        }


def read_schedule() -> tuple[float, float]:
    """Return for how many seconds this thread has run, and has waited for a core."""
    _, queued, _ = Path("/proc/thread-self/schedstat").read_text().split()
    return time.thread_time(), int(queued) / 1e9


def watch_replicas(clock: Clock) -> None:
    """Note the spans of forward and backward of micro-batches of `ls.DataParallel`."""

    def timed(kind: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(run: ReplicaRun, *args: Any) -> Any:
            return clock.time(f"device {run.index}", kind, partial(method, run, *args))

        return call

    for kind in KINDS:
        patch.object(ReplicaRun, kind, timed(kind, getattr(ReplicaRun, kind))).start()


def compute_like_torch(model: nn.Module, loss: nn.Module, batch: Batch, clock: Clock) -> None:
    """Take a step with the algorithm of `torch.nn.DataParallel`, which itself needs GPUs.

    Replicas of the module compute in threads; autograd computes one backward from the joined
    outputs, for CPU devices on the calling thread, and adds the gradients as they arrive.
    """
    parts = batch[0].chunk(DEVICES)
    outputs: dict[int, torch.Tensor] = {}
    replicas = []
    for number in range(DEVICES):
        tensors: dict[int, torch.Tensor] = {
            id(each): each.view_as(each) for each in model.parameters()
        }
        for each in model.buffers():
            tensors[id(each)] = each if number == 0 else each.clone()
        replicas.append(replicate(model, tensors))

    def compute(number: int) -> None:
        torch.get_num_threads()  # otherwise its first product starts a thread per core
        work = partial(replicas[number], parts[number])
        outputs[number] = clock.time(f"device {number}", "forward", work)

    threads = [threading.Thread(target=compute, args=(number,)) for number in range(DEVICES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    value = loss(torch.cat([outputs[number] for number in range(DEVICES)]), batch[1])
    clock.time("device 0", "backward", value.backward)


def train(contender: str, network: str) -> Outcome:
    """Train on this rank."""
    world = ls.init()
    build, size = NETWORKS[network]
    torch.manual_seed(0)
    model, loss = build(), nn.CrossEntropyLoss()
    clock = Clock()
    wrapped: Any = model
    if contender == "processes":
        wrapped = ls.DistributedDataParallel(model)
    elif contender == "threads":
        wrapped = ls.DataParallel(model, ["cpu"] * DEVICES, microbatches=DEVICES)
        watch_replicas(clock)

    def compute(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = loss(wrapped(inputs), targets)
        return value

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(1)
    outcome = Outcome()
    outcome.bytes["parameters"] = sum(each.nbytes for each in model.parameters())
    before = 0
    for step in range(WARM_UP + STEPS):
        batch = (
            torch.randn(size, 3, 32, 32, generator=generator),
            torch.randint(0, 10, (size,), generator=generator),
        )
        outcome.bytes["inputs"] = batch[0].nbytes
        if contender == "processes":
            batch = (batch[0].chunk(DEVICES)[world.rank], batch[1].chunk(DEVICES)[world.rank])
            torch.distributed.barrier()
        if step == 0:
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
            before = read_memory("VmRSS")
        clock.spans = []
        if step == WARM_UP:
            clock.parts.clear()
        lane = f"process {world.rank}"
        begin, cpu = time.perf_counter(), time.process_time()
        optimizer.zero_grad()
        if contender == "threads":
            wrapped.compute_loss(loss, *batch).backward()
        elif contender == "torch":
            compute_like_torch(model, loss, batch, clock)
        else:
            value = clock.time(lane, "forward", partial(compute, *batch))
            clock.time(lane, "backward", value.backward)
        optimizer.step()
        end = time.perf_counter()
        if step >= WARM_UP:
            outcome.seconds.append(end - begin)
            outcome.cpu.append(time.process_time() - cpu)
            outcome.spans.append([*clock.spans, ("step", "step", begin, end)])
    outcome.peak = read_memory("VmHWM") - before
    outcome.blocked = clock.blocked()
    ls.shutdown()
    return outcome


def read_memory(name: str) -> int:
    """Return a field of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(name + ":")]
    return int(line.split()[1]) * 1024


def measure() -> dict[str, Any]:
    """Return the medians of each round, and the spans of the fastest steps."""
    found: dict[str, Any] = {}
    for network in NETWORKS:
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in CONTENDERS}
        fastest: dict[str, Any] = {}
        sizes: dict[str, int] = {}
        for number in range(ROUNDS):
            names = list(CONTENDERS)
            for name in names if number % 2 == 0 else reversed(names):
                ranks = DEVICES if name == "processes" else 1
                outcomes = ls.launch(train, (name, network), ranks, timeout=300.0)
                slowest = [max(each) for each in zip(*(o.seconds for o in outcomes), strict=True)]
                cpu = [sum(each) for each in zip(*(o.cpu for o in outcomes), strict=True)]
                rounds[name].append(
                    {
                        "seconds": statistics.median(slowest),
                        "cpu": statistics.median(cpu),
                        "peak": outcomes[0].peak,
                        **outcomes[0].blocked,
                    }
                )
                sizes |= outcomes[0].bytes
                length = min(slowest)
                if name not in fastest or length < fastest[name]["seconds"]:
                    step = slowest.index(length)
                    spans = [span for each in outcomes for span in each.spans[step]]
                    fastest[name] = {"seconds": length, "spans": spans}
                print(f"{network}, round {number + 1}, {name}: {rounds[name][-1]}", flush=True)
        found[network] = {"rounds": rounds, "fastest": fastest, "bytes": sizes}
    return {
        "benchmark": "single_process",
        "command": "python benchmarks/single_process.py",
        "environment": describe_environment(),
        "networks": found,
    }


def spread(values: list[float], style: str) -> str:
    """Return the median and the quartiles of some values."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:{style}} ({low:{style}} to {high:{style}})"


def tell(result: dict[str, Any]) -> str:
    """Return the tables of the page."""
    lines = []
    for network, measured in result["networks"].items():
        rounds = measured["rounds"]
        seconds = {name: [each["seconds"] for each in values] for name, values in rounds.items()}
        lines += [
            f"## {network.capitalize()}",
            "",
            "| contender | step | relative to processes | CPU time | blocked in forward "
            "| blocked in backward | peak memory |",
            "|---|---|---|---|---|---|---|",
        ]
        for name, about in CONTENDERS.items():
            values = rounds[name]
            cells = [spread([1000 * each for each in seconds[name]], ".1f") + " ms"]
            pairs = zip(seconds[name], seconds["processes"], strict=True)
            cells.append(spread([one / two for one, two in pairs], ".2f"))
            cells.append(f"{statistics.median(1000 * each['cpu'] for each in values):.1f} ms")
            cells += [spread([each[kind] for each in values], ".0%") for kind in KINDS]
            cells.append(f"{statistics.median(each['peak'] / 2**20 for each in values):.1f} MiB")
            lines.append(f"| {about} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def write_timeline(result: dict[str, Any]) -> None:
    """Write the spans of the fastest steps for `tools/drawings`, in milliseconds."""
    drawn: dict[str, dict[str, Any]] = {}
    for network, measured in result["networks"].items():
        drawn[network] = {}
        for name in ("threads", "processes"):
            spans = measured["fastest"][name]["spans"]
            start = min(begin for _, _, begin, _ in spans)
            drawn[network][name] = sorted(
                [lane, kind, round(1000 * (begin - start), 2), round(1000 * (end - start), 2)]
                for lane, kind, begin, end in spans
            )
    TIMELINE.write_text(json.dumps(drawn, indent=1) + "\n")


def main() -> None:
    """Measure, and write the results."""
    result = measure()
    (HERE / "single_process.json").write_text(json.dumps(result, indent=1) + "\n")
    write_timeline(result)
    print(tell(result))


if __name__ == "__main__":
    main()
