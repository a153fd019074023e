"""How hosts that are checked together find each other and exchange their reports.

Every host listens, and calls every other host, so that each direction of each path is tried. A
connection carries, in this order:

    caller                                   listener
      ── facts, of the caller ───────────────>
      <─ facts, of the listener ──────────────
      ── clock ──────────────────────────────>      several times
      <─ clock, with the time ────────────────
                                                    each end waits until it has tried all paths
      ── reports, its own ───────────────────>
      <─ reports, its own ────────────────────
                                                    each end waits for the report of each host
      ── reports, all that it knows ─────────>
      <─ reports, all that it knows ──────────

So a report also arrives from a host that can be reached in one direction only, or only by a third
host. Messages are authenticated (`lockstep.transport`) and parsed as data of known types; the
authentication says nothing if the hosts have no secret.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lockstep.errors import LockstepError, UsageError
from lockstep.launcher.listening_socket import is_loopback, listen, resolve_address
from lockstep.report.checks.data_port import describe_error, probe_data_port
from lockstep.report.checks.host_report import (
    OTHER_HOST,
    OTHER_PROGRAM,
    OTHER_SECRET,
    TO_ITSELF,
    UNRESOLVED,
    UNTESTED,
    HostFacts,
    HostReport,
    Path,
    parse_report,
)
from lockstep.transport.frame import ForgedFrame
from lockstep.transport.handshake import Refused, Status
from lockstep.transport.message_connection import MessageConnection, MessageListener, connect_to

__all__ = ["HostEntry", "HostExchange"]

PURPOSE = "check of hosts"
NO_SECRET = hashlib.sha256(b"hosts that are checked without a secret").digest()
RETRY = 0.3  # seconds between two attempts
CONNECT_TIMEOUT = 3.0  # seconds for one attempt
GRACE = 5.0  # seconds for the second direction of a path, after the first one
ANSWER_TIMEOUT = 10.0  # seconds for an answer that the other end gives at once
NOTE_INTERVAL = 10.0  # seconds between two notes about hosts that are missing
NUM_CLOCKS = 5


@dataclass(frozen=True)
class HostEntry:
    """A host in the list of hosts: its name or address, and the port at which it listens."""

    name: str
    port: int

    def __str__(self) -> str:
        """Return "HOST:PORT"."""
        return f"[{self.name}]:{self.port}" if ":" in self.name else f"{self.name}:{self.port}"


class HostExchange:
    """This host's part in the exchange.

    Args:
        hosts: All hosts, in the same order on each.
        own: Index of this host.
        facts: The facts about this host.
        secret: What the hosts share; None if they have no secret.
        timeout: Seconds to wait for the other hosts.
        note: Called with a line about hosts that are missing, every 10 s.
    """

    def __init__(
        self,
        hosts: Sequence[HostEntry],
        own: int,
        facts: HostFacts,
        secret: bytes | None,
        timeout: float,
        note: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._hosts, self._own, self._note = hosts, own, note
        self._secret = NO_SECRET if secret is None else secret
        self._others = [index for index in range(len(hosts)) if index != own]
        self._facts: dict[int, HostFacts] = {own: facts}
        self._reports: dict[int, HostReport] = {}
        self._own_report = HostReport(own, facts)  # what the other hosts get: it is replaced once
        self._paths = dict.fromkeys(self._others, Path())
        self._callers: dict[int, float] = {}  # when another host has called
        self._called: dict[int, float] = {}  # when another host has answered
        self._deadline, self._timeout = time.monotonic() + timeout, timeout
        self._changed = threading.Condition()
        self._has_own, self._has_all = threading.Event(), threading.Event()
        self._talks: list[threading.Thread] = []
        self._waiting = 0  # connections whose other end has not sent its report yet

    def run(self) -> list[HostReport]:
        """Return the report of each host, in order; one without facts for a missing host.

        Raises:
            UsageError: This host cannot listen at its port.
        """
        own = self._hosts[self._own]
        try:
            listening = listen(own.name, own.port, is_single_host=False)
        except UsageError as error:
            raise UsageError(f"--hosts: {error}") from None
        with MessageListener(listening, self._secret, PURPOSE) as listener:
            accepting = threading.Thread(target=self._accept, args=(listener,), daemon=True)
            accepting.start()
            for index in self._others:
                self._start(self._call, index)
            self._wait_until_tried()
            with self._changed:
                self._own_report = HostReport(self._own, self._facts[self._own], self._paths)
                self._paths = dict(self._paths)
            self._has_own.set()
            with self._changed:
                self._changed.wait_for(lambda: not self._waiting, self._timeout)
            self._has_all.set()
            self._join()
            accepting.join()
        known = {index: HostReport(index, facts) for index, facts in self._facts.items()}
        known |= self._reports | {self._own: self._own_report}
        return [known.get(index, HostReport(index)) for index in range(len(self._hosts))]

    def _start(self, target: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._talks.append(thread)
        thread.start()

    def _join(self) -> None:
        deadline = time.monotonic() + ANSWER_TIMEOUT
        for thread in list(self._talks):
            thread.join(max(0.0, deadline - time.monotonic()))

    def _wait_until_tried(self) -> None:
        """Wait until every path has been tried in both directions, or until the deadline."""
        note_at = time.monotonic() + NOTE_INTERVAL
        while missing := [index for index in self._others if not self._is_tried(index)]:
            now = time.monotonic()
            if now >= self._deadline:
                return
            if now >= note_at:
                note_at = now + NOTE_INTERVAL
                self._note(self._describe_missing(missing))
            with self._changed:
                self._changed.wait(0.1)

    def _is_tried(self, index: int) -> bool:
        """Return whether both directions were tried; one that fails gets GRACE seconds more."""
        times = [each[index] for each in (self._callers, self._called) if index in each]
        return len(times) == 2 or (bool(times) and time.monotonic() >= times[0] + GRACE)

    def _describe_missing(self, missing: Sequence[int]) -> str:
        texts = [f"{self._hosts[each]} ({self._paths[each].reason})" for each in missing]
        left = max(0.0, self._deadline - time.monotonic())
        return f"waiting {left:.0f} s more for {', '.join(texts)}"

    # --- on the threads of connections ---------------------------------------------------------

    def _accept(self, listener: MessageListener) -> None:
        while not self._has_all.is_set():
            with contextlib.suppress(TimeoutError):
                self._start(self._talk, listener.accept(timeout=0.1), None)

    def _call(self, index: int) -> None:
        """Call a host until it answers."""
        while not self._has_own.is_set() and time.monotonic() < self._deadline:
            connection = self._try_call(index)
            if connection is not None:
                self._talk(connection, index)
                return
            self._has_own.wait(RETRY)

    def _try_call(self, index: int) -> MessageConnection | None:
        """Return a connection to a host; None, with the reason in the path, if it fails."""
        entry, resolved = self._hosts[index], ""
        try:
            resolved = resolve_address(entry.name)[1]
            if is_loopback(resolved):
                reason = TO_ITSELF
            else:
                # First without a handshake: its errors do not say what the kernel said.
                socket.create_connection((resolved, entry.port), CONNECT_TIMEOUT).close()
                return connect_to(resolved, entry.port, self._secret, PURPOSE, CONNECT_TIMEOUT)
        except UsageError as error:
            reason = OTHER_PROGRAM if resolved else UNRESOLVED
            cause = error.__cause__
            if isinstance(cause, Refused) and cause.status is Status.OTHER_KEY:
                reason = OTHER_SECRET
        except LockstepError:
            reason = OTHER_PROGRAM
        except OSError as error:
            reason = describe_error(error)
        with self._changed:
            self._paths[index] = replace(self._paths[index], resolved=resolved, reason=reason)
            self._changed.notify_all()
        return None

    def _talk(self, connection: MessageConnection, called: int | None) -> None:
        """Exchange everything over one connection; `called` is the host that should answer."""
        is_caller = called is not None
        with connection, contextlib.suppress(OSError, EOFError, ForgedFrame, ValueError):
            other = self._exchange_facts(connection, is_caller)
            with self._changed:
                self._waiting += 1
            try:
                offset = self._compare_clocks(connection, is_caller)
                self._keep_path(connection, called, other, offset)
                self._has_own.wait(self._timeout + GRACE)
                self._exchange_reports(connection, is_caller, [self._own_report])
            finally:
                with self._changed:
                    self._waiting -= 1
                    self._changed.notify_all()
            self._has_all.wait(self._timeout)
            known = [*self._reports.values(), self._own_report]
            self._exchange_reports(connection, is_caller, known)

    def _exchange_facts(self, connection: MessageConnection, is_caller: bool) -> HostReport:
        own = HostReport(self._own, self._facts[self._own]).as_data()
        data = _exchange(connection, is_caller, {"kind": "facts", "report": own}, ANSWER_TIMEOUT)
        other = parse_report(data.get("report"), len(self._hosts))
        if other.facts is None:
            raise ValueError("facts without facts")
        with self._changed:
            self._facts.setdefault(other.index, other.facts)
        return other

    def _compare_clocks(
        self, connection: MessageConnection, is_caller: bool
    ) -> tuple[float, float]:
        """Return the other end's clock minus this one's and its largest error, if `is_caller`."""
        best = 0.0, -1.0
        for _ in range(NUM_CLOCKS):
            if not is_caller:
                connection.receive(ANSWER_TIMEOUT)
                connection.send({"kind": "clock", "time": time.time()})
                continue
            began, sent = time.monotonic(), time.time()
            connection.send({"kind": "clock"})
            theirs = connection.receive(ANSWER_TIMEOUT).get("time")
            if not isinstance(theirs, float) or not abs(theirs) < 1e12:
                raise ValueError("a clock without a time")
            error = (time.monotonic() - began) / 2
            if best[1] < 0 or error < best[1]:
                best = theirs - (sent + error), error
        return best

    def _keep_path(
        self,
        connection: MessageConnection,
        called: int | None,
        other: HostReport,
        clock: tuple[float, float],
    ) -> None:
        """Keep what the connection showed, after a connection to another port of the host."""
        assert other.facts is not None
        if called is None and other.index == self._own:
            raise ValueError("two hosts with one index: the caller sees it too")
        index = other.index if called is None else called
        is_other = called not in (None, other.index)
        facts = other.facts
        other_ports = self._paths[index].other_ports
        if other_ports == UNTESTED and not is_other:
            address = facts.address or connection.peer
            other_ports = probe_data_port(address, facts.port, facts.token)
        with self._changed:
            path = replace(self._paths.get(index, Path()), other_ports=other_ports)
            times = self._callers if called is None else self._called
            times.setdefault(index, time.monotonic())
            if called is not None:
                path = replace(
                    path,
                    resolved=connection.peer,
                    reason=OTHER_HOST if is_other else "",
                    answered=other.index,
                    offset=clock[0],
                    uncertainty=clock[1],
                )
            self._paths[index] = path
            self._changed.notify_all()

    def _exchange_reports(
        self, connection: MessageConnection, is_caller: bool, reports: Sequence[HostReport]
    ) -> None:
        message = {"kind": "reports", "reports": [report.as_data() for report in reports]}
        data = _exchange(connection, is_caller, message, self._timeout + GRACE + ANSWER_TIMEOUT)
        received = data.get("reports")
        if not isinstance(received, list) or len(received) > len(self._hosts):
            raise ValueError("reports that are no list")
        found = [parse_report(each, len(self._hosts)) for each in received]
        with self._changed:
            for report in found:
                if report.index != self._own and report.facts is not None:
                    self._reports.setdefault(report.index, report)


def _exchange(
    connection: MessageConnection, is_caller: bool, message: dict[str, Any], timeout: float
) -> dict[str, Any]:
    """Send a message and return that of the other end; the caller sends first."""
    if is_caller:
        connection.send(message)
    received = connection.receive(timeout)
    if not is_caller:
        connection.send(message)
    if received.get("kind") != message["kind"]:
        raise ValueError("a message of another kind")
    return received
