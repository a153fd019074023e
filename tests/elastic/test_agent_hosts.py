"""What the launcher of host 0 does with agents: whom it refuses, and when a host is lost."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Iterator

import pytest

from lockstep.comm.transport.listener import MessageListener
from lockstep.comm.transport.message_connection import connect_to
from lockstep.elastic import agent_hosts
from lockstep.elastic.agent_hosts import AgentHosts
from lockstep.elastic.host_connection import PURPOSE, HostConnection
from lockstep.kernel.errors import RendezvousError
from lockstep.launcher import late_ranks
from lockstep.launcher.channel import Message, open_pair
from lockstep.launcher.failure_attribution import describe_end
from lockstep.launcher.supervisor import RankSupervisor
from processes import until

SECRET = bytes(range(32))
HELLO = {"kind": "join", "host": 1, "name": "node7", "nnodes": 3, "version": "1"}


@pytest.fixture
def ranks() -> Iterator[RankSupervisor]:
    ours, theirs = open_pair()
    ranks = RankSupervisor(ours, range(0), noun="member")
    yield ranks
    ranks.close()
    theirs.close()


@pytest.fixture
def hosts(ranks: RankSupervisor) -> Iterator[AgentHosts]:
    listener = MessageListener(socket.create_server(("127.0.0.1", 0)), SECRET, PURPOSE)
    hosts = AgentHosts(ranks, listener, nnodes=3, silence=10.0, folder=None, version="1")
    yield hosts
    hosts.end(0, "")


@pytest.fixture
def connect(ranks: RankSupervisor, hosts: AgentHosts) -> Iterator[Callable[..., Agent]]:
    agents: list[Agent] = []

    def open_connection(**changes: object) -> Agent:
        agents.append(Agent(ranks, hosts, **changes))
        return agents[-1]

    yield open_connection
    for agent in agents:
        agent.connection.close()


class Agent:
    """The other end: an agent whose messages the test writes."""

    def __init__(self, ranks: RankSupervisor, hosts: AgentHosts, **changes: object) -> None:
        self._ranks = ranks
        port = hosts._listener.port
        self.connection = HostConnection(connect_to("127.0.0.1", port, SECRET, PURPOSE), 10.0)
        self.connection.send({**HELLO, **changes})
        self.received: list[Message] = []

    def receive(self) -> Message:
        """Return the next message, while the supervisor runs."""

        def has_received() -> bool:
            self._ranks.processes.process_events(0.01)
            self.received += self.connection.receive(timeout=0.01)
            return bool(self.received)

        until(has_received, "no message", 10)
        return self.received.pop(0)

    def join(self) -> Agent:
        assert self.receive()["kind"] == "welcome"
        return self


def run_until(ranks: RankSupervisor, condition: object) -> None:
    def holds() -> bool:
        ranks.processes.process_events(0.01)
        return bool(condition())  # type: ignore[operator]

    until(holds, "it does not happen", 10)


@pytest.mark.parametrize(
    ("changes", "reason", "is_final"),
    [
        ({"version": "2"}, "host 0 runs 1, this host 2: install the same", True),
        ({"nnodes": 2}, "--nnodes is 2 here and 3 on host 0", True),
        ({"host": 0}, "--node-rank is 0, which is not that of another host", True),
        ({}, "host 1 (node7) takes part in the run already", False),
    ],
)
def test_hosts_that_do_not_fit_are_refused(ranks, connect, changes, reason, is_final):
    connect().join()
    second = connect(**changes)
    assert second.receive() == {"kind": "refuse", "reason": reason, "is_final": is_final}
    assert ranks.processes.present == [0, 1]


def test_members_of_a_host_are_started_there_and_lost_with_it(ranks, hosts, connect, capfd):
    agent = connect(host=2).join()
    hosts.start(2, 7, 0, {"RANK": "1"})
    assert agent.receive() == {
        "kind": "start",
        "member": 7,
        "local_rank": 0,
        "variables": {"RANK": "1"},
    }
    agent.connection.send({"kind": "started", "member": 7, "pid": 99})
    agent.connection.send({"kind": "begun", "members": [7]})
    run_until(ranks, lambda: ranks.processes.has_begun(7))
    hosts.start(2, 8, 1, {})
    assert (
        ranks.processes.host_of(7),
        ranks.processes.find_pid(7, 8),
        ranks.processes.find_pid(7, 0),
    ) == (2, 99, 0)
    assert 7 not in ranks.processes.pids  # those of this host, which it looks for
    agent.receive()
    ranks.processes.send(7, {"kind": "leave"})
    ranks.processes.send_signal(7, signal.SIGTERM, group=False)
    assert agent.receive() == {"kind": "send", "member": 7, "message": {"kind": "leave"}}
    expected = {"kind": "signal", "member": 7, "number": signal.SIGTERM, "group": False}
    assert agent.receive() == expected
    reports = []
    ranks.processes.on_report = lambda member, message: reports.append((member, message)) is None
    agent.connection.send({"kind": "report", "member": 7, "message": {"kind": "ready"}, "age": 0})
    agent.connection.send({"kind": "exit", "member": 8, "status": -9, "hint": "; no memory"})
    run_until(ranks, lambda: ranks.processes.outcomes[8].status is not None)
    assert reports == [(7, {"kind": "ready"})]
    assert describe_end(ranks.processes.outcomes[8]) == "was killed by SIGKILL; no memory"
    agent.connection.close()
    run_until(ranks, lambda: ranks.processes.outcomes[7].status is not None)
    assert ranks.processes.outcomes[7].was_killed
    assert describe_end(ranks.processes.outcomes[7]) == "was lost with host 2 (node7)"
    assert ranks.processes.present == [0]
    assert "host 2 (node7) closed the connection: member 7 is lost" in capfd.readouterr().err
    hosts.start(2, 9, 0, {})  # it was to start another member a moment ago
    assert describe_end(ranks.processes.outcomes[9]) == "was lost with host 2"


def test_an_agent_that_reports_about_members_of_others_is_lost(ranks, hosts, connect, capfd):
    agents = [connect(host=host).join() for host in (1, 2)]
    hosts.start(2, 3, 0, {})
    agents[0].connection.send({"kind": "exit", "member": 3, "status": 0, "hint": ""})
    run_until(ranks, lambda: ranks.processes.present == [0, 2])
    assert ranks.processes.outcomes[3].status is None
    assert "reported about member 3, which is not on it" in capfd.readouterr().err


@pytest.mark.parametrize(
    "message",
    [
        {"kind": "exit", "member": 3, "status": "0", "hint": None, "more": 1},
        {"kind": "exit", "member": 3},
        {"kind": "begun", "members": [{}]},
        {"kind": "report", "member": 3, "message": {"kind": "value"}, "age": 0},
        {"kind": "report", "member": 3, "message": "ready", "age": 0},
        {"member": 3},
    ],
)
def test_an_agent_that_sends_something_else_is_lost(ranks, hosts, connect, capfd, message):
    agent = connect().join()
    hosts.start(1, 3, 0, {})
    agent.connection.send(message)
    agent.connection.send({"kind": "exit", "member": 3, "status": "x", "hint": ""})
    run_until(ranks, lambda: ranks.processes.present == [0])
    assert ranks.processes.outcomes[3].status in (0, -signal.SIGKILL)
    assert "host 1 (node7) sent a message that cannot be processed (" in capfd.readouterr().err


def test_a_host_that_is_asked_to_stop_is_dismissed(ranks, hosts, connect, capfd):
    agent = connect().join()
    hosts.start(1, 5, 0, {})
    agent.receive()
    agent.connection.send({"kind": "leave"})
    assert agent.receive()["number"] == signal.SIGKILL
    assert ranks.processes.present == [0]
    agent.connection.send({"kind": "exit", "member": 5, "status": -9, "hint": ""})
    assert agent.receive() == {"kind": "end", "status": 143, "reason": ""}
    run_until(ranks, lambda: 1 not in hosts._hosts)
    assert describe_end(ranks.processes.outcomes[5]) == "was lost with host 1 (node7)"
    said = capfd.readouterr().err.splitlines()
    assert said[-1] == ("lockstep: host 1 (node7) was asked to stop and leaves, with member 5")


def test_hosts_that_do_not_come_are_named(hosts, connect, monkeypatch, capfd):
    monkeypatch.setattr(agent_hosts, "JOIN_TIMEOUT", 0.3)
    monkeypatch.setattr(late_ranks, "NOTE_AFTER", 0.1)
    connect().join()
    with pytest.raises(RendezvousError, match=r"host 2 of 3 did not join within . s: start the"):
        hosts.wait_for_all(lambda: False)
    assert " for host 2 of 3, and waits 0 s more" in capfd.readouterr().err


def test_a_stop_is_heeded_while_hosts_are_missing(hosts):
    assert not hosts.wait_for_all(lambda: True)
