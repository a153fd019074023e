"""The schedule of checkpoints: the settings, and the steps after which one is saved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from lockstep.call_checks import check_kinds, read_kinds
from lockstep.kernel.errors import UsageError

__all__ = ["CheckpointConfig", "CheckpointSchedule", "Stateful", "read_checkpoint_argument"]

# limits of the default interval
LEAST_SECONDS = 10.0
MOST_SECONDS = 300.0
COST = 1 / 200  # fraction of the time that writing may take by default


class Stateful(Protocol):
    """An object whose state is saved and restored: a module, a meter, a trainer."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Restore a state that `state_dict` returned."""


@dataclass(frozen=True)
class CheckpointConfig:
    """The settings of a trainer's checkpoints, for `Trainer(checkpoint=...)`.

    A checkpoint is saved when either interval has passed, at the end of the training, and when
    SIGTERM asks the program to stop.

    Attributes:
        every_steps: The number of steps between two checkpoints. None: no such interval.
        every_seconds: The seconds between two checkpoints. None: no such interval; if both are
            None, the interval is 200 times the time that saving a checkpoint takes, between 10
            and 300 s.
        keep: The number of latest checkpoints that are kept.
        folder: The folder of the run, in which a folder `checkpoints` is created. None: the
            folder of the trainer's record, or of `lockstep run`, or a new one in `runs`.
        stateful: Objects by name, such as meters, counters or another trainer, whose
            `state_dict()` is saved and passed to their `load_state_dict()` when the run resumes.
            State dicts consist of tensors, arrays, numbers, strings, and containers of them. A
            checkpoint holds those of rank 0, for every rank.

    Raises:
        UsageError: A value is invalid.
    """

    every_steps: int | None = None
    every_seconds: float | None = None
    keep: int = 3
    folder: str | Path | None = None
    stateful: Mapping[str, Stateful] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the values."""
        for name in ("every_steps", "every_seconds", "keep"):
            value = getattr(self, name)
            if value is None and name != "keep":
                continue
            kinds = (int, float) if name == "every_seconds" else (int,)
            if type(value) not in kinds or not value > 0:
                expected = "number" if name == "every_seconds" else "whole number"
                raise UsageError(
                    f"CheckpointConfig({name}={value!r}): expected a positive {expected}"
                )
        folder = read_kinds({"folder": type(self).__annotations__["folder"]})
        check_kinds("CheckpointConfig", folder, {"folder": self.folder})
        if not isinstance(self.stateful, Mapping):
            raise UsageError(
                "CheckpointConfig(stateful=...): expected objects by name, such as "
                f"{{'meter': meter}}, not a {type(self.stateful).__name__}"
            )
        for name, entry in self.stateful.items():
            if not (hasattr(entry, "state_dict") and hasattr(entry, "load_state_dict")):
                raise UsageError(
                    f"CheckpointConfig(stateful=...): {name!r} is a {type(entry).__name__} without "
                    "the methods state_dict() and load_state_dict(state)"
                )


def read_checkpoint_argument(given: CheckpointConfig | bool | None) -> CheckpointConfig | None:
    """Return the settings that an argument `checkpoint` selects; None: no checkpoints.

    Raises:
        UsageError: The argument has another type.
    """
    if given is True:
        return CheckpointConfig()
    if given is None or given is False:
        return None
    if not isinstance(given, CheckpointConfig):
        raise UsageError(
            f"checkpoint={given!r}: expected True, False or a lockstep.CheckpointConfig"
        )
    return given


class CheckpointSchedule:
    """The rule that decides after which steps a checkpoint is due.

    Args:
        config: The intervals.
        now: The time of the start, in seconds of a monotonic clock.
    """

    def __init__(self, config: CheckpointConfig, now: float) -> None:
        self._steps = config.every_steps
        self._seconds = config.every_seconds
        self._last_step = 0
        self._last_time = now

    def is_due(self, steps: int, now: float, cost: float = 0.0) -> bool:
        """Return whether a checkpoint is due.

        Args:
            steps: The number of finished steps.
            now: The time, by the same clock.
            cost: The seconds that writing the latest checkpoint took.
        """
        if self._steps is not None and steps // self._steps > self._last_step // self._steps:
            return True
        seconds = self._seconds
        if self._steps is None and seconds is None:
            seconds = min(MOST_SECONDS, max(LEAST_SECONDS, cost / COST))
        return seconds is not None and now - self._last_time >= seconds

    def saved(self, steps: int, now: float) -> None:
        """Note that a checkpoint was saved or loaded after `steps` steps."""
        self._last_step = steps
        self._last_time = now
