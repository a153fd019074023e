"""The other hosts of an elastic run, in the launcher of host 0.

Members on other hosts look like members on this one: they are started, get messages and signals,
report and exit. Their agents (`host_agent.py`) start them and pass everything on:

    ElasticCoordinator ── start, send, signal ──> RankSupervisor ──> a process of this host
                                                    └──> AgentHosts ──> agent ──> a process there

When a host is lost, all of its members are. The launcher of a host that was lost may connect
again; then the host gets new members.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from lockstep.comm.transport.listener import MessageListener
from lockstep.elastic.host_connection import ConnectionLost, HostConnection, reading
from lockstep.formatting import format_numbered
from lockstep.kernel.errors import RendezvousError
from lockstep.launcher.channel import Message
from lockstep.launcher.late_ranks import LongWait
from lockstep.launcher.rank_processes import TICK
from lockstep.launcher.supervisor import RankSupervisor
from lockstep.messages import escape_control, log

__all__ = ["AgentHosts"]

JOIN_TIMEOUT = 300.0  # seconds that all hosts have to join at the beginning
LEFT = 128 + signal.SIGTERM  # exit status of the launcher of a host that was asked to stop
HELLO_TIMEOUT = 5.0  # seconds from a connection to its first message


@dataclass(eq=False)
class AgentHost:
    """Another host, whose agent is connected.

    Attributes:
        index: Its index, from 1.
        name: Its name in messages: "host 1 (node7)".
        connection: The connection to its agent.
        pids: The process ids of its members.
        begun: Its members that have published an operation.
        is_leaving: Whether it was asked to stop.
    """

    index: int
    name: str
    connection: HostConnection
    pids: dict[int, int] = field(default_factory=dict)
    begun: set[int] = field(default_factory=set)
    is_leaving: bool = False


class AgentHosts:
    """The members on the hosts whose agents have connected.

    Args:
        ranks: The supervisor of all members.
        listener: Accepts the connections of agents.
        nnodes: The number of hosts, including this one.
        silence: Seconds after which a host that sends nothing is lost.
        folder: The run's folder, which agents name in messages.
        version: The version that agents must have.
    """

    def __init__(
        self,
        ranks: RankSupervisor,
        listener: MessageListener,
        *,
        nnodes: int,
        silence: float,
        folder: Path | None,
        version: str,
    ) -> None:
        self._ranks = ranks
        self._processes = ranks.processes
        self._listener = listener
        self._silence = silence
        self._nnodes = nnodes
        self._folder = folder
        self._version = version
        self._hosts: dict[int, AgentHost] = {}
        self._callers: dict[HostConnection, float] = {}  # that have not said who they are
        self._host_of: dict[int, int] = {}
        self._is_ending = False
        ranks.processes.others = self
        ranks.processes.on_tick = self._attend

    # --- hosts --------------------------------------------------------------------------------

    @property
    def present(self) -> list[int]:
        """The hosts that can start members."""
        return sorted(index for index, host in self._hosts.items() if not host.is_leaving)

    def host_of(self, member: int) -> int:
        """Return the index of a member's host; 0 for this one."""
        return self._host_of.get(member, 0)

    def start(self, host: int, member: int, local_rank: int, variables: Mapping[str, str]) -> None:
        """Have the agent of another host start a member."""
        self._processes.expect(member)
        self._host_of[member] = host
        self._post(
            host,
            {
                "kind": "start",
                "member": member,
                "local_rank": local_rank,
                "variables": dict(variables),
            },
        )
        if host not in self._hosts:  # it was lost a moment ago
            self._lose_member(member, f"host {host}")

    def end(self, status: int, reason: str) -> None:
        """Tell all agents that the run has ended, and close the connections."""
        self._is_ending = True
        for host in [*self._hosts.values()]:
            self._post(host.index, {"kind": "end", "status": status, "reason": reason})
        for connection in [*(host.connection for host in self._hosts.values()), *self._callers]:
            connection.close()
        self._hosts.clear()
        self._callers.clear()
        self._listener.close()

    # --- as for local members -----------------------------------------------------------------

    def has_begun(self, rank: int) -> bool:
        """Return whether a member has published an operation."""
        host = self._find_host(rank)
        return host is not None and rank in host.begun

    def find_pid(self, rank: int) -> int:
        """Return a member's process id on its host; 0 if it is unknown."""
        host = self._find_host(rank)
        return 0 if host is None else host.pids.get(rank, 0)

    def send(self, rank: int, message: Message) -> None:
        """Send a message to a member, if it still runs."""
        if self._processes.outcomes[rank].status is None:
            self._post(self.host_of(rank), {"kind": "send", "member": rank, "message": message})

    def send_signal(self, rank: int, number: int, *, group: bool) -> None:
        """Send a signal to a member, or to its whole process group."""
        message = {"kind": "signal", "member": rank, "number": int(number), "group": group}
        self._post(self.host_of(rank), message)

    def release(self, rank: int) -> None:
        """Have the agent close what belongs to a member that has exited."""
        if (host := self._find_host(rank)) is not None:
            self._post(host.index, {"kind": "release", "member": rank})

    # --- waiting ------------------------------------------------------------------------------

    def _attend(self) -> None:
        """Take new connections, keep the others alive, and let hosts go that have left."""
        self._accept_callers()
        for host in [*self._hosts.values()]:
            try:
                host.connection.keep_alive()
            except ConnectionLost as lost:
                self._lose_host(host, str(lost))
            if host.is_leaving and not self._list_running(host):
                self._post(host.index, {"kind": "end", "status": LEFT, "reason": ""})
                self._lose_host(host, "has left")

    def wait_for_all(self, is_stop_requested: Callable[[], bool]) -> bool:
        """Wait until all hosts have joined; return False if a stop was requested before.

        Raises:
            RendezvousError: A host did not join in time.
        """
        wait = LongWait(JOIN_TIMEOUT)
        while missing := [host for host in range(1, self._nnodes) if host not in self._hosts]:
            if is_stop_requested():
                return False
            who = format_numbered("host", missing)
            if wait.left <= 0:
                raise RendezvousError(
                    f"{who} of {self._nnodes} did not join within {wait.waited:.0f} s: start the "
                    f"same command there, with its --node-rank, and check that it reaches port "
                    f"{self._listener.port} of this host"
                )
            if wait.is_note_due():
                log(wait.describe("host 0", f"{who} of {self._nnodes}"))
            self._processes.process_events(TICK)
        return True

    # --- connections --------------------------------------------------------------------------

    def _find_host(self, member: int) -> AgentHost | None:
        return self._hosts.get(self.host_of(member))

    def _post(self, host: int, message: Message) -> None:
        """Send a message to an agent; if that fails, its host is lost."""
        if (agent := self._hosts.get(host)) is None:
            return
        try:
            agent.connection.send(message)
        except ConnectionLost as lost:
            self._lose_host(agent, str(lost))

    def _accept_callers(self) -> None:
        """Take new connections, and the first message of each."""
        with contextlib.suppress(TimeoutError):  # as soon as there is none
            while True:
                accepted = HostConnection(self._listener.accept(timeout=0.0), self._silence)
                self._callers[accepted] = time.monotonic() + HELLO_TIMEOUT
        for connection, deadline in [*self._callers.items()]:
            try:
                messages = connection.receive()
            except ConnectionLost:
                messages = []
                deadline = 0.0
            if messages:
                del self._callers[connection]
                self._admit(connection, messages[0])
            elif time.monotonic() >= deadline:
                del self._callers[connection]
                connection.close()

    def _admit(self, connection: HostConnection, message: Message) -> None:
        """Let a host take part, or refuse it."""
        try:
            with reading():
                reason, is_final = self._find_obstacle(message)
            if reason:
                connection.send({"kind": "refuse", "reason": reason, "is_final": is_final})
                connection.close()
                return
            folder = None if self._folder is None else str(self._folder)
            connection.send({"kind": "welcome", "silence": self._silence, "folder": folder})
        except ConnectionLost:
            connection.close()
            return
        index = message["host"]
        name = f"host {index} ({escape_control(str(message.get('name')))[:255]})"
        host = AgentHost(index, name, connection)
        self._hosts[index] = host
        self._processes.readers.add(connection.fileno(), partial(self._on_agent, host))
        log(f"{name} joined")

    def _find_obstacle(self, message: Message) -> tuple[str, bool]:
        """Return why a host cannot take part, and whether that cannot change; ("", _) if it can."""
        index, nnodes, version = (message[key] for key in ("host", "nnodes", "version"))
        if version != self._version:
            return f"host 0 runs {self._version}, this host {version}: install the same", True
        if nnodes != self._nnodes:
            return f"--nnodes is {nnodes} here and {self._nnodes} on host 0", True
        if not 0 < index < self._nnodes:
            return f"--node-rank is {index}, which is not that of another host", True
        if self._is_ending or self._ranks.was_asked_to_stop:
            return "the run is ending", True
        if index in self._hosts:
            return f"{self._hosts[index].name} takes part in the run already", False
        return "", False

    def _on_agent(self, host: AgentHost) -> bool:
        """Process what an agent has sent; return False if its connection is closed."""
        try:
            for message in host.connection.receive():
                if host.index in self._hosts:
                    with reading():
                        self._take(host, message)
        except ConnectionLost as lost:
            self._lose_host(host, str(lost))
            return True  # it is unregistered already
        return True

    def _take(self, host: AgentHost, message: Message) -> None:
        """Process a message of an agent."""
        kind = message["kind"]
        member = message.get("member", -1)
        if kind == "leave":
            self._dismiss_host(host)
        elif kind == "begun":
            host.begun.update(map(int, message["members"]))
        elif self.host_of(member) != host.index:
            self._lose_host(host, f"reported about member {member}, which is not on it")
        elif kind == "started":
            host.pids[member] = int(message["pid"])
        elif kind == "report":
            report = message["message"]
            if "time" in report:  # in seconds of that host's clock
                report["time"] = time.monotonic() - float(message["age"])
            self._processes.take_report(member, report)
        elif kind == "exit":
            outcome = self._processes.outcomes[member]
            outcome.status = int(message["status"])
            outcome.when = time.monotonic()
            outcome.hint = "" if outcome.was_terminated else str(message["hint"])
            host.pids.pop(member, None)

    def _dismiss_host(self, host: AgentHost) -> None:
        """Continue without a host that was asked to stop."""
        if host.is_leaving or self._ranks.was_asked_to_stop:
            return
        host.is_leaving = True
        members = self._list_running(host)
        what = f", with {format_numbered('member', members)}" if members else ""
        log(f"{host.name} was asked to stop and leaves{what}")
        for member in members:
            self._processes.outcomes[member].lost_with = host.name
            self._processes.send_signal(member, signal.SIGKILL)

    def _lose_host(self, host: AgentHost, how: str) -> None:
        """Count all members of a host as lost, unless this was done already."""
        if self._hosts.get(host.index) is not host:
            return
        del self._hosts[host.index]
        self._processes.readers.remove(host.connection.fileno())
        host.connection.close()
        members = self._list_running(host)
        verb = "is" if len(members) == 1 else "are"
        what = f": {format_numbered('member', members)} {verb} lost" if members else ""
        if not host.is_leaving:
            log(f"{host.name} {how}{what}")
        for member in members:
            self._lose_member(member, host.name)

    def _list_running(self, host: AgentHost) -> list[int]:
        return [member for member in self._processes.running if self.host_of(member) == host.index]

    def _lose_member(self, member: int, host: str) -> None:
        outcome = self._processes.outcomes[member]
        outcome.status = -signal.SIGKILL
        outcome.when = time.monotonic()
        outcome.lost_with = host
