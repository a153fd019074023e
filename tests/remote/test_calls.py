"""Calls: each is answered by the process that it was made to."""

from __future__ import annotations

from lockstep.remote.calls import DRIVER, Calls
from lockstep.remote.frame import Frame


class Routes:
    """Notes what is posted."""

    def __init__(self) -> None:
        self.posted: list[tuple[int, Frame]] = []

    def post(self, rank: int, frame: Frame) -> None:
        self.posted.append((rank, frame))

    def post_drop(self, address) -> None:
        raise AssertionError(address)


def test_only_the_rank_that_was_called_answers():
    routes = Routes()
    calls = Calls(DRIVER, routes, lambda done, deadline: None)
    future = calls.start(1, "the sum", sum, [(1, 2)])
    ((rank, call),) = routes.posted
    answer = Frame({"kind": "value", "number": call.header["number"]}, calls.pack(DRIVER, 3))
    calls.settle(2, answer)
    assert not future.done()
    calls.settle(rank, answer)
    assert future.result() == 3
