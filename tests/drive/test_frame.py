"""Frames: what is sent arrives, and what was not sent is noticed."""

from __future__ import annotations

import json
import socket
import threading

import pytest

from lockstep.drive.frame import CHUNK, LENGTH, LONGEST_HEADER, PROOF, Forged, Frame, Wire


@pytest.fixture
def wires():
    left, right = socket.socketpair()
    with left, right:
        for end in (left, right):
            end.settimeout(10)
        yield Wire(left, b"one", b"other"), Wire(right, b"other", b"one")


def test_frames_arrive_whole_and_in_order(wires):
    here, there = wires
    large = bytes(range(256)) * (3 * CHUNK // 256)
    sent = [
        Frame({"kind": "a", "number": 1}),
        Frame({"kind": "b"}, [memoryview(b"pickle"), memoryview(large), memoryview(b"")]),
        Frame({"kind": "c"}),
    ]
    sender = threading.Thread(target=lambda: [here.send(frame) for frame in sent])
    sender.start()
    received = [there.receive() for _ in sent]
    sender.join()
    assert [frame.header for frame in received] == [frame.header for frame in sent]
    assert [bytes(piece) for piece in received[1].pieces] == [b"pickle", large, b""]


def test_pieces_begin_on_a_64_byte_boundary(wires):
    here, there = wires
    here.send(Frame({"kind": "a"}, [memoryview(b"x" * size) for size in (1, 7, 100)]))
    numpy = pytest.importorskip("numpy")
    for piece in there.receive().pieces:
        assert numpy.frombuffer(piece, numpy.uint8).ctypes.data % 64 == 0


def recorded(frame: Frame, number: int = 0) -> bytes:
    """Return the bytes of one frame, the `number`th of its connection."""
    left, right = socket.socketpair()
    with left, right:
        wire = Wire(left, b"one", b"other")
        for _ in range(number):
            wire.send(Frame({"kind": "before"}))
        if number:
            right.recv(1 << 16)
        wire.send(frame)
        return right.recv(1 << 16)


FRAME = Frame({"kind": "a"}, [memoryview(b"piece")])


@pytest.mark.parametrize("position", [4, 4 + PROOF, -PROOF - 1, -1])
def test_a_changed_byte_is_noticed(wires, position):
    changed = bytearray(recorded(FRAME))
    changed[position] ^= 1
    wires[0].end.sendall(changed)
    with pytest.raises(Forged):
        wires[1].receive()


def test_a_repeated_frame_is_noticed(wires):
    wires[0].end.sendall(recorded(FRAME) * 2)
    assert wires[1].receive().kind == "a"
    with pytest.raises(Forged):
        wires[1].receive()


def test_a_frame_that_was_left_out_is_noticed(wires):
    wires[0].end.sendall(recorded(FRAME, 1))
    with pytest.raises(Forged):
        wires[1].receive()


def test_a_frame_of_the_other_direction_is_noticed(wires):
    wires[0].send(FRAME)
    wires[0].end.sendall(wires[1].end.recv(1 << 16))
    reflected = Wire(wires[1].end, b"one", b"other")
    with pytest.raises(Forged):
        reflected.receive()


def test_a_long_header_takes_no_memory(wires):
    wires[0].end.sendall(LENGTH.pack(LONGEST_HEADER + 1) + b"x" * 100)
    with pytest.raises(Forged, match="a header of"):
        wires[1].receive()


def test_sizes_are_not_believed_without_their_proof(wires):
    header = json.dumps({"kind": "a", "sizes": [1 << 40]}).encode()
    wires[0].end.sendall(LENGTH.pack(len(header)) + b"?" * PROOF + header)
    with pytest.raises(Forged, match="without its proof"):
        wires[1].receive()


def test_an_end_within_a_frame_is_an_end(wires):
    wires[0].end.sendall(recorded(FRAME)[:-3])
    wires[0].end.shutdown(socket.SHUT_WR)
    with pytest.raises(EOFError):
        wires[1].receive()
