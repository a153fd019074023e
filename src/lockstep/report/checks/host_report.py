"""What the hosts of a run tell each other when they are checked together.

    HostReport ─┬─ index   in the list of hosts
                ├─ facts   versions, processor, network interface     None if it did not answer
                └─ paths   by index of another host: what this host found out about the way there

A report arrives over the network, so that it is parsed as data of known types, with limits.
"""

from __future__ import annotations

import math
import platform
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar

import lockstep
from lockstep.messages import escape_control

__all__ = ["HostFacts", "HostReport", "Path", "collect_facts", "parse_report"]

MAX_TEXT = 300  # characters
MAX_HOSTS = 64

UNTESTED = "untested"
UNRESOLVED = "the name cannot be resolved"
TO_ITSELF = "the name leads to the loopback interface"
OTHER_HOST = "another host answers"
OTHER_SECRET = "its secret is another one"
OTHER_PROGRAM = "another program, or another version of Lockstep, answers"
LARGE_LOST = "small messages arrive, large ones do not"

Parsed = TypeVar("Parsed")


@dataclass(frozen=True)
class HostFacts:
    """A host's own description.

    Attributes:
        host_name: Its host name.
        python: Version of Python.
        torch: Version of torch.
        lockstep: Version of Lockstep.
        instructions: The instruction set that torch's kernels use, such as "AVX512".
        backend: Why the backend "lockstep" cannot be used; "" if it can.
        gpus: Names of the GPUs, or "none".
        interface: The network interface of the route to the other hosts; "" if it is unknown.
        address: Its address on that route; "" if it is unknown.
        port: A free port at that address, or at any, at which it answers.
        token: What it answers.
    """

    host_name: str = ""
    python: str = ""
    torch: str = ""
    lockstep: str = ""
    instructions: str = ""
    backend: str = ""
    gpus: str = "none"
    interface: str = ""
    address: str = ""
    port: int = 0
    token: str = ""


@dataclass(frozen=True)
class Path:
    """What a host found out about the way to another one.

    Attributes:
        resolved: The address that its name has on this host; "" if it has none.
        reason: Why the other host did not answer at the common port; "" if it did.
        answered: Index of the host that answered; -1 if none did.
        other_ports: Why it did not answer at another port, or LARGE_LOST; "" if it did.
        offset: Its clock minus this host's clock, in seconds.
        uncertainty: Largest error of `offset`, in seconds; negative if it was not measured.
    """

    resolved: str = ""
    reason: str = UNTESTED
    answered: int = -1
    other_ports: str = UNTESTED
    offset: float = 0.0
    uncertainty: float = -1.0


@dataclass(frozen=True)
class HostReport:
    """A host's facts, and its paths by the index of the other host."""

    index: int
    facts: HostFacts | None = None
    paths: Mapping[int, Path] = field(default_factory=dict)

    def as_data(self) -> dict[str, Any]:
        """Return the report as JSON data."""
        return {
            "index": self.index,
            "facts": None if self.facts is None else asdict(self.facts),
            "paths": [[index, asdict(path)] for index, path in self.paths.items()],
        }


def parse_report(data: Any, num_hosts: int) -> HostReport:
    """Return the report that JSON data contains; ValueError if it contains none."""
    if not isinstance(data, dict):
        raise ValueError("a report is a JSON object")
    facts, paths = data.get("facts"), data.get("paths")
    if not isinstance(paths, list) or len(paths) > num_hosts:
        raise ValueError("a report has a list of paths")
    found = {}
    for pair in paths:
        if not isinstance(pair, list) or len(pair) != 2:
            raise ValueError("a path is an index and an object")
        found[_parse_index(pair[0], num_hosts)] = _parse(Path, pair[1])
    return HostReport(
        _parse_index(data.get("index"), num_hosts),
        None if facts is None else _parse(HostFacts, facts),
        found,
    )


def _parse_index(value: Any, num_hosts: int) -> int:
    if type(value) is not int or not 0 <= value < num_hosts:
        raise ValueError("a host has an index")
    return value


def _parse(kind: type[Parsed], data: Any) -> Parsed:
    """Return a dataclass of texts and numbers that JSON data describes."""
    defaults = {each.name: each.default for each in fields(kind)}  # type: ignore[arg-type]
    if not isinstance(data, dict) or data.keys() != defaults.keys():
        raise ValueError(f"{kind.__name__} with other fields")
    for name, value in data.items():
        if type(value) is not type(defaults[name]):
            raise ValueError(f"{name} of another type")
        if isinstance(value, str) and (len(value) > MAX_TEXT or not value.isprintable()):
            raise ValueError(f"{name} is not a short text")
        if isinstance(value, (int, float)) and not abs(value) < 1e15:  # nor NaN
            raise ValueError(f"{name} is not a number")
    return kind(**data)


def collect_facts(**network: Any) -> HostFacts:
    """Return the facts about this host; `network` are those about its interface and port."""
    import torch

    from lockstep.comm import backend
    from lockstep.devices import device_names

    texts = {
        "host_name": socket.gethostname(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lockstep": lockstep.__version__,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "backend": backend.reason_unavailable() or "",
        "gpus": ", ".join(sorted(device_names())) or "none",
    }
    short: dict[str, Any] = {name: escape_control(text)[:MAX_TEXT] for name, text in texts.items()}
    return HostFacts(**short, **network)


def is_measured(path: Path) -> bool:
    """Return whether the clocks were compared."""
    return math.isfinite(path.offset) and path.uncertainty >= 0
