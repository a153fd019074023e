"""What torch asks of every process group, for groups whose operations are written in Python."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["PythonProcessGroup"]

# torch's types leave out constructors and overloads that its process groups in Python need.
ProcessGroup: Any = dist.ProcessGroup


class PythonProcessGroup(ProcessGroup):  # type: ignore[misc]
    """A process group without operations.

    Args:
        rank: This rank in the group.
        size: The number of ranks.
        store: The store of the group.
        backend_name: The name of the backend.
        timeout: The seconds after which an operation fails.
    """

    supports_splitting = supports_coalescing = False

    def __init__(self, rank: int, size: int, store: Any, backend_name: str, timeout: float) -> None:
        super().__init__(rank, size)
        self._rank, self._size, self._store, self._timeout = rank, size, store, timeout
        self._backend_name = backend_name
        # The name and the description are in torch's C++ backends, of which this group has none.
        self._name = self._description = ""
        self._calls = 0
        self._process = os.getpid()

    def name(self) -> str:
        """Return the name of the backend."""
        return self._backend_name

    getBackendName = name  # what torch's C++ calls

    def setGroupName(self, name: str) -> None:  # noqa: D102
        self._name = name

    def setGroupDesc(self, description: str) -> None:  # noqa: D102
        self._description = description

    def getGroupName(self) -> str:  # noqa: D102
        return self._name

    def getGroupDesc(self) -> str:  # noqa: D102
        return self._description

    def get_group_store(self) -> Any:
        """Return the store of the group."""
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> PythonProcessGroup:
        return self

    def _has_hooks(self) -> bool:
        return False

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout.total_seconds()

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of the operations that follow."""
        self._set_default_timeout(timeout)

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _get_sequence_number_for_group(self) -> int:
        return self._calls
