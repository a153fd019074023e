"""The forward pass of one micro-batch: model, loss, metrics, and the errors of each."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from lockstep.compiled_wrapper import unwrap
from lockstep.foreign_messages import BATCH_NORM_OF_ONE
from lockstep.kernel.errors import LockstepError, LossError, UsageError
from lockstep.kernel.loss_weights import is_number
from lockstep.model.static_shapes import TOO_MANY_SHAPES, is_limit_error
from lockstep.model.target_weights import loss_name

__all__ = [
    "DatasetMetric",
    "Metric",
    "accuracy",
    "call_model",
    "compute_loss",
    "compute_metrics",
    "compute_results",
    "explain_batch_norm",
    "find_inputs",
    "forward",
    "has_loss",
    "require_number",
    "split_targets",
]

Metric = Callable[[Any, Any], Any]
"""A function of (outputs, targets) that returns a mean over the samples of a micro-batch."""


@dataclass(frozen=True)
class DatasetMetric:
    """A metric that is no mean over samples, such as F1, AUC or perplexity.

    `Trainer.evaluate` calls it once, with the outputs and targets of all samples in the order of
    the dataset, on the CPU and on every rank. Steps do not compute it.

    Attributes:
        function: A function of (outputs, targets) that returns a number or a tensor with one
            element, or a metric of torchmetrics.
        select: A function of the outputs and targets of a micro-batch, or with `loss=None` of the
            outputs and the micro-batch, that returns the outputs and targets to keep. By default
            these are kept whole.
    """

    function: Callable[[Any, Any], Any]
    select: Callable[[Any, Any], tuple[Any, Any]] = lambda outputs, targets: (outputs, targets)

    def __post_init__(self) -> None:
        """Check the functions."""
        for name, function in vars(self).items():
            if not callable(function):
                raise UsageError(f"ls.DatasetMetric({name}={function!r}): expected a function")

    def __call__(self, outputs: Any, targets: Any) -> float:
        """Return the metric of a whole dataset."""
        value = self.function(outputs, targets)
        reset = getattr(self.function, "reset", None)
        if callable(reset):  # torchmetrics keeps all that it was given
            reset()
        require_number("the value of an ls.DatasetMetric", value)
        return float(value)


def accuracy(outputs: torch.Tensor, targets: torch.Tensor, k: int = 1) -> torch.Tensor:
    """Return the fraction of samples whose target class is among the k largest outputs.

    Args:
        outputs: Of shape (samples, classes).
        targets: Class indices of shape (samples,), int64; or probabilities of the classes, of shape
            (samples, classes), of which the largest one counts.
        k: The number of outputs, at least 1. With k classes or fewer, the result is 1.

    Returns:
        A float64 tensor with one element, in [0, 1].
    """
    if targets.is_floating_point():
        targets = targets.argmax(dim=1)
    if k == 1:
        hits = outputs.argmax(dim=1) == targets
    else:
        largest = outputs.topk(min(k, outputs.shape[1]), dim=1).indices
        hits = (largest == targets.unsqueeze(1)).any(dim=1)
    return hits.to(torch.float64).mean()


def forward(
    model: nn.Module,
    loss: Callable[..., Any] | None,
    metrics: Mapping[str, Metric],
    data: Any,
    where: str,
) -> tuple[Any, dict[str, Any]]:
    """Return the loss of one micro-batch and its metrics.

    Args:
        model: The model.
        loss: The loss function. None: the model returns its loss. In both cases the loss is
            returned as a tensor, under the key "loss", as the attribute `.loss`, or first in a
            tuple.
        metrics: Functions of (outputs, targets) by name; of (outputs, data) without a loss
            function.
        data: With a loss function, a tuple or list (inputs, ..., targets). Without one, a
            sequence of arguments, a mapping of keyword arguments, or one input.
        where: The rank, step and micro-batch, for messages.

    Raises:
        LossError: The loss function raised an exception, or no loss was returned.
    """
    if loss is None:
        return compute_results(loss, metrics, call_model(model, data, where), data, where)
    inputs, targets = split_targets(data, where)
    return compute_loss(loss, metrics, call_model(model, inputs, where), targets, where)


def find_inputs(loss: Callable[..., Any] | None, data: Any, where: str) -> Any:
    """Return the inputs of the model in a micro-batch: all of it if the model returns its loss."""
    return data if loss is None else split_targets(data, where)[0]


def compute_results(
    loss: Callable[..., Any] | None,
    metrics: Mapping[str, Metric],
    outputs: Any,
    data: Any,
    where: str,
) -> tuple[Any, dict[str, Any]]:
    """Return the loss and the metrics from the outputs and the data of a micro-batch."""
    if loss is None:
        return extract_loss(outputs, where), compute_metrics(metrics, outputs, data, where)
    return compute_loss(loss, metrics, outputs, split_targets(data, where)[1], where)


def split_targets(data: Any, where: str) -> tuple[list[Any], Any]:
    """Return the inputs and the targets; UsageError if a batch is not such a pair."""
    if not isinstance(data, (tuple, list)) or len(data) < 2:
        raise UsageError(
            f"{where}: a batch for a loss function is a pair (inputs, targets), not a "
            f"{type(data).__name__}; pass loss=None if the model returns its loss, or write your "
            "own loop: with trainer.manual_step() as step"
        )
    *inputs, targets = data
    return inputs, targets


def compute_loss(
    loss: Callable[..., Any],
    metrics: Mapping[str, Metric],
    outputs: Any,
    targets: Any,
    where: str,
) -> tuple[Any, dict[str, Any]]:
    """Return the loss and the metrics from the outputs of a micro-batch."""
    try:
        value = loss(outputs, targets)
    except LockstepError:
        raise
    except Exception as error:
        raise LossError(
            f"{where}: the loss {loss_name(loss)} {_explain_failure(error, outputs, targets)}"
        ) from error
    if not isinstance(value, torch.Tensor):
        value = _find_loss(value, where)
        if value is None or isinstance(value, (tuple, list, Mapping)):
            advice = "return the loss first, or alone"
            if isinstance(value, Mapping):
                advice = 'return the loss alone, or under the key "loss"'
            returned = "None: end it with `return loss`"
            if value is not None:
                returned = f"{_describe_output(value)}: {advice}"
            raise LossError(f"{where}: the loss {loss_name(loss)} returned {returned}")
    return value, compute_metrics(metrics, outputs, targets, where) if metrics else {}


def compute_metrics(
    metrics: Mapping[str, Metric], outputs: Any, targets: Any, where: str
) -> dict[str, Any]:
    """Return the metrics of a micro-batch by name."""
    values = {}
    for name, metric in metrics.items():
        try:
            with torch.no_grad():
                values[name] = metric(outputs, targets)
        except LockstepError:
            raise
        except Exception as error:
            raise UsageError(
                f"{where}: the metric {name} {_explain_failure(error, outputs, targets)}"
            ) from error
        require_number(f"{where}: the metric {name}", values[name])
    return values


def require_number(about: str, value: Any) -> None:
    """Raise UsageError for what is neither a number nor has one element; waits for no device."""
    if not is_number(value):
        raise UsageError(f"{about} must be one number, not {_describe(value)}")


def call_model(model: nn.Module, data: Any, where: str) -> Any:
    """Call a module with a mapping of arguments, a sequence of arguments, or one argument."""
    positional: Sequence[Any] = ()
    named: Mapping[str, Any] = {}
    if isinstance(data, (tuple, list)):
        positional = data
    elif isinstance(data, torch.Tensor) or not isinstance(data, Mapping):
        positional = (data,)
    else:
        named = data
    try:
        return model(*positional, **named)
    except Exception as error:
        if is_limit_error(error):
            raise UsageError(f"{where}: {TOO_MANY_SHAPES}") from error
        if isinstance(error, TypeError) and (
            refused := _explain_arguments(model, data, positional, named)
        ):
            raise UsageError(f"{where}: {refused}") from error
        given = [value for value in tree_leaves(data) if isinstance(value, torch.Tensor)]
        if any(value.shape[:1] != (1,) for value in given):
            raise
        if (explained := explain_batch_norm(error, where)) is None:
            raise
        raise explained from error


def _explain_arguments(
    model: nn.Module, data: Any, positional: Sequence[Any], named: Mapping[str, Any]
) -> str:
    """Return why a module cannot be called with the data of a micro-batch; "" if it can."""
    module = unwrap(model)
    given = type(data).__name__
    advice = "let the dataset return what the model takes"
    if named:
        given += f" of {', '.join(map(str, named))}"
        advice = "name its entries as the model names its arguments"
    elif positional is data:
        given += f" of {len(data)}"
        advice += ", or pass a loss function, which gets the last entry"
    try:
        signature = inspect.signature(module.forward)
    except (TypeError, ValueError):  # of a function of C++
        return ""
    try:
        signature.bind(*positional, **named)
    except TypeError as error:
        return (
            f"{type(module).__name__}.forward({', '.join(signature.parameters)}) cannot take the "
            f"micro-batch, a {given} ({error}): {advice}"
        )
    return ""


def explain_batch_norm(error: BaseException, where: str) -> UsageError | None:
    """Return a better error for torch's error about one value per channel; None for others.

    Ask only for a micro-batch of one sample: a model may also reduce several samples to one value.
    """
    if not isinstance(error, ValueError) or BATCH_NORM_OF_ONE not in str(error):
        return None
    return UsageError(
        f"{where} holds one sample, and batch norm cannot train on one: choose the batch size and "
        "the number of micro-batches so that each holds at least two; if only the last batch of an "
        "epoch is short, pass drop_last=True"
    )


def extract_loss(output: Any, where: str) -> Any:
    """Return the loss from the output of a model; LossError if there is none."""
    loss = _find_loss(output, where)
    if loss is output and not isinstance(output, torch.Tensor):
        raise LossError(
            f"{where}: there is no loss function, so the model must return its loss: a "
            'tensor, a mapping with "loss", an object with .loss or a tuple that begins with the '
            f"loss, not {_describe_output(output)}"
        )
    return loss


def has_loss(output: Any, where: str) -> bool:
    """Return whether the output of a model has a loss, and not only predictions."""
    loss = _find_loss(output, where)
    return isinstance(loss, torch.Tensor) and (loss is not output or loss.numel() == 1)


def _find_loss(value: Any, where: str) -> Any:
    """Return the loss in the result of a model or loss function; the result if it has none."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, Mapping) and "loss" in value:
        loss = value["loss"]
    elif hasattr(value, "loss"):
        loss = value.loss
    elif isinstance(value, (tuple, list)) and value and _is_number(value[0]):
        loss = value[0]
        if any(_is_number(member) and member.requires_grad for member in value[1:]):
            raise LossError(
                f"{where}: any of several numbers in a {type(value).__name__} could be the loss: "
                'return their sum alone, or a mapping with "loss"'
            )
    else:
        return value
    if loss is None:
        raise LossError(
            f"{where}: a {type(value).__name__} has the loss None: put the targets into the batch "
            "under the name of the argument of the model (such as labels), or pass a loss function "
            "of (outputs, targets), loss="
        )
    return loss


def _is_number(value: Any) -> bool:
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return is_float and value.numel() == 1


def _explain_failure(error: Exception, outputs: Any, targets: Any) -> str:
    first_line = (str(error).splitlines() or [""])[0]
    return (
        f"failed on outputs {_describe(outputs)} and targets {_describe(targets)}: "
        f"{type(error).__name__}: {first_line}"
    )


def _describe_output(value: Any) -> str:
    kind = f"a {type(value).__name__}"
    if isinstance(value, Mapping):
        return f"{kind} of {', '.join(map(repr, value))}"
    if isinstance(value, (tuple, list)) and value:
        return f"{kind} that begins with {_describe(value[0])}"
    return kind


def _describe(value: Any) -> str:
    """Describe a tensor by its shape, its dtype and, for integers, its range."""
    if not isinstance(value, torch.Tensor):
        return f"of type {type(value).__name__}"
    text = f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if value.numel() and not (value.is_floating_point() or value.is_complex()):
        text += f" with values {int(value.min())} to {int(value.max())}"
    return text
