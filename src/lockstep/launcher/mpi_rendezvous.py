"""What installations of earlier sources name as an entry point, which `import torch` calls."""

from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """Do nothing: the backend "mpi4py" has left. Install again to remove the entry point."""
