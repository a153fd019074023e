"""The messages between pytest's own process and a rank, as plain values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["Order", "Result"]


@dataclass(frozen=True)
class Order:
    """An order to a rank to run a test.

    Attributes:
        nodeid: The test.
        rank: The rank.
        width: The number of ranks.
        backend: The backend of the group.
        joins: Whether to join the group.
        timeout: Seconds after which a call of the backend fails.
        allowed_leaks: The kinds of leaks that are ignored.
        values: Pickled values of fixtures.
        instance: Pickled attributes of the test class's instance, if the test is a method.
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
    """The result of a test in a rank in which it did not fail.

    Attributes:
        outcome: "passed", "skipped", "xfailed", "exit", or "killed" by `pytest_lockstep.kill`.
        reason: The reason if the outcome is not "passed".
        sections: Titles and texts of the logs.
        properties: The properties recorded by the fixture `record_property`.
        warnings: Message, category, file and line of each warning.
    """

    outcome: str = "passed"
    reason: str = ""
    sections: list[tuple[str, str]] = field(default_factory=list)
    properties: list[tuple[str, object]] = field(default_factory=list)
    warnings: list[tuple[str, type[Warning], str, int]] = field(default_factory=list)
