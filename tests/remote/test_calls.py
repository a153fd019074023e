"""Calls are answered by the process that was called, and by no other."""

from __future__ import annotations

from lockstep.remote.calls import DRIVER, Calls
from lockstep.transport.frame import Frame


class Transport:
    """Records what is posted."""

    def __init__(self) -> None:
        self.posted: list[tuple[int, Frame]] = []

    def post(self, rank: int, frame: Frame) -> None:
        self.posted.append((rank, frame))

    def post_drop(self, address) -> None:
        raise AssertionError(address)


def test_only_the_rank_that_was_called_answers():
    transport = Transport()
    calls = Calls(DRIVER, transport, lambda done, deadline: None)
    future = calls.start(1, "the sum", sum, [(1, 2)])
    ((rank, call),) = transport.posted
    answer = Frame({"kind": "value", "number": call.header["number"]}, calls.serialize(DRIVER, 3))
    calls.on_answer(2, answer)
    assert not future.done()
    calls.on_answer(rank, answer)
    assert future.result() == 3
