"""Modules that exchange gradients by themselves, which a Trainer cannot train.

The Trainer adds the gradients of micro-batches over the ranks. A wrapper such as
DistributedDataParallel would average them once more, over ranks that may compute different
numbers of micro-batches: other bits for other numbers of ranks, or a deadlock.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from lockstep.data_parallel.distributed import DistributedDataParallel
from lockstep.errors import UsageError

__all__ = ["refuse_wrappers"]


def refuse_wrappers(values: Mapping[str, Any]) -> None:
    """Raise UsageError for a module that is wrapped for data parallelism, or contains one.

    Args:
        values: Modules, and lists of modules, by the name that the message uses; anything
            else among them is passed over.
    """
    for root, module in _modules(values):
        module = getattr(module, "_orig_mod", module)
        for path, part in module.named_modules(prefix=root):
            if isinstance(part, _wrappers()):
                raise UsageError(
                    f"{path} is wrapped in {type(part).__name__}, which exchanges gradients by "
                    f"itself, as the Trainer does: give the Trainer the model itself: {path}.module"
                )
            if isinstance(part, _sharded()):
                raise UsageError(
                    f"{path} is sharded by fully_shard, which exchanges gradients by itself, as "
                    "the Trainer does: give the Trainer the model without it (storage='shared' "
                    "keeps parameters and optimizer state once per host)"
                )


def _modules(values: Mapping[str, Any]) -> Iterator[tuple[str, nn.Module]]:
    for name, value in values.items():
        if isinstance(value, nn.Module):
            yield name, value
        elif isinstance(value, (list, tuple)):
            yield from _modules({f"{name}[{number}]": each for number, each in enumerate(value)})


def _wrappers() -> tuple[type, ...]:
    """Return the classes that hold the wrapped model as `module`."""
    known = (DistributedDataParallel, nn.DataParallel, nn.parallel.DistributedDataParallel)
    return (*known, *_of_fsdp("FullyShardedDataParallel"))


def _sharded() -> tuple[type, ...]:
    """Return the classes that `fully_shard` adds to those of the modules that it is given."""
    return _of_fsdp("FSDPModule")


def _of_fsdp(name: str) -> tuple[type, ...]:
    """Return a class of FSDP; none where it was never imported, which takes seconds."""
    module = sys.modules.get("torch.distributed.fsdp")
    found = getattr(module, name, None)
    return (found,) if isinstance(found, type) else ()
