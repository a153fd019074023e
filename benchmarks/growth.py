"""What a rank exchanges and records on 4 to 8,192 ranks, simulated in one process.

    python benchmarks/growth.py [--ranks 4 64 1024 8192]

Every rank of a simulated world runs the code of a real one, with messages passed in memory: the
statuses of a step, the norm of the gradient, an evaluation, a comparison, and the registration at
the store. Counted are the messages that a rank sends and receives, their bytes, and the processor
time of merging; the time until all ranks have the result is simulated with 50 us per message and
1 Gbit/s. "Of every rank" is what a rank would receive if it read the message of every other one.
"""

import argparse
import gc
import json
import time
from collections import deque
from functools import partial
from types import SimpleNamespace

import orjson
from torch.distributed import HashStore

from lockstep.comm.collectives import ALL_GATHER_RANKS, FRAME, PAGE
from lockstep.comm.message_tree import Packet, Send, run_along_tree
from lockstep.kernel.buffers import BufferReport
from lockstep.kernel.exact_sum import compute_partial_sums, merge_partial_sums
from lockstep.kernel.rank_status import RankStatus, summarize
from lockstep.kernel.step_context import MicrobatchResult
from lockstep.launcher import rendezvous_check
from lockstep.launcher.environment import RankInfo
from lockstep.model.evaluation import EvaluationSums, MicrobatchScores
from lockstep.model.group_exchange import pack, unpack
from lockstep.model.state_mutation_check import StateMutationCheck
from lockstep.training.history import StepResult, describe_step
from lockstep.training.hyperparameter_check import HyperparameterCheck
from lockstep.training.step_usage import Durations, RankTimes, RankUsage, StepUsage

LATENCY, BANDWIDTH = 50e-6, 125e6  # seconds per message, bytes per second
BUFFERS, PARAMETERS = 20, 64
# Merging a value needs nothing of a trainer.
HOOKS = {
    hook.name: hook.__new__(hook) for hook in (HyperparameterCheck, StateMutationCheck, StepUsage)
}


class World:
    """Ranks that exchange messages in one process; counts and clocks are per rank."""

    def __init__(self, ranks):
        self.ranks = ranks
        self.sent, self.received = [0] * ranks, [0] * ranks
        self.bytes_sent, self.bytes_received = [0] * ranks, [0] * ranks
        self.busy, self.clock = [0.0] * ranks, [0.0] * ranks

    def combine(self, values, merge, encode, decode):
        """Return the combination of the values of all ranks."""
        gc.collect()
        gc.disable()  # it would traverse the objects of all simulated ranks
        try:
            return self._combine(values, merge, encode, decode)
        finally:
            gc.enable()

    def _combine(self, values, merge, encode, decode):
        if self.ranks <= ALL_GATHER_RANKS:
            return self._gather(values, merge, encode, decode)
        running = [
            run_along_tree(rank, self.ranks, Packet("in step 3"), value, merge, encode, decode)
            for rank, value in enumerate(values)
        ]
        mail, waiting, found = {}, {}, None
        ready = deque((rank, None) for rank in range(self.ranks))
        while ready:
            rank, message = ready.popleft()
            begun = time.process_time()
            try:
                action = running[rank].send(message)
            except StopIteration as end:
                found = end.value
                self._work(rank, time.process_time() - begun)
                continue
            self._work(rank, time.process_time() - begun)
            if isinstance(action, Send):
                size = max(FRAME, 8 + len(action.message))
                parts = 1 if size == FRAME else 2
                self.sent[rank] += parts
                self.bytes_sent[rank] += size
                self.clock[rank] += size / BANDWIDTH
                mail[rank, action.peer] = action.message, self.clock[rank] + LATENCY, size, parts
                ready.append((rank, None))
                key = rank, action.peer
            else:
                waiting[action.peer, rank] = True
                key = action.peer, rank
            if key in mail and waiting.pop(key, False):
                message, arrival, size, parts = mail.pop(key)
                receiver = key[1]
                self.received[receiver] += parts
                self.bytes_received[receiver] += size
                self.clock[receiver] = max(self.clock[receiver], arrival)
                ready.append((receiver, message))
        return decode(found.body)

    def _gather(self, values, merge, encode, decode):
        """Gather the pages of all ranks, in a ring as Gloo does; every rank combines them."""
        messages = [encode(value) for value in values]
        size = max(PAGE, 64 + max(map(len, messages)))
        rounds = 1 if size == PAGE else 2
        begun = time.process_time()
        found = decode(messages[0])
        for message in messages[1:]:
            found = merge(found, decode(message))
        combining = time.process_time() - begun
        others = (self.ranks - 1) * rounds
        for rank in range(self.ranks):
            self.sent[rank] += others
            self.received[rank] += others
            self.bytes_sent[rank] += (self.ranks - 1) * (size + PAGE * (rounds - 1))
            self.bytes_received[rank] += (self.ranks - 1) * (size + PAGE * (rounds - 1))
            self._work(rank, combining + others * LATENCY + (others * size) / BANDWIDTH, combining)
        return found

    def _work(self, rank, seconds, processor=None):
        self.clock[rank] += seconds
        self.busy[rank] += seconds if processor is None else processor

    def row(self):
        """Return the figures of the busiest rank, and the means."""
        messages = [a + b for a, b in zip(self.sent, self.received, strict=True)]
        sizes = [a + b for a, b in zip(self.bytes_sent, self.bytes_received, strict=True)]
        return {
            "messages_max": max(messages), "messages_mean": sum(messages) / self.ranks,
            "bytes_max": max(sizes), "bytes_mean": sum(sizes) / self.ranks,
            "processor_max_us": max(self.busy) * 1e6,
            "processor_mean_us": sum(self.busy) / self.ranks * 1e6,
            "done_us": max(self.clock) * 1e6,
        }  # fmt: skip


def make_metrics(rank):
    return {"accuracy": rank % 7 / 7, "top5": 1.0}


def make_status(rank, ranks):
    """Return the status of a rank with one micro-batch, two metrics and some buffers."""
    return RankStatus(
        [MicrobatchResult(rank, 32, 1 / ranks, 1 / (rank + 3), make_metrics(rank))],
        buffers=[BufferReport([f"{number:016x}" for number in range(BUFFERS)])],
        gradients=[f"{(1 << PARAMETERS) - 1:x}"], batch="0 3 1f2e3d4c5b6a7988 -",
        hooks={
            "hyperparameters": "b" * 32, "state": {"0": "a" * 16},
            "usage": RankUsage.of(
                RankTimes(
                    rank, 0.05 + rank % 97 * 1e-5, 0.002 + rank % 13 * 1e-5, 0.0, 10**9 + rank
                )
            ),
        },
    )  # fmt: skip


def take_step(ranks):
    """Return the world after the statuses and the norm of one step, and their summary."""
    world = World(ranks)
    summaries = [
        summarize(
            make_status(rank, ranks),
            SimpleNamespace(rank=rank, replica=rank, replicas=ranks, stages=1, position=0),
            ranks,
        )
        for rank in range(ranks)
    ]
    found = world.combine(
        summaries,
        lambda left, right: left.merge(right, HOOKS),
        pack,
        lambda message: unpack(message, HOOKS),
    )
    sums = [compute_partial_sums([1 / (rank + 1), rank * 1e-9]) for rank in range(ranks)]
    world.combine(sums, merge_partial_sums, pack_floats, json.loads)
    return world, found


def pack_floats(values):
    return json.dumps(values).encode()


def evaluate(ranks):
    """Return the world after an evaluation in which every rank has 16 micro-batches."""
    world = World(ranks)
    rows = [MicrobatchScores(32, 32.0, 1 / (rank + 3), make_metrics(rank)) for rank in range(ranks)]
    values = [EvaluationSums.of([row] * 16) for row in rows]
    world.combine(values, EvaluationSums.merge, EvaluationSums.pack, EvaluationSums.unpack)
    return world


def compare(ranks):
    """Return the world after a comparison of equal messages of 88 bytes."""
    world = World(ranks)
    world.combine(
        [b"x" * 88] * ranks, lambda left, right: left if left == right else b"", bytes, bytes
    )
    return world


def keep_equal(left, right):
    return left if left == right else b""


def record(summary, ranks):
    """Return the bytes of the line of a step in the record."""
    durations = Durations(0.05, 0.002, 0.01, 0.001)
    result = StepResult(
        3, 0, summary.sum_losses(), 32 * ranks, summary.average_metrics(), 0.1, 0.1,
        summary.hooks["usage"].compute_rows(durations), losses=summary.list_losses(), norm=1.5,
        batch="c" * 16,
    )  # fmt: skip
    return len(orjson.dumps({"kind": "step", "t": 1.0, **describe_step(result)}))


class CountingStore:
    """A store that counts the requests and bytes of the rank that is set."""

    def __init__(self, ranks):
        self.store, self.rank = HashStore(), 0
        self.requests, self.bytes = [0] * ranks, [0] * ranks

    def __getattr__(self, name):
        return partial(self._call, name)

    def _call(self, name, *arguments):
        result = getattr(self.store, name)(*arguments)
        sizes = [
            sum(map(len, each)) if isinstance(each, list) else len(str(each)) for each in arguments
        ]
        self.requests[self.rank] += 1
        self.bytes[self.rank] += sum(sizes) + (len(result) if isinstance(result, bytes) else 8)
        return result


def register(ranks):
    """Return (requests, bytes) of the median and of the busiest rank at the start.

    Ranks register one after another, so every rank but the last one would wait; they look for
    the result when all are there.
    """
    store = CountingStore(ranks)
    worlds = [
        RankInfo(
            rank=rank, world_size=ranks, master_addr="192.0.2.1", master_port=29500, host=rank // 8
        )
        for rank in range(ranks)
    ]
    for rank, info in enumerate(worlds):
        store.rank = rank
        rendezvous_check._register(store, info)
    for rank, info in enumerate(worlds):
        store.rank = rank
        rendezvous_check._wait(store, info, time.monotonic() + 10)
        rendezvous_check.read_hosts(store, info)
    counts = sorted(zip(store.requests, store.bytes, strict=True))
    return counts[ranks // 2], counts[-1]


def measure(ranks):
    """Return all figures of a number of ranks."""
    step, summary = take_step(ranks)
    median, busiest = register(ranks)
    return {
        "ranks": ranks,
        "step": step.row(),
        "summary_bytes": len(pack(summary)),
        "record_bytes": record(summary, ranks),
        "evaluation": evaluate(ranks).row(),
        "comparison": compare(ranks).row(),
        "store": {"median": median, "busiest": busiest},
    }


def list_rows(found):
    """Return the rows of the tables of `growth.md`."""
    yield from table("ranks", "messages", "bytes", "processor time", "done after", "of every rank")
    for each in found:
        row, ranks = each["step"], each["ranks"]
        yield cells(
            f"{ranks:,}",
            f"{row['messages_max']} ({row['messages_mean']:.1f})",
            f"{kibibytes(row['bytes_max'])} ({kibibytes(row['bytes_mean'])})",
            f"{row['processor_max_us']:,.0f} us ({row['processor_mean_us']:,.0f} us)",
            f"{row['done_us'] / 1000:.1f} ms",
            kibibytes(2 * (ranks - 1) * PAGE),
        )
    yield ""
    names = "line of a step", "start, median rank", "start, last rank"
    yield from table("ranks", "evaluation", "comparison", *names)
    for each in found:
        rows = [each[name] for name in ("evaluation", "comparison")]
        yield cells(
            f"{each['ranks']:,}",
            *(f"{row['messages_max']} messages, {kibibytes(row['bytes_max'])}" for row in rows),
            f"{each['record_bytes']:,} B",
            *(
                f"{requests:,} requests, {kibibytes(size)}"
                for requests, size in each["store"].values()
            ),
        )


def kibibytes(size):
    return f"{size / 1024:,.0f} KiB" if size >= 10_000 else f"{size / 1024:,.1f} KiB"


def cells(*texts):
    return f"| {' | '.join(texts)} |"


def table(*names):
    return cells(*names), cells(*["---"] * len(names))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 64, 1024, 8192])
    parser.add_argument("--json", help="write the figures to this file")
    given = parser.parse_args()
    found = [measure(ranks) for ranks in given.ranks]
    if given.json:
        with open(given.json, "w") as file:
            json.dump(found, file, indent=1)
    print("\n".join(list_rows(found)))


if __name__ == "__main__":
    main()
