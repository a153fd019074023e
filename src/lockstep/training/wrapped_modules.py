"""Rejects modules that are already wrapped for data parallelism.

The Trainer reduces the gradients of micro-batches over the ranks. A wrapper such as
DistributedDataParallel would average them a second time, over ranks that may compute different
numbers of micro-batches: results would depend on the number of ranks, or ranks would deadlock.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from lockstep.data_parallel.distributed import DistributedDataParallel
from lockstep.errors import UsageError

__all__ = ["reject_wrapped_modules"]


def reject_wrapped_modules(values: Mapping[str, Any]) -> None:
    """Check that no module is wrapped for data parallelism, or contains a wrapped one.

    Args:
        values: Modules and lists of modules by the names that messages use; other values are
            ignored.

    Raises:
        UsageError: A module is wrapped or sharded.
    """
    for root, module in _iterate_modules(values):
        module = getattr(module, "_orig_mod", module)
        for path, part in module.named_modules(prefix=root):
            if isinstance(part, _get_wrappers()):
                raise UsageError(
                    f"{path} is wrapped in {type(part).__name__}, which exchanges gradients by "
                    f"itself, as the Trainer does: pass {path}.module to the Trainer"
                )
            if isinstance(part, _get_sharded()):
                raise UsageError(
                    f"{path} is sharded by fully_shard, which exchanges gradients by itself, as "
                    "the Trainer does: pass the model to the Trainer without it (storage='shared' "
                    "keeps parameters and optimizer state once per host)"
                )


def _iterate_modules(values: Mapping[str, Any]) -> Iterator[tuple[str, nn.Module]]:
    for name, value in values.items():
        if isinstance(value, nn.Module):
            yield name, value
        elif isinstance(value, (list, tuple)):
            yield from _iterate_modules(
                {f"{name}[{number}]": each for number, each in enumerate(value)}
            )


def _get_wrappers() -> tuple[type, ...]:
    """Return the classes that keep the wrapped model in the attribute `module`."""
    known = (DistributedDataParallel, nn.DataParallel, nn.parallel.DistributedDataParallel)
    return (*known, *_get_fsdp_class("FullyShardedDataParallel"))


def _get_sharded() -> tuple[type, ...]:
    """Return the classes that `fully_shard` adds as a base to the classes of its modules."""
    return _get_fsdp_class("FSDPModule")


def _get_fsdp_class(name: str) -> tuple[type, ...]:
    """Return a class of FSDP; () if FSDP was never imported, because the import takes seconds."""
    module = sys.modules.get("torch.distributed.fsdp")
    found = getattr(module, name, None)
    return (found,) if isinstance(found, type) else ()
