"""The current activity of this process, published where its launcher can read it.

The launcher of a rank gives it one page of memory, which the rank maps. The rank writes its
current operation; the launcher can read the page at any time, without signals or ptrace, even
while the rank is stopped or runs C code. In a process without a launcher the page is private
memory.

       0   entry    | number | since | state | length | text | number |       published by Python;
    1024   entry    the same; the two are written in turn                     micro-batches below
    2048   last collective call or message of the backend "lockstep"          csrc/core/activity.h
    2304   what a thread has been waiting for since it fell asleep
    4088   the number of the last entry

The numbers at both ends of an entry differ while it is being written. A reader then uses the
other entry, so it need not wait for a process that was stopped at that moment. Publishing costs
about a microsecond and makes no system call.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

__all__ = [
    "ALL_OTHERS",
    "PAGE_BYTES",
    "Activity",
    "CallKind",
    "State",
    "Waited",
    "Waiting",
    "follow_page",
    "publish",
    "publish_microbatch",
    "read_activity",
    "read_own_activity",
    "use_page",
]

PAGE_BYTES = 4096
ENTRY_BYTES = 1024
TEXT_BYTES = 992
ENTRY = struct.Struct(f"<QqII{TEXT_BYTES}sQ")
LAST_CALL = struct.Struct("<IiqQQ16s48s")
LAST_CALL_AT = 2048
CURRENT_WAIT = struct.Struct("<IIqiI512s")
CURRENT_WAIT_AT = 2304
ALL_OTHERS = -1  # the smallest number that says who is waited for
NUMBER_AT = 4088
ATTEMPTS = 4  # at a consistent copy of a page that is being written


class State(IntEnum):
    """The kind of a published text."""

    COMPUTING = 0
    WAITING = 1  # for other ranks
    FINISHED = 2


class CallKind(IntEnum):
    """The kind of a call of the backend "lockstep" in which a thread waits."""

    OTHER = 0  # or not known
    COLLECTIVE = 1
    RECEIVE = 2
    SEND = 3


@dataclass(frozen=True)
class Activity:
    """The last publications of a process; times are in `time.monotonic()` seconds.

    Attributes:
        number: The number of texts that Python has published.
        text: The last text, such as "all_gather in step 12 of trainer 0"; "" for none.
        state: The kind of the text.
        since: The time at which the text was published.
        call: The last call of the backend "lockstep" that began; "" for none.
        call_number: A number that changes with every such call.
        call_begun: The time at which `call` began.
        wait: The call in which a thread has been sleeping since `wait_since`; "" for none.
        wait_since: The time at which that wait began; 0 for none.
        is_main_thread_waiting: Whether the sleeping thread is the main thread.
        awaited: The rank that the thread waits for, `ALL_OTHERS`, or None if it does not say.
        kind: The `CallKind` of `wait`.
    """

    number: int = 0
    text: str = ""
    state: State = State.FINISHED
    since: float = 0.0
    call: str = ""
    call_number: int = 0
    call_begun: float = 0.0
    wait: str = ""
    wait_since: float = 0.0
    is_main_thread_waiting: bool = False
    awaited: int | None = None
    kind: int = CallKind.OTHER

    @property
    def changes(self) -> tuple[int, int]:
        """A value that changes whenever a new operation begins."""
        return self.number, self.call_number

    @property
    def is_waiting(self) -> bool:
        """Whether the main thread waits for other ranks."""
        return self.state is State.WAITING or self.is_main_thread_waiting

    @property
    def operation(self) -> str:
        """The call in which the process waits, or else its last operation; "" for none."""
        if self.is_main_thread_waiting:
            wait = self.wait or "an asynchronous call"
            return f"{wait}, {self.text}" if self.state is State.WAITING else wait
        if self.text and (self.state is not State.FINISHED or self.since >= self.call_begun):
            return self.text
        return self.call

    @property
    def operation_since(self) -> float:
        """The time at which `operation` began; 0 if the process has published nothing."""
        if self.state is State.WAITING:
            return self.since
        if self.is_main_thread_waiting:
            return self.wait_since
        return max(self.since, self.call_begun)


class _Page:
    """The page that this process writes, and the number of its last entry on it."""

    def __init__(self, memory: mmap.mmap) -> None:
        self.memory = memory
        self.number = ctypes.c_uint64.from_buffer(memory, NUMBER_AT)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))


_page = _Page(mmap.mmap(-1, PAGE_BYTES))
_followers: list[Callable[[int], None]] = []


def use_page(descriptor: int) -> None:
    """Publish from now on to the open file `descriptor`, which has `PAGE_BYTES` bytes."""
    _replace_page(mmap.mmap(descriptor, PAGE_BYTES))


def follow_page(follower: Callable[[int], None]) -> None:
    """Call `follower` with the address of the page, now and whenever it is replaced."""
    _followers.append(follower)
    follower(_page.address)


def _replace_page(memory: mmap.mmap) -> None:
    global _page
    _page = _Page(memory)
    for follower in _followers:
        follower(_page.address)


# A forked child must not write into the page of its parent.
os.register_at_fork(after_in_child=lambda: _replace_page(mmap.mmap(-1, PAGE_BYTES)))


def publish(text: str, state: int = State.COMPUTING) -> None:
    """Publish what this process begins: a computation, or a wait of its main thread."""
    page = _page
    number = page.number.value + 1
    page.number.value = number
    now = time.monotonic_ns()
    offset = (number & 1) * ENTRY_BYTES
    body = text.encode(errors="replace")
    ENTRY.pack_into(page.memory, offset, number, now, state, len(body), body, number)


def publish_microbatch(step: int, microbatch: int) -> None:
    """Publish that a micro-batch begins, as the native module does.

    Args:
        step: The number of the step; -1 - n in batch n of an evaluation.
        microbatch: The number of the micro-batch.
    """
    about = f"step {step}" if step >= 0 else f"evaluation {-1 - step}"
    publish(f"micro-batch {microbatch} of {about}")


class Waited:
    """The time that this process has spent in `Waiting`.

    Attributes:
        seconds: The sum; read it twice, and take the difference.
    """

    seconds = 0.0


class Waiting:
    """A context in which the main thread waits for other ranks."""

    __slots__ = ("_begun", "_text")

    def __init__(self, text: str) -> None:
        self._text = text
        self._begun = 0.0

    def __enter__(self) -> None:
        """Publish that the wait begins."""
        self._begun = time.perf_counter()
        publish(self._text, State.WAITING)

    def __exit__(self, *error: object) -> None:
        """Publish that the wait has ended."""
        publish(self._text, State.FINISHED)
        Waited.seconds += time.perf_counter() - self._begun


def read_own_activity() -> Activity:
    """Return the activity of this process."""
    return _read(lambda: _page.memory[:])


def read_activity(descriptor: int) -> Activity:
    """Return the activity of the process that publishes to the file `descriptor`."""
    return _read(lambda: os.pread(descriptor, PAGE_BYTES, 0))


def _read(copy: Callable[[], bytes]) -> Activity:
    """Parse a copy of a page; copy again if the page changes meanwhile."""
    page = copy()
    for _ in range(ATTEMPTS):
        again = copy()
        if again == page:
            break
        page = again
    return parse_page(page)


def parse_page(page: bytes) -> Activity:
    """Return the activity on a page, without entries that are being written."""
    if len(page) < PAGE_BYTES:
        return Activity()
    number, text, state, since = max(_parse_entry(page, 0), _parse_entry(page, ENTRY_BYTES))
    call_sequence, peer, begun, call, count, op, group = LAST_CALL.unpack_from(page, LAST_CALL_AT)
    sequence, in_main, wait_since, awaited, kind, wait = CURRENT_WAIT.unpack_from(
        page, CURRENT_WAIT_AT
    )
    has_call = call_sequence and call_sequence % 2 == 0
    waits = sequence % 2 == 0 and wait_since > 0
    return Activity(
        number=number,
        text=text,
        state=state,
        since=since / 1e9,
        call=_describe_call(op, peer, call, count, group) if has_call else "",
        call_number=call_sequence,
        call_begun=begun / 1e9 if has_call else 0.0,
        wait=_decode(wait) if waits else "",
        wait_since=wait_since / 1e9 if waits else 0.0,
        is_main_thread_waiting=waits and bool(in_main),
        awaited=awaited if waits and awaited >= ALL_OTHERS else None,
        kind=kind,
    )


def _parse_entry(page: bytes, offset: int) -> tuple[int, str, State, int]:
    """Return the number, text, state and time of an entry; the number is 0 if incomplete."""
    number, since, state, length, text, number_again = ENTRY.unpack_from(page, offset)
    if number != number_again or not number or state not in list(State):
        return 0, "", State.FINISHED, 0
    return number, text[:length].decode(errors="replace"), State(state), since


def _describe_call(op: bytes, peer: int, number: int, count: int, group: bytes) -> str:
    name = _decode(op)
    elements = f"{count} element" + ("" if count == 1 else "s")
    if number:
        what = f" ({elements})" if count else ""
        return f"{name}{what}, call {number} of group {_decode(group)}"
    other = f"rank {peer}" if peer >= 0 else "any rank"
    return f"{name} {'to' if name == 'send' else 'from'} {other} ({elements})"


def _decode(text: bytes) -> str:
    return text.partition(b"\0")[0].decode(errors="replace")
