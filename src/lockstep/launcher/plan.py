"""What `lockstep run` was asked for, checked before anything starts. Pure.

torchrun's names and meanings; the words in the messages are the flags.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from lockstep.errors import UsageError

__all__ = ["Plan", "endpoint", "hosts", "processes", "ranks_filter", "streams"]

STDOUT, STDERR = 1, 2
DEFAULT_PORT = 29500
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Plan:
    """A script, module or program on `nprocs` ranks of each of `hosts` hosts.

    `port` 0 is a free one. `redirects` and `tee` give, for each local rank, the
    streams (1 stdout, 2 stderr, 3 both) that go to its log only, or to log and
    terminal. `shown` are the local ranks whose streams reach the terminal.
    """

    target: str
    arguments: tuple[str, ...] = ()
    kind: str = "script"
    nprocs: int = 1
    hosts: int = 1
    host: int = 0
    address: str = LOOPBACK
    port: int = 0
    run: str = ""
    role: str = "default"
    fresh: bool = False
    log_dir: str | None = None
    redirects: dict[int, int] = field(default_factory=dict)
    tee: dict[int, int] = field(default_factory=dict)
    shown: frozenset[int] | None = None

    def __post_init__(self) -> None:
        """Raise UsageError, with the flag and its value, for what cannot be."""
        if self.nprocs < 1:
            raise UsageError(f"--nproc-per-node {self.nprocs}: a host has at least one rank")
        if self.hosts < 1:
            raise UsageError(f"--nnodes {self.hosts}: a world has at least one host")
        if not 0 <= self.host < self.hosts:
            raise UsageError(
                f"--node-rank {self.host}: with --nnodes {self.hosts} hosts count from 0 to "
                f"{self.hosts - 1}"
            )
        if not 0 <= self.port < 65536:
            raise UsageError(f"--master-port {self.port}: a port is a number from 1 to 65535")
        named = {"--local-ranks-filter": self.shown or (), "--redirects": self.redirects}
        for flag, local_ranks in {**named, "--tee": self.tee}.items():
            beyond = [local_rank for local_rank in local_ranks if local_rank >= self.nprocs]
            if beyond:
                raise UsageError(
                    f"{flag} names local rank {beyond[0]}, but --nproc-per-node {self.nprocs} "
                    f"counts them from 0 to {self.nprocs - 1}"
                )

    def shows(self, local_rank: int, stream: int) -> bool:
        """Whether `stream` (1 or 2) of a rank reaches the terminal."""
        if self.shown is not None and local_rank not in self.shown:
            return False
        redirected = self.redirects.get(local_rank, 0) & stream
        return not redirected or bool(self.tee.get(local_rank, 0) & stream)


def processes(text: str, gpus: Callable[[], int]) -> int:
    """Return how many ranks a host gets: a number, "cpu" (cores), "gpu", or "auto" (either)."""
    word = text.strip().lower()
    if re.fullmatch(r"-?\d+", word):
        return int(word)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if word == "cpu":
        return cores or 1
    if word in ("gpu", "auto"):
        count = gpus()
        if word == "gpu" and not count:
            raise UsageError("--nproc-per-node gpu: this host has no GPU; give a number")
        return count or cores or 1
    raise UsageError(f"--nproc-per-node {text}: give a number, auto, cpu or gpu")


def hosts(text: str) -> int:
    """Return the number of hosts; torchrun's range MIN:MAX only where both are the same."""
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text.strip())
    if match is None:
        raise UsageError(f"--nnodes {text}: give the number of hosts")
    if match[2] is not None and match[2] != match[1]:
        raise UsageError(
            f"--nnodes {text}: lockstep run starts a fixed number of hosts; give one number"
        )
    return int(match[1])


def endpoint(text: str, flag: str = "--rdzv-endpoint") -> tuple[str, int]:
    """Return address and port of "HOST" or "HOST:PORT", which `flag` asked for."""
    address, _, port = text.rpartition(":") if ":" in text else (text, "", "")
    if port and not port.isdigit():
        raise UsageError(f"{flag} {text}: give HOST:PORT")
    return address, int(port) if port else DEFAULT_PORT


def streams(flag: str, text: str, nprocs: int) -> dict[int, int]:
    """Read torchrun's "3" (every rank) or "0:1,2:3" (local rank: streams)."""
    if re.fullmatch(r"[0-3]", text):
        return dict.fromkeys(range(nprocs), int(text))
    chosen: dict[int, int] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*:\s*([0-3])\s*", part)
        if match is None:
            raise UsageError(
                f"{flag} {text}: give 0 (none), 1 (stdout), 2 (stderr) or 3 (both), or such a "
                f"number for some local ranks: 0:1,1:3"
            )
        chosen[int(match[1])] = int(match[2])
    return chosen


def ranks_filter(text: str) -> frozenset[int] | None:
    """Read "0,2": the local ranks to show; empty for all."""
    if not text.strip():
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() for part in parts):
        raise UsageError(f"--local-ranks-filter {text}: give local ranks, such as 0,2")
    return frozenset(map(int, parts))
