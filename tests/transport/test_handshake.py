"""The handshake accepts processes with the key, under their own identity, and no others."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lockstep.transport import handshake
from lockstep.transport.credentials import UNKNOWN_SESSION, Credentials, Identity, Role
from lockstep.transport.handshake import GREETING, NONCE, Agreement, Refused, Status, answer, call

KEY, OTHER_KEY = b"k" * 32, b"o" * 32
SESSION, LATER = b"s" * 16, b"l" * 16
DRIVER, AGENT = Identity(Role.DRIVER), Identity(Role.NODE_AGENT)
FIRST, SECOND = Identity(Role.WORKER, 0, 0), Identity(Role.WORKER, 1, 0)


class End:
    """One end of a handshake, to which messages are carried by hand."""

    def __init__(self, steps) -> None:
        self._steps = steps
        self._step = next(steps)
        self._arrived = b""
        self.first = self._step.send
        self.outcome: Agreement | Refused | None = None

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
            self.outcome = self._step.agreement
        return said


def met(caller, listener, carry=lambda number, message: message):
    """Return how both ends fare, and what was said; `carry` may change each message."""
    ends, said = [End(caller), End(listener)], []
    message = ends[0].first
    while message:
        said.append(message)
        message = ends[len(said) % 2].take(carry(len(said) - 1, message))
    return ends[0].outcome, ends[1].outcome, said


def worker_to_driver():
    return call(Credentials(KEY, FIRST, SESSION), DRIVER), answer(Credentials(KEY, DRIVER, SESSION))


def worker_to_worker():
    return (
        call(Credentials(KEY, FIRST, SESSION), SECOND),
        answer(Credentials(KEY, SECOND, SESSION)),
    )


def test_both_ends_agree_on_their_identities_and_on_a_key_for_each_direction():
    here, there, said = met(*worker_to_worker())
    assert (here.other, there.other) == (SECOND, FIRST)
    assert (here.sending, here.receiving) == (there.receiving, there.sending)
    assert here.sending != here.receiving
    again, _, _ = met(*worker_to_worker())
    assert len({here.sending, here.receiving, again.sending, again.receiving}) == 4
    assert [len(message) for message in said] == [116, 33, 32, 33]


def test_another_key_is_refused():
    caller = call(Credentials(OTHER_KEY, FIRST, SESSION), DRIVER)
    here, there, _ = met(caller, answer(Credentials(KEY, DRIVER, SESSION)))
    assert str(here) == str(there) == "it holds another key"


def test_every_changed_bit_is_refused():
    _, _, said = met(*worker_to_driver())
    for number, message in enumerate(said):
        for bit in range(8 * len(message)):

            def flip(which: int, content: bytes, number: int = number, bit: int = bit) -> bytes:
                changed = bytearray(content)
                if which == number:
                    changed[bit // 8] ^= 1 << bit % 8
                return bytes(changed)

            here, there, _ = met(*worker_to_driver(), flip)
            assert not isinstance(here, Agreement), (number, bit)
            # The listener has agreed before it sends the last message, and hears nothing more.
            assert isinstance(there, Agreement) == (number == 3), (number, bit)


@given(st.data())
def test_composed_recorded_messages_are_refused(data):
    """Any stretch of earlier handshakes, of both ends, in place of any stretch of this one."""
    recorded = [b"".join(met(*make())[2]) for make in (worker_to_driver, worker_to_worker)]
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

    here, there, _ = met(*worker_to_driver(), splice)
    assume(any(changes))
    assert not isinstance(here, Agreement)
    assert victim == 3 or not isinstance(there, Agreement)


def test_a_repeated_caller_is_refused():
    _, _, said = met(*worker_to_driver())
    listener = End(answer(Credentials(KEY, DRIVER, SESSION)))
    assert len(listener.take(said[0])) == 1 + NONCE
    assert listener.take(said[2]) == b""
    assert str(listener.outcome) == "it repeated messages of another connection"


def test_reflected_messages_are_refused():
    said = []

    def reflect(number: int, message: bytes) -> bytes:
        said.append(message)
        return message if number != 3 else message[:1] + said[2]

    here, _, _ = met(*worker_to_driver(), reflect)
    assert str(here) == "it does not prove that it holds the key"


@pytest.mark.parametrize(
    "listener",
    [
        Credentials(KEY, FIRST, SESSION),  # the caller itself
        Credentials(KEY, Identity(Role.WORKER, 1, 1), SESSION),
        Credentials(KEY, Identity(Role.WORKER, 0, 1), SESSION),
        Credentials(KEY, DRIVER, SESSION),
        Credentials(KEY, SECOND, LATER),  # of a later driver with the same key
    ],
    ids=str,
)
def test_only_the_process_that_was_called_answers(listener):
    caller = call(Credentials(KEY, FIRST, SESSION), SECOND)
    here, there, _ = met(caller, answer(listener))
    assert str(here) == "it is another process than the one that was called"
    assert str(there) == "it called another process"


def test_only_a_node_agent_may_not_know_the_session():
    driver = Credentials(KEY, DRIVER, SESSION)
    here, there, _ = met(call(Credentials(KEY, AGENT), DRIVER), answer(driver))
    assert (here.other, there.other) == (DRIVER, AGENT)
    here, _, _ = met(call(Credentials(KEY, FIRST, UNKNOWN_SESSION), DRIVER), answer(driver))
    assert here.status is Status.MISDIRECTED


def test_the_keys_depend_on_both_identities_and_on_the_session(monkeypatch):
    monkeypatch.setattr(handshake.secrets, "token_bytes", lambda size: b"n" * size)
    keys = set()
    for own in (FIRST, AGENT):
        for called in (SECOND, DRIVER):
            for session in (SESSION, LATER):
                caller = call(Credentials(KEY, own, session), called)
                here, there, _ = met(caller, answer(Credentials(KEY, called, session)))
                assert here.sending == there.receiving
                keys |= {here.sending, here.receiving}
    assert len(keys) == 16


@given(st.binary(min_size=len(GREETING), max_size=300))
def test_garbage_is_refused_by_its_first_bytes(said):
    assume(not said.startswith(GREETING))
    listener = End(answer(Credentials(KEY, DRIVER, SESSION)))
    assert listener.take(said) == b""
    assert str(listener.outcome) == "it is not a process of this version of Lockstep"


@given(st.binary(min_size=116 - len(GREETING), max_size=300))
def test_garbage_after_a_greeting_is_refused(said):
    listener = End(answer(Credentials(KEY, DRIVER, SESSION)))
    assert listener.take(GREETING + said) == bytes([Status.OTHER_KEY])
    assert isinstance(listener.outcome, Refused)


@given(st.binary(min_size=1, max_size=300))
def test_a_listener_without_a_proof_is_refused(said):
    caller = End(call(Credentials(KEY, FIRST, SESSION), DRIVER))
    while caller.outcome is None:
        caller.take(said)
    assert isinstance(caller.outcome, Refused)
    assert str(caller.outcome).isascii()


def test_the_repr_of_credentials_does_not_contain_the_key():
    assert KEY.decode() not in repr(Credentials(KEY, DRIVER, SESSION))
