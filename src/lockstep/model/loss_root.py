"""The root of a backward pass: the loss of a micro-batch, multiplied by its share of the batch."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from lockstep.kernel.errors import LossError
from lockstep.kernel.loss_scale import LossScale
from lockstep.kernel.step_context import StepContext

__all__ = [
    "LossRoot",
    "check_scalar",
    "read_gradients",
    "record_loss",
    "run_backward",
    "scale_loss",
    "warn_of_denominator",
]

FIRST = 3  # steps in which divisions and ignored targets are looked for
REACHED = 8  # operations before the loss among which one is looked for that ignores targets
MEAN = 1  # torch's number of `reduction="mean"`

_is_logged = logging.getLogger("torch.autograd.graph").isEnabledFor
_is_mode_enabled = torch._C._is_torch_function_mode_enabled
_run_engine: Any = torch.autograd.Variable._execution_engine.run_backward


def check_scalar(loss: object, where: str) -> None:
    """Raise LossError unless a loss is a tensor with one number."""
    if not isinstance(loss, torch.Tensor):
        advice = ": pass the loss in it" if isinstance(loss, (tuple, list, Mapping)) else ""
        if isinstance(loss, (float, int)):
            advice = ": leave out .item() or float()"
        raise LossError(f"{where}: the loss is a {type(loss).__name__}, not a tensor{advice}")
    if loss.numel() != 1:
        raise LossError(
            f"{where}: the loss has shape {tuple(loss.shape)}; it must be a scalar, so leave "
            'the loss at reduction="mean" or call .mean() on it'
        )
    if loss.is_complex():
        raise LossError(f"{where}: the loss is complex; pass a real number, such as loss.abs()")


def record_loss(
    step: StepContext, loss: torch.Tensor, where: str, factor: float = 1.0
) -> torch.Tensor:
    """Show a loss times a factor to the observers, and return it, detached.

    Raises:
        LossError: Backward cannot start from the loss.
    """
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or loss.is_complex():
        check_scalar(loss, where)
    noted = loss.detach() if factor == 1 else loss.detach() * factor
    for observer in step.observers:
        observer.record_loss(noted)
    if not loss.requires_grad:
        raise LossError(
            f"{where}: the loss depends on no trainable parameter; either all parameters are "
            "frozen, or the loss was computed under torch.no_grad() or detached by .detach(), "
            ".item() or .data"
        )
    return noted


def warn_of_denominator(step: StepContext, loss: torch.Tensor, size: int, call: str) -> None:
    """Warn in the first steps if a loss that is multiplied by its share is no mean over samples.

    It may be divided by a number of micro-batches, too, or be a mean over some of the targets.

    Args:
        step: The context of the step.
        loss: The loss of a micro-batch before it is multiplied by its share.
        size: The number of samples of the micro-batch, by which a sum may be divided.
        call: What multiplies it, such as "exact.weigh(loss)".
    """
    if step.number >= FIRST or not isinstance(loss, torch.Tensor) or loss.is_complex():
        return
    assert step.batch is not None
    divisor = _find_divisor(loss)
    numbers = {
        float(len(step.batch.microbatches)): "this rank, which depends on the number of ranks",
        float(step.batch.leaves): "the batch",
    }
    if divisor > 1 and divisor != size and divisor in numbers:
        step.warn(
            step.where,
            f"the loss is divided by {divisor:g}, the number of micro-batches of "
            f"{numbers[divisor]}, and {call} multiplies it by the share of the micro-batch, too: "
            "leave out the division",
        )
    if _ignores_targets(loss) and not step.has_warned("ignored_targets"):
        is_trainer = call.startswith("step.")
        step.warn(
            step.where,
            "the loss is a mean that ignores some targets or weights classes, and "
            f"{call} multiplies it by the micro-batch's share of the samples, so the gradient is "
            "not that of the whole batch: "
            + (
                "pass loss_weight= to the trainer, or divide a sum by step.total and pass share=1"
                if is_trainer
                else "pass what the mean divides by, such as weight=(targets != -100).sum()"
            ),
            "ignored_targets",
        )


def _ignores_targets(loss: torch.Tensor) -> bool:
    """Return whether a loss contains a mean of torch over targets that do not all count alike."""
    operations: list[Any] = [loss.grad_fn]
    for operation in operations:
        if operation is None:
            continue
        if operation.name() in ("NllLossBackward0", "NllLoss2DBackward0"):
            ignored = operation._saved_ignore_index
            ignored -= (ignored >> 63) << 64  # torch shows a negative index without its sign
            return operation._saved_reduction == MEAN and (
                operation._saved_weight is not None
                or bool((operation._saved_target == ignored).any())
            )
        if len(operations) < REACHED:
            operations += [before for before, _ in operation.next_functions]
    return False


def _find_divisor(loss: torch.Tensor) -> float:
    """Return the number by which the last operation of a loss divides it; 1 if it does not."""
    operation: Any = loss.grad_fn
    name = "" if operation is None else operation.name()
    if name not in ("DivBackward0", "MulBackward0"):
        return 1.0
    other = operation._saved_other
    divided = operation.next_functions[0][0]
    is_sum = divided is not None and "Sum" in divided.name()
    if other is None or other.requires_grad or other.numel() != 1 or is_sum:
        return 1.0
    number = float(other)
    if name == "DivBackward0" or not number:
        return number
    return float(round(1 / number, 6))


def scale_loss(loss: torch.Tensor, share: float, scale: LossScale | None) -> torch.Tensor:
    """Return the loss multiplied by its share of the batch and the loss scale."""
    return loss * share if scale is None else scale.scale(loss, share)


class LossRoot:
    """The gradient of the last loss, which the next one usually has too.

    Args:
        scale: The loss scale; None: there is none.
    """

    def __init__(self, scale: LossScale | None) -> None:
        self._scale = scale
        self._gradient: torch.Tensor | None = None
        self._share = 0.0
        self._version = 0

    def find(self, loss: torch.Tensor, share: float) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the tensor at which backward begins, and its gradient (None for 1).

        The bits are the same as with `scale_loss`. Without a loss scale the share is the gradient,
        so the graph needs no multiplication.
        """
        known = self._gradient
        if (
            known is not None
            and self._share == share
            and known._version == self._version  # otherwise a hook wrote to it
            and known.dtype == loss.dtype
            and known.ndim == loss.ndim  # both have one element
            and known.device == loss.device
        ):
            return loss, known
        if self._scale is not None or not loss.is_floating_point():
            return scale_loss(loss, share, self._scale), None
        known = torch.full_like(loss, share)
        self._gradient = known
        self._share = share
        self._version = known._version
        return loss, known


def read_gradients(parameters: Iterable[torch.Tensor]) -> list[tuple[int, int] | None]:
    """Return what changes if something replaces the gradients in `.grad`, or writes to them."""
    gradients = [parameter.grad for parameter in parameters]
    return [None if grad is None else (id(grad), grad._version) for grad in gradients]


def run_backward(loss: torch.Tensor, gradient: torch.Tensor | None, retain_graph: bool) -> None:
    """Do the same as `loss.backward(gradient, retain_graph=retain_graph)`, without its checks.

    These take as long as the backward pass of a tiny model. The trainer's loss is one scalar with
    a gradient of the same shape and dtype, so they cannot fail.

    Args:
        loss: The tensor at which backward begins, on the CPU or another device.
        gradient: Its gradient, of the same shape and dtype; None for 1.
        retain_graph: Whether the graph can be used again.
    """
    is_usual = (
        gradient is not None
        and type(loss) is torch.Tensor
        and loss.is_cpu  # threads of other devices need the context variables of this one
        and not _is_mode_enabled()
        and not _is_logged(logging.DEBUG)  # torch logs the nodes of the graph
    )
    if not is_usual:
        loss.backward(gradient, retain_graph=retain_graph)
        return
    # The last arguments are: inputs, allow_unreachable and accumulate_grad.
    _run_engine((loss,), (gradient,), bool(retain_graph), False, (), True, True)
