"""The hosts of a launch, compared with each other.

    lockstep run -n 1 --nnodes 2 ... --no-python lockstep doctor        on every host

    the first rank of each host: HostFacts ──gathered──> compare_hosts ──> CheckResults, on rank 0

The rendezvous of the launch finds hosts that do not answer, wrong names and closed ports.
"""

from __future__ import annotations

import json
import platform
import socket
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from lockstep.formatting import format_duration
from lockstep.launcher.arithmetic_difference import advise, name_differences
from lockstep.messages import escape_control
from lockstep.tools.report.checks import CheckResult, bad, good, note
from lockstep.version import VERSION

__all__ = ["HostFacts", "compare_hosts", "gather_facts"]

TIMEOUT = 120.0  # seconds for the other hosts
MAX_CLOCK_DIFFERENCE = 1.0  # seconds

# What must be the same on every host: the fact, and what to do about a difference.
EQUAL = {
    "lockstep": "install the same version of Lockstep on every host",
    "torch": "install the same build of torch on every host: results depend on it",
    "python": "install the same version of Python on every host",
}


@dataclass(frozen=True)
class HostFacts:
    """What a host says of itself.

    Attributes:
        host: Its host name.
        python: The version of Python.
        torch: The version of torch.
        lockstep: The version of Lockstep.
        arithmetic: The fingerprint of the bits that it computes.
        backend: Why the backend "lockstep" cannot be used; "" if it can.
        gpus: The names of the GPUs, or "none".
        clock: The clock of the host minus that of rank 0, in seconds.
    """

    host: str
    python: str
    torch: str
    lockstep: str
    arithmetic: str
    backend: str
    gpus: str
    clock: float = 0.0


def gather_facts() -> list[HostFacts]:
    """Join the launch, and return the facts of each host, the host of rank 0 first.

    Raises:
        RendezvousError: A host did not join in time.
    """
    import torch

    from lockstep.comm import backend
    from lockstep.comm.clock_offset import clock_offset
    from lockstep.comm.collectives import all_gather_bytes
    from lockstep.devices import device_names
    from lockstep.launcher.arithmetic import measure_arithmetic
    from lockstep.launcher.world import init, shutdown

    world = init(timeout=TIMEOUT)
    facts = HostFacts(
        host=socket.gethostname(),
        python=platform.python_version(),
        torch=torch.__version__,
        lockstep=VERSION,
        arithmetic=measure_arithmetic(),
        backend=backend.reason_unavailable() or "",
        gpus=", ".join(sorted(device_names())) or "none",
        clock=-clock_offset(clock=time.time),
    )
    mine = json.dumps(asdict(facts)).encode() if world.local_rank == 0 else b""
    messages = all_gather_bytes(mine, "comparing the hosts")
    shutdown()
    return [HostFacts(**json.loads(message)) for message in messages if message]


def compare_hosts(hosts: Sequence[HostFacts]) -> Iterator[CheckResult]:
    """Yield what differs between hosts: versions, processors, backends, GPUs and clocks."""
    same = []
    for fact, advice in EQUAL.items():
        values = _hosts_by_value(hosts, fact)
        if len(values) == 1:
            same.append(f"{fact} {next(iter(values))}")
        else:
            minors = {value.rpartition(".")[0] for value in values}
            is_harmless = fact == "python" and len(minors) == 1
            yield (note if is_harmless else bad)(fact, _describe(values), advice)
    if same:
        yield good("versions", f"on every host: {', '.join(same)}")
    yield from _compare_arithmetic(hosts)
    backends = _hosts_by_value(hosts, "backend")
    for reason, names in backends.items():
        if reason and len(backends) > 1:
            cause, _, remedy = reason.rpartition(": ")
            what = f"the backend 'lockstep' cannot be used on {names}, but elsewhere: {cause}"
            yield note("backend", what, remedy)
    if len(gpus := _hosts_by_value(hosts, "gpus")) > 1:
        yield note("gpus", _describe(gpus), "the slowest host sets the pace")
    earliest, latest = (find(hosts, key=lambda host: host.clock) for find in (min, max))
    apart = latest.clock - earliest.clock
    if apart > MAX_CLOCK_DIFFERENCE:
        yield note(
            "clocks",
            f"the clock of {escape_control(latest.host)} is {format_duration(apart)} ahead of "
            f"that of {escape_control(earliest.host)}",
            "synchronize the clocks with NTP (timedatectl): times in logs and records differ",
        )
    else:
        yield good("clocks", f"at most {format_duration(max(apart, 1e-6))} apart")


def _compare_arithmetic(hosts: Sequence[HostFacts]) -> Iterator[CheckResult]:
    """Yield whether the hosts compute the same bits."""
    (common, first), *others = _hosts_by_value(hosts, "arithmetic").items()
    for value, names in others:
        families = name_differences(value, common)
        what = f"{families}: other bits on {names} than on {first}"
        yield bad("arithmetic", what, advise(value, common))
    if not others:
        yield good("arithmetic", "every host computes the same bits")


def _hosts_by_value(hosts: Sequence[HostFacts], fact: str) -> dict[str, str]:
    """Return the names of the hosts with each value of a fact, as a list in words."""
    names: defaultdict[str, list[str]] = defaultdict(list)
    for host in hosts:
        names[str(getattr(host, fact))].append(host.host)
    return {value: ", ".join(given) for value, given in names.items()}


def _describe(hosts_by_value: dict[str, str]) -> str:
    """Return text such as "2.13.0 on a, b; 2.12.1 on c"."""
    return "; ".join(f"{value} on {names}" for value, names in hosts_by_value.items())
