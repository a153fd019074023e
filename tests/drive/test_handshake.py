"""The handshake: who holds the key gets in, and nobody else."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from lockstep.drive import handshake
from lockstep.drive.frame import Frame
from lockstep.drive.handshake import GREETING, NONCE, Refused, answer, call

KEY, OTHER = b"k" * 32, b"o" * 32


def shaken(callers: bytes, listeners: bytes):
    """Return what both ends got from a handshake: a wire or what was refused."""
    left, right = _connected()

    def end(function, socket_end, key):
        try:
            return function(socket_end, key, 5.0)
        except Refused as error:
            socket_end.close()
            return error

    with ThreadPoolExecutor() as pool:
        ends = pool.submit(end, call, left, callers), pool.submit(end, answer, right, listeners)
        return tuple(future.result(10) for future in ends)


def _connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        caller = socket.create_connection(server.getsockname())
        return caller, server.accept()[0]


def test_one_key_connects_both():
    here, there = shaken(KEY, KEY)
    with here.end, there.end:
        here.send(Frame({"kind": "a"}))
        there.send(Frame({"kind": "b"}))
        assert (there.receive().kind, here.receive().kind) == ("a", "b")
        assert here.end.gettimeout() == 5.0


def test_another_key_is_refused_on_both_sides():
    here, there = shaken(KEY, OTHER)
    assert str(there) == "it holds another key"
    assert isinstance(here, Refused)


def test_a_listener_that_proves_nothing_is_refused():
    left, right = _connected()
    with left, right, ThreadPoolExecutor() as pool:
        refused = pool.submit(call, left, KEY, 5.0)
        right.sendall(GREETING + b"n" * NONCE + b"p" * NONCE)
        with pytest.raises(Refused, match="another key"):
            refused.result(10)


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", b"\x80\x04" * 400, GREETING])
def test_garbage_is_refused(said):
    left, right = _connected()
    with left, right:
        left.sendall(said)
        left.shutdown(socket.SHUT_WR)
        with pytest.raises(Refused):
            answer(right, KEY, 5.0)


def test_silence_is_refused_at_the_deadline(monkeypatch):
    monkeypatch.setattr(handshake, "PATIENCE", 0.1)
    left, right = _connected()
    with left, right:
        left.sendall(GREETING[:3])
        with pytest.raises(Refused, match="said nothing"):
            answer(right, KEY, 5.0)


def test_the_proofs_of_another_handshake_are_worth_nothing():
    spoken = []

    class Tapped(socket.socket):
        def sendall(self, content):
            spoken.append(content)
            super().sendall(content)

    left, right = _connected()
    with ThreadPoolExecutor() as pool:
        tapped = Tapped(fileno=left.detach())
        there = pool.submit(answer, right, KEY, 5.0)
        with call(tapped, KEY, 5.0).end, there.result(10).end:
            pass
    assert len(spoken) == 2
    left, right = _connected()
    with left, right:
        left.sendall(b"".join(spoken))
        with pytest.raises(Refused, match="another key"):
            answer(right, KEY, 5.0)
