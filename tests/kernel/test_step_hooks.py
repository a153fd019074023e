"""Hooks: what a step calls of them, and in which steps."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.kernel.step import find_active
from lockstep.kernel.step_context import StepContext
from lockstep.kernel.step_hooks import StepHook


class Silent(StepHook):
    """A hook that overrides nothing."""


class Begins(StepHook):
    """A hook of the first two steps, and of every fifth."""

    first = 2
    every = 5

    def begin(self, step: StepContext, batch: Any) -> None:
        """Do nothing."""


class Reports(Begins):
    """A hook that adds a method to those of its base."""

    def commit(self, step: StepContext) -> None:
        """Do nothing."""


@pytest.mark.parametrize(
    ("kind", "events"),
    [(Silent, set()), (Begins, {"begin"}), (Reports, {"begin", "commit"})],
)
def test_a_step_calls_what_a_hook_overrides(kind: type[StepHook], events: set[str]) -> None:
    assert kind.events == events


def test_a_hook_takes_part_in_its_first_steps_and_in_multiples() -> None:
    hooks = [Silent(), Begins()]
    counts = [len(find_active(hooks, number)) for number in range(11)]
    assert counts == [2, 2, 1, 1, 1, 2, 1, 1, 1, 1, 2]
