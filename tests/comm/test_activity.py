"""The page on which a process publishes what it does."""

from __future__ import annotations

import os
import struct

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

from lockstep.comm import activity, backend, native_module
from lockstep.comm.activity import ENTRY, ENTRY_BYTES, LAST_CALL, LAST_CALL_AT, PAGE_BYTES, State


@pytest.fixture
def page():
    """Return the descriptor of a page that this process publishes to during the test."""
    descriptor = os.memfd_create("page")
    os.ftruncate(descriptor, PAGE_BYTES)
    before = activity._page
    activity.use_page(descriptor)
    yield descriptor
    activity._page = before
    for follower in activity._followers:
        follower(before.address)
    os.close(descriptor)


def entry(number: int, text: str, ending: int | None = None) -> bytes:
    body = text.encode()
    return ENTRY.pack(number, 5_000_000_000, State.COMPUTING, len(body), body, ending or number)


def page_of(first: bytes, second: bytes) -> bytes:
    return (first + second).ljust(PAGE_BYTES, b"\0")


def test_the_last_text_is_read_with_its_state_and_time(page):
    assert activity.read_activity(page) == activity.Activity()
    activity.publish("micro-batch 3 of step 12")
    first = activity.read_activity(page)
    assert (first.operation, first.state) == ("micro-batch 3 of step 12", State.COMPUTING)
    assert not first.is_waiting
    with activity.Waiting("all_gather, in step 12"):
        waiting = activity.read_activity(page)
    assert waiting.is_waiting
    assert waiting.operation == "all_gather, in step 12"
    finished = activity.read_activity(page)
    assert not finished.is_waiting
    assert finished.operation == "all_gather, in step 12"
    assert first.since < waiting.since < finished.since == finished.operation_since
    assert first.changes != waiting.changes != finished.changes
    assert activity.read_own_activity() == finished


def test_micro_batches_are_published_alike_with_and_without_the_native_module(page):
    texts = []
    for publish in (activity.publish_microbatch, native_module.load_native().publish_microbatch):
        for step in (12, -3):
            before = activity.read_activity(page)
            publish(step, 3)
            now = activity.read_activity(page)
            assert now.number == before.number + 1
            assert (now.state, now.since >= before.since) == (State.COMPUTING, True)
            texts.append(now.text)
    assert texts == ["micro-batch 3 of step 12", "micro-batch 3 of evaluation 2"] * 2


def test_a_long_text_is_cut_and_a_broken_one_is_readable(page):
    activity.publish("é" * 2000)
    assert activity.read_activity(page).text.startswith("é" * 490)
    activity.publish("\udcff of a file name")
    assert activity.read_activity(page).text == "? of a file name"


def test_an_entry_that_is_being_written_does_not_count():
    whole = entry(4, "step 4")
    torn = entry(5, "step 5", ending=3)
    assert activity.parse_page(page_of(whole, torn)).text == "step 4"
    assert activity.parse_page(page_of(torn, torn)) == activity.Activity()
    assert activity.parse_page(page_of(whole, entry(5, "step 5"))).text == "step 5"


def test_a_page_that_changes_while_it_is_copied_is_copied_again():
    # The beginning of the first copy is old, its end is new, and both numbers fit by chance.
    mixed = entry(1, "step 1")[:40] + entry(1, "other text beyond")[40:]
    copies = [
        page_of(mixed, b""),
        page_of(entry(3, "step 3"), b""),
        page_of(entry(3, "step 3"), b""),
    ]
    assert activity._read(lambda: copies.pop(0)).text == "step 3"
    assert not copies


def test_a_wait_says_for_whom_it_is(page):
    native = native_module.load_native()
    for given, awaited in (((), None), ((activity.ALL_OTHERS,), activity.ALL_OTHERS), ((3,), 3)):
        native.begin_wait("a call", *given)
        try:
            found = activity.read_activity(page)
        finally:
            native.end_wait()
        assert (found.wait, found.awaited) == ("a call", awaited)
    assert activity.read_activity(page).awaited is None


def test_a_call_that_is_being_written_does_not_count():
    page = bytearray(PAGE_BYTES)
    for sequence, call in ((2, "recv from rank 1 (4 elements)"), (3, "")):
        LAST_CALL.pack_into(page, LAST_CALL_AT, sequence, 1, 9_000_000_000, 0, 4, b"recv", b"x")
        found = activity.parse_page(bytes(page))
        assert (found.call, found.operation) == (call, call)


def test_a_page_that_is_no_page_says_nothing():
    noise = struct.pack("<Q", 7).ljust(16, b"\xff").ljust(ENTRY_BYTES - 8, b"\xff")
    noise += struct.pack("<Q", 7)
    assert activity.parse_page(page_of(noise, noise)).text == ""
    assert activity.parse_page(b"") == activity.Activity()


def test_a_forked_child_does_not_write_into_the_page_of_its_parent(page):
    activity.publish("step 1")
    pid = os.fork()
    if pid == 0:
        activity.publish("what the child does")
        os._exit(0 if activity.read_own_activity().text == "what the child does" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert activity.read_activity(page).text == "step 1"


@pytest.mark.skipif(not backend.available(), reason="needs the backend lockstep")
def test_the_backend_publishes_calls_and_messages(page):
    backend.register()
    dist.init_process_group("lockstep", store=HashStore(), rank=0, world_size=1)
    try:
        dist.all_reduce(torch.ones(5))
        found = activity.read_activity(page)
        assert found.operation.startswith("all_reduce (5 elements), call 1 of group ")
        assert found.operation_since > 0
        assert not found.is_waiting
        dist.barrier()
        later = activity.read_activity(page)
        assert later.operation.startswith("barrier, call 2")
        assert later.changes != found.changes
        activity.publish("step 1")
        assert activity.read_activity(page).operation == "step 1"
    finally:
        dist.destroy_process_group()
