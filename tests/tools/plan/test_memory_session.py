"""What the session of `lockstep plan` finds out beside the memory."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lockstep.tools.plan import memory_session
from lockstep.tools.plan.memory_session import MemorySession


@pytest.mark.parametrize(
    ("backend", "make", "shared", "sharded"),
    [
        ("lockstep", torch.optim.AdamW, None, None),
        ("gloo", torch.optim.AdamW, 'it needs the backend "lockstep"', None),
        ("lockstep", torch.optim.Rprop, None, "torch cannot step the shards"),
        (
            "lockstep",
            torch.optim.Adafactor,
            "torch's Adafactor does not treat",
            "torch's Adafactor does not treat",
        ),
    ],
)
def test_what_the_backend_or_the_optimizer_excludes(monkeypatch, backend, make, shared, sharded):
    monkeypatch.setattr(memory_session, "world", lambda: SimpleNamespace(backend=backend))
    module = nn.Linear(4, 4)
    session = MemorySession([].append, ranks=2)
    session.optimizers = [make(module.parameters(), lr=0.1)]
    found = session.find_refusals(module)
    for storage, reason in {"shared": shared, "sharded": sharded}.items():
        assert (storage in found) == (reason is not None)
        assert found.get(storage, "").startswith(reason or "")
        assert not re.search("use another|leave", found.get(storage, ""))  # without the advice
    session.optimizers = [*session.optimizers] * 2
    assert "shared" in session.find_refusals(module)
