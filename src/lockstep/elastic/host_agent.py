"""The agent of a host in an elastic run on several hosts: the launcher of a host other than 0.

It starts and ends the members of this host as the launcher of host 0 orders, and passes on what
they and that launcher say (`host_connection.py`). It decides nothing. If it loses the launcher of
host 0, it ends its members: the run has ended for this host, and can be resumed.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from lockstep.comm.transport.message_connection import connect_to
from lockstep.elastic.host_connection import PURPOSE, ConnectionLost, HostConnection, reading
from lockstep.kernel.errors import RankError, RendezvousError, UsageError
from lockstep.launcher.channel import Message
from lockstep.launcher.failure_attribution import signal_name
from lockstep.launcher.failure_codes import STOPPED
from lockstep.launcher.late_ranks import LongWait
from lockstep.launcher.rank_processes import TICK
from lockstep.launcher.supervisor import RankSupervisor
from lockstep.messages import escape_control, log

__all__ = ["HostAgent", "RunEnded", "StartLocalMember"]

JOIN_TIMEOUT = 300.0  # seconds that host 0 has to answer
ATTEMPT = 1.0  # seconds of one attempt to connect; signals are noticed between two

StartLocalMember = Callable[[int, int, dict[str, str]], None]
"""Starts a process of this host: its number as a member, its local rank, and its variables."""


class RunEnded(RankError):
    """The run has ended for this host before it was complete."""

    def __init__(self, message: str, exit_status: int) -> None:
        super().__init__(message)
        self.exit_status = exit_status


class HostAgent:
    """The agent of this host, which starts and ends its members.

    Args:
        ranks: The supervisor of the members.
        start: Starts a member.
        hello: The message with which this host asks to take part.
        address: The address of host 0.
        port: The port at which its launcher accepts agents.
        secret: The secret of the run.
    """

    def __init__(
        self,
        ranks: RankSupervisor,
        start: StartLocalMember,
        hello: Message,
        address: str,
        port: int,
        secret: bytes,
    ) -> None:
        self._ranks = ranks
        self._processes = ranks.processes
        self._start = start
        self._hello = hello
        self._address = address
        self._port = port
        self._secret = secret
        self._connection: HostConnection | None = None
        self._folder: str | None = None
        self._end: Message | None = None
        self._lost = ""
        self._has_asked_to_leave = False
        self._told: set[tuple[str, int]] = set()  # what host 0 knows of which member
        ranks.processes.on_report = self._on_member_report
        ranks.processes.on_tick = self._attend

    def wait(self, is_stop_requested: Callable[[], bool]) -> RankError | None:
        """Take part in the run until it has ended, and return why it has ended early.

        Args:
            is_stop_requested: As for `RankSupervisor.wait`.

        Raises:
            RendezvousError: The launcher of host 0 did not answer.
            UsageError: It refused this host.
        """
        ranks = self._ranks
        if not self._join(is_stop_requested):
            ranks.stop_early()
            return None
        while self._end is None and not self._lost:
            if is_stop_requested() and not self._has_asked_to_leave:
                self._has_asked_to_leave = True
                log("SIGTERM: this host leaves the run")
                self._post({"kind": "leave"})
            ranks.answer_request()
            if hang := ranks.hang_monitor.check():
                ranks.terminate()
                return hang
            ranks.processes.process_events(TICK)
            if not ranks.processes.has_fork_server:
                self._lost = "the fork server of this host has exited"
        ranks.terminate()
        return self._conclude()

    def _attend(self) -> None:
        """Pass on what the members have sent, and keep the connection to host 0 alive."""
        self._report_changes()
        if self._connection is not None:
            try:
                self._connection.keep_alive()
            except ConnectionLost as lost:
                self._lose(str(lost))

    def close(self) -> None:
        """Close the connection to host 0, after the members have ended."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    # --- joining ------------------------------------------------------------------------------

    def _join(self, is_stop_requested: Callable[[], bool]) -> bool:
        """Connect to the launcher of host 0; return False if a stop was requested before."""
        wait = LongWait(JOIN_TIMEOUT)
        reason = ""
        own = f"host {self._hello['host']}"
        target = f"host 0 at {self._address}:{self._port}"
        while not is_stop_requested():
            try:
                self._connection = self._attempt()
            except (RendezvousError, ConnectionLost) as error:
                reason = str(error)
            else:
                self._processes.readers.add(self._connection.fileno(), self._on_coordinator)
                return True
            if wait.left <= 0:
                raise RendezvousError(
                    f"{target} did not let this host join within {wait.waited:.0f} s: {reason}"
                )
            if wait.is_note_due():
                log(f"{wait.describe(own, target)}: {reason}")
            self._processes.process_events(TICK)
        return False

    def _attempt(self) -> HostConnection:
        """Connect, and ask to take part.

        Raises:
            RendezvousError: Nobody answers.
            ConnectionLost: The other end cannot let this host join now.
            UsageError: It refuses this host.
        """
        opened = connect_to(self._address, self._port, self._secret, PURPOSE, timeout=ATTEMPT)
        connection = HostConnection(opened, silence=JOIN_TIMEOUT)
        try:
            connection.send(self._hello)
            answers = connection.receive(timeout=5.0)
            if not answers:
                raise ConnectionLost("it did not answer")
            answer = answers[0]
            with reading():
                if answer["kind"] == "refuse":
                    said = escape_control(answer["reason"])
                    if answer["is_final"]:
                        raise UsageError(f"host 0 does not let this host join: {said}")
                    raise ConnectionLost(said)
                connection.silence = float(answer["silence"])
                self._folder = answer["folder"]
                for message in answers[1:]:
                    self._obey(message)
        except BaseException:
            connection.close()
            raise
        return connection

    # --- orders -------------------------------------------------------------------------------

    def _on_coordinator(self) -> bool:
        """Obey the launcher of host 0; return whether it is still connected."""
        if self._connection is None:
            return False
        try:
            for message in self._connection.receive():
                with reading():
                    self._obey(message)
        except ConnectionLost as lost:
            self._lose(str(lost))
        return True  # it is unregistered already if it is lost

    def _obey(self, message: Message) -> None:
        """Carry an order of the launcher of host 0 out."""
        member = message.get("member", -1)
        if message["kind"] not in ("start", "end") and member not in self._processes.outcomes:
            return  # it was a member of this host before the host was lost
        match message["kind"]:
            case "start":
                self._start(member, message["local_rank"], message["variables"])
                self._processes.outcomes[member].is_replaced = True  # host 0 judges how it ends
            case "send":
                self._processes.send(member, message["message"])
            case "signal":
                self._processes.send_signal(member, message["number"], group=message["group"])
            case "release":
                if self._processes.outcomes[member].status is not None:
                    self._processes.release(member)
            case "end":
                self._end = message

    def _lose(self, how: str) -> None:
        """Note that the launcher of host 0 is gone, unless it has ended the run."""
        if self._connection is None:
            return
        self._processes.readers.remove(self._connection.fileno())
        self._connection.close()
        self._connection = None
        if self._end is None:
            self._lost = f"host 0 ({self._address}:{self._port}) {how}"

    def _post(self, message: Message) -> None:
        if self._connection is None:
            return
        try:
            self._connection.send(message)
        except ConnectionLost as lost:
            self._lose(str(lost))

    # --- reports ------------------------------------------------------------------------------

    def _on_member_report(self, member: int, message: Message) -> bool:
        """Pass on what a member has sent; return whether only host 0 needs it."""
        kind = message["kind"]
        if kind == "stack":  # its descriptors are files of this host
            return False
        age = time.monotonic() - float(message["time"]) if "time" in message else 0.0
        self._post({"kind": "report", "member": member, "message": message, "age": age})
        return bool(kind != "error")

    def _report_changes(self) -> None:
        """Report which members have started, published something, and exited."""
        for member, pid in self._processes.pids.items():
            if self._is_news("started", member):
                self._post({"kind": "started", "member": member, "pid": pid})
        for member in self._processes.running:
            if self._processes.has_begun(member) and self._is_news("begun", member):
                self._post({"kind": "begun", "members": [member]})
        for member, outcome in self._processes.outcomes.items():
            if outcome.status is not None and self._is_news("exit", member):
                status = outcome.status
                hint = outcome.hint
                self._post({"kind": "exit", "member": member, "status": status, "hint": hint})

    def _is_news(self, kind: str, member: int) -> bool:
        """Return whether this is called for the first time with these arguments."""
        is_news = (kind, member) not in self._told
        self._told.add((kind, member))
        return is_news

    # --- the end ------------------------------------------------------------------------------

    def _conclude(self) -> RankError | None:
        """Return why the run has ended for this host; None if it is complete."""
        resume = "start it again on every host with the same command"
        if self._folder is not None:
            command = f"lockstep run --resume {self._folder}"
            resume = f"continue it on every host, with the same options: {command}"
        if self._end is None:
            return RunEnded(
                f"{self._lost}, so this host has left the run; if the run goes on, the same "
                f"command joins it again; otherwise {resume}",
                STOPPED,
            )
        status = self._end["status"]
        reason = escape_control(self._end["reason"])
        if status == 0:
            return None
        if status == STOPPED:
            return RunEnded(f"the run was stopped on request; {resume}", STOPPED)
        if status > 128:
            if self._has_asked_to_leave:
                return RunEnded("this host has left the run", status)
            return RunEnded(f"the run was ended by {signal_name(status - 128)} on host 0", status)
        return RunEnded(f"the run has failed: {reason}", status)
