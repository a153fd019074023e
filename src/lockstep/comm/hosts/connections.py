"""The end of Gloo's connections between hosts.

A wait that times out closes all of Gloo's connections of this process. Gloo has no other way to
wake its waiting threads.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from lockstep.foreign_messages import is_gloo_timeout

__all__ = ["close_connections"]

CLOSING_TAG = (1 << 31) - 1  # of a message that nobody sends


def close_connections(gloo: Any) -> None:
    """Close all connections of a `ProcessGroupGloo`, which cannot be used any longer.

    Threads that wait, here and on the other ranks, wake up. Safe on any thread.
    """
    nothing = torch.empty(1, dtype=torch.uint8)
    for other in range(gloo.size()):
        if other != gloo.rank():
            try:
                gloo.recv([nothing], other, CLOSING_TAG).wait(timedelta(milliseconds=1))
            except RuntimeError as error:
                if is_gloo_timeout(str(error)):
                    return  # it has closed all; a connection that is closed already raises, too
