"""Contenders that need the backend "lockstep", if it is unavailable."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from lockstep.comm import backend
from lockstep.kernel.errors import UsageError

__all__ = ["require_available", "unavailable"]


class Contender(Protocol):
    """A training method on a backend."""

    @property
    def backend(self) -> str:
        """The backend's name."""


def unavailable(contenders: Mapping[str, Contender]) -> list[str]:
    """Return the names of the `contenders` that cannot run here."""
    if backend.available():
        return []
    return [name for name, contender in contenders.items() if contender.backend == "lockstep"]


def require_available(name: str, without: Collection[str]) -> None:
    """Raise UsageError where `name` is one of those that cannot run here."""
    if name in without:
        raise UsageError(
            f"--vs {name} needs the backend 'lockstep', which can't be used here; "
            f"{backend.reason_unavailable()}; or leave it out"
        )
