"""Calls are answered by the process that was called, and by no other."""

from __future__ import annotations

import pickle

from lockstep.tools.remote.calls import Calls
from lockstep.tools.remote.serialization import serialize


def test_only_the_rank_that_was_called_answers():
    posted = []
    calls = Calls(
        lambda *message: posted.append(message), lambda done, deadline: None, lambda *call: None
    )
    (future,) = calls.start([1], "the sum", sum, [(1, 2)])
    ((rank, message),) = posted
    function, args, options = pickle.loads(message["payload"])
    answer = {"kind": "value", "number": message["number"]}
    answer["payload"] = serialize(function(*args, **options))
    calls.on_answer(2, answer)
    assert not future.done()
    calls.on_answer(rank, answer)
    assert future.result() == 3
