"""What is asked of a replay and what it returns, as plain values without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from lockstep.check.layouts import Layout
from lockstep.model.fingerprint import StepFingerprint
from lockstep.model.operator_call import KeptTensors, OperatorCall

__all__ = ["Level", "Replay", "ReplayRequest", "ReplayedStep"]

Level = Literal["result", "modules", "operators"]
"""What is recorded: results of the steps; also what each module, or each operator, computed."""


@dataclass(frozen=True)
class ReplayRequest:
    """Which steps of a run to compute again.

    Attributes:
        run: The folder of the run.
        first: The first step that is wanted, from 0.
        last: The last one.
        layout: Where the training takes place.
        level: What is recorded of the wanted steps.
        microbatch: The only micro-batch to compute of the step `first`, which is then not
            finished; None for whole steps.
        kept: The index, among the operators of the step `first`, of the one whose tensors are
            kept at level "operators"; None for none.
        timeout: Seconds after which the ranks are ended; None for no limit.
    """

    run: Path
    first: int
    last: int
    layout: Layout = field(default_factory=lambda: Layout(1))
    level: Level = "result"
    microbatch: int | None = None
    kept: int | None = None
    timeout: float | None = None


@dataclass(frozen=True)
class ReplayedStep:
    """One step, as the replay computed it.

    Attributes:
        step: Its number, from 0.
        epoch: Its epoch, from 0.
        loss: The loss of the batch, before the step.
        norm: The 2-norm of the gradient before clipping.
        losses: The loss of each micro-batch; None for one that was not computed.
        batch: A hash of the batch's samples, as in the record; None where it is not known.
        digest: `trainer.digest()` after the step.
        fingerprints: What each rank's modules computed, by rank; only at level "modules".
        operators: The operators that rank 0 executed, in order; only at level "operators".
        kept: The tensors of the operator that the request names, of this step; None for none.
    """

    step: int
    epoch: int
    loss: float
    norm: float
    losses: tuple[float | None, ...]
    batch: str | None
    digest: str
    fingerprints: list[StepFingerprint] = field(default_factory=list)
    operators: list[OperatorCall] = field(default_factory=list)
    kept: KeptTensors | None = None


@dataclass(frozen=True)
class Replay:
    """What came of a replay.

    Attributes:
        steps: The wanted steps, as far as it came.
        base: The number of steps in the checkpoint from which it began; 0 for the beginning.
        seconds: From the start of the ranks to their end.
        failure: Why it ended too early, as one sentence; "" if it did not.
        details: The traceback and the last lines of output of the failed rank.
    """

    steps: list[ReplayedStep]
    base: int
    seconds: float
    failure: str = ""
    details: str = ""
