"""Connections for messages: who is accepted, deadlines, and what a late message leaves."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from lockstep.kernel.errors import RendezvousError, UsageError
from lockstep.launcher.listening_socket import listen
from lockstep.transport.frame import ForgedFrame
from lockstep.transport.message_connection import MessageListener, connect_to

SECRET, PURPOSE = b"s" * 32, "test"
PATIENCE = 30.0


@pytest.fixture
def listener():
    with MessageListener(listen("127.0.0.1", 0), SECRET, PURPOSE) as listener:
        yield listener


@pytest.fixture
def ends(listener):
    with (
        connect_to("127.0.0.1", listener.port, SECRET, PURPOSE) as here,
        listener.accept(PATIENCE) as there,
    ):
        yield here, there


def test_messages_arrive_in_order_in_both_directions(ends):
    for sender, receiver in (ends, ends[::-1]):
        for number in range(3):
            sender.send({"number": number, "text": "ä" * number})
        assert [receiver.receive(PATIENCE)["number"] for _ in range(3)] == [0, 1, 2]
        assert receiver.peer == "127.0.0.1"


def test_a_large_message(ends):
    here, there = ends
    sent = {"text": "x" * 1_000_000}
    sender = threading.Thread(target=here.send, args=(sent,))
    sender.start()
    assert there.receive(PATIENCE) == sent
    sender.join()


def test_a_receiver_that_gave_up_can_receive_the_message_later(ends):
    here, there = ends
    started = time.monotonic()
    with pytest.raises(TimeoutError, match=r"no message within 0.05 s"):
        there.receive(0.05)
    assert time.monotonic() - started >= 0.05
    here.send({"kind": "late"})
    assert there.receive(PATIENCE) == {"kind": "late"}


def test_a_closed_connection(ends):
    here, there = ends
    here.send({"kind": "last"})
    here.close()
    assert there.receive(PATIENCE) == {"kind": "last"}
    with pytest.raises(EOFError):
        there.receive(PATIENCE)


def test_bytes_without_their_proof_are_an_error(ends):
    here, there = ends
    socket.socket.sendall(here._end, b"x" * 100)
    with pytest.raises(ForgedFrame):
        there.receive(PATIENCE)


def test_another_secret_is_refused(listener):
    with pytest.raises(UsageError, match="holds another key: give both the same key, with --secre"):
        connect_to("127.0.0.1", listener.port, b"o" * 32, PURPOSE)
    with pytest.raises(TimeoutError, match="no connection"):
        listener.accept(0)


def test_another_purpose_is_refused(listener):
    with pytest.raises(RendezvousError, match="it is another process"):
        connect_to("127.0.0.1", listener.port, SECRET, "another")


def test_nobody_listens():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(RendezvousError, match=r"the process at .* could not be reached"):
        connect_to("127.0.0.1", port, SECRET, PURPOSE, timeout=0.1)


def test_closing_closes_connections_that_were_not_taken():
    with MessageListener(listen("127.0.0.1", 0), SECRET, PURPOSE) as listener:
        here = connect_to("127.0.0.1", listener.port, SECRET, PURPOSE)
    with here, pytest.raises(EOFError):
        here.receive(PATIENCE)
