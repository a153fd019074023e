"""Connections of a group are shut down from another thread, and nothing else is."""

from __future__ import annotations

import socket
import threading

from lockstep.launcher.group_connections import GroupConnections


def connect(listening: socket.socket) -> tuple[socket.socket, socket.socket]:
    ours = socket.create_connection(listening.getsockname(), timeout=10)
    theirs, _ = listening.accept()
    theirs.settimeout(10)
    return ours, theirs


def test_a_thread_that_waits_for_a_connection_returns():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        other = connect(listening)
        with GroupConnections() as connections:
            ours, theirs = connect(listening)
            later = socket.create_server(("127.0.0.1", 0))
            pair = socket.socketpair()
        received: list[bytes] = []
        thread = threading.Thread(target=lambda: received.append(ours.recv(1)))
        thread.start()
        connections.shut_down()
        thread.join(10)
        assert received == [b""]
        assert theirs.recv(1) == b""
        # Not the others: from before, listening, or within this host.
        other[0].sendall(b"!")
        assert other[1].recv(1) == b"!"
        pair[0].sendall(b"?")
        assert pair[1].recv(1) == b"?"
        accepted = connect(later)
        for each in (*other, ours, theirs, later, *pair, *accepted):
            each.close()


def test_a_descriptor_that_another_socket_uses_now_is_left_alone():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        with GroupConnections() as connections:
            ours, theirs = connect(listening)
        number = ours.fileno()
        ours.close()
        again = connect(listening)
        assert number in [each.fileno() for each in again]
        connections.shut_down()
        again[0].sendall(b"!")
        assert again[1].recv(1) == b"!"
        for each in (theirs, *again):
            each.close()
