"""The bytes of the tensors that are alive, counted by a dispatch mode."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lockstep.sharded_tensors import local_part

__all__ = ["LiveTensors"]


class LiveTensors(TorchDispatchMode):
    """Counts the bytes of the tensors that operators have made and that are alive.

    Attributes:
        peak: The most bytes so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._bytes = 0
        self._known: set[int] = set()

    def ignore(self, tensors: Any) -> None:
        """Leave tensors out."""
        self._known |= {local_part(tensor).untyped_storage()._cdata for tensor in tensors}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operator, and count its outputs."""
        outputs = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(outputs):
            if torch.is_tensor(tensor) and tensor.device.type != "meta":
                self._count(local_part(tensor).untyped_storage())
        return outputs

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        size = storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self._bytes += size
            self.peak = max(self.peak, self._bytes)
            weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._bytes -= size
