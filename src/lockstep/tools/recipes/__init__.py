"""Complete trainings on real data, one file per recipe."""

from __future__ import annotations

__all__ = ["NAMES"]

NAMES = ("digits",)
"""The recipes of `lockstep train`."""
