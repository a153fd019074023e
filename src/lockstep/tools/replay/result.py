"""The request for a replay and its result, as plain values without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lockstep.audit.operator_call import KeptTensors, OperatorCall
from lockstep.model.fingerprint import StepFingerprint

__all__ = ["Level", "Replay", "ReplayRequest", "ReplayedStep"]

Level = Literal["result", "modules", "operators"]
"""The level of recording: results of the steps; also the results of modules, or of operators."""


@dataclass(frozen=True)
class ReplayRequest:
    """A request to compute steps of a run again.

    Attributes:
        run: The folder of the run.
        first: The first step that is wanted, from 0.
        last: The last step that is wanted.
        ranks: The number of ranks of the replay; one at the levels "modules" and "operators".
        level: The level of recording for the wanted steps.
        microbatch: The micro-batch of the step `first` that is wanted. On one rank it is
            computed alone, and the step is not finished. None for whole steps.
        kept: The index of the operator of the step `first` whose tensors are kept at level
            "operators"; None for none.
        debug: Whether that micro-batch is computed under pdb, in this terminal.
    """

    run: Path
    first: int
    last: int
    ranks: int = 1
    level: Level = "result"
    microbatch: int | None = None
    kept: int | None = None
    debug: bool = False

    @property
    def is_alone(self) -> bool:
        """Whether one micro-batch is computed alone, and not the whole step."""
        return self.microbatch is not None and self.ranks == 1


@dataclass(frozen=True)
class ReplayedStep:
    """One step, as the replay computed it.

    Attributes:
        step: Its number, from 0.
        epoch: Its epoch, from 0.
        loss: The loss of the batch, before the step.
        norm: The 2-norm of the gradient before clipping.
        losses: The loss of each micro-batch; None for one that was not computed.
        batch: A hash of the batch's samples, as in the record; None if it is not known.
        digest: `trainer.digest()` after the step.
        optimizer_digest: `trainer.optimizer_digest()` after the step.
        fingerprints: The fingerprints of modules, by rank; only at level "modules".
        operators: The operators that rank 0 executed, in order; only at level "operators".
        kept: The tensors of the operator that the request names; None for none.
        samples: The dataset indices of the samples of the micro-batch that was computed alone;
            None if they are not known.
    """

    step: int
    epoch: int = 0
    loss: float = math.nan
    norm: float = math.nan
    losses: tuple[float | None, ...] = ()
    batch: str | None = None
    digest: str = ""
    optimizer_digest: str = ""
    fingerprints: list[StepFingerprint] = field(default_factory=list)
    operators: list[OperatorCall] = field(default_factory=list)
    kept: KeptTensors | None = None
    samples: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Replay:
    """The result of a replay.

    Attributes:
        steps: The wanted steps that were computed.
        base: The number of steps in the checkpoint from which it began; 0 for the beginning.
        seconds: The time from the start of the ranks to their end, in seconds.
        failure: A sentence about why it ended too early; "" if it did not.
        details: The traceback and the last lines of output of the failed rank.
        stop: The failure of a step for which it ended, as fields of a record's last line; None
            for other failures, and if it did not fail.
        is_left: Whether the user left the debugger before the micro-batch was computed.
    """

    steps: list[ReplayedStep]
    base: int
    seconds: float
    failure: str = ""
    details: str = ""
    is_left: bool = False
    stop: Mapping[str, Any] | None = None
