"""The connection between the launchers of two hosts: messages, heartbeats, and its loss."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterator

import pytest

from lockstep.comm.transport.listener import MessageListener
from lockstep.comm.transport.message_connection import connect_to
from lockstep.elastic import host_connection
from lockstep.elastic.host_connection import PURPOSE, ConnectionLost, HostConnection

SILENCE = 10.0


class Clock:
    """Stands for the module `time`."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(host_connection, "time", clock)
    return clock


@pytest.fixture
def ends(clock: Clock) -> Iterator[tuple[HostConnection, HostConnection]]:
    secret = secrets.token_bytes(32)
    with MessageListener(socket.create_server(("127.0.0.1", 0)), secret, PURPOSE) as listener:
        ours = connect_to("127.0.0.1", listener.port, secret, PURPOSE)
        theirs = listener.accept(timeout=10)
        with ours, theirs:
            yield HostConnection(ours, SILENCE), HostConnection(theirs, SILENCE)


def test_messages_arrive_in_order_without_heartbeats(ends, clock):
    here, there = ends
    for number in range(3):
        here.send({"kind": "number", "number": number})
        clock.now += SILENCE / 4
        here.keep_alive()
    received = []
    while len(received) < 3:
        received += there.receive(timeout=10)
    assert [message["number"] for message in received] == [0, 1, 2]


def test_a_heartbeat_keeps_a_silent_end_alive(ends, clock):
    here, there = ends
    for _ in range(10):
        clock.now += SILENCE / 2
        here.keep_alive()
        assert not there.receive(timeout=0.5)
        there.keep_alive()
        assert not here.receive(timeout=0.5)


def test_an_end_that_sends_nothing_is_lost(ends, clock):
    here, _ = ends
    clock.now = SILENCE - 0.1
    here.keep_alive()
    clock.now = SILENCE
    with pytest.raises(ConnectionLost, match="was silent for 10 s"):
        here.keep_alive()


def test_what_was_sent_before_the_end_arrives(ends):
    here, there = ends
    here.send({"kind": "end"})
    here.close()
    assert there.receive(timeout=10) == [{"kind": "end"}]
    with pytest.raises(ConnectionLost, match="closed the connection"):
        there.receive(timeout=10)


def test_an_end_that_reads_nothing_is_lost(ends):
    here, _ = ends
    here.silence = 0.2

    def fill() -> None:
        for _ in range(1000):
            here.send({"kind": "large", "text": "x" * (1 << 18)})

    with pytest.raises(ConnectionLost, match=r"took no message for 0\.2 s"):
        fill()
