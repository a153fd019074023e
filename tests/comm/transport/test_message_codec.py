"""The codec of messages: what arrives is what was sent, in order, and any change is detected."""

from __future__ import annotations

import contextlib
import itertools
import pickle
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.comm.transport.message_codec import (
    CONTENT_PART,
    PROOF,
    SIZES,
    SIZES_PART,
    ForgedMessage,
    MessageCodec,
    prove,
)

HERE = b"h" * 32
THERE = b"t" * 32
MAX_MESSAGE = 1000
MAX_PAYLOAD = 2000
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(st.characters(exclude_categories=()), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
messages = st.lists(
    st.builds(
        lambda message, payload: {**message, "payload": payload} if payload else message,
        st.dictionaries(st.text(max_size=5), json_values, max_size=3),
        st.binary(max_size=40),
    ),
    max_size=4,
)


def codec(sending: bytes = HERE, receiving: bytes = THERE) -> MessageCodec:
    return MessageCodec((sending, receiving), MAX_PAYLOAD, MAX_MESSAGE)


def encoded(sent: list, sending: bytes = HERE) -> list[bytes]:
    """Return the messages as bytes, each by itself."""
    here = codec(sending)
    return [b"".join(here.encode(message)) for message in sent]


def received(stream: bytes, size: int = 1 << 20) -> tuple[list, bool]:
    """Return the messages in `stream`, read in pieces of at most `size`, and whether all are."""
    there = codec(THERE, HERE)
    arrived = []
    with contextlib.suppress(ForgedMessage):
        while stream:
            piece = stream[:size]
            stream = stream[size:]
            arrived += decode(there, piece)
        return arrived, True
    return arrived, False


def decode(there: MessageCodec, content: bytes) -> Iterator[dict]:
    """Yield the messages that the next bytes complete."""
    while content:
        count = min(len(content), len(there.rest))
        there.rest[:count] = content[:count]
        content = content[count:]
        message = there.take(count)
        if message is not None:
            yield message


@given(messages, st.integers(1, 100))
def test_messages_arrive_in_pieces_of_any_size(sent, size):
    assert received(b"".join(encoded(sent)), size) == (sent, True)


def test_every_changed_bit_is_detected():
    (content,) = encoded([{"kind": "a", "payload": b"piece"}])
    for position in range(8 * len(content)):
        changed = bytearray(content)
        changed[position // 8] ^= 1 << position % 8
        assert received(bytes(changed)) == ([], False), f"bit {position}"


@given(messages.filter(bool), messages, st.data())
def test_only_what_was_sent_is_received_and_only_in_order(sent, others, data):
    """Change, drop, move, repeat or insert any stretch: messages before it arrive, nothing else."""
    own = encoded(sent)
    content = b"".join(own)
    sources = {
        "this direction": own,
        "the other direction": encoded(others, THERE),
        "another connection": encoded(others, b"a" * 32),
    }

    def stretch(parts: list[bytes]) -> tuple[int, int]:
        starts = [0, *itertools.accumulate(map(len, parts))]
        inner = [start + SIZES.size + PROOF for start in starts[:-1]]
        offsets = st.sampled_from(starts + inner) | st.integers(0, starts[-1])
        low, high = sorted((data.draw(offsets), data.draw(offsets)))
        return low, high

    low, high = stretch(own)
    source = sources[data.draw(st.sampled_from(sorted(sources)))]
    first, last = stretch(source)
    how = data.draw(st.sampled_from(["replace", "insert", "drop", "flip", "exchange"]))
    if how == "exchange":  # two stretches of this direction change places
        cuts = sorted({low, high, *stretch(own)})
        middle = [content[a:b] for a, b in itertools.pairwise(cuts)]
        changed = content[: cuts[0]] + b"".join(reversed(middle)) + content[cuts[-1] :]
    elif how == "flip":
        flipped = bytes(byte ^ data.draw(st.integers(1, 255)) for byte in content[low : low + 1])
        changed = content[:low] + flipped + content[low + 1 :]
    else:
        kept = low if how == "insert" else high
        put = b"" if how == "drop" else b"".join(source)[first:last]
        changed = content[:low] + put + content[kept:]
    arrived, _ = received(changed)
    assert arrived == sent[: len(arrived)]
    assert len(arrived) < len(sent) or changed.startswith(content)


def proven(content: bytes, sizes: tuple[int, int] | None = None) -> bytes:
    """Return `content` as a message from an end with the key, with any stated sizes."""
    stated = SIZES.pack(*(sizes or (len(content), 0)))
    proofs = prove(HERE, SIZES_PART, 0, stated), prove(HERE, CONTENT_PART, 0, content)
    return stated + proofs[0] + content + proofs[1]


@pytest.mark.parametrize(
    ("stream", "reason"),
    [
        (proven(b"", (1 << 31, 0)), "a message of 2,147,483,648 bytes"),
        (proven(b"", (2, MAX_PAYLOAD + 1)), "a message of 2,003 bytes"),
        (proven(pickle.dumps({"a": 1})), "not JSON"),
        (proven(b"[" * 900), "not JSON"),
        (proven(b"[1]"), "not a JSON object"),
    ],
    ids=["too large", "payload", "pickle", "nested", "list"],
)
def test_an_end_with_the_key_cannot_send_anything_else(stream, reason):
    with pytest.raises(ForgedMessage, match=reason):
        list(decode(codec(THERE, HERE), stream))


def test_nothing_is_allocated_for_sizes_without_a_proof():
    there = codec(THERE, HERE)
    with pytest.raises(ForgedMessage, match="without its proof"):
        list(decode(there, SIZES.pack(900, 2000) + bytes(PROOF)))
    assert not there.rest


def test_a_message_that_is_too_large_is_not_sent():
    here = codec()
    there = codec(THERE, HERE)
    with pytest.raises(ValueError, match="1,010 bytes, more than 1,000"):
        here.encode({"a": "x" * 1001})
    assert list(decode(there, b"".join(here.encode({})))) == [{}]
