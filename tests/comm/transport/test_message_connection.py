"""Connections for messages: who is accepted, the errors when that fails, and deadlines."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time

import pytest

from lockstep.comm.transport import message_connection
from lockstep.comm.transport.handshake import Status, answer
from lockstep.comm.transport.listener import MessageListener
from lockstep.comm.transport.message_codec import ForgedMessage
from lockstep.comm.transport.message_connection import MessageConnection, connect_to
from lockstep.kernel.errors import RendezvousError, UsageError
from lockstep.launcher.listening_socket import listen

SECRET = b"s" * 32
PURPOSE = "test"
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
    os.write(here.fileno(), b"x" * 100)
    with pytest.raises(ForgedMessage):
        there.receive(PATIENCE)


def test_another_secret_is_refused(listener):
    with pytest.raises(UsageError, match="holds another key: give both the same key, with --secre"):
        connect_to("127.0.0.1", listener.port, b"o" * 32, PURPOSE)
    with pytest.raises(TimeoutError, match="no connection"):
        listener.accept(0)


def test_another_purpose_is_refused(listener):
    with pytest.raises(RendezvousError, match="it is another process"):
        connect_to("127.0.0.1", listener.port, SECRET, "another")


def test_closing_closes_connections_that_were_not_taken():
    with MessageListener(listen("127.0.0.1", 0), SECRET, PURPOSE) as listener:
        here = connect_to("127.0.0.1", listener.port, SECRET, PURPOSE)
    with here, pytest.raises(EOFError):
        here.receive(PATIENCE)


# --- callers --------------------------------------------------------------------------------


@pytest.fixture
def serve():
    """Listen with a function that is given every connection, on a thread."""
    with contextlib.ExitStack() as opened:

        def start(function) -> int:
            server = socket.create_server(("127.0.0.1", 0))

            def work() -> None:
                with contextlib.suppress(OSError):
                    while True:
                        end, _ = server.accept()
                        end.settimeout(10)
                        with end, contextlib.suppress(OSError):
                            function(end)

            thread = threading.Thread(target=work)
            thread.start()
            opened.callback(thread.join)
            opened.callback(server.close)
            opened.callback(server.shutdown, socket.SHUT_RDWR)
            return int(server.getsockname()[1])

        yield start


def connected(port: int, timeout: float = 0.3) -> MessageConnection:
    return connect_to("127.0.0.1", port, SECRET, PURPOSE, timeout, called="the driver")


def test_no_answer():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    sentence = rf"^the driver at 127\.0\.0\.1:{port} could not be reached within 0.3 s: connection"
    with pytest.raises(RendezvousError, match=sentence):
        connected(port)


def pretend(end: socket.socket) -> None:
    """Accept a caller, without the key."""
    end.sendall(bytes([Status.ACCEPTED]) + b"n" * 32)
    end.sendall(bytes([Status.ACCEPTED]) + b"p" * 32)
    while end.recv(100):
        pass


@pytest.mark.parametrize(
    ("function", "error", "reason"),
    [
        (lambda end: end.recv(1), RendezvousError, "it closes connections before the handshake"),
        (lambda end: end.sendall(bytes([Status.BUSY])), RendezvousError, "it is busy with"),
        (lambda end: end.sendall(bytes([Status.OTHER_KEY])), UsageError, "it holds another key: "),
        (
            lambda end: end.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
            UsageError,
            "it is not a process of this version of Lockstep",
        ),
        (pretend, UsageError, "it does not prove that it holds the key"),
    ],
    ids=["closed", "busy", "other key", "other protocol", "without the key"],
)
def test_the_error_says_why_a_listener_is_not_the_one(serve, function, error, reason):
    with pytest.raises(error, match=reason):
        connected(serve(function))


def test_a_silent_listener(serve, monkeypatch):
    monkeypatch.setattr(message_connection, "HANDSHAKE_TIMEOUT", 0.2)
    over = threading.Event()
    try:
        with pytest.raises(RendezvousError, match="it accepts connections but does not answer"):
            connected(serve(lambda end: over.wait(10)))
    finally:
        over.set()


@pytest.mark.parametrize("said", [bytes([Status.BUSY]), b""])
def test_a_caller_tries_again_until_it_is_accepted(serve, said):
    calls = []

    def later(end: socket.socket) -> None:
        calls.append(end)
        if len(calls) < 3:
            end.recv(1)
            end.sendall(said)
            return
        steps = answer(SECRET, PURPOSE)
        step = next(steps)
        while step.keys is None:
            end.sendall(step.send)
            step = steps.send(end.recv(step.size, socket.MSG_WAITALL))
        end.sendall(step.send)

    with connected(serve(later), timeout=30.0):
        assert len(calls) == 3


def test_an_unknown_address():
    with pytest.raises(UsageError, match="'no such host' cannot be resolved"):
        connect_to("no such host", 1, SECRET, PURPOSE, 1.0)
