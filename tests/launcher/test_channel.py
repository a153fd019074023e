"""Messages with descriptors between two processes of one host."""

from __future__ import annotations

import os
import socket
import threading

import pytest

from lockstep.launcher.channel import open_pair, read_memfd, write_memfd


def test_messages_keep_order_size_and_descriptors():
    left, right = open_pair()
    reading, writing = os.pipe()
    large = {"environ": {"A": "ü\udc80" * 200_000}}
    sender = threading.Thread(target=lambda: [left.send({"n": 1}, [writing]), left.send(large)])
    sender.start()
    message, (descriptor,) = right.receive()
    assert message == {"n": 1}
    os.write(descriptor, b"through")
    assert os.read(reading, 10) == b"through"
    assert right.receive() == (large, [])
    sender.join()
    left.close()
    assert right.receive() is None
    right.close()
    for each in (reading, writing, descriptor):
        os.close(each)


def test_a_connection_that_closes_within_a_message_counts_as_closed():
    left, right = open_pair()
    os.write(left.fileno(), b"\x10\x00\x00\x00{")
    left.close()
    assert right.receive() is None
    right.close()


def test_an_end_that_stopped_waiting_receives_what_was_sent_alone():
    left, right = open_pair()
    left.send({"n": 1})
    os.write(left.fileno(), b"\x10\x00\x00\x00{")  # and another process holds the other end
    right.stop_waiting()
    assert right.receive() == ({"n": 1}, [])
    assert right.receive() is None
    for end in (left, right):
        end.close()


def test_each_receiver_reads_a_memfd_completely():
    descriptor = write_memfd(b"x" * 100_000)
    copy = os.dup(descriptor)
    assert read_memfd(descriptor) == read_memfd(copy) == b"x" * 100_000


def test_an_interrupt_does_not_leave_a_part_of_a_message(monkeypatch):
    class Interrupt(Exception):
        """Stands for what a signal handler raises."""

    def interrupt(*_) -> None:
        raise Interrupt

    left, right = open_pair()
    monkeypatch.setattr(socket.socket, "sendall", interrupt)
    left.send({"n": 1})  # in one system call, without sendall
    assert right.receive() == ({"n": 1}, [])
    send_fds = socket.send_fds
    monkeypatch.setattr(
        socket, "send_fds", lambda end, parts, fds: send_fds(end, [parts[0][:7]], fds)
    )
    with pytest.raises(Interrupt):
        left.send({"n": 2})  # as if it were larger than the socket's buffer
    assert right.receive() is None
    for end in (left, right):
        end.close()
