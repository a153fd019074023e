"""Trainings that have the same outcome on every rank of every number of ranks.

    training = Trainings()

    @training
    def with_dropout():
        ...
        return trainer.digest()

    outcomes = training.make_fixture(1, 2, 3)
    test_outcomes = training.make_test()

All trainings of a module run in one launch per number of ranks.
"""

from collections.abc import Callable
from typing import Any

import pytest


class Trainings:
    """The trainings of one test module, registered by its functions' names."""

    def __init__(self) -> None:
        self.functions: dict[str, Callable[[], Any]] = {}

    def __call__(self, function: Callable[[], Any]) -> Callable[[], Any]:
        """Register a training, which returns its outcome on this rank."""
        self.functions[function.__name__] = function
        return function

    def run(self) -> dict[str, Any]:
        """Run all trainings on this rank; return their outcomes by name."""
        return {name: function() for name, function in self.functions.items()}

    def make_fixture(self, *numbers: int, backend: str | None = None) -> Any:
        """Return a fixture of the outcomes of every rank, with these numbers of ranks."""

        @pytest.fixture(scope="module")
        def outcomes(ranks: Callable[..., list[Any]]) -> list[dict[str, Any]]:
            return [
                outcome
                for n in numbers
                for outcome in ranks(self.run, n, backend=backend, timeout=100.0)
            ]

        return outcomes

    def make_test(self) -> Any:
        """Return the test that compares the outcomes, one case per training."""

        @pytest.mark.parametrize("name", self.functions)
        def test(outcomes: list[dict[str, Any]], name: str) -> None:
            for outcome in outcomes:
                assert outcome[name] == outcomes[0][name]

        return test
