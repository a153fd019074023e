"""The listener accepts callers with the secret, regardless of how many strangers connect."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
from functools import partial
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import processes
from lockstep.comm.transport import listener as listening
from lockstep.comm.transport.handshake import Status, call
from lockstep.comm.transport.listener import REPORT_INTERVAL, SLOTS, MessageListener, RefusalLog
from lockstep.comm.transport.message_connection import connect_to
from lockstep.launcher.listening_socket import listen

SECRET = b"k" * 32
PURPOSE = "test"
PATIENCE = 30.0
until = partial(processes.until, seconds=PATIENCE)


@pytest.fixture
def door(monkeypatch):
    """A listener, with the one line that it says."""
    monkeypatch.setattr(listening, "REPORT_INTERVAL", 1e6)
    monkeypatch.setattr(listening, "HANDSHAKE_TIMEOUT", PATIENCE)
    lines = []
    with MessageListener(listen("127.0.0.1", 0), SECRET, PURPOSE, lines.append) as listener:
        yield SimpleNamespace(port=listener.port, accept=listener.accept, lines=lines)


@pytest.fixture
def strangers():
    with contextlib.ExitStack() as opened:

        def connect(door, count: int, address: str = "127.0.0.1") -> list[socket.socket]:
            endpoint = ("127.0.0.1", door.port)
            return [
                opened.enter_context(
                    socket.create_connection(endpoint, PATIENCE, source_address=(address, 0))
                )
                for _ in range(count)
            ]

        yield connect


def joined(door) -> None:
    """Join with the secret, and let a message pass."""
    with (
        connect_to("127.0.0.1", door.port, SECRET, PURPOSE, PATIENCE) as here,
        door.accept(PATIENCE) as there,
    ):
        here.send({"kind": "a"})
        assert there.receive(PATIENCE) == {"kind": "a"}


def told(end: socket.socket) -> bytes | None:
    """Return what an end was told before the other end closed it; None if it is open."""
    end.setblocking(False)
    try:
        return end.recv(100, socket.MSG_PEEK)
    except BlockingIOError:
        return None
    except ConnectionResetError:
        return b""


def test_a_caller_with_the_key_is_accepted(door):
    joined(door)
    assert door.lines == []


def test_silent_connections_do_not_keep_callers_out(door, strangers):
    threads = threading.active_count()
    silent = strangers(door, 3 * SLOTS)
    joined(door)
    assert threading.active_count() == threads
    until(lambda: len(open_ends(silent)) <= SLOTS, "more connections than slots")
    assert open_ends(silent) == silent[-len(open_ends(silent)) :]  # the oldest left first


def open_ends(ends: list[socket.socket]) -> list[socket.socket]:
    return [end for end in ends if told(end) is None]


def test_connections_that_are_renewed_do_not_keep_callers_out(door):
    over = threading.Event()

    def renew() -> None:
        held: list[socket.socket] = []
        while not over.is_set():
            with contextlib.suppress(OSError):
                held.append(socket.create_connection(("127.0.0.1", door.port)))
            if len(held) > SLOTS + 48:
                held.pop(0).close()
        for end in held:
            end.close()

    attack = threading.Thread(target=renew)
    attack.start()
    try:
        for _ in range(5):
            joined(door)
    finally:
        over.set()
        attack.join()
    assert len(door.lines) <= 1


def test_a_caller_that_has_introduced_itself_keeps_its_slot(door, strangers):
    (caller,) = strangers(door, 1)
    steps = call(SECRET, PURPOSE)
    caller.sendall(next(steps).send)
    assert caller.recv(1) == bytes([Status.ACCEPTED])
    silent = strangers(door, 2 * SLOTS)
    until(lambda: len(open_ends(silent)) < SLOTS, "the strangers were all let in")
    steps.send(bytes([Status.ACCEPTED]))
    caller.sendall(steps.send(caller.recv(32, socket.MSG_WAITALL)).send)
    assert caller.recv(33, socket.MSG_WAITALL)[:1] == bytes([Status.ACCEPTED])
    door.accept(PATIENCE).close()


def test_an_address_with_one_slot_keeps_it(door, strangers):
    (lonely,) = strangers(door, 1, "127.0.0.2")
    many = strangers(door, 2 * SLOTS)
    until(lambda: len(open_ends(many)) < SLOTS, "the strangers were all let in")
    assert open_ends([lonely]) == [lonely]


def test_a_caller_that_loses_its_slot_is_told(door, strangers):
    first, *_ = strangers(door, SLOTS + 1)
    assert first.recv(2) == bytes([Status.BUSY])


def test_without_descriptors_a_stranger_is_refused(door, strangers, monkeypatch):
    (silent,) = strangers(door, 1)
    joined(door)
    accept = socket.socket.accept
    failures = [errno.EMFILE, errno.EMFILE]

    def fail_twice(self):
        if failures:
            raise OSError(failures.pop(), "Too many open files")
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", fail_twice)
    joined(door)
    assert failures == []
    assert told(silent) == bytes([Status.BUSY])


def test_strangers_are_reported_in_one_line_without_their_text(door, strangers):
    for _ in range(10):
        for end in strangers(door, 50):
            with contextlib.suppress(OSError):
                end.sendall(b"\x1b]0;owned\x07\x1b[2J\r\n" * 40)
            end.close()
    joined(door)
    until(lambda: door.lines, "nothing was said")
    (line,) = door.lines
    assert "refused" in line
    assert "it is not a process of this version of Lockstep" in line
    assert line.isprintable()


def test_a_caller_that_sends_too_little_is_refused_in_time(door, strangers, monkeypatch):
    monkeypatch.setattr(listening, "HANDSHAKE_TIMEOUT", 0.05)
    (silent, slow) = strangers(door, 2)
    slow.sendall(b"lockstep")
    until(lambda: told(silent) == told(slow) == b"", "not closed")
    until(lambda: door.lines, "nothing was said")
    assert "it was not authenticated within 0.05 s" in door.lines[0]


def test_a_stranger_that_sends_without_end_is_refused(door, strangers):
    (stranger,) = strangers(door, 1)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        while True:  # otherwise the timeout of the suite ends it
            stranger.sendall(os.urandom(1 << 16))
    joined(door)
    until(lambda: told(stranger) is not None, "not closed")
    assert len(door.lines) == 1


def test_the_last_refusals_are_reported_at_the_end(strangers):
    lines = []
    listener = MessageListener(listen("127.0.0.1", 0), SECRET, PURPOSE, lines.append)
    for end in strangers(listener, 3):
        end.sendall(b"GET / HTTP/1.1\r\n\r\n")
        until(lambda end=end: told(end) == b"", "not closed")
    waiting = strangers(listener, 1)
    listener.close()
    assert told(waiting[0]) == b""
    words = [line.split(" ")[0] for line in lines]
    assert len(words) > 1
    assert sum(1 if word == "a" else int(word) for word in words) == 3


def test_the_first_is_reported_at_once_and_the_others_together():
    refusals = RefusalLog()
    assert refusals.due() is None
    refusals.add("10.0.0.1", "it holds another key")
    assert refusals.due() <= 0.0
    first = refusals.report(100.0)
    assert first == "a connection from 10.0.0.1 was refused: it holds another key"
    assert refusals.due() is None
    for _ in range(1999):
        refusals.add("10.0.0.2", "it is another one")
    refusals.add("10.0.0.3", "it holds another key")
    assert refusals.due() == 100.0 + REPORT_INTERVAL
    assert refusals.report(110.0) == (
        "2,000 connections were refused, the last one from 10.0.0.3: "
        "it is another one (1,999); it holds another key (1)"
    )


@given(st.lists(st.floats(0, 1), max_size=300))
def test_every_refusal_is_counted_and_lines_are_rare(gaps):
    refusals = RefusalLog()
    now = 0.0
    lines = []
    for gap in gaps:
        now += gap
        refusals.add("10.0.0.1", "it is another one")
        if refusals.due() <= now:
            lines.append(refusals.report(now))
    if refusals.due() is not None:
        lines.append(refusals.report(now))
    assert len(lines) <= 2 + now / REPORT_INTERVAL
    counts = [1 if line.startswith("a ") else int(line.split()[0]) for line in lines]
    assert sum(counts) == len(gaps)
