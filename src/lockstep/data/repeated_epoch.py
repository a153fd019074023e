"""The warning about an epoch that is trained again by mistake, with the same random numbers."""

from __future__ import annotations

import os
from types import FrameType

from lockstep.user_code import is_user_code

__all__ = ["describe_repetition"]


def describe_repetition(epoch: int, advice: str, frame: FrameType | None) -> tuple[str, str]:
    """Return the place and the sentence of the warning.

    Args:
        epoch: The number of the epoch.
        advice: What to write.
        frame: The frame in which the epoch begins; its innermost line of user code is the place.
    """
    while frame is not None and not is_user_code(frame.f_code.co_filename):
        frame = frame.f_back
    place = "a loop"
    if frame is not None:
        place = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
    again = f"epoch {epoch} is trained again, with the same order and augmentation as before"
    return place, f"{again}: {advice}"
