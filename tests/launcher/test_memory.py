"""Out of memory: what the kernel says of it."""

from __future__ import annotations

import pytest

from lockstep.launcher import memory

LOG = """\
6,1,2,-;python invoked oom-killer: gfp_mask=0x140cca
3,1,2,-;Out of memory: Killed process 4321 (python) total-vm:9000kB, anon-rss:8000kB
3,1,2,-;Memory cgroup out of memory: Killed process 77 (python) total-vm:9000kB
"""


def test_the_kernels_log_names_a_process():
    assert memory.named(LOG, 4321)
    assert memory.named(LOG, 77)
    assert not memory.named(LOG, 432)
    assert not memory.named("", 77)


@pytest.mark.parametrize(
    ("log", "before", "now", "words"),
    [
        (LOG, None, None, "; the kernel's log says out of memory"),
        ("", 3, 4, "; this control group ran out of memory"),
        ("", 3, 3, ""),
        ("", None, 4, ""),
    ],
)
def test_a_hint_needs_a_reason(monkeypatch, log, before, now, words):
    monkeypatch.setattr(memory, "kernel_log", lambda: log)
    monkeypatch.setattr(memory, "counted", lambda: now)
    assert memory.hint(77, before) == words
