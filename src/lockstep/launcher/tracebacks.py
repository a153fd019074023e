"""Tracebacks of Lockstep's own errors: the user's frames, without those of Lockstep.

    Traceback (most recent call last):
      File "/home/ann/train.py", line 31, in main
        trainer = ls.Trainer(model, loss, optimizer)
    lockstep.errors.UsageError: this process has not joined a world: call lockstep.init() first

The sentence says what is wrong, so the frames that raised it do not help; nor do those of
torch.distributed, through which the backend "lockstep" is called. Errors of other classes,
such as those of the user's model, keep every frame. LOCKSTEP_TRACEBACK=1 shows all.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from types import TracebackType

from lockstep.errors import LockstepError
from lockstep.launcher.stacks import PACKAGE, is_user_code

__all__ = [
    "BACKEND_ERRORS",
    "find_location",
    "find_user_location",
    "format_user_frames",
    "install",
    "is_full",
    "is_own_error",
]

FULL = "LOCKSTEP_TRACEBACK"
# Of torch: the classes of what the backend "lockstep" says about a collective or a message.
BACKEND_ERRORS = ("DistBackendError", "DistNetworkError")
COMMUNICATION = "/torch/distributed/"  # the folder of torch that calls the backend


def is_full() -> bool:
    """Return whether the environment asks for every frame."""
    return os.environ.get(FULL, "") not in ("", "0")


def is_own_error(error: BaseException) -> bool:
    """Return whether Lockstep has written this error's message, in a class of torch's or its own.

    Messages of the backend "lockstep" begin with a rank, unlike those of torch's backends.
    """
    kind = type(error)
    if isinstance(error, LockstepError) or kind.__module__ == "lockstep.comm.backend":
        return True
    is_said_by_rank = re.match(r"rank \d+\b", str(error)) is not None
    return kind.__name__ in BACKEND_ERRORS and is_said_by_rank


def install() -> None:
    """Show uncaught errors of Lockstep without its frames, unless the program has its own hook.

    Debuggers, IPython and torch, once a group is initialized, have one.
    """
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _show_uncaught


def _show_uncaught(
    kind: type[BaseException], error: BaseException, frames: TracebackType | None
) -> None:
    if not is_own_error(error) or is_full():
        sys.__excepthook__(kind, error, frames)
        return
    shown = traceback.TracebackException(kind, error, frames)
    _drop_frames(shown)
    for line in shown.format():
        print(line, end="", file=sys.stderr)


def _drop_frames(shown: traceback.TracebackException) -> None:
    """Drop Lockstep's frames, also of causes; and causes that have no other frames."""
    shown.stack = _select_frames(shown.stack)
    for name in ("__cause__", "__context__"):
        cause: traceback.TracebackException | None = getattr(shown, name)
        if cause is not None:
            _drop_frames(cause)
            if not cause.stack:
                setattr(shown, name, None)


def _select_frames(frames: traceback.StackSummary) -> traceback.StackSummary:
    """Return the frames without Lockstep's, and without what those call that is not the user's.

    Frames of torch.distributed count as Lockstep's.
    """
    kept, is_inside = traceback.StackSummary(), False
    for frame in frames:
        is_user = is_user_code(frame.filename)
        begins = frame.filename.startswith(PACKAGE) or COMMUNICATION in frame.filename
        is_inside = not is_user and (is_inside or begins)
        if not is_inside:
            kept.append(frame)
    return kept


def format_user_frames(error: BaseException) -> str:
    """Return the frames of a traceback that are not Lockstep's, as in a traceback."""
    return "".join(_select_frames(traceback.extract_tb(error.__traceback__)).format())


def find_user_location(error: BaseException) -> str:
    """Return "train.py:31", the innermost line of user code in the traceback; "" without one."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{os.path.basename(error.filename)}:{error.lineno}"
    own = [
        each for each in traceback.extract_tb(error.__traceback__) if is_user_code(each.filename)
    ]
    return _format_location(own)


def find_location(error: BaseException) -> str:
    """Return the innermost line of user code in the traceback, or the innermost line of all."""
    return find_user_location(error) or _format_location(traceback.extract_tb(error.__traceback__))


def _format_location(frames: list[traceback.FrameSummary]) -> str:
    return f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
