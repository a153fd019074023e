"""Memory of the simulated accelerator that several processes map.

The memory of a device belongs to a file without a name, which ends with the last process that has
it mapped or open, however that ends.
"""

from __future__ import annotations

import os
import weakref

import torch

from lockstep.comm import device_ipc
from simulated import kernels

__all__ = ["NAME", "count_mapped", "register"]

NAME = "lockstep-simulated"
"""The name of the files in /proc."""

_descriptors: dict[int, int] = {}
"""The file of allocated memory, by the identity of its storage."""


class SimulatedIpc:
    """The door to memory that is shared; a handle is the path of a file, and its size."""

    def identify(self, device: torch.device) -> str:
        """Return the number of a device, which is the same one in every process."""
        return str(device.index)

    def allocate(self, size: int, device: torch.device) -> torch.Tensor:
        """Return zeroed memory in a file of its own."""
        descriptor = os.memfd_create(NAME)
        os.truncate(descriptor, size)
        memory = kernels.map_file(descriptor, size, device)
        _descriptors[memory.data_ptr()] = descriptor
        weakref.finalize(memory, _close, memory.data_ptr())
        return memory

    def export(self, memory: torch.Tensor) -> bytes:
        """Return a handle of allocated memory."""
        path = f"/proc/{os.getpid()}/fd/{_descriptors[memory.data_ptr()]}"
        return f"{memory.numel()} {path}".encode()

    def open(self, handle: bytes, device: torch.device) -> torch.Tensor:
        """Return the memory of another process."""
        size, _, path = handle.decode().partition(" ")
        descriptor = os.open(path, os.O_RDWR)
        try:
            return kernels.map_file(descriptor, int(size), device)
        finally:
            os.close(descriptor)


def _close(address: int) -> None:
    os.close(_descriptors.pop(address))


def count_mapped() -> int:
    """Return how many files of shared memory this process has mapped."""
    with open("/proc/self/maps") as maps:
        return sum(NAME in line for line in maps)


def register() -> None:
    """Let ranks on one simulated device share its memory."""
    device_ipc.BY_DEVICE_TYPE[kernels.TYPE] = SimulatedIpc()
