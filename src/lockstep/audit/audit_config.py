"""The settings of the audit."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.formatting import format_quantity
from lockstep.kernel.errors import UsageError

__all__ = ["AuditConfig", "read_audit"]

SERIES = (0, 1, 2, 5, 10, 20, 50)
"""The steps that are audited at the beginning of a run."""


@dataclass(frozen=True)
class AuditConfig:
    """The settings of a trainer's audit, for `Trainer(audit=...)`.

    In an audited step, one micro-batch is computed again, on another rank if there is one, and
    the bits of the results are compared.

    Attributes:
        every_steps: The number of steps between two audited steps. The steps 0, 1, 2, 5, 10, 20
            and 50 are audited, too.
        max_corrections: The number of wrong results of one rank that are corrected. The run stops
            after the next one.

    Raises:
        UsageError: A value is invalid.
    """

    every_steps: int = 100
    max_corrections: int = 3

    def __post_init__(self) -> None:
        """Check the values."""
        for name, least in (("every_steps", 1), ("max_corrections", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                kind = "positive whole number" if least else "whole number, at least 0"
                raise UsageError(f"AuditConfig({name}={value!r}): expected a {kind}")

    def is_audited(self, step: int) -> bool:
        """Return whether a step is audited."""
        return step in SERIES or step % self.every_steps == 0

    def count_audited(self, step: int) -> int:
        """Return the number of audited steps before a step."""
        multiples = -(-step // self.every_steps)
        return multiples + sum(n < step and n % self.every_steps != 0 for n in SERIES)

    def explain_excess(self, corrections: int) -> str:
        """Return why a rank with this number of wrong results cannot go on, after its name."""
        return (
            f"computed {format_quantity(corrections, 'wrong result')}, more than "
            f"max_corrections={self.max_corrections}: continue on other cores or another host"
        )

    @property
    def limits(self) -> tuple[int, int]:
        """The numbers (first, every) of a hook: only steps below `first` and multiples of `every`.

        Most steps that are not audited are not among them.
        """
        return (3, 5) if self.every_steps % 5 == 0 else (51, self.every_steps)


def read_audit(given: AuditConfig | bool) -> AuditConfig | None:
    """Return the settings that an argument `audit` selects; None: no step is audited.

    Raises:
        UsageError: The argument has another type.
    """
    if isinstance(given, AuditConfig):
        return given
    if not isinstance(given, bool):
        raise UsageError(f"audit={given!r}: expected True, False or a lockstep.AuditConfig")
    return AuditConfig() if given else None
