"""What pytest's own process and a rank tell each other, in plain values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["Order", "Result", "run_order"]


@dataclass(frozen=True)
class Order:
    """What a rank has to run.

    Attributes:
        nodeid: The test.
        rank: The rank.
        width: The number of ranks.
        backend: The backend of the group.
        joins: Whether to join the group.
        timeout: Seconds after which the backend gives up a call.
        allowed_leaks: Kinds of leaks that are not looked for.
        values: Pickled values of fixtures.
        instance: Pickled attributes of the object whose method the test is.
        coverage: Settings of the line coverage; None if it is not measured.
        debugs: Whether the launcher runs with `--pdb`.
    """

    nodeid: str
    rank: int
    width: int
    backend: str
    joins: bool
    timeout: float
    allowed_leaks: tuple[str, ...]
    values: dict[str, bytes]
    instance: dict[str, bytes]
    coverage: dict[str, Any] | None
    debugs: bool


@dataclass
class Result:
    """How a test ended in a rank without failing.

    Attributes:
        outcome: "passed", "skipped", "xfailed", "exit", or "killed" by `pytest_lockstep.kill`.
        reason: Why, if it did not pass.
        sections: Titles and texts of what was logged.
        properties: What the fixture `record_property` recorded.
        warnings: Message, category, file and line of each warning.
    """

    outcome: str = "passed"
    reason: str = ""
    sections: list[tuple[str, str]] = field(default_factory=list)
    properties: list[tuple[str, object]] = field(default_factory=list)
    warnings: list[tuple[str, type[Warning], str, int]] = field(default_factory=list)


def run_order(order: Order) -> Result:
    """Run a test in this process, which is a rank.

    Pickled by its name in pytest's own process, which need not import torch for that.
    """
    from pytest_lockstep.rank import run_test

    return run_test(order)
