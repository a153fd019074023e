"""Test distributed PyTorch code with pytest: every rank is a process, forked in milliseconds.

The public names, in reading order. They are imported when they are first used, because pytest
loads this package in every run.

PYTEST_DONT_REWRITE: nothing here asserts, and the template process imports this package before
pytest.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_lockstep.assertions import assert_same_bits as assert_same_bits
    from pytest_lockstep.assertions import assert_same_on_ranks as assert_same_on_ranks
    from pytest_lockstep.assertions import assert_width_invariant as assert_width_invariant
    from pytest_lockstep.faults import corrupt as corrupt
    from pytest_lockstep.faults import delay as delay
    from pytest_lockstep.faults import kill as kill
    from pytest_lockstep.marker import rank_fixture as rank_fixture
    from pytest_lockstep.runner import run as run

# name -> the module that defines it
PUBLIC = {
    "rank_fixture": "marker",
    "run": "runner",
    "assert_same_bits": "assertions",
    "assert_same_on_ranks": "assertions",
    "assert_width_invariant": "assertions",
    "kill": "faults",
    "delay": "faults",
    "corrupt": "faults",
}

__version__ = "0.1.0"
__all__ = [*PUBLIC, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in PUBLIC:
        raise AttributeError(f"module 'pytest_lockstep' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"pytest_lockstep.{PUBLIC[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *PUBLIC})
