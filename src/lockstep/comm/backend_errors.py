"""The errors of the backend "lockstep": those of Lockstep and of torch at once.

    LockstepError                    torch.distributed.DistBackendError, a RuntimeError
      └─ CommunicationError ─────────────┴─> BackendError     a call failed
           └─ LostError ─────────────────────> PeerLostError  another rank is lost

The native module raises them, from works and futures, too.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import get_args

import torch.distributed as dist

from lockstep.kernel.errors import CommunicationError, LostError, Observation

__all__ = ["BackendError", "Failure", "PeerLostError"]


class BackendError(CommunicationError, dist.DistBackendError):
    """A call of the backend failed."""


class PeerLostError(LostError, BackendError):
    """A call of the backend failed because another rank is lost."""


@dataclass(frozen=True)
class Failure:
    """Why a group can no longer be used.

    Attributes:
        reason: The reason.
        observed: What was observed of a rank that is lost; None if no rank is.
        rank: That rank in the world; None if it is not known.
    """

    reason: str
    observed: Observation | None = None
    rank: int | None = None

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Return the failure of a call of the native module."""
        first = str(error).partition("\n")[0]
        if not isinstance(error, BackendError):
            return cls(first)
        lost = error if isinstance(error, PeerLostError) else None
        known = (None, None) if lost is None else (lost.observed, lost.rank)
        return cls(error.reason or first, *known)

    @classmethod
    def decode(cls, message: bytes) -> Failure:
        """Return the failure that another rank has written; `encode` is the inverse."""
        try:
            reason, observed, rank = json.loads(message)
            known = observed if observed in get_args(Observation) else None
            return cls(str(reason), known, rank if type(rank) is int else None)
        except (ValueError, TypeError):
            return cls(message.decode(errors="replace"))

    def encode(self) -> str:
        """Return the failure as a text, for other ranks."""
        return json.dumps([self.reason, self.observed, self.rank])

    def to_native(self) -> tuple[str, str, int]:
        """Return the arguments of the native module for this failure."""
        return self.reason, self.observed or "", -1 if self.rank is None else self.rank

    def make_error(self, message: str, operation: str) -> BackendError:
        """Return the exception of a call that failed for this reason.

        Args:
            message: Its message.
            operation: The call, such as "all_reduce #3".
        """
        error = BackendError(message)
        if self.observed is not None:
            error = lost = PeerLostError(message)
            lost.observed = self.observed
            lost.rank = self.rank
        error.operation = operation
        error.reason = self.reason
        return error
