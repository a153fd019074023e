"""The check of several hosts, for a run that would span them: `lockstep doctor --hosts`.

    every host: HostFacts ──> HostExchange ══ the other hosts ══> HostReports ──> CheckResults

Every host runs it with the same list of hosts, and prints the same results.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator, Sequence

from lockstep.errors import LaunchEnvironmentError, UsageError
from lockstep.launcher.host_list import expand_host_list
from lockstep.launcher.listening_socket import (
    find_source_address,
    is_loopback,
    parse_endpoint,
    resolve_address,
)
from lockstep.launcher.network_interface import find_own_addresses
from lockstep.report.checks import CheckResult
from lockstep.report.checks.data_port import DataPort
from lockstep.report.checks.host_exchange import HostEntry, HostExchange
from lockstep.report.checks.host_report import MAX_HOSTS, HostFacts, collect_facts
from lockstep.report.checks.hosts import judge_hosts

__all__ = ["check_hosts", "find_own_index", "parse_hosts"]

WAIT = 120.0  # seconds for the other hosts


def parse_hosts(text: str) -> list[HostEntry]:
    """Return the hosts in a list such as "a:29400,b", "gpu[01-04]" or "10.0.0.1,[fd00::2]:29400".

    A host without a port gets the port of the first one.

    Raises:
        UsageError: The text is not such a list, or has fewer than two or too many hosts.
    """
    # An IPv6 address in brackets looks like a range of numbers to the reader of Slurm's lists.
    parts = text.split(",") if "[" in text and ":" in text else _expand(text)
    entries: list[HostEntry] = []
    for part in map(str.strip, parts):
        name, port = parse_endpoint(part, "--hosts")
        has_port = part not in (name, f"[{name}]")
        entries.append(HostEntry(name, port if has_port or not entries else entries[0].port))
    names = [entry.name for entry in entries]
    if not all(names) or len(set(names)) < len(names):
        raise UsageError(f"--hosts {text}: expected different names or addresses, such as a,b")
    if not 2 <= len(entries) <= MAX_HOSTS:
        raise UsageError(f"--hosts {text}: expected 2 to {MAX_HOSTS} hosts, such as a,b")
    return entries


def _expand(text: str) -> list[str]:
    try:
        return list(expand_host_list(text.replace(" ", "")))
    except LaunchEnvironmentError:
        return text.split(",")


def find_own_index(hosts: Sequence[HostEntry]) -> int:
    """Return the index of this host: the entry with an address or with the name of this host.

    Raises:
        UsageError: There is none, or there are several.
    """
    addresses = find_own_addresses()
    by_address, by_name = [], []
    for index, entry in enumerate(hosts):
        with contextlib.suppress(UsageError):
            resolved = resolve_address(entry.name)[1]
            if is_loopback(resolved) or resolved in addresses:
                by_address.append(index)
        if entry.name.partition(".")[0] == socket.gethostname().partition(".")[0] != "":
            by_name.append(index)
    for found in (by_address, by_name):
        if len(found) == 1:
            return found[0]
    names = ", ".join(entry.name for entry in hosts)
    several = [hosts[index].name for index in by_address]
    own = ", ".join(address for address in addresses if not is_loopback(address))
    problem = (
        f"{' and '.join(several)} are all addresses of this host (is a line in /etc/hosts wrong?)"
        if several
        else f"none of {names} is a name or address of this host ({own or 'without a network'})"
    )
    raise UsageError(f"--hosts: {problem}: add --node-rank, the index of this host from 0")


def check_hosts(
    hosts: Sequence[HostEntry],
    own: int,
    secret: bytes | None = None,
    wait: float = WAIT,
    note: Callable[[str], None] = lambda line: None,
    collect: Callable[..., HostFacts] = collect_facts,
) -> Iterator[CheckResult]:
    """Yield the findings about hosts that all call this function.

    Args:
        hosts: All hosts, in the same order on each.
        own: Index of this host.
        secret: What the hosts share; None if they have no secret.
        wait: Seconds to wait for the other hosts.
        note: Called with a line about hosts that are missing, every 10 s.
        collect: Returns the facts about this host.

    Raises:
        UsageError: This host cannot listen at its port.
    """
    address, interface = _find_data_address(hosts, own)
    with contextlib.closing(DataPort(address)) as port:
        facts = collect(interface=interface, address=address, port=port.port, token=port.token)
        reports = HostExchange(hosts, own, facts, secret, wait, note).run()
    yield from judge_hosts(hosts, reports)


def _find_data_address(hosts: Sequence[HostEntry], own: int) -> tuple[str, str]:
    """Return this host's address on the route to the first other host, and its interface."""
    for index, entry in enumerate(hosts):
        if index == own:
            continue
        with contextlib.suppress(UsageError):
            resolved = resolve_address(entry.name)[1]
            found = None if is_loopback(resolved) else find_source_address(resolved)
            if found is not None:
                return found, find_own_addresses().get(found, "")
    return "", ""
