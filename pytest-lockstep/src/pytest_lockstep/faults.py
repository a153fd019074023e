"""Faults at a call of torch.distributed, in one rank: its death, a delay, or a flipped bit.

    with pytest_lockstep.kill(rank=1, call=2, op="all_reduce"):
        train_one_step()

Calls are counted in torch's dispatcher, so calls by DistributedDataParallel or another library
count too. Lockstep's direct calls of its backend are counted as well.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.comm import backend
from lockstep.comm.native_all_reduce import DIGEST_BYTES, NativeAllReduce
from lockstep.launcher.channel import write_memfd
from lockstep.launcher.rank_process import report_to_launcher
from pytest_lockstep.rank_order import Result

__all__ = ["corrupt", "delay", "kill"]

# prefix of torch's operator, without leading underscores -> our name of the call
OPERATIONS = {
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "reduce_scatter": "reduce_scatter",
    "reduce": "reduce",
    "allgather": "all_gather",
    "all_gather": "all_gather",
    "gather": "gather",
    "broadcast": "broadcast",
    "scatter": "scatter",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "barrier": "barrier",
    "monitored_barrier": "barrier",
    "send": "send",
    "recv": "recv",
}
NAMES = tuple(dict.fromkeys([*OPERATIONS.values(), "reproducible_all_reduce"]))

Inject = Callable[[list[torch.Tensor]], None]


@contextlib.contextmanager
def kill(rank: int, *, call: int = 1, op: str | None = None) -> Iterator[None]:
    """Kill a rank (SIGKILL) when it makes a call; its death does not fail the test.

    The other ranks get an error in this call, or in the next one.

    Args:
        rank: The rank.
        call: The number of the rank's call in the `with` block, from 1.
        op: Count only calls of this operation, such as "all_reduce"; None counts all.
    """

    def inject(tensors: list[torch.Tensor]) -> None:
        value = write_memfd(pickle.dumps(Result("killed")))
        report_to_launcher({"kind": "value", "time": time.monotonic()}, [value])
        os.kill(os.getpid(), signal.SIGKILL)

    with _inject(rank, call, op, inject):
        yield


@contextlib.contextmanager
def delay(rank: int, *, seconds: float, call: int = 1, op: str | None = None) -> Iterator[None]:
    """Make a rank late for a call.

    Args:
        rank: The rank.
        seconds: The delay in seconds.
        call: The number of the rank's call in the `with` block, from 1.
        op: Count only calls of this operation, such as "all_reduce"; None counts all.
    """
    with _inject(rank, call, op, lambda tensors: time.sleep(seconds)):
        yield


@contextlib.contextmanager
def corrupt(
    rank: int, *, call: int = 1, op: str | None = None, bit: int | None = None
) -> Iterator[None]:
    """Flip a bit of the first element that a rank passes to a call.

    Args:
        rank: The rank.
        call: The number of the rank's call in the `with` block, from 1.
        op: Count only calls of this operation, such as "all_reduce"; None counts all.
        bit: The bit, 0 for the lowest; None for the highest mantissa bit of a floating-point
            number, and for the lowest bit of other dtypes.
    """

    def inject(tensors: list[torch.Tensor]) -> None:
        whole = next((tensor for tensor in tensors if tensor.numel()), None)
        if whole is None:
            raise AssertionError(f"call {call} on rank {rank} has no tensor to corrupt")
        element = whole.detach().as_strided((1,), (1,)).view(torch.uint8)
        flipped = _find_visible_bit(whole.dtype) if bit is None else bit
        if not 0 <= flipped < 8 * len(element):
            raise ValueError(f"bit={flipped}: an element of {whole.dtype} has {8 * len(element)}")
        element[flipped // 8] ^= 1 << flipped % 8

    with _inject(rank, call, op, inject):
        yield


def _find_visible_bit(dtype: torch.dtype) -> int:
    is_number = dtype.is_floating_point or dtype.is_complex
    return round(-math.log2(torch.finfo(dtype).eps)) - 1 if is_number else 0


@contextlib.contextmanager
def _inject(rank: int, call: int, op: str | None, inject: Inject) -> Iterator[None]:
    if op is not None and op not in NAMES:
        raise ValueError(f"op={op!r}: choose one of {', '.join(NAMES)}")
    if call < 1:
        raise ValueError(f"call={call}: calls count from 1")
    if not 0 <= rank < dist.get_world_size():
        raise ValueError(f"rank={rank}: the ranks are 0 to {dist.get_world_size() - 1}")
    if dist.get_rank() != rank:
        yield
        return
    counter = _Counter(call, op, inject)
    with _CountedCalls(counter), _counted_reproducible_calls(counter):
        yield
    if counter.calls < call:
        made = "1 call" if counter.calls == 1 else f"{counter.calls} calls"
        raise AssertionError(
            f"the fault was not injected: rank {rank} made {made} of {op or 'any operation'} in "
            f"the block, and it was to happen in call {call}"
        )


class _Counter:
    """Counts calls and injects a fault into one of them."""

    def __init__(self, call: int, op: str | None, inject: Inject) -> None:
        self.calls = 0
        self._call = call
        self._op = op
        self._inject = inject

    def count(self, name: str, values: object) -> None:
        if self._op in (None, name):
            self.calls += 1
            if self.calls == self._call:
                self._inject(list(_find_tensors(values)))


class _CountedCalls(TorchDispatchMode):
    """Counts every call of a collective in torch's dispatcher while it is active."""

    def __init__(self, counter: _Counter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counter = counter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            operator = func._schema.name.partition("::")[2].strip("_")
            for prefix, name in OPERATIONS.items():
                if operator.startswith(prefix):
                    self._counter.count(name, _inputs(operator, args))
                    break
        return func(*args, **(kwargs or {}))


def _inputs(operator: str, args: Any) -> Any:
    """Return the tensors that a call sends; some operators take their output tensors first."""
    fills_first = ("allgather", "reduce_scatter", "alltoall", "gather", "scatter")
    has_output = operator.startswith(fills_first) and len(args) > 1
    return args[1] if has_output and list(_find_tensors(args[1])) else args


@contextlib.contextmanager
def _counted_reproducible_calls(counter: _Counter) -> Iterator[None]:
    """Count the reproducible all-reduce, which Lockstep calls without torch's dispatcher."""
    if not backend.available():
        yield
        return
    kind = backend.load_native().LockstepBackend
    name = "reproducible_all_reduce"
    all_reduce = getattr(kind, name)
    pack = NativeAllReduce.pack

    def counted(self: Any, bucket: Any, packed: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        counter.count(name, packed)
        return all_reduce(self, bucket, packed, *args, **kwargs)

    def counted_pack(self: NativeAllReduce, held: Any) -> bytes:
        """Count the gradients of a small model, which are sent with the status of a rank."""
        message = bytearray(pack(self, held))
        counter.count(name, torch.frombuffer(message, dtype=torch.uint8)[:-DIGEST_BYTES])
        return bytes(message)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, name, counted)
        patch.setattr(NativeAllReduce, "pack", counted_pack)
        yield


def _find_tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _find_tensors(part)
