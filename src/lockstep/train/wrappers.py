"""Modules that exchange gradients by themselves, which a Trainer cannot train.

The Trainer adds the gradients of micro-batches over the ranks. A wrapper such as
DistributedDataParallel would average them once more, over ranks that may compute different
numbers of micro-batches: other bits for other numbers of ranks, or a deadlock.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from torch import nn

from lockstep.data_parallel.distributed import DistributedDataParallel
from lockstep.errors import UsageError

__all__ = ["refuse_wrappers"]


def refuse_wrappers(modules: Mapping[str, nn.Module]) -> None:
    """Raise UsageError for a module that is wrapped for data parallelism, or contains one.

    Args:
        modules: what a step calls, by the name that the message uses.
    """
    for root, module in modules.items():
        for path, part in module.named_modules(prefix=root):
            if isinstance(part, _wrappers()):
                raise UsageError(
                    f"{path} is wrapped in {type(part).__name__}, which exchanges gradients by "
                    f"itself, as the Trainer does: give the Trainer the model itself: {path}.module"
                )
            if isinstance(part, _sharded()):
                raise UsageError(
                    f"{path} is sharded by fully_shard, which exchanges gradients by itself, as "
                    "the Trainer does: give the Trainer the model without it (shared=True holds "
                    "parameters and optimizer state once per host)"
                )


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
