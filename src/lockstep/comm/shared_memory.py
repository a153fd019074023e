"""Tensors in shared memory, and atomic access to their elements.

    empty_shared          one tensor per rank; other ranks read it directly   | rank 0 | rank 1 |
    create_group_tensor   one tensor for all ranks of a group on this host    | ranks 0 and 1   |

Atomic access is for decisions that must be consistent even if ranks die, such as whether a step is
committed:

    rank a   writes its part ... atomic_compare_exchange(tensor, 0, OPEN, COMMITTED)
    rank b   atomic_load(tensor, 0) == COMMITTED: everything that rank a wrote before is visible

Atomic access needs the native module.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from lockstep.comm.backend import available, host_group_of, load_native, of_group
from lockstep.kernel.errors import LayoutError, WorkError

__all__ = [
    "atomic_compare_exchange",
    "atomic_load",
    "atomic_store",
    "create_group_tensor",
    "empty_shared",
    "is_shared",
]


def empty_shared(*size: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return an uninitialized CPU tensor in shared memory, which collectives reduce in place.

    Other ranks on the host write to the tensor while a collective on the backend "lockstep"
    runs. A process forked from this one shares the tensor too. Without the native backend the
    result is an ordinary tensor.

    Args:
        size: The shape, as integers or as one sequence, as for `torch.empty`.
        dtype: The element type, as for `torch.empty`; None selects torch's default dtype.

    Raises:
        TypeError: `torch.empty` does not accept this `size` or `dtype`.
        RuntimeError: A dimension is negative, or there is not enough memory.
    """
    try:
        # A meta tensor without memory: lets torch parse the arguments, exactly as in torch.empty.
        like = torch.empty(*size, dtype=dtype, device="meta")
    except (TypeError, RuntimeError) as error:
        message, _, _ = str(error).partition("\n")  # a C++ backtrace may follow
        raise type(error)(message) from None
    if not available():
        return torch.empty(like.shape, dtype=like.dtype)
    tensor: torch.Tensor = load_native().empty(like.shape, like.dtype)
    return tensor


def is_shared(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is in shared memory, from `empty_shared` or from DDP or FSDP2."""
    return available() and bool(load_native().is_shared(tensor))


def create_group_tensor(
    shape: int | Sequence[int], dtype: torch.dtype, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Return a CPU tensor of zeros whose memory is common to all ranks of a group.

    Every rank of the group must make this call, with the same arguments. Order accesses by a
    barrier or by atomic operations. The memory is aligned to a page and is released when no rank
    has a view of it, even if ranks were killed. A group of one rank gets ordinary memory.

    Args:
        shape: The shape.
        dtype: The element type.
        group: The process group; None is the default group.

    Raises:
        WorkError: There is not enough memory; raised on every rank.
        LayoutError: The backend of the group is not "lockstep", the only one whose ranks are
            known to be on one host.
    """
    sizes = [shape] if isinstance(shape, int) else list(shape)
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return torch.zeros(sizes, dtype=dtype)
    native = of_group(group)
    if native is None:
        across = host_group_of(group) is not None
        raise LayoutError(
            "only ranks on one host, in a group with the backend 'lockstep', can share a tensor; "
            + (
                "the ranks of this group are on several hosts"
                if across
                else f"this group has the backend '{dist.get_backend(group)}'"
            )
        )
    try:
        # Limit the size: every rank must make the call, even if the backend's integers are too
        # small for the size.
        flat: torch.Tensor = native.share(min(math.prod(sizes) * dtype.itemsize, 1 << 62))
    except RuntimeError as error:
        raise WorkError(str(error)) from None
    return flat.view(dtype).view(sizes)


def atomic_load(tensor: torch.Tensor, index: int) -> int:
    """Return the element at `index` of an int64 tensor, with acquire semantics.

    Everything that another rank wrote before it stored this value is then visible.

    Raises:
        ValueError: The tensor is not int64, not contiguous or not on the CPU.
        IndexError: There is no such element.
    """
    return int(load_native().load(tensor, index))


def atomic_store(tensor: torch.Tensor, index: int, value: int) -> None:
    """Set the element at `index` of an int64 tensor, with release semantics.

    Raises:
        ValueError, IndexError: As `atomic_load`.
    """
    load_native().store(tensor, index, value)


def atomic_compare_exchange(tensor: torch.Tensor, index: int, expected: int, desired: int) -> int:
    """Set the element at `index` to `desired` if it is `expected`, in one atomic operation.

    Returns:
        The previous value.

    Raises:
        ValueError, IndexError: As `atomic_load`.
    """
    return int(load_native().compare_exchange(tensor, index, expected, desired))
