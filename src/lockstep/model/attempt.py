"""Attempts: the steps that a trainer begins, whether or not they finish.

             step 0      step 1      step 2      step 2
    rank 0   attempt 0   attempt 1   attempt 2 . . . . .  waits for the others' gradients
    rank 1   attempt 0   attempt 1   attempt 2   attempt 3
                                     raised, and the loop went on with the next batch

A step that fails is repeated under its own number, so the step's number cannot tell
these ranks apart. The attempt's number can: it is part of what every exchange of a step
compares before anything is added.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Attempt"]


@dataclass
class Attempt:
    """One attempt at a step of a trainer, on this rank.

    Attributes:
        trainer: The number of the trainer in the world, from 0.
        step: The number of the step, from 0; finished steps only are counted.
        number: The number of the attempt, from 0; all attempts are counted.
        previous_failure: How the attempt before failed on this rank, or "".
        failure: How this attempt failed on this rank, or "".
    """

    trainer: int
    step: int
    number: int
    previous_failure: str = ""
    failure: str = ""

    def following(self, step: int) -> Attempt:
        """Return the next attempt, at step `step`."""
        return Attempt(self.trainer, step, self.number + 1, previous_failure=self.failure)

    def fail(self, error: BaseException) -> None:
        """Remember that this attempt raised `error`."""
        first = (str(error).splitlines() or [""])[0]
        self.failure = (
            f"attempt {self.number}, at step {self.step}, raised {type(error).__name__}: {first}"
        )

    def __str__(self) -> str:
        """Return the words that every exchange of the attempt compares."""
        return f"in step {self.step} of trainer {self.trainer} (attempt {self.number})"
