"""Findings about the hosts of a run: which one is the culprit, and what to do there.

The findings follow from the reports of all hosts (`host_report.py`), so every host prints the same
ones. A result's subject is the host that is to be changed, or what all hosts have in common.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from lockstep.formatting import format_duration
from lockstep.report.checks import CheckResult, bad, good, note
from lockstep.report.checks.host_exchange import HostEntry
from lockstep.report.checks.host_report import (
    LARGE_LOST,
    OTHER_HOST,
    OTHER_PROGRAM,
    OTHER_SECRET,
    TO_ITSELF,
    UNRESOLVED,
    UNTESTED,
    HostReport,
    Path,
    is_measured,
)

__all__ = ["judge_hosts"]

MAX_CLOCK_DIFFERENCE = 1.0  # seconds

ADVICE = {
    UNTESTED: "run the same command on {host}",
    OTHER_PROGRAM: "choose another port on every host: --hosts {first}:PORT,..., and as "
    "--master-port; or install the same version of Lockstep on {host}",
    OTHER_SECRET: "give every host a copy of the same --secret-file",
    "connection refused": "run the same command on {host} with the same --hosts",
    "timed out": "run the same command on {host}; if it is running there, a firewall on {host} or "
    "in between drops connections to port {port}",
}
NO_WAY = "check the network of {host} and of the hosts named here: ip addr, ip route get ADDRESS"

# What must be the same on every host: name of the fact, subject, what a difference does.
EQUAL = (
    ("lockstep", "lockstep", "install the same version of Lockstep on every host"),
    ("torch", "torch", "install the same build of torch on every host: results depend on it"),
    ("python", "python", "install the same version of Python on every host"),
    (
        "instructions",
        "processors",
        "set MKL_CBWR=COMPATIBLE ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 on every host: "
        "results depend on it",
    ),
)


class Findings:
    """The findings about the reports of all hosts, in the order of the hosts."""

    def __init__(self, hosts: Sequence[HostEntry], reports: Sequence[HostReport]) -> None:
        self.hosts, self.reports = hosts, reports
        self.present = [each for each in reports if each.facts is not None]
        self.missing = [each.index for each in reports if each.facts is None]

    def name(self, index: int) -> str:
        """Return a host's name, as given."""
        return self.hosts[index].name

    def names(self, indices: Sequence[int]) -> str:
        """Return names of hosts, such as "a, b and c"."""
        return join([self.name(index) for index in indices])

    def all(self) -> Iterator[CheckResult]:
        """Yield every finding."""
        problems = [*self.names_that_lead_elsewhere(), *self.hosts_that_do_not_answer()]
        problems += [*self.closed_ports()]
        yield from problems
        if not problems:
            ports = ", ".join(sorted({str(entry.port) for entry in self.hosts}))
            yield good(
                "connections",
                f"{self.names(range(len(self.hosts)))} reach each other at port {ports} and at "
                f"ports that the system chooses",
            )
        if len(self.present) > 1:
            yield from self.interfaces()
            yield from self.differences()
            yield from self.clocks()

    def names_that_lead_elsewhere(self) -> Iterator[CheckResult]:
        """Yield wrong names by the host where they are wrong."""
        for report in self.present:
            here = self.name(report.index)
            by_reason: defaultdict[str, list[int]] = defaultdict(list)
            for index, path in report.paths.items():
                by_reason[path.reason].append(index)
            if unresolved := by_reason[UNRESOLVED]:
                yield bad(
                    here,
                    f"cannot resolve {self.names(unresolved)}",
                    f"on {here}, add {self.names(unresolved)} to /etc/hosts or to the name server, "
                    f"or give addresses instead of names, here and as --master-addr",
                )
            for index in by_reason[TO_ITSELF]:
                resolved = report.paths[index].resolved
                yield bad(
                    here,
                    f"the name {self.name(index)} is {resolved} there, the loopback interface of "
                    f"{here} itself",
                    f"on {here}, correct the line for {self.name(index)} in /etc/hosts, or give "
                    f"addresses instead of names",
                )
            for index in by_reason[OTHER_HOST]:
                path = report.paths[index]
                yield bad(
                    here,
                    f"the name {self.name(index)} is {path.resolved} there, where a host answers "
                    f"that takes itself for {self.name(path.answered)}",
                    f"on {here}, correct the line for {self.name(index)} in /etc/hosts; or give "
                    f"each host its own index with --node-rank",
                )

    def hosts_that_do_not_answer(self) -> Iterator[CheckResult]:
        """Yield the hosts from which there is no report."""
        for index in self.missing:
            failed = self._failed_paths(index)
            if not failed:  # the names are wrong: said above
                continue
            (reason, _), *_ = Counter(path.reason for path in failed.values()).most_common(1)
            advice = ADVICE.get(reason, NO_WAY).format(
                host=self.name(index), first=self.name(0), port=self.hosts[index].port
            )
            yield bad(
                self.name(index),
                f"does not answer at port {self.hosts[index].port} to "
                f"{self.names(list(failed))}: {reason}",
                advice,
            )

    def closed_ports(self) -> Iterator[CheckResult]:
        """Yield the ports of hosts that run this check and cannot be reached nevertheless."""
        for report in self.present:
            index, host = report.index, self.name(report.index)
            if failed := self._failed_paths(index):
                (reason, _), *_ = Counter(path.reason for path in failed.values()).most_common(1)
                whom, port = self.names(list(failed)), self.hosts[index].port
                what = f"runs this check, but its port {port} does not answer to {whom}: {reason}"
                advice = "open port {port} (TCP) of {host} in its firewall and in between"
                if reason in (OTHER_PROGRAM, OTHER_SECRET):
                    advice = ADVICE[reason]
                advice = advice.format(host=host, first=self.name(0), port=port)
                # The other hosts connect to the store at host 0, nobody to this port of another.
                yield (
                    bad(host, what, advice)
                    if index == 0
                    else note(host, what, f"{advice}; only needed if {host} becomes host 0")
                )
            yield from self._closed_other_ports(index)

    def _closed_other_ports(self, index: int) -> Iterator[CheckResult]:
        host = self.name(index)
        failed: defaultdict[str, list[int]] = defaultdict(list)
        for other in self.present:
            path = other.paths.get(index)
            if path is not None and path.other_ports not in ("", UNTESTED):
                failed[path.other_ports].append(other.index)
        for reason, others in failed.items():
            whom = self.names(others)
            if reason == LARGE_LOST:
                yield bad(
                    host,
                    f"small messages from {host} arrive at {whom}, large ones do not",
                    f"the sizes of packets (MTU) differ: compare ip link on {host} and {whom}, and "
                    f"set the smallest one, such as ip link set {self._interface(index)} mtu 1400",
                )
            else:
                yield bad(
                    host,
                    f"ports that the system chooses do not answer to {whom}: {reason}",
                    f"gloo and nccl use any port from 1024 (cat "
                    f"/proc/sys/net/ipv4/ip_local_port_range): open them on {host} for the hosts "
                    f"of a run",
                )

    def _failed_paths(self, index: int) -> dict[int, Path]:
        """Return the paths to a host on which it did not answer, by the host at their beginning."""
        return {
            other.index: other.paths[index]
            for other in self.present
            if index in other.paths
            and other.paths[index].reason not in ("", UNRESOLVED, TO_ITSELF, OTHER_HOST)
        }

    def _interface(self, index: int) -> str:
        facts = self.reports[index].facts
        return (facts.interface if facts is not None else "") or "INTERFACE"

    def interfaces(self) -> Iterator[CheckResult]:
        """Yield the interface that each host uses."""
        texts = [
            f"{self.name(each.index)} {each.facts.interface} ({each.facts.address})"
            for each in self.present
            if each.facts is not None and each.facts.interface
        ]
        if texts:
            yield good("interfaces", ", ".join(texts))

    def differences(self) -> Iterator[CheckResult]:
        """Yield the versions and processors that differ, and what all hosts have."""
        same = []
        for fact, subject, advice in EQUAL:
            values = self._values(fact)
            if len(values) == 1:
                same.append(f"{subject} {next(iter(values))}")
                continue
            found = note if fact == "python" and self._is_same_minor(values) else bad
            yield found(subject, self._describe_difference(values), advice)
        if same:
            yield good("versions", f"on every host: {', '.join(same)}")
        backends = self._values("backend")
        without = {reason: hosts for reason, hosts in backends.items() if reason}
        if without and "" in backends:
            for reason, hosts in without.items():
                cause, _, remedy = reason.rpartition(": ")
                what = f"the backend 'lockstep' cannot be used here, but on other hosts: {cause}"
                yield note(self.names(hosts), what, remedy)
        gpus = self._values("gpus")
        if len(gpus) > 1:
            yield note("gpus", self._describe_difference(gpus), "the slowest host sets the pace")

    def _values(self, fact: str) -> dict[str, list[int]]:
        """Return the hosts with each value of a fact, the most frequent value first."""
        found: defaultdict[str, list[int]] = defaultdict(list)
        for each in self.present:
            found[str(getattr(each.facts, fact))].append(each.index)
        return dict(sorted(found.items(), key=lambda item: -len(item[1])))

    def _describe_difference(self, values: dict[str, list[int]]) -> str:
        """Return "c has 2.12, the other hosts 2.13", or who has what without a majority."""
        (common, most), *others = values.items()
        if len(most) > sum(len(hosts) for _, hosts in others):
            texts = [f"{self.names(hosts)} {_have(hosts)} {value}" for value, hosts in others]
            whom = "the other host has" if len(most) == 1 else "the other hosts have"
            return f"{join(texts)}, {whom} {common}"
        return join(
            [f"{self.names(hosts)} {_have(hosts)} {value}" for value, hosts in values.items()]
        )

    @staticmethod
    def _is_same_minor(values: dict[str, list[int]]) -> bool:
        return len({value.rpartition(".")[0] for value in values}) == 1

    def clocks(self) -> Iterator[CheckResult]:
        """Yield the clocks that are far apart."""
        clocks = self._offsets()
        if len(clocks) < 2:
            return
        middle = statistics.median_low([offset for offset, _ in clocks.values()])
        worst = max(error for _, error in clocks.values())
        far = {
            index: offset - middle
            for index, (offset, error) in clocks.items()
            if abs(offset - middle) > MAX_CLOCK_DIFFERENCE + error
        }
        advice = "synchronize the clocks with NTP (timedatectl): times in logs and records differ"
        if not far:
            spread = max(offset for offset, _ in clocks.values()) - min(
                offset for offset, _ in clocks.values()
            )
            apart = format_duration(max(spread, worst, 1e-6))
            yield good("clocks", f"at most {apart} apart")
        elif len(clocks) == 2:
            (first, second), difference = clocks, max(abs(value) for value in far.values())
            yield note(
                "clocks",
                f"those of {self.name(first)} and {self.name(second)} are "
                f"{format_duration(difference)} apart: compare date -u with a correct clock",
                advice,
            )
        else:
            for index, difference in far.items():
                word = "ahead of" if difference > 0 else "behind"
                yield note(
                    self.name(index),
                    f"its clock is {format_duration(abs(difference))} {word} most others",
                    advice,
                )

    def _offsets(self) -> dict[int, tuple[float, float]]:
        """Return each host's clock minus the first host's, and its largest error, in seconds."""
        found = {self.present[0].index: (0.0, 0.0)}
        waiting = [self.present[0].index]
        while waiting:
            here = waiting.pop(0)
            for there, offset, error in self._clock_paths(here):
                if there not in found:
                    found[there] = found[here][0] + offset, found[here][1] + error
                    waiting.append(there)
        return dict(sorted(found.items()))

    def _clock_paths(self, here: int) -> Iterator[tuple[int, float, float]]:
        """Yield the clocks of other hosts minus that of `here`, measured by either end."""
        for report in self.present:
            for there, path in report.paths.items():
                if is_measured(path) and path.answered == there:
                    if report.index == here:
                        yield there, path.offset, path.uncertainty
                    elif there == here:
                        yield report.index, -path.offset, path.uncertainty


def judge_hosts(hosts: Sequence[HostEntry], reports: Sequence[HostReport]) -> Iterator[CheckResult]:
    """Yield the findings about all hosts from their reports, which are in the same order."""
    return Findings(hosts, reports).all()


def join(texts: Sequence[str]) -> str:
    """Return "a", "a and b" or "a, b and c"."""
    *first, last = texts
    return f"{', '.join(first)} and {last}" if first else last


def _have(hosts: Sequence[int]) -> str:
    return "has" if len(hosts) == 1 else "have"
