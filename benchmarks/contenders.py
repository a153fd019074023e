"""The contenders of a race that need the backend lockstep, where it can't be used."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from lockstep.comm import backend
from lockstep.errors import UsageError

__all__ = ["lacking", "require"]


class Way(Protocol):
    """A way to train, on a backend."""

    @property
    def backend(self) -> str:
        """The backend's name."""


def lacking(ways: Mapping[str, Way]) -> list[str]:
    """Return the names of the `ways` that cannot run here."""
    if backend.available():
        return []
    return [name for name, way in ways.items() if way.backend == "lockstep"]


def require(name: str, without: Collection[str]) -> None:
    """Raise UsageError where `name` is one of those that cannot run here."""
    if name in without:
        raise UsageError(
            f"--vs {name} needs the backend 'lockstep', which can't be used here; "
            f"{backend.reason_unavailable()}; or leave it out"
        )
