"""Memory of a device that several processes map, through IPC handles.

    owner    memory = ipc.allocate(...)      handle = ipc.export(memory)
    peer     ipc.open(handle)                a tensor with the same memory

A handle is for one peer, and the memory stays valid until that peer has dropped its tensor, even if
the owner drops its own before. Nothing orders the accesses: a process synchronizes with its stream,
and then says so in a message.

The ranks of a group share memory if they compute on the same device of one host. Whether that works
is tried once per group: containers and allocators may forbid it.
"""

from __future__ import annotations

import ast
from typing import Any

import torch
import torch.distributed as dist

from lockstep.comm.collectives import all_gather_bytes
from lockstep.comm.hosts.identity import identify_host
from lockstep.messages import escape_control, log

__all__ = ["BY_DEVICE_TYPE", "CudaIpc", "identify_device", "shares_device"]

PROBE_BYTES = 64
"""The size of the memory with which a group tries whether it can share some."""


class CudaIpc:
    """Shared memory of CUDA devices. Torch counts the peers and keeps the memory for them."""

    def identify(self, device: torch.device) -> str:
        """Return a text that processes of one host have in common if they see the same device.

        It is the UUID of the device, or of its partition.
        """
        return str(torch.cuda.get_device_properties(device).uuid)

    def allocate(self, size: int, device: torch.device) -> torch.Tensor:
        """Return zeroed memory of `size` bytes that can be exported."""
        return torch.zeros(size, dtype=torch.uint8, device=device)

    def export(self, memory: torch.Tensor) -> bytes:
        """Return a handle of allocated memory for one other process."""
        storage: Any = memory.untyped_storage()
        _, *shared = storage._share_cuda_()  # without the index of the device in this process
        return repr(tuple(shared)).encode()

    def open(self, handle: bytes, device: torch.device) -> torch.Tensor:
        """Return the memory of another process, as bytes."""
        untyped: Any = torch.UntypedStorage
        storage = untyped._new_shared_cuda(device.index, *ast.literal_eval(handle.decode()))
        return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


BY_DEVICE_TYPE: dict[str, Any] = {"cuda": CudaIpc()}
"""The methods of `CudaIpc` for each type of device."""


def identify_device(device: torch.device) -> str:
    """Return a text that two processes have in common if they compute on the same device."""
    return f"{identify_host()} {BY_DEVICE_TYPE[device.type].identify(device)}"


def shares_device(device: torch.device, group: dist.ProcessGroup | None) -> bool:
    """Return whether the ranks of a group compute on one device, and can share memory of it.

    A collective: all ranks of the group call it, with devices of the same type.
    """
    ipc = BY_DEVICE_TYPE.get(device.type)
    if ipc is None or not dist.is_initialized() or dist.get_world_size(group) == 1:
        return False
    rank = dist.get_rank(group)
    ranks = dist.get_world_size(group)
    own = identify_device(device)
    about = "comparing the devices of the ranks"
    identities = all_gather_bytes(own.encode(), about, group)
    if identities.count(identities[0]) < ranks:
        return False
    handles = dict[int, bytes]()
    failure = ""
    try:
        memory = ipc.allocate(PROBE_BYTES, device).fill_(rank)
        handles = {peer: ipc.export(memory) for peer in range(ranks) if peer != rank}
        torch.accelerator.synchronize(device)
    except Exception as error:  # any error: the other ranks wait for the outcome
        failure = _summarize(error)
    about = "trying to share memory of the device"
    exported = [ast.literal_eval(m.decode()) for m in _gather(repr(handles), about, group)]
    try:
        for peer, offered in enumerate(exported):
            if peer != rank and offered and not failure:
                values = ipc.open(offered[rank], device).tolist()
                if values != [peer] * PROBE_BYTES:
                    failure = f"the memory of rank {peer} has other values here"
    except Exception as error:
        failure = _summarize(error)
    failures = _gather(failure, about, group)
    first = next((number for number, said in enumerate(failures) if said), None)
    if first is not None and rank == 0:
        reason = escape_control(failures[first].decode(errors="replace"))
        log(
            f"the {ranks} ranks on {device} exchange gradients through the CPU, which is slower: "
            f"rank {first} of the group could not share memory of the device: {reason}"
        )
    return first is None


def _gather(text: str, about: str, group: dist.ProcessGroup | None) -> list[bytes]:
    return all_gather_bytes(text.encode(), about, group)


def _summarize(error: Exception) -> str:
    """Return the first line of an error."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
