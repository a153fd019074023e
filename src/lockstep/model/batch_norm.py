"""Early errors for batch norm on micro-batches of one sample, on which it cannot train.

Batch norm normalizes a channel over the values of a micro-batch. With one value per sample, as
after a linear layer, a micro-batch of one sample has no variance, and torch raises an error:

    batch        0     1     2     3 (short)
    samples      16    16    16    1
    batch norm   8 micro-batches of 2 samples each, 2 values per channel    fails

The error of torch would occur in the last step of the epoch. This module raises an error in the
first step instead, before the weights change, since forward then shows the number of values per
sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.data.microbatch import Batch
from lockstep.kernel.errors import UsageError
from lockstep.model.compilation import is_compiled

__all__ = [
    "check_batch_norm",
    "explain_batch_norm",
    "freeze_batch_norm",
    "warn_of_batch_norm",
]

ADVICE = (
    "pass drop_last=True to trainer.batches if that is the short last batch, or choose another "
    "batch size or number of micro-batches"
)


def check_batch_norm(
    model: nn.Module, batch: Any, position: Callable[[], tuple[int, int] | None]
) -> AbstractContextManager[None]:
    """Raise UsageError in the body if batch norm will fail in this or a later batch of the epoch.

    Only certain failures raise: a batch norm of torch, in training mode, that gets one value per
    sample. A compiled model is not checked, since hooks would change its graphs.

    Args:
        model: The model, or its compiled wrapper.
        batch: The batch of the step. The first batch of an epoch has the sizes of the others.
        position: A function that returns the micro-batch and the stage that are being computed.
    """

    def refuse(single: str, name: str) -> None:
        raise UsageError(
            f"a micro-batch of {single} holds one sample, on which the batch norm {name} cannot "
            f"train: {ADVICE}"
        )

    return _watch({"": model}, batch, position, refuse)


def warn_of_batch_norm(
    modules: Mapping[str, nn.Module],
    batch: Any,
    position: Callable[[], tuple[int, int] | None],
    warn: Callable[[str], None],
) -> AbstractContextManager[None]:
    """Warn where `check_batch_norm` would raise, since the user's loop may skip that batch.

    Args:
        modules: All modules that the loop may call, by their names in the warning.
        batch: The batch of the step.
        position: A function that returns the micro-batch and the stage that are being computed.
        warn: A function that is called with the warning, at most once.
    """
    said: list[str] = []

    def report(single: str, name: str) -> None:
        if not said:
            said.append(name)
            warn(
                f"before {single}: a micro-batch of that batch holds one sample, on which the "
                f"batch norm {name} cannot train: {ADVICE}"
            )

    return _watch(modules, batch, position, report)


def explain_batch_norm(error: BaseException, place: str) -> UsageError | None:
    """Return a better error for torch's error about one value per channel; None for others."""
    if not isinstance(error, ValueError) or "more than 1 value per channel" not in str(error):
        return None
    return UsageError(
        f"{place} holds one sample, and batch norm cannot train on one: pass drop_last=True to "
        "trainer.batches, or choose the batch size and the number of micro-batches so that each "
        "holds at least two, also in the short last batch of an epoch"
    )


def _watch(
    modules: Mapping[str, nn.Module],
    batch: Any,
    position: Callable[[], tuple[int, int] | None],
    report: Callable[[str, str], None],
) -> AbstractContextManager[None]:
    """Report batch norm that gets one value per sample, before a micro-batch of one sample."""
    if not isinstance(batch, Batch) or not batch.single_sample:
        return nullcontext()
    if any(is_compiled(each) for root in modules.values() for each in root.modules()):
        return nullcontext()
    return _watch_calls(modules, batch, position, partial(report, batch.single_sample))


@contextmanager
def _watch_calls(
    modules: Mapping[str, nn.Module],
    batch: Batch,
    position: Callable[[], tuple[int, int] | None],
    report: Callable[[str], None],
) -> Iterator[None]:
    """Call `report` with the name of each batch norm that gets one value per sample."""
    sizes = {each.index: each.size for each in batch.microbatches}
    handles = []

    def check(name: str, module: nn.Module, given: tuple[Any, ...]) -> None:
        here = position()
        size = sizes[here[0]] if here is not None else 1
        if size == 1 or not given or not _normalizes_by_batch(module):
            return
        if given[0].numel() // given[0].shape[1] != size:
            return
        report(name)

    for root_name, root in modules.items():
        for name, module in root.named_modules(prefix=root_name):
            if isinstance(module, _BatchNorm) and type(module).forward is _BatchNorm.forward:
                handles.append(module.register_forward_pre_hook(partial(check, name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def freeze_batch_norm(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Make batch norm use its running statistics in the body, which also work for one sample."""
    changed = [
        each
        for module in modules
        for each in module.modules()
        if isinstance(each, _BatchNorm) and each.training
    ]
    for each in changed:
        each.training = False
    try:
        yield
    finally:
        for each in changed:
            each.training = True


def _normalizes_by_batch(module: nn.Module) -> bool:
    return module.training or getattr(module, "running_mean", None) is None
