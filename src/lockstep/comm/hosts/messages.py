"""Messages between ranks on different hosts: send and receive.

For each rank on another host there are two streams of frames, one in each direction, and a thread
that reads the one that comes in. It always reads, so a frame never waits for the program:

    short message   header, data                       the send is complete; the data waits for
                                                       its receive
    long message    header           ──>
                                     <──  grant        when its receive is posted
                    grant, data      ──>               straight into the tensor

Messages match by (source, tag) in the order of sending, receives in the order of posting. A receive
from any rank is also posted to the native group of the host; the first message that comes takes it
there or here, never twice.

The threads begin with the first message to or from a rank of another host, sent or received.
"""

from __future__ import annotations

import queue
import struct
import threading
import weakref
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from typing import Any

import torch

from lockstep.comm import native_module
from lockstep.comm.hosts.group import HostGroup

__all__ = ["Mailbox"]

HEADER_TAG, BODY_TAG = 0x4C530020, 0x4C530021
SHORT_BYTES = 64 << 10
HEADER = struct.Struct("<BqQQ24s")  # kind, tag, number, bytes, dtype


class Kind(IntEnum):
    """The kind of a frame."""

    SHORT = 0  # a message, followed by its data
    LONG = 1  # a message whose data follows after a grant
    GRANT = 2  # the receive of message `number` is posted
    DATA = 3  # followed by the data of message `number`
    REFUSAL = 4  # message `number` does not fit its receive


@dataclass(eq=False)
class Posted:
    """A receive that waits for its message; `native` is its other half, if it is from any rank."""

    work: Any
    source: int | None
    tag: int
    native: Any = None


@dataclass(eq=False)
class Arrived:
    """A message that has arrived before its receive; `data` is None for a long message."""

    source: int
    tag: int
    number: int
    size: int
    dtype: str
    data: torch.Tensor | None
    work: Any = None  # of the receive that takes it while its data is being read
    is_complete: bool = True


@dataclass(eq=False)
class Frame:
    """A frame to send; `work` is finished when it is sent."""

    kind: Kind
    tag: int = 0
    number: int = 0
    size: int = 0
    dtype: str = ""
    body: torch.Tensor | None = None
    work: Any = None


class Mailbox:
    """The messages between one rank and the ranks of other hosts.

    Args:
        group: The group.
    """

    def __init__(self, group: HostGroup) -> None:
        self._group = group
        self._lock = threading.Lock()  # guards everything below
        self._outgoing: dict[int, queue.SimpleQueue[Frame | None]] = {}
        self._threads: list[threading.Thread] = []
        self._gone: dict[int, str] = {}  # ranks whose connection is closed, and why
        self._posted: list[Posted] = []
        self._arrived: list[Arrived] = []
        self._granted: dict[tuple[int, int], Any] = {}  # (source, number) -> work
        self._sending: dict[tuple[int, int], Frame] = {}  # (target, number) -> long message
        self._numbers = 0
        self._is_closed = False
        self._callbacks: Any = None

    # ---- calls ----

    def send(self, tensor: torch.Tensor, target: int, tag: int) -> Any:
        """Start to send a tensor; return a Work."""
        what = f"send to {self._group.describe(target)} (tag {tag})"
        work = self._new_work("send", tensor, what, target)
        body = work.buffer.reshape(-1).view(torch.uint8) if tensor.numel() else None
        size = tensor.nbytes
        with self._lock:
            self._start(target)
            if self._refuse_gone(work, what, target):
                return work
            self._numbers += 1
            frame = Frame(Kind.SHORT, tag, self._numbers, size, name_of(tensor.dtype), body, work)
            if size > SHORT_BYTES:
                self._sending[target, self._numbers] = frame
                frame = Frame(Kind.LONG, tag, self._numbers, size, name_of(tensor.dtype))
            self._outgoing[target].put(frame)
        return work

    def recv(self, tensor: torch.Tensor, source: int, tag: int) -> Any:
        """Start to receive a tensor from a rank; return a Work."""
        what = f"recv from {self._group.describe(source)} (tag {tag})"
        work = self._new_work("recv", tensor, what, source)
        with self._lock:
            self._start(source)
            if not self._take_arrived(work, source, tag) and not self._refuse_gone(
                work, what, source
            ):
                self._posted.append(Posted(work, source, tag))
        return work

    def recv_any(self, tensor: torch.Tensor, tag: int) -> Any:
        """Start to receive a tensor from any rank; return a Work."""
        group = self._group
        work = self._new_work("recvAnySource", tensor, f"recv from any rank (tag {tag})", None)
        others = [r for r in range(group.map.size) if group.map.host_of(r) != group.host]
        with self._lock:
            for source in others:
                self._start(source)
            if self._take_arrived(work, None, tag):
                return work
            posted = Posted(work, None, tag, group.local.recv_anysource([work.buffer], tag))
            self._posted.append(posted)
            self._threads.append(
                threading.Thread(target=self._wait_native, args=(posted,), daemon=True)
            )
            self._threads[-1].start()
        return work

    def close(self) -> None:
        """End the threads, after the connections have been closed."""
        with self._lock:
            self._is_closed = True
            for outgoing in self._outgoing.values():
                outgoing.put(None)
            threads, self._threads = self._threads, []
        for thread in threads:
            thread.join(5)
        if self._callbacks is not None:
            self._callbacks.stop()

    # ---- works ----

    def _new_work(self, op: str, tensor: torch.Tensor, what: str, peer: int | None) -> Any:
        group, native = self._group, native_module.load()
        if self._callbacks is None:
            self._callbacks = native.CallbackPool()

        def fail_late() -> None:
            reason = (
                f"{group.describe(group.rank)} timed out after {group.timeout:g} s in {what}: "
                "no such message was "
            ) + ("received there" if op == "send" else "sent")
            group.fail(reason)
            if (late := waiting()) is not None:
                late.finish(-1, self._group.sentence(what, reason))

        def interrupt() -> None:
            group.fail(f"{group.describe(group.rank)} was interrupted")

        if group.failure:
            raise RuntimeError(self._group.sentence(what, f"the group had failed: {group.failure}"))
        work = native.HostMessageWork(
            op, tensor, timedelta(seconds=group.timeout), interrupt, fail_late, self._callbacks
        )
        # Not the work itself: it keeps the function, and neither would ever be freed.
        waiting = weakref.ref(work)
        return work

    def _refuse_gone(self, work: Any, what: str, peer: int) -> bool:
        if peer not in self._gone:
            return False
        reason = self._gone[peer]
        # Not under the lock: a callback of the work may send.
        threading.Thread(
            target=work.finish, args=(-1, self._group.sentence(what, reason)), daemon=True
        ).start()
        return True

    # ---- matching, under the lock ----

    def _take_arrived(self, work: Any, source: int | None, tag: int) -> bool:
        """Give the first message that matches to a receive; return whether there is one."""
        for message in self._arrived:
            if message.work is None and message.tag == tag and source in (None, message.source):
                break
        else:
            return False
        if not message.is_complete:
            message.work = work  # the thread that reads it finishes the receive
            return True
        self._arrived.remove(message)
        self._deliver(message, work)
        return True

    def _deliver(self, message: Arrived, work: Any) -> None:
        """Give a message to its receive."""
        buffer = work.buffer
        if (buffer.nbytes, name_of(buffer.dtype)) != (message.size, message.dtype):
            self._refuse(message, work)
        elif message.data is not None or not message.size:
            if message.size:
                assert message.data is not None
                buffer.reshape(-1).view(torch.uint8).copy_(message.data)
            work.finish(message.source)
        else:
            self._granted[message.source, message.number] = work
            self._outgoing[message.source].put(Frame(Kind.GRANT, number=message.number))

    def _refuse(self, message: Arrived, work: Any) -> None:
        buffer = work.buffer
        peer = self._group.describe(message.source)
        reason = (
            f"{peer} sent {message.size} bytes of {message.dtype}, but the "
            f"tensor has {buffer.nbytes} bytes of {name_of(buffer.dtype)}"
        )
        work.finish(
            message.source, self._group.sentence(f"recv from {peer} (tag {message.tag})", reason)
        )
        if message.data is None and message.size:
            self._outgoing[message.source].put(Frame(Kind.REFUSAL, number=message.number))

    def _match(self, message: Arrived) -> Any:
        """Remove and return the first receive that a message matches, or None."""
        for posted in list(self._posted):
            if posted.tag != message.tag or posted.source not in (None, message.source):
                continue
            self._posted.remove(posted)
            if posted.native is None or posted.native.cancel():
                return posted.work
        return None

    # ---- threads ----

    def _start(self, peer: int) -> None:
        """Start the threads for a rank."""
        if peer in self._outgoing:
            return
        outgoing = self._outgoing[peer] = queue.SimpleQueue()
        for target, arguments in (
            (self._send_frames, (peer, outgoing)), (self._read_frames, (peer,)),
        ):  # fmt: skip
            thread = threading.Thread(
                target=target, args=arguments, name=f"lockstep-mail-{peer}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def _send_frames(self, target: int, outgoing: queue.SimpleQueue[Frame | None]) -> None:
        gloo = self._group.between
        while (frame := outgoing.get()) is not None:
            header = HEADER.pack(
                frame.kind, frame.tag, frame.number, frame.size, frame.dtype.encode()
            )
            packed = torch.frombuffer(bytearray(header), dtype=torch.uint8)
            try:
                sends = [gloo.send_raw(packed, target, HEADER_TAG)]
                if frame.body is not None:
                    sends.append(gloo.send_raw(frame.body, target, BODY_TAG))
                for send in sends:
                    send.wait_forever()
            except RuntimeError as error:
                self._note_gone(target, str(error), frame.work)
                return
            if frame.work is not None:
                frame.work.finish(-1)

    def _read_frames(self, source: int) -> None:
        link = self._group.between
        header = torch.empty(HEADER.size, dtype=torch.uint8)
        try:
            while True:
                link.recv_raw(header, source, HEADER_TAG).wait_forever()
                kind, tag, number, size, dtype = HEADER.unpack(header.numpy().tobytes())
                self._handle(source, Kind(kind), tag, number, size, dtype.rstrip(b"\0").decode())
        except RuntimeError as error:
            self._note_gone(source, str(error), None)

    def _handle(
        self, source: int, kind: Kind, tag: int, number: int, size: int, dtype: str
    ) -> None:
        link = self._group.between
        if kind == Kind.SHORT:
            message = Arrived(source, tag, number, size, dtype, None, is_complete=False)
            with self._lock:
                message.work = self._match(message)
                if message.work is None:
                    self._arrived.append(message)
            if size:
                message.data = torch.empty(size, dtype=torch.uint8)
                link.recv_raw(message.data, source, BODY_TAG).wait_forever()
            with self._lock:
                message.is_complete = True
                if message.work is not None:
                    if message in self._arrived:
                        self._arrived.remove(message)
                    self._deliver(message, message.work)
        elif kind == Kind.LONG:
            message = Arrived(source, tag, number, size, dtype, None)
            with self._lock:
                work = self._match(message)
                if work is None:
                    self._arrived.append(message)
                else:
                    self._deliver(message, work)
        elif kind == Kind.GRANT:
            with self._lock:
                frame = self._sending.pop((source, number))
                frame.kind = Kind.DATA
                self._outgoing[source].put(frame)
        elif kind == Kind.REFUSAL:
            with self._lock:
                frame = self._sending.pop((source, number))
            peer = self._group.describe(source)
            what = f"send to {peer} (tag {frame.tag})"
            frame.work.finish(
                -1, self._group.sentence(what, f"{peer} receives it into another tensor")
            )
        else:
            with self._lock:
                work = self._granted.pop((source, number))
            link.recv_raw(
                work.buffer.reshape(-1).view(torch.uint8), source, BODY_TAG
            ).wait_forever()
            work.finish(source)

    def _wait_native(self, posted: Posted) -> None:
        """Finish a receive from any rank if a rank of this host sends the message."""
        group = self._group
        error, source = "", -1
        try:
            posted.native.wait()
            source = group.map.hosts[group.host][posted.native._source_rank()]
        except RuntimeError as raised:
            error = str(raised)
        with self._lock:
            if posted not in self._posted and error:
                return  # it was cancelled: a message of another host has taken the receive
            if posted in self._posted:
                self._posted.remove(posted)
        posted.work.finish(source, error and str(group.explain_local(error)))

    def _note_gone(self, peer: int, error: str, work: Any) -> None:
        """Fail what waits for a rank whose connection is closed; without any, do nothing."""
        group = self._group
        with self._lock:
            if self._is_closed or peer in self._gone:
                waiting = [work] if work is not None else []
            else:
                self._gone[peer] = ""
                waiting = [work] if work is not None else []
                waiting += [each.work for each in self._posted if each.source == peer]
                self._posted = [each for each in self._posted if each.source != peer]
                waiting += [found for (rank, _), found in self._granted.items() if rank == peer]
                waiting += [
                    frame.work for (rank, _), frame in self._sending.items() if rank == peer
                ]
                if not self._others_left():
                    taken = [each for each in self._posted if each.native.cancel()]
                    self._posted = [each for each in self._posted if each not in taken]
                    waiting += [each.work for each in taken]
        if self._is_closed:
            return
        if waiting:
            failure = str(group.explain(peer, error))
        else:
            failure = f"{group.describe(peer)} has left the group"
        with self._lock:
            self._gone[peer] = failure.rpartition(" failed: ")[2]
        for each in waiting:
            each.finish(-1, failure)

    def _others_left(self) -> bool:
        return any(peer not in self._gone for peer in self._outgoing)


def name_of(dtype: torch.dtype) -> str:
    """Return "float32"."""
    return str(dtype).removeprefix("torch.")
