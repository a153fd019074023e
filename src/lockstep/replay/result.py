"""The request for a replay and its result, as plain values without torch."""

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
        microbatch: The micro-batch of the step `first` that is wanted; on one rank it is
            computed alone, and the step not finished. None for whole steps.
        kept: The index, among the operators of the step `first`, of the one whose tensors are
            kept at level "operators"; None for none.
        dump: The folder into which the tensors of that micro-batch are written; None for none.
        anomaly: Compute that micro-batch in autograd's anomaly mode.
        debug: Compute that micro-batch under pdb, in this terminal.
        timeout: Seconds after which the ranks are ended; None for no limit.
    """

    run: Path
    first: int
    last: int
    layout: Layout = field(default_factory=lambda: Layout(1))
    level: Level = "result"
    microbatch: int | None = None
    kept: int | None = None
    dump: Path | None = None
    anomaly: bool = False
    debug: bool = False
    timeout: float | None = None

    @property
    def is_alone(self) -> bool:
        """Whether one micro-batch is computed alone, and not the whole step."""
        return self.microbatch is not None and self.layout.ranks == 1


@dataclass(frozen=True)
class ReplayedStep:
    """One step, as the replay computed it.

    A step in which the program failed has neither results nor a digest, only what modules or
    operators computed.

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
        samples: The indices in the dataset of the samples of the micro-batch that was computed
            alone; None where they are not known.
        remarks: What was found in the micro-batch that was computed alone, in sentences.
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
    samples: tuple[int, ...] | None = None
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Replay:
    """The result of a replay.

    Attributes:
        steps: The wanted steps, as far as it came.
        base: The number of steps in the checkpoint from which it began; 0 for the beginning.
        seconds: From the start of the ranks to their end.
        failure: Why it ended too early, as one sentence; "" if it did not.
        details: The traceback and the last lines of output of the failed rank.
        finished: The number of steps that were finished when it ended; None where the program did
            not come to the trainer.
        is_refused: Whether the failure says that the program has no such layout.
        is_left: Whether the user left the debugger before the micro-batch was computed.
    """

    steps: list[ReplayedStep]
    base: int
    seconds: float
    failure: str = ""
    details: str = ""
    finished: int | None = None
    is_refused: bool = False
    is_left: bool = False
