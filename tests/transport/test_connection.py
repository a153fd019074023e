"""Connecting to a process that listens, and the errors when that fails."""

from __future__ import annotations

import contextlib
import socket
import threading

import pytest

from lockstep.kernel.errors import RendezvousError, UsageError
from lockstep.launcher.listening_socket import listen
from lockstep.transport import connection
from lockstep.transport.connection import connect
from lockstep.transport.credentials import Credentials, Identity, Role
from lockstep.transport.handshake import Status, answer
from lockstep.transport.listener import Listener

KEY, SESSION = b"k" * 32, b"s" * 16
DRIVER, FIRST, SECOND = (
    Identity(Role.DRIVER),
    Identity(Role.WORKER, 0, 1),
    Identity(Role.WORKER, 2, 0),
)
OWN = Credentials(KEY, FIRST, SESSION)


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


def connected(port: int, called: Identity = DRIVER, timeout: float = 0.3) -> socket.socket:
    return connect("127.0.0.1", port, OWN, called, 5.0, timeout).end


def test_no_answer():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    sentence = rf"^the driver at 127\.0\.0\.1:{port} could not be reached within 0.3 s: connection"
    with pytest.raises(RendezvousError, match=sentence):
        connected(port)


def test_a_closed_connection_is_not_reported_as_another_key(serve):
    with pytest.raises(RendezvousError, match="it closes connections before the handshake"):
        connected(serve(lambda end: end.recv(1)))


def test_a_silent_listener(serve, monkeypatch):
    monkeypatch.setattr(connection, "HANDSHAKE_TIMEOUT", 0.2)
    over = threading.Event()
    try:
        with pytest.raises(RendezvousError, match="it accepts connections but does not answer"):
            connected(serve(lambda end: over.wait(10)))
    finally:
        over.set()


def test_a_busy_listener(serve):
    with pytest.raises(
        RendezvousError, match="it is busy with connections that are not authenticated"
    ):
        connected(serve(lambda end: end.sendall(bytes([Status.BUSY]))))


def test_another_key(serve):
    with pytest.raises(UsageError, match="refused the connection: it holds another key: give both"):
        connected(serve(lambda end: end.sendall(bytes([Status.OTHER_KEY]))))


def test_another_protocol(serve):
    with pytest.raises(UsageError, match="it is not a process of this version of Lockstep"):
        connected(serve(lambda end: end.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")))


def test_a_listener_without_the_key(serve):
    accepted = bytes([Status.ACCEPTED])

    def pretend(end: socket.socket) -> None:
        end.sendall(accepted + b"n" * 32)
        end.sendall(accepted + b"p" * 32)
        while end.recv(100):
            pass

    with pytest.raises(UsageError, match="it does not prove that it holds the key"):
        connected(serve(pretend))


def test_another_worker_answers():
    own = Credentials(KEY, Identity(Role.WORKER, 2, 1), SESSION)
    listener = Listener(listen("127.0.0.1", 0), own, 5.0, lambda wire, caller: None)
    try:
        with pytest.raises(RendezvousError, match=r"^worker 0 of host 2.at .* it is another"):
            connected(listener.port, SECOND)
    finally:
        listener.close()


@pytest.mark.parametrize("said", [bytes([Status.BUSY]), b""])
def test_a_caller_tries_again_until_it_is_accepted(serve, said):
    calls = []

    def later(end: socket.socket) -> None:
        calls.append(end)
        if len(calls) < 3:
            end.recv(1)
            end.sendall(said)
            return
        steps = answer(Credentials(KEY, DRIVER, SESSION))
        step = next(steps)
        while step.agreement is None:
            end.sendall(step.send)
            step = steps.send(end.recv(step.size, socket.MSG_WAITALL))
        end.sendall(step.send)

    with connected(serve(later), timeout=30.0):
        assert len(calls) == 3


def test_an_unknown_address():
    with pytest.raises(UsageError, match="'no such host' cannot be resolved"):
        connect("no such host", 1, OWN, DRIVER, 1.0, 1.0)
