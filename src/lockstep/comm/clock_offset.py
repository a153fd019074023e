"""The offset of a rank's clock from that of rank 0, to align timelines.

    rank r   sent ──────┐              ┌──> received        several rounds; the one with the
    rank 0              └──> remote ───┘                    shortest round trip is used

The estimate assumes that `remote` was read in the middle between sent and received, so its error
is at most half the round trip (Cristian, "Probabilistic clock synchronization", 1989).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from lockstep.comm.collectives import message_device

__all__ = ["RoundTrip", "clock_offset", "estimate"]

ROUNDS = 8


class RoundTrip(NamedTuple):
    """One round trip; `remote` is a time of the other clock, the other times are of this clock."""

    sent: float
    remote: float
    received: float


def estimate(rounds: Sequence[RoundTrip]) -> float:
    """Return the seconds to add to this clock to get the other clock.

    The error is at most the shortest round trip. If 0 is within the error of the measurement, the
    result is exactly 0, because two ranks of one host share a clock.
    """
    best = min(rounds, key=lambda round_: round_.received - round_.sent)
    offset = best.remote - (best.sent + best.received) / 2
    return 0.0 if abs(offset) <= (best.received - best.sent) / 2 else offset


def clock_offset(
    group: dist.ProcessGroup | None = None, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Measure the seconds to add to the clock of this rank to get the clock of rank 0.

    Call it on every rank of the group; rank 0 answers the other ranks one by one. Clocks of
    different hosts drift by about 10 microseconds per second, so repeat the measurement from time
    to time.

    Args:
        group: The process group; None is the default group.
        clock: A function that returns the time in seconds.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if rank == 0:
        for peer in range(1, ranks):
            for _ in range(ROUNDS):
                _receive(peer, group)
                _send(clock(), peer, group)
        return 0.0
    return estimate([_ask(clock, group) for _ in range(ROUNDS)])


def _ask(clock: Callable[[], float], group: dist.ProcessGroup | None) -> RoundTrip:
    sent = clock()
    _send(sent, 0, group)
    remote = _receive(0, group)
    return RoundTrip(sent, remote, clock())


def _send(value: float, peer: int, group: dist.ProcessGroup | None) -> None:
    message = torch.tensor([value], dtype=torch.float64, device=message_device(group))
    dist.send(message, group=group, group_dst=peer)


def _receive(peer: int, group: dist.ProcessGroup | None) -> float:
    message = torch.empty(1, dtype=torch.float64, device=message_device(group))
    dist.recv(message, group=group, group_src=peer)
    return message.item()
