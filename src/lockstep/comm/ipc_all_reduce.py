"""The reproducible all-reduce of ranks that share a device, in memory of the device.

Every rank packs its nodes into memory that the other ranks have mapped. Nothing is copied to the
host. Two small messages over the CPU replace the transfers of a backend:

    rank j   pack its rows, synchronize ──┐ message 1: all rows are packed
             add row j of all ranks,  <───┘
             write the sum, synchronize ──┐ message 2: all sums are written
             copy the sums of all ranks <─┘

    memory of a rank   | row 0 | row 1 | ... | sum of its slice |

A rank packs again after message 2, when all ranks have read its rows. It writes its next sum after
the next message 1, before which all ranks have synchronized with their copies of the last one. Row
j of a rank is read, and overwritten by intermediate sums, only by rank j.

A rank whose memory is new says so in message 1, and all ranks exchange the handles of theirs. The
wait for a message ends with an error if a peer died, or at the group's timeout.
"""

from __future__ import annotations

import ast
import weakref

import torch
import torch.distributed as dist

from lockstep.comm.bucket import ALIGNMENT, parts
from lockstep.comm.collectives import all_gather_bytes
from lockstep.comm.device_ipc import BY_DEVICE_TYPE
from lockstep.comm.reproducible_all_reduce import Held, ReproducibleAllReduce
from lockstep.comm.slice_plan import SlicePlan
from lockstep.devices import record_event

__all__ = ["IpcAllReduce", "close_all"]

_all: weakref.WeakSet[IpcAllReduce] = weakref.WeakSet()


class IpcAllReduce(ReproducibleAllReduce):
    """The implementation for ranks that share a device.

    Args:
        plan: The plan of the bucket.
        device: The device.
        group: The process group; None is the default group.
    """

    def __init__(
        self, plan: SlicePlan, device: torch.device, group: dist.ProcessGroup | None
    ) -> None:
        self.bucket = plan.bucket
        self.sums = plan.make_sums(device)
        self._plan = plan
        self._device = device
        self._group = group
        self._ipc = BY_DEVICE_TYPE[device.type]
        self._widths = [len(nodes) * plan.slice_bytes for nodes in plan.nodes_by_rank]
        place = self._sum_place(plan.rank)
        self._own = self._ipc.allocate(max(place.stop, ALIGNMENT), device)
        self._rows = self._own[: place.start].view(plan.ranks, self._widths[plan.rank])
        self._memory: list[torch.Tensor] = []  # of each rank; empty if the own memory is new
        self._pending: list[torch.Event] = []  # what the other ranks may rely on after a message
        self._flags = b""
        _all.add(self)

    def _row_place(self, owner: int, row: int) -> slice:
        """Return the bytes of a row in the memory of a rank."""
        return slice(row * self._widths[owner], (row + 1) * self._widths[owner])

    def _sum_place(self, owner: int) -> slice:
        """Return the bytes of the sum in the memory of a rank, after its rows."""
        end = self._plan.ranks * self._widths[owner]
        return slice(end, end + self._plan.slice_bytes)

    def launch(self, held: Held, in_steps: bool = False) -> None:
        """Pack this rank's nodes; see `ReproducibleAllReduce.launch`."""
        self._flags = bytes(self._plan.pack(held, self._rows))
        self._pending.append(record_event(self._device))

    def combine(self) -> None:
        """Wait until all rows are packed, and add this rank's slice of them."""
        states = self._meet(bytes([not self._memory]) + self._flags, "the rows of gradients")
        if any(state[0] for state in states):
            self._exchange_handles()
        rows = [
            memory[self._row_place(owner, self._plan.rank)]
            for owner, memory in enumerate(self._memory)
        ]
        mine = self._plan.add(rows, [state[1:] for state in states])
        self._memory[self._plan.rank][self._sum_place(self._plan.rank)].view(mine.dtype).copy_(mine)
        self._pending.append(record_event(self._device))

    def gather(self) -> list[tuple[int, torch.Tensor | None]]:
        """Wait until all sums are written, and copy them; see `ReproducibleAllReduce.gather`."""
        self._meet(b"", "the sums of gradients")
        slices = self.sums.view(self._plan.ranks, self._plan.length)
        for owner, memory in enumerate(self._memory):
            slices[owner].copy_(memory[self._sum_place(owner)].view(self.sums.dtype))
        self._pending.append(record_event(self._device))
        return parts(self.bucket, self.sums, self._plan.present)

    def _meet(self, message: bytes, what: str) -> list[bytes]:
        """Finish this rank's work on shared memory, and exchange messages with the other ranks."""
        while self._pending:
            self._pending.pop().synchronize()
        about = f"exchanging {what}, {self._plan.length} of {self.bucket.dtype} per rank"
        return all_gather_bytes(message, about, self._group)

    def _exchange_handles(self) -> None:
        """Map the memory of the other ranks."""
        self._memory = []
        peers = [peer for peer in range(self._plan.ranks) if peer != self._plan.rank]
        handles = {peer: self._ipc.export(self._own) for peer in peers}
        offers = self._meet(repr(handles).encode(), "the handles of memory")
        self._memory = [
            self._own
            if owner == self._plan.rank
            else self._ipc.open(ast.literal_eval(offer.decode())[self._plan.rank], self._device)
            for owner, offer in enumerate(offers)
        ]

    def close(self) -> None:
        """Unmap the memory of the other ranks, and free the own memory when they have done so."""
        self._memory = []
        del self._own, self._rows


def close_all() -> None:
    """End all sums in shared memory, before this process leaves its group."""
    for reduction in list(_all):
        reduction.close()
    _all.clear()
