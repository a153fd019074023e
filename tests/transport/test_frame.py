"""Frames arrive as they were sent, and any change is detected."""

from __future__ import annotations

import itertools
import json
import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.transport import frame
from lockstep.transport.frame import (
    CHUNK,
    LENGTH,
    MAX_HEADER,
    PROOF,
    ForgedFrame,
    Frame,
    FrameSocket,
)


@pytest.fixture
def sockets():
    left, right = socket.socketpair()
    with left, right:
        for end in (left, right):
            end.settimeout(10)
        yield FrameSocket(left, b"one", b"other"), FrameSocket(right, b"other", b"one")


def test_frames_arrive_whole_and_in_order(sockets):
    here, there = sockets
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


def test_pieces_begin_on_a_64_byte_boundary(sockets):
    here, there = sockets
    here.send(Frame({"kind": "a"}, [memoryview(b"x" * size) for size in (1, 7, 100)]))
    numpy = pytest.importorskip("numpy")
    for piece in there.receive().pieces:
        assert numpy.frombuffer(piece, numpy.uint8).ctypes.data % 64 == 0


def recorded(frame: Frame, number: int = 0) -> bytes:
    """Return the bytes of one frame, the `number`th of its connection."""
    left, right = socket.socketpair()
    with left, right:
        frames_socket = FrameSocket(left, b"one", b"other")
        for _ in range(number):
            frames_socket.send(Frame({"kind": "before"}))
        if number:
            right.recv(1 << 16)
        frames_socket.send(frame)
        return right.recv(1 << 16)


def received(content: bytes) -> tuple[list[tuple[dict, list[bytes]]], type[Exception]]:
    """Return what an end takes for frames out of `content`, and how it stops."""
    left, right = socket.socketpair()
    with left, right:
        right.settimeout(10)
        left.sendall(content)
        left.shutdown(socket.SHUT_WR)
        frames_socket, frames = FrameSocket(right, b"other", b"one"), []
        try:
            while True:
                frames.append(plain(frames_socket.receive()))
        except (ForgedFrame, EOFError) as error:
            return frames, type(error)


def plain(frame: Frame) -> tuple[dict, list[bytes]]:
    return frame.header, [bytes(piece) for piece in frame.pieces]


FRAME = Frame({"kind": "a"}, [memoryview(b"piece")])


def test_every_changed_bit_is_detected():
    content = recorded(FRAME)
    for position in range(8 * len(content)):
        changed = bytearray(content)
        changed[position // 8] ^= 1 << position % 8
        assert received(bytes(changed)) == ([], ForgedFrame), f"bit {position}"


@pytest.mark.parametrize("pieces", [[], [memoryview(b"piece")]])
def test_a_repeated_frame_is_detected(pieces):
    frame = Frame({"kind": "a"}, pieces)
    assert received(recorded(frame) * 2) == ([plain(frame)], ForgedFrame)


def test_pieces_of_another_frame_are_detected():
    frames = [Frame({"kind": "a"}, [memoryview(content)]) for content in (b"one", b"two")]
    first, second = recorded(frames[0], 0), recorded(frames[1], 1)
    tail = len(b"one") + PROOF
    assert received(first + second) == ([plain(frame) for frame in frames], EOFError)
    assert received(first + second[:-tail] + first[-tail:]) == ([plain(frames[0])], ForgedFrame)
    assert received(first[:-tail] + second[-tail:]) == ([], ForgedFrame)


def test_a_missing_frame_is_detected(sockets):
    sockets[0].end.sendall(recorded(FRAME, 1))
    with pytest.raises(ForgedFrame):
        sockets[1].receive()


def test_a_frame_of_the_other_direction_is_detected(sockets):
    sockets[0].send(FRAME)
    sockets[0].end.sendall(sockets[1].end.recv(1 << 16))
    reflected = FrameSocket(sockets[1].end, b"one", b"other")
    with pytest.raises(ForgedFrame):
        reflected.receive()


def test_a_header_is_not_accepted_as_a_piece_of_the_same_size():
    """A header and its proof, sent once more in place of a piece and its proof."""
    size = next(n for n in range(100) if len(json.dumps({"kind": "a", "sizes": [n]})) == n)
    content = recorded(Frame({"kind": "a"}, [memoryview(bytes(size))]))
    start = content.index(b'{"kind"')
    header = content[start : start + size]
    proofs = [content[start - PROOF : start], content[start + size : start + size + PROOF]]
    for proof in proofs:
        forged = content[: -size - PROOF] + header + proof
        assert len(forged) == len(content)
        assert received(forged) == ([], ForgedFrame)


def test_no_memory_is_allocated_for_a_header_that_is_too_long(sockets):
    sockets[0].end.sendall(LENGTH.pack(MAX_HEADER + 1) + b"x" * 100)
    with pytest.raises(ForgedFrame, match="a length without its proof"):
        sockets[1].receive()


def test_sizes_without_a_proof_are_rejected(sockets):
    header = json.dumps({"kind": "a", "sizes": [1 << 40]}).encode()
    sockets[0].end.sendall(LENGTH.pack(len(header)) + b"?" * PROOF + header)
    with pytest.raises(ForgedFrame, match="without its proof"):
        sockets[1].receive()


def test_no_memory_is_allocated_for_a_size_before_its_proof(sockets, monkeypatch):
    allocated = []
    receive = frame.receive_exactly
    monkeypatch.setattr(
        frame, "receive_exactly", lambda end, size: allocated.append(size) or receive(end, size)
    )
    sockets[0].end.sendall(LENGTH.pack(MAX_HEADER) + b"?" * 1000)
    with pytest.raises(ForgedFrame):
        sockets[1].receive()
    assert sum(allocated) <= LENGTH.size + PROOF


def test_a_connection_that_closes_within_a_frame_counts_as_closed(sockets):
    sockets[0].end.sendall(recorded(FRAME)[:-3])
    sockets[0].end.shutdown(socket.SHUT_WR)
    with pytest.raises(EOFError):
        sockets[1].receive()


def test_an_end_that_sends_single_bytes_times_out(monkeypatch):
    class Dripping:
        now = 0.0

        def gettimeout(self) -> float:
            return 10.0

        def recv_into(self, view) -> int:
            self.now += 9.0
            return 1

    end = Dripping()
    monkeypatch.setattr(frame.time, "monotonic", lambda: end.now)
    with pytest.raises(TimeoutError):
        frame.receive_exactly(end, 100)
    assert end.now == 18.0
    assert len(frame.receive_exactly(end, 1)) == 1


FRAMES = st.lists(
    st.builds(
        Frame,
        st.fixed_dictionaries({"kind": st.sampled_from("ab"), "number": st.integers(0, 99)}),
        st.lists(st.binary(max_size=40).map(memoryview), max_size=3),
    ),
    min_size=1,
    max_size=4,
)


def spoken(frames: list[Frame], sending: bytes) -> tuple[bytes, list[int], list[int]]:
    """Return the bytes of `frames`, and where each part and each whole frame begins."""
    left, right = socket.socketpair()
    with left, right:
        frames_socket = FrameSocket(left, sending, b"")
        for each in frames:
            frames_socket.send(each)
        content = right.recv(1 << 16)
    starts, wholes = [0], [0]
    for each in frames:
        sizes = [piece.nbytes for piece in each.pieces]
        header = len(json.dumps({**each.header, "sizes": sizes}))
        for size in (LENGTH.size, PROOF, header, PROOF, *sizes, PROOF if sizes else 0):
            starts.append(starts[-1] + size)
        wholes.append(starts[-1])
    assert starts[-1] == len(content)
    return content, starts, wholes


@given(FRAMES, FRAMES, st.data())
def test_only_what_was_sent_is_received_and_only_in_order(frames, others, data):
    """Change, drop, move, repeat or insert any stretch: frames before it arrive, nothing else."""
    own = spoken(frames, b"one")
    content = own[0]
    sources = {
        "this direction": own,
        "the other direction": spoken(others, b"other"),
        "another connection": spoken(others, b"three"),
    }

    def stretch(of: tuple[bytes, list[int], list[int]]) -> tuple[int, int]:
        aligned = st.sampled_from(of[1]) | st.sampled_from(of[2])
        positions = aligned | st.integers(0, len(of[0]))
        low, high = sorted((data.draw(positions), data.draw(positions)))
        return low, high

    low, high = stretch(own)
    source = sources[data.draw(st.sampled_from(sorted(sources)))]
    first, last = stretch(source)
    how = data.draw(st.sampled_from(["replace", "insert", "drop", "flip", "exchange"]))
    put = source[0][first:last]
    if how == "exchange":  # two stretches of this direction change places
        cuts = sorted({low, high, *stretch(own)})
        middle = [content[a:b] for a, b in itertools.pairwise(cuts)]
        changed = content[: cuts[0]] + b"".join(reversed(middle)) + content[cuts[-1] :]
    elif how == "flip":
        flipped = bytes(byte ^ data.draw(st.integers(1, 255)) for byte in content[low : low + 1])
        changed = content[:low] + flipped + content[low + 1 :]
    else:
        kept = low if how == "insert" else high
        changed = content[:low] + (b"" if how == "drop" else put) + content[kept:]
    arrived, end = received(changed)
    sent = [plain(each) for each in frames]
    assert arrived == sent[: len(arrived)]
    assert len(arrived) < len(sent) or changed.startswith(content)
    assert end is ForgedFrame or end is EOFError
