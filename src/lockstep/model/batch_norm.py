"""Batch norm and micro-batches of one sample, on which it cannot train.

Batch norm normalizes a channel over the values of a micro-batch. With one value per sample, as
behind a linear layer, a micro-batch of one sample has no variance, and torch raises an error:

    batch        0     1     2     3 (short)
    samples      16    16    16    1
    batch norm   8 micro-batches of 2 samples each, 2 values per channel    fails

That error would come in the last step of the epoch. It is raised in the first one instead, before
the weights change: by then the number of values per sample is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.data.microbatch import Batch
from lockstep.errors import UsageError

__all__ = ["check_batch_norm", "freeze_batch_norm"]


@contextmanager
def check_batch_norm(
    model: nn.Module, batch: Any, position: Callable[[], tuple[int, int] | None]
) -> Iterator[None]:
    """Raise UsageError in the body if batch norm will fail in this or a later batch of the epoch.

    Only what is certain is raised: a module of torch, in training mode, that gets one value per
    sample. A compiled model is not checked, since hooks would change its graphs.

    Args:
        model: The model, or what compiled it.
        batch: The batch of the step; the first one of an epoch knows about the others.
        position: Returns the micro-batch and the stage that are being computed.
    """
    single = batch.single_sample if isinstance(batch, Batch) else ""
    if not single or any(_is_compiled(each) for each in model.modules()):
        yield
        return
    sizes = {each.index: each.size for each in batch.microbatches}
    handles = []

    def check(name: str, module: nn.Module, given: tuple[Any, ...]) -> None:
        here = position()
        size = sizes[here[0]] if here is not None else 1
        if size == 1 or not given or not _normalizes_by_batch(module):
            return
        if given[0].numel() // given[0].shape[1] != size:
            return
        raise UsageError(
            f"a micro-batch of {single} holds one sample, on which the batch norm {name} cannot "
            "train: pass drop_last=True to trainer.batches if that is the short last batch, or "
            "choose another batch size or number of micro-batches"
        )

    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and type(module).forward is _BatchNorm.forward:
            handles.append(module.register_forward_pre_hook(partial(check, name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def freeze_batch_norm(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let batch norm use its running statistics in the body, which work for one sample too."""
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


def _is_compiled(module: nn.Module) -> bool:
    return "dynamo_ctx" in vars(module) or vars(module).get("_compiled_call_impl") is not None
