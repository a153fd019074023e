"""The codec of messages: what arrives is what was sent, however it is cut."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.transport.frame import HEADER_PART, LENGTH, LENGTH_PART, PROOF, ForgedFrame, prove
from lockstep.transport.message_codec import MessageCodec

HERE, THERE = b"h" * 32, b"t" * 32
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
messages = st.lists(st.dictionaries(st.text(max_size=5), json_values, max_size=3), max_size=4)


def ends() -> tuple[MessageCodec, MessageCodec]:
    return MessageCodec(HERE, THERE, 1000), MessageCodec(THERE, HERE, 1000)


@given(messages, st.integers(1, 100))
def test_messages_arrive_in_pieces_of_any_size(sent, size):
    here, there = ends()
    stream = b"".join(map(here.encode, sent))
    pieces = [stream[start : start + size] for start in range(0, len(stream), size)]
    assert [each for piece in pieces for each in there.decode(piece)] == sent


@given(messages)
def test_an_end_that_receives_what_is_missing_receives_one_message_at_a_time(sent):
    here, there = ends()
    stream = b"".join(map(here.encode, sent))
    for message in sent:
        found = []
        while not found:
            count = there.missing
            found += there.decode(stream[:count])
            stream = stream[count:]
        assert found == [message]
    assert not stream


@given(st.data())
def test_a_changed_byte_is_detected(data):
    here, there = ends()
    stream = bytearray(here.encode({"kind": "a"}) + here.encode({"kind": "b"}))
    place = data.draw(st.integers(0, len(stream) - 1))
    stream[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ForgedFrame):
        list(there.decode(bytes(stream)))


def test_repeated_exchanged_and_reflected_messages_are_detected():
    here, there = ends()
    first, second = here.encode({"n": 1}), here.encode({"n": 2})
    for stream in (second, first + first, there.encode({"n": 1})):
        with pytest.raises(ForgedFrame):
            list(ends()[1].decode(stream))


@given(st.binary(max_size=200))
def test_random_bytes_complete_no_message(content):
    found = []
    try:
        found += ends()[1].decode(content)
    except ForgedFrame:
        assert len(content) >= LENGTH.size + PROOF
    assert not found


def proven(content: bytes, size: int | None = None) -> bytes:
    """Return `content` as a message from an end with the key, with any stated size."""
    length = LENGTH.pack(len(content) if size is None else size)
    proofs = prove(HERE, LENGTH_PART, 0, length), prove(HERE, HEADER_PART, 0, content)
    return length + proofs[0] + content + proofs[1]


@pytest.mark.parametrize(
    ("stream", "reason"),
    [
        (proven(b"", 1 << 31), "a message of 2,147,483,648 bytes"),
        (proven(pickle.dumps({"a": 1})), "not JSON"),
        (proven(b"[" * 900), "not JSON"),
        (proven(b"[1]"), "not a JSON object"),
    ],
    ids=["too large", "pickle", "nested", "list"],
)
def test_an_end_with_the_key_cannot_send_anything_else(stream, reason):
    with pytest.raises(ForgedFrame, match=reason):
        list(ends()[1].decode(stream))


def test_a_message_that_is_too_large_is_not_sent():
    here, there = ends()
    with pytest.raises(ValueError, match="1,010 bytes, more than 1,000"):
        here.encode({"a": "x" * 1001})
    assert list(there.decode(here.encode({}))) == [{}]
