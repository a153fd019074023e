"""Messages with descriptors between two processes of one host."""

from __future__ import annotations

import os
import threading

from lockstep.launcher.channel import pair, parcel, unpack


def test_messages_keep_their_order_their_size_and_their_descriptors():
    left, right = pair()
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


def test_an_end_in_the_middle_of_a_message_is_an_end():
    left, right = pair()
    os.write(left.fileno(), b"\x10\x00\x00\x00{")
    left.close()
    assert right.receive() is None
    right.close()


def test_a_parcel_is_read_whole_by_each_of_its_receivers():
    descriptor = parcel(b"x" * 100_000)
    copy = os.dup(descriptor)
    assert unpack(descriptor) == unpack(copy) == b"x" * 100_000
