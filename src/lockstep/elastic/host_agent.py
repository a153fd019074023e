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
from lockstep.launcher.channel import Channel, Message
from lockstep.launcher.failure_attribution import signal_name
from lockstep.launcher.failure_codes import STOPPED
from lockstep.launcher.hang_monitor import HangPolicy
from lockstep.launcher.late_ranks import LongWait
from lockstep.launcher.supervisor import STOP_GRACE, TICK, RankSupervisor
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


# It has many methods: those of a supervisor, and the conversation with host 0.
class HostAgent(RankSupervisor):
    """The supervisor of the members of this host.

    Args:
        channel: As for `RankSupervisor`.
        hang_policy: As for `RankSupervisor`.
        hello: The message with which this host asks to take part.
        address: The address of host 0.
        port: The port at which its launcher accepts agents.
        secret: The secret of the run.

    Attributes:
        start: Starts a member.
    """

    def __init__(
        self,
        channel: Channel,
        hang_policy: HangPolicy,
        hello: Message,
        address: str,
        port: int,
        secret: bytes,
    ) -> None:
        super().__init__(channel, range(0), hang_policy=hang_policy, noun="member")
        self.start: StartLocalMember = lambda member, local_rank, variables: None
        self.on_report = self._on_member_report
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

    def wait(
        self,
        deadline: float | None = None,
        *,
        grace: float = STOP_GRACE,
        is_stop_requested: Callable[[], bool] = lambda: False,
    ) -> RankError | None:
        """Take part in the run until it has ended.

        Raises:
            RendezvousError: The launcher of host 0 did not answer.
            UsageError: It refused this host.
        """
        if not self._join(is_stop_requested):
            self.was_asked_to_stop = True
            self.close()
            return None
        while self._end is None and not self._lost:
            if is_stop_requested() and not self._has_asked_to_leave:
                self._has_asked_to_leave = True
                log("SIGTERM: this host leaves the run")
                self._post({"kind": "leave"})
            self._answer_request()
            if hang := self.hang_monitor.check():
                self.terminate()
                return hang
            self.process_events(TICK)
            if not self.has_fork_server:
                self._lost = "the fork server of this host has exited"
        self.terminate()
        return self._conclude()

    def process_events(self, timeout: float) -> None:
        """Process what the members and the launcher of host 0 have sent, and pass it on."""
        super().process_events(min(timeout, TICK))
        self._report_changes()
        if self._connection is not None:
            try:
                self._connection.keep_alive()
            except ConnectionLost as lost:
                self._lose(str(lost))

    def close(self) -> None:
        """Release everything; members that still run are killed."""
        super().close()
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
                self.readers.add(self._connection.fileno(), self._on_coordinator)
                return True
            if wait.left <= 0:
                raise RendezvousError(
                    f"{target} did not let this host join within {wait.waited:.0f} s: {reason}"
                )
            if wait.is_note_due():
                log(f"{wait.describe(own, target)}: {reason}")
            self.process_events(TICK)
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
                    self.obey(message)
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
                    self.obey(message)
        except ConnectionLost as lost:
            self._lose(str(lost))
        return True  # it is unregistered already if it is lost

    def obey(self, message: Message) -> None:
        """Carry an order of the launcher of host 0 out."""
        member = message.get("member", -1)
        if message["kind"] not in ("start", "end") and member not in self.outcomes:
            return  # it was a member of this host before the host was lost
        match message["kind"]:
            case "start":
                self.start(member, message["local_rank"], message["variables"])
                self.outcomes[member].is_replaced = True  # host 0 judges how it ends
            case "send":
                self.send(member, message["message"])
            case "signal":
                self.send_signal(member, message["number"], group=message["group"])
            case "release":
                if self.outcomes[member].status is not None:
                    self.release(member)
            case "end":
                self._end = message

    def _lose(self, how: str) -> None:
        """Note that the launcher of host 0 is gone, unless it has ended the run."""
        if self._connection is None:
            return
        self.readers.remove(self._connection.fileno())
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
        for member, pid in self.pids.items():
            if self._is_news("started", member):
                self._post({"kind": "started", "member": member, "pid": pid})
        for member in self.running:
            if self.has_begun(member) and self._is_news("begun", member):
                self._post({"kind": "begun", "members": [member]})
        for member, outcome in self.outcomes.items():
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
