"""Faults that are known and not fixed yet: cases that meet one are left out. To be empty."""

from __future__ import annotations

from grammar import Case


def known_fault(case: Case) -> str:
    """Return the fault that a case meets; nothing if it meets none."""
    staged = any(leg.layout.stages > 1 for leg in case.legs)
    recomputed = any(leg.layout.recompute for leg in case.legs)
    has_alias = "'view')" in str(case.model) or "'detached')" in str(case.model)
    if has_alias and (staged or recomputed):
        return "11 aliases across a boundary"
    return ""
