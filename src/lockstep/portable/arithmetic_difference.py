"""Fingerprints of arithmetic as texts: their families, and in which of them two differ."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["NOT_OF_TORCH", "advise", "find_differences", "join", "name_differences", "parse"]

NOT_OF_TORCH = frozenset({"functions of the C library", "numpy"})
"""The families whose bits depend on software that torch does not contain."""


def join(hashes: Mapping[str, str]) -> str:
    """Return the fingerprint with these hashes by the names of the families."""
    return ", ".join(f"{name}={value}" for name, value in hashes.items())


def parse(arithmetic: str) -> dict[str, str]:
    """Return the hashes of a fingerprint by the names of the families."""
    pairs = (part.partition("=") for part in arithmetic.split(", "))
    return {name: value for name, _, value in pairs}


def name_differences(a: str, b: str) -> str:
    """Return the families in which two fingerprints differ, as a list in words; "" if none do."""
    *names, last = find_differences(a, b) or [""]
    return f"{', '.join(names)} and {last}" if names else last


def find_differences(a: str, b: str) -> list[str]:
    """Return the names of the families in which two fingerprints differ."""
    ours = parse(a)
    theirs = parse(b)
    return [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]


def advise(a: str, b: str) -> str:
    """Return what makes the bits of two different fingerprints the same."""
    if NOT_OF_TORCH.issuperset(find_differences(a, b)):
        return "use the same version of the C library and of numpy, and start with --portable"
    return "start with --portable, for the same bits on every x86-64 processor with AVX2"
