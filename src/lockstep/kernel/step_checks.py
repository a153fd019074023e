"""The errors that prevent a step, each raised on every rank from the same summary."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from lockstep.kernel.errors import (
    BufferMismatchError,
    GradientError,
    LossError,
    StateError,
    StoppedError,
)
from lockstep.kernel.parts import Part
from lockstep.kernel.rank_status import NonFiniteLoss, StatusSummary
from lockstep.kernel.step_context import StepContext, StepWarning

__all__ = ["raise_failure", "raise_own_error", "refuse_buffers"]


def raise_own_error(step: StepContext) -> None:
    """Raise the error of a stage of this rank, unless the step is refused for another reason."""
    error = None if step.failure is None else step.failure.error
    if error is not None and not isinstance(error, StoppedError) and not step.refusal:
        raise error


def raise_failure(step: StepContext, summary: StatusSummary) -> None:
    """Raise the failure of the first rank that stops the step, or of a loss, if there is one."""
    if summary.failure is not None:
        rank, kind, sentence = summary.failure
        if kind == "stopped":
            raise StoppedError(f"rank {step.parallel.rank} stopped because {sentence}")
        error = (GradientError if kind == "failure" else StateError)(
            f"rank {rank}, step {step.number}: {sentence}"
        )
        error.reason = sentence
        raise error
    if summary.non_finite is not None:
        raise _explain_loss(step, summary.non_finite, summary.warnings)


def _explain_loss(
    step: StepContext, lost: NonFiniteLoss, warnings: Sequence[tuple[int, StepWarning]]
) -> LossError:
    advice = ""
    kinds = {warning.kind for _, warning in warnings}
    if math.isnan(lost.loss) and not kinds.isdisjoint({"ignored_targets", "not_additive"}):
        loss = "torch.nn.CrossEntropyLoss()" if step.parallel.loss is None else "loss"
        advice = (
            " (if it ignores all targets of the micro-batch, pass loss_weight="
            f"ls.target_weight({loss}) to the trainer)"
        )
    error = LossError(
        f"rank {lost.rank}, step {step.number}, micro-batch {lost.leaf}: the loss is "
        f"{lost.loss}{advice}"
    )
    error.microbatch = lost.leaf
    error.loss = str(lost.loss)
    return error


def refuse_buffers(step: StepContext, parts: Sequence[Part], summary: StatusSummary) -> None:
    """Raise the error about a buffer that cannot be merged, which one rank can explain."""
    every = summary.buffers.values()
    if not any(report.is_refused for reports in every for report in reports):
        return
    reports = summary.buffers[str(step.parallel.position)]
    pairs = zip(parts, reports, strict=True)
    reasons = [buffers.describe_refusal(report) for (_, buffers), report in pairs]
    mine = json.dumps(max(reasons, default=(False, ""))).encode()
    messages = [mine]
    if summary.ranks > 1:
        about = f"comparing buffers {step.label.about}"
        messages = step.parallel.messages.gather(mine, about)
    _, reason = max(tuple(json.loads(message)) for message in messages)
    raise BufferMismatchError(f"step {step.number}: {reason}")
