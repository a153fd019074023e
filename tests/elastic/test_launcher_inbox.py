"""A member's inbox: messages for the rank, and losses that close its connections at once."""

from __future__ import annotations

import queue
from typing import Any

import pytest

from lockstep.elastic import launcher_inbox
from lockstep.elastic.launcher_inbox import LauncherInbox
from processes import until


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> tuple[queue.SimpleQueue[Any], list[int]]:
    sent: queue.SimpleQueue[Any] = queue.SimpleQueue()
    closed: list[int] = []
    monkeypatch.setattr(launcher_inbox, "receive_from_launcher", lambda timeout: sent.get())
    monkeypatch.setattr(launcher_inbox, "close_world_connections", lambda: closed.append(1))
    return sent, closed


def test_losses_close_the_connections_of_their_round_and_of_no_later_one(launcher):
    sent, closed = launcher
    inbox = LauncherInbox()
    inbox.enter(3)
    assert not closed
    sent.put(({"kind": "lost", "round": 2, "member": 1}, []))
    sent.put(({"kind": "newcomers", "round": 3, "count": 1}, []))
    assert inbox.receive(10) == ({"kind": "newcomers", "round": 3, "count": 1}, [])
    assert not closed
    sent.put(({"kind": "lost", "round": 3, "member": 1}, []))
    until(lambda: closed, "they stay open", 10)
    inbox.enter(4)
    assert closed == [1]
    assert inbox.receive(0) is None
    sent.put(({"kind": "lost", "round": 5, "member": 1}, []))
    sent.put(({"kind": "round"}, []))
    assert inbox.receive(None) == ({"kind": "round"}, [])
    before = len(closed)
    inbox.enter(5)  # which was over before the rank had joined it
    assert (inbox.lost_round, len(closed)) == (5, before + 1)
    sent.put(None)
