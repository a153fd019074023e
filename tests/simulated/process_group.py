"""The backend "simulated": collectives of tensors on the simulated accelerator, as NCCL's.

A call returns at once. Its result is written by a stream of the group, and `wait()` makes the
current stream wait for that one, not the host. Gloo carries the bytes between the ranks, in one
connection for tensors on the device and one for tensors on the CPU, so a send from one kind of
memory does not meet a receive into the other. As NCCL, it ignores the tags of messages. It copies
what it sends when it is called: whether a program changes a tensor before its transfer is complete
does not show here.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from simulated import kernels, streams

__all__ = ["NAME", "register"]

NAME = "simulated_ccl"
STREAM = -1  # the number of the stream of all groups

groups: list[SimulatedProcessGroup] = []
"""The groups of this process. `messages` has the sends and receives of each peer, in their order:
NCCL runs them in this order, so the lists of two ranks must mirror each other."""

ProcessGroup: Any = dist.ProcessGroup  # torch's types leave out a constructor

OPERATIONS = {
    "allreduce": "allreduce",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "allgather": "allgather",
    "all_gather_single": "_allgather_base",
    "_allgather_base": "_allgather_base",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_single": "_reduce_scatter_base",
    "_reduce_scatter_base": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
    "alltoall_base": "alltoall_base",
    "gather": "gather",
    "scatter": "scatter",
    "recv": "recv",
    "send": "send",
    "barrier": "barrier",
}
"""The methods of a process group, in torch 2.11 and 2.13, and those of Gloo."""


class SimulatedWork(dist.Work):
    """An operation on the stream of its group."""

    def __init__(
        self, stream: streams.Stream, device: torch.device, inner: dist.Work, outputs: object
    ) -> None:
        super().__init__()
        self._stream = stream
        self._device = device
        self._inner = inner
        self._until = stream.launched
        self._outputs = outputs

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Let the current stream wait for the operation; the host goes on."""
        kernels.stream_of(self._device).launch(lambda: self._stream.run(self._until))
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the outputs, whose `wait` lets the current stream wait."""
        future: torch.futures.Future[Any] = torch.futures.Future(devices=[self._device])
        number = int(self._device.index)
        kind = torch.accelerator.current_stream(self._device).device_type
        with torch.Stream(stream_id=STREAM, device_index=number, device_type=kind):
            future.set_result(self._outputs)
        return future

    def is_completed(self) -> bool:
        """Return whether the operation is complete."""
        return bool(self._inner.is_completed())


class SimulatedProcessGroup(ProcessGroup):  # type: ignore[misc]  # of type Any, see above
    """A process group for tensors on the CPU and on the simulated accelerator."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._store = store
        self._name = ""
        self._description = ""
        self.messages: dict[int, list[str]] = {}
        groups.append(self)
        self._by_type = {
            kind: dist.ProcessGroupGloo(dist.PrefixStore(kind, store), rank, size, timeout)
            for kind in ("cpu", kernels.TYPE)
        }

    def name(self) -> str:
        return NAME

    getBackendName = name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def getGroupName(self) -> str:
        return self._name

    def getGroupDesc(self) -> str:
        return self._description

    def get_group_store(self) -> Any:
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), torch.device(kernels.TYPE)]

    def _get_backend(self, device: torch.device) -> Any:
        return self

    supports_splitting = supports_coalescing = False

    def _has_hooks(self) -> bool:
        return False

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _get_sequence_number_for_group(self) -> int:
        return 0

    def shutdown(self) -> None:
        pass

    abort = shutdown

    def run(self, operation: str, *args: Any) -> dist.Work:
        """Start an operation of Gloo on these arguments."""
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        outputs = None if operation == "send" else args[0] if args else None
        device = _find_device(args)
        if device is None:
            return getattr(self._by_type["cpu"], operation)(*args)
        current = kernels.stream_of(device)
        own = streams.stream(device.index, STREAM)
        until = current.launched
        own.launch(lambda: current.run(until))
        own.run()
        converted = [_copy(each, copies if each is outputs else []) for each in args]
        if operation in ("send", "recv"):
            converted[2:] = [0]  # as in NCCL, messages have no tags, and the order decides
            self.messages.setdefault(args[1], []).append(operation)
        inner = getattr(self._by_type[kernels.TYPE], operation)(*converted)

        def finish() -> None:
            inner.wait()
            for place, value in copies:
                kernels.as_cpu(place).copy_(value)

        own.launch(finish if copies else lambda: None)
        return SimulatedWork(own, device, inner, outputs)


def _method(operation: str) -> Callable[..., dist.Work]:
    return lambda self, *args, **named: self.run(operation, *args, *named.values())


for _name, _operation in OPERATIONS.items():
    setattr(SimulatedProcessGroup, _name, _method(_operation))


def _find_device(value: Any) -> torch.device | None:
    if isinstance(value, torch.Tensor):
        return value.device if value.device.type == kernels.TYPE else None
    if isinstance(value, list | tuple):
        return next((found for each in value if (found := _find_device(each))), None)
    return None


def _copy(value: Any, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """Return a value with copies of its tensors on the CPU."""
    if isinstance(value, list | tuple):
        return [_copy(each, copies) for each in value]
    if not isinstance(value, torch.Tensor):
        return value
    if value.device.type != kernels.TYPE:
        raise RuntimeError(f"{NAME}: expected tensors on the device, found one on {value.device}")
    copy = kernels.as_cpu(value).clone(memory_format=torch.contiguous_format)
    copies.append((value, copy))
    return copy


def register() -> None:
    """Make this the backend of the device for `torch.distributed`."""
    dist.Backend.register_backend(NAME, SimulatedProcessGroup, devices=[kernels.TYPE])
