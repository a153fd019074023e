"""Interleaved measurement: contenders take turns, so that drift affects all of them equally.

    round 1   gloo  mpi  lockstep  memcpy        one block of calls each
    round 2   mpi  lockstep  memcpy  gloo        starts with the next contender
    ...       until each has used its share of time

The time of a call is that of its slowest rank.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from lockstep.tools.bench.measured_collectives import COLLECTIVES, COPY
from lockstep.tools.bench.results import Contender, Result
from lockstep.tools.bench.workload import Workload

__all__ = ["measure", "rotate"]

BLOCK_MICROSECONDS = 6e3  # target duration of a block
MAX_BLOCK_CALLS = 100  # per block
MIN_CALLS = 15  # per contender
MAX_CALLS = 4000  # per contender
MIN_ROUNDS = 3


@dataclass
class ContenderProgress:
    """The measurements of one contender so far."""

    contender: Contender
    workload: Workload
    calls: int = 1
    rounds: int = 0
    spent: float = 0.0
    wrong: int = 0
    error: str = ""
    times: list[float] | None = None

    def is_done(self, seconds: float) -> bool:
        """Return whether the contender has used its time, or has failed."""
        made = len(self.times or ())
        enough = made >= MIN_CALLS and self.rounds >= MIN_ROUNDS
        return bool(self.error) or (enough and (self.spent >= seconds or made >= MAX_CALLS))


def measure(
    contenders: list[Contender], workload: Workload, ranks: int, size: int, seconds: float
) -> list[Result]:
    """Measure a workload on every contender, for about `seconds` each.

    Args:
        contenders: The contenders, in the order of the results.
        workload: The workload.
        ranks: The number of ranks.
        size: The size of the message in bytes.
        seconds: The time per contender.

    Returns:
        One result per contender. A contender that does not support the workload has an error
        and no times.

    Raises:
        LockstepError: A rank has failed or does not answer.
    """
    states = [
        ContenderProgress(one, replace(workload, shared_memory=one.shared_memory), times=[])
        for one in contenders
    ]
    for progress in states:
        asked = (
            copy_workload(progress.workload, ranks)
            if progress.contender.is_copy
            else progress.workload
        )
        send_request(progress, {"prepare": progress.contender.name, "workload": asdict(asked)})
        warm_up(progress)
    for number in rotate(len(states)):
        running = [progress for progress in states if not progress.is_done(seconds)]
        if not running:
            break
        if states[number] in running:
            run_block(states[number])
    for progress in states:
        progress.contender.runner.ask({"drop": progress.contender.name})
    return [make_result(progress, ranks, size) for progress in states]


def rotate(count: int) -> Iterator[int]:
    """Yield indices forever; each round starts with the next contender."""
    first = 0
    while True:
        yield from ((first + step) % count for step in range(count))
        first += 1


def send_request(progress: ContenderProgress, message: dict[str, Any]) -> list[dict[str, Any]]:
    """Send a request to the ranks of a contender and keep the error, if any."""
    answers = progress.contender.runner.ask(message)
    progress.error = next((answer["error"] for answer in answers if "error" in answer), "")
    return answers


def copy_workload(workload: Workload, ranks: int) -> Workload:
    """Return the workload of a copy that moves as many bytes as the message contains."""
    parts = ranks if COLLECTIVES[workload.collective].has_part_per_rank else 1
    return replace(workload, collective=COPY.name, count=workload.count * parts)


def slowest_times(progress: ContenderProgress, answers: list[dict[str, Any]]) -> list[float]:
    """Return the microseconds of each call on its slowest rank; half of a round trip."""
    is_round_trip = progress.workload.collective == "send_recv" and not progress.contender.is_copy
    scale = 2e3 if is_round_trip else 1e3
    by_call = zip(*(answer["times"] for answer in answers), strict=True)
    return [max(times) / scale for times in by_call]


def warm_up(progress: ContenderProgress) -> None:
    """Run a few calls, and choose the number of calls per block."""
    for _ in range(2):
        if progress.error:
            return
        answers = send_request(progress, {"block": progress.contender.name, "calls": 2})
        if not progress.error:
            typical = statistics.median(slowest_times(progress, answers))
            progress.calls = max(
                1, min(MAX_BLOCK_CALLS, round(BLOCK_MICROSECONDS / max(typical, 1e-3)))
            )


def run_block(progress: ContenderProgress) -> None:
    """Measure one block."""
    answers = send_request(progress, {"block": progress.contender.name, "calls": progress.calls})
    if progress.error:
        return
    times = slowest_times(progress, answers)
    assert progress.times is not None
    progress.times += times
    progress.rounds += 1
    progress.spent += sum(times) / 1e6
    progress.wrong += sum(answer["wrong"] for answer in answers)


def make_result(progress: ContenderProgress, ranks: int, size: int) -> Result:
    """Return the result of a contender."""
    times = tuple(sorted(progress.times or ())) if not progress.error else ()
    return Result(
        progress.contender, progress.workload, ranks, size, times, progress.wrong, progress.error
    )  # fmt: skip
