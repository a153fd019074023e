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
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.data.microbatch import Batch
from lockstep.kernel.errors import UsageError
from lockstep.kernel.step_context import Position, StepContext, StepObserver
from lockstep.kernel.step_hooks import StepHook
from lockstep.model.compilation import is_compiled

__all__ = [
    "BatchNormCheck",
    "freeze_batch_norm",
    "has_batch_norm",
]

ADVICE = (
    "pass drop_last=True to trainer.batches if that is the short last batch, or choose another "
    "batch size or number of micro-batches"
)


class BatchNormCheck(StepHook):
    """The hook that reports if batch norm will fail in this or a later batch of the epoch.

    Only certain failures are reported: a batch norm of torch, in training mode, that gets one value
    per sample. A compiled model is not checked, since hooks would change its graphs. In a step with
    the trainer's own loss this is an error; a user's loop may skip that batch, and gets a warning.

    Args:
        modules: The modules that a step calls, by their names in messages.
        position: A function that returns the micro-batch and the stage that are being computed.
        has_weights: Whether micro-batches have weights. If so, one of a single sample may have
            weight 0, and is not computed.
    """

    def __init__(
        self, modules: Mapping[str, nn.Module], position: Position, has_weights: bool
    ) -> None:
        self._modules, self._position, self._has_weights = dict(modules), position, has_weights
        self._model = {"": self._modules[""]}

    def begin(self, step: StepContext, batch: Any) -> AbstractContextManager[object] | None:
        """Watch the batch norms of the model if a batch of the epoch has such a micro-batch."""
        if batch is None:
            warning = _BatchNormWarning(step, self._modules, self._position)
            step.observers.append(warning)
            return warning.watching
        single = getattr(batch, "single_sample", "")
        if not single or self._has_weights or not isinstance(batch, Batch):
            return None

        def refuse(name: str) -> None:
            raise UsageError(
                f"a micro-batch of {single} holds one sample, on which the batch norm {name} "
                f"cannot train: {ADVICE}"
            )

        return _watch(self._model, batch, self._position, refuse)


class _BatchNormWarning(StepObserver):
    """The warning in a manual step, whose batch is known when it is selected."""

    def __init__(
        self, step: StepContext, modules: Mapping[str, nn.Module], position: Position
    ) -> None:
        self._step, self._modules, self._position = step, modules, position
        self.watching = ExitStack()

    def select(self, batch: Batch) -> Batch:
        """Watch the batch norms if a batch of the epoch has such a micro-batch."""
        if batch.single_sample:
            report = partial(self._warn, batch.single_sample)
            self.watching.enter_context(_watch(self._modules, batch, self._position, report))
        return batch

    def _warn(self, single: str, name: str) -> None:
        here = self._position()
        self.watching.close()
        self._step.warnings.append(
            f"{self._step.place(here[0] if here else 0)}, before {single}: a micro-batch of that "
            f"batch holds one sample, on which the batch norm {name} cannot train: {ADVICE}"
        )


def _watch(
    modules: Mapping[str, nn.Module],
    batch: Batch,
    position: Position,
    report: Callable[[str], None],
) -> AbstractContextManager[None]:
    """Report batch norm that gets one value per sample, before a micro-batch of one sample."""
    if any(is_compiled(part) for root in modules.values() for part in root.modules()):
        return nullcontext()
    return _watch_calls(modules, batch, position, report)


@contextmanager
def _watch_calls(
    modules: Mapping[str, nn.Module],
    batch: Batch,
    position: Callable[[], tuple[int, int] | None],
    report: Callable[[str], None],
) -> Iterator[None]:
    """Call `report` with the name of each batch norm that gets one value per sample."""
    sizes = {part.index: part.size for part in batch.microbatches}
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
        part
        for module in modules
        for part in module.modules()
        if isinstance(part, _BatchNorm) and part.training
    ]
    for norm in changed:
        norm.training = False
    try:
        yield
    finally:
        for norm in changed:
            norm.training = True


def has_batch_norm(modules: Iterable[nn.Module]) -> bool:
    """Return whether a batch norm of torch is among some modules, or inside of one."""
    return any(isinstance(part, _BatchNorm) for module in modules for part in module.modules())


def _normalizes_by_batch(module: nn.Module) -> bool:
    return module.training or getattr(module, "running_mean", None) is None
