"""The codes of failures: types decide, not words."""

from __future__ import annotations

import pytest
from torch.distributed import DistBackendError  # type: ignore[attr-defined]

from lockstep.comm.backend_errors import BackendError, PeerLostError
from lockstep.kernel.errors import (
    LayoutError,
    LostError,
    RendezvousError,
    StoppedError,
    UsageError,
)
from lockstep.launcher.failure_codes import find_code, is_lost_peer
from lockstep.pipeline.p2p import LinkError

DIED = "rank 0: recv from rank 1 failed: rank 3 died (process 7 has ended)"
CLOSED = "[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:24473"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (PeerLostError("any words"), "lost"),
        (LostError("any words"), "lost"),
        (RuntimeError(CLOSED), "lost"),
        (StoppedError("any words"), "stopped"),
        (RendezvousError("any words"), "rendezvous"),
        (BackendError("any words"), "communication"),
        (LinkError("any words"), "communication"),
        (LayoutError("any words"), "layout"),
        (UsageError("the layout has no stages"), ""),
        (ValueError("any words"), ""),
        # Words of Lockstep's own messages decide nothing.
        (BackendError(DIED), "communication"),
        (StoppedError(f"rank 0 stopped because {DIED}"), "stopped"),
        (DistBackendError(DIED), ""),
        (RuntimeError(f"{DIED}; rank 1 has left the group"), ""),
        (BrokenPipeError(32, "Broken pipe"), ""),
    ],
)
def test_the_type_of_an_error_decides(error, code):
    assert find_code(error) == code
    assert is_lost_peer(error) == (code == "lost")


def test_an_error_that_was_raised_from_the_loss_of_a_rank_is_its_consequence():
    error = RendezvousError("the ranks could not be connected")
    error.__cause__ = PeerLostError("rank 0 is gone")
    assert find_code(error) == "lost"
    error.__cause__ = None
    error.__context__ = PeerLostError("handled before")
    assert find_code(error) == "rendezvous"
