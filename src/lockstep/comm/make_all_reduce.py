"""The choice of the implementation of a reproducible all-reduce for a group."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from lockstep.comm.backend import host_group_of, of_group
from lockstep.comm.bucket import Bucket
from lockstep.comm.hosts.all_reduce import HostAllReduce
from lockstep.comm.ipc_all_reduce import IpcAllReduce
from lockstep.comm.native_all_reduce import NativeAllReduce, is_supported, native_backend
from lockstep.comm.pair_all_reduce import PairAllReduce
from lockstep.comm.piecewise_all_reduce import PIECE_BYTES, PiecewiseAllReduce
from lockstep.comm.portable_all_reduce import GroupTransport, PortableAllReduce
from lockstep.comm.reproducible_all_reduce import ReproducibleAllReduce
from lockstep.comm.slice_plan import SlicePlan

__all__ = ["adds_in_place", "make_all_reduce"]


def adds_in_place(
    device: torch.device, dtype: torch.dtype, group: dist.ProcessGroup | None
) -> bool:
    """Return whether such tensors are added where they were packed, in shared memory."""
    return is_supported(device, dtype) and (
        of_group(group) is not None or host_group_of(group) is not None
    )


def make_all_reduce(
    bucket: Bucket,
    nodes_by_rank: Sequence[Sequence[tuple[int, int]]],
    leaves: int,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    cuts: Sequence[int] = (),
    is_device_shared: bool = False,
) -> ReproducibleAllReduce:
    """Return the reproducible all-reduce of a bucket.

    Args:
        bucket: The planned bucket; its members refer to tensors by index.
        nodes_by_rank: The nodes that each rank of the group holds, ascending. Together they cover
            all leaves.
        leaves: The number of leaves of the tree.
        device: The device of the tensors.
        group: The process group; None is the default group.
        cuts: The bounds of the ranks' slices. If given, nothing is gathered, and a rank has only
            the sums of its own slice (backend "lockstep" only).
        is_device_shared: Whether the ranks share memory of one device (`shares_device`).
    """
    native = native_backend(device, bucket.dtype, group)
    if native is not None:
        made = NativeAllReduce(
            native,
            bucket,
            nodes_by_rank,
            leaves,
            rank=dist.get_rank(group),
            cuts=cuts or None,
            scatter=bool(cuts),
        )
        made.fits_messages = not cuts and made.fits(native.longest_message // 2)
        return made
    assert not cuts
    hosts = host_group_of(group) if is_supported(device, bucket.dtype) else None
    if hosts is not None:
        return HostAllReduce(hosts, bucket, nodes_by_rank, leaves)
    rank = dist.get_rank(group)
    if is_device_shared:
        return IpcAllReduce(SlicePlan(bucket, nodes_by_rank, leaves, rank), device, group)
    if is_supported(device, bucket.dtype) and [len(nodes) for nodes in nodes_by_rank] == [1, 1]:
        return PairAllReduce(bucket, device, group)
    if device.type == "cpu" and bucket.length * bucket.dtype.itemsize > PIECE_BYTES:
        return PiecewiseAllReduce(bucket, nodes_by_rank, leaves, device, group)
    plan = SlicePlan(bucket, nodes_by_rank, leaves, rank)
    return PortableAllReduce(plan, GroupTransport(group), device)
