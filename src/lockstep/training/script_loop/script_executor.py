"""The executor of steps whose micro-batches a script computes in a loop of its own.

Several models may have open steps at once, such as those of a GAN. The generators then continue as
if no step had drawn anything when the last of these steps has ended:

    model A       begin ───────── end
    model B              begin ─────────── end
    generators    kept                     restored
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from lockstep.kernel.step_context import StepContext
from lockstep.model.script_calls import ScriptCalls
from lockstep.model.watched_calls import WatchedCalls
from lockstep.training.microbatch_loop import MicrobatchLoop
from lockstep.training.whole_model import WholeModelExecutor

__all__ = ["ScriptExecutor", "has_open_step"]


@dataclass
class OpenSteps:
    """The open steps of the scripts' loops in this process.

    Attributes:
        count: Their number.
        restore: The function that restores the generators after the last of them.
    """

    count: int = 0
    restore: Callable[[], None] | None = None


_open_steps = OpenSteps()


def has_open_step() -> bool:
    """Return whether a step of a script's loop is open in this process."""
    return _open_steps.count > 0


# It has many attributes: those of the executor that it extends, and what a script leaves open
# between two calls.
class ScriptExecutor(WholeModelExecutor):
    """The executor of a script's own loop; the arguments are those of `WholeModelExecutor`.

    Attributes:
        calls: The calls of the model, watched as long as it exists.
        is_repeatable: Whether an audit may repeat them.
    """

    left_early = (
        "the step was left before its last micro-batch: iterate over all micro-batches of a batch"
    )

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.is_repeatable = True
        self.calls = ScriptCalls(self._called, self._scopes, has_open_step)
        # For good, so that calls between two micro-batches are known, too. The scopes come first,
        # since a call that is no part of the training must not reach them.
        self._installed = self._scopes.install_hooks()
        self._installed.__enter__()
        self.calls.install()

    @contextmanager
    def open(self, step: StepContext) -> Iterator[MicrobatchLoop]:
        """Watch the calls of the model while the body computes a step."""
        with super().open(step) as loop:
            self.calls.loop = loop
            try:
                yield loop
            finally:
                self.calls.loop = None

    def find_calls(self) -> list[WatchedCalls]:
        """Return the calls of the model, which an audit repeats between two micro-batches."""
        if not self.is_repeatable:
            return []
        return [
            replace(calls, call=self.calls.call_unwatched, watch=self.calls.watch)
            for calls in super().find_calls()
        ]

    @contextmanager
    def _seed_calls(self) -> Iterator[None]:
        """Keep the generators, and restore them after the last of overlapping steps."""
        if not _open_steps.count:
            _open_steps.restore = self._scopes.remember()
        _open_steps.count += 1
        try:
            yield
        finally:
            self._scopes.pause()
            _open_steps.count -= 1
            restore = _open_steps.restore
            if not _open_steps.count and restore is not None:
                restore()
