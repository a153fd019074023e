"""The classes of Lockstep's errors; `lockstep.errors`, where programs find them, has their tree."""

from __future__ import annotations

from typing import Literal

__all__ = [
    "BufferMismatchError",
    "CommunicationError",
    "DatasetError",
    "DisagreementError",
    "FileError",
    "GradientError",
    "LaunchEnvironmentError",
    "LayoutError",
    "LockstepError",
    "LossError",
    "LostError",
    "RankError",
    "RendezvousError",
    "SampleError",
    "StateError",
    "StoppedError",
    "UsageError",
    "WorkError",
]


class LockstepError(Exception):
    """The base class of Lockstep's errors; `exit_status` is the exit status of a command."""

    exit_status = 1


class UsageError(LockstepError, ValueError):
    """Lockstep was used in a way that cannot work.

    `reason` is the message without the advice at its end, of an error that is made with both.
    """

    exit_status = 2

    def __init__(self, reason: object = "", advice: str = "") -> None:
        super().__init__(f"{reason}{advice}")
        self.reason = str(reason)


class LaunchEnvironmentError(UsageError):
    """The environment variables of this rank are missing, invalid or contradict each other."""


class LayoutError(UsageError):
    """A program cannot be trained in the requested layout of ranks, stages and storage.

    The numbers do not fit together, or the model, loss or optimizer does not allow the layout.
    """


class DatasetError(UsageError):
    """A dataset cannot be used as requested: it is empty, or its length or partition is wrong."""


class WorkError(LockstepError, RuntimeError):
    """The work started and failed.

    `reason` is why, without the rank and the step; "" if only the message says it.
    """

    reason: str = ""


class RankError(WorkError):
    """A rank raised, exited with a status, or was killed by a signal.

    Attributes:
        rank: The rank that failed first; None if it is not known.
        status: Its exit status, negative for a signal; None if it is not known.
        exception: The class name of the error that it raised; None if it is not known.
        code: What kind of failure the error is (`lockstep.launcher.failure_codes`).
        reason: The message of the error, without the rank; "" if it raised none.
    """

    rank: int | None = None
    status: int | None = None
    exception: str | None = None
    code: str = ""


class RendezvousError(WorkError):
    """The ranks did not connect to each other before the timeout."""


class DisagreementError(WorkError):
    """The ranks hold different models, data or settings.

    `cause` is the earlier failure of a rank, after which the ranks made different calls; "" if none
    is known.
    """

    cause: str = ""


class FileError(WorkError):
    """A data file is damaged, or a file or folder cannot be read or written."""


class SampleError(WorkError):
    """The dataset raised while a sample was loaded; the message names its index."""


class LossError(WorkError):
    """A loss is not a scalar, is not finite, or its function raised an error.

    `microbatch` is the first micro-batch whose loss is not finite, and `loss` is that loss, such
    as "nan"; None and "" for other failures.
    """

    microbatch: int | None = None
    loss: str = ""


class GradientError(WorkError):
    """A gradient is not finite, or cannot be added, as when its dtype is not its parameter's."""


class BufferMismatchError(WorkError):
    """A buffer's results differ between micro-batches and cannot be merged."""


class StateError(WorkError):
    """A step changed state that ranks cannot merge: a parameter, or a private generator."""


class StoppedError(WorkError):
    """Another rank of the pipeline failed and reported it."""


class CommunicationError(WorkError):
    """A collective call or message failed.

    The backend "lockstep" raises it, also as a `torch.distributed.DistBackendError`.

    Attributes:
        operation: The call that failed, such as "barrier #3"; "" if it is not known.
        reason: Why it failed; "" if only the message says it.
        hint: The end of the reason, if something else may explain it; "" for nothing.
    """

    operation: str = ""
    hint: str = ""


Observation = Literal["ended", "left", "unopened", "closed"]
"""The observation of a lost rank: its process has ended; it has left the group; memory
that it had published can no longer be opened; it has closed its connection."""


class LostError(CommunicationError):
    """Another rank is gone, or cannot be reached.

    Attributes:
        rank: The rank; None if it is not known.
        observed: What was observed of it; None if it only does not answer.
    """

    rank: int | None = None
    observed: Observation | None = None
