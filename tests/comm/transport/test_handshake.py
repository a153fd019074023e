"""The handshake accepts processes with the secret and the same purpose, and no others."""

from __future__ import annotations

from hypothesis import assume, given
from hypothesis import strategies as st

from lockstep.comm.transport.handshake import GREETING, NONCE, Keys, Refused, Status, answer, call

SECRET = b"k" * 32
OTHER = b"o" * 32
OPENING = len(GREETING) + 96  # bytes of the first message


class End:
    """One end of a handshake, to which messages are carried by hand."""

    def __init__(self, steps) -> None:
        self._steps = steps
        self._step = next(steps)
        self._arrived = b""
        self.first = self._step.send
        self.outcome: Keys | Refused | None = None

    def take(self, message: bytes) -> bytes:
        """Take what has arrived; return what is said to it."""
        self._arrived += message
        said = b""
        while self.outcome is None and len(self._arrived) >= self._step.size:
            content = self._arrived[: self._step.size]
            self._arrived = self._arrived[self._step.size :]
            try:
                self._step = self._steps.send(content)
            except Refused as error:
                self.outcome = error
                return b"" if error.status is None else bytes([error.status])
            said += self._step.send
            self.outcome = self._step.keys
        return said


def met(caller, listener, carry=lambda number, message: message):
    """Return how both ends fare, and what was said; `carry` may change each message."""
    ends = [End(caller), End(listener)]
    said = []
    message = ends[0].first
    while message:
        said.append(message)
        message = ends[len(said) % 2].take(carry(len(said) - 1, message))
    return ends[0].outcome, ends[1].outcome, said


def store():
    return call(SECRET, "store"), answer(SECRET, "store")


def driver():
    return call(SECRET, "driver"), answer(SECRET, "driver")


def test_both_ends_agree_on_a_key_for_each_direction():
    here, there, said = met(*store())
    assert here == there[::-1]
    again, _, _ = met(*store())
    assert len({*here, *again}) == 4
    assert [len(message) for message in said] == [OPENING, 33, 32, 33]


def test_another_secret_is_refused():
    here, there, _ = met(call(OTHER, "store"), answer(SECRET, "store"))
    assert str(here) == str(there) == "it holds another key"


def test_another_purpose_is_refused():
    here, there, _ = met(call(SECRET, "store"), answer(SECRET, "driver"))
    assert str(here) == "it is another process than the one that was called"
    assert str(there) == "it called another process"


def test_every_changed_bit_is_refused():
    _, _, said = met(*store())
    for number, message in enumerate(said):
        for bit in range(8 * len(message)):

            def flip(which: int, content: bytes, number: int = number, bit: int = bit) -> bytes:
                changed = bytearray(content)
                if which == number:
                    changed[bit // 8] ^= 1 << bit % 8
                return bytes(changed)

            here, there, _ = met(*store(), flip)
            assert not isinstance(here, tuple), (number, bit)
            # The listener has agreed before it sends the last message, and hears nothing more.
            assert isinstance(there, tuple) == (number == 3), (number, bit)


@given(st.data())
def test_composed_recorded_messages_are_refused(data):
    """Any stretch of earlier handshakes, of both ends, in place of any stretch of this one."""
    recorded = [b"".join(met(*make())[2]) for make in (store, driver)]
    victim = data.draw(st.integers(0, 3))
    changes = []

    def splice(number: int, message: bytes) -> bytes:
        if number != victim:
            return message
        source = data.draw(st.sampled_from([*recorded, message]))
        sizes = st.sampled_from([1, 16, 32, 33, len(message)]) | st.integers(1, len(message))
        size = min(data.draw(sizes), len(source))
        into = data.draw(st.integers(0, len(message) - min(size, len(message))))
        out = data.draw(st.integers(0, len(source) - size))
        changed = message[:into] + source[out : out + size] + message[into + size :]
        changes.append(changed != message)
        return changed[: len(message)]

    here, there, _ = met(*store(), splice)
    assume(any(changes))
    assert not isinstance(here, tuple)
    assert victim == 3 or not isinstance(there, tuple)


def test_a_repeated_caller_is_refused():
    _, _, said = met(*store())
    listener = End(answer(SECRET, "store"))
    assert len(listener.take(said[0])) == 1 + NONCE
    assert listener.take(said[2]) == b""
    assert str(listener.outcome) == "it repeated messages of another connection"


def test_reflected_messages_are_refused():
    said = []

    def reflect(number: int, message: bytes) -> bytes:
        said.append(message)
        return message if number != 3 else message[:1] + said[2]

    here, _, _ = met(*store(), reflect)
    assert str(here) == "it does not prove that it holds the key"


@given(st.binary(min_size=len(GREETING), max_size=300))
def test_garbage_is_refused_by_its_first_bytes(said):
    assume(not said.startswith(GREETING))
    listener = End(answer(SECRET, "store"))
    assert listener.take(said) == b""
    assert str(listener.outcome) == "it is not a process of this version of Lockstep"


@given(st.binary(min_size=96, max_size=300))
def test_garbage_after_a_greeting_is_refused(said):
    listener = End(answer(SECRET, "store"))
    assert listener.take(GREETING + said) == bytes([Status.OTHER_KEY])
    assert isinstance(listener.outcome, Refused)


@given(st.binary(min_size=1, max_size=300))
def test_a_listener_without_a_proof_is_refused(said):
    caller = End(call(SECRET, "store"))
    while caller.outcome is None:
        caller.take(said)
    assert isinstance(caller.outcome, Refused)
    assert str(caller.outcome).isascii()
