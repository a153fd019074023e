"""Tracebacks of Lockstep's own errors: the user's frames, without those of Lockstep.

    Traceback (most recent call last):
      File "/home/ann/train.py", line 31, in main
        trainer = ls.Trainer(model, loss, optimizer)
    lockstep.kernel.errors.UsageError: this process has not joined a world: call lockstep.init()

The message says what is wrong, so the frames that raised it do not help; nor do the frames of
torch.distributed, through which the backend "lockstep" is called. Errors of other classes, such
as errors of the user's model, keep every frame. LOCKSTEP_TRACEBACK=1 shows all frames.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

from lockstep.comm.native_module import ArgumentError
from lockstep.kernel.errors import LockstepError
from lockstep.user_code import PACKAGE, is_user_code

__all__ = [
    "find_ipython_shell",
    "find_location",
    "find_user_location",
    "format_user_frames",
    "install",
    "is_full",
    "is_own_error",
]

FULL = "LOCKSTEP_TRACEBACK"
COMMUNICATION = "/torch/distributed/"  # the folder of torch that calls the backend

explanations: list[Callable[[BaseException], str]] = []
"""Functions that return a note for an uncaught error of the user's program, or ""."""


def is_full() -> bool:
    """Return whether the environment asks for every frame."""
    return os.environ.get(FULL, "") not in ("", "0")


def is_own_error(error: BaseException) -> bool:
    """Return whether Lockstep wrote this error's message."""
    return isinstance(error, (LockstepError, ArgumentError))


def add_notes(error: BaseException) -> None:
    """Add the notes of `explanations` to an uncaught error."""
    for explain in explanations:
        note = explain(error)
        if note and note not in getattr(error, "__notes__", ()):
            error.add_note(note)


def install() -> None:
    """Show uncaught errors of Lockstep without its frames, unless the program has its own hook.

    Debuggers have one, and so has torch once a group is initialized. IPython and notebooks get
    a handler for these errors, unless the user has set one for any errors.
    """
    if (shell := find_ipython_shell()) is not None:
        if not shell.custom_exceptions:
            shell.set_custom_exc((LockstepError,), _show_in_notebook)
    elif sys.excepthook is sys.__excepthook__:
        sys.excepthook = _show_uncaught


def find_ipython_shell() -> Any:
    """Return the running IPython shell; None outside of IPython and notebooks."""
    module = sys.modules.get("IPython")
    get_shell = getattr(module, "get_ipython", None)
    return None if get_shell is None else get_shell()


def _show_in_notebook(
    shell: Any,
    kind: type[BaseException],
    error: BaseException,
    frames: TracebackType | None,
    tb_offset: int | None = None,
) -> None:
    """Show an error where IPython shows errors, as a program would; `%debug` has every frame."""
    if is_full():
        shell.showtraceback((kind, error, frames), tb_offset=tb_offset)
        return
    sys.last_type = kind
    sys.last_value = error
    sys.last_traceback = frames
    while frames is not None and not is_user_code(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next  # IPython's
    shell._showtraceback(kind, error, "".join(_format(kind, error, frames)).splitlines())


def _show_uncaught(
    kind: type[BaseException], error: BaseException, frames: TracebackType | None
) -> None:
    if is_full() or not is_own_error(error):
        add_notes(error)
        sys.__excepthook__(kind, error, frames)
        return
    print("".join(_format(kind, error, frames)), end="", file=sys.stderr)


def _format(
    kind: type[BaseException], error: BaseException, frames: TracebackType | None
) -> list[str]:
    """Return the traceback of an error as lines, without the frames of Lockstep."""
    shown = traceback.TracebackException(kind, error, frames)
    _drop_frames(shown)
    return list(shown.format())


def _drop_frames(shown: traceback.TracebackException) -> None:
    """Drop Lockstep's frames from an error and its causes, and causes without other frames."""
    shown.stack = _select_frames(shown.stack)
    for name in ("__cause__", "__context__"):
        cause: traceback.TracebackException | None = getattr(shown, name)
        if cause is not None:
            _drop_frames(cause)
            if not cause.stack:
                setattr(shown, name, None)


def _select_frames(frames: traceback.StackSummary) -> traceback.StackSummary:
    """Return the frames without Lockstep's, and without library frames that those call.

    Frames of torch.distributed count as Lockstep's.
    """
    selected = traceback.StackSummary()
    is_inside = False
    for frame in frames:
        begins = frame.filename.startswith(PACKAGE) or COMMUNICATION in frame.filename
        is_inside = not is_user_code(frame.filename) and (is_inside or begins)
        if not is_inside:
            selected.append(frame)
    return selected


def format_user_frames(error: BaseException) -> str:
    """Return an error's traceback as text, without Lockstep's frames."""
    return "".join(_select_frames(traceback.extract_tb(error.__traceback__)).format())


def find_user_location(error: BaseException) -> str:
    """Return "train.py:31", the innermost line of user code in the traceback; "" without one."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{os.path.basename(error.filename)}:{error.lineno}"
    own = [
        frame for frame in traceback.extract_tb(error.__traceback__) if is_user_code(frame.filename)
    ]
    return _format_location(own)


def find_location(error: BaseException) -> str:
    """Return the innermost line of user code in the traceback, or the innermost line of all.

    The result is "" instead of a line of Lockstep: if the caller forgot an argument, for
    example, no line of user code has run.
    """
    if location := find_user_location(error):
        return location
    frames = traceback.extract_tb(error.__traceback__)
    is_inside = bool(frames) and frames[-1].filename.startswith(PACKAGE)
    return "" if is_inside else _format_location(frames)


def _format_location(frames: list[traceback.FrameSummary]) -> str:
    return f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
