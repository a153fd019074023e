"""The evaluations and predictions of a trainer as operations of every rank.

prepare    every rank computes its micro-batches; repeated if a rank of an elastic run is lost
commit     the history gets the evaluation; a resumed script gets the recorded one
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lockstep.data.loader import Batches
from lockstep.elastic.membership import exchange, run_transaction
from lockstep.model.evaluation import Evaluation, EvaluationTask, Scoring
from lockstep.model.predictions import Predictions
from lockstep.training.resume.resumable_run import ResumableRun

__all__ = ["EvaluationOperation"]


class EvaluationOperation:
    """The evaluations and predictions of one trainer.

    Args:
        run: The run, which answers a resumed script.
    """

    def __init__(self, run: ResumableRun) -> None:
        self._run = run
        self._state = run.state
        self._parallel = run.state.parallel

    def evaluate(
        self, options: Mapping[str, Any], begin: Callable[[], Scoring], *, ema: bool
    ) -> Evaluation:
        """Return the mean loss and the metrics over a dataset.

        Args:
            options: The options of `Batches`.
            begin: Returns the task of the evaluation.
            ema: Whether to evaluate the averaged weights.
        """

        def commit(task: Scoring, evaluation: Evaluation) -> dict[str, Any]:
            for warning in task.warnings:
                self._state.history.warn(self._parallel.rank, "evaluation", warning, show=True)
            self._state.history.add_evaluation(evaluation)
            return vars(evaluation)

        def call() -> dict[str, Any]:
            recorded: dict[str, Any] = self._perform(options, ema, begin, commit)
            return recorded

        batches = self._make_batches(options, "an evaluation")
        return Evaluation(**self._run.evaluate(batches, call, ema=ema))

    def predict(
        self, options: Mapping[str, Any], begin: Callable[[], Predictions], *, ema: bool
    ) -> Any:
        """Return the outputs for a dataset; the arguments are those of `evaluate`."""
        self._run.begin_prediction()
        return self._perform(options, ema, begin, lambda task, outputs: outputs)

    def _make_batches(self, options: Mapping[str, Any], about: str) -> Batches:
        def agree(message: bytes, doing: str) -> list[bytes]:
            return exchange(lambda: message, f"{doing} {about}", self._parallel.group)

        return Batches(**options, **self._parallel.loader_options(), agree=agree)

    def _perform(
        self,
        options: Mapping[str, Any],
        ema: bool,
        begin: Callable[[], Any],
        commit: Callable[[Any, Any], Any],
    ) -> Any:
        """Compute a task on every rank, and again if a rank is lost; then commit its result."""
        copy = self._state.select_module() if ema else None

        def prepare() -> tuple[EvaluationTask, Any]:
            task: EvaluationTask = begin()
            batches = self._make_batches(options, task.about)
            return task, self._state.executor.evaluate(copy, task.prepare(batches), task)

        return run_transaction(prepare, lambda done: commit(*done))
